"""Too much of something: bytes of all requests together, wrong keys from one address, addresses altogether."""

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from localllm.config.settings import MIN_INFLIGHT_BODY_BYTES, ServerConfig
from localllm.errors import ConfigError
from localllm.web.access.keys import Key, add_key, keys_path
from localllm.web.access.limits import MOST_CLIENTS, WRONG_KEYS_PER_MINUTE, Bodies, Buckets, Guesses
from localllm.web.errors import BodiesTooLarge, WrongKeys
from tests.web.harness import refusal
from tests.web.live_server import LiveServer, PacedRunner, fake_model, settings, wait_until

pytestmark = pytest.mark.slow

TEXT = "/v1/completions"
ROOM_BYTES = 200_000
Narrow = tuple[LiveServer, PacedRunner, list[Bodies]]
Locked = tuple[LiveServer, dict[str, str], dict[str, str]]


# Bytes --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def narrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Narrow]:
    """A server that keeps few bytes of requests; its counter."""
    made: list[Bodies] = []

    def few(most_bytes: int) -> Bodies:
        made.append(Bodies(ROOM_BYTES))
        return made[-1]

    monkeypatch.setattr("localllm.web.access.auth.Bodies", few)
    runner = PacedRunner()
    with LiveServer(fake_model(tmp_path, runner)) as server:
        yield server, runner, made


def begun(server: LiveServer, announced_bytes: int, body: bytes, path: str = TEXT, key: str = "") -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)), timeout=10)
    head = f"POST {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\ncontent-type: application/json\r\n"
    head += f"x-api-key: {key}\r\n" if key else ""
    sock.sendall(f"{head}content-length: {announced_bytes}\r\n\r\n".encode() + body)
    return sock


def test_bodies_are_refused_when_there_are_too_many_bytes_and_taken_again_afterwards(
    narrow: Narrow,
) -> None:
    server, _, [bodies] = narrow
    filler = {"prompt": "a", "max_tokens": 1, "user": "x" * 120_000}
    half_sent = json.dumps(filler).encode()
    with begun(server, len(half_sent), half_sent[:-10]):
        wait_until(lambda: bodies.in_flight_bytes > 110_000)
        for path, status, kind in ((TEXT, 503, "overloaded_error"), ("/v1/messages", 529, "overloaded_error")):
            refused = server.post(path, filler | {"messages": [{"role": "user", "content": "a"}]})
            assert (refused.status_code, refused.json()["error"]["type"]) == (status, kind)
            assert refused.headers["retry-after"] == "1"
            assert "--max-inflight-body-bytes" in refused.json()["error"]["message"]
        assert server.post("/api/chat", filler).status_code == 503
        assert server.post(TEXT, {"prompt": "a", "max_tokens": 1}).status_code == 200  # a small one fits
    wait_until(lambda: bodies.in_flight_bytes == 0)
    assert server.post(TEXT, filler).status_code == 200


def test_a_body_without_a_length_is_counted_as_it_comes(
    narrow: Narrow,
) -> None:
    server, _, [bodies] = narrow
    error = refusal(
        server.http.post(TEXT, content=iter([b" " * 50_000] * 6), headers={"content-type": "application/json"}), 503
    )
    assert error["code"] == "too_many_bytes"
    wait_until(lambda: bodies.in_flight_bytes == 0)


def test_a_body_counts_until_its_answer_has_ended(narrow: Narrow) -> None:
    server, runner, [bodies] = narrow
    runner.gate.clear()
    body = json.dumps({"prompt": "a", "max_tokens": 2, "user": "x" * 120_000}).encode()
    with begun(server, len(body), body) as sock:
        wait_until(lambda: bodies.in_flight_bytes == len(body))
        assert server.post(TEXT, {"prompt": "a", "user": "x" * 120_000}).status_code == 503
        runner.gate.set()
        assert b"".join(iter(lambda: sock.recv(65536), b"")).startswith(b"HTTP/1.1 200")
    wait_until(lambda: bodies.in_flight_bytes == 0)


def test_one_client_leaves_room_for_the_bodies_of_others() -> None:
    bodies, big = Bodies(16 * 2**20), b"x" * 2**20

    async def hold(client: str, held: ExitStack, num_mib: int = 1) -> None:
        async def receive() -> Any:
            return {"type": "http.request", "body": big * num_mib, "more_body": True}

        counting = held.enter_context(bodies.counted(receive, 0, client))
        await counting()

    async def fill(client: str, held: ExitStack) -> int:
        for number in range(32):
            try:
                await hold(client, held)
            except BodiesTooLarge:
                return number
        return 32

    with ExitStack() as held:
        assert asyncio.run(fill("alone", held)) == 8
        asyncio.run(hold("small", held))
        assert asyncio.run(fill("second", held)) == 4
        with ExitStack() as third:
            asyncio.run(hold("third", third, 3))  # an only body may have all that is left
    assert bodies.in_flight_bytes == 0


def test_requests_that_never_end_leave_the_small_ones_of_other_keys_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    attacker, other = (add_key(keys_path(), name, "infer") for name in ("attacker", "other"))
    monkeypatch.setattr("localllm.web.access.auth.Bodies", lambda _: Bodies(16 * 2**20))
    with LiveServer(fake_model(tmp_path / "tiny", PacedRunner())) as server, ExitStack() as held:
        for number in range(20):
            sock = begun(server, 2**20, b"", key=attacker)
            held.callback(sock.close)
            try:
                sock.sendall(b"{" + b" " * (2**20 - 2))
            except ConnectionError:
                assert number >= 8
        for _ in range(3):
            headers = {"x-api-key": other}
            assert server.post(TEXT, {"prompt": "a", "max_tokens": 1}, headers=headers).status_code == 200
            large = {"prompt": "a", "max_tokens": 1, "user": "x" * 3_000_000}
            assert server.post(TEXT, large, headers=headers).status_code == 200


