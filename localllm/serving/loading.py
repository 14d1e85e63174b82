"""The blocking calls that load, sleep and wake models, and the thread in which a load runs.

Does not know: which model is loaded, and when.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from localllm.config.settings import EngineConfig, Settings
from localllm.errors import EngineStopped
from localllm.serving.compute import clear_tracebacks, release_cached_memory
from localllm.serving.entry import ModelEntry
from localllm.serving.phases import OnPhase, Phase
from localllm.serving.reopen import BareModel, SleepingModel, close_engine, open_engine
from localllm.serving.served import LoadLimits, ServedModel

if TYPE_CHECKING:
    from localllm.models.library.catalog import ResolvedModel

Result = TypeVar("Result")


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
    release_cached_memory: Callable[[], None] = release_cached_memory


async def load_in_thread(loader: Loader, entry: ModelEntry, limits: LoadLimits) -> ServedModel:
    """Build the model, or wake it if it sleeps. When cancelled, wait for the thread, which stops at its next report."""
    settings = entry.settings
    assert settings is not None
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
