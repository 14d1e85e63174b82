"""What no client should send, over a real socket: refused clearly and soon, in flat memory; the next one is served."""

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from localllm.web.access import connection
from tests.web.harness import answers, connect, open_request, refusal
from tests.web.live_server import LiveServer, wait_until

TEXT = "/v1/completions"
POST = f"POST {TEXT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
HEAD = "GET /v1/models HTTP/1.1\r\nhost: localhost\r\n"
JSON = {"content-type": "application/json"}
JSON_ROUTES = [
    TEXT, "/v1/chat/completions", "/v1/embeddings", "/v1/rerank", "/v1/score", "/tokenize", "/detokenize",
    "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/localllm/v1/models/load", "/localllm/v1/models/unload",
    "/localllm/v1/models/sleep", "/localllm/v1/models/wake", "/localllm/v1/models/pin",
    "/localllm/v1/models/downloads",
]  # fmt: skip
SMALL_ROUTES = [path for path in JSON_ROUTES if "lora" in path or "localllm" in path]


@pytest.fixture(autouse=True)
def the_server_goes_on(server: LiveServer) -> Iterator[None]:
    """After each test: the next request is answered, no connection is left, memory has not grown."""
    server.get("/v1/models")
    before, connections = psutil.Process().memory_info().rss, len(server.server.server_state.connections)
    yield
    assert server.post(TEXT, {"prompt": "a", "max_tokens": 2}).status_code == 200
    wait_until(lambda: len(server.server.server_state.connections) <= connections)  # clients of others may keep some
    assert psutil.Process().memory_info().rss - before < 100 * 2**20


def refused(answer: str, status: int) -> str:
    """The code of an answer that was made before there was a request."""
    head, _, body = answer.partition("\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} "), answer[:200]
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return str(error["code"])


# Heads --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (f"GET /{'a' * 20_000} HTTP/1.1\r\n", 414, "url_too_long"),
        (HEAD + "".join(f"x-{i}: 1\r\n" for i in range(101)) + "\r\n", 431, "headers_too_large"),
        (HEAD + "".join(f"x-{i}: {'a' * 7000}\r\n" for i in range(10)) + "\r\n", 431, "headers_too_large"),
        (HEAD + "x: " + "a" * 400_000, 431, "headers_too_large"),
        (HEAD + "a" * 400_000, 431, "headers_too_large"),
        ("\x16\x03\x01\x02\x00\x01\x00", 400, "invalid_http"),
        ("hello\r\n\r\n", 400, "invalid_http"),
        ("GET / HTTP/9.9\r\n\r\n", 400, "invalid_http"),
        ("CONNECT example.com:443 HTTP/1.1\r\nhost: x\r\n\r\n", 400, "invalid_http"),
        ("GET /\xff HTTP/1.1\r\nhost: localhost\r\n\r\n", 400, "invalid_http"),
        (HEAD + "content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n", 400, "invalid_http"),
        (HEAD + "content-length: 5\r\ncontent-length: 6\r\n\r\n", 400, "invalid_http"),
        (HEAD + "content-length: -1\r\n\r\n", 400, "invalid_http"),
        (HEAD + "x y: 1\r\n\r\n", 400, "invalid_http"),
    ],
    ids=["url", "many headers", "large headers", "endless value", "endless name", "tls", "no http", "version",
         "connect", "url bytes", "smuggled", "two lengths", "negative length", "header name"],
)  # fmt: skip
def test_heads(server: LiveServer, sent: str, status: int, code: str) -> None:
    with connect(server) as sock:
        try:
            sock.sendall(sent.encode("latin-1"))
        except ConnectionError:  # it was refused before the end
            pass
        assert refused(answers(sock), status) == code


def test_heads_within_the_bounds_are_read(server: LiveServer) -> None:
    headers = {f"x-{i}": "a" * 600 for i in range(90)}
    assert server.get(f"/v1/models?{'q' * 15_000}", headers=headers).status_code == 431  # together too large
    assert server.get(f"/v1/models?{'q' * 8_000}", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("sent", "part"),
    [("GET", "headers"), (HEAD + "x: 1\r\n", "headers"), (f"{POST}content-length: 9\r\n\r\n{{", "body")],
    ids=["line", "headers", "body"],
)  # fmt: skip
def test_a_request_that_trickles_in_is_given_up(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, sent: str, part: str
) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.15)
    monkeypatch.setattr(connection, "BODY_S", 0.15)
    with connect(server) as sock:
        sock.sendall(sent.encode())
        answer = answers(sock)
    assert refused(answer, 408) == "request_timeout"
    assert part in answer


