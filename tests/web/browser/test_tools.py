"""Consent to a tool in Chromium: the card, the keyboard, the reply that follows; the page of servers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from localllm.config.mcp_servers import McpServer
from localllm.web.pages.chat.replies import prompt
from tests.mcp.programs import hostile, searxng_stub
from tests.web.browser.looks import opened, overflow, small_targets
from tests.web.live_server import LiveServer
from tests.web.scripted import Script, called, tool_servers

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.slow


@pytest.fixture
def tooled(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    """A server whose model calls a tool, calls it again, and then answers."""
    with tool_servers(tmp_path_factory) as start:
        server = start(hostile("plain", name="files"))
        script = Script().direct(monkeypatch, prompt, server)
        script.says(called(), "The tool was **called**.", called(), "And once more, by itself.")
        yield server


def serious(page: Page) -> list[str]:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    found = axe.Axe().run(page).response["violations"]
    return [each["id"] for each in found if each["impact"] in ("moderate", "serious", "critical")]


def test_a_person_allows_a_tool_always_and_the_chat_goes_on_by_itself(chromium: Browser, tooled: LiveServer) -> None:
    """By keyboard, on a phone."""
    with opened(chromium, 360, 740, bypass_csp=True) as page:  # axe itself is put into the page
        page.goto(f"{tooled.url}/")
        page.get_by_label("Message", exact=True).fill("go")
        page.get_by_label("Message", exact=True).press("Enter")
        page.get_by_text("Run tool of files?").wait_for()
        assert overflow(page) == 0
        assert small_targets(page) == []
        for scheme in ("dark", "light"):
            page.emulate_media(color_scheme=scheme)
            assert serious(page) == []
        always = page.get_by_role("button", name="Always")
        always.focus()
        page.keyboard.press("Enter")
        page.get_by_text("The tool was called.").wait_for()
        assert page.get_by_text('called with {"n": 1}').count() == 1
        page.get_by_label("Message", exact=True).fill("again")
        page.get_by_label("Message", exact=True).press("Enter")
        page.get_by_text("And once more, by itself.").wait_for()
        assert page.get_by_text('called with {"n": 1}').count() == 2
        assert page.get_by_role("button", name="Allow once").count() == 0
        page.goto(f"{tooled.url}/chats/tools")
        page.get_by_role("button", name="Ask again for tool of files").click()
        page.get_by_text("No tool is allowed always.").wait_for()
        for width in (360, 768, 1280):
            page.set_viewport_size({"width": width, "height": 800})
            page.goto(f"{tooled.url}/settings/tools")
            assert overflow(page) == 0
            assert small_targets(page) == []
        page.goto(tooled.link())  # what starts a program needs the owner
        page.goto(f"{tooled.url}/settings/tools")
        page.get_by_role("button", name="Test and list its tools").click()
        page.get_by_text("Tools (1)").wait_for()
        assert serious(page) == []
        page.locator("#server-name").fill("mine")
        page.locator("#server-command").fill("my-server --root '/my notes'")
        page.get_by_role("button", name="Show what will be saved").click()
        page.get_by_text("/my notes", exact=False).first.wait_for()
        assert serious(page) == []


def test_the_web_is_one_switch_beside_send_and_each_search_asks(
    chromium: Browser, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tool_servers(tmp_path_factory) as start, searxng_stub() as address:
        server = start(McpServer("web", searxng=address, in_new_chats=False))
        script = Script().direct(monkeypatch, prompt, server)
        search = called("search_web", {"query": "paged attention"})
        script.says("Without the web.", search, "It is **there**.")
        with opened(chromium, 360, 740, bypass_csp=True) as page:
            page.goto(f"{server.url}/")
            page.get_by_label("Message", exact=True).fill("one")
            page.get_by_label("Message", exact=True).press("Enter")
            page.get_by_text("Without the web.").wait_for()
            assert "search_web" not in script.prompts[0]
            page.get_by_label("Web").focus()
            page.keyboard.press("Space")
            page.get_by_label("Message", exact=True).fill("two")
            page.get_by_label("Message", exact=True).press("Enter")
            page.get_by_text("Run search_web of web?").wait_for()
            assert "search_web" in script.prompts[1]
            for width in (360, 768, 1280):
                page.set_viewport_size({"width": width, "height": 740})
                assert overflow(page) == 0
                assert small_targets(page) == []
            assert serious(page) == []
            page.get_by_role("button", name="Allow once").click()
            page.get_by_text("It is there.").wait_for()
            assert "https://example.com/0" in script.prompts[2]