def test_announcing_takes_no_room(narrow: Narrow) -> None:
    server, _, _ = narrow
    socks = [begun(server, 190_000, b"{") for _ in range(20)]
    try:
        assert server.post(TEXT, {"prompt": "a", "max_tokens": 1, "user": "x" * 100_000}).status_code == 200
    finally:
        for sock in socks:
            sock.close()


def test_one_body_always_fits() -> None:
    with pytest.raises(ConfigError, match="inflight"):
        ServerConfig(max_inflight_body_bytes=MIN_INFLIGHT_BODY_BYTES - 1)
    with pytest.raises(ConfigError, match="inflight"):
        ServerConfig(max_body_bytes=2**26, max_inflight_body_bytes=2**25)


# Wrong keys ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[LiveServer, dict[str, str], dict[str, str]]]:
    """A server with two keys."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    used, unused = ({"x-api-key": add_key(keys_path(), name, "infer")} for name in ("used", "unused"))
    with LiveServer(fake_model(tmp_path / "tiny", PacedRunner())) as server:
        yield server, used, unused


def test_whoever_guesses_keys_is_told_to_wait_and_whoever_had_one_goes_on(
    locked: Locked, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, used, unused = locked
    assert server.get("/v1/models", headers=used).status_code == 200
    for i in range(WRONG_KEYS_PER_MINUTE):
        assert server.get("/v1/models", headers={"x-api-key": f"guess {i}"}).status_code == 401
    for headers in (
        {"x-api-key": "one more"},
        {"authorization": "Basic eDp5"},
        unused,
    ):  # a right one tells nothing, too
        refused = server.get("/v1/models", headers=headers)
        assert refusal(refused, 429)["code"] == "too_many_wrong_keys"
        assert 1 <= int(refused.headers["retry-after"]) <= 3
    assert server.get("/v1/models", headers=used).status_code == 200
    assert (
        server.get("/v1/models").status_code == 401
    )  # a request without a key is not a guess: a browser's first request
    assert server.get("/health", headers={"x-api-key": "wrong"}).status_code == 200
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 61)  # for this module alone: servers are running
    monkeypatch.setattr("localllm.web.access.limits.time", later)
    assert server.get("/v1/models", headers=unused).status_code == 200
    assert server.get("/v1/models", headers={"x-api-key": "one more"}).status_code == 401


def test_guesses_are_counted_by_address_and_forgotten_with_the_oldest() -> None:
    guesses, key = Guesses(), Key("a", "infer", "0" * 64)

    def is_refused(host: str, key: Key | None = None) -> bool:
        try:
            guesses.check(host, key)
        except WrongKeys:
            return True
        return False

    guesses.check("10.0.0.1", key)
    for i in range(WRONG_KEYS_PER_MINUTE):
        guesses.check("10.0.0.1", None)
        guesses.check(f"2001:db8::{i:x}", None)  # one network, which one machine may have for itself
    assert is_refused("10.0.0.1")
    assert is_refused("::ffff:10.0.0.1")
    assert is_refused("2001:db8::ffff")
    assert is_refused("2001:db8::ffff", key)
    assert not is_refused("2001:db8:0:1::1")
    assert not is_refused("10.0.0.1", key)
    assert not is_refused("10.0.0.2")
    for i in range(MOST_CLIENTS + 10):
        guesses.check(f"fd00:{i:x}::1", key)
        guesses.check(f"fd00:{i:x}::2", None)
    assert len(guesses._wrong) <= MOST_CLIENTS
    assert len(guesses._right) <= MOST_CLIENTS


def test_a_full_table_costs_no_more_than_an_empty_one() -> None:
    buckets = Buckets(per_minute=2)
    for i in range(3 * MOST_CLIENTS):
        buckets.take(str(i))
    assert len(buckets) <= MOST_CLIENTS
    started_s = time.process_time()
    for i in range(1000):
        buckets.take(f"more {i}")
    assert time.process_time() - started_s < 0.2  # a scan of the table each time would take seconds


# Other sites --------------------------------------------------------------------------------------------------------


def test_pages_of_allowed_origins_may_delete_what_they_made(tmp_path: Path) -> None:
    with LiveServer(fake_model(tmp_path, PacedRunner()), settings(allowed_origins=("https://app.example",))) as server:
        origin = {"origin": "https://app.example"}
        preflight = origin | {"access-control-request-method": "DELETE"}
        allowed = server.http.options("/v1/responses/resp_1", headers=preflight)
        assert "DELETE" in allowed.headers["access-control-allow-methods"]
        made = server.post("/v1/responses", {"input": "Hi", "max_output_tokens": 1}, headers=origin)
        deleted = server.http.delete(f"/v1/responses/{made.json()['id']}", headers=origin)
        assert (deleted.status_code, deleted.json()["deleted"]) == (200, True)
        assert deleted.headers["access-control-allow-origin"] == origin["origin"]
        refused = server.http.delete("/v1/responses/resp_1", headers={"origin": "https://evil.example"})
        assert refused.status_code == 403
