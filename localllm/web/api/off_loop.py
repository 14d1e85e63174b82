"""Run long work in a thread, so that other streams are not delayed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import anyio.to_thread

T = TypeVar("T")
LARGE = 2_000
"""Logprobs to write, or characters of base64. Below this size the work takes less time than a thread hop."""


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Return the result of `work`, run in a thread if `size` exceeds `LARGE`."""
    return work() if size < LARGE else await anyio.to_thread.run_sync(work)
