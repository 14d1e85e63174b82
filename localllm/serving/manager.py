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
    Kept,
    Lease,
    LoadCancelled,
    ModelLoading,
    ModelNotLoaded,
    ModelsBusy,
    ModelStatus,
    ModelTuning,
)
from localllm.serving.eviction import can_sleep, candidates, has_room_on_host, promised_bytes, ready
from localllm.serving.loading import Road, in_own_thread, let_go, load_in_thread
from localllm.serving.register import Register
from localllm.serving.reopen import BareModel
from localllm.serving.served import Beside, OnPhase, ServedModel
from localllm.serving.sleep import put_to_sleep, wake_up

log = logging.getLogger(__name__)

WAIT_S = 300.0  # the longest time a request waits for its model
DRAIN_S = 30.0  # time for running requests to finish after a sleep or unload command
MAKE_ROOM_S = 120.0  # time for running requests to finish when another model needs the memory
STABLE_S = 60.0  # an engine that ran at least this long before it ended by itself is loaded again at once
RETRY_S = 5.0  # after a failed load, requests do not try again for this long
TICK_S = 0.5
COMFORTABLE_CONTEXT = 8192  # idle models are evicted to reach a context of this length
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Loan:
    """A model whose weights are lent, and the task that borrowed them."""

    kept: Kept
    task: asyncio.Task[Any]


