"""What pages of other sites may do to this server through a browser, and whom a proxy may speak for."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localllm.config.settings import ServerConfig
from localllm.errors import ConfigError
from localllm.web.access.limits import WRONG_KEYS_PER_MINUTE
from localllm.web.access.origins import Origins
from localllm.web.access.proxies import Proxies
from localllm.web.pages.frame.static import static_files
from tests.web.harness import refusal
from tests.web.live_server import LiveServer, PacedRunner, fake_model, settings, wait_until

CHAT = "/v1/chat/completions"
KEY = {"authorization": "Bearer sesame"}
IMAGE = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"}
LINK = {
    "sec-fetch-site": "cross-site",
    "sec-fetch-mode": "navigate",
    "sec-fetch-dest": "document",
    "accept": "text/html",
}
FRAME = LINK | {"sec-fetch-dest": "iframe"}
APP = "http://localhost:3000"


@pytest.fixture(scope="module")
def open_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """As it comes: pages, no key."""
    with LiveServer(fake_model(tmp_path_factory.mktemp("tiny"), PacedRunner()), settings(ui=True)) as server:
        yield server


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    model = fake_model(tmp_path_factory.mktemp("tiny"), PacedRunner())
    with LiveServer(model, settings(ui=True, api_key="sesame")) as server:
        yield server


# Pages of other sites -----------------------------------------------------------------------------------------------

READS = [
    "/library/fit?model=evil/ok", "/library/model/evil/ok", "/library/discover?q=a", "/localllm/v1/models/search?q=a",
    "/settings/doctor", "/v1/models", "/health", "/metrics", "/static/app.css", "/chats", "/nowhere", "/logs/download",
]  # fmt: skip


@pytest.mark.parametrize("path", READS)
@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_nothing_is_read_for_a_page_of_another_site(open_server: LiveServer, path: str, site: str) -> None:
    for headers in (IMAGE, LINK, FRAME):
        assert open_server.get(path, headers=headers | {"sec-fetch-site": site}).status_code == 403
    if not path.startswith(("/library", "/localllm", "/settings")):
        assert open_server.get(path, headers={"sec-fetch-site": "same-origin"}).status_code != 403
        assert open_server.get(path, headers={"sec-fetch-site": "none"}).status_code != 403
        assert open_server.get(path).status_code != 403  # not a browser


@pytest.mark.parametrize("path", ["/sleep", "/wake_up", "/v1/models/unload", "/api/chat", "/chats/wipe"])
def test_nothing_is_written_for_a_page_of_another_site(open_server: LiveServer, path: str) -> None:
    assert open_server.http.post(path, headers=IMAGE).status_code == 403


def test_a_link_leads_to_pages_that_only_show_themselves(open_server: LiveServer) -> None:
    for path in ("/dashboard", "/playground"):
        assert open_server.get(path, headers=LINK).status_code == 200
        assert open_server.get(path, headers=FRAME).status_code == 403
        assert open_server.get(path, headers=IMAGE).status_code == 403
    for path in ("/", "/login"):
        assert open_server.get(path, headers=LINK).status_code in (200, 303)
    refused = open_server.get("/library", headers=LINK)
    assert refused.status_code == 403
    assert "page of another site" in refused.text
    assert 'href="/"' in refused.text


def test_every_answer_says_that_no_other_site_may_use_it(open_server: LiveServer) -> None:
    html = {"accept": "text/html"}
    answers = [
        open_server.get(path, headers=html)
        for path in ("/", "/nowhere", "/static/app.css", "/v1/models", "/v1/nowhere")
    ]
    answers += [open_server.get("/health"), open_server.post(CHAT, {}), open_server.http.options(CHAT)]
    answers += [
        open_server.get("/v1/models", headers=IMAGE),
        open_server.get("/v1/models", headers={"host": "evil.example"}),
    ]
    for answer in answers:
        assert answer.headers.get_list("cross-origin-resource-policy") == ["same-origin"]
        assert answer.headers.get_list("x-content-type-options") == ["nosniff"]
        if answer.headers.get("content-type", "").startswith("text/html"):
            assert "default-src" in answer.headers["content-security-policy"]


# Pages of programs on this machine ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("origin", "by_default", "named_local"),
    [
        ("http://localhost:3000", "key", "yes"),
        ("https://127.0.0.1", "key", "yes"),
        ("http://127.1.2.3:80", "key", "yes"),
        ("http://[::1]:5173", "key", "yes"),
        ("http://tauri.localhost", "key", "yes"),
        ("app://obsidian.md", "no", "yes"),
        ("file://", "no", "yes"),
        ("tauri://localhost", "no", "yes"),
        ("vscode-webview://abc", "no", "yes"),
        ("null", "no", "no"),
        ("http://localhost.evil.example", "no", "no"),
        ("http://localhost@evil.example", "no", "no"),
        ("http://evil.example@localhost", "no", "no"),
        ("http://127.0.0.1.nip.io", "no", "no"),
        ("http://192.168.1.7", "no", "no"),
        ("http://evil.localhost", "no", "no"),
        ("https://evil.example", "no", "no"),
        ("http://[", "no", "no"),
        ("http://localhost/evil", "no", "no"),
        ("localhost", "no", "no"),
        ("", "no", "no"),
    ],
)
def test_whose_pages_may_call(origin: str, by_default: str, named_local: str) -> None:
    for named, expected in ((), by_default), (("local",), named_local):
        origins = Origins(named)
        with_key, without = (origins.may_call(origin, shows_key=key) for key in (True, False))
        assert (with_key, without) == {"yes": (True, True), "key": (True, False), "no": (False, False)}[expected]
        assert origins.may_ask(origin) == with_key


def test_a_page_of_no_origin_needs_a_key_even_where_it_is_named() -> None:
    """Any site can put a frame of origin null into its page."""
    for named in (("null",), ("null", "*"), ("null", "local")):
        assert not Origins(named).may_call("null", shows_key=False)
        assert Origins(named).may_call("null", shows_key=True)
    assert not Origins(("*",)).may_call("null", shows_key=True)


def test_a_page_of_this_machine_is_told_what_to_type_and_reads_it(open_server: LiveServer) -> None:
    asks = {"origin": APP, "sec-fetch-site": "same-site", "sec-fetch-mode": "cors"}
    preflight = asks | {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    asked = open_server.http.options(CHAT, headers=preflight)
    assert asked.status_code == 204
    assert asked.headers["access-control-allow-headers"] == "content-type"
    refused = open_server.post(CHAT, {"messages": [{"role": "user", "content": "a"}]}, headers=asks)
    assert "--allowed-origins local" in refusal(refused, 403)["message"]
    assert refused.headers["access-control-allow-origin"] == APP
    other = open_server.post(CHAT, {}, headers={"origin": "app://obsidian.md"})
    assert "--allowed-origins local" in refusal(other, 403)["message"]
    assert "access-control-allow-origin" not in other.headers
    assert "localhost" in refusal(open_server.post(CHAT, {}, headers={"origin": "null"}), 403)["message"]


def test_a_page_of_this_machine_comes_in_with_a_key_and_with_nothing_else(locked: LiveServer) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    asks = {"origin": APP, "sec-fetch-site": "same-site"}
    answer = locked.post(CHAT, body, headers=asks | KEY)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, APP)
    assert locked.get("/v1/models", headers=asks | {"x-api-key": "sesame"}).status_code == 200
    login = locked.http.post("/login", data={"key": "sesame"})
    cookie = login.headers["set-cookie"].partition(";")[0]
    for borrowed in ({"cookie": cookie}, {"authorization": "Basic dXNlcjpzZXNhbWU="}):
        assert locked.get("/v1/models", headers=borrowed).status_code == 200
        assert locked.get("/v1/models", headers=asks | borrowed).status_code == 403
    assert locked.get("/chats", headers=asks | KEY).status_code == 403  # the pages are for themselves
    assert locked.get("/v1/models", headers=KEY | {"origin": "https://evil.example"}).status_code == 403


def test_local_pages_may_call_where_they_are_named_and_other_sites_may_not(tmp_path: Path) -> None:
    asked = settings(ui=True, allowed_origins=("local", "https://app.example/"))
    with LiveServer(fake_model(tmp_path, PacedRunner()), asked) as server:
        for origin in (APP, "vscode-webview://abc", "https://app.example", "https://APP.example"):
            answer = server.get("/v1/models", headers={"origin": origin, "sec-fetch-site": "cross-site"})
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, origin)
            assert answer.headers["vary"] == "origin"
            assert server.get("/chats", headers={"origin": origin}).status_code == 403
        for origin in ("null", "https://evil.example"):
            answer = server.get("/v1/models", headers={"origin": origin})
            assert answer.status_code == 403
            assert "access-control-allow-origin" not in answer.headers
        preflight = {"origin": "null", "access-control-request-method": "POST"}
        assert server.http.options(CHAT, headers=preflight).status_code == 403


def test_a_page_cannot_guess_keys_without_being_counted(tmp_path: Path) -> None:
    with LiveServer(fake_model(tmp_path, PacedRunner()), settings(api_key="sesame")) as server:
        codes = {
            server.get("/v1/models", headers={"origin": APP, "x-api-key": f"guess {i}"}).status_code
            for i in range(WRONG_KEYS_PER_MINUTE)
        }
        assert codes == {403}
        assert server.get("/v1/models", headers={"origin": APP, "x-api-key": "sesame"}).status_code == 429


# Proxies ------------------------------------------------------------------------------------------------------------


def seen_by(trusted: tuple[str, ...], client: str, forwarded: str | None, proto: str = "") -> tuple[str, str]:
    scope: Any = {"client": (client, 1), "scheme": "http"}
    headers = {} if forwarded is None else {b"x-forwarded-for": forwarded.encode("latin-1")}
    Proxies(trusted).apply(scope, headers | ({b"x-forwarded-proto": proto.encode()} if proto else {}))
    return scope["client"][0], scope["scheme"]


@pytest.mark.parametrize(
    ("trusted", "client", "forwarded", "expected"),
    [
        ((), "127.0.0.1", "6.6.6.6", "127.0.0.1"),
        (("127.0.0.1",), "127.0.0.1", None, "127.0.0.1"),
        (("127.0.0.1",), "127.0.0.1", "6.6.6.6", "6.6.6.6"),
        (("127.0.0.1",), "10.0.0.9", "6.6.6.6", "10.0.0.9"),
        (("127.0.0.1",), "127.0.0.1", "1.1.1.1, 6.6.6.6", "6.6.6.6"),  # the first one the client wrote itself
        (("127.0.0.1", "10.0.0.0/8"), "127.0.0.1", "1.1.1.1, 6.6.6.6, 10.1.2.3", "6.6.6.6"),
        (("10.0.0.0/8",), "10.0.0.1", "10.0.0.2, 10.0.0.3", "10.0.0.2"),
        (("127.0.0.1",), "127.0.0.1", "[2001:db8::1]:99", "2001:db8::1"),
        (("127.0.0.1",), "127.0.0.1", "6.6.6.6:99", "6.6.6.6"),
        (("127.0.0.1",), "::ffff:127.0.0.1", "::ffff:6.6.6.6", "6.6.6.6"),
        (("127.0.0.1",), "127.0.0.1", "6.6.6.6 key=ops id=forged", "127.0.0.1"),
        (("127.0.0.1",), "127.0.0.1", "6.6.6.6, unknown", "127.0.0.1"),
        (("127.0.0.1",), "127.0.0.1", "", "127.0.0.1"),
        (("127.0.0.1",), "127.0.0.1", "\xe9, \x00", "127.0.0.1"),
    ],
)
def test_a_proxy_that_is_named_tells_the_address(
    trusted: tuple[str, ...], client: str, forwarded: str | None, expected: str
) -> None:
    assert seen_by(trusted, client, forwarded) == (expected, "http")


def test_a_proxy_that_is_named_tells_the_scheme() -> None:
    assert seen_by(("127.0.0.1",), "127.0.0.1", None, "https") == ("127.0.0.1", "https")
    assert seen_by(("127.0.0.1",), "127.0.0.1", "6.6.6.6", "gopher") == ("6.6.6.6", "http")
    assert seen_by((), "127.0.0.1", "6.6.6.6", "https") == ("127.0.0.1", "http")


def test_wrong_keys_are_counted_by_the_true_address(tmp_path: Path) -> None:
    for trusted, last in (((), 429), (("127.0.0.1",), 401)):
        asked = settings(api_key="sesame", trusted_proxies=trusted)
        with LiveServer(fake_model(tmp_path, PacedRunner()), asked) as server:
            codes = [
                server.get("/v1/models", headers={"x-api-key": "a", "x-forwarded-for": f"6.6.6.{i}"}).status_code
                for i in range(WRONG_KEYS_PER_MINUTE + 1)
            ]
            assert (codes[0], codes[-1]) == (401, last)


def test_proxies_are_addresses_or_networks() -> None:
    ServerConfig(trusted_proxies=("10.0.0.1", "fd00::/8"))
    with pytest.raises(ConfigError, match="trusted-proxies"):
        ServerConfig(trusted_proxies=("proxy.lan",))


def test_no_value_forges_a_line_of_the_log(locked: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "localllm.access"):
        locked.get("/a%20status=200%0A%22b key=ops id=forged", headers={"x-forwarded-for": "6.6.6.6 key=ops"})
        wait_until(lambda: any(record.name == "localllm.access" for record in caplog.records))
    [line] = [record.getMessage() for record in caplog.records if record.name == "localllm.access"]
    method, path, *rest = line.split(" ", 1)[0], *json_then_rest(line.split(" ", 1)[1])
    assert (method, path) == ("GET", '/a status=200\n"b key=ops id=forged')
    assert [word.partition("=")[0] for word in rest if "=" in word] == ["status", "time", "client", "key", "id"]
    assert "client=127.0.0.1 key=" in line


def json_then_rest(text: str) -> list[str]:
    path, end = json.JSONDecoder().raw_decode(text)
    return [path, *text[end:].split()]


# Content types ------------------------------------------------------------------------------------------------------


def test_no_answer_names_its_characters_twice(open_server: LiveServer) -> None:
    chat = open_server.http.post("/chat", data={"message": "a", "max_tokens": "1"}).headers["location"]
    paths = [
        "/",
        "/static/app.css",
        "/logs/download",
        "/dashboard/requests.csv",
        f"{chat}/export/md",
        f"{chat}/export/json",
    ]
    paths += [f"/static/{path}" for path in static_files() if path.endswith((".js", ".svg", ".txt"))][:6]
    for path in paths:
        answer = open_server.get(path)
        assert answer.status_code == 200, path
        assert answer.headers["content-type"].count("charset") == ("json" not in answer.headers["content-type"]), path
    with open_server.http.stream("GET", "/live/dashboard") as live:
        assert live.headers["content-type"].count("charset") <= 1
