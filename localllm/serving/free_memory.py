"""Free the memory of an engine that has ended: its caches, and the references that a stored error holds.

Does not know: models, engines.
"""

from __future__ import annotations

import sys
import traceback


def release_cached_memory() -> None:
    """Return freed memory to the device and the system; otherwise both allocators would keep it. Does nothing in a
    process that has not imported torch, which has held no model.
    """
    if "torch" not in sys.modules:
        return
    from localllm.models.loader import trim_heap
    from localllm.runner.device_memory import empty_cache

    empty_cache()
    trim_heap()


def clear_tracebacks(error: BaseException | None) -> None:
    """Clear the frames of a stored error's traceback, as they would hold the weights."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
