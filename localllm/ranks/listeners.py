"""The listening sockets that a library has opened in this process, and a filter that lets nobody connect to them.

gloo accepts a connection of anybody and keeps it for ever, so another user of this machine could use up the open files
of a rank. Once the ranks are connected nobody has to connect any more. The library goes on owning its sockets: a closed
one would end its event loop. Linux only; elsewhere nothing is changed.
Does not know: which library.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_SO_ATTACH_FILTER = 26
_DROP = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0))
"""A filter of one instruction: accept 0 bytes of each packet, so the kernel drops it."""


@contextmanager
def closed_to_others() -> Iterator[None]:
    """Let the block open listening sockets and connect to them; at its end nobody can connect to them any more.
    Connections that exist are kept.
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
