"""The real scheduler over the real runner: whatever the schedule, each request gets what it gets alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from localllm.engine.block_hash import BlockHasher
from localllm.engine.ledger import Ledger
from localllm.engine.loop import EngineLoop
from localllm.engine.outputs import EngineOutput
from localllm.engine.params import SamplingParams
from localllm.engine.request import Request
from localllm.engine.scheduler import Scheduler
from localllm.engine.scheduler_config import SchedulerConfig
from localllm.engine.speculation import Speculation
from localllm.engine.state_pool import StatePool
from localllm.engine.step import Runner
from localllm.kernels.launch import LaunchOptions
from localllm.models.spec.model_spec import ModelSpec
from localllm.runner.drafter_steps import OpenDrafter
from localllm.runner.kv_cache import KVCache
from localllm.runner.runner import TorchRunner
from localllm.runner.state_cache import StateCache
from tests.kv import ledger_of, of_each
from tests.runner.desk import WAYS

BLOCK, MAX_LEN, CPU = 8, 160, torch.device("cpu")
ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 0.9, "seed": 3, "top_p": 0.9, "frequency_penalty": 0.5},
    {"temperature": 1.5, "seed": 4, "top_k": 20, "repetition_penalty": 1.3, "repeat_last_n": 9},
    {"temperature": 1.0, "seed": 5, "min_p": 0.02, "min_tokens": 10, "stop_token_ids": [7, 9]},
]


class Widest(Speculation):
    """Verifies as many drafts as fit into a step."""

    def width(self, decoding: Sequence[Request], ready: Sequence[int], limit: int) -> int:
        widths = range(self.most, 0, -1)
        return next((w for w in widths if len(ready) + sum(min(w, count) for count in ready) <= limit), 0)


def serve(
    model: Any,
    spec: ModelSpec,
    requests: list[Request],
    *,
    num_blocks: int = 200,
    depth: int = 1,
    step: int = 64,
    way: str = "host",
    make_runner: Callable[..., Runner] | None = None,
    num_places: int = 0,
    deterministic: bool = False,
    ledger: Ledger | None = None,
    kv_dtype: torch.dtype = torch.float32,
    speculates: bool = False,
    drafter: Callable[[int], OpenDrafter] | None = None,
) -> tuple[dict[str, list[EngineOutput]], Scheduler]:
    """Every request's outputs, and the scheduler after all is done. make_runner: in place of the model's own.
    ledger: in place of one of `num_blocks` blocks for each group. num_places: of
    recurrent states, which are NaN at the start, as K and V then are; 0: the model has none.
    speculates: with the runner's drafts, as many of them as fit into a step. drafter: made for a number of blocks."""
    config = SchedulerConfig(
        max_num_seqs=4, max_num_batched_tokens=step, max_model_len=MAX_LEN, block_size=BLOCK,
        long_prefill_token_threshold=16, output_reserve=0.0, state_interval=BLOCK,
        fixed_chunk=2 * BLOCK if deterministic else 0,
    )  # fmt: skip
    sizes: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": step, "max_model_len": MAX_LEN, **WAYS[way]}
    if make_runner is None:
        sizes_of_groups = of_each(spec, num_blocks) if ledger is None else ledger.num_blocks
        cache = KVCache(spec, sizes_of_groups, BLOCK, CPU, kv_dtype)
        states = StateCache(spec, num_places, CPU, torch.float32)
        if num_places:
            poison(cache, states)
        runner: Runner = TorchRunner(
            model, spec, cache, block_size=BLOCK, device=CPU, states=states, has_drafts=speculates,
            drafter=drafter and drafter(sizes_of_groups[0]),
            launch_options=LaunchOptions(deterministic=deterministic), **sizes,
        )  # fmt: skip
    else:
        runner = make_runner(num_blocks=num_blocks, block_size=BLOCK, **sizes)
    while runner.use_idle_time():
        pass
    places = StatePool(num_places) if num_places else None
    ledger = ledger or ledger_of(spec, num_blocks, BLOCK)
    speculation = Widest(runner.drafts) if speculates else None
    scheduler = Scheduler(config, ledger, BlockHasher(b"tiny", BLOCK), state_pool=places, speculation=speculation)
    loop = EngineLoop(scheduler, runner, depth=depth)
    told: dict[str, list[EngineOutput]] = {request.request_id: [] for request in requests}

    def receive(outputs: list[EngineOutput]) -> None:
        for output in outputs:
            told[output.request_id].append(output)

    loop.deliver = receive
    loop.submit(*requests)
    for _ in range(3000):
        loop.step()
        if not scheduler.has_work:
            return told, scheduler
    raise AssertionError("still at work")


