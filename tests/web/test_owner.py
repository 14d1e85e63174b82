"""Whose requests a server without keys answers: its owner's, those of other users of the machine, one-time links."""

import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from localllm.machine import peer_user
from localllm.web.access import auth, keys
from tests.web.harness import browser_of
from tests.web.live_server import LiveServer, PacedRunner, fake_model, settings

OTHER = 65_534
AS_OTHER = """
import http.client, json, os, sys
"".encode("idna")  # what is imported later may be in a folder that the other user cannot open
os.setuid(int(sys.argv[1]))
seen = []
for method, path, body in json.loads(sys.argv[3]):
    asked = http.client.HTTPConnection("127.0.0.1", int(sys.argv[2]), timeout=20)
    kind = "application/json" if body.startswith("{") else "application/x-www-form-urlencoded"
    asked.request(method, path, body, {"content-type": kind})
    answer = asked.getresponse()
    seen.append([answer.status, answer.read().decode(errors="replace")])
print(json.dumps(seen))
"""
ADD = ("POST", "/settings/tools/add", "name=x&command=id&confirm=yes")
OWNERS = [
    ADD,
    ("POST", "/settings/tools/x/test", "a=b"),
    ("POST", "/settings/keys", "name=mine&scope=admin"),
    ("POST", "/settings/change", "name=port&value=1"),
    ("GET", "/logs", ""),
    ("POST", "/localllm/v1/models/load", '{"model": "demo"}'),
]
ANSWER = ("POST", "/v1/completions", '{"prompt": "a", "max_tokens": 2}')


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    with LiveServer(fake_model(tmp_path / "tiny", PacedRunner()), settings(ui=True)) as live:
        yield live


def as_other(server: LiveServer, *requests: tuple[str, str, str]) -> list[tuple[int, str]]:
    """Send requests from a process of another user of this machine."""
    if os.getuid() != 0 or not peer_user.KNOWS_USERS:
        pytest.skip("only root can start a process of another user, and only Linux says whose it is")
    words = [sys.executable, "-I", "-c", AS_OTHER, str(OTHER), str(urlsplit(server.url).port), json.dumps(requests)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return [(status, text) for status, text in json.loads(done.stdout)]


def test_another_user_of_the_machine_may_use_models_and_nothing_else(server: LiveServer) -> None:
    answered, health, chat, *refused = as_other(server, ANSWER, ("GET", "/health", ""), ("GET", "/", ""), *OWNERS)
    assert (answered[0], health[0], chat[0]) == (200, 200, 200)
    assert [status for status, _ in refused] == [403] * len(OWNERS)
    assert all("owner" in text for _, text in refused)


def test_users_of_the_machine_have_chats_of_their_own(server: LiveServer) -> None:
    with browser_of(server) as browser:
        browser.post("/chat", data={"message": "a secret of mine"})
        assert "a secret of mine" in browser.get("/").text
    [(_, page), (_, export)] = as_other(server, ("GET", "/", ""), ("GET", "/chats/export", ""))
    assert "a secret of mine" not in page + export


def test_the_owner_has_all_rights_but_what_starts_a_program_needs_a_link(server: LiveServer) -> None:
    with browser_of(server) as browser:
        assert browser.get("/settings").status_code == 200
        for method, path, body in OWNERS[:3]:
            refused = browser.request(method, path, content=body, headers={"content-type": "text/plain"})
            assert refused.status_code == 403
            assert "localllm link" in refused.text
        assert "localllm link" in browser.get("/settings/tools").text
        link = server.link()
        assert str(browser.get(f"{link}&next=/settings/tools").url).endswith("/settings/tools")
        shown = browser.post("/settings/tools/add", data={"name": "x", "command": "id"})
        assert shown.status_code == 200
        assert "localllm link" not in browser.get("/settings/tools").text
    with browser_of(server) as late:
        again = late.get(link)
        assert (again.status_code, "cannot be used any more" in again.text) == (401, True)
        assert late.post("/settings/tools/add", data={"name": "x", "command": "id"}).status_code == 403


def test_a_link_gives_another_user_the_owner_s_rights(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.web.access.connection.user_of", lambda client, server: None)
    with browser_of(server) as browser:
        assert browser.get("/logs").status_code == 403
        browser.get(server.link())
        assert browser.get("/logs").status_code == 200
        assert "Log out" not in browser.get("/logs").text


def test_links_end_with_their_hour_and_cannot_be_changed(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = server.server.app.state.key_ring
    monkeypatch.setattr(keys, "LINK_S", -1)
    ended = server.link().partition("once=")[2]
    monkeypatch.undo()
    until, nonce, signature = server.link().partition("once=")[2].split(".")
    later = f"{int(time.time()) + 10**6}.{nonce}.{signature}"
    for token in (ended, later, f"{until}.{nonce}.{'0' * 64}", "", "..", "a.b.c", "\ud800"):
        assert ring.open_link(token) is None
    assert ring.open_link(f"{until}.{nonce}.{signature}") is not None
    assert ring.open_link(f"{until}.{nonce}.{signature}") is None


def test_a_verb_of_the_owner_sends_the_server_s_secret(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.web.access.connection.user_of", lambda client, server: None)
    body = {"model": "tiny", "pinned": True}
    assert httpx.post(f"{server.url}/localllm/v1/models/pin", json=body).status_code == 403
    secret = server.server.app.state.key_ring.owner_secret
    key = {"authorization": f"Bearer {secret}"}
    assert httpx.post(f"{server.url}/localllm/v1/models/pin", json=body, headers=key).status_code == 200


def test_the_kernel_is_asked_once_for_a_connection(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr("localllm.web.access.connection.user_of", lambda client, server: asked.append(client))
    line = http.client.HTTPConnection(server.url.removeprefix("http://"))
    for _ in range(5):
        line.request("GET", "/v1/models")
        assert line.getresponse().read()
    line.close()
    assert len(asked) == 1


def test_where_the_kernel_does_not_say_whose_it_is_every_user_has_the_old_rights(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "KNOWS_USERS", False)
    with browser_of(server) as browser:
        assert browser.get("/logs").status_code == 200
        assert browser.post("/settings/tools/add", data={"name": "x", "command": "id"}).status_code == 403
