"""Records from the server to all ranks of a group, and answers from them.

Every record goes to every rank in the same order; the number of a record is the same for all. Any thread may send and
wait. One waiting thread reads at a time, for all others too, so that the result of a step wakes no second thread.
A rank that closes its socket, leaves a step or answers too late makes the whole group lost: the error is `RanksLost`.
Does not know: processes (supervisor.py), what records do.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar

from localllm.errors import RanksLost
from localllm.ranks.channel import Channel
from localllm.ranks.messages import Failure, Log, Report
from localllm.ranks.wire import BadRecord, Kind, Record, decode, encode, encode_record

log = logging.getLogger(__name__)

T = TypeVar("T")
OnReport = Callable[[int, Report], None]
Lose = Callable[[str, str, Collection[int]], RanksLost]
"""Function that declares the group lost: what happened, why, and because of which ranks."""
HINT = "The model is loaded again: send the request again in a few seconds. The log has the details."


class Loss:
    """The state of a group: lost or not, and why. Its file descriptor becomes readable with the loss, for `poll`."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        self._lock = threading.Lock()
        self._declared = threading.Event()
        self.error: RanksLost | None = None
        self.ranks: frozenset[int] = frozenset()  # that ended the group

    def fileno(self) -> int:
        return self._read

    def declare(self, what: str, why: str = "", ranks: Collection[int] = ()) -> RanksLost:
        """Declare the group lost, because of these ranks. Return the error, which is the first that was declared."""
        with self._lock:
            if self.error is None:
                self.ranks = frozenset(ranks)
                self.error = RanksLost(what, why, HINT)
                os.close(self._write)
                self._declared.set()
            return self.error

    def wait(self, seconds: float) -> bool:
        """Wait for a loss. Return whether there is one."""
        return self._declared.wait(seconds)

    def check(self) -> None:
        """Raise `RanksLost` if the group is lost."""
        if self.error is not None:
            raise RanksLost(self.error.what, self.error.why, self.error.hint)

    def close(self) -> None:
        """Close the file descriptors. The group must be lost or ended."""
        with self._lock:
            if self.error is None:
                self.error = RanksLost("The ranks have ended.", "", HINT)
                os.close(self._write)
                self._declared.set()
        os.close(self._read)


def ignore(rank: int, report: Report) -> None:
    """Do nothing with a report."""


SEND_S = 60.0  # for a rank that does not take a record
REST_S = 5.0  # for the other ranks' answers after one has refused a record
CAUSE_S = 0.8  # for the death that made another rank fail


