"""Formats of the KV cache: bits of a number, scales, zero points, rotation; and the window of a layer.

    format_of("k8v4", window).token_bytes(128)     bytes of K and V of one token position and KV head

The *window* of a layer says which keys its query at position p reads, besides those after it, which it never does:

    None    all
    n       the last n, its own included: from p - n + 1 on (a sliding window)
    -n      the ones in its chunk of n positions: from p - p % n on (Llama 4)

A plane is the keys or the values of a layer. Its numbers are stored

    16 and 32 bits, fp8    as they are; fp8 with a scale for each head, fixed before the first token
    int8                   number = code * scale, an fp32 scale for each token and head
    4 bits                 number = zero + (code - 8) * scale, scale and zero point in fp16 for each token, head and
                           group of numbers; two codes in a byte, dimension 2 j in the low half of byte j

Keys of 4 bits are rotated after the rotary embedding, with the queries (`hadamard` of rotary_store_kv.py): a few
channels of keys are often much larger than the others, and would make the steps between codes too wide for the rest.
The scores are unchanged.
Does not know: torch, models, who chooses a format.
"""

from __future__ import annotations

from typing import NamedTuple

UNIT = 32  # numbers of a head that 4 bits need a multiple of: a group of values, and rows of 16 bytes


class Plane(NamedTuple):
    """The stored form of K or V of a token and head."""

    stored: str  # torch's name of the type; uint8: two numbers of 4 bits
    bits: int
    group: int = 0  # numbers with a scale of their own; 0: the numbers of a head
    scale_bytes: int = 0  # of a group, its zero point included; 0: tokens have no scales

    def stored_width(self, head_dim: int) -> int:
        """Return the elements of `stored` that a head takes."""
        return head_dim // 2 if self.bits == 4 else head_dim

    def num_groups(self, head_dim: int) -> int:
        return head_dim // self.group if self.group else 1

    def num_bytes(self, head_dim: int) -> int:
        """Return the bytes of a token and head, its scales included."""
        return head_dim * self.bits // 8 + self.num_groups(head_dim) * self.scale_bytes


class KVFormat(NamedTuple):
    """The format of a layer's cache."""

    name: str
    k: Plane
    v: Plane

    @property
    def index_type(self) -> str:
        """The type of index keys: that of K if it has 16 bits or more, else bfloat16, without scales."""
        return self.k.stored if self.k.bits >= 16 else "bfloat16"

    @property
    def has_four_bits(self) -> bool:
        return 4 in (self.k.bits, self.v.bits)

    def token_bytes(self, head_dim: int, *, values_are_keys: bool = False) -> int:
        """Return the bytes of K and V of one token position and KV head."""
        return self.k.num_bytes(head_dim) + (0 if values_are_keys else self.v.num_bytes(head_dim))


_WIDE = {"float32": 32, "bfloat16": 16, "float16": 16, "float8_e4m3fn": 8}
_INT8, _INT4 = Plane("int8", 8, 0, 4), Plane("uint8", 4, UNIT, 4)
KV_FORMATS = {
    **{name: KVFormat(name, Plane(name, bits), Plane(name, bits)) for name, bits in _WIDE.items()},
    "int8": KVFormat("int8", _INT8, _INT8),
    "k8v4": KVFormat("k8v4", _INT8, _INT4),
    "int4": KVFormat("int4", _INT4._replace(group=0), _INT4),
}
"""The formats by the names that a memory plan gives them. The plain ones are torch's types."""


def first_visible(window: int | None, position: int) -> int:
    """Return the first position that a query at `position` sees."""
    if window is None:
        return 0
    return max(0, position - window + 1 if window > 0 else position - position % -window)


def first_unseeing(window: int, end: int) -> int:
    """Return the first position whose query sees no position before `end`."""
    return end + window - 1 if window > 0 else -(end // window) * -window


def window_name(window: int | None) -> str:
    """Return the name of such layers: full, window_1024, chunk_8192."""
    return "full" if window is None else f"window_{window}" if window > 0 else f"chunk_{-window}"


def format_of(name: str, window: int | None) -> KVFormat:
    """Return the format of layers with this window in a cache of this name: 4 bits become int8 where few tokens are
    kept."""
    named = KV_FORMATS[name]
    return KV_FORMATS["int8"] if window is not None and named.has_four_bits else named
