"""Offline batches over real sockets: files, batches, their owners, limits and ends, and a server that is killed."""

import json
import os
import signal
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from localllm.config.settings import ServerConfig
from localllm.errors import ConfigError
from localllm.web.access.keys import add_key, keys_path, remove_key
from localllm.web.api.batches import worker as worker_module
from localllm.web.api.batches.lines import index_of
from tests.web.child_server import ChildServer
from tests.web.live_server import LiveServer, PacedRunner, fake_model, settings, wait_until

CHAT = "/v1/chat/completions"
NewServer = Callable[..., LiveServer]
CLIENTS: list[openai.OpenAI] = []


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path / "data" / "localllm"


@pytest.fixture
def runner() -> PacedRunner:
    return PacedRunner()


@pytest.fixture
def new_server(data: Path, runner: PacedRunner, tmp_path: Path) -> NewServer:
    def made(**asked: Any) -> LiveServer:
        return LiveServer(fake_model(tmp_path / "model", runner), settings(**asked))

    return made


@pytest.fixture
def server(new_server: NewServer) -> Iterator[LiveServer]:
    with new_server() as running:
        yield running


@pytest.fixture
def client(server: LiveServer) -> openai.OpenAI:
    return client_of(server)


def client_of(server: LiveServer, key: str = "none") -> openai.OpenAI:
    made = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=20)
    CLIENTS.append(made)
    return made


@pytest.fixture(autouse=True)
def closed_clients() -> Iterator[None]:
    yield
    while CLIENTS:
        CLIENTS.pop().close()


def chat_line(name: str, max_tokens: int = 4, **changed: Any) -> dict[str, Any]:
    body = {"model": "tiny", "max_tokens": max_tokens, "messages": [{"role": "user", "content": f"hi {name}"}]}
    return {"custom_id": name, "method": "POST", "url": CHAT, "body": body, **changed}


def jsonl(lines: Sequence[Any]) -> bytes:
    return "\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines).encode()


def start(client: openai.OpenAI, lines: Sequence[Any], **asked: Any) -> Any:
    file = client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    asked = {"endpoint": CHAT, "completion_window": "24h"} | asked
    return client.batches.create(input_file_id=file.id, **asked)


def ended(client: openai.OpenAI, id: str, seconds: float = 60.0) -> Any:
    wait_until(lambda: client.batches.retrieve(id).status in ("completed", "failed", "expired", "cancelled"), seconds)
    return client.batches.retrieve(id)


def lines_of(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()] if file_id else []


def test_the_sdk_runs_a_batch_and_bad_lines_harm_no_other(client: openai.OpenAI, data: Path) -> None:
    bad = [
        "not json",
        {"custom_id": "no body", "method": "POST", "url": CHAT},
        chat_line("get", method="GET"),
        chat_line("elsewhere", url="/v1/embeddings"),
        chat_line("streamed") | {"body": chat_line("streamed")["body"] | {"stream": True}},
        chat_line("good 3"),  # a second time
        chat_line("unknown model") | {"body": {"model": "no/such", "messages": []}},
        chat_line("bad field") | {"body": chat_line("x")["body"] | {"top_p": 99}},
    ]
    batch = start(client, [*(chat_line(f"good {i}") for i in range(40)), "", *bad], metadata={"run": "7"})
    assert (batch.status, batch.metadata) == ("validating", {"run": "7"})
    batch = ended(client, batch.id)
    assert batch.status == "completed"
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (48, 40, 8)
    answers = lines_of(client, batch.output_file_id)
    assert sorted(each["custom_id"] for each in answers) == sorted(f"good {i}" for i in range(40))
    assert all(each["response"]["body"]["usage"]["completion_tokens"] == 4 for each in answers)
    errors = {each["custom_id"]: each for each in lines_of(client, batch.error_file_id)}
    codes = {name: (each["error"] or each["response"]["body"]["error"])["code"] for name, each in errors.items()}
    assert codes[None] == "invalid_value"
    assert codes["unknown model"] == "model_not_found"
    assert errors["unknown model"]["response"]["status_code"] == 404
    assert "not unique" in errors["good 3"]["error"]["message"]
    assert "stream" in errors["streamed"]["error"]["message"]
    assert [each.id for each in client.batches.list()] == [batch.id]
    assert len(list(client.files.list())) == 3
    for path in (data / "batches").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, f"{path} is private"
    assert client.files.delete(batch.output_file_id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(batch.output_file_id)


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/completions", {"model": "tiny", "prompt": "a b", "max_tokens": 3}),
        ("/v1/responses", {"model": "tiny", "input": "a b", "max_output_tokens": 3}),
    ],
)
def test_other_endpoints(server: LiveServer, client: openai.OpenAI, url: str, body: dict[str, Any]) -> None:
    batch = ended(client, start(client, [chat_line("a", url=url, body=body)], endpoint=url).id)
    (answer,) = lines_of(client, batch.output_file_id)
    assert answer["response"]["status_code"] == 200
    assert len(server.server.app.state.responses) == 0, "answers to lines do not evict stored responses"


