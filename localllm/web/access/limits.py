"""Limits per client and for all clients together: requests per minute and at a time, wrong keys, bytes.

A client is a key, or an address if the server has no keys. Refusals say when to retry. Every table is bounded, and its
cost does not depend on how full it is.
Does not know: the engine's queue, which has its own limit; routes (web/access/auth.py decides what counts).
"""

from __future__ import annotations

import ipaddress
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from litestar.types import HTTPReceiveMessage, Receive

from localllm.units import format_bytes
from localllm.web.access.keys import Key
from localllm.web.errors import BodiesTooLarge, RateLimited, WrongKeys

MOST_CLIENTS = 10_000
"""Buckets in memory; beyond that, the client that was idle for longest is dropped."""
WRONG_KEYS_PER_MINUTE = 20
"""Per address. Enough for a person or a program with an old key; too few for guessing."""

SMALL_BODY_BYTES = 64 * 1024
"""Bodies up to this size are not counted by `Bodies`."""


class Buckets:
    """A token bucket for each client: it holds one minute's tokens and refills over time."""

    def __init__(self, per_minute: int) -> None:
        self.per_minute = per_minute
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # client -> (tokens left, time in s)

    def __len__(self) -> int:
        return len(self._buckets)

    def wait_s(self, client: str) -> int:
        """Return the seconds until the client has a token; 0 if it has one."""
        tokens = self._tokens(client, time.monotonic())
        return 0 if tokens >= 1 else math.ceil((1 - tokens) * 60 / self.per_minute)

    def take(self, client: str) -> None:
        now_s = time.monotonic()
        self._buckets[client] = (self._tokens(client, now_s) - 1, now_s)
        self._buckets.move_to_end(client)
        oldest = next(iter(self._buckets))
        while oldest != client and self._tokens(oldest, now_s) >= self.per_minute:  # a full bucket equals none
            del self._buckets[oldest]
            oldest = next(iter(self._buckets))
        if len(self._buckets) > MOST_CLIENTS:
            del self._buckets[oldest]

    def _tokens(self, client: str, now_s: float) -> float:
        tokens, then_s = self._buckets.get(client, (float(self.per_minute), now_s))
        return min(float(self.per_minute), tokens + (now_s - then_s) * self.per_minute / 60)


class Limits:
    """Each client's requests of the last minute, and the number of its requests being answered."""

    def __init__(self, per_minute: int | None, at_once: int | None) -> None:
        self._buckets = Buckets(per_minute) if per_minute is not None else None
        self._at_once = at_once
        self._running: Counter[str] = Counter()

    def take(self, client: str) -> None:
        """Count one request. Raises `RateLimited`."""
        if self._buckets is None:
            return
        if wait_s := self._buckets.wait_s(client):
            raise RateLimited(
                f"More than {self._buckets.per_minute} requests per minute.",
                hint="Retry later, or start the server with a higher --rate-limit.",
            ).after(wait_s)
        self._buckets.take(client)

    @contextmanager
    def running(self, client: str) -> Iterator[None]:
        """Count a request as running inside the `with` block. Raises `RateLimited`."""
        if self._at_once is not None and self._running[client] >= self._at_once:
            raise RateLimited(
                f"{self._at_once} requests of this client are already running.",
                "This is the limit for one client.",
                "Wait for one of them, or start the server with a higher --max-concurrent-requests.",
            )
        self._running[client] += 1
        try:
            yield
        finally:
            self._running[client] -= 1
            if not self._running[client]:
                del self._running[client]


