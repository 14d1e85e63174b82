"""Recent prompts, and why a new prompt was not found in the prefix cache.

A request is compared with the earlier requests of its owner whose blocks it could have shared. What it lost is what an
earlier request had computed of its prompt and it computes again: tokens behind a difference that are the same again, or
tokens before it whose blocks are gone. Requests keep their tokens here until newer ones need the room, so an
explanation never needs the KV cache itself.
The hash chain (memory/block_names.py) makes this quick: equal names mean equal prefixes, so the first block that
differs is found by bisection, and only the tokens of that block are compared.
Does not know: requests, blocks of the KV cache, text, torch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

MOST_TOKENS = 2**20
"""Tokens of all remembered requests: 4 MiB of ids, and as much again of names for blocks of 16 tokens."""
MOST_REQUESTS = 64  # remembered ones
MOST_MISSES = 256  # explanations kept for the pages

NUM_SHOWN = 16  # tokens shown on each side of a difference
RUN = 16
"""Fewest tokens of a run behind a difference that count as the same again. Shorter ones are phrases of the format."""
MOST_COMPARED = 8  # newest requests with the same number of common blocks that are compared token by token
MOST_LOOKS = 12  # places of a prompt at which a run is searched
NUM_LONGEST = 2  # requests compared besides the nearest one, which may differ early and yet have most of the prompt

Reason = Literal["changed", "evicted", "no_state", "new", "off"]
TokenIds = npt.NDArray[np.int32]
ID_BYTES = 4


class CacheMiss(NamedTuple):
    """The reason why the cache did not hold more of a prompt.

    changed: the prompt differs from the nearest earlier one. evicted: an earlier request had computed the tokens, and
    their blocks are gone. no_state: the blocks are there, but not the recurrent state at their end. new: no earlier
    prompt is known that begins alike. off: the cache is off, or not used for this request.
    """

    reason: Reason
    position: int = 0  # tokens that the prompt and the earlier one have in common; of evicted and no_state: found ones
    num_tokens: int = 0  # tokens computed again that the earlier request had computed
    request_id: str = ""  # the earlier request; empty: none
    before: tuple[int, ...] = ()  # token ids before the difference,
    here: tuple[int, ...] = ()  # behind it in this prompt,
    earlier: tuple[int, ...] = ()  # and in the earlier one


OFF = CacheMiss("off")


@dataclass(frozen=True, slots=True)
class Prefix:
    """The first tokens of a request, which are computed or about to be."""

    request_id: str
    owner: str
    root: bytes  # of the hash chain
    id_bytes: bytes  # token ids as int32, since bytes can be searched
    names: Sequence[bytes]  # of its full blocks that can be shared

    @property
    def num_tokens(self) -> int:
        return len(self.id_bytes) // ID_BYTES

    @property
    def token_ids(self) -> TokenIds:
        """Return the same bytes as an array, [N]."""
        return np.frombuffer(self.id_bytes, np.int32)

    def is_comparable(self, other: Prefix) -> bool:
        """Return whether the other request is of the same owner, and blocks could be shared with it."""
        return self.root == other.root and self.owner == other.owner

    def num_common_blocks(self, other: Prefix) -> int:
        """Return the full blocks of the longest common prefix."""
        num_blocks = min(len(self.names), len(other.names))
        if not num_blocks or self.names[0] != other.names[0]:
            return 0
        return bisect_left(range(num_blocks), True, key=lambda block: self.names[block] != other.names[block])

    def num_common(self, other: Prefix, block_size: int) -> int:
        """Return the length of the longest common prefix, in tokens."""
        same = self.num_common_blocks(other)
        is_in_block = same < min(len(self.names), len(other.names))  # else one of them ends, or has no more names
        start = same * block_size
        end = min(self.num_tokens, other.num_tokens, start + block_size if is_in_block else 2**31)
        return start + _num_equal(self.token_ids[start:end], other.token_ids[start:end])

    def begins_with(self, other: Prefix, block_size: int) -> bool:
        num_blocks, num_tokens = len(other.names), other.num_tokens
        if num_blocks > len(self.names) or num_tokens > self.num_tokens:
            return False
        if num_blocks and self.names[num_blocks - 1] != other.names[-1]:
            return False
        rest = num_blocks * block_size
        return bool((self.token_ids[rest:num_tokens] == other.token_ids[rest:]).all())


class _Overlap(NamedTuple):
    """Tokens that a prompt has in common with an earlier request."""

    other: Prefix
    num_common: int  # tokens from the start
    runs: tuple[tuple[int, int], ...] = ()  # begin and end in the prompt of what is the same again behind it

    def missed(self, num_cached: int) -> int:
        """Return the tokens of the runs that the cache did not hold."""
        return sum([max(0, end - max(begin, num_cached)) for begin, end in self.runs])


class PromptHistory:
    """Remembers the last requests of an engine. unit: the length of each hit is a multiple of it, in tokens."""

    def __init__(self, block_size: int, unit: int) -> None:
        self._block_size, self._unit = block_size, unit
        self._requests: OrderedDict[int, Prefix] = OrderedDict()  # by sequence number, in the order of `remember`
        self._misses: OrderedDict[str, tuple[str, CacheMiss | None]] = OrderedDict()  # with owners, by request id
        self.num_tokens = 0  # of all remembered requests

    def explain(self, prompt: Prefix, num_cached: int, num_kv_tokens: int) -> CacheMiss | None:
        """Return why a request that is being admitted found no more of its prompt; None if there was no more to find,
        because it repeats or continues an earlier prompt. num_kv_tokens: prompt tokens whose KV was found."""
        size, num_tokens = self._block_size, prompt.num_tokens
        if num_cached == (num_tokens - 1) // self._unit * self._unit:
            return None  # the last token is always computed
        found = self._nearest(prompt, num_cached)
        if found is None:
            return CacheMiss("new")
        other, at = found.other, found.num_common
        changed = found.missed(num_cached)
        sharable = min(at, len(other.names) * size, num_tokens - 1)
        gone = sharable // self._unit * self._unit - num_cached
        if gone > 0 and gone >= changed:
            reason: Reason = "no_state" if num_kv_tokens >= num_cached + gone else "evicted"
            return CacheMiss(reason, num_cached, gone, other.request_id)
        if not changed and at in (num_tokens, other.num_tokens):
            return None
        if not changed and at < size:
            return CacheMiss("new")
        before, here = prompt.token_ids[max(0, at - NUM_SHOWN) : at], prompt.token_ids[at : at + NUM_SHOWN]
        earlier = other.token_ids[at : at + NUM_SHOWN]
        shown = [tuple(ids.tolist()) for ids in (before, here, earlier)]
        return CacheMiss("changed", at, changed, other.request_id, *shown)

    def _nearest(self, prompt: Prefix, num_cached: int) -> _Overlap | None:
        """Return the overlap with the earlier request that has most of the prompt; None if there is no request."""
        known = [each for each in reversed(self._requests.values()) if prompt.is_comparable(each)]  # newest first
        if not known:
            return None
        size, num_tokens = self._block_size, prompt.num_tokens
        shared = [(prompt.num_common_blocks(each), each) for each in known]
        most = max([blocks for blocks, _ in shared])
        deepest = [each for blocks, each in shared if blocks == most][:MOST_COMPARED]
        found = [_Overlap(each, prompt.num_common(each, size)) for each in deepest]
        nearest = max(found, key=lambda each: each.num_common)
        start = max(num_cached, nearest.num_common)
        if num_tokens - start < RUN:
            return nearest
        # A side request may be the nearest one, and a long one that differs before it may have much more of the prompt.
        others = [(blocks > 0, min(each.num_tokens, num_tokens), each) for blocks, each in shared]
        others = [each for each in others if each[-1] is not nearest.other]
        others.sort(key=lambda each: each[:2], reverse=True)
        longest = [_Overlap(each, prompt.num_common(each, size)) for *_, each in others[:NUM_LONGEST]]
        best = nearest
        for each in (nearest, *longest):
            whole = each._replace(runs=_runs(prompt, each.other, each.num_common))
            best = max(best, whole, key=lambda one: one.num_common + one.missed(start))
            if 2 * best.missed(start) > num_tokens - start:  # no other one can have twice as much
                break
        return best

    def remember(self, sequence: int, new: Prefix) -> None:
        """Remember a request, in place of what was known of it and of requests that it continues."""
        self._forget(sequence)
        if not new.num_tokens:
            return
        for each, old in [*self._requests.items()]:
            if new.is_comparable(old) and new.begins_with(old, self._block_size):
                self._forget(each)
        self._requests[sequence] = new
        self.num_tokens += new.num_tokens
        while len(self._requests) > MOST_REQUESTS or (self.num_tokens > MOST_TOKENS and len(self._requests) > 1):
            self._forget(next(iter(self._requests)))

    def _forget(self, sequence: int) -> None:
        old = self._requests.pop(sequence, None)
        self.num_tokens -= 0 if old is None else old.num_tokens

    def keep_miss(self, request_id: str, owner: str, miss: CacheMiss | None) -> None:
        """Keep an explanation for `miss_of`."""
        self._misses[request_id] = owner, miss
        self._misses.move_to_end(request_id)
        while len(self._misses) > MOST_MISSES:
            self._misses.popitem(last=False)

    def miss_of(self, request_id: str, owner: str) -> CacheMiss | None:
        """Return the explanation of a request of this owner, whose token ids are for no one else. Any thread."""
        its_owner, miss = self._misses.get(request_id, (None, None))
        return miss if its_owner == owner else None


def _num_equal(some: TokenIds, others: TokenIds) -> int:
    """Return the length of the longest common prefix of two arrays of the same length."""
    differs = some != others
    first = int(differs.argmax()) if len(differs) else 0
    return first if len(differs) and differs[first] else len(differs)


def _runs(prompt: Prefix, other: Prefix, start: int) -> tuple[tuple[int, int], ...]:
    """Return the runs of the prompt, in order and from `start` on, that are in the other one too, in the same order.

    A run is searched at places of the prompt that are four times as far apart after each that is not in the other one.
    Short runs among many differences are therefore missed: the result is a lower bound.
    """
    ours, theirs = prompt.token_ids, other.token_ids
    runs, at, step, after = list[tuple[int, int]](), start, 1, start
    for _ in range(MOST_LOOKS):
        if at + RUN > len(ours):
            break
        place = _find(other.id_bytes, ours[at : at + RUN].tobytes(), after)
        if place is None:
            at, step = at + step, 4 * step
            continue
        passed = min(at - (runs[-1][1] if runs else start), place - after)  # the run may begin before this place
        passed = _num_equal(ours[at - passed : at][::-1], theirs[place - passed : place][::-1])
        length = min(len(ours) - at, len(theirs) - place)
        length = _num_equal(ours[at : at + length], theirs[place : place + length])
        runs.append((at - passed, at + length))
        at, step, after = at + length, 1, place + length
    return tuple(runs)


def _find(id_bytes: bytes, wanted: bytes, start: int) -> int | None:
    """Return the first place of some tokens in others, from `start` on; None if they are not there."""
    at = id_bytes.find(wanted, start * ID_BYTES)
    while at % ID_BYTES and at >= 0:  # it begins within an id
        at = id_bytes.find(wanted, at + 1)
    return None if at < 0 else at // ID_BYTES
