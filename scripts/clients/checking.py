"""What the files beside this one share: where the server is, and how a file's checks are run and told.

A file has a function for each capability it checks, named as in CAPABILITIES, and ends with `run(globals())`. One JSON
object a line comes out: {"check", "why"}, `why` being null where all went well. What a client has no call for, its file
has no function for.
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
    "tools",  # a call forced or wished for, whole and streamed, and its result sent back
    "schema",  # an answer that keeps to a JSON schema
    "errors",  # wrong model, wrong value, wrong key: the exceptions that the client has for them
    "embeddings",  # refused by a model that generates, with its reason
    "tokens",  # counted before anything is generated
    "responses",  # OpenAI's /v1/responses
    "scores",  # log-probabilities of a given text
)


@contextmanager
def refused(*kinds: type[BaseException], saying: str) -> Iterator[None]:
    """What is inside must raise one of these, with these words in it."""
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
    """What the check ended with, where it did not end well, and the line of it."""
    try:
        result = check()
        if inspect.iscoroutine(result):
            loop.run(result)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        line = next(frame.lineno for frame in reversed(frames) if frame.filename == check.__code__.co_filename)
        return f"line {line}: {type(error).__name__}: {error}"
    return None