@pytest.mark.parametrize("sent", [b"", b"\r\n"], ids=["nothing", "line ends"])
@pytest.mark.parametrize("after_one", [False, True])
def test_an_idle_connection_is_closed(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, sent: bytes, after_one: bool
) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.2)
    monkeypatch.setattr(server.server.config, "timeout_keep_alive", 0.2)
    with connect(server) as sock:
        if after_one:
            sock.sendall(f"{HEAD}\r\n".encode())
            answer = sock.recv(65536)
            while not answer.endswith(b"}"):  # head and body may come one by one
                answer += sock.recv(65536)
            assert answer.startswith(b"HTTP/1.1 200")
            sock.settimeout(0.03)
        for _ in range(20 if after_one else 1):  # uvicorn's own timer ends with any byte
            try:
                sock.sendall(sent)
                assert sock.recv(65536) == b""
                break
            except TimeoutError:
                pass
            except ConnectionError:
                break
        else:
            pytest.fail("it is still open")


def test_pipelined_requests_are_answered_in_order_and_too_many_are_not(server: LiveServer) -> None:
    with connect(server) as sock:
        sock.sendall(f"{HEAD}\r\n".encode() * 4 + f"{HEAD}connection: close\r\n\r\n".encode())
        assert answers(sock).count("HTTP/1.1 200") == 5
    with connect(server) as sock:
        try:
            sock.sendall(f"{HEAD}\r\n".encode() * 20_000)
        except ConnectionError:
            pass
        assert answers(sock).count("HTTP/1.1 200") <= connection.MAX_PIPELINED + 1


def test_garbage_behind_a_request_ends_it_and_is_not_taken_for_its_answer(server: LiveServer) -> None:
    with connect(server) as sock:
        sock.sendall(f"{HEAD}\r\n".encode() + b"\x00garbage\r\n\r\n")
        assert "invalid_http" not in answers(sock)
    with open_request(server, {"prompt": "a", "max_tokens": 400, "stream": True}) as sock:
        assert sock.recv(15) == b"HTTP/1.1 200 OK"
        sock.sendall(b"\x00garbage\r\n\r\n")
        assert "HTTP/1.1 400" not in answers(sock)
    server.wait_idle()


def test_half_closed_is_closed(server: LiveServer) -> None:
    """Whoever says that nothing more will come is taken for gone, and its request ends."""
    with open_request(server, {"prompt": "a", "max_tokens": 400}) as sock:
        sock.shutdown(socket.SHUT_WR)
        assert answers(sock) == ""
    server.wait_idle()


# Bodies -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", JSON_ROUTES)
def test_deep_bodies_are_refused_at_once(server: LiveServer, path: str) -> None:
    for raw in (
        b"[" * 10_000 + b"]" * 10_000,
        b'{"model":' + b'{"a":' * 10_000 + b"1" + b"}" * 10_001,
        b'{"messages":[{"role":"user","content":"x","y":' + b"[" * 500 + b"]" * 500 + b"}]}",
    ):
        started_s = time.monotonic()
        error = refusal(server.http.post(path, content=raw, headers=JSON), 400)
        assert error["code"] == "invalid_json"
        assert "nested too deeply" in error["message"]
        assert time.monotonic() - started_s < 0.5


def test_bodies_with_many_shallow_parts_are_read(server: LiveServer) -> None:
    body = {"tokens": [5] * 100, "x": [[[]]] * 1000}
    assert server.post("/detokenize", body).status_code == 200


@pytest.mark.parametrize("path", SMALL_ROUTES)
def test_routes_that_take_names_read_little(server: LiveServer, path: str) -> None:
    error = refusal(server.post(path, {"model": "x" * 300_000}), 413)
    assert "256 KiB" in error["message"]


def push(sock: socket.socket, piece: bytes, seconds: float = 5) -> int:
    """Send until the server closes; how many bytes it took."""
    sent, deadline_s = 0, time.monotonic() + seconds
    try:
        while time.monotonic() < deadline_s:
            sent += sock.send(piece)
    except ConnectionError:
        return sent
    pytest.fail("the server took everything")


