"""Spans as a collector receives them, over HTTP; without the flag nothing of OpenTelemetry is imported."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from localllm.config.settings import ServerConfig
from localllm.errors import ConfigError
from localllm.machine.install_kind import how_to_install
from localllm.web.app import bind
from tests.web.harness import open_request
from tests.web.live_server import LiveServer, PacedRunner, fake_model, settings, wait_until

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
proto = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector:
    """Keeps the spans that it is sent."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.paths: set[str] = set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["content-length"]))
                collector.paths.add(self.path)
                for resource in proto.ExportTraceServiceRequest.FromString(raw).resource_spans:
                    for scope in resource.scope_spans:
                        collector.spans.extend(scope.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args: object) -> None:
                """Nothing."""

        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    collector = Collector()
    thread = threading.Thread(target=collector.http.serve_forever, args=(0.02,))
    thread.start()
    yield collector
    collector.http.shutdown()
    thread.join()
    collector.http.server_close()


def facts(span: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in span.attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        found[each.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return found


def test_each_request_is_one_span_with_its_parent_and_what_came_of_it(collector: Collector, tmp_path: Path) -> None:
    runner = PacedRunner()
    asked = settings(otlp_traces_endpoint=collector.url, api_key="k", allowed_origins=("https://a.example",))
    with LiveServer(fake_model(tmp_path, runner), asked) as server:
        key = {"x-api-key": "k"}
        body = {"model": "org/tiny", "prompt": [1, 2, 3], "max_tokens": 5, "n": 2}
        server.post("/v1/completions", body | {"stream": True}, headers=key | {"traceparent": PARENT})
        server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "my secret"}]}, headers=key)
        server.post("/v1/completions", {"prompt": []}, headers=key)
        server.get("/v1/models")
        server.get("/health")
        server.get("/metrics", headers=key)
        runner.step_s = 0.02
        sock = open_request(server, {"prompt": "a", "max_tokens": 400}, headers="x-api-key: k\r\n")
        wait_until(lambda: server.stats().num_running == 1)
        sock.close()
    assert collector.paths == {"/v1/traces"}
    stream, chat, refused, locked, left = sorted(collector.spans, key=lambda span: span.start_time_unix_nano)
    assert stream.trace_id.hex() == PARENT.split("-")[1]
    assert stream.parent_span_id.hex() == PARENT.split("-")[2]
    assert stream.name == "POST /v1/completions"
    told = facts(stream)
    assert 0 < told.pop("gen_ai.latency.time_to_first_token") < 5
    assert 0 <= told.pop("gen_ai.latency.time_in_queue") < 5
    assert told.pop("localllm.request_id")
    assert told == {
        "http.request.method": "POST", "http.route": "/v1/completions", "http.response.status_code": 200,
        "gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "localllm",
        "gen_ai.request.model": "org/tiny", "gen_ai.response.model": "tiny", "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 10, "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ["length", "length"],
    }  # fmt: skip
    assert facts(chat)["gen_ai.operation.name"] == "chat"
    assert not chat.parent_span_id
    assert "secret" not in str(chat)
    assert facts(refused)["http.response.status_code"] == 400
    assert facts(locked)["http.response.status_code"] == 401
    assert "http.response.status_code" not in facts(left) or facts(left)["http.response.status_code"] == 499
    assert facts(left)["gen_ai.response.finish_reasons"] == []


def test_a_collector_that_is_gone_disturbs_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setattr("localllm.web.tracing.LAST_SPANS_S", 0.1)
    asked = settings(otlp_traces_endpoint="http://127.0.0.1:9")
    before = set(threading.enumerate())
    with LiveServer(fake_model(tmp_path, PacedRunner()), asked) as server:
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 2}).status_code == 200
    wait_until(lambda: not set(threading.enumerate()) - before)  # it still tries, beside the tests that come next


def test_without_opentelemetry_the_flag_is_refused_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry") or name == "localllm.web.tracing"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError) as caught:
        bind(ServerConfig(port=0, otlp_traces_endpoint="http://h:4318"))
    assert caught.value.hint == how_to_install("localllm[otel]")


def test_without_the_flag_nothing_is_imported() -> None:
    code = "import sys, localllm.web.app; print([m for m in sys.modules if m.startswith('opentelemetry')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
