"""Adapters over a real socket, spoken to by the real `openai` client: loaded, used, listed, unloaded."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from localllm.config.lora_modules import LoraModule
from localllm.config.settings import EngineConfig, ServerConfig, Settings
from localllm.serving.build import build_engine
from tests.adapters import make_tiny_adapter
from tests.web.live_server import LiveServer, wait_until

LOAD, UNLOAD, TEXT = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/completions"
PROMPT = "The quick brown fox jumps over the lazy dog."


@pytest.fixture(scope="module")
def folders(tiny_llama_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {name: make_tiny_adapter(root / name, tiny_llama_path, seed=seed) for seed, name in enumerate("abc")}


@pytest.fixture(scope="module")
def live(tiny_llama_path: Path, folders: dict[str, Path]) -> Iterator[LiveServer]:
    engine = EngineConfig(
        model=str(tiny_llama_path), max_model_len=512, kv_cache_memory_bytes=2 << 20, device="cpu",
        lora_modules=(LoraModule("a", str(folders["a"])),), max_loras=2, max_lora_rank=4,
    )  # fmt: skip
    server = ServerConfig(port=0, ui=False, served_model_name=("base",), api_key="secret")
    with LiveServer(build_engine(Settings(engine, server)), Settings(engine, server)) as live:
        live.http.headers["authorization"] = "Bearer secret"
        yield live


def say(live: LiveServer, model: str, **fields: Any) -> Any:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **fields}
    answer = live.post(TEXT, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def said(answer: Any) -> str:
    return str(answer["choices"][0]["text"])


def test_an_adapters_life(live: LiveServer, folders: dict[str, Path]) -> None:
    client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="secret", max_retries=0)
    assert [model.id for model in client.models.list()] == ["base", "a"]
    assert live.post(LOAD, {"lora_name": "b", "lora_path": str(folders["b"])}).text == (
        "Success: LoRA adapter 'b' added successfully."
    )
    listed = client.models.retrieve("b").model_dump()
    assert (listed["root"], listed["parent"], listed["max_model_len"]) == (str(folders["b"]), "base", 512)
    assert listed["status"] == {"value": "loaded"}

    texts = {}
    for name in ("base", "a", "b"):
        answer = client.completions.create(model=name, prompt=PROMPT, max_tokens=8, temperature=0)
        assert answer.model == name
        texts[name] = answer.choices[0].text
    assert len(set(texts.values())) == 3
    chat = client.chat.completions.create(
        model="b", messages=[{"role": "user", "content": "hi"}], max_tokens=4, stream=True
    )
    assert {chunk.model for chunk in chat} == {"b"}

    assert live.post(UNLOAD, {"lora_name": "b"}).text == "Success: LoRA adapter 'b' removed successfully."
    assert [model.id for model in client.models.list()] == ["base", "a"]
    with pytest.raises(openai.NotFoundError, match="'b' is not served here"):
        client.completions.create(model="b", prompt=PROMPT)
    live.post(LOAD, {"lora_name": "b", "lora_path": str(folders["c"])})  # another adapter under the same name
    assert said(say(live, "b")) not in texts.values()
    live.post(UNLOAD, {"lora_name": "b"})


def test_prefixes_of_an_adapter_are_its_own(live: LiveServer) -> None:
    prompt = {"prompt": list(range(3, 43)), "max_tokens": 1}

    def cached(model: str) -> int:
        return int(say(live, model, **prompt)["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [cached(model) for model in ("a", "base", "a", "base")] == [0, 0, 32, 32]


def test_unloading_while_it_answers(live: LiveServer, folders: dict[str, Path]) -> None:
    """The answer that runs comes to its end; whoever asks meanwhile is refused."""
    live.post(LOAD, {"lora_name": "b", "lora_path": str(folders["b"])})
    wanted = said(say(live, "b", max_tokens=400))
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(say(live, "b", max_tokens=400)))
    asking.start()
    wait_until(lambda: live.stats().num_running > 0)
    assert live.post(UNLOAD, {"lora_name": "b"}).status_code == 200
    asking.join(20)
    assert said(answers[0]) == wanted
    assert live.post(TEXT, {"model": "b", "prompt": "x"}).status_code == 404


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        (LOAD, {"lora_name": "x"}, 400, "Both 'lora_name' and 'lora_path' must be provided."),
        (LOAD, {"lora_path": "x"}, 400, "Both 'lora_name' and 'lora_path' must be provided."),
        (LOAD, {"lora_name": "x", "lora_path": "y", "load_inplace": True}, 400, "load_inplace"),
        (LOAD, {"lora_name": "a", "lora_path": "y"}, 400, "The name 'a' is taken."),
        (LOAD, {"lora_name": "base", "lora_path": "y"}, 400, "The name 'base' is taken."),
        (LOAD, {"lora_name": "x", "lora_path": "/nowhere"}, 404, "/nowhere does not hold an adapter."),
        (LOAD, {"lora_name": "x", "lora_path": "/nowhere", "model": "other"}, 404, "'other' is not served here."),
        (UNLOAD, {}, 400, "'lora_name' needs to be provided"),
        (UNLOAD, {"lora_name": "x"}, 404, "The adapter 'x' is not loaded."),
        (UNLOAD, {"lora_name": "base"}, 404, "The adapter 'base' is not loaded."),
    ],
)
def test_refusals(live: LiveServer, path: str, body: dict[str, Any], status: int, said: str) -> None:
    answer = live.post(path, body)
    assert answer.status_code == status
    assert said in answer.json()["error"]["message"]


def test_the_key_is_asked_for(live: LiveServer) -> None:
    assert live.post(LOAD, {}, headers={"authorization": "Bearer guess"}).status_code == 401
    assert live.post(UNLOAD, {}, headers={"authorization": "Bearer guess"}).status_code == 401
    assert live.post(LOAD, {}, headers={"origin": "http://evil.example"}).status_code == 403
