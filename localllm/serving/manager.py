"""Load models when a request names them, and put them to sleep or unload them when others need the memory.

One change happens at a time: a load, a sleep or an unload waits for its turn. Requests for the same model share one
load. A load that does not fit evicts other models by LRU: models without requests first, then models with running
requests, which may finish. Pinned models are never evicted. If the load then fails, the evicted models are loaded
again. A model without requests for its keep-alive time is unloaded. One model at a time can be lent: a tuning run
needs its weights alone.
Does not know: how a model is loaded (build.py) or sleeps (sleep.py), HTTP, terminals.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

import psutil

from localllm.config.settings import Settings, Task
from localllm.errors import DeviceLost, DoesNotFit, LocalLLMError, ModelNotFound, UnsupportedOption
from localllm.serving.adapters import AdapterRefused, LoadedAdapter
from localllm.serving.build import build_engine
from localllm.serving.entry import (
    Lease,
    LoadCancelled,
    ModelEntry,
    ModelLoading,
    ModelNotLoaded,
    ModelsBusy,
    ModelStatus,
    ModelTuning,
)
from localllm.serving.eviction import can_sleep, candidates, has_room_on_host, ready, reserved_bytes
from localllm.serving.loading import Loader, clear_tracebacks, in_compute_thread, load_in_thread
from localllm.serving.phases import OnPhase
from localllm.serving.register import Register
from localllm.serving.reopen import BareModel
from localllm.serving.served import LoadLimits, ServedModel
from localllm.serving.sleep import put_to_sleep, wake_up

log = logging.getLogger(__name__)

WAIT_S = 300.0  # the longest time a request waits for its model
DRAIN_S = 30.0  # time for running requests to finish after a sleep or unload command
EVICTION_DRAIN_S = 120.0  # time for running requests to finish when another model needs the memory
STABLE_S = 60.0  # an engine that ran at least this long before it ended by itself is loaded again at once
RETRY_S = 5.0  # after a failed load, requests do not try again for this long
TICK_S = 0.5
COMFORTABLE_CONTEXT = 8192  # idle models are evicted to reach a context of this length
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Loan:
    """A model whose weights are lent, and the task that borrowed them."""

    entry: ModelEntry
    task: asyncio.Task[Any]


class ModelManager:
    """The models of this server."""

    def __init__(self, loader: Loader | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._loader = loader or Loader(build_engine, put_to_sleep, wake_up)
        self.register = Register(self._loader)
        self._clock = clock
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._lost: asyncio.Future[DeviceLost] | None = None
        self._baseline_bytes: int | None = None  # RSS of this process without any model
        self._closing = False
        self._loan: Loan | None = None

    # Queries ----------------------------------------------------------------------------------------------------

    @property
    def default(self) -> ModelEntry | None:
        """The model for a request without a name: the last used ready model, else the last used of all models."""
        return self.register.default

    @property
    def current(self) -> ServedModel | None:
        """The ready model that was used last."""
        entry = self.default
        return entry.served if entry is not None and entry.state == "ready" else None

    @property
    def entries(self) -> list[ModelEntry]:
        """All known models, in any state."""
        return self.register.entries

    @property
    def ready(self) -> list[ServedModel]:
        return ready(self.entries)

    @property
    def num_open(self) -> int:
        return sum(model.client.num_open for model in self.ready)

    def statuses(self) -> list[ModelStatus]:
        """Return the status of every known model, ready models first."""
        order = ("ready", "tuning", "loading", "unloading", "sleeping", "failed", "unloaded")
        now_s = self._clock()
        return [entry.status(now_s) for entry in sorted(self.entries, key=lambda entry: order.index(entry.state))]

    def require_working(self) -> None:
        """Raise the error that a request without a name would get now: still loading, being tuned, or load failed."""
        entry = self.default
        if entry is None or entry.state == "loading":
            raise ModelLoading(f"{entry.name if entry else 'The model'} is loading.", "Try again in a moment.")
        if entry.state == "tuning":
            self._refuse_while_lent()
        if entry.state == "failed" and entry.error is not None:
            raise entry.error.with_traceback(None)  # raised again and again: its traceback would grow for ever

    async def device_lost(self) -> DeviceLost:
        """Wait until a model's device is lost, which ends the process."""
        if self._lost is None:
            self._lost = asyncio.get_running_loop().create_future()
        return await asyncio.shield(self._lost)

    # Acquire, load, unload --------------------------------------------------------------------------------------

    async def acquire(
        self, name: str | None = None, task: Task = "generate", *, keep_alive_s: float | None = None
    ) -> Lease:
        """Return a lease on the model of that name, and load or wake the model if needed.

        Without a name, the model is the last used one that does `task`. keep_alive_s: idle time to live from now on.
        Raises `ModelNotFound`, `ModelLoading` after `WAIT_S`, `ModelsBusy`, `LoadCancelled`, and whatever a load
        raises.
        """
        entry = await self.register.find_or_add(name, task)
        if keep_alive_s is not None:
            entry.keep_alive_s = keep_alive_s
        if entry.state == "failed" and entry.error is not None and self._clock() - entry.failed_s < RETRY_S:
            raise entry.error.with_traceback(None)
        lease = await self._claim(entry)
        if name and name not in entry.names and not entry.has_adapter(name):  # unloaded while the model was coming
            lease.release()
            raise self.register.not_found(name)
        return lease

    async def load(
        self, name: str, *, pin: bool | None = None, keep_alive_s: float | None = None, wait: bool = True
    ) -> ModelStatus:
        """Load or wake a model; with `wait`, until it is ready. The name may be a path: only for operators."""
        entry = await self.register.find_or_add(name, anywhere=True)
        entry.pinned = entry.pinned if pin is None else pin
        entry.keep_alive_s = entry.keep_alive_s if keep_alive_s is None else keep_alive_s
        if wait:
            (await self._claim(entry)).release()
        elif not entry.is_running and entry.settings is not None:
            self._start_load(entry)
        return entry.status(self._clock())

    async def wake(self, name: str) -> ModelStatus:
        """Wake a sleeping model, and wait until it is ready."""
        entry = self.register.require(name)
        if entry.state in ("unloaded", "failed"):
            raise ModelNotLoaded(f"{entry.name} is not asleep: it is {entry.state}.", "Load it instead.", param="model")
        (await self._claim(entry)).release()
        return entry.status(self._clock())

    async def unload(self, name: str) -> ModelStatus:
        """Unload a model. Cancel its load; let running requests finish for `DRAIN_S`, then end them."""
        entry = self.register.require(name)
        self._refuse_while_lent()
        entry.pinned = False
        if entry.is_loading and entry.state == "loading":
            await self._cancel(entry)
        async with self._turn:
            await self._drain(entry, DRAIN_S)
            await self._unload(entry)
        return entry.status(self._clock())

    async def sleep(self, name: str) -> ModelStatus:
        """Keep the weights in host memory and free everything else. Running requests may finish for `DRAIN_S`."""
        entry = self.register.require(name)
        self._refuse_while_lent()
        async with self._turn:
            if entry.state == "ready" and not can_sleep(entry):
                why = "Only models that generate text support sleep."
                raise UnsupportedOption(f"{entry.name} cannot sleep.", why, "Unload it.", param="model")
            if entry.state == "ready":
                await self._drain(entry, DRAIN_S)
                await self._put_to_sleep(entry)
        if entry.state != "sleeping":
            raise ModelNotLoaded(f"{entry.name} cannot sleep: it is {entry.state}.", "Load it first.", param="model")
        return entry.status(self._clock())

    def pin(self, name: str, pinned: bool = True) -> ModelStatus:
        """Pin or unpin a model. A pinned model is never evicted; only `unload` by name unloads it."""
        entry = self.register.require(name)
        entry.pinned = pinned
        return entry.status(self._clock())

    async def load_adapter(self, name: str, path: str, base: str | None = None) -> LoadedAdapter:
        """Load a LoRA adapter into a model, and load or wake that model if needed. Default: the model used last.

        Raises `AdapterRefused`, `UnsupportedOption`, and what `acquire` and the adapter's files raise.
        """
        if await self.register.is_taken(name):
            why = "A model or an adapter has this name."
            raise AdapterRefused(f"The name {name!r} is taken.", why, "Choose another name.", param="lora_name")
        with await self.acquire(base) as model:
            return await asyncio.to_thread(model.require_adapters().load, name, path)

    async def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter once its running requests have ended. Raises `ModelNotFound`, `AdapterBusy`."""
        entry = next((entry for entry in self.entries if entry.has_adapter(name)), None)
        if entry is None or entry.adapters is None:
            raise ModelNotFound(
                f"The adapter {name!r} is not loaded.", hint="GET /v1/models lists them.", param="lora_name"
            )
        await entry.adapters.unload_async(name)

    # Start, tick, close -----------------------------------------------------------------------------------------

    async def start(self, settings: Settings, on_phase: OnPhase = lambda phase: None) -> ServedModel:
        """Load the first model. `on_phase` is called on this event loop. Raises what a load raises."""
        self.register.settings, self._closing = settings, False
        own = settings.of_first_model()
        entry = self.register.add(own, settings.engine.model, keep_alive_s=math.inf)
        entry.on_phase = on_phase
        self._spawn(self._tick_forever())
        try:
            (await self._claim(entry)).release()
        except asyncio.CancelledError:
            await self._cancel(entry)
            raise
        finally:
            entry.on_phase = lambda phase: None
        assert entry.served is not None
        return entry.served

    def adopt(self, model: ServedModel) -> ModelEntry:
        """Serve a model that was built elsewhere and is already started."""
        entry = ModelEntry(model.name, None, frozenset({model.name, *model.aliases}), model.path)
        entry.state, entry.served, entry.card, entry.last_used_s = "ready", model, model.card, self._clock()
        self.entries.append(entry)
        return entry

    def expect(self, name: str) -> ModelEntry:
        """Register a model that is being loaded elsewhere."""
        entry = ModelEntry(name, None, frozenset({name}), state="loading")
        self.entries.append(entry)
        return entry

    async def close(self) -> None:
        """End running requests with an error and free the memory. Idempotent."""
        self.register.settings, self._closing = None, True
        for task in list(self._tasks):
            task.cancel()
        if self._loan is not None:
            self._loan.task.cancel()
            await asyncio.wait({self._loan.task})
        for entry in self.entries:
            if entry.is_loading:
                await self._cancel(entry)
        for entry in list(self.entries):
            await self._unload(entry)
        self.entries.clear()

    async def tick(self) -> None:
        """Unload models whose keep-alive time is over. While a load or unload runs, leave that to the next tick."""
        for entry in list(self.entries):
            if self._has_expired(entry) and not self._turn.locked():
                async with self._turn:
                    if self._has_expired(entry):  # a request may have arrived while this waited for its turn
                        log.info("model idle name=%s keep_alive=%.0fs", entry.name, entry.keep_alive_s)
                        await self._unload(entry)

    def _has_expired(self, entry: ModelEntry) -> bool:
        return entry.expires_in_s(self._clock()) == 0 and not entry.num_leases

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            await self.tick()

    # Loading ----------------------------------------------------------------------------------------------------

    async def _claim(self, entry: ModelEntry) -> Lease:
        entry.last_used_s = self._clock()
        if entry.is_running and entry.served is not None:
            return entry.lease(entry.served, self._released)
        self._refuse_while_lent()
        if entry.settings is None:
            self.require_working()
            raise ModelLoading(f"{entry.name} is {entry.state}.", "Try again in a moment.")
        waiter: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        entry.waiters.append(waiter)
        self._start_load(entry)
        try:
            async with asyncio.timeout(WAIT_S):
                return await waiter
        except TimeoutError:
            phase = next(reversed(entry.phases.values()), None)
            where = (
                f"The present phase is {phase.name}: {phase.detail}."
                if phase
                else "It is waiting for another load to finish."
            )
            raise ModelLoading(f"{entry.name} is not ready after {WAIT_S:.0f} s.", where, "Try again later.") from None
        except BaseException:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                waiter.result().release()  # the load ended in the same moment in which the request was cancelled
            raise

    def _start_load(self, entry: ModelEntry) -> None:
        """Start the load, unless it is already running: all waiting requests share it."""
        if not entry.is_loading:
            if entry.state != "unloading":
                entry.state = "loading"
            entry.task = asyncio.create_task(self._load_in_turn(entry), name=f"load {entry.name}")

    async def _load_in_turn(self, entry: ModelEntry) -> None:
        """Load or wake the model when its turn comes, and resolve its waiters. Raises only `CancelledError`."""
        evicted: list[ModelEntry] = []
        try:
            async with self._turn:
                try:
                    await self._load_now(entry, evicted)
                except BaseException:
                    entry.state = "sleeping" if entry.asleep is not None else "unloaded"
                    await self._reload_evicted(evicted)
                    raise
        except asyncio.CancelledError:
            if entry.state == "loading":  # it was still waiting for its turn
                entry.state = "sleeping" if entry.asleep is not None else "unloaded"
            entry.refuse_waiters(LoadCancelled(f"The load of {entry.name} was cancelled."))
            raise
        except Exception as error:
            if not isinstance(error, LocalLLMError):
                log.exception("load failed name=%s", entry.name)
                why = f"{type(error).__name__}: {error}"
                error = LocalLLMError(f"{entry.name} could not be loaded.", why, "The log has the details.")
            entry.error, entry.failed_s = error, self._clock()
            entry.state = "sleeping" if entry.asleep is not None else "failed"
            log.warning("load failed name=%s error=%s", entry.name, error)
            entry.refuse_waiters(error)

    async def _load_now(self, entry: ModelEntry, evicted: list[ModelEntry]) -> None:
        if not entry.is_running:
            if entry.served is not None:  # its engine has ended
                await self._unload(entry)
            entry.state, entry.phases, entry.error = "loading", {}, None
            model = await self._evict_and_load(entry, evicted)
            await model.client.start()
            self._mark_ready(entry, model)
        waiters, entry.waiters = entry.waiters, []
        assert entry.served is not None
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(entry.lease(entry.served, self._released))

    def _mark_ready(self, entry: ModelEntry, model: ServedModel) -> None:
        woken = entry.asleep is not None
        entry.served, entry.asleep, entry.card, entry.path = model, None, model.card, model.path
        entry.name, entry.names = model.name, entry.names | {model.name, *model.aliases}
        entry.state, entry.last_used_s = "ready", self._clock()
        entry.idle.set()
        entry.ready_s = entry.last_used_s
        entry.watch = asyncio.create_task(self._watch(entry, model))
        if not woken:  # takes 0.1 s or more, and a request waits for a waking model
            gc.collect()
        gc.freeze()  # full collections would walk over these long-lived objects again and again, mid-step
        if len(self.ready) == 1:
            self._baseline_bytes = psutil.Process().memory_info().rss - model.plan.weights_bytes
        log.info("model ready name=%s device=%s", entry.name, model.plan.device)

    async def _evict_and_load(self, entry: ModelEntry, evicted: list[ModelEntry]) -> ServedModel:
        assert entry.settings is not None
        limit = entry.settings.server.models_max
        while limit is not None and len(self.ready) >= limit:
            await self._evict_one(
                entry, evicted, ModelsBusy(f"There is no room for {entry.name}.", f"--models-max is {limit}.")
            )
        while True:
            idle = [each for each in candidates(entry, self.entries) if not each.num_leases]
            limits = LoadLimits(reserved_bytes(self.entries, self._baseline_bytes), COMFORTABLE_CONTEXT if idle else 0)
            try:
                return await load_in_thread(self._loader, entry, limits)
            except DoesNotFit as error:
                await self._evict_one(entry, evicted, error)

    async def _watch(self, entry: ModelEntry, model: ServedModel) -> None:
        error = await model.client.ended()
        if isinstance(error, DeviceLost):
            self._set_device_lost(error)
        else:
            self._spawn(self._after_crash(entry, model, error))

    async def _after_crash(self, entry: ModelEntry, model: ServedModel, error: LocalLLMError) -> None:
        """Free the memory of an engine that ended by itself, and load its model again.

        An engine that ended within `STABLE_S` of its load is not loaded again; the next request tries.
        """
        async with self._turn:
            if entry.served is not model or self._closing:  # already unloaded, or loaded again by a request
                return
            lasted_s = self._clock() - entry.ready_s
            log.error("engine ended name=%s after=%.0fs error=%s", entry.name, lasted_s, error)
            await self._unload(entry)
            entry.state, entry.error, entry.failed_s = "failed", error, self._clock()
        if lasted_s >= STABLE_S and entry.settings is not None and not self._closing:
            self._start_load(entry)

    def _set_device_lost(self, error: DeviceLost) -> None:
        if self._lost is None:
            self._lost = asyncio.get_running_loop().create_future()
        if not self._lost.done():
            self._lost.set_result(error)

    # Lending and reopening --------------------------------------------------------------------------------------

    async def lend(self, name: str, work: Callable[[BareModel, Settings], Result], stop: Callable[[], None]) -> Result:
        """Run `work` on a model's weights, on a thread of its own, and serve the model as before afterwards, even on
        failure.

        Running requests may finish first. Meanwhile new requests are refused, and no other model is loaded or unloaded.
        stop: makes `work` return soon; called when this call is cancelled or the server ends. Raises `ModelTuning` for
        a second loan, `ModelsBusy` when requests do not end within `DRAIN_S`, and what a load and `work` raise.
        """
        entry = await self._require_reopenable(name)
        self._refuse_while_lent()
        task = asyncio.current_task()
        assert task is not None
        self._loan = Loan(entry, task)
        try:
            async with self._turn:
                await self._wait_until_idle(entry)
                return await _uncancelled(self._lend_now(entry, work), stop)
        finally:
            self._loan = None

    async def reopen(self, name: str, tuned: Mapping[str, Any]) -> ModelStatus:
        """Serve a model with the settings of a profile, on the weights already in memory. Its requests wait meanwhile.

        On failure the model is served with its previous settings, and the error is raised. Raises `ModelsBusy` as
        `lend` does.
        """
        entry = await self._require_reopenable(name)
        async with self._turn:
            await self._wait_until_idle(entry)
            await _uncancelled(self._reopen_now(entry, tuned))
        return entry.status(self._clock())

    async def _require_reopenable(self, name: str) -> ModelEntry:
        self._refuse_while_lent()
        entry = self.register.require(name)
        with await self._claim(entry) as model:
            model.require("generate")
        if entry.settings is None:
            raise UnsupportedOption(
                f"{entry.name} cannot be opened again.", "It was not loaded by this server.", param="model"
            )
        return entry

    async def _wait_until_idle(self, entry: ModelEntry) -> None:
        """Wait until the model has no requests; new ones wait. Raises `ModelsBusy`, `ModelNotLoaded`."""
        await self._drain(entry, DRAIN_S, give_up=f"{entry.name} is busy.")
        if entry.served is None:
            raise ModelNotLoaded(f"{entry.name} is {entry.state}.", "Its state changed while this request waited.")

    def _refuse_while_lent(self) -> None:
        if self._loan is not None:
            name = self._loan.entry.name
            why = "A tuning run is using its weights. No model is loaded or unloaded until the run ends."
            raise ModelTuning(f"{name} is being tuned.", why, "Try again after the run, or cancel the run at /tune.")

    async def _lend_now(self, entry: ModelEntry, work: Callable[[BareModel, Settings], Result]) -> Result:
        assert entry.served is not None
        assert entry.settings is not None
        tuned = entry.served.tuned
        bare = await self._close_engine(entry, "tuning")
        try:
            return await in_compute_thread(partial(work, bare, entry.settings))
        except BaseException as error:
            clear_tracebacks(error)
            if isinstance(error, DeviceLost):
                self._set_device_lost(error)
            raise
        finally:
            if self._closing:
                entry.state = "unloaded"
            else:
                await self._open_engine(entry, bare, tuned)

    async def _reopen_now(self, entry: ModelEntry, tuned: Mapping[str, Any]) -> None:
        assert entry.served is not None
        before = entry.served.tuned
        bare = await self._close_engine(entry, "loading")
        error = await self._open_engine(entry, bare, tuned)
        if error is not None:
            await self._open_engine(entry, bare, before)
            raise error

    async def _close_engine(self, entry: ModelEntry, state: Literal["tuning", "loading"]) -> BareModel:
        """Close the engine and keep the weights."""
        served, entry.served = entry.served, None
        assert served is not None
        self._stop_watching(entry)
        await served.client.stop()
        gc.unfreeze()
        entry.state = state
        bare = await asyncio.to_thread(self._loader.close_engine, served)
        del served
        await self._collect_garbage()
        return bare

    async def _open_engine(self, entry: ModelEntry, bare: BareModel, tuned: Mapping[str, Any]) -> LocalLLMError | None:
        """Open an engine with these settings. On failure mark the model as failed, and return the error."""
        assert entry.settings is not None
        config = replace(entry.settings.engine, **tuned)
        known = self._baseline_bytes + bare.weights_bytes if self._baseline_bytes is not None else None
        limits = LoadLimits(reserved_bytes(self.entries, known))
        try:
            work = partial(self._loader.open_engine, bare, config, lambda phase: None, limits)
            model = replace(await in_compute_thread(work), tuned=tuned)
            await model.client.start()
        except Exception as error:
            clear_tracebacks(error)
            why = error if isinstance(error, LocalLLMError) else LocalLLMError(f"{entry.name} stopped.", f"{error}.")
            log.warning("model could not be opened again name=%s error=%s", entry.name, error)
            entry.state, entry.error, entry.failed_s = "failed", why, self._clock()
            await self._collect_garbage()
            return why
        entry.error = None
        self._mark_ready(entry, model)
        return None

    # Unloading --------------------------------------------------------------------------------------------------

    async def _evict_one(self, entry: ModelEntry, evicted: list[ModelEntry], otherwise: LocalLLMError) -> None:
        others = candidates(entry, self.entries)
        if not others:
            pinned = [each.name for each in self.entries if each.pinned and each.state in ("ready", "sleeping")]
            if pinned:
                otherwise.why += f" Pinned models: {', '.join(pinned)}."
            raise otherwise
        victim = others[0]
        log.info("model evicted name=%s for=%s requests=%d", victim.name, entry.name, victim.num_leases)
        if victim.state == "ready":
            await self._drain(victim, EVICTION_DRAIN_S, give_up="There is no room for the model.")
            if victim.pinned:  # pinned while it drained
                victim.state = "ready"
                await self._evict_one(entry, evicted, otherwise)
                return
        evicted.append(victim)
        if victim.state != "sleeping" and has_room_on_host(victim):
            await self._put_to_sleep(victim)
        else:
            await self._unload(victim)

    async def _drain(self, entry: ModelEntry, limit_s: float, *, give_up: str = "") -> None:
        """Wait until the running requests end; new ones wait. give_up: text of a `ModelsBusy` after the time limit."""
        if entry.state != "ready":
            return
        entry.state = "unloading"
        try:
            async with asyncio.timeout(limit_s):
                while entry.num_leases:
                    await entry.idle.wait()
        except TimeoutError:
            if give_up:
                entry.state = "ready"
                why = f"{entry.num_leases} requests of {entry.name} were still running after {limit_s:.0f} s."
                raise ModelsBusy(give_up, why, "Try again later.") from None
        except BaseException:
            entry.state = "ready"
            raise

    async def _put_to_sleep(self, entry: ModelEntry) -> None:
        """Put the model to sleep: move its weights to the host and free everything else."""
        entry.state = "unloading"  # set it here: a request that arrives before the task below starts must wait
        await _uncancelled(self._put_to_sleep_now(entry))

    async def _put_to_sleep_now(self, entry: ModelEntry) -> None:
        served, entry.served, entry.state = entry.served, None, "unloading"
        assert served is not None
        self._stop_watching(entry)
        await served.client.stop()
        gc.unfreeze()
        try:
            entry.asleep = await asyncio.to_thread(self._loader.sleep, served)
            entry.state = "sleeping"
        except Exception as error:
            log.exception("sleep failed name=%s", entry.name)
            await asyncio.to_thread(served.close)
            entry.state = "unloaded"
            raise LocalLLMError(f"{entry.name} could not be put to sleep.", str(error)) from error
        finally:
            del served
            await self._collect_garbage()

    async def _unload(self, entry: ModelEntry) -> None:
        """Unload the model. Requests that still run end with an error."""
        entry.state = "unloading"  # set it here: a request that arrives before the task below starts must wait
        await _uncancelled(self._unload_now(entry))

    async def _unload_now(self, entry: ModelEntry) -> None:
        served, entry.served, entry.asleep, entry.state = entry.served, None, None, "unloading"
        self._stop_watching(entry)
        gc.unfreeze()
        if served is not None:
            await served.client.stop()
            await asyncio.to_thread(served.close)
            del served
        entry.state = "unloaded"
        if entry.settings is None and entry in self.entries:
            self.entries.remove(entry)
        await self._collect_garbage()

    async def _collect_garbage(self) -> None:
        gc.collect()  # an engine and its callbacks refer to each other
        await asyncio.to_thread(self._loader.release_cached_memory)
        if self.ready:
            gc.freeze()

    async def _reload_evicted(self, evicted: list[ModelEntry]) -> None:
        """Load the models again that were evicted for a load that failed."""
        for entry in [] if self._closing else evicted:
            try:
                await self._load_now(entry, [])
            except LocalLLMError as error:
                entry.error, entry.failed_s = error, self._clock()
                entry.state = "sleeping" if entry.asleep is not None else "failed"
                log.warning("model could not be restored name=%s error=%s", entry.name, error)

    async def _cancel(self, entry: ModelEntry) -> None:
        task = entry.task
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    def _released(self, entry: ModelEntry) -> None:
        entry.last_used_s = self._clock()
        if entry.keep_alive_s == 0 and not entry.num_leases:
            self._spawn(self.tick())

    def _stop_watching(self, entry: ModelEntry) -> None:
        if entry.watch is not None:
            entry.watch.cancel()
            entry.watch = None

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _uncancelled(work: Coroutine[Any, Any, Result], on_cancel: Callable[[], None] = lambda: None) -> Result:
    """Finish `work` even if the caller is cancelled: a half-done unload would leave memory that no model owns."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        on_cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # mark its exception as retrieved: the cancelled caller does not need it
        raise
