"""A client that goes away, in whatever state its request is, gives its blocks back within a step."""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from localllm.web.access import connection
from localllm.web.api import disconnect
from tests.web.harness import open_request
from tests.web.live_server import LiveServer, PacedRunner, fake_model, wait_until
from tests.web.vanishing import vanish

STEP_S = 0.02
ENDLESS: dict[str, Any] = {"prompt": "Hello", "max_tokens": 480}


@pytest.mark.parametrize("body", [{}, {"n": 3}, {"prompt": ["a", "b", "c"]}], ids=["one", "choices", "prompts"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_running_request_ends_with_its_connection(
    server: LiveServer, runner: PacedRunner, stream: bool, body: dict[str, Any]
) -> None:
    runner.step_s = STEP_S
    sock = open_request(server, {**ENDLESS, "stream": stream, **body})
    wait_until(server.is_decoding)
    aborted = server.stats().finished.get("abort", 0)
    steps = server.stats().num_steps
    sock.close()
    stats = server.wait_idle()
    # The one in flight when the news came, and those that ran while the closed socket was noticed.
    assert stats.num_steps - steps <= 10
    assert stats.finished["abort"] > aborted
    assert stats.free_blocks + stats.cached_blocks == stats.total_blocks


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_in_prefill_ends_with_its_connection(server: LiveServer, runner: PacedRunner, stream: bool) -> None:
    """Chunks of 64 tokens: five steps before the first token."""
    runner.step_s = 0.1
    sock = open_request(server, {"prompt": [7] * 320, "max_tokens": 100, "stream": stream, "cache_prompt": False})
    wait_until(lambda: server.stats().used_blocks > 0)
    generated = server.stats().generation_tokens
    sock.close()
    assert server.wait_idle().generation_tokens == generated


@pytest.mark.parametrize("stream", [False, True])
def test_a_queued_request_ends_with_its_connection(tmp_path: Path, stream: bool) -> None:
    runner = PacedRunner()
    runner.step_s = STEP_S
    with LiveServer(fake_model(tmp_path, runner, max_num_seqs=1)) as server:
        running = open_request(server, ENDLESS)
        wait_until(lambda: server.stats().num_running == 1)
        queued = open_request(server, {**ENDLESS, "stream": stream})
        wait_until(lambda: server.stats().num_waiting == 1)
        queued.close()
        wait_until(lambda: server.stats().num_waiting == 0)
        assert server.stats().num_running == 1
        running.close()
        server.wait_idle()


def test_a_client_that_leaves_disturbs_nobody(server: LiveServer, runner: PacedRunner) -> None:
    body = {"prompt": "Once", "max_tokens": 40, "temperature": 0}
    alone = server.post("/v1/completions", body).json()["choices"][0]["text"]
    runner.step_s = 0.005
    texts: list[str] = []
    neighbour = threading.Thread(
        target=lambda: texts.append(server.post("/v1/completions", body).json()["choices"][0]["text"])
    )
    leaving = open_request(server, {**ENDLESS, "stream": True})
    neighbour.start()
    wait_until(lambda: server.stats().num_running == 2)
    leaving.close()
    neighbour.join(10)
    assert texts == [alone]


def test_headers_come_before_the_first_token(server: LiveServer, runner: PacedRunner) -> None:
    runner.gate.clear()
    with open_request(server, {**ENDLESS, "max_tokens": 2, "stream": True}) as sock:
        head = sock.recv(4096).decode()
        assert head.startswith("HTTP/1.1 200")
        assert "text/event-stream" in head
        assert "data:" not in head
        runner.gate.set()
        assert b"data:" in sock.recv(4096)


def test_a_silent_stream_is_kept_alive_by_comments(
    server: LiveServer, runner: PacedRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disconnect, "PING_INTERVAL_S", 0.05)
    runner.gate.clear()
    with open_request(server, {**ENDLESS, "max_tokens": 2, "stream": True}) as sock:
        seen = b""
        while seen.count(b": ping\n\n") < 2:
            seen += sock.recv(4096)
        runner.gate.set()
        while b"[DONE]" not in seen:
            seen += sock.recv(4096)


@pytest.mark.parametrize("silent_first", [False, True])
def test_a_reader_that_stopped_reading_is_given_up(monkeypatch: pytest.MonkeyPatch, silent_first: bool) -> None:
    """Its connection is full and stays full: a write waits, be it a token's or a ping's."""
    monkeypatch.setattr(disconnect, "STALLED_S", 0.1)
    monkeypatch.setattr(disconnect, "PING_INTERVAL_S", 0.03)

    async def scenario() -> None:
        closed, written = [], []

        async def events() -> AsyncGenerator[bytes, None]:
            if silent_first:
                await asyncio.Event().wait()
            while True:
                yield b"data: x\n\n"

        async def send(message: Any) -> None:
            written.append(message)
            if len(written) > 3:
                await asyncio.Event().wait()

        async def receive() -> Any:
            await asyncio.Event().wait()

        async def close() -> None:
            closed.append(True)

        await disconnect.EventStream(events(), close)({"type": "http"}, receive, send)  # type: ignore[arg-type]
        assert closed == [True]
        assert len(written) >= 4

    asyncio.run(asyncio.wait_for(scenario(), 5))


def test_a_stuck_connection_gives_its_blocks_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on a real socket: its buffers fill, then the server's, then the request ends."""
    monkeypatch.setattr(disconnect, "STALLED_S", 0.3)
    monkeypatch.setattr(disconnect, "PING_INTERVAL_S", 0.1)
    runner = PacedRunner()
    runner.step_s = 0.005
    live = LiveServer(fake_model(tmp_path, runner))
    live._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    with live as server:
        body = {**ENDLESS, "n": 8, "logprobs": 5, "return_token_ids": True, "stream": True}
        with open_request(server, body):
            wait_until(lambda: server.stats().finished.get("abort", 0) == 8)
            assert server.wait_idle().generation_tokens < 8 * ENDLESS["max_tokens"]


def test_a_client_that_never_reads_its_answer_loses_its_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is complete and lies in the server's buffer; closing alone would wait for its reader for ever."""
    monkeypatch.setattr(connection, "UNREAD_S", 0.2)
    live = LiveServer(fake_model(tmp_path, PacedRunner()))
    live._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    with live as server:
        asked = {"prompt": "a", "n": 8, "max_tokens": 400, "logprobs": 20}
        with open_request(server, asked, receive_bytes=4096) as sock:
            connections = server.server.server_state.connections
            wait_until(lambda: len(connections) == 1)
            wait_until(lambda: not connections)
            seen = b"".join(iter(lambda: sock.recv(65536), b""))
        head, _, body = seen.partition(b"\r\n\r\n")
        assert len(body) < int(head.partition(b"content-length: ")[2].split()[0])
        assert server.post("/v1/completions", ENDLESS | {"max_tokens": 1}).status_code == 200


def test_clients_that_vanish_leave_nothing_behind() -> None:
    """A hundred here; `python -m tests.web.vanishing 1000` takes more."""
    assert vanish(100) < 1.0


def test_events_of_one_step_leave_in_one_write(server: LiveServer, runner: PacedRunner) -> None:
    """Four choices: one chunk of the transfer encoding per step, four events in it."""
    runner.step_s = STEP_S
    with open_request(server, {"prompt": [5], "n": 4, "max_tokens": 6, "temperature": 0, "stream": True}) as sock:
        seen = b""
        while not seen.endswith(b"0\r\n\r\n"):
            seen += sock.recv(65536)
    body = seen.partition(b"\r\n\r\n")[2]
    writes = []
    while body:
        size, _, body = body.partition(b"\r\n")
        writes.append(body[: int(size, 16)].count(b"data: "))
        body = body[int(size, 16) + 2 :]
    assert max(writes) >= 4
    assert len(writes) <= 6 + 2


def test_stopping_the_server_ends_streams_with_an_error(tmp_path: Path) -> None:
    """What still runs when the time to drain is over hears why, and the server stops."""
    runner = PacedRunner()
    runner.step_s = STEP_S
    with LiveServer(fake_model(tmp_path, runner), drain_s=0.3) as server:
        sock = open_request(server, {**ENDLESS, "stream": True})
        wait_until(lambda: server.stats().num_running == 1)
        started = time.monotonic()
        server.server.should_exit = True
        seen = b""
        while piece := sock.recv(65536):
            seen += piece
        sock.close()
        assert b'"code":"engine_stopped"' in seen
        assert time.monotonic() - started < 5


def test_a_short_answer_may_finish_while_the_server_stops(tmp_path: Path) -> None:
    runner = PacedRunner()
    runner.step_s = STEP_S
    with LiveServer(fake_model(tmp_path, runner), drain_s=5) as server:
        sock = open_request(server, {"prompt": "a", "max_tokens": 20, "stream": True})
        wait_until(lambda: server.stats().num_running == 1)
        server.server.should_exit = True
        seen = b""
        while piece := sock.recv(65536):
            seen += piece
        sock.close()
        assert b"[DONE]" in seen


async def test_work_that_ends_first_wins_over_a_disconnect() -> None:
    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def work() -> int:
        return 3

    assert await disconnect.unless_disconnected(receive, work()) == 3
