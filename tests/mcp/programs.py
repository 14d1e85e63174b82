"""The servers of tools that the tests start, as entries of the config file."""

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

from localllm.config.mcp_servers import McpServer

HERE = Path(__file__).parent


def friendly(name: str = "friendly", **fields: Any) -> McpServer:
    """The server written with the official package, over stdio."""
    return McpServer(name, sys.executable, (str(HERE / "friendly.py"),), **fields)


def hostile(mode: str, *arguments: str, name: str = "", **fields: Any) -> McpServer:
    return McpServer(name or mode, sys.executable, ("-S", str(HERE / "hostile.py"), mode, *arguments), **fields)


@contextmanager
def friendly_over_http() -> Iterator[str]:
    """Run the server written with the official package on a free port; yield its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen([sys.executable, str(HERE / "friendly.py"), "http", str(port)]) as process:
        try:
            until = time.monotonic() + 60
            while not _answers(port):
                assert process.poll() is None, "the server ended"
                assert time.monotonic() < until, "the server did not start"
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port}/mcp"
        finally:
            process.kill()


def _answers(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


FOUND = [
    {"title": f"Result {number}", "url": f"https://example.com/{number}", "content": f"About  blocks\n{number}."}
    for number in range(20)
]
PAGE = (
    "<html><head><title>Blocks</title><style>p {}</style></head><body><nav>Menu</nav><h1>Paged &amp; kept</h1>"
    "<p>One <b>block</b>\nhas tokens.</p><ul><li>first</li><li>second</li></ul><script>alert(1)</script></body></html>"
)


class SearxngStub(BaseHTTPRequestHandler):
    asked: ClassVar[list[dict[str, list[str]]]] = []
    status = 200

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        if parts.path == "/search":
            self.asked.append(parse_qs(parts.query))
            self._answer(self.status, "application/json", json.dumps({"results": FOUND}))
        elif parts.path == "/page":
            self._answer(200, "text/html; charset=utf-8", PAGE)
        elif parts.path == "/moved":
            self._answer(
                302,
                "text/html",
                "",
                Location=f"http://{self.headers['Host'].replace('public.example', '127.0.0.1')}/page",
            )
        elif parts.path == "/loop":
            self._answer(302, "text/html", "", Location="/loop")
        else:
            self._answer(200, "image/png", "x")

    def _answer(self, status: int, kind: str, text: str, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(text.encode())), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def searxng_stub() -> Iterator[str]:
    """Run a stub of a SearXNG that also has pages; yield its address."""
    SearxngStub.asked, SearxngStub.status = [], 200
    with ThreadingHTTPServer(("127.0.0.1", 0), SearxngStub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
