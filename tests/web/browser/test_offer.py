"""The offered model in a real Chromium: from the empty page to an answer of a downloaded model that really runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.hub import conftest as hub_fixtures
from tests.hub.local_hub import LocalHub, Trouble, wait_until_stalled
from tests.web.browser.looks import overflow, small_targets
from tests.web.library_server import LibraryServer, only_pick
from tests.web.live_server import LiveServer, wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.slow

hub = hub_fixtures.hub
NAME, WEIGHTS = "org/tiny", "model.safetensors"
PICKS = only_pick(NAME, num_bytes=512_000, title="Tiny Llama")
SHOTS = os.environ.get("LOCALLLM_SHOTS")
"""A folder for screenshots, for looking at them."""


@pytest.fixture
def server(hub: LocalHub, tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "60")  # a stalled answer stays stalled on a loaded machine
    hub.add_repo(NAME, tiny_llama_path)
    with LibraryServer(picks=PICKS) as live:
        wait_until(lambda: live.manager.current is not None, 60)
        yield live


def shoot(page: Page, name: str) -> None:
    for width, height in ((1280, 800), (360, 740)) if SHOTS else ():
        page.set_viewport_size({"width": width, "height": height})
        page.screenshot(path=f"{SHOTS}/{name}-{width}.png")
    page.set_viewport_size({"width": 1280, "height": 800})


def until_stalled(page: Page) -> str:
    """The bytes so far, such as "203 KiB of 531 KiB", once they stay the same."""
    line, before = page.locator(".offer__line"), ""
    while not (" of " in before and before == line.inner_text().partition(" · ")[0]):
        before = line.inner_text().partition(" · ")[0]
        page.wait_for_timeout(1200)
    return before


def test_from_the_empty_page_to_an_answer_of_a_downloaded_model(open_page: Callable[..., Page], hub: LocalHub) -> None:
    hub.troubles[WEIGHTS] = Trouble(stall_after=200_000)
    page = open_page("/")
    page.get_by_text("is a 4 M-parameter toy").wait_for()
    shoot(page, "offered")
    page.set_viewport_size({"width": 360, "height": 740})
    page.reload()
    assert page.locator("#chat-scroll").evaluate("e => e.scrollTop") == 0, "a phone begins at the top"
    assert page.locator("#empty-title").is_visible()
    assert page.locator("#offer .button--primary").is_visible()
    page.set_viewport_size({"width": 1280, "height": 800})
    page.get_by_role("button", name="Download and use (500 KiB)").click()
    wait_until_stalled(hub)
    bar = page.get_by_role("progressbar", name="Download of Tiny Llama")
    so_far = until_stalled(page)
    assert 0.2 < float(bar.get_attribute("value") or 0) < 0.8
    shoot(page, "downloading")
    second = page.context.new_page()
    second.goto(page.url)
    second.get_by_text(so_far).wait_for()
    second.close()
    page.reload()
    page.get_by_text(so_far).wait_for()
    page.get_by_role("textbox", name="Message").fill("Once upon a time")
    hub.go_on.set()
    page.locator("#offer:has-text('is ready. The next message goes to it.')").wait_for(timeout=60_000)
    shoot(page, "ready")
    assert "Tiny Llama is ready" in page.locator("#chat-status").inner_text()
    assert page.locator("#empty-chat strong").inner_text() == "tiny"
    assert page.get_by_role("combobox", name="Model").input_value() == "tiny"
    message = page.get_by_role("textbox", name="Message")
    assert message.input_value() == "Once upon a time", "the draft is still there"
    page.locator("#sampling > summary").click()
    page.locator("[name=max_tokens]").fill("8")
    page.keyboard.press("Escape")
    message.press("Enter")
    page.locator(".message--assistant .figures").wait_for(timeout=60_000)
    assert page.locator(".message--assistant .message__author").inner_text() == "tiny"
    shoot(page, "answered")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_state_of_the_card_is_for_everybody(open_page: Callable[..., Page], hub: LocalHub, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    hub.troubles["api"] = Trouble(status=403)
    page = open_page("/", color_scheme=scheme, bypass_csp=True)

    def check(state: str) -> None:
        found = axe.Axe().run(page).response["violations"]
        grave = [each for each in found if each["impact"] in ("moderate", "serious", "critical")]
        assert [(state, each["id"], [node["html"][:120] for node in each["nodes"]][:5]) for each in grave] == []
        for width in (320, 360, 768) if scheme == "light" else ():
            page.set_viewport_size({"width": width, "height": 740})
            assert (state, overflow(page), small_targets(page)) == (state, 0, [])
        page.set_viewport_size({"width": 1280, "height": 800})

    check("absent")
    page.get_by_role("button", name="Download and use").press("Enter")
    page.locator("#offer .notice").wait_for()
    page.get_by_text("Load a file or a folder from this machine").click()
    check("failed")
    shoot(page, f"failed-{scheme}")
    hub.troubles[WEIGHTS] = Trouble(stall_after=200_000)
    page.get_by_role("button", name="Try again").press("Enter")
    wait_until_stalled(hub)
    until_stalled(page)
    check("downloading")
    assert page.evaluate("document.activeElement.closest('#offer') !== null"), "the focus stays in the card"
    page.get_by_role("button", name="Cancel").press("Enter")
    page.get_by_role("button", name="Resume").wait_for()
    check("stopped")
    shoot(page, f"stopped-{scheme}")
    hub.go_on.set()
