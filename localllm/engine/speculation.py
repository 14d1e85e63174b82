"""The number of tokens that each request guesses ahead in a step: drafts, which the step verifies.

    StepCosts     seconds of a step by its number of tokens, as measured
    Speculation   the drafts of every step: as many as give the most expected tokens per second

Whether a draft is right is decided by the runner: it draws the token at each position as it would without drafts, and
compares. So the number of drafts changes when tokens appear, and never which (docs/concepts/speculation.md).
A step with prompt tokens has no drafts, nor has a step of more tokens than the runner verifies at a time.
Does not know: torch, where drafts come from, the counters of a request (request.py, settle.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from localllm.engine.memory.ledger import Ledger
from localllm.engine.request import Request
from localllm.engine.stats import SpeculationStats
from localllm.engine.step import DraftSupport, Row, RowResult

WIDTHS = (1, 2, 3, 5, 7, 11, 15, 23, 31)
"""Numbers of drafts per row that are compared."""
LOOK_BACK, LOOK_EVERY = 64, 8
"""Tokens without drafts after which a device looks for drafts in one of LOOK_EVERY steps."""
LEAST_GAIN = 1.03
"""Expected tokens per second with drafts, as a multiple of those without, from which on they are used."""


class StepCosts:
    """Seconds of decode steps by their number of tokens, each a mean that follows changes slowly."""

    FIRST_SLOPE = 0.05
    """Cost of a further token as a share of a step of one token, until it is measured."""
    WEIGHT = 0.1
    """Weight of the newest step in a mean."""
    STALE_STEPS = 128
    """Steps after which a mean must be measured again."""

    def __init__(self) -> None:
        self._means: dict[int, tuple[float, int, int]] = {}  # tokens -> (seconds, observations, step of the last one)
        self._num_steps = 0

    def observe(self, tokens: int, seconds: float) -> None:
        """Record a step without prompt tokens."""
        if seconds <= 0:
            return
        self._num_steps += 1
        key = _bucket(tokens)
        mean, count, _ = self._means.get(key, (seconds, 0, 0))
        bounded = min(max(seconds, mean / 2), mean * 2)  # another process may have had the processor
        mean += (bounded - mean) * max(self.WEIGHT, 1 / (count + 1))
        self._means[key] = mean, count + 1, self._num_steps

    def is_stale(self, tokens: int) -> bool:
        """Return whether no step of this number of tokens was measured recently, while others were."""
        return self._num_steps > 0 and _bucket(tokens) not in self._fresh()

    def ratio(self, tokens: int, base: int) -> float:
        """Return the seconds of a step of `tokens` tokens, as a multiple of the seconds of a step of `base` tokens."""
        return self._seconds(tokens) / self._seconds(base)

    def _seconds(self, tokens: int) -> float:
        """Return the expected seconds of a step; in an arbitrary unit if none was measured."""
        fresh, key = self._fresh(), _bucket(tokens)
        if not fresh:
            return self._first(key)
        near = min(fresh, key=lambda other: abs(other - key))
        return fresh[near] * self._first(key) / self._first(near)

    def _fresh(self) -> dict[int, float]:
        oldest = self._num_steps - self.STALE_STEPS
        return {key: mean for key, (mean, _, step) in self._means.items() if step > oldest}

    def _first(self, tokens: int) -> float:
        return 1 + self.FIRST_SLOPE * (tokens - 1)


def _bucket(tokens: int) -> int:
    return tokens if tokens <= 16 else -(-tokens // 8) * 8


class Speculation:
    """Decides the drafts of each step, and counts what became of them. Used on the engine's thread."""

    def __init__(self, support: DraftSupport, *, most: int | None = None, why_off: str = "") -> None:
        """most: most drafts of a row, if fewer than the runner supports. why_off: why there are none at all."""
        self.support = support
        self.most = support.most if most is None else min(most, support.most)
        if why_off:
            self.most = 0
        self.why_off = "" if self.most else why_off or support.why_none
        self.costs = StepCosts()
        self._widths = (*[width for width in WIDTHS if width < self.most], *([self.most] if self.most else []))
        self._num_drafts = self._num_draft_tokens = self._num_accepted = 0
        self._num_decode_rows = self._num_decode_tokens = self._last_width = 0
        self._num_planned = 0  # steps for which a device could look for drafts
        self._by_place: Counter[int] = Counter()
        self._off_steps: Counter[str] = Counter()
        self._last_reason = ""

    def most_for(self, request: Request) -> int:
        """Return the most drafts at a time of a request."""
        asked = request.options.max_drafts
        if request.prompt_embeds is not None or request.max_output_tokens == 1:  # no tokens to look up, none to guess
            return 0
        if request.media and self.support.lookahead:  # a drafter with weights does not see
            return 0
        if request.params.mirostat:  # what it keeps depends on the probability of the token before
            return 0
        return self.most if asked is None else min(asked, self.most)

    def propose(self, sampling: Sequence[Request]) -> int:
        """Return how many drafts the runner should have ready after a step in which these requests sample.

        On a device the lookup is two kernels more in every step. It is left out while no request has had drafts within
        its last LOOK_BACK tokens, but for every LOOK_EVERY-th step: a text may begin to repeat itself at any time.
        """
        most = min(self.most, max(0, self.support.step_tokens - len(sampling)))
        if not most or not self.support.widths or self.support.lookahead:
            return most
        self._num_planned += 1
        if self._num_planned % LOOK_EVERY == 0 or any(_had_drafts_lately(request) for request in sampling):
            return most
        return 0

    def set_drafts(self, decoding: Sequence[Request], budget: int, ledger: Ledger, *, has_prompts: bool) -> None:
        """Set the number of drafts of the requests that decode in the step being planned.

        budget: tokens that the step may have. has_prompts: whether it will have prompt tokens.
        """
        if not (self.most and decoding):
            return
        ready = [self._num_ready(request) for request in decoding]
        limit = min(budget, self.support.step_tokens)
        width, reason = 0, ""
        if has_prompts:
            reason = "prompt"
        elif not any(ready):
            reason = "no drafts"
        elif len(decoding) >= limit:
            reason = "batch"
        else:
            width = self.width(decoding, ready, limit)
            reason = "" if width else "cost"
        ahead = 1 if self.support.lookahead else 0  # a drafter keeps keys and values of the newest token, too
        if width and not _has_blocks(decoding, ready, width, ledger, ahead):
            width, reason = 0, "memory"
        for request, drafts in zip(decoding, ready, strict=True):
            request.num_drafts = min(width, drafts)
        self._last_width, self._last_reason = width, reason
        if reason:
            self._off_steps[reason] += 1

    def _num_ready(self, request: Request) -> int:
        """Return the drafts that a request may have in the step being planned.

        If launched steps are not settled, their result says how many drafts there are; the runner then verifies those
        that it has. A lookup may then have found any number. A drafter has as many as behind the last settled step.
        Without drafts after that step, none are expected.
        """
        room = request.max_output_tokens - request.num_output_tokens - request.num_output_placeholders - 1
        if request.num_wanted_tokens != 1 or request.waits_for_tokens or not request.num_proposed:
            return 0
        is_open = request.num_output_placeholders and not self.support.lookahead
        return max(0, min(self.most if is_open else request.num_proposed, request.max_drafts, room))

    def width(self, decoding: Sequence[Request], ready: Sequence[int], limit: int) -> int:
        """Return the number of drafts per row from which the most tokens per second are expected; 0: none.

        ready: drafts that each row has. limit: most tokens of the step.
        """
        rows, best, gain = len(decoding), 0, LEAST_GAIN
        for width in self._widths:
            tokens = rows + sum([min(width, drafts) for drafts in ready])
            if tokens > limit or (self.support.widths and self.support.padded_tokens(rows, width) > limit):
                break
            expected = rows + sum([
                request.acceptance.expected(min(width, drafts))
                for request, drafts in zip(decoding, ready, strict=True)
            ])  # fmt: skip
            gained = expected / rows / self.costs.ratio(tokens, rows)
            if gained > gain:
                best, gain = width, gained
            if width >= max(ready):
                break
        if best and self.costs.is_stale(rows):  # what a step without drafts costs is compared with, so it is measured
            return 0
        return best

    def settle(self, request: Request, row: Row, result: RowResult) -> None:
        """Record the result of a row that sampled."""
        if row.num_scheduled_tokens != 1 + row.num_drafts or not result.token_ids:
            return
        accepted = len(result.token_ids) - 1
        self._num_decode_rows += 1
        self._num_decode_tokens += len(result.token_ids)
        request.acceptance.settle(result.num_checked, accepted, are_predicted=request.are_predicted)
        if result.num_checked:
            self._num_drafts += 1
            self._num_draft_tokens += result.num_checked
            self._num_accepted += accepted
            self._by_place.update(range(accepted))

    def stats(self) -> SpeculationStats:
        return SpeculationStats(
            is_on=self.most > 0,
            why_off=self.why_off,
            num_drafts=self._num_drafts,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=self._num_accepted,
            accepted_by_place=tuple([self._by_place[place] for place in range(max(self._by_place, default=-1) + 1)]),
            num_decode_rows=self._num_decode_rows,
            num_decode_tokens=self._num_decode_tokens,
            last_width=self._last_width,
            off_steps=tuple(sorted(self._off_steps.items())),
            last_reason=self._last_reason,
        )


def _had_drafts_lately(request: Request) -> bool:
    """Return whether a request may have drafts, and had some, or began, within its last LOOK_BACK tokens."""
    position = request.num_output_tokens + request.num_output_placeholders
    return request.max_drafts > 0 and position - request.last_proposed <= LOOK_BACK


def _has_blocks(decoding: Sequence[Request], ready: Sequence[int], width: int, ledger: Ledger, ahead: int = 0) -> bool:
    """Return whether all rows fit into free blocks, so that no request is preempted for the drafts of another.
    ahead: positions behind a row that have blocks, too."""
    needed = 0
    for request, drafts in zip(decoding, ready, strict=True):
        end = request.num_computed_tokens + 1 + min(width, drafts) + ahead
        needed += max(0, ledger.blocks_for(end) - request.num_blocks)
    return needed <= min(ledger.num_free)
