"""A child process that compiles grammars for the server: if it crashes or is killed, only its grammar fails.

It is a script of machine/child_main.py and imports llguidance, but nothing of localllm or torch. Its messages are the
vocabulary and then grammars, its answers an error or null. `GrammarTrials` in grammar_trial.py is its parent.
Does not know: requests, tokenizers.
"""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Callable
from typing import Any

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


def worker() -> Callable[[bytes], bytes]:
    return GrammarTrial()


class GrammarTrial:
    """Answers the first message, the vocabulary, with null, and each further one, a grammar, with an error or null."""

    def __init__(self) -> None:
        self._facts: dict[str, Any] = {}
        self._vocabulary: Any = None

    def __call__(self, message: bytes) -> bytes:
        if self._vocabulary is None:
            from llguidance import LLTokenizer

            facts = self._facts = pickle.loads(message)
            words = ChildVocabulary(facts)
            self._vocabulary = LLTokenizer(words, n_vocab=len(words.tokens), eos_token=facts["eos_token_ids"])  # type: ignore[arg-type]
            return b"null"
        threading.stack_size(self._facts["stack_bytes"])
        matchers = [_on_thread(_compile, self._vocabulary, message.decode(), self._facts["limits"])]
        threading.stack_size(0)
        return json.dumps(_on_thread(_walk, matchers)).encode()  # on a thread, like the engine


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
