"""/metrics against the snapshot that it is made from, read by Prometheus' own parser."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from localllm.config.resolve import resolve
from localllm.config.settings import ServerConfig
from localllm.engine.step import KernelFallBack
from localllm.errors import ConfigError
from localllm.web.metrics import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    LLAMACPP_COUNTERS,
    LLAMACPP_GAUGES,
    OWN,
    VLLM,
)
from tests.web.live_server import LiveServer, PacedRunner, fake_model


@pytest.fixture
def aliased(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> LiveServer:
    """The same server, as with --metrics-aliases vllm,llamacpp."""
    asked = server.server.app.state.settings
    told = replace(asked, server=replace(asked.server, metrics_aliases=("vllm", "llamacpp")))
    monkeypatch.setattr(server.server.app.state, "settings", told)
    return server


def samples(server: LiveServer) -> dict[str, list[Sample]]:
    response = server.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    found: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def exposed_names() -> Iterator[str]:
    for prefix in (OWN, VLLM):
        yield from (prefix + name for name, *_ in GAUGES)
        yield from (f"{prefix}{name}_total" for name, *_ in COUNTERS)
        yield from (prefix + name + end for name, *_ in HISTOGRAMS for end in ("_bucket", "_sum", "_count"))
        yield from (f"{prefix}{name}" for name in ("request_success_total", "cache_config_info", "engine_sleep_state"))


def test_every_metric_has_one_name_unless_others_are_asked_for(server: LiveServer) -> None:
    found = samples(server)
    prefixes = {name.partition(":")[0] for name in found}
    assert prefixes == {"localllm"}
    assert {name for name in exposed_names() if name.startswith(OWN)} <= found.keys()


@pytest.mark.parametrize(("given", "told"), [("vllm", {"vllm"}), ("llamacpp", {"llamacpp"}), ("", set())])
def test_aliases_are_told_one_by_one(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, given: str, told: set[str]
) -> None:
    asked = server.server.app.state.settings
    settings = replace(asked, server=resolve({"metrics_aliases": given}, {}).server)
    monkeypatch.setattr(server.server.app.state, "settings", settings)
    assert {name.partition(":")[0] for name in samples(server)} == {"localllm", *told}
    with pytest.raises(ConfigError, match="--metrics-aliases tgi is out of range"):
        ServerConfig(metrics_aliases=("vllm", "tgi"))


def test_every_metric_is_there_under_both_names(aliased: LiveServer) -> None:
    found = samples(aliased)
    assert set(exposed_names()) <= found.keys()
    for name in exposed_names():
        if name.startswith("vllm:"):
            ours = found[name.replace("vllm:", "localllm:")]
            assert [(s.labels, s.value) for s in found[name]] == [(s.labels, s.value) for s in ours]
            assert found[name][0].labels["model_name"] == "tiny"


def test_numbers_are_those_of_the_snapshot(aliased: LiveServer) -> None:
    aliased.post("/v1/completions", {"prompt": "count me", "max_tokens": 5})
    stats = aliased.wait_idle()
    found = samples(aliased)

    def value(name: str) -> float:
        [sample] = found[name]
        return sample.value

    assert value("localllm:generation_tokens_total") == stats.generation_tokens
    assert value("localllm:prompt_tokens_total") == stats.prompt_tokens
    assert value("vllm:kv_cache_usage_perc") == stats.kv_usage == 0
    assert value("localllm:kv_blocks_total") == stats.total_blocks
    assert value("vllm:time_to_first_token_seconds_count") == stats.ttft.count
    reasons = {s.labels["finished_reason"]: s.value for s in found["vllm:request_success_total"]}
    assert reasons["length"] == stats.finished["length"]


def test_buckets_are_cumulative(server: LiveServer) -> None:
    server.post("/v1/completions", {"prompt": "count me", "max_tokens": 5})
    server.wait_idle()
    found = samples(server)
    buckets = [s.value for s in found["localllm:e2e_request_latency_seconds_bucket"]]
    assert buckets == sorted(buckets)
    assert buckets[-1] == found["localllm:e2e_request_latency_seconds_count"][0].value > 0


def test_llama_cpp_names_tell_the_same(aliased: LiveServer) -> None:
    aliased.post("/v1/completions", {"prompt": "count me", "max_tokens": 5})
    stats = aliased.wait_idle()
    found = samples(aliased)
    assert {f"{name}_total" for name, *_ in LLAMACPP_COUNTERS} | {name for name, *_ in LLAMACPP_GAUGES} <= found.keys()
    assert found["llamacpp:tokens_predicted_total"][0].value == stats.generation_tokens
    assert found["llamacpp:n_busy_slots_per_decode"][0].value == stats.scheduled_requests / stats.num_steps > 0


def test_the_sleep_state_is_that_of_the_model(aliased: LiveServer) -> None:
    def states() -> dict[str, float]:
        return {s.labels["sleep_state"]: s.value for s in samples(aliased)["vllm:engine_sleep_state"]}

    assert states() == {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aliased.manager.entries[0], "state", "sleeping")
        patch.setattr(aliased.manager.loads, "require_working", lambda: None)
        assert states() == {"awake": 0, "weights_offloaded": 1, "discard_all": 0}


def test_a_kernel_that_fell_back_and_graphs_that_failed_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = PacedRunner()
    fallen = KernelFallBack("decode attention", "pointers", "TMA: the error was 0.7")
    told = runner.stats()._replace(fall_backs=(fallen,), failed_graphs=3)
    monkeypatch.setattr(runner, "stats", lambda: told)
    with LiveServer(fake_model(tmp_path, runner)) as server:
        server.post("/v1/completions", {"prompt": "a", "max_tokens": 2})
        found = samples(server)
    (sample,) = found["localllm:kernel_fallback"]
    assert (sample.labels["kernel"], sample.labels["variant"], sample.value) == ("decode attention", "pointers", 1)
    assert [each.value for each in found["localllm:failed_graphs"]] == [3]


def test_answers_are_counted_by_route_and_status(server: LiveServer) -> None:
    def counts() -> dict[tuple[str, ...], float]:
        return {tuple(s.labels.values()): s.value for s in samples(server)["localllm:http_requests_total"]}

    before = counts()
    for path in ("/v1/models/tiny", "/v1/models/org/tiny", "/v1/models/none", "/secret/path"):
        server.get(path)
    new = {key: value - before.get(key, 0) for key, value in counts().items() if value != before.get(key)}
    assert {key: value for key, value in new.items() if key[1] != "/metrics"} == {
        ("GET", "/v1/models/{name}", "200"): 2, ("GET", "/v1/models/{name}", "404"): 1, ("GET", "other", "404"): 1,
    }  # fmt: skip


BOARD = json.loads((Path(__file__).parents[2] / "docs" / "grafana" / "localllm.json").read_text())


def test_every_query_of_the_board_names_metrics_and_labels_that_exist(server: LiveServer) -> None:
    server.post("/v1/completions", {"prompt": "count me", "max_tokens": 5})
    server.wait_idle()
    found = samples(server)
    queries = [target["expr"] for panel in BOARD["panels"] for target in panel.get("targets", ())]
    queries += [variable["query"]["query"] for variable in BOARD["templating"]["list"] if variable["type"] == "query"]
    assert len(queries) > 15
    for query in queries:
        named = re.findall(r"(\w+:\w+)(?:\{([^}]*)\})?", query)
        assert named, query
        for name, matchers in named:
            assert name in found, f"{name} in {query}"
            asked = set(re.findall(r"(\w+)\s*=", matchers))
            assert asked <= found[name][0].labels.keys(), query
        of_any = {label for name, _ in named for label in found[name][0].labels}
        for grouping in re.findall(r"by \(([^)]*)\)", query):
            assert {label.strip() for label in grouping.split(",")} <= of_any, query


def test_the_board_can_be_imported() -> None:
    """What Grafana's import asks for: a data source to choose, an id of its own for each panel, a place for each."""
    assert [each["pluginId"] for each in BOARD["__inputs"]] == ["prometheus"]
    assert {"title", "uid", "schemaVersion", "panels", "templating", "time"} <= BOARD.keys()
    panels = BOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["type"] == "row" or panel["datasource"]["uid"] == "${DS_PROMETHEUS}"
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells
