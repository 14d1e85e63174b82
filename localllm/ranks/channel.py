"""Records over a socket: whole ones out, whole ones in.

The socket is one end of a `socket.socketpair`, so that records keep their order, a full buffer holds the sender back,
and the death of the other process is the end of the file.
Does not know: what records mean, which rank is at the other end.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

from localllm.ranks.wire import HEADER, Header, Kind, Record, check_payload, decode_header, encode_record

READ_BYTES = 1 << 16


class Channel:
    """One end of the socket. Any thread may send; one thread at a time may read."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._buffer = bytearray()
        self._turn = threading.Lock()

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, kind: Kind, seq: int, payload: bytes = b"") -> None:
        """Send a record, and wait until the socket has taken all of it. Raises `OSError`."""
        with self._turn:
            self.socket.sendall(encode_record(kind, seq, payload))

    def records(self) -> Iterator[Record]:
        """Yield records until the other end is closed. Raises `BadRecord`."""
        while (data := _received(self.socket)) != b"":
            yield from self._taken(data)

    def available(self) -> list[Record] | None:
        """Return the records that have arrived, without waiting; None: the other end is closed. Raises `BadRecord`."""
        records: list[Record] = []
        while True:
            try:
                data = self.socket.recv(READ_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return records
            except OSError:
                data = b""
            if not data:
                return records or None
            records += self._taken(data)
            if len(data) < READ_BYTES:
                return records

    def close(self) -> None:
        self.socket.close()

    def _taken(self, data: bytes) -> list[Record]:
        """Return the whole records in the buffer with these bytes added."""
        self._buffer += data
        records: list[Record] = []
        start = 0
        while (header := self._next_header(start)) is not None:
            begin = start + HEADER.size
            start = begin + header.size
            records.append(check_payload(header, bytes(memoryview(self._buffer)[begin:start])))
        del self._buffer[:start]
        return records

    def _next_header(self, start: int) -> Header | None:
        """Return the header at `start`; None: the record is not complete."""
        if len(self._buffer) - start < HEADER.size:
            return None
        header = decode_header(memoryview(self._buffer)[start:])
        return header if len(self._buffer) - start - HEADER.size >= header.size else None


def _received(end: socket.socket) -> bytes:
    try:
        return end.recv(READ_BYTES)
    except OSError:  # the other end was closed with bytes unread
        return b""
