"""What /metrics, the dashboard and `localllm top` show of a model's ranks, and that they show nothing without ranks."""

import asyncio
import io
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from localllm.cli import main, parse
from localllm.cli.server_stats import StatsPoller
from localllm.cli.top_screen import draw
from localllm.engine.step import RankStats, RunnerStats
from localllm.web.pages.dashboard import machine
from localllm.web.pages.dashboard.machine import ranks as rank_tiles
from tests.web.live_server import LiveServer, settings
from tests.web.pages_stub import StubClient, StubModel, stub_ranks

RANKS = stub_ranks()
Sample = tuple[dict[str, str], float]


@pytest.fixture(scope="module")
def live() -> Iterator[tuple[LiveServer, StubClient]]:
    client = StubClient()
    with LiveServer(StubModel(client), settings(ui=True)) as server:  # type: ignore[arg-type]
        yield server, client


@pytest.fixture
def client(live: tuple[LiveServer, StubClient]) -> Iterator[StubClient]:
    live[1].ranks = RANKS
    yield live[1]
    live[1].ranks = ()


@pytest.fixture
def url(live: tuple[LiveServer, StubClient]) -> str:
    return live[0].url


def metrics(url: str) -> dict[str, list[Sample]]:
    families = text_string_to_metric_families(httpx.get(url + "/metrics").text)
    found: dict[str, list[Sample]] = {}
    for sample in (sample for family in families for sample in family.samples):
        if "rank_" in sample.name or "bubble" in sample.name:
            found.setdefault(sample.name.removeprefix("localllm:"), []).append((dict(sample.labels), sample.value))
    return found


def test_metrics_of_each_rank_are_those_of_the_snapshot(url: str, client: StubClient) -> None:
    found = metrics(url)
    by_name = {
        "rank_up": lambda rank: rank.is_up,
        "rank_step_seconds": lambda rank: rank.step_s,
        "rank_lag_steps": lambda rank: rank.lag_steps,
        "rank_restarts_total": lambda rank: rank.restarts,
    }
    for name, value in by_name.items():
        assert found[name] == [
            ({"model_name": "demo", "engine": "0", "rank": str(rank.rank), "device": rank.device}, float(value(rank)))
            for rank in RANKS
        ]
    held = {(labels["rank"], labels["part"]): value for labels, value in found["rank_memory_bytes"]}
    for rank in RANKS:
        memory, parts = rank.memory, ("weights", "kv", "activations", "other")
        by_part = (memory.weights_bytes, memory.kv_bytes, memory.activation_bytes, memory.other_bytes)
        assert tuple(held[str(rank.rank), part] for part in parts) == by_part
        assert sum(by_part) == memory.held_bytes
    assert [(labels["stage"], value) for labels, value in found["pipeline_bubble_ratio"]] == [("0", 0.25), ("1", 0.75)]
    assert found.keys() == {*by_name, "rank_memory_bytes", "pipeline_bubble_ratio"}


def test_a_model_without_ranks_has_no_metrics_rows_or_tiles_of_ranks(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = httpx.get(url + "/metrics").text
    assert "localllm:rank" not in text
    assert "bubble" not in text
    page = httpx.get(url + "/dashboard").text
    assert '<section id="tile-ranks" hidden></section>' in page
    assert "Rank 0" not in page
    assert main(["top", "--once", "--url", url]) == 0
    assert "rank" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("stages", "busy", "bubbles"),
    [
        ((0, 0, 1, 1), (0.75, 0.5, None, 0.25), {0: 0.25, 1: 0.75}),  # the busiest rank of a stage counts
        ((0, 0), (0.75, 0.5), {}),  # no pipeline
        ((0, 1), (None, 1.0), {1: 0.0}),  # unknown
        ((), (), {}),
    ],
)
def test_a_stage_is_idle_when_its_busiest_rank_is(
    stages: tuple[int, ...], busy: tuple[float | None, ...], bubbles: dict[int, float]
) -> None:
    members = zip(stages, busy, strict=True)
    made = tuple(RankStats(n, stage, 0, "cpu", busy_ratio=ratio) for n, (stage, ratio) in enumerate(members))
    assert RunnerStats(ranks=made).bubble_ratios() == bubbles


def test_tiles_are_in_the_order_of_stages_and_a_lost_rank_says_why() -> None:
    view = rank_tiles(RunnerStats(ranks=RANKS))
    assert [[tile.number for tile in stage.ranks] for stage in view.stages] == [[0, 1], [2, 3]]
    assert (view.num_ranks, view.num_lost) == (4, 1)
    first, last = view.stages[0].ranks[0], view.stages[1].ranks[1]
    assert first.held == "19.8 GiB of 24.0 GiB"
    assert [round(part.width * 24 / 100, 2) for part in first.memory] == [12, 7, 0.5, 0.25]
    assert {fact.name: fact.value for fact in last.facts} | {"Step": "12 ms", "Lag": "9 steps"} == {
        "Step": "12 ms", "Lag": "9 steps", "Computing": "25%",
    }  # fmt: skip
    unknown = rank_tiles(RunnerStats(ranks=(RankStats(0, 0, 0, "cpu"),))).stages[0].ranks[0]
    assert (unknown.held, [fact.name for fact in unknown.facts]) == ("0 B", ["Step", "Lag"])


