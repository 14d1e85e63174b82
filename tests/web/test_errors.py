"""Bad input over a real socket: each gets OpenAI's envelope with a status, a code and the field; the server goes on."""

import dataclasses
import hashlib
import json
import re
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from localllm.config.settings import ServerConfig
from localllm.errors import DoesNotFit, PortInUse
from localllm.web.access.auth import SESSION_COOKIE
from localllm.web.access.keys import KeyRing, add_key, remove_key
from localllm.web.access.sessions import MAX_SESSIONS, SESSION_S
from localllm.web.app import bind
from tests.web.harness import refusal
from tests.web.live_server import MAX_MODEL_LEN, LiveServer, PacedRunner, fake_model, settings, wait_until

USER: list[Any] = [{"role": "user", "content": "Hi"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BAD_BODIES: list[tuple[str, Any, str, str]] = [
    (CHAT, {}, "messages", "missing_required_parameter"),
    (TEXT, {}, "prompt", "missing_required_parameter"),
    (CHAT, {"messages": []}, "messages", "invalid_value"),
    (CHAT, {"messages": "Hi"}, "messages", "invalid_type"),
    (CHAT, {"messages": ["Hi"]}, "messages[0]", "invalid_type"),
    (CHAT, {"messages": [{"role": "wizard", "content": "Hi"}]}, "messages", "invalid_value"),
    (CHAT, {"messages": [{"content": "Hi"}]}, "messages", "invalid_value"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages", "invalid_value"),
    (CHAT, {"messages": [{"role": "user", "content": 3}]}, "messages", "invalid_value"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0]",
        "unsupported_parameter",
    ),
    (CHAT, {"messages": USER, "max_tokens": "ten"}, "max_tokens", "invalid_type"),
    (CHAT, {"messages": USER, "max_tokens": 1.5}, "max_tokens", "invalid_type"),
    (CHAT, {"messages": USER, "max_tokens": True}, "max_tokens", "invalid_type"),
    (CHAT, {"messages": USER, "max_tokens": 0}, "max_tokens", "invalid_value"),
    (CHAT, {"messages": USER, "max_tokens": -5}, "max_tokens", "invalid_value"),
    (CHAT, {"messages": USER, "max_tokens": 10**30}, "max_tokens", "context_length_exceeded"),
    (CHAT, {"messages": USER, "max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "invalid_value"),
    (CHAT, {"messages": USER, "temperature": -1}, "temperature", "invalid_value"),
    (CHAT, {"messages": USER, "temperature": "hot"}, "temperature", "invalid_type"),
    (CHAT, {"messages": USER, "top_p": 0}, "top_p", "invalid_value"),
    (CHAT, {"messages": USER, "top_p": 1e300}, "top_p", "invalid_value"),
    (CHAT, {"messages": USER, "top_k": -2}, "top_k", "invalid_value"),
    (CHAT, {"messages": USER, "n": 0}, "n", "invalid_value"),
    (CHAT, {"messages": USER, "n": 10**6}, "n", "invalid_value"),
    (CHAT, {"messages": USER, "seed": 2**70}, "seed", "invalid_value"),
    (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    (CHAT, {"messages": USER, "top_logprobs": 2}, "top_logprobs", "invalid_value"),
    (CHAT, {"messages": USER, "stop": [1]}, "stop[0]", "invalid_type"),
    (CHAT, {"messages": USER, "stop": ""}, "stop", "invalid_value"),
    (CHAT, {"messages": USER, "logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
    (CHAT, {"messages": USER, "logit_bias": {"5": 1000}}, "logit_bias", "invalid_value"),
    (CHAT, {"messages": USER, "logit_bias": {"100000": 1}}, "logit_bias", "invalid_value"),
    (CHAT, {"messages": USER, "stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    (CHAT, {"messages": USER, "stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage",
     "invalid_type"),
    (CHAT, {"messages": USER, "stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "unsupported_parameter"),
    (CHAT, {"messages": USER, "cache_salt": "a/b"}, "cache_salt", "invalid_value"),
    (CHAT, {"messages": USER, "cache_salt": ""}, "cache_salt", "invalid_value"),
    (CHAT, {"messages": USER, "reasoning_effort": "huge"}, "reasoning_effort", "invalid_value"),
    (CHAT, {"messages": USER, "documents": [{"text": "x"}]}, "documents", "unsupported_parameter"),
    (CHAT, {"messages": USER, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "invalid_value"),
    (CHAT, {"messages": USER, "add_generation_prompt": True, "continue_final_message": True}, "continue_final_message",
     "invalid_value"),
    (TEXT, {"prompt": []}, "prompt", "invalid_type"),
    (TEXT, {"prompt": {"a": 1}}, "prompt", "invalid_type"),
    (TEXT, {"prompt": ["a", 1]}, "prompt", "invalid_type"),
    (TEXT, {"prompt": [True]}, "prompt", "invalid_type"),
    (TEXT, {"prompt": ""}, "prompt", "invalid_value"),
    (TEXT, {"prompt": [[]]}, "prompt", "invalid_value"),
    (TEXT, {"prompt": [512]}, "prompt", "invalid_value"),
    (TEXT, {"prompt": [-1]}, "prompt", "invalid_value"),
    (TEXT, {"prompt": [10**30]}, "prompt", "invalid_value"),
    (TEXT, {"prompt": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value"),
    ("/tokenize", {}, "prompt", "missing_required_parameter"),
    ("/detokenize", {"tokens": [99999]}, "tokens", "invalid_value"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param", "code"), BAD_BODIES)
def test_bad_fields_are_named(server: LiveServer, path: str, body: Any, param: str, code: str) -> None:
    error = refusal(server.post(path, body), 400)
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b'{"prompt": "\xff"}',
        b'{"prompt": 1e999}',
        b"[" * 100_000,
        b"{'a': 1}",
        b"\x00",
    ],
    ids=["empty", "open", "array", "string", "null", "not utf-8", "huge number", "deep", "python", "nul"],
)
def test_malformed_json(server: LiveServer, raw: bytes) -> None:
    error = refusal(server.http.post(TEXT, content=raw, headers={"content-type": "application/json"}), 400)
    assert error["type"] == "invalid_request_error"


def test_half_a_surrogate_pair_is_refused(server: LiveServer) -> None:
    raw = b'{"prompt": "\\ud83d"}'
    refusal(server.http.post(TEXT, content=raw, headers={"content-type": "application/json"}), 400)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_is_told_the_numbers_and_the_flag(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "word " * 2000}], stream=stream, max_tokens=1
        )
    error: Any = caught.value.body
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert str(MAX_MODEL_LEN) in error["message"]
    assert re.search(r"needs \d{4}", error["message"])
    assert "--max-model-len" in error["message"]
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt=[5] * MAX_MODEL_LEN, stream=stream)
    assert caught.value.param == "prompt"
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt=[5] * 10, max_tokens=MAX_MODEL_LEN, stream=stream)
    assert caught.value.param == "max_tokens"


def test_unknown_models_are_told_what_is_served(client: openai.OpenAI, server: LiveServer) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-4o", messages=USER)
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
    assert "Served: tiny" in str(caught.value)
    assert refusal(server.get("/v1/models/some/other"), 404)["code"] == "model_not_found"


def test_unknown_urls_and_methods(server: LiveServer) -> None:
    assert refusal(server.post("/v1/nothing", {}), 404)["code"] == "unknown_url"
    response = server.get(CHAT)
    assert refusal(response, 405)["code"] == "method_not_allowed"
    assert "POST" in response.headers["allow"]


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", None])
def test_only_json_is_read(server: LiveServer, content_type: str | None) -> None:
    headers = {"content-type": content_type} if content_type else {}
    response = server.http.post(TEXT, content=json.dumps({"prompt": "x"}), headers=headers)
    assert refusal(response, 415)["code"] == "unsupported_media_type"


def test_a_body_beyond_the_limit_is_refused_unread(server: LiveServer) -> None:
    """Announced by content-length; nothing of it has to be sent."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        head = f"POST {TEXT} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\ncontent-type: application/json\r\n"
        sock.sendall(f"{head}content-length: {65 * 2**20}\r\n\r\n".encode())
        answer = b"".join(iter(lambda: sock.recv(65536), b"")).decode()
    assert answer.startswith("HTTP/1.1 413")
    assert '"code":"request_too_large"' in answer


def test_browsers_get_a_page(server: LiveServer) -> None:
    response = server.get("/nowhere<script>", headers={"accept": "text/html,*/*"})
    assert response.status_code == 404
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert "<script>" not in response.text
    assert server.get("/v1/nowhere", headers={"accept": "text/html"}).headers["content-type"] == "application/json"


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_step_is_told_and_the_next_request_works(
    client: openai.OpenAI, runner: PacedRunner, stream: bool
) -> None:
    runner.failing = True
    with pytest.raises(openai.APIError) as caught:
        list(client.completions.create(model="tiny", prompt="Hi", max_tokens=3, stream=stream))
    assert (caught.value.code, caught.value.type) == ("step_failed", "server_error")
    runner.failing = False
    assert client.completions.create(model="tiny", prompt="Hi", max_tokens=3).choices[0].finish_reason == "length"


def test_an_error_in_mid_stream_reaches_the_client(
    client: openai.OpenAI, server: LiveServer, runner: PacedRunner
) -> None:
    runner.step_s = 0.01
    stream = client.completions.create(model="tiny", prompt="Hi", max_tokens=400, stream=True)
    next(stream)
    runner.failing = True
    with pytest.raises(openai.APIError) as caught:
        list(stream)
    assert caught.value.code == "step_failed"


def test_our_own_mistake_in_mid_stream_is_an_error_event_without_details(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("localllm.web.api.openai.answer.CompletionChunks.event", lambda *args: 1 / 0)
    response = server.post(TEXT, {"prompt": "Hi", "max_tokens": 3, "stream": True})
    assert response.status_code == 200
    error = json.loads(response.text.removeprefix("data: "))["error"]
    assert error["code"] == "internal_error"
    assert response.headers["x-request-id"] in error["message"]
    assert "ZeroDivision" not in response.text
    assert "ZeroDivision" in caplog.text


def test_our_own_mistake_is_a_500_with_the_request_id_and_no_details(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("localllm.web.api.openai.chat.chat_params", lambda body, model: 1 / 0)
    response = server.post(CHAT, {"messages": [{"role": "user", "content": "secret words"}]})
    error = refusal(response, 500)
    assert response.headers["x-should-retry"] == "false"
    assert response.headers["x-request-id"] in error["message"]
    assert "ZeroDivision" not in response.text
    assert any(record.exc_info for record in caplog.records)
    assert "secret words" not in caplog.text


def test_a_full_queue_says_when_to_retry(tmp_path: Path) -> None:
    """Four choices arrive together where one may wait; those that were accepted end with the others."""
    with LiveServer(fake_model(tmp_path, PacedRunner(), max_num_seqs=1, max_num_queued_reqs=1)) as server:
        for stream in (False, True):
            response = server.post(TEXT, {"prompt": "a", "n": 4, "max_tokens": 2, "stream": stream})
            error = refusal(response, 503)
            assert (error["code"], error["type"]) == ("queue_full", "overloaded_error")
            assert response.headers["retry-after"] == "1"
        server.wait_idle()
        assert server.post(TEXT, {"prompt": "a", "max_tokens": 2}).status_code == 200


def test_a_queue_that_is_seen_to_be_full_is_refused_at_once(server: LiveServer) -> None:
    assert server.model is not None
    crowded = dataclasses.replace(server.stats(), num_waiting=64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(server.model.client), "stats", lambda self: crowded)
        assert refusal(server.post(TEXT, {"prompt": "a", "stream": True}), 503)["code"] == "queue_full"


# Before and without a model ---------------------------------------------------------------------------------------


def test_a_loading_server_says_so_and_when_to_retry() -> None:
    with LiveServer(None) as server:
        for path in ("/health", "/v1/health", "/ping", "/metrics"):
            response = server.get(path)
            error = refusal(response, 503)
            assert (error["type"], error["code"]) == ("unavailable_error", "model_loading")
            assert response.headers["retry-after"]
        assert refusal(server.post(CHAT, {"messages": USER}), 503)["code"] == "model_loading"
        assert server.get("/version").status_code == 200
        [entry] = server.manager.entries
        entry.state, entry.error = "failed", DoesNotFit("It does not fit.", "It needs 26 GiB, 22 are free.")
        response = server.post(CHAT, {"messages": USER})
        assert refusal(response, 503)["code"] == "model_does_not_fit"
        assert response.headers["x-should-retry"] == "false"


def test_health_and_version(server: LiveServer) -> None:
    for path in ("/health", "/v1/health", "/ping"):
        assert server.get(path).json() == {"status": "ok"}
    assert server.get("/version").json()["version"]


# The front door -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server with pages, a key, one more name and one allowed origin."""
    asked = settings(ui=True, api_key="sesame", allowed_hosts=("box.lan",), allowed_origins=("https://app.example",))
    with LiveServer(fake_model(tmp_path_factory.mktemp("tiny"), PacedRunner()), asked) as server:
        yield server


KEY = {"authorization": "Bearer sesame"}


def test_every_route_but_the_probes_needs_the_key(guarded: LiveServer) -> None:
    for route in guarded.server.app.routes:
        path = re.sub(r"\{[^}]+\}", "x", route.path)
        for method in route.methods - {"OPTIONS"}:
            status = guarded.http.request(method, path).status_code
            is_open = path in (
                "/health",
                "/v1/health",
                "/ping",
                "/version",
                "/api/version",
                "/login",
                "/logout",
                "/favicon.ico",
            )
            is_open = is_open or path.startswith(("/static/", "/shared/"))  # a link to a chat holds its own secret
            if (method, path) == ("POST", "/login"):
                continue  # has a 401 of its own
            assert (status == 401) != is_open, f"{method} {path} answered {status}"
    assert guarded.get("/nowhere").status_code == 401


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (KEY, 200),
        ({"authorization": "bearer sesame"}, 200),
        ({"x-api-key": "sesame"}, 200),
        ({"authorization": "Basic dXNlcjpzZXNhbWU="}, 200),
        ({"authorization": "Basic !!"}, 401),
        ({"authorization": "Bearer sesam"}, 401),
        ({"authorization": "Bearer"}, 401),
        ({"authorization": "sesame"}, 401),
        ({"x-api-key": "öffne dich".encode()}, 401),
        ({}, 401),
    ],
)
def test_keys(guarded: LiveServer, headers: Any, status: int) -> None:
    response = guarded.get("/v1/models", headers=headers)
    assert response.status_code == status
    if status == 401:
        error = refusal(response, 401)
        assert (error["code"], error["type"]) == ("invalid_api_key", "authentication_error")
        assert response.headers["www-authenticate"] == "Bearer"


def test_a_browser_shows_its_key_once_and_comes_back_to_where_it_was(guarded: LiveServer) -> None:
    with httpx.Client(base_url=guarded.url, headers={"accept": "text/html"}) as browser:
        response = browser.get("/dashboard?loading=1")
        assert response.status_code == 303
        page = browser.get(response.headers["location"])
        assert 'name="next" value="/dashboard?loading=1"' in page.text
        wrong = browser.post("/login", data={"key": "sesam"})
        assert (wrong.status_code, "localllm_session" in browser.cookies) == (401, False)
        assert "not a key of this server" in wrong.text
        right = browser.post("/login", data={"key": " sesame ", "next": "/dashboard?loading=1"})
        assert (right.status_code, right.headers["location"]) == (303, "/dashboard?loading=1")
        assert "HttpOnly" in right.headers["set-cookie"]
        assert "sesame" not in right.headers["set-cookie"]
        assert browser.get("/dashboard").status_code == 200
        assert browser.get("/v1/models").status_code == 200
        assert browser.get("/login").status_code == 303
        browser.post("/logout")
        assert browser.get("/dashboard").status_code == 303


@pytest.mark.parametrize("following", ["//evil.example", "https://evil.example", "/\\evil.example", "", "/a\nb"])
def test_a_login_leads_nowhere_else(guarded: LiveServer, following: str) -> None:
    response = httpx.post(f"{guarded.url}/login", data={"key": "sesame", "next": following})
    assert response.headers["location"] == "/"


@pytest.mark.parametrize("session", ["", "x", "api-key:9999999999:00", "²", '"', ":::", "a" * 9000])
def test_no_made_up_session_opens_the_door(guarded: LiveServer, session: str) -> None:
    headers = {"cookie": f"localllm_session={session}".encode()}
    assert guarded.http.get("/v1/models", headers=headers).status_code == 401


def test_a_session_ends_with_its_time_and_with_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys.toml"
    made = add_key(path, "laptop", "infer")
    ring = KeyRing(path=path)
    key = ring.find([made.encode()])
    assert key is not None
    session, other = ring.session(key), ring.session(key)
    assert ring.of_session(session) == ring.of_session(other) == key
    ring.end_session(other)
    assert (ring.of_session(session), ring.of_session(other)) == (key, None)
    assert KeyRing(path=path).of_session(session) == key, "after a restart"
    assert KeyRing(path=path).of_session(other) is None, "a logout outlives a restart"
    expired_s = time.time() + SESSION_S + 1
    with monkeypatch.context() as later:
        later.setattr("localllm.web.access.keys.time.time", lambda: expired_s)
        assert ring.of_session(session) is None
    remove_key(path, "laptop")
    assert ring.of_session(session) is None


def test_one_key_holds_so_many_sessions_and_takes_none_of_another(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    alice, bob = (KeyRing(path=path).find([add_key(path, name, "infer").encode()]) for name in ("alice", "bob"))
    assert alice is not None
    assert bob is not None
    ring = KeyRing(path=path)
    others = ring.session(bob)
    sessions = [ring.session(alice) for _ in range(MAX_SESSIONS + 3)]
    found = [ring.of_session(session) for session in sessions]
    assert found == [None] * 3 + [alice] * MAX_SESSIONS
    assert ring.of_session(others) == bob


def test_the_file_of_sessions_is_private_and_opens_nothing(tmp_path: Path) -> None:
    ring = KeyRing(["short"], tmp_path / "keys.toml")
    key = ring.find([b"short"])
    assert key is not None
    token = ring.session(key)
    file = tmp_path / "sessions.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    [(name, session)] = json.loads(file.read_text()).items()
    hashes = {hashlib.sha256(each.encode()).hexdigest() for each in ("short", token)}
    assert token not in file.read_text()
    assert session["proof"] not in hashes, "a short key could be guessed from its hash"
    assert [ring.of_session(each) for each in (name, session["proof"], "short")] == [None] * 3


def test_two_servers_on_one_folder_lose_no_session_of_each_other(tmp_path: Path) -> None:
    rings = [KeyRing(["sesame"], tmp_path / "keys.toml") for _ in range(2)]
    key = rings[0].find([b"sesame"])
    assert key is not None
    sessions = [ring.session(key) for ring in rings]
    assert [[ring.of_session(each) for each in sessions] for ring in rings] == [[key, key]] * 2
    rings[1].end_session(sessions[0])
    assert rings[0].of_session(sessions[0]) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1}', '{"a": {"b": 1}}', "[" * 9000])
def test_a_damaged_file_of_sessions_logs_out_and_stops_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "sessions.json").write_text(text)
    ring = KeyRing(["sesame"], tmp_path / "keys.toml")
    key = ring.find([b"sesame"])
    assert key is not None
    assert ring.of_session(ring.session(key)) == key


def test_a_session_works_where_no_file_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "sessions.json").mkdir()
    ring = KeyRing(["sesame"], tmp_path / "keys.toml")
    key = ring.find([b"sesame"])
    assert key is not None
    assert ring.of_session(ring.session(key)) == key


def test_a_copied_cookie_is_worth_nothing_after_the_logout(guarded: LiveServer) -> None:
    with httpx.Client(base_url=guarded.url) as browser:
        browser.post("/login", data={"key": "sesame"})
        copy = {"cookie": f"{SESSION_COOKIE}={browser.cookies[SESSION_COOKIE]}"}
        assert guarded.http.get("/v1/models", headers=copy).status_code == 200
        assert browser.post("/logout").status_code == 303
    assert guarded.http.get("/v1/models", headers=copy).status_code == 401


def test_a_script_of_a_page_is_sent_to_the_login(guarded: LiveServer) -> None:
    response = guarded.http.post("/chat", headers={"accept": "text/html", "hx-request": "true"})
    assert (response.status_code, response.headers["hx-redirect"]) == (401, "/login")


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost:1", 200), ("127.0.0.1", 200), ("[::1]:8000", 200), ("Box.LAN", 200), ("evil.example", 403),
     ("127.0.0.1.evil.example", 403), ("192.168.1.7", 403)],
)  # fmt: skip
def test_only_known_names_are_answered(guarded: LiveServer, host: str, status: int) -> None:
    response = guarded.get("/v1/models", headers={**KEY, "host": host})
    assert response.status_code == status
    if status == 403:
        assert "--allowed-hosts" in refusal(response, 403)["message"]


@pytest.mark.parametrize(
    ("origin", "status"),
    [(None, 200), ("same", 200), ("https://app.example", 200), ("https://evil.example", 403), ("null", 403)],
)
def test_only_known_origins_may_write(guarded: LiveServer, origin: str | None, status: int) -> None:
    headers = dict(KEY)
    if origin is not None:
        headers["origin"] = guarded.url if origin == "same" else origin
    assert guarded.post(TEXT, {"prompt": "x", "max_tokens": 1}, headers=headers).status_code == status


def test_cors_answers_configured_origins_only(guarded: LiveServer, server: LiveServer) -> None:
    preflight = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    allowed = guarded.http.options(CHAT, headers={"origin": "https://app.example", **preflight})
    assert allowed.status_code == 204
    assert allowed.headers["access-control-allow-origin"] == "https://app.example"
    refused = guarded.get("/v1/models", headers={"origin": "https://app.example"})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://app.example")
    other = guarded.http.options(CHAT, headers={"origin": "https://evil.example", **preflight})
    assert "access-control-allow-origin" not in other.headers
    off = server.get("/v1/models", headers={"origin": "https://app.example"})
    assert not any(name.startswith("access-control") for name in off.headers)


def test_a_path_cannot_forge_an_access_line(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        server.get("/v1/x%0aGET /v1/forged status=200")
    assert not any("\n" in record.getMessage() for record in caplog.records if record.name == "localllm.access")


def test_request_ids_are_kept_or_made(server: LiveServer) -> None:
    assert server.get("/version", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    made = [server.get("/version", headers={"x-request-id": "a b"}).headers["x-request-id"] for _ in range(2)]
    assert made[0] != made[1]
    assert "a b" not in made


def test_access_lines_hold_no_prompt_and_no_key(guarded: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG"):
        name = guarded.post(TEXT, {"prompt": "my secret", "max_tokens": 1}, headers=KEY).headers["x-request-id"]

        def lines() -> list[str]:
            """Of this request: a line follows its answer, so that of another one may come now."""
            told = [r.getMessage() for r in caplog.records if r.name == "localllm.access"]
            return [line for line in told if name in line]

        wait_until(lambda: bool(lines()))
    [line] = lines()
    assert line.startswith(f"POST {TEXT} status=200")
    assert "my secret" not in caplog.text
    assert "sesame" not in caplog.text


def test_a_taken_port_is_an_error_and_never_another_port() -> None:
    with bind(ServerConfig(port=0)) as taken, pytest.raises(PortInUse) as caught:
        bind(ServerConfig(port=taken.getsockname()[1]))
    assert caught.value.exit_code == 6
    assert "--port" in caught.value.hint


def test_every_post_answers_200_when_it_works(server: LiveServer) -> None:
    """Litestar's default for POST is 201."""
    for route in server.server.app.routes:
        for handler in getattr(route, "route_handlers", ()):
            assert handler.status_code == 200, route.path
