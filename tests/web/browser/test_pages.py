"""The pages in a real Chromium: text that grows, keys, figures that move, small screens, a server that goes away."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from localllm.web.pages import PAGES as REGISTERED
from tests.web.browser.looks import overflow, until
from tests.web.live_server import LiveServer, settings
from tests.web.pages_stub import StubModel, stub_ranks

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


def reply_text(page: Page) -> str:
    return page.locator(".message--assistant").last.inner_text()


def test_message_is_answered_in_text_that_grows_and_ends_rendered(
    open_page: Callable[..., Page], model: StubModel
) -> None:
    model.client.every_s = 0.1  # so slow that the browser is faster on any machine
    page = open_page()
    page.fill("#composer-message", "What is paged attention?")
    page.click("[data-send]")
    page.locator("#chat-status:text('Generating')").wait_for(state="attached")
    lengths = {0}
    while len(lengths) < 6:
        assert page.locator(".message--assistant[aria-busy]").count() == 1, lengths
        lengths.add(len(reply_text(page)))
        page.wait_for_timeout(60)
    model.client.every_s = 0.001
    page.wait_for_selector(".figures")
    reply = page.locator(".message--assistant")
    assert reply.locator("strong").first.inner_text() == "Paged attention"
    assert reply.locator(".code .k").first.inner_text() == "def"
    assert reply.locator("table td.align-right").count() == 2
    assert re.search(
        r"[\d.]+ s to first word · [\d.,]+ tok/s · [\d,]+ tokens", reply.locator(".figures").inner_text(), re.DOTALL
    )
    assert re.fullmatch(r"Reply finished, \d+ tokens", page.locator("#chat-status").inner_text())
    assert page.input_value("#composer-message") == ""
    assert "/c/" in page.url
    shown = reply.inner_text()
    page.reload()
    assert reply_text(page) == shown


def test_keyboard_alone_asks_breaks_lines_stops_and_goes_on(open_page: Callable[..., Page], model: StubModel) -> None:
    model.client.every_s = 0.03
    page = open_page()
    keys = page.keyboard
    assert page.evaluate("document.activeElement.id") == "composer-message"
    keys.type("one")
    keys.press("Shift+Enter")
    keys.type("two")
    keys.press("Enter")
    page.wait_for_selector("[data-stop]")
    assert page.locator(".message--user .message__text").inner_text() == "one\ntwo"
    keys.press("Enter")  # nothing to send: nothing happens
    until(page, "document.querySelector('.open').textContent.length > 5")
    keys.press("Escape")
    page.wait_for_selector("[data-send]")
    assert "stopped by you" in reply_text(page)
    assert page.locator("#chat-status").inner_text().startswith("Reply stopped")
    assert page.evaluate("document.activeElement.id") == "composer-message"
    assert not model.client.running
    model.client.every_s = 0.001
    keys.type("and now?")
    keys.press("Enter")
    until(page, "document.querySelectorAll('.figures').length === 2")
    assert "user: one\ntwo\nassistant: " in "".join(map(chr, model.client.asked[-1].prompt_token_ids))


def test_skip_link_and_tab_order_reach_everything(open_page: Callable[..., Page]) -> None:
    page = open_page("/dashboard")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    seen = []
    for _ in range(3 + len(REGISTERED)):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.textContent.trim().split(/\\s/)[0]"))
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid", seen
    assert seen == ["", *(page.entry.title for page in REGISTERED), "?Shortcuts", "Theme:"]


def test_settings_apply_and_close_with_escape(open_page: Callable[..., Page], model: StubModel) -> None:
    page = open_page()
    page.click(".drawer summary")
    page.fill("#system", "Answer in French.")
    page.fill("#max-tokens", "5")
    page.keyboard.press("Escape")
    assert page.locator(".drawer[open]").count() == 0
    assert page.evaluate("document.activeElement.ariaLabel") == "Model behaviour"
    page.click("text=Explain in simple words why the sky is blue")
    page.wait_for_selector(".figures")
    assert "5 tokens" in reply_text(page)
    asked = "".join(map(chr, model.client.asked[-1].prompt_token_ids))
    assert asked == "system: Answer in French.\nuser: Explain in simple words why the sky is blue"
    assert page.locator("#empty-chat").count() == 0


def test_tab_that_reloads_mid_reply_misses_nothing(open_page: Callable[..., Page], model: StubModel) -> None:
    model.client.every_s = 0.1  # until the page is there again
    page = open_page()
    page.fill("#composer-message", "hello")
    page.press("#composer-message", "Enter")
    page.wait_for_selector(".message--assistant[aria-busy] .prose :not(:empty), .message--assistant .open:not(:empty)")
    page.reload()
    assert page.locator(".message--assistant[aria-busy]").count() == 1
    model.client.every_s = 0.001
    page.wait_for_selector(".figures")
    assert page.locator(".prose strong").count() == 1
    assert page.locator(".prose .code").count() == 1
    assert reply_text(page).count("How a position is found") == 1


def test_refusal_gives_the_message_back(open_page: Callable[..., Page]) -> None:
    page = open_page(expect="Failed to load resource: the server responded with a status of 400 (Bad Request)")
    page.click(".drawer summary")
    page.fill("#temperature", "-1")
    page.fill("#composer-message", "keep me")
    page.click("[data-close-drawer]")
    page.press("#composer-message", "Enter")  # a number out of range is not even sent
    until(page, "document.activeElement.id === 'temperature' && document.activeElement.ariaInvalid === 'true'")
    page.fill("#temperature", "")
    page.click(".drawer__more summary")
    page.fill("#tools", "{")
    page.keyboard.press("Escape")
    with page.expect_response("**/chat") as refused:
        page.press("#composer-message", "Enter")
    assert refused.value.status == 400
    page.wait_for_selector("#composer-error .notice")
    assert "Tools must be a JSON list" in page.locator("#composer-error").inner_text()
    assert page.input_value("#composer-message") == "keep me"
    assert page.get_attribute("#tools", "aria-invalid") == "true"
    assert page.locator("#tools").is_visible()


def test_hostile_reply_does_nothing(open_page: Callable[..., Page]) -> None:
    page = open_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.fill("#composer-message", "hostile <img src=x onerror='window.hacked=9'>")
    page.press("#composer-message", "Enter")
    page.wait_for_selector(".figures")
    assert page.evaluate("window.hacked") is None
    assert page.locator(".prose img, .prose script, .prose [hx-get]").count() == 0
    assert [url for url in asked if "evil" in url or url.endswith("/x")] == []
    assert page.locator(".chip").inner_text() == "Image: pixel"


def test_code_is_copied(open_page: Callable[..., Page], server: LiveServer) -> None:
    page = open_page()
    page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=server.url)
    page.fill("#composer-message", "code")
    page.press("#composer-message", "Enter")
    page.wait_for_selector(".figures")
    page.click("[data-copy]")
    page.wait_for_selector("text=Copied")
    assert page.evaluate("navigator.clipboard.readText()").startswith("def slot(block_table: list[int]")


def test_dashboard_moves_while_a_request_runs_and_can_cancel_it(
    open_page: Callable[..., Page], model: StubModel
) -> None:
    model.client.every_s = 0.03
    chat = open_page()
    board = open_page("/dashboard")  # last: a page in the background pauses its live parts
    assert board.locator("#tile-live-requests").inner_text().endswith("call the API.")
    chat.fill("#composer-message", "hello")
    chat.press("#composer-message", "Enter")
    row = board.locator("#tile-live-requests tbody tr")
    row.wait_for()
    generated = row.locator("[data-label=Generated]")
    first = int(generated.inner_text())
    board.wait_for_timeout(1200)
    assert int(generated.inner_text()) > first
    assert float(board.locator("#tile-generation output").inner_text()) > 0
    assert "1 running" in board.locator("#status-pill").inner_text()
    assert board.locator("#tile-generation polyline").count() >= 1
    row.locator("button").click()
    chat.wait_for_selector("text=stopped by you")
    until(board, "document.querySelector('#tile-finished-requests .tag')?.textContent === 'abort'")


def test_a_rank_that_is_lost_turns_red_and_its_tile_fits(open_page: Callable[..., Page], model: StubModel) -> None:
    page = open_page("/dashboard", width=320)
    tile = page.locator("#tile-ranks")
    assert not tile.is_visible()
    lost = stub_ranks()
    try:
        model.client.ranks = tuple(replace(rank, is_up=True) for rank in lost)
        page.locator("#rank-3").wait_for()
        colour = "getComputedStyle(document.getElementById('rank-3')).borderTopColor"
        before = page.evaluate(colour)
        model.client.ranks = lost
        page.locator("#rank-3.rank--lost").wait_for()
        assert page.evaluate(colour) != before == page.evaluate(colour.replace("rank-3", "rank-2"))
        assert "signal 9 <b>(SIGKILL)</b>" in page.locator("#rank-3").inner_text()
        assert overflow(page) == 0
        cut = "[...document.querySelectorAll('#tile-ranks *')].filter(e => e.scrollWidth > e.clientWidth + 1)"
        assert page.evaluate(f"{cut}.filter(e => e.clientWidth && !e.closest('svg')).map(e => e.outerHTML)") == []
        split = "[...document.querySelectorAll('#rank-3 dd')].filter(e => e.getBoundingClientRect().height > 30)"
        assert page.evaluate(f"{split}.map(e => e.textContent)") == []
    finally:
        model.client.ranks = ()
    tile.wait_for(state="hidden")


def test_frozen_dashboard_stands_still(open_page: Callable[..., Page]) -> None:
    page = open_page("/dashboard")
    page.wait_for_timeout(700)
    page.click("[data-freeze]")
    up = "#tile-counters .facts__row:last-child dd"
    before = page.locator(up).inner_text()
    page.wait_for_timeout(1500)
    assert page.locator(up).inner_text() == before


@pytest.mark.slow
@pytest.mark.parametrize("width", [320, 360, 768, 1280])
def test_nothing_scrolls_sideways(open_page: Callable[..., Page], model: StubModel, width: int) -> None:
    page = open_page(width=width, height=740)
    page.fill("#composer-message", "A" * 300 + " and a question about attention")
    page.press("#composer-message", "Enter")
    page.wait_for_selector(".figures")
    assert overflow(page) == 0
    page.click(".drawer summary")
    assert overflow(page) == 0
    model.client.every_s = 0.3
    page.keyboard.press("Escape")
    page.fill("#composer-message", "again")
    page.press("#composer-message", "Enter")
    page.goto(page.url.split("/c/")[0] + "/dashboard")
    page.wait_for_selector("#tile-live-requests tbody tr")
    assert overflow(page) == 0
    page.click("#tile-live-requests tbody button")
    page.goto(page.url.replace("dashboard", "dev/patterns"))
    wide = "[...document.querySelectorAll('*')].filter(e => e.getBoundingClientRect().right > innerWidth + 1)"
    assert overflow(page) == 0, page.evaluate(wide + ".map(e => e.outerHTML.slice(0, 90)).slice(0, 30)")


def test_works_without_scripts(open_page: Callable[..., Page], model: StubModel) -> None:
    model.client.every_s = 0.0
    page = open_page(java_script_enabled=False)
    page.fill("#composer-message", "hello")
    page.click("[data-send]")
    assert "Paged attention" in reply_text(page)
    page.fill("#composer-message", "and again")
    page.click("[data-send]")
    page.locator(".message--assistant").nth(1).wait_for()
    page.goto(page.url.split("/c/")[0] + "/dashboard")
    assert "KV cache" in page.locator("#tile-kv-usage").inner_text()


def test_live_parts_connect_each_time(open_page: Callable[..., Page]) -> None:
    """htmx starts itself in a timer; the extension has to be there by then, however slowly it arrives."""

    def late(route: Any) -> None:
        time.sleep(0.05)
        route.continue_()

    page = open_page("/dev/patterns")
    page.context.route("**/hx-sse*", late)
    for _ in range(4):
        with page.expect_request("**/live/dashboard"):
            page.goto(page.url.replace("/dev/patterns", "/dashboard"))


def test_server_that_goes_away_is_noticed_and_found_again(chromium: Browser) -> None:
    model = StubModel()
    with LiveServer(model, settings(ui=True)) as first:  # type: ignore[arg-type]
        page = chromium.new_page()
        page.goto(first.url)
        page.wait_for_timeout(500)
        port = int(first.url.rsplit(":", 1)[1])
    page.wait_for_selector("#connection:not([hidden])", timeout=10_000)
    assert "does not answer" in page.locator("#connection").inner_text()
    page.fill("#composer-message", "are you there?")
    page.press("#composer-message", "Enter")
    page.wait_for_selector("#composer-error :text('Not sent: the server is away.')")
    assert page.input_value("#composer-message") == "are you there?"
    with LiveServer(model, settings(ui=True, port=port)):  # type: ignore[arg-type]
        page.wait_for_selector("#connection", state="hidden", timeout=15_000)
        page.wait_for_selector(".message__text:text('are you there?')")
        page.wait_for_selector(".figures")
        assert page.input_value("#composer-message") == ""
        page.close()