def test_the_page_shows_last_words_as_text_and_the_stream_sends_a_loss(url: str, client: StubClient) -> None:
    page = httpx.get(url + "/dashboard").text
    assert page.index('id="rank-2"') < page.index('class="rank rank--lost" id="rank-3"')
    assert page.count("signal 9 &lt;b&gt;(SIGKILL)&lt;/b&gt;") == 2
    assert "Stage 1, idle for 75 % of the time" in page
    client.ranks = RANKS[:2]  # one stage, nobody lost
    with httpx.stream("GET", url + "/live/dashboard", timeout=5) as stream:
        lines = stream.iter_lines()
        assert any('hx-target="#tile-ranks"' in line for line in (next(lines) for _ in range(2000)))
        client.ranks = (RANKS[0], replace(RANKS[1], is_up=False, last_words="Out of memory."))
        assert any("Out of memory." in line for line in (next(lines) for _ in range(2000)))
    page = httpx.get(url + "/dashboard").text
    assert "Stage 0" not in page
    assert '<h3 class="rank__title" id="rank-1-title">' in page  # no level of headings is left out


def test_top_shows_the_ranks_as_lines_as_json_and_on_the_screen(
    url: str, client: StubClient, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", "--once", "--url", url]) == 0
    line, restarted, lost = capsys.readouterr().out.splitlines()
    assert line.endswith(" ranks_up=3/4")
    assert "rank 1 (cuda:1) was restarted. The process was killed" in restarted
    assert "rank 3 (cuda:3) is lost. The process was killed" in lost
    assert main(["top", "--once", "--json", "--url", url]) == 0
    runner = RunnerStats(*json.loads(capsys.readouterr().out)["models"][0]["stats"]["runner"])
    assert [rank["is_up"] for rank in runner.ranks] == [True, True, True, False]
    stats = StatsPoller(parse(["top", "--url", url])).poll()
    assert stats.models[0].stats is not None
    assert stats.models[0].stats.runner.ranks == RANKS
    screen = Console(width=80, record=True, file=io.StringIO())
    screen.print(draw(stats))
    rows = [row.split() for row in screen.export_text().splitlines()]
    assert ["RANK", "DEVICE", "STATE", "WEIGHTS", "KV", "OTHER", "STEP", "LAG", "IDLE"] in rows
    assert ["3", "cuda:3", "LOST", "6.0", "GiB", "3.0", "GiB", "512", "MiB", "12", "ms", "9", "75%"] in rows


def test_the_dashboard_asks_for_the_memory_of_its_ranks(
    url: str, client: StubClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Sequence[int]] = []

    async def read(self: machine.MachineMonitor, rank_pids: Sequence[int]) -> machine.MachineReading:
        asked.append(rank_pids)
        return machine.MachineReading(0.1, 8, 1, 2, 1)

    monkeypatch.setattr(machine.MachineMonitor, "read", read)
    client.ranks = (replace(RANKS[0], pid=7), replace(RANKS[1], pid=0), replace(RANKS[2], pid=9))
    httpx.get(url + "/dashboard")
    assert asked == [[7, 9]]


def test_memory_of_the_ranks_counts_as_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(pid=0, usedGpuMemory=5)
    nvml = SimpleNamespace(
        NVMLError=Exception, NVML_CLOCK_SM=0, NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None, nvmlDeviceGetCount=lambda: 1, nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=9, total=24),
        nvmlDeviceGetName=lambda handle: "A", nvmlDeviceGetPowerUsage=lambda handle: 1000,
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [gpu],
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=50),
        nvmlDeviceGetClockInfo=lambda handle, clock: 1, nvmlDeviceGetTemperature=lambda handle, sensor: 60,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    gpu.pid, resident = child.pid, machine._resident_bytes(child.pid)
    alone = asyncio.run(machine.MachineMonitor().read())
    with_rank = asyncio.run(machine.MachineMonitor().read([child.pid]))
    child.communicate(b"\n")
    assert (alone.gpus[0].process_bytes, with_rank.gpus[0].process_bytes) == (0, 5)
    assert resident > 0
    assert machine._resident_bytes(child.pid) == 0
    monkeypatch.setattr(machine, "_resident_bytes", lambda pid: 10**15)
    assert asyncio.run(machine.MachineMonitor().read([child.pid])).process_bytes > 10**15
