"""The dashboard and the Models page in a real Chromium while requests run: what is shown first, cancelled and kept."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.hub import conftest as hub_fixtures
from tests.hub.local_hub import LocalHub
from tests.web.browser.looks import opened, overflow, small_targets
from tests.web.library_server import LibraryServer, Loads
from tests.web.live_server import LiveServer, PacedRunner, fake_model, settings

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.slow

axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
hub = hub_fixtures.hub


def look(page: Page) -> None:
    """The page fits and is for everybody, on a phone and on a desk, in both themes."""
    for width, scheme in ((360, "light"), (1280, "dark")):
        page.set_viewport_size({"width": width, "height": 740})
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        assert (width, overflow(page), small_targets(page)) == (width, 0, [])
        found: list[Any] = axe.Axe().run(page).response["violations"]
        assert [each["id"] for each in found if each["impact"] in ("moderate", "serious", "critical")] == []


@contextmanager
def asking(server: LiveServer, count: int) -> Iterator[None]:
    """So many requests, which run until they are cancelled or the runner goes on."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 400, "ignore_eos": True}

    def ask() -> None:
        with suppress(httpx.HTTPError):
            server.post("/v1/chat/completions", body)

    threads = [threading.Thread(target=ask) for _ in range(count)]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def test_live_requests_fit_a_phone_and_are_cancelled_together(chromium: Browser, tmp_path: Path) -> None:
    pace = PacedRunner()
    pace.step_s = 0.05
    with (
        LiveServer(fake_model(tmp_path, pace), settings(ui=True)) as live,
        opened(chromium, 360, 740, bypass_csp=True) as page,
    ):
        page.goto(live.url + "/dashboard")
        page.locator("#tile-live-requests .first-request").wait_for()
        look(page)
        with asking(live, 4):
            page.set_viewport_size({"width": 360, "height": 740})
            page.locator("#tile-live-requests tbody tr").nth(3).wait_for()
            row = page.locator("#tile-live-requests tbody tr").first.bounding_box()
            assert row is not None
            assert row["height"] < 100, "two lines, not a card of six figures"
            first = page.locator("#tile-waiting").bounding_box()
            assert first is not None
            assert first["y"] + first["height"] < 740, "waiting time is seen without scrolling"
            look(page)
            page.once("dialog", lambda dialog: dialog.accept())
            page.click("#cancel-all")
            page.locator("#tile-live-requests tbody tr").first.wait_for(state="detached")


def test_rows_stay_under_the_pointer_when_a_request_above_them_ends(chromium: Browser, tmp_path: Path) -> None:
    pace = PacedRunner()
    pace.step_s = 0.05
    with (
        LiveServer(fake_model(tmp_path, pace), settings(ui=True)) as live,
        opened(chromium, 1280, 900) as page,
        asking(live, 3),
    ):
        page.goto(live.url + "/dashboard")
        rows = page.locator("#tile-live-requests tbody tr")
        rows.nth(2).wait_for()
        names = [row.get_attribute("id") for row in rows.all()]
        last = rows.nth(2).locator("button")
        last.hover()
        place = last.bounding_box()
        rows.nth(0).locator("form").evaluate("form => fetch(form.action, { method: 'POST' })")
        page.locator(f"#{names[0]}.requests__ended button:disabled").wait_for()
        page.wait_for_timeout(600)
        assert [row.get_attribute("id") for row in rows.all()] == names
        assert last.bounding_box() == place
        page.mouse.move(5, 5)
        page.locator(f"#{names[0]}").wait_for(state="detached")
        assert rows.count() == 2
        page.once("dialog", lambda dialog: dialog.accept())
        page.click("#cancel-all")
        rows.first.wait_for(state="detached")


def test_an_unload_is_taken_back_and_a_wrong_path_is_marked(
    chromium: Browser, hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = Loads(tmp_path / "made", monkeypatch)
    with LibraryServer() as live, opened(chromium, 1280, 740, bypass_csp=True) as page:
        page.goto(live.url + "/library")
        look(page)
        loads.runners[-1].gate.clear()
        with asking(live, 1):
            page.get_by_text("1 request now").wait_for()
            page.get_by_role("button", name="Unload demo").click()
            page.locator(".tag--unloading:has-text('unloading, 1 request to finish')").wait_for()
            page.get_by_role("button", name="Keep it demo").click()
            page.locator(".shelf__row:has-text('demo') .tag--ready").wait_for()
            loads.runners[-1].gate.set()
        wrong = page.context.new_page()  # its console says that the answer has status 404
        wrong.goto(live.url + "/library")
        wrong.click(".import__title")
        wrong.fill("#import-path", "/no/where")
        wrong.keyboard.press("Enter")
        wrong.locator("#import-error:has-text('No folder or .gguf file there.')").wait_for()
        assert wrong.input_value("#import-path") == "/no/where"
        assert wrong.evaluate("document.activeElement.id") == "import-path"
        look(wrong)
