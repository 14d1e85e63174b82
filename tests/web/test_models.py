"""Several models over a real socket: loaded by a request, listed, put to sleep, woken, unloaded; and the verbs."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from localllm.cli import main
from localllm.config.settings import EngineConfig, ModelTable, ServerConfig, Settings
from localllm.errors import ModelNotFound
from tests.web.live_server import LiveServer, ManagedServer, wait_until

pytestmark = pytest.mark.slow

CHAT, ROOT = "/v1/chat/completions", "/localllm/v1/models"
KEY = {"authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def running(tiny_model_path: Callable[[str], Path]) -> Iterator[ManagedServer]:
    engine = EngineConfig(model=str(tiny_model_path("llama")), max_model_len=256, kv_cache_memory_bytes=1 << 20)
    other = {"model": str(tiny_model_path("qwen3")), "max_model_len": 128}
    tables = {"other": ModelTable("other", other, ("o",), keep_alive=600.0)}
    server = ServerConfig(port=0, served_model_name=("first", "f"), api_key="secret", on_demand=False)
    with ManagedServer(Settings(engine, server, models=tables)) as running:
        running.http.headers.update(KEY)
        yield running


@pytest.fixture
def managed(running: ManagedServer) -> ManagedServer:
    """With one model ready, as after the start."""
    running.post(f"{ROOT}/load", {"model": "first", "pin": False})
    if "other" in states(running):
        running.post(f"{ROOT}/unload", {"model": "other"})
    return running


def ask(server: LiveServer, model: str | None) -> Any:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "temperature": 0}
    return server.post(CHAT, body)


def states(server: LiveServer) -> dict[str, str]:
    return {model["id"]: model["state"] for model in server.get(f"{ROOT}/loaded").json()["data"]}


def test_models_come_when_they_are_asked_for(managed: ManagedServer) -> None:
    listed = managed.get("/v1/models").json()["data"]
    assert [(model["id"], model["status"]["value"]) for model in listed] == [("first", "loaded"), ("other", "unloaded")]
    assert managed.get("/v1/models/o").json()["status"]["value"] == "unloaded"  # looking loads nothing
    assert states(managed).get("other") in (None, "unloaded")
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda name: ask(managed, name).json(), ("other", "o", "first", "f")))
    assert [answer["model"] for answer in answers] == ["other", "other", "first", "first"]
    said = [answer["choices"][0]["message"]["content"] for answer in answers]
    assert said[0] == said[1]
    assert said[2] == said[3]
    listed = managed.get("/v1/models").json()["data"]
    assert [(model["status"]["value"], model["max_model_len"]) for model in listed] == [
        ("loaded", 256),
        ("loaded", 128),
    ]
    families = text_string_to_metric_families(managed.get("/metrics").text)
    steps = next(family for family in families if family.name == "localllm:steps")
    assert {sample.labels["model_name"] for sample in steps.samples} == {"first", "other"}
    assert managed.get("/health").status_code == 200
    refused = ask(managed, "third")
    assert refused.status_code == 404
    assert "Served: first, other." in refused.json()["error"]["message"]


def test_health_is_503_where_the_files_of_the_first_model_are_gone(
    managed: ManagedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A probe would read the 404 of the load as a wrong path."""

    def gone() -> None:
        raise ModelNotFound("The path './gone' does not exist.", "Available: secret names.")

    monkeypatch.setattr(managed.manager.loads, "require_working", gone)
    answer = managed.get("/health")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_loadable")
    assert "'./gone' does not exist" in answer.text
    assert "secret" not in answer.text


