"""Ollama's dialect: the real ollama client against a real socket, golden lines, and bad input in every field."""

import json
import runpy
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest
from ollama import _types as sdk

from localllm.config.settings import EngineConfig, ModelTable, ServerConfig, Settings
from localllm.engine.outputs import GenerationEvent, Timings, Usage
from localllm.errors import StepFailed
from localllm.serving.answers.generation import Progress
from localllm.serving.build import build_engine
from localllm.web.api import disconnect
from localllm.web.api.ollama import lines
from localllm.web.api.ollama.models import plain_name
from localllm.web.api.ollama.schema import OPTION_RULES, RULES, OllamaChatBody, OllamaGenerateBody, Options
from tests.hub.conftest import checkpoint, hub  # noqa: F401
from tests.hub.local_hub import LocalHub
from tests.models.pooling.checkpoints import save_bert
from tests.web.live_server import MAX_MODEL_LEN, LiveServer, ManagedServer, PacedRunner, settings, wait_until

CHAT, GENERATE = "/api/chat", "/api/generate"
USER: list[Any] = [{"role": "user", "content": "Hello, 世界 🙂"}]
FEW: dict[str, Any] = {"num_predict": 20, "temperature": 0}


@pytest.fixture
def client(server: LiveServer) -> Iterator[ollama.Client]:
    with client_of(server) as client:
        yield client


def client_of(server: LiveServer) -> ollama.Client:
    return ollama.Client(host=server.url, verify=False, timeout=20)


def refusal(response: httpx.Response, status: int) -> str:
    assert response.status_code == status, response.text
    assert response.json().keys() == {"error"}
    message = response.json()["error"]
    assert isinstance(message, str)
    assert message
    return message


def said(response: httpx.Response) -> list[Any]:
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


def test_chat_says_the_same_whole_and_streamed(client: ollama.Client) -> None:
    whole = client.chat("tiny:latest", USER, options=FEW)
    assert (whole.model, whole.message.role, whole.done, whole.done_reason) == ("tiny", "assistant", True, "length")
    assert whole.message.content
    assert (whole.eval_count, whole.created_at is not None) == (20, True)
    assert whole.prompt_eval_count
    assert whole.total_duration > whole.load_duration >= 0  # type: ignore[operator]
    assert whole.eval_duration > 0  # type: ignore[operator]
    parts = list(client.chat("tiny", USER, options=FEW, stream=True))
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert (parts[-1].done_reason, parts[-1].eval_count) == ("length", 20)


def test_generate_is_chat_without_history(client: ollama.Client) -> None:
    asked = client.generate("tiny", "Hello", system="Be brief.", options=FEW)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert asked.response == client.chat("tiny", messages, options=FEW).message.content
    parts = list(client.generate("tiny", "Hello", system="Be brief.", options=FEW, stream=True))
    assert "".join(part.response for part in parts) == asked.response


def test_a_raw_prompt_meets_no_template(client: ollama.Client, server: LiveServer) -> None:
    raw = client.generate("tiny", "Hello", raw=True, options=FEW)
    plain = server.post("/v1/completions", {"prompt": "Hello", "max_tokens": 20, "temperature": 0}).json()
    assert raw.response == plain["choices"][0]["text"]
    assert raw.prompt_eval_count == plain["usage"]["prompt_tokens"]


def test_a_last_message_of_the_assistant_is_continued(server: LiveServer) -> None:
    messages = [*USER, {"role": "assistant", "content": "It is"}]
    tokens = server.post("/tokenize", {
        "messages": messages, "continue_final_message": True, "add_generation_prompt": False,
    }).json()["count"]  # fmt: skip
    answer = server.post(CHAT, {"messages": messages, "stream": False, "options": FEW}).json()
    assert answer["prompt_eval_count"] == tokens


@pytest.mark.parametrize("num_predict", [None, -2, 10**30])
def test_without_a_limit_the_context_is_filled(server: LiveServer, num_predict: int | None) -> None:
    answer = server.post(CHAT, {"messages": USER, "stream": False, "options": {"num_predict": num_predict}}).json()
    assert answer["prompt_eval_count"] + answer["eval_count"] == MAX_MODEL_LEN
    assert answer["done_reason"] == "length"


OPTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"temperature": 0.6, "max_tokens": None, "seed": 0}),  # the model's generation_config
    ({"temperature": 0.1, "seed": 7}, {"temperature": 0.1, "seed": 7}),
    ({"top_p": 0.5, "top_k": 7, "min_p": 0.1}, {"top_p": 0.5, "top_k": 7, "min_p": 0.1}),
    ({"presence_penalty": 1, "frequency_penalty": -1}, {"presence_penalty": 1, "frequency_penalty": -1}),
    ({"repeat_penalty": 1.2}, {"repetition_penalty": 1.2, "repeat_last_n": 64}),
    ({"frequency_penalty": 1, "repeat_last_n": 0}, {"frequency_penalty": 1, "repeat_last_n": 0}),
    (
        {"mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.2, "typical_p": 0.7},
        {"mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.2, "typical_p": 0.7},
    ),
    (
        {"dry_multiplier": 0.8, "dry_sequence_breakers": ["x"]},
        {"dry_multiplier": 0.8, "dry_sequence_breakers": ("x",), "dry_penalty_last_n": 64},
    ),
    ({"repeat_penalty": 1.2, "repeat_last_n": -1}, {"repetition_penalty": 1.2, "repeat_last_n": -1}),
    ({"repeat_last_n": 33, "penalize_newline": False}, {"repetition_penalty": 1.0, "repeat_last_n": 33}),
    ({"stop": "x", "num_predict": 3}, {"stop": ("x",), "max_tokens": 3}),
    ({"stop": ["x", "y"], "seed": -1}, {"stop": ("x", "y"), "seed": None}),
]


@pytest.mark.parametrize(("options", "params"), OPTIONS, ids=lambda fields: ",".join(fields))
def test_options_reach_the_engine(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], params: dict[str, Any]
) -> None:
    assert server.model is not None
    admission, admitted = server.model.admission, []
    admit = type(admission).admit
    monkeypatch.setattr(type(admission), "admit", lambda self, asked: admitted.append(asked) or admit(self, asked))
    response = server.post(GENERATE, {"prompt": "Hi", "options": options | {"stop": options.get("stop", "e")}})
    assert response.status_code == 200, response.text
    asked = admitted[0].params
    params = {name: value for name, value in params.items() if (name, value) != ("seed", 0)}
    assert {name: getattr(asked, name) for name in params} == params


GOLDEN = b"""\
{"model":"tiny","created_at":"2026-01-02T03:04:05.000000Z","message":{"role":"assistant","content":"Say \\"hi\\""},\
"done":false}
{"model":"tiny","created_at":"2026-01-02T03:04:05.000000Z","message":{"role":"assistant","content":"\\n!"},"done":false}
{"model":"tiny","created_at":"2026-01-02T03:04:05.000000Z","message":{"role":"assistant","content":""},"done":true,\
"done_reason":"stop","total_duration":99,"load_duration":7,"prompt_eval_count":9,"prompt_eval_duration":250000000,\
"eval_count":3,"eval_duration":750000000}
"""


def test_golden_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines.time, "time", lambda: 1767323045.0)
    monkeypatch.setattr(lines.RequestClock, "total_ns", lambda self: 99)
    encoder = lines.OllamaLines(lines.OllamaHead("tiny", "chat", lines.RequestClock(load_ns=7)))
    progress = Progress(1, 9, 1)
    timings = Timings(prefill_s=0.25, decode_s=0.5)
    news = [
        GenerationEvent(0, 'Say "hi"', (5, 6)),
        GenerationEvent(0, "", (7,)),
        GenerationEvent(0, "\n!", (), finish_reason="stop", usage=Usage(9, 3, 4), timings=timings),
    ]
    written = b""
    for event in news:
        progress.count(event)
        written += encoder.event(event, progress)
    assert written + encoder.end(progress) == GOLDEN
    assert encoder.error(StepFailed("It failed.", "A reason.")) == b'{"error":"It failed. A reason."}\n'
    generated = lines.OllamaLines(lines.OllamaHead("tiny", "generate", lines.RequestClock(load_ns=7)))
    assert b'"response":"Say \\"hi\\"","done":false}\n' in generated.event(news[0], progress)


