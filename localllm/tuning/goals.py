"""The uses that a machine can be tuned for: a typical load, the score to maximise, and limits that must hold.

    chat           one or two people who wait for the answer
    agents         a few programs whose long prompts share a prefix
    throughput     the most tokens per second, latency does not count
    long-context   the longest prompt with an acceptable time to first token
    share          several people at once
    edit           one person who has files edited: an answer repeats most of its prompt

A higher score is always better. Lengths are typical of the use; on a machine that would take minutes for one round
they are scaled down (`scaled_to`), and the report says so.
Does not know: engines, the search, how a load is run (drive.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

from localllm.errors import ConfigError
from localllm.tuning.figures import LoadMetrics
from localllm.tuning.workload import PromptSource, Workload, WorkloadRequest
from localllm.units import format_bytes, format_count, format_rate, format_seconds

ANSWER_TOKENS = 128  # length of the answer that a person waits for
ROUNDS = 4  # rounds of all streams in a full trial; a brief trial is one round
SHORTEST = 1 / 8  # smallest scale of a goal's lengths: shorter ones would be another kind of load
MOST_ROUNDS = 32
SPREAD = (0.75, 1.0, 1.25)  # factors on a goal's mean lengths, used in turn
LONG_SHARE = 0.9  # share of the context that the prompt of long-context fills


@dataclass(frozen=True, slots=True)
class GoalLimits:
    """Limits that must hold, however good the score. None: no limit, or the goal's own."""

    max_ttft_s: float | None = None  # 95th percentile
    max_tpot_s: float | None = None  # median
    min_context: int | None = None
    max_memory_bytes: int | None = None  # weights, KV cache and activations, as planned

    def broken_by(self, figures: LoadMetrics) -> str:
        """Return a sentence about the first limit that was exceeded; empty if all held."""
        for what, limit, seen in (
            ("to the first token", self.max_ttft_s, figures.ttft_p95_s),
            ("for each token after it", self.max_tpot_s, figures.tpot_p50_s),
        ):
            if limit is not None and seen is not None and seen > limit:
                return f"{format_seconds(seen)} {what}, the limit is {format_seconds(limit)}"
        return ""


@dataclass(frozen=True, slots=True)
class Goal:
    """A use of the machine, with the load that represents it. `score` is the value to maximise."""

    name: str
    what: str
    streams: int  # requests open at the same time
    prompt_len: int  # tokens, without the shared prefix
    output_len: int
    score: Callable[[LoadMetrics], float]
    unit: str  # of the score
    comfortable_context: int  # the context to offer where memory allows
    least_seqs: int = 1  # smallest max_num_seqs to try: real loads sometimes have more streams than the typical one
    shared_len: int = 0  # tokens of the prefix that all prompts of one stream share
    rounds: int = ROUNDS
    limits: GoalLimits = GoalLimits()
    repeats: bool = False  # answers repeat most of their prompts, so drafts pay
    fills_context: bool = False  # the prompt fills the context, so trials with different contexts do different work

    def on_gpu(self) -> Goal:
        """Return the goal for a GPU: a load that saturates a CPU leaves a GPU idle."""
        return replace(self, streams=256) if self.name == "throughput" else self

    def scaled_to(self, round_s: float, trial_s: float) -> Goal:
        """Return the goal scaled to trials of about `trial_s`, if a full-length round takes `round_s`."""
        if self.fills_context:
            return self
        rounds = trial_s / max(round_s, 1e-6)
        if rounds >= ROUNDS:
            return replace(self, rounds=min(MOST_ROUNDS, int(rounds)))
        return self.with_scaled_lengths(max(SHORTEST, rounds / ROUNDS))

    def with_scaled_lengths(self, scale: float) -> Goal:
        lengths = {
            name: max(1, round(getattr(self, name) * scale)) for name in ("prompt_len", "output_len", "shared_len")
        }
        lengths["shared_len"] *= bool(self.shared_len)
        return replace(self, **lengths)

    def cut_to_context(self, context: int) -> Goal:
        """Return the goal with its lengths cut to fit into this context."""
        longest = self.shared_len + SPREAD[-1] * (self.prompt_len + self.output_len)
        return self if longest <= context else self.with_scaled_lengths(0.95 * context / longest)

    def workload(
        self, effort: float, context: int, *, seed: int, vocab_size: int, text_ids: Sequence[int] = ()
    ) -> Workload:
        """Return the requests of a trial. They do not depend on the settings, so that trials can be compared.

        text_ids: the text of the prompts of a goal that `repeats`; (): random tokens.
        """
        if self.fills_context:
            prompt = max(1, int(LONG_SHARE * context) - self.output_len)
            request = WorkloadRequest(PromptSource(seed, vocab_size).prompt(prompt), self.output_len)
            return Workload(f"one prompt of {format_count(prompt)}", seed, (request,))
        goal, source = self.cut_to_context(context), PromptSource(seed, vocab_size)
        shared = [source.prompt(goal.shared_len) for _ in range(self.streams)]
        own = partial(source.begun_again, text_ids=text_ids) if self.repeats else source.prompt
        count = self.streams * max(1, round(self.rounds * effort))
        # Vary the lengths: requests of equal length all end together, which makes any scheduler look better than it is.
        requests = tuple(
            WorkloadRequest(
                shared[i % self.streams] + own(_spread_length(goal.prompt_len, i)),
                _spread_length(goal.output_len, i + 1),
            )
            for i in range(count)
        )
        return Workload(self.lengths, seed, requests)

    @property
    def lengths(self) -> str:
        shared = f"{format_count(self.shared_len)} shared + " if self.shared_len else ""
        return f"{shared}{format_count(self.prompt_len)} in, {format_count(self.output_len)} out"

    def in_words(self, score: float) -> str:
        if self.unit == "tok/s":
            return format_rate(score)
        return f"{format_count(score) if score >= 100 else f'{score:.1f}'} {self.unit}"


