"""Invented samples of the dashboard's views, for `/dev/patterns` and the template tests."""

from __future__ import annotations

import math
from dataclasses import replace

from localllm.engine.outputs import ExplainedMiss
from localllm.engine.prompt_history import CacheMiss
from localllm.engine.stats import NO_SPECULATION, RequestTimeline, SpeculationStats, StepComposition
from localllm.engine.step import RankMemory, RankStats, RunnerStats
from localllm.web.pages.dashboard import machine, request_views, shown
from localllm.web.pages.dashboard import views as v
from localllm.web.pages.dashboard.machine import FarUse, GPUReading, MachineReading, machine_use, ranks
from localllm.web.pages.dashboard.plots import pool_map, sparkline
from localllm.web.pages.dashboard.request_views import cache_miss, request_page
from localllm.web.pages.dashboard.views import drafts, steps
from localllm.web.pages.frame import views
from localllm.web.pages.frame.views import stacked


def _far_samples(facts: tuple[views.Fact, ...]) -> tuple[views.View, ...]:
    """The tiles of a model with experts in RAM."""
    ram = stacked([("Experts", "weights", 3, "42 GiB"), ("Rest of RAM", "idle", 1, "22 GiB")])
    large = v.ModelFacts("large", stacked([("Weights", "decode", 3, "17 GiB")]), facts, ram=ram)
    return large, machine_use(MachineReading(0.42, 8, 2**34, 2**35, 2**31), FarUse(0.61, 5.2e10, 7.7e10))


def samples(shell: views.Shell) -> list[views.View]:
    waterfall = stacked(
        [("Queue", "queue", 1, "1 s"), ("Prefill", "prefill", 2, "2 s"), ("Decode", "decode", 5, "5 s")]
    )
    line = RequestTimeline("chat-4f2a91c0", "running", 812, 768, 201, 64, 1, 1.7e9, 1.7e9 + 0.2, 1.7e9 + 0.9,
                           num_drafted_tokens=161, num_accepted_tokens=120, num_swaps=1,
                           events=(("Swapped out", 1.7e9 + 1.1), ("Swapped in", 1.7e9 + 1.4)))  # fmt: skip
    ended_line = replace(line, state="finished", finished_s=1.7e9 + 4, finish_reason="stop",
                         miss_reason="changed", miss_position=768, num_missed_tokens=31)  # fmt: skip
    miss = ExplainedMiss(CacheMiss("changed", 768, 31, "77aa"), 0.4, "Today is ", "Tuesday.\nBe", "Monday.\nBe")
    row = request_views.RequestRow(
        "4f2a91c0e1b2", "chat", "/", "running", "seq-0", 812, 768, 201, 64, 61.8, 4.2, "/", "120 of 161"
    )
    waiting = request_views.RequestRow("0c12a7b3d4e5", "laptop", "/", "waiting", "seq-1", 12, 0, 0, 0, None, 0.3, "/")
    ended = request_views.FinishedRow("77aab1c2d3e4", "API", "/", "stop", 812, 768, 201, 0.041, 61.8, 3.4, waterfall,
                                      "120 of 161",
                          31, 0.4)  # fmt: skip
    aborted = request_views.FinishedRow("77abb1c2d3e4", "playground", "/", "abort", 812, 0, 0, None, None, 0.4, ())
    facts = (views.Fact("Preemptions", "2", "requests that gave their blocks back"), views.Fact("Up", "12 min 4 s"))
    choices = (shown.DashboardLink("1 min", "/", True), shown.DashboardLink("1 h", "/", False))
    return [
        _headline(),
        _headline().sparkline,
        _kv_usage(),
        _steps(),
        ranks(RunnerStats(ranks=_RANKS)),
        machine.OtherServers((_SERVER, replace(_SERVER, is_up=False, failure="laptop cannot be reached."))),
        v.Latency(
            (v.LatencyRow("TTFT", "To the first token", 0.041, 0.22), v.LatencyRow("Queue", "", None, None)),
            "last minute",
        ),
        v.Counters(0.713, 713, 1000, facts),
        drafts(_SPECULATION, None),
        drafts(_SPECULATION._replace(last_width=0, last_reason="cost"), NO_SPECULATION._replace(num_decode_rows=1)),
        drafts(SpeculationStats(is_on=True), None),
        drafts(SpeculationStats(why_off="speculation is off"), None),
        request_views.LiveRequests((row, waiting), hidden=3, count=5, cancel_url="/"),
        request_views.LiveRequests(()),
        request_views.LiveRequests((), curl="curl http://127.0.0.1:8000/v1/chat/completions -d '{}'"),
        request_views.FinishedRequests((ended, aborted), 3.4, hidden=42),
        request_views.FinishedRequests((), 0.0),
        machine.MachineUse(
            (views.Gauge("CPU", 0.42, "42% of 8 cores"), views.Gauge("Memory", 0.95, "15.2 GiB of 16.0 GiB")), facts
        ),
        machine_use(MachineReading(0.42, 8, 2**34, 2**35, 2**31, (_GPU, replace(_GPU, power_w=None)))),
        v.ModelFacts(
            "demo", stacked([("Weights", "decode", 3, "12 MiB")]), facts, ("The KV cache is bounded on CPU.",)
        ),
        *_far_samples(facts),
        _board(),
        v.DashboardPage(
            shell,
            _board(),
            spans=choices,
            models=(shown.DashboardLink("demo", "/", True), shown.DashboardLink("big", "/", False)),
        ),
        v.DashboardPage(shell, None, views.Loading("demo")),
        request_views.RequestsPage(
            shell, request_views.LiveRequests((row, waiting)), request_views.FinishedRequests((ended, aborted), 3.4)
        ),
        request_page(shell, line, 1.7e9 + 2),
        request_page(shell, ended_line, 1.7e9 + 9, found=miss),
        *[
            card
            for reason in ("changed", "evicted", "no_state", "new", "off")
            if (card := cache_miss(replace(ended_line, miss_reason=reason), None))
        ],
    ]


