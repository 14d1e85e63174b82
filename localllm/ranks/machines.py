"""Ranks on several machines: the server's gate that they come to, their life as seen from there, and the rank's side.

A launcher (Ray, torchrun: placement.py) starts the ranks. Each connects to the gate, proves that it has the group's key
(handshake.py), and is from then on a rank as any other: the same records, over TCP instead of a socket pair. It sends
its signs of life as records, and ends when its connection does. The server hosts the store in which ranks find each
other, on the address of the gate alone.
Does not know: how ranks are started, what they compute.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import secrets
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import psutil

from localllm.errors import ConfigError, EngineError
from localllm.machine.processes import threads_per_process
from localllm.ranks.channel import Channel
from localllm.ranks.handshake import Introduction, NotAdmitted, admit, difference, introduce
from localllm.ranks.links import Links
from localllm.ranks.progress import ProgressTable, shared_memory
from localllm.ranks.rank import BEAT_S, Rank, Share, log_to_server
from localllm.ranks.supervisor import RANKS_S, STOP_S, TICK_S, RankPlace, Supervisor
from localllm.ranks.wire import Kind, encode

log = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
"""For each step of a handshake."""
KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 20_000))
"""After about 20 s without an answer from the other machine, a connection counts as closed."""
STORE_S = 300.0
"""For the store's requests, which ranks make while they connect."""


@dataclass(frozen=True, slots=True)
class Gate:
    """The address that a group's ranks connect to, and the key that they have to show."""

    host: str
    port: int
    key: bytes = field(default_factory=partial(secrets.token_bytes, 32), repr=False)


class Placement(Protocol):
    """Starts the ranks of a group on machines. `host`: this machine's address for them. `devices`: of each rank, as
    its own process numbers them. `note`: what the user should know about the choice of machines."""

    host: str
    key: bytes | None  # None: a new one for each group
    devices: Sequence[str]
    note: str

    def start(self, gate: Gate) -> None:
        """Have every rank started. Raises what hinders it."""
        ...

    def why_ended(self, rank: int) -> str:
        """Return what the launcher knows about the end of a rank, as a sentence; empty: nothing."""
        ...

    def end(self) -> None:
        """End what is left of the ranks. Idempotent."""
        ...


