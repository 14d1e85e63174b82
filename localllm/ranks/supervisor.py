"""Starts the processes of a group of ranks, watches them, and ends them.

One thread does all three for as long as the group lives: the system kills a rank when the thread that started it ends,
so a rank is never started by a thread that loads a model. A rank that dies or stops giving signs of life makes the
group lost, and a lost group is killed: SIGTERM, then SIGKILL. Nothing of it is left afterwards.
Does not know: what ranks compute, records (links.py).
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import psutil

from localllm.errors import EngineError, LocalLLMError, RanksLost
from localllm.machine.processes import threads_per_process
from localllm.ranks.channel import Channel
from localllm.ranks.links import Links, Loss
from localllm.ranks.progress import ProgressTable, shared_memory, unnamed_memory
from localllm.ranks.wire import Kind

log = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "localllm.ranks")
TICK_S = 1.0
SILENT_TICKS = 5  # without a sign of life
BUSY_TICKS = 20  # ... of a rank whose processor time grows: a compiler may hold the interpreter
BUSY_S = 0.02  # processor time per tick above which it grows
RANKS_S = 60.0  # for ranks that another program starts, to come
STOP_S = 5.0  # for ranks to end by themselves
TERM_S = 2.0  # between SIGTERM and SIGKILL
STACKS_S = 0.3  # for ranks to write their stacks
LOOPBACK = "lo"


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The device of one rank, and its processors."""

    device: str = "cpu"  # cpu, cuda:0, ...
    numa_node: int = -1  # -1: any


