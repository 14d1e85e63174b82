"""The state that the handlers of the Models page share: one `LibraryState` per application.

Does not know: routes.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable
from typing import Any

from litestar import Request

from localllm.config.settings import Settings
from localllm.errors import LocalLLMError
from localllm.machine.bandwidth import memory_bandwidth
from localllm.machine.hardware import Hardware
from localllm.models.library.hub import client
from localllm.models.library.hub.downloads import Downloads
from localllm.models.library.picks import FittingPick, fitting_picks
from localllm.serving.manager import ModelManager
from localllm.units import format_bytes, format_count, format_parameters
from localllm.web.pages.frame.state import once_per_app
from localllm.web.pages.library.download_presenters import num_running
from localllm.web.pages.library.fit_checks import FitChecks
from localllm.web.pages.library.installed_models import InstalledModels, page_url
from localllm.web.pages.library.views import LibraryTabs, PickCard, Picks, Tab

log = logging.getLogger(__name__)

SOON_S = 1.5
"""How long an action is waited for. A longer one continues in the background; the model's row shows its progress."""
MOST_SAID = 50


class LibraryState:
    """The shared state of the Models page."""

    def __init__(self, manager: ModelManager, settings: Settings, downloads: Downloads) -> None:
        self.manager, self.settings, self.downloads = manager, settings, downloads
        self.models = InstalledModels(manager)
        self.fits = FitChecks(manager, settings)
        self._said: dict[str, str] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def is_offline(self) -> bool:
        return self.settings.engine.offline or client.is_offline()

    def tabs(self, here: Tab) -> LibraryTabs:
        return LibraryTabs(here, num_running(self.downloads))

    def leave_notice(self, text: str) -> str:
        """Keep a message for the page after a redirect; return the query that names it."""
        key = secrets.token_urlsafe(6)
        self._said[key] = text
        while len(self._said) > MOST_SAID:
            del self._said[next(iter(self._said))]
        return f"said={key}"

    def take_notice(self, key: str | None) -> str:
        """Return the message with this key, and forget it."""
        return self._said.pop(key or "", "")

    async def wait_briefly(self, work: Awaitable[object]) -> None:
        """Wait for the work, but only for a moment. Raises its error if it fails by then; later errors
        go to the log.
        """
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        await asyncio.wait({task}, timeout=SOON_S)
        if task.done():
            task.result()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), LocalLLMError):
            log.info("a page's background task failed reason=%s", error)

    async def picks(self) -> Picks | None:
        """Return the recommended models; None if a model is installed already."""
        if not self.models.is_bare or num_running(self.downloads):
            return None
        hardware = await self.fits.hardware()
        found = await asyncio.to_thread(self._fitting, hardware)
        cards = [_card(each) for each in found]
        return Picks(tuple(cards), machine_words(hardware), self.is_offline)

    def _fitting(self, hardware: Hardware) -> list[FittingPick]:
        """Return the models that fit. The first call on a machine measures its memory for up to 50 ms."""
        return fitting_picks(hardware, self.settings, memory_bandwidth(hardware))


def _card(found: FittingPick) -> PickCard:
    pick = found.pick
    memory = f"{format_bytes(found.plan.total_bytes)} in memory, up to {format_count(found.max_model_len)} tokens"
    return PickCard(
        name=pick.name,
        url=page_url(pick.name),
        title=pick.title,
        says=" ".join(filter(None, (pick.says, found.gpus))),
        download=format_bytes(pick.bytes),
        memory=", ".join(filter(None, (memory, found.speed))),
        license=", ".join(filter(None, (f"{format_parameters(pick.parameters)} parameters", pick.license))),
    )


def machine_words(hardware: Hardware) -> str:
    """Return the free memory that decides: of the GPU that would be used, else of the machine."""
    gpu = max((gpu for gpu in hardware.gpus if gpu.is_supported), key=lambda gpu: gpu.free_bytes, default=None)
    if gpu is not None:
        return f"{gpu.name}, {format_bytes(gpu.free_bytes)} free"
    ram = format_bytes(hardware.ram_available_bytes)
    return f"No supported GPU; {hardware.cpu_cores} CPU cores, {ram} of memory free"


def library_state(request: Request[Any, Any, Any]) -> LibraryState:
    """Return the application's library, created at first use."""
    app = request.app.state
    return once_per_app(request.app, "library", lambda: LibraryState(app["manager"], app["settings"], app["downloads"]))
