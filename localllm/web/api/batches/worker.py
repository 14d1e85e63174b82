"""Runs batches, one at a time, and resumes them after a restart.

Several lines of a batch run at once, each as a background request: the engine runs every other request first. An
answer is appended to the batch's output or error file in one write, and that file is the only record of what is done.
So after a crash no finished line runs again, and no line is lost or answered twice. While batches of several owners
wait, each has a turn of `TURN_S`.
Does not know: HTTP, how a line is answered (line_runner.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from localllm.config.settings import Settings
from localllm.errors import InvalidParameter, LocalLLMError, NotWritable, RequestError
from localllm.files.folders import make_private, translated_write
from localllm.web.access.keys import Key, KeyRing
from localllm.web.api.batches.file_store import FileStore, StorageFull, StoredFile
from localllm.web.api.batches.line_runner import LineRunner
from localllm.web.api.batches.lines import (
    InputIndex,
    LineRules,
    answered_numbers,
    custom_id_of,
    failed_line,
    index_of,
    request_name,
)
from localllm.web.api.batches.records import BatchFault, BatchRecord, BatchRecords, Status

log = logging.getLogger(__name__)

TURN_S = 300.0
"""How long a batch runs while a batch of another owner waits."""
LOOK_EVERY_S = 1.0
"""Longest time between two looks at the clock and at removed keys."""
SWEEP_EVERY_S = 60.0


class BatchExpired(LocalLLMError):
    """The batch's completion window is over."""

    status, code = 408, "batch_expired"


class BatchesElsewhere(RequestError):
    """Another server of the same user has the folder of the batches."""

    status, code = 409, "batches_elsewhere"


@dataclass(slots=True)
class _AnswerFile:
    """A file that answers are appended to."""

    stored: StoredFile
    path: Path


