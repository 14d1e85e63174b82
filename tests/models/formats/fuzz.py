"""Damage done to headers: bits flipped, ends cut off, numbers made absurd, bytes lost and found.

`survives` says what a reader may do with any bytes at all: refuse them by one of our errors, or give back what the
caller then checks; nothing else, and without taking memory for what is not there.
Does not know: any format.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from localllm.errors import CorruptModel, UnsupportedModel

Given = TypeVar("Given")
Found = TypeVar("Found")
NUMBERS = (0, 1, 0x7F, 0xFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)


def damaged(originals: Sequence[bytes], count: int, seed: int) -> Iterator[bytes]:
    """`count` variants of the originals, each with one to four kinds of damage."""
    dice = random.Random(seed)
    for _ in range(count):
        data = bytearray(dice.choice(originals))
        for _ in range(dice.randint(1, 4)):
            dice.choice((_flip, _cut, _absurd, _lose, _repeat))(data, dice)
        yield bytes(data)


def survives(read: Callable[[Given], Found], data: Given) -> Found | None:
    """What `read` makes of it; None where it refuses. Any other exception goes up."""
    try:
        return read(data)
    except (CorruptModel, UnsupportedModel):
        return None


def _at(data: bytearray, dice: random.Random) -> int:
    return dice.randrange(len(data)) if data else 0


def _flip(data: bytearray, dice: random.Random) -> None:
    if data:
        data[_at(data, dice)] ^= 1 << dice.randrange(8)


def _cut(data: bytearray, dice: random.Random) -> None:
    if dice.random() < 0.3:
        del data[_at(data, dice) :]


def _absurd(data: bytearray, dice: random.Random) -> None:
    at, width = _at(data, dice), dice.choice((1, 4, 8))
    data[at : at + width] = (dice.choice(NUMBERS) & ((1 << 8 * width) - 1)).to_bytes(width, "little")


def _lose(data: bytearray, dice: random.Random) -> None:
    at = _at(data, dice)
    del data[at : at + dice.randint(1, 8)]


def _repeat(data: bytearray, dice: random.Random) -> None:
    at = _at(data, dice)
    data[at:at] = data[at : at + dice.randint(1, 16)]