class Guesses:
    """Wrong keys by address. Beyond the limit per minute, further keys from the address are refused unchecked, so that
    guessing faster reveals nothing. A key that was right before from that address still works, because several clients
    may share an address: programs on one machine, or machines behind one router.
    """

    def __init__(self) -> None:
        self._wrong = Buckets(WRONG_KEYS_PER_MINUTE)
        self._right: OrderedDict[tuple[str, str], None] = OrderedDict()  # (address, hash of the key) of valid keys

    def check(self, host: str, key: Key | None) -> None:
        """Check a request that sent a key. `key` is the matching key, None if it was wrong. Raises `WrongKeys`."""
        address = _network(host)
        if key is not None and (address, key.sha256) in self._right:
            self._right.move_to_end((address, key.sha256))
            return
        if wait_s := self._wrong.wait_s(address):
            raise WrongKeys(
                f"{address} sent more than {WRONG_KEYS_PER_MINUTE} wrong keys per minute.",
                hint="Retry later, with a valid key of this server.",
            ).after(wait_s)
        if key is None:
            self._wrong.take(address)
            return
        self._right[address, key.sha256] = None
        if len(self._right) > MOST_CLIENTS:
            self._right.popitem(last=False)


def _network(host: str) -> str:
    """Return the /64 network of an IPv6 address, because its owner usually has all of it; an IPv4 address is returned
    unchanged.
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if address.version == 4:
        return host
    return str(address.ipv4_mapped or ipaddress.ip_network((int(address), 64), strict=False))


class Bodies:
    """Bytes of the large bodies that have arrived and whose requests are not answered yet. Small bodies are not
    counted: the number of connections bounds them.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.in_flight_bytes = most_bytes, 0
        self._clients: Counter[str] = Counter()

    @contextmanager
    def counted(self, receive: Receive, announced_bytes: int, client: str) -> Iterator[Receive]:
        """Yield a `receive` that counts bytes until the end of the `with` block. Both raise `BodiesTooLarge` if the
        client's share or the limit for all is reached.

        The announced length is checked but not reserved, since announcing costs a client nothing.
        """
        self._require_room(announced_bytes, client, 0)
        taken_bytes = counted_bytes = 0

        async def counting() -> HTTPReceiveMessage:
            nonlocal taken_bytes, counted_bytes
            message = await receive()
            if message["type"] == "http.request":
                taken_bytes += len(message["body"])
                self._require_room(taken_bytes, client, counted_bytes)
                if taken_bytes > SMALL_BODY_BYTES:
                    self._add(client, taken_bytes - counted_bytes)
                    counted_bytes = taken_bytes
            return message  # type: ignore[return-value]

        try:
            yield counting
        finally:
            self._add(client, -counted_bytes)

    def _add(self, client: str, size_bytes: int) -> None:
        self.in_flight_bytes += size_bytes
        self._clients[client] += size_bytes
        if not self._clients[client]:
            del self._clients[client]

    def _require_room(self, size_bytes: int, client: str, counted_bytes: int) -> None:
        """Raise `BodiesTooLarge` if a body of this size has no room. `counted_bytes` of the body are counted already.

        The bodies of one client can take a quarter of the limit, or half of it while no other client has any; so there
        is room for another one. A client's only body may be larger.
        """
        if size_bytes <= SMALL_BODY_BYTES:
            return
        new_bytes, own_bytes = size_bytes - counted_bytes, self._clients[client]
        if self.in_flight_bytes + new_bytes > self.most_bytes:
            raise BodiesTooLarge(
                "The total size of the bodies of all running requests is too large.",
                f"It is {format_bytes(self.in_flight_bytes)}; the limit is {format_bytes(self.most_bytes)}.",
                "Retry later, or start the server with a higher --max-inflight-body-bytes.",
            )
        share_bytes = self.most_bytes // (4 if self.in_flight_bytes > own_bytes else 2)
        if own_bytes > counted_bytes and own_bytes + new_bytes > share_bytes:
            raise BodiesTooLarge(
                "The total size of the bodies of your running requests is too large.",
                f"It is {format_bytes(own_bytes)}; the limit is {format_bytes(share_bytes)}, so that other clients can "
                "send theirs.",
                "Wait for one of them, or start the server with a higher --max-inflight-body-bytes.",
            )
