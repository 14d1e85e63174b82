"""`localllm chat` and `localllm complete`: a terminal client of localllm or any other OpenAI-compatible server.

Does not know: how a conversation is stored and printed (talk.py), where the server is (server.py).
"""

from __future__ import annotations

import argparse
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from typing import Any

from localllm.cli.server import ServerClient, ServerRefused
from localllm.cli.talk import SAMPLING, Piece, Talk, add_sampling, answer_or_chat, read_prompt, speed_line
from localllm.config.flags import add_debug_flag
from localllm.errors import ConfigError

COMPLETION_TOKENS = 256
"""Default max_tokens of `complete`; servers would stop after OpenAI's default of 16."""


def chat_arguments(parser: argparse.ArgumentParser, *, chats: bool = True) -> None:
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="default: chat, or read standard input")
    help = "URL of any OpenAI-compatible server; default: the one running on this machine"
    parser.add_argument("--url", metavar="URL", help=help)
    help = "the server's API key; default for a remote server: OPENAI_API_KEY"
    parser.add_argument("--api-key", metavar="KEY", help=help)
    parser.add_argument("--model", metavar="NAME", help="a model of the server, or a folder; default: the first")
    add_sampling(parser, chats=chats)
    add_debug_flag(parser)


def chat(options: argparse.Namespace) -> int:
    """Answer the prompt from the command line or standard input; without a prompt, chat."""
    return _talk(options, ChatSpeaker)


def complete_arguments(parser: argparse.ArgumentParser) -> None:
    chat_arguments(parser, chats=False)


def complete(options: argparse.Namespace) -> int:
    """Continue a text, without a chat template and without earlier messages."""
    return _talk(options, CompletionSpeaker)


def _talk(options: argparse.Namespace, speaker: type[_Remote]) -> int:
    prompt = read_prompt(options.prompt)
    given = {name: getattr(options, name) for name in SAMPLING if getattr(options, name) is not None}
    if options.verbose:
        given["stream_options"] = {"include_usage": True}
    answers = speaker(ServerClient.of_anyone(options), options.model, given)
    return answer_or_chat(Talk(answers, system=options.system, verbose=options.verbose), prompt)


class _Remote(ABC):
    """A `Speaker` that asks a server. Times are measured in this client, so that any two servers can be compared."""

    path = ""
    continues_text = False

    def __init__(self, server: ServerClient, model: str | None, params: Mapping[str, Any]) -> None:
        """Use `model`, or else the server's first model. Raises `LocalLLMError` if the server lists no model."""
        self._server, self._params = server, params
        self.model = model or next(iter(self.models()), "")
        if not self.model:
            raise ConfigError(f"{server.url} lists no model.", "", "--model NAME", param="model")
        self._started_s = self._first_s = self._last_s = 0.0
        self._usage: Mapping[str, Any] = {}
        self._finish_reason: str | None = None

    def answer(self, messages: Sequence[dict[str, str]]) -> Generator[Piece]:
        self._started_s, self._first_s, self._usage, self._finish_reason = time.perf_counter(), 0.0, {}, None
        body = {"model": self.model, **self._prompt(messages), "stream": True, **self._params}
        with closing(self._server.stream(f"{self._server.v1}{self.path}", body)) as events:
            for event in events:
                self._usage = event.get("usage") or self._usage
                for choice in event.get("choices") or ():
                    self._finish_reason = choice.get("finish_reason") or self._finish_reason
                    for piece in self._pieces(choice):
                        if piece.text:
                            self._last_s = time.perf_counter()
                            self._first_s = self._first_s or self._last_s
                            yield piece
        if self._finish_reason is None:
            raise ServerRefused("The answer is incomplete.", "The server closed the stream without a finish_reason.")

    def figures(self) -> str:
        """Return one line with the server's token counts and the times measured here."""
        details = self._usage.get("prompt_tokens_details") or {}
        return speed_line(
            self._usage.get("prompt_tokens", 0),
            details.get("cached_tokens") or 0,
            self._usage.get("completion_tokens", 0),
            ttft_s=(self._first_s or time.perf_counter()) - self._started_s,
            decode_s=self._last_s - self._first_s if self._first_s else 0.0,
            finish_reason=self._finish_reason,
        )

    def models(self) -> Sequence[str]:
        """Return the models that the server lists; a localllm lists loaded models first."""
        told = self._server.ask("GET", f"{self._server.v1}/models")
        return [str(model["id"]) for model in told.get("data") or ()]

    def use(self, name: str) -> None:
        known = self.models()
        if name not in known:
            raise ConfigError(f"The server lists no model {name!r}.", f"It has {', '.join(known)}.", "/model NAME")
        self.model = name

    @abstractmethod
    def _prompt(self, messages: Sequence[dict[str, str]]) -> Mapping[str, Any]:
        """Return the fields of the request body that hold the conversation."""

    @abstractmethod
    def _pieces(self, choice: Mapping[str, Any]) -> Sequence[Piece]:
        """Return the text pieces in one choice of an event."""


class ChatSpeaker(_Remote):
    path = "/chat/completions"

    def _prompt(self, messages: Sequence[dict[str, str]]) -> Mapping[str, Any]:
        return {"messages": list(messages)}

    def _pieces(self, choice: Mapping[str, Any]) -> Sequence[Piece]:
        delta = choice.get("delta") or {}
        reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
        return Piece(reasoning, is_reasoning=True), Piece(delta.get("content") or "")


class CompletionSpeaker(_Remote):
    path = "/completions"
    continues_text = True

    def _prompt(self, messages: Sequence[dict[str, str]]) -> Mapping[str, Any]:
        return {"prompt": messages[-1]["content"], "max_tokens": COMPLETION_TOKENS}

    def _pieces(self, choice: Mapping[str, Any]) -> Sequence[Piece]:
        return (Piece(choice.get("text") or ""),)
