"""/v1/files: upload, list, show, read and delete the files of batches."""

from __future__ import annotations

from typing import IO, Annotated, Any, Literal, cast

import anyio.to_thread
import msgspec
from litestar import delete, get, post
from litestar.datastructures import UploadFile
from litestar.handlers import HTTPRouteHandler
from litestar.response import Stream
from litestar.response.base import ASGIResponse

from localllm.config.settings import ServerConfig
from localllm.errors import InvalidParameter
from localllm.web.access.caller import owner_of
from localllm.web.api.batches import shapes
from localllm.web.api.batches.file_store import KEPT_S, FileInUse
from localllm.web.api.batches.worker import BatchWorker
from localllm.web.api.exchange import ApiRequest, json_response
from localllm.web.api.openapi import FORM, Operation, RequestBody
from localllm.web.api.reading import read_query
from localllm.web.errors import MissingParameter, UnsupportedMediaType

FORM_BYTES = 64 * 1024
"""Room for the other fields of an upload and for the borders between them."""
MAX_PARTS = 20
LIFETIME_S = (3600, 30 * 24 * 3600)
"""Shortest and longest lifetime that `expires_after` can name."""
PAGE = 10_000


class Upload(msgspec.Struct, kw_only=True):
    file: Annotated[str, msgspec.Meta(extra_json_schema={"format": "binary"})]
    purpose: Literal["batch"]
    anchor: Literal["created_at"] = msgspec.field(default="created_at", name="expires_after[anchor]")
    seconds: Annotated[int, msgspec.Meta(ge=LIFETIME_S[0], le=LIFETIME_S[1])] = msgspec.field(
        default=int(KEPT_S), name="expires_after[seconds]"
    )


class PageQuery(msgspec.Struct, kw_only=True):
    after: str | None = None  # id of the last entry of the page before
    limit: int = 20


class FilesQuery(msgspec.Struct, kw_only=True):
    purpose: str | None = None
    after: str | None = None  # id of the last file of the page before
    limit: int = PAGE
    order: Literal["asc", "desc"] = "desc"


def worker_of(request: ApiRequest) -> BatchWorker:
    """Return the worker, with its files and batches. Raises `BatchesElsewhere`."""
    worker: BatchWorker = request.app.state.batches
    worker.open()
    return worker


def upload_route(config: ServerConfig) -> HTTPRouteHandler:
    """Return the handler of uploads, whose body may be as large as a file."""

    @post(
        "/v1/files",
        status_code=200,
        request_max_body_size=config.largest_batch_file_bytes + FORM_BYTES,
        operation=Operation(shapes.FileObject, RequestBody(Upload, media_type=FORM), also=(409, 507), guide="batches"),
    )
    async def upload_file(request: ApiRequest) -> ASGIResponse:
        """Upload a file of requests for a batch.

        `expires_after[seconds]` is how long it is kept, 30 days otherwise; with it, `expires_after[anchor]` is needed.
        """
        if request.content_type[0] != "multipart/form-data":
            raise UnsupportedMediaType(
                "The file must be sent as multipart/form-data.",
                f"The content type is {request.content_type[0] or 'missing'!r}.",
                "With curl: -F purpose=batch -F file=@requests.jsonl",
            )
        form = await request.form()
        file, purpose = form.get("file"), form.get("purpose")
        if not isinstance(file, UploadFile):
            raise MissingParameter("Missing required parameter: 'file'.", param="file")
        if purpose != "batch":
            what = f"purpose {str(purpose)[:40]!r} is not supported."
            raise InvalidParameter(what, "Files are stored for batches only.", "purpose=batch", param="purpose")
        asked = [form.get(f"expires_after[{name}]") for name in ("anchor", "seconds")]
        lifetime_s = lifetime_of({"anchor": asked[0], "seconds": asked[1]} if any(asked) else None)
        worker, owner = worker_of(request), owner_of(request)
        name, limit = file.filename or "requests.jsonl", config.largest_batch_file_bytes
        stored = await anyio.to_thread.run_sync(
            lambda: worker.files.put(owner, cast("IO[bytes]", file.file), name, "batch", lifetime_s, limit)
        )
        return json_response(shapes.file_object(stored))

    return upload_file


def lifetime_of(expires_after: dict[str, Any] | None, param: str = "expires_after") -> float:
    """Return the seconds that a file is kept. Raises `InvalidParameter`."""
    if expires_after is None:
        return KEPT_S
    seconds = str(expires_after.get("seconds"))
    low, high = LIFETIME_S
    if expires_after.get("anchor") != "created_at" or not seconds.isdigit() or not low <= int(seconds) <= high:
        what = f"{param} is not valid."
        raise InvalidParameter(what, f"anchor must be created_at, and seconds from {low} to {high}.", param=param)
    return float(seconds)


@get("/v1/files", operation=Operation(shapes.FileList, query=FilesQuery, also=(409,), guide="batches"))
async def list_files(request: ApiRequest) -> ASGIResponse:
    """List the files of the caller, the newest first."""
    asked = read_query(request, FilesQuery)
    files = [each for each in worker_of(request).files.of(owner_of(request)) if asked.purpose in (None, each.purpose)]
    page, more = paged(files[::-1] if asked.order == "asc" else files, asked.after, asked.limit, PAGE)
    ids = [each.id for each in page] or [None]
    data = [shapes.file_object(each) for each in page]
    listed = shapes.FileList(object="list", data=data, first_id=ids[0], last_id=ids[-1], has_more=more)
    return json_response(listed)


def paged(entries: list[Any], after: str | None, limit: int, most: int) -> tuple[list[Any], bool]:
    """Return the entries of a page, and whether more follow. Raises `InvalidParameter`."""
    if not 1 <= limit <= most:
        raise InvalidParameter(f"limit {limit} is out of range.", f"Allowed: 1 to {most}.", param="limit")
    if after is not None:
        ids = [each.id for each in entries]
        if after not in ids:
            raise InvalidParameter(f"There is no entry {after[:80]!r} here.", param="after")
        entries = entries[ids.index(after) + 1 :]
    return entries[:limit], len(entries) > limit


@get("/v1/files/{id:str}", operation=Operation(shapes.FileObject, also=(404, 409), guide="batches"))
async def show_file(request: ApiRequest) -> ASGIResponse:
    """Show the facts of a file."""
    return json_response(shapes.file_object(worker_of(request).files.get(owner_of(request), request.path_params["id"])))


@get("/v1/files/{id:str}/content", operation=Operation("application/octet-stream", also=(404, 409), guide="batches"))
async def file_content(request: ApiRequest) -> Stream:
    """Read a file."""
    files = worker_of(request).files
    found = files.get(owner_of(request), request.path_params["id"])
    headers = {"content-length": str(found.num_bytes), "content-disposition": "attachment"}
    return Stream(files.chunks(found.id), media_type="application/octet-stream", headers=headers)


@delete("/v1/files/{id:str}", status_code=200, operation=Operation(shapes.DeletedFile, also=(404, 409)))
async def delete_file(request: ApiRequest) -> ASGIResponse:
    """Delete a file. A batch that has not ended keeps its input."""
    worker = worker_of(request)
    found = worker.files.get(owner_of(request), request.path_params["id"])
    if (batch := worker.records.uses(found.id)) is not None:
        why = f"The batch {batch.id} reads it, and is {batch.status}."
        raise FileInUse("The file is in use.", why, f"POST /v1/batches/{batch.id}/cancel", param="file_id")
    await anyio.to_thread.run_sync(worker.files.forget, found)
    return json_response(shapes.DeletedFile(id=found.id, object="file", deleted=True))
