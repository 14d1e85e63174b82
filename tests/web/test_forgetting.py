"""Nothing of a request stays in memory when it is answered, and nothing of a chat when it is wiped."""

import gc
import http.client
import json
import secrets
import sys
from collections.abc import Iterator
from functools import _lru_cache_wrapper
from urllib.parse import urlencode, urlsplit

import psutil
import pytest

from localllm.web.pages.chat.markdown.stream import HTMLCache, cached_html
from tests.conftest import thaw
from tests.web.live_server import LiveServer, PacedRunner, fake_model, settings, wait_until

JSON = {"content-type": "application/json"}
FORM = {"content-type": "application/x-www-form-urlencoded", "connection": "close"}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A locked server with pages."""
    folder = tmp_path_factory.mktemp("tiny")
    asked = settings(ui=True, api_key="the-key-of-this-server", chat_history=False)
    with LiveServer(fake_model(folder, PacedRunner()), asked) as server:
        yield server


def ask(
    server: LiveServer, method: str, path: str, body: str | None = None, headers: dict[str, str] | None = None
) -> tuple[int, str]:
    """By a client that keeps nothing itself; the status and where it leads."""
    connection = http.client.HTTPConnection(str(urlsplit(server.url).netloc), timeout=20)
    try:
        connection.request(method, path, body, {"connection": "close", **(headers or {})})
        answer = connection.getresponse()
        answer.read()
        return answer.status, answer.headers.get("location", "")
    finally:
        connection.close()


def holders(kept: list[str]) -> list[str]:
    """What in this process refers to a text or to bytes that hold one of the secrets."""
    thaw()
    gc.collect()
    needles = [secret[::-1] for secret in kept]
    raws = [needle.encode() for needle in needles]
    own = {id(each) for each in needles + raws}
    found, todo = [], gc.get_objects()
    while todo:
        holder = todo.pop()
        for held in gc.get_referents(holder):
            if type(held) in (tuple, dict) and not gc.is_tracked(held):
                todo.append(held)  # they hold nothing but texts, bytes and numbers: the collector passes over them
            if type(held) not in (str, bytes, bytearray) or len(held) < len(needles[0]) or id(held) in own:
                continue
            if any(each in held for each in (needles if type(held) is str else raws)):
                found.append(f"{type(holder).__name__} with {held[:80]!r}")
    return found


def by_query(server: LiveServer, secret: str) -> None:
    assert ask(server, "GET", f"/login?next=/{secret[::-1]}")[0] == 200


def by_cookie(server: LiveServer, secret: str) -> None:
    assert ask(server, "GET", "/login", headers={"cookie": f"a={secret[::-1]}"})[0] == 200


def by_login(server: LiveServer, secret: str) -> None:
    assert ask(server, "POST", "/login", urlencode({"key": secret[::-1]}), FORM)[0] == 401


def by_path(server: LiveServer, secret: str) -> None:
    key = {"x-api-key": "the-key-of-this-server"}
    assert ask(server, "GET", f"/v1/responses/{secret[::-1]}", headers=key)[0] == 404


def by_wiped_chat(server: LiveServer, secret: str) -> None:
    key = FORM | {"x-api-key": "the-key-of-this-server"}
    status, chat = ask(server, "POST", "/chat", urlencode({"message": secret[::-1], "max_tokens": "2"}), key)
    assert status == 303
    server.wait_idle()
    assert ask(server, "GET", chat, headers=key)[0] == 200
    assert cached_html._html
    assert ask(server, "POST", "/chats/wipe", "sure=1", key)[0] == 303
    assert not cached_html._html


def test_no_object_of_the_process_holds_what_a_request_brought(pages: LiveServer) -> None:
    """The secrets are kept backwards here, so that none of the test's own objects is found."""
    kept = [secrets.token_hex(12) for _ in range(5)]
    for secret, send in zip(kept, (by_query, by_cookie, by_login, by_path, by_wiped_chat), strict=True):
        send(pages, secret)
    state = pages.server.server_state
    wait_until(lambda: not state.connections and not state.tasks)
    wait_until(lambda: not holders(kept), 60)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": 1, "allowed_token_ids": [*range(10**6, 10**6 + 99_991)]}),
        ("/v1/chat/completions", {"messages": [{}] * 99_991}),
        ("/v1/completions", {"prompt": [10**6] * 99_991}),
    ],
)
def test_a_refused_body_is_freed_without_a_garbage_collection(
    pages: LiveServer, path: str, body: dict[str, object]
) -> None:
    """An error that crossed threads refers to itself through its traceback, whose frames hold the parsed body."""
    written = json.dumps(body)
    held = {id(each) for each in lists_of(99_991)}
    gc.disable()
    try:
        assert 400 <= ask(pages, "POST", path, written, {"x-api-key": "the-key-of-this-server"} | JSON)[0] < 500
        wait_until(lambda: {id(each) for each in lists_of(99_991)} <= held, 5)
    finally:
        gc.enable()


