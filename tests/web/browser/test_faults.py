"""What goes wrong around a page in a real Chromium: a restart under it, two messages at once, two tabs of one chat."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from localllm.config.settings import EngineConfig, ServerConfig, Settings
from localllm.web.access.keys import keys_path
from tests.web.browser.looks import opened, overflow, until
from tests.web.library_server import Loads, only_pick
from tests.web.live_server import LiveServer, ManagedServer, settings, wait_until
from tests.web.pages_stub import StubModel

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.slow
KEY = "sesame"
Open = Callable[..., "Page"]


def locked_server(port: int = 0) -> LiveServer:
    return LiveServer(StubModel(), settings(ui=True, api_key=KEY, port=port))  # type: ignore[arg-type]


def logged_in(chromium: Browser, server: LiveServer) -> Page:
    page = chromium.new_context().new_page()
    page.set_default_timeout(20_000)
    page.goto(server.url)
    page.fill("#key", KEY)
    page.keyboard.press("Enter")
    page.wait_for_selector("#composer-message")
    return page


def restarted(page: Page, server: LiveServer) -> LiveServer:
    """Another server at the same address, once the page has seen that the first one is gone."""
    server.__exit__(None, None, None)
    page.locator("#connection").wait_for(state="visible")
    return locked_server(int(server.url.rpartition(":")[2]))


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return keys_path().parent


def test_a_message_typed_during_a_restart_is_sent_by_the_browser_that_was_logged_in(
    chromium: Browser, data: Path
) -> None:
    server = locked_server().__enter__()
    page = logged_in(chromium, server)
    page.fill("#composer-message", "sent later")
    with restarted(page, server) as again:
        page.keyboard.press("Enter")
        page.locator(".message--assistant .figures").wait_for()
        assert page.locator("#connection").is_hidden()
        assert page.locator("#logged-out").is_hidden()
        assert len(again.model.client.asked) == 1  # type: ignore[union-attr]
        page.context.close()


def test_a_page_whose_session_has_ended_says_so_and_keeps_the_text(chromium: Browser, data: Path) -> None:
    server = locked_server().__enter__()
    page = logged_in(chromium, server)
    page.goto(f"{server.url}/?behaviour")
    page.fill("#composer-message", "kept")
    (data / "sessions.json").unlink()
    with restarted(page, server):
        page.locator("#logged-out").wait_for(state="visible")
        assert page.locator("#connection").is_hidden()
        page.get_by_role("link", name="Log in again").click()
        page.fill("#key", KEY)
        page.keyboard.press("Enter")
        page.wait_for_selector("#composer-message")
        assert page.input_value("#composer-message") == "kept"
        page.context.close()


SHOWN = "[...document.querySelectorAll('.message:not(.message--sending)')].map(e => e.id)"


def say(page: Page, text: str) -> None:
    page.fill("#composer-message", text)
    page.press("#composer-message", "Enter")


@pytest.mark.parametrize("width", [360, 1280])
def test_two_quick_messages_in_a_new_chat_stay_one_chat(open_page: Open, model: StubModel, width: int) -> None:
    page = open_page(width=width, height=740)
    slow = page.context.new_cdp_session(page)
    delayed = {"offline": False, "latency": 1000, "downloadThroughput": -1, "uploadThroughput": -1}
    slow.send("Network.emulateNetworkConditions", delayed)
    text = f"one of two at {width}"
    say(page, text)
    assert page.locator(".message--sending .message__text").inner_text() == text  # in the same frame
    assert "Stop" in page.locator("#composer-action").inner_text()
    assert not page.locator("#empty-chat").is_visible()
    say(page, "two of two")
    assert page.input_value("#composer-message") == "two of two", "Enter sends nothing while Stop is shown"
    page.locator(".message--assistant .figures").wait_for()
    page.press("#composer-message", "Enter")
    until(page, "document.querySelectorAll('.message--assistant .figures').length === 2")
    assert page.locator(".message--sending").count() == 0
    assert page.locator(f"#chat-list a:has-text('{text}')").count() == 1
    before = page.evaluate(SHOWN)
    page.reload()
    assert (page.evaluate(SHOWN), len(before)) == (before, 4)


def test_stop_is_heard_before_the_server_has_answered(open_page: Open, model: StubModel) -> None:
    page = open_page()
    model.client.every_s = 0.2
    slow = page.context.new_cdp_session(page)
    delayed = {"offline": False, "latency": 700, "downloadThroughput": -1, "uploadThroughput": -1}
    slow.send("Network.emulateNetworkConditions", delayed)
    say(page, "stop " * 20)
    page.keyboard.press("Escape")
    page.locator(".message--assistant .figures").wait_for()
    assert page.locator("[data-send]").is_visible()


def test_a_refused_message_takes_its_bubble_away(open_page: Open) -> None:
    page = open_page(expect="Failed to load resource: the server responded with a status of 400 (Bad Request)")
    page.evaluate("document.querySelector('#composer-message').value = 'x'.repeat(20_000)")
    page.locator("#composer-message").press("Enter")
    page.locator("#composer-fit .refusal").wait_for()
    assert page.locator(".message").count() == 0
    assert len(page.input_value("#composer-message")) == 20_000


def test_two_tabs_of_one_chat_show_one_chat(open_page: Open, model: StubModel) -> None:
    model.client.every_s = 0.001
    first = open_page()
    say(first, "from the first tab")
    first.locator(".message--assistant .figures").wait_for()
    path = first.evaluate("location.pathname")
    second = open_page(path)
    say(second, "from the second tab")
    until(first, f"{SHOWN}.length === 4")
    until(first, "document.querySelectorAll('.message--assistant .figures').length === 2")
    assert first.evaluate(SHOWN) == second.evaluate(SHOWN)
    first.fill("#composer-message", "typed")
    second.locator(".message--assistant .figures").nth(1).wait_for()
    say(second, "once more")
    first.locator("#news").wait_for(state="visible")
    assert first.evaluate(f"{SHOWN}.length") == 4, "the page does not move under a person who types"
    first.click("#news")
    until(first, f"{SHOWN}.length === 6")
    assert first.locator("#news").is_hidden()
    assert first.input_value("#composer-message") == "typed"
    until(first, "document.querySelectorAll('.message--assistant .figures').length === 3")
    assert first.evaluate(SHOWN) == second.evaluate(SHOWN)


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_the_head_names_the_model_that_answers_and_covers_nothing(
    open_page: Open, server: LiveServer, model: StubModel, width: int
) -> None:
    model.client.every_s = 0.001
    other = StubModel(name="a-second-model-of-some-length")
    entry = server.manager.adopt(other)  # type: ignore[arg-type]
    try:
        page = open_page(width=width, height=740)
        page.select_option("#model", model.name)
        page.locator(f"#status-pill[title^='{model.name}: ready']").wait_for()
        title = "Please think about scheduling and say why it is hard, now"
        say(page, title)
        page.locator(".message--assistant .figures").wait_for()
        assert page.locator(".pill__model").inner_text() == model.name
        page.select_option("#model", other.name)
        page.locator(f"#status-pill[title^='{other.name}: ready']").wait_for()
        entry.state = "unloaded"
        page.locator("#status-pill[title$='not loaded']").wait_for()
        until(page, "document.querySelector('#model').selectedOptions[0].textContent.includes('not loaded')")
        boxes = "[...document.querySelectorAll('.head > *, #status-pill')].filter(e => e.checkVisibility())"
        edges = page.evaluate(
            f"{boxes}.filter(e => e.id !== 'context-meter').map(e => e.getBoundingClientRect())"
            ".filter(b => b.width).map(b => [b.left, b.right])"
        )
        assert all(before[1] <= after[0] + 1 for before, after in pairwise(edges)), edges
        if width == 1280:
            assert page.evaluate("(e => e.scrollWidth <= e.clientWidth)(document.querySelector('.head__title'))")
        assert overflow(page) == 0
    finally:
        server.manager.entries.remove(entry)


def test_nothing_lies_on_the_offer_of_an_empty_chat(open_page: Open) -> None:
    page = open_page(width=360, height=400, has_touch=True, is_mobile=True)
    page.wait_for_timeout(300)
    assert page.locator("#newest").is_hidden()


def test_a_server_that_has_loaded_nothing_has_a_composer(
    chromium: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Loads(tmp_path / "made", monkeypatch)
    asked = Settings(EngineConfig(), ServerConfig(port=0, ui=True, load_at_start=False), picks=only_pick("org/tiny"))
    with ManagedServer(asked) as server, opened(chromium, 360, 740) as page:
        wait_until(lambda: server.manager.register.default is not None)
        page.set_default_timeout(20_000)
        page.goto(server.url)
        assert re.search(r"demo is not loaded. Your first message loads it \([\d.]+ MiB\).", page.inner_text("#main"))
        say(page, "wake up")
        page.locator(".message--assistant .figures").wait_for()
        page.locator("#status-pill[title^='demo: ready']").wait_for()
