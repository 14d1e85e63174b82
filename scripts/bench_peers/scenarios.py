"""What each engine is asked in each round, and the figures that come of it.

    batch    16 streams at once, 128 tokens in and 64 out: output tokens/s
    single   one stream, 128 in and 64 out: output tokens/s
    prefix   a prompt of 1,500 tokens, then the very same again: time to first token of both

Each round brings new prompts, so nothing is answered from an older round's prefix cache.
Does not know: how engines are started, tables.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from localllm.tuning.report import BenchReport, RequestTimes, summarise
from localllm.tuning.workload import WorkloadRequest, fixed_lengths, repeated_prompt
from scripts.bench_peers.engines import Engine, EngineFailed

Figures = dict[str, float]
WARM_UP_SEED = 1 << 32


@dataclass(frozen=True, slots=True)
class Load:
    """The sizes of the scenarios; the defaults are the figures asked for."""

    concurrency: int = 16
    num_requests: int = 32
    input_len: int = 128
    output_len: int = 64
    single_requests: int = 3
    prefix_len: int = 1500
    prefix_prompts: int = 2
    prefix_repeats: int = 2
    seed: int = 20261120


def warm(engine: Engine, load: Load) -> None:
    """One batch that counts for nothing: lazy initialisation and first compilations happen here."""
    size = 1 if engine.one_at_a_time else load.concurrency
    _ask(engine, fixed_lengths(size, load.input_len, 8, seed=load.seed + WARM_UP_SEED).requests, load.concurrency)


def batch(engine: Engine, load: Load, round_index: int) -> Figures:
    # One at a time, the rate does not depend on how many wait: four requests show it.
    count = min(load.num_requests, 4) if engine.one_at_a_time else load.num_requests
    workload = fixed_lengths(count, load.input_len, load.output_len, seed=load.seed + round_index)
    report = _timed(engine, workload.requests, load.concurrency)
    return {"output tok/s": report.output_tokens_per_s, **_latencies(report)}


def single(engine: Engine, load: Load, round_index: int) -> Figures:
    seed = load.seed + 1000 + round_index
    workload = fixed_lengths(load.single_requests, load.input_len, load.output_len, seed=seed)
    report = _timed(engine, workload.requests, 1)
    return {"output tok/s": report.output_tokens_per_s, **_latencies(report)}


def prefix(engine: Engine, load: Load, round_index: int) -> Figures:
    firsts: list[float] = []
    repeats: list[float] = []
    for index in range(load.prefix_prompts):
        seed = load.seed + 2000 + 100 * round_index + index
        workload = repeated_prompt(1 + load.prefix_repeats, load.prefix_len, 4, seed=seed)
        first, *again = [time_s for one in _ask(engine, workload.requests, 1) if (time_s := one.ttft_s) is not None]
        firsts.append(first)
        repeats += again
    first_s, repeat_s = statistics.median(firsts), statistics.median(repeats)
    return {"first TTFT ms": 1e3 * first_s, "repeated TTFT ms": 1e3 * repeat_s, "first / repeated": first_s / repeat_s}


SCENARIOS: Mapping[str, Callable[[Engine, Load, int], Figures]] = {"batch": batch, "single": single, "prefix": prefix}


def greedy_texts(engine: Engine, load: Load, count: int = 4) -> list[str]:
    """Answers that must not differ between engines, or their speeds say nothing."""
    workload = fixed_lengths(count, 32, 32, seed=load.seed + 5000)
    return [engine.greedy_text(request) for request in workload.requests]


def _timed(engine: Engine, requests: Sequence[WorkloadRequest], concurrency: int) -> BenchReport:
    started_s = time.perf_counter()
    times = _ask(engine, requests, concurrency)
    duration_s = time.perf_counter() - started_s
    return summarise("serve", times, duration_s=duration_s, model="", workload="", seed=0, concurrency=concurrency)


def _ask(engine: Engine, requests: Sequence[WorkloadRequest], concurrency: int) -> list[RequestTimes]:
    """Every answer must come, and in full."""
    times = engine.ask(requests, concurrency)
    for request, one in zip(requests, times, strict=True):
        if one.error is not None:
            raise EngineFailed(f"{engine.name}: {one.error}")
        if one.output_tokens != request.max_tokens:
            raise EngineFailed(f"{engine.name} gave {one.output_tokens} of {request.max_tokens} tokens")
    return times


def _latencies(report: BenchReport) -> Figures:
    figures: Figures = {}
    if report.ttft is not None:
        figures["TTFT p50 ms"] = 1e3 * report.ttft.p50_s
    if report.tpot is not None:
        figures["TPOT p50 ms"] = 1e3 * report.tpot.p50_s
    if report.itl is not None:
        figures["ITL p99 ms"] = 1e3 * report.itl.p99_s
    return figures
