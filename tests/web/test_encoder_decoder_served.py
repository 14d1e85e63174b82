"""An encoder-decoder behind /v1/completions on a real socket, as transformers answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from localllm.config.settings import EngineConfig, ServerConfig, Settings
from localllm.serving.build import build_engine
from localllm.serving.served import ServedModel
from tests.models.encoder_decoders import load_reference, save_encoder_decoder
from tests.web.live_server import LiveServer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_encoder_decoder(tmp_path_factory.mktemp("m2m"), "m2m_100")


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[tuple[LiveServer, ServedModel]]:
    engine = EngineConfig(model=str(folder), device="cpu", max_num_seqs=4)
    model = build_engine(Settings(engine, ServerConfig(served_model_name=("m2m",))))
    with LiveServer(model) as server:
        yield server, model


def test_the_openai_client_gets_what_transformers_writes(served: tuple[LiveServer, ServedModel], folder: Path) -> None:
    server, model = served
    reference, tokenizer = load_reference(folder), model.tokenizer
    texts = ["Hello!", "The quick brown fox jumps over the lazy dog."]
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none-needed")
    asked: dict[str, Any] = {"model": "m2m", "max_tokens": 9, "temperature": 0}
    whole = client.completions.create(prompt=texts, **asked, extra_body={"tgt_lang": "de"})
    german = tokenizer.token_id("__de__")
    for text, choice in zip(texts, whole.choices, strict=True):
        ids = torch.tensor([tokenizer.encode(text)])
        wanted = reference.generate(ids, max_new_tokens=10, num_beams=1, forced_bos_token_id=german)[0, 2:].tolist()
        assert choice.text == tokenizer.decode(wanted)
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == sum(len(tokenizer.encode(text)) for text in texts)
    stream = client.completions.create(prompt=texts[0], stream=True, **asked, extra_body={"tgt_lang": "de"})
    assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == whole.choices[0].text
    assert model.client.stats().num_running == 0


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "words"),
    [
        ("/v1/completions", {"prompt": "a", "echo": True}, 400, "echo", "does not continue the prompt"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, 400, "suffix", "cannot fill in the middle"),
        ("/v1/completions", {"prompt": "a", "tgt_lang": "fr"}, 400, "tgt_lang", "__de__, __en__"),
        ("/v1/completions", {"prompt": [5] * 70}, 400, "prompt", "The prompt has 70 tokens"),
        ("/v1/embeddings", {"input": "a"}, 400, "model", "generates text"),
    ],
)
def test_refusals(
    served: tuple[LiveServer, ServedModel], path: str, body: dict[str, Any], status: int, param: str, words: str
) -> None:
    answer = httpx.post(f"{served[0].url}{path}", json={"model": "m2m", **body}, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
    assert words in answer.json()["error"]["message"]
    again = httpx.post(f"{served[0].url}/v1/completions", json={"model": "m2m", "prompt": "a", "max_tokens": 1})
    assert again.status_code == 200
