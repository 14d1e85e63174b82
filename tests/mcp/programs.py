"""The servers of tools that the tests start, as entries of the config file."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
