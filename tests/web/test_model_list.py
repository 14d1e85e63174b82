"""The lists of models, in the shapes of several clients: what each model can do, without a load and while one loads."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localllm.config.settings import EngineConfig, ModelTable, ServerConfig, Settings
from localllm.web.api.model_facts import Abilities, ModelFacts, abilities_of
from localllm.web.api.openai.models import codex_object
from tests.text.templates import CHATML
from tests.tiny import save_tiny_tokenizer
from tests.web.live_server import MAX_MODEL_LEN, LiveServer, ManagedServer

ANTHROPIC = {"anthropic-version": "2023-06-01"}


def test_a_model_says_what_it_can(hermes: LiveServer) -> None:
    (model,) = hermes.get("/v1/models").json()["data"]
    assert model["capabilities"] == ["completion", "tools", "reasoning"]
    assert (model["context_length"], model["max_model_len"]) == (MAX_MODEL_LEN, MAX_MODEL_LEN)
    assert hermes.get("/v1/models/tiny").json() == model
    without_pages = hermes.http.get("/models", headers={"accept": "text/html"})
    assert without_pages.json()["data"] == [model]


def test_codex_reads_the_context_and_the_tools(hermes: LiveServer) -> None:
    assert "models" not in hermes.get("/v1/models").json()
    (model,) = hermes.get("/v1/models?client_version=0.169.0").json()["models"]
    assert (model["slug"], model["context_window"], model["supports_parallel_tool_calls"]) == ("tiny", 512, True)
    assert model["input_modalities"] == ["text"]


def test_anthropics_clients_get_their_shape(hermes: LiveServer) -> None:
    listed = hermes.http.get("/v1/models", headers=ANTHROPIC).json()
    (model,) = listed["data"]
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "tiny", "tiny")
    assert (model["type"], model["id"], model["max_input_tokens"]) == ("model", "tiny", MAX_MODEL_LEN)
    assert hermes.http.get("/v1/models/tiny", headers=ANTHROPIC).json() == model


def test_lm_studios_clients_get_their_shape(hermes: LiveServer) -> None:
    (model,) = hermes.get("/api/v0/models").json()["data"]
    assert model == {
        "id": "tiny", "object": "model", "type": "llm", "publisher": "localllm", "arch": "llama",
        "compatibility_type": "safetensors", "quantization": "FLOAT32", "state": "loaded", "max_context_length": 2048,
        "loaded_context_length": MAX_MODEL_LEN, "capabilities": ["tool_use"],
    }  # fmt: skip
    assert hermes.get("/api/v0/models/tiny").json() == model
    assert hermes.get("/api/v0/models/nobody").status_code == 404


def test_the_lists_answer_while_a_model_loads() -> None:
    with LiveServer(None) as server:
        (model,) = server.get("/v1/models").json()["data"]
        assert (model["id"], model["status"]["value"]) == ("tiny", "loading")
        assert server.http.get("/v1/models", headers=ANTHROPIC).json()["data"][0]["id"] == "tiny"
        assert server.get("/api/v0/models").json()["data"][0]["state"] == "not-loaded"
        assert server.get("/v1/models?client_version=1").json()["models"][0]["context_window"] is None
        assert server.get("/api/tags").json()["models"][0]["name"] == "tiny"


def test_abilities_are_read_without_a_load_and_again_after_a_change(tmp_path: Path) -> None:
    save_tiny_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    assert abilities_of(tmp_path) == Abilities(tools=True, reasoning=True, template=CHATML)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }} plain", encoding="utf-8")
    assert abilities_of(tmp_path) == Abilities(template="{{ messages[0].content }} plain")
    (tmp_path / "chat_template.jinja").write_text("{% if", encoding="utf-8")
    assert abilities_of(tmp_path) == Abilities(template="{% if")


def test_an_unloaded_model_says_what_it_can(tiny_model_path: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "calls"
    folder.mkdir()
    for file in tiny_model_path("llama").iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    engine = EngineConfig(model="demo", max_model_len=256, kv_cache_memory_bytes=1 << 20)
    tables = {"calls": ModelTable("calls", {"model": str(folder)})}
    server = ServerConfig(port=0, on_demand=False, load_at_start=False)
    with ManagedServer(Settings(engine, server, models=tables)) as running:
        listed = {each["id"]: each for each in running.get("/v1/models").json()["data"]}
        assert listed["calls"]["capabilities"] == ["completion", "tools", "reasoning"]
        shown = running.post("/api/show", {"model": "calls"}).json()
        context = listed["calls"]["context_length"]
        assert shown["capabilities"] == ["completion", "tools", "thinking"]
        assert shown["model_info"]["general.basename"] == "calls"
        assert f"num_ctx                        {context}\n" in shown["parameters"] + "\n"
        assert shown["template"] == CHATML
        assert running.get("/props?model=calls").json()["default_generation_settings"]["n_ctx"] == context
        assert listed["calls"]["status"]["value"] == "unloaded"


def test_a_model_whose_files_cannot_be_read_is_listed_without_facts() -> None:
    facts: Any = ModelFacts("gone", None)
    assert (facts.capabilities(), facts.quant, facts.family) == (["completion"], "", "")
    assert json.loads(json.dumps(codex_object(facts).slug)) == "gone"


@pytest.mark.parametrize("path", ["/api/tags", "/api/version", "/"])
def test_head_is_answered(hermes: LiveServer, path: str) -> None:
    answer = hermes.http.head(path)
    assert (answer.status_code, answer.content) == (200, b"")


def test_ollamas_version_is_one_that_clients_accept(hermes: LiveServer) -> None:
    told = hermes.get("/api/version").json()
    assert tuple(map(int, told["version"].split("."))) >= (0, 13, 4)
    assert told["localllm"] == hermes.get("/version").json()["version"]
