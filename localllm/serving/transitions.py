"""The changes of state that every model of a server goes through, one at a time.

    ready -> unloading (`drain`, until its requests have ended) -> sleeping (`put_to_sleep`) or unloaded (`unload`)

`turn` is held during a change: a load, a sleep, an unload or a loan waits for it. `Loader` has the calls that do it.
Does not know: which model is loaded or unloaded, and why (loading.py, manager.py, lending.py).
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from localllm.config.settings import EngineConfig, Settings
from localllm.errors import DeviceLost, LocalLLMError
from localllm.serving.compute import release_cached_memory
from localllm.serving.entry import ModelEntry, ModelsBusy, ModelTuning, UnloadCancelled
from localllm.serving.eviction import ready
from localllm.serving.phases import OnPhase
from localllm.serving.reopen import BareModel, SleepingModel, close_engine, load_again, open_engine
from localllm.serving.served import LoadLimits, ServedModel

if TYPE_CHECKING:
    from localllm.models.library.catalog import ResolvedModel

log = logging.getLogger(__name__)

Result = TypeVar("Result")
OnCrash = Callable[[ModelEntry, ServedModel, LocalLLMError], None]


def _resolve(name: str, paths: bool) -> ResolvedModel:
    from localllm.models.library.catalog import resolve_model

    return resolve_model(name, paths=paths)


def _list() -> Sequence[ResolvedModel]:
    from localllm.models.library.catalog import list_models

    return list_models()


@dataclass(frozen=True, slots=True)
class Loader:
    """The functions that load, sleep, wake and find models. All of them block."""

    build: Callable[[Settings, OnPhase, LoadLimits], ServedModel]
    sleep: Callable[[ServedModel], SleepingModel]
    wake: Callable[[SleepingModel, Settings, OnPhase, LoadLimits], ServedModel]
    resolve: Callable[[str, bool], ResolvedModel] = _resolve
    list: Callable[[], Sequence[ResolvedModel]] = _list
    close_engine: Callable[[ServedModel], BareModel] = close_engine
    open_engine: Callable[[BareModel, EngineConfig, OnPhase, LoadLimits], ServedModel] = open_engine
    load_again: Callable[[BareModel, Settings, OnPhase, LoadLimits], None] = load_again
    release_cached_memory: Callable[[], None] = release_cached_memory


class ModelTransitions:
    """The changes of state of the models in `entries`, and the facts that all of them share."""

    def __init__(
        self, loader: Loader, entries: list[ModelEntry], clock: Callable[[], float], on_crash: OnCrash
    ) -> None:
        """on_crash: called when an engine has ended by itself, with its error."""
        self.loader, self.entries, self.clock, self._on_crash = loader, entries, clock, on_crash
        self.turn = asyncio.Lock()
        self.closing = False
        self.lent: ModelEntry | None = None  # its weights are lent: no model is loaded or unloaded
        self.baseline_bytes: int | None = None  # RSS of this process without any model
        self._lost: asyncio.Future[DeviceLost] | None = None

    def require_no_loan(self) -> None:
        """Raise `ModelTuning` while a model is lent."""
        if self.lent is not None:
            why = "A tuning run is using its weights. No model is loaded or unloaded until the run ends."
            raise ModelTuning(
                f"{self.lent.name} is being tuned.", why, "Try again after the run, or cancel the run at /tune."
            )

    def mark_ready(self, entry: ModelEntry, model: ServedModel) -> None:
        woken = entry.asleep is not None
        entry.served, entry.asleep, entry.card, entry.path = model, None, model.card, model.path
        entry.name, entry.names = model.name, entry.names | {model.name, *model.aliases}
        entry.state, entry.last_used_s = "ready", self.clock()
        entry.idle.set()
        entry.ready_s = entry.last_used_s
        if entry.lost_ranks and model.executor is not None:
            model.executor.continue_from(entry.lost_ranks)
        entry.watch = asyncio.create_task(self._watch(entry, model))
        if not woken:  # takes 0.1 s or more, and a request waits for a waking model
            gc.collect()
        gc.freeze()  # full collections would walk over these long-lived objects again and again, mid-step
        if len(ready(self.entries)) == 1:
            self.baseline_bytes = psutil.Process().memory_info().rss - model.plan.weights_bytes
        log.info("model ready name=%s device=%s", entry.name, model.plan.device)

    async def drain(self, entry: ModelEntry, limit_s: float, *, give_up: str = "") -> None:
        """Wait until the running requests end; new ones wait. give_up: text of a `ModelsBusy` after the time limit.

        Raises `UnloadCancelled` if the model is kept meanwhile, or `ModelsBusy` if there is a `give_up`.
        """
        if entry.state != "ready":
            return
        entry.state, entry.is_draining = "unloading", True
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    while entry.num_leases and entry.is_draining:
                        await entry.idle.wait()
            if not entry.is_draining:
                raise _kept(entry, give_up)
            if entry.num_leases and give_up:
                why = f"{entry.num_leases} requests of {entry.name} were still running after {limit_s:.0f} s."
                raise ModelsBusy(give_up, why, "Try again later.")
        except BaseException:
            entry.state = "ready"
            raise
        finally:
            entry.is_draining = False

    async def put_to_sleep(self, entry: ModelEntry) -> None:
        """Put the model to sleep: move its weights to the host and free everything else."""
        entry.state = "unloading"  # set it here: a request that arrives before the task below starts must wait
        await uncancelled(self._put_to_sleep_now(entry))

    async def _put_to_sleep_now(self, entry: ModelEntry) -> None:
        served, entry.served, entry.state = entry.served, None, "unloading"
        assert served is not None
        await self.stop_engine(entry, served)
        gc.unfreeze()
        try:
            entry.asleep = await asyncio.to_thread(self.loader.sleep, served)
            entry.state = "sleeping"
        except Exception as error:
            log.exception("sleep failed name=%s", entry.name)
            await asyncio.to_thread(served.close)
            entry.state = "unloaded"
            raise LocalLLMError(f"{entry.name} could not be put to sleep.", str(error)) from error
        finally:
            del served
            await self.collect_garbage()

    async def unload(self, entry: ModelEntry) -> None:
        """Unload the model. Requests that still run end with an error."""
        entry.state = "unloading"  # set it here: a request that arrives before the task below starts must wait
        await uncancelled(self._unload_now(entry))

    async def _unload_now(self, entry: ModelEntry) -> None:
        served, asleep = entry.served, entry.asleep
        entry.served, entry.asleep, entry.state = None, None, "unloading"
        gc.unfreeze()
        if served is not None:
            await self.stop_engine(entry, served)
            await asyncio.to_thread(served.close)
        if asleep is not None:
            await asyncio.to_thread(asleep.close)
        del served, asleep
        entry.state = "unloaded"
        if entry.settings is None and entry in self.entries:
            self.entries.remove(entry)
        await self.collect_garbage()

    async def collect_garbage(self) -> None:
        gc.collect()  # an engine and its callbacks refer to each other
        await asyncio.to_thread(self.loader.release_cached_memory)
        if ready(self.entries):
            gc.freeze()

    async def stop_engine(self, entry: ModelEntry, served: ServedModel) -> None:
        """Stop the model's client: its requests end with an error, and the end of its engine is not reported."""
        if entry.watch is not None:
            entry.watch.cancel()
            entry.watch = None
        await served.client.stop()

    async def _watch(self, entry: ModelEntry, model: ServedModel) -> None:
        error = await model.client.ended()
        if isinstance(error, DeviceLost) and error.ends_process:
            self.set_device_lost(error)
        else:
            self._on_crash(entry, model, error)

    async def device_lost(self) -> DeviceLost:
        """Wait until a model's device is lost, which ends the process."""
        return await asyncio.shield(self._lost_device())

    def set_device_lost(self, error: DeviceLost) -> None:
        lost = self._lost_device()
        if not lost.done():
            lost.set_result(error)

    def _lost_device(self) -> asyncio.Future[DeviceLost]:
        if self._lost is None:
            self._lost = asyncio.get_running_loop().create_future()
        return self._lost


def _kept(entry: ModelEntry, give_up: str) -> LocalLLMError:
    if entry.num_leases:
        entry.idle.clear()  # set by `keep` although requests run
    if give_up:
        return ModelsBusy(give_up, f"{entry.name} was kept while its requests ended.", "Try again later.")
    return UnloadCancelled(f"{entry.name} stays loaded.", "It was kept while its requests ended.", param="model")


async def uncancelled(work: Coroutine[Any, Any, Result], on_cancel: Callable[[], None] = lambda: None) -> Result:
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
