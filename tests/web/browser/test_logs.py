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
    refusal = "Failed to load resource: the server responded with a status of 400 (Bad Request)"
    page = open_page("/logs?level=warning", expect=refusal)
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
    page.locator("#log-text").press_sequentially("it came")
    page.wait_for_url("**/logs?level=warning&text=it+came")
    assert page.locator(".log__text").all_inner_texts() == ["it came"]
    page.click("[data-pause]")
    page.select_option("#log-what", "server")  # another filter is live again
    page.wait_for_url("**/logs?level=warning&text=it+came&what=server")
    log.warning("and it came back")
    page.locator(".log__text:text-is('and it came back')").wait_for()
    with page.expect_response("**/logs?*") as refused:
        page.fill("#log-id", "a b")
    assert refused.value.status == 400
    page.locator("#log-error .notice").wait_for()
    assert page.locator(".log__text").count() == 2
    assert page.input_value("#log-id") == "a b"
    page.fill("#log-id", "")
    page.locator("#log-error .notice").wait_for(state="detached")
