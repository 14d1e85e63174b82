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
LARGE_TEXT = 65_536
"""Characters, or token ids. While a text is tokenised it takes some hundred times its size in memory."""

_large_texts = ThreadPoolExecutor(1, thread_name_prefix="localllm-large-text")


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Return the result of `work`, run in a thread unless `size` is below `LARGE`."""
    return work() if size < LARGE else await on_thread(size, work)


async def on_thread(size: int, work: Callable[[], T]) -> T:
    """Return the result of `work`, run in a thread. Large texts take turns, so that their memory does not add up.

    size: characters or token ids that `work` goes through.
    """
    if size < LARGE_TEXT:
        return await anyio.to_thread.run_sync(work)
    return await asyncio.get_running_loop().run_in_executor(_large_texts, work)
