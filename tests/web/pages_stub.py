"""A served model that needs no engine: canned Markdown, token by token, and stats that move while it writes.

For the pages' tests, and for looking at the pages: `python -m tests.web.pages_stub 8011` serves them until Ctrl-C, and
`python -m tests.web.pages_stub 8011 ranks` with four ranks on the dashboard.
"""

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from localllm.config.settings import EngineConfig, ServerConfig, Settings
from localllm.engine.admission import GenerationRequest
from localllm.engine.outputs import GenerationEvent, Timings, Usage
from localllm.engine.params import SamplingParams
from localllm.engine.pulse import Pulse
from localllm.engine.stats import EngineStats, Histogram, RequestTimeline, StepComposition
from localllm.engine.step import RankMemory, RankStats, RunnerStats
from localllm.errors import ContextTooLong, LocalLLMError, StepFailed
from localllm.media.sound import SoundLimits
from localllm.media.source import Fetcher
from localllm.models.fit import MemoryPlan
from localllm.models.spec.model_spec import ModelSpec
from localllm.models.spec.rope import RopeSpec
from localllm.models.spec.vision import HearingSpec
from localllm.models.vision.sound import SoundProcessor
from localllm.serving.answers.pictures import Sight
from localllm.serving.answers.sounds import Hearing, Senses
from localllm.serving.manager import ModelManager
from localllm.serving.served import ModelCard
from localllm.text.answers.reader import AnswerFormat
from localllm.text.messages import images_of

CONTEXT = 2048
BLOCKS, BLOCK_SIZE = 256, 16
BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)

REPLY = """**Paged attention** keeps the keys and values of a request in *blocks* of 16 tokens, so memory is given \
out as it is needed instead of being reserved for the longest reply.

### How a position is found

1. The position is divided by the block size.
2. The block table says which block that is.
3. The remainder is the place inside it.

```python
def slot(block_table: list[int], position: int, block_size: int = 16) -> int:
    # where K and V of this position live
    block_id = block_table[position // block_size]
    return block_id * block_size + position % block_size
```

| word | meaning | tokens |
|:-----|:--------|-------:|
| block | what the pool hands out | 16 |
| slot | one place in a block | 1 |

Start the server with `localllm up` and watch the blocks on the dashboard.
"""

HOSTILE = """<script>window.hacked = 1</script> <img src=x onerror="window.hacked = 2">

[click](javascript:window.hacked=3) [data](data:text/html,<script>1</script>) ![pixel](https://evil.example/p.png)

```html"><script>window.hacked = 4</script>
<img src=x onerror="window.hacked = 5">
```

<hx-partial hx-target="body">gone</hx-partial> <div hx-get="/dashboard" hx-trigger="load">x</div>
"""


PICTURE = "\N{OBJECT REPLACEMENT CHARACTER}"
SOUND = "\N{SPEAKER WITH THREE SOUND WAVES}"


class StubTemplate:
    """Joins messages; a marker in the last one chooses what the stub does."""

    def __bool__(self) -> bool:
        return True

    def reads(self, variable: str) -> bool:
        return False

    def render(self, messages: Sequence[dict[str, Any]], **switches: Any) -> str:
        return "\n".join(f"{message['role']}: {_shown(message['content'])}" for message in messages)

    def pictures(self, messages: Sequence[dict[str, Any]], *, with_tools: bool = False) -> list[Any]:
        return [part["media"] for message in messages for part in images_of(message)]


def _shown(content: Any) -> str:
    if not isinstance(content, list):
        return str(content)
    return "".join({"image": PICTURE, "audio": SOUND}.get(part["type"]) or part["text"] for part in content)


