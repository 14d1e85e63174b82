"""/metrics against the snapshot that it is made from, read by Prometheus' own parser."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from localllm.web.metrics import COUNTERS, GAUGES, HISTOGRAMS, PREFIXES
from tests.web.live_server import LiveServer


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
    for prefix in PREFIXES:
        yield from (prefix + name for name, *_ in GAUGES)
        yield from (f"{prefix}{name}_total" for name, *_ in COUNTERS)
        yield from (prefix + name + end for name, *_ in HISTOGRAMS for end in ("_bucket", "_sum", "_count"))
        yield from (f"{prefix}request_success_total", f"{prefix}cache_config_info")


def test_every_metric_is_there_under_both_names(server: LiveServer) -> None:
    found = samples(server)
    assert set(exposed_names()) <= found.keys()
    for name in exposed_names():
        if name.startswith("vllm:"):
            ours = found[name.replace("vllm:", "localllm:")]
            assert [(s.labels, s.value) for s in found[name]] == [(s.labels, s.value) for s in ours]
            assert found[name][0].labels["model_name"] == "tiny"


def test_numbers_are_those_of_the_snapshot(server: LiveServer) -> None:
    server.post("/v1/completions", {"prompt": "count me", "max_tokens": 5})
    stats = server.wait_idle()
    found = samples(server)

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
