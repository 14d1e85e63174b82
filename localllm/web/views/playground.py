"""Views of the playground."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from localllm.web.views.shared import ErrorNotice, Fact, Loading, Shell, View


@dataclass(frozen=True, slots=True)
class MessageRow:
    """A message in the editor."""

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class NumberField:
    """A sampling field, as it was typed."""

    name: str  # as the API calls it
    label: str
    value: str
    default: str  # what holds where it is empty


@dataclass(frozen=True, slots=True)
class Editor(View):
    """The request as it is being written; which parts are shown depends on the tab."""

    template: ClassVar[str] = "playground/_editor.html"
    tab: str
    roles: tuple[str, ...]
    messages: tuple[MessageRow, ...]
    text: str  # of a completion, a tokenisation, an embedding
    numbers: tuple[NumberField, ...]
    stop: str  # one a line
    schema: str  # JSON
    tools: str  # JSON
    alternatives: str  # per token; empty: no probabilities are asked for
    special: bool  # with the tokens that the tokenizer puts around every text
    streams: bool = False  # the answer is shown while it is written


@dataclass(frozen=True, slots=True)
class Token:
    """A token of a text, with its number."""

    id: str
    text: str
    ends_line: bool = False


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """What the model reads."""

    tokens: tuple[Token, ...]
    total: int
    hidden: int  # more than are shown


@dataclass(frozen=True, slots=True)
class HeatToken:
    """A token of an answer, coloured by how likely it was. `likely` and the alternatives are ready to show."""

    kind: Literal["heat-0", "heat-1", "heat-2", "heat-3", "heat-4"]
    text: str
    likely: str
    alternatives: tuple[tuple[str, str], ...]  # text, how likely; the likeliest first


@dataclass(frozen=True, slots=True)
class Call:
    """A tool that the model wants called."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Snippet:
    """The same request in a language."""

    id: str
    title: str
    code: str


@dataclass(frozen=True, slots=True)
class Result(View):
    """What came of a request. Empty parts are not shown."""

    template: ClassVar[str] = "playground/_result.html"
    error: ErrorNotice | None = None
    text: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    finish_reason: str = ""
    heat: tuple[HeatToken, ...] = ()
    prompt: PromptTokens | None = None
    facts: tuple[Fact, ...] = ()
    warning: str = ""
    raw: str = ""  # the response, as it came
    snippets: tuple[Snippet, ...] = ()
    raw_title: str = "JSON"


@dataclass(frozen=True, slots=True)
class PlaygroundPage(View):
    """`/playground`."""

    template: ClassVar[str] = "playground/page.html"
    shell: Shell
    tabs: tuple[tuple[str, str], ...] = ()  # key, title
    editor: Editor | None = None
    result: Result | None = None
    loading: Loading | None = None
