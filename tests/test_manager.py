"""The manager: which model is served."""

import asyncio
import itertools
import shutil
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from localllm.config.settings import EngineConfig, ModelTable, ServerConfig, Settings
from localllm.engine.client import GenerationRequest
from localllm.engine.params import SamplingParams
from localllm.errors import CorruptModel, EngineStopped, ModelNotFound
from localllm.runner.runner import TorchRunner
from localllm.serving.build import build_engine
from localllm.serving.entry import LoadCancelled, ModelLoading, ModelNotLoaded, UnloadCancelled
from localllm.serving.eviction import reserved_bytes
from localllm.serving.manager import ModelManager
from localllm.serving.phases import OnPhase
from localllm.serving.served import LoadLimits, ServedModel
from tests.serving import PHASES, in_order, settings_for, spy_on_closing
from tests.tiny import make_tiny_model


@pytest.fixture
def closed_runners(monkeypatch: pytest.MonkeyPatch) -> list[TorchRunner]:
    return spy_on_closing(monkeypatch)


IDS = itertools.count()
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


async def tokens(manager: ModelManager, name: str | None = None) -> list[int]:
    """What the model says to a fixed prompt, greedily."""
    with await manager.acquire(name) as model:
        request = GenerationRequest(f"request-{next(IDS)}", [5, 6, 7], GREEDY)
        return [token for event in [e async for e in model.client.generate(request)] for token in event.token_ids]


async def test_the_manager_serves_and_gives_back(tiny_llama_path: Path, closed_runners: list[TorchRunner]) -> None:
    manager, seen = ModelManager(), []
    assert manager.current is None
    with pytest.raises(ModelLoading):
        await manager.acquire(None)
    model = await manager.start(settings_for(tiny_llama_path), seen.append)
    assert manager.current is model
    [entry] = manager.entries
    assert in_order(entry.phases) == PHASES
    assert all(phase.done for phase in entry.phases.values())
    assert in_order(phase.name for phase in seen if phase.done) == PHASES
    assert len(await tokens(manager)) == 12
    await manager.close()
    assert manager.current is None
    await manager.close()
    assert len(closed_runners) == 1


async def test_a_request_that_comes_before_the_first_load_starts_it_and_waits(tiny_llama_path: Path) -> None:
    """A server answers before it loads: the request of a client that systemd has started it for."""
    manager, seen, settings = ModelManager(), [], settings_for(tiny_llama_path)
    entry = manager.register_first(settings, seen.append)
    with pytest.raises(ModelLoading, match="is loading"):
        manager.loads.require_working()
    request = asyncio.create_task(tokens(manager))
    await asyncio.sleep(0)
    model = await manager.start(settings, seen.append)
    assert (manager.entries, entry.served) == ([entry], model)
    assert len(await request) == 12
    assert in_order(phase.name for phase in seen if phase.done) == PHASES
    await manager.close()


async def test_the_loading_thread_ends_with_the_load(tiny_llama_path: Path) -> None:
    """An idle thread that has computed keeps a team of libgomp workers, and the engine's steps pay for it."""
    manager = ModelManager()
    await manager.start(settings_for(tiny_llama_path))
    for _ in range(200):
        if not any(thread.name.startswith("localllm-loader") for thread in threading.enumerate()):
            break
        await asyncio.sleep(0.02)
    else:
        raise AssertionError(threading.enumerate())
    await manager.close()


async def test_closing_ends_running_requests_with_an_error(tiny_llama_path: Path) -> None:
    manager = ModelManager()
    model = await manager.start(settings_for(tiny_llama_path))
    request = GenerationRequest("a", [5, 6, 7], SamplingParams(max_tokens=200, ignore_eos=True))
    stream = model.client.generate(request)
    await anext(stream)
    await manager.close()
    last = [event async for event in stream][-1]
    assert isinstance(last.error, EngineStopped)


@pytest.mark.parametrize("seed", [None, 3])
async def test_unseeded_requests_repeat_after_a_load_only_where_a_seed_was_said(
    tiny_llama_path: Path, seed: int | None
) -> None:
    async def sampled(manager: ModelManager) -> list[int]:
        with await manager.acquire(None) as model:
            request = GenerationRequest(
                f"request-{next(IDS)}", [5, 6, 7], SamplingParams(max_tokens=12, ignore_eos=True)
            )
            return [token for event in [e async for e in model.client.generate(request)] for token in event.token_ids]

    manager = ModelManager()
    await manager.start(settings_for(tiny_llama_path, seed=seed))
    first = await sampled(manager)
    await manager.unload(tiny_llama_path.name)
    second = await sampled(manager)
    await manager.sleep(tiny_llama_path.name)
    third = await sampled(manager)
    await manager.close()
    answers = [first, second, third]
    assert len({tuple(answer) for answer in answers}) == (3 if seed is None else 1)


async def test_names_that_find_the_model(tiny_llama_path: Path) -> None:
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


