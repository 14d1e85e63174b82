"""A server from its address to its last request: the real command, a real socket, real signals."""

import asyncio
import io
import json
import logging
import os
import pty
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from localllm import up
from localllm.cli import announce, main, suggestion
from localllm.cli.announce import JsonAnnouncer, LogAnnouncer, TerminalAnnouncer, doors
from localllm.cli.serving import set_up_logging
from localllm.config.settings import EngineConfig, PicksTable, ServerConfig, Settings
from localllm.engine.speculation import Speculation
from localllm.engine.step import DraftSupport
from localllm.errors import ConfigError, PortInUse
from localllm.logs.log_file import log_path
from localllm.machine.hardware import Gpu, Hardware
from localllm.serving.phases import Phase
from tests.serving import ROOT, Server

EXAMPLES = ROOT / "docs" / "examples"


# ---- the whole command -----------------------------------------------------------------------------------------------


def test_up_serves_and_lets_running_answers_end(
    tiny_llama_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"messages": [{"role": "user", "content": "hi, my word is xyzzy"}], "max_tokens": 1800}
    body = {**asked, "ignore_eos": True, "stream": True}
    with Server(tmp_path, "up", str(tiny_llama_path)) as server:
        url = server.wait_for("ready")["url"]
        assert {"find", "torch", "fit", "weights", "engine"} <= {event.get("phase") for event in server.events}
        assert [event["event"] for event in server.events].count("hardware") == 1
        [path] = tmp_path.glob("localllm-*.json")
        told = json.loads(path.read_text())
        assert (told["url"], told["pid"], told["model"]) == (url, server.process.pid, tiny_llama_path.name)
        assert httpx.get(f"{url}/health").json() == {"status": "ok"}
        assert httpx.get(url).status_code == 200
        _run_example("chat_client.py", url, monkeypatch)
        _run_example("load_client.py", url, monkeypatch)
        assert "P99 latency" in capsys.readouterr().out
        with (
            httpx.Client(timeout=60) as client,
            client.stream("GET", f"{url}/live/dashboard") as dashboard,
            client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer,
        ):
            assert dashboard.status_code == 200
            lines = (line for line in answer.iter_lines() if line)
            next(lines), next(lines)  # the role comes before the first token, the second line with it
            server.process.send_signal(signal.SIGTERM)
            assert list(lines)[-1] == "data: [DONE]"
        assert server.process.wait(20) == 0
        assert server.wait_for("stopping")["requests"] == 1
    assert not list(tmp_path.glob("localllm-*"))
    logged = log_path(0).read_text()
    for event in (f"ready url={url}", "POST /v1/chat/completions status=200", "stopping requests=1", "ended"):
        assert event in logged
    assert "xyzzy" not in logged


