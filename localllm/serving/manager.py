"""Load models when a request names them, and put them to sleep or unload them when others need the memory.

One change happens at a time: a load, a sleep or an unload waits for its turn. Requests for the same model share one
load. A load that does not fit evicts other models by LRU: models without requests first, then models with running
requests, which may finish. Pinned models are never evicted. If the load then fails, the evicted models are loaded
again. A model without requests for its keep-alive time is unloaded. The changes of state themselves are in
transitions.py; lending.py lends one model at a time to a tuning run.
Does not know: how a model is loaded (build.py) or sleeps (reopen.py), HTTP, terminals.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine

from localllm.config.settings import Settings, Task
from localllm.errors import DeviceLost, DoesNotFit, LocalLLMError, ModelNotFound, RanksLost, UnsupportedOption
from localllm.serving.adapters import AdapterRefused, LoadedAdapter
from localllm.serving.build import build_engine
from localllm.serving.entry import (
    LoadCancelled,
    ModelEntry,
    ModelLoading,
    ModelNotLoaded,
    ModelsBusy,
    ModelStatus,
)
from localllm.serving.eviction import can_sleep, candidates, has_room_on_host, ready, reserved_bytes
from localllm.serving.lease import Lease
from localllm.serving.lending import Lending
from localllm.serving.loading import Loader, load_in_thread
from localllm.serving.phases import DRAIN_S, OnPhase
from localllm.serving.register import Register
from localllm.serving.reopen import put_to_sleep, wake_up
from localllm.serving.served import LoadLimits, ServedModel
from localllm.serving.transitions import ModelTransitions

log = logging.getLogger(__name__)

WAIT_S = 300.0  # the longest time a request waits for its model
EVICTION_DRAIN_S = 120.0  # time for running requests to finish when another model needs the memory
STABLE_S = 60.0  # an engine that ran at least this long before it ended by itself is loaded again at once
RETRY_S = 5.0  # after a failed load, requests do not try again for this long
TICK_S = 0.5
COMFORTABLE_CONTEXT = 8192  # idle models are evicted to reach a context of this length


class ModelManager:
    """The models of this server."""

    def __init__(self, loader: Loader | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        loader = loader or Loader(build_engine, put_to_sleep, wake_up)
        self.register = Register(loader)
        self._clock = clock
        self.transitions = ModelTransitions(loader, self.register.entries, clock, self._on_crash)
        self.lending = Lending(self.register, self.transitions, self._claim)
        self._tasks: set[asyncio.Task[None]] = set()

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

    @property
    def is_busy(self) -> bool:
        """Return whether a model answers requests, loads, is tuned, or is waited for."""
        return bool(self.num_open) or any(
            entry.num_leases or entry.waiters or entry.is_loading or entry.state == "tuning" for entry in self.entries
        )

    def statuses(self) -> list[ModelStatus]:
        """Return the status of every known model, ready models first."""
        order = ("ready", "tuning", "loading", "unloading", "sleeping", "failed", "unloaded")
        now_s = self._clock()
        return [entry.status(now_s) for entry in sorted(self.entries, key=lambda entry: order.index(entry.state))]

    def require_working(self) -> None:
        """Raise the error that a request without a name would get now: still loading, being tuned, or load failed."""
        entry = self.default
        if entry is None:
            raise ModelLoading("The model is loading.", hint="Try again in a moment.")
        if entry.state == "loading":
            raise ModelLoading(f"{entry.name} is loading.", entry.progress, "Try again in a moment.")
        if entry.state == "tuning":
            self.lending.require_no_loan()
        if entry.state == "failed" and entry.error is not None:
            raise entry.error.with_traceback(None)  # raised again and again: its traceback would grow for ever

    async def device_lost(self) -> DeviceLost:
        """Wait until a model's device is lost, which ends the process."""
        return await self.transitions.device_lost()

    # Acquire, load, unload --------------------------------------------------------------------------------------

    async def acquire(
        self, name: str | None = None, task: Task = "generate", *, keep_alive_s: float | None = None
    ) -> Lease[ServedModel]:
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
        """Unload a model. Cancel its load; let running requests finish for `DRAIN_S`, then end them.

        Raises `UnloadCancelled` if `keep` is called meanwhile.
        """
        entry = self.register.require(name)
        self.lending.require_no_loan()
        entry.pinned = False
        if entry.is_loading and entry.state == "loading":
            await self._cancel(entry)
        async with self.transitions.turn:
            await self.transitions.drain(entry, DRAIN_S)
            await self.transitions.unload(entry)
        return entry.status(self._clock())

    async def sleep(self, name: str) -> ModelStatus:
        """Keep the weights in host memory and free everything else. Running requests may finish for `DRAIN_S`."""
        entry = self.register.require(name)
        self.lending.require_no_loan()
        async with self.transitions.turn:
            if entry.state == "ready" and not can_sleep(entry):
                why = "Only models that generate text, in one replica, support sleep."
                raise UnsupportedOption(f"{entry.name} cannot sleep.", why, "Unload it.", param="model")
            if entry.state == "ready":
                await self.transitions.drain(entry, DRAIN_S)
                await self.transitions.put_to_sleep(entry)
        if entry.state != "sleeping":
            raise ModelNotLoaded(f"{entry.name} cannot sleep: it is {entry.state}.", "Load it first.", param="model")
        return entry.status(self._clock())

    def keep(self, name: str) -> ModelStatus:
        """Keep a model that waits for its requests to end before it is unloaded or put to sleep."""
        entry = self.register.require(name)
        if not entry.is_draining:
            what = f"{entry.name} cannot be kept: it is {entry.state}."
            raise ModelNotLoaded(what, "Only a model that waits for its requests to end can be.", param="model")
        entry.keep()
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

    async def start(self, settings: Settings, on_phase: OnPhase = lambda phase: None) -> ServedModel | None:
        """Register the first model and load it. `on_phase` is called on this event loop. Raises what a load raises.

        Return None if the model is not to be loaded at the start: the first request that needs it loads it.
        """
        self.register.settings, self.transitions.closing = settings, False
        own = settings.of_first_model()
        entry = self.register.add(own, settings.engine.model, keep_alive_s=math.inf)
        self._spawn(self._tick_forever())
        if not settings.server.load_at_start:
            return None
        entry.on_phase = on_phase
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
        self.register.settings, self.transitions.closing = None, True
        for task in list(self._tasks):
            task.cancel()
        await self.lending.close()
        for entry in self.entries:
            if entry.is_loading:
                await self._cancel(entry)
        for entry in list(self.entries):
            await self.transitions.unload(entry)
        self.entries.clear()

    async def tick(self) -> None:
        """Unload models whose keep-alive time is over. While a load or unload runs, leave that to the next tick."""
        for entry in list(self.entries):
            if self._has_expired(entry) and not self.transitions.turn.locked():
                async with self.transitions.turn:
                    if self._has_expired(entry):  # a request may have arrived while this waited for its turn
                        log.info("model idle name=%s keep_alive=%.0fs", entry.name, entry.keep_alive_s)
                        await self.transitions.unload(entry)

    def _has_expired(self, entry: ModelEntry) -> bool:
        return entry.expires_in_s(self._clock()) == 0 and not entry.num_leases

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            await self.tick()

    # Loading ----------------------------------------------------------------------------------------------------

    async def _claim(self, entry: ModelEntry) -> Lease[ServedModel]:
        entry.last_used_s = self._clock()
        if entry.is_running and entry.served is not None:
            return entry.lease(entry.served, self._released)
        self.lending.require_no_loan()
        if entry.settings is None:
            self.require_working()
            raise ModelLoading(f"{entry.name} is {entry.state}.", "Try again in a moment.")
        waiter: asyncio.Future[Lease[ServedModel]] = asyncio.get_running_loop().create_future()
        entry.waiters.append(waiter)
        self._start_load(entry)
        try:
            async with asyncio.timeout(WAIT_S):
                return await waiter
        except TimeoutError:
            what = f"{entry.name} is not ready after {WAIT_S:.0f} s."
            raise ModelLoading(what, entry.progress, "Try again later.") from None
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
            async with self.transitions.turn:
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
                await self.transitions.unload(entry)
            entry.state, entry.phases, entry.error = "loading", {}, None
            model = await self._evict_and_load(entry, evicted)
            await model.client.start()
            self.transitions.mark_ready(entry, model)
        waiters, entry.waiters = entry.waiters, []
        assert entry.served is not None
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(entry.lease(entry.served, self._released))

    async def _evict_and_load(self, entry: ModelEntry, evicted: list[ModelEntry]) -> ServedModel:
        assert entry.settings is not None
        limit = entry.settings.server.models_max
        while limit is not None and len(self.ready) >= limit:
            await self._evict_one(
                entry, evicted, ModelsBusy(f"There is no room for {entry.name}.", f"--models-max is {limit}.")
            )
        while True:
            idle = [each for each in candidates(entry, self.entries) if not each.num_leases]
            limits = LoadLimits(
                reserved_bytes(self.entries, self.transitions.baseline_bytes), COMFORTABLE_CONTEXT if idle else 0
            )
            try:
                return await load_in_thread(self.transitions.loader, entry, limits)
            except DoesNotFit as error:
                await self._evict_one(entry, evicted, error)
            except RanksLost as error:
                asleep, entry.asleep = entry.asleep, None
                if asleep is None:
                    raise
                log.warning("model lost its weights while it slept name=%s error=%s", entry.name, error)
                await asyncio.to_thread(asleep.close)

    def _on_crash(self, entry: ModelEntry, model: ServedModel, error: LocalLLMError) -> None:
        self._spawn(self._after_crash(entry, model, error))

    async def _after_crash(self, entry: ModelEntry, model: ServedModel, error: LocalLLMError) -> None:
        """Free the memory of an engine that ended by itself, and load its model again.

        An engine that ended within `STABLE_S` of its load is not loaded again; the next request tries.
        """
        async with self.transitions.turn:
            if entry.served is not model or self.transitions.closing:  # already unloaded, or loaded again by a request
                return
            lasted_s = self._clock() - entry.ready_s
            log.error("engine ended name=%s after=%.0fs error=%s", entry.name, lasted_s, error)
            if isinstance(error, RanksLost):
                entry.lost_ranks = model.engine[0].runner.stats().ranks
            await self.transitions.unload(entry)
            entry.state, entry.error, entry.failed_s = "failed", error, self._clock()
        if lasted_s >= STABLE_S and entry.settings is not None and not self.transitions.closing:
            self._start_load(entry)

    # Evicting ---------------------------------------------------------------------------------------------------

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
            await self.transitions.drain(victim, EVICTION_DRAIN_S, give_up="There is no room for the model.")
            if victim.pinned:  # pinned while it drained
                victim.state = "ready"
                await self._evict_one(entry, evicted, otherwise)
                return
        evicted.append(victim)
        if victim.state != "sleeping" and has_room_on_host(victim):
            await self.transitions.put_to_sleep(victim)
        else:
            await self.transitions.unload(victim)

    async def _reload_evicted(self, evicted: list[ModelEntry]) -> None:
        """Load the models again that were evicted for a load that failed."""
        for entry in [] if self.transitions.closing else evicted:
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

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