def test_an_error_in_mid_stream_is_a_line(client: ollama.Client, runner: PacedRunner) -> None:
    runner.step_s = 0.01
    stream = client.chat("tiny", USER, stream=True)
    next(stream)
    runner.failing = True
    with pytest.raises(ollama.ResponseError):
        list(stream)


def test_a_silent_stream_sends_no_line_that_says_nothing(
    server: LiveServer, runner: PacedRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disconnect, "PING_INTERVAL_S", 0.02)
    runner.step_s = 0.1
    answer = server.post(GENERATE, {"prompt": "Hi", "options": {"num_predict": 3}})
    assert [line["done"] for line in said(answer)][-1] is True


# Models -------------------------------------------------------------------------------------------------------------


def test_models_are_listed_and_shown(client: ollama.Client) -> None:
    [model] = client.list().models
    assert (model.model, model.details.format) == ("tiny", "safetensors")  # type: ignore[union-attr]
    [loaded] = client.ps().models
    assert (loaded.name, loaded.context_length, loaded.size_vram) == ("tiny", MAX_MODEL_LEN, 0)
    assert loaded.expires_at.year == 9999  # type: ignore[union-attr]
    shown = client.show("tiny:latest")
    assert shown.capabilities == ["completion"]
    assert shown.modelinfo["llama.context_length"] == MAX_MODEL_LEN  # type: ignore[index]
    assert "<|im_start|>" in (shown.template or "")
    assert [line.split() for line in (shown.parameters or "").splitlines()] == [
        ["num_ctx", "512"],
        ["temperature", "0.6"],
    ]
    with pytest.raises(ollama.ResponseError, match="Served: tiny"):
        client.show("gemma")


def test_who_only_asks_whether_it_runs_is_told_so(server: LiveServer) -> None:
    assert server.get("/").text == "Ollama is running"
    assert server.http.head("/").status_code == 200
    assert server.get("/api/version").json()["version"]


def test_with_pages_a_browser_gets_the_chat_and_a_program_a_word() -> None:
    with LiveServer(None, settings(ui=True)) as server:
        assert server.get("/").text == "Ollama is running"
        assert server.http.head("/").status_code == 200
        assert server.get("/", headers={"accept": "text/html,*/*;q=0.8"}).text.startswith("<!doctype html>")


@pytest.fixture(scope="module")
def managed(tiny_model_path: Callable[[str], Path]) -> Iterator[ManagedServer]:
    engine = EngineConfig(model=str(tiny_model_path("llama")), max_model_len=256, kv_cache_memory_bytes=1 << 20)
    tables = {"other": ModelTable("other", {"model": str(tiny_model_path("qwen3"))})}
    asked = ServerConfig(port=0, served_model_name=("first",), on_demand=False)
    with ManagedServer(Settings(engine, asked, models=tables)) as server:
        wait_until(lambda: server.get("/health").status_code == 200)
        yield server


def test_without_a_prompt_a_model_is_loaded_and_unloaded(managed: ManagedServer) -> None:
    with client_of(managed) as client:
        for unload in (lambda: client.generate("first", keep_alive=0), lambda: client.chat("first", keep_alive=0)):
            answer = unload()
            assert (answer.done, answer.done_reason) == (True, "unload")
            assert client.ps().models == []
        answer = client.generate("first:latest", keep_alive="10m")
        assert (answer.done, answer.done_reason, client.chat("first", []).done_reason) == (True, "load", "load")
        [loaded] = client.ps().models
        assert loaded.expires_at.year < 9999  # type: ignore[union-attr]
    managed.manager.entries[0].pinned = True
    response = managed.post(GENERATE, {"model": "first", "keep_alive": "5m"})
    assert "pinned" in response.headers["x-localllm-warning"]


