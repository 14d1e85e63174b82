"""Which models are served: loaded when a request names them, put to sleep or unloaded when others need the room.

One change at a time: a load, a sleep or an unload takes its turn, requests for the same model share one load. A load
that does not fit makes room by LRU: the models that nobody uses go first, one with running requests drains before it
goes, a pinned one never goes. What went is brought back if the load then fails. A model that nobody has asked for
within its keep-alive time is unloaded.
Does not know: how a model is loaded (build.py) or sleeps (sleep.py), HTTP, terminals.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from localllm.build import build_engine, short_name
from localllm.config import Settings
from localllm.errors import (
    DeviceLost,
    DoesNotFit,
    EngineError,
    EngineStopped,
    LocalLLMError,
    ModelNotFound,
    RequestError,
    UnsupportedOption,
)
from localllm.kept import Kept, Lease, ModelStatus
from localllm.served import Beside, OnPhase, Phase, ServedModel, Task
from localllm.sleep import SleepingModel, give_back_memory, put_to_sleep, wake_up

if TYPE_CHECKING:
    from localllm.models.catalog import ResolvedModel

log = logging.getLogger(__name__)

WAIT_S = 300.0  # a request waits so long for its model
DRAIN_S = 30.0  # running requests may go on so long after somebody said sleep or unload
MAKE_ROOM_S = 120.0  # and so long when another model wants the room
KEEP_ALIVE_S = 300.0  # of models loaded on demand, where nothing else is said
RETRY_S = 5.0  # a request does not try a load again that has just failed
TICK_S = 0.5
COMFORTABLE_CONTEXT = 8192  # idle models give way to a context of this length


class ModelLoading(EngineError):
    """The server is up and its model is not there yet."""

    code, type = "model_loading", "unavailable_error"


class LoadCancelled(EngineError):
    """Somebody ended the load that this request was waiting for."""

    code, type = "load_cancelled", "unavailable_error"


class ModelsBusy(EngineError):
    """The models that are loaded do not give way: they are pinned, or their requests did not end in time."""

    code, type = "models_busy", "overloaded_error"


class ModelNotLoaded(RequestError):
    """What was asked can only be done to a model that is loaded."""

    status, code = 409, "model_not_loaded"


def _resolve(name: str) -> ResolvedModel:
    from localllm.models.catalog import resolve_model

    return resolve_model(name)


def _list() -> Sequence[ResolvedModel]:
    from localllm.models.catalog import list_models

    return list_models()


@dataclass(frozen=True, slots=True)
class Road:
    """How models come and go. All blocking."""

    build: Callable[[Settings, OnPhase, Beside], ServedModel]
    sleep: Callable[[ServedModel], SleepingModel]
    wake: Callable[[SleepingModel, Settings, OnPhase, Beside], ServedModel]
    resolve: Callable[[str], ResolvedModel] = _resolve
    list: Callable[[], Sequence[ResolvedModel]] = _list
    give_back_memory: Callable[[], None] = give_back_memory


class ModelManager:
    """The models of this server."""

    def __init__(self, road: Road | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.kept: list[Kept] = []
        self._road = road or Road(build_engine, put_to_sleep, wake_up)
        self._clock = clock
        self._settings: Settings | None = None
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._lost: asyncio.Future[DeviceLost] | None = None
        self._bare_bytes: int | None = None  # this process without any model
        self._closing = False

    # What there is ----------------------------------------------------------------------------------------------

    @property
    def default(self) -> Kept | None:
        """What a request without a name gets: of the models that are ready, else of all, the one used last."""
        return self._used_last(self.kept)

    @property
    def current(self) -> ServedModel | None:
        """The ready model that was used last."""
        kept = self.default
        return kept.served if kept is not None and kept.state == "ready" else None

    @property
    def ready(self) -> list[ServedModel]:
        return [kept.served for kept in self.kept if kept.state == "ready" and kept.served is not None]

    @property
    def num_open(self) -> int:
        return sum(model.client.num_open for model in self.ready)

    def statuses(self) -> list[ModelStatus]:
        """Of every model that is or was loaded, the ready ones first."""
        order = ("ready", "loading", "unloading", "sleeping", "failed", "unloaded")
        now_s = self._clock()
        return [kept.status(now_s) for kept in sorted(self.kept, key=lambda kept: order.index(kept.state))]

    async def installed(self) -> list[str]:
        """Names of the models that a request could have loaded beside those of `kept`."""
        settings = self._settings
        if settings is None:
            return []
        names = [table.name for table in settings.models.values() if self._known(table.name) is None]
        if settings.server.on_demand:
            paths = {kept.path for kept in self.kept}
            found = await asyncio.to_thread(self._road.list)
            names += [each.name for each in found if each.path not in paths and self._known(each.name) is None]
        return list(dict.fromkeys(names))

    async def look_up(self, name: str) -> Kept | str:
        """What a request of that name would get, or the name where that would have to be loaded first."""
        kept = self._known(name)
        if kept is not None:
            return kept
        settings = self._settings
        if settings is not None and (settings.table(name) is not None or name in await self.installed()):
            return name
        raise self._not_found(name)

    def require_working(self) -> None:
        """Raises what a request without a name would hear at once: it is loading, or why it could not be loaded."""
        kept = self.default
        if kept is None or kept.state == "loading":
            raise ModelLoading(f"{kept.name if kept else 'The model'} is loading.", "Try again in a moment.")
        if kept.state == "failed" and kept.error is not None:
            raise kept.error.with_traceback(None)  # raised again and again: its traceback would grow for ever

    async def device_lost(self) -> DeviceLost:
        """Waits until a model's device is lost, which ends the process."""
        if self._lost is None:
            self._lost = asyncio.get_running_loop().create_future()
        return await asyncio.shield(self._lost)

    # A request's way in -----------------------------------------------------------------------------------------

    async def acquire(
        self, name: str | None = None, task: Task = "generate", *, keep_alive_s: float | None = None
    ) -> Lease:
        """The model of that name, loaded or woken if it has to be; None or empty: of those for `task` the one used
        last. keep_alive_s: how long it stays after this and later requests.

        Raises `ModelNotFound`, `ModelLoading` when it takes longer than `WAIT_S`, `ModelsBusy`, `LoadCancelled`, and
        whatever a load raises.
        """
        kept = await self._named(name, task)
        if keep_alive_s is not None:
            kept.keep_alive_s = keep_alive_s
        if kept.state == "failed" and kept.error is not None and self._clock() - kept.failed_s < RETRY_S:
            raise kept.error.with_traceback(None)
        return await self._claim(kept)

    async def load(
        self, name: str, *, pin: bool | None = None, keep_alive_s: float | None = None, wait: bool = True
    ) -> ModelStatus:
        """Load or wake, and wait for it. Also takes a path: whoever may call this may say where models are."""
        kept = await self._named(name, anywhere=True)
        kept.pinned = kept.pinned if pin is None else pin
        kept.keep_alive_s = kept.keep_alive_s if keep_alive_s is None else keep_alive_s
        if wait:
            (await self._claim(kept)).release()
        elif not kept.is_up and kept.settings is not None:
            self._bring_up(kept)
        return kept.status(self._clock())

    async def wake(self, name: str) -> ModelStatus:
        """Serve a sleeping model again, and wait for it."""
        kept = self._require_known(name)
        if kept.state in ("unloaded", "failed"):
            raise ModelNotLoaded(f"{kept.name} does not sleep: it is {kept.state}.", "Load it instead.", param="model")
        (await self._claim(kept)).release()
        return kept.status(self._clock())

    async def unload(self, name: str) -> ModelStatus:
        """Give all its memory back. A load is cancelled; running requests may go on for `DRAIN_S`, then they end."""
        kept = self._require_known(name)
        kept.pinned = False
        if kept.is_coming and kept.state == "loading":
            await self._cancel(kept)
        async with self._turn:
            await self._drain(kept, DRAIN_S)
            await self._drop(kept)
        return kept.status(self._clock())

    async def sleep(self, name: str) -> ModelStatus:
        """Keep the weights in host memory and give the rest back. Running requests may go on for `DRAIN_S`."""
        kept = self._require_known(name)
        async with self._turn:
            if kept.state == "ready" and not _can_sleep(kept):
                why = "Of the models that generate text the weights can be kept without the rest."
                raise UnsupportedOption(f"{kept.name} cannot sleep.", why, "Unload it.", param="model")
            if kept.state == "ready":
                await self._drain(kept, DRAIN_S)
                await self._lay_down(kept)
        if kept.state != "sleeping":
            raise ModelNotLoaded(f"{kept.name} cannot sleep: it is {kept.state}.", "Load it first.", param="model")
        return kept.status(self._clock())

    def pin(self, name: str, pinned: bool = True) -> ModelStatus:
        """A pinned model stays until it is unloaded by name, whoever else wants the room."""
        kept = self._require_known(name)
        kept.pinned = pinned
        return kept.status(self._clock())

    # The server's life ------------------------------------------------------------------------------------------

    async def start(self, settings: Settings, on_phase: OnPhase = lambda phase: None) -> ServedModel:
        """Load the first model. `on_phase` is called on this event loop. Raises what a load raises."""
        self._settings, self._closing = settings, False
        own = settings.of_first_model()
        kept = self._remember(own, settings.engine.model, keep_alive_s=math.inf)
        kept.on_phase = on_phase
        self._spawn(self._keep_time())
        try:
            (await self._claim(kept)).release()
        except asyncio.CancelledError:
            await self._cancel(kept)
            raise
        finally:
            kept.on_phase = lambda phase: None
        assert kept.served is not None
        return kept.served

    def adopt(self, model: ServedModel) -> Kept:
        """Serve a model that was built elsewhere and is started."""
        kept = Kept(model.name, None, frozenset({model.name, *model.aliases}), model.path)
        kept.state, kept.served, kept.card, kept.last_used_s = "ready", model, model.card, self._clock()
        self.kept.append(kept)
        return kept

    def expect(self, name: str) -> Kept:
        """A model that somebody else is loading."""
        kept = Kept(name, None, frozenset({name}), state="loading")
        self.kept.append(kept)
        return kept

    async def close(self) -> None:
        """End running requests with an error and give the memory back. Idempotent."""
        self._settings, self._closing = None, True
        for task in list(self._tasks):
            task.cancel()
        for kept in self.kept:
            if kept.is_coming:
                await self._cancel(kept)
        for kept in list(self.kept):
            await self._drop(kept)
        self.kept.clear()

    async def tick(self) -> None:
        """Unload what nobody has asked for within its keep-alive time. Waits for nobody: there will be another tick."""
        for kept in list(self.kept):
            if kept.expires_in_s(self._clock()) == 0 and not kept.num_leases and not self._turn.locked():
                async with self._turn:
                    log.info("model idle name=%s keep_alive=%.0fs", kept.name, kept.keep_alive_s)
                    await self._drop(kept)

    async def _keep_time(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            await self.tick()

    # From a name to a model -------------------------------------------------------------------------------------

    async def _named(self, name: str | None, task: Task = "generate", *, anywhere: bool = False) -> Kept:
        kept = self._known(name) if name else self._default_for(task)
        if kept is not None:
            return kept
        if not name:
            raise ModelLoading("No model is loaded.", "Name one that is installed.")
        settings = self._settings
        if settings is None:
            raise self._not_found(name)
        table = settings.table(name)
        if table is not None:
            return self._remember(settings.of_model(name), name)
        if not anywhere and (not settings.server.on_demand or name.startswith((".", "/", "~"))):
            raise self._not_found(name)
        try:
            found = await asyncio.to_thread(self._road.resolve, name)
        except ModelNotFound as error:
            raise (error if anywhere else self._not_found(name)) from None
        if found.source == "path" and not anywhere:
            raise self._not_found(name)  # a path of this machine is the operator's business
        same = self._known(name) or next((kept for kept in self.kept if kept.path == found.path), None)
        if same is not None:  # asked for under another of its names, or meanwhile by another request
            same.names |= {name}
            return same
        short = short_name(found.name)
        names = (found.name,) if self._known(short) is not None else ()
        kept = self._remember(settings.of_model(name, names), short if not names else found.name)
        kept.names |= {name, found.name}
        kept.path = found.path
        return kept

    @staticmethod
    def _used_last(models: Sequence[Kept]) -> Kept | None:
        rank = {"ready": 2, "failed": 0}
        return max(models, key=lambda kept: (rank.get(kept.state, 1), kept.last_used_s), default=None)

    def _default_for(self, task: Task) -> Kept | None:
        """Among the models that do what is asked for; where none is known to, any, which then says what it does."""
        able = [kept for kept in self.kept if kept.card is not None and kept.card.task == task]
        return self._used_last(able) or self.default

    def _known(self, name: str) -> Kept | None:
        return next((kept for kept in self.kept if name in kept.names), None)

    def _require_known(self, name: str) -> Kept:
        kept = self._known(name)
        if kept is None:
            raise ModelNotLoaded(f"{name!r} is not loaded.", self._served_words(), "localllm ps", param="model")
        return kept

    def _remember(self, settings: Settings, asked: str, *, keep_alive_s: float = KEEP_ALIVE_S) -> Kept:
        """A model that may be loaded from now on."""
        table = settings.table(asked)
        said = [table.keep_alive if table else None, settings.server.keep_alive, keep_alive_s]
        names = settings.server.served_model_name or (asked,)
        kept = Kept(names[0], settings, frozenset(names))
        kept.pinned = table.pin if table else False
        kept.keep_alive_s = next(seconds for seconds in said if seconds is not None)
        self.kept.append(kept)
        return kept

    def _not_found(self, name: str) -> ModelNotFound:
        hint = "GET /v1/models lists what is served and what could be loaded."
        return ModelNotFound(f"The model {name!r} is not served here.", self._served_words(), hint, param="model")

    def _served_words(self) -> str:
        names = [kept.name for kept in self.kept if kept.state not in ("unloaded", "failed")]
        return f"Served: {', '.join(names) or 'none'}."

    # Up ---------------------------------------------------------------------------------------------------------

    async def _claim(self, kept: Kept) -> Lease:
        kept.last_used_s = self._clock()
        if kept.is_up and kept.served is not None:
            return kept.lease(kept.served, self._released)
        if kept.settings is None:
            self.require_working()
            raise ModelLoading(f"{kept.name} is {kept.state}.", "Try again in a moment.")
        waiter: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        kept.waiters.append(waiter)
        self._bring_up(kept)
        try:
            async with asyncio.timeout(WAIT_S):
                return await waiter
        except TimeoutError:
            phase = next(reversed(kept.phases.values()), None)
            where = f"It has come as far as: {phase.name} {phase.detail}." if phase else "It waits for its turn."
            raise ModelLoading(f"{kept.name} is not ready after {WAIT_S:.0f} s.", where, "Try again later.") from None
        except BaseException:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                waiter.result().release()  # it came in the same moment in which its reader left
            raise

    def _bring_up(self, kept: Kept) -> None:
        """Begin, unless that has been done: everybody who waits shares one load."""
        if not kept.is_coming:
            if kept.state != "unloading":
                kept.state = "loading"
            kept.task = asyncio.create_task(self._open(kept), name=f"load {kept.name}")

    async def _open(self, kept: Kept) -> None:
        """Load or wake in its turn, and tell everybody who waits. Raises nothing but a cancellation."""
        gone: list[Kept] = []
        try:
            async with self._turn:
                try:
                    await self._open_now(kept, gone)
                except BaseException:
                    kept.state = "sleeping" if kept.asleep is not None else "unloaded"
                    await self._bring_back(gone)
                    raise
        except asyncio.CancelledError:
            if kept.state == "loading":  # it still waited for its turn
                kept.state = "sleeping" if kept.asleep is not None else "unloaded"
            kept.refuse_waiters(LoadCancelled(f"The load of {kept.name} was cancelled."))
            raise
        except Exception as error:
            if not isinstance(error, LocalLLMError):
                log.exception("load failed name=%s", kept.name)
                why = f"{type(error).__name__}: {error}"
                error = LocalLLMError(f"{kept.name} could not be loaded.", why, "The log has the details.")
            kept.error, kept.failed_s = error, self._clock()
            kept.state = "sleeping" if kept.asleep is not None else "failed"
            log.warning("load failed name=%s error=%s", kept.name, error)
            kept.refuse_waiters(error)

    async def _open_now(self, kept: Kept, gone: list[Kept]) -> None:
        if not kept.is_up:
            if kept.served is not None:  # its engine has died
                await self._drop(kept)
            kept.state, kept.phases, kept.error = "loading", {}, None
            model = await self._make_room_and_load(kept, gone)
            await model.client.start()
            self._is_ready(kept, model)
        waiters, kept.waiters = kept.waiters, []
        assert kept.served is not None
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(kept.lease(kept.served, self._released))

    def _is_ready(self, kept: Kept, model: ServedModel) -> None:
        kept.served, kept.asleep, kept.card, kept.path = model, None, model.card, model.path
        kept.name, kept.names = model.name, kept.names | {model.name, *model.aliases}
        kept.state, kept.last_used_s = "ready", self._clock()
        kept.idle.set()
        kept.watch = asyncio.create_task(self._watch(model))
        gc.collect()
        gc.freeze()  # what is there now stays: a full collection would walk over it again and again, mid-step
        if len(self.ready) == 1:
            self._bare_bytes = psutil.Process().memory_info().rss - model.plan.weights_bytes
        log.info("model ready name=%s device=%s", kept.name, model.plan.device)

    async def _make_room_and_load(self, kept: Kept, gone: list[Kept]) -> ServedModel:
        assert kept.settings is not None
        limit = kept.settings.server.models_max
        while limit is not None and len(self.ready) >= limit:
            await self._evict_one(kept, gone, ModelsBusy(f"{kept.name} has no place.", f"--models-max is {limit}."))
        while True:
            idle = [each for each in self._candidates(kept) if not each.num_leases]
            beside = Beside(self._promised_bytes(), COMFORTABLE_CONTEXT if idle else 0)
            try:
                return await self._in_thread(kept, beside)
            except DoesNotFit as error:
                await self._evict_one(kept, gone, error)

    async def _in_thread(self, kept: Kept, beside: Beside) -> ServedModel:
        settings = kept.settings
        assert settings is not None
        event_loop, given_up = asyncio.get_running_loop(), threading.Event()

        def report(phase: Phase) -> None:
            """On the loading thread, which cannot be cancelled otherwise."""
            if given_up.is_set():
                raise EngineStopped("The load was given up.")
            event_loop.call_soon_threadsafe(kept.note, phase)

        def work() -> ServedModel:
            try:
                if kept.asleep is not None:
                    return self._road.wake(kept.asleep, settings, report, beside)
                return self._road.build(settings, report, beside)
            except BaseException as error:
                _let_go(error)
                raise

        # A thread of its own that ends with the load: libgomp keeps a team of workers for every thread that has ever
        # computed, and with an idle second team it counts more threads than cores and lets the engine's sleep.
        loader = ThreadPoolExecutor(1, "localllm-loader")
        job = event_loop.run_in_executor(loader, work)
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            given_up.set()
            while not job.done():  # its memory is taken until it ends: nobody else may plan with it
                with suppress(asyncio.CancelledError):
                    await asyncio.wait({job})
            if job.exception() is None:
                job.result().close()
            raise
        finally:
            loader.shutdown(wait=False)

    async def _watch(self, model: ServedModel) -> None:
        error = await model.client.device_lost()
        if self._lost is None:
            self._lost = asyncio.get_running_loop().create_future()
        if not self._lost.done():
            self._lost.set_result(error)

    def _promised_bytes(self) -> int:
        """RAM that the models here may still take: a KV cache on a CPU is taken page by page, as it is written."""
        plans = [model.plan for model in self.ready if model.plan.device == "cpu"]
        promised = sum(plan.kv_bytes + plan.activation_bytes for plan in plans)
        if not promised or self._bare_bytes is None:
            return promised
        weights = sum(plan.weights_bytes for plan in plans)
        weights += sum(kept.card.plan.weights_bytes for kept in self.kept if kept.asleep is not None and kept.card)
        touched = psutil.Process().memory_info().rss - self._bare_bytes - weights
        return int(max(0, promised - max(0, touched)))

    # Down -------------------------------------------------------------------------------------------------------

    def _candidates(self, kept: Kept) -> list[Kept]:
        """Who could give way to a model, in this order: by LRU, those without requests first."""
        others = [each for each in self.kept if each is not kept and not each.pinned and each.settings is not None]
        on_gpu = self._wants_gpu(kept)
        awake = [
            each for each in others
            if each.state == "ready" and each.served and (each.served.plan.device != "cpu") == on_gpu
        ]  # fmt: skip
        asleep = [] if on_gpu else [each for each in others if each.state == "sleeping" and not each.is_coming]
        return sorted([*awake, *asleep], key=lambda each: (each.num_leases > 0, each.last_used_s))

    def _wants_gpu(self, kept: Kept) -> bool:
        assert kept.settings is not None
        device = kept.settings.engine.device
        if device == "auto":
            return any(model.plan.device != "cpu" for model in self.ready)
        return device != "cpu"

    async def _evict_one(self, kept: Kept, gone: list[Kept], otherwise: LocalLLMError) -> None:
        candidates = self._candidates(kept)
        if not candidates:
            pinned = [each.name for each in self.kept if each.pinned and each.state in ("ready", "sleeping")]
            if pinned:
                otherwise.why += f" Pinned beside it: {', '.join(pinned)}."
            raise otherwise
        victim = candidates[0]
        log.info("model gives way name=%s to=%s requests=%d", victim.name, kept.name, victim.num_leases)
        if victim.state == "ready":
            await self._drain(victim, MAKE_ROOM_S, give_up=True)
            if victim.pinned:  # meanwhile
                victim.state = "ready"
                await self._evict_one(kept, gone, otherwise)
                return
        gone.append(victim)
        if victim.state != "sleeping" and self._has_room_on_host(victim):
            await self._lay_down(victim)
        else:
            await self._drop(victim)

    def _has_room_on_host(self, kept: Kept) -> bool:
        """Weights of a GPU may wait in host memory: to load them again takes seconds, to copy them back does not."""
        plan = kept.served.plan if kept.served is not None else None
        if plan is None or plan.device == "cpu" or not _can_sleep(kept):
            return False
        memory = psutil.virtual_memory()
        return bool(memory.available - plan.weights_bytes > 0.1 * memory.total)

    async def _drain(self, kept: Kept, limit_s: float, *, give_up: bool = False) -> None:
        """Let its requests end; new ones wait. give_up: raise `ModelsBusy` when they take too long."""
        if kept.state != "ready":
            return
        kept.state = "unloading"
        try:
            async with asyncio.timeout(limit_s):
                while kept.num_leases:
                    await kept.idle.wait()
        except TimeoutError:
            if give_up:
                kept.state = "ready"
                why = f"{kept.num_leases} requests of {kept.name} were still running after {limit_s:.0f} s."
                raise ModelsBusy("There is no room for the model.", why, "Try again later.") from None
        except BaseException:
            kept.state = "ready"
            raise

    async def _lay_down(self, kept: Kept) -> None:
        """Weights to the host, everything else goes."""
        await _to_the_end(self._lay_down_now(kept))

    async def _lay_down_now(self, kept: Kept) -> None:
        served, kept.served, kept.state = kept.served, None, "unloading"
        assert served is not None
        self._stop_watching(kept)
        await served.client.stop()
        gc.unfreeze()
        try:
            kept.asleep = await asyncio.to_thread(self._road.sleep, served)
            kept.state = "sleeping"
        except Exception as error:
            log.exception("sleep failed name=%s", kept.name)
            await asyncio.to_thread(served.close)
            kept.state = "unloaded"
            raise LocalLLMError(f"{kept.name} could not be put to sleep.", str(error)) from error
        finally:
            del served
            await self._tidy()

    async def _drop(self, kept: Kept) -> None:
        """Everything it holds goes. Requests that still run end with an error."""
        await _to_the_end(self._drop_now(kept))

    async def _drop_now(self, kept: Kept) -> None:
        served, kept.served, kept.asleep, kept.state = kept.served, None, None, "unloading"
        self._stop_watching(kept)
        gc.unfreeze()
        if served is not None:
            await served.client.stop()
            await asyncio.to_thread(served.close)
            del served
        kept.state = "unloaded"
        if kept.settings is None and kept in self.kept:
            self.kept.remove(kept)
        await self._tidy()

    async def _tidy(self) -> None:
        gc.collect()  # an engine and its callbacks refer to each other
        await asyncio.to_thread(self._road.give_back_memory)
        if self.ready:
            gc.freeze()

    async def _bring_back(self, gone: list[Kept]) -> None:
        """The load has failed: the models that gave way to it serve again."""
        for kept in [] if self._closing else gone:
            try:
                await self._open_now(kept, [])
            except LocalLLMError as error:
                kept.error, kept.failed_s = error, self._clock()
                kept.state = "sleeping" if kept.asleep is not None else "failed"
                log.warning("model did not come back name=%s error=%s", kept.name, error)

    async def _cancel(self, kept: Kept) -> None:
        task = kept.task
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    def _released(self, kept: Kept) -> None:
        kept.last_used_s = self._clock()
        if kept.keep_alive_s == 0 and not kept.num_leases:
            self._spawn(self.tick())

    def _stop_watching(self, kept: Kept) -> None:
        if kept.watch is not None:
            kept.watch.cancel()
            kept.watch = None

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _can_sleep(kept: Kept) -> bool:
    return kept.served is not None and kept.served.task == "generate"


def _let_go(error: BaseException | None) -> None:
    """An error is kept for those who ask later; the frames of its traceback would keep the weights with it."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


async def _to_the_end(work: Coroutine[None, None, None]) -> None:
    """Cancelled or not: half a way down, memory would belong to nobody."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
