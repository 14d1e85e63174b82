"""When readers are woken: first and last events at once, the others at a rate, in turn, and none is lost."""

import asyncio
import itertools
import random

from localllm.engine.outputs import GenerationEvent
from localllm.engine.streams import Stream, Wakes


def event(number: int, *, last: bool = False) -> GenerationEvent:
    return GenerationEvent(0, str(number), (number,), finish_reason="length" if last else None)


class Reader:
    """Takes what comes, and writes down what and when."""

    def __init__(self) -> None:
        self.stream, self.numbers, self.times_s, self.takes = Stream(1), list[int](), list[float](), 0
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        while self.stream.open_choices or self.stream.events:
            for each in await self.stream.take():
                self.numbers += each.token_ids
            self.takes += 1
            self.times_s.append(asyncio.get_running_loop().time())


async def test_a_small_load_is_never_held() -> None:
    wakes, readers = Wakes(per_s=1000, burst=8), [Reader() for _ in range(8)]
    for number in range(20):
        await asyncio.sleep(0.01)
        for reader in readers:
            wakes.put(reader.stream, event(number, last=number == 19))
    await asyncio.gather(*(reader.task for reader in readers))
    assert all(reader.takes == 20 for reader in readers)


async def test_a_large_load_travels_together_and_whoever_waited_longest_goes_first() -> None:
    wakes, readers = Wakes(per_s=200, burst=4), [Reader() for _ in range(8)]
    await asyncio.sleep(0)
    started_s = asyncio.get_running_loop().time()
    for number in range(100):
        for reader in readers:
            wakes.put(reader.stream, event(number, last=number == 99))
        await asyncio.sleep(0.002)
    await asyncio.gather(*(reader.task for reader in readers))
    took_s = asyncio.get_running_loop().time() - started_s
    takes = [reader.takes for reader in readers]
    assert all(reader.numbers == list(range(100)) for reader in readers)
    assert sum(takes) <= 200 * took_s + 4 + 2 * len(readers) + 1  # first and last are not counted
    assert max(takes) - min(takes) <= 2
    assert all(reader.times_s[0] - started_s < 0.05 for reader in readers)


async def test_what_is_held_comes_although_nothing_follows() -> None:
    wakes, readers = Wakes(per_s=100, burst=1), [Reader() for _ in range(4)]
    await asyncio.sleep(0)
    for number in range(2):
        for reader in readers:
            wakes.put(reader.stream, event(number))
        await asyncio.sleep(0)
    await asyncio.sleep(0.2)
    assert [reader.numbers for reader in readers] == [[0, 1]] * 4
    for reader in readers:
        reader.task.cancel()


def test_no_event_is_lost_or_out_of_order_whatever_readers_do() -> None:
    """Readers that are slow, that leave, and that come while others are held."""

    async def main(seed: int) -> None:
        draw, wakes = random.Random(seed), Wakes(per_s=2000, burst=3)
        sent: dict[Reader, itertools.count[int]] = {}
        for _ in range(300):
            if len(sent) < 6 and draw.random() < 0.2:
                sent[Reader()] = itertools.count()
            for reader, numbers in list(sent.items()):
                if draw.random() < 0.7:
                    last = draw.random() < 0.02
                    wakes.put(reader.stream, event(next(numbers), last=last))
                    if last:
                        del sent[reader]
                        await asyncio.wait_for(reader.task, 1)
                        assert reader.numbers == list(range(next(numbers)))
                elif draw.random() < 0.02:
                    del sent[reader]
                    reader.task.cancel()
            await asyncio.sleep(draw.choice([0, 0, 0.001]))
        for reader, numbers in sent.items():
            wakes.put(reader.stream, event(next(numbers), last=True))
            await asyncio.wait_for(reader.task, 1)
            assert reader.numbers == list(range(next(numbers)))

    for seed in range(8):
        asyncio.run(main(seed))
