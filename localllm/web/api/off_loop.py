"""Work that takes long goes to a thread, so that other streams keep their pace."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import anyio.to_thread

T = TypeVar("T")
LARGE = 2_000
"""Log-probabilities to write, or characters of base64. Below, the work takes less time than the hop to a thread and
back."""


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """What `work` gives; `size`: see `LARGE`."""
    return work() if size < LARGE else await anyio.to_thread.run_sync(work)
