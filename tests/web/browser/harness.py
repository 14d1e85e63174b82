"""Chats for the browser, and the hands that operate its pages: mouse, touch, keyboard."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tests.web.browser.looks import overflow
from tests.web.harness import browser_of
from tests.web.live_server import LiveServer
from tests.web.tuned_server import TunedServer

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page


def long_chat(server: LiveServer, count: int = 500) -> str:
    """A chat with so many messages, some with code."""
    code = "\n\n```python\ndef f(x):\n    return x + 1\n```\n"
    texts = [
        f"Message {i}. " + "A sentence about attention and blocks. " * 5 + code * (i % 3 == 0) for i in range(count)
    ]
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    with browser_of(server) as browser:
        body = json.dumps({"messages": messages}).encode()
        return browser.post("/chats/import", files={"file": body}).url.path


def delete_and_import(page: Page, tmp_path: Path) -> None:
    """Export the chat of one message, delete the message with its files, and import the chat again."""
    exported = tmp_path / "chat.json"
    exported.write_bytes(page.request.get(f"{page.url}/export/json").body())
    page.locator(".message--user").first.hover()
    page.locator(".message--user [aria-label=More]").first.click()
    page.locator(".more:popover-open .action--delete").click()
    page.get_by_text("The message and what followed it are deleted.").wait_for()
    assert page.locator(".message--user").count() == 0
    page.goto(f"{page.url.split('/c/')[0]}/chats/manage")
    page.set_input_files("#import-file", exported)
    page.get_by_role("button", name="Import", exact=True).click()


@contextmanager
def finishing(page: Page) -> Iterator[None]:
    """Wait for the end of the reply to what the block sends. Until then the page tells of the end of the last one."""
    page.evaluate("document.querySelector('#chat-status').textContent = ''")
    yield
    page.locator("#chat-status:text('Reply finished')").wait_for(state="attached")


def say(page: Page, text: str) -> None:
    page.fill("#composer-message", text)
    with finishing(page):
        page.press("#composer-message", "Enter")


QUESTIONS = ("What is paged attention?", "How do I start localllm?", "What is a KV cache?")
MOST_TABS = 150


class Hand(Protocol):
    """A way to reach what a page offers."""

    def press(self, target: Locator) -> None: ...
    def write(self, target: Locator, text: str) -> None: ...


class Mouse:
    def press(self, target: Locator) -> None:
        target.click()

    def write(self, target: Locator, text: str) -> None:
        self.press(target)
        target.fill(text)


class Finger(Mouse):
    def press(self, target: Locator) -> None:
        target.tap()


class Keyboard:
    def press(self, target: Locator) -> None:
        self._reach(target)
        target.page.keyboard.press("Enter")

    def write(self, target: Locator, text: str) -> None:
        self._reach(target)
        target.page.keyboard.press("ControlOrMeta+a")
        target.page.keyboard.type(text)

    def _reach(self, target: Locator) -> None:
        """With Tab, from wherever the focus is; and it is seen there."""
        target.wait_for()
        for _ in range(MOST_TABS):
            has_focus, is_seen = target.evaluate("e => [e === document.activeElement, e.matches(':focus-visible')]")
            if has_focus:
                assert is_seen
                return
            target.page.keyboard.press("Tab")
        raise AssertionError(f"{MOST_TABS} times Tab do not lead to {target}")


@contextmanager
def load(server: TunedServer) -> Iterator[None]:
    """Conversations of different lengths, over and over."""
    over = threading.Event()

    def ask(stream: int) -> None:
        system = {"role": "system", "content": "You answer questions about localllm. " * 4}
        while not over.is_set():
            question = {"role": "user", "content": QUESTIONS[stream] + " Please." * stream}
            body = {"messages": [system, question], "max_tokens": 60 + 60 * stream, "ignore_eos": True}
            assert server.post("/v1/chat/completions", body).status_code == 200

    threads = [threading.Thread(target=ask, args=(stream,)) for stream in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


class Tour:
    def __init__(self, page: Page, server: TunedServer, hand: Hand, pictures: Path, look: str) -> None:
        self.page, self.server, self.hand = page, server, hand
        self.pictures, self.look = pictures, look

    def go(self, title: str) -> None:
        """By the rail, or on a phone by the bar and its menu."""
        bar = self.page.get_by_role("navigation", name="Main")
        link = bar.get_by_role("link", name=title, exact=True)
        if not link.is_visible():
            self.hand.press(bar.get_by_role("button", name="More"))
        self.hand.press(link)
        self.page.locator(f".nav__link[aria-current=page]:has-text('{title}')").wait_for(state="attached")
        self.page.wait_for_load_state()

    def press(self, name: str, role: Any = "button") -> None:
        self.hand.press(self.page.get_by_role(role, name=name, exact=True))

    def picture(self, name: str) -> None:
        assert overflow(self.page) == 0, name
        self.page.evaluate("scrollTo(0, 0)")
        self.page.screenshot(path=self.pictures / f"{name}{self.look}.png")

    def chat(self) -> None:
        self.page.goto(self.server.url)
        for number, question in enumerate(QUESTIONS[:2]):
            self._say(question, number)
        self.hand.press(self.page.locator(".message--assistant").last.get_by_label("Regenerate"))
        self.page.locator(".message--assistant .versions__count").wait_for()
        self.page.locator(".message--assistant .figures").nth(1).wait_for()
        self.picture("chat")

    def chat_goes_on(self) -> None:
        """The chat of before, and another engine."""
        self.go("Chat")
        self._say(QUESTIONS[2], number=2)

    def _say(self, question: str, number: int) -> None:
        self.hand.write(self.page.locator("#composer-message"), question)
        self.press("Send")
        self.page.locator(".message--assistant .figures").nth(number).wait_for()

    def dashboard(self) -> None:
        with load(self.server):
            self.go("Dashboard")
            self.page.locator("#tile-live-requests tbody tr").nth(2).wait_for()
            self.page.wait_for_timeout(2000)  # until its plots have something to show
            self.picture("dashboard")

    def models(self) -> None:
        self.go("Models")
        self.press("Discover", "link")
        self.hand.write(self.page.get_by_role("searchbox"), "tiny")
        self.press("Search")
        self.page.locator(".tag--fit-fits").wait_for()
        self.picture("discover")
        self.press("Download org/tiny")
        self.page.locator(".tag--done").wait_for()
        self.press("Load org/tiny")
        self.page.locator(".shelf__row:has-text('Hugging Face cache') .tag--ready").wait_for()
        self.picture("models")
        self.press("Unload tiny")
        self.press("Delete… tiny", "link")
        self.hand.press(self.page.locator("#question-dialog[open]").get_by_role("button", name="Delete"))
        self.page.get_by_text("was deleted").wait_for()

    def playground(self) -> None:
        self.go("Playground")
        self.hand.write(self.page.locator("#content-0"), QUESTIONS[2])
        self.press("Run")
        self.page.locator("#result .card").first.wait_for()
        self.picture("playground")

    def others(self) -> None:
        self.go("Logs")
        self.page.get_by_text("POST /v1/chat/completions").first.wait_for()
        self.picture("logs")
        self.go("Settings")
        self.picture("settings")

    def tune(self) -> None:
        self.go("Tune")
        self.hand.press(self.page.locator(".goal:has-text('chat')"))
        self.press("Start the run")
        self.page.locator("#tune-trials .trial--measured").nth(2).wait_for()
        self.picture("tune-run")
        self.page.wait_for_url("**/tune/result", timeout=90_000)
        self.picture("tune")
        for fold in self.page.locator(".pick__else > summary").all():  # nothing was clearly better than what runs
            self.hand.press(fold)
        self.press("Apply")
        self.page.get_by_role("status").get_by_text("In use now").wait_for()
