"""Hybrids that sleep, wake, and are replaced by another model: states are dropped with the KV cache.

Afterwards sequences begin from zeros, prefixes are found only if they were computed since, and answers are those of
transformers.
"""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localllm.config.settings import EngineConfig, ModelTable, ServerConfig, Settings
from localllm.engine.client import GenerationRequest
from localllm.engine.params import SamplingParams
from localllm.runner.kv_cache import StateCache
from localllm.serving.manager import ModelManager
from tests.models.harness import prompt, reference, reference_greedy
from tests.serving import settings_for

PathOf = Callable[[str], Path]
IDS = itertools.count()
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin every pool of states with NaN instead of zeros: a sequence that read one would answer nonsense."""
    begin = StateCache.__init__

    def poisoned(self: StateCache, *given: Any) -> None:
        begin(self, *given)
        for layer in self.layers.values():
            for tensor in layer.tensors():
                tensor.fill_(float("nan"))

    monkeypatch.setattr(StateCache, "__init__", poisoned)


async def answer(manager: ModelManager, tokens: list[int], name: str | None = None) -> tuple[list[int], int]:
    """Return the greedy answer to a prompt, and how many tokens of the prompt were cached."""
    with await manager.acquire(name) as model:
        request = GenerationRequest(f"request-{next(IDS)}", tokens, GREEDY)
        events = [event async for event in model.client.generate(request)]
    usage = events[-1].usage
    assert usage is not None
    return [token for event in events for token in event.token_ids], usage.cached_tokens


@pytest.mark.parametrize(
    "family", ["lfm2", *[pytest.param(each, marks=pytest.mark.slow) for each in ("qwen3_5", "falcon_h1")]]
)
async def test_a_sleeping_hybrid_forgets_its_states(family: str, tiny_model_path: PathOf) -> None:
    path, first = tiny_model_path(family), prompt(50)

    def expected(tokens: list[int]) -> list[int]:
        return reference_greedy(reference(path), tokens, 8)

    manager = ModelManager()
    model = await manager.start(settings_for(path, dtype="float32"))
    said, _ = await answer(manager, first)
    second = [*first, *said, *prompt(20, seed=2)]
    assert said == expected(first)
    again, cached = await answer(manager, second)
    assert again == expected(second)
    assert cached >= 48
    assert (await manager.sleep(model.name)).state == "sleeping"
    assert await answer(manager, second, model.name) == (expected(second), 0)
    third = [*second, *expected(second), 5]
    again, cached = await answer(manager, third)
    assert again == expected(third)
    assert cached >= len(second) // 16 * 16
    await manager.close()


@pytest.mark.slow
async def test_hybrids_take_turns(tiny_model_path: PathOf) -> None:
    """Two models with unlike states, of which one is in memory at a time."""
    paths = {"": tiny_model_path("qwen3_5"), "other": tiny_model_path("lfm2")}
    table = ModelTable("other", {"model": str(paths["other"]), "max_model_len": 256, "dtype": "float32"}, ())
    engine = EngineConfig(model=str(paths[""]), max_model_len=256, kv_cache_memory_bytes=1 << 20, dtype="float32")
    settings, tokens = Settings(engine, ServerConfig(models_max=1), models={"other": table}), prompt(40)
    expected = {name: reference_greedy(reference(path), tokens, 8) for name, path in paths.items()}
    manager = ModelManager()
    first = await manager.start(settings)
    for name in ("", "other", "", "other"):
        assert await answer(manager, tokens, name or first.name) == (expected[name], 0)
        assert len(manager.ready) == 1
    await manager.close()
