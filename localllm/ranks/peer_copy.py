"""`python -m localllm.ranks.peer_copy FD DEVICE SIDE PARENT` copies 1 MB between two GPUs; the exit code is the result.

Two such processes, one for each GPU, hold the ends of a socket. Each opens the memory of the other one by CUDA IPC,
reads from it, writes into it, and compares. The driver is called without torch, whose import takes seconds.
Does not know: which pairs are probed, what follows from the result (peers.py).
"""

from __future__ import annotations

import ctypes
import hashlib
import signal
import socket
import sys
from typing import Any, Protocol

from localllm.machine.processes import end_with_parent

COPY_BYTES = 1 << 20
COPY_S = 3.0  # once both processes have a context
GOOD, BAD, UNKNOWN = 0, 1, 3
"""Exit codes: the copies were equal; a copy was refused or differed; the driver could not be used at all."""

HANDLE_BYTES = 64
LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class DriverError(Exception):
    """A call that the CUDA driver refused."""


class Memory(Protocol):
    """The memory of one GPU, and of other processes' GPUs. An address is an integer. Raises `DriverError`."""

    def allocate(self, size: int) -> int: ...
    def write(self, address: int, data: bytes) -> None: ...
    def read(self, address: int, size: int) -> bytes: ...
    def copy(self, to: int, source: int, size: int) -> None: ...
    def handle_of(self, address: int) -> bytes: ...
    def open(self, handle: bytes) -> int: ...


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_byte * HANDLE_BYTES),)


class CudaMemory:
    """Implements `Memory` on the CUDA driver."""

    def __init__(self, device: int) -> None:
        """device: the driver's index, which is torch's. Raises `DriverError`, `OSError`."""
        self._cuda = ctypes.CDLL("libcuda.so.1")
        found, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(found), device)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), found)
        self._call("cuCtxSetCurrent", context)

    def allocate(self, size: int) -> int:
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address.value

    def write(self, address: int, data: bytes) -> None:
        self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), data, ctypes.c_size_t(len(data)))
        self._call("cuCtxSynchronize")

    def read(self, address: int, size: int) -> bytes:
        data = ctypes.create_string_buffer(size)
        self._call("cuMemcpyDtoH_v2", data, ctypes.c_uint64(address), ctypes.c_size_t(size))
        return data.raw

    def copy(self, to: int, source: int, size: int) -> None:
        self._call("cuMemcpyDtoD_v2", ctypes.c_uint64(to), ctypes.c_uint64(source), ctypes.c_size_t(size))
        self._call("cuCtxSynchronize")

    def handle_of(self, address: int) -> bytes:
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        address = ctypes.c_uint64()
        given = _Handle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, ctypes.c_uint(LAZY_PEER_ACCESS))
        return address.value

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            raise DriverError(f"{name} returned {code}")


def copies_agree(memory: Memory, other: socket.socket, number: int) -> bool:
    """Return whether this GPU reads what the other one wrote, and the other way round. Both sides call this at once.

    number: 0 or 1, the side; each writes bytes of its own. Raises `DriverError`, `EOFError`.
    """
    own, others = _pattern(number), _pattern(1 - number)
    address, scratch = memory.allocate(2 * COPY_BYTES), memory.allocate(COPY_BYTES)
    memory.write(address, own + bytes(COPY_BYTES))
    peer = memory.open(_swap(other, memory.handle_of(address)))
    memory.copy(scratch, peer, COPY_BYTES)
    reads = memory.read(scratch, COPY_BYTES) == others
    memory.copy(peer + COPY_BYTES, address, COPY_BYTES)
    _swap(other, b"w")  # both have written
    written = memory.read(address + COPY_BYTES, COPY_BYTES) == others
    _swap(other, b"r")  # both have read
    return reads and written


def _pattern(number: int) -> bytes:
    return hashlib.shake_128(bytes([number])).digest(COPY_BYTES)


def _swap(other: socket.socket, data: bytes) -> bytes:
    """Send bytes, and return as many of the other side. Raises `EOFError`."""
    received = bytearray()
    try:
        other.sendall(data)
        while len(received) < len(data):
            part = other.recv(len(data) - len(received))
            if not part:
                raise EOFError("the other process has ended")
            received += part
    except OSError as error:
        raise EOFError("the other process has ended") from error
    return bytes(received)


def main(arguments: list[str]) -> int:
    """Return the exit code. A copy that hangs is ended by SIGALRM."""
    fd, device, number, parent = map(int, arguments)
    end_with_parent(parent)
    other = socket.socket(fileno=fd)
    try:
        memory = CudaMemory(device)
        _swap(other, b"c")
    except (DriverError, OSError, AttributeError, EOFError):
        return UNKNOWN
    signal.setitimer(signal.ITIMER_REAL, COPY_S)
    try:
        return GOOD if copies_agree(memory, other, number) else BAD
    except (DriverError, EOFError):
        return BAD


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
