"""A table of what each rank has done last, in memory that the server and its ranks share.

A rank writes into its own line without waiting for anybody; the server reads all lines at any time, also when a rank no
longer answers. The memory has no name, so nothing is left over when the processes are killed.
Does not know: what is concluded from it.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

WORDS = 8
"""Words of 8 bytes per rank: one cache line."""
LAUNCHED, ANSWERED, BEAT_NS, STEPS, STEP_NS, BUSY_NS = range(6)


@dataclass(frozen=True, slots=True)
class RankProgress:
    """One rank's line."""

    launched: int  # sequence number of the last record that it began
    answered: int  # ... and ended
    beat_ns: int  # time.monotonic_ns() of its last sign of life
    steps: int  # that it ended
    step_ns: int  # what all its steps took together, waits included
    busy_ns: int  # time that it computed in all steps; 0 on a GPU, where a launch shows no waits


class ProgressTable:
    """The lines of all ranks. The writer of a line is its rank; a word is written at once."""

    def __init__(self, fd: int, size: int) -> None:
        """fd: of the memory, which stays the caller's. size: ranks."""
        self.size = size
        self._memory = mmap.mmap(fd, size * WORDS * 8)
        self._words = memoryview(self._memory).cast("Q")
        self._reading = threading.Lock()

    def write(self, rank: int, word: int, value: int) -> None:
        self._words[rank * WORDS + word] = value

    def add(self, rank: int, word: int, value: int) -> None:
        """Add to a word that only the caller's thread writes."""
        self._words[rank * WORDS + word] += value

    def put(self, rank: int, words: Sequence[int]) -> None:
        """Write the line of a rank on another machine. Its sign of life counts from now: clocks differ."""
        for word, value in enumerate(words[: len(RankProgress.__slots__)]):
            self.write(rank, word, value & 2**64 - 1)
        self.beat(rank)

    def beat(self, rank: int) -> None:
        self.write(rank, BEAT_NS, time.monotonic_ns())

    def read(self, rank: int) -> RankProgress:
        start = rank * WORDS
        with self._reading:
            return RankProgress(*self._words[start : start + len(RankProgress.__slots__)])

    def read_all(self) -> list[RankProgress]:
        return [self.read(rank) for rank in range(self.size)]

    def close(self) -> None:
        """Give the memory back. Its last words can still be read."""
        with self._reading:
            shared, self._words = self._words, memoryview(bytes(self._words)).cast("Q")
            shared.release()
            self._memory.close()


def shared_memory(size: int) -> int:
    """Return a file descriptor of memory for the lines of `size` ranks."""
    fd = unnamed_memory()
    os.truncate(fd, size * WORDS * 8)
    return fd


def unnamed_memory() -> int:
    """Return a file descriptor of empty memory. It ends with the last process that holds it, and exec closes it."""
    return os.memfd_create("localllm-ranks", os.MFD_CLOEXEC)
