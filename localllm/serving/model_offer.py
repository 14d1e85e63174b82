"""The model that a server without a real one offers: the choice, and the way from the hub to a running engine.

    absent -> starting -> downloading -> loading -> ready
                 |             |            |-> failed
                 '-> failed    |-> failed   '-> installed    its load was cancelled
                               '-> stopped                   its bytes stay, and a later start resumes

The state is read from the download and from the manager, so the Models page, another tab and a program see and change
the same one. Only two facts are kept here: which model was offered last, and the error of a step that has no other
place. After a restart of the server, partial files on the disk show which download to resume.
Does not know: HTTP, keys, how an offer is shown.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from typing import Literal

from localllm.config.settings import Settings
from localllm.errors import InvalidParameter, LocalLLMError, ModelNotFound
from localllm.models.library.catalog import DEMO_NAME, demo_path, list_models, resolve_model
from localllm.models.library.hub.cache import incomplete_repositories, remove_partial
from localllm.models.library.hub.client import offline_error
from localllm.models.library.hub.downloads import Downloads, DownloadStatus
from localllm.models.library.hub.plan import as_it_stands
from localllm.models.library.hub.pull import PullProgress
from localllm.models.library.names import parse_name
from localllm.models.library.pick_list import Pick
from localllm.serving.entry import ModelEntry
from localllm.serving.manager import ModelManager
from localllm.serving.suggestions import Suggestions

State = Literal["absent", "starting", "downloading", "stopped", "installed", "loading", "ready", "failed"]
POLL_S = 0.2
"""How often the end of a download is looked for."""
STOP_S = 1.5
"""How long `stop` waits for a load to end. A longer one ends in the background; the state shows it."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A model of the list of picks, and how it would run here."""

    pick: Pick
    context_tokens: int | None  # longest context; None: the model does not fit into the memory that is free now
    speed: str = ""  # such as "11 to 24 tokens/s"; empty: unknown


@dataclass(frozen=True, slots=True)
class OfferStatus:
    """The state of an offered model, with the figures of that state."""

    state: State
    held_bytes: int = 0  # of its files, on this machine
    progress: PullProgress | None = None  # of its download, in the state downloading
    entry: ModelEntry | None = None  # the model in the manager, in the states loading and ready
    error: LocalLLMError | None = None  # in the state failed


