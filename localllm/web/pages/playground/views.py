"""The playground's views, made from an API response: whole, or reassembled from its events.

Does not know: HTTP, how an answer is generated.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import PurePath
from typing import Any, Literal

import msgspec

from localllm.text.transcript import FORMATS, Transcript
from localllm.units import format_count, format_rate, format_seconds
from localllm.web.api.openai.audio import written
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
    model: str = ""
    models: tuple[str, ...] = ()  # this server's model, if there is one, and those of other servers

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
    downloads: tuple[tuple[str, str], ...] = ()  # files of a transcript: name, and data: URL


@view("playground/page.html")
class PlaygroundPage(View):
    """`/playground`."""

    shell: Shell
    tabs: tuple[tuple[str, str], ...] = ()  # key, title
    editor: Editor | None = None
    result: Result | None = None
    empty: str = ""  # shown in place of the result before the first request
    loading: Loading | None = None
    servers: str = ""  # other servers that have the model of the request; empty: this server has it


DONE = "[DONE]"


class StreamedAnswer:
    """The events of one choice, with the fields of a response that is not streamed."""

    def __init__(self, tab: str) -> None:
        self.is_chat = tab == "chat"
        self.events: list[str] = []  # as received
        self.text = self.reasoning = ""
        self.calls: list[dict[str, Any]] = []
        self.finish_reason: str | None = None
        self.error = ""  # error message, if the stream ended with one
        self._logprobs: dict[str, list[Any]] = {}
        self._last: dict[str, Any] = {}  # usage and timings

    def add(self, written: bytes) -> None:
        """Add one write of the stream, which may contain several events."""
        for event in written.decode().split("\n\n"):
            if not event.startswith("data: "):
                continue
            self.events.append(event)
            data = event.removeprefix("data: ")
            if data != DONE:
                self._add_chunk(msgspec.json.decode(data))

    def response(self) -> dict[str, Any]:
        """Return the response; complete once all events have arrived."""
        choice: dict[str, Any] = {"finish_reason": self.finish_reason, "logprobs": self._logprobs or None}
        if self.is_chat:
            calls = [{"function": call} for call in self.calls]
            choice["message"] = {"content": self.text, "reasoning_content": self.reasoning, "tool_calls": calls}
        else:
            choice["text"] = self.text
        return {"choices": [choice], **self._last}

    def _add_chunk(self, chunk: dict[str, Any]) -> None:
        if error := chunk.get("error"):
            self.error = error["message"]
        elif not chunk.get("choices"):
            self._last = {"usage": chunk.get("usage"), "timings": chunk.get("timings")}
        else:
            self._add_delta(chunk["choices"][0])

    def _add_delta(self, choice: dict[str, Any]) -> None:
        delta = choice.get("delta") or {"content": choice.get("text")}
        self.text += delta.get("content") or ""
        self.reasoning += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls") or ():
            if call["index"] == len(self.calls):
                self.calls.append({"name": call["function"]["name"], "arguments": ""})
            self.calls[call["index"]]["arguments"] += call["function"]["arguments"]
        for name, values in (choice.get("logprobs") or {}).items():
            if values:
                self._logprobs.setdefault(name, []).extend(values)
        self.finish_reason = choice.get("finish_reason") or self.finish_reason


MOST_TOKENS = 2000
"""Most tokens shown of a prompt or an answer; the JSON has all of them."""

MOST_JSON_CHARS = 200_000

_ANSWER = (
    "The answer appears here, with the rendered prompt, the probability of each token, and the same request as curl, "
    "Python and JavaScript code."
)

EMPTY = {
    "chat": _ANSWER,
    "completions": _ANSWER,
    "tokenize": "The tokens appear here, each with its id.",
    "transcribe": "The text appears here while it is written, then its files with times (SRT, VTT).",
    "embeddings": "The vectors appear here: their number, their dimensions and how similar the texts are.",
}
"""Tab -> the words where the result will appear."""

BOUNDS = (0.9, 0.6, 0.3, 0.1)
"""Probabilities that separate heat-0 (most probable) to heat-4."""


def result(tab: str, response: dict[str, Any], warning: str, server: str = "") -> Result:
    """Return the result of a response, without prompt and snippets. server: another one that answered."""
    raw = _bounded(json.dumps(response, ensure_ascii=False, indent=2))
    if tab == "tokenize":
        prompt = prompt_tokens(zip(response["tokens"], response["token_strs"], strict=True), response["count"])
        return Result(prompt=prompt, facts=(Fact("Tokens", format_count(response["count"])),), warning=warning, raw=raw)
    if tab == "embeddings":
        return Result(facts=_vector_facts(response), warning=warning, raw=raw)
    choice = response["choices"][0]
    message = choice.get("message") or {"content": choice.get("text")}
    calls = [each["function"] for each in message.get("tool_calls") or ()]
    return Result(
        text=message.get("content") or "",
        reasoning=message.get("reasoning_content") or "",
        calls=tuple(PlaygroundCall(each["name"], each["arguments"]) for each in calls),
        finish_reason=choice["finish_reason"] or "",
        heat=_heat(choice.get("logprobs")),
        facts=(
            *((Fact("Answered by", server),) if server else ()),
            *_facts(response.get("usage") or {}, response.get("timings") or {}),
        ),
        warning=warning,
        raw=raw,
    )


def transcript_result(transcript: Transcript, name: str) -> Result:
    """Return the result of a transcription. name: of the sound's file."""
    stem = PurePath(name).stem

    def download(kind: str, suffix: str) -> tuple[str, str]:
        data = base64.b64encode(written(transcript, kind)).decode()
        return f"{stem}.{suffix}", f"data:{FORMATS[kind].replace(' ', '')};base64,{data}"

    facts = [
        Fact("Sound", format_seconds(transcript.seconds)),
        Fact("Segments", format_count(len(transcript.segments))),
    ]
    if transcript.language:
        facts.append(Fact("Language", transcript.language))
    return Result(
        text=transcript.timed_text, finish_reason="stop", facts=tuple(facts), warning="; ".join(transcript.warnings),
        raw=_bounded(written(transcript, "verbose_json").decode()),
        downloads=(download("text", "txt"), download("srt", "srt"), download("vtt", "vtt")),
    )  # fmt: skip


