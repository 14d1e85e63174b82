"""Compiles large grammars in a child process first (grammar_child.py), where a crash or a hang is harmless.

The child is started at the first large grammar, stays, and is replaced if it crashed or was killed. It ends with this
process, since it reads until its stdin is closed.
Does not know: the meaning of a grammar, requests.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from localllm.text import grammar_child

log = logging.getLogger(__name__)

STACK_BYTES = 256 * 2**20
"""Stack of a thread that compiles a large grammar; only used pages take memory. A level takes at most 12 KiB."""
CPU_S, WALL_S = 5.0, 25.0
"""CPU time of a trial, and its wall-clock limit on a busy machine."""
START_S = 30.0
MEMORY_BYTES = 2 * 2**30  # address space, including the stack above; Python and a vocabulary take less than 1 GiB


class GrammarVocabulary(Protocol):
    """A vocabulary in the form that llguidance expects."""

    tokens: list[bytes]
    special_token_ids: list[int]
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None


class TrialFailed(Exception):
    """The child crashed on the grammar, or was killed. The text says which, as a sentence."""


class TrialUnavailable(Exception):
    """No child process could be started to try a grammar."""


class GrammarTrials:
    """Runs trials, one at a time. `run` is thread-safe."""

    def __init__(self, words: Callable[[], GrammarVocabulary], limits: Mapping[str, Any]) -> None:
        """limits: arguments of `LLParserLimits`."""
        self._words, self._limits = words, dict(limits)
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._ended: weakref.finalize[..., Any] | None = None
        self._cannot_start = False

    def run(self, grammar: str) -> str | None:
        """Return llguidance's error, or None if the grammar is valid. Raises `TrialFailed` or `TrialUnavailable`."""
        with self._lock:
            if self._child is not None and self._child.poll() is not None:  # the child has ended meanwhile
                self._end()
            if self._child is None:
                self._start()
            try:
                return self._asked(grammar.encode("utf-8", "replace"), WALL_S)
            except TimeoutError:
                self._end()
                raise TrialFailed(f"Compiling it takes longer than {WALL_S:g} s.") from None
            except (OSError, EOFError):
                with suppress(subprocess.TimeoutExpired):
                    assert self._child is not None
                    self._child.wait(1.0)  # its pipe closes shortly before it exits
                status = self._end()
                if status == -getattr(signal, "SIGPROF", 0):
                    raise TrialFailed(f"Compiling it takes more than {CPU_S:g} s of CPU time.") from None
                log.warning("grammar compiler crashed status=%s characters=%d", status, len(grammar))
                raise TrialFailed("The grammar compiler crashes on it or needs too much memory.") from None

    def close(self) -> None:
        """End the child process, including a running trial."""
        if (ended := self._ended) is not None:
            ended()

    def _start(self) -> None:
        if self._cannot_start:
            raise TrialUnavailable
        words = self._words()
        facts = {
            "tokens": words.tokens, "special_token_ids": words.special_token_ids, "bos_token_id": words.bos_token_id,
            "eos_token_ids": list(words.eos_token_ids), "limits": self._limits, "cpu_s": CPU_S,
            "stack_bytes": STACK_BYTES, "memory_bytes": MEMORY_BYTES,
        }  # fmt: skip
        began_s = time.monotonic()
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-P", str(Path(grammar_child.__file__))],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
                env={**os.environ, "RAYON_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"},  # uses less address space
            )  # fmt: skip
            self._ended = weakref.finalize(self, _kill, self._child)
            self._asked(pickle.dumps(facts), START_S)
        except (OSError, EOFError, TimeoutError) as error:
            self._end()
            self._cannot_start = True
            log.warning("large grammars are compiled without a trial reason=%r", f"{type(error).__name__}: {error}")
            raise TrialUnavailable from error
        log.info("grammar compiler started pid=%d took=%.2fs", self._child.pid, time.monotonic() - began_s)

    def _asked(self, message: bytes, within_s: float) -> str | None:
        child = self._child
        assert child is not None
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(grammar_child.LENGTH.pack(len(message)) + message)
        child.stdin.flush()
        until_s = time.monotonic() + within_s
        [size] = grammar_child.LENGTH.unpack(_read(child.stdout.fileno(), grammar_child.LENGTH.size, until_s))
        reason: str | None = json.loads(_read(child.stdout.fileno(), size, until_s))
        return reason

    def _end(self) -> int | None:
        """End the child and return its exit status."""
        child, self._child = self._child, None
        if self._ended is not None:
            self._ended()
        return None if child is None else child.returncode


def _kill(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        with suppress(OSError):
            if pipe is not None:
                pipe.close()


def _read(file: int, size: int, until_s: float) -> bytes:
    """Read `size` bytes. Raises `EOFError` or `TimeoutError`."""
    read = b""
    with selectors.DefaultSelector() as selector:
        selector.register(file, selectors.EVENT_READ)
        while len(read) < size:
            if not selector.select(max(until_s - time.monotonic(), 0)):
                raise TimeoutError
            piece = os.read(file, size - len(read))
            if not piece:
                raise EOFError
            read += piece
    return read
