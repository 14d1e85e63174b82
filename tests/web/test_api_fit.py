"""GET /localllm/v1/fit: where a model would run, and how fast, before it is loaded."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from localllm.models.fit.far import DiskPlan, FarPlan, TableBytes
from localllm.models.fit.speed import PlanSpeeds
from localllm.web.api.own.running import _with_stats
from localllm.web.pages.dashboard.views import _far_use, model_facts
from tests.tiny import make_tiny_model
from tests.web.live_server import LiveServer, PacedRunner, fake_model, settings


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with LiveServer(fake_model(tmp_path_factory.mktemp("tiny"), PacedRunner()), settings(ui=False)) as live:
        yield live


def test_a_program_learns_the_place_and_the_speeds(server: LiveServer) -> None:
    answer = httpx.get(server.url + "/localllm/v1/fit", params={"model": "demo"}, timeout=60)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert (found["model"], found["download_bytes"]) == ("demo", 0)
    first = found["devices"][0]
    assert (first["device"], first["is_chosen"], first["verdict"]) == ("cpu", True, "fits")
    assert first["plan"]["far"] is None
    least, most = first["predicted"]["decode"]
    assert 0 < least < first["predicted"]["streams"]["1"] < most
    assert set(first["predicted"]["first_token_s"]) <= {"1000", "8000"}
    short = httpx.get(server.url + "/localllm/v1/fit", params={"model": "demo", "max_model_len": 256}, timeout=60)
    assert short.json()["devices"][0]["max_model_len"] == 256


@pytest.mark.parametrize(
    ("asked", "status", "said"),
    [
        ({}, 400, "model"),
        ({"model": "no-such-model"}, 404, "no-such-model"),
        ({"model": "demo", "n_cpu_moe": "some"}, 400, "n_cpu_moe"),
        ({"model": "demo", "max_model_len": 0}, 400, "max_model_len"),
    ],
)
def test_what_is_wrong_is_refused_by_name(
    asked: dict[str, str | int], status: int, said: str, server: LiveServer
) -> None:
    answer = httpx.get(server.url + "/localllm/v1/fit", params=asked, timeout=60)
    assert (answer.status_code, said in answer.text) == (status, True), answer.text


def test_a_path_of_the_server_is_not_read(server: LiveServer, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, "llama")
    answer = httpx.get(server.url + "/localllm/v1/fit", params={"model": str(path)}, timeout=60)
    assert answer.status_code in (400, 404), answer.text


def test_a_loaded_models_entry_has_its_experts_in_ram_and_both_speeds(server: LiveServer) -> None:
    def entry() -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(server.url + "/localllm/v1/models/stats").json()["data"][0]
        return found

    found = entry()
    assert (found["far"], found["predicted"], found["measured_tokens_per_s"]) == (None, None, None)
    speeds = PlanSpeeds((24.0, 34.0), {1: 29.0, 8: 5.5}, 250.0, {1000: 4.0}, "why")
    stats = replace(server.model.client.stats(), lone_tokens_per_s=27.5)
    far = FarPlan((1, 2), 4, 100, 110, 5, 0, DiskPlan(1000, 110), tables=(TableBytes("embedding", 10),))
    served = replace(server.model, plan=replace(server.model.plan, far=far), speed=speeds)
    status = server.manager.statuses()[0]
    made = msgspec.to_builtins(_with_stats(status, served, stats), str_keys=True)
    assert made["far"] == {"layers": [1, 2], "ram_bytes": 110, "disk_bytes": 1000, "tables": {"embedding": 10}}
    assert list(made["predicted"]["decode"]) == [24.0, 34.0]
    assert made["predicted"]["streams"] == {"1": 29.0, "8": 5.5}
    assert made["measured_tokens_per_s"] == 27.5


def test_the_dashboard_shows_ram_and_both_speeds(server: LiveServer) -> None:
    speeds = PlanSpeeds((24.0, 34.0), {1: 29.0}, None, {}, "A token reads 2 GB.", 77e9)
    plan = replace(server.model.plan, far=FarPlan((1, 2), 4, 100, 2**30, 5, 0), kv_ram_bytes=2**29)
    served = replace(server.model, plan=plan, speed=speeds)
    shown = model_facts(served, 27.5)
    assert [part.name for part in shown.ram] == ["Experts", "KV blocks at most", "Rest of RAM"]
    facts = {fact.name: fact for fact in shown.facts}
    speed = facts["Speed of one answer"]
    assert (speed.value, speed.note) == ("measured: 28 tokens/s", "predicted: 24 to 34 tokens/s")
    before = {fact.name: fact for fact in model_facts(served).facts}["Speed of one answer"]
    assert (before.value, before.note) == ("predicted: 24 to 34 tokens/s", "A token reads 2 GB.")
    assert model_facts(server.model).ram == ()
    stats = server.model.client.stats()
    assert _far_use(stats, None, server.model) is None
    before = replace(stats, runner=stats.runner._replace(far_s=1.0, far_read_bytes=10**9))
    now = replace(stats, taken_s=stats.taken_s + 10, uptime_s=stats.uptime_s + 10)
    now = replace(now, runner=stats.runner._replace(far_s=7.1, far_read_bytes=306 * 10**9))
    use = _far_use(now, before, served)
    assert use is not None
    assert use.share == pytest.approx(0.61)
    assert use.words == "computed in 61% of the last minute, reading 50 of 77 GB/s"
    idle = _far_use(replace(now, runner=before.runner), before, served)
    assert idle is not None
    assert idle.words == "computed in 0% of the last minute"
    on_disk = replace(served, plan=replace(plan, far=replace(plan.far, disk=DiskPlan(1000, 110))))
    use = _far_use(now, before, on_disk)
    assert use is not None
    assert use.read_rate is None  # reads of the disk are in the same time
    tables = FarPlan((), 0, 100, 2**30, 0, 0, tables=(TableBytes("embedding", 2**30),))
    served = replace(served, plan=replace(plan, far=tables))
    assert _far_use(now, before, served) is None
    assert [part.name for part in model_facts(served).ram] == ["Lookup tables", "KV blocks at most", "Rest of RAM"]
