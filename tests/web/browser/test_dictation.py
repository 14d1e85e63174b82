"""Dictation in Chromium with a microphone that plays a file, a tiny speech model, and each way in which it fails."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from localllm.config.settings import Settings
from localllm.errors import QueueFull
from localllm.media import speech
from localllm.web.pages.chat.files import attachments, handlers
from tests.media.sounds import sounds, wav
from tests.models.speech_models import save_parakeet, save_whisper
from tests.web.browser.conftest import CHROMIUM
from tests.web.browser.looks import overflow, small_targets
from tests.web.live_server import LiveServer, settings
from tests.web.pages_stub import StubModel

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FAKE = "--use-fake-device-for-media-stream"


@pytest.fixture(scope="module")
def server_settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = save_parakeet(tmp_path_factory.mktemp("models") / "parakeet", "tdt")
    return settings(ui=True, speech_model=str(folder), allowed_hosts=("desk.test",))


@pytest.fixture(scope="module")
def server(model: StubModel, server_settings: Settings) -> Iterator[LiveServer]:
    with LiveServer(model, server_settings) as live:  # type: ignore[arg-type]
        yield live


@pytest.fixture
def installed(server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of an installed speech model that is not loaded."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder, commit = tmp_path / "models--org--whisper-tiny", "0" * 40
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    (folder / "snapshots" / commit).mkdir(parents=True)
    save_whisper(folder / "snapshots" / commit)
    before = list(server.manager.entries)
    yield "org/whisper-tiny"
    server.manager.entries[:] = before


@pytest.fixture
def opened(chromium: Browser, server: LiveServer, tmp_path: Path) -> Iterator[Callable[..., Page]]:
    """Opens the chat in a browser with these arguments; the test fails when the page complained in the console."""
    browsers, complaints = list[Any](), list[str]()

    def open_chat(
        *arguments: str, width: int = 1280, allows: bool = True, host: str = "", touches: bool = False
    ) -> Page:
        browser = chromium.browser_type.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--no-first-run", *arguments]
        )
        browsers.append(browser)
        context = browser.new_context(
            viewport={"width": width, "height": 740}, has_touch=touches, is_mobile=touches
        )  # fmt: skip
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
        page.set_default_timeout(10_000)
        url = server.url.replace("127.0.0.1", host or "127.0.0.1")
        if allows and not host:
            context.grant_permissions(["microphone"], origin=url)
        page.goto(url)
        return page

    yield open_chat
    for browser in browsers:
        browser.close()
    expected = ("Failed to load resource", "The Cross-Origin-Opener-Policy header has been ignored")
    assert [each for each in complaints if not each.startswith(expected)] == []


def microphone(tmp_path: Path, values: np.ndarray) -> str:
    path = tmp_path / "said.wav"
    path.write_bytes(wav(values))
    return f"--use-file-for-fake-audio-capture={path}%noloop"


def flaws(page: Page) -> list[str]:
    """Return what axe-core finds."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    return [each["id"] for each in axe.Axe().run(page).response["violations"]]


def idle(page: Page) -> None:
    page.locator("#dictate[data-dictate=idle]").wait_for(timeout=60_000)


