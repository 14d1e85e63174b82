"""Views of the Models page: installed models, search results of the hub, and downloads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from localllm.web.pages.frame.views import ErrorNotice, Fact, LoadPhase, Segment, Shell, View

ModelState = Literal["loading", "ready", "tuning", "sleeping", "unloading", "unloaded", "failed"]
FitKind = Literal["fits", "shorter", "offload", "no", "unknown"]
Tab = Literal["installed", "discover", "downloads", "none"]


@dataclass(frozen=True, slots=True)
class LibraryTabs(View):
    """The tabs of the page."""

    template: ClassVar[str] = "library/_tabs.html"
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


@dataclass(frozen=True, slots=True)
class InstalledList(View):
    """Every model on this machine, with its state."""

    template: ClassVar[str] = "library/_installed.html"
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


@dataclass(frozen=True, slots=True)
class Picks(View):
    """The models suggested for this machine, shown if it has none."""

    template: ClassVar[str] = "library/_picks.html"
    picks: tuple[PickCard, ...] = ()
    machine: str = ""  # Runs on RTX 4090: 22.9 GiB free
    offline: str = ""  # what switched the hub off; empty: it may be asked
    is_pending: bool = False  # the models have not been planned yet; the live connection fills the room


@dataclass(frozen=True, slots=True)
class FitVerdict(View):
    """The answer whether a model fits on this machine, with the numbers, or why this is unknown."""

    template: ClassVar[str] = "library/_fit.html"
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


@dataclass(frozen=True, slots=True)
class SearchResults(View):
    """The results of a search."""

    template: ClassVar[str] = "library/_results.html"
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


@dataclass(frozen=True, slots=True)
class DownloadsView(View):
    """All downloads of this server, the newest first."""

    template: ClassVar[str] = "library/_downloads.html"
    cards: tuple[DownloadCard, ...]
    cut: tuple[PartialDownload, ...]
    free_bytes: int
    folder: str


@dataclass(frozen=True, slots=True)
class DeleteQuestion(View):
    """Asks for confirmation before a model is deleted, or says why it cannot be deleted."""

    template: ClassVar[str] = "library/_delete.html"
    name: str
    frees: str
    where: str
    refusal: ErrorNotice | None = None


@dataclass(frozen=True, slots=True)
class LibraryNotice(View):
    """The result of the last action. That of a load from a path changes with the load."""

    template: ClassVar[str] = "library/_notice.html"
    said: str = ""
    error: ErrorNotice | None = None
    chat_url: str = ""  # the model is loaded: a link to a chat with it


@dataclass(frozen=True, slots=True)
class LibraryPage(View):
    """`/library`"""

    template: ClassVar[str] = "library/page.html"
    shell: Shell
    tabs: LibraryTabs
    installed: InstalledList
    picks: Picks | None = None
    notice: LibraryNotice = LibraryNotice()
    path: str = ""  # a typed path that was refused
    path_error: ErrorNotice | None = None  # why


@dataclass(frozen=True, slots=True)
class DiscoverPage(View):
    """`/library/discover`"""

    template: ClassVar[str] = "library/discover.html"
    shell: Shell
    tabs: LibraryTabs
    query: str
    format: str  # safetensors, gguf, or empty for both
    hub: str  # host name of the hub
    results: SearchResults | None = None  # None: no search yet
    error: ErrorNotice | None = None
    retry_url: str = ""
    offline: ErrorNotice | None = None  # why there is no search


@dataclass(frozen=True, slots=True)
class DownloadsPage(View):
    """`/library/downloads`"""

    template: ClassVar[str] = "library/downloads.html"
    shell: Shell
    tabs: LibraryTabs
    downloads: DownloadsView
    notice: LibraryNotice = LibraryNotice()


@dataclass(frozen=True, slots=True)
class AbsentPage(View):
    """`/library/model/{name}` of a model of which nothing is known here, with the way back."""

    template: ClassVar[str] = "library/absent.html"
    shell: Shell
    tabs: LibraryTabs
    name: str
    error: ErrorNotice


@dataclass(frozen=True, slots=True)
class DeletePage(View):
    """`/library/delete`, for a browser without scripts."""

    template: ClassVar[str] = "library/delete.html"
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


@dataclass(frozen=True, slots=True)
class ModelPage(View):
    """`/library/model/{name}`: facts, fit and files of one model, on this machine or on the hub."""

    template: ClassVar[str] = "library/model.html"
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
