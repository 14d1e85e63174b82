"""Servers at a URL that misbehave: endless, compressed or unrelated answers, redirects elsewhere, and silence."""

import gzip
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from localllm.config.mcp_servers import McpServer
from localllm.mcp import connection
from tests.mcp.harness import N, calling, refusal

TOOL = {"name": "tool", "description": "", "inputSchema": {"type": "object"}}


class Hostile(BaseHTTPRequestHandler):
    """Speaks the protocol until a tool is called; the path says what happens then."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_error(405)

    do_DELETE = do_GET

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.seen.append((self.path, self.headers.get("x-key")))  # type: ignore[attr-defined]
        match request.get("method"):
            case "initialize":
                version, info = request["params"]["protocolVersion"], {"name": "hostile", "version": "1"}
                self._result(request, {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info})
            case "tools/list":
                self._result(request, {"tools": [TOOL]})
            case "tools/call":
                self._call(request)
            case _ if "id" in request:
                error = {"code": -32601, "message": "Method not found"}
                self._send(json.dumps({"jsonrpc": "2.0", "id": request["id"], "error": error}).encode())
            case _:
                self.send_response(202)
                self.send_header("content-length", "0")
                self.end_headers()

    def _call(self, request: Any) -> None:
        match self.path:
            case "/huge":
                self._result(request, {"content": [{"type": "text", "text": "x" * 20 * 2**20}]})
            case "/gzip":
                body = gzip.compress(b" " * 50 * 2**20)
                self._send(body, {"content-encoding": "gzip"})
            case "/html":
                self._send(b"<h1>Log in</h1>", {"content-type": "text/html"})
            case "/elsewhere":
                self.send_response(307)
                self.send_header("location", "http://localhost:9/mcp")
                self.send_header("content-length", "0")
                self.end_headers()
            case "/silent":
                time.sleep(3)
            case "/endless":
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.end_headers()
                with_id = b": still thinking\n" * 4096
                while True:
                    self.wfile.write(with_id)
            case _:
                self._result(request, {"content": [{"type": "text", "text": "fine"}]})

    def _result(self, request: Any, result: Any) -> None:
        self._send(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}).encode())

    def _send(self, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(200)
        for name, text in ({"content-type": "application/json"} | (headers or {})).items():
            self.send_header(name, text)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Quiet(ThreadingHTTPServer):
    """Does not print that a client has gone, which is what these clients do."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Hostile)
        self.seen: list[tuple[str, str | None]] = []

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


@pytest.fixture(scope="module")
def http() -> Iterator[Quiet]:
    with Quiet() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def at(http: Quiet, path: str, **fields: Any) -> McpServer:
    return McpServer("web", url=f"http://127.0.0.1:{http.server_port}{path}", **fields)


def test_headers_are_sent_and_the_call_answers(http: Quiet) -> None:
    assert calling(at(http, "/fine", headers={"X-Key": "k"})).text == "fine"
    assert {key for path, key in http.seen if path == "/fine"} == {"k"}


@pytest.mark.parametrize("path", ["/huge", "/gzip", "/html", "/elsewhere", "/endless"])
def test_an_answer_that_breaks_a_bound_fails_the_call(http: Quiet, path: str) -> None:
    error = refusal(at(http, path, timeout_s=30.0))
    assert "tool" in error.what
    assert "within" not in error.what, "it did not have to be waited for"


def test_a_silent_address_is_given_up(http: Quiet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CLOSE_S", 0.5)
    assert "did not answer the call of tool within" in refusal(at(http, "/silent", timeout_s=0.5), "tool", N).what
