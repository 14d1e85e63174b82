"""Compiles large grammars in a child process first (grammar_child.py), where a crash or a hang is harmless.

The child is started at the first large grammar, stays, and is replaced if it crashed or was killed.
Does not know: the meaning of a grammar, requests.
"""

from __future__ import annotations

import json
import logging
import pickle
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from localllm.machine.child import ChildProcess
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
        self._child: ChildProcess | None = None
        self._cannot_start = False

    def run(self, grammar: str) -> str | None:
        """Return llguidance's error, or None if the grammar is valid. Raises `TrialFailed` or `TrialUnavailable`."""
        with self._lock:
            if self._child is not None and self._child.has_ended:
                self.close()
            child = self._child = self._child or self._start()
            try:
                message = grammar.encode("utf-8", "replace")
                answer = child.ask(message, WALL_S, memory_bytes=MEMORY_BYTES, cpu_s=CPU_S)
                reason: str | None = json.loads(answer)
                return reason
            except TimeoutError:
                self.close()
                raise TrialFailed(f"Compiling it takes longer than {WALL_S:g} s.") from None
            except (OSError, EOFError):
                status = self.close()
                if status == -getattr(signal, "SIGPROF", 0):
                    raise TrialFailed(f"Compiling it takes more than {CPU_S:g} s of CPU time.") from None
                log.warning("grammar compiler crashed status=%s characters=%d", status, len(grammar))
                raise TrialFailed("The grammar compiler crashes on it or needs too much memory.") from None

    def close(self) -> int | None:
        """End the child process, including a running trial, and return its exit status."""
        child, self._child = self._child, None
        return None if child is None else child.end()

    def _start(self) -> ChildProcess:
        if self._cannot_start:
            raise TrialUnavailable
        words = self._words()
        facts = {
            "tokens": words.tokens, "special_token_ids": words.special_token_ids, "bos_token_id": words.bos_token_id,
            "eos_token_ids": list(words.eos_token_ids), "limits": self._limits,
            "stack_bytes": STACK_BYTES,
        }  # fmt: skip
        began_s = time.monotonic()
        try:
            threads = {"RAYON_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}  # these use less address space
            child = ChildProcess(Path(grammar_child.__file__), threads)
            child.ask(pickle.dumps(facts), START_S, memory_bytes=MEMORY_BYTES, cpu_s=0)
        except (OSError, EOFError, TimeoutError) as error:
            self._cannot_start = True
            log.warning("large grammars are compiled without a trial reason=%r", f"{type(error).__name__}: {error}")
            raise TrialUnavailable from error
        log.info("grammar compiler started pid=%d took=%.2fs", child.process.pid, time.monotonic() - began_s)
        return child
