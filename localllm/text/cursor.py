"""Turns one choice's token ids into text: detokenises, holds text back, finds stop strings.

Guarantees of a cursor:
- Text, token ids and logprobs are released together: a delta's text is exactly the text of its tokens. A token is held
  back while its last character is incomplete, or while the end of the text could become a stop string; earlier tokens
  are not.
- No part of a stop string is ever released (unless requested).
- The stop string that completes first ends the text, whether tokens arrive one by one or several per step; of two that
  complete at the same character, the longer one. A match counts if a token beyond `min_tokens` completes it.
- A match cuts the text at its start, or at its end with `include_stop_str_in_output`. Kept are the tokens whose text
  begins before the cut, and tokens without text at the cut, with their logprobs; `num_tokens` counts them. The text of
  the last kept token may extend beyond the cut, so the decoded ids may be longer than the text.
- Without a match, the deltas up to `finish` add up to the decoded output. Special tokens keep their ids and have no
  text with `skip_special_tokens`; the eos or stop token that ended a request never has text (see `finish`).

A step costs a few microseconds per token, whatever the length of the output.
Does not know: requests, the engine, asyncio.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from localllm.text.stop_strings import START, StopMatch, stop_strings
from localllm.text.tokenizer import Tokenizer


class TextDelta(NamedTuple):
    """Newly released text and tokens. `stop_string` is set once, in the delta that ends the text."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Any, ...]  # one per token if the caller passed any, unchanged
    stop_string: str | None = None


class _Waiting(NamedTuple):
    """A token that is held back. Positions count the output's characters from its start."""

    token_id: int
    logprob: Any
    begin: int
    end: int  # -1: its last character is incomplete


_NOTHING = TextDelta("", (), (), None)


class TextCursor:
    """Call `push` with each step's tokens, then `finish` once. After a stop match both return empty deltas."""

    __slots__ = (
        "_done",
        "_include_stop",
        "_min_tokens",
        "_start",
        "_state",
        "_stops",
        "_stream",
        "_text",
        "_waiting",
        "num_tokens",
        "stop_string",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._stream = tokenizer.stream(prompt_token_ids, skip_special_tokens=skip_special_tokens)
        self._stops = stop_strings((stop,) if isinstance(stop, str) else tuple(stop))
        self._state = START  # state of the stop strings after all text so far
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._waiting: list[_Waiting] = []
        self._text = ""  # complete characters that are not released yet
        self._start = 0  # position of the first of them
        self._done = False
        self.num_tokens = 0  # tokens pushed; after a stop match: tokens kept
        self.stop_string: str | None = None

    def push(self, token_ids: Sequence[int], logprobs: Sequence[Any] = ()) -> TextDelta:
        """Add tokens (with one entry of `logprobs` each, or none) and return what can be released."""
        if self._done:
            return _NOTHING
        if len(token_ids) == 1 and not self._waiting:
            return self._push_one(token_ids[0], logprobs)
        match = self._take_all(token_ids, logprobs)
        return self._cut(match) if match else self._release_safe()

    def finish(
        self, token_ids: Sequence[int] = (), logprobs: Sequence[Any] = (), *, eos_is_last: bool = False
    ) -> TextDelta:
        """Add the last step's tokens and release everything held back.

        `eos_is_last`: the last of `token_ids` is the eos or stop token that ended the request. Its id and logprob are
        kept; its text is hidden, unless `include_stop_str_in_output` is set.
        """
        if self._done:
            return _NOTHING
        silent = 1 if eos_is_last and token_ids and not self._include_stop else 0
        shown = len(token_ids) - silent
        match = self._take_all(token_ids[:shown], logprobs[:shown]) or self._grow(self._stream.flush())
        self._done = True
        if match:
            return self._cut(match)
        end = self._start + len(self._text)
        self._waiting = [token._replace(end=token.end if token.end >= 0 else end) for token in self._waiting]
        if silent:
            self._waiting.append(_Waiting(token_ids[-1], logprobs[-1] if logprobs else None, end, end))
            self.num_tokens += 1
        return self._release(len(self._text))

    def _push_one(self, token_id: int, logprobs: Sequence[Any]) -> TextDelta:
        """Handle the usual step: one new token, nothing held back."""
        text = self._stream.feed(token_id)
        self.num_tokens += 1
        if self._stream.open or not self._stops.absent(text):
            match = self._wait(token_id, logprobs[0] if logprobs else None, self._start, text)
            return self._cut(match) if match else self._release_safe()
        self._start += len(text)
        return TextDelta(text, (token_id,), tuple(logprobs))

    def _take_all(self, token_ids: Sequence[int], logprobs: Sequence[Any]) -> StopMatch | None:
        """Add tokens to the held-back ones, up to the first stop match."""
        assert not logprobs or len(logprobs) == len(token_ids)
        for i, token_id in enumerate(token_ids):
            was_open = self._stream.open
            new = self._stream.feed(token_id)
            self.num_tokens += 1
            begin = self._start + len(self._text)
            if was_open and new.startswith("�"):
                begin += 1  # the incomplete character belongs to earlier tokens
            match = self._wait(token_id, logprobs[i] if logprobs else None, begin, new)
            if match:
                return match
        return None

    def _wait(self, token_id: int, logprob: Any, begin: int, new: str) -> StopMatch | None:
        """Add a newly fed token to the held-back ones. Return the stop match that its text completes."""
        match = self._grow(new)
        end = -1 if self._stream.open else self._start + len(self._text)
        self._waiting.append(_Waiting(token_id, logprob, begin, end))
        return match

    def _grow(self, new: str) -> StopMatch | None:
        """Append characters. Return the stop match that completes in them, if any."""
        seen = len(self._text)
        self._text += new
        if self.num_tokens <= self._min_tokens:
            self._state = self._stops.skip(self._state, new)
            return None
        self._state, match = self._stops.read(self._state, new)
        return match and StopMatch(seen + match.begin, seen + match.end, match.string)

    def _release_safe(self) -> TextDelta:
        return self._release(len(self._text) - self._stops.num_held(self._state))

    def _release(self, safe: int) -> TextDelta:
        """Release the tokens whose text ends within the first `safe` held-back characters."""
        limit, count = self._start + safe, 0
        for number, token in enumerate(self._waiting, start=1):
            if token.end > limit:
                break
            if token.end >= 0:
                count = number
        if not count:
            return _NOTHING
        out, self._waiting = self._waiting[:count], self._waiting[count:]
        length = out[-1].end - self._start
        text, self._text = self._text[:length], self._text[length:]
        self._start += length
        return _delta(text, out)

    def _cut(self, match: StopMatch) -> TextDelta:
        """End the text at a stop match and drop the tokens after it."""
        length = match.end if self._include_stop else match.begin
        cut = self._start + length
        kept = [token for token in self._waiting if token.begin < cut or token.begin == token.end == cut]
        self.num_tokens -= len(self._waiting) - len(kept)
        self._done, self.stop_string = True, match.string
        return _delta(self._text[:length], kept, match.string)


def _delta(text: str, tokens: Sequence[_Waiting], stop_string: str | None = None) -> TextDelta:
    logprobs = tuple([token.logprob for token in tokens if token.logprob is not None])
    return TextDelta(text, tuple([token.token_id for token in tokens]), logprobs, stop_string)
