"""The user of this machine who holds the other end of a loopback connection, as the kernel knows it.

Linux has an answer, by sock_diag, which finds one connection without reading all of them, else by /proc/net/tcp. An
answer counts only while the other end is open: a socket that its program has closed is said to be root's.
Does not know: HTTP, what a user may do.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

KNOWS_USERS = sys.platform == "linux"
"""Whether the kernel can be asked; elsewhere every user is unknown."""

_ESTABLISHED = 1
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST = 4, 20, 1
_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_SOCKET = struct.Struct("!HH16s16s")  # inet_diag_sockid without interface and cookie: ports and addresses of both ends
_REPLY = struct.Struct("=BBBB4x16x16x12xIIIII")  # inet_diag_msg: family, state, ..., expires, queues, uid, inode
Address = tuple[str, int]


def user_of(client: Address, server: Address) -> int | None:
    """Return the uid that owns the client's end of a connection between two addresses of this machine; None: unknown,
    for example because the client is in a container with a network of its own.
    """
    if not KNOWS_USERS:
        return None
    try:
        ends = tuple((_plain(host), port) for host, port in (client, server))
    except ValueError:
        return None
    with suppress(OSError, struct.error):
        uid = _by_sock_diag(*ends)
        if uid is not None or _has_sock_diag():  # a client can close thousands: no table is read for each of these
            return uid
    with suppress(OSError, ValueError, IndexError):
        return _by_table(*ends)
    return None


def is_owner(uid: int | None) -> bool:
    """Return whether a user owns this process, or everything."""
    return uid is not None and uid in (0, os.getuid())


@cache
def _has_sock_diag() -> bool:
    """Return whether sock_diag finds a connection that exists; some kernels are built without it."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        ends = [(_plain(host), port) for host, port in (client.getsockname(), listener.getsockname())]
        return _by_sock_diag(ends[0], ends[1]) is not None


_Ip = ipaddress.IPv4Address | ipaddress.IPv6Address
_End = tuple[_Ip, int]


def _plain(host: str) -> _Ip:
    """Return the address of a socket; IPv4 for an IPv6 address that stands for it."""
    address = ipaddress.ip_address(host.partition("%")[0])
    return address.ipv4_mapped or address if isinstance(address, ipaddress.IPv6Address) else address


def _by_sock_diag(client: _End, server: _End) -> int | None:
    family = socket.AF_INET if client[0].version == 4 else socket.AF_INET6
    ends = _SOCKET.pack(client[1], server[1], client[0].packed.ljust(16, b"\0"), server[0].packed.ljust(16, b"\0"))
    asked = struct.pack("=BBBBI", family, socket.IPPROTO_TCP, 0, 0, 1 << _ESTABLISHED) + ends
    asked += struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)  # any interface, any cookie
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.settimeout(0.2)
        head = _HEADER.pack(_HEADER.size + len(asked), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0)
        kernel.sendto(head + asked, (0, 0))
        answer = kernel.recv(4096)
    if _HEADER.unpack_from(answer)[1] != _SOCK_DIAG_BY_FAMILY:  # an error: no such connection, or no such service
        return None
    found = answer[_HEADER.size :]
    _, state, _, _, _, _, _, uid, inode = _REPLY.unpack_from(found)
    is_asked = found[4 : 4 + 4] == ends[:4]
    return uid if state == _ESTABLISHED and inode and is_asked else None


def _by_table(client: _End, server: _End) -> int | None:
    for table, ends in _written(client, server):
        with suppress(FileNotFoundError):
            for line in Path(table).read_text().splitlines()[1:]:
                if ends in line:
                    fields = line.split()
                    state, uid, inode = int(fields[3], 16), int(fields[7]), int(fields[9])
                    return uid if f"{fields[1]} {fields[2]}" == ends and state == _ESTABLISHED and inode else None
    return None


def _written(client: _End, server: _End) -> list[tuple[str, str]]:
    """Return the tables that may have the connection, and the two ends as each table has them: the words of an address
    in the byte order of the machine. An IPv6 socket that reaches an IPv4 one is in the second table.
    """

    def word(packed: bytes, port: int) -> str:
        words = struct.unpack(f"={len(packed) // 4}I", packed)
        return "".join(f"{each:08X}" for each in words) + f":{port:04X}"

    def line(prefix: bytes) -> str:
        return " ".join(word(prefix + address.packed, port) for address, port in (client, server))

    if client[0].version == 6:
        return [("/proc/net/tcp6", line(b""))]
    return [("/proc/net/tcp", line(b"")), ("/proc/net/tcp6", line(bytes(10) + b"\xff\xff"))]
