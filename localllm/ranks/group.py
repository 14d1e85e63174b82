"""Collectives between ranks, over torch.distributed: gloo on a CPU, NCCL on GPUs.

Ranks find each other through memory that they inherit, so no port is opened for it and no file is
left. Every group has the timeout, since a group without one waits ten minutes for a rank that has died.
Does not know: which layers ask for a collective, processes.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from localllm.ranks.messages import Connect

MOST_SENDS = 2
"""Sends to the next stage that may be under way: as many as steps are in flight between two stages."""

WAYS = "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_NVLS_ENABLE", "NCCL_SHM_DISABLE"
"""Settings of NCCL that decide how GPUs of one machine reach each other: directly, in the switch, over host memory."""


class SmallSum(Protocol):
    """A quicker sum over the shards, of tensors that it takes."""

    def takes(self, x: Tensor) -> bool: ...
    def sum_(self, x: Tensor) -> Tensor:
        """Add up x over all shards, in place. Every shard gets the same bits."""
        ...


class ProcessGroup:
    """The shards of one stage, one in each process. Implements `models.layers.group.Group`.

    is_deterministic: add up in the order of shards in fp32, whatever the size of the tensor. is_rehearsing: exchange
    nothing, and return tensors of the right shapes: only the kernels that are launched matter. small: adds up what it
    takes; None: the backend adds up everything.
    """

    def __init__(self, group: Any, ids: Any, size: int, index: int) -> None:
        """ids: a second group of the same shards, whose collectives do not queue behind the first one's."""
        self.size, self.index = size, index
        self.connection, self._ids = group, ids
        self.is_deterministic = self.is_rehearsing = False
        self.small: SmallSum | None = None

    def reconnect(self, other: ProcessGroup) -> None:
        """Use the connections of another object for the same shards."""
        self.connection, self._ids, self.small = other.connection, other._ids, None

    def sum_(self, x: Tensor) -> Tensor:
        if self.is_rehearsing:
            return x
        if self.is_deterministic:
            return x.copy_(torch.stack(self._all(x)).float().sum(0))
        if self.small is not None and self.small.takes(x):
            return self.small.sum_(x)
        dist.all_reduce(x, group=self.connection)
        return x

    def gather(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        if self.is_rehearsing:
            return x.new_zeros(*x.shape[:-1], sum(sizes))
        parts = self._all(_padded(x, max(sizes)))
        return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], -1)

    def gather_to_first(self, x: Tensor, sizes: Sequence[int]) -> Tensor | None:
        if self.is_rehearsing:
            return self.gather(x, sizes) if self.index == 0 else None
        own, home = _sendable(_padded(x, max(sizes)), self.connection), x.device
        parts = [torch.empty_like(own) for _ in sizes] if self.index == 0 else None
        dist.gather(own, parts, group=self.connection, group_dst=0)
        if parts is None:
            return None
        return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], -1).to(home)

    def broadcast_(self, x: Tensor) -> Tensor:
        if not self.is_rehearsing:
            dist.broadcast(x, group=self._ids, group_src=0)
        return x

    def _all(self, x: Tensor) -> list[Tensor]:
        """Return every shard's x, in order."""
        home, own = x.device, _sendable(x, self.connection)
        parts = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(parts, own, group=self.connection)
        return [part.to(home) for part in parts]


