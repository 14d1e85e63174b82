"""GET /localllm/v1/fit: where a model would run, and how fast, before it is loaded."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.tiny import make_tiny_model
from tests.web.live_server import LiveServer, PacedRunner, fake_model, settings


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with LiveServer(fake_model(tmp_path_factory.mktemp("tiny"), PacedRunner()), settings(ui=False)) as live:
        yield live


def test_a_program_learns_the_place_and_the_speeds(server: LiveServer) -> None:
    answer = httpx.get(server.url + "/localllm/v1/fit", params={"model": "demo"}, timeout=60)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert (found["model"], found["download_bytes"]) == ("demo", 0)
    first = found["devices"][0]
    assert (first["device"], first["is_chosen"], first["verdict"]) == ("cpu", True, "fits")
    assert first["plan"]["far"] is None
    least, most = first["predicted"]["decode"]
    assert 0 < least < first["predicted"]["streams"]["1"] < most
    assert set(first["predicted"]["first_token_s"]) <= {"1000", "8000"}
    short = httpx.get(server.url + "/localllm/v1/fit", params={"model": "demo", "max_model_len": 256}, timeout=60)
    assert short.json()["devices"][0]["max_model_len"] == 256


@pytest.mark.parametrize(
    ("asked", "status", "said"),
    [
        ({}, 400, "model"),
        ({"model": "no-such-model"}, 404, "no-such-model"),
        ({"model": "demo", "n_cpu_moe": "some"}, 400, "n_cpu_moe"),
        ({"model": "demo", "max_model_len": 0}, 400, "max_model_len"),
    ],
)
def test_what_is_wrong_is_refused_by_name(
    asked: dict[str, str | int], status: int, said: str, server: LiveServer
) -> None:
    answer = httpx.get(server.url + "/localllm/v1/fit", params=asked, timeout=60)
    assert (answer.status_code, said in answer.text) == (status, True), answer.text


def test_a_path_of_the_server_is_not_read(server: LiveServer, tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path, "llama")
    answer = httpx.get(server.url + "/localllm/v1/fit", params={"model": str(path)}, timeout=60)
    assert answer.status_code in (400, 404), answer.text