class Links:
    """The server's ends of the sockets to all ranks, by rank."""

    def __init__(
        self, channels: Sequence[Channel], loss: Loss, names: Sequence[str], lose_hanging: Lose,
        on_beat: Callable[[int, Sequence[int]], None] = lambda rank, words: None,
    ) -> None:  # fmt: skip
        """names: of the ranks, for errors and logs. lose_hanging: declares the group lost because it does not answer.
        on_beat: called with a sign of life that came as a record, and the words of its line."""
        self._on_beat = on_beat
        self._channels, self._loss, self._names, self._lose_hanging = list(channels), loss, list(names), lose_hanging
        self._ranks = {channel.fileno(): rank for rank, channel in enumerate(channels)}
        self._seq = 0
        self._sending = threading.Lock()
        self._turn = threading.Condition()  # guards what follows
        self._someone_reads = False
        self._expected: dict[int, dict[int, Record | None]] = {0: dict.fromkeys(range(len(channels)))}
        self._latest_sign_s = 0.0
        self._on_report: dict[int, OnReport] = {}
        self._poll = select.poll()
        for fd in (*self._ranks, loss.fileno()):
            self._poll.register(fd, select.POLLIN)

    @property
    def size(self) -> int:
        return len(self._channels)

    # ---- sending -----------------------------------------------------------------------------------------------------

    def post(self, kind: Kind, payloads: Sequence[bytes], answers: Iterable[int] = ()) -> int:
        """Send a record to all ranks and return its number. Raises `RanksLost`.

        payloads: by rank, or one for all. answers: ranks whose answers will be waited for.
        """
        wanted: dict[int, Record | None] = dict.fromkeys(answers)
        with self._sending:
            self._loss.check()
            self._seq += 1
            if wanted:
                self._expected[self._seq] = wanted
            records = [encode_record(kind, self._seq, payload) for payload in payloads]
            for rank, channel in enumerate(self._channels):
                self._send(rank, channel.socket, records[rank if len(records) > 1 else 0])
            return self._seq

    def _send(self, rank: int, end: socket.socket, record: bytes) -> None:
        try:
            sent = end.send(record, socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise self._closed(rank) from error
        if sent < len(record):
            self._send_rest(rank, end, memoryview(record)[sent:])

    def _send_rest(self, rank: int, end: socket.socket, rest: memoryview) -> None:
        """Send the part of a large record that did not fit into the socket's buffer, as the rank takes it."""
        writable = select.poll()
        writable.register(end, select.POLLOUT)
        writable.register(self._loss, select.POLLIN)
        while rest:
            ready = [fd for fd, _ in writable.poll(SEND_S * 1000)]
            self._loss.check()
            if not ready:
                raise self._loss.declare(
                    f"{self._names[rank]} does not take records.", f"It had {SEND_S:.0f} s.", [rank]
                )
            try:
                rest = rest[end.send(rest, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise self._closed(rank) from error

    # ---- answers -----------------------------------------------------------------------------------------------------

    def call(self, kind: Kind, value: Any, answer: type[T], timeout_s: float, on_report: OnReport = ignore) -> list[T]:
        """Send a record to all ranks and return their answers. Raises the error of the first rank that refused it."""
        return self.answers(self.ask(kind, [encode(value)]), answer, timeout_s, kind.name, on_report)

    def ask(self, kind: Kind, payloads: Sequence[bytes]) -> int:
        """Send a record that every rank will answer, and return its number. payloads: by rank, or one for all."""
        return self.post(kind, payloads, range(self.size))

    def answers(self, seq: int, answer: type[T], timeout_s: float, doing: str, on_report: OnReport = ignore) -> list[T]:
        """Return the answers of all ranks to a record; 0: their first ones. doing: for errors."""
        self._on_report[seq] = on_report
        try:
            records = self.wait(seq, timeout_s, doing)
        finally:
            del self._on_report[seq]
        failed = [record for record in records if record.kind is Kind.FAILED]
        if failed:
            raise decode(failed[0].payload, Failure).as_error()
        return [decode(record.payload, answer) for record in records]

    def expect(self, seq: int) -> None:
        """Announce that every rank will answer this record once more."""
        with self._turn:
            self._expected[seq] = dict.fromkeys(range(self.size))

    def wait(self, seq: int, timeout_s: float, doing: str) -> list[Record]:
        """Return the answers to a record, in the order of ranks. A report of progress begins `timeout_s` again.

        Raises `RanksLost` if a rank is lost or late.
        """
        begun = time.monotonic()
        while not self._is_answered(seq):
            self._loss.check()
            limit = max(begun, self._latest_sign_s) + timeout_s
            if self._refusal(seq) is not None:
                limit = min(limit, self._latest_sign_s + REST_S)
            left = limit - time.monotonic()
            if left <= 0:
                return self._late(seq, timeout_s, doing)
            self._read(seq, left)
        return [record for record in self._expected.pop(seq).values() if record is not None]

    def forget(self, seqs: Iterable[int]) -> None:
        """Drop the answers to these records; their steps were given up."""
        with self._turn:
            for seq in seqs:
                self._expected.pop(seq, None)

    def drain(self) -> None:
        """Handle what ranks sent while no thread waits for an answer: log records, failures.

        Does nothing while a thread waits for answers with reports: it reads them, and its callback may raise.
        """
        if self._loss.error is None and not self._on_report:
            self._read(None, 0)

    def _is_answered(self, seq: int) -> bool:
        return None not in self._expected[seq].values()

    def _refusal(self, seq: int) -> Record | None:
        answers = self._expected[seq].values()
        return next((record for record in answers if record is not None and record.kind is Kind.FAILED), None)

    def _late(self, seq: int, timeout_s: float, doing: str) -> list[Record]:
        """Declare the group lost. Return the refusal of a rank whose peers wait for it, if there is one."""
        answers = self._expected.pop(seq)
        missing = [rank for rank, record in answers.items() if record is None]
        names = ", ".join(self._names[rank] for rank in missing)
        here = len(answers) - len(missing)
        why = f"{here} of {len(answers)} ranks answered within {timeout_s:.0f} s. Missing: {names}."
        error = self._lose_hanging(f"The ranks did not finish {doing}.", why, missing)
        refusals = [record for record in answers.values() if record is not None and record.kind is Kind.FAILED]
        if refusals:
            return refusals
        raise error

    def _read(self, seq: int | None, seconds: float) -> None:
        """Read once, or wait until the thread that reads has done so."""
        with self._turn:
            if seq is not None and self._is_answered(seq):
                return
            if self._someone_reads:
                if seq is not None:
                    self._turn.wait(seconds)
                return
            self._someone_reads = True
        try:
            self._read_all(seconds)
        finally:
            with self._turn:
                self._someone_reads = False
                self._turn.notify_all()

    def _read_all(self, seconds: float) -> None:
        for fd, _ in self._poll.poll(seconds * 1000):
            rank = self._ranks.get(fd)
            if rank is None:
                self._loss.check()
                return
            try:
                records = self._channels[rank].available()
                for record in records or ():
                    self._take(rank, record)
            except BadRecord as error:
                what = f"{self._names[rank]} sent a damaged answer."
                raise self._loss.declare(what, f"{error}.", [rank]) from error
            if records is None:
                raise self._closed(rank)

    def _take(self, rank: int, record: Record) -> None:
        if record.kind is Kind.LOG:
            line = decode(record.payload, Log)
            name = self._names[rank].replace("Rank", "rank", 1)
            logging.getLogger(line.logger).log(line.level, "%s: %s", name, line.text)
            return
        if record.kind is Kind.BEAT:  # says nothing about the record that is waited for
            self._on_beat(rank, decode(record.payload, list[int]))
            return
        self._latest_sign_s = time.monotonic()
        if record.kind is Kind.REPORT:
            self._on_report.get(record.seq, ignore)(rank, decode(record.payload, Report))
            return
        if record.kind is Kind.FAILED:
            self._note_failure(rank, decode(record.payload, Failure))
        answers = self._expected.get(record.seq)
        if answers is not None and rank in answers:
            answers[rank] = record

    def _note_failure(self, rank: int, failure: Failure) -> None:
        """Log a failure. One that left a step makes the group lost; the death of another rank may be its cause."""
        if not failure.is_fatal:
            return
        self._loss.wait(CAUSE_S)
        if self._loss.error is None:
            log.error("rank failed rank=%d\n%s", rank, failure.trace)
        raise self._loss.declare(f"{self._names[rank]} failed. {failure.what}", failure.why, [rank])

    def _closed(self, rank: int) -> RanksLost:
        """Return the error for a closed socket. The supervisor soon knows how the process ended."""
        self._loss.wait(CAUSE_S)
        return self._loss.declare(f"{self._names[rank]} closed its connection.", ranks=[rank])

    def close(self) -> None:
        """Close the sockets. The group must be lost or ended."""
        with self._turn:
            self._turn.wait_for(lambda: not self._someone_reads, timeout=1)
            for channel in self._channels:
                channel.close()
