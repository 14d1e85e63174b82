"""Models with windowed layers over the real scheduler and runner, far past their windows.

Blocks before a window are given back and written by other requests. Whatever the schedule, a request gets what it gets
alone with every token kept, and in the same steps even the same bits.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from localllm.engine.memory.cache_manager import CacheManager
from localllm.engine.memory.ledger import Ledger
from localllm.engine.outputs import EngineOutput
from localllm.engine.params import SamplingParams
from localllm.engine.request import Request
from localllm.models.loader import load_model
from localllm.models.read_spec import read_spec
from localllm.models.spec.model_spec import ModelSpec, kv_groups
from localllm.runner.runner import TorchRunner
from tests.kv import ledger_of, windowed_ledger
from tests.runner.harness import BLOCK, MAX_LEN, serve

CPU = torch.device("cpu")
WINDOWED = 40  # blocks: the windows of four requests and the tokens of a step


@pytest.fixture(scope="module", params=["gemma3", "gpt_oss", "llama4"])
def served(request: pytest.FixtureRequest, tiny_model_path: Callable[[str], Path]) -> tuple[Any, ModelSpec]:
    """A model whose layers see 20 tokens or chunks of 40, except for some that see all."""
    path = tiny_model_path(request.param)
    spec = read_spec(path)
    assert sorted(group.window or 0 for group in kv_groups(spec)) in ([0, 20], [-40, 0])
    return load_model(path, spec, CPU, torch.float32, max_model_len=MAX_LEN), spec


def ledger(spec: ModelSpec, num_blocks: int, step: int) -> Ledger:
    sizes = tuple(num_blocks if group.window is None else min(WINDOWED, num_blocks) for group in kv_groups(spec))
    return windowed_ledger(spec, sizes, BLOCK, step)


def make_requests() -> list[Request]:
    dice, requests = random.Random(5), []
    shared = [dice.randrange(250) for _ in range(70)]
    for i in range(8):
        prompt = shared[: dice.choice([0, 33, 70])] + [dice.randrange(250) for _ in range(dice.randint(1, 40))]
        params = SamplingParams(temperature=0.0, logprobs=2, max_tokens=dice.randint(20, 45))
        assert params.max_tokens is not None
        requests.append(Request(f"r{i}", prompt, params, max_output_tokens=params.max_tokens))
    return requests


def tokens_of(outputs: list[EngineOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def bits_of(outputs: list[EngineOutput]) -> list[tuple[float, ...]]:
    return [tuple(entry.logprobs) for output in outputs for entry in output.logprobs]


@pytest.mark.parametrize(
    ("depth", "num_blocks", "step", "way"),
    [
        (1, 200, 64, "host"), (2, 200, 64, "staged"), (2, 22, 20, "host"), (2, 22, 20, "staged"),
        (2, 22, 80, "replayed"),
    ],
)  # fmt: skip
def test_output_is_that_of_a_cache_that_keeps_every_token(
    served: tuple[Any, ModelSpec], depth: int, num_blocks: int, step: int, way: str
) -> None:
    own = ledger(served[1], num_blocks, step)
    got, scheduler = serve(*served, make_requests(), depth=depth, step=step, way=way, ledger=own)
    assert scheduler.recorder.num_failed_steps == 0
    assert (scheduler.recorder.num_preemptions > 0) == (num_blocks == 22)
    assert scheduler.recorder.prefix_cache_hits > 0
    for request in make_requests():
        alone, _ = serve(*served, [request])
        wanted = alone[request.request_id]
        assert tokens_of(got[request.request_id]) == tokens_of(wanted), request.request_id
        assert got[request.request_id][-1].finish_reason == wanted[-1].finish_reason


@pytest.mark.parametrize("way", ["host", "staged"])
@pytest.mark.parametrize("kv_dtype", ["float32", "int8", "float8_e4m3fn"])
def test_the_same_steps_have_the_same_bits(served: tuple[Any, ModelSpec], way: str, kv_dtype: str) -> None:
    """With and without giving back: the same requests in the same steps, down to the last bit of each logprob."""
    kept, _ = serve(*served, make_requests(), step=40, way=way, kv_dtype=kv_dtype)
    given, _ = serve(*served, make_requests(), step=40, way=way, ledger=ledger(served[1], 200, 40), kv_dtype=kv_dtype)
    for name, outputs in kept.items():
        assert tokens_of(given[name]) == tokens_of(outputs), name
        assert bits_of(given[name]) == bits_of(outputs), name


@pytest.mark.parametrize("way", ["host", "staged"])
def test_what_was_given_back_is_never_read(
    served: tuple[Any, ModelSpec], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every block becomes NaN when its window has passed: one read of it would end a request with an error."""
    caches: list[Any] = []
    opened = TorchRunner.__init__

    def keep(self: TorchRunner, model: Any, spec: ModelSpec, kv: Any, **options: Any) -> None:
        caches.append(kv)
        opened(self, model, spec, kv, **options)

    drop, dropped = Ledger.drop_before, []

    def drop_and_poison(self: Ledger, request: Request, position: int) -> None:
        before = [list(table) for table in request.block_tables]
        drop(self, request, position)
        for group, (old, new) in enumerate(zip(before, request.block_tables, strict=True)):
            gone = [a for a, b in zip(old, new, strict=True) if a != b]
            dropped.extend(gone)
            for layer in kv_groups(served[1])[group].layers:
                for tensor in caches[-1].layers[layer].tensors():
                    tensor[:, gone] = float("nan")

    monkeypatch.setattr(TorchRunner, "__init__", keep)
    monkeypatch.setattr(Ledger, "drop_before", drop_and_poison)
    monkeypatch.setattr(CacheManager, "find", lambda self, request: self.ledger.lookup(()))
    got, _ = serve(*served, make_requests(), step=40, way=way, ledger=ledger(served[1], 200, 40))
    assert dropped
    assert all(outputs[-1].finish_reason == "length" for outputs in got.values())


def test_a_windowed_group_holds_a_bounded_share(served: tuple[Any, ModelSpec]) -> None:
    """One request of 150 tokens, of which windowed layers keep 20."""
    own = ledger(served[1], 200, 20)
    most = [0] * len(own.pools)
    allocate = own.allocate

    def watched(request: Request, count: int) -> Any:
        blocks = allocate(request, count)
        most[:] = map(max, most, request.num_held_blocks)
        return blocks

    own.allocate = watched  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.0, max_tokens=100)
    serve(*served, [Request("r", range(3, 53), params, max_output_tokens=100)], step=20, ledger=own)
    for group, count in zip(kv_groups(served[1]), most, strict=True):
        assert count == (19 if group.window is None else 5), group  # 19 before a query and 16 of a chunk
    assert ledger_of(served[1], 5, BLOCK).windows == (None, None)