async def test_blanks_around_a_name_are_not_kept(tiny_llama_path: Path) -> None:
    """What is found under a name is kept under it, so a name may not have endless spellings."""
    manager = ModelManager()
    await manager.start(settings_for(tiny_llama_path))
    [entry] = manager.register.entries
    found = SimpleNamespace(path=entry.path, name="org/tiny", source="cache", alias_of=None)
    manager.register._loader = replace(manager.register._loader, resolve=lambda name, paths: found)
    for blanks in range(5):
        assert await manager.register.find_or_add("org/tiny" + " " * blanks) is entry
    assert "org/tiny" in entry.names
    assert not [name for name in entry.names if name != name.strip()]
    with pytest.raises(ModelNotFound, match="300 characters"):
        await manager.acquire("x" * 301)
    with pytest.raises(ModelNotFound, match="300 characters"):
        await manager.acquire(" " * 301)
    await manager.close()


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("/home/me/models/tiny", "tiny"),
        ("/home/me/models/tiny/", "tiny"),
        ("~/models/big-Q4_K_M-00001-of-00002.gguf", "big-Q4_K_M"),
        ("/cache/models--org--small/snapshots/0a1b2c", "small"),
        ("org/small", "small"),
        ("demo", "demo"),
    ],
)
def test_a_model_has_its_name_before_it_is_loaded(asked: str, name: str) -> None:
    """Not its path: every client sees it, and clients ask for it while the model loads."""
    register = ModelManager().register
    entry = register.add(settings_for(Path(asked)), asked)
    assert entry.name == name
    assert register.find(name) is register.find(asked) is entry
    entry.state = "loading"
    assert f"Served: {name}." in register.not_found("other").why


async def test_a_failed_load_is_remembered_and_the_next_may_work(tiny_llama_path: Path, tmp_path: Path) -> None:
    manager = ModelManager()
    with pytest.raises(ModelNotFound):
        await manager.start(settings_for(tmp_path / "nothing-here"))
    with pytest.raises(ModelNotFound, match="nothing-here"):
        await manager.acquire(None)
    model = await manager.start(settings_for(tiny_llama_path))
    with await manager.acquire(None) as found:
        assert found is model
    await manager.close()


