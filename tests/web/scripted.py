"""A server whose model says what a test writes, and servers of tools beside it: for tests of tools that run here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from localllm.config.mcp_servers import McpServer
from localllm.engine.client import GenerationRequest
from localllm.engine.params import SamplingParams
from localllm.text.structured import StructuredOutputsParams
from tests.text.templates import CHATML
from tests.web import live_server
from tests.web.live_server import LiveServer, PacedRunner, fake_model, settings

N = {"n": 1}


def called(name: str = "tool", arguments: object = N) -> str:
    """Return the text with which the model calls a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Script:
    """What the model says next, one text for each reply; the last one again and again. `prompts` is what it read."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.prompts: list[str] = []

    def says(self, *texts: str) -> None:
        self.texts = list(texts)

    def direct(self, monkeypatch: pytest.MonkeyPatch, room: ModuleType, served: LiveServer) -> Script:
        """Let every request that the module `room` makes be answered by this script."""
        assert served.model is not None
        tokenizer = served.model.tokenizer

        def saying(
            name: str, token_ids: Sequence[int], params: SamplingParams, *more: Any, **others: Any
        ) -> GenerationRequest:
            self.prompts.append(tokenizer.decode(token_ids, skip_special_tokens=False))
            text = self.texts.pop(0) if len(self.texts) > 1 else self.texts[0]
            said = replace(params, structured_outputs=StructuredOutputsParams(choice=[text]))
            return GenerationRequest(name, token_ids, said, *more, **others)

        monkeypatch.setattr(room, "GenerationRequest", saying)
        return self


@contextmanager
def tool_servers(folders: pytest.TempPathFactory) -> Iterator[Callable[..., LiveServer]]:
    """Yield a function that starts a server with these servers of tools, and data of its own. All end with the block.

    Its other arguments are those of `settings`.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live_server, "MAX_MODEL_LEN", 2048)
        running: list[LiveServer] = []

        def begin(*tools: McpServer, template: str | None = CHATML, **server: Any) -> LiveServer:
            data = folders.mktemp("data")
            patch.setenv("XDG_DATA_HOME", str(data))
            model = fake_model(folders.mktemp("hermes"), PacedRunner(), chat_template=template)
            asked = settings(**{"ui": True, **server})
            asked = replace(asked, file=data / "config.toml", mcp={each.name: each for each in tools})
            running.append(LiveServer(model, asked))
            return running[-1].__enter__()

        yield begin
        for each in running:
            each.__exit__(None, None, None)
