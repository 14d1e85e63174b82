"""What is inside a message, in Chromium: reasoning while it is written, maths under the pages' policy, files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from localllm.text.answers.detect import answer_format
from localllm.text.chat_template import ChatTemplate
from tests.text.templates import CHATML
from tests.web.browser.looks import overflow, small_targets, until
from tests.web.pages_stub import StubModel

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.slow

THOUGHT = "<think>\nThe user wants *maths*.\n\n" + "It goes on and on. " * 20 + "\n</think>\n\nThe answer."
MATHS = r"""Money is $5 and $6. Inline $e^{i\pi} + 1 = 0$, and displayed:

$$
\int_0^\infty e^{-x^2}\,dx = \frac{\sqrt{\pi}}{2} \quad \begin{pmatrix} a & b \\ c & d \end{pmatrix}
$$

\[ \color{red}{\boxed{x}} \cancel{y} \href{javascript:window.hacked=1}{z} \]

\( \def\a{\a\a}\a \) and \( \unknown{ \)
"""


@pytest.fixture
def reasoning(model: StubModel) -> Iterator[StubModel]:
    before = model.client.reply
    model.answers = answer_format(ChatTemplate(CHATML, {}))
    yield model
    model.client.reply, model.answers = before, None


def send(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_role("button", name="Send", exact=True).click()


def test_reasoning_is_open_with_a_clock_while_it_is_written_and_then_collapses(
    open_page: Callable[..., Page], reasoning: StubModel
) -> None:
    reasoning.client.reply = THOUGHT
    page = open_page("/")
    reasoning.client.every_s = 0.03
    send(page, "think")
    page.wait_for_selector(".thinking[open][aria-busy=true] .thinking__clock")
    page.wait_for_selector(".thinking__text em")
    page.wait_for_selector(".thinking:not([open])")
    page.wait_for_selector(".figures")
    assert page.locator(".thinking__head").inner_text().startswith("Thought for ")
    assert page.locator(".thinking").count() == 1
    assert page.locator(".prose:not(.thinking__text)").inner_text() == "The answer."
    page.locator(".thinking__head").press("Enter")
    assert page.locator(".thinking__text").is_visible()


def test_maths_is_drawn_under_the_policy_and_hostile_tex_stays_text(
    open_page: Callable[..., Page], model: StubModel
) -> None:
    before, model.client.reply = model.client.reply, MATHS
    page = open_page("/")
    assert not page.evaluate("'temml' in window"), "nothing is fetched before there is a formula"
    send(page, "maths")
    page.wait_for_selector(".figures")
    until(page, "document.querySelectorAll('.maths math').length >= 2")
    until(page, "!document.querySelector('[data-maths]:not([data-drawn])')")
    assert "Money is $5 and $6." in page.locator(".prose").inner_text()
    assert page.locator(".maths--display mfrac").count() == 1
    assert page.locator(".maths a").count() == 0
    assert page.evaluate("window.hacked") is None
    assert page.locator(".maths", has_text="unknown").count() == 1
    assert overflow(page) == 0
    model.client.reply = before


def test_a_file_is_chosen_shown_removed_and_a_long_paste_becomes_one(open_page: Callable[..., Page]) -> None:
    page = open_page("/", width=360)
    page.set_input_files("#composer-file", [{"name": "notes.py", "mimeType": "text/plain", "buffer": b"x = 1\n" * 40}])
    page.wait_for_selector(".file")
    assert "tokens" in page.locator(".file__size").inner_text()
    page.evaluate(
        """() => { const clipboardData = new DataTransfer(); clipboardData.setData('text/plain', 'word '.repeat(2000));
        document.querySelector('#composer-message').dispatchEvent(new ClipboardEvent('paste', { clipboardData })); }"""
    )
    page.wait_for_selector(".file__searched")
    assert small_targets(page) == []
    assert overflow(page) == 0
    page.get_by_role("button", name="Remove pasted.txt").click()
    until(page, "document.querySelectorAll('.file').length === 1")
    send(page, "What is it?")
    page.wait_for_selector(".figures")
    assert page.locator("#attachments .file").count() == 0
    assert page.locator(".message--user .file__name").inner_text() == "notes.py"
    assert page.locator(".message--user .message__text").inner_text() == "What is it?"
