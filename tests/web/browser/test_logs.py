"""The logs page in a real Chromium: lines come, stay at the end, and can be held."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from localllm.logs.recent_logs import RecentLogs
from tests.web.browser.looks import until

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.slow

log = logging.getLogger("localllm.test")


@pytest.fixture
def recent() -> Iterator[RecentLogs]:
    handler = RecentLogs()
    logging.getLogger().addHandler(handler)
    yield handler
    logging.getLogger().removeHandler(handler)


def test_lines_come_live_stay_in_view_and_can_be_held(open_page: Callable[..., Page], recent: RecentLogs) -> None:
    for number in range(60):
        log.warning("line %d", number)
    page = open_page("/logs?level=warning")
    last = page.locator(".log__text").last
    bottom = "document.querySelector('{}').getBoundingClientRect().bottom"
    at_end = f"{bottom.format('.log__line:last-child')} <= {bottom.format('#log')} + 1"
    assert last.inner_text() == "line 59"
    assert page.evaluate(at_end)
    log.warning("it came")
    page.locator(".log__text:text-is('it came')").wait_for()
    until(page, at_end)
    page.click("[data-pause]")
    log.warning("held back")
    page.wait_for_timeout(500)
    assert page.locator(".log__text:text-is('held back')").count() == 0
    page.click("[data-pause]")
    page.locator(".log__text:text-is('held back')").wait_for()
    page.fill("#log-text", "it came")
    page.keyboard.press("Enter")
    page.wait_for_url("**/logs?level=warning&text=it+came&id=")
    assert page.locator(".log__text").all_inner_texts() == ["it came"]
