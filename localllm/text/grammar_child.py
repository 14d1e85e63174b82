"""A child process that compiles grammars for the server: if it crashes or is killed, only its grammar fails.

It is started by file name and imports llguidance, but nothing of localllm or torch. It reads the vocabulary and then
grammars from stdin, and writes an error or null for each to stdout. `GrammarTrials` in grammar_trial.py is its parent.
Does not know: requests, tokenizers.
"""

from __future__ import annotations

import json
import pickle
import signal
import struct
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO

LENGTH = struct.Struct("<I")
WALK_TOKENS = 16
LONGEST_TOKEN = 16


class ChildVocabulary:
    """The vocabulary in the form that llguidance expects.
    A text is split into its longest tokens, which suffices for a trial."""

    is_tokenizer_wrapper = True

    def __init__(self, facts: dict[str, Any]) -> None:
        self.tokens, self.special_token_ids = facts["tokens"], facts["special_token_ids"]
        self.eos_token_id, self.bos_token_id = facts["eos_token_ids"][0], facts["bos_token_id"]
        special = set(self.special_token_ids)
        self._ids = {token: i for i, token in enumerate(self.tokens) if token and i not in special}

    def __call__(self, text: bytes | str) -> list[int]:
        left = text.encode("utf-8", "replace") if isinstance(text, str) else text
        ids, at = [], 0
        while at < len(left):
            size = next((size for size in range(LONGEST_TOKEN, 0, -1) if left[at : at + size] in self._ids), 0)
            ids += [self._ids[left[at : at + size]]] if size else []
            at += size or 1
        return ids


def main() -> None:
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    facts = pickle.loads(_read(source))
    _limit_memory(facts["memory_bytes"])
    from llguidance import LLTokenizer

    words = ChildVocabulary(facts)
    vocabulary = LLTokenizer(words, n_vocab=len(words.tokens), eos_token=facts["eos_token_ids"])  # type: ignore[arg-type]
    _write(sink, None)
    while grammar := _read(source).decode():
        _end_after(facts["cpu_s"])
        threading.stack_size(facts["stack_bytes"])
        matchers = [_on_thread(_compile, vocabulary, grammar, facts["limits"])]
        threading.stack_size(0)
        reason = _on_thread(_walk, matchers)  # on a thread, like the engine
        _end_after(0)
        _write(sink, reason)


def _on_thread(work: Callable[..., Any], *given: Any) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work(*given)))
    thread.start()
    thread.join()
    return results.pop()


def _compile(vocabulary: Any, grammar: str, limits: dict[str, Any]) -> Any:
    from llguidance import LLMatcher, LLParserLimits

    return LLMatcher(vocabulary, grammar, log_level=0, limits=LLParserLimits(**limits))


def _walk(matchers: list[Any]) -> str | None:
    """Return why the grammar cannot be used, or None.
    Computes a few masks of one text that follows it, then drops it."""
    begun = matchers.pop().deep_copy()
    for count in range(WALK_TOKENS):
        bits = int.from_bytes(b"" if begun.is_error() else begun.compute_bitmask(), "little")
        if begun.is_error():
            return None if count else str(begun.get_error())
        if not bits:
            break
        begun.consume_token((bits & -bits).bit_length() - 1)
        if begun.is_stopped():
            break
    return None


def _end_after(cpu_s: float) -> None:
    """Let SIGPROF end this process after so much CPU time, even inside native code or without its parent. 0: cancel."""
    if hasattr(signal, "setitimer"):  # not on Windows
        signal.setitimer(signal.ITIMER_PROF, cpu_s)


def _limit_memory(most_bytes: int) -> None:
    try:
        import resource
    except ImportError:  # not on Windows
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = most_bytes if hard == resource.RLIM_INFINITY else min(most_bytes, hard)
    with suppress(ValueError, OSError):  # the system may refuse
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _read(source: BinaryIO) -> bytes:
    """Read a message; empty at the end of the input."""
    head = source.read(LENGTH.size)
    return source.read(*LENGTH.unpack(head)) if len(head) == LENGTH.size else b""


def _write(sink: BinaryIO, reason: str | None) -> None:
    body = json.dumps(reason).encode()
    sink.write(LENGTH.pack(len(body)) + body)
    sink.flush()


if __name__ == "__main__":
    main()