_GPU = GPUReading("NVIDIA RTX 4090", 0.87, 20 * 2**30, 24 * 2**30, 18 * 2**30, 2520, 64, 380.0)

_SPECULATION = SpeculationStats(
    True, "", 131, 530, 412, (131, 120, 99, 62), 131, 543, 7, (("no drafts", 14), ("prompt", 6))
)

_SERVER = machine.ServerTile(
    "laptop", "http://192.168.1.5:8000/v1", True, "", "org/big, org/small", (views.Fact("Requests", "2", "running"),)
)


_RANK = RankStats(
    0,
    0,
    0,
    "cuda:0",
    "NVIDIA RTX 4090",
    memory=RankMemory(12 * 2**30, 7 * 2**30, 2**29, 2**28),
    device_bytes=24 * 2**30,
    step_s=0.0121,
    busy_ratio=0.94,
)
_RANKS = (
    _RANK,
    replace(_RANK, rank=1, stage=1, device="cuda:1", lag_steps=1, busy_ratio=0.81, restarts=1, last_words="Signal 9."),
    replace(_RANK, rank=2, stage=1, shard=1, device="cuda:2", is_up=False, lag_steps=7, last_words="Signal 9."),
)


def _steps() -> v.RecentSteps:
    held = [(512 * (n % 9 == 0), 24 + n % 5) for n in range(80)]
    return steps(
        [StepComposition(n, p, d, int(p > 0), d, 512, 2e-4, 9e-3, 6e-4, 2e-4) for n, (p, d) in enumerate(held)], 80
    )


def _headline() -> v.Headline:
    wave = [(0.5 * i, 40 + 25 * math.sin(i / 9)) for i in range(120) if not 50 < i < 62]
    plot = sparkline("Generated tokens per second", wave, lambda value: f"{value:.0f} tok/s")
    return v.Headline("generation", "Generation", "412", "tok/s", "81,233 tokens since start", plot)


def _kv_usage() -> v.KVUsage:
    parts = [("In use", "used", 96.0, "96 blocks"), ("Reusable", "cached", 60.0, "60"), ("Free", "free", 100.0, "100")]
    cells, columns, rows, per_cell = pool_map(96, 60, 100, [("seq-0", 40), ("seq-1", 30), ("seq-4", 26)])
    bar = stacked(parts)
    windowed = v.GroupUsage(1024, bar, cells, columns, rows, per_cell)
    wave = [(0.5 * i, 30 + 10 * math.sin(i / 9)) for i in range(120)]
    plot = sparkline("Share of the KV cache in use", wave, lambda value: f"{value:.0f} %", top=100.0)
    ram = v.StoreUsage("In RAM", 3 * 2**29, 2**31, bar, "12,480 tokens read")
    return v.KVUsage(
        0.375, plot, 16, 1500, 4096, 960, 36, bar, cells, columns, rows, per_cell, (windowed,),
        stores=(ram, replace(ram, title="On disk")),
    )  # fmt: skip


def _board() -> v.Dashboard:
    empty = machine.MachineUse((), ())
    return v.Dashboard(
        (_headline(),),
        machine.Ranks(),
        _kv_usage(),
        steps((), 0),
        v.Latency((), "since start"),
        v.Counters(0.0, 0, 0, ()),
        drafts(_SPECULATION, None),
        request_views.LiveRequests(()),
        request_views.FinishedRequests((), 0.0),
        empty,
        v.ModelFacts("demo", (), ()),
    )