def poison(cache: KVCache, states: StateCache) -> None:
    """Fill the memory with NaN, except what padding is written to."""
    for layer in (*[kv for kv in cache.layers if kv is not None], *states.layers.values()):
        for tensor in layer.tensors():
            tensor[1:] = torch.nan


def make_requests() -> list[Request]:
    dice = random.Random(8)
    shared = [dice.randrange(500) for _ in range(40)]  # a prefix that some have in common
    requests = []
    for i in range(10):
        prompt = shared[: dice.choice([0, 17, 40])] + [dice.randrange(500) for _ in range(dice.randint(1, 30))]
        params = SamplingParams(max_tokens=dice.randint(8, 30), **ASKED[i % len(ASKED)])
        assert params.max_tokens is not None
        requests.append(Request(f"r{i}", prompt, params, max_output_tokens=params.max_tokens, eos_token_ids=(2,)))
    return requests


@pytest.mark.parametrize(
    ("depth", "num_blocks", "step", "way"),
    [
        (1, 200, 64, "host"), (2, 200, 64, "staged"), (1, 18, 20, "host"), (2, 18, 20, "host"), (2, 18, 20, "staged"),
        (2, 200, 64, "replayed"), (2, 18, 20, "replayed"), (2, 18, 80, "replayed"),
    ],
)  # fmt: skip
def test_output_depends_on_the_request_alone(
    model: Any, spec: ModelSpec, depth: int, num_blocks: int, step: int, way: str
) -> None:
    """I21 and I24 with real tensors: 17 usable blocks force preemptions, steps of 20 tokens force chunks."""
    together, scheduler = serve(model, spec, make_requests(), num_blocks=num_blocks, depth=depth, step=step, way=way)
    assert scheduler.recorder.num_failed_steps == 0
    assert (scheduler.recorder.num_preemptions > 0) == (num_blocks == 18)
    for request in make_requests():
        alone, _ = serve(model, spec, [request])
        got, wanted = together[request.request_id], alone[request.request_id]
        assert [t for o in got for t in o.token_ids] == [t for o in wanted for t in o.token_ids], request.request_id
        assert got[-1].finish_reason == wanted[-1].finish_reason
        assert _ids(got) == _ids(wanted)


def _ids(outputs: list[EngineOutput]) -> list[tuple[int, ...]]:
    """Which tokens the log-probabilities speak of; prompt ones first."""
    prompt = [entry.token_ids for output in outputs for entry in output.prompt_logprobs or ()]
    return prompt + [entry.token_ids for output in outputs for entry in output.logprobs]


class Follows:
    """A grammar that begins with each token below 150, behind which two tokens below 40 must come."""

    def __init__(self) -> None:
        self.left, self.num_refused = 0, [0]

    def may_forbid(self, num_unseen: int) -> bool:
        return self.left > 0

    def refuses(self, token_id: int) -> bool:
        refused = self.left > 0 and token_id >= 40
        self.num_refused[0] += refused
        return refused

    def fill(self, bits: Any) -> None:
        bits[:] = -1
        if self.left:
            bits[:] = 0
            bits[0] = -1
            bits[1] = 255

    def accept(self, token_id: int) -> None:
        assert not self.left or token_id < 40
        self.left = self.left - 1 if self.left else 2 * (token_id < 150)

    def fork(self) -> Follows:
        other = Follows()
        other.left, other.num_refused = self.left, self.num_refused
        return other

    @property
    def is_over(self) -> bool:
        return False


@pytest.mark.parametrize(("way", "depth"), [("host", 2), ("staged", 2), ("replayed", 3)])
@pytest.mark.parametrize("speculates", [False, True])
def test_refused_tokens_are_drawn_again(model: Any, spec: ModelSpec, way: str, depth: int, speculates: bool) -> None:
    """A grammar that begins while a token is in flight gives what it gives if the host sees each token first."""

    def requests() -> list[Request]:
        asked = make_requests()
        for request in asked[::2]:
            request.grammar = Follows()
        return asked

    expected, _ = serve(model, spec, requests())
    given = requests()
    told, scheduler = serve(model, spec, given, way=way, depth=depth, speculates=speculates)
    assert {name: tokens(outputs) for name, outputs in told.items()} == {
        name: tokens(outputs) for name, outputs in expected.items()
    }
    refused = sum(request.grammar.num_refused[0] for request in given if isinstance(request.grammar, Follows))
    assert refused
    assert scheduler.recorder.num_preemptions == refused


def tokens(outputs: Sequence[EngineOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]
