"""A server whose model follows a script: it reads two files with the client's own shell tool, then says so.

    .venv/bin/python scripts/clients/scripted_server.py

It prints one JSON line with its URL and serves until its standard input ends. The model needs no weights; what it says
depends on its prompt: a call for each file whose content it has not read yet, then `DONE`. A prompt that does not name
the files is answered with `Hello.`
Does not know: any program.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from localllm.engine.client import GenerationRequest
from localllm.engine.params import SamplingParams
from localllm.serving.answers import generation
from localllm.text.structured import StructuredOutputsParams
from tests.text.templates import CHATML
from tests.web import live_server
from tests.web.live_server import LiveServer, PacedRunner, fake_model

CONTEXT = 200_000
FILES = {"first.txt": "the first word is zebra", "second.txt": "the second word is giraffe"}
DONE = "Both words were read: zebra, giraffe."
SHELLS: dict[str, Any] = {
    "Bash": lambda command: {"command": command, "description": "Read a file"},
    "bash": lambda command: {"command": command, "description": "Read a file"},
    "exec_command": lambda command: {"cmd": command},
    "shell_command": lambda command: {"command": command},
    "shell": lambda command: {"command": ["bash", "-lc", command]},
    "run_shell_command": lambda command: {"command": command, "is_background": False},
    "run_commands": lambda command: {"commands": [command]},
    "execute_command": lambda command: {"command": command, "requires_approval": False},
}
"""Names of tools that run a command, and the arguments of each."""


def reply_to(prompt: str) -> str:
    """Return what the model says next."""
    if not all(name in prompt for name in FILES):
        return "Hello."
    tool = next((name for name in SHELLS if re.search(rf'"name": "{name}"', prompt)), None)
    missing = [name for name, content in FILES.items() if content not in prompt]
    if not missing or tool is None:
        return DONE if not missing else "Hello."
    call = {"name": tool, "arguments": SHELLS[tool](f"cat {missing[0]}")}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def serve() -> None:
    live_server.MAX_MODEL_LEN, live_server.NUM_BLOCKS = CONTEXT, 4 * CONTEXT // live_server.BLOCK_SIZE
    with tempfile.TemporaryDirectory() as folder:
        model = fake_model(Path(folder), PacedRunner(), chat_template=CHATML, max_num_batched_tokens=8192)

        def scripted(
            name: str, token_ids: Sequence[int], params: SamplingParams, *more: Any, **others: Any
        ) -> GenerationRequest:
            reply = reply_to(model.tokenizer.decode(token_ids, skip_special_tokens=False))
            said = replace(params, structured_outputs=StructuredOutputsParams(choice=[reply]))
            return GenerationRequest(name, token_ids, said, *more, **others)

        generation.GenerationRequest = scripted  # type: ignore[assignment,misc]
        with LiveServer(model, live_server.settings()) as server:
            print(json.dumps({"url": server.url}), flush=True)
            sys.stdin.read()


if __name__ == "__main__":
    serve()
