"""Views of the Models page: what is installed, what the hub has, what is being fetched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from localllm.web.views.shared import ErrorNotice, Fact, Phase, Segment, Shell, View

ModelState = Literal["loading", "ready", "tuning", "sleeping", "unloading", "unloaded", "failed"]
FitKind = Literal["fits", "shorter", "offload", "no", "unknown"]
Tab = Literal["installed", "discover", "downloads", "none"]


@dataclass(frozen=True, slots=True)
class LibraryTabs(View):
    """The parts of the page."""

    template: ClassVar[str] = "library/_tabs.html"
    here: Tab
    running: int  # downloads that have not ended


@dataclass(frozen=True, slots=True)
class Verb:
    """A button: what is posted, and what it says."""

    name: str
    title: str
    is_main: bool = False


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One model of this machine."""

    name: str
    url: str  # of its own page
    state: ModelState
    facts: tuple[str, ...]  # size, format, context, where it is from, when it was used
    verbs: tuple[Verb, ...]
    pinned: bool = False
    delete_url: str = ""  # empty: it is not ours to delete, or it is in use
    phases: tuple[Phase, ...] = ()  # of the load
    error: ErrorNotice | None = None  # why the last load failed


@dataclass(frozen=True, slots=True)
class Installed(View):
    """Every model of this machine with what it is doing."""

    template: ClassVar[str] = "library/_installed.html"
    rows: tuple[ModelRow, ...]
    size_bytes: int
    free_bytes: int  # on the disk of the cache


@dataclass(frozen=True, slots=True)
class PickCard:
    """A model to begin with."""

    name: str
    url: str
    title: str
    says: str
    download: str  # 5.0 GiB
    memory: str  # 6.5 GiB of 7.8 GiB on this GPU, context 8,000
    license: str


@dataclass(frozen=True, slots=True)
class Picks(View):
    """What a machine without a model could begin with."""

    template: ClassVar[str] = "library/_picks.html"
    picks: tuple[PickCard, ...]
    machine: str  # RTX 4090, 22.9 GiB free
    offline: bool  # the hub may not be asked


@dataclass(frozen=True, slots=True)
class FitVerdict(View):
    """Whether a model fits this machine, with the numbers, or why that cannot be told."""

    template: ClassVar[str] = "library/_fit.html"
    kind: FitKind
    title: str  # Fits, ...
    numbers: str
    hint: str = ""
    download: str = ""  # 5.0 GiB to download
    terms_url: str = ""  # of a gated repository: where its terms are accepted


@dataclass(frozen=True, slots=True)
class SearchResult:
    """A repository of the hub."""

    name: str
    url: str  # of its page here
    fit_url: str
    format: str
    facts: tuple[str, ...]  # parameters, downloads, likes, licence, date
    is_gated: bool = False
    is_here: bool = False


@dataclass(frozen=True, slots=True)
class SearchResults(View):
    """What a search found."""

    template: ClassVar[str] = "library/_results.html"
    query: str
    results: tuple[SearchResult, ...]


@dataclass(frozen=True, slots=True)
class FileRow:
    """A file of a model or of a download."""

    name: str
    size: str
    fraction: float | None = None  # 0 to 1 while it is fetched; None: no bar


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
    verbs: tuple[Verb, ...]
    error: ErrorNotice | None = None
    terms_url: str = ""


@dataclass(frozen=True, slots=True)
class CutDownload:
    """What a download left that this server does not know."""

    repo_id: str
    held: str


@dataclass(frozen=True, slots=True)
class DownloadList(View):
    """All downloads of this server, the newest first."""

    template: ClassVar[str] = "library/_downloads.html"
    cards: tuple[DownloadCard, ...]
    cut: tuple[CutDownload, ...]
    free_bytes: int
    folder: str


@dataclass(frozen=True, slots=True)
class DeleteQuestion(View):
    """Asks before a model is deleted, or says why it is not."""

    template: ClassVar[str] = "library/_delete.html"
    name: str
    frees: str
    where: str
    refusal: ErrorNotice | None = None


@dataclass(frozen=True, slots=True)
class LibraryPage(View):
    """`/library`"""

    template: ClassVar[str] = "library/page.html"
    shell: Shell
    tabs: LibraryTabs
    installed: Installed
    picks: Picks | None = None
    said: str = ""  # what the last click did
    error: ErrorNotice | None = None
    path: str = ""  # typed, and refused


@dataclass(frozen=True, slots=True)
class DiscoverPage(View):
    """`/library/discover`"""

    template: ClassVar[str] = "library/discover.html"
    shell: Shell
    tabs: LibraryTabs
    query: str
    format: str  # safetensors, gguf, or empty: both
    hub: str  # where it is asked
    results: SearchResults | None = None  # None: nothing was asked
    error: ErrorNotice | None = None
    retry_url: str = ""


@dataclass(frozen=True, slots=True)
class DownloadsPage(View):
    """`/library/downloads`"""

    template: ClassVar[str] = "library/downloads.html"
    shell: Shell
    tabs: LibraryTabs
    downloads: DownloadList
    said: str = ""
    error: ErrorNotice | None = None


@dataclass(frozen=True, slots=True)
class DeletePage(View):
    """`/library/delete`, for a browser without scripts."""

    template: ClassVar[str] = "library/delete.html"
    shell: Shell
    tabs: LibraryTabs
    question: DeleteQuestion


@dataclass(frozen=True, slots=True)
class FitTable:
    """The fit on every device of the machine."""

    segments: tuple[Segment, ...]  # of what the first device has free
    devices: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    notes: tuple[str, ...]
    options: tuple[tuple[str, ...], ...]  # flags, context, at a time, cost


@dataclass(frozen=True, slots=True)
class Variant:
    """Another quantisation in the same repository."""

    title: str
    url: str
    size: str
    is_current: bool


@dataclass(frozen=True, slots=True)
class ModelPage(View):
    """`/library/model/{name}`: facts, fit, files of one model, here or on the hub."""

    template: ClassVar[str] = "library/model.html"
    shell: Shell
    tabs: LibraryTabs
    name: str
    row: ModelRow | None  # None: it is not here
    facts: tuple[Fact, ...]
    files: tuple[FileRow, ...]
    verdict: FitVerdict
    table: FitTable | None = None
    variants: tuple[Variant, ...] = ()
    download: str = ""  # bytes to fetch; empty: it is here
    error: ErrorNotice | None = None  # why it cannot be looked at
