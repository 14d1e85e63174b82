"""Prefill and decode apart (`--prefill-replicas`): requests whose prompt one engine computes and another one continues.

    submit     a prompt goes to a prefill replica, which makes its first token, if a decode replica's cache lacks at
               least `LEAST_TOKENS` of it; every other request goes to a decode replica whole
    lease      the blocks that the prompt's engine copies out are kept in RAM, until the other engine has had a token,
               or the deadline has passed
    continue   the other engine waits with the tokens so far, and loads the blocks under their names as from any tier

A block that does not arrive is computed, so a lease that ends early costs time and never an answer.
Does not know: who is chosen (replicas.py), what is in a block.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Protocol

from localllm.engine.memory.block_stores import Key
from localllm.engine.request import Request
from localllm.engine.step import Bytes
from localllm.machine.hardware import Hardware

LEAST_TOKENS = 1024
"""Uncached tokens of a prompt from which on it goes to a prefill replica."""
LEASE_S = 30.0
"""Longest wait for the blocks of a prompt after its first token. While the request waits for the other engine, its
lease is renewed."""
MOST_BYTES = 8 * 2**30
"""Bytes of blocks on their way, at most, and at most an eighth of the free RAM. What exceeds them is computed again."""


class Timer(Protocol):
    def cancel(self) -> None: ...


def start_timer(seconds: float, act: Callable[[], None]) -> Timer:
    """Have `act` called once, on a thread of its own."""
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()
    return timer


@dataclass(slots=True, eq=False)
class HandOver:
    """One request that two engines answer."""

    asked: Request  # as the client sent it
    lease: int
    said: list[int] = field(default_factory=list)  # tokens that the client has had from the first engine
    is_continued: bool = False  # the second engine has it


class Leases:
    """Blocks of prompts in RAM, each kept as long as a lease names it. Methods may be called from any thread."""

    def __init__(self, capacity_bytes: int, start_timer: Callable[[float, Callable[[], None]], Timer] = start_timer):
        self.capacity_bytes, self.used_bytes = capacity_bytes, 0
        self._start_timer, self._numbers = start_timer, count(1)
        self._names: dict[int, tuple[bytes, ...]] = {}  # by lease
        self._timers: dict[int, Timer] = {}
        self._num_wanting: Counter[bytes] = Counter()  # leases by the name of a block
        self._blocks: dict[bytes, dict[int, Bytes]] = {}  # by name, and KV group
        self._lock = threading.Lock()

    @property
    def num_open(self) -> int:
        return len(self._names)

    def open(self, names: Sequence[bytes]) -> int:
        """Keep the blocks of these names, as they come. Return the number of the lease."""
        with self._lock:
            lease = next(self._numbers)
            self._names[lease] = tuple(names)
            self._num_wanting.update(names)
            return lease

    def renew(self, lease: int, on_due: Callable[[], None]) -> None:
        """Have `on_due` called in `LEASE_S`, unless the lease ends or is renewed before."""
        with self._lock:
            if lease in self._names:
                self._stop_timer(lease)
                self._timers[lease] = self._start_timer(LEASE_S, on_due)

    def end(self, lease: int) -> None:
        """Drop the blocks that no other lease names. Idempotent."""
        with self._lock:
            self._stop_timer(lease)
            for name in self._names.pop(lease, ()):
                self._num_wanting[name] -= 1
                if not self._num_wanting[name]:
                    del self._num_wanting[name]
                    self.used_bytes -= sum(block.nbytes for block in self._blocks.pop(name, {}).values())

    def _stop_timer(self, lease: int) -> None:
        if (timer := self._timers.pop(lease, None)) is not None:
            timer.cancel()

    # ---- as a store of blocks ----------------------------------------------------------------------------------------

    def __contains__(self, key: Key) -> bool:
        return self.get(key) is not None

    def put(self, key: Key, block: Bytes) -> None:
        """Keep a block that a lease names, if there is room."""
        group, name = key
        with self._lock:
            is_wanted = name in self._num_wanting and key not in self
            if is_wanted and self.used_bytes + block.nbytes <= self.capacity_bytes:
                self._blocks.setdefault(name, {})[group] = block
                self.used_bytes += block.nbytes

    def get(self, key: Key) -> Bytes | None:
        """Return a block that is kept."""
        group, name = key
        return self._blocks.get(name, {}).get(group)

    def clear(self) -> None:
        with self._lock:
            self._blocks.clear()
            self.used_bytes = 0


class LeasedBlocks:
    """The leases as one engine sees them: the `BlockStore` behind its cache. Prefill replicas write, others read.

    Another way between engines is another store: its `get` has to return None unless the lease holds after the copy.
    """

    name, is_private = "handover", True  # nothing outlives the process

    def __init__(self, leases: Leases, *, accepts: bool) -> None:
        self.leases, self.accepts, self.capacity_bytes = leases, accepts, leases.capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self.leases.used_bytes

    def __contains__(self, key: Key) -> bool:
        return key in self.leases

    def put(self, key: Key, block: Bytes) -> None:
        self.leases.put(key, block)

    def get(self, key: Key) -> Bytes | None:
        return self.leases.get(key)

    def clear(self) -> None:
        self.leases.clear()


@dataclass(slots=True)
class PrefillApart:
    """The first replicas of a model compute prompts, the others continue them."""

    num_replicas: int
    leases: Leases
    least_tokens: int = LEAST_TOKENS
    ended: Counter[str] = field(default_factory=Counter)  # requests by how the hand-over ended

    def computes_prompts(self, number: int) -> bool:
        return number < self.num_replicas

    def store_of(self, number: int) -> LeasedBlocks:
        return LeasedBlocks(self.leases, accepts=self.computes_prompts(number))


def capacity_of(hardware: Hardware) -> int:
    """Return the bytes of blocks that may be on their way between engines of this machine."""
    return min(MOST_BYTES, hardware.ram_available_bytes // 8)


def may_hand_over(requests: Sequence[Request]) -> bool:
    """Return whether one engine may compute the prompt and another one the answer. Choices of one prompt and steps of a
    beam search share their blocks in one engine, and scores of a prompt need all of it computed there."""
    [first, *others] = requests
    options = first.options
    return (
        not others
        and first.max_output_tokens > 1
        and options.replica is None
        and not options.part_of
        and first.params.prompt_logprobs is None
        and first.prompt_embeds is None
    )


def for_another_engine(
    request: Request, said: Sequence[int] = (), before: Request | None = None, *, hands_over: bool = False
) -> Request:
    """Return a request that makes what follows `said`, the tokens that the client has had. Its grammar is where it was
    after them.

    before: the request that made them, for the times and the counts of the whole. hands_over: make one token, for
    another engine to continue.
    """
    new = Request(
        request.request_id,
        request.token_ids[: request.prompt_len],
        request.params,
        replace(request.options, hands_over=hands_over),
        max_output_tokens=1 if hands_over else request.max_output_tokens,
        eos_token_ids=request.eos_token_ids,
        bad_words_token_ids=request.bad_words_token_ids,
        dry_breakers=request.dry_breakers,
        grammar=request.grammar,
        reports_progress=request.reports_progress,
        prompt_embeds=request.prompt_embeds,
        media=request.media,
        arrived_s=request.arrived_s,
    )
    if said and before is not None:
        new.token_ids.extend(said)
        new.scheduled_s, new.first_token_s = before.scheduled_s, before.first_token_s
        new.last_token_s, new.num_lost_tokens = before.last_token_s, before.prompt_len
        new.num_cached_tokens, new.cache_miss = before.num_cached_tokens, before.cache_miss
    return new
