"""A server whose model runs over ranks, in Chromium: same answers, ranks on the dashboard, and one that is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.web.child_server import ChildServer

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.slow

QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The answer of one process."""
    with ChildServer(tmp_path_factory.mktemp("alone"), "--device", "cpu", with_bystander=False) as server:
        body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
        answer: str = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    return answer


@pytest.fixture(params=[["-tp", "2"], ["-pp", "2"], ["-tp", "2", "-pp", "2"]], ids=" ".join)
def ranked(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ChildServer]:
    with ChildServer(tmp_path, "--device", "cpu", *request.param, with_bystander=False) as server:
        yield server


def ask(page: Page, url: str) -> None:
    page.goto(f"{url}/chat")
    page.get_by_label("Message", exact=True).fill(QUESTION)
    page.get_by_role("button", name="Send", exact=True).click()


def test_a_chat_over_ranks(ranked: ChildServer, alone: str, chromium: Browser) -> None:
    pids = [child.pid for child in psutil.Process(ranked.pid).children() if "localllm.ranks" in child.cmdline()]
    page = chromium.new_page()
    ask(page, ranked.url)
    page.wait_for_selector(".figures")
    assert page.locator(".prose").last.inner_text() == alone
    page.goto(f"{ranked.url}/dashboard")
    assert page.locator("#tile-ranks").inner_text().count("Rank ") == len(pids)

    os.kill(pids[-1], signal.SIGKILL)
    ask(page, ranked.url)  # waits for the model, which is loaded again
    page.wait_for_selector(".figures")
    assert page.locator(".prose").last.inner_text() == alone
    page.goto(f"{ranked.url}/dashboard")
    page.get_by_text("SIGKILL").first.wait_for()
    page.close()
