"""A rank's process: takes records in order, drives its share of the model, answers.

Three threads: this one does what records ask; one reads the socket, so that a sender never waits for a step and the
server's death is noticed at once; one writes a sign of life every second. On a GPU a fourth one waits for results,
while this one launches the next step.
An error in a step ends the rank: its peers may wait for it in a collective, so none of them can be trusted again. An
error in any other record is its answer.
Does not know: how the process was started, what a share holds (share.py), torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from localllm.engine.step import HostBlocks, PendingStep, Runner, RunnerStats, StepPlan
from localllm.errors import DoesNotFit, LocalLLMError
from localllm.machine.processes import bind_to_node, end_with_parent
from localllm.ranks.channel import Channel
from localllm.ranks.messages import (
    Connect,
    Connected,
    Failure,
    Idle,
    Loaded,
    Log,
    Measured,
    PutAdapter,
    Report,
)  # fmt: skip
from localllm.ranks.progress import ANSWERED, BUSY_NS, LAUNCHED, STEP_NS, STEPS, ProgressTable
from localllm.ranks.wire import (
    Answer,
    BadRecord,
    Kind,
    Record,
    decode,
    decode_plan,
    decode_sample,
    encode,
    encode_blocks,
)

log = logging.getLogger(__name__)

BEAT_S = 1.0
LINGER_S = 5.0  # after an error that ends the rank, for the server to read it
STATS_S = 0.1  # between two answers that carry the runner's counts

Tell = Callable[[Report], None]
Agree = Callable[[Measured], bytes]
"""Function that takes what this rank has measured and returns the memory plan that fits all ranks.
Raises `DoesNotFit` if another rank has refused."""


class OpenedRunner(Runner, Protocol):
    """A runner that the rank closes."""

    def close(self) -> None: ...


class Share(Protocol):
    """A rank's share of a model. `samples`: whether this rank draws the tokens, once connected.
    `answers_later`: whether results come after a launch, so that a thread waits for them. `waited_ns`: the time that
    launches have waited for other stages.

    It decodes the records that open the model and its runner, and returns the latter's answer."""

    samples: bool
    answers_later: bool

    def connect(self, rank: int, asked: Connect) -> Connected: ...
    def enter_thread(self) -> None:
        """Prepare the calling thread, another one than that of `connect`, to wait for results."""
        ...

    def fingerprint(self, path: str) -> dict[str, str]:
        """Return the digest of each file of a checkpoint, by its name."""
        ...

    def load(self, asked: bytes, tell: Tell) -> Loaded: ...
    def open_runner(self, asked: bytes, agree: Agree, tell: Tell) -> tuple[OpenedRunner, object]: ...
    def waited_ns(self) -> int: ...
    def sleep(self) -> None: ...
    def wake(self) -> None: ...
    def put_adapter(self, asked: PutAdapter) -> None: ...
    def close(self) -> None: ...


