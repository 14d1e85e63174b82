"""Views of the playground."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from localllm.web.pages.frame.views import ErrorNotice, Fact, Loading, Shell, View, view


@dataclass(frozen=True, slots=True)
class MessageRow:
    """A message in the editor."""

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class NumberField:
    """A numeric sampling field."""

    name: str  # the name of the API's parameter
    label: str
    value: str
    default: str  # the value used if the field is empty


@view("playground/_editor.html")
class Editor(View):
    """The request that the user edits. The tab decides which parts are shown."""

    tab: str
    roles: tuple[str, ...]
    messages: tuple[MessageRow, ...]
    text: str  # of a completion, a tokenisation or an embedding
    numbers: tuple[NumberField, ...]
    stop: str  # one per line
    schema: str  # JSON
    tools: str  # JSON
    alternatives: str  # per token; empty: no logprobs are requested
    special: bool  # add the tokenizer's special tokens
    streams: bool = False  # show the answer while it is generated

    @property
    def num_set(self) -> int:
        """Number of sampling fields that are filled in."""
        return sum(bool(number.value.strip()) for number in self.numbers)


@dataclass(frozen=True, slots=True)
class Token:
    """A token of a text, with its id."""

    id: str
    text: str
    ends_line: bool = False


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """The rendered prompt as tokens."""

    tokens: tuple[Token, ...]
    total: int
    hidden: int  # tokens that are not shown


@dataclass(frozen=True, slots=True)
class HeatToken:
    """A token of an answer, coloured by its probability. `likely` and the alternatives are ready to show."""

    kind: Literal["heat-0", "heat-1", "heat-2", "heat-3", "heat-4"]
    text: str
    likely: str
    alternatives: tuple[tuple[str, str], ...]  # text and probability, the most probable first


@dataclass(frozen=True, slots=True)
class PlaygroundCall:
    """A tool call in the answer."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Snippet:
    """The request in a programming language."""

    id: str
    title: str
    code: str


@view("playground/_result.html")
class Result(View):
    """The result of a request. Empty parts are not shown."""

    error: ErrorNotice | None = None
    text: str = ""
    reasoning: str = ""
    calls: tuple[PlaygroundCall, ...] = ()
    finish_reason: str = ""
    heat: tuple[HeatToken, ...] = ()
    prompt: PromptTokens | None = None
    facts: tuple[Fact, ...] = ()
    warning: str = ""
    raw: str = ""  # the response as it was received
    snippets: tuple[Snippet, ...] = ()
    raw_title: str = "JSON"


@view("playground/page.html")
class PlaygroundPage(View):
    """`/playground`."""

    shell: Shell
    tabs: tuple[tuple[str, str], ...] = ()  # key, title
    editor: Editor | None = None
    result: Result | None = None
    empty: str = ""  # shown in place of the result before the first request
    loading: Loading | None = None
