"""A real server on a real socket, in a thread: the engine is the real one, its model is made of memory.

`fake_model` builds a served model without torch or weights; `LiveServer` serves any served model.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from localllm.config.settings import EngineConfig, ServerConfig, Settings
from localllm.engine.admission import Admission, ModelLimits
from localllm.engine.client import EngineClient
from localllm.engine.loop import EngineLoop
from localllm.engine.memory.block_names import BlockHasher
from localllm.engine.memory.cache_manager import CacheManager
from localllm.engine.memory.ledger import Ledger
from localllm.engine.scheduler import Scheduler
from localllm.engine.scheduler_config import SchedulerConfig
from localllm.engine.stats import EngineStats
from localllm.engine.step import StepPlan
from localllm.models.fit import MemoryPlan
from localllm.models.spec.model_spec import ModelSpec
from localllm.models.spec.rope import RopeSpec
from localllm.serving.manager import ModelManager
from localllm.serving.served import ServedModel
from localllm.text.answers.detect import answer_format
from localllm.text.chat_template import ChatTemplate
from localllm.text.grammar import Grammars
from localllm.text.reasoning_budget import ReasoningBudgets
from localllm.text.tokenizer import load_tokenizer
from localllm.web.access.keys import one_time_link
from localllm.web.app import Server, bind, create_app
from tests.fake_runner import FakeRunner
from tests.tiny import VOCAB_SIZE, save_tiny_tokenizer

MAX_MODEL_LEN = 512
NUM_BLOCKS = 257
BLOCK_SIZE = 8


class PacedRunner(FakeRunner):
    """The model made of memory, which takes `step_s` for a step and can be held back or made to fail."""

    def __init__(self) -> None:
        super().__init__(NUM_BLOCKS, BLOCK_SIZE, vocab_size=VOCAB_SIZE, fail_when=lambda plan: self.failing)
        self.step_s = 0.0
        self.failing = False
        self.gate = threading.Event()
        self.gate.set()

    def forward(self, plan: StepPlan) -> None:
        self.gate.wait(10)
        time.sleep(self.step_s)
        super().forward(plan)


def fake_model(
    folder: Path, runner: FakeRunner, *, max_num_seqs: int = 8, max_num_queued_reqs: int = 64,
    chat_template: str | None = None, max_num_batched_tokens: int = 64, picture_rows: int = 0,
) -> ServedModel:  # fmt: skip
    """A served model with the tests' tokenizer; nothing ends it but the length, since it has no eos."""
    save_tiny_tokenizer(folder)
    tokenizer = load_tokenizer(folder)
    template = ChatTemplate(chat_template or tokenizer.chat_templates, tokenizer.special_tokens)
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        max_num_queued_reqs=max_num_queued_reqs,
        encoder_rows=2 * picture_rows,
        encoder_budget=picture_rows,
    )
    cache = CacheManager(config, Ledger(runner.num_blocks, BLOCK_SIZE), BlockHasher(b"test", BLOCK_SIZE))
    loop = EngineLoop(Scheduler(config, cache), runner)
    limits = ModelLimits(MAX_MODEL_LEN, VOCAB_SIZE, most_media_rows=picture_rows)
    answers = answer_format(template)
    admission = Admission(
        limits,
        tokenizer,
        grammars=Grammars(tokenizer, VOCAB_SIZE, limits.eos_token_ids),
        budgets=ReasoningBudgets(tokenizer, answers),
    )
    return ServedModel(
        name="tiny",
        path=folder,
        spec=_spec(),
        plan=_plan(),
        tokenizer=tokenizer,
        chat_template=template,
        client=EngineClient(loop, admission, tokenizer),
        created_s=1_700_000_000.0,
        loop=loop,
        admission=admission,
        sampling_defaults={"temperature": 0.6},
        max_num_queued_reqs=max_num_queued_reqs,
        aliases=frozenset({"org/tiny"}),
        answers=answers,
    )


def _spec() -> ModelSpec:
    return ModelSpec(
        architecture="LlamaForCausalLM", num_layers=2, hidden_size=64, intermediate_size=96, num_heads=4,
        num_kv_heads=2, head_dim=16, vocab_size=VOCAB_SIZE, max_position=2048, hidden_act="silu",
        tie_word_embeddings=True, dtype="float32", rope=RopeSpec(),
    )  # fmt: skip


def _plan() -> MemoryPlan:
    return MemoryPlan(
        device="cpu", dtype="float32", kv_dtype="float32", max_model_len=MAX_MODEL_LEN, max_num_seqs=8,
        max_num_batched_tokens=64, long_prefill_token_threshold=0, num_blocks=(NUM_BLOCKS,), block_size=BLOCK_SIZE,
        weights_bytes=1000, kv_bytes=1000, activation_bytes=0, reserve_bytes=0, free_bytes=10**9, async_depth=1,
    )  # fmt: skip


def settings(**server: Any) -> Settings:
    return Settings(EngineConfig(), ServerConfig(**{"port": 0, "ui": False, **server}))


class LiveServer:
    """Serves `model` (None: still loading) until the `with` block ends."""

    def __init__(
        self, model: ServedModel | None, server_settings: Settings | None = None, drain_s: float = 2.0
    ) -> None:
        self.model, self.settings = model, server_settings or settings()
        self.manager = ModelManager()
        if model is None:
            self.manager.expect("tiny")
        self._socket = bind(self.settings.server)
        self.url = f"{self.settings.server.scheme}://127.0.0.1:{self._socket.getsockname()[1]}"
        self.server = Server(create_app(self.manager, self.settings), drain_s=drain_s)
        self.http = httpx.Client(base_url=self.url, timeout=20, verify=False)  # spares the list of authorities
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="server")

    def __enter__(self) -> Self:
        self._thread.start()
        wait_until(lambda: self.server.started)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.http.close()
        self.server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive(), "the server did not stop"

    async def _serve(self) -> None:
        if self.model is not None:
            await self.model.client.start()
            self.manager.adopt(self.model)
        if (speech := self.settings.server.speech_model) not in (None, "none"):
            self.manager.register.settings = self.settings
            await self.manager.register.add_speech_model(speech)
        await self.server.serve([self._socket])
        await self.manager.close()

    def link(self) -> str:
        """A one-time link for the owner's browser."""
        return one_time_link(self.url, self.server.app.state.key_ring.owner_secret)

    def stats(self) -> EngineStats:
        assert self.model is not None
        return self.model.client.stats()

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.http.get(path, **options)

    def is_decoding(self) -> bool:
        """A request holds blocks, and the newest settled step decoded."""
        stats = self.stats()
        return stats.used_blocks > 0 and any(step.decode_tokens for step in stats.steps[-1:])

    def wait_idle(self) -> EngineStats:
        """The stats once nothing runs or waits and every block is back."""
        wait_until(lambda: (s := self.stats()).num_running + s.num_waiting + s.used_blocks == 0)
        return self.stats()


class ManagedServer(LiveServer):
    """Its manager loads the model that the settings name."""

    def __init__(self, server_settings: Settings) -> None:
        super().__init__(None, server_settings)
        self.manager.entries.clear()

    async def _serve(self) -> None:
        await self.manager.start(self.settings)
        await super()._serve()


def wait_until(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)
