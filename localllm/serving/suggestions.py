"""The suggested models of a server: computed once beside the event loop, and kept for all pages.

A page takes what is known, without a wait. The machine is looked at again from time to time; only if its hardware or
its free memory has changed are the models planned anew, and pages have the old answer until then.
Does not know: pages, which of the models are installed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from dataclasses import dataclass

from localllm.config.settings import Settings
from localllm.errors import ConfigError
from localllm.machine.bandwidth import memory_bandwidth
from localllm.machine.hardware import Hardware, read_hardware
from localllm.models.library.pick_list import Pick, read_picks
from localllm.models.library.picks import FittingPick, fitting_picks, rounded
from localllm.serving.eviction import hardware_once_free
from localllm.serving.manager import ModelManager

log = logging.getLogger(__name__)

LOOK_EVERY_S = 30.0
"""How long the free memory is taken to be the same."""


@dataclass(frozen=True, slots=True)
class Suggested:
    """The suggested models that fit, the one to take first, and the machine that they were planned for."""

    picks: tuple[FittingPick, ...]
    hardware: Hardware
    cpu_bandwidth: float | None


class Suggestions:
    """The suggestions of one server. All methods run on its event loop."""

    def __init__(self, manager: ModelManager, settings: Settings) -> None:
        self._manager, self._settings = manager, settings
        self._known: Suggested | None = None
        self._looked_s = -math.inf
        self._work: asyncio.Task[Suggested] | None = None

    def known(self) -> Suggested | None:
        """Return what was computed last, None at first. Begins to compute what is missing or old."""
        if time.monotonic() - self._looked_s > LOOK_EVERY_S:
            self._looked_s = time.monotonic()
            self._work = asyncio.create_task(self._compute(), name="suggestions")
        return self._known

    async def get(self) -> Suggested:
        """Return the suggestions, after a wait only the first time."""
        known = self.known()
        if known is not None:
            return known
        assert self._work is not None
        return await asyncio.shield(self._work)

    def all_picks(self) -> tuple[Pick, ...]:
        """Return the list of suggested models; none if the config file's list is wrong, as doctor reports."""
        try:
            return read_picks(self._settings.picks).picks
        except ConfigError as error:
            log.warning("no model is suggested reason=%s", error)
            return ()

    async def close(self) -> None:
        if self._work is not None:
            await asyncio.wait({self._work})

    async def _compute(self) -> Suggested:
        self._known = await asyncio.to_thread(self._look, self._known)
        return self._known

    def _look(self, known: Suggested | None) -> Suggested:
        hardware = rounded(hardware_once_free(read_hardware(), self._manager.entries))
        bandwidth = memory_bandwidth(hardware)
        if known is not None and (known.hardware, known.cpu_bandwidth) == (hardware, bandwidth):
            return known
        count = len(self.all_picks())
        found = fitting_picks(hardware, self._settings, bandwidth, count) if count else []
        return Suggested(tuple(found), hardware, bandwidth)
