"""The playground in a real Chromium: run in place, by the keyboard, and with its answer in every small place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.web.browser.looks import opened, overflow, small_targets
from tests.web.live_server import LiveServer, PacedRunner, fake_model, settings

pytestmark = pytest.mark.slow

axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture
def pace() -> PacedRunner:
    return PacedRunner()


@pytest.fixture
def tiny(tmp_path_factory: pytest.TempPathFactory, pace: PacedRunner) -> Iterator[LiveServer]:
    with LiveServer(fake_model(tmp_path_factory.mktemp("tiny"), pace), settings(ui=True)) as live:
        yield live


def test_a_request_runs_in_place_and_is_copied(chromium: Browser, tiny: LiveServer) -> None:
    context = chromium.new_context(bypass_csp=True)
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.set_default_timeout(10_000)
    page.goto(tiny.url + "/playground")
    run = page.locator("[data-run]").bounding_box()
    assert run is not None
    assert run["y"] + run["height"] < 720, "the button is seen without scrolling"
    page.click("summary:text('Sampling')")
    page.reload()
    page.fill("#content-0", "Hello you")
    page.locator("label:text-is('Max tokens') + input").fill("6")  # still unfolded
    page.keyboard.press("Enter")
    page.locator(".tokens .heat").nth(5).wait_for()
    assert page.url.endswith("/playground")
    assert page.input_value("#content-0") == "Hello you"
    assert page.locator(".token").count() > 3
    page.locator("[data-finish]:text-is('length')").wait_for()
    assert page.locator("#raw-json").text_content().endswith("data: [DONE]")  # type: ignore[union-attr]
    page.click("text=Show the prompt only")
    page.locator("#usage-title").wait_for(state="detached")
    page.focus("#content-0")
    page.keyboard.press("Control+Enter")
    page.locator("#usage-title").wait_for()
    page.click("[data-copy=snippet-curl]")
    page.locator("[data-copy=snippet-curl]:has-text('Copied')").wait_for()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        found = axe.Axe().run(page).response["violations"]
        assert [each["id"] for each in found if each["impact"] in ("moderate", "serious", "critical")] == []
    for width in (320, 768):
        page.set_viewport_size({"width": width, "height": 740})
        assert overflow(page) == 0
        assert small_targets(page) == []
    page.click("text=Add a message")
    page.locator("#content-1").wait_for()
    assert page.input_value("#content-0") == "Hello you"
    context.close()
    assert complaints == []


def test_an_answer_is_watched_and_stopped(chromium: Browser, tiny: LiveServer, pace: PacedRunner) -> None:
    """By the button, by Escape, and by asking something else: each time the server stops with it."""
    pace.step_s = 0.03
    with opened(chromium, 360, 740) as page:
        page.set_default_timeout(10_000)
        page.goto(tiny.url + "/playground")
        page.fill("#content-0", "Hello you")
        for stop in ("button", "key"):
            page.click("[data-run]")
            page.locator("[data-finish]:text-is('writing')").wait_for()
            page.wait_for_selector("#running [data-stop]", state="visible")
            shorter = len(page.locator(".answer").inner_text())
            page.wait_for_timeout(500)
            assert len(page.locator(".answer").inner_text()) > shorter
            assert (overflow(page), small_targets(page)) == (0, [])
            if stop == "button":
                page.click("[data-stop]")
            else:
                page.keyboard.press("Escape")
            page.locator("[data-finish]:text-is('stopped')").wait_for()
            page.wait_for_selector("#running", state="hidden")
            tiny.wait_idle()
        page.click("[data-run]")
        page.locator("[data-finish]:text-is('writing')").wait_for()
        page.click("text=Show the prompt only")
        page.locator("[data-finish]").wait_for(state="detached")
        page.locator("#prompt-title").wait_for()
        tiny.wait_idle()
