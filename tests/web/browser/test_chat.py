"""Chats in a real Chromium: branches, keys, dialogs, undo, a long history, and what axe says."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from tests.web.browser.harness import long_chat, say
from tests.web.browser.looks import overflow, until
from tests.web.live_server import LiveServer
from tests.web.pages_stub import StubModel

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.slow

Open = Callable[..., "Page"]
SHOWN_TEXT = "[...document.querySelectorAll('.message__text')].map(e => e.textContent)"


@pytest.fixture(autouse=True)
def quick(model: StubModel) -> None:
    model.client.every_s = 0.001


def test_edit_regenerate_and_switch_between_versions(open_page: Open) -> None:
    page = open_page()
    say(page, "first")
    assert page.locator("#chat-list [aria-current]").inner_text() == "first"
    page.locator(".message--user").hover()
    page.click(".message--user [data-key=e]")
    until(page, "document.activeElement.value === 'first'")
    page.keyboard.type(" and more")
    page.click(".edit button[type=submit]")
    page.wait_for_selector(".message--user .versions")
    until(page, f"{SHOWN_TEXT}.join() === 'first and more'")
    page.wait_for_selector(".figures")
    page.click("[aria-label='Previous version']")
    until(page, f"{SHOWN_TEXT}.join() === 'first'")
    page.keyboard.press("Escape")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("r")
    page.wait_for_selector(".message--assistant .versions")
    page.wait_for_selector(".message--assistant .figures")
    assert "2/2" in page.locator(".message--assistant .versions").inner_text()
    assert page.locator(".message").count() == 2


def test_keys_walk_through_messages_copy_and_search(open_page: Open, server: LiveServer) -> None:
    page = open_page()
    page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=server.url)
    say(page, "walk here")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("k")
    page.keyboard.press("k")
    assert page.evaluate("document.activeElement.className") == "message message--user"
    page.keyboard.press("c")
    page.locator("#chat-status:text('Copied')").wait_for(state="attached")
    assert page.evaluate("navigator.clipboard.readText()") == "walk here"
    page.keyboard.press("j")
    assert "assistant" in page.evaluate("document.activeElement.className")
    page.keyboard.press("/")
    page.keyboard.type("walk")
    page.wait_for_selector("#chat-list mark")
    assert page.locator("#chat-list mark").first.inner_text() == "walk"
    page.keyboard.type("zzzz")
    page.wait_for_selector("text=No chat contains these words.")


def test_dialog_renames_and_deletes_with_undo(open_page: Open) -> None:
    page = open_page(expect="Failed to load resource: the server responded with a status of 400 (Bad Request)")
    say(page, "to be renamed")
    page.click(".head__more")
    page.fill("#chat-title", "  ")
    page.keyboard.press("Enter")
    page.wait_for_selector("#manage-error :text('The title is empty.')")
    page.fill("#chat-title", "A better name")
    page.keyboard.press("Enter")
    page.wait_for_selector(".head__title:text('A better name')")
    until(page, "!document.querySelector('#manage').open")
    assert page.locator("#chat-list [aria-current]").inner_text() == "A better name"
    page.click(".message--assistant [aria-label=More]")
    page.click(".more:popover-open .action--delete")
    until(page, "document.querySelectorAll('.message').length === 1")
    page.click(".undo__button")
    until(page, "document.querySelectorAll('.message').length === 2")
    page.click(".head__more")
    page.click(".manage__delete")
    page.wait_for_selector(".undo")
    assert page.locator("#chat-list :text('A better name')").count() == 0
    page.click(".undo__button")
    page.wait_for_selector(".message--assistant")


def test_chat_of_500_messages_is_little_work_to_paint_and_loads_upwards(open_page: Open, server: LiveServer) -> None:
    """The main thread's own processor time: a busy machine changes that less than the clock, which
    scripts/bench_chat_page looks at."""
    path = long_chat(server)
    page = open_page("/dev/patterns")
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    before = _task_s(session)
    page.goto(server.url + path)
    until(page, "performance.getEntriesByName('first-contentful-paint').length === 1")
    assert _task_s(session) - before < 0.3
    assert page.locator(".message").count() == 40
    until(page, "(s => s.scrollHeight - s.scrollTop - s.clientHeight < 2)(document.querySelector('#chat-scroll'))")
    first = page.locator(".message").first.get_attribute("id")
    page.evaluate("document.querySelector('#chat-scroll').scrollTop = 0")
    until(page, "document.querySelectorAll('.message').length >= 80")
    assert page.locator(f"#{first}").evaluate("e => e.getBoundingClientRect().top") > 0
    assert page.evaluate("document.querySelector('#chat-scroll').scrollTop") > 100


def _task_s(session: Any) -> float:
    metrics = session.send("Performance.getMetrics")["metrics"]
    return float(next(each["value"] for each in metrics if each["name"] == "TaskDuration"))


@pytest.mark.parametrize("width", [320, 768])
def test_small_screens_have_the_list_behind_a_button(open_page: Open, width: int) -> None:
    page = open_page(width=width, height=740)
    say(page, "W" * 200)
    assert overflow(page) == 0
    assert not page.locator("#chat-list").is_visible()
    page.click(".head__chats")
    small = """[...document.querySelectorAll('#side a, #side input')].filter(e => e.offsetParent)
        .filter(e => e.getBoundingClientRect().height < 32).map(e => e.outerHTML.slice(0, 80))"""
    assert page.evaluate(small) == []
    page.locator("#chat-list .chats__more").first.click()
    page.wait_for_selector("#manage[open]")
    page.keyboard.press("Escape")
    page.click(".message--user [data-key=e]", force=True)
    page.wait_for_selector(".edit")
    assert overflow(page) == 0
    page.click(".drawer summary")
    assert overflow(page) == 0


def test_at_400_percent_the_conversation_can_be_read_and_a_message_sent(open_page: Open) -> None:
    page = open_page(width=320, height=256)
    say(page, "W" * 200)
    assert overflow(page) == 0
    assert page.locator("#chat-scroll").evaluate("e => e.clientHeight") >= 200
    page.locator("[data-send]").scroll_into_view_if_needed()
    say(page, "and again")
    until(page, "document.querySelectorAll('.message--user').length === 2")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(open_page: Open, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    page = open_page(color_scheme=scheme, bypass_csp=True)  # axe itself is put into the page
    say(page, "question")
    page.locator(".message--user").hover()
    stages = [lambda: None, lambda: page.click(".drawer summary"), lambda: _dialog(page, ".head__more")]
    stages += [lambda: _dialog(page, ".side__more")]
    for stage in stages:
        stage()
        found = axe.Axe().run(page).response["violations"]
        serious = [
            (each["id"], each["nodes"][0]["html"][:120])
            for each in found
            if each["impact"] in ("moderate", "serious", "critical")
        ]
        assert serious == []


def _dialog(page: Page, button: str) -> None:
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    page.click(button)
    page.wait_for_selector("#manage[open] h2")


def test_without_scripts_everything_is_a_page(open_page: Open) -> None:
    page = open_page(java_script_enabled=False)
    page.fill("#composer-message", "plain")
    page.click("[data-send]")
    page.click(".message--user [aria-label=Edit]", force=True)
    page.fill(".edit__text", "plainer")
    page.click(".edit button[type=submit]")
    page.click(".message--user [aria-label='Previous version']", force=True)
    assert page.locator(".message__text").inner_text() == "plain"
    page.click(".head__more")
    page.fill("#chat-title", "Without scripts")
    page.click("text=Rename")
    assert page.locator(".head__title").inner_text() == "Without scripts"
    page.fill("#search", "plain")
    page.keyboard.press("Enter")
    page.locator(".panel a:has-text('Without scripts')").first.wait_for()
    page.click(".panel a:has-text('Without scripts')")
    page.click(".message--assistant [aria-label=More]")
    page.click(".message--assistant .action--delete")
    page.click(".undo__button")
    assert page.locator(".message--assistant").count() == 1
