"""What the tests of loading a model and those of the manager share: settings of a small engine, a spy."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import pytest

from localllm.config.settings import EngineConfig, ServerConfig, Settings
from localllm.engine.client import GenerationRequest
from localllm.engine.params import SamplingParams
from localllm.runner.runner import TorchRunner
from localllm.serving.served import ServedModel

PHASES = ["find", "torch", "fit", "tokenizer", "weights", "memory", "engine"]


def in_order(phases: Iterable[str]) -> list[str]:
    """The phases with the tokenizer before the weights: both are read at the same time, and either may be first."""
    names = list(phases)
    at = names.index("weights")
    if names[at + 1 : at + 2] == ["tokenizer"]:
        names[at : at + 2] = ["tokenizer", "weights"]
    return names


def settings_for(path: Path, *, served_model_name: tuple[str, ...] = (), **engine: Any) -> Settings:
    engine = {"max_model_len": 256, "kv_cache_memory_bytes": 1 << 20, **engine}
    return Settings(EngineConfig(model=str(path), **engine), ServerConfig(port=0, served_model_name=served_model_name))


def spy_on_closing(monkeypatch: pytest.MonkeyPatch) -> list[TorchRunner]:
    """The list that every runner closed from now on is added to."""
    closed: list[TorchRunner] = []
    close = TorchRunner.close

    def spy(self: TorchRunner) -> None:
        closed.append(self)
        close(self)

    monkeypatch.setattr(TorchRunner, "close", spy)
    return closed


def answer(model: ServedModel, prompt_len: int) -> list[int]:
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    prompt = [5 + i % 40 for i in range(prompt_len)]
    [request] = model.admission.admit(GenerationRequest("a", prompt, params))
    outputs: list[Any] = []
    model.loop.deliver = outputs.extend
    model.loop.submit(request)
    while model.loop.scheduler.has_work or not outputs:
        model.loop.step()
    return [token for output in outputs for token in output.token_ids]


ROOT = Path(__file__).parent.parent


class Server:
    """`localllm VERB ... --json` in a process of its own; a context manager that leaves nothing behind."""

    def __init__(self, folder: Path, *words: str) -> None:
        environ = os.environ | {"XDG_RUNTIME_DIR": str(folder), "XDG_CONFIG_HOME": str(folder), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "localllm", *words, "--port", "0", "--json"]
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self.events: list[dict[str, Any]] = []

    def wait_for(self, event: str) -> dict[str, Any]:
        """Read on until an event of that name; its facts."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.append(json.loads(line))
            if self.events[-1]["event"] == event:
                return self.events[-1]
        raise AssertionError(f"no {event!r} but {self.events}\n{self.log.read_text()}")

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.process.wait(20)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        with self.process:  # closes the pipe and waits
            self.process.kill()