class MachineSupervisor(Supervisor):
    """The ranks of one group on several machines. Not their processes but their connections are watched."""

    def __init__(self, places: Sequence[RankPlace], placement: Placement, *, tick_s: float = TICK_S) -> None:
        super().__init__(places, tick_s=tick_s)
        self._placement = placement
        self._ends, self._end_event = {}, select.POLLRDHUP  # rank by the file descriptor of its connection
        self._store_server: Any = None

    def _spawn(self) -> None:
        with socket.create_server((self._placement.host, 0), backlog=len(self._places)) as listener:
            key = {} if self._placement.key is None else {"key": self._placement.key}
            gate = Gate(self._placement.host, listener.getsockname()[1], **key)
            self.store = self._host_store(gate.host)
            self._placement.start(gate)
            joined = self._admit_all(listener, gate.key)
        self.pids = [introduction.pid for _, introduction in joined]
        self.names = [
            f"Rank {rank} ({self._placement.devices[rank]} on {introduction.node})"
            for rank, (_, introduction) in enumerate(joined)
        ]
        channels = [channel for channel, _ in joined]
        self._ends = {channel.fileno(): rank for rank, channel in enumerate(channels)}
        self._links = Links(channels, self.loss, self.names, self.lose_hanging, self.progress.put)

    def _host_store(self, host: str) -> str:
        """Serve the store on this address alone. Return it as `messages.Connect` names it."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        listener = socket.socket(socket.AF_INET)
        listener.bind((host, 0))
        port = listener.getsockname()[1]
        self._store_server = TCPStore(
            host, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return f"tcp://{host}:{port}"

    def _admit_all(self, listener: socket.socket, key: bytes) -> list[tuple[Channel, Introduction]]:
        """Return the connections of all ranks, in their order. Raises `EngineError` if some do not come, and the error
        for one whose versions differ."""
        joined: dict[int, tuple[Channel, Introduction]] = {}
        refused: list[Exception] = []

        def shake(end: socket.socket) -> None:
            try:
                self._shake(end, key, joined)
            except (NotAdmitted, OSError) as error:
                log.warning("rank not admitted error=%s", error)
                end.close()
            except ConfigError as error:
                refused.append(error)
                end.close()

        until = time.monotonic() + RANKS_S
        try:
            with ThreadPoolExecutor(len(self._places) + 4, "localllm-gate") as pool:
                while len(joined) < len(self._places):
                    if refused:
                        raise refused[0]
                    if time.monotonic() > until or self._stopping.is_set():
                        raise self._missing(joined)
                    waits: list[Any] = [listener, self._wake_read]
                    if select.select(waits, [], [], 0.05)[0] and not self._stopping.is_set():
                        pool.submit(shake, listener.accept()[0])
        except BaseException:
            for channel, _ in joined.values():
                channel.close()
            raise
        return [joined[rank] for rank in range(len(self._places))]

    def _shake(self, end: socket.socket, key: bytes, joined: dict[int, tuple[Channel, Introduction]]) -> None:
        end.settimeout(HANDSHAKE_S)
        channel, introduction = admit(end, key)
        rank, error = introduction.rank, difference(introduction.node, introduction.versions)
        if error is None and not 0 <= rank < len(self._places):
            raise NotAdmitted(f"there is no rank {rank}")
        channel.send(Kind.JOIN, 0, encode("" if error is None else str(error)))
        if error is not None:
            raise error
        keep_alive(end)
        if joined.setdefault(rank, (channel, introduction))[0] is not channel:
            raise NotAdmitted(f"rank {rank} came twice")

    def _missing(self, joined: dict[int, tuple[Channel, Introduction]]) -> EngineError:
        missing = [rank for rank in range(len(self._places)) if rank not in joined]
        why = " ".join(filter(None, (self._placement.why_ended(rank) for rank in missing)))
        names = ", ".join(f"rank {rank}" for rank in missing)
        return EngineError(
            f"{len(joined)} of {len(self._places)} ranks came within {RANKS_S:.0f} s.",
            f"Missing: {names}. {why}".strip(),
            "Their logs are on their machines. A firewall between the machines has to let them through.",
        )

    def _check_ended(self, ready: Sequence[int]) -> None:
        for rank in (self._ends[fd] for fd in ready if fd in self._ends):
            if not self._stopping.is_set():
                why = self._placement.why_ended(rank) or "Its connection was closed."
                self.loss.declare(f"{self.names[rank]} died.", why, [rank])

    def _end_all(self) -> None:
        if self.loss.error is None and self._stops():
            until = time.monotonic() + STOP_S
            poll, left = select.poll(), set(self._ends)
            for fd in left:
                poll.register(fd, self._end_event)
            while left and (ready := poll.poll(max(0.0, until - time.monotonic()) * 1000)):
                for fd, _ in ready:
                    poll.unregister(fd)
                    left.discard(fd)
        self._placement.end()
        self._store_server = None


def keep_alive(end: socket.socket) -> None:
    """Make a connection of records: without delay or limit of time, and closed soon after the other machine is gone."""
    end.settimeout(None)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE:
        if hasattr(socket, name):
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


# ---- the rank's side -------------------------------------------------------------------------------------------------


class MachineRank(Rank):
    """A rank whose server is on another machine: its line of the progress table travels as a record."""

    def _beat(self) -> None:
        with suppress(OSError):  # the reading thread ends this process
            while True:
                self._table.beat(self._number)
                line = self._table.read(self._number)
                words = [getattr(line, name) for name in line.__slots__]
                self._channel.send(Kind.BEAT, 0, encode(words))
                time.sleep(BEAT_S)


def join(
    gate: Gate,
    rank: int,
    size: int,
    local_size: int,
    make_share: Callable[[], Share] | None = None,
    end: Callable[[int], object] = os._exit,
) -> None:
    """Run one rank of `size`, until the server ends it or is gone. local_size: ranks on this machine.

    It prepares the environment of the whole process, so torch must not be imported yet. Raises `NotAdmitted`.
    """
    connection = socket.create_connection((gate.host, gate.port), timeout=HANDSHAKE_S)
    channel = introduce(connection, gate.key, rank, os.getpid(), socket.gethostname())
    keep_alive(connection)
    address = connection.getsockname()[0]
    found = (name for name, own in psutil.net_if_addrs().items() if any(each.address == address for each in own))
    interface = next(found, "")  # the one that has this address
    os.environ |= {"OMP_NUM_THREADS": threads_per_process(local_size, os.environ)}
    os.environ |= {f"{library}_SOCKET_IFNAME": interface for library in ("GLOO", "NCCL")} if interface else {}
    faulthandler.enable()
    with suppress(ValueError):  # signals belong to the main thread
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends its ranks
    log_to_server(channel)
    MachineRank(rank, channel, ProgressTable(shared_memory(size), size), make_share or torch_share, end).run()


def torch_share() -> Share:
    """Return a share of a real model. This imports torch."""
    from localllm.ranks.share import TorchShare

    return TorchShare()
