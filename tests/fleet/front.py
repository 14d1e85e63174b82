"""A server in front of others, for the tests of its API and those of its pages."""

import json
from typing import Any

import httpx

from localllm.config.settings import EngineConfig, ServerConfig, Settings
from localllm.config.upstreams import UpstreamConfig
from localllm.fleet import upstreams
from tests.fleet.hostile import WORDS, HostileServer
from tests.web.live_server import LiveServer

ANSWER = "".join(WORDS)
MESSAGES = [{"role": "user", "content": "Why is the sky blue?"}]
CHAT = {"model": "theirs", "messages": MESSAGES}


class Front(LiveServer):
    """A server with these upstreams, and with a model of its own or without one."""

    def __init__(self, *servers: UpstreamConfig, model: Any = None, mcp: Any = None, **server: Any) -> None:
        config = ServerConfig(**{"port": 0, "ui": False, **server})
        named = {each.name: each for each in servers}
        super().__init__(model, Settings(EngineConfig(), config, upstreams=named, mcp=mcp or {}))
        if model is None:
            self.manager.entries.clear()

    @property
    def others(self) -> upstreams.Upstreams:
        found: upstreams.Upstreams = self.server.app.state.upstreams
        return found

    def chat(self, **more: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", {**CHAT, **more})

    def streamed(self, **more: Any) -> tuple[str, list[dict[str, Any]]]:
        """The text of a streamed answer, and its error events."""
        lines = [each[5:].strip() for each in self.chat(stream=True, **more).text.splitlines() if each[:5] == "data:"]
        events = [json.loads(each) for each in lines if each != "[DONE]"]
        said = [choice["delta"].get("content") or "" for each in events for choice in each.get("choices", ())]
        return "".join(said), [each["error"] for each in events if "error" in each]


def config_of(server: HostileServer, name: str, **more: Any) -> UpstreamConfig:
    return UpstreamConfig(name, f"{server.url}/v1", **more)
