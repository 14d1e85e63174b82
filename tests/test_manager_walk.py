"""Any order of requests, loads, sleeps, unloads and pins: never too much memory, nobody loses a model in use, no hang.

The manager is the real one; models are names with a size, and loading one takes from a small budget.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import weakref
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from localllm.config.settings import EngineConfig, ServerConfig, Settings
from localllm.errors import ConfigError, CorruptModel, DoesNotFit, EngineCrashed, LocalLLMError, ModelNotFound
from localllm.models.library.catalog import ResolvedModel
from localllm.serving import lending, loading, transitions
from localllm.serving.entry import ModelLoading, ModelsBusy
from localllm.serving.lease import Lease
from localllm.serving.loading import STABLE_S
from localllm.serving.manager import RETRY_S, ModelManager
from localllm.serving.phases import OnPhase, Phase
from localllm.serving.reopen import SleepingModel
from localllm.serving.served import LoadLimits, ModelCard, ServedModel
from localllm.serving.transitions import Loader
from tests.draws import draws
from tests.web.pages_stub import stub_plan, stub_spec

SIZES = {"one": 3, "two": 3, "big": 6, "small": 2, "huge": 9}
BUDGET = 8
ASLEEP = 1  # what a sleeping model holds
NAMES = st.sampled_from(sorted(SIZES))


class FakeClient:
    def __init__(self) -> None:
        self.crash = asyncio.Event()

    async def start(self) -> None: ...
    async def stop(self) -> None: ...

    async def ended(self) -> LocalLLMError:
        await self.crash.wait()
        return EngineCrashed("The engine crashed.")

    def stats(self) -> Any:
        return SimpleNamespace(kv_usage=0.0, num_running=0, num_waiting=0)


@dataclass
class FakeServed:
    """What the manager uses of a `ServedModel`."""

    name: str
    memory: FakeMemory
    plan: Any = field(default_factory=stub_plan)
    client: FakeClient = field(default_factory=FakeClient)
    loop: Any = field(default_factory=lambda: SimpleNamespace(is_running=True))
    aliases: frozenset[str] = frozenset()
    spec: Any = field(default_factory=stub_spec)
    adapters: None = None
    hearing: None = None
    key: int = -1

    @property
    def path(self) -> Path:
        return Path("/models") / self.name

    @property
    def card(self) -> Any:
        return ModelCard(self.name, self.path, self.spec, self.plan, {}, 0.0)

    def close(self) -> None:
        self.memory.give(self)


@dataclass(eq=False)
class FakeWeights:
    key: int

    def close(self) -> None:
        """Their memory is counted until the last reference is gone."""


class FakeMemory:
    """The loader of models that are only sizes."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}
        self._keys = itertools.count()
        self.failing: set[str] = set()
        self.on_close: Callable[[FakeServed], None] = lambda served: None
        self.builds: list[str] = []
        self.on_cpu: list[str] = []  # names of models that the GPU has no room for
        self.devices: list[str] = []

    @property
    def used(self) -> int:
        return sum(self.held.values())

    @property
    def loader(self) -> Loader:
        return Loader(self.build, self.sleep, self.wake, self.resolve, list, lambda: None)  # type: ignore[arg-type]

    def resolve(self, name: str, paths: bool) -> ResolvedModel:
        if name not in SIZES:
            raise ModelNotFound(f"There is no {name}.")
        return ResolvedModel(name, Path("/models") / name, "cache")

    def build(self, settings: Settings, on_phase: OnPhase, limits: LoadLimits) -> FakeServed:
        name = settings.engine.model
        self.devices.append(settings.engine.device)
        if name in self.on_cpu and settings.engine.device != "cpu":
            raise DoesNotFit(f"{name} does not fit.", "The GPU is full.")
        on_phase(Phase("find"))
        self._require(name, SIZES[name])
        on_phase(Phase("weights"))
        if name in self.failing:
            raise CorruptModel(f"{name} is damaged.")
        self.builds.append(name)
        return self._take(FakeServed(name, self))

    def sleep(self, served: FakeServed) -> SleepingModel:
        served.close()
        key = next(self._keys)
        weights = FakeWeights(key)
        self.held[key] = ASLEEP
        weakref.finalize(weights, self.held.pop, key, None)  # as real ones: gone with the last reference
        return SleepingModel(weights, served)  # type: ignore[arg-type]

    def wake(self, asleep: SleepingModel, settings: Settings, on_phase: OnPhase, limits: LoadLimits) -> FakeServed:
        name = asleep.served.name
        self._require(name, SIZES[name] - ASLEEP)
        if name in self.failing:
            raise CorruptModel(f"{name} is damaged.")
        del self.held[asleep.executor.key]  # type: ignore[attr-defined]
        return self._take(FakeServed(name, self))

    def give(self, served: FakeServed) -> None:
        self.on_close(served)
        self.held.pop(served.key, None)

    def _require(self, name: str, size: int) -> None:
        if self.used + size > BUDGET:
            raise DoesNotFit(f"{name} does not fit.", f"It needs {size}, {BUDGET - self.used} are free.")

    def _take(self, served: FakeServed) -> FakeServed:
        served.key = next(self._keys)
        self.held[served.key] = SIZES[served.name]
        return served