class ModelManager:
    """The models of this server."""

    def __init__(self, road: Road | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._road = road or Road(build_engine, put_to_sleep, wake_up)
        self.register = Register(self._road)
        self._clock = clock
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._lost: asyncio.Future[DeviceLost] | None = None
        self._bare_bytes: int | None = None  # RSS of this process without any model
        self._closing = False
        self._loan: Loan | None = None

    # Queries ----------------------------------------------------------------------------------------------------

    @property
    def default(self) -> Kept | None:
        """The model for a request without a name: the last used ready model, else the last used of all models."""
        return self.register.default

    @property
    def current(self) -> ServedModel | None:
        """The ready model that was used last."""
        kept = self.default
        return kept.served if kept is not None and kept.state == "ready" else None

    @property
    def kept(self) -> list[Kept]:
        """All known models, in any state."""
        return self.register.kept

    @property
    def ready(self) -> list[ServedModel]:
        return ready(self.kept)

    @property
    def num_open(self) -> int:
        return sum(model.client.num_open for model in self.ready)

    def statuses(self) -> list[ModelStatus]:
        """Return the status of every known model, ready models first."""
        order = ("ready", "tuning", "loading", "unloading", "sleeping", "failed", "unloaded")
        now_s = self._clock()
        return [kept.status(now_s) for kept in sorted(self.kept, key=lambda kept: order.index(kept.state))]

    def require_working(self) -> None:
        """Raise the error that a request without a name would get now: still loading, being tuned, or load failed."""
        kept = self.default
        if kept is None or kept.state == "loading":
            raise ModelLoading(f"{kept.name if kept else 'The model'} is loading.", "Try again in a moment.")
        if kept.state == "tuning":
            self._refuse_while_lent()
        if kept.state == "failed" and kept.error is not None:
            raise kept.error.with_traceback(None)  # raised again and again: its traceback would grow for ever

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
        kept = await self.register.named(name, task)
        if keep_alive_s is not None:
            kept.keep_alive_s = keep_alive_s
        if kept.state == "failed" and kept.error is not None and self._clock() - kept.failed_s < RETRY_S:
            raise kept.error.with_traceback(None)
        lease = await self._claim(kept)
        if name and name not in kept.names and not kept.has_adapter(name):  # unloaded while the model was coming
            lease.release()
            raise self.register.not_found(name)
        return lease

    async def load(
        self, name: str, *, pin: bool | None = None, keep_alive_s: float | None = None, wait: bool = True
    ) -> ModelStatus:
        """Load or wake a model; with `wait`, until it is ready. The name may be a path: only for operators."""
        kept = await self.register.named(name, anywhere=True)
        kept.pinned = kept.pinned if pin is None else pin
        kept.keep_alive_s = kept.keep_alive_s if keep_alive_s is None else keep_alive_s
        if wait:
            (await self._claim(kept)).release()
        elif not kept.is_up and kept.settings is not None:
            self._bring_up(kept)
        return kept.status(self._clock())

    async def wake(self, name: str) -> ModelStatus:
        """Wake a sleeping model, and wait until it is ready."""
        kept = self.register.require_known(name)
        if kept.state in ("unloaded", "failed"):
            raise ModelNotLoaded(f"{kept.name} is not asleep: it is {kept.state}.", "Load it instead.", param="model")
        (await self._claim(kept)).release()
        return kept.status(self._clock())

    async def unload(self, name: str) -> ModelStatus:
        """Unload a model. Cancel its load; let running requests finish for `DRAIN_S`, then end them."""
        kept = self.register.require_known(name)
        self._refuse_while_lent()
        kept.pinned = False
        if kept.is_coming and kept.state == "loading":
            await self._cancel(kept)
        async with self._turn:
            await self._drain(kept, DRAIN_S)
            await self._drop(kept)
        return kept.status(self._clock())

    async def sleep(self, name: str) -> ModelStatus:
        """Keep the weights in host memory and free everything else. Running requests may finish for `DRAIN_S`."""
        kept = self.register.require_known(name)
        self._refuse_while_lent()
        async with self._turn:
            if kept.state == "ready" and not can_sleep(kept):
                why = "Only models that generate text support sleep."
                raise UnsupportedOption(f"{kept.name} cannot sleep.", why, "Unload it.", param="model")
            if kept.state == "ready":
                await self._drain(kept, DRAIN_S)
                await self._lay_down(kept)
        if kept.state != "sleeping":
            raise ModelNotLoaded(f"{kept.name} cannot sleep: it is {kept.state}.", "Load it first.", param="model")
        return kept.status(self._clock())

    def pin(self, name: str, pinned: bool = True) -> ModelStatus:
        """Pin or unpin a model. A pinned model is never evicted; only `unload` by name unloads it."""
        kept = self.register.require_known(name)
        kept.pinned = pinned
        return kept.status(self._clock())

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
        kept = next((kept for kept in self.kept if kept.has_adapter(name)), None)
        if kept is None or kept.adapters is None:
            raise ModelNotFound(
                f"The adapter {name!r} is not loaded.", hint="GET /v1/models lists them.", param="lora_name"
            )
        await kept.adapters.unload_async(name)

    # Start, tick, close -----------------------------------------------------------------------------------------

    async def start(self, settings: Settings, on_phase: OnPhase = lambda phase: None) -> ServedModel:
        """Load the first model. `on_phase` is called on this event loop. Raises what a load raises."""
        self.register.settings, self._closing = settings, False
        own = settings.of_first_model()
        kept = self.register.remember(own, settings.engine.model, keep_alive_s=math.inf)
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
        """Serve a model that was built elsewhere and is already started."""
        kept = Kept(model.name, None, frozenset({model.name, *model.aliases}), model.path)
        kept.state, kept.served, kept.card, kept.last_used_s = "ready", model, model.card, self._clock()
        self.kept.append(kept)
        return kept

    def expect(self, name: str) -> Kept:
        """Register a model that is being loaded elsewhere."""
        kept = Kept(name, None, frozenset({name}), state="loading")
        self.kept.append(kept)
        return kept

    async def close(self) -> None:
        """End running requests with an error and free the memory. Idempotent."""
        self.register.settings, self._closing = None, True
        for task in list(self._tasks):
            task.cancel()
        if self._loan is not None:
            self._loan.task.cancel()
            await asyncio.wait({self._loan.task})
        for kept in self.kept:
            if kept.is_coming:
                await self._cancel(kept)
        for kept in list(self.kept):
            await self._drop(kept)
        self.kept.clear()

    async def tick(self) -> None:
        """Unload models whose keep-alive time is over. While a load or unload runs, leave that to the next tick."""
        for kept in list(self.kept):
            if self._has_expired(kept) and not self._turn.locked():
                async with self._turn:
                    if self._has_expired(kept):  # a request may have arrived while this waited for its turn
                        log.info("model idle name=%s keep_alive=%.0fs", kept.name, kept.keep_alive_s)
                        await self._drop(kept)

    def _has_expired(self, kept: Kept) -> bool:
        return kept.expires_in_s(self._clock()) == 0 and not kept.num_leases

    async def _keep_time(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            await self.tick()

    # Loading ----------------------------------------------------------------------------------------------------

    async def _claim(self, kept: Kept) -> Lease:
        kept.last_used_s = self._clock()
        if kept.is_up and kept.served is not None:
            return kept.lease(kept.served, self._released)
        self._refuse_while_lent()
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
            where = (
                f"The present phase is {phase.name}: {phase.detail}."
                if phase
                else "It is waiting for another load to finish."
            )
            raise ModelLoading(f"{kept.name} is not ready after {WAIT_S:.0f} s.", where, "Try again later.") from None
        except BaseException:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                waiter.result().release()  # the load ended in the same moment in which the request was cancelled
            raise

    def _bring_up(self, kept: Kept) -> None:
        """Start the load, unless it is already running: all waiting requests share it."""
        if not kept.is_coming:
            if kept.state != "unloading":
                kept.state = "loading"
            kept.task = asyncio.create_task(self._open(kept), name=f"load {kept.name}")

    async def _open(self, kept: Kept) -> None:
        """Load or wake the model when its turn comes, and resolve its waiters. Raises only `CancelledError`."""
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
            if kept.state == "loading":  # it was still waiting for its turn
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
            if kept.served is not None:  # its engine has ended
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
        woken = kept.asleep is not None
        kept.served, kept.asleep, kept.card, kept.path = model, None, model.card, model.path
        kept.name, kept.names = model.name, kept.names | {model.name, *model.aliases}
        kept.state, kept.last_used_s = "ready", self._clock()
        kept.idle.set()
        kept.ready_s = kept.last_used_s
        kept.watch = asyncio.create_task(self._watch(kept, model))
        if not woken:  # takes 0.1 s or more, and a request waits for a waking model
            gc.collect()
        gc.freeze()  # full collections would walk over these long-lived objects again and again, mid-step
        if len(self.ready) == 1:
            self._bare_bytes = psutil.Process().memory_info().rss - model.plan.weights_bytes
        log.info("model ready name=%s device=%s", kept.name, model.plan.device)

    async def _make_room_and_load(self, kept: Kept, gone: list[Kept]) -> ServedModel:
        assert kept.settings is not None
        limit = kept.settings.server.models_max
        while limit is not None and len(self.ready) >= limit:
            await self._evict_one(
                kept, gone, ModelsBusy(f"There is no room for {kept.name}.", f"--models-max is {limit}.")
            )
        while True:
            idle = [each for each in candidates(kept, self.kept) if not each.num_leases]
            beside = Beside(promised_bytes(self.kept, self._bare_bytes), COMFORTABLE_CONTEXT if idle else 0)
            try:
                return await load_in_thread(self._road, kept, beside)
            except DoesNotFit as error:
                await self._evict_one(kept, gone, error)

    async def _watch(self, kept: Kept, model: ServedModel) -> None:
        error = await model.client.ended()
        if isinstance(error, DeviceLost):
            self._lose(error)
        else:
            self._spawn(self._after_crash(kept, model, error))

    async def _after_crash(self, kept: Kept, model: ServedModel, error: LocalLLMError) -> None:
        """Free the memory of an engine that ended by itself, and load its model again.

        An engine that ended within `STABLE_S` of its load is not loaded again; the next request tries.
        """
        async with self._turn:
            if kept.served is not model or self._closing:  # already unloaded, or loaded again by a request
                return
            lasted_s = self._clock() - kept.ready_s
            log.error("engine ended name=%s after=%.0fs error=%s", kept.name, lasted_s, error)
            await self._drop(kept)
            kept.state, kept.error, kept.failed_s = "failed", error, self._clock()
        if lasted_s >= STABLE_S and kept.settings is not None and not self._closing:
            self._bring_up(kept)

    def _lose(self, error: DeviceLost) -> None:
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
        kept = await self._to_be_opened(name)
        self._refuse_while_lent()
        task = asyncio.current_task()
        assert task is not None
        self._loan = Loan(kept, task)
        try:
            async with self._turn:
                await self._free(kept)
                return await _to_the_end(self._lend_now(kept, work), stop)
        finally:
            self._loan = None

    async def reopen(self, name: str, tuned: Mapping[str, Any]) -> ModelStatus:
        """Serve a model with the settings of a profile, on the weights already in memory. Its requests wait meanwhile.

        On failure the model is served with its previous settings, and the error is raised. Raises `ModelsBusy` as
        `lend` does.
        """
        kept = await self._to_be_opened(name)
        async with self._turn:
            await self._free(kept)
            await _to_the_end(self._reopen_now(kept, tuned))
        return kept.status(self._clock())

    async def _to_be_opened(self, name: str) -> Kept:
        self._refuse_while_lent()
        kept = self.register.require_known(name)
        with await self._claim(kept) as model:
            model.require("generate")
        if kept.settings is None:
            raise UnsupportedOption(
                f"{kept.name} cannot be opened again.", "It was not loaded by this server.", param="model"
            )
        return kept

    async def _free(self, kept: Kept) -> None:
        """Wait until the model has no requests; new ones wait. Raises `ModelsBusy`, `ModelNotLoaded`."""
        await self._drain(kept, DRAIN_S, give_up=f"{kept.name} is busy.")
        if kept.served is None:
            raise ModelNotLoaded(f"{kept.name} is {kept.state}.", "Its state changed while this request waited.")

    def _refuse_while_lent(self) -> None:
        if self._loan is not None:
            name = self._loan.kept.name
            why = "A tuning run is using its weights. No model is loaded or unloaded until the run ends."
            raise ModelTuning(f"{name} is being tuned.", why, "Try again after the run, or cancel the run at /tune.")

    async def _lend_now(self, kept: Kept, work: Callable[[BareModel, Settings], Result]) -> Result:
        assert kept.served is not None
        assert kept.settings is not None
        tuned = kept.served.tuned
        bare = await self._lay_bare(kept, "tuning")
        try:
            return await in_own_thread(partial(work, bare, kept.settings))
        except BaseException as error:
            let_go(error)
            if isinstance(error, DeviceLost):
                self._lose(error)
            raise
        finally:
            if self._closing:
                kept.state = "unloaded"
            else:
                await self._open_again(kept, bare, tuned)

    async def _reopen_now(self, kept: Kept, tuned: Mapping[str, Any]) -> None:
        assert kept.served is not None
        before = kept.served.tuned
        bare = await self._lay_bare(kept, "loading")
        error = await self._open_again(kept, bare, tuned)
        if error is not None:
            await self._open_again(kept, bare, before)
            raise error

    async def _lay_bare(self, kept: Kept, state: Literal["tuning", "loading"]) -> BareModel:
        """Close the engine and keep the weights."""
        served, kept.served = kept.served, None
        assert served is not None
        self._stop_watching(kept)
        await served.client.stop()
        gc.unfreeze()
        kept.state = state
        bare = await asyncio.to_thread(self._road.lay_bare, served)
        del served
        await self._tidy()
        return bare

    async def _open_again(self, kept: Kept, bare: BareModel, tuned: Mapping[str, Any]) -> LocalLLMError | None:
        """Open an engine with these settings. On failure mark the model as failed, and return the error."""
        assert kept.settings is not None
        config = replace(kept.settings.engine, **tuned)
        known = self._bare_bytes + bare.weights_bytes if self._bare_bytes is not None else None
        beside = Beside(promised_bytes(self.kept, known))
        try:
            work = partial(self._road.open_again, bare, config, lambda phase: None, beside)
            model = replace(await in_own_thread(work), tuned=tuned)
            await model.client.start()
        except Exception as error:
            let_go(error)
            why = error if isinstance(error, LocalLLMError) else LocalLLMError(f"{kept.name} stopped.", f"{error}.")
            log.warning("model could not be opened again name=%s error=%s", kept.name, error)
            kept.state, kept.error, kept.failed_s = "failed", why, self._clock()
            await self._tidy()
            return why
        kept.error = None
        self._is_ready(kept, model)
        return None

    # Unloading --------------------------------------------------------------------------------------------------

    async def _evict_one(self, kept: Kept, gone: list[Kept], otherwise: LocalLLMError) -> None:
        others = candidates(kept, self.kept)
        if not others:
            pinned = [each.name for each in self.kept if each.pinned and each.state in ("ready", "sleeping")]
            if pinned:
                otherwise.why += f" Pinned models: {', '.join(pinned)}."
            raise otherwise
        victim = others[0]
        log.info("model evicted name=%s for=%s requests=%d", victim.name, kept.name, victim.num_leases)
        if victim.state == "ready":
            await self._drain(victim, MAKE_ROOM_S, give_up="There is no room for the model.")
            if victim.pinned:  # pinned while it drained
                victim.state = "ready"
                await self._evict_one(kept, gone, otherwise)
                return
        gone.append(victim)
        if victim.state != "sleeping" and has_room_on_host(victim):
            await self._lay_down(victim)
        else:
            await self._drop(victim)

    async def _drain(self, kept: Kept, limit_s: float, *, give_up: str = "") -> None:
        """Wait until the running requests end; new ones wait. give_up: text of a `ModelsBusy` after the time limit."""
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
                raise ModelsBusy(give_up, why, "Try again later.") from None
        except BaseException:
            kept.state = "ready"
            raise

    async def _lay_down(self, kept: Kept) -> None:
        """Put the model to sleep: move its weights to the host and free everything else."""
        kept.state = "unloading"  # set it here: a request that arrives before the task below starts must wait
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
        """Unload the model. Requests that still run end with an error."""
        kept.state = "unloading"  # set it here: a request that arrives before the task below starts must wait
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
        """Load the models again that were evicted for a load that failed."""
        for kept in [] if self._closing else gone:
            try:
                await self._open_now(kept, [])
            except LocalLLMError as error:
                kept.error, kept.failed_s = error, self._clock()
                kept.state = "sleeping" if kept.asleep is not None else "failed"
                log.warning("model could not be restored name=%s error=%s", kept.name, error)

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


async def _to_the_end(work: Coroutine[Any, Any, Result], hurry: Callable[[], None] = lambda: None) -> Result:
    """Finish `work` even if the caller is cancelled: a half-done unload would leave memory that no model owns."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        hurry()
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # mark its exception as retrieved: the cancelled caller does not need it
        raise