def _spread_length(mean: int, index: int) -> int:
    return max(1, round(mean * SPREAD[index % 3]))


def _answers_per_minute(figures: LoadMetrics) -> float:
    """Answers per minute for one person: one answer takes the first token and `ANSWER_TOKENS` after it."""
    return 60 / ((figures.ttft_p50_s or 0.0) + ANSWER_TOKENS * (figures.tpot_p50_s or 0.0) + 1e-9)


def _context_score(figures: LoadMetrics) -> float:
    """Score the context first: doubling it outweighs a thousandfold prefill speed, which only decides ties."""
    return figures.context * math.pow(max(1.0, figures.prompt_tokens_per_s), 0.1)


GOALS: Mapping[str, Goal] = {
    goal.name: goal
    for goal in (
        Goal(
            "chat", "one or two people who wait for each answer", 2, 512, 128,
            _answers_per_minute, "answers/min", 8192, 8,
        ),
        Goal(
            "agents", "a few programs whose long prompts share a prefix", 4, 256, 96,
            lambda figures: 60 * figures.requests_per_s, "turns/min", 65536, 8, shared_len=4096,
        ),
        Goal(
            "throughput", "as many tokens as possible; latency does not matter", 64, 256, 128,
            lambda figures: figures.output_tokens_per_s, "tok/s", 4096, 4,
        ),
        Goal(
            "long-context", "the longest prompt with an acceptable time to first token", 1, 0, 16,
            _context_score, "points", 0, rounds=1, limits=GoalLimits(max_ttft_s=60.0),
            fills_context=True,
        ),
        Goal(
            "share", "a given number of people at the same time", 4, 512, 128,
            _answers_per_minute, "answers/min each", 8192, 4,
        ),
        Goal(
            "edit", "one person who has files edited: most of an answer repeats the prompt", 1, 1024, 256,
            _answers_per_minute, "answers/min", 8192, 4, repeats=True,
        ),
    )
}  # fmt: skip


def goal_of(name: str, limits: GoalLimits = GoalLimits(), people: int | None = None) -> Goal:
    """Return the goal of that name with these limits. Raises `ConfigError`."""
    if name not in GOALS:
        known = "; ".join(f"{goal.name}: {goal.what}" for goal in GOALS.values())
        raise ConfigError(f"Unknown goal {name!r}.", f"Known goals: {known}.", "--goal chat", param="goal")
    goal = GOALS[name]
    if people is not None:
        if name != "share" or not 1 <= people <= 256:
            why = "It applies only to --goal share." if name != "share" else f"Got {people}; allowed: 1 to 256."
            raise ConfigError("--people is not valid here.", why, "--goal share --people 4", param="people")
        goal = replace(goal, streams=people, least_seqs=people)
    asked = {name: value for name, value in asdict(limits).items() if value is not None}
    for name, value in asked.items():
        if not value > 0:
            flag = "--" + name.removesuffix("_s").removesuffix("_bytes").replace("_", "-")
            raise ConfigError(f"{flag} {value:g} is out of range.", "A limit must be above 0.", param=name)
    return replace(goal, limits=replace(goal.limits, **asked))


def over_budget(limits: GoalLimits, planned_bytes: int) -> str:
    """Return why the planned memory exceeds the limit, before any trial; empty if it does not."""
    if limits.max_memory_bytes is None or planned_bytes <= limits.max_memory_bytes:
        return ""
    return f"takes {format_bytes(planned_bytes)}, the limit is {format_bytes(limits.max_memory_bytes)}"