def test_a_model_that_was_never_loaded_is_listed_and_shown(managed: ManagedServer) -> None:
    assert [model["name"] for model in managed.get("/api/tags").json()["models"]] == ["first", "other"]
    shown = managed.post("/api/show", {"model": "other"}).json()
    assert shown["model_info"]["general.architecture"] == "qwen3"
    assert shown["model_info"]["qwen3.context_length"] > 256
    assert [model["name"] for model in managed.get("/api/ps").json()["models"]] == ["first"]


def test_a_model_that_is_asked_with_keep_alive_0_goes_after_its_answer(managed: ManagedServer) -> None:
    managed.manager.entries[0].pinned = False
    assert managed.post(CHAT, {"messages": USER, "keep_alive": 0, "options": {"num_predict": 3}}).status_code == 200
    wait_until(lambda: managed.get("/api/ps").json()["models"] == [])
    shown = managed.post("/api/show", {"name": "first"}).json()
    assert shown["model_info"]["llama.context_length"] == 256


def test_embeddings(tmp_path: Path) -> None:
    model = build_engine(Settings(EngineConfig(model=str(save_bert(tmp_path)), device="cpu")))
    with LiveServer(model) as server, client_of(server) as client:
        answer = client.embed(model.name, ["The quick brown fox", "a"])
        one = client.embeddings(model.name, "a")
        assert [len(vector) for vector in answer.embeddings] == [32, 32]
        assert one.embedding == pytest.approx(answer.embeddings[1], abs=1e-5)
        assert answer.prompt_eval_count
        assert len(client.embed(model.name, "a", dimensions=8).embeddings[0]) == 8
        assert client.show(model.name).capabilities == ["embedding"]
        long = "word " * 200
        assert client.embed(model.name, long, truncate=True).prompt_eval_count == 64
        assert "truncate: true" in refusal(server.post("/api/embed", {"input": long}), 400)
        for body in ({"input": []}, {"input": 3}, {"input": [3]}, {}, {"input": "a", "dimensions": "x"}):
            refusal(server.post("/api/embed", body), 400)
        refusal(server.post("/api/embeddings", {"prompt": ["a"]}), 400)


def test_a_model_is_pulled_and_deleted(hub: LocalHub, checkpoint: Path) -> None:  # noqa: F811
    hub.add_repo("org/name", checkpoint)
    with LiveServer(None) as server, client_of(server) as client:
        parts = list(client.pull("org/name:latest", stream=True))
        assert (parts[0].status, parts[-1].status) == ("pulling manifest", "success")
        assert parts[-3].completed == parts[-3].total > 300_000  # type: ignore[operator]
        assert client.delete("org/name").status == "success"
        assert client.pull("org/name").status == "success"
        with pytest.raises(ollama.ResponseError) as caught:
            client.delete("org/other")
        assert caught.value.status_code == 404
        with pytest.raises(ollama.ResponseError):
            client.pull("org/absent")
        hub.add_repo("org/closed", checkpoint, gated=True)
        with pytest.raises(ollama.ResponseError):
            list(client.pull("org/closed", stream=True))
        refusal(server.post("/api/pull", {"model": "org/name", "insecure": True}), 400)


