"""The wizard in a real Chromium: a table that moves, a plot, a page that comes back to the run that goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.web.browser.looks import opened, overflow, small_targets, until
from tests.web.tuned_server import TunedServer, be_quick

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.slow

axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")


@pytest.fixture
def tuned(
    tiny_model_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[TunedServer]:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    be_quick(monkeypatch, trial_s=0.3, soak_s=1.0)
    with TunedServer.tiny(tiny_model_path("llama")) as server:
        yield server


@pytest.fixture
def page(chromium: Browser, tuned: TunedServer) -> Iterator[Page]:
    with opened(chromium, 1280, 900, bypass_csp=True) as page:
        yield page


def grave(page: Page) -> list[Any]:
    found = axe.Axe().run(page).response["violations"]
    return [each["id"] for each in found if each["impact"] in ("moderate", "serious", "critical")]


def test_a_run_is_watched_to_its_plot(page: Page, tuned: TunedServer) -> None:
    """Started by hand, left and found again, watched without a reload until its result stands there."""
    page.goto(f"{tuned.url}/tune")
    page.click(".goal:has-text('chat')")
    assert grave(page) == []
    page.click("text=Start the run")
    page.wait_for_url("**/tune/run")
    page.goto(f"{tuned.url}/dashboard")
    page.locator("#loading-title:text('is being tuned')").wait_for()
    page.goto(f"{tuned.url}/tune/run")
    assert grave(page) == []
    page.evaluate("window.same = true")
    page.locator("#tune-trials .trial").first.wait_for()
    assert page.evaluate("window.same") is True
    page.wait_for_url("**/tune/result", timeout=60_000)
    assert page.locator(".point--pick").count() == 1
    assert page.locator("#tune-trials .trial--measured").count() > 1
    page.click("[data-copy=export-flags]")
    page.locator("[data-copy=export-flags]:text('Copied')").wait_for()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        assert grave(page) == []
    for width in (320, 360, 768, 1280):
        page.set_viewport_size({"width": width, "height": 740})
        assert overflow(page) == 0, width
        assert small_targets(page) == [], width
    for fold in page.locator(".pick__else > summary").all():  # where nothing is clearly better than what runs
        assert page.locator(".pick__keep .button--primary").inner_text() == "Keep what runs"
        fold.click()
    page.click("button:text-is('Apply')")
    until(page, "document.querySelector('.pick__kept') !== null")