class Supervisor:
    """The processes of one group. `start` and `stop` may be called from any thread; the rest is done by its own."""

    def __init__(
        self,
        places: Sequence[RankPlace],
        *,
        command: Sequence[str] = COMMAND,
        tick_s: float = TICK_S,
        added: Mapping[str, str] | None = None,
    ) -> None:
        """places: by rank. tick_s: between two looks at the ranks' signs of life. added: to the ranks' environment."""
        self._added = dict(added or {})
        self._places, self._command, self._tick_s = places, list(command), tick_s
        self._on_lost: Callable[[RanksLost], None] | None = None
        self._told: RanksLost | None = None
        self._telling = threading.Lock()
        self.names = [f"Rank {rank} ({place.device})" for rank, place in enumerate(places)]
        self.loss = Loss()
        self._table_fd, self._store_fd = shared_memory(len(places)), unnamed_memory()
        self.store = f"/proc/self/fd/{self._store_fd}"  # path of the memory in which the ranks find each other
        self.progress = ProgressTable(self._table_fd, len(places))
        self.processes: list[subprocess.Popen[bytes]] = []
        self._watches = [_Watch() for _ in places]
        self.watches_beats = False  # while a model is served: start-up has the deadlines of its phases
        self._pidfds: dict[int, int] = {}
        self._ends, self._end_event = self._pidfds, select.POLLIN  # what the poll returns for a rank that has ended
        self.pids: list[int] = []  # by rank; of another machine, if it runs there
        self._links: Links | None = None
        self._failure: OSError | LocalLLMError | None = None
        self._spawned, self._stopping = threading.Event(), threading.Event()
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._run, name="localllm-ranks", daemon=True)

    def start(self) -> Links:
        """Start all processes, and return the links to them. Raises `EngineError` if the system refuses."""
        self._thread.start()
        self._spawned.wait()
        if self._links is None:
            self._thread.join()
            if isinstance(self._failure, LocalLLMError):
                raise self._failure
            raise EngineError(
                "The processes of the ranks could not be started.", f"{self._failure}."
            ) from self._failure
        return self._links

    def stop(self) -> None:
        """End all processes and return when none is left. Idempotent."""
        if self._thread.ident is None:
            self._thread.start()
        if not self._stopping.is_set():
            self._stopping.set()
            with contextlib.suppress(OSError):
                os.write(self._wake_write, b"x")
        self._thread.join()

    def when_lost(self, act: Callable[[RanksLost], None]) -> None:
        """Have `act` called when the group is lost, on the supervisor's thread; at once if that has happened."""
        with self._telling:
            self._on_lost, told = act, self._told
        if told is not None:
            _call(act, told)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            if not self._stopping.is_set():
                self._spawn()
            self._spawned.set()
            self._watch()
            if self.loss.error is not None:
                self._tell(self.loss.error)
        except (OSError, LocalLLMError) as error:
            self._failure = error
            log.exception("ranks could not be started or watched")
            self.loss.declare("The ranks can no longer be watched.", f"{error}.")
        finally:
            self._end_all()
            self._free()
            self._spawned.set()

    def _tell(self, error: RanksLost) -> None:
        log.error("ranks lost what=%r why=%r %s", error.what, error.why, self.describe())
        with self._telling:
            self._told, act = error, self._on_lost
        if act is not None:
            _call(act, error)

    def _spawn(self) -> None:
        environ = {**environment(os.environ, len(self._places)), **self._added}
        channels: list[Channel] = []
        try:
            for rank, place in enumerate(self._places):
                ours, theirs = socket.socketpair()
                channels.append(Channel(ours))
                with theirs:
                    process = self._started(rank, place, theirs.fileno(), environ)
                self.processes.append(process)
                self.pids.append(process.pid)
                self._pidfds[os.pidfd_open(process.pid)] = rank
        except OSError:
            for channel in channels:
                channel.close()
            raise
        self._links = Links(channels, self.loss, self.names, self.lose_hanging)

    def _started(self, rank: int, place: RankPlace, fd: int, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
        inherited = fd, self._table_fd, self._store_fd
        arguments = map(str, (*inherited, rank, len(self._places), os.getpid(), place.numa_node))
        return subprocess.Popen(
            [*self._command, *arguments], pass_fds=inherited, env=environ, stdin=subprocess.DEVNULL,
            start_new_session=True,  # keys of the terminal reach the server alone
        )  # fmt: skip

    def _watch(self) -> None:
        """Watch until the group is lost or is to be stopped."""
        poll = select.poll()
        for fd in self._ends:
            poll.register(fd, self._end_event)
        for fd in (self.loss.fileno(), self._wake_read):
            poll.register(fd, select.POLLIN)
        due_s = time.monotonic() + self._tick_s
        while self.loss.error is None and not self._stopping.is_set():
            self._check_ended([fd for fd, _ in poll.poll(max(0, due_s - time.monotonic()) * 1000)])
            if time.monotonic() >= due_s:
                due_s = time.monotonic() + self._tick_s
                self._tick()

    def _tick(self) -> None:
        if self._links is not None:
            with contextlib.suppress(RanksLost):
                self._links.drain()
        if self.watches_beats:
            for rank, watch in enumerate(self._watches):
                pid = self.processes[rank].pid if self.processes else None
                if watch.is_silent(self.progress.read(rank).beat_ns, pid):
                    why = f"No sign of life for {watch.ticks} s."
                    self.lose_hanging(f"{self.names[rank]} does not answer.", why, [rank])

    def _check_ended(self, ready: Sequence[int]) -> None:
        """Declare the loss of ranks that have ended. ready: the file descriptors that the poll has returned."""
        for rank in (self._pidfds[fd] for fd in ready if fd in self._pidfds):
            code = exit_code(self.processes[rank].pid)
            if code is not None and not self._stopping.is_set():
                self.loss.declare(f"{self.names[rank]} died.", f"Its process {ended_how(code)}.", [rank])

    def lose_hanging(self, what: str, why: str, ranks: Collection[int]) -> RanksLost:
        """Declare the group lost because these ranks hang, after all ranks have written their stacks to stderr."""
        if self.loss.error is not None:  # its processes are being ended
            return self.loss.error
        for process, line in zip(self.processes, self.progress.read_all(), strict=False):
            if line.beat_ns:  # it has begun, and knows the signal
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGUSR1)  # `Popen.send_signal` would reap a process that has ended
        time.sleep(STACKS_S)
        return self.loss.declare(what, f"{why} {self.describe()}", ranks)

    def describe(self) -> str:
        """Return in words what each rank has done last."""
        lines = [
            f"rank {n} began record {p.launched} and ended {p.answered}" for n, p in enumerate(self.progress.read_all())
        ]
        return f"Of the records, {'; '.join(lines)}."

    # ---- the end -----------------------------------------------------------------------------------------------------

    def _end_all(self) -> None:
        """End every process of the group, with its children. A process is waited for last: until then, its id and that
        of its session cannot be given to another one."""
        if self.loss.error is None and self._stops():
            self._wait(STOP_S)
        self._signal(signal.SIGTERM)
        self._wait(TERM_S)
        self._signal(signal.SIGKILL)
        self._wait(STOP_S)
        left = [process.pid for process in self.processes if process.poll() is None]
        if left:
            log.error("ranks could not be killed pids=%s", left)

    def _stops(self) -> bool:
        """Ask the ranks to end. Return whether all were asked."""
        if self._links is None:
            return False
        try:
            self._links.post(Kind.STOP, [b""])
        except RanksLost:
            return False
        return True

    def _signal(self, number: signal.Signals) -> None:
        """Signal each process and what it started: it leads a session of its own."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        for fd, rank in self._pidfds.items():
            left = until - time.monotonic()
            if exit_code(self.processes[rank].pid) is None and left > 0:
                select.select([fd], [], [], left)

    def _free(self) -> None:
        """Close every file descriptor."""
        self.loss.close()
        if self._links is not None:
            self._links.close()
        self.progress.close()
        for fd in (*self._pidfds, self._wake_read, self._wake_write, self._table_fd, self._store_fd):
            os.close(fd)


@dataclass(slots=True)
class _Watch:
    """The signs of life of one rank, as seen once per tick. Ticks are counted instead of seconds: a machine that was
    suspended has not ticked."""

    beat_ns: int = 0
    ticks: int = 0  # without a new sign of life
    processor_s: float = 0.0

    def is_silent(self, beat_ns: int, pid: int | None) -> bool:
        """pid: None for a rank of another machine, whose processor time is not known."""
        self.ticks = 0 if beat_ns != self.beat_ns else self.ticks + 1
        self.beat_ns = beat_ns
        if self.ticks < SILENT_TICKS - 1:
            return False
        if pid is None:
            return self.ticks >= BUSY_TICKS
        before, self.processor_s = self.processor_s, _processor_s(pid)
        grows = self.processor_s - before >= BUSY_S
        return self.ticks >= (BUSY_TICKS if grows else SILENT_TICKS)


def _call(act: Callable[[RanksLost], None], error: RanksLost) -> None:
    try:
        act(error)
    except Exception:
        log.exception("the loss of ranks was not handled")


def _processor_s(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def environment(environ: Mapping[str, str], ranks: int) -> dict[str, str]:
    """Return the environment of a rank: this process's modules, its share of the processors, loopback only."""
    return {
        **environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": threads_per_process(ranks, environ),
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        "NCCL_SOCKET_IFNAME": LOOPBACK,
    }


def exit_code(pid: int) -> int | None:
    """Return how a child ended: its exit code, or minus its signal; None: it runs. It can still be waited for."""
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def ended_how(code: int) -> str:
    """Return how a process ended, from its return code."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
