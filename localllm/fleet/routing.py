"""Choose the replica that answers a request: the least expected cost, in seconds, from what each replica has to do.

    cost = (uncached prompt tokens that wait there + uncached tokens of this prompt) / prefill rate
         + the wait for KV blocks, if too few are free
         + the time of the answer's tokens, which grows with the requests that decode there

The longest cached prefix, the queue, free blocks and speed are thus weighed in one unit, and a hot prefix spreads by
itself: once the replica that has it costs more than computing the prefix elsewhere, it is computed elsewhere. Costs
that are nearly equal go to the replica that was chosen longest ago: measured speeds differ by chance, and one replica
would get everything.
Does not know: where the loads come from, what a replica is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal, NamedTuple

Policy = Literal["prefix", "least_loaded", "round_robin"]
POLICIES: tuple[Policy, ...] = ("prefix", "least_loaded", "round_robin")
Reason = Literal["prefix", "load", "tie", "pinned", "retry", "handover"]

USUAL_TOKENS_PER_S, USUAL_STEP_S = 1000.0, 0.03
"""Prompt tokens per second, and seconds of a step, of a replica or another server until they are measured."""
MEMORY = 0.2
"""Weight of a new observation in the running means of these speeds."""
MOST_PREFIXES = 16_384
"""Names of prefixes that are remembered of a replica whose cache cannot be looked at; a name takes some 150 bytes."""
SAME_RATIO, SAME_S = 1.1, 0.002
"""A cost up to this factor above the least, and this many seconds more, counts as equal to it."""


class ReplicaLoad(NamedTuple):
    """The work that a replica has, and its speed."""

    hit_tokens: int = 0  # of the new prompt, in the replica's prefix cache
    queued_tokens: int = 0  # uncached prompt tokens of other requests that are not computed yet
    prefill_tokens_per_s: float = USUAL_TOKENS_PER_S
    running: int = 0  # requests that were given to it and have not ended
    max_running: int = 64  # requests in one step; more have to wait
    step_s: float = 0.01  # of a step that decodes with few requests
    full_step_s: float = 0.02  # of a step that decodes with `max_running`
    blocks_wait_s: float = 0.0  # until enough KV blocks are free
    weight: float = 1.0  # costs are divided by it


def cost_s(load: ReplicaLoad, num_tokens: int, output_tokens: float) -> float:
    """Return the expected seconds of a request until its end, less the decoding that an idle replica needs as well."""
    hit_tokens, queued_tokens, rate, running, most, step_s, full_step_s, blocks_wait_s, weight = load
    prefill_s = (queued_tokens + (num_tokens - hit_tokens if num_tokens > hit_tokens else 0)) / rate
    share = running / most
    if share <= 1.0:
        slower_s = output_tokens * (full_step_s - step_s) * share
    else:  # a request waits for the end of others: on average each of them makes room once an answer
        slower_s = output_tokens * (full_step_s - step_s + (share - 1.0) * full_step_s)
    return (prefill_s + blocks_wait_s + slower_s) / weight


class Router:
    """Chooses among a fixed number of replicas, and counts its choices."""

    def __init__(self, num_replicas: int, policy: Policy = "prefix") -> None:
        self.policy: Policy = policy
        self._turns = [0] * num_replicas  # the turn in which each replica was chosen last
        self._turn = 0

    def order(
        self, loads: Sequence[tuple[int, ReplicaLoad]], num_tokens: int, output_tokens: float = 200.0
    ) -> list[tuple[int, Reason]]:
        """Return the replicas, best first, each with what decided for it. loads: of the replicas that can answer, each
        with its number."""
        policy, turns = self.policy, self._turns
        if policy == "prefix":
            costs = [cost_s(load, num_tokens, output_tokens) for _, load in loads]
        elif policy == "least_loaded":
            costs = [load.running / load.weight for _, load in loads]
        else:
            costs = [0.0] * len(loads)
        same = min(costs, default=0.0)
        if policy == "prefix":
            same = same * SAME_RATIO + SAME_S
        # Equal costs take turns; others keep the order of their costs, and of their numbers if those are equal.
        ordered = sorted(
            (cost, 0, at) if cost > same else (same, turns[loads[at][0]], at) for at, cost in enumerate(costs)
        )
        is_tie = sum(cost <= same for cost in costs) > 1
        most = max((load.hit_tokens for _, load in loads), default=0) if policy == "prefix" else 0
        otherwise: Reason = "tie" if is_tie else "load"
        return [(loads[at][0], "prefix" if 0 < most == loads[at][1].hit_tokens else otherwise) for _, _, at in ordered]

    def chosen(self, index: int) -> None:
        """Note that a request goes to this replica."""
        self._turn += 1
        self._turns[index] = self._turn


class PrefixMemory:
    """The prefixes of the prompts that a replica was given, for one whose own cache cannot be looked at.

    A prefix is used whenever a longer one is, and counts as used after it. So it is forgotten after all longer ones, as
    in the replica's cache, and the longest known one is found by bisection.
    """

    def __init__(self, most: int = MOST_PREFIXES) -> None:
        self._most = most
        self._tokens: OrderedDict[bytes, int] = OrderedDict()  # by the name of a prefix: its length in tokens

    def hit_tokens(self, names: Sequence[bytes]) -> int:
        """Return the length of the longest known prefix. names: of each prefix of a prompt, shortest first."""
        known = self._tokens
        if not names or names[0] not in known:
            return 0
        return known[names[bisect_left(names, True, 1, key=lambda name: name not in known) - 1]]

    def add(self, names: Sequence[bytes], lengths: Sequence[int]) -> None:
        """Remember the prefixes of a prompt, and forget those that were used longest ago."""
        for name, length in zip(reversed(names), reversed(lengths), strict=True):
            self._tokens[name] = length
            self._tokens.move_to_end(name)
        while len(self._tokens) > self._most:
            self._tokens.popitem(last=False)

    def clear(self) -> None:
        self._tokens.clear()