class FakeTime:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def settings_of(models: str = "one", **server: Any) -> Settings:
    return Settings(EngineConfig(model=models), ServerConfig(**server))


@pytest.fixture(autouse=True)
def without_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full collection takes a tenth of a second; nothing here has cycles worth finding."""
    quiet = SimpleNamespace(collect=lambda: 0, freeze=lambda: None, unfreeze=lambda: None)
    monkeypatch.setattr(transitions, "gc", quiet)
    monkeypatch.setattr(lending, "gc", quiet)


class SteppedLoop(asyncio.SelectorEventLoop):
    """Threads' work is done on the loop itself, a few turns later: the same walk always goes the same way."""

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        done = self.create_future()
        self._work(done, func, args, turns_left=3)
        return done

    def _work(self, done: asyncio.Future[Any], func: Callable[..., Any], args: Any, turns_left: int) -> None:
        if turns_left:
            self.call_soon(self._work, done, func, args, turns_left - 1)
            return
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)


class ManagerWalk(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.events = SteppedLoop()
        self.clock, self.memory = FakeTime(), FakeMemory()
        self.memory.on_close = self.on_close
        self.manager = ModelManager(self.memory.loader, self.clock)
        self.leases: list[Lease[ServedModel]] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self.told_to_go: set[str] = set()  # by name: somebody said unload or sleep
        self.violations: list[str] = []
        self.run(self.manager.start(settings_of()))
        for task in self.manager._tasks:
            task.cancel()  # this clock ticks when the walk says so

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.events.run_until_complete(asyncio.wait_for(work, 10))

    def on_close(self, served: FakeServed) -> None:
        """On the way down of any model: nobody may hold it, and a pinned one goes only by name.

        Requests wait for a model that was on its way down when they came. One of them may have pinned it.
        """
        if any(lease.model is served and lease._on_release for lease in self.leases):
            self.violations.append(f"{served.name} was taken from a request")
        entry = self.manager.register.find(served.name)
        if entry is not None and entry.pinned and not entry.waiters and served.name not in self.told_to_go:
            self.violations.append(f"{served.name} is pinned and was evicted")

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        self.tasks.append(self.events.create_task(work))
        self.settle()

    def settle(self) -> None:
        """Until nothing moves any more: what is left waits for a request to end."""

        async def pause() -> None:
            for turn in range(2000):
                await asyncio.sleep(0)
                if turn < 10:
                    continue  # what was just asked has hardly begun
                busy = self.manager.transitions.turn.locked() or any(entry.is_loading for entry in self.manager.entries)
                held = [lease.model for lease in self.leases]
                draining = any(entry.state == "unloading" and entry.served in held for entry in self.manager.entries)
                if not busy or draining:
                    return
            raise AssertionError("it does not come to rest")

        self.run(pause())
        for task in [task for task in self.tasks if task.done()]:
            self.tasks.remove(task)
            self.outcome(task)

    def outcome(self, task: asyncio.Task[Any]) -> None:
        """A refusal is an answer; anything else is a bug."""
        if not task.cancelled() and task.exception() is not None:
            assert isinstance(task.exception(), LocalLLMError), task.exception()

    async def request(self, name: str) -> None:
        self.leases.append(await self.manager.acquire(name))

    async def go(self, name: str, work: Callable[[str], Coroutine[Any, Any, Any]]) -> None:
        self.told_to_go.add(name)
        try:
            await work(name)
        finally:
            self.told_to_go.discard(name)

    @rule(name=NAMES)
    def ask(self, name: str) -> None:
        self.spawn(self.request(name))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        lease = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.events.call_soon(lease.release)
        self.settle()

    @rule(name=NAMES, pin=st.sampled_from([None, True, False]), keep=st.sampled_from([None, 0.0, 10.0]))
    def load(self, name: str, pin: bool | None, keep: float | None) -> None:
        self.spawn(self.manager.load(name, pin=pin, keep_alive_s=keep))

    @rule(name=NAMES)
    def unload(self, name: str) -> None:
        self.spawn(self.go(name, self.manager.unload))

    @rule(name=NAMES)
    def sleep(self, name: str) -> None:
        self.spawn(self.go(name, self.manager.sleep))

    @rule(name=NAMES)
    def wake(self, name: str) -> None:
        self.spawn(self.manager.wake(name))

    @rule(name=NAMES, pinned=st.booleans())
    def pin(self, name: str, pinned: bool) -> None:
        if self.manager.register.find(name):
            self.manager.pin(name, pinned)

    @rule(name=NAMES)
    def damage(self, name: str) -> None:
        self.memory.failing ^= {name}

    @rule(seconds=st.sampled_from([1.0, 20.0, 1000.0]))
    def pass_time(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.spawn(self.manager.tick())

    @rule()
    def leave(self) -> None:
        """Somebody who waits gives up."""
        for task in self.tasks[:1]:
            task.cancel()
        self.settle()

    @invariant()
    def memory_is_never_overdrawn(self) -> None:
        assert self.memory.used <= BUDGET

    @invariant()
    def nobody_lost_anything(self) -> None:
        assert not self.violations
        for lease in self.leases:
            assert any(entry.served is lease.model for entry in self.manager.entries)

    @invariant()
    def states_tell_the_truth(self) -> None:
        for entry in self.manager.entries:
            assert (entry.state in ("ready", "unloading")) >= (entry.served is not None), entry.state
            assert entry.state != "ready" or entry.served is not None
            assert entry.state != "sleeping" or entry.asleep is not None
        if self.manager.transitions.turn.locked():
            return
        held = sum(1 for entry in self.manager.entries if entry.served is not None or entry.asleep is not None)
        assert len(self.memory.held) == held

    async def let_everybody_finish(self) -> None:
        """When every request ends, everybody who waits gets an answer."""
        while self.leases or not all(task.done() for task in self.tasks):
            while self.leases:
                self.leases.pop().release()
            await asyncio.sleep(0)

    def teardown(self) -> None:
        try:
            self.run(self.let_everybody_finish())
            for task in self.tasks:
                self.outcome(task)
            self.run(self.manager.close())
            assert not self.memory.held
        finally:
            self.events.close()


def test_any_order_of_events() -> None:
    run_state_machine_as_test(
        ManagerWalk,
        settings=draws(40, stateful_step_count=30, suppress_health_check=list(HealthCheck)),
    )


def test_a_model_that_is_pinned_on_its_way_down_comes_back() -> None:
    walk = ManagerWalk()
    walk.load("big", None, 0.0)
    walk.load("big", True, None)
    assert not walk.violations
    assert states(walk.manager)["big"] == "ready"
    walk.teardown()


# ---- single decisions ------------------------------------------------------------------------------------------------


def play(story: Callable[[ModelManager, FakeMemory, FakeTime], Coroutine[Any, Any, None]], **server: Any) -> None:
    """Run a story of a manager that serves `one`."""

    async def scenario() -> None:
        memory, clock = FakeMemory(), FakeTime()
        manager = ModelManager(memory.loader, clock)
        await manager.start(settings_of(**server))
        await story(manager, memory, clock)
        await manager.close()

    asyncio.run(asyncio.wait_for(scenario(), 20))


def states(manager: ModelManager) -> dict[str, str]:
    return {status.name: status.state for status in manager.statuses()}


async def use(manager: ModelManager, clock: FakeTime, name: str) -> None:
    clock.now_s += 1
    (await manager.acquire(name)).release()


def test_requests_for_one_model_share_its_load() -> None:
    async def story(manager: ModelManager, memory: FakeMemory, clock: FakeTime) -> None:
        leases = await asyncio.gather(*(manager.acquire("two") for _ in range(5)))
        assert memory.builds == ["one", "two"]
        assert len({id(lease.model) for lease in leases}) == 1

    play(story)


def test_who_was_used_longest_ago_goes_first() -> None:
    async def story(manager: ModelManager, memory: FakeMemory, clock: FakeTime) -> None:
        await use(manager, clock, "two")
        await use(manager, clock, "one")
        await use(manager, clock, "small")  # 3 + 3 + 2 are all there is
        await use(manager, clock, "big")  # 6: `two` goes, then `one`, and 2 are left beside `small`
        assert states(manager) == {"big": "ready", "small": "ready", "one": "unloaded", "two": "unloaded"}
        await use(manager, clock, "two")
        assert states(manager) == {"two": "ready", "big": "unloaded", "small": "unloaded", "one": "unloaded"}

    play(story)


def test_a_model_in_use_drains_first_and_an_idle_one_goes_before_it() -> None:
    async def story(manager: ModelManager, memory: FakeMemory, clock: FakeTime) -> None:
        busy = await manager.acquire("one")
        await use(manager, clock, "two")
        loading = asyncio.create_task(manager.acquire("big"))  # 6 of 8: both have to go
        while states(manager)["one"] != "unloading":
            await asyncio.sleep(0.001)
        assert states(manager)["two"] == "unloaded"
        late = asyncio.create_task(manager.acquire("one"))  # waits its turn: it would keep the other for ever
        await asyncio.sleep(0.01)
        assert not loading.done()
        busy.release()
        (await loading).release()
        assert (await late).model.name == "one"

    play(story)


def test_pinned_models_are_named_when_there_is_no_room() -> None:
    async def story(manager: ModelManager, memory: FakeMemory, clock: FakeTime) -> None:
        manager.pin("one")
        with pytest.raises(DoesNotFit, match=r"5 are free\. Pinned models: one"):
            await manager.acquire("big")
        assert states(manager)["one"] == "ready"

    play(story)


def test_models_max() -> None:
    async def story(manager: ModelManager, memory: FakeMemory, clock: FakeTime) -> None:
        await use(manager, clock, "two")
        assert states(manager) == {"two": "ready", "one": "unloaded"}
        manager.pin("two")
        with pytest.raises(ModelsBusy, match="--models-max is 1"):
            await manager.acquire("small")

    play(story, models_max=1)


@pytest.fixture
def all_transcribe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.models.encoders.recipe.task_of", lambda path: "transcribe")


@pytest.mark.usefixtures("all_transcribe")
def test_the_speech_model_is_loaded_at_its_first_use_beside_the_others_and_is_never_the_default() -> None:
    async def story(manager: ModelManager, memory: FakeMemory, clock: FakeTime) -> None:
        assert states(manager) == {"one": "ready", "two": "unloaded"}
        speech = manager.register.speech
        assert speech is not None
        assert speech.name == "two"
        clock.now_s += 1
        (await manager.acquire(None, "transcribe")).release()
        assert states(manager) == {"one": "ready", "two": "ready"}  # although --models-max is 1
        assert manager.current is not None
        assert manager.current.name == "one"
        clock.now_s += 599
        await manager.tick()
        assert states(manager)["two"] == "ready"
        clock.now_s += 1
        await manager.tick()
        assert states(manager)["two"] == "unloaded"

    play(story, models_max=1, speech_model="two")


@pytest.mark.usefixtures("all_transcribe")
def test_no_model_is_evicted_for_the_speech_model_which_takes_the_cpu_where_a_gpu_is_full() -> None:
    async def story(manager: ModelManager, memory: FakeMemory, clock: FakeTime) -> None:
        with pytest.raises(DoesNotFit, match="It needs 6, 5 are free"):
            await manager.acquire("big")
        assert states(manager) == {"one": "ready", "big": "failed"}
        clock.now_s += RETRY_S
        memory.held.clear()
        memory.devices, memory.on_cpu = [], ["big"]
        await use(manager, clock, "big")
        await manager.unload("big")
        await use(manager, clock, "big")
        assert memory.devices == ["auto", "cpu", "auto", "cpu"]

    play(story, speech_model="big")


def test_a_speech_model_that_does_not_transcribe_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.models.read_spec.read_spec", lambda path: stub_spec())

    async def story(*rest: Any) -> None:
        """The start fails."""

    with pytest.raises(ConfigError, match=r"--speech-model two does not transcribe speech\. It generates text\."):
        play(story, speech_model="two")
    with pytest.raises(ModelNotFound, match="There is no five"):
        play(story, speech_model="five")


def test_without_a_speech_model_a_sound_is_refused() -> None:
    async def story(manager: ModelManager, memory: FakeMemory, clock: FakeTime) -> None:
        assert manager.register.speech is None
        with pytest.raises(ModelNotFound, match="No model here transcribes speech") as refused:
            await manager.acquire(None, "transcribe")
        assert "--speech-model" in refused.value.hint

    play(story, speech_model="none")


def test_keep_alive() -> None:
    async def story(manager: ModelManager, memory: FakeMemory, clock: FakeTime) -> None:
        await use(manager, clock, "two")
        clock.now_s += 299
        await manager.tick()
        assert states(manager)["two"] == "ready"
        clock.now_s += 1
        await manager.tick()
        assert states(manager) == {"one": "ready", "two": "unloaded"}  # the first model stays
        lease = await manager.acquire("two", keep_alive_s=0)
        await manager.tick()
        assert states(manager)["two"] == "ready"  # somebody uses it
        lease.release()
        while states(manager)["two"] == "ready":
            await asyncio.sleep(0.001)
        (await manager.acquire("two", keep_alive_s=math.inf)).release()
        clock.now_s += 1e6
        await manager.tick()
        assert states(manager)["two"] == "ready"

    play(story)


@pytest.mark.parametrize("turns", range(4))
def test_a_request_in_the_moment_of_expiry_gets_a_model_that_runs(turns: int) -> None:
    async def story(manager: ModelManager, memory: FakeMemory, clock: FakeTime) -> None:
        await use(manager, clock, "two")
        clock.now_s += 301
        tick = asyncio.create_task(manager.tick())
        for _ in range(turns):
            await asyncio.sleep(0)
        lease = await manager.acquire("two")
        await tick
        entry = next(entry for entry in manager.entries if entry.name == "two")
        assert entry.served is lease.model
        assert entry.is_running
        lease.release()

    play(story)


def test_keep_alive_of_the_first_model() -> None:
    async def story(manager: ModelManager, memory: FakeMemory, clock: FakeTime) -> None:
        clock.now_s += 61
        await manager.tick()
        assert states(manager) == {"one": "unloaded"}
        manager.loads.require_working()  # the next request has it back
        assert (await manager.acquire()).model.name == "one"

    play(story, keep_alive=60.0)


def test_a_failure_is_told_again_and_tried_again_later() -> None:
    async def story(manager: ModelManager, memory: FakeMemory, clock: FakeTime) -> None:
        memory.failing = {"two"}
        for _ in range(2):
            with pytest.raises(CorruptModel):
                await manager.acquire("two")
        memory.failing = set()
        with pytest.raises(CorruptModel):
            await manager.acquire("two")
        clock.now_s += RETRY_S
        assert (await manager.acquire("two")).model.name == "two"

    play(story)


def test_a_request_that_waits_too_long_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(manager: ModelManager, memory: FakeMemory, clock: FakeTime) -> None:
        monkeypatch.setattr(loading, "WAIT_S", 0.05)
        lease = await manager.acquire("one")
        with pytest.raises(ModelLoading, match=r"big is not ready after 0 s\. The present phase is find"):
            await manager.acquire("big")
        lease.release()

    play(story)


def test_an_engine_that_died_takes_nobody_with_it() -> None:
    async def story(manager: ModelManager, memory: FakeMemory, clock: FakeTime) -> None:
        await use(manager, clock, "two")
        dead = next(model for model in manager.ready if model.name == "two")
        dead.loop.is_running = False  # type: ignore[misc]
        assert (await manager.acquire("one")).model.name == "one"
        lease = await manager.acquire("two")
        assert lease.model is not dead
        assert memory.used == 6

    play(story)


def test_an_engine_that_crashed_is_loaded_again_unless_it_was_new() -> None:
    async def story(manager: ModelManager, memory: FakeMemory, clock: FakeTime) -> None:
        clock.now_s += STABLE_S
        crash(manager, "one")
        await until(lambda: memory.builds == ["one", "one"] and manager.current is not None)
        assert memory.used == 3
        crash(manager, "one")  # it had just been loaded
        await until(lambda: manager.statuses()[0].state == "failed")
        assert memory.used == 0
        with pytest.raises(EngineCrashed):
            manager.loads.require_working()
        with pytest.raises(EngineCrashed):
            await manager.acquire("one")
        clock.now_s += RETRY_S
        (await manager.acquire("one")).release()
        assert memory.builds == ["one"] * 3

    play(story)


def crash(manager: ModelManager, name: str) -> None:
    """As an engine's thread that ends by itself."""
    dead: Any = next(model for model in manager.ready if model.name == name)
    dead.loop.is_running = False
    dead.client.crash.set()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.001)


def test_what_a_request_may_have_loaded() -> None:
    async def story(manager: ModelManager, memory: FakeMemory, clock: FakeTime) -> None:
        for name in ("none", "/models/two", "./two", "~/two"):
            with pytest.raises(ModelNotFound, match=r"not served here\. Served: one\."):
                await manager.acquire(name)
        assert memory.builds == ["one"]

    play(story)


def test_without_on_demand_only_what_is_loaded_is_served() -> None:
    async def story(manager: ModelManager, memory: FakeMemory, clock: FakeTime) -> None:
        with pytest.raises(ModelNotFound):
            await manager.acquire("two")
        assert (await manager.load("two")).state == "ready"  # whoever runs the server may
        (await manager.acquire("two")).release()

    play(story, on_demand=False)
