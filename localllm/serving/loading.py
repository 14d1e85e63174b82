"""The blocking calls that load, sleep and wake models, and the thread in which a load runs.

Does not know: which model is loaded, and when.
"""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from localllm.config.settings import EngineConfig, Settings
from localllm.errors import EngineStopped
from localllm.serving.entry import ModelEntry
from localllm.serving.reopen import BareModel, close_engine, open_engine
from localllm.serving.served import Beside, OnPhase, Phase, ServedModel
from localllm.serving.sleep import SleepingModel, give_back_memory

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
class Road:
    """The functions that load, sleep, wake and find models. All of them block."""

    build: Callable[[Settings, OnPhase, Beside], ServedModel]
    sleep: Callable[[ServedModel], SleepingModel]
    wake: Callable[[SleepingModel, Settings, OnPhase, Beside], ServedModel]
    resolve: Callable[[str, bool], ResolvedModel] = _resolve
    list: Callable[[], Sequence[ResolvedModel]] = _list
    lay_bare: Callable[[ServedModel], BareModel] = close_engine
    open_again: Callable[[BareModel, EngineConfig, OnPhase, Beside], ServedModel] = open_engine
    give_back_memory: Callable[[], None] = give_back_memory


async def load_in_thread(road: Road, entry: ModelEntry, beside: Beside) -> ServedModel:
    """Build the model, or wake it if it sleeps. When cancelled, wait for the thread, which stops at its next report."""
    settings = entry.settings
    assert settings is not None
    event_loop, given_up = asyncio.get_running_loop(), threading.Event()

    def report(phase: Phase) -> None:
        """Report a phase from the loading thread, which can only be stopped here."""
        if given_up.is_set():
            raise EngineStopped("The load was cancelled.")
        event_loop.call_soon_threadsafe(entry.note, phase)

    def work() -> ServedModel:
        try:
            if entry.asleep is not None:
                return road.wake(entry.asleep, settings, report, beside)
            return road.build(settings, report, beside)
        except BaseException as error:
            let_go(error)
            raise

    loader = own_thread()
    job = event_loop.run_in_executor(loader, work)
    try:
        return await asyncio.shield(job)
    except asyncio.CancelledError:
        given_up.set()
        while not job.done():  # its memory is in use until it ends: no other load may plan with that memory
            with suppress(asyncio.CancelledError):
                await asyncio.wait({job})
        if job.exception() is None:
            job.result().close()
        raise
    finally:
        loader.shutdown(wait=False)


def own_thread() -> ThreadPoolExecutor:
    """Return an executor for computing work; shut it down with the work.

    libgomp keeps a worker team for every thread that has ever computed. With an idle second team it counts more threads
    than cores, and the engine's workers sleep instead of spinning.
    """
    return ThreadPoolExecutor(1, "localllm-loader")


async def in_own_thread(work: Callable[[], Result]) -> Result:
    thread = own_thread()
    try:
        return await asyncio.get_running_loop().run_in_executor(thread, work)
    finally:
        thread.shutdown(wait=False)


def let_go(error: BaseException | None) -> None:
    """Clear the frames of a stored error's traceback, as they would hold the weights."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
