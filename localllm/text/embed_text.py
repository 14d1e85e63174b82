"""Converts a text to the token ids that an embedding model reads.

Most models read the plain text. sentence-transformers also saves models that read the rendering of a chat template: the
text is a user's message, and a prompt is the system's.
Does not know: which of both a checkpoint uses (models/encoders/recipe.py), HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from localllm.text.chat_template import ChatTemplate
from localllm.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextEncoder:
    tokenizer: Tokenizer
    template: ChatTemplate | None = None  # None: plain text
    switches: Mapping[str, Any] = field(default_factory=dict)  # further variables of the template
    lower_case: bool = False  # texts are lower-cased first

    def encode(self, text: str, prompt: str = "") -> list[int]:
        """Return the token ids with special tokens. prompt: a prefix of the text, or the system's message."""
        if self.lower_case:
            text, prompt = text.lower(), prompt.lower()
        if self.template is None:
            return self.tokenizer.encode(prompt + text)
        messages = [{"role": "system", "content": prompt}] if prompt else []
        messages.append({"role": "user", "content": text})
        switches = {"add_generation_prompt": False, **self.switches}
        return self.tokenizer.encode(self.template.render(messages, **switches), add_special_tokens=False)

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """Return the ids of two texts as one input, and for each token which text it is from."""
        if self.lower_case:
            first, second = first.lower(), second.lower()
        return self.tokenizer.encode_pair(first, second)

    def cut(self, token_ids: Sequence[int], length: int, prompt: str = "") -> list[int]:
        """Return at most `length` of a text's ids.
        Keeps what ends every text: a closing token, or the template's end."""
        if len(token_ids) <= length:
            return list(token_ids)
        tail = _common_tail(self.encode("0", prompt), self.encode("1 2 3 4", prompt))
        return _with_tail(token_ids, tail, length)

    def cut_pair(self, token_ids: Sequence[int], types: Sequence[int], length: int) -> tuple[list[int], list[int]]:
        """Cut a pair to `length` tokens: its second text becomes shorter."""
        if len(token_ids) <= length:
            return list(token_ids), list(types)
        tail = _common_tail(self.encode_pair("0", "0")[0], self.encode_pair("0", "1 2 3 4")[0])
        return _with_tail(token_ids, tail, length), _with_tail(types, types[len(types) - len(tail) :], length)


def _with_tail(values: Sequence[int], tail: Sequence[int], length: int) -> list[int]:
    return [*values[: length - len(tail)], *tail] if len(tail) < length else list(values[:length])


def _common_tail(first: Sequence[int], second: Sequence[int]) -> list[int]:
    count = 0
    while count < min(len(first), len(second)) and first[-1 - count] == second[-1 - count]:
        count += 1
    return list(first[len(first) - count :])
