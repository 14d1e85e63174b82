"""The dashboard's tiles from made-up snapshots, and its pages and files from a live server."""

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import fields, replace

import httpx
import pytest

from localllm.engine.recorder import RECENT_STEPS, StatsRecorder
from localllm.engine.stats import EngineStats, RequestTimeline, StepComposition
from localllm.engine.step import StepTimings
from localllm.web.pages.dashboard.machine import GPUReading, MachineReading, machine_use
from localllm.web.pages.dashboard.plots import (
    FIVE_MINUTES,
    HOUR,
    MINUTE,
    STEPS,
    STEPS_HEIGHT,
    Span,
    sparkline,
    step_columns,
)
from localllm.web.pages.dashboard.request_views import finished_requests
from localllm.web.pages.dashboard.views import steps
from localllm.web.pages.frame.sampler import Sampler, StatsSample
from tests.web.live_server import LiveServer, settings
from tests.web.pages_stub import StubClient, StubModel

LINE = RequestTimeline("=cmd()", "finished", 12, 4, 9, 0, 1, 100.0, 100.5, 101.0, 103.0, "stop")


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    client = StubClient()
    client.finished = [LINE, *(replace(LINE, request_id=f"chat-{n}") for n in range(9))]
    client.steps = 100
    with LiveServer(StubModel(client), settings(ui=True)) as live:  # type: ignore[arg-type]
        yield live