def test_a_model_is_copied_to_a_second_name(
    tiny_model_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    engine = EngineConfig(model="demo", max_model_len=256, kv_cache_memory_bytes=4 << 20)
    with ManagedServer(Settings(engine, ServerConfig(port=0))) as server, client_of(server) as client:
        wait_until(lambda: server.get("/health").status_code == 200)
        assert client.copy("demo", "helper:latest").status == "success"
        assert [model.model for model in client.list().models] == ["demo", "helper"]
        assert client.generate("helper", "Hello", options={"num_predict": 2}).eval_count == 2
        assert [model.model for model in client.ps().models] == ["demo"]  # the same one: nothing is loaded twice
        listed = {each["id"]: each for each in server.get("/v1/models").json()["data"]}
        assert (listed["helper"]["root"], listed["helper"]["status"]) == ("demo", {"value": "loaded"})
        assert client.show("helper").modelinfo == client.show("demo").modelinfo
        assert client.delete("helper").status == "success"
        for refused, status in ((("helper", "a"), 404), (("demo", "demo"), 409), (("demo", "a b"), 400)):
            with pytest.raises(ollama.ResponseError) as caught:
                client.copy(*refused)
            assert caught.value.status_code == status
        assert client.copy("demo", "helper").status == "success"
        client.delete("helper")
        with pytest.raises(ollama.ResponseError) as caught:
            client.generate("helper", "Hello")
        assert caught.value.status_code == 404
        refusal(server.post("/api/copy", {"source": "demo"}), 400)
        refusal(server.post("/api/copy", {"source": "demo", "destination": " "}), 400)


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/api/push"), ("POST", "/api/create"), ("POST", "/api/blobs/sha256:00")],
)
def test_calls_that_are_not_offered_say_why(server: LiveServer, method: str, path: str) -> None:
    assert "not" in refusal(server.http.request(method, path, json={"model": "a", "source": "a"}), 501)
    assert server.http.head("/api/blobs/sha256:00").status_code == 501


# Refusals -----------------------------------------------------------------------------------------------------------


def of(*kinds: type) -> set[str]:
    return {name for kind in kinds for name in typing.get_type_hints(kind)} - {"model_config"}


@pytest.mark.parametrize("name", sorted(of(sdk.ChatRequest, sdk.GenerateRequest)))
def test_every_field_of_the_client_has_a_place(name: str) -> None:
    honoured = {*OllamaChatBody.__struct_fields__, *OllamaGenerateBody.__struct_fields__}
    assert name in {*honoured, *RULES.harmless, *RULES.hints, *RULES.refused}


@pytest.mark.parametrize("name", sorted(of(sdk.Options)))
def test_every_option_of_the_client_has_a_place(name: str) -> None:
    assert name in {
        *Options.__struct_fields__, *OPTION_RULES.harmless, *OPTION_RULES.hints, *OPTION_RULES.refused,
    }  # fmt: skip


