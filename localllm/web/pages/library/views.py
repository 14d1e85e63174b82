"""Views of the Models page: installed models, search results of the hub, and downloads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from localllm.web.pages.frame.views import ErrorNotice, Fact, LoadPhase, Segment, Shell, View, view

ModelState = Literal["loading", "ready", "tuning", "sleeping", "unloading", "unloaded", "failed"]
FitKind = Literal["fits", "shorter", "offload", "no", "unknown"]
Tab = Literal["installed", "discover", "downloads", "none"]


@view("library/_tabs.html")
class LibraryTabs(View):
    """The tabs of the page."""

    here: Tab
    running: int  # downloads that have not ended


@dataclass(frozen=True, slots=True)
class ActionButton:
    """A button: the value it posts, and its label."""

    name: str
    title: str
    is_main: bool = False


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One model on this machine."""

    name: str
    url: str  # the model's own page
    state: ModelState
    facts: tuple[str, ...]  # size, format, context, source, last use
    verbs: tuple[ActionButton, ...]
    label: str  # the state in words: loaded, unloading, 12 requests to finish
    pinned: bool = False
    delete_url: str = ""  # empty: the model is not in the cache, or is in use
    phases: tuple[LoadPhase, ...] = ()  # of the current load
    fraction: float | None = None  # of the current load, over all its phases; None: not loading, or unknown
    error: ErrorNotice | None = None  # why the last load failed


@view("library/_installed.html")
class InstalledList(View):
    """Every model on this machine, with its state."""

    rows: tuple[ModelRow, ...]
    size_bytes: int
    free_bytes: int  # on the disk that holds the cache


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


@view("library/_fit.html")
class FitVerdict(View):
    """The answer whether a model fits on this machine, with the numbers, or why this is unknown."""

    kind: FitKind
    title: str  # Fits, ...
    numbers: str
    hint: str = ""
    download: str = ""  # 5.0 GiB to download
    terms_url: str = ""  # for a gated repository: the page where its terms are accepted


@dataclass(frozen=True, slots=True)
class SearchResult:
    """A repository on the hub."""

    name: str
    url: str  # its page on this server
    fit_url: str
    format: str
    facts: tuple[str, ...]  # parameters, downloads, likes, licence, date
    is_gated: bool = False
    is_here: bool = False


@view("library/_results.html")
class SearchResults(View):
    """The results of a search."""

    query: str
    results: tuple[SearchResult, ...]


@dataclass(frozen=True, slots=True)
class FileRow:
    """A file of a model or of a download."""

    name: str
    size: str
    fraction: float | None = None  # 0 to 1 while it is downloaded; None: no bar


@dataclass(frozen=True, slots=True)
class DownloadCard:
    """One download."""

    id: str
    name: str
    url: str
    state: str  # waiting, running, paused, done, failed, cancelled
    fraction: float
    line: str  # 3.1 GiB of 15.2 GiB · 112 MiB/s · 1 min 50 s left
    files: tuple[FileRow, ...]
    verbs: tuple[ActionButton, ...]
    error: ErrorNotice | None = None
    terms_url: str = ""


@dataclass(frozen=True, slots=True)
class PartialDownload:
    """An unfinished download that was started before this server."""

    repo_id: str
    held: str


@view("library/_downloads.html")
class DownloadsView(View):
    """All downloads of this server, the newest first."""

    cards: tuple[DownloadCard, ...]
    cut: tuple[PartialDownload, ...]
    free_bytes: int
    folder: str


@view("library/_delete.html")
class DeleteQuestion(View):
    """Asks for confirmation before a model is deleted, or says why it cannot be deleted."""

    name: str
    frees: str
    where: str
    refusal: ErrorNotice | None = None


@view("library/_notice.html")
class LibraryNotice(View):
    """The result of the last action. That of a load from a path changes with the load."""

    said: str = ""
    error: ErrorNotice | None = None
    chat_url: str = ""  # the model is loaded: a link to a chat with it


@view("library/page.html")
class LibraryPage(View):
    """`/library`"""

    shell: Shell
    tabs: LibraryTabs
    installed: InstalledList
    picks: Picks | None = None
    notice: LibraryNotice = LibraryNotice()
    path: str = ""  # a typed path that was refused
    path_error: ErrorNotice | None = None  # why


@view("library/discover.html")
class DiscoverPage(View):
    """`/library/discover`"""

    shell: Shell
    tabs: LibraryTabs
    query: str
    format: str  # safetensors, gguf, or empty for both
    hub: str  # host name of the hub
    results: SearchResults | None = None  # None: no search yet
    error: ErrorNotice | None = None
    retry_url: str = ""
    offline: ErrorNotice | None = None  # why there is no search


@view("library/downloads.html")
class DownloadsPage(View):
    """`/library/downloads`"""

    shell: Shell
    tabs: LibraryTabs
    downloads: DownloadsView
    notice: LibraryNotice = LibraryNotice()


@view("library/absent.html")
class AbsentPage(View):
    """`/library/model/{name}` of a model of which nothing is known here, with the way back."""

    shell: Shell
    tabs: LibraryTabs
    name: str
    error: ErrorNotice


@view("library/delete.html")
class DeletePage(View):
    """`/library/delete`, for a browser without scripts."""

    shell: Shell
    tabs: LibraryTabs
    question: DeleteQuestion


@dataclass(frozen=True, slots=True)
class FitTable:
    """The fit of a model on each device of the machine."""

    segments: tuple[Segment, ...]  # shares of the first device's free memory
    devices: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    notes: tuple[str, ...]
    options: tuple[tuple[str, ...], ...]  # flags, context, requests at a time, cost
    ranks: tuple[str, ...] = ()  # headings of the table per rank; empty: the model runs on one device
    rank_rows: tuple[tuple[str, tuple[str, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class Variant:
    """Another quantisation in the same repository."""

    title: str
    url: str
    size: str
    is_current: bool


@view("library/model.html")
class ModelPage(View):
    """`/library/model/{name}`: facts, fit and files of one model, on this machine or on the hub."""

    shell: Shell
    tabs: LibraryTabs
    name: str
    row: ModelRow | None  # None: the model is not on this machine
    facts: tuple[Fact, ...]
    files: tuple[FileRow, ...]
    verdict: FitVerdict
    table: FitTable | None = None
    variants: tuple[Variant, ...] = ()
    download: str = ""  # size of the download; empty: the model is on this machine
    error: ErrorNotice | None = None  # why the model cannot be read
    offline: str = ""  # what switched the hub off, for a suggested model that needs it
