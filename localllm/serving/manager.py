"""Load models when a request names them, and put them to sleep or unload them when others need the memory.

A model without requests for its keep-alive time is unloaded. Loads, and what is evicted for them, are in loading.py,
the changes of state themselves in transitions.py; lending.py lends one model at a time to a tuning run.
Does not know: how a model is loaded (build.py) or sleeps (reopen.py), HTTP, terminals.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any

from localllm.config.settings import Settings, Task
from localllm.errors import LocalLLMError, ModelNotFound, UnsupportedOption
from localllm.serving.adapters import AdapterRefused, LoadedAdapter
from localllm.serving.build import build_engine
from localllm.serving.entry import (
    ModelEntry,
    ModelNotLoaded,
    ModelStatus,
)
from localllm.serving.eviction import can_sleep, ready
from localllm.serving.lease import Lease
from localllm.serving.lending import Lending
from localllm.serving.loading import ModelLoads
from localllm.serving.phases import DRAIN_S, OnPhase
from localllm.serving.register import Register
from localllm.serving.reopen import put_to_sleep, wake_up
from localllm.serving.served import ServedModel
from localllm.serving.transitions import Loader

log = logging.getLogger(__name__)

RETRY_S = 5.0  # after a failed load, requests do not try again for this long
TICK_S = 0.5


class ModelManager:
    """The models of this server."""

    def __init__(self, loader: Loader | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        loader = loader or Loader(build_engine, put_to_sleep, wake_up)
        self.register = Register(loader)
        self._clock = clock
        self.loads = ModelLoads(loader, self.register, clock, self._released)
        self.transitions = self.loads.transitions
        self.lending = Lending(self.register, self.loads)
        self._tasks: set[asyncio.Task[None]] = set()
        self._first: ModelEntry | None = None  # registered, and not yet loaded by `start`

    # Queries ----------------------------------------------------------------------------------------------------

    @property
    def current(self) -> ServedModel | None:
        """The ready model that was used last."""
        entry = self.register.default
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
        lease = await self.loads.claim(entry)
        if name and name not in entry.names and not entry.has_adapter(name):  # unloaded while the model was coming
            lease.release()
            raise self.register.not_found(name)
        return lease

    async def load(
        self, name: str, *, pin: bool | None = None, keep_alive_s: float | None = None, wait: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> ModelStatus:  # fmt: skip
        """Load or wake a model; with `wait`, until it is ready. The name may be a path: only for operators.

        options: settings of the engine, for this load and those after it. A model that is loaded with others is
        unloaded first, as `unload` does; one that was loaded elsewhere raises `UnsupportedOption`.
        """
        entry = await self.register.find_or_add(name, anywhere=True)
        pin = entry.pinned if pin is None else pin
        if options:
            if entry.settings is None:
                raise UnsupportedOption(f"{entry.name} cannot be loaded again.", "It was not loaded by this server.")
            before, engine = entry.settings, replace(entry.settings.engine, **options)
            entry.settings = replace(before, engine=engine)  # a request that waits for the model loads it with these
            try:
                if engine != before.engine and entry.state != "unloaded":
                    await self.unload(entry.name)
            except LocalLLMError:
                entry.settings = before
                raise
        entry.pinned = pin
        entry.keep_alive_s = entry.keep_alive_s if keep_alive_s is None else keep_alive_s
        if wait:
            (await self.loads.claim(entry)).release()
        elif not entry.is_running and entry.settings is not None:
            self.loads.start(entry)
        return entry.status(self._clock())

    async def wake(self, name: str) -> ModelStatus:
        """Wake a sleeping model, and wait until it is ready."""
        entry = self.register.require(name)
        if entry.state in ("unloaded", "failed"):
            raise ModelNotLoaded(f"{entry.name} is not asleep: it is {entry.state}.", "Load it instead.", param="model")
        (await self.loads.claim(entry)).release()
        return entry.status(self._clock())

    async def unload(self, name: str) -> ModelStatus:
        """Unload a model. Cancel its load; let running requests finish for `DRAIN_S`, then end them.

        Raises `UnloadCancelled` if `keep` is called meanwhile.
        """
        entry = self.register.require(name)
        self.transitions.require_no_loan()
        entry.pinned = False
        if entry.is_loading and entry.state == "loading":
            await self.loads.cancel(entry)
        async with self.transitions.turn:
            await self.transitions.drain(entry, DRAIN_S)
            await self.transitions.unload(entry)
        return entry.status(self._clock())

    async def sleep(self, name: str) -> ModelStatus:
        """Keep the weights in host memory and free everything else. Running requests may finish for `DRAIN_S`."""
        entry = self.register.require(name)
        self.transitions.require_no_loan()
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

    def register_first(self, settings: Settings, on_phase: OnPhase = lambda phase: None) -> ModelEntry:
        """Register the first model before `start`, which then takes no other one: a request that comes before its load
        starts it, and waits. Arguments as of `start`."""
        self.register.settings, self.transitions.closing = settings, False
        entry = self.register.add(settings.of_first_model(), settings.engine.model, keep_alive_s=math.inf)
        if settings.server.load_at_start:
            entry.state, entry.on_phase = "loading", on_phase
        self._first = entry
        return entry

    async def start(self, settings: Settings, on_phase: OnPhase = lambda phase: None) -> ServedModel | None:
        """Register the first model and load it. `on_phase` is called on this event loop. Raises what a load raises.

        Return None if the model is not to be loaded at the start: the first request that needs it loads it.
        """
        entry = self._first or self.register_first(settings, on_phase)
        self._first = None
        if (speech := settings.server.speech_model) not in (None, "none"):
            await self.register.add_speech_model(speech)
        self._spawn(self._tick_forever())
        if not settings.server.load_at_start:
            return None
        try:
            (await self.loads.claim(entry)).release()
        except asyncio.CancelledError:
            await self.loads.cancel(entry)
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
        self.register.settings, self.transitions.closing, self._first = None, True, None
        for task in list(self._tasks):
            task.cancel()
        await self.lending.close()
        await self.loads.close()
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

    def _released(self, entry: ModelEntry) -> None:
        entry.last_used_s = self._clock()
        if entry.keep_alive_s == 0 and not entry.num_leases:
            self._spawn(self.tick())

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