def chat(**message: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": [message]}


def offering(*tools: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": USER, "tools": list(tools)}


def option(**options: Any) -> tuple[str, dict[str, Any]]:
    return GENERATE, {"prompt": "Hi", "options": options}


def field(**fields: Any) -> tuple[str, dict[str, Any]]:
    return GENERATE, {"prompt": "Hi", **fields}


BAD: list[tuple[tuple[str, dict[str, Any]], str]] = [
    (field(model=3), "model"),
    (field(prompt=3), "prompt"),
    (field(system=[]), "system"),
    (field(raw="yes"), "raw"),
    (field(raw=True, system="Be brief."), "system"),
    (field(stream=1), "stream"),
    (field(keep_alive=True), "keep_alive"),
    (field(keep_alive="soon"), "keep_alive"),
    (field(options=[]), "options"),
    (field(think="hard"), "think"),
    (field(think=7), "think"),
    (field(raw=True, think=True), "think"),
    (field(format="xml"), "invalid format: 'xml'"),
    (field(format=["json"]), "format"),
    (field(format={"type": "object", "not": {}}), "not"),
    (field(tools=[{"type": "function"}]), "tools"),
    (field(images=["AAAA"]), "images"),
    (field(suffix="end"), "suffix"),
    (field(template="{{ .Prompt }}"), "template"),
    (field(context=[1, 2]), "context"),
    (field(top_logprobs=2), "top_logprobs"),
    (field(width=512), "width"),
    ((CHAT, {"messages": "Hi"}), "messages"),
    ((CHAT, {"messages": ["Hi"]}), "messages[0]"),
    (offering(3), "tools[0]"),
    (offering({"type": "web_search"}), "tools[0] is of type 'web_search'"),
    (offering({"type": "function"}), "tools[0].function"),
    (offering({"function": {"name": ""}}), "tools[0].function.name"),
    (offering({"function": {"name": "f", "parameters": []}}), "tools[0].function.parameters"),
    (offering({"function": {"name": "f"}}, {"function": {"name": "f"}}), "Two tools"),
    (offering({"function": {"name": "f"}}), '"tiny" does not support tools'),
    ((CHAT, {"messages": USER, "tools": {}}), "tools"),
    (chat(content="Hi"), "messages[0].role"),
    (chat(role="wizard", content="Hi"), "messages[0]"),
    (chat(role="user", content=3), "messages[0].content"),
    (chat(role="user", content="Hi", images=["AAAA"]), "messages[0].images"),
    (chat(role="user", content="Hi", thinking=3), "messages[0].thinking"),
    (chat(role="assistant", tool_calls="f"), "messages[0].tool_calls"),
    (chat(role="assistant", tool_calls=[{"function": 3}]), "messages[0].tool_calls[0]"),
    (chat(role="tool", content="Hi", tool_name=3), "messages[0].tool_name"),
    (chat(role="tool", content="Hi", tool_call_id=3), "messages[0].tool_call_id"),
    (option(num_ctx="big"), "options.num_ctx"),
    (option(num_predict=0), "options.num_predict"),
    (option(num_predict=-3), "options.num_predict"),
    (option(num_predict=1.5), "options.num_predict"),
    (option(seed="x"), "options.seed"),
    (option(stop=[3]), "options.stop[0]"),
    (option(stop=""), "options.stop"),
    (option(temperature=-1), "options.temperature"),
    (option(temperature="hot"), "options.temperature"),
    (option(top_k=-2), "options.top_k"),
    (option(top_k=1.5), "options.top_k"),
    (option(top_p=2), "options.top_p"),
    (option(top_p="x"), "options.top_p"),
    (option(min_p=2), "options.min_p"),
    (option(min_p=[]), "options.min_p"),
    (option(repeat_penalty=0), "options.repeat_penalty"),
    (option(repeat_penalty="x"), "options.repeat_penalty"),
    (option(presence_penalty=3), "options.presence_penalty"),
    (option(presence_penalty="x"), "options.presence_penalty"),
    (option(frequency_penalty=-3), "options.frequency_penalty"),
    (option(frequency_penalty="x"), "options.frequency_penalty"),
    (option(typical_p=1.5), "options.typical_p"),
    (option(tfs_z=0.5), "options.tfs_z"),
    (option(mirostat=3), "options.mirostat"),
    (option(repeat_last_n=-2), "options.repeat_last_n"),
    (option(repeat_last_n=1.5), "options.repeat_last_n"),
    (option(penalize_newline=False, repeat_penalty=1.1), "options.penalize_newline"),
    (option(penalize_newline="no"), "options.penalize_newline"),
    ((CHAT, {}), "model is required"),
    ((CHAT, {"model": "", "messages": []}), "model is required"),
    ((GENERATE, {"keep_alive": 0}), "model is required"),
    (("/api/show", {}), "model"),
    (("/api/show", {"model": 3}), "model"),
    (("/api/pull", {"model": ""}), "model"),
    (("/api/pull", {"model": "a", "stream": "x"}), "stream"),
]


@pytest.mark.parametrize(("request_", "named"), BAD)
def test_bad_fields_are_named(server: LiveServer, request_: tuple[str, dict[str, Any]], named: str) -> None:
    assert named in refusal(server.post(*request_), 400)


def test_what_asks_for_nothing_passes_without_a_warning(server: LiveServer) -> None:
    nothing = {"format": "", "tools": [], "think": False, "images": [], "context": [], "template": "", "suffix": ""}
    options = {
        "num_ctx": 64, "typical_p": 1.0, "mirostat": 0, "mirostat_tau": 3.5, "mirostat_eta": 0.2, "tfs_z": 1,
        "repeat_last_n": 64, "penalize_newline": False, "num_predict": 2,
    }  # fmt: skip
    for body in ({"prompt": "Hi"}, {"messages": USER}):
        path = CHAT if "messages" in body else GENERATE
        response = server.post(path, {**body, **nothing, "options": options})
        assert response.status_code == 200, response.text
        assert "x-localllm-warning" not in response.headers
        assert said(response)[-1]["done_reason"] == "length"


def test_what_has_no_effect_is_said(server: LiveServer) -> None:
    options = {"num_gpu": 99, "num_thread": 4, "use_mmap": True, "num_keep": 5, "tempersture": 1, "num_predict": 1}
    response = server.post(GENERATE, {"prompt": "Hi", "truncate": True, "options": options})
    warning = response.headers["x-localllm-warning"]
    for name in ("options.num_gpu", "options.use_mmap", "options.num_keep", "options.tempersture", "'truncate'"):
        assert name in warning


def test_a_body_without_a_content_type_is_json_unless_a_browser_sent_it(server: LiveServer) -> None:
    """As litellm sends it. A page of another site may send such a body without asking, and then with its Origin."""
    body = json.dumps({"prompt": "Hi", "options": {"num_predict": 2}}).encode()
    answer = server.http.post(GENERATE, content=body)
    assert "content-type" not in answer.request.headers
    assert said(answer)[-1]["done_reason"] == "length"
    for headers in ({"origin": server.url}, {"content-type": "text/plain"}):
        assert server.http.post(GENERATE, content=body, headers=headers).status_code in (403, 415)
    assert server.http.post("/v1/completions", content=b'{"prompt": "Hi"}').status_code == 415


@pytest.mark.parametrize("raw", [b"", b"[]", b'{"prompt": 1e999}', b"[" * 100_000, b"\xff"])
def test_malformed_json(server: LiveServer, raw: bytes) -> None:
    refusal(server.http.post(CHAT, content=raw, headers={"content-type": "application/json"}), 400)


def test_refusals_before_the_dialect_have_its_shape(server: LiveServer) -> None:
    assert "Served: tiny" in refusal(server.post(CHAT, {"model": "llama3", "messages": USER}), 404)
    too_long = refusal(server.post(GENERATE, {"prompt": "word " * 2000}), 400)
    assert str(MAX_MODEL_LEN) in too_long
    refusal(server.post("/api/nothing", {}), 404)
    refusal(server.get(CHAT), 405)
    refusal(server.http.post(CHAT, content="{}", headers={"content-type": "text/plain"}), 415)
    refusal(server.post(CHAT, {"messages": USER}, headers={"host": "evil.example"}), 403)


def test_names_are_read_as_clients_write_them() -> None:
    names = {
        "tiny": "tiny",
        "tiny:latest": "tiny",
        "org/name:Q4_K_M": "org/name:Q4_K_M",
        "hf.co/org/name:latest": "org/name",
        " ": None,
    }
    assert {name: plain_name(name) for name in names} == names


def test_the_example_in_the_guide_runs(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCALLLM_URL", f"{server.url}/v1")
    runpy.run_path("docs/examples/ollama_client.py")
    assert len(capsys.readouterr().out) > 20


@pytest.mark.parametrize("kind", [CHAT, GENERATE])
def test_logprobs_come_with_the_tokens(server: LiveServer, kind: str) -> None:
    body = {"messages": USER} if kind == CHAT else {"prompt": "Hi"}
    body |= {"model": "tiny", "options": {"num_predict": 4}, "logprobs": True, "top_logprobs": 2}
    whole = server.post(kind, {**body, "stream": False}).json()["logprobs"]
    lines = [json.loads(line) for line in server.post(kind, body).text.splitlines()]
    streamed = [each for line in lines for each in line.get("logprobs", [])]
    assert len(whole) == len(streamed) == 4
    for each in (*whole, *streamed):
        assert {"token", "logprob", "bytes", "top_logprobs"} <= each.keys()
    assert "logprobs" not in server.post(kind, {**body, "logprobs": False, "top_logprobs": None}).text


def test_a_larger_context_than_the_served_one_is_capped(server: LiveServer) -> None:
    body = {"model": "tiny", "messages": USER, "options": {"num_ctx": 32_768, "num_predict": 1}}
    answer = server.post(CHAT, body)
    assert answer.status_code == 200, answer.text
    assert f"32768: the context is {MAX_MODEL_LEN} tokens" in answer.headers["x-localllm-warning"]
    body["options"]["num_ctx"] = MAX_MODEL_LEN
    assert "x-localllm-warning" not in server.post(CHAT, body).headers