class Pipe:
    """One shard's connections to the same shard of the stages before and after."""

    def __init__(self, before: Any | None, after: Any | None) -> None:
        """before, after: groups of two processes; None before the first stage and after the last."""
        self.is_rehearsing = False  # as in ProcessGroup
        self.waited_ns = 0  # for the stages before and after; NCCL waits on the device instead
        self._before, self._after = before, after
        self._under_way: deque[tuple[Any, Tensor]] = deque()

    def send(self, stream: Tensor) -> None:
        """Send the hidden stream [T, H] to the next stage. This thread does not wait until the stream is taken; a GPU
        does, since a CUDA graph must contain the end of a transfer that it begins."""
        assert self._after is not None, "the last stage has no next one"
        if self.is_rehearsing:
            return
        if stream.is_cuda:
            dist.send(_sendable(stream, self._after), group=self._after, group_dst=1)
            return
        while len(self._under_way) >= MOST_SENDS:
            self._wait(self._under_way.popleft()[0].wait)
        stream = stream.contiguous()
        self._under_way.append((dist.isend(stream, group=self._after, group_dst=1), stream))

    def receive(self, stream: Tensor) -> Tensor:
        """Receive the hidden stream [T, H] of the stage before, in place."""
        before = self._before
        assert before is not None, "the first stage has none before it"
        if self.is_rehearsing:
            return stream
        arrived = _sendable(stream, before)
        self._wait(lambda: dist.recv(arrived, group=before, group_src=0))
        return stream if arrived is stream else stream.copy_(arrived)

    def _wait(self, act: Callable[[], object]) -> None:
        begun_ns = time.monotonic_ns()
        act()
        self.waited_ns += time.monotonic_ns() - begun_ns


class World:
    """All ranks of a model, and this one's place among them: rank = stage x shards + shard."""

    def __init__(self, rank: int, asked: Connect, device: torch.device) -> None:
        self.asked, self.device = asked, device
        self._rank, self._shards, self.num_stages = rank, asked.shards, asked.stages
        self._timeout = timedelta(seconds=asked.timeout_s)
        self._backend = asked.backend or ("nccl" if device.type == "cuda" else "gloo")
        size = asked.shards * asked.stages
        self._store = _store_of(asked.store, size, self._timeout)
        self._times = self._told = 0
        self._stage, self._shard = divmod(rank, asked.shards)
        self.group, self.everyone, self.pipe = self._connect()

    @property
    def is_last_stage(self) -> bool:
        return self._stage + 1 == self.num_stages

    @property
    def stage_devices(self) -> list[str]:
        """Return the devices of the shards of this rank's stage, in order."""
        return self.asked.devices[self._stage * self._shards : (self._stage + 1) * self._shards]

    def first_told(self, text: str) -> str:
        """Return the text of the first rank whose text is not empty. All ranks call this at once; it needs no device,
        so a rank whose GPU hangs can say so."""
        self._told += 1
        self._store.set(f"told {self._told} by {self._rank}", text)
        ranks = range(self._shards * self.num_stages)
        texts = [self._store.get(f"told {self._told} by {rank}").decode() for rank in ranks]
        return next(filter(None, texts), "")

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Exchange nothing during the block, which a rank may run without the others."""
        self.group.is_rehearsing = self.pipe.is_rehearsing = True
        try:
            yield
        finally:
            self.group.is_rehearsing = self.pipe.is_rehearsing = False

    def measure_s(self) -> float:
        """Return the seconds of one small all-reduce among the shards, after one that connects them."""
        x = torch.ones(1024, device=self.device)
        self.group.sum_(x)
        _wait_for(self.device)
        begun = time.monotonic()
        self.group.sum_(x)
        _wait_for(self.device)
        return time.monotonic() - begun

    @property
    def transport(self) -> str:
        """Return what carries the collectives, and the settings of NCCL that change its way, for the first lines."""
        return transport_of(self._backend, os.environ)

    def disconnect(self) -> None:
        """Give back what the connections hold: NCCL keeps up to 1 GiB on each GPU."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def reconnect(self) -> None:
        """Connect again, under the objects that layers hold."""
        group, everyone, self.pipe = self._connect()
        self.group.reconnect(group)
        self.everyone.reconnect(everyone)

    def _connect(self) -> tuple[ProcessGroup, ProcessGroup, Pipe]:
        """Every rank makes all groups, its own and the others', in the same order."""
        if self._backend != "gloo":  # NCCL makes some of its connections when they are first used
            return self._connect_all()
        with closed_to_others():
            return self._connect_all()

    def _connect_all(self) -> tuple[ProcessGroup, ProcessGroup, Pipe]:
        self._times += 1
        size = self._shards * self.num_stages
        store: Any = dist.PrefixStore(str(self._times), self._store)  # type: ignore[attr-defined]
        dist.init_process_group(self._backend, store=store, rank=self._rank, world_size=size, timeout=self._timeout)
        stages = [[stage * self._shards + shard for shard in range(self._shards)] for stage in range(self.num_stages)]
        shards = [self._new(ranks) for ranks in stages]
        ids = [self._new(ranks) for ranks in stages] if self._backend == "nccl" else shards
        group = ProcessGroup(shards[self._stage], ids[self._stage], self._shards, self._shard)
        everyone = ProcessGroup(dist.group.WORLD, dist.group.WORLD, size, self._rank)
        return group, everyone, self._connect_stages(stages)

    def _connect_stages(self, stages: list[list[int]]) -> Pipe:
        borders = [[self._new([a, b]) for a, b in zip(*pair, strict=True)] for pair in pairwise(stages)]
        own = [border[self._shard] for border in borders]
        before = own[self._stage - 1] if self._stage else None
        return Pipe(before, None if self.is_last_stage else own[self._stage])

    def _new(self, ranks: list[int]) -> Any:
        return dist.new_group(ranks, timeout=self._timeout)


