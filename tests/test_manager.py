"""The manager: which model is served."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from localllm.config import EngineConfig, ServerConfig, Settings
from localllm.engine.client import GenerationRequest
from localllm.engine.params import SamplingParams
from localllm.errors import EngineStopped, ModelNotFound
from localllm.manager import ModelLoading, ModelManager
from localllm.runner.runner import TorchRunner

PHASES = ["find", "torch", "fit", "tokenizer", "weights", "memory", "engine"]


def settings_for(path: Path, *, served_model_name: tuple[str, ...] = (), **engine: Any) -> Settings:
    engine = {"max_model_len": 256, "kv_cache_memory_bytes": 1 << 20, **engine}
    return Settings(EngineConfig(model=str(path), **engine), ServerConfig(served_model_name=served_model_name))


@pytest.fixture
def closed_runners(monkeypatch: pytest.MonkeyPatch) -> list[TorchRunner]:
    """Every runner that was closed."""
    closed: list[TorchRunner] = []
    close = TorchRunner.close

    def spy(self: TorchRunner) -> None:
        closed.append(self)
        close(self)

    monkeypatch.setattr(TorchRunner, "close", spy)
    return closed


GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


async def tokens(manager: ModelManager, name: str | None = None) -> list[int]:
    """What the model says to a fixed prompt, greedily."""
    with await manager.acquire(name) as model:
        request = GenerationRequest("a", [5, 6, 7], GREEDY)
        return [token for event in [e async for e in model.client.generate(request)] for token in event.token_ids]


def test_the_manager_serves_and_gives_back(tiny_llama_path: Path, closed_runners: list[TorchRunner]) -> None:
    async def scenario() -> None:
        manager, seen = ModelManager(), []
        assert manager.current is None
        with pytest.raises(ModelLoading):
            await manager.acquire(None)
        model = await manager.start(settings_for(tiny_llama_path), seen.append)
        assert manager.current is model
        [kept] = manager.kept
        assert list(kept.phases) == PHASES
        assert all(phase.done for phase in kept.phases.values())
        assert [phase.name for phase in seen if phase.done] == PHASES
        assert len(await tokens(manager)) == 12
        await manager.close()
        assert manager.current is None
        await manager.close()

    asyncio.run(scenario())
    assert len(closed_runners) == 1


def test_the_loading_thread_ends_with_the_load(tiny_llama_path: Path) -> None:
    """An idle thread that has computed keeps a team of libgomp workers, and the engine's steps pay for it."""

    async def main() -> None:
        manager = ModelManager()
        await manager.start(settings_for(tiny_llama_path))
        for _ in range(200):
            if not any(thread.name.startswith("localllm-loader") for thread in threading.enumerate()):
                break
            await asyncio.sleep(0.02)
        else:
            raise AssertionError(threading.enumerate())
        await manager.close()

    asyncio.run(main())


def test_closing_ends_running_requests_with_an_error(tiny_llama_path: Path) -> None:
    async def scenario() -> None:
        manager = ModelManager()
        model = await manager.start(settings_for(tiny_llama_path))
        request = GenerationRequest("a", [5, 6, 7], SamplingParams(max_tokens=200, ignore_eos=True))
        stream = model.client.generate(request)
        await anext(stream)
        await manager.close()
        last = [event async for event in stream][-1]
        assert isinstance(last.error, EngineStopped)

    asyncio.run(scenario())


def test_names_that_find_the_model(tiny_llama_path: Path) -> None:
    async def scenario() -> None:
        manager = ModelManager()
        model = await manager.start(settings_for(tiny_llama_path))
        for name in (None, "", tiny_llama_path.name, str(tiny_llama_path)):
            with await manager.acquire(name) as found:
                assert found is model
        with pytest.raises(ModelNotFound, match=f"Served: {tiny_llama_path.name}"):
            await manager.acquire("another")
        await manager.close()
        named = await manager.start(settings_for(tiny_llama_path, served_model_name=("mine", "my")))
        assert named.name == "mine"
        for name in ("mine", "my"):
            with await manager.acquire(name) as found:
                assert found is named
        with pytest.raises(ModelNotFound):
            await manager.acquire(tiny_llama_path.name)
        await manager.close()

    asyncio.run(scenario())


def test_a_failed_load_is_remembered_and_the_next_may_work(tiny_llama_path: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        manager = ModelManager()
        with pytest.raises(ModelNotFound):
            await manager.start(settings_for(tmp_path / "nothing-here"))
        with pytest.raises(ModelNotFound, match="nothing-here"):
            await manager.acquire(None)
        model = await manager.start(settings_for(tiny_llama_path))
        with await manager.acquire(None) as found:
            assert found is model
        await manager.close()

    asyncio.run(scenario())


def test_a_load_that_is_given_up_stops_at_its_next_report(
    tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loading thread cannot be cancelled: it is told at its next report."""
    monkeypatch.setattr("localllm.models.loader.load_model", lambda *args: pytest.fail("it went on"))

    async def scenario() -> None:
        manager = ModelManager()
        reached = asyncio.Event()
        loading = asyncio.create_task(
            manager.start(settings_for(tiny_llama_path), lambda phase: reached.set() if phase.name == "fit" else None)
        )
        await reached.wait()
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        assert manager.current is None
        await manager.close()

    asyncio.run(scenario())  # waits for the loading thread


def test_sleep_and_wake_give_the_same_tokens(tiny_llama_path: Path, closed_runners: list[TorchRunner]) -> None:
    async def scenario() -> None:
        manager = ModelManager()
        model = await manager.start(settings_for(tiny_llama_path))
        before = await tokens(manager)
        status = await manager.sleep(model.name)
        assert status.state == "sleeping"
        assert manager.current is None
        assert len(closed_runners) == 1
        assert await tokens(manager, model.name) == before
        assert manager.current is not model
        await manager.close()

    asyncio.run(scenario())
