"""A sound file in Chromium: attached for a model that hears, priced, sent, played, exported and imported."""

from __future__ import annotations

import io
import wave
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from localllm.web.pages.chat.files import attachments
from tests.media.sounds import sounds
from tests.web.browser.harness import delete_and_import
from tests.web.browser.looks import overflow, small_targets
from tests.web.pages_stub import StubModel, stub_hearing

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.usefixtures("own_data")

LOAD = """(player) => new Promise((done) => {
  player.onloadedmetadata = () => done(player.duration);
  player.onerror = () => done(player.error.message);
  player.preload = "auto";
  player.load();
})"""


def plain_wav(seconds: float) -> bytes:
    """A WAV file of 16 bits as Chromium plays it."""
    stream = io.BytesIO()
    with wave.open(stream, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(sounds(seconds)[0].astype("<i2").tobytes())
    return stream.getvalue()


@pytest.fixture(scope="module")
def model() -> StubModel:
    return StubModel(hearing=stub_hearing())


@pytest.mark.parametrize("width", [360, 1280])
def test_a_sound_goes_to_a_model_that_hears_and_can_be_played(
    open_page: Callable[..., Page], model: StubModel, tmp_path: Path, width: int
) -> None:
    (tmp_path / "talk.wav").write_bytes(plain_wav(6.0))
    page = open_page("/", width=width, height=740)
    page.set_input_files("#composer-file", tmp_path / "talk.wav")
    page.locator(".attachments .file").wait_for()
    assert "6.0 s, 188 KiB, 60 tokens" in page.locator(".attachments .file__size").inner_text()
    assert small_targets(page) == []
    assert overflow(page) == 0
    page.get_by_label("Message", exact=True).fill("What is said?")
    page.get_by_role("button", name="Send", exact=True).click()
    page.wait_for_selector(".figures")
    [span] = model.client.asked[-1].media
    assert span.rows == 60
    assert page.get_by_label("Play talk.wav").evaluate(LOAD) == pytest.approx(6, abs=0.1)
    assert overflow(page) == 0
    delete_and_import(page, tmp_path)
    page.get_by_label("Play talk.wav").wait_for()


@pytest.mark.parametrize(("most", "is_sent"), [(2.2, True), (1.8, False)])
def test_sounds_on_the_tray_count_with_their_bytes(
    open_page: Callable[..., Page], model: StubModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: float,
    is_sent: bool,
) -> None:  # fmt: skip
    """Of two sounds the first is dropped if both together are more than the tray holds."""
    data = plain_wav(6.0)
    monkeypatch.setattr(attachments, "MAX_TRAY_BYTES", int(most * len(data)))
    refused = "Failed to load resource: the server responded with a status of 400 (Bad Request)"
    page = open_page("/", expect="" if is_sent else refused)
    for count, name in enumerate(("a.wav", "b.wav"), 1):
        (tmp_path / name).write_bytes(data)
        page.set_input_files("#composer-file", tmp_path / name)
        page.locator(f".attachments .file >> nth={count - 1}").wait_for()
    assert page.locator(".attachments .file__size").all_inner_texts() == ["6.0 s, 188 KiB, 60 tokens"] * 2
    page.get_by_label("Message", exact=True).fill("What is said?")
    page.get_by_role("button", name="Send", exact=True).click()
    if is_sent:
        page.wait_for_selector(".figures")
        assert len(model.client.asked[-1].media) == 2
    else:
        page.get_by_text("An attached file is no longer on the server.").wait_for()


def test_a_model_that_does_not_hear_needs_a_speech_model(
    open_page: Callable[..., Page], model: StubModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "hearing", None)
    (tmp_path / "talk.wav").write_bytes(plain_wav(1.0))
    page = open_page("/", width=360, height=740)
    page.set_input_files("#composer-file", tmp_path / "talk.wav")
    page.get_by_text("talk.wav is sound, and no model here transcribes speech.").wait_for()
    assert page.locator(".attachments .file").count() == 0