def test_a_body_without_a_length_is_read_to_the_limit_and_no_further(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "LINGER_S", 0.1)
    with connect(server) as sock:
        sock.sendall(f"{POST}transfer-encoding: chunked\r\n\r\n".encode())
        assert push(sock, b"10000\r\n" + b" " * 65536 + b"\r\n") > server.settings.server.max_body_bytes


def test_the_rest_of_a_refused_body_is_taken_for_a_moment_only(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "LINGER_S", 0.1)
    with connect(server) as sock:
        sock.sendall(f"{POST}content-length: {10**9}\r\n\r\n".encode())
        assert sock.recv(65536).startswith(b"HTTP/1.1 413")
        push(sock, b"x" * 1000)


def test_a_client_that_leaves_while_it_sends_is_no_mistake_of_ours(
    server: LiveServer, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(server) as sock:
        sock.sendall(f"{POST}content-length: 99\r\n\r\n{{".encode())
        wait_until(lambda: bool(server.server.server_state.tasks))
    wait_until(lambda: not server.server.server_state.tasks)
    assert not [record for record in caplog.records if record.exc_info]


BIG: list[tuple[str, Any]] = [
    ("stop", ["x" * 1000] * 1000),
    ("stop", "x" * 2**20),
    ("bad_words", [str(i) for i in range(100_000)]),
    ("logit_bias", {str(i): 1 for i in range(500_000)}),
    ("allowed_token_ids", list(range(1_100_000))),
    ("stop_token_ids", [1] * 100_000),
    ("prompt", ["a"] * 100_000),
    ("prompt", [[1]] * 100_000),
]


@pytest.mark.parametrize(("field", "value"), BIG, ids=[f"{field} {i}" for i, (field, _) in enumerate(BIG)])
def test_absurd_lists_are_refused_by_name(server: LiveServer, field: str, value: Any) -> None:
    started_s = time.monotonic()
    error = refusal(server.post(TEXT, {"prompt": "a", "max_tokens": 1, field: value}), 400)
    assert error["param"] == field
    assert time.monotonic() - started_s < 20  # of processor time it is half a second


@pytest.mark.parametrize(
    "raw", [b'{"prompt": "\xff\xfe"}', b"\xff" * 100, b'{"prompt": "a", "max_tokens": ' + b"9" * 10**5 + b"}"]
)
def test_bytes_that_are_no_text_and_numbers_that_are_no_numbers(server: LiveServer, raw: bytes) -> None:
    refusal(server.http.post(TEXT, content=raw, headers=JSON), 400)


def test_an_error_does_not_repeat_a_megabyte(server: LiveServer) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "reasoning_effort": "x" * 2**20}
    assert len(refusal(server.post("/v1/chat/completions", body), 400)["message"]) < 3000


# Names and paths ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ("host: evil.example\r\nhost: localhost", 400),
        ("host: localhost\r\nhost: evil.example", 400),
        ("host: localhost@evil.example", 403),
        ("host: localhost.", 403),
        ("host: LOCALHOST", 200),
        ("host: localhost:99999", 200),
        ("host: [::1]x", 403),
        ("host: localhost:1:2", 403),
        ("host: [::1", 403),
        ("host: \xe9", 403),
        ("host: localhost\r\norigin: http://localhost.evil.example", 403),
        ("host: localhost\r\norigin: null", 403),
        ("host: localhost\r\norigin: http://evil.example\r\norigin: http://localhost", 400),
        ("host: localhost\r\norigin: http://localhost@evil.example", 403),
        ("host: localhost\r\norigin: http://[", 403),
        ("host: localhost\r\norigin: http://localhost", 200),
    ],
)
def test_forged_hosts_and_origins(server: LiveServer, headers: str, status: int) -> None:
    body = b'{"content": "a"}'
    with connect(server) as sock:
        sock.sendall(
            f"POST /tokenize HTTP/1.1\r\n{headers}\r\ncontent-type: application/json\r\nconnection: close\r\n"
            f"content-length: {len(body)}\r\n\r\n".encode("latin-1")
            + body
        )
        assert answers(sock).startswith(f"HTTP/1.1 {status} ")