def _run_example(name: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_URL", f"{url}/v1")
    monkeypatch.setenv("NUM_REQUESTS", "12")
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc")
def test_an_idle_server_wakes_less_than_ten_times_a_second(tiny_llama_path: Path, tmp_path: Path) -> None:
    with Server(tmp_path, "up", str(tiny_llama_path)) as server:
        url = server.wait_for("ready")["url"]
        body = {"model": tiny_llama_path.name, "prompt": "hi", "max_tokens": 4}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
        time.sleep(1)  # threads of the request go back to their places
        began_s, before = time.monotonic(), _switches(server.process.pid)
        time.sleep(4)
        assert (_switches(server.process.pid) - before) / (time.monotonic() - began_s) < 10


def _switches(pid: int) -> int:
    """Return how often the threads of a process have gone to sleep by themselves."""
    tasks = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/status")]
    return sum(int(text.split("\nvoluntary_ctxt_switches:")[1].split()[0]) for text in tasks)


def test_a_second_signal_ends_running_answers(tiny_llama_path: Path, tmp_path: Path) -> None:
    body = {"prompt": "hi", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with Server(tmp_path, "serve", str(tiny_llama_path)) as server:
        url = server.wait_for("ready")["url"]
        with httpx.Client(timeout=60) as client, client.stream("POST", f"{url}/v1/completions", json=body) as answer:
            next(answer.iter_lines())
            server.process.send_signal(signal.SIGINT)
            server.wait_for("stopping")
            started = time.monotonic()
            assert server.stop() == 0
            assert time.monotonic() - started < 5


@pytest.mark.parametrize(("answered_s", "least_s", "most_s"), [(0.0, 0.0, 0.2), (0.1, 0.1, 0.28), (9.0, 0.3, 2.0)])
async def test_a_load_waits_a_moment_for_requests_that_came_first(
    answered_s: float, least_s: float, most_s: float
) -> None:
    requests = {"of a browser"} if answered_s else set()
    server = SimpleNamespace(started=False, server_state=SimpleNamespace(tasks=requests))
    serving = SimpleNamespace(settings=Settings(EngineConfig(), ServerConfig(load_at_start=False)), server=server)
    http, began_s = asyncio.create_task(asyncio.sleep(9)), time.perf_counter()
    asyncio.get_running_loop().call_later(0.01, setattr, server, "started", True)
    asyncio.get_running_loop().call_later(answered_s, requests.clear)
    await up._Serving._answer_first(serving, http)  # type: ignore[arg-type]  # of which this reads two fields
    assert least_s <= time.perf_counter() - began_s < most_s
    assert server.started
    http.cancel()


async def test_a_server_that_does_not_start_is_not_waited_for() -> None:
    server = SimpleNamespace(started=False, server_state=SimpleNamespace(tasks=set()))
    serving = SimpleNamespace(settings=Settings(EngineConfig(), ServerConfig(load_at_start=False)), server=server)
    http = asyncio.create_task(asyncio.sleep(0))
    await asyncio.wait_for(up._Serving._answer_first(serving, http), 5)  # type: ignore[arg-type]


def test_a_taken_port_is_known_before_the_model_loads(capsys: pytest.CaptureFixture[str]) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "no/such-model", "--port", str(port)]) == 6
    error = capsys.readouterr().err
    assert f"(pid {os.getpid()}) is listening on it.\nTry: localllm serve no/such-model --port {port + 1}, or" in error


def test_a_refused_start_leaves_the_log_of_the_running_server_alone(tmp_path: Path) -> None:
    """The refused start is a process of its own: it sets up logging."""
    environ = os.environ | {"XDG_DATA_HOME": str(tmp_path), "LOCALLLM_PROT": "1"}
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        command = [sys.executable, "-m", "localllm", "serve", "demo", "--port", str(taken.getsockname()[1])]
        refused = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert refused.returncode == 6, refused.stderr
    assert "Did you mean LOCALLLM_PORT?" in refused.stderr
    assert not list(tmp_path.rglob("*.log"))


def test_lines_before_the_port_is_bound_are_in_the_file_once_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    open_file = set_up_logging(Settings(server=ServerConfig(port=8321)), quiet=True)
    logging.getLogger("localllm").warning("before")
    assert not log_path(8321).exists()
    open_file()
    logging.getLogger("localllm").warning("after")
    root.handlers[-1].close()
    assert [line.split()[-1] for line in log_path(8321).read_text().splitlines()] == ["before", "after"]


