"""What every page has around and between its own parts, and the views of the pages that have nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

State = Literal["loading", "ready", "busy", "error"]
Theme = Literal["auto", "light", "dark"]


class View:
    """Base of all views: `template` is the file that draws it."""

    template: ClassVar[str]


@dataclass(frozen=True, slots=True)
class StatusPill(View):
    """The header's one-line answer to: is it there, and what is it doing?"""

    template: ClassVar[str] = "_status_pill.html"
    state: State
    label: str  # ready, 2 running, loading weights, ...
    model: str | None = None
    tokens_per_s: float = 0.0  # generated, over the last seconds
    kv_usage: float = 0.0  # 0 to 1
    context_tokens: int = 0
    memory_bytes: int = 0  # weights, KV cache and activations, as planned


@dataclass(frozen=True, slots=True)
class ErrorNotice(View):
    """What happened, why, what next; in the place where it happened."""

    template: ClassVar[str] = "_error_notice.html"
    what: str
    why: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Phase(View):
    """One phase of loading."""

    template: ClassVar[str] = "_phase.html"
    name: str
    done: bool = False
    fraction: float | None = None  # 0 to 1; None: no measure
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Loading(View):
    """The model is on its way, or rests; stands where the chat or the tiles will be."""

    template: ClassVar[str] = "_loading.html"
    model: str
    phases: tuple[Phase, ...] = ()
    error: ErrorNotice | None = None
    rests: str = ""  # sleeping, unloaded: the next request brings it back
    is_tuned: bool = False  # its weights are lent


@dataclass(frozen=True, slots=True)
class NavEntry:
    """An entry of the rail."""

    key: str
    title: str
    url: str
    icon: str  # path data


@dataclass(frozen=True, slots=True)
class Shell:
    """What base.html needs around a page."""

    title: str
    here: str  # the key of the current entry
    entries: tuple[NavEntry, ...]
    pill: StatusPill
    theme: Theme
    live_url: str  # where the page's live parts come from; empty: it has none
    refresh_s: int | None  # without scripts, the page reloads itself this often


@dataclass(frozen=True, slots=True)
class Segment:
    """One part of a stacked bar, 0 to 100 along the bar."""

    name: str
    kind: str  # its colour class: used, cached, free, prefill, decode, idle, queue, ...
    x: float
    width: float
    value: str


@dataclass(frozen=True, slots=True)
class Fact:
    """A name, a value, and what it means where the name does not say."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Gauge:
    """A share of something limited."""

    name: str
    fraction: float  # 0 to 1
    value: str


@dataclass(frozen=True, slots=True)
class LiveUpdate(View):
    """One live event: partials by the id of the element they replace."""

    template: ClassVar[str] = "_live_update.html"
    parts: dict[str, str] = field(default_factory=dict)  # element id -> safe markup


@dataclass(frozen=True, slots=True)
class LoginPage(View):
    """Asks a browser for a key."""

    template: ClassVar[str] = "login.html"
    shell: Shell
    next: str  # where to go with it
    error: ErrorNotice | None = None


@dataclass(frozen=True, slots=True)
class ErrorPage(View):
    """A whole page for an error outside of any fragment."""

    template: ClassVar[str] = "error.html"
    shell: Shell
    status: int
    error: ErrorNotice


@dataclass(frozen=True, slots=True)
class PatternsPage(View):
    """`/dev/patterns`: every partial with a sample."""

    template: ClassVar[str] = "patterns.html"
    shell: Shell
    samples: tuple[tuple[str, str], ...]  # (template, safe markup)
    sheets: tuple[str, ...]