def test_an_interactive_request_is_answered_while_a_batch_runs(
    server: LiveServer, client: openai.OpenAI, runner: PacedRunner
) -> None:
    runner.step_s = 0.01
    batch = start(client, [chat_line(f"{i}", max_tokens=60) for i in range(60)])
    wait_until(lambda: server.stats().num_running == 8)
    asked = client.chat.completions.create(model="tiny", max_tokens=2, messages=[{"role": "user", "content": "now"}])
    assert asked.usage is not None
    assert asked.usage.completion_tokens == 2
    done = client.batches.retrieve(batch.id).request_counts
    assert done is not None
    assert done.completed < 30, "it did not wait for the batch"
    cancelled = client.batches.cancel(batch.id)
    assert cancelled.status == "cancelling"
    batch = ended(client, batch.id)
    assert batch.status == "cancelled"
    server.wait_idle()
    answered = lines_of(client, batch.output_file_id)
    assert len(answered) == batch.request_counts.completed < 60
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)


def test_a_batch_expires_with_an_error_for_each_line_left(
    server: LiveServer, client: openai.OpenAI, runner: PacedRunner
) -> None:
    runner.step_s = 0.01
    batch = ended(client, start(client, [chat_line(f"{i}", 100) for i in range(200)], completion_window="2s").id)
    assert batch.status == "expired"
    errors = lines_of(client, batch.error_file_id)
    assert {each["error"]["code"] for each in errors} == {"batch_expired"}
    names = [each["custom_id"] for each in errors + lines_of(client, batch.output_file_id)]
    assert sorted(names, key=int) == [str(i) for i in range(200)], "each line once"


def test_each_key_has_its_own_files_and_batches(new_server: NewServer, data: Path, runner: PacedRunner) -> None:
    data.mkdir(parents=True, mode=0o700)
    mine, other, admin = (add_key(keys_path(), name, scope) for name, scope in
                          (("mine", "infer"), ("other", "infer"), ("root", "admin")))  # fmt: skip
    with new_server() as server:
        my_client = client_of(server, mine)
        batch = ended(my_client, start(my_client, [chat_line("a")]).id)
        for key in (other, admin):
            stranger = client_of(server, key)
            assert list(stranger.files.list()) == []
            assert list(stranger.batches.list()) == []
            for ask in (
                lambda s=stranger: s.files.retrieve(batch.input_file_id),
                lambda s=stranger: s.files.content(batch.output_file_id),
                lambda s=stranger: s.files.delete(batch.input_file_id),
                lambda s=stranger: s.batches.retrieve(batch.id),
                lambda s=stranger: s.batches.cancel(batch.id),
                lambda s=stranger: s.batches.create(
                    input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"
                ),
            ):
                with pytest.raises(openai.NotFoundError):
                    ask()
        with pytest.raises(openai.AuthenticationError):
            client_of(server, "wrong").files.list()
        runner.step_s = 0.02
        running = start(my_client, [chat_line(f"{i}", 50) for i in range(100)])
        wait_until(lambda: server.stats().num_running > 0)
        with pytest.raises(openai.ConflictError):
            my_client.files.delete(running.input_file_id)
        remove_key(keys_path(), "mine")
        wait_until(lambda: not server.server.app.state.batches.is_busy, 20)
        (record,) = [each for each in server.server.app.state.batches.records.all() if each.id == running.id]
        assert record.status == "failed"
        assert "removed" in record.faults[0].message


def test_limits_are_refused_with_numbers(new_server: NewServer) -> None:
    with new_server(
        max_batch_file_bytes=2**16, max_batch_lines=3, max_batch_files=4, max_batch_storage_bytes=2**20
    ) as server:
        client = client_of(server)
        with pytest.raises(openai.BadRequestError, match=r"64\.0 KiB"):
            client.files.create(file=("in.jsonl", b"x" * (2**16 + 1)), purpose="batch")
        with pytest.raises(openai.APIStatusError) as told:
            client.files.create(file=("in.jsonl", b"x" * 2**18), purpose="batch")
        assert told.value.status_code == 413
        with pytest.raises(openai.BadRequestError, match="purpose"):
            client.files.create(file=("in.jsonl", b"{}"), purpose="assistants")
        batch = ended(client, start(client, [chat_line(f"{i}") for i in range(4)]).id)
        assert batch.status == "failed"
        assert "more than 3 lines" in batch.errors.data[0].message
        empty = ended(client, start(client, ["", " "]).id)
        assert "no lines" in empty.errors.data[0].message
        for _ in range(2):
            client.files.create(file=("in.jsonl", b"{}"), purpose="batch")
        with pytest.raises(openai.APIStatusError, match="limit is 4 files") as told:
            client.files.create(file=("in.jsonl", b"{}"), purpose="batch")
        assert told.value.status_code == 507
        for wrong in ({"completion_window": "soon"}, {"completion_window": "31d"}, {"endpoint": "/v1/models"}):
            asked: dict[str, Any] = {"endpoint": CHAT, "completion_window": "24h"} | wrong
            with pytest.raises(openai.BadRequestError):
                client.batches.create(input_file_id=batch.input_file_id, **asked)
        asked = {"endpoint": CHAT, "completion_window": "24h", "metadata": {"a": "b" * 513}}
        with pytest.raises(openai.BadRequestError, match="metadata"):
            client.batches.create(input_file_id=batch.input_file_id, **asked)
        text = server.get("/metrics").text
        assert 'localllm:batches{status="failed"} 2.0' in text
        assert "localllm:batch_files 4.0" in text


