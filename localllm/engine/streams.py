"""Delivers events to the readers of streams, and limits how often readers are woken.

Waking a reader costs a piece of JSON and a system call. With 256 streams and a step every 12 ms that would be 21,000
times a second: more Python than the engine's thread leaves time for, so its steps would be late. Beyond a burst, which
smaller loads never use up, readers are therefore woken at a steady rate, the longest waiting first, and all events that
arrived for a reader meanwhile are sent together. First and last events are delivered at once.
Does not know: where events come from, what their readers do with them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from itertools import chain

from msgspec.structs import replace

from localllm.engine.outputs import GenerationEvent

WAKES_PER_S = 8_000
BURST = 64  # readers that may be woken at once after a quiet period
TICK_S = 0.002  # between two checks of waiting readers


class Stream:
    """Events that the request's single reader has not consumed yet."""

    __slots__ = ("_news", "events", "has_begun", "num_choices", "open_choices")

    def __init__(self, choices: int) -> None:
        self.events: list[GenerationEvent] = []
        self.num_choices = self.open_choices = choices
        self.has_begun = False  # the reader has been woken at least once
        self._news: asyncio.Future[None] | None = None  # what the reader awaits: cheaper than an asyncio.Event

    @property
    def has_waiting_reader(self) -> bool:
        return self._news is not None and not self._news.done()

    def wake(self) -> None:
        if self._news is not None and not self._news.done():
            self.has_begun = True
            self._news.set_result(None)

    async def take(self) -> list[GenerationEvent]:
        if not self.events:
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        events, self.events = self.events, []
        return events if len(events) <= self.num_choices else joined(events)


class Wakes:
    """Decides when readers are woken. One instance per event loop."""

    def __init__(self, per_s: float = WAKES_PER_S, burst: int = BURST) -> None:
        self._per_s, self._burst = per_s, burst
        self._allowed, self._filled_s = float(burst), 0.0  # a token bucket
        self._held: deque[Stream] = deque()
        self._tick: asyncio.TimerHandle | None = None

    def put(self, stream: Stream, event: GenerationEvent) -> None:
        """Add an event. Its reader is woken now or, if many readers wait, a few milliseconds later."""
        is_held = bool(stream.events) and stream.has_waiting_reader
        stream.events.append(event)
        is_last = event.finish_reason is not None
        if is_last:
            stream.open_choices -= 1
        if is_last or not stream.has_begun or (not is_held and not self._held and self._may_wake()):
            stream.wake()
        elif not is_held and stream.has_waiting_reader:
            self._held.append(stream)
            self._look_again()

    def _may_wake(self) -> bool:
        now_s = asyncio.get_running_loop().time()
        self._allowed = min(self._burst, self._allowed + (now_s - self._filled_s) * self._per_s)
        self._filled_s = now_s
        if self._allowed < 1:
            return False
        self._allowed -= 1
        return True

    def _look_again(self) -> None:
        if self._tick is None:
            self._tick = asyncio.get_running_loop().call_later(TICK_S, self._wake_held)

    def _wake_held(self) -> None:
        self._tick = None
        while self._held and self._may_wake():
            self._held.popleft().wake()
        if self._held:
            self._look_again()


def joined(events: Iterable[GenerationEvent]) -> list[GenerationEvent]:
    """Return one event per choice, as if one step had produced everything. Error events are kept as they are."""
    by_index: dict[int, list[GenerationEvent]] = {}
    errors = []
    for event in events:
        if event.error is None:
            by_index.setdefault(event.index, []).append(event)
        else:
            errors.append(event)
    return [_join(one_choice) for one_choice in by_index.values()] + errors


def _join(events: list[GenerationEvent]) -> GenerationEvent:
    if len(events) == 1:
        return events[0]
    return replace(
        events[-1],  # the finish reason and its fields come with the last event
        text="".join([event.text for event in events]),
        token_ids=tuple(chain.from_iterable([event.token_ids for event in events])),
        logprobs=tuple(chain.from_iterable([event.logprobs for event in events])),
        prompt_logprobs=next((event.prompt_logprobs for event in events if event.prompt_logprobs is not None), None),
        prompt_progress=next((event.prompt_progress for event in events[::-1] if event.prompt_progress), None),
    )
