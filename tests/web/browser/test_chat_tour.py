"""A person's way through what a chat does beside talking: a project, a tool after consent, a long file, a preview, two
models, an edited answer, a link to read, the memory, and the list of everything.

The model says what the test puts into its mouth. With a finger on 360 px, with a mouse on 768 and 1920, and on 1280
with nothing but the keyboard; `scripts/make_screenshots` keeps the pictures that docs/ shows.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from localllm.config.mcp_servers import McpServer
from localllm.engine.client import GenerationRequest
from localllm.engine.params import SamplingParams
from localllm.text.structured import StructuredOutputsParams
from localllm.web.pages.chat.replies import prompt
from tests.draws import DAY
from tests.text.templates import CHATML
from tests.web import live_server
from tests.web.browser.harness import Finger, Hand, Keyboard, Mouse, Tour
from tests.web.browser.looks import changed_pictures, opened, until
from tests.web.harness import pdf_of
from tests.web.live_server import LiveServer, PacedRunner, fake_model, settings
from tests.web.pages_stub import StubModel

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = pytest.mark.slow

QUESTION = "What is the melting point of zorbium?"
CALL = {"name": "get_current_time", "arguments": {"timezone": "Asia/Tokyo"}}
DRAWING = """Here is a clock:

```html
<svg viewBox="0 0 100 100" width="160"><circle cx="50" cy="50" r="45" fill="none" stroke="teal" stroke-width="4"/>
<path d="M50 50V20M50 50L70 60" stroke="teal" stroke-width="4" stroke-linecap="round"/></svg>
```
"""
SAYS = (
    f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>",
    "It is **past noon** in Tokyo: the clock there is nine hours ahead of UTC.",
    "According to page 17, zorbium melts at **412 degrees**.",
    DRAWING,
    "A block table maps the positions of a request to blocks of its keys and values.",
    "It maps logical blocks to physical ones, as a page table does.",
    "It lists, for each request, where the blocks of its cache are.",  # by the second model
)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    monkeypatch.setattr(live_server, "MAX_MODEL_LEN", 8192)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("HOME", str(tmp_path))  # so that the folder is ~/notes
    texts = list(SAYS)

    def saying(name: str, token_ids: Sequence[int], params: SamplingParams, **others: Any) -> GenerationRequest:
        said = StructuredOutputsParams(choice=[texts.pop(0)])
        return GenerationRequest(name, token_ids, replace(params, structured_outputs=said), **others)

    monkeypatch.setattr(prompt, "GenerationRequest", saying)
    model = fake_model(tmp_path / "tiny", PacedRunner(), chat_template=CHATML)
    asked = replace(settings(ui=True), file=tmp_path / "config.toml")
    clock = McpServer("clock", sys.executable, ("-m", "mcp_server_time", "--local-timezone", "UTC"))
    with LiveServer(model, replace(asked, mcp={"clock": clock})) as live:
        yield live


class ChatTour(Tour):
    def project(self, folder: Path) -> None:
        (folder / "notes").mkdir()
        (folder / "notes" / "kernels.md").write_text("# Kernels\n\nThe grid of zorbium has four programs.\n")
        self.page.goto(self.server.link())  # a folder of the machine needs its owner
        self.page.goto(f"{self.server.url}/projects")
        self.hand.write(self.page.locator("#project-name"), "Kernels")
        self.page.keyboard.press("Enter")
        self.page.locator("#panel-title:text('Kernels')").wait_for()
        notes = {"name": "style.md", "mimeType": "text/plain", "buffer": b"Answer in one sentence."}
        self.page.set_input_files("#project-file", files=[notes])
        self.press("Add")
        self.page.get_by_text("context tokens").wait_for()
        self.hand.write(self.page.locator("#project-folder"), "~/notes")
        self.page.keyboard.press("Enter")
        self.page.get_by_text("1 file is searched").wait_for()
        self.picture("project")
        self.press("New chat in this project", "link")
        self.page.locator(".head__project[aria-label='Project Kernels']").wait_for()

    def tool(self) -> None:
        self._ask("What time is it in Tokyo?")
        self.page.get_by_text("of clock?").wait_for()
        self.picture("tool")
        self.press("Allow once")
        self.page.get_by_text("nine hours ahead").wait_for()

    def long_file(self, folder: Path) -> None:
        pages = [f"Page {number} is about the weather of the year. " * 40 for number in range(1, 40)]
        pages[16] = "The melting point of zorbium is 412 degrees."
        (folder / "paper.pdf").write_bytes(pdf_of(pages))
        self.page.goto(self.server.url)
        self.page.set_input_files("#composer-file", folder / "paper.pdf")
        self.page.locator(".file__searched").wait_for()
        self._ask(QUESTION)
        self.page.locator(".message--assistant .figures").wait_for()
        self.hand.press(self.page.locator(".sources__head"))
        self.page.locator(".sources__passage", has_text="p. 17").get_by_text(pages[16]).wait_for()
        self.picture("long-file")

    def preview(self) -> None:
        self.page.goto(self.server.url)
        self._ask("Draw a clock as SVG.")
        self.page.locator(".message--assistant .figures").wait_for()
        self.hand.press(self.page.locator("[data-preview]"))
        self.page.frame_locator(".preview iframe").locator("circle").wait_for()
        self.picture("preview")

    def two_models(self) -> None:
        self.page.goto(self.server.url)
        self._ask("What is a block table?")
        self.page.locator(".message--assistant .figures").wait_for()
        other = StubModel(name="second")
        other.client.every_s, other.client.chars, other.client.reply = 0.01, 20, SAYS[-1]
        self.server.manager.adopt(other)  # type: ignore[arg-type]
        self._choose("Compare two models…")
        self.page.locator("#other-beside").wait_for()
        self.hand.press(self.page.locator("#manage button[type=submit]"))
        for place in (1, 2):
            self.page.locator(f".compare__one:nth-child({place}) .figures").wait_for()
        self.picture("compare")
        self.press("Keep this one: second")
        self.page.locator(".compare").wait_for(state="detached")

    def another_answer(self) -> None:
        self._choose("Edit the answer")
        self.hand.write(self.page.locator(".edit__text"), "A list of blocks.")
        self.press("Save")
        self.page.locator(".message__mark").wait_for()
        self._choose("New chat from here")
        self.page.locator(".head__title:text('(2)')").wait_for()
        assert "A list of blocks." in self.page.locator(".message--assistant").inner_text()

    def link(self) -> None:
        self.hand.press(self.page.locator(".head__more"))
        self.hand.press(self.page.locator("#chat-link").get_by_role("button", name="Make a link"))
        self.page.locator("#chat-link-address").wait_for()
        self.picture("link")
        self.press("Close")

    def memory(self) -> None:
        self._choose("Remember…")
        self.hand.write(self.page.locator("#remember-note"), "I write kernels in Triton.")
        self.hand.press(self.page.locator("#manage").get_by_role("button", name="Remember"))
        self.page.locator("#chat-status:text('Remembered')").wait_for(state="attached")
        self.page.goto(f"{self.server.url}/memory")
        assert self.page.get_by_label("Notes, one on each line").input_value() == "I write kernels in Triton."
        self.picture("memory")

    def everything(self) -> None:
        self.page.keyboard.press("ControlOrMeta+k")
        self.page.locator("#palette-list [role=option]").first.wait_for()
        self.page.keyboard.type("clock")
        self.page.keyboard.press("Enter")  # before the list is that of the text
        self.page.locator("[data-preview]").wait_for()
        self.page.keyboard.press("ControlOrMeta+k")
        self.page.keyboard.type("table")
        until(self.page, "document.querySelectorAll('#palette-list [role=option]').length < 5")
        self.picture("palette")

    def _ask(self, text: str) -> None:
        self.hand.write(self.page.locator("#composer-message"), text)
        self.press("Send")

    def _choose(self, item: str) -> None:
        """Of the menu of the last answer."""
        self.hand.press(self.page.locator(".message--assistant [aria-label=More]").last)
        self.hand.press(self.page.locator(".more:popover-open").get_by_text(item, exact=True))


@pytest.mark.parametrize(
    ("look", "width", "hand", "options"),
    [
        pytest.param("-small", 360, Finger(), {"has_touch": True, "is_mobile": True}, id="finger-360"),
        pytest.param("-dark", 768, Mouse(), {"color_scheme": "dark"}, id="mouse-768"),
        pytest.param("", 1280, Keyboard(), {}, id="keyboard-1280"),
        pytest.param("-wide", 1920, Mouse(), {}, id="mouse-1920"),
    ],
)
def test_a_way_through_the_chat(
    chromium: Browser, server: LiveServer, tmp_path: Path, look: str, width: int, hand: Hand, options: dict[str, Any]
) -> None:
    pytest.importorskip("mcp_server_time")
    pictures = Path(os.environ.get("LOCALLLM_PICTURES", tmp_path))
    with opened(chromium, width, 740 if width < 768 else 900, **options) as page:
        page.set_default_timeout(20_000)
        tour = ChatTour(page, server, hand, pictures, look)
        tour.project(tmp_path)
        tour.tool()
        tour.long_file(tmp_path)
        tour.preview()
        tour.two_models()
        tour.another_answer()
        tour.link()
        tour.memory()
        tour.everything()
    if "LOCALLLM_PICTURES" not in os.environ and not DAY:  # else they are taken to be agreed on, or it has to be quick
        assert changed_pictures(pictures, look) == {}
