"""Readers in a process of their own: completion streams and open dashboards, read with as little work as can be.

    python -m scripts.stream_bench.readers PORT EVERY_MS STREAMS DASHBOARDS STUCK     # until ended, then prints JSON

With EVERY_MS the readers look only so often, which leaves this machine's cores to the server as readers on other
machines would; with 0 each piece is read when it comes, and `gap_s` means something.
"""

from __future__ import annotations

import json
import selectors
import signal
import socket
import sys
import time

PROMPT_LEN = 64
READ_BYTES = 1 << 16
CONNECT_AT_ONCE = 32


class Reader:
    """One connection. `pieces` counts the events that came, `gaps` the seconds between two arrivals."""

    __slots__ = ("gaps", "last_s", "pieces", "socket")

    def __init__(self, port: int, request: bytes, *, buffer_bytes: int = 0) -> None:
        self.socket = socket.socket()
        if buffer_bytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        self.socket.connect(("127.0.0.1", port))
        self.socket.sendall(request)
        self.socket.setblocking(False)
        self.pieces, self.last_s = 0, 0.0
        self.gaps: list[float] = []

    def read(self) -> bool:
        """Take what has come; False at the end."""
        piece = self.socket.recv(READ_BYTES)
        now_s = time.perf_counter()
        if not piece:
            return False
        self.pieces += piece.count(b"data: ")
        if self.last_s:
            self.gaps.append(now_s - self.last_s)
        self.last_s = now_s
        return True


def main() -> None:
    port, every_ms, num_streams, num_dashboards, num_stuck = map(int, sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    streams = [Reader(port, completion(index)) for index in range(num_streams)]
    dashboards = [Reader(port, head("GET", "/live/dashboard")) for _ in range(num_dashboards)]
    stuck = [Reader(port, completion(index), buffer_bytes=4096) for index in range(num_stuck)]
    try:
        read_all([*streams, *dashboards], every_ms / 1e3)
    finally:
        for reader in stuck:
            reader.socket.close()
        print(json.dumps({
            "pieces": sum(reader.pieces for reader in streams),
            "dashboard_pieces": sum(reader.pieces for reader in dashboards),
            "gap_s": [gap for reader in streams for gap in reader.gaps[len(reader.gaps) // 2 :]],
        }), flush=True)  # fmt: skip


def read_all(readers: list[Reader], every_s: float) -> None:
    selector = selectors.EpollSelector() if hasattr(selectors, "EpollSelector") else selectors.DefaultSelector()
    for reader in readers:
        selector.register(reader.socket, selectors.EVENT_READ, reader)
    left = len(readers)
    while left:
        time.sleep(every_s)
        for key, _ in selector.select(1):
            if not key.data.read():
                selector.unregister(key.fileobj)
                left -= 1


def completion(index: int) -> bytes:
    prompt = [(7 * index + 13 * position) % 500 for position in range(PROMPT_LEN + index % 16)]
    body = json.dumps({"prompt": prompt, "max_tokens": 1900, "temperature": 0, "stream": True, "ignore_eos": True})
    return head("POST", "/v1/completions", len(body)) + body.encode()


def head(method: str, path: str, length: int = 0) -> bytes:
    return (
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


if __name__ == "__main__":
    main()