def test_verbs_move_models_of_the_running_server(
    managed: ManagedServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALLLM_API_KEY", "secret")

    def run(*words: str, code: int = 0) -> str:
        assert main([*words, "--url", managed.url]) == code
        told = capsys.readouterr()
        return told.err if code else told.out

    said = ask(managed, "first").json()["choices"]
    assert run("load", "other", "--keep-alive", "5m", "--pin") == "other: ready\n"
    lines = run("ps").splitlines()
    assert lines[0].split() == ["NAME", "SIZE", "DEVICE", "CONTEXT", "KV", "%", "REQS", "UNTIL", "STATE"]
    assert [(line.split()[0], line.split()[-2:]) for line in lines[1:]] == [
        ("first", ["ever", "ready"]), ("other", ["pinned", "ready"])
    ]  # fmt: skip
    assert run("pin", "other", "--off") == "other: ready\n"
    assert " min " in run("ps").splitlines()[2]
    assert run("sleep", "first") == "first: sleeping\n"
    assert run("sleep", "o") == "other: sleeping\n"
    assert states(managed) == {"first": "sleeping", "other": "sleeping"}
    assert managed.get("/health").status_code == 200
    assert managed.get("/v1/models").json()["data"][0]["status"]["value"] == "sleeping"
    assert ask(managed, "first").json()["choices"] == said  # awake, and the same
    assert run("wake", "other") == "other: ready\n"
    assert run("stop", "other") == "other: unloaded\n"
    told = json.loads(run("unload", "first", "--json"))
    assert (told["state"], told["size_bytes"]) == ("unloaded", 0)
    assert "first is not asleep: it is unloaded." in run("wake", "first", code=1)
    assert "'not/there'" in run("load", "not/there", code=1)
    assert ask(managed, None).json()["model"] in ("first", "other")
    assert main(["ps", "--url", "http://127.0.0.1:9"]) == 1
    assert "No localllm answers at http://127.0.0.1:9." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("load", {}, 400, "missing_required_parameter"),
        ("load", {"model": "first", "keep_alive": "soon"}, 400, "invalid_value"),
        ("load", {"model": "first", "pinned": True}, 400, "invalid_value"),
        ("load", {"model": "/no/where"}, 404, "model_not_found"),
        ("sleep", {"model": "third"}, 409, "model_not_loaded"),
        ("unload", {"model": "nobody"}, 409, "model_not_loaded"),
    ],
)  # fmt: skip
def test_refusals(managed: ManagedServer, path: str, body: dict[str, Any], status: int, code: str) -> None:
    response = managed.post(f"{ROOT}/{path}", body)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    unknown = managed.post(f"{ROOT}/{path}", body, headers={"authorization": "Bearer wrong"})
    assert unknown.status_code == 401


def test_load_need_not_be_waited_for(managed: ManagedServer) -> None:
    response = managed.post(f"{ROOT}/load", {"model": "other", "wait": False})
    assert (response.status_code, response.json()["state"]) == (202, "loading")
    wait_until(lambda: states(managed)["other"] == "ready")


# Other servers' names ----------------------------------------------------------------------------------------------


def values(server: LiveServer, path: str = "/models") -> dict[str, str]:
    return {model["id"]: model["status"]["value"] for model in server.get(path).json()["data"]}


def test_models_sleep_and_wake_by_vllms_names(managed: ManagedServer) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "temperature": 0}
    said = managed.post(CHAT, body).json()["choices"]
    for query, state in (("", "sleeping"), ("?level=1", "sleeping"), ("?level=2", "unloaded")):
        assert managed.get("/is_sleeping").json() == {"is_sleeping": False}
        assert managed.http.post(f"/sleep{query}").status_code == 200
        assert managed.get("/is_sleeping").json() == {"is_sleeping": True}
        assert values(managed)["first"] == state
        for tag in ("weights", "kv_cache"):
            assert managed.http.post(f"/wake_up?tags={tag}").status_code == 200
    assert managed.post(CHAT, body).json()["choices"] == said


def test_models_are_loaded_and_unloaded_by_llama_cpps_names(managed: ManagedServer) -> None:
    assert values(managed) == values(managed, "/v1/models")
    assert managed.post("/models/load", {"model": "other"}).json() == {"success": True}
    wait_until(lambda: values(managed)["other"] == "loaded")
    assert managed.http.post("/sleep?model=other").status_code == 200
    assert managed.get("/is_sleeping?model=other").json() == {"is_sleeping": True}
    assert managed.get("/is_sleeping").json() == {"is_sleeping": False}
    assert managed.post("/models/unload", {"model": "other"}).json() == {"success": True}
    assert values(managed)["other"] == "unloaded"
    assert managed.http.post("/wake_up?model=other").status_code == 200
    assert values(managed)["other"] == "loaded"


ROUTER_REFUSALS = [
    ("POST", "/sleep?level=3", 400, "level"),
    ("POST", "/sleep?level=one", 400, "level"),
    ("POST", "/sleep?mode=abort", 400, "mode"),
    ("POST", "/sleep?model=third", 409, "model"),
    ("POST", "/wake_up?tags=graphs", 400, "tags"),
    ("POST", "/wake_up?model=third", 409, "model"),
    ("GET", "/is_sleeping?model=third", 409, "model"),
    ("GET", "/slots?model=third", 409, "model"),
    ("DELETE", "/models", 400, "model"),
    ("DELETE", "/models?model=no/such", 404, "model"),
]


@pytest.mark.parametrize(("method", "path", "status", "param"), ROUTER_REFUSALS)
def test_refusals_of_the_other_names(managed: ManagedServer, method: str, path: str, status: int, param: str) -> None:
    response = managed.http.request(method, path)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param), response.text


@pytest.mark.parametrize("body", [{}, {"model": 1}, {"model": ""}, {"model": "first", "extra_args": []}, []])
@pytest.mark.parametrize("path", ["/models/load", "/models/unload"])
def test_bodies_are_checked(managed: ManagedServer, path: str, body: Any) -> None:
    assert managed.post(path, body).status_code == 400
    assert managed.http.post(path, content=b'{"model": "first"}').status_code == 415