def partial_result(answer_so_far: StreamedAnswer) -> Result:
    """Return the result of an answer that is still being generated."""
    calls = tuple(PlaygroundCall(each["name"], each["arguments"]) for each in answer_so_far.calls)
    return Result(text=answer_so_far.text, reasoning=answer_so_far.reasoning, calls=calls, finish_reason="writing")


def stream_result(tab: str, answer_so_far: StreamedAnswer, warning: str, server: str = "") -> Result:
    """Return the result of a stream that has ended, or failed."""
    raw = _bounded("\n\n".join(answer_so_far.events))
    if answer_so_far.error:
        failed = replace(partial_result(answer_so_far), error=ErrorNotice(answer_so_far.error), finish_reason="error")
        return replace(failed, raw=raw, raw_title="Events")
    return replace(result(tab, answer_so_far.response(), warning, server), raw=raw, raw_title="Events")


def _bounded(text: str) -> str:
    return text if len(text) <= MOST_JSON_CHARS else f"{text[:MOST_JSON_CHARS]}\n…"


def prompt_tokens(tokens: Iterable[tuple[int, str]], total: int) -> PromptTokens:
    shown = tuple(
        Token(str(token_id), _visible(text).removesuffix("\n"), text.endswith("\n"))
        for token_id, text in islice(tokens, MOST_TOKENS)
    )
    return PromptTokens(shown, total, total - len(shown))


def _heat(logprobs: Mapping[str, Any] | None) -> tuple[HeatToken, ...]:
    if not logprobs:
        return ()
    if "content" in logprobs:  # a chat response
        entries = logprobs["content"][:MOST_TOKENS]
        return tuple(
            heat_token(each["token"], each["logprob"], [(top["token"], top["logprob"]) for top in each["top_logprobs"]])
            for each in entries
        )
    lists = zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    entries = list(lists)[:MOST_TOKENS]
    return tuple(heat_token(text, logprob, list((top or {}).items())) for text, logprob, top in entries)


def heat_token(text: str, logprob: float | None, top: Sequence[tuple[str, float]]) -> HeatToken:
    """Return a token with its colour. `logprob` None: the first token, which has no predecessor."""
    likely = 1.0 if logprob is None else math.exp(logprob)
    bucket = sum(likely < bound for bound in BOUNDS)
    ranked = sorted(top, key=lambda each: each[1], reverse=True)
    alternatives = tuple((_visible(each), _percent(math.exp(score))) for each, score in ranked)
    return HeatToken(f"heat-{bucket}", _visible(text), _percent(likely), alternatives)  # type: ignore[arg-type]


def _visible(text: str) -> str:
    """Make line breaks, a lone space and an empty text visible."""
    shown = text.replace("\n", "↵\n")
    return shown.replace(" ", "␣") if not text.strip(" ") and text else shown or "∅"


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %" if 0.001 <= share < 0.9995 else "under 0.1 %" if share < 0.001 else "100 %"


def _facts(usage: Mapping[str, Any], timings: Mapping[str, Any]) -> tuple[Fact, ...]:
    """Return the counts and times of an answer; another server may not tell all of them."""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    note, rate = f"{format_count(cached)} from the prefix cache" if cached else "", timings.get("predicted_per_second")
    counts = (("Prompt", "prompt_tokens", note), ("Answer", "completion_tokens", ""))
    times = (("In the queue", "queue_ms"), ("Time to first token", "ttft_ms"), ("Prompt processed in", "prompt_ms"))
    return (
        *(Fact(title, f"{format_count(usage[name])} tokens", more) for title, name, more in counts if name in usage),
        *(Fact(title, format_seconds(timings[name] / 1e3)) for title, name in times if name in timings),
        *([Fact("Generation speed", format_rate(rate))] if rate is not None else []),
    )


def _vector_facts(response: Mapping[str, Any]) -> tuple[Fact, ...]:
    vectors = [each["embedding"] for each in response["data"]]
    facts = [Fact("Vectors", format_count(len(vectors))), Fact("Dimensions", format_count(len(vectors[0])))]
    facts.append(Fact("Prompt", f"{format_count(response['usage']['prompt_tokens'])} tokens"))
    for number, vector in enumerate(vectors[1:6], 2):
        facts.append(
            Fact(f"Similarity of texts 1 and {number}", f"{_cosine(vectors[0], vector):.4f}", "cosine, -1 to 1")
        )
    return tuple(facts)


def _cosine(one: Sequence[float], other: Sequence[float]) -> float:
    lengths = math.hypot(*one) * math.hypot(*other)
    return math.fsum(a * b for a, b in zip(one, other, strict=True)) / lengths if lengths else 0.0