@pytest.mark.parametrize("name", ["no/such-model", "./tests", "truncated"])
def test_a_model_that_cannot_be_served_ends_the_command(
    name: str, tmp_path: Path, tiny_llama_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "truncated":
        name = str(_truncated(tiny_llama_path, tmp_path / "truncated"))
    assert main(["serve", name, "--port", "0", "--no-ui"]) == 5
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert 2 <= len(error.splitlines()) <= 3


def _truncated(model: Path, to: Path) -> Path:
    to.mkdir()
    for file in model.iterdir():
        content = file.read_bytes()
        (to / file.name).write_bytes(content[: len(content) // 2] if file.suffix == ".safetensors" else content)
    return to


# ---- signals while loading -------------------------------------------------------------------------------------------


def test_ctrl_c_while_loading_ends_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """The manager loads for ever; one signal is enough."""
    loading = threading.Event()

    def load_for_ever(settings: Settings, on_phase: Callable[[Phase], None], limits: object) -> None:
        while True:
            loading.set()
            time.sleep(0.01)
            on_phase(Phase("weights", fraction=0.5))

    def interrupt() -> None:
        loading.wait(20)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(up, "build_replicas", load_for_ever)
    sender = threading.Thread(target=interrupt)
    sender.start()
    with pytest.raises(KeyboardInterrupt):
        up.up(Settings(server=ServerConfig(port=0, ui=False)), JsonAnnouncer(io.StringIO()))
    sender.join()


# ---- the address -----------------------------------------------------------------------------------------------------


def test_an_address_that_is_not_ours_is_a_wrong_setting_not_a_taken_port() -> None:
    with pytest.raises(ConfigError) as refused:
        up.bind_address(ServerConfig(host="192.0.2.1", port=8123, api_key="k"))
    assert not isinstance(refused.value, PortInUse)
    assert refused.value.exit_code == 2


def test_url_is_one_that_a_browser_here_can_open() -> None:
    with closing(up.bind_address(ServerConfig(host="0.0.0.0", port=0, api_key="k"))) as address:
        assert up.url_of(address) == f"http://127.0.0.1:{address.getsockname()[1]}"


# ---- what is said ----------------------------------------------------------------------------------------------------

GIB = 1024**3
NO_GPU = Hardware((), "A CPU", 1, 16 * GIB, 12 * GIB)
ONE_GPU = Hardware((Gpu(0, "A GPU", 24 * GIB, 22 * GIB, (9, 0), "580.65"),), "A CPU", 8, 64 * GIB, 60 * GIB)


def _ready(**changes: Any) -> up.Ready:
    plan = SimpleNamespace(
        max_model_len=2048, num_kv_tokens=4096, weights_bytes=GIB, kv_bytes=2 * GIB, activation_bytes=0,
        reserve_bytes=0, num_places=0, notes=("A note.",),
    )  # fmt: skip
    model: Any = SimpleNamespace(
        name="tiny[1]",
        plan=plan,
        spec=SimpleNamespace(max_position=2048, task="generate"),
        memory=None,
        engine=(
            SimpleNamespace(scheduler=SimpleNamespace(speculation=Speculation(DraftSupport(7, 8, proposes=True)))),
        ),
    )
    facts = {"url": "http://h:1", "name": model.name, "model": model, "seconds": 1.5, "needs_key": False}
    return up.Ready(**(facts | {"has_pages": True} | changes))


def _tell(announcer: Any, hardware: Hardware, ready: up.Ready) -> None:
    announcer.starting(Settings())
    announcer.found(hardware)
    announcer.phase(Phase("weights"))
    announcer.phase(Phase("weights", "1 of 2 GiB", 0.5, 0.5))
    announcer.phase(Phase("weights", "2 of 2 GiB", 1.0, 1.0, done=True))
    announcer.ready(ready)
    announcer.stopping(2)
    announcer.close()


def test_terminal_tells_facts_and_where_to_go_when_verbose() -> None:
    out = io.StringIO()
    _tell(TerminalAnnouncer(out, verbose=True), ONE_GPU, _ready())
    text = out.getvalue()
    for fact in (
        "GPU 0  A GPU 24.0 GiB · driver 580.65 · 22.0 GiB free",
        " weights       1.0 s  2 of 2 GiB",
        "Note: A note.",
        "2,048 tokens (model limit) × 2.0 full-length chats",
        "weights 1.0 GiB planned · KV cache 2.0 GiB planned",
        "Drafts  7 tokens of a request guessed ahead in a step at most",
        "Ready in 1.5 s",
        "Chat       http://h:1\n",
        '"model": "tiny[1]"',
        "waiting for 2 requests",
    ):
        assert fact in text
    assert "0.5" not in text  # a bar belongs to a terminal, not into a file


def test_the_line_about_drafts_says_why_there_are_none() -> None:
    for speculation, words in (
        (Speculation(DraftSupport(7, 8, proposes=True), why_off="--speculative off"), "off: --speculative off"),
        (Speculation(DraftSupport(why_none="the model is on cuda:0")), "off: the model is on cuda:0"),
        (None, "off: this model is served without drafts"),
    ):
        engine = (SimpleNamespace(scheduler=SimpleNamespace(speculation=speculation)),)
        assert announce.drafts_line(SimpleNamespace(engine=engine)) == words  # type: ignore[arg-type]


def test_no_gpu_is_one_line() -> None:
    out = io.StringIO()
    _tell(TerminalAnnouncer(out, verbose=True), NO_GPU, _ready())
    assert "No GPU: the model runs on the CPU · A CPU · 1 core · 12.0 GiB of 16.0 GiB RAM free\n" in out.getvalue()


@pytest.mark.parametrize("has_driver", [True, False])
def test_terminal_tells_a_person_what_to_do_next(has_driver: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is named once: at once without a driver, else when torch has found the GPUs."""
    monkeypatch.setattr(announce, "may_have_gpu", lambda: has_driver)
    monkeypatch.setattr(announce, "read_hardware", lambda: NO_GPU)
    monkeypatch.setattr(announce, "installed_model", lambda: None)
    monkeypatch.setattr(suggestion, "memory_bandwidth", lambda hardware: 3e10)
    out = io.StringIO()
    _tell(TerminalAnnouncer(out), ONE_GPU if has_driver else NO_GPU, _ready())
    lines = out.getvalue().splitlines()
    machine = "A GPU, 22.0 GiB of 24.0 GiB free" if has_driver else "CPU, 1 core, 12.0 GiB of 16.0 GiB free"
    assert out.getvalue().count(machine) == 1
    assert lines[0].startswith("localllm ")
    assert lines[0].endswith("no telemetry")
    assert "Ready after 1.5 s: http://h:1 " in out.getvalue()
    assert "A real model that fits here:" in out.getvalue()
    assert any(line.startswith("  localllm up ") and "tokens of context" in line for line in lines)
    assert "weights" not in out.getvalue()


def test_a_wrong_list_of_suggestions_does_not_end_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(announce, "installed_model", lambda: None)
    wrong = Settings(picks=PicksTable(tmp_path / "config.toml", tmp_path / "absent.toml"))
    facts = announce.started_facts(_ready(), wrong, NO_GPU)
    assert facts.pick is None
    assert "absent.toml" in caplog.text


def test_doors_name_only_what_is_there() -> None:
    assert [name for name, _ in doors(_ready(has_pages=False))] == ["OpenAI", "Metrics", "Try"]
    assert "Authorization: Bearer" in dict(doors(_ready(needs_key=True)))["Try"]


def test_json_lines_are_json() -> None:
    out = io.StringIO()
    _tell(JsonAnnouncer(out), ONE_GPU, _ready())
    events = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [event["event"] for event in events] == ["starting", "hardware", "phase", "ready", "stopping"]
    assert events[2] == {"event": "phase", "phase": "weights", "seconds": 1.0, "detail": "2 of 2 GiB"}


def test_log_has_one_line_per_event(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    _tell(LogAnnouncer(), NO_GPU, _ready())
    assert [record.message.split()[0] for record in caplog.records] == [
        "starting", "hardware", "loaded", "ready", "stopping",
    ]  # fmt: skip
    assert "ready url=http://h:1 model=tiny[1] seconds=1.5" in caplog.text


def test_up_at_a_terminal_shows_bars_and_leaves_it_as_it_was(tiny_llama_path: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    environ = os.environ | {"XDG_CONFIG_HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "TERM": "xterm"}
    command = [sys.executable, "-m", "localllm", "up", str(tiny_llama_path), "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=theirs, stderr=theirs, stdin=theirs)
    os.close(theirs)
    text = b""
    try:
        while b"All figures" not in text:
            text += os.read(ours, 65536)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait(10)
        os.close(ours)
    assert b"Ready after" in text
    assert text.count(b"\x1b[?25l") == text.count(b"\x1b[?25h")  # the cursor is shown again
