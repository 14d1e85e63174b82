"""Answer the lines of a batch in this process, as the endpoints answer requests.

A line has the key of its batch, and the same limits for its body as a request. What a server limits by time and by
connection (requests per minute, concurrent requests) does not concern it: the worker limits how many lines run at once.
Does not know: files, batches.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, cast

import msgspec
from litestar import Litestar, Request
from litestar.response.base import ASGIResponse
from litestar.types import HTTPReceiveMessage, Scope

from localllm.errors import DeviceLost, EngineError, EngineStopped, InvalidParameter, KVCacheExhausted, QueueFull
from localllm.serving.entry import LoadCancelled, ModelLoading, ModelsBusy
from localllm.web.access.keys import Key
from localllm.web.api.batches.lines import (
    AnsweredLine,
    BatchLine,
    LineResponse,
    LineRules,
    custom_id_of,
    failed_line,
    read_line,
    written,
)
from localllm.web.errors import as_local_error, drop_frames, openai_error

Answer = Callable[[Request[Any, Any, Any], bytes], Awaitable[ASGIResponse]]
Endpoints = Mapping[str, Answer]
"""The function that answers a body, by path."""

WAITED_FOR = (QueueFull, ModelLoading, ModelsBusy, LoadCancelled, EngineStopped, DeviceLost)
"""Errors after which a line is tried again, however often: the server is busy, or it is about to stop or to restart."""
MAX_TRIES = 3
"""Tries after other errors of the engine, which another request may have caused."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 15.0


class LineRunner:
    """Answers lines with the application's endpoints."""

    def __init__(self, app: Litestar, endpoints: Endpoints, *, is_background: bool = True) -> None:
        """is_background: every request that is not a line runs first."""
        self._app, self.endpoints, self._is_background = app, endpoints, is_background

    async def written(self, raw: bytes, name: str, rules: LineRules, key: Key | None = None) -> tuple[bytes, bool]:
        """Answer a line of an input file. Return the line for the output, and whether it is an error. Cancelling it
        cancels the request."""
        try:
            line = read_line(raw, rules)
        except InvalidParameter as error:
            return failed_line(name, custom_id_of(raw), error), True
        response = await self.answer(line, key)
        answered = AnsweredLine(id=name, custom_id=line.custom_id, response=response, error=None)
        return written(answered), response.status_code >= 400

    async def answer(self, line: BatchLine, key: Key | None) -> LineResponse:
        """Return the answer, which may be an error. Waits while the server is too busy. Cancelling it cancels the
        request."""
        pause_s, num_tries = FIRST_PAUSE_S, 0
        while True:
            request_id = uuid.uuid4().hex
            # A model is held until the task of its request ends, so each try has a task.
            trying = asyncio.create_task(self._try(line, key, request_id), name=f"batch-line-{request_id}")
            status, body, error = await _cancelling(trying)
            is_passing = isinstance(error, WAITED_FOR)
            if not is_passing and isinstance(error, EngineError) and not isinstance(error, KVCacheExhausted):
                num_tries += 1
                is_passing = num_tries < MAX_TRIES
            if is_passing:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                continue
            return LineResponse(status_code=status, request_id=request_id, body=msgspec.Raw(body))

    async def _try(self, line: BatchLine, key: Key | None, request_id: str) -> tuple[int, bytes, Exception | None]:
        """Return status, body and the error, if there is one."""
        scope = cast("Scope", {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": line.url, "raw_path": line.url.encode(), "root_path": "", "query_string": b"",
            "headers": [(b"content-type", b"application/json")], "client": None, "server": None,
            "app": self._app, "litestar_app": self._app, "path_params": {}, "extensions": {}, "session": None,
            "state": {"key": key, "request_id": request_id, "source": "batch",
                      "is_background": self._is_background},
        })  # fmt: skip
        try:
            response = await self.endpoints[line.url](Request(scope, _never), line.body)
        except Exception as error:
            local = as_local_error(error, scope)
            drop_frames(error)
            return local.status, msgspec.json.encode(openai_error(local)), local
        return response.status_code, bytes(response.body), None


async def _cancelling(task: asyncio.Task[tuple[int, bytes, Exception | None]]) -> tuple[int, bytes, Exception | None]:
    """Return the task's result. If the caller is cancelled, cancel the task and wait for its clean-up."""
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task})
        raise


async def _never() -> HTTPReceiveMessage:
    """Wait for a client that cannot leave."""
    await asyncio.Event().wait()
    raise AssertionError
