"""A server with an EAGLE drafter: answers are those without one, and another model's drafter is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from localllm.config.settings import EngineConfig, ServerConfig, Settings
from localllm.engine.speculation import Speculation
from localllm.errors import DrafterMismatch, UnsupportedModel
from localllm.serving.build import build_engine
from tests.eagle_files import write_eagle
from tests.web.live_server import LiveServer

CHAT = "/v1/chat/completions"
ASKED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 4},
    {"temperature": 0, "logprobs": True},
]


def settings_of(target: Path, drafter: Path) -> Settings:
    engine = EngineConfig(
        model=str(target), max_model_len=256, kv_cache_memory_bytes=2 << 20, device="cpu", speculative=str(drafter)
    )
    return Settings(engine, ServerConfig(port=0, ui=False))


@pytest.fixture
def config(tiny_llama_path: Path) -> dict[str, Any]:
    return dict(json.loads((tiny_llama_path / "config.json").read_text("utf-8")))


@pytest.mark.parametrize(
    ("method", "fields"),
    [("eagle3", {"taps": [0, 1], "as_bin": True}), pytest.param("eagle", {}, marks=pytest.mark.slow)],
)
def test_the_answer_is_that_without_the_drafter(
    tmp_path: Path, tiny_llama_path: Path, config: dict[str, Any], method: str, fields: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(Speculation, "width", lambda self, decoding, ready, limit: limit // len(ready) - 1)
    drafter = write_eagle(tmp_path / "drafter", config, method, **fields)
    with LiveServer(build_engine(settings_of(tiny_llama_path, drafter))) as server:
        for asked in ASKED:
            body = {"messages": [{"role": "user", "content": "Say it."}], "max_tokens": 40, "ignore_eos": True, **asked}
            plain, drafted = (server.post(CHAT, {**body, "speculative": s}).json() for s in (False, True))
            assert drafted["choices"][0]["message"] == plain["choices"][0]["message"]
            assert drafted["timings"]["draft_n"] > 20
            assert "draft_n" not in plain["timings"]


@pytest.mark.parametrize(
    ("method", "fields", "error", "told"),
    [
        ("eagle3", {"taps": [0, 1], "vocab_size": 700}, DrafterMismatch, "vocabulary of 700 tokens"),
        ("eagle3", {}, DrafterMismatch, "at least 7 layers"),
        ("eagle", {"fc_norm": True}, UnsupportedModel, "fc_norm"),
    ],
)
def test_another_models_drafter_is_refused(
    tmp_path: Path, tiny_llama_path: Path, config: dict[str, Any], method: str, fields: dict[str, Any],
    error: type[Exception], told: str,
) -> None:  # fmt: skip
    drafter = write_eagle(tmp_path / "drafter", config, method, **fields)
    with pytest.raises(error, match=told):
        build_engine(settings_of(tiny_llama_path, drafter))