class BatchWorker:
    """Owns the files and the batches of a server. `start` and `close` run on the event loop."""

    def __init__(
        self, folder: Path, settings: Settings, runner: LineRunner, keys: KeyRing, is_ready: Callable[[], bool]
    ) -> None:
        """is_ready: whether the models of the server are known, so that lines can be answered."""
        server, engine = settings.server, settings.engine
        self._folder = folder
        self._lock = FileLock(folder / "running.lock", mode=0o600, thread_local=False)
        self.max_lines, self.max_line_bytes = server.max_batch_lines, server.max_body_bytes
        self.files = FileStore(
            folder / "files", max_files=server.max_batch_files, max_bytes=server.max_batch_storage_bytes
        )
        self.records = BatchRecords(folder)
        # So many lines keep each step full, and leave half of the queue to others.
        self.num_at_once = engine.max_num_seqs + max(1, min(engine.max_num_seqs, engine.max_num_queued_reqs // 2))
        self.counts: Counter[str] = Counter()  # lines since the start, by outcome
        self.runner, self._keys, self._is_ready = runner, keys, is_ready
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._last_owner = ""

    async def start(self) -> None:
        self._task = asyncio.create_task(self._work(), name="batches")

    async def close(self) -> None:
        """Stop. Lines without an answer run again after the next start."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        self._lock.release()

    def open(self) -> None:
        """Read the files and the batches, at the first call. Blocking. Raises `BatchesElsewhere` while another server
        of this user has them, and `NotWritable`."""
        if self._lock.is_locked:
            return
        with translated_write("The lock of the batches", self._folder):
            make_private(self._folder)
            try:
                self._lock.acquire(timeout=0)
            except Timeout:
                raise BatchesElsewhere(
                    "Another server of this user runs the batches.",
                    f"Only one at a time can use {self._folder}.",
                    "Send the request to that server (localllm doctor names it), or start this one with another "
                    "XDG_DATA_HOME.",
                ) from None
        self.files.load()
        self.records.load()

    def wake(self) -> None:
        """Look at the batches now, since one was created or cancelled."""
        self._changed.set()

    @property
    def is_busy(self) -> bool:
        return any(each.is_open for each in self.records.all())

    # The loop ---------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        swept_s = 0.0
        while True:
            self._changed.clear()
            if not self._lock.is_locked and self._folder.is_dir():
                with suppress(LocalLLMError):  # told by each request
                    self.open()
            if time.time() - swept_s > SWEEP_EVERY_S:
                swept_s = time.time()
                await asyncio.to_thread(self._sweep)
            batch = self._next() if self._is_ready() else None
            if batch is None:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), LOOK_EVERY_S)
                continue
            self._last_owner = batch.owner
            try:
                await self._run(batch)
            except Exception as error:
                log.exception("a batch failed id=%s", batch.id)
                fault = error if isinstance(error, LocalLLMError) else None
                await self._fail(batch, fault or LocalLLMError("The batch failed.", "The log has the details."))

    def _next(self) -> BatchRecord | None:
        """Return the oldest open batch of an owner whose turn it is."""
        waiting = [each for each in self.records.all() if each.is_open]
        others = [each for each in waiting if each.owner != self._last_owner]
        return next(iter(others or waiting), None)

    def _sweep(self) -> None:
        """Delete expired files and old records."""
        now_s = time.time()
        for file in self.files.expired(now_s):
            if self.records.uses(file.id) is None:
                self.files.forget(file)
        self.records.forget_old(now_s)

    # A batch ----------------------------------------------------------------------------------------------------

    async def _run(self, batch: BatchRecord) -> None:
        """Run a batch to its end, or until its turn is over."""
        if batch.status == "cancelling":
            await self._finish(batch, "cancelled")
            return
        if self.files.find(batch.input_file_id) is None:
            await self._fail(batch, InvalidParameter("The input file was deleted.", param="input_file_id"))
            return
        try:
            index = await asyncio.to_thread(index_of, self.files.path(batch.input_file_id), self.max_lines)
        except InvalidParameter as error:
            await self._fail(batch, error)
            return
        outputs, done = await asyncio.to_thread(self._open_outputs, batch)
        batch.num_lines = len(index)
        if batch.status == "validating":
            self.records.set_status(batch, "in_progress")
        log.info("batch runs id=%s lines=%d answered=%d", batch.id, len(index), len(done))
        left = [number for number in index.order if number not in done]
        why = await self._answer_all(batch, index, left, outputs)
        match why:
            case "turn":
                self.records.save(batch)
            case "cancelled":
                await self._finish(batch, "cancelled")
            case "expired":
                await asyncio.to_thread(self._expire_lines, batch, index, outputs)
                await self._finish(batch, "expired")
            case _:
                self.records.set_status(batch, "finalizing")
                await self._finish(batch, "completed")

    def _open_outputs(self, batch: BatchRecord) -> tuple[tuple[_AnswerFile, _AnswerFile], set[int]]:
        """Return the output and the error file, which are created at the first time, and the answered lines."""
        if self.files.find(batch.output_id) is None or self.files.find(batch.error_id) is None:
            names = (f"{batch.id}_output.jsonl", f"{batch.id}_error.jsonl")
            made = [self.files.new(batch.owner, name, "batch_output", batch.output_lifetime_s) for name in names]
            for each in made:
                self.files.save(each)
            batch.output_id, batch.error_id = made[0].id, made[1].id
            self.records.save(batch)
        outputs, done, counts = [], set[int](), []
        for id in (batch.output_id, batch.error_id):
            stored = self.files.find(id)
            assert stored is not None
            path = self.files.path(stored.id)
            numbers, end = answered_numbers(path)
            self.files.shrink_to(stored, end)
            outputs.append(_AnswerFile(stored, path))
            counts.append(len(numbers))
            done |= numbers
        batch.num_completed, batch.num_failed = counts
        return (outputs[0], outputs[1]), done

    async def _answer_all(
        self, batch: BatchRecord, index: InputIndex, left: Sequence[int], outputs: tuple[_AnswerFile, _AnswerFile]
    ) -> str:
        """Answer lines, several at a time. Return why it ended: done, turn, cancelled, expired."""
        turn_ends_s = time.monotonic() + TURN_S

        def why_over() -> str:
            """Return why no further line is to be answered; empty: it is."""
            if batch.status == "cancelling":
                return "cancelled"
            if time.time() >= batch.expires_s:
                return "expired"
            if time.monotonic() > turn_ends_s and any(
                other.is_open and other.owner != batch.owner for other in self.records.all()
            ):
                return "turn"
            return ""

        async def answer_next() -> str:
            for number in numbers:
                await self._answer_one(batch, index, number, self._key_of(batch), outputs)
                if why := why_over():
                    return why
            return ""

        # Each task takes one line after another: a task for each line, and a wait for all of them whenever one ends,
        # were an eighth of what a line costs outside of the engine.
        numbers = iter(left)
        running = {asyncio.create_task(answer_next()) for _ in range(min(self.num_at_once, len(left)))}
        try:
            while running:
                done, running = await asyncio.wait(running, timeout=LOOK_EVERY_S, return_when=asyncio.FIRST_COMPLETED)
                ended = [task.result() for task in done]
                self._key_of(batch)  # a key that is removed ends lines that are being answered
                if why := next(filter(None, [*ended, why_over()]), ""):
                    return why
            return "done"
        finally:
            for task in running:
                task.cancel()
            if running:
                await asyncio.wait(running)

    def _key_of(self, batch: BatchRecord) -> Key | None:
        """Return the key of the batch; None for the server's owner. Raises `InvalidParameter` if it was removed."""
        if not batch.owner:
            return None
        key = self._keys.of_owner(batch.owner)
        if key is None:
            raise InvalidParameter("The key that created this batch was removed.", "Its lines may not run any more.")
        return key

    async def _answer_one(
        self,
        batch: BatchRecord,
        index: InputIndex,
        number: int,
        key: Key | None,
        outputs: tuple[_AnswerFile, _AnswerFile],
    ) -> None:
        """Answer a line, and append the answer to its file."""
        rules = LineRules(frozenset({batch.endpoint}), self.max_line_bytes, number in index.repeated)
        name = request_name(batch.id, number)
        line, is_error = await self.runner.written(index.read(number), name, rules, key)
        self._append(batch, outputs[is_error], line)

    def _append(self, batch: BatchRecord, output: _AnswerFile, line: bytes) -> None:
        """Append a line whole, or not at all. Raises `StorageFull`, `DiskFull`, `NotWritable`."""
        self.files.grow(output.stored, len(line))
        try:
            with translated_write("An answer", output.path), output.path.open("ab", buffering=0) as file:
                if file.write(line) != len(line):
                    raise OSError(28, "No space left on device", str(output.path))
        except BaseException:
            self.files.shrink_to(output.stored, output.stored.num_bytes - len(line))
            raise
        is_error = output.stored.id == batch.error_id
        batch.num_completed, batch.num_failed = batch.num_completed + (not is_error), batch.num_failed + is_error
        self.counts["failed" if is_error else "completed"] += 1

    def _expire_lines(self, batch: BatchRecord, index: InputIndex, outputs: tuple[_AnswerFile, _AnswerFile]) -> None:
        """Write an error for each line that has no answer."""
        error = BatchExpired("The batch expired before this request ran.", f"Its window: {batch.completion_window}.")
        done = answered_numbers(outputs[0].path)[0] | answered_numbers(outputs[1].path)[0]
        with suppress(StorageFull, NotWritable):
            for number in range(len(index)):
                if number not in done:
                    custom_id = custom_id_of(index.read(number))
                    self._append(batch, outputs[1], failed_line(request_name(batch.id, number), custom_id, error))

    async def _fail(self, batch: BatchRecord, error: LocalLLMError) -> None:
        message = " ".join(part for part in (error.what, error.why, error.hint) if part)
        batch.faults = [BatchFault(code=error.code or "error", message=message, param=error.param)]
        await self._finish(batch, "failed")

    async def _finish(self, batch: BatchRecord, status: Status) -> None:
        """List the files that have lines, delete those without, and end the batch."""
        await asyncio.to_thread(self._list_outputs, batch)
        self.records.set_status(batch, status)
        counts = (batch.num_completed, batch.num_failed)
        log.info("batch ended id=%s status=%s completed=%d failed=%d", batch.id, status, *counts)

    def _list_outputs(self, batch: BatchRecord) -> None:
        kept = []
        for id in (batch.output_id, batch.error_id):
            stored = self.files.find(id)
            if stored is not None and stored.num_bytes:
                stored.is_listed, stored.expires_s = True, time.time() + batch.output_lifetime_s
                self.files.save(stored)
            elif stored is not None:
                self.files.forget(stored)
                stored = None
            kept.append(None if stored is None else stored.id)
        batch.output_id, batch.error_id = kept
