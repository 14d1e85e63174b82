"""Long work beside the event loop: large texts one after the other, everything else at once."""

import asyncio
import threading

import pytest

from localllm.serving.answers.off_loop import LARGE_TEXT, on_thread


@pytest.mark.parametrize(("size", "most"), [(10, 4), (LARGE_TEXT, 1)])
async def test_large_texts_take_turns(size: int, most: int) -> None:
    running: list[int] = []
    counts: list[int] = []
    together = threading.Barrier(most)

    def work() -> None:
        running.append(1)
        together.wait(10)
        counts.append(len(running))
        together.wait(10)
        running.pop()

    await asyncio.gather(*(on_thread(size, work) for _ in range(4)))
    assert max(counts) == most
