"""The bytes that each token adds to the text.

The decoders of language models join independent pieces of bytes, so text can be made token by token without decoding a
window twice. Invalid UTF-8 becomes U+FFFD as Unicode recommends (one per broken sequence), for byte-level and
byte-fallback vocabularies alike. (`tokenizers` turns a whole run of byte-fallback tokens into U+FFFD if one byte of it
is wrong. A stream cannot do that: it would have to take back valid characters.)
Does not know: requests, stop strings, files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PieceRule:
    """Rule that converts a token of the vocabulary to bytes, applied in the order of the fields."""

    byte_level: bool = False  # each character stands for a byte (GPT-2's alphabet)
    replacements: tuple[tuple[str, str], ...] = ()  # e.g. the SentencePiece space
    byte_fallback: bool = False  # '<0xE2>' is the byte 0xE2
    before: str = ""  # added before every token (vocabularies of words)
    strip_first: bool = False  # the text's first token loses one leading space
    drop_in_first: str = ""  # characters removed from the text's first token

    def piece(self, token: str) -> bytes:
        """Return the bytes of a token inside a text."""
        if self.byte_level:
            return _byte_level(token)
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes.fromhex(token[3:5])
            except ValueError:
                pass  # '<0xZZ>' is ordinary text
        return (self.before + token).encode("utf-8", "replace")

    def first_piece(self, token: str) -> bytes:
        """Return the bytes of the first token of a text."""
        if self.drop_in_first:
            return self.piece(token.replace(self.drop_in_first, ""))
        piece = self.piece(token)
        return piece.removeprefix(b" ") if self.strip_first else piece


def read_rule(decoder: Mapping[str, Any] | None) -> PieceRule | None:
    """Return the rule of a tokenizer.json `decoder`; None if its tokens are not independent."""
    if decoder is None:
        return PieceRule(before=" ", strip_first=True)
    steps = _flatten(decoder)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return PieceRule(byte_level=True)
    if kinds == ["Metaspace"]:
        mark = steps[0]["replacement"]
        never = steps[0].get("prepend_scheme", "always") == "never"
        return PieceRule(replacements=((mark, " "),), drop_in_first="" if never else mark)
    return _read_sentencepiece(steps)


def _flatten(decoder: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for child in decoder["decoders"] for step in _flatten(child)]


def _read_sentencepiece(steps: Sequence[Mapping[str, Any]]) -> PieceRule | None:
    """Parse Replace*, ByteFallback?, Fuse?, Strip?: the decoder of converted SentencePiece models."""
    order = ["Replace", "ByteFallback", "Fuse", "Strip"]
    kinds = [step["type"] for step in steps]
    if any(kind not in order for kind in kinds) or kinds != sorted(kinds, key=order.index):
        return None
    replacements = []
    for step in (step for step in steps if step["type"] == "Replace"):
        if "String" not in step["pattern"]:
            return None
        replacements.append((step["pattern"]["String"], step["content"]))
    strips = [(step["content"], step["start"], step["stop"]) for step in steps if step["type"] == "Strip"]
    if strips and (strips not in ([(" ", 1, 0)], [(" ", 0, 0)]) or "Fuse" not in kinds):
        return None
    return PieceRule(
        replacements=tuple(replacements),
        byte_fallback="ByteFallback" in kinds,
        strip_first=strips == [(" ", 1, 0)],
    )


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's printable stand-ins:
    visible Latin-1 characters represent themselves, the others start at U+0100."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    """Return the bytes of a token. Added tokens may contain characters outside the alphabet, which are plain text."""
    try:
        return bytes([_BYTE_OF[char] for char in token])
    except KeyError:
        return token.encode("utf-8", "replace")


class PieceTable(dict[int, bytes]):
    """Token id -> bytes, filled on demand. Ids outside the vocabulary add nothing and are not stored.

    Thread-safe: a race computes the same value twice.
    """

    def __init__(self, piece_of: Callable[[int], bytes | None]) -> None:
        super().__init__()
        self._piece_of = piece_of

    def __missing__(self, token_id: int) -> bytes:
        piece = self._piece_of(token_id)
        if piece is None:
            return b""
        self[token_id] = piece
        return piece
