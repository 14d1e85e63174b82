"""A model with its own prediction layer, served with --speculative mtp: the answers are those without drafts."""

from collections.abc import Iterator
from typing import Any

import pytest

from localllm.config.settings import EngineConfig, ServerConfig, Settings
from localllm.engine.speculation import Speculation
from localllm.errors import DrafterMismatch
from localllm.runner.host_drafts import NO_DRAFTS, HostDrafts
from localllm.serving.build import build_engine
from tests.mtp_models import make_mtp_model
from tests.web.live_server import LiveServer

TEXT = "/v1/completions"
PROMPT = "Paged attention reads the cache through a block table, so memory is not wasted. 0 1 2 3 4 5 6 7 8 9 10"
TWO: dict[str, Any] = {"allowed_token_ids": [300, 301]}
"""Of two tokens a layer of random weights guesses some."""


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server without lookup, whose steps verify as many drafts as they can."""
    path = make_mtp_model(tmp_path_factory.mktemp("mtp"), "mimo")
    engine = EngineConfig(
        model=str(path), max_model_len=512, kv_cache_memory_bytes=2 << 20, device="cpu", speculative="mtp",
        max_num_batched_tokens=24,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Speculation, "width", lambda self, decoding, ready, limit: limit // len(ready) - 1)
        patch.setattr(HostDrafts, "_find", lambda self, slot, most: NO_DRAFTS)
        with LiveServer(build_engine(Settings(engine, ServerConfig(port=0, ui=False)))) as server:
            yield server


def answer(server: LiveServer, body: dict[str, Any]) -> Any:
    response = server.post(TEXT, {"prompt": PROMPT, "max_tokens": 60, "ignore_eos": True, **body})
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize(
    "asked",
    [
        {**TWO, "temperature": 0}, {**TWO, "temperature": 1.3, "seed": 5}, {"temperature": 0.7, "seed": 1},
        {"temperature": 0, "repetition_penalty": 1.2},
    ],
)  # fmt: skip
def test_the_answer_is_that_without_drafts(real: LiveServer, asked: dict[str, Any]) -> None:
    """The prompt of each request but the first is found in the prefix cache."""
    plain = answer(real, {**asked, "speculative": False})
    drafted = answer(real, asked)
    assert drafted["choices"][0]["text"] == plain["choices"][0]["text"]
    assert drafted["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16
    assert "draft_n" not in plain["timings"]
    assert drafted["timings"]["draft_n"] > 20
    if "allowed_token_ids" in asked:
        assert drafted["timings"]["draft_n_accepted"] > 0


def test_a_model_without_such_a_layer_is_refused(tiny_llama_path: Any) -> None:
    engine = EngineConfig(model=str(tiny_llama_path), device="cpu", speculative="mtp")
    with pytest.raises(DrafterMismatch, match="LlamaForCausalLM"):
        build_engine(Settings(engine, ServerConfig(port=0, ui=False)))
