"""A server whose models are made of memory and load in no time, on a local hub: for the Models page."""

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from localllm.config.settings import EngineConfig, PicksTable, ServerConfig, Settings
from localllm.errors import DoesNotFit
from localllm.models.library.catalog import DEMO_NAME, resolve_model
from localllm.serving import manager, suggestions
from localllm.serving.phases import OnPhase, Phase
from localllm.serving.reopen import SleepingModel
from localllm.serving.served import LoadLimits, ServedModel, short_name
from tests.web.live_server import ManagedServer, PacedRunner, fake_model


class Loads:
    """Stands where models are built. `gate`: cleared, a load stands still at its weights."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """folder: for the models that are made."""
        folder.mkdir(exist_ok=True)
        self.folder, self.gate = folder, threading.Event()
        self.gate.set()
        self.runners: list[PacedRunner] = []  # of the models that were made, the newest last
        self.configs: list[EngineConfig] = []  # of all loads
        self.error: DoesNotFit | None = None  # why no model but the demo can be loaded
        for name, fake in (("build_engine", self.build), ("put_to_sleep", self.sleep), ("wake_up", self.wake)):
            monkeypatch.setattr(manager, name, fake)
        monkeypatch.setattr(suggestions, "memory_bandwidth", lambda _: 25e9)  # of a machine with nothing else to do

    def build(self, settings: Settings, on_phase: OnPhase, limits: LoadLimits) -> ServedModel:
        found = resolve_model(settings.engine.model)
        self.configs.append(settings.engine)
        on_phase(Phase("weights", "2.3 of 5.7 GiB", fraction=0.4))
        while not self.gate.wait(0.02):
            on_phase(Phase("weights", "2.3 of 5.7 GiB", fraction=0.4))
        if self.error is not None and found.name != DEMO_NAME:
            raise DoesNotFit(self.error.what, self.error.why, self.error.hint)  # a new one, as real loads raise
        name = next(iter(settings.server.served_model_name), short_name(found.name))
        self.runners.append(PacedRunner())
        return replace(fake_model(self.folder, self.runners[-1]), name=name, path=found.path, aliases=frozenset())

    def sleep(self, served: ServedModel) -> SleepingModel:
        served.loop.stop()
        return SleepingModel(SimpleNamespace(close=lambda: None), served)  # type: ignore[arg-type]

    def wake(self, asleep: SleepingModel, settings: Settings, on_phase: OnPhase, limits: LoadLimits) -> ServedModel:
        return self.build(settings, on_phase, limits)


def only_pick(name: str, num_bytes: int = 300_000, title: str = "Tiny") -> PicksTable:
    """A list of suggested models with one entry, as a config file has it."""
    sizes = {"vocab_size": 4096, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 8192}
    entry = {
        "name": name, "title": title, "says": "Answers anything.", "license": "apache-2.0", "bytes": num_bytes,
        "parameters": num_bytes // 2, "config": {"architectures": ["LlamaForCausalLM"], **sizes, **heads},
    }  # fmt: skip
    return PicksTable(Path("config.toml"), entries=(entry,))


class LibraryServer(ManagedServer):
    """With the demo loaded."""

    def __init__(
        self, engine: EngineConfig | None = None, port: int = 0, api_key: str | None = None,
        picks: PicksTable | None = None, file: Path | None = None,
    ) -> None:  # fmt: skip
        server = ServerConfig(port=port, ui=True, api_key=api_key)
        super().__init__(Settings(engine or EngineConfig(), server, picks=picks, file=file))
