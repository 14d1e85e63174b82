"""Files in Chromium: a long PDF that is asked about, a wrong import and a right one, a chat saved as one page."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.web.browser.looks import overflow, small_targets, until
from tests.web.harness import lm_studio, open_webui, pdf_of
from tests.web.pages_stub import StubModel, stub_plan

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.usefixtures("own_data")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> StubModel:
    """A model whose context holds some passages: its tokens are characters."""
    return StubModel(plan=replace(stub_plan(), max_model_len=16_384))


def test_a_long_pdf_is_asked_about_chats_are_imported_and_one_is_saved(
    open_page: Callable[..., Page], model: StubModel, tmp_path: Path
) -> None:
    pages = [f"Page {number} is about the weather of the year. " * 40 for number in range(1, 40)]
    pages[16] = "The melting point of zorbium is 412 degrees."
    (tmp_path / "paper.pdf").write_bytes(pdf_of(pages))
    page = open_page("/", width=360, height=740)
    with (tmp_path / "huge.txt").open("wb") as huge:
        huge.truncate(200_000_000)
    page.set_input_files("#composer-file", tmp_path / "huge.txt")
    page.get_by_text("Too large: 191 MiB. The files may have 64 MiB together.").wait_for()
    page.set_input_files("#composer-file", tmp_path / "paper.pdf")
    assert page.locator(".file__searched").inner_text() == "search in it"
    assert page.locator(".attachments__sum").count() == 0
    assert small_targets(page) == []
    assert overflow(page) == 0
    page.get_by_label("Message", exact=True).fill("What is the melting point of `zorbium`?")
    page.get_by_role("button", name="Send", exact=True).click()
    sources = page.locator(".sources__head")
    sources.wait_for()
    assert "paper.pdf" in sources.inner_text()
    assert "p. 17" in sources.inner_text()
    assert not page.locator(".sources__text").first.is_visible()
    page.wait_for_selector(".figures")
    sources.focus()
    page.keyboard.press("Enter")
    page.locator(".sources__passage", has_text="p. 17").get_by_text(pages[16]).wait_for()
    assert page.locator(".message__text code").inner_text() == "zorbium"
    assert page.locator(".file--searched").inner_text().startswith("paper.pdf")
    assert overflow(page) == 0

    (tmp_path / "bad.json").write_text('{"messages": []}')
    (tmp_path / "webui.json").write_text(json.dumps(open_webui()))
    (tmp_path / "studio.json").write_text(json.dumps(lm_studio()))
    page = open_page("/", expect="Failed to load resource: the server responded with a status of 400 (Bad Request)")
    chats = page.locator(".chats__row").count()
    page.locator(".side__more").click()
    page.set_input_files("#import-file", [tmp_path / "bad.json", tmp_path / "webui.json"])
    page.get_by_role("button", name="Import", exact=True).press("Enter")
    page.get_by_text("bad.json: This file holds no messages.").wait_for()
    page.get_by_text("One chat is imported.").wait_for()
    assert page.locator("#manage").is_visible()
    until(page, f"document.querySelectorAll('.chats__row').length === {chats + 1}")
    page.set_input_files("#import-file", tmp_path / "studio.json")
    page.get_by_role("button", name="Import", exact=True).press("Enter")
    page.wait_for_url("**/c/*")
    assert page.locator(".message__author").last.inner_text() == "qwen3-4b"

    page.locator(".head__more").last.click()
    with page.expect_download() as saved:
        page.get_by_role("link", name="Save as HTML").click()
    file = tmp_path / saved.value.suggested_filename
    saved.value.save_as(file)
    assert file.name == "studio-chat.html"
    page.goto(file.as_uri())
    assert page.locator(".prose:not(.thinking__text)").inner_text() == "Blue."
    assert page.evaluate("document.styleSheets.length") == 1
    assert overflow(page) == 0
