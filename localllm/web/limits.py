"""How many requests one client may send: so many a minute, and so many at a time.

A client is a key, or an address where no key is asked for. What is refused says when to come back.
Does not know: the engine's queue, which has a limit of its own; routes (web/auth.py says what counts).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from localllm.web.errors import RateLimited

MOST_CLIENTS = 10_000
"""Buckets that are remembered; beyond that, those that are full again are forgotten, which changes nothing for them."""


class Limits:
    """Token buckets of a minute's requests, and counts of those that are being answered."""

    def __init__(self, per_minute: int | None, at_once: int | None) -> None:
        self._per_minute, self._at_once = per_minute, at_once
        self._buckets: dict[str, tuple[float, float]] = {}  # client -> tokens left, at which second
        self._running: Counter[str] = Counter()

    def take(self, client: str) -> None:
        """Count one request. Raises `RateLimited`."""
        if self._per_minute is None:
            return
        now_s = time.monotonic()
        tokens = self._tokens(client, now_s)
        if tokens < 1:
            refusal = RateLimited(
                f"More than {self._per_minute} requests a minute.",
                hint="Retry later, or start the server with a higher --rate-limit.",
            )
            refusal.retry_after_s = math.ceil((1 - tokens) * 60 / self._per_minute)
            raise refusal
        if len(self._buckets) >= MOST_CLIENTS:
            full = [each for each in self._buckets if self._tokens(each, now_s) >= self._per_minute]
            for each in full:
                del self._buckets[each]
        self._buckets[client] = (tokens - 1, now_s)

    @contextmanager
    def running(self, client: str) -> Iterator[None]:
        """While one request is answered. Raises `RateLimited`."""
        if self._at_once is not None and self._running[client] >= self._at_once:
            raise RateLimited(
                f"{self._at_once} requests are being answered already.",
                "That is the limit for one client.",
                "Wait for one of them, or start the server with a higher --max-concurrent-requests.",
            )
        self._running[client] += 1
        try:
            yield
        finally:
            self._running[client] -= 1
            if not self._running[client]:
                del self._running[client]

    def _tokens(self, client: str, now_s: float) -> float:
        assert self._per_minute is not None
        tokens, then_s = self._buckets.get(client, (float(self._per_minute), now_s))
        return min(float(self._per_minute), tokens + (now_s - then_s) * self._per_minute / 60)