class Rank:
    """The state of a rank between two records."""

    def __init__(
        self,
        number: int,
        channel: Channel,
        table: ProgressTable,
        make_share: Callable[[], Share],
        end: Callable[[int], object] = os._exit,
    ) -> None:
        """make_share: called once the server knows that the rank is there, since it imports torch. end: ends the
        process at once, from any thread, with an exit code."""
        self._make_share, self._end = make_share, end
        self._number, self._channel, self._table = number, channel, table
        self._connected: Share | None = None
        self._records: queue.SimpleQueue[Record | BadRecord] = queue.SimpleQueue()
        self._seq = self._forwarded_ns = 0
        self._stopped = False
        self._runner: OpenedRunner | None = None
        self._plan: StepPlan | None = None  # forwarded, not sampled
        self._answers: _Answers | None = None
        self._acts: dict[Kind, Callable[[Record], object]] = {
            Kind.CONNECT: self._connect, Kind.OPEN: self._open, Kind.OPEN_RUNNER: self._open_runner,
            Kind.CLOSE_RUNNER: self._close_runner, Kind.IDLE: self._idle, Kind.RESET: self._reset,
            Kind.STATS: self._stats, Kind.SLEEP: self._sleep, Kind.WAKE: self._wake, Kind.ADAPTER: self._put_adapter,
            Kind.STOP: self._stop, Kind.ALLOCATE: self._ignore,
            Kind.CHECK: lambda record: self._share.fingerprint(decode(record.payload, str)),
        }  # fmt: skip

    def run(self) -> None:
        """Do what records ask until STOP."""
        for target in (self._read, self._beat):
            threading.Thread(target=target, name=f"localllm-rank-{target.__name__}", daemon=True).start()
        self._channel.send(Kind.HELLO, 0, encode(os.getpid()))
        try:
            while not self._stopped:
                self._do(self._next())
        except BaseException as error:
            self._end_with(error)

    # ---- threads -----------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Queue records as they come. End the process when the server closes its end, which its death does too."""
        try:
            for record in self._channel.records():
                self._records.put(record)
        except BadRecord as error:
            self._records.put(error)
            return
        self._end(1)

    def _beat(self) -> None:
        while True:
            self._table.beat(self._number)
            time.sleep(BEAT_S)

    # ---- records -----------------------------------------------------------------------------------------------------

    def _next(self) -> Record:
        """Return the next record. Raises `BadRecord` if one is damaged or missing."""
        record = self._records.get()
        if isinstance(record, BadRecord):
            raise record
        if record.seq != self._seq + 1:
            raise BadRecord(f"record {record.seq} ({record.kind.name}) came after {self._seq}")
        self._seq = record.seq
        return record

    def _do(self, record: Record) -> None:
        self._table.write(self._number, LAUNCHED, record.seq)
        if record.kind is Kind.FORWARD:
            self._forward(record)
        elif record.kind is Kind.SAMPLE:
            self._sample(record)
        elif record.kind in self._acts:
            self._answer(record, self._acts[record.kind])
        else:
            raise BadRecord(f"{record.kind.name} is not a record for a rank here")

    def _answer(self, record: Record, act: Callable[[Record], object]) -> None:
        """Answer with what `act` returns, or with its error."""
        try:
            done = act(record)
        except LocalLLMError as error:
            self._channel.send(Kind.FAILED, record.seq, encode(Failure.of(error, is_fatal=False)))
            return
        self._table.write(self._number, ANSWERED, record.seq)
        self._channel.send(Kind.DONE, record.seq, encode(done))

    def _end_with(self, error: BaseException) -> None:
        """Send the error that ends this rank, and end it. The server has time to read it: it kills the process."""
        with contextlib.suppress(OSError):
            self._channel.send(Kind.FAILED, self._seq, encode(Failure.of(error, is_fatal=True)))
            time.sleep(LINGER_S)
        self._end(1)

    # ---- steps -------------------------------------------------------------------------------------------------------

    def _forward(self, record: Record) -> None:
        plan = decode_plan(record.payload)
        self._forwarded_ns = time.monotonic_ns()
        if self._plan is not None:
            raise BadRecord(f"step {plan.step_id} came before step {self._plan.step_id} was sampled")
        with self._computing():
            self._opened.forward(plan)
        self._plan = plan

    def _sample(self, record: Record) -> None:
        step_id, masks = decode_sample(record.payload)
        plan, self._plan = self._plan, None
        if plan is None or plan.step_id != step_id:
            raise BadRecord(f"step {step_id} is to be sampled, and {plan and plan.step_id} was forwarded")
        with self._computing():
            pending = self._opened.sample(plan, masks)
        assert self._answers is not None
        leaving = tuple([move.host for move in plan.moves if not move.is_load])
        self._answers.put(UnansweredStep(record.seq, self._forwarded_ns, pending, leaving))

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        """Add the time of a launch to the time that this rank has computed, less its waits for other stages."""
        begun_ns, waited_ns = time.monotonic_ns(), self._share.waited_ns()
        yield
        if not self._share.answers_later:
            spent_ns = time.monotonic_ns() - begun_ns - (self._share.waited_ns() - waited_ns)
            self._table.add(self._number, BUSY_NS, spent_ns)

    def _settle(self, step: UnansweredStep, stats: RunnerStats | None) -> None:
        """Wait for a step's result, and send it if this rank draws the tokens."""
        result = step.pending.result()
        self._table.write(self._number, ANSWERED, step.seq)
        self._table.add(self._number, STEP_NS, time.monotonic_ns() - step.begun_ns)
        self._table.add(self._number, STEPS, 1)
        if self._share.samples:
            answer = Answer(result, stats, encode_blocks(step.leaving))
            self._channel.send(Kind.RESULT, step.seq, encode(answer))

    # ---- other records -----------------------------------------------------------------------------------------------

    def _connect(self, record: Record) -> Connected:
        asked = decode(record.payload, Connect)
        self._connected = self._make_share()
        return self._share.connect(self._number, asked)

    def _open(self, record: Record) -> Loaded:
        return self._share.load(record.payload, self._tell(record))

    def _open_runner(self, record: Record) -> object:
        runner, opened = self._share.open_runner(record.payload, self._agree_on(record), self._tell(record))
        self._runner = runner
        if self._share.answers_later:
            self._answers = _Later(self._settle, runner, self._share.enter_thread, self._end_with)
        else:
            self._answers = _AtOnce(self._settle, runner)
        return opened

    def _agree_on(self, asked: Record) -> Agree:
        def agree(measured: Measured) -> bytes:
            self._channel.send(Kind.MEASURED, asked.seq, encode(measured))
            record = self._next()
            if record.kind is not Kind.ALLOCATE:
                raise BadRecord(f"ALLOCATE was expected instead of {record.kind.name}")
            if not record.payload:
                raise DoesNotFit("Another rank does not have enough memory.")
            return record.payload

        return agree

    def _close_runner(self, record: Record) -> None:
        if self._answers is not None:
            self._answers.close()
        if self._runner is not None:
            self._runner.close()
        self._runner = self._answers = self._plan = None

    def _idle(self, record: Record) -> Idle:
        return Idle(self._opened.use_idle_time(), self._opened.stats())

    def _reset(self, record: Record) -> None:
        self._plan = None
        self._opened.reset()

    def _stats(self, record: Record) -> RunnerStats:
        return self._opened.stats()

    def _sleep(self, record: Record) -> None:
        self._share.sleep()

    def _wake(self, record: Record) -> None:
        self._share.wake()

    def _put_adapter(self, record: Record) -> None:
        self._share.put_adapter(decode(record.payload, PutAdapter))

    def _stop(self, record: Record) -> None:
        self._close_runner(record)
        if self._connected is not None:
            self._connected.close()
        self._stopped = True

    def _ignore(self, record: Record) -> None:
        """Do nothing: this rank has refused to open the runner that the plan is for."""

    def _tell(self, record: Record) -> Tell:
        return lambda report: self._channel.send(Kind.REPORT, record.seq, encode(report))

    @property
    def _share(self) -> Share:
        if self._connected is None:
            raise BadRecord(f"record {self._seq} came before CONNECT")
        return self._connected

    @property
    def _opened(self) -> OpenedRunner:
        if self._runner is None:
            raise BadRecord(f"record {self._seq} needs a runner, and none is open")
        return self._runner