async def test_a_load_that_is_given_up_stops_at_its_next_report(
    tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loading thread cannot be cancelled: it is told at its next report."""
    monkeypatch.setattr("localllm.models.loader.load_model", lambda *args: pytest.fail("it went on"))
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


async def test_sleep_and_wake_give_the_same_tokens(tiny_llama_path: Path, closed_runners: list[TorchRunner]) -> None:
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


def settings_with(first: Path, *others: Path, **server: Any) -> Settings:
    """The first model is served from the start, the others have a table: model-1, model-2, ..."""
    engine = {"max_model_len": 256, "kv_cache_memory_bytes": 1 << 20}
    tables = {
        f"model-{number}": ModelTable(f"model-{number}", {"model": str(path), "max_model_len": 256}, (f"m{number}",))
        for number, path in enumerate(others, 1)
    }
    return Settings(EngineConfig(model=str(first), **engine), ServerConfig(**server), models=tables)


async def test_a_request_loads_another_model_and_both_serve(tiny_model_path: Callable[[str], Path]) -> None:
    before = set(threading.enumerate())
    manager = ModelManager()
    first = await manager.start(settings_with(tiny_model_path("llama"), tiny_model_path("qwen3")))
    one = await tokens(manager, first.name)
    answers = await asyncio.gather(*(tokens(manager, name) for name in ("model-1", "m1", "model-1")))
    assert answers[0] == answers[1] == answers[2] != one
    assert [status.state for status in manager.statuses()] == ["ready", "ready"]
    assert await tokens(manager, first.name) == one
    assert manager.current is first
    assert "model-1" not in await manager.register.installed()
    await manager.unload("model-1")
    assert await tokens(manager) == one
    await manager.close()
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "localllm-engine"]


async def test_a_load_that_fails_leaves_the_other_serving(
    tiny_model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(tiny_model_path("qwen3"), damaged)
    (damaged / "model.safetensors").write_bytes((damaged / "model.safetensors").read_bytes()[:-1000])
    manager = ModelManager()
    first = await manager.start(settings_with(tiny_model_path("llama"), damaged, models_max=1))
    before = await tokens(manager)
    for _ in range(2):  # the second is told what the first one found
        with pytest.raises(CorruptModel):
            await tokens(manager, "model-1")
    [ready, failed] = manager.statuses()
    assert (ready.name, ready.state, failed.name, failed.state) == (first.name, "ready", "model-1", "failed")
    assert failed.error
    assert await tokens(manager) == before  # it gave way, and came back
    await manager.close()


async def test_a_load_can_be_cancelled(tiny_model_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    manager = ModelManager()
    await manager.start(settings_with(tiny_model_path("llama"), tiny_model_path("qwen3")))

    def slow(settings: Settings, on_phase: OnPhase, limits: LoadLimits) -> ServedModel:
        begun.set()
        go_on.wait(10)
        return build_engine(settings, on_phase, limits)

    manager.transitions.loader = replace(manager.transitions.loader, build=slow)
    waiting = asyncio.create_task(tokens(manager, "model-1"))
    while not begun.is_set():
        await asyncio.sleep(0.01)
    asyncio.get_running_loop().call_later(0.05, go_on.set)
    assert (await manager.unload("model-1")).state == "unloaded"
    with pytest.raises(LoadCancelled):
        await waiting
    assert len(manager.ready) == 1
    assert await tokens(manager)
    await manager.close()


async def test_a_model_is_loaded_again_with_options_and_keeps_them(tiny_llama_path: Path) -> None:
    manager, name = ModelManager(), tiny_llama_path.name
    await manager.start(settings_for(tiny_llama_path))
    manager.pin(name)
    before = await tokens(manager)
    status = await manager.load(name, options={"max_model_len": 128})
    assert (status.state, status.max_model_len, status.pinned) == ("ready", 128, True)
    assert await tokens(manager) == before
    engine = manager.current.engine[0] if manager.current else None
    await manager.load(name, options={"max_model_len": 128})
    assert manager.current is not None
    assert manager.current.engine[0] is engine, "the same options load nothing again"
    await manager.unload(name)
    assert (await manager.load(name)).max_model_len == 128
    await manager.close()


async def test_unload_and_sleep_give_the_memory_back(tmp_path: Path) -> None:
    """The model dies with its last reference, and the system gets the pages back."""
    wide = make_tiny_model(tmp_path / "wide", "llama", hidden_size=1024, intermediate_size=4096, num_hidden_layers=4)
    engine = EngineConfig(model=str(wide), max_model_len=2048, kv_cache_memory_bytes=192 << 20)
    rss = psutil.Process().memory_info
    manager = ModelManager()
    await manager.start(Settings(engine))
    model = manager.ready[0]
    runner = model.loop.runner
    assert isinstance(runner, TorchRunner)
    weights, weights_bytes = weakref.ref(runner.model), model.plan.weights_bytes
    assert weights_bytes > 200 << 20
    engine_ref = weakref.ref(model.loop)
    for layer in runner._steps._layers:  # type: ignore[union-attr]  as if the cache were full
        for tensor in layer.tensors():
            tensor.fill_(1)
    name, full = model.name, rss().rss
    del model, runner, layer, tensor
    await manager.sleep(name)
    assert weights() is not None
    asleep = rss().rss
    assert full - asleep > 150 << 20
    assert len(await tokens(manager, name)) == 12
    awake = rss().rss
    await manager.unload(name)
    assert weights() is None
    assert engine_ref() is None
    assert awake - rss().rss > 0.8 * weights_bytes
    await manager.close()


async def test_what_is_promised_to_one_model_is_not_free_for_the_next(tiny_llama_path: Path) -> None:
    """A KV cache on a CPU is taken page by page: until it is written the system counts it as free."""
    manager = ModelManager()
    model = await manager.start(settings_for(tiny_llama_path, kv_cache_memory_bytes=1 << 30, max_model_len=None))
    reserved = reserved_bytes(manager.entries, manager.transitions.baseline_bytes)
    assert 0.8 * model.plan.kv_bytes < reserved <= model.plan.kv_bytes + model.plan.activation_bytes
    await manager.sleep(model.name)
    assert reserved_bytes(manager.entries, manager.transitions.baseline_bytes) == 0
    await manager.close()


async def test_a_model_is_kept_while_its_requests_end(tiny_llama_path: Path) -> None:
    """Unload and sleep wait for a request that does not end; `keep` ends the wait, and what waited is served."""

    async def until(holds: Callable[[], bool]) -> None:
        while not holds():
            await asyncio.sleep(0.01)

    manager = ModelManager()
    await manager.start(settings_for(tiny_llama_path))
    [entry] = manager.entries
    with pytest.raises(ModelNotLoaded, match=r"cannot be kept: it is ready\."):
        manager.keep(entry.name)
    held = await manager.acquire(None)
    for leave in (manager.unload, manager.sleep):
        leaving = asyncio.create_task(leave(entry.name))
        await until(lambda: entry.is_draining)
        assert entry.state == "unloading"
        other = asyncio.create_task(tokens(manager))
        await until(lambda: bool(entry.waiters))
        assert manager.keep(entry.name).state == "unloading", "it is ready once the wait has ended"
        with pytest.raises(UnloadCancelled, match="stays loaded"):
            await leaving
        assert len(await other) == 12
        assert (entry.state, entry.is_draining, entry.num_leases) == ("ready", False, 1)
    leaving = asyncio.create_task(manager.unload(entry.name))
    await until(lambda: entry.is_draining)
    manager.keep(entry.name)
    with pytest.raises(UnloadCancelled):
        await leaving
    assert not entry.idle.is_set(), "the next unload waits for the request again"
    leaving = asyncio.create_task(manager.unload(entry.name))
    await until(lambda: entry.is_draining)
    done, _ = await asyncio.wait({leaving}, timeout=0.1)
    assert not done
    held.release()
    await leaving
    assert entry.state == "unloaded"
    await manager.close()
