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


def settings_for(path: Path, *, served_model_name: str | None = None, **engine: Any) -> Settings:
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


def test_the_manager_serves_and_gives_back(tiny_llama_path: Path, closed_runners: list[TorchRunner]) -> None:
    async def scenario() -> None:
        manager, seen = ModelManager(), []
        assert manager.current is None
        with pytest.raises(ModelLoading):
            manager.find(None)
        model = await manager.start(settings_for(tiny_llama_path), seen.append)
        assert manager.current is model
        assert list(manager.phases) == PHASES
        assert all(phase.done for phase in manager.phases.values())
        assert [phase.name for phase in seen if phase.done] == PHASES
        request = GenerationRequest("a", [5, 6, 7], SamplingParams(max_tokens=3, ignore_eos=True))
        events = [event async for event in model.client.generate(request)]
        assert events[-1].finish_reason == "length"
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
            assert manager.find(name) is model
        with pytest.raises(ModelNotFound, match=f"Served: {tiny_llama_path.name}"):
            manager.find("another")
        await manager.close()
        named = await manager.start(settings_for(tiny_llama_path, served_model_name="mine"))
        assert manager.find("mine") is named
        with pytest.raises(ModelNotFound):
            manager.find(tiny_llama_path.name)
        await manager.close()

    asyncio.run(scenario())


def test_a_failed_load_is_remembered_and_the_next_may_work(tiny_llama_path: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        manager = ModelManager()
        with pytest.raises(ModelNotFound):
            await manager.start(settings_for(tmp_path / "nothing-here"))
        with pytest.raises(ModelNotFound, match="nothing-here"):
            manager.find(None)
        model = await manager.start(settings_for(tiny_llama_path))
        assert manager.find(None) is model
        assert manager.error is None
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

    asyncio.run(scenario())  # waits for the loading thread
