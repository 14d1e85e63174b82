"""Clients that open a stream and vanish in the middle of it, many at once.

    python -m tests.web.vanishing 1000

prints how long the server took until nothing of them was left: no request, no block, no task, no connection.
"""

import asyncio
import json
import resource
import sys
import tempfile
import time
from pathlib import Path

from tests.web.live_server import LiveServer, PacedRunner, fake_model, wait_until

BODY = json.dumps({"prompt": "Hello", "max_tokens": 480, "stream": True}).encode()
REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(BODY), BODY)
)


def vanish(count: int) -> float:
    """Seconds from the last client's end until the server is as it was."""
    runner = PacedRunner()
    runner.step_s = 0.01
    with tempfile.TemporaryDirectory() as folder:
        model = fake_model(Path(folder), runner, max_num_queued_reqs=max(64, count))
        with LiveServer(model) as server:
            asyncio.run(_open_and_abort(int(server.url.rpartition(":")[2]), count))
            started_s = time.monotonic()
            server.wait_idle()
            state = server.server.server_state
            wait_until(lambda: not state.connections and not state.tasks)
            seconds = time.monotonic() - started_s
            assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 2}).status_code == 200
    return seconds


async def _open_and_abort(port: int, count: int) -> None:
    """Each has its headers before the first one goes; some run by then, the others wait."""

    async def open_one() -> asyncio.StreamWriter:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST)
        assert b"200 OK" in await reader.readline()
        return writer

    writers = await asyncio.gather(*(open_one() for _ in range(count)))
    for writer in writers:
        writer.transport.abort()


if __name__ == "__main__":
    count = int(sys.argv[1])
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4 * count + 100), hard))
    print(f"{count} clients: nothing left after {vanish(count):.2f} s")
