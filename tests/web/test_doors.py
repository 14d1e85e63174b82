"""Who may do what, and how often: scopes by route, a key file that changes, limits a minute and at a time."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import httpx
import openai
import pytest

from localllm.config.settings import ServerConfig
from localllm.errors import ConfigError
from localllm.web import pages
from localllm.web.access.keys import add_key, keys_path, remove_key
from localllm.web.access.limits import MOST_CLIENTS, Limits, RateLimited
from localllm.web.access.scopes import API_RULES, is_open, scope_of
from localllm.web.app import bind
from tests.web.harness import open_request
from tests.web.live_server import LiveServer, PacedRunner, fake_model, settings, wait_until

USER = {"role": "user", "content": "Hi"}
TEXT = {"prompt": "a", "max_tokens": 1}


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return keys_path()


@pytest.fixture
def locked(data: Path, tmp_path: Path) -> Iterator[tuple[LiveServer, dict[str, dict[str, str]]]]:
    """A server whose keys are all in the file, and a header for each scope."""
    keys = {scope: {"x-api-key": add_key(data, f"my-{scope}", scope)} for scope in ("infer", "admin")}  # type: ignore[arg-type]
    with LiveServer(fake_model(tmp_path / "tiny", PacedRunner()), settings(ui=True)) as server:
        yield server, keys


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def sdk(server: LiveServer, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


# Scopes -------------------------------------------------------------------------------------------------------------

ADMIN = {
    "GET /localllm/v1/server", "POST /v1/load_lora_adapter", "POST /v1/unload_lora_adapter",
    "POST /localllm/v1/models/load", "POST /localllm/v1/models/unload", "POST /localllm/v1/models/sleep",
    "POST /localllm/v1/models/wake", "POST /localllm/v1/models/pin", "POST /localllm/v1/models/downloads",
    "DELETE /localllm/v1/models/downloads/x", "DELETE /localllm/v1/models/x", "POST /dashboard/requests/x/cancel",
    "POST /dashboard/requests/cancel", "POST /api/pull", "POST /api/push", "POST /api/create", "POST /api/copy",
    "DELETE /api/delete", "GET /slots", "POST /models/load", "POST /models/unload", "DELETE /models", "POST /sleep",
    "POST /wake_up", "GET /is_sleeping", "GET /logs", "GET /logs/live", "GET /logs/download", "GET /settings",
    "GET /settings/change", "POST /settings/change", "POST /settings/log-level", "POST /settings/restart",
    "POST /settings/tools/x/x", "POST /settings/tools/x/stop", "POST /settings/tools/x/test",
    "POST /settings/tools/add", "GET /settings/tools", "GET /settings/live/restart", "GET /settings/restarting",
    "POST /settings/kv/delete", "POST /settings/experts/delete",
    "GET /settings/doctor", "POST /settings/keys", "POST /settings/keys/x/remove", "POST /library/downloads",
    "POST /library/import", "POST /library/load", "GET /tune", "GET /tune/limits", "GET /tune/run", "POST /tune/run",
    "POST /tune/run/cancel", "GET /tune/result", "POST /tune/result/apply", "POST /tune/result/save",
    "GET /tune/result/flags.txt", "GET /tune/result/profile.toml", "POST /tune/plans/apply",
    "POST /tune/plans/delete", "POST /library/models", "POST /library/delete", "POST /library/downloads/x",
    "POST /library/partial", "POST /chat/model", "POST /start_profile", "POST /stop_profile",
}  # fmt: skip


def test_each_route_asks_for_its_scope(locked: tuple[LiveServer, dict[str, dict[str, str]]]) -> None:
    """Also written with more slashes than it needs."""
    server, keys = locked
    seen = set()
    for route in server.server.app.routes:
        path = re.sub(r"\{[^}]+\}", "x", route.path)
        for method in route.methods - {"OPTIONS"}:
            if path.startswith("/live/") or is_open(path):
                continue
            admin = f"{method} {path}" in ADMIN
            seen |= {f"{method} {path}"} & ADMIN
            for spelling in (path, f"/{path}/", "/" + path[1:].replace("/", "%2F")):
                answer = server.http.request(method, f"{server.url}{spelling}", headers=keys["infer"])
                denied = answer.status_code == 403 and "scope admin" in answer.text
                if spelling != path and answer.status_code == 404:
                    continue  # not the route
                assert denied == admin, f"{method} {spelling}: {answer.status_code} {answer.text}"
    assert seen == ADMIN


def test_a_missing_scope_is_named(locked: tuple[LiveServer, dict[str, dict[str, str]]]) -> None:
    server, keys = locked
    refused = server.post("/localllm/v1/models/load", {"model": "tiny"}, headers=keys["infer"])
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["type"]) == (403, "missing_scope", "permission_error")
    assert "my-infer" in error["message"]
    assert "scope admin" in error["message"]
    assert server.post("/localllm/v1/models/load", {"model": "tiny"}, headers=keys["admin"]).status_code == 200
    with sdk(server, keys["infer"]["x-api-key"]) as client, pytest.raises(openai.PermissionDeniedError):
        client.post("/load_lora_adapter", body={}, cast_to=httpx.Response)


def test_a_key_for_infer_neither_unloads_a_model_nor_says_how_long_it_stays(
    locked: tuple[LiveServer, dict[str, dict[str, str]]],
) -> None:
    """In each of Ollama's routes that know keep_alive; without it they work as ever."""
    server, keys = locked
    [entry] = server.manager.entries
    entry.pinned, entry.keep_alive_s = True, 1234.0
    user = [{"role": "user", "content": "a"}]
    for path in ("/api/generate", "/api/chat"):
        refused = server.post(path, {"model": "tiny", "keep_alive": 0}, headers=keys["infer"])
        assert (refused.status_code, "scope admin" in refused.json()["error"]) == (403, True), refused.text
    short = {"model": "tiny", "keep_alive": "1s", "options": {"num_predict": 1}}
    asked = [("/api/generate", {**short, "prompt": "a"}), ("/api/chat", {**short, "messages": user})]
    asked += [("/api/generate", short), ("/api/embed", {**short, "input": "a"})]
    for path, body in asked:
        answer = server.post(path, body, headers=keys["infer"])
        if path == "/api/embed":
            assert answer.status_code == 400  # a model that generates text
        else:
            assert answer.status_code == 200, answer.text
            assert "keep_alive" in answer.headers["x-localllm-warning"]
    assert (entry.state, entry.pinned, entry.keep_alive_s) == ("ready", True, 1234.0)
    assert server.post("/api/generate", {**short, "prompt": "a"}, headers=keys["admin"]).status_code == 200
    assert entry.keep_alive_s == 1.0


