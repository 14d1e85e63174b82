"""A real llama-server as an upstream, in every dialect. LOCALLLM_LLAMA_SERVER is the path of its program."""

import os
import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from localllm.config.settings import EngineConfig, ServerConfig, Settings
from localllm.config.upstreams import UpstreamConfig
from tests.gguf_files import write_gguf
from tests.tiny import make_tiny_model
from tests.web.live_server import LiveServer, wait_until

PROGRAM = os.environ.get("LOCALLLM_LLAMA_SERVER", "")
MESSAGES = [{"role": "user", "content": "hi"}]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not PROGRAM, reason="LOCALLLM_LLAMA_SERVER names no llama-server")]


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("llama")
    make_tiny_model(folder / "model")
    write_gguf(folder / "model", folder / "tiny.gguf")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [PROGRAM, "-m", str(folder / "tiny.gguf"), "--alias", "tiny", "--port", str(port), "-c", "512", "-t", "1"]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until(lambda: _answers(f"{url}/health"), 60)
            config = Settings(
                EngineConfig(),
                ServerConfig(port=0, ui=False),
                upstreams={"llama": UpstreamConfig("llama", f"{url}/v1")},
            )
            with LiveServer(None, config) as server:
                server.manager.entries.clear()
                yield server
        finally:
            process.kill()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "end"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 5}, '"finish_reason":"length"'),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 5}, '"finish_reason":"length"'),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 5}, '"status":"incomplete"'),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 5}, '"stop_reason":"max_tokens"'),
        ("/api/chat", {"messages": MESSAGES, "options": {"num_predict": 5}}, '"done_reason":"length"'),
        ("/api/generate", {"prompt": "hi", "options": {"num_predict": 5}}, '"done_reason":"length"'),
    ],
)
def test_llama_server_answers_in_every_dialect(
    front: LiveServer, path: str, body: dict[str, Any], end: str, streams: bool
) -> None:
    answer = front.post(path, {**body, "model": "tiny", "stream": streams})
    assert answer.status_code == 200, answer.text
    assert end in answer.text
    assert "error" not in answer.text.replace('"error":null', "")
