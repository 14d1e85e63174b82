"""What the tests of loading a model and those of the manager share: settings of a small engine, a spy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from localllm.config.settings import EngineConfig, ServerConfig, Settings
from localllm.runner.runner import TorchRunner

PHASES = ["find", "torch", "fit", "tokenizer", "weights", "memory", "engine"]


def settings_for(path: Path, *, served_model_name: tuple[str, ...] = (), **engine: Any) -> Settings:
    engine = {"max_model_len": 256, "kv_cache_memory_bytes": 1 << 20, **engine}
    return Settings(EngineConfig(model=str(path), **engine), ServerConfig(served_model_name=served_model_name))


def spy_on_closing(monkeypatch: pytest.MonkeyPatch) -> list[TorchRunner]:
    """The list that every runner closed from now on is added to."""
    closed: list[TorchRunner] = []
    close = TorchRunner.close

    def spy(self: TorchRunner) -> None:
        closed.append(self)
        close(self)

    monkeypatch.setattr(TorchRunner, "close", spy)
    return closed