def test_names_of_models_tell_nothing_of_files(
    locked: tuple[LiveServer, dict[str, dict[str, str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same answer for a path that is there and for one that is not; a cached model that is damaged is the client's
    error, in words without folders."""
    server, keys = locked
    cache = tmp_path / "cache"
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "secret.txt").write_text("x")
    (cache / "models--org--broken" / "snapshots" / "1").mkdir(parents=True)
    (cache / "models--org--broken" / "snapshots" / "1" / "config.json").write_text("{}")
    server.manager.register.settings = server.settings
    for there, missing in (("docs", "dogs"), ("docs/../secret.txt", "docs/../nothing.x"), ("secret.txt", "nothing.xx")):
        said = []
        for name in (there, missing):
            answer = server.post("/v1/completions", {**TEXT, "model": name}, headers=keys["infer"])
            fit = server.get("/library/fit", params={"model": name}, headers=keys["infer"])
            said.append([each.text.replace(name, "NAME").replace(quote(name, ""), "NAME") for each in (answer, fit)])
            said[-1] += [answer.status_code, fit.status_code]
            assert str(tmp_path) not in answer.text + fit.text
        assert said[0] == said[1]
        assert said[0][2] == 404
    broken = server.post("/v1/completions", {**TEXT, "model": "org/broken"}, headers=keys["infer"])
    assert (broken.status_code, broken.json()["error"]["code"]) == (422, "model_unusable")
    assert str(tmp_path) not in broken.text


def test_routes_that_nobody_listed() -> None:
    rules = API_RULES + pages.rules()
    assert [rules.scope_of("GET", path) for path in ("/live/tune", "/live/dashboard")] == ["admin", "infer"]
    assert scope_of("POST", "/v1/messages") == scope_of("GET", "/api/tags") == scope_of("POST", "/api/chat") == "infer"
    assert scope_of("DELETE", "/api/delete") == scope_of("POST", "/api/pull") == scope_of("PUT", "/v1/x") == "admin"
    assert scope_of("POST", "/anything") == scope_of("GET", "/anything") == scope_of("POST", "/localllm/x") == "admin"
    assert scope_of("DELETE", "/v1/responses/resp_1") == "infer"
    assert scope_of("DELETE", "/v1/models/tiny") == scope_of("DELETE", "/v1/responses") == "admin"
    assert all(scope_of("POST", f"/{path}//") == "admin" for path in API_RULES.admin.exact)


# Keys ---------------------------------------------------------------------------------------------------------------


def test_a_running_server_sees_keys_come_and_go(data: Path, tmp_path: Path) -> None:
    with LiveServer(fake_model(tmp_path / "tiny", PacedRunner())) as server:
        assert server.get("/v1/models").status_code == 200
        key = add_key(data, "late", "infer")
        assert server.get("/v1/models").status_code == 401
        assert server.get("/v1/models", headers=bearer(key)).status_code == 200
        remove_key(data, "late")
        assert server.get("/v1/models", headers=bearer(key)).status_code == 401
        assert server.get("/v1/models").status_code == 401  # nobody, rather than everybody
        assert server.get("/health").status_code == 200


def test_a_new_key_of_an_old_name_does_not_see_the_old_ones_chats(data: Path, tmp_path: Path) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "my secret"}]}).encode()
    ops = bearer(add_key(data, "ops", "admin"))
    first = bearer(add_key(data, "alice", "infer"))
    with LiveServer(fake_model(tmp_path / "tiny", PacedRunner()), settings(ui=True)) as server:
        made = server.http.post("/chats/import", files={"file": ("x.json", body)}, headers=first)
        chat = made.headers["location"]
        assert "my secret" in server.get(chat, headers=first).text
        warned = server.http.post("/settings/keys/alice/remove", headers=ops)
        assert (warned.status_code, "alice has 1 chat." in warned.text) == (409, True)
        server.http.post("/settings/keys/alice/remove", data={"confirm": "yes"}, headers=ops)
        second = bearer(add_key(data, "alice", "infer"))
        assert server.get(chat, headers=second).status_code == 404
        # The way back, by the line that the warning tells.
        [owner] = re.findall(r"id = &#34;(#[0-9a-f]{16})&#34;", warned.text)
        data.write_text(re.sub(r'(name = "alice".*?id = )"[^"]*"', rf'\1"{owner}"', data.read_text(), flags=re.DOTALL))
        assert "my secret" in server.get(chat, headers=second).text


def test_several_keys_on_the_command_line(tmp_path: Path) -> None:
    with LiveServer(fake_model(tmp_path, PacedRunner()), settings(api_key=("one", "two,three"))) as server:
        codes = [server.get("/v1/models", headers=bearer(k)).status_code for k in ("one", "two,three", "two")]
        assert codes == [200, 200, 401]


def test_keys_of_the_file_open_the_network_and_nothing_does_not(data: Path) -> None:
    with pytest.raises(ConfigError, match="without a key"):
        bind(ServerConfig(host="0.0.0.0", port=0))
    add_key(data, "one", "infer")
    bind(ServerConfig(host="0.0.0.0", port=0)).close()
    with pytest.raises(ConfigError, match="is empty"):
        ServerConfig(api_key=("one", ""))


def test_the_access_log_names_the_key_and_never_holds_it(
    locked: tuple[LiveServer, dict[str, dict[str, str]]], caplog: pytest.LogCaptureFixture
) -> None:
    server, keys = locked
    with caplog.at_level("DEBUG"):
        server.get("/v1/models", headers=keys["infer"])
        server.get("/v1/models", headers={"x-api-key": "wrong-secret"})
        wait_until(lambda: sum(r.name == "localllm.access" for r in caplog.records) == 2)
    lines = [r.getMessage() for r in caplog.records if r.name == "localllm.access"]
    assert ["key=my-infer" in lines[0], "key=-" in lines[1]] == [True, True]
    assert keys["infer"]["x-api-key"] not in caplog.text
    assert "wrong-secret" not in caplog.text


# Whose things are whose ---------------------------------------------------------------------------------------------


def cached_tokens(server: LiveServer, key: dict[str, str], **fields: Any) -> int:
    body = {"messages": [{"role": "user", "content": "a secret " * 20}], "max_tokens": 1, **fields}
    answer = server.post("/v1/chat/completions", body, headers=key).json()
    server.wait_idle()
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("shared", [False, True])
def test_a_key_finds_its_own_prefixes_in_the_cache(data: Path, tmp_path: Path, shared: bool) -> None:
    """Otherwise the number of cached tokens tells what another key has sent; a salt that the other one may know is
    not enough."""
    alice, bob, ops, root = (
        bearer(add_key(data, name, "infer" if name in ("alice", "bob") else "admin"))
        for name in ("alice", "bob", "ops", "root")
    )
    with LiveServer(fake_model(tmp_path / "tiny", PacedRunner()), settings(share_prefix_cache=shared)) as server:
        assert cached_tokens(server, alice) == 0
        found = cached_tokens(server, alice)
        assert found > 0
        assert cached_tokens(server, bob) == (found if shared else 0)
        assert cached_tokens(server, ops) == (found if shared else 0)
        assert cached_tokens(server, root) == found  # admins share
        assert cached_tokens(server, alice, cache_salt="known") == 0
        assert cached_tokens(server, bob, cache_salt="known") == (found if shared else 0)
        assert cached_tokens(server, bob, cache_salt="known") == found


def test_a_chat_is_cached_for_its_key(data: Path, tmp_path: Path) -> None:
    alice, bob = (bearer(add_key(data, name, "infer")) for name in ("alice", "bob"))
    with LiveServer(fake_model(tmp_path / "tiny", PacedRunner()), settings(ui=True)) as server:

        def ask(key: dict[str, str]) -> int:
            """Tokens of a chat's prompt that were found in the cache."""
            before = server.wait_idle()
            server.http.post("/chat", data={"message": "a secret " * 20, "max_tokens": "1"}, headers=key)
            wait_until(lambda: sum(server.stats().finished.values()) > sum(before.finished.values()))
            return server.wait_idle().prompt_tokens_cached - before.prompt_tokens_cached

        assert [ask(alice), ask(bob)] == [0, 0]
        assert ask(alice) > 0


def test_a_kept_response_is_there_for_its_key_alone(data: Path, tmp_path: Path) -> None:
    alice, bob = (bearer(add_key(data, name, "infer")) for name in ("alice", "bob"))
    with LiveServer(fake_model(tmp_path / "tiny", PacedRunner())) as server:
        body = {"input": "a secret", "max_output_tokens": 2}
        made = server.post("/v1/responses", body, headers=alice).json()
        url, item = f"/v1/responses/{made['id']}", {"type": "item_reference", "id": made["output"][0]["id"]}

        def codes(key: dict[str, str]) -> list[int]:
            bodies = ({**body, "previous_response_id": made["id"]}, {**body, "input": [item, USER]})
            answers = [server.post("/v1/responses", each, headers=key) for each in bodies]
            answers += [server.get(f"{url}{tail}", headers=key) for tail in ("", "/input_items")]
            answers.append(server.post(f"{url}/cancel", {}, headers=key))
            answers.append(server.http.delete(url, headers=key))
            return [answer.status_code for answer in answers]

        assert codes(bob) == [404, 400, 404, 404, 404, 404]
        assert codes(alice) == [200, 200, 200, 200, 400, 200]


# Limits -------------------------------------------------------------------------------------------------------------


def test_too_many_requests_a_minute_are_told_when_to_come_back(data: Path, tmp_path: Path) -> None:
    """Each key has its own minute; probes and files cost nothing."""
    keys = [bearer(add_key(data, name, "infer")) for name in ("a", "b")]
    asked = settings(rate_limit=3, ui=True)
    with LiveServer(fake_model(tmp_path / "tiny", PacedRunner()), asked) as server:
        assert [server.get("/v1/models", headers=keys[0]).status_code for _ in range(4)] == [200, 200, 200, 429]
        refused = server.get("/v1/models", headers=keys[0])
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert 1 <= int(refused.headers["retry-after"]) <= 20
        assert refused.headers["x-should-retry"] == "true"
        for path in ("/health", "/version", "/static/app.css"):
            assert {server.get(path, headers=keys[0]).status_code for _ in range(5)} == {200}
        assert server.get("/v1/models", headers=keys[1]).status_code == 200
        with sdk(server, keys[0]["authorization"][7:]) as client, pytest.raises(openai.RateLimitError):
            client.models.list()


def test_without_keys_an_address_is_counted(tmp_path: Path) -> None:
    with LiveServer(fake_model(tmp_path, PacedRunner()), settings(rate_limit=2)) as server:
        codes = [server.get("/v1/models", headers={"x-api-key": str(i)}).status_code for i in range(3)]
        assert codes == [200, 200, 429]


def test_too_many_at_once_are_refused_until_one_ends(tmp_path: Path) -> None:
    runner = PacedRunner()
    runner.step_s = 0.01
    with LiveServer(fake_model(tmp_path, runner), settings(max_concurrent_requests=1)) as server:
        with open_request(server, {"prompt": "a", "max_tokens": 480, "stream": True}):
            wait_until(lambda: server.stats().num_running == 1)
            refused = server.post("/v1/completions", TEXT)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert refused.headers["x-should-retry"] == "true"
            assert server.get("/v1/models").status_code == 200
        wait_until(lambda: server.post("/v1/completions", TEXT).status_code == 200)


def test_a_bucket_fills_again_and_full_ones_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr("localllm.web.access.limits.time", SimpleNamespace(monotonic=lambda: now_s))
    limits = Limits(per_minute=2, at_once=None)
    limits.take("a")
    limits.take("a")
    with pytest.raises(RateLimited) as caught:
        limits.take("a")
    assert caught.value.retry_after_s == 30
    now_s += 30
    limits.take("a")
    for i in range(MOST_CLIENTS):
        limits.take(str(i))
    now_s += 60
    limits.take("b")
    assert len(limits._buckets) == 1
