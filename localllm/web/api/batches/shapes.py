"""Files and batches as they are sent, in OpenAI's format.

Does not know: where the values come from.
"""

from __future__ import annotations

from typing import Literal

from localllm.web.api.batches.file_store import StoredFile
from localllm.web.api.batches.records import BatchRecord, Status
from localllm.web.shape import Shape


class FileObject(Shape):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["processed"]


class FileList(Shape):
    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(Shape):
    id: str
    object: Literal["file"]
    deleted: bool


class BatchProblem(Shape):
    code: str
    message: str
    param: str | None
    line: int | None


class BatchProblems(Shape):
    object: Literal["list"]
    data: list[BatchProblem]


class RequestCounts(Shape):
    total: int
    completed: int
    failed: int


class Batch(Shape):
    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchProblems | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(Shape):
    object: Literal["list"]
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


def file_object(file: StoredFile) -> FileObject:
    return FileObject(
        id=file.id, object="file", bytes=file.num_bytes, created_at=int(file.created_s), expires_at=int(file.expires_s),
        filename=file.filename, purpose=file.purpose, status="processed",
    )  # fmt: skip


def batch_object(batch: BatchRecord) -> Batch:
    """Return a batch. Its files are named once it has ended."""

    def at(status: Status) -> int | None:
        return int(batch.reached_s[status]) if status in batch.reached_s else None

    faults = [BatchProblem(code=f.code, message=f.message, param=f.param, line=f.line) for f in batch.faults]
    return Batch(
        id=batch.id,
        object="batch",
        endpoint=batch.endpoint,
        errors=BatchProblems(object="list", data=faults) if faults else None,
        input_file_id=batch.input_file_id,
        completion_window=batch.completion_window,
        status=batch.status,
        output_file_id=None if batch.is_open else batch.output_id,
        error_file_id=None if batch.is_open else batch.error_id,
        created_at=int(batch.created_s),
        in_progress_at=at("in_progress"),
        expires_at=int(batch.expires_s),
        finalizing_at=at("finalizing"),
        completed_at=at("completed"),
        failed_at=at("failed"),
        expired_at=at("expired"),
        cancelling_at=at("cancelling"),
        cancelled_at=at("cancelled"),
        request_counts=RequestCounts(
            total=batch.num_lines, completed=batch.num_completed, failed=batch.num_failed
        ),
        metadata=batch.metadata,
    )  # fmt: skip