class UnansweredStep(NamedTuple):
    """A step whose result has not been sent."""

    seq: int  # of the record that it answers
    begun_ns: int
    pending: PendingStep
    leaving: tuple[HostBlocks, ...]  # blocks that it copies out, by move


Settle = Callable[[UnansweredStep, RunnerStats | None], None]


class _Answers(Protocol):
    """A way to wait for the results of launched steps."""

    def put(self, step: UnansweredStep) -> None: ...
    def close(self) -> None: ...


class _AtOnce:
    """Waits on the launching thread: on a CPU a step is over when its launch is."""

    def __init__(self, settle: Settle, runner: Runner) -> None:
        self._settle, self._runner, self._due_s = settle, runner, 0.0

    def put(self, step: UnansweredStep) -> None:
        self._settle(step, self._stats())

    def _stats(self) -> RunnerStats | None:
        """Return the runner's counts, if the last ones are old."""
        if time.monotonic() < self._due_s:
            return None
        self._due_s = time.monotonic() + STATS_S
        return self._runner.stats()

    def close(self) -> None:
        """Do nothing: every result has been sent."""


class _Later(_AtOnce):
    """Waits on a thread of its own, while the launching thread takes the next record."""

    def __init__(
        self,
        settle: Settle,
        runner: Runner,
        enter_thread: Callable[[], None],
        end_with: Callable[[BaseException], None],
    ) -> None:
        super().__init__(settle, runner)
        self._enter_thread, self._end_with = enter_thread, end_with
        self._launched: queue.SimpleQueue[UnansweredStep | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="localllm-rank-results", daemon=True)
        self._thread.start()

    def put(self, step: UnansweredStep) -> None:
        self._launched.put(step)

    def close(self) -> None:
        self._launched.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._enter_thread()
            while (launched := self._launched.get()) is not None:
                self._settle(launched, self._stats())
        except BaseException as error:
            self._end_with(error)


class _LogsToServer(logging.Handler):
    """Sends log records to the server, whose handlers write them."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(logging.INFO)
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._channel.send(Kind.LOG, 0, encode(Log(record.levelno, record.name, self.format(record))))
        except OSError:
            pass  # the server has closed its end, and the reading thread ends this process


def log_to_server(channel: Channel) -> None:
    """Send all log records of this process to the server, whose log names the rank."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[_LogsToServer(channel)], force=True)


def main(make_share: Callable[[], Share], arguments: list[str] | None = None) -> None:
    """Run one rank. arguments: file descriptors of socket, table and the memory in which ranks find each other; rank,
    ranks, the server's process, NUMA node.

    make_share: makes what the rank drives.
    """
    *fds, number, size, parent, node = map(int, sys.argv[1:] if arguments is None else arguments)
    socket_fd, table_fd, _ = fds
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends its ranks
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    end_with_parent(parent)
    bind_to_node(node)
    for fd in fds:
        os.set_inheritable(fd, False)
    channel = Channel(socket.socket(fileno=socket_fd))
    log_to_server(channel)
    Rank(number, channel, ProgressTable(table_fd, size), make_share).run()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # at once: no thread of a library may keep a rank alive
