"""The state that the handlers of the Models page share: one `LibraryState` per application.

Does not know: routes.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from typing import Any, Literal

from litestar import Request

from localllm.config.settings import Settings
from localllm.errors import LocalLLMError
from localllm.machine.bandwidth import with_kept_speeds
from localllm.machine.hardware import Hardware
from localllm.models.fit.conversation_bytes import needs_in_words
from localllm.models.library.hub.client import offline_switch
from localllm.models.library.hub.downloads import Downloads
from localllm.models.library.pick_list import Pick, SpeechPick, read_picks
from localllm.models.library.picks import FittingPick
from localllm.serving.manager import ModelManager
from localllm.serving.suggestions import Suggestions
from localllm.units import format_bytes, format_parameters
from localllm.web.pages.frame.errors import notice
from localllm.web.pages.frame.state import once_per_app, pages_state
from localllm.web.pages.frame.views import ErrorNotice, View, view
from localllm.web.pages.library.downloads import num_running
from localllm.web.pages.library.fit_checks import FitChecks
from localllm.web.pages.library.installed_models import InstalledModels, page_url

Tab = Literal["installed", "discover", "downloads", "none"]


@view("library/_tabs.html")
class LibraryTabs(View):
    """The tabs of the page."""

    here: Tab
    running: int  # downloads that have not ended


@dataclass(frozen=True, slots=True)
class PickCard:
    """A recommended model."""

    name: str
    url: str
    title: str
    says: str
    download: str  # 5.0 GiB, 8.2 B parameters
    memory: str  # 1.1 GiB at 4,096 tokens (10.7 GiB at its longest, 40,960)
    speed: str  # 11 to 24 tokens/s; empty: unknown
    license: str


@view("library/_picks.html")
class Picks(View):
    """The models suggested for this machine, shown if it has none."""

    picks: tuple[PickCard, ...] = ()
    machine: str = ""  # Runs on RTX 4090: 22.9 GiB free
    offline: str = ""  # what switched the hub off; empty: it may be asked
    is_pending: bool = False  # the models have not been planned yet; the live connection fills the room
    speech: tuple[PickCard, ...] = ()  # those that transcribe, beside another model


@view("library/_notice.html")
class LibraryNotice(View):
    """The result of the last action. That of a load from a path changes with the load."""

    said: str = ""
    error: ErrorNotice | None = None
    chat_url: str = ""  # the model is loaded: a link to a chat with it


log = logging.getLogger(__name__)

SOON_S = 1.5
"""How long an action is waited for. A longer one continues in the background; the model's row shows its progress."""

MOST_SAID = 50
MOST_PICKS, MOST_SPEECH_PICKS = 3, 2


class LibraryState:
    """The shared state of the Models page."""

    def __init__(
        self, manager: ModelManager, settings: Settings, downloads: Downloads, suggestions: Suggestions
    ) -> None:
        self.manager, self.settings, self.downloads, self.suggestions = manager, settings, downloads, suggestions
        self.models = InstalledModels(manager)
        self.fits = FitChecks(manager, settings)
        self._said: dict[str, str] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def offline_switch(self) -> str:
        """Return what switched the hub off; empty: it may be asked."""
        return offline_switch(self.settings)

    def pick(self, name: str) -> Pick | None:
        """Return the suggested model of that name."""
        return next((pick for pick in read_picks(self.settings.picks).picks if pick.name == name), None)

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

    def load_notice(self, name: str) -> LibraryNotice:
        """Return the notice about a model that is loaded from a path, as its load is now."""
        entry = self.manager.register.find(name)
        if entry is None or entry.state not in ("loading", "ready", "failed"):
            return LibraryNotice()
        if entry.state == "failed":
            return LibraryNotice(error=notice(entry.error) if entry.error is not None else None)
        if entry.state == "ready":
            return LibraryNotice(f"{entry.name} is loaded.", chat_url="/")
        return LibraryNotice(f"{entry.name} is being loaded.")

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

    async def picks(self, *, waits: bool = False) -> Picks | None:
        """Return the suggested models; None if a model is installed already. waits: until the models are planned, else
        the view says that they are pending."""
        if not self.models.is_bare or num_running(self.downloads):
            return None
        known = await self.suggestions.get() if waits else self.suggestions.known()
        if known is None:
            return Picks(is_pending=True)
        cards = tuple(_card(each) for each in known.picks[:MOST_PICKS])
        hear = [pick for pick in read_picks(self.settings.picks).speech if pick.fits(known.hardware)]
        # What a load or a fit has measured; without it no speed is shown.
        kept = await asyncio.to_thread(with_kept_speeds, known.hardware)
        kept = replace(kept, speeds=kept.speeds._replace(ram=known.cpu_bandwidth))
        speech = tuple(_speech_card(each, kept) for each in hear[:MOST_SPEECH_PICKS])
        return Picks(cards, machine_words(known.hardware), self.offline_switch, speech=speech)


def _card(found: FittingPick) -> PickCard:
    pick = found.pick
    return PickCard(
        name=pick.name,
        url=page_url(pick.name),
        title=pick.title,
        says=" ".join(filter(None, (pick.says, found.gpus))),
        download=f"{format_bytes(pick.bytes)}, {format_parameters(pick.parameters)} parameters",
        memory=needs_in_words(found.needs),
        speed=found.speed,
        license=pick.license or "not stated",
    )


def _speech_card(pick: SpeechPick, hardware: Hardware) -> PickCard:
    return PickCard(
        name=pick.name,
        url=page_url(pick.name),
        title=pick.title,
        says=pick.says,
        download=f"{format_bytes(pick.bytes)}, {format_parameters(pick.parameters)} parameters",
        memory=f"{format_bytes(pick.cpu_bytes)} on the CPU",
        speed=pick.speed_on(hardware),
        license=pick.license or "not stated",
    )


def machine_words(hardware: Hardware) -> str:
    """Return where models run, and the free memory that decides: of the GPU that would be used, else of the machine."""
    gpu = max((gpu for gpu in hardware.gpus if gpu.is_supported), key=lambda gpu: gpu.free_bytes, default=None)
    if gpu is not None:
        return f"Runs on {gpu.name}: {format_bytes(gpu.free_bytes)} free"
    cores = f"{hardware.cpu_cores} {'core' if hardware.cpu_cores == 1 else 'cores'}"
    words = f"Runs on the CPU: {cores}, {format_bytes(hardware.ram_available_bytes)} of memory free"
    unsupported = ", ".join(gpu.name for gpu in hardware.gpus)
    return f"{words} ({unsupported} is not supported)" if unsupported else words


def library_state(request: Request[Any, Any, Any]) -> LibraryState:
    """Return the application's library, created at first use."""
    app, pages = request.app.state, pages_state(request)
    return once_per_app(
        request.app,
        "library",
        lambda: LibraryState(app["manager"], app["settings"], app["downloads"], pages.suggestions),
    )
