"""Load the models that requests wait for, one at a time, each in a thread of its own, and evict others for them.

A load waits for its turn. Requests for the same model share one load. A load that does not fit evicts other models by
LRU: models without requests first, then models with running requests, which may finish. Pinned models are never
evicted. If the load then fails, the evicted models are loaded again.
Does not know: which models exist (register.py), when one is unloaded without another (manager.py).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from localllm.config.settings import Settings
from localllm.errors import DoesNotFit, EngineStopped, LocalLLMError, RanksLost
from localllm.serving.compute import clear_tracebacks
from localllm.serving.entry import LoadCancelled, ModelEntry, ModelLoading, ModelsBusy
from localllm.serving.eviction import candidates, has_room_on_host, ready, reserved_bytes
from localllm.serving.lease import Lease
from localllm.serving.phases import Phase
from localllm.serving.register import Register
from localllm.serving.served import LoadLimits, ServedModel
from localllm.serving.transitions import Loader, ModelTransitions

log = logging.getLogger(__name__)

Result = TypeVar("Result")

WAIT_S = 300.0  # the longest time a request waits for its model
EVICTION_DRAIN_S = 120.0  # time for running requests to finish when another model needs the memory
STABLE_S = 60.0  # an engine that ran at least this long before it ended by itself is loaded again at once
COMFORTABLE_CONTEXT = 8192  # idle models are evicted to reach a context of this length


class ModelLoads:
    """Loads models one at a time, shares a load among the requests that wait for it, and evicts others for it."""

    def __init__(
        self, loader: Loader, register: Register, clock: Callable[[], float], on_release: Callable[[ModelEntry], None]
    ) -> None:
        """on_release: called when a lease on a model ends."""
        self._register, self._clock, self._on_release = register, clock, on_release
        self.transitions = ModelTransitions(loader, register.entries, clock, self._on_crash)
        self._restarts: set[asyncio.Task[None]] = set()

    def require_working(self) -> None:
        """Raise the error that a request without a name would get now: still loading, being tuned, or load failed."""
        entry = self._register.default
        if entry is None:
            raise ModelLoading("The model is loading.", hint="Try again in a moment.")
        if entry.state == "loading":
            raise ModelLoading(f"{entry.name} is loading.", entry.progress, "Try again in a moment.")
        if entry.state == "tuning":
            self.transitions.require_no_loan()
        if entry.state == "failed" and entry.error is not None:
            raise entry.error.with_traceback(None)  # raised again and again: its traceback would grow for ever

    async def claim(self, entry: ModelEntry) -> Lease[ServedModel]:
        entry.last_used_s = self._clock()
        if entry.is_running and entry.served is not None:
            return entry.lease(entry.served, self._on_release)
        self.transitions.require_no_loan()
        if entry.settings is None:
            self.require_working()
            raise ModelLoading(f"{entry.name} is {entry.state}.", "Try again in a moment.")
        waiter: asyncio.Future[Lease[ServedModel]] = asyncio.get_running_loop().create_future()
        entry.waiters.append(waiter)
        self.start(entry)
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

    def start(self, entry: ModelEntry) -> None:
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
                waiter.set_result(entry.lease(entry.served, self._on_release))

    async def _evict_and_load(self, entry: ModelEntry, evicted: list[ModelEntry]) -> ServedModel:
        assert entry.settings is not None
        limit, device = entry.settings.server.models_max, ""
        counted = [each for each in self._register.entries if not each.is_beside]
        while limit is not None and not entry.is_beside and len(ready(counted)) >= limit:
            await self._evict_one(
                entry, evicted, ModelsBusy(f"There is no room for {entry.name}.", f"--models-max is {limit}.")
            )
        while True:
            idle = [each for each in candidates(entry, self._register.entries) if not each.num_leases]
            reserved = reserved_bytes(self._register.entries, self.transitions.baseline_bytes)
            limits = LoadLimits(reserved, COMFORTABLE_CONTEXT if idle else 0)
            try:
                engine = replace(entry.settings.engine, device=device or entry.settings.engine.device)
                settings = replace(entry.settings, engine=engine)
                return await load_in_thread(self.transitions.loader, entry, limits, settings)
            except DoesNotFit as error:
                if entry.is_beside and engine.device != "cpu":  # the GPU is another model's
                    device = "cpu"
                else:
                    await self._evict_one(entry, evicted, error)
            except RanksLost as error:
                asleep, entry.asleep = entry.asleep, None
                if asleep is None:
                    raise
                log.warning("model lost its weights while it slept name=%s error=%s", entry.name, error)
                await asyncio.to_thread(asleep.close)

    def _on_crash(self, entry: ModelEntry, model: ServedModel, error: LocalLLMError) -> None:
        restart = asyncio.create_task(self._after_crash(entry, model, error))
        self._restarts.add(restart)
        restart.add_done_callback(self._restarts.discard)

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
            self.start(entry)

    async def _evict_one(self, entry: ModelEntry, evicted: list[ModelEntry], otherwise: LocalLLMError) -> None:
        others = candidates(entry, self._register.entries)
        if not others:
            pinned = [
                each.name for each in self._register.entries if each.pinned and each.state in ("ready", "sleeping")
            ]
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

    async def cancel(self, entry: ModelEntry) -> None:
        task = entry.task
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    async def close(self) -> None:
        """Cancel all loads, and load no model that crashed."""
        for restart in list(self._restarts):
            restart.cancel()
        for entry in self._register.entries:
            if entry.is_loading:
                await self.cancel(entry)


async def load_in_thread(loader: Loader, entry: ModelEntry, limits: LoadLimits, settings: Settings) -> ServedModel:
    """Build the model, or wake it if it sleeps. When cancelled, wait for the thread, which stops at its next report."""
    event_loop, given_up = asyncio.get_running_loop(), threading.Event()

    def report(phase: Phase) -> None:
        """Report a phase from the loading thread, which can only be stopped here."""
        if given_up.is_set():
            raise EngineStopped("The load was cancelled.")
        event_loop.call_soon_threadsafe(entry.record_phase, phase)

    def work() -> ServedModel:
        try:
            if entry.asleep is not None:
                return loader.wake(entry.asleep, settings, report, limits)
            return loader.build(settings, report, limits)
        except BaseException as error:
            clear_tracebacks(error)
            raise

    thread = compute_thread()
    job = event_loop.run_in_executor(thread, work)
    try:
        return await asyncio.shield(job)
    except asyncio.CancelledError:
        given_up.set()
        await _wait_for(job)  # its memory is in use until it ends: no other load may plan with that memory
        if job.exception() is None:
            undo = partial(loader.sleep, job.result()) if entry.asleep is not None else job.result().close
            await _wait_for(event_loop.run_in_executor(thread, undo))
        raise
    finally:
        thread.shutdown(wait=False)


async def _wait_for(job: asyncio.Future[Any]) -> None:
    """Wait until the job is done, however often this task is cancelled."""
    while not job.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait({job})


def compute_thread() -> ThreadPoolExecutor:
    """Return an executor for computing work; shut it down with the work.

    libgomp keeps a worker team for every thread that has ever computed. With an idle second team it counts more threads
    than cores, and the engine's workers sleep instead of spinning.
    """
    return ThreadPoolExecutor(1, "localllm-loader")


async def in_compute_thread(work: Callable[[], Result]) -> Result:
    thread = compute_thread()
    try:
        return await asyncio.get_running_loop().run_in_executor(thread, work)
    finally:
        thread.shutdown(wait=False)
