"""The same over HTTP, for the pages: search, plan, downloads with progress, cancel, delete. Through a real server."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localllm.config.settings import EngineConfig, ServerConfig, Settings
from localllm.models.library.hub.plan import plan_download
from localllm.models.library.hub.pull import pull
from tests.hub.local_hub import LocalHub, Trouble, wait_until_stalled
from tests.web.live_server import LiveServer, PacedRunner, fake_model, settings, wait_until

WEIGHTS = "model.safetensors"
BASE = "/localllm/v1/models"


@pytest.fixture
def server(hub: LocalHub, checkpoint: Path) -> Iterator[LiveServer]:
    hub.add_repo("org/name", checkpoint)
    with LiveServer(None) as server:
        yield server


def download(server: LiveServer, id: str) -> dict[str, Any]:
    found: dict[str, Any] = server.get(f"{BASE}/downloads/{id}").json()
    return found


def test_a_model_is_found_planned_fetched_and_deleted(server: LiveServer, checkpoint: Path) -> None:
    (found,) = server.get(f"{BASE}/search", params={"q": "name"}).json()["data"]
    assert (found["repo_id"], found["format"]) == ("org/name", "safetensors")
    plan = server.get(f"{BASE}/plan", params={"model": "org/name"}).json()
    assert plan["needed_bytes"] == plan["total_bytes"] > 300_000
    assert plan["fits_on_disk"] is True
    started = server.post(f"{BASE}/downloads", {"model": "org/name"}).json()
    assert started["model"] == "org/name"
    wait_until(lambda: download(server, started["id"])["state"] == "done")
    done = download(server, started["id"])
    assert (done["bytes_done"], done["files_done"], done["error"]) == (plan["total_bytes"], 5, None)
    assert [each["id"] for each in server.get(f"{BASE}/downloads").json()["data"]] == [started["id"]]
    listed = {model["id"]: model for model in server.get(BASE).json()["data"]}
    assert listed["org/name"]["size_bytes"] == plan["total_bytes"]
    removed = server.http.delete(f"{BASE}/org/name").json()
    assert removed == {"id": "org/name", "object": "model", "deleted": True, "freed_bytes": plan["total_bytes"]}
    assert "org/name" not in [model["id"] for model in server.get(BASE).json()["data"]]


def test_a_download_is_watched_and_cancelled_and_goes_on(server: LiveServer, hub: LocalHub, checkpoint: Path) -> None:
    hub.troubles[WEIGHTS] = Trouble(stall_after=100_000)
    started = server.post(f"{BASE}/downloads", {"model": "org/name"}).json()
    wait_until_stalled(hub)
    wait_until(lambda: download(server, started["id"])["bytes_done"] > 100_000)
    assert download(server, started["id"])["state"] == "running"
    assert server.http.delete(f"{BASE}/downloads/{started['id']}").json()["state"] == "cancelled"
    hub.go_on.set()
    wait_until(lambda: hub.bytes_sent(WEIGHTS) == 100_000)
    again = server.post(f"{BASE}/downloads", {"model": "org/name"}).json()
    wait_until(lambda: download(server, again["id"])["state"] == "done")
    assert hub.bytes_sent(WEIGHTS) == (checkpoint / WEIGHTS).stat().st_size


def test_clients_see_what_is_coming(hub: LocalHub, checkpoint: Path, tmp_path: Path) -> None:
    hub.add_repo("org/name", checkpoint)
    hub.troubles[WEIGHTS] = Trouble(stall_after=100_000)
    (tmp_path / "served").mkdir()
    with LiveServer(fake_model(tmp_path / "served", PacedRunner())) as server:
        started = server.post(f"{BASE}/downloads", {"model": "org/name"}).json()
        wait_until_stalled(hub)
        wait_until(lambda: download(server, started["id"])["bytes_done"] > 100_000)
        coming = {model["id"]: model["status"] for model in server.get("/v1/models").json()["data"]}["org/name"]
        assert coming["value"] == "downloading"
        assert 0 < coming["progress"] < 1
        server.http.delete(f"{BASE}/downloads/{started['id']}")
        hub.go_on.set()
        wait_until(lambda: "org/name" not in [model["id"] for model in server.get("/v1/models").json()["data"]])


def test_a_download_that_fails_says_why(server: LiveServer, hub: LocalHub, checkpoint: Path) -> None:
    hub.add_repo("org/closed", checkpoint, gated=True)
    started = server.post(f"{BASE}/downloads", {"model": "org/closed"}).json()
    wait_until(lambda: download(server, started["id"])["state"] == "failed")
    error = download(server, started["id"])["error"]
    assert error["code"] == "hub_access_denied"
    assert f"{hub.url}/org/closed" in error["message"]


REFUSED: list[tuple[str, str, Any, int, str]] = [
    ("GET", "/search", None, 400, "missing_required_parameter"),
    ("GET", "/search?q=x&format=onnx", None, 400, "invalid_value"),
    ("GET", "/search?q=x&limit=0", None, 400, "invalid_value"),
    ("GET", "/plan", None, 400, "missing_required_parameter"),
    ("GET", "/plan?model=org/absent", None, 404, "model_not_found"),
    ("POST", "/downloads", {}, 400, "invalid_value"),
    ("POST", "/downloads", {"model": "org/name", "evil": 1}, 400, "invalid_value"),
    ("POST", "/downloads", {"model": "org/absent"}, 404, "model_not_found"),
    ("GET", "/downloads/99", None, 404, "model_not_found"),
    ("DELETE", "/downloads/99", None, 404, "model_not_found"),
    ("DELETE", "/demo", None, 400, "invalid_config"),
    ("DELETE", "/org/absent", None, 404, "model_not_found"),
]


def test_refusals_name_what_is_wrong(server: LiveServer) -> None:
    for method, path, body, status, code in REFUSED:
        answer = server.http.request(method, BASE + path, **({"json": body} if body is not None else {}))
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), (method, path, body)


def test_a_model_that_is_served_is_not_deleted(hub: LocalHub, checkpoint: Path) -> None:
    hub.add_repo("org/name", checkpoint)
    snapshot = pull(plan_download("org/name"))
    with LiveServer(fake_model(snapshot, PacedRunner())) as server:
        answer = server.http.delete(f"{BASE}/org/name")
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "model_in_use")
    assert (snapshot / WEIGHTS).is_file()


def test_a_key_guards_every_route(hub: LocalHub) -> None:
    with LiveServer(None, settings(api_key="secret")) as server:
        for method, path in (("GET", ""), ("GET", "/search?q=x"), ("POST", "/downloads"), ("DELETE", "/org/name")):
            assert server.http.request(method, BASE + path).status_code == 401
        assert server.get(BASE, headers={"authorization": "Bearer secret"}).status_code == 200


def test_a_server_told_to_stay_offline_asks_nobody(hub: LocalHub) -> None:
    offline = Settings(EngineConfig(offline=True), ServerConfig(port=0, ui=False))
    with LiveServer(None, offline) as server:
        for answer in (
            server.get(f"{BASE}/search?q=x"),
            server.get(f"{BASE}/plan?model=org/name"),
            server.post(f"{BASE}/downloads", {"model": "org/name"}),
        ):
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, "hub_offline")
    assert hub.sent == []
