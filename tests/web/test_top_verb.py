"""`localllm top`: its figures are the engine's, and it says when the server is gone and when it is back."""

import json
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from localllm.cli import main, parse, top_screen
from localllm.cli import top as top_module
from localllm.cli.server_stats import ServerStats, StatsPoller
from tests.web.live_server import LiveServer, PacedRunner, fake_model, settings, wait_until
from tests.web.terminal import Terminal

STATS = "/localllm/v1/models/stats"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def own_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)


def ask(server: LiveServer, **fields: Any) -> httpx.Response:
    return server.post("/v1/completions", {"model": "tiny", "prompt": "hello", "max_tokens": 8, **fields})


def test_a_snapshot_goes_over_the_wire_and_back_unchanged(server: LiveServer) -> None:
    ask(server)
    server.wait_idle()
    (model,) = StatsPoller(parse(["top", "--url", server.url])).poll().models
    now = server.stats()
    assert model.stats is not None
    assert (model.stats.ttft, model.stats.requests, model.stats.finished) == (now.ttft, now.requests, now.finished)
    assert (model.stats.num_steps, model.stats.runner) == (now.num_steps, now.runner)


def test_live_requests_are_listed_up_to_a_bound(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.web.api.own.running.MAX_REQUESTS", 0)
    assert server.get(STATS).json()["data"][0]["stats"]["requests"] == []


def test_one_look_as_lines_and_as_json(server: LiveServer, capsys: Capture) -> None:
    ask(server)
    server.wait_idle()
    assert main(["top", "--once", "--url", server.url]) == 0
    line = capsys.readouterr().out
    assert " tiny ready running=0 waiting=0 generation=" in line
    assert " ttft_p50=" in line
    assert main(["top", "--once", "--json", "--url", server.url]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["url"], told["problem"]) == (server.url, None)
    assert told["models"][0]["stats"]["generation_tokens"] == server.stats().generation_tokens
    assert told["models"][0]["latency_s"]["ttft"]["p95"] > 0


def test_quantiles_are_those_of_the_last_minute(server: LiveServer, runner: PacedRunner) -> None:
    ask(server)
    poller = StatsPoller(parse(["top", "--url", server.url]))
    server.wait_idle()
    poller.poll()
    runner.step_s = 0.2
    ask(server, max_tokens=1)
    server.wait_idle()
    p50, _ = poller.poll_or_last().models[0].latency_s["ttft"]
    assert p50 is not None
    assert p50 > 0.1  # the quick ones before count no longer


def test_a_server_that_is_loading_or_not_there(capsys: Capture) -> None:
    with LiveServer(None) as loading:
        assert main(["top", "--once", "--url", loading.url]) == 0
        assert "tiny loading" in capsys.readouterr().out
    assert main(["top", "--url", loading.url]) == 1
    assert f"No localllm answers at {loading.url}." in capsys.readouterr().err


def test_lines_tell_when_the_server_goes_and_when_it_is_back(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, tmp_path: Path
) -> None:
    """At each look the test does something to the server; the last look is Ctrl-C."""
    first = LiveServer(None)
    looks = iter(["go", "back", "leave"])
    opened = [first]

    def look(seconds: float) -> None:
        step = next(looks)
        if step == "leave":
            raise KeyboardInterrupt
        if step == "go":
            opened.pop().__exit__(None, None, None)
        else:
            port = int(first.url.rsplit(":", 1)[1])
            opened.append(LiveServer(fake_model(tmp_path, PacedRunner()), settings(port=port)).__enter__())

    clock = SimpleNamespace(sleep=look, monotonic=time.monotonic, time=time.time, strftime=time.strftime)
    monkeypatch.setattr(top_module, "time", clock)
    first.__enter__()
    try:
        assert main(["top", "--url", first.url]) == 0
    finally:
        for each in opened:
            each.__exit__(None, None, None)
    lines = capsys.readouterr().out.splitlines()
    assert "tiny loading" in lines[0]
    assert "No localllm answers" in lines[1]
    assert "trying again" in lines[1]
    assert "tiny ready" in lines[2]


def test_the_screen_shows_load_and_leaves_the_terminal_as_it_was(
    server: LiveServer, runner: PacedRunner, terminal: Callable[..., Terminal]
) -> None:
    runner.step_s = 0.05
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 400, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body):
        wait_until(lambda: server.stats().num_running == 1)
        screen = terminal("top", "--url", server.url)
        screen.wait_for(r"1 of 8.*KV cache.*time to first token.*\w{12} +running")
    screen.wait_for("0 of 8")
    screen.interrupt()
    screen.wait_for(r"\x1b\[\?1049l")
    assert screen.program.wait(10) == 0


def test_an_interrupt_that_somebody_swallows_ends_the_screen_all_the_same(server: LiveServer) -> None:
    """As one that arrives in a finaliser does."""
    stats = StatsPoller(parse(["top", "--url", server.url])).poll()

    class Swallowing:
        def poll_or_last(self) -> ServerStats:
            with suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            return stats

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        top_screen.show(Swallowing(), stats, 0.01)  # type: ignore[arg-type]
    assert signal.getsignal(signal.SIGINT) is before
