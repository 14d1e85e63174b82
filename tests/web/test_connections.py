"""Connections of old clients, of clients that would rather speak something else, and of too many clients."""

import json
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from localllm import up
from localllm.machine.platforms import raise_file_limit
from localllm.web.access import connection
from tests.web.harness import answers, connect
from tests.web.live_server import LiveServer, PacedRunner, fake_model, settings, wait_until

TEXT = "/v1/completions"
BODY = {"prompt": "a", "max_tokens": 4, "ignore_eos": True}


def posted(body: dict[str, object], version: str, *headers: str) -> bytes:
    raw = json.dumps(body).encode()
    head = [f"POST {TEXT} HTTP/{version}", "host: localhost", "content-type: application/json", *headers]
    return "\r\n".join([*head, f"content-length: {len(raw)}", "", ""]).encode() + raw


# HTTP/1.0 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_alive", [(), ("connection: keep-alive",)])
def test_a_stream_for_an_old_client_has_no_chunks_and_ends_with_its_connection(
    server: LiveServer, keep_alive: tuple[str, ...]
) -> None:
    with connect(server) as sock:
        sock.sendall(posted(BODY | {"stream": True}, "1.0", *keep_alive))
        head, _, body = answers(sock).partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 200")
    assert "transfer-encoding" not in head
    assert "connection: close" in head
    assert body.startswith("data: {")
    assert body.endswith("data: [DONE]\n\n")
    assert all(line.startswith("data: ") for line in body.splitlines() if line)


def test_a_whole_answer_for_an_old_client_has_its_length(server: LiveServer) -> None:
    with connect(server) as sock:
        sock.sendall(posted(BODY, "1.0"))
        head, _, body = answers(sock).partition("\r\n\r\n")
    assert f"content-length: {len(body)}" in head  # `answers` has a character for each byte
    assert json.loads(body)["choices"]
    with connect(server) as sock:
        sock.sendall(b"HEAD /v1/models HTTP/1.0\r\nhost: localhost\r\n\r\n")
        assert answers(sock).endswith("\r\n\r\n")
    with connect(server) as sock:
        sock.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert "transfer-encoding" not in answers(sock).partition("\r\n\r\n")[0]


def test_a_new_client_gets_chunks(server: LiveServer) -> None:
    with connect(server) as sock:
        sock.sendall(posted(BODY | {"stream": True}, "1.1", "connection: close"))
        head, _, body = answers(sock).partition("\r\n\r\n")
    assert "transfer-encoding: chunked" in head
    assert body.endswith("0\r\n\r\n")


# Other protocols ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("upgrade", ["websocket", "h2c"])
def test_who_asks_for_another_protocol_is_answered_in_this_one(
    server: LiveServer, caplog: pytest.LogCaptureFixture, upgrade: str
) -> None:
    """Java's client asks for h2c with each request, on one connection."""
    asks = (f"connection: Upgrade, HTTP2-Settings\r\nupgrade: {upgrade}", "http2-settings: AAEAAEAA")
    with connect(server) as sock:
        for _ in range(3):
            sock.sendall(posted(BODY, "1.1", *asks))
            assert json.loads(body_of(sock))["choices"]
        sock.sendall(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        assert answers(sock).startswith("HTTP/1.1 200")
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]


def body_of(sock: socket.socket) -> bytes:
    """Of the one answer that comes."""
    seen = b""
    while b"\r\n\r\n" not in seen:
        seen += sock.recv(65536)
    head, _, body = seen.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), seen
    length = next(int(line[15:]) for line in head.splitlines() if line.startswith(b"content-length:"))
    while len(body) < length:
        body += sock.recv(65536)
    return body


def test_a_body_that_comes_later_belongs_to_the_request_that_asked(server: LiveServer) -> None:
    whole = posted(BODY, "1.1", "connection: upgrade", "upgrade: h2c")
    end = whole.index(b"\r\n\r\n") + 4
    for cut in (20, end - 10, end, end + 5, len(whole) - 1):
        with connect(server) as sock:
            sock.sendall(whole[:cut])
            time.sleep(0.02)
            sock.sendall(whole[cut:])
            assert json.loads(body_of(sock))["choices"]


def test_requests_that_ask_are_pipelined_as_others_are(server: LiveServer) -> None:
    one = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: keep-alive, Upgrade\r\nupgrade: h2c\r\n\r\n"
    last = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    with connect(server) as sock:
        sock.sendall(one * 3 + last)
        assert answers(sock).count("HTTP/1.1 200") == 4
    with connect(server) as sock:
        try:
            sock.sendall(one * 5_000)
        except ConnectionError:
            pass
        assert answers(sock).count("HTTP/1.1 200") <= connection.MAX_PIPELINED + 1


# Too many -----------------------------------------------------------------------------------------------------------