@pytest.mark.parametrize("width", [360, 1280])
def test_what_is_said_lands_at_the_caret_and_undo_takes_it_back(
    opened: Callable[..., Page], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setattr(speech, "VadOptions", lambda: None)  # the network that finds speech knows noise from speech
    page = opened(FAKE, microphone(tmp_path, sounds(20)[0] / 32767), width=width)
    text = page.locator("#composer-message")
    text.fill("Dear you")
    text.evaluate("field => field.setSelectionRange(4, 4)")
    page.get_by_role("button", name="Dictate").click()
    page.locator("#dictate:has-text('0:02')").wait_for()
    assert overflow(page) == 0
    assert small_targets(page) == []
    page.screenshot(path=tmp_path / f"recording-{width}.png")
    page.get_by_role("button", name="Stop and transcribe").click()
    idle(page)
    found = re.fullmatch(r"Dear (\S.*) you", text.input_value(), re.DOTALL)
    assert found, text.input_value()
    assert text.evaluate("field => field === document.activeElement")
    page.keyboard.press("Control+z")
    assert text.input_value() == "Dear you"
    page.screenshot(path=tmp_path / f"done-{width}.png")


def level_of(page: Page) -> float:
    """Return the share of its width that the level bar shows."""
    return float(page.locator(".dictate__level").evaluate("bar => new DOMMatrix(getComputedStyle(bar).transform).a"))


def test_a_button_that_is_held_records_until_it_is_released(
    opened: Callable[..., Page], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speech, "VadOptions", lambda: None)
    page = opened(FAKE, microphone(tmp_path, sounds(20)[0] / 32767), width=360)
    box = page.locator("#dictate").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.locator("#dictate[data-dictate=recording]:has-text('0:01')").wait_for()
    page.mouse.move(10, 10)  # the press goes on beside the button
    page.mouse.up()
    idle(page)
    assert page.locator("#composer-message").input_value()
    page.locator("#dictate").click()  # what was held does not swallow the next click
    page.locator("#dictate[data-dictate=recording]").wait_for()
    page.keyboard.press("Escape")
    idle(page)
    page.locator("#dictate").press("Enter")  # no pointer at all
    page.locator("#dictate[data-dictate=recording]").wait_for()
    page.locator("#dictate").press("Enter")
    idle(page)


def test_a_finger_that_holds_the_button_records_until_it_is_lifted(
    opened: Callable[..., Page], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speech, "VadOptions", lambda: None)
    page = opened(FAKE, microphone(tmp_path, sounds(20)[0] / 32767), width=360, touches=True)
    box = page.locator("#dictate").bounding_box()
    assert box is not None
    finger, x, y = page.context.new_cdp_session(page), box["x"] + box["width"] / 2, box["y"] + box["height"] / 2

    def touch(kind: str, *points: tuple[float, float]) -> None:
        finger.send(
            "Input.dispatchTouchEvent", {"type": kind, "touchPoints": [{"x": at[0], "y": at[1]} for at in points]}
        )

    touch("touchStart", (x, y))
    page.locator("#dictate[data-dictate=recording]:has-text('0:01')").wait_for()
    for step in range(1, 6):  # slides off the button, which neither scrolls the page nor ends the recording
        touch("touchMove", (x, y - 40 * step))
    page.locator("#dictate[data-dictate=recording]:has-text('0:02')").wait_for()
    assert page.evaluate("scrollY") == 0
    touch("touchEnd")
    idle(page)
    assert page.locator("#composer-message").input_value()
    page.locator("#dictate").tap()  # a tap starts, a tap ends
    page.locator("#dictate[data-dictate=recording]:has-text('0:01')").wait_for()
    page.locator("#dictate").tap()
    idle(page)
    said = page.locator("#composer-message").input_value()
    touch("touchStart", (x, y))
    page.locator("#dictate[data-dictate=recording]").wait_for()
    touch("touchCancel")  # a short touch that the system takes away has started, as a tap has
    page.wait_for_timeout(200)
    assert page.locator("#dictate").get_attribute("data-dictate") == "recording"
    page.keyboard.press("Escape")
    idle(page)
    assert page.locator("#composer-message").input_value() == said


@pytest.mark.parametrize(("loudness", "low", "high"), [(1.0, 0.5, 1.0), (0.0, 0.0, 0.05)])
def test_the_bar_shows_the_level_of_the_microphone_and_moves_nothing(
    opened: Callable[..., Page], tmp_path: Path, loudness: float, low: float, high: float
) -> None:
    page = opened(FAKE, microphone(tmp_path, loudness * sounds(20)[0] / 32767))
    assert not page.locator(".dictate__level").is_visible()
    page.locator("#dictate").click()
    page.locator("#dictate:has-text('0:01')").wait_for()
    before = page.locator("#dictate").bounding_box()
    levels = []
    for _ in range(10):
        levels.append(level_of(page))
        page.wait_for_timeout(50)
    assert low <= max(levels) <= high
    assert page.locator("#dictate").bounding_box() == before
    assert flaws(page) == []
    page.keyboard.press("Escape")
    idle(page)
    assert not page.locator(".dictate__level").is_visible()


def test_silence_is_told_and_a_cancelled_recording_is_not_sent(
    opened: Callable[..., Page], server: LiveServer, tmp_path: Path
) -> None:
    page = opened(FAKE, microphone(tmp_path, np.zeros(160_000)))
    sent = list[str]()
    page.on("request", lambda request: sent.append(request.url) if request.url.endswith("/dictate") else None)
    page.locator("#dictate").click()
    page.locator("#dictate:has-text('0:00')").wait_for()
    page.keyboard.press("Escape")
    idle(page)
    assert sent == []
    page.locator("#dictate").click()
    page.locator("#dictate:has-text('0:01')").wait_for()
    page.locator("#dictate").click()
    page.get_by_text("No speech was heard.").wait_for()
    assert page.locator("#composer-message").input_value() == ""
    assert len(sent) == 1


def test_each_reason_for_no_sound_has_its_words(opened: Callable[..., Page], server: LiveServer) -> None:
    for arguments, options, words in (
        ((FAKE, "--deny-permission-prompts"), {"allows": False}, "The browser has refused the microphone."),
        ((), {}, "No microphone was found."),
        (("--host-resolver-rules=MAP desk.test 127.0.0.1",), {"host": "desk.test"}, "over HTTPS"),
    ):
        page = opened(*arguments, **options)
        page.locator("#dictate").click()
        page.get_by_text(words).wait_for()
        idle(page)


def test_a_server_that_goes_away_or_refuses_says_so(
    opened: Callable[..., Page], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = opened(FAKE, microphone(tmp_path, sounds(20)[0] / 32767))

    def dictate() -> None:
        page.locator("#dictate").click()
        page.locator("#dictate:has-text('0:01')").wait_for()
        page.locator("#dictate").click()

    page.route("**/chats/dictate", lambda route: route.abort("connectionrefused"))
    dictate()
    page.get_by_text("Not transcribed: the server is away.").wait_for()
    page.unroute("**/chats/dictate")

    async def full(*rest: Any) -> Any:
        raise QueueFull("9 requests are waiting already.", "At most 8 may wait.", "Retry in a moment.")

    monkeypatch.setattr(handlers, "transcript_of_page", full)
    dictate()
    page.get_by_text("9 requests are waiting already.").wait_for()


def test_a_sound_file_is_attached_as_its_text(
    opened: Callable[..., Page], model: StubModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speech, "VadOptions", lambda: None)
    (tmp_path / "talk.wav").write_bytes(wav(sounds(8)[0] / 32767))
    page = opened(width=360)
    page.set_input_files("#composer-file", tmp_path / "talk.wav")
    page.get_by_text("8.0 s of speech by parakeet").wait_for(timeout=60_000)
    assert overflow(page) == 0
    page.screenshot(path=tmp_path / "attached-360.png")
    page.get_by_label("Message", exact=True).fill("What is said?")
    page.get_by_role("button", name="Send", exact=True).click()
    page.wait_for_selector(".figures")
    page.locator(".file--sent summary").click()
    assert page.locator(".file__text").inner_text().startswith("[0:0")
    assert "talk.wav" in "".join(map(chr, model.client.asked[-1].prompt_token_ids))


@pytest.mark.parametrize("width", [360, 1280])
def test_a_sound_file_is_read_again_with_another_speech_model(
    opened: Callable[..., Page], server: LiveServer, installed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    width: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(speech, "VadOptions", lambda: None)
    (tmp_path / "talk.wav").write_bytes(wav(sounds(8)[0] / 32767))
    page = opened(width=width)
    page.set_input_files("#composer-file", tmp_path / "talk.wav")
    chosen = page.get_by_label("Speech model of talk.wav")
    chosen.wait_for(timeout=60_000)
    assert chosen.locator("option").all_inner_texts()[:2] == ["Read again with …", installed]
    assert overflow(page) == 0
    assert small_targets(page) == []
    assert flaws(page) == []
    page.screenshot(path=tmp_path / f"chip-{width}.png")
    chosen.select_option(installed)
    page.get_by_text(f"8.0 s of speech by {installed.rsplit('/')[-1]}").wait_for(timeout=60_000)
    assert page.locator(".attachments .file").count() == 1
    page.screenshot(path=tmp_path / f"again-{width}.png")
    assert [entry.is_beside for entry in server.manager.entries if entry.path and "whisper" in str(entry.path)] == [
        True
    ]
    assert next(entry for entry in server.manager.entries if not entry.is_beside).state == "ready"
    chosen.evaluate("field => field.append(new Option('gone', 'gone'))")
    chosen.select_option("gone")
    page.get_by_text("'gone' cannot transcribe talk.wav now.").wait_for()
    assert page.locator(".attachments .file").count() == 1
    chosen.select_option("parakeet")
    page.get_by_text("8.0 s of speech by parakeet").wait_for(timeout=60_000)


def test_a_transcript_on_the_tray_counts_with_its_sound(
    opened: Callable[..., Page], installed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sound is kept to be read again: the tray holds two of them, and a third pushes out the first."""
    monkeypatch.setattr(speech, "VadOptions", lambda: None)
    data = wav(sounds(3)[0] / 32767)
    monkeypatch.setattr(attachments, "MAX_TRAY_BYTES", int(2.5 * len(data)))
    page = opened()
    for count, name in enumerate(("a.wav", "b.wav", "c.wav"), 1):
        (tmp_path / name).write_bytes(data)
        page.set_input_files("#composer-file", tmp_path / name)
        page.locator(f".attachments .file >> nth={count - 1}").wait_for(timeout=60_000)
    page.get_by_label("Message", exact=True).fill("What is said?")
    page.get_by_role("button", name="Send", exact=True).click()
    page.get_by_text("An attached file is no longer on the server.").wait_for()


@pytest.mark.parametrize("width", [360, 1280])
def test_the_playground_writes_a_transcript_and_its_files(
    opened: Callable[..., Page], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setattr(speech, "VadOptions", lambda: None)
    (tmp_path / "talk.wav").write_bytes(wav(sounds(40)[0] / 32767))
    page = opened(width=width)
    page.goto(f"{page.url}playground?tab=transcribe")
    page.set_input_files("#sound", tmp_path / "talk.wav")
    page.get_by_role("button", name="Run").click()
    page.get_by_role("link", name="talk.srt").wait_for(timeout=60_000)
    assert "[0:3" in page.locator(".answer").inner_text()
    assert overflow(page) == 0
    assert small_targets(page) == []
    page.screenshot(path=tmp_path / f"playground-{width}.png")
    with page.expect_download() as download:
        page.get_by_role("link", name="talk.srt").click()
    assert download.value.suggested_filename == "talk.srt"
    assert "-->" in Path(download.value.path()).read_text()
