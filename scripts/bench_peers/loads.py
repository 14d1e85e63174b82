"""The loads of every round, and the values computed from them.

    latency      one stream, one request after another (as `localllm bench latency --concurrency 1`)
    serve        --concurrency streams (as `localllm bench serve`)
    throughput   all requests at once (as `localllm bench throughput`)
    prefix       a long prompt, then the same again: time to first token of both

and the goals of `localllm tune`. Each round has other prompts.
Does not know: how engines are started, tables.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from localllm.tuning.figures import figures_of
from localllm.tuning.goals import Goal
from localllm.tuning.report import RequestTimes, summarise
from localllm.tuning.workload import Workload, WorkloadRequest, fixed_lengths, repeated_prompt

Figures = dict[str, float]
KINDS = ("latency", "serve", "throughput", "prefix")
WARM_UP_SEED = 1 << 32
WARM_UP_TOKENS = 256, 8  # most tokens of a prompt and an answer
ANSWER_LEN = 4  # where only the first token counts


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the loads that are not goals. Lengths in tokens."""

    concurrency: int
    num_requests: int
    input_len: int
    output_len: int
    single_requests: int
    prefix_len: int


@dataclass(frozen=True, slots=True)
class Load:
    """A closed loop: a fixed number of open requests, until all are answered."""

    name: str
    streams: int
    workload: Callable[[int], Workload]  # from a seed
    goal: Goal | None = None  # also report its score

    def requests(self, seed: int) -> tuple[WorkloadRequest, ...]:
        return self.workload(seed).requests

    def warm_up(self, seed: int) -> list[WorkloadRequest]:
        """Return an unmeasured batch: lazy initialisation and first compilations happen here."""
        prompt, answer = WARM_UP_TOKENS
        return [
            WorkloadRequest(one.prompt_token_ids[:prompt], min(answer, one.max_tokens))
            for one in self.requests(seed + WARM_UP_SEED)[: self.streams]
        ]

    def figures(
        self, requests: Sequence[WorkloadRequest], times: Sequence[RequestTimes], duration_s: float, context: int
    ) -> Figures:
        if self.name == "prefix":
            return _first_and_again(requests, times)
        figures = _figures(times, duration_s)
        if self.goal is not None:
            figures[self.goal.unit] = self.goal.score(figures_of(times, duration_s, 0, 0, context))
        return figures


def bench_load(kind: str, sizes: Sizes, vocab_size: int) -> Load:
    """Return the load of one of `KINDS`."""
    if kind == "prefix":
        return Load(kind, 1, lambda seed: repeated_prompt(
            3, sizes.prefix_len, ANSWER_LEN, seed=seed, vocab_size=vocab_size
        ))  # fmt: skip
    count = sizes.single_requests if kind == "latency" else sizes.num_requests
    streams = {"latency": 1, "serve": min(sizes.concurrency, count), "throughput": count}[kind]
    return Load(kind, streams, lambda seed: fixed_lengths(
        count, sizes.input_len, sizes.output_len, seed=seed, vocab_size=vocab_size
    ))  # fmt: skip


def goal_load(goal: Goal, scale: float, context: int, vocab_size: int) -> Load:
    """Return a goal's load. scale: factor on its lengths. context: longest request; a load that fills it does so."""
    goal = goal if goal.fills_context else goal.with_scaled_lengths(scale).cut_to_context(context)
    return Load(
        f"goal {goal.name}",
        goal.streams,
        lambda seed: goal.workload(1.0, context, seed=seed, vocab_size=vocab_size),
        goal,
    )


def longest(loads: Sequence[Load]) -> int:
    """Return the tokens of the longest request, prompt and answer."""
    return max(len(one.prompt_token_ids) + one.max_tokens for load in loads for one in load.requests(0))


def _figures(times: Sequence[RequestTimes], duration_s: float) -> Figures:
    report = summarise("serve", times, duration_s=duration_s, model="", workload="", seed=0, concurrency=0)
    figures = {"output tok/s": report.output_tokens_per_s}
    for name, found in (("TTFT", report.ttft), ("TPOT", report.tpot)):
        if found is not None:
            figures |= {f"{name} p50 ms": 1e3 * found.p50_s, f"{name} p95 ms": 1e3 * found.p95_s}
    if report.e2e is not None:  # the only latency that does not depend on tokens per event
        figures["answer p50 ms"] = 1e3 * report.e2e.p50_s
    return figures


def _first_and_again(requests: Sequence[WorkloadRequest], times: Sequence[RequestTimes]) -> Figures:
    ttft_ms = [1e3 * (one.ttft_s or 0.0) for one in times]
    first_ms, again_ms = ttft_ms[0], statistics.median(ttft_ms[1:])
    return {"first TTFT ms": first_ms, "repeated TTFT ms": again_ms, "first / repeated": first_ms / again_ms}
