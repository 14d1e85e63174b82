"""Work that takes long goes to a thread, so that other streams keep their pace."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import anyio.to_thread

T = TypeVar("T")
LARGE = 2_000
"""Log-probabilities to write, or characters of base64. Below, the work takes less time than the hop to a thread and
back."""
LARGE_TEXT = 65_536
"""Characters, or token ids. A text takes some hundred times its size while it is tokenised."""

_large_texts = ThreadPoolExecutor(1, thread_name_prefix="localllm-large-text")


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Return what `work` returns; work of at least `LARGE` runs on a thread."""
    return work() if size < LARGE else await on_thread(size, work)


async def on_thread(size: int, work: Callable[[], T]) -> T:
    """Run `work` on a thread. Large texts take turns, so that only one of them takes its memory at a time.

    size: characters or token ids that `work` goes through.
    """
    if size < LARGE_TEXT:
        return await anyio.to_thread.run_sync(work)
    return await asyncio.get_running_loop().run_in_executor(_large_texts, work)
