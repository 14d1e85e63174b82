"""Lend a model's weights to a tuning run, and reopen a model with other settings on the weights in memory.

Both end the model's engine, keep its weights, and open an engine on them again (reopen.py). The weights are loaded
again if the settings put experts elsewhere: the settings of a profile, or the former ones after a run that moved them.
Does not know: how the other models are loaded and unloaded (loading.py), what a tuning run does.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

from localllm.config.settings import Settings
from localllm.errors import DeviceLost, LocalLLMError, UnsupportedOption
from localllm.serving.compute import clear_tracebacks
from localllm.serving.entry import ModelEntry, ModelNotLoaded, ModelStatus
from localllm.serving.eviction import reserved_bytes
from localllm.serving.loading import ModelLoads, in_compute_thread
from localllm.serving.phases import DRAIN_S
from localllm.serving.register import Register
from localllm.serving.reopen import BareModel
from localllm.serving.served import LoadLimits
from localllm.serving.transitions import uncancelled

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class Lending:
    """Lends one model at a time. Meanwhile no other model is loaded or unloaded."""

    def __init__(self, register: Register, loads: ModelLoads) -> None:
        self._register, self._transitions, self._claim = register, loads.transitions, loads.claim
        self._borrower: asyncio.Task[Any] | None = None

    async def close(self) -> None:
        """Cancel the loan, and wait until the weights are back."""
        if self._borrower is not None:
            self._borrower.cancel()
            await asyncio.wait({self._borrower})

    async def lend(self, name: str, work: Callable[[BareModel, Settings], Result], stop: Callable[[], None]) -> Result:
        """Run `work` on a model's weights, on a thread of its own, and serve the model as before afterwards, even on
        failure.

        Running requests may finish first. Meanwhile new requests are refused, and no other model is loaded or unloaded.
        stop: makes `work` return soon; called when this call is cancelled or the server ends. Raises `ModelTuning` for
        a second loan, `ModelsBusy` when requests do not end within `DRAIN_S`, and what a load and `work` raise.
        """
        entry = await self._require_reopenable(name)
        self._transitions.require_no_loan()
        self._transitions.lent, self._borrower = entry, asyncio.current_task()
        try:
            async with self._transitions.turn:
                await self._wait_until_idle(entry)
                return await uncancelled(self._lend_now(entry, work), stop)
        finally:
            self._transitions.lent = self._borrower = None

    async def reopen(self, name: str, tuned: Mapping[str, Any]) -> ModelStatus:
        """Serve a model with the settings of a profile, on the weights already in memory. Its requests wait meanwhile.

        On failure the model is served with its previous settings, and the error is raised. Raises `ModelsBusy` as
        `lend` does.
        """
        entry = await self._require_reopenable(name)
        async with self._transitions.turn:
            await self._wait_until_idle(entry)
            await uncancelled(self._reopen_now(entry, tuned))
        return entry.status(self._transitions.clock())

    async def _require_reopenable(self, name: str) -> ModelEntry:
        self._transitions.require_no_loan()
        entry = self._register.require(name)
        with await self._claim(entry) as model:
            model.require("generate")
        if entry.has_replicas:
            what, why = f"{entry.name} cannot be tuned.", "It runs as several replicas (--data-parallel-size)."
            raise UnsupportedOption(what, why, "Tune it with one replica.", param="model")
        if entry.settings is None:
            raise UnsupportedOption(
                f"{entry.name} cannot be opened again.", "It was not loaded by this server.", param="model"
            )
        return entry

    async def _wait_until_idle(self, entry: ModelEntry) -> None:
        """Wait until the model has no requests; new ones wait. Raises `ModelsBusy`, `ModelNotLoaded`."""
        await self._transitions.drain(entry, DRAIN_S, give_up=f"{entry.name} is busy.")
        if entry.served is None:
            raise ModelNotLoaded(f"{entry.name} is {entry.state}.", "Its state changed while this request waited.")

    async def _lend_now(self, entry: ModelEntry, work: Callable[[BareModel, Settings], Result]) -> Result:
        assert entry.served is not None
        assert entry.settings is not None
        tuned = entry.served.tuned
        bare = await self._close_engine(entry, "tuning")
        try:
            return await in_compute_thread(partial(work, bare, entry.settings))
        except BaseException as error:
            clear_tracebacks(error)
            if isinstance(error, DeviceLost) and error.ends_process:
                self._transitions.set_device_lost(error)
            raise
        finally:
            if self._transitions.closing:
                entry.state = "unloaded"
                await asyncio.to_thread(bare.close)
            elif await self._open_engine(entry, bare, tuned) is not None:
                await asyncio.to_thread(bare.close)

    async def _reopen_now(self, entry: ModelEntry, tuned: Mapping[str, Any]) -> None:
        assert entry.served is not None
        before = entry.served.tuned
        bare = await self._close_engine(entry, "loading")
        error = await self._open_engine(entry, bare, tuned)
        if error is not None:
            if await self._open_engine(entry, bare, before) is not None:
                await asyncio.to_thread(bare.close)
            raise error

    async def _close_engine(self, entry: ModelEntry, state: Literal["tuning", "loading"]) -> BareModel:
        """Close the engine and keep the weights."""
        served, entry.served = entry.served, None
        assert served is not None
        await self._transitions.stop_engine(entry, served)
        gc.unfreeze()
        entry.state = state
        bare = await asyncio.to_thread(self._transitions.loader.close_engine, served)
        del served
        await self._transitions.collect_garbage()
        return bare

    async def _open_engine(self, entry: ModelEntry, bare: BareModel, tuned: Mapping[str, Any]) -> LocalLLMError | None:
        """Open an engine with these settings. On failure mark the model as failed, and return the error."""
        assert entry.settings is not None
        config = replace(entry.settings.engine, **tuned)
        baseline, loader = self._transitions.baseline_bytes, self._transitions.loader
        try:
            if not bare.has_placed(config):
                log.info("model loaded again name=%s experts=%s", entry.name, config.placement)
                limits = LoadLimits(reserved_bytes(self._transitions.entries, baseline))
                settings = replace(entry.settings, engine=replace(config, profile="none"))
                await in_compute_thread(partial(loader.load_again, bare, settings, lambda phase: None, limits))
            known = None if baseline is None else baseline + bare.weights_bytes
            limits = LoadLimits(reserved_bytes(self._transitions.entries, known))
            work = partial(loader.open_engine, bare, config, lambda phase: None, limits)
            model = replace(await in_compute_thread(work), tuned=tuned)
            await model.client.start()
        except Exception as error:
            clear_tracebacks(error)
            why = error if isinstance(error, LocalLLMError) else LocalLLMError(f"{entry.name} stopped.", f"{error}.")
            log.warning("model could not be opened again name=%s error=%s", entry.name, error)
            entry.state, entry.error, entry.failed_s = "failed", why, self._transitions.clock()
            await self._transitions.collect_garbage()
            return why
        entry.error = None
        self._transitions.mark_ready(entry, model)
        return None
