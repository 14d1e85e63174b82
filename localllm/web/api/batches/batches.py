"""/v1/batches: create, list, show and cancel batches."""

from __future__ import annotations

import re
import time
from typing import Any

import anyio.to_thread
import msgspec
from litestar import get, post
from litestar.response.base import ASGIResponse

from localllm.errors import InvalidParameter, RequestError
from localllm.web.access.caller import owner_of
from localllm.web.api.batches import shapes
from localllm.web.api.batches.files import PageQuery, lifetime_of, paged, worker_of
from localllm.web.api.batches.records import BatchRecord, new_batch_id
from localllm.web.api.exchange import SMALL_BODY_BYTES, ApiRequest, json_body, json_response, warning_headers
from localllm.web.api.fields import FieldRules
from localllm.web.api.openapi import Operation, RequestBody
from localllm.web.api.reading import read, read_query

MAX_PAGE = 100
MAX_METADATA, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
MAX_WINDOW_S = 30 * 24 * 3600


class BatchEnded(RequestError):
    """The batch has ended, so it cannot be cancelled."""

    status, code = 409, "batch_ended"


class BatchBody(msgspec.Struct, kw_only=True):
    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None
    output_expires_after: dict[str, Any] | None = None


BODY = RequestBody(
    BatchBody,
    FieldRules(),
    example={"input_file_id": "file-…", "endpoint": "/v1/chat/completions", "completion_window": "24h"},
)


@post(
    "/v1/batches",
    status_code=200,
    request_max_body_size=SMALL_BODY_BYTES,
    operation=Operation(shapes.Batch, BODY, also=(404, 409, 429, 507), guide="batches"),
)
async def create_batch(request: ApiRequest) -> ASGIResponse:
    """Answer the requests of an uploaded file in the background.

    `completion_window` is a number with s, m, h or d, up to 30 days; OpenAI's service accepts `24h` only.
    """
    body, warnings = await read(await json_body(request), BatchBody, FieldRules())
    worker, owner = worker_of(request), owner_of(request)
    if body.endpoint not in worker.runner.endpoints:
        known = ", ".join(worker.runner.endpoints)
        raise InvalidParameter(f"{body.endpoint[:80]!r} has no batches.", f"Supported: {known}.", param="endpoint")
    window_s, lifetime_s = (
        _window_s(body.completion_window),
        lifetime_of(body.output_expires_after, "output_expires_after"),
    )
    _check_metadata(body.metadata)
    file = worker.files.get(owner, body.input_file_id, "input_file_id")
    now_s = time.time()
    record = BatchRecord(
        id=new_batch_id(),
        owner=owner,
        endpoint=body.endpoint,
        input_file_id=file.id,
        completion_window=body.completion_window,
        created_s=now_s,
        expires_s=now_s + window_s,
        output_lifetime_s=lifetime_s,
        metadata=body.metadata,
    )
    await anyio.to_thread.run_sync(worker.records.add, record)
    worker.wake()
    return json_response(shapes.batch_object(record), warning_headers(warnings))


def _window_s(window: str) -> int:
    found = re.fullmatch(r"([1-9][0-9]{0,6})([smhd])", window)
    seconds = int(found[1]) * SECONDS[found[2]] if found else 0
    if not 0 < seconds <= MAX_WINDOW_S:
        what, why = f"completion_window {window[:20]!r} is not valid.", "It is a number with s, m, h or d, up to 30d."
        raise InvalidParameter(what, why, "24h", param="completion_window")
    return seconds


def _check_metadata(metadata: dict[str, str] | None) -> None:
    given = metadata or {}
    longest = [max(map(len, each), default=0) for each in (given.keys(), given.values())]
    if len(given) > MAX_METADATA or longest[0] > MAX_KEY_CHARS or longest[1] > MAX_VALUE_CHARS:
        raise InvalidParameter(
            "metadata is too large.",
            f"It has {len(given)} keys, of up to {longest[0]} characters, with values of up to {longest[1]}; the "
            f"limits are {MAX_METADATA}, {MAX_KEY_CHARS} and {MAX_VALUE_CHARS}.",
            param="metadata",
        )


@get("/v1/batches", operation=Operation(shapes.BatchList, query=PageQuery, also=(409,), guide="batches"))
async def list_batches(request: ApiRequest) -> ASGIResponse:
    """List the batches of the caller, the newest first."""
    asked = read_query(request, PageQuery)
    page, more = paged(worker_of(request).records.of(owner_of(request)), asked.after, asked.limit, MAX_PAGE)
    ids = [each.id for each in page] or [None]
    data = [shapes.batch_object(each) for each in page]
    return json_response(shapes.BatchList(object="list", data=data, first_id=ids[0], last_id=ids[-1], has_more=more))


@get("/v1/batches/{id:str}", operation=Operation(shapes.Batch, also=(404, 409), guide="batches"))
async def show_batch(request: ApiRequest) -> ASGIResponse:
    """Show a batch with its counts, and its files once it has ended."""
    return json_response(
        shapes.batch_object(worker_of(request).records.get(owner_of(request), request.path_params["id"]))
    )


@post("/v1/batches/{id:str}/cancel", status_code=200, operation=Operation(shapes.Batch, also=(404, 409)))
async def cancel_batch(request: ApiRequest) -> ASGIResponse:
    """Cancel a batch. Answers that it has so far stay in its files."""
    worker = worker_of(request)
    record = worker.records.get(owner_of(request), request.path_params["id"])
    if not record.is_open:
        raise BatchEnded(f"The batch cannot be cancelled: it is {record.status}.", param="batch_id")
    if record.status != "cancelling":
        worker.records.set_status(record, "cancelling")
        worker.wake()
    return json_response(shapes.batch_object(record))
