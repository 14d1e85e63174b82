"""A link to read one chat, over a real socket: without a key, up to one message, until it is ended."""

import re
from collections.abc import Iterator

import httpx
import pytest

from localllm.web.access.keys import add_key, keys_path
from tests.web.chat_page import SCRIPTED
from tests.web.harness import browser_of, conversation
from tests.web.live_server import LiveServer, settings
from tests.web.pages_stub import StubModel


@pytest.fixture(scope="module")
def model() -> StubModel:
    stub = StubModel()
    stub.client.every_s, stub.client.chars = 0.0, 40
    return stub


@pytest.fixture(scope="module")
def locked(model: StubModel, own_data: None) -> Iterator[LiveServer]:
    add_key(keys_path(), "anna", "infer")
    with LiveServer(model, settings(ui=True)) as live:  # type: ignore[arg-type]
        yield live


@pytest.fixture(scope="module")
def key() -> str:
    return add_key(keys_path(), "berta", "infer")


@pytest.fixture
def berta(locked: LiveServer, key: str) -> Iterator[httpx.Client]:
    with browser_of(locked) as client:
        assert client.post("/login", data={"key": key}).status_code == 200
        yield client


@pytest.fixture
def stranger(locked: LiveServer) -> Iterator[httpx.Client]:
    with browser_of(locked) as client:
        yield client


def say(browser: httpx.Client, text: str, chat: str = "", **fields: str) -> str:
    return conversation(browser.post("/chat", data={"message": text, "conversation": chat, **fields}).text)


def link(browser: httpx.Client, chat: str, action: str = "now") -> str:
    form = browser.post(f"/c/{chat}/link", data={"link": action}, headers=SCRIPTED).text
    found = re.search(r'href="http://[^/]+(/shared/[\w-]+)"', form)
    return found[1] if found else ""


def test_a_link_shows_the_chat_as_it_was_and_nothing_else(berta: httpx.Client, stranger: httpx.Client) -> None:
    chat = say(berta, "What is a block?", system="Be secret.")
    assert stranger.get(f"/c/{chat}").url.path == "/login"
    address = link(berta, chat)
    page = stranger.get(address)
    assert page.status_code == 200
    assert "What is a block?" in page.text
    assert "Be secret." not in page.text
    assert not re.search(r"<(script|form|button|nav|a href=\"/)", page.text)
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    assert (page.headers["referrer-policy"], page.headers["cache-control"]) == ("no-referrer", "no-store")
    say(berta, "And a later secret?", chat)
    assert "later secret" not in stranger.get(address).text
    assert "Show the newest messages too" in berta.get(f"/c/{chat}/manage").text
    assert link(berta, chat) == address, "the address stays"
    assert "later secret" in stranger.get(address).text
    assert stranger.post(address).status_code in (403, 404, 405)


def test_an_ended_link_shows_nothing_and_a_new_one_is_another(berta: httpx.Client, stranger: httpx.Client) -> None:
    chat = say(berta, "Keep this")
    address = link(berta, chat)
    assert f'action="/c/{chat}/link"' in berta.get("/chats/manage").text
    assert link(berta, chat, "end") == ""
    gone = stranger.get(address)
    assert (gone.status_code, "Keep this" in gone.text, "This link shows nothing" in gone.text) == (404, False, True)
    assert f'action="/c/{chat}/link"' not in berta.get("/chats/manage").text
    assert (again := link(berta, chat)) != address
    berta.post(f"/c/{chat}/delete")
    assert stranger.get(again).status_code == 404


def test_nobody_makes_or_ends_a_link_to_the_chat_of_another_key(
    berta: httpx.Client, stranger: httpx.Client, locked: LiveServer
) -> None:
    chat = say(berta, "Mine")
    address = link(berta, chat)
    other = add_key(keys_path(), "carla", "admin")
    stranger.post("/login", data={"key": other})
    assert stranger.post(f"/c/{chat}/link", data={"link": "end"}).status_code == 404
    assert stranger.get(address).status_code == 200


@pytest.mark.parametrize(
    "path", ["/shared/", "/shared/x", "/shared/../settings", "/shared/x/y", "/shared/%2e%2e/settings"]
)
def test_what_is_not_a_link_opens_nothing(stranger: httpx.Client, path: str) -> None:
    answer = stranger.get(path)
    assert answer.status_code == 404 or answer.url.path == "/login", path
    assert "page--settings" not in answer.text


def test_links_end_with_all_chats(berta: httpx.Client, stranger: httpx.Client) -> None:
    address = link(berta, say(berta, "Wiped"))
    berta.post("/chats/wipe", data={"sure": "1"})
    assert stranger.get(address).status_code == 404
