"""Logprobs in OpenAI's two formats, and in vLLM's format for prompt logprobs.

Does not know: sampling, streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from localllm.engine.step import TokenLogprobs
from localllm.text.tokenizer import Tokenizer
from localllm.web.api.openai.shapes import ChatLogprobs, CompletionLogprobs, PromptScored, Scored, ScoredToken

FLOOR = -9999.0
"""Replaces minus infinity, which JSON does not have."""
MANY = 1_000
"""Logprobs per position. Positions with more are kept as encoded JSON: objects take several times the memory."""


@dataclass(frozen=True, slots=True)
class TokenNames:
    """The texts of tokens in a logprobs object."""

    tokenizer: Tokenizer
    as_ids: bool = False  # return_tokens_as_token_ids: `token_id:123`, exact for any token

    def of(self, token_id: int) -> tuple[str, bytes]:
        """Return the token's text (incomplete characters replaced) and its exact bytes."""
        raw = self.tokenizer.token_bytes(token_id)
        return (f"token_id:{token_id}" if self.as_ids else raw.decode("utf-8", "replace")), raw


def chat_logprobs(entries: Sequence[TokenLogprobs], names: TokenNames) -> ChatLogprobs:
    return ChatLogprobs([_chat_entry(entry, names) for entry in entries], None)


def _chat_entry(entry: TokenLogprobs, names: TokenNames) -> ScoredToken:
    (token, logprob, raw), *top = [_scored(*pair, names) for pair in zip(entry.token_ids, entry.logprobs, strict=True)]
    return ScoredToken(token, logprob, raw, _compact([Scored(*each) for each in top]))


def _scored(token_id: int, logprob: float, names: TokenNames) -> tuple[str, float, list[int]]:
    """Return the token, its logprob and its bytes."""
    text, raw = names.of(token_id)
    return text, max(logprob, FLOOR), list(raw)


@dataclass(slots=True)
class CompletionLogprobsBuilder:
    """Builds the four parallel lists of /v1/completions; `offset` counts through the whole text of a choice."""

    names: TokenNames
    offset: int = 0
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[Any] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def add_prompt(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> None:
        """Add an echoed prompt. Its first token has no predecessor and hence no logprob."""
        self._add_name(token_ids[0])
        self.token_logprobs.append(None)
        self.top_logprobs.append(None)
        self.add(entries)

    def add(self, entries: Sequence[TokenLogprobs]) -> None:
        for entry in entries:
            self._add_name(entry.token_ids[0])
            self.token_logprobs.append(max(entry.logprobs[0], FLOOR))
            pairs = zip(entry.token_ids, entry.logprobs, strict=True)
            top = {self.names.of(token_id)[0]: max(score, FLOOR) for token_id, score in pairs}
            self.top_logprobs.append(_compact(top))

    def take(self) -> CompletionLogprobs:
        """Return the entries added since the last call, in the format of the response."""
        taken = CompletionLogprobs(self.tokens, self.token_logprobs, self.top_logprobs, self.text_offset)
        self.tokens, self.token_logprobs, self.top_logprobs, self.text_offset = [], [], [], []
        return taken

    def _add_name(self, token_id: int) -> None:
        text, raw = self.names.of(token_id)
        self.tokens.append(text)
        self.text_offset.append(self.offset)
        self.offset += len(raw.decode("utf-8", "replace"))


def prompt_logprobs(entries: Sequence[TokenLogprobs] | None, names: TokenNames) -> list[Any] | None:
    """Return vLLM's format: per prompt position, token id -> logprob, rank and text; None for the first position."""
    if entries is None:
        return None
    return [None, *(_prompt_position(entry, names) for entry in entries)]


def _prompt_position(entry: TokenLogprobs, names: TokenNames) -> Any:
    position: dict[str, PromptScored] = {}
    for rank, (token_id, logprob) in enumerate(zip(entry.token_ids, entry.logprobs, strict=True)):
        scored = PromptScored(max(logprob, FLOOR), rank or entry.rank, names.of(token_id)[0])
        position.setdefault(str(token_id), scored)
    return _compact(position)


def _compact(position: list[Any] | dict[str, Any]) -> Any:
    return msgspec.Raw(msgspec.json.encode(position)) if len(position) > MANY else position