def read(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_a_step_that_came_back_keeps_what_it_held_and_gets_its_times() -> None:
    recorder = StatsRecorder()
    for step_id in range(4):  # two are in flight at a time, and step 1 fails
        recorder.on_step(StepComposition(step_id, decode_tokens=step_id), 0)
        if step_id in (1, 3):
            recorder.on_settled(step_id - 1, 1, StepTimings(float(step_id)), 0.0)
    assert [(step.step_id, step.decode_tokens, step.forward_s) for step in recorder.steps] == [(0, 0, 1.0), (2, 2, 3.0)]
    recorder.on_settled(99, 1, StepTimings(), 0.0)
    for step_id in range(100, 300):
        recorder.on_step(StepComposition(step_id), 0)
        recorder.on_settled(step_id, 1, StepTimings(), 0.0)
    assert [step.step_id for step in recorder.steps] == list(range(300 - RECENT_STEPS, 300))


@pytest.mark.parametrize("held", [[], [(0, 0)], [(512, 3)], [(n % 7, n) for n in range(200)]])
def test_columns_stay_in_their_box_and_prefill_stands_on_decode(held: list[tuple[int, int]]) -> None:
    columns = step_columns(held)
    assert len(columns) == min(len(held), STEPS)
    for column in columns:
        assert 0 <= column.x < 120
        assert column.decode_y + column.decode_height == pytest.approx(STEPS_HEIGHT, abs=0.02)
        assert column.prefill_y + column.prefill_height == pytest.approx(column.decode_y, abs=0.02)
        assert column.prefill_y >= -0.02
    if any(map(sum, held)):
        assert min(column.prefill_y for column in columns) == pytest.approx(0, abs=0.02)


def test_the_plot_says_in_text_what_it_draws() -> None:
    recent = [StepComposition(n, 3 * n, n, 1, 2, 512, 0.001, 0.002) for n in range(30)]
    view = steps(recent, 30)
    assert (view.most_tokens, len(view.columns), len(view.rows)) == (116, 30, 10)
    assert (view.rows[0].step_id, view.rows[0].requests) == (29, 3)
    assert view.rows[0].total_s == pytest.approx(0.003)


@pytest.mark.parametrize("span", [MINUTE, FIVE_MINUTES, HOUR])
@pytest.mark.parametrize("every_s", [0.5, 5.0])
def test_a_sparkline_shows_its_span_and_no_more(span: Span, every_s: float) -> None:
    """Two hours of an engine that generates ever faster: the left edge is where the span begins."""
    samples = [(1e9 + every_s * n, every_s * n) for n in range(round(7200 / every_s) + 1)]
    plot = sparkline("Generated", samples, lambda value: f"{value:.0f}", span=span)
    points = [tuple(map(float, point.split(","))) for line in plot.lines for point in line.split()]
    assert plot.span == span.title
    assert 0 <= points[0][0] < 3
    assert points[-1][0] == 120
    assert len(points) <= 242
    assert abs(int(plot.low) - (7200 - span.seconds)) <= 20
    assert len(plot.samples) <= 10
    assert len(plot.lines) == (1 if every_s < span.gap_s else len(points))
    if span is HOUR:
        assert plot.samples[-1][0].endswith(" min")


def test_buckets_hold_the_mean_of_what_was_in_them() -> None:
    """Every other five seconds at full speed: an hour shows half of it, and not whatever came last."""
    samples = [(999_999_990 + 5.0 * n, 100.0 * (n % 2)) for n in range(720)]
    plot = sparkline("Generated", samples, lambda value: f"{value:.0f}", span=HOUR)
    assert (int(plot.low), int(plot.high)) == (33, 67)


def test_the_past_is_kept_whether_or_not_somebody_looks() -> None:
    client, past = StubClient(), list[EngineStats | None]()
    stats = replace(client.stats(), taken_s=1000.0, uptime_s=10.0)
    later = {"taken_s": 1005.0, "uptime_s": 15.0, "num_steps": stats.num_steps + 9}
    past += [
        stats,
        replace(
            stats, **later, generation_tokens=stats.generation_tokens + 50, prompt_tokens=stats.prompt_tokens + 500
        ),
        None,  # the model slept
        replace(stats, taken_s=1020.0, uptime_s=30.0),
        replace(stats, taken_s=1025.0, uptime_s=1.0, generation_tokens=10**9),  # and this is another engine
    ]
    sampler = Sampler(lambda: past.pop(0))
    for _ in range(len(past)):
        sampler.tick()
    assert [(each.taken_s, each.decode_tokens_per_s, each.prefill_tokens_per_s) for each in sampler.hour] == [
        (1005.0, 10.0, 100.0)
    ]


def test_gpus_stand_side_by_side_with_whose_memory_is_whose() -> None:
    gpus = (GPUReading("A", 0.5, 10, 24, 7, 2520, 64, 380.0), GPUReading("B", 0.0, 3, 24))
    view = machine_use(MachineReading(0.1, 8, 1, 2, 1, gpus))
    assert [gpu.name for gpu in view.gpus] == ["A", "B"]
    assert [round(part.width * 24 / 100) for part in view.gpus[0].memory] == [7, 3, 14]
    assert [fact.name for fact in view.gpus[0].facts] == ["Clock", "Temperature", "Power"]
    assert view.gpus[1].facts == ()


def test_what_is_not_listed_is_counted() -> None:
    view = finished_requests([LINE] * 11)
    assert (len(view.rows), view.hidden) == (8, 3)


def test_the_plots_show_as_far_back_as_asked(server: LiveServer) -> None:
    page = httpx.get(server.url + "/dashboard?last=1h").text
    assert "/live/dashboard?last=1h" in page
    assert 'href="/dashboard?last=1h" aria-current="page"' in page
    assert "last 1 h: now" in page
    assert "last 1 min: now" in httpx.get(server.url + "/dashboard").text
    refused = httpx.get(server.url + "/dashboard?last=year")
    assert (refused.status_code, "Known: 1m, 5m, 1h." in refused.text) == (400, True)
    with httpx.stream("GET", server.url + "/live/dashboard?last=5m", timeout=5) as stream:
        lines = stream.iter_lines()
        assert any("last 5 min: now" in line for line in (next(lines) for _ in range(400)))


def test_each_request_has_a_page_and_all_have_one(server: LiveServer) -> None:
    page = httpx.get(server.url + "/dashboard/requests").text
    assert "chat-8" in page
    one = httpx.get(server.url + "/dashboard/requests/chat-3")
    assert "First token" in one.text
    assert ">3 s<" in one.text.replace("3.0 s", "3 s")
    gone = httpx.get(server.url + "/dashboard/requests/nobody")
    assert (gone.status_code, "There is no request nobody" in gone.text) == (404, True)


def test_files_hold_every_field_and_no_formula(server: LiveServer) -> None:
    requests = read(httpx.get(server.url + "/dashboard/requests.csv").text)
    assert set(requests[0]) == {field.name for field in fields(RequestTimeline)}
    assert requests[0]["request_id"] == "'=cmd()"
    assert float(requests[0]["finished_s"]) == 103.0
    held = read(httpx.get(server.url + "/dashboard/steps.csv").text)
    assert [int(row["step_id"]) for row in held] == list(range(40, 100))
    assert "decode_tokens_per_s" in read(httpx.get(server.url + "/dashboard/minute.csv").text)[0]
    hour = httpx.get(server.url + "/dashboard/hour.csv").text
    assert hour.splitlines()[0] == ",".join(field.name for field in fields(StatsSample))
    stats = json.loads(httpx.get(server.url + "/dashboard/stats.json").text)
    assert set(stats) == {field.name for field in fields(EngineStats)}