class ModelOffer:
    """The offer of one server. All methods run on its event loop."""

    def __init__(
        self, manager: ModelManager, downloads: Downloads, settings: Settings, suggestions: Suggestions
    ) -> None:
        self._manager, self._downloads, self._settings = manager, downloads, settings
        self._suggestions = suggestions
        self._run = _Run("")  # the latest start

    async def find(self) -> Offer | None:
        """Return the model to offer; None if a real model is in use or installed, or if no pick fits.

        A model that was started stays the offer until it is ready. Else the first of these: a pick with partial files,
        an installed pick, the best pick that fits.
        """
        default = self._manager.register.default
        if (started := await self.started()) is not None:
            return started
        if default is not None and (default.state == "loading" or not _is_demo(default)):
            return None
        models, partial = await asyncio.to_thread(lambda: (list_models(), incomplete_repositories()))
        installed = {model.name for model in models} - {DEMO_NAME}
        cut = next((pick for pick in self._picks() if parse_name(pick.name).base in partial), None)
        if cut is not None:
            return await self.describe(cut.name)
        able = [offer for offer in await self._fit() if not installed or offer.pick.name in installed]
        if not able or (await self.status(able[0].pick.name)).state == "ready":
            return None
        return able[0]

    @property
    def is_pending(self) -> bool:
        """Return whether `find` would wait, because the suggested models have not been planned yet."""
        default = self._manager.register.default
        if default is not None and (default.state == "loading" or not _is_demo(default)):
            return False
        return bool(self._suggestions.all_picks()) and self._suggestions.known() is None

    async def started(self) -> Offer | None:
        """Return the model that was started last, until it is ready or its files are discarded."""
        name = self._run.name
        if not name or (await self.status(name)).state in ("absent", "ready"):
            return None
        return await self.describe(name)

    async def describe(self, name: str) -> Offer:
        """Return a pick as an offer, also if it does not fit now. Raises `InvalidParameter` for any other model."""
        pick = next((pick for pick in self._picks() if pick.name == name), None)
        if pick is None:
            hint = "The Models page downloads any model of the hub."
            raise InvalidParameter(f"{name[:100]!r} is not one of the suggested models.", hint=hint, param="model")
        return next((offer for offer in await self._fit() if offer.pick.name == name), Offer(pick, None))

    async def status(self, name: str) -> OfferStatus:
        """Return the state of an offered model."""
        entry = self._manager.register.find(name)
        if entry is not None and entry.state in ("loading", "ready", "tuning"):
            return OfferStatus("loading" if entry.state == "loading" else "ready", entry=entry)
        download, run = self._download(name), self._run if self._run.name == name else None
        if run is not None and run.is_busy and not run.is_stopping and not run.has_begun:
            return OfferStatus("starting")
        is_stopping = run is not None and run.is_busy and run.is_stopping
        if download is not None and not download.is_over and not is_stopping:
            return OfferStatus("downloading", download.progress.bytes_done, download.progress)
        installed, held = await asyncio.to_thread(_look, name, download)
        error = run.error if run is not None else None
        if installed:
            error = error or (entry.error if entry is not None and entry.state == "failed" else None)
            return OfferStatus("failed" if error else "installed", held, error=error)
        error = error or (download.error if download is not None and download.state == "failed" else None)
        if error is not None:
            return OfferStatus("failed", held, error=error)
        return OfferStatus("stopped" if held else "absent", held)

    def start(self, name: str) -> None:
        """Download what is missing of an offered model, then load it. Does nothing while another start runs."""
        before = self._run
        if before.is_busy and not before.is_stopping and not self._has_ended(before):
            return
        self._run = _Run(name)
        self._run.task = asyncio.create_task(self._work(self._run, before), name=f"offer {name}")

    async def stop(self, name: str) -> None:
        """Cancel the download or the load of an offered model. Received bytes stay."""
        entry = self._manager.register.find(name)
        if entry is not None and entry.state == "loading":
            unloading = asyncio.ensure_future(self._manager.unload(entry.name))
            await asyncio.wait({unloading}, timeout=STOP_S)
            return
        if self._run.name == name:
            self._run.is_stopping = True
        download = self._download(name)
        if download is not None:
            await asyncio.to_thread(self._downloads.cancel, download.id)

    async def discard(self, name: str) -> int:
        """Cancel the download of an offered model and delete its partial files. Returns the freed bytes."""
        await self.stop(name)
        if self._run.name == name:
            if self._run.task is not None:
                await asyncio.wait({self._run.task}, timeout=STOP_S)
            self._run.error = None
        freed, download = 0, self._download(name)
        if download is not None:
            freed = await asyncio.to_thread(self._downloads.discard, download.id)
        return freed + await asyncio.to_thread(remove_partial, parse_name(name).base)

    async def close(self) -> None:
        """Stop following the download. The server ends the download itself."""
        if self._run.task is not None:
            self._run.task.cancel()
            await asyncio.wait({self._run.task})

    async def _work(self, run: _Run, before: _Run) -> None:
        if before.task is not None:  # a stopped download ends when its connection says something, or times out
            await asyncio.wait({before.task})
        try:
            if not await asyncio.to_thread(_is_installed, run.name) and not await self._downloaded(run):
                return
            if not run.is_stopping:
                keep_alive_s = math.inf if self._settings.server.keep_alive is None else None
                await self._manager.load(run.name, keep_alive_s=keep_alive_s, wait=False)
        except LocalLLMError as error:
            run.error = error

    async def _downloaded(self, run: _Run) -> bool:
        """Download the model. Return False if the download was stopped or failed."""
        if self._settings.engine.offline:
            raise offline_error(run.name)
        download = await asyncio.to_thread(self._downloads.start, run.name)
        run.has_begun = True
        if run.is_stopping:  # while the hub was asked for the files
            await asyncio.to_thread(self._downloads.cancel, download.id)
        while not download.is_over:
            await asyncio.sleep(POLL_S)
            try:
                download = self._downloads.get(download.id)
            except ModelNotFound:  # removed from the list by another page
                return False
        return download.state == "done"

    def _has_ended(self, run: _Run) -> bool:
        """Return whether the download of a run has stopped or failed, which the run itself notices a moment later."""
        download = self._download(run.name) if run.has_begun else None
        return download is not None and download.state in ("paused", "cancelled", "failed")

    def _download(self, name: str) -> DownloadStatus | None:
        """Return the latest download of the model by this server, whoever started it."""
        return next((each for each in reversed(self._downloads.list()) if each.plan.name == name), None)

    async def _fit(self) -> tuple[Offer, ...]:
        """Return the picks that fit this machine, the one to take first."""
        found = (await self._suggestions.get()).picks
        return tuple(Offer(each.pick, each.max_model_len, each.speed) for each in found)

    def _picks(self) -> tuple[Pick, ...]:
        return self._suggestions.all_picks()


class _Run:
    """One start of an offered model, until its load begins or its download ends."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.task: asyncio.Task[None] | None = None
        self.has_begun = False  # its download is in the list of downloads
        self.is_stopping = False
        self.error: LocalLLMError | None = None  # of a step before the download or the load

    @property
    def is_busy(self) -> bool:
        return self.task is not None and not self.task.done()


def _is_demo(entry: ModelEntry) -> bool:
    if entry.path is not None:
        return entry.path == demo_path()
    return entry.settings is not None and entry.settings.engine.model == DEMO_NAME


def _is_installed(name: str) -> bool:
    try:
        resolve_model(name)
    except LocalLLMError:
        return False
    return True


def _look(name: str, download: DownloadStatus | None) -> tuple[bool, int]:
    """Return whether a model is installed, and how many bytes of an interrupted download are on this machine."""
    if download is not None:
        return _is_installed(name), as_it_stands(download.plan).cached_bytes
    return _is_installed(name), incomplete_repositories().get(parse_name(name).base, 0)
