"""Shared code of the client files: the server's address, and how checks are run and reported.

A file has a function for each capability that it checks, named as in CAPABILITIES, and ends with `run(globals())`. It
prints one JSON object per line: {"check", "why"}, where `why` is null if the check passed. A file has no function for
what its client cannot do.
Does not know: any client.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

URL = os.environ.get("LOCALLLM_URL", "http://127.0.0.1:8000/v1")
KEY = os.environ.get("LOCALLLM_API_KEY", "none-needed")
MODEL = os.environ.get("LOCALLLM_MODEL", "demo")

CAPABILITIES = (
    "models",  # the model is listed
    "chat",
    "stream",
    "tools",  # a call, forced or optional, whole and streamed, and its result sent back
    "schema",  # an answer that follows a JSON schema
    "errors",  # wrong model, wrong value, wrong key: the client's own exceptions
    "embeddings",  # refused by a model that generates, with the reason
    "tokens",  # counted without generating
    "responses",  # OpenAI's /v1/responses
    "scores",  # log-probabilities of a given text
)


@contextmanager
def refused(*kinds: type[BaseException], saying: str) -> Iterator[None]:
    """Require that the block raises one of these exceptions, with these words in its message."""
    refusal = None
    try:
        yield
    except kinds as error:
        refusal = error
    assert refusal is not None, f"not refused: expected {kinds[0].__name__}"
    assert saying in str(refusal), f"{type(refusal).__name__} does not say {saying!r}: {refusal}"


def run(names: Mapping[str, Any]) -> None:
    with asyncio.Runner() as loop:
        for check in (name for name in CAPABILITIES if inspect.isfunction(names.get(name))):
            print(json.dumps({"check": check, "why": failure_of(names[check], loop)}), flush=True)


def failure_of(check: Any, loop: asyncio.Runner) -> str | None:
    """Return the error of a failed check with its line; None if it passed."""
    try:
        result = check()
        if inspect.iscoroutine(result):
            loop.run(result)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        line = next(frame.lineno for frame in reversed(frames) if frame.filename == check.__code__.co_filename)
        return f"line {line}: {type(error).__name__}: {error}"
    return None
