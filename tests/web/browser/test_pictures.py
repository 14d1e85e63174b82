"""Pictures in Chromium, on a phone and on a desk: chosen, pasted, dropped, priced, sent and shown."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from PIL import Image

from tests.media.pictures import picture, sight
from tests.web.browser.harness import delete_and_import
from tests.web.browser.looks import overflow, small_targets
from tests.web.pages_stub import PICTURE, StubModel

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.usefixtures("own_data")

TRANSFER = """([kind, selector, data]) => {
  const bytes = Uint8Array.from(atob(data), (each) => each.charCodeAt(0)), transfer = new DataTransfer();
  transfer.items.add(new File([bytes], `${kind}.png`, { type: "image/png" }));
  const options = { bubbles: true, cancelable: true };
  const event = kind === "paste" ? new ClipboardEvent(kind, { ...options, clipboardData: transfer })
    : new DragEvent(kind, { ...options, dataTransfer: transfer });
  document.querySelector(selector).dispatchEvent(event);
}"""


@pytest.fixture(scope="module")
def model() -> StubModel:
    return StubModel(sight=sight(ord(PICTURE), mark=PICTURE))


@pytest.mark.parametrize("width", [360, 1280])
def test_pictures_are_attached_priced_sent_and_shown(
    open_page: Callable[..., Page], model: StubModel, tmp_path: Path, width: int
) -> None:
    (tmp_path / "photo.jpg").write_bytes(picture("JPEG", (400, 300), "teal"))
    scan = Image.new("RGB", (600, 800), "white")
    scan.paste("black", (100, 100, 500, 140))
    scan.save(tmp_path / "scan.pdf", resolution=144)
    page = open_page("/", width=width, height=740)
    assert page.locator(".attach--camera").is_visible() == (width == 360)
    page.set_input_files("#composer-file", tmp_path / "photo.jpg")
    page.get_by_text("400 x 300").wait_for()
    small = base64.b64encode(picture(size=(30, 20))).decode()
    for kind, selector, count in (("paste", "#composer-message", 2), ("drop", "#composer", 3)):
        page.evaluate(TRANSFER, [kind, selector, small])
        page.locator(f".attachments .file >> nth={count - 1}").wait_for()
    page.set_input_files("#composer-camera", tmp_path / "photo.jpg")
    page.locator(".attachments .file >> nth=3").wait_for()
    assert page.locator(".attachments .file").count() == 4
    facts = page.locator(".attachments .file__size").all_inner_texts()
    assert "12 tokens, scaled to 40 x 30" in facts[0]
    assert "6 tokens" in facts[1]
    page.get_by_label("Detail of photo.jpg").first.select_option("low")
    page.get_by_text("4 tokens, scaled to 20 x 20").or_(page.get_by_text("2 tokens, scaled to 20 x 10")).wait_for()
    page.set_input_files("#composer-file", tmp_path / "scan.pdf")
    page.get_by_text("1 page as a picture").wait_for()
    assert small_targets(page) == []
    assert overflow(page) == 0
    page.get_by_label("Remove photo.jpg").last.click()
    page.locator(".attachments .file >> nth=4").wait_for(state="detached")
    page.get_by_label("Message", exact=True).fill("What is it?")
    page.get_by_role("button", name="Send", exact=True).click()
    page.wait_for_selector(".figures")
    thumbs = page.locator(".message--user .file__thumb")
    assert thumbs.count() == 4
    assert thumbs.first.evaluate("image => image.naturalWidth") > 0
    assert overflow(page) == 0
    assert len(model.client.asked[-1].media) == 4
    with page.expect_popup() as popup:
        page.locator(".message--user .file__picture").first.click()
    popup.value.wait_for_load_state()
    assert popup.value.locator("img").evaluate("image => image.naturalWidth") == 400
    popup.value.close()
    delete_and_import(page, tmp_path)
    page.locator(".message--user .file__thumb").nth(3).wait_for()


def test_a_model_that_reads_text_says_so_before_sending(
    open_page: Callable[..., Page], model: StubModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "sight", None)
    (tmp_path / "photo.png").write_bytes(picture())
    page = open_page("/", width=360, height=740)
    page.set_input_files("#composer-file", tmp_path / "photo.png")
    page.get_by_text("photo.png is a picture, and demo does not see pictures.").wait_for()
    assert page.locator(".attachments .file").count() == 0
