"""Blocks under pressure: when a waiting request may take free blocks, and which running request loses its blocks.

A request admitted as soon as its prompt fits may be preempted a few steps later, and its tokens are computed again.
Room for the longest possible output would leave most of the cache empty. A request therefore counts with its prompt and
a share of its expected output (`OutputReserve`). `Preemption` weighs waiting requests against running ones with it, and
chooses the victim where running requests need more blocks than there are.
Does not know: the rows of a step, names of blocks, torch, text.
Idea: new_token_ratio of SGLang (Zheng et al. 2024, arXiv:2312.07104).
"""

from __future__ import annotations

from collections.abc import Sequence

from localllm.engine.memory.cache_manager import CacheManager
from localllm.engine.memory.ledger import Counts, Hit, fits, plus
from localllm.engine.request import BACKGROUND_PRIORITY, Request

FIRST_GUESS = 512
"""Expected output tokens before any request has ended."""
WEIGHT = 0.1
"""Weight of the newest output in the mean."""
SPACING = 1.5
"""Time between two trials, as a multiple of (steps of one output / running requests)."""
PAUSE = 0.25
"""Time without trials after a preemption, as a share of the steps of one output."""
PRESSURE_STEPS = 2
"""Steps after a preemption in which admission leaves a block more to each running request."""


class OutputReserve:
    """Room that a request needs for its output at admission: the mean length of recent outputs, or `max_tokens` if that
    is less, times a share.

    In addition, one request at a time whose prompt fits is admitted on trial. Trials are spread over the time that an
    output takes, so that requests do not all grow large together, and they pause after a preemption.
    """

    def __init__(self, share: float) -> None:
        """share: of the expected output, 0 to 1; with 0 every prompt that fits is admitted."""
        self._share = share
        self._mean_tokens = float(FIRST_GUESS)
        self._steps_to_trial = 0.0

    def num_tokens(self, request: Request) -> int:
        """Return the tokens that the request is expected to hold for most of its time, at least its present ones."""
        output = self._share * min(self._mean_tokens, request.max_output_tokens)
        return max(request.num_tokens, request.prompt_len + int(output))

    @property
    def allows_trial(self) -> bool:
        return self._steps_to_trial <= 0

    def on_step(self) -> None:
        self._steps_to_trial -= 1

    def on_trial(self, request: Request, num_running: int) -> None:
        """Note a trial. num_running: 0 while the only other requests are loading their blocks."""
        self._steps_to_trial = SPACING * min(self._mean_tokens, request.max_output_tokens) / max(1, num_running)

    def on_preemption(self) -> None:
        self._steps_to_trial = max(self._steps_to_trial, PAUSE * self._mean_tokens)

    def on_end(self, request: Request) -> None:
        if request.num_output_tokens:
            self._mean_tokens += WEIGHT * (request.num_output_tokens - self._mean_tokens)


class Preemption:
    """Weighs waiting requests against running ones. Changes nothing: the scheduler preempts and admits."""

    def __init__(self, cache: CacheManager, reserve: OutputReserve, running: Sequence[Request], lookahead: int) -> None:
        """running: the list of running requests, which changes. lookahead: positions behind the known tokens that a
        drafter writes to."""
        self._cache, self._ledger, self._reserve, self._running = cache, cache.ledger, reserve, running
        self._lookahead = lookahead
        self._steps_under_pressure = 0  # that are left

    def on_step(self) -> None:
        self._steps_under_pressure -= 1
        self._reserve.on_step()

    def on_pressure(self) -> None:
        """Note that a request was preempted for the blocks that a running one needs."""
        self._steps_under_pressure = PRESSURE_STEPS

    def victim(self) -> Request:
        """Return the request to preempt: the youngest of the least urgent ones."""
        return max(self._running, key=lambda request: (request.priority, request.sequence))

    def victims_for(self, head: Request, *, has_free_slot: bool) -> list[Request]:
        """Return the requests to preempt for a more urgent waiting one: one if all slots are taken, and background
        requests for their blocks, as many as it takes, but only if that is enough."""
        if head.num_in_flight_tokens or not self._running:
            return []
        victim = self.victim()
        is_background = victim.priority == BACKGROUND_PRIORITY
        if head.priority >= victim.priority or (has_free_slot and not is_background):
            return []
        hit = self._cache.find(head)
        if self._cache.is_being_computed(head, hit, self._running):
            return []
        # A request enters with room for its expected output, and without it where it runs alone.
        wanted: list[tuple[int, int | None]] = [(head.num_tokens, None)]
        if is_background:
            wanted.insert(0, (self._reserve.num_tokens(head), head.priority))
        for num_tokens, priority in wanted:
            need = plus(self._ledger.needs(self.end_of_blocks(head, num_tokens)), self._ledger.taken_by_hit(hit))
            room, victims = self.spare_blocks(priority), list[Request]()
            for each in sorted(self._running, key=lambda one: (one.priority, one.sequence), reverse=True):
                if (has_free_slot or victims) and fits(need, room):
                    break
                if each.priority <= head.priority or (victims and each.priority != BACKGROUND_PRIORITY):
                    break
                room = plus(room, each.num_held_blocks)
                victims.append(each)
            if victims and fits(need, room):
                return victims
        return []

    def needs(self, request: Request, hit: Hit) -> tuple[Counts, Counts, Counts]:
        """Return the blocks that a waiting request with this hit takes: for its prompt, with its expected output, and
        the most that it ever takes for its prompt."""
        ledger, taken = self._ledger, self._ledger.taken_by_hit(hit)
        end = self.end_of_blocks(request, request.num_tokens)
        most = max(end, self._reserve.num_tokens(request))
        counts = (ledger.needs(end), ledger.needs(most), ledger.needs_alone(end))
        least, expected, alone = [plus(taken, count) for count in counts]
        return least, expected, alone

    def enters_on_trial(self, request: Request, blocks: Counts) -> bool:
        """Return whether a request without room for its expected output may be admitted nevertheless."""
        if not self._reserve.allows_trial or not fits(blocks, self.spare_blocks(None)):
            return False
        self._reserve.on_trial(request, len(self._running))
        return True

    def spare_blocks(self, priority: int | None) -> Counts:
        """Return the free blocks that running requests will not need for their prompts or, as expected, their outputs.

        priority: outputs of less urgent requests do not count, since those requests would be preempted. None: no
        outputs count. For some steps after a preemption each running request keeps a block more, so that what was
        preempted does not come back to be preempted again.
        """
        ends = list[tuple[Request, int]]()
        for request in self._running:
            counts = priority is not None and request.priority <= priority
            end = self._reserve.num_tokens(request) if counts else request.num_tokens
            ends.append((request, self.end_of_blocks(request, end)))
        is_tight = self._steps_under_pressure > 0
        return self._cache.free_beside(ends, len(ends) if is_tight else 0)

    def end_of_blocks(self, request: Request, end: int) -> int:
        """Return the position up to which a request needs blocks for a row that ends at `end`: a drafter also keeps
        keys and values of the token behind it, unless the request ends there."""
        if not self._lookahead:
            return end
        return max(end, min(end + 1, request.prompt_len + request.max_output_tokens - 1))
