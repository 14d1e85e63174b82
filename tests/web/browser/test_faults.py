"""What goes wrong around a page in a real Chromium: a restart under it, two messages at once, two tabs of one chat."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from localllm.web.access.keys import keys_path
from tests.web.live_server import LiveServer, settings
from tests.web.pages_stub import StubModel

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

KEY = "sesame"


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


@pytest.mark.slow
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


@pytest.mark.slow
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