def test_a_file_larger_than_all_bodies_is_a_contradiction() -> None:
    with pytest.raises(ConfigError, match="max-batch-file-bytes"):
        ServerConfig(max_batch_file_bytes=2**30)
    assert ServerConfig(max_inflight_body_bytes=2**25).largest_batch_file_bytes == 2**25


def test_a_second_server_leaves_the_batches_to_the_first(new_server: NewServer, tmp_path: Path) -> None:
    with new_server() as first:
        client = client_of(first)
        file = client.files.create(file=("in.jsonl", b"{}"), purpose="batch")
        second = LiveServer(fake_model(tmp_path / "other", PacedRunner()), settings())
        with second:
            with pytest.raises(openai.ConflictError, match="Another server"):
                client_of(second).files.list()
            for path, methods in second.get("/openapi.json").json()["paths"].items():
                if path.startswith(("/v1/files", "/v1/batches")):
                    assert all("409" in operation["responses"] for operation in methods.values()), path
            first.__exit__(None, None, None)
            wait_until(lambda: second.get("/v1/files").status_code == 200)
            assert [each.id for each in client_of(second).files.list()] == [file.id]


def test_full_storage_fails_the_batch_and_keeps_its_answers(
    server: LiveServer, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.server.app.state.batches.files.max_bytes = 30_000
    batch = ended(client, start(client, [chat_line(f"{i}") for i in range(100)]).id)
    assert batch.status == "failed"
    assert batch.errors.data[0].code == "file_storage_full"
    answers = lines_of(client, batch.output_file_id)
    assert 0 < len(answers) < 100


def test_batches_of_several_owners_take_turns(
    new_server: NewServer, data: Path, runner: PacedRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "TURN_S", 0.2)
    data.mkdir(parents=True, mode=0o700)
    keys = [add_key(keys_path(), name, "infer") for name in ("a", "b")]
    runner.step_s = 0.01
    with new_server() as server:
        clients = [client_of(server, key) for key in keys]
        long = start(clients[0], [chat_line(f"{i}", 60) for i in range(400)])
        wait_until(lambda: server.stats().num_running > 0)
        short = start(clients[1], [chat_line("a")])
        assert ended(clients[1], short.id, 20).status == "completed"
        assert clients[0].batches.retrieve(long.id).status == "in_progress"
        clients[0].batches.cancel(long.id)
        assert ended(clients[0], long.id).status == "cancelled"


def test_lines_of_one_model_run_together(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(jsonl([{"custom_id": str(i), "body": {"model": "ab"[i % 2]}} for i in range(6)]))
    assert index_of(path, 10).order == [0, 2, 4, 1, 3, 5]


def test_a_killed_server_loses_no_line_and_answers_none_twice(tmp_path: Path) -> None:
    server = ChildServer(tmp_path, with_bystander=False)
    lines = [chat_line(f"{i}", 40) | {"body": chat_line(f"{i}", 40)["body"] | {"model": "demo"}} for i in range(120)]
    output = tmp_path / "data" / "localllm" / "batches" / "files"
    with server:
        url = server.url
        sent = httpx.post(f"{url}/v1/files", files={"file": ("in.jsonl", jsonl(lines))}, data={"purpose": "batch"})
        made = server.post(
            "/v1/batches", {"input_file_id": sent.json()["id"], "endpoint": CHAT, "completion_window": "24h"}
        ).json()
        wait_until(lambda: server.get(f"/v1/batches/{made['id']}").json()["request_counts"]["completed"] >= 10, 120)
        os.kill(server.pid, signal.SIGKILL)
    record = json.loads((tmp_path / "data" / "localllm" / "batches" / f"{made['id']}.json").read_bytes())
    path = output / record["output_id"]
    before = path.read_bytes()
    assert 10 <= before.count(b"\n") < 120
    with path.open("ab") as file:
        file.write(b'{"id":"batch_req_half')  # a line that the end of the process cut
    with server:
        deadline = time.monotonic() + 120
        while (batch := server.get(f"/v1/batches/{made['id']}").json())["status"] != "completed":
            assert time.monotonic() < deadline
            time.sleep(0.2)
        content = server.get(f"/v1/files/{batch['output_file_id']}/content").content
    assert content.startswith(before), "finished lines are not computed again"
    names = [json.loads(line)["custom_id"] for line in content.splitlines()]
    assert sorted(names, key=int) == [str(i) for i in range(120)]
    assert batch["request_counts"] == {"total": 120, "completed": 120, "failed": 0}
