"""The views that every page shares (shell, status pill, notices, bars), and the pages that have no other parts.

A view is the data that a template shows: a frozen dataclass that knows the name of its template, and nothing of HTTP or
of the engine. Fields hold plain values in the units of the engine (seconds, bytes, tokens per second); templates print
them with the filters of `render.py`. Each page has its own in its `views.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import ClassVar, Literal, TypeVar, dataclass_transform

State = Literal["loading", "ready", "busy", "error", "idle"]

LOOKS = {
    "theme": {"auto": "System", "light": "Light", "dark": "Dark"},
    "text": {"normal": "Normal text", "large": "Large text", "larger": "Larger text"},
    "column": {"normal": "Normal column", "wide": "Wide column"},
}
"""The looks that a browser chooses: the values of each with their names. The first one is the default."""

Kind = TypeVar("Kind", bound="View")

NUM_IN_BAR = 3
"""Pages whose entries are in the bar of a narrow screen; the entries after them are in its menu."""


class View:
    """Base of all views. `template` is the file that renders the view.

    Views compare and print by their fields with the methods here: methods for each class, as dataclasses make them, are
    a thirtieth of the time until the first page.
    """

    __slots__ = ()
    template: ClassVar[str]

    def __eq__(self, other: object) -> bool:
        return _values(self) == _values(other) if type(other) is type(self) else NotImplemented

    def __hash__(self) -> int:
        return hash(_values(self))

    def __repr__(self) -> str:
        shown = (f"{each.name}={value!r}" for each, value in zip(fields(self), _values(self), strict=True))  # type: ignore[arg-type]
        return f"{type(self).__qualname__}({', '.join(shown)})"


def _values(view: object) -> tuple[object, ...]:
    return tuple(getattr(view, each.name) for each in fields(view))  # type: ignore[arg-type]  # a dataclass


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def view(template: str) -> Callable[[type[Kind]], type[Kind]]:
    """Make a class a view: a frozen dataclass that knows its template."""

    def made(kind: type[Kind]) -> type[Kind]:
        frozen = dataclass(frozen=True, slots=True, eq=False, repr=False)(kind)
        frozen.template = template
        return frozen

    return made


@view("_status_pill.html")
class StatusPill(View):
    """The one-line summary in the header: which model is loaded, and what it is doing."""

    state: State
    label: str  # ready, 2 running, loading weights, ...
    model: str | None = None
    tokens_per_s: float = 0.0  # generated tokens, averaged over the last seconds
    kv_usage: float = 0.0  # 0 to 1
    context_tokens: int = 0
    memory_bytes: int = 0  # weights, KV cache and activations, as planned
    num_others: int = 0  # other models that are loaded
    is_brief: bool = False  # beside a chat: a dot and a name, and the figures in the title


@view("_error_notice.html")
class ErrorNotice(View):
    """An error in the place where it happened: what happened, why, and what to try next."""

    what: str
    why: str = ""
    hint: str = ""


@view("_phase.html")
class LoadPhase(View):
    """One phase of loading."""

    name: str
    done: bool = False
    fraction: float | None = None  # 0 to 1; None: unknown
    detail: str = ""


@view("_loading.html")
class Loading(View):
    """Shown in place of the chat or the tiles while the model loads, sleeps or is unloaded."""

    model: str
    phases: tuple[LoadPhase, ...] = ()
    error: ErrorNotice | None = None
    rests: str = ""  # "sleeping" or "unloaded": the next request loads the model again
    is_tuned: bool = False  # a tuning run is using the model's weights
    fraction: float | None = None  # of the whole load, 0 to 1; None: unknown


@dataclass(frozen=True, slots=True)
class NavEntry:
    """One entry of the navigation bar."""

    key: str
    title: str
    url: str
    icon: str  # SVG path data


@dataclass(frozen=True, slots=True)
class Shell:
    """Everything that base.html draws around a page."""

    title: str
    here: str  # the key of the current entry
    entries: tuple[NavEntry, ...]
    pill: StatusPill
    look: Mapping[str, str]  # a value for each of `LOOKS`
    live_url: str  # URL of the page's live events; empty: the page has none
    refresh_s: int | None  # seconds between reloads when scripts are off; None: no reload
    can_log_out: bool = False  # this browser has logged in with a key

    @property
    def in_bar(self) -> tuple[NavEntry, ...]:
        return self.entries[:NUM_IN_BAR]

    @property
    def in_menu(self) -> tuple[NavEntry, ...]:
        return self.entries[NUM_IN_BAR:]

    @property
    def is_in_menu(self) -> bool:
        """Return whether the entry of this page is in the menu of a narrow screen."""
        return any(entry.key == self.here for entry in self.in_menu)

    @property
    def looks(self) -> dict[str, dict[str, str]]:
        return LOOKS

    @property
    def next_theme(self) -> str:
        names = list(LOOKS["theme"])
        return names[(names.index(self.look["theme"]) + 1) % len(names)]


@dataclass(frozen=True, slots=True)
class Segment:
    """One part of a stacked bar; positions are 0 to 100 along the bar."""

    name: str
    kind: str  # its colour class: used, cached, free, prefill, decode, idle, queue, ...
    x: float
    width: float
    value: str


@dataclass(frozen=True, slots=True)
class Fact:
    """A name and a value, with a note if the name needs an explanation."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Gauge:
    """The used share of a limited resource."""

    name: str
    fraction: float  # 0 to 1
    value: str


@view("_live_update.html")
class LiveUpdate(View):
    """One live event: HTML partials, keyed by the id of the element that each replaces."""

    parts: dict[str, str] = field(default_factory=dict)  # element id -> safe markup


@view("login.html")
class LoginPage(View):
    """The page that asks a browser for a key. Its shell has no entries: without a key they all lead back here."""

    shell: Shell
    next: str  # the page to open after the login
    error: ErrorNotice | None = None


@view("error.html")
class ErrorPage(View):
    """A whole page that shows an error."""

    shell: Shell
    error: ErrorNotice
    back: NavEntry | None = None  # the page that the address belongs to; None: the start page is offered


@view("patterns.html")
class PatternsPage(View):
    """`/dev/patterns`: every partial template, rendered with sample data."""

    shell: Shell
    samples: tuple[tuple[str, str], ...]  # (template, safe markup)
    sheets: tuple[str, ...]


def stacked(parts: Sequence[tuple[str, str, float, str]], total: float | None = None) -> tuple[Segment, ...]:
    """Return the parts (name, kind, amount, printed value) side by side; `total` is the amount of the whole bar."""
    whole = max(total if total is not None else 0.0, sum(amount for _, _, amount, _ in parts)) or 1.0
    segments, x = [], 0.0
    for name, kind, amount, value in parts:
        width = 100 * amount / whole
        segments.append(Segment(name, kind, round(x, 3), round(width, 3), value))
        x += width
    return tuple(segments)