def stub_hearing() -> Hearing:
    """What reads sound as Granite Speech does, in rows of `SOUND`."""
    spec = HearingSpec("granite_speech", ord(SOUND), 16, 8, 8, 1, 1, chunk=30, piece=0, chunk_rows=3)
    processor = SoundProcessor(spec, 900)
    processor.family = replace(processor.family, mark=SOUND, marks=(SOUND,))
    return Hearing(processor, Fetcher(kind="audio"), SoundLimits(most_s=60), 32)


class StubTokenizer:
    """A token is a character."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, token_ids))

    def token_id(self, token: str) -> int | None:
        return None

    special_ids = frozenset[int]()


@dataclass
class StubClient:
    """Writes `reply`, `chars` characters every `every_s`; remembers what it was asked."""

    reply: str = REPLY
    every_s: float = 0.004
    chars: int = 3
    asked: list[GenerationRequest] = field(default_factory=list)
    running: dict[str, RequestTimeline] = field(default_factory=dict)
    finished: list[RequestTimeline] = field(default_factory=list)
    cancelled: set[str] = field(default_factory=set)
    steps: int = 0
    generated: int = 0
    compilers: tuple[()] = ()
    gate: asyncio.Event | None = None  # when set, generation waits for it before its first token
    latencies: list[float] = field(default_factory=list)
    started_s: float = field(default_factory=time.time)
    failure: LocalLLMError | None = None
    ranks: tuple[RankStats, ...] = ()

    async def prepare(self, params: SamplingParams) -> None:
        """It has no grammars to compile."""

    async def generate_batches(self, request: GenerationRequest) -> AsyncGenerator[list[GenerationEvent], None]:
        async with aclosing(self.generate(request)) as events:
            async for event in events:
                yield [event]

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        if self.failure is not None:
            raise self.failure
        prompt = len(request.prompt_token_ids)
        if prompt >= CONTEXT * 100:
            raise ContextTooLong(
                "This conversation is too long.", f"{prompt} tokens; {CONTEXT} fit.", "Start a new chat."
            )
        self.asked.append(request)
        arrived_s = time.time()
        said = "".join(map(chr, request.prompt_token_ids))
        text = HOSTILE if "hostile" in said else self.reply
        limit = request.params.max_tokens or 10**6
        line = RequestTimeline(
            request.request_id, "running", prompt, min(prompt // 2, 64), 0, 1, 0, arrived_s, arrived_s,
            source=request.options.source,
        )  # fmt: skip
        self.running[request.request_id] = line
        first_s = 0.0
        tokens, reason, error = 0, "stop", None
        try:
            if self.gate is not None:
                await self.gate.wait()
            await asyncio.sleep(0.05)
            for start in range(0, len(text), self.chars):
                if request.request_id in self.cancelled or tokens >= limit:
                    reason = "length" if tokens >= limit else "abort"
                    break
                if "fail now" in said and tokens == 5:
                    reason, error = "error", StepFailed("The step failed.", "The runner raised.", "Send it again.")
                    break
                tokens, self.steps, self.generated = tokens + 1, self.steps + 1, self.generated + 1
                first_s = first_s or time.time()
                self.latencies.append(self.every_s)
                blocks = (prompt + tokens) // BLOCK_SIZE + 1
                self.running[request.request_id] = _grown(line, tokens, blocks, first_s)
                yield GenerationEvent(0, text[start : start + self.chars], (tokens,))
                await asyncio.sleep(self.every_s)
            now = time.time()
            first_s = first_s or now
            usage = Usage(prompt, tokens, line.num_cached_tokens)
            timings = Timings(0.002, first_s - arrived_s, now - first_s, first_s - arrived_s)
            yield GenerationEvent(0, finish_reason=reason, usage=usage, timings=timings, error=error)
        finally:
            last = self.running.pop(request.request_id)
            ended = _grown(last, tokens, 0, first_s or None)
            self.finished.insert(0, _finished(ended, reason, arrived_s + 0.01))

    def cancel(self, request_id: str, n: int = 1) -> None:
        self.cancelled.add(request_id)

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def _steps(self, running: int) -> tuple[StepComposition, ...]:
        """As if a prompt came every seventh step."""
        ids = range(max(0, self.steps - 60), self.steps)
        held = ((n, 96 * (n % 7 == 0), max(running, 1)) for n in ids)
        return tuple(StepComposition(n, p, d, int(p > 0), d, 512, 2e-4, 8e-3, 6e-4, 3e-4) for n, p, d in held)

    def stats(self) -> EngineStats:
        now = time.time()
        lines = tuple(self.running.values())
        used = sum(line.num_blocks for line in lines)
        cached = min(BLOCKS - used, 5 * len(self.finished))
        rate = len(lines) / max(self.every_s, 1e-3)
        latency = _histogram(self.latencies[-400:])
        ttft = _histogram([line.ttft_s or 0.0 for line in self.finished])
        empty = _histogram([])
        return EngineStats(
            taken_s=now, uptime_s=now - self.started_s, num_running=len(lines), num_waiting=0, block_size=BLOCK_SIZE,
            total_blocks=BLOCKS, used_blocks=used, cached_blocks=cached, free_blocks=BLOCKS - used - cached,
            wasted_token_slots=7 * len(lines), max_num_seqs=8, max_model_len=CONTEXT, steps=self._steps(len(lines)),
            num_steps=self.steps, scheduled_requests=self.steps,
            prompt_tokens=40 * len(self.finished), prompt_tokens_cached=16 * len(self.finished),
            generation_tokens=self.generated, prefill_tokens_per_s=rate / 4, decode_tokens_per_s=rate,
            prefix_cache_queries=64 * len(self.finished), prefix_cache_hits=40 * len(self.finished), num_preemptions=0,
            prefix_cache_lacks_state=0, total_places=0, used_places=0, checkpoint_places=0,
            recomputed_tokens=0, num_failed_steps=0, degraded_steps=0, async_depth=1,
            corrupted_requests=0, runner=RunnerStats(ranks=self.ranks), finished={"stop": len(self.finished)},
            ttft=ttft, tpot=latency, inter_token=latency, e2e=ttft, queue=empty, prefill=ttft, decode=empty,
            inference=ttft, prompt_len=empty, generation_len=empty, iteration_tokens=empty, requests=lines,
            recent=tuple(self.finished[:10]),
        )  # fmt: skip


def _grown(line: RequestTimeline, tokens: int, blocks: int, first_s: float | None) -> RequestTimeline:
    return replace(line, num_output_tokens=tokens, num_blocks=blocks, first_token_s=first_s)


def _finished(line: RequestTimeline, reason: str, scheduled_s: float) -> RequestTimeline:
    return replace(
        line, state="finished", num_blocks=0, scheduled_s=scheduled_s, finished_s=time.time(), finish_reason=reason
    )


def _histogram(values: Sequence[float]) -> Histogram:
    counts = [0] * (len(BOUNDS) + 1)
    for value in values:
        counts[sum(value > bound for bound in BOUNDS)] += 1
    return Histogram(BOUNDS, tuple(counts), sum(values))


def stub_ranks() -> tuple[RankStats, ...]:
    """Four ranks, two stages of two shards: rank 1 was restarted, rank 3 is lost."""
    memory = RankMemory(12 * 2**30, 7 * 2**30, 2**29, 2**28)
    first = RankStats(
        0, 0, 0, "cuda:0", "NVIDIA RTX 4090", memory=memory, device_bytes=24 * 2**30, step_s=0.0121, busy_ratio=0.75,
    )  # fmt: skip
    small = replace(
        first, device_name="NVIDIA RTX 3060", memory=RankMemory(6 * 2**30, 3 * 2**30, 2**29), device_bytes=12 * 2**30
    )
    killed = "The process was killed by signal 9 <b>(SIGKILL)</b>."
    return (
        first,
        replace(first, rank=1, shard=1, device="cuda:1", busy_ratio=0.5, lag_steps=1, restarts=1, last_words=killed),
        replace(small, rank=2, stage=1, device="cuda:2", step_s=0.009, busy_ratio=None),
        replace(
            small, rank=3, stage=1, shard=1, device="cuda:3", busy_ratio=0.25, lag_steps=9, is_up=False,
            last_words=killed,
        ),
    )  # fmt: skip


def stub_spec() -> ModelSpec:
    return ModelSpec(
        architecture="LlamaForCausalLM", num_layers=6, hidden_size=256, intermediate_size=704, num_heads=8,
        num_kv_heads=4, head_dim=32, vocab_size=4096, max_position=CONTEXT, hidden_act="silu",
        tie_word_embeddings=True, dtype="float32", rope=RopeSpec(),
    )  # fmt: skip


def stub_plan() -> MemoryPlan:
    return MemoryPlan(
        device="cpu", dtype="float32", kv_dtype="float32", max_model_len=CONTEXT, max_num_seqs=8,
        max_num_batched_tokens=512, long_prefill_token_threshold=128, num_blocks=(BLOCKS + 1,), block_size=BLOCK_SIZE,
        weights_bytes=19_300_000, kv_bytes=50_500_000, activation_bytes=12_000_000, reserve_bytes=2**30,
        free_bytes=8 * 2**30, async_depth=1, notes=("On a CPU the KV cache is bounded to 16 contexts.",),
    )  # fmt: skip


@dataclass
class StubModel:
    """What the pages use of a `ServedModel`."""

    client: StubClient = field(default_factory=StubClient)
    name: str = "demo"
    path: Path = Path("demo")
    spec: ModelSpec = field(default_factory=stub_spec)
    plan: MemoryPlan = field(default_factory=stub_plan)
    tokenizer: StubTokenizer = field(default_factory=StubTokenizer)
    chat_template: StubTemplate = field(default_factory=StubTemplate)
    sampling_defaults: dict[str, Any] = field(default_factory=lambda: {"temperature": 0.7})
    created_s: float = 0.0
    aliases: frozenset[str] = frozenset()
    adapters: None = None
    answers: AnswerFormat | None = None
    sight: Sight | None = None
    hearing: Hearing | None = None
    speed: None = None

    @property
    def senses(self) -> Senses:
        return Senses(self.sight, self.hearing)

    @property
    def shown_name(self) -> str:
        return self.name

    @property
    def generator(self) -> StubClient:
        return self.client

    @property
    def loop(self) -> SimpleNamespace:
        """An engine that rests, for the watchdog."""
        return SimpleNamespace(is_running=True, pulse=lambda: Pulse(True, False, 0, None))

    def require(self, *tasks: str) -> None:
        """It generates."""

    @property
    def default_params(self) -> SamplingParams:
        return SamplingParams(**self.sampling_defaults)

    @property
    def card(self) -> ModelCard:
        return ModelCard(self.name, self.path, self.spec, self.plan, self.sampling_defaults, self.created_s)

    def close(self) -> None: ...


class StubManager(ModelManager):
    """Serves the stub model, or with `model=None` loads for ever."""

    def __init__(self, model: StubModel | None) -> None:
        super().__init__()
        if model is None:
            self.expect("demo")
        else:
            self.adopt(model)  # type: ignore[arg-type]


def stub_settings(port: int = 0, **server: Any) -> Settings:
    return Settings(EngineConfig(), ServerConfig(port=port, **server))


async def _main(port: int, ranks: tuple[RankStats, ...]) -> None:
    from localllm.web.app import Server, bind, create_app

    settings = stub_settings(port)
    model = StubModel(StubClient(every_s=0.02, ranks=ranks))
    await Server(create_app(StubManager(model), settings), drain_s=1.0).serve([bind(settings.server)])


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1]) if len(sys.argv) > 1 else 8011, stub_ranks() if "ranks" in sys.argv else ()))
