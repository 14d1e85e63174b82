"""A model that only another localllm has, in a real Chromium: chosen in the picker, and named at its replies."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from localllm.config.upstreams import UpstreamConfig
from tests.fleet.front import Front
from tests.web.browser.harness import say
from tests.web.browser.looks import until
from tests.web.live_server import LiveServer, PacedRunner, fake_model
from tests.web.pages_stub import StubModel

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.slow


def test_a_model_of_another_server_is_chosen_and_answers(chromium: Browser, tmp_path: Path) -> None:
    complaints: list[str] = []
    other = fake_model(tmp_path, PacedRunner())
    with ExitStack() as stack:
        behind = stack.enter_context(LiveServer(other))
        config = UpstreamConfig("laptop", f"{behind.url}/v1")
        front = stack.enter_context(Front(config, model=StubModel(), ui=True))
        page = chromium.new_page()
        page.set_default_timeout(10_000)
        page.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None)
        page.goto(front.url)
        page.select_option("#model", label="tiny · on laptop")
        until(page, "document.querySelector('#status-pill').textContent.includes('tiny')")
        page.evaluate("document.querySelector('#sampling [name=max_tokens]').value = '8'")  # the drawer is closed
        say(page, "Hello there")
        assert page.locator(".message__author").last.inner_text().split() == ["tiny", "on", "laptop"]
        page.wait_for_selector(".figures")
        say(page, "And more")  # the chat keeps its model
        assert page.locator(".message__author:has-text('on laptop')").count() == 2
        page.goto(f"{front.url}/library")
        page.click("text=Chat with tiny")
        page.wait_for_selector("text=runs on laptop")
        page.goto(f"{front.url}/playground")
        page.select_option("#request-model", "tiny")
        page.fill("#content-0", "Hello")
        page.click("[data-run]")
        page.wait_for_selector("#result :text('Answered by')")
        page.close()
    assert complaints == []
