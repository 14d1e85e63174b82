"""Prompts that are the same tokens as ids and as text, for a server that only reads text.

They consist of whole words that are single tokens, so tokenising their text gives the same ids again.
Does not know: engines, loads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from localllm.errors import ConfigError
from localllm.text.tokenizer import Tokenizer
from localllm.tuning.load_client import Endpoint, LoadClient
from localllm.tuning.workload import WorkloadRequest

NUM_WORDS, FEWEST = 500, 32


class Texts:
    """The prompts of one tokenizer. Raises `ConfigError` if it has too few single-token words."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._head = tuple(tokenizer.encode(""))  # its prefix of every text
        self._words = tuple(islice(self._single_tokens(), NUM_WORDS))
        if len(self._words) < FEWEST:
            raise ConfigError("Prompts as text cannot be made.", f"Only {len(self._words)} words are single tokens.")

    def _single_tokens(self) -> Iterator[int]:
        for token_id in range(self._tokenizer.vocab_size):
            text = self._tokenizer.token_text(token_id)
            if text[:1] == " " and text[1:].isascii() and text[1:].isalpha() and self._encode(text) == (token_id,):
                yield token_id

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def worded(self, request: WorkloadRequest) -> WorkloadRequest:
        """Return a request of the same length with a word for each token; shared prefixes stay shared."""
        count, words = len(self._words), request.prompt_token_ids[len(self._head) :]
        return replace(request, prompt_token_ids=self._head + tuple(self._words[each % count] for each in words))

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Return the text of a prompt. Raises `ConfigError` if the tokenizer reads it as other tokens."""
        text = self._tokenizer.decode(token_ids[len(self._head) :])
        if tuple(self._tokenizer.encode(text)) != tuple(token_ids):
            raise ConfigError("The tokenizer reads the text of a prompt as other tokens.", f"It begins: {text[:80]}")
        return text


class TextClient(LoadClient):
    """A client for `transformers serve`, which reads text (of worded requests) and refuses `ignore_eos`."""

    def __init__(self, endpoint: Endpoint, model: str, texts: Texts) -> None:
        super().__init__(endpoint, model)
        self._texts = texts

    def fields(self, request: WorkloadRequest) -> dict[str, Any]:
        fields = super().fields(request)
        del fields["ignore_eos"]
        prompt = self._texts.text_of(request.prompt_token_ids)
        length = {"min_new_tokens": request.max_tokens, "do_sample": False}
        return {**fields, "prompt": prompt, "generation_config": json.dumps(length)}
