"""Text to token ids and back, for the vocabulary of one checkpoint.

Built on `tokenizers.Tokenizer`, which threads can share as long as its truncation and padding are not changed. Both are
switched off once, here, so a prompt is never truncated silently. Text is made from each token's own bytes (pieces.py),
so decoding at once and decoding as a stream cannot disagree.
Does not know: messages, requests, torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import tokenizers

from localllm.errors import InvalidParameter
from localllm.text.pieces import PieceTable, read_rule
from localllm.text.stream import ByteStream, TextStream, WindowStream
from localllm.text.tokenizer_files import (
    panics_told,
    read_chat_templates,
    read_raw_tokenizer,
    read_special_tokens,
    require_little_growth,
)

CACHED_WORDS = 1000
"""Words whose tokens the library keeps. More make no text measurably faster (docs/lab.md)."""


def load_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer of a checkpoint's folder. Raises `CorruptModel` or `UnsupportedModel`."""
    path = Path(path)
    return Tokenizer(
        read_raw_tokenizer(path), special_tokens=read_special_tokens(path), chat_templates=read_chat_templates(path)
    )


class Tokenizer:
    """The tokenizer of one checkpoint. Thread-safe."""

    def __init__(
        self,
        raw: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        require_little_growth(raw)
        raw.no_truncation()
        raw.no_padding()
        if hasattr(raw.model, "_resize_cache"):  # BPE and Unigram
            raw.model._resize_cache(CACHED_WORDS)
        self._raw = raw
        # The decoder's state only: the whole tokenizer's may be tens of megabytes.
        self._rule = read_rule(None if raw.decoder is None else json.loads(raw.decoder.__getstate__()))
        self.special_tokens = dict(special_tokens or {})  # bos_token, eos_token, ...: for chat templates
        self.chat_templates = dict(chat_templates or {})  # by name; most models have one, 'default'
        added = raw.get_added_tokens_decoder()
        self.added_ids = frozenset(added)  # their names are recognised in a text before anything else
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size = raw.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")
        self._pieces = PieceTable(self._piece)
        self._shown_pieces = PieceTable(lambda token_id: b"" if token_id in self.special_ids else self._piece(token_id))

    @property
    def chat_template(self) -> str | None:
        return self.chat_templates.get("default")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. Releases the GIL while encoding."""
        try:
            # Unlike `encode`, the batch call releases the GIL (and computes no offsets).
            with panics_told():
                ids: list[int] = self._raw.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError as error:
            raise _not_text(text) from error
        return ids

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """Return the ids of two texts as one input with special tokens between them,
        and for each token which text it is from."""
        try:
            with panics_told():
                encoding = self._raw.encode_batch_fast([(first, second)])[0]
        except TypeError as error:
            raise _not_text(first if not isinstance(first, str) else second) from error
        return encoding.ids, encoding.type_ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids at the start of a text. Ids outside the vocabulary add nothing."""
        if self._rule is None:
            known = [token_id for token_id in ids if self._token(token_id) is not None]
            with panics_told():
                text: str = self._raw.decode(known, skip_special_tokens=skip_special_tokens)
            return text
        stream = self.stream((), skip_special_tokens=skip_special_tokens)
        return "".join([stream.feed(token_id) for token_id in ids]) + stream.flush()

    def stream(self, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> TextStream:
        """Return a new stream that continues the prompt; only the prompt's last tokens are used."""
        if self._rule is None:
            return WindowStream(prompt_token_ids, lambda ids: self.decode(ids, skip_special_tokens))
        if skip_special_tokens:
            return ByteStream(prompt_token_ids, self._shown_pieces, self._first_shown_piece)
        return ByteStream(prompt_token_ids, self._pieces, self._first_piece)

    def token_text(self, token_id: int) -> str:
        """Return the text of a token inside a text; U+FFFD if its bytes are only a part of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's bytes inside a text, special tokens by their name; empty outside the vocabulary."""
        return self._pieces[token_id]

    def token_id(self, token: str) -> int | None:
        """Return the id of a vocabulary entry as spelled in the vocabulary, e.g. '<|im_end|>'."""
        token_id: int | None = self._raw.token_to_id(token)
        return token_id

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.token_id(token)

    def _token(self, token_id: int) -> str | None:
        try:
            token: str | None = self._raw.id_to_token(token_id)
        except OverflowError:  # negative, or beyond 32 bits
            return None
        return token

    def _piece(self, token_id: int) -> bytes | None:
        token = self._token(token_id)
        if token is None:
            return None
        if self._rule is None:
            with panics_told():
                return str(self._raw.decode([token_id], skip_special_tokens=False)).encode("utf-8", "replace")
        return self._rule.piece(token)

    def _first_piece(self, token_id: int) -> bytes | None:
        token = self._token(token_id)
        return None if token is None or self._rule is None else self._rule.first_piece(token)

    def _first_shown_piece(self, token_id: int) -> bytes | None:
        return None if token_id in self.special_ids else self._first_piece(token_id)


def _not_text(text: object) -> InvalidParameter:
    if not isinstance(text, str):
        return InvalidParameter("The prompt must be text.", f"Got {type(text).__name__}.", param="prompt")
    return InvalidParameter(
        "The prompt is not valid Unicode.",
        "It holds half of a surrogate pair, which UTF-8 cannot encode.",
        "Send the character itself, or both halves of its \\uXXXX\\uXXXX escape.",
        param="prompt",
    )