def lists_of(length: int) -> list[list[object]]:
    return [each for each in gc.get_objects() if type(each) is list and len(each) == length]


def test_litestar_has_no_cache_that_requests_fill(pages: LiveServer) -> None:
    """If a future version has another one, add it to web/app.py, or here where it holds no request."""
    caches = set()
    for module in [module for name, module in sys.modules.items() if name.startswith("litestar")]:
        found = list(vars(module).values())
        found += [value for kind in found if isinstance(kind, type) for value in vars(kind).values()]
        functions = [getattr(value, "__func__", value) for value in found]
        caches |= {each for each in functions if isinstance(each, _lru_cache_wrapper)}
    own = {each.__name__ for each in caches if each.__module__.startswith("litestar")}
    assert own <= {"normalize_headers"}  # the headers that handlers are declared with
    thaw()
    gc.collect()
    living = [each for each in gc.get_objects() if type(each) is _lru_cache_wrapper]
    names = {
        each.__name__ for each in living if str(each.__module__).startswith("litestar") and each.cache_info().currsize
    }
    assert names <= {"normalize_headers"}


def test_hundreds_of_requests_leave_no_memory_behind(pages: LiveServer) -> None:
    """Each brings something new of 15 KiB, which Litestar's own caches would keep as some 600 KiB."""
    pairs = "; ".join(f"{i:x}=" for i in range(2_000))

    def some(start: int, count: int) -> None:
        for i in range(start, start + count):
            assert ask(pages, "GET", f"/login?{i}", headers={"cookie": f"i{i}=; {pairs}"})[0] == 200

    some(0, 32)
    gc.collect()
    before = psutil.Process().memory_info().rss
    some(32, 256)
    gc.collect()
    assert psutil.Process().memory_info().rss - before < 16 * 2**20


def test_large_cookies_and_forms_are_refused(pages: LiveServer) -> None:
    key = FORM | {"x-api-key": "the-key-of-this-server"}
    assert ask(pages, "GET", "/login", headers={"cookie": "a=" + "b" * 17_000})[0] == 431
    assert ask(pages, "GET", "/login", headers={"cookie": "a=" + "b" * 16_000})[0] == 200
    assert ask(pages, "POST", "/login", "key=" + "a" * 40_000, FORM)[0] == 413
    assert ask(pages, "POST", "/chat", "a=&" * 1_001, key)[0] == 413
    assert ask(pages, "POST", "/chat", "message=" + "a" * 2_000_000, key)[0] == 413


def test_drawn_texts_are_kept_up_to_a_bound_and_cleared_when_told() -> None:
    texts = HTMLCache(most_chars=1_000)
    for i in range(100):
        texts(f"text {i} " * 5)
    assert 0 < sum(len(text) + len(html) for text, html in texts._html.items()) <= 1_000
    newest = next(reversed(texts._html))
    assert texts(newest) is texts(newest)
    assert "<p>" in texts("too large to be kept " * 100)
    texts.clear()
    assert not texts._html
    assert texts._chars == 0
