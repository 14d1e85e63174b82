"""Readers in their own process: completion streams and open dashboards, read with as little work as possible.

    python -m scripts.stream_bench.readers PORT EVERY_MS STREAMS DASHBOARDS STUCK     # until ended, then prints JSON

With EVERY_MS the readers only look that often, which leaves this machine's cores to the server, as remote readers
would; with 0 each piece is read when it arrives, and `gap_s` is meaningful.
"""

from __future__ import annotations

import json
import random
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

PROMPT_LEN = 64
READ_BYTES = 1 << 16
TAIL_BYTES = 4096


class Reader:
    """One connection. `pieces` counts events, `gaps` holds seconds between arrivals, `tail` the last data."""

    __slots__ = ("gaps", "last_s", "pieces", "socket", "tail")

    def __init__(self, port: int, request: bytes, *, host: str = "127.0.0.1", buffer_bytes: int = 0) -> None:
        self.socket = socket.socket()
        if buffer_bytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        self.socket.connect((host, port))
        self.socket.sendall(request)
        self.socket.setblocking(False)
        self.pieces, self.last_s, self.tail = 0, 0.0, b""
        self.gaps: list[float] = []

    def read(self) -> bool:
        """Read the available data; False at the end."""
        piece = self.socket.recv(READ_BYTES)
        now_s = time.perf_counter()
        if not piece:
            return False
        self.pieces += piece.count(b"data: ")
        self.tail = (self.tail + piece)[-TAIL_BYTES:]
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
            "gap_s": gaps_of(streams),
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


def gaps_of(readers: Sequence[Reader]) -> list[float]:
    """Return the gaps of the second half, when all readers are active."""
    return [gap for reader in readers for gap in reader.gaps[len(reader.gaps) // 2 :]]


def completion(index: int) -> bytes:
    return request("/v1/completions", index, 0, {"max_tokens": 1900, "stream": True})


def request(path: str, index: int, seed: int, fields: Mapping[str, Any], *, close: bool = False) -> bytes:
    """Return a completion request with the prompt of `index` and `seed`. close: end the connection after it."""
    dice = random.Random(f"{seed}-{index}")
    prompt = [dice.randrange(3, 500) for _ in range(PROMPT_LEN + index % 16)]
    body = json.dumps({"prompt": prompt, "temperature": 0, "ignore_eos": True, **fields})
    return head("POST", path, len(body), close=close) + body.encode()


def head(method: str, path: str, length: int = 0, *, close: bool = False) -> bytes:
    return (
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\nConnection: {'close' if close else 'keep-alive'}\r\n\r\n"
    ).encode()


if __name__ == "__main__":
    main()
