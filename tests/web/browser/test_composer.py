"""The composer in a real Chromium: a full chat and its ways on, drafts, the drawer, the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from tests.web.browser.looks import overflow, small_targets, until
from tests.web.live_server import LiveServer
from tests.web.pages_stub import StubModel

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.slow

Open = Callable[..., "Page"]
REFUSED = "Failed to load resource: the server responded with a status of 400 (Bad Request)"


@pytest.fixture(autouse=True)
def quick(model: StubModel) -> None:
    model.client.every_s = 0.001


def send(page: Page, text: str) -> None:
    page.fill("#composer-message", text)
    page.press("#composer-message", "Enter")


def written(page: Page, count: int) -> None:
    until(page, f"document.querySelectorAll('.message--assistant .figures').length >= {count}")


@pytest.mark.parametrize("width", [360, 1280])
def test_full_chat_goes_on_in_each_of_its_ways(open_page: Open, width: int) -> None:
    page = open_page(width=width, height=740, expect=REFUSED)
    send(page, "a" * 300)
    written(page, 1)
    page.fill("#composer-message", "b" * 700)
    page.wait_for_selector("#composer-fit :text('This chat is full: ')")  # before anything is sent
    assert "Too long by" in page.locator("#composer-action").inner_text()
    page.click("text=Edit the message")
    until(page, "document.activeElement.id === 'composer-message'")
    page.press("#composer-message", "Enter")
    assert page.locator(".message").count() == 2
    assert page.input_value("#composer-message") == "b" * 700
    assert overflow(page) == 0
    assert small_targets(page) == []
    page.reload()
    assert page.input_value("#composer-message") == "b" * 700  # the draft of this chat
    page.press("#composer-message", "Enter")  # not counted yet: refused by the server
    page.wait_for_selector("#composer-fit :text('This chat is full: ')")
    page.fill("#composer-message", "short")
    page.wait_for_selector("[data-send]")
    assert page.locator("#composer-fit > *").count() == 0
    page.fill("#composer-message", "b" * 700)
    page.click("text=Leave out the oldest messages")
    written(page, 2)
    assert page.locator(".message--left-out").count() == 2
    assert page.input_value("#composer-message") == ""
    assert overflow(page) == 0
    page.click("text=Bring back")
    until(page, "!document.querySelector('.message--left-out')")
    page.fill("#composer-message", "and now?" * 20)
    page.click("text=Go on in a new chat with a summary")
    page.wait_for_selector(".origin")
    until(page, "document.querySelectorAll('.message--assistant .figures').length === 1")
    assert page.input_value("#composer-message") == "and now?" * 20
    page.press("#composer-message", "Enter")
    written(page, 2)


def test_drawer_counts_resets_and_closes(open_page: Open) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    page = open_page(width=360, height=740, bypass_csp=True)
    page.click(".drawer__open")
    page.fill("#system", "Speak like a pirate")
    page.fill("#temperature", "0.7")
    until(page, "document.querySelector('[data-num-set]').textContent === '· 2 set'")
    page.click(".drawer__more summary")
    assert page.locator("#top-p").is_visible()
    assert (overflow(page), small_targets(page)) == (0, [])
    serious = [
        each["id"]
        for each in axe.Axe().run(page).response["violations"]
        if each["impact"] in ("moderate", "serious", "critical")
    ]
    assert serious == []
    page.click("[data-close-drawer]")
    until(page, "document.activeElement.matches('.drawer__open')")
    send(page, "hi")
    written(page, 1)
    page.click(".behaviour__chip")
    until(page, "document.activeElement.id === 'system'")
    page.click("text=Reset")
    until(page, "document.querySelector('#system').value === ''")
    assert page.locator("[data-num-set]").inner_text() == ""
    assert page.locator(".drawer[open]").count() == 1


def test_file_is_cut_to_what_fits_and_a_model_is_picked(open_page: Open, server: LiveServer, model: StubModel) -> None:
    page = open_page()
    page.click(".drawer__open")
    page.fill("#system", "s" * 700)
    page.click("[data-close-drawer]")
    page.set_input_files("#composer-file", {"name": "n.txt", "mimeType": "text/plain", "buffer": b"word " * 270})
    page.wait_for_selector("#composer-fit :text('Too long by')")
    page.click("text=/Attach the first/")
    until(page, "document.querySelectorAll('#composer-fit > *').length === 0")
    page.wait_for_selector("[data-send]")
    other = StubModel(name="second")
    entry = server.manager.adopt(other)  # type: ignore[arg-type]
    try:
        page.reload()
        page.fill("#composer-message", "stays")
        page.select_option("#model", "second")
        page.wait_for_selector("[data-send]")
        assert page.input_value("#composer-message") == "stays"
        page.press("#composer-message", "Enter")
        written(page, 1)
        assert len(other.client.asked) == 1
    finally:
        server.manager.entries.remove(entry)


def test_a_message_waits_for_the_end_of_the_reply_and_can_be_taken_back(open_page: Open, model: StubModel) -> None:
    model.client.every_s = 0.02
    page = open_page()
    send(page, "first")
    page.wait_for_selector("[data-stop]:not([data-stop=later])")
    send(page, "second")
    page.wait_for_selector(".composer--queued")
    page.press("#composer-message", "Escape")
    assert page.locator(".composer--queued").count() == 0
    assert page.locator("[data-stop]").count() == 1, "Esc took the message back, and stopped nothing"
    page.press("#composer-message", "Enter")
    page.wait_for_selector(".composer--queued")
    written(page, 2)
    assert page.locator(".message--user .message__text").last.inner_text() == "second"
    assert page.input_value("#composer-message") == ""


def test_enter_once_more_stops_the_reply_and_sends_the_message_now(
    open_page: Callable[..., Page], model: StubModel
) -> None:
    model.client.every_s = 0.2
    page = open_page()
    send(page, "first")
    page.wait_for_selector("[data-stop]:not([data-stop=later])")
    send(page, "rather this")
    page.wait_for_selector(".composer--queued")
    page.press("#composer-message", "Enter")
    page.get_by_text("stopped by you").wait_for()
    model.client.every_s = 0.001
    written(page, 2)
    assert page.locator(".message--user .message__text").last.inner_text() == "rather this"


def test_the_list_shows_where_a_reply_is_being_written_and_where_one_is_new(
    open_page: Callable[..., Page], model: StubModel
) -> None:
    model.client.every_s = 0.2
    page = open_page()
    send(page, "a slow one")
    page.wait_for_selector("[data-stop]:not([data-stop=later])")
    page.locator(".side__new").click()
    page.wait_for_selector(".chats__link[data-dot=writing]:has-text('a slow one')")
    model.client.every_s = 0.001
    page.wait_for_selector(".chats__link[data-dot=new]:has-text('a slow one')")
    assert page.evaluate("document.querySelector('[data-dot=new]').ariaDescription") == "New reply"
    page.reload()
    page.locator(".chats__link[data-dot=new]").click()
    page.wait_for_selector(".figures")
    assert page.locator(".chats__link[data-dot=new]").count() == 0


def test_the_browser_tells_of_a_long_reply_in_a_hidden_tab_once_it_was_allowed(
    open_page: Callable[..., Page], model: StubModel
) -> None:
    model.client.every_s = 0.2
    page = open_page()
    page.evaluate(
        """(() => {
            window.told = [];
            window.Notification = class {
                static permission = "default";
                static requestPermission() { this.permission = "granted"; }
                constructor(title, { body }) { told.push(`${title}: ${body}`); }
            };
        })()"""
    )
    page.clock.install()
    for number, hidden in enumerate(("false", "true"), 1):
        model.client.every_s = 0.2
        send(page, "go")
        page.wait_for_selector("[data-stop]:not([data-stop=later])")
        page.clock.fast_forward(11_000)
        if number == 1:
            page.get_by_role("button", name="Tell me when it is done").click()
        assert not page.locator("#tell").is_visible()
        page.clock.fast_forward(20_000)
        page.evaluate(f"Object.defineProperty(document, 'hidden', {{value: {hidden}, configurable: true}})")
        model.client.every_s = 0.001
        written(page, number)
        assert len(page.evaluate("told")) == number - 1, "a tab that is seen needs no notice"
    assert page.evaluate("told") == ["go: The reply is done."]
