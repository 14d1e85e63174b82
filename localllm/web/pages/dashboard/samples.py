"""Samples of the dashboard's views, made up: for `/dev/patterns` and the template tests."""

from __future__ import annotations

import math

from localllm.web.pages.dashboard.plots import pool_map, sparkline, stacked
from localllm.web.views import dashboard as v
from localllm.web.views import shared


def samples(shell: shared.Shell) -> list[shared.View]:
    batch = stacked(
        [("Prefill", "prefill", 380, "380"), ("Decode", "decode", 24, "24"), ("Unused", "idle", 108, "108")]
    )
    times = stacked([("Schedule", "queue", 0.2, "0.2 ms"), ("Forward", "decode", 9.1, "9.1 ms")])
    waterfall = stacked(
        [("Queue", "queue", 1, "1 s"), ("Prefill", "prefill", 2, "2 s"), ("Decode", "decode", 5, "5 s")]
    )
    row = v.RequestRow("chat-4f2a91c0", "running", "seq-0", 812, 768, 201, 64, 61.8, 4.2, "/")
    waiting = v.RequestRow("chatcmpl-0c12", "waiting", "seq-1", 12, 0, 0, 0, None, 0.3, "/")
    ended = v.FinishedRow("chat-77aa", "stop", 812, 768, 201, 0.041, 61.8, 3.4, waterfall)
    aborted = v.FinishedRow("chat-77ab", "abort", 812, 0, 0, None, None, 0.4, ())
    facts = (shared.Fact("Preemptions", "2", "requests that gave their blocks back"), shared.Fact("Up", "12 min 4 s"))
    return [
        _headline(),
        _headline().sparkline,
        _kv_usage(),
        v.LastStep(812, 813, 380, 24, 1, 24, 512, batch, times, 0.0093),
        v.Latency(
            (v.LatencyRow("TTFT", "To the first token", 0.041, 0.22), v.LatencyRow("Queue", "", None, None)),
            "last minute",
        ),
        v.Counters(0.713, 713, 1000, facts),
        v.LiveRequests((row, waiting), hidden=3),
        v.LiveRequests(()),
        v.FinishedRequests((ended, aborted), 3.4),
        v.FinishedRequests((), 0.0),
        v.MachineUse(
            (shared.Gauge("CPU", 0.42, "42% of 8 cores"), shared.Gauge("Memory", 0.95, "15.2 GiB of 16.0 GiB")), facts
        ),
        v.ModelFacts(
            "demo", stacked([("Weights", "decode", 3, "12 MiB")]), facts, ("The KV cache is bounded on CPU.",)
        ),
        _board(),
        v.DashboardPage(shell, _board()),
        v.DashboardPage(shell, None, shared.Loading("demo")),
    ]


def _headline() -> v.Headline:
    wave = [(0.5 * i, 40 + 25 * math.sin(i / 9)) for i in range(120) if not 50 < i < 62]
    plot = sparkline("Generated tokens per second", wave, lambda value: f"{value:.0f} tok/s")
    return v.Headline("generation", "Generation", "412", "tok/s", "81,233 tokens since start", plot)


def _kv_usage() -> v.KVUsage:
    parts = [("In use", "used", 96.0, "96 blocks"), ("Reusable", "cached", 60.0, "60"), ("Free", "free", 100.0, "100")]
    cells, columns, rows, per_cell = pool_map(96, 60, 100, [("seq-0", 40), ("seq-1", 30), ("seq-4", 26)])
    return v.KVUsage(256, 96, 230, 16, 1500, 4096, 960, 36, stacked(parts), cells, columns, rows, per_cell)


def _board() -> v.Dashboard:
    empty = v.MachineUse((), ())
    step = v.LastStep(0, 0, 0, 0, 0, 0, 512, (), (), 0.0)
    return v.Dashboard(
        (_headline(),),
        _kv_usage(),
        step,
        v.Latency((), "since start"),
        v.Counters(0.0, 0, 0, ()),
        v.LiveRequests(()),
        v.FinishedRequests((), 0.0),
        empty,
        v.ModelFacts("demo", (), ()),
    )
