"""A real Chromium on a live server whose model is canned; the page that complains in its console fails its test."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.web.browser.looks import STILL
from tests.web.live_server import LiveServer, settings, wait_until
from tests.web.pages_stub import StubModel

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

HERE = Path(__file__).parent

BINARIES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = os.environ.get("CHROMIUM") or next((path for name in BINARIES if (path := shutil.which(name))), None)
MARKS = (
    pytest.mark.browser,
    # Playwright runs an event loop of its own on this thread and leaves its sockets to the interpreter.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            for mark in MARKS:
                item.add_marker(mark)


@pytest.fixture(scope="package")
def chromium() -> Iterator[Browser]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    arguments = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    with playwright.sync_playwright() as engine:
        browser = engine.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def own_data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A folder of its own for the chats and files of a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        yield


@pytest.fixture(scope="module")
def model() -> StubModel:
    return StubModel()


@pytest.fixture(scope="module")
def server(model: StubModel) -> Iterator[LiveServer]:
    with LiveServer(model, settings(ui=True)) as live:  # type: ignore[arg-type]
        yield live


@pytest.fixture
def open_page(chromium: Browser, server: LiveServer, model: StubModel) -> Iterator[Callable[..., Page]]:
    """Opens a path; the test fails when the page complained in the console."""
    contexts: list[Any] = []
    complaints: list[str] = []
    expected: list[str] = []

    def note(message: Any) -> None:
        if message.type in ("error", "warning") and message.text not in expected:
            complaints.append(message.text)

    def open_path(path: str = "/", width: int = 1280, height: int = 800, expect: str = "", **options: Any) -> Page:
        expected.append(expect)
        options = {**STILL, **options}
        context = chromium.new_context(viewport={"width": width, "height": height}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("console", note)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(server.url + path)
        return page

    model.client.every_s, model.client.chars = 0.004, 6
    yield open_path
    for context in contexts:
        context.close()
    wait_until(lambda: not model.client.running)
    assert complaints == []
