"""Turn the times of single requests into a report, with the names and definitions of vLLM.

TTFT: from sending the request to the first token. ITL: between two arrivals of one stream (an arrival may carry
several tokens). TPOT: mean time per output token after the first. E2EL: from sending to the last token. Token counts
are the server's (`usage`), not the number of arrivals.
Does not know: HTTP, engines, clocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from localllm.units import format_rate, format_seconds


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Times of one request as the client saw it, in seconds on one clock."""

    started_s: float
    finished_s: float  # when its last token arrived, or when it failed
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens found in the server's prefix cache, if the server reports them
    first_token_s: float | None = None  # None: no token arrived, or the engine does not stream
    inter_token_s: tuple[float, ...] = ()
    error: str | None = None

    @classmethod
    def streamed(
        cls, started_s: float, arrivals: Sequence[float], *, prompt_tokens: int, output_tokens: int, cached_tokens: int
    ) -> RequestTimes:
        """Build the times of a request whose pieces arrived at these times."""
        gaps = tuple(later - earlier for earlier, later in pairwise(arrivals))
        return cls(started_s, arrivals[-1], prompt_tokens, output_tokens, cached_tokens, arrivals[0], gaps)

    @property
    def e2e_s(self) -> float:
        return self.finished_s - self.started_s

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.started_s

    @property
    def tpot_s(self) -> float | None:
        if self.first_token_s is None or self.output_tokens < 2:
            return None
        return (self.finished_s - self.first_token_s) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean, percentiles and maximum of durations, in seconds."""

    count: int
    mean_s: float
    p50_s: float
    p90_s: float
    p95_s: float
    p99_s: float
    max_s: float


def distribution(values: Iterable[float | None]) -> Distribution | None:
    """Return the distribution of the values that are not None; None if there are none."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return None
    return Distribution(
        count=len(known),
        mean_s=math.fsum(known) / len(known),
        p50_s=quantile(known, 0.50),
        p90_s=quantile(known, 0.90),
        p95_s=quantile(known, 0.95),
        p99_s=quantile(known, 0.99),
        max_s=known[-1],
    )


def quantile(ordered: Sequence[float], q: float) -> float:
    """Return a quantile of ascending values, interpolated linearly between neighbours (numpy's default)."""
    place = q * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True, slots=True)
class BenchReport:
    """The results of one benchmark. `str()` prints it as `vllm bench serve` would; `to_dict()` is the JSON output."""

    kind: str  # serve, throughput, latency
    model: str
    workload: str
    seed: int
    concurrency: int
    duration_s: float
    num_requests: int  # successful requests
    num_failed: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft: Distribution | None
    tpot: Distribution | None
    itl: Distribution | None
    e2e: Distribution | None
    url: str | None = None
    errors: dict[str, int] = field(default_factory=dict)  # message -> how often

    @property
    def requests_per_s(self) -> float:
        return self.num_requests / self.duration_s if self.duration_s else 0.0

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.duration_s if self.duration_s else 0.0

    @property
    def total_tokens_per_s(self) -> float:
        return (self.prompt_tokens + self.output_tokens) / self.duration_s if self.duration_s else 0.0

    def to_dict(self) -> dict[str, Any]:
        rates = {
            "requests_per_s": self.requests_per_s,
            "output_tokens_per_s": self.output_tokens_per_s,
            "total_tokens_per_s": self.total_tokens_per_s,
        }
        return {**asdict(self), **rates}

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def summarise(
    kind: str,
    times: Sequence[RequestTimes],
    *,
    duration_s: float,
    model: str,
    workload: str,
    seed: int,
    concurrency: int,
    url: str | None = None,
) -> BenchReport:
    """Return the report of a run. Failed requests are counted, and left out of all other values."""
    done = [one for one in times if one.error is None]
    errors: dict[str, int] = {}
    for one in times:
        if one.error is not None:
            errors[one.error] = errors.get(one.error, 0) + 1
    return BenchReport(
        kind=kind,
        model=model,
        workload=workload,
        seed=seed,
        concurrency=concurrency,
        duration_s=duration_s,
        num_requests=len(done),
        num_failed=len(times) - len(done),
        prompt_tokens=sum(one.prompt_tokens for one in done),
        cached_tokens=sum(one.cached_tokens for one in done),
        output_tokens=sum(one.output_tokens for one in done),
        ttft=distribution(one.ttft_s for one in done),
        tpot=distribution(one.tpot_s for one in done),
        itl=distribution(gap for one in done for gap in one.inter_token_s),
        e2e=distribution(one.e2e_s for one in done),
        url=url,
        errors=errors,
    )


WIDTH = 50
TITLES = {"serve": "Serving", "throughput": "Throughput", "latency": "Latency"}


def _lines(report: BenchReport) -> list[str]:
    lines = [f" {TITLES.get(report.kind, report.kind)} Benchmark Result ".center(WIDTH, "=")]
    lines += [f"{name + ':':<40} {value:<10}".rstrip() for name, value in _totals(report)]
    for title, short, times in (
        ("Time to First Token", "TTFT", report.ttft),
        ("Time per Output Token (excl. 1st token)", "TPOT", report.tpot),
        ("Inter-token Latency", "ITL", report.itl),
        ("End-to-end Latency", "E2EL", report.e2e),
    ):
        lines += _section(title, short, times)
    most = sorted(report.errors.items(), key=lambda item: -item[1])[:5]
    lines += ["=" * WIDTH, *(f"{count} x {message}" for message, count in most), _in_words(report)]
    return lines


def _totals(report: BenchReport) -> list[tuple[str, str]]:
    rows = [
        ("Successful requests", f"{report.num_requests}"),
        ("Failed requests", f"{report.num_failed}"),
        ("Maximum request concurrency", f"{report.concurrency}"),
        ("Benchmark duration (s)", f"{report.duration_s:.2f}"),
        ("Total input tokens", f"{report.prompt_tokens}"),
        ("Total generated tokens", f"{report.output_tokens}"),
        ("Request throughput (req/s)", f"{report.requests_per_s:.2f}"),
        ("Output token throughput (tok/s)", f"{report.output_tokens_per_s:.2f}"),
        ("Total token throughput (tok/s)", f"{report.total_tokens_per_s:.2f}"),
    ]
    if report.cached_tokens:
        rows.insert(5, ("Cached input tokens", f"{report.cached_tokens}"))
    return rows


def _section(title: str, short: str, times: Distribution | None) -> list[str]:
    if times is None:
        return []
    rows = [("Mean", times.mean_s), ("Median", times.p50_s), ("P90", times.p90_s), ("P99", times.p99_s)]
    names = [(f"{name} {short} (ms):", seconds * 1e3) for name, seconds in rows]
    return [title.center(WIDTH, "-"), *(f"{name:<40} {ms:.2f}" for name, ms in names)]


def _in_words(report: BenchReport) -> str:
    duration, rate = format_seconds(report.duration_s), format_rate(report.output_tokens_per_s, "tokens/s")
    words = f"{report.num_requests} requests in {duration}: {report.requests_per_s:.2f} requests/s, {rate}"
    if report.e2e is None:
        return words
    mean, p50, p99 = (format_seconds(value) for value in (report.e2e.mean_s, report.e2e.p50_s, report.e2e.p99_s))
    return f"{words}; latency mean {mean}, P50 {p50}, P99 {p99}"