def test_idle_connections_give_way_when_files_run_short(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    state = server.server.server_state
    server.get("/health")
    most = len(state.connections) + 20
    monkeypatch.setattr(connection, "most_connections", lambda: most)
    socks = [connect(server) for _ in range(60)]
    halves = [connect(server) for _ in range(60)]
    try:
        for sock in halves:
            try:
                sock.sendall(b"GET /v1/models HTTP/1.1\r\nhost: loc")
            except ConnectionError:
                pass
        for _ in range(5):
            with connect(server) as sock:
                sock.sendall(posted(BODY, "1.1", "connection: close"))
                assert answers(sock).startswith("HTTP/1.1 200")
        wait_until(lambda: len(state.connections) <= most)
    finally:
        for sock in socks + halves:
            sock.close()


def test_a_connection_with_a_request_does_not_give_way(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with connect(server) as streaming:
        streaming.sendall(posted(BODY | {"max_tokens": 300, "stream": True}, "1.1", "connection: close"))
        first = streaming.recv(100)
        monkeypatch.setattr(connection, "most_connections", lambda: 1)
        for _ in range(10):
            connect(server).close()
        assert (first.decode("latin-1") + answers(streaming)).endswith("0\r\n\r\n")


HALF_SENT = (
    b"POST /login HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/x-www-form-urlencoded\r\n"
    b"content-length: 2000\r\n\r\nkey="
)


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[LiveServer]:
    with LiveServer(fake_model(tmp_path, PacedRunner()), settings(api_key="secret", ui=True)) as server:
        yield server


def half_sent(server: LiveServer, count: int) -> list[socket.socket]:
    socks = [connect(server) for _ in range(count)]
    for sock in socks:
        try:
            sock.sendall(HALF_SENT)
        except ConnectionError:  # it was closed for a later one
            pass
    return socks


@pytest.mark.parametrize(
    ("most", "attackers"), [(64, 100), pytest.param(4096, 4300, marks=pytest.mark.slow)], ids=["few", "thousands"]
)
def test_half_sent_logins_leave_a_place_for_others(
    locked: LiveServer, monkeypatch: pytest.MonkeyPatch, most: int, attackers: int
) -> None:
    raise_file_limit(up.MOST_FILES)
    monkeypatch.setattr(connection, "most_connections", lambda: most)
    state, socks = locked.server.server_state, half_sent(locked, attackers)
    try:
        wait_until(lambda: len(state.connections) <= most // 4 + 1)
        for _ in range(5):
            with connect(locked) as sock:
                sock.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
                assert answers(sock).startswith("HTTP/1.1 200")
            body = posted(BODY, "1.1", "authorization: Bearer secret", "connection: close")
            with connect(locked) as sock:
                sock.sendall(body[:-1])
                time.sleep(0.02)
                sock.sendall(body[-1:])
                assert answers(sock).startswith("HTTP/1.1 200")
    finally:
        for sock in socks:
            sock.close()


def test_requests_are_closed_first_whose_client_was_silent_for_longest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LiveServer(fake_model(tmp_path, PacedRunner()), settings(ui=True)) as server:
        socks = half_sent(server, 10)
        state = server.server.server_state
        wait_until(lambda: len(state.connections) == 10)
        for sock in (*socks[5:], *socks[1:5]):
            time.sleep(0.02)
            sock.sendall(b"a")
        time.sleep(0.1)
        monkeypatch.setattr(connection, "most_connections", lambda: 10)
        with connect(server) as last:
            assert socks[0].recv(1) == b""
            for sock in socks[1:]:
                sock.setblocking(False)
                with pytest.raises(BlockingIOError):
                    sock.recv(1)
            last.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            assert answers(last).startswith("HTTP/1.1 200")
        for sock in socks:
            sock.close()


def test_the_time_for_a_body_grows_with_what_has_arrived(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "BODY_S", 0.2)
    monkeypatch.setattr(connection, "BODY_BYTES_PER_S", 20_000)
    whole = posted(BODY | {"user": "x" * 12_000}, "1.1", "connection: close")
    with connect(server) as sock:  # 0.6 s, above the least speed
        for start in range(0, len(whole), 1000):
            sock.sendall(whole[start : start + 1000])
            time.sleep(0.05 if start < 12_000 else 0)
        assert answers(sock).startswith("HTTP/1.1 200")
    with connect(server) as sock:
        sock.sendall(whole[:6000])
        started_s = time.monotonic()
        assert answers(sock).startswith("HTTP/1.1 408")
        assert 0.3 < time.monotonic() - started_s < 5


def test_a_shell_s_limit_of_open_files_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, int]] = []
    infinity = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: made.append(limits))
    for limits in ((1024, 1_048_576), (1024, 4096), (1024, infinity), (infinity, infinity), (65_536, 65_536)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=limits: limits)
        raise_file_limit(up.MOST_FILES)
    assert made == [(65_536, 1_048_576), (4096, 4096), (65_536, infinity)]
    connection.most_connections.cache_clear()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    assert connection.most_connections() == 1024 - connection.OTHER_FILES
    connection.most_connections.cache_clear()
