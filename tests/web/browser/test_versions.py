"""What a message's menu opens, in Chromium: a preview that reaches nothing, jumps, reading aloud, two models."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.web.browser.harness import finishing, long_chat, say
from tests.web.browser.looks import overflow, small_targets, until
from tests.web.live_server import LiveServer
from tests.web.pages_stub import StubModel

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

Open = Callable[..., "Page"]
ESCAPES = """Look:

```html
<p id=said></p><form action=/chats/wipe method=post><button>Go</button></form>
<script>
const tries = {
  cookie: () => document.cookie,
  storage: () => localStorage.length,
  parent: () => parent.document.title,
  top: () => { top.location = "https://example.invalid/"; },
  opened: () => { if (!open("/")) throw Error("no window"); },
  eval: () => eval("1"),
};
const said = {};
for (const [name, run] of Object.entries(tries)) {
  try { run(); said[name] = "reached"; } catch (error) { said[name] = "refused"; }
}
const load = (name, made) => new Promise((done) => {
  made.onload = () => { said[name] = "reached"; done(); };
  made.onerror = () => { said[name] = "refused"; done(); };
  document.body.append(made);
});
const image = document.createElement("img");
const script = document.createElement("script");
const pending = [load("image", image), load("script", script)];
image.src = "/static/favicon.svg";
script.src = "/static/app.js";
pending.push(fetch("/").then(() => { said.fetch = "reached"; }, () => { said.fetch = "refused"; }));
document.querySelector("button").click();
Promise.all(pending).then(() => { document.querySelector("#said").textContent = JSON.stringify(said); });
</script>
```
"""


@pytest.fixture
def reply(model: StubModel) -> Iterator[Callable[[str], None]]:
    """Sets what the model answers."""
    before = model.client.reply
    yield lambda text: setattr(model.client, "reply", text)
    model.client.reply = before


@pytest.fixture
def second(server: LiveServer) -> Iterator[StubModel]:
    """Another model, loaded as well."""
    other = StubModel(name="second")
    other.client.chars, other.client.reply = 6, "The second answers.\n\n- one\n- two\n"
    entry = server.manager.adopt(other)  # type: ignore[arg-type]
    yield other
    server.manager.entries.remove(entry)


def menu(page: Page, item: str, message: str = ".message--assistant") -> None:
    """By the keyboard alone."""
    page.locator(f"{message} [aria-label=More]").last.press("Enter")
    page.locator(".more:popover-open").get_by_text(item, exact=True).press("Enter")


def test_a_preview_reaches_neither_the_page_nor_a_network(
    chromium: Browser, server: LiveServer, model: StubModel, reply: Callable[[str], None]
) -> None:
    reply(ESCAPES)
    model.client.chars, model.client.every_s = 60, 0.001
    context = chromium.new_context(viewport={"width": 360, "height": 740})
    page, answered, refused = context.new_page(), list[str](), list[str]()
    page.on("console", lambda note: refused.append(note.text))
    page.goto(server.url)
    say(page, "draw")
    page.on("response", lambda answer: answered.append(answer.url.removeprefix(server.url)))
    page.locator("[data-preview]").press("Enter")
    said = page.frame_locator(".preview iframe").locator("#said")
    said.get_by_text("{").wait_for()
    tries = json.loads(said.inner_text())
    assert (len(tries), set(tries.values())) == (9, {"refused"}), tries
    (preview,) = (url for url in answered if not url.startswith("/live/"))
    assert "/preview/" in preview
    assert page.url.startswith(f"{server.url}/c/")
    assert any("Content Security Policy" in text for text in refused), "the policy itself refused something"
    assert overflow(page) == 0
    assert page.locator("[data-preview]").get_attribute("aria-expanded") == "true"
    alone = page.request.get(server.url + preview)
    assert "sandbox allow-scripts" in alone.headers["content-security-policy"]
    page.locator("[data-preview]").press("Enter")
    assert page.locator("iframe").count() == 0
    context.close()


@pytest.mark.slow
def test_jumps_lead_through_a_long_chat(open_page: Open, server: LiveServer, model: StubModel) -> None:
    page = open_page(long_chat(server, 120))
    at_end = "(s => s.scrollHeight - s.scrollTop - s.clientHeight < 2)(document.querySelector('#chat-scroll'))"
    until(page, at_end)
    assert not page.locator("#newest").is_visible()
    page.locator("[aria-label='Questions in this chat']").press("Enter")
    page.locator(".outline").wait_for()
    assert page.locator(".outline__link").count() == 60
    assert small_targets(page) == []
    page.locator(".outline__link").nth(45).press("Enter")  # on the page already
    page.locator("#newest").wait_for()
    shown = "document.activeElement.querySelector('.message__text').textContent.split('.')[0]"
    assert page.evaluate(shown) == "Message 90"
    assert not page.locator("#manage").is_visible()
    page.locator("#newest").press("Enter")
    until(page, at_end)
    page.locator("#newest").wait_for(state="hidden")
    page.locator("[aria-label='Questions in this chat']").click()
    page.locator(".outline__link").nth(5).click()  # not on the page yet
    page.wait_for_url("**?before=*")
    until(page, "(e => e && e.getBoundingClientRect().top > 0 && e.getBoundingClientRect().top < innerHeight)"
                "(document.querySelector(location.hash))")  # fmt: skip
    assert "Message 10." in page.locator(":target").inner_text()
    page.locator("#newest").wait_for()
    page.locator("#newest").click()
    page.wait_for_url(lambda url: "before" not in url)
    until(page, at_end)


VOICES = """
const spoken = [], local = { name: "here", lang: "en-GB", localService: true };
window.spoken = spoken;
window.queued = [];
window.SpeechSynthesisUtterance = function (text) { this.text = text; };
Object.defineProperty(window, "speechSynthesis", { value: {
  getVoices: () => [{ name: "elsewhere", lang: "en-US", localService: false }, ...(%s ? [local] : [])],
  addEventListener() {}, cancel() { spoken.push("cancel"); },
  speak(said) { spoken.push(`${said.voice.name}: ${said.text}`); queued.push(said); },
} });
"""


@pytest.mark.slow
@pytest.mark.parametrize("has_local_voice", [True, False])
def test_reading_aloud_skips_code_and_uses_no_voice_of_elsewhere(
    chromium: Browser, server: LiveServer, model: StubModel, reply: Callable[[str], None], has_local_voice: bool
) -> None:
    """The voices are made here, because a Chromium without sound has none."""
    reply("First words. And then, e.g., more!\n\n```python\nx = 1\n```\n\n- a list $x^2$\n")
    context = chromium.new_context()
    context.add_init_script(VOICES % str(has_local_voice).lower())
    page = context.new_page()
    page.goto(server.url)
    say(page, "read")
    if not has_local_voice:
        page.locator(".message--assistant [aria-label=More]").press("Enter")
        page.locator(".more:popover-open").wait_for()
        assert not page.get_by_text("Read aloud").is_visible()
    else:
        menu(page, "Read aloud")
        assert page.evaluate("spoken.filter(each => each !== 'cancel')") == [
            "here: First words.", "here: And then, e.g., more!", "here: a list"
        ]  # fmt: skip
        menu(page, "Stop reading")
        assert page.evaluate("spoken.at(-1)") == "cancel"
        assert page.locator(".more [data-speak]").text_content() == "Read aloud"
    context.close()


BETWEEN_TWO_UPDATES = """(async () => {
  const wait = () => new Promise((done) => setTimeout(done, 400));
  const message = document.querySelector(".message--assistant");
  message.ariaBusy = "true";
  message.querySelector(".prose").replaceChildren();
  const open = Object.assign(document.createElement("div"), { className: "open open--text", id: `${message.id}-open` });
  open.textContent = "One. Two";
  message.querySelector(".prose").after(open);
  message.querySelector(".more [data-speak]").click();
  message.querySelector(".prose").innerHTML = "<p>One. Two.</p>";
  await wait();
  const next = open.cloneNode();
  next.textContent = "New. Block";
  open.replaceWith(next);
})()"""
"""A finished block is on the page, and the open block still has its text."""


@pytest.mark.parametrize("width", [360, 1280])
def test_a_reply_is_read_aloud_while_it_is_written(
    chromium: Browser, server: LiveServer, model: StubModel, reply: Callable[[str], None], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, width: int,
) -> None:  # fmt: skip
    code, items = "```python\nx = 1. Not read.\n```", "1. A list. Of two.\n2. Parts."
    reply(f"First **words**. And then more! This one ends the paragraph.\n\n{code}\n\n{items}\n\nThe end.")
    monkeypatch.setattr(model.client, "chars", 2)
    monkeypatch.setattr(model.client, "every_s", 0.04)
    context = chromium.new_context(viewport={"width": width, "height": 740})
    context.add_init_script(VOICES % "true")
    page = context.new_page()
    page.goto(server.url)
    page.fill("#composer-message", "read")
    with finishing(page):
        page.press("#composer-message", "Enter")
        page.locator(".message--assistant[aria-busy=true]").get_by_role("button", name="Read aloud").click()
        until(page, "spoken.includes('here: First words.')")
        assert page.locator(".message--assistant .prose > *").count() == 0, "its paragraph is not finished"
        page.screenshot(path=tmp_path / f"written-{width}.png")
        assert overflow(page) == 0
        assert small_targets(page) == []
    stop = page.get_by_role("button", name="Stop reading")
    stop.wait_for()
    until(page, "spoken.includes('here: The end.')")
    assert page.evaluate("spoken.filter(each => each !== 'cancel')") == [
        "here: First words.", "here: And then more!", "here: This one ends the paragraph.", "here: A list.",
        "here: Of two.", "here: Parts.", "here: The end.",
    ]  # fmt: skip
    page.screenshot(path=tmp_path / f"read-{width}.png")
    assert overflow(page) == 0
    page.evaluate("queued.forEach(each => each.onend())")
    stop.wait_for(state="hidden")
    page.reload()
    menu(page, "Read aloud")
    stop.click()
    assert page.evaluate("spoken.at(-1)") == "cancel"
    page.evaluate(BETWEEN_TWO_UPDATES)
    until(page, "spoken.at(-1) === 'here: New.'")
    said = page.evaluate("spoken.slice(spoken.lastIndexOf('cancel') + 1)")
    assert said == ["here: One.", "here: Two.", "here: New."]
    context.close()


@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), pytest.param(1280, "light", marks=pytest.mark.slow)])
def test_two_models_are_compared_an_answer_is_edited_and_the_chat_copied(
    open_page: Open, model: StubModel, second: StubModel, width: int, scheme: str
) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    page = open_page(width=width, color_scheme=scheme, bypass_csp=True)  # axe itself is put into the page
    page.select_option("#model", "demo")
    model.client.every_s = second.client.every_s = 0.002
    say(page, f"question {width}")

    def look() -> None:
        found = axe.Axe().run(page).response["violations"]
        assert [each["id"] for each in found if each["impact"] in ("moderate", "serious", "critical")] == []
        assert (overflow(page), small_targets(page)) == (0, [])

    page.locator(".message--assistant [aria-label=More]").press("Enter")
    look()
    page.keyboard.press("Escape")
    menu(page, "Compare two models…")
    page.locator("#other-beside").wait_for()
    look()
    model.client.every_s = 0.05
    page.locator("#manage button[type=submit]").press("Enter")
    page.locator(".compare__one:nth-child(2) .figures").wait_for()
    assert page.locator(".compare__one:nth-child(1) [aria-busy=true]").count() == 1, "both at the same time"
    tops = page.evaluate("[...document.querySelectorAll('.compare__one')].map(e => e.getBoundingClientRect().top)")
    assert (tops[0] == tops[1]) == (width >= 1024)
    assert page.get_by_role("button", name="Stop second").is_visible() is False
    look()
    page.get_by_role("button", name="Stop demo").press("Enter")
    page.locator(".compare__one:nth-child(1) .figures").wait_for()
    page.get_by_role("button", name="Keep this one: second").press("Enter")
    page.locator(".compare").wait_for(state="detached")
    assert "The second answers." in page.locator(".message--assistant").inner_text()

    menu(page, "Edit the answer")
    page.locator(".edit__text").wait_for()
    look()
    page.keyboard.press("ControlOrMeta+a")
    page.keyboard.type("My own words")
    page.get_by_role("button", name="Save", exact=True).press("Enter")
    page.locator(".message__mark").wait_for()
    menu(page, "New chat from here")
    page.locator(f".head__title:text('question {width} (2)')").wait_for()
    assert "My own words" in page.locator(".message--assistant").inner_text()
    menu(page, "Delete")
    page.locator(".undo").wait_for()


def test_the_preview_stays_beside_the_chat_and_shows_what_the_model_writes_next(
    open_page: Open, model: StubModel, reply: Callable[[str], None]
) -> None:
    model.client.chars, model.client.every_s = 60, 0.001
    page = open_page(bypass_csp=True)
    frame = page.frame_locator("#canvas iframe")
    for number in (1, 2):
        reply(f"Here:\n\n```html\n<p id=said>Version {number}</p>\n```\n")
        say(page, "draw")
        if number == 1:
            page.locator("[data-preview]").click()
        frame.get_by_text(f"Version {number}").wait_for()
    assert page.locator("#canvas [role=status]").inner_text() == "2 of 2"
    assert page.locator("[data-preview]").nth(1).get_attribute("aria-expanded") == "true"
    reply("No picture this time.")
    say(page, "talk")
    frame.get_by_text("Version 2").wait_for()
    page.get_by_label("Earlier version").click()
    frame.get_by_text("Version 1").wait_for()
    assert page.get_by_label("Earlier version").is_disabled()
    chat, canvas = (page.locator(each).bounding_box() for each in (".chat", "#canvas"))
    assert chat
    assert canvas
    assert chat["x"] + chat["width"] <= canvas["x"] + 1, "beside each other"
    for width in (360, 768, 1280, 1920):
        page.set_viewport_size({"width": width, "height": 800})
        assert (overflow(page), small_targets(page)) == (0, [])
    page.set_viewport_size({"width": 360, "height": 740})
    page.get_by_role("button", name="Close", exact=True).press("Escape")
    assert not page.locator("#canvas").is_visible()
    assert page.locator("[data-preview]").first.inner_text() == "Preview"
    page.locator("[data-preview]").first.click()
    assert page.evaluate("document.activeElement.textContent") == "Close", "on a phone it covers the chat"