def _store_of(store: str, size: int, timeout: timedelta) -> Any:
    """Return what the ranks find each other by: memory that they inherit, or a server's tcp://HOST:PORT."""
    if store.startswith("tcp://"):
        host, _, port = store.removeprefix("tcp://").rpartition(":")
        return dist.TCPStore(host, int(port), None, False, timeout)  # type: ignore[attr-defined]
    return dist.FileStore(store, size)  # type: ignore[attr-defined]


def transport_of(backend: str, environ: Mapping[str, str]) -> str:
    """Return the name of a backend of torch.distributed; for NCCL its version too, and what `environ` sets of WAYS."""
    if backend != "nccl":
        return backend
    version: Any = torch.cuda.nccl.version()
    settings = [f"{name}={environ[name]}" for name in WAYS if name in environ]
    return ", ".join([f"NCCL {'.'.join(map(str, version))}", *settings])


def _sendable(x: Tensor, group: Any) -> Tensor:
    """Return x, contiguous, on the device that the group's backend reads: gloo gathers and sends host memory only."""
    return x.cpu() if x.is_cuda and dist.get_backend(group) == "gloo" else x.contiguous()


def _padded(x: Tensor, size: int) -> Tensor:
    """Return x with zeros up to `size` along the last dimension: gloo gathers tensors of one size."""
    if x.shape[-1] == size:
        return x.contiguous()
    return torch.nn.functional.pad(x, (0, size - x.shape[-1]))


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


_SO_ATTACH_FILTER = 26
_DROP = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0))
"""A filter of one instruction: accept 0 bytes of each packet, so the kernel drops it."""


@contextmanager
def closed_to_others() -> Iterator[None]:
    """Let the block open listening sockets and connect to them; at its end nobody can connect to them any more.
    Connections that exist are kept.

    gloo accepts a connection of anybody and keeps it for ever, so another user of this machine could use up the open
    files of a rank. Once the ranks are connected nobody has to connect any more. The library goes on owning its
    sockets: a closed one would end its event loop. Linux only; elsewhere nothing is changed.
    """
    before = set(_listening())
    yield
    for inode, fd in _listening().items():
        if inode not in before:
            with suppress(OSError), socket.socket(fileno=os.dup(fd)) as listener:
                listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(_DROP)))


def _listening() -> dict[str, int]:
    """Return a descriptor of each listening TCP socket of this process, by the name of the socket."""
    found: dict[str, int] = {}
    with suppress(OSError):
        for path in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                name = os.readlink(path)
                if not name.startswith("socket:"):
                    continue
                with socket.socket(fileno=os.dup(int(path.name))) as each:
                    is_tcp = each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM
                    if is_tcp and each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        found[name] = int(path.name)
    return found
