"""Markdown from a model: whole, safe, and cut into blocks without changing what it says."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.web.pages.chat.markdown import BlockSplitter, render_markdown
from tests.web.pages_stub import HOSTILE, REPLY

ALLOWED_TAGS = {
    *("p", "em", "strong", "s", "code", "pre", "div", "span", "button", "a", "h3", "h4", "h5", "h6", "ul", "ol", "li"),
    *("blockquote", "hr", "br", "table", "thead", "tbody", "tr", "th", "td"),
}
PIECES = [
    "# heading\n", "text ", "*em* ", "\n", "\n\n", "- item\n", "1. one\n", "```python\n", "```\n", "~~~\n", "x = 1\n",
    "> quote\n", "| a | b |\n", "|---|--:|\n", "| 1 | 2 |\n", "    code\n", "---\n", "<script>alert(1)</script>",
    "[x](javascript:alert(1))", "![i](http://e.example/i.png)", "<img src=x onerror=y>", "  ", "\\", "`", "**", "[a]: http://b\n",
]  # fmt: skip


def split(text: str, sizes: list[int]) -> list[str]:
    splitter, blocks, at = BlockSplitter(), [], 0
    while at < len(text):
        size = sizes[at % len(sizes)] if sizes else 1
        closed = splitter.push(text[at : at + size])
        at += size
        blocks += [closed] if closed else []
    rest = splitter.finish()
    return [*blocks, rest] if rest else blocks


def tags(html: str) -> set[str]:
    return {name.lower() for name in re.findall(r"<\s*/?\s*([a-zA-Z][\w:-]*)", html)}


@given(st.lists(st.sampled_from(PIECES), max_size=25).map("".join), st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_splitting_keeps_every_character(text: str, sizes: list[int]) -> None:
    assert "".join(split(text, sizes)) == text


@given(st.lists(st.sampled_from(PIECES), max_size=25).map("".join))
def test_only_known_tags_and_links_come_out(text: str) -> None:
    html = "".join(render_markdown(block) for block in split(text, [3]))
    assert tags(html) <= ALLOWED_TAGS
    assert not re.search(r"<[^>]*\s(on\w+|style|src|hx-[\w:-]+)=", html)
    assert all(link.startswith(("http://", "https://", "mailto:")) for link in re.findall(r'href="([^"]*)', html))


@given(st.text(max_size=300))
def test_any_text_renders(text: str) -> None:
    assert tags(render_markdown(text)) <= ALLOWED_TAGS


def test_blocks_render_as_the_whole_does() -> None:
    assert "".join(render_markdown(block) for block in split(REPLY, [3])) == render_markdown(REPLY)


def test_a_block_is_given_back_once_it_is_closed() -> None:
    splitter = BlockSplitter()
    assert splitter.push("para") == ""
    assert splitter.push("graph\nstill\n") == ""
    assert splitter.push("\n") == "paragraph\nstill\n\n"
    assert splitter.push("```py\nx = 1\n\ny") == ""
    assert splitter.open_block() == ("code", "x = 1\n\ny")
    assert splitter.push("\n```\n") == "```py\nx = 1\n\ny\n```\n"
    assert splitter.push("- one\n\n- two\n\n") == ""  # a list may go on after a blank line
    assert splitter.push("After") == ""
    assert splitter.push(" it.\n") == "- one\n\n- two\n\n"
    assert splitter.open_block() == ("text", "After it.\n")


def test_hostile_reply_is_text() -> None:
    html = render_markdown(HOSTILE)
    assert tags(html) <= ALLOWED_TAGS
    assert "&lt;script&gt;" in html
    assert "https://evil.example/p.png" in html  # as a link to follow, not as an image to load
    assert not re.search(r'(href|src)="(javascript|data)', html)


def test_image_becomes_a_link_that_says_what_it_is() -> None:
    html = render_markdown("![a cat](https://example.com/cat.png)")
    assert '<a class="chip" href="https://example.com/cat.png"' in html
    assert "Image: a cat" in html
    assert "<img" not in html


@pytest.mark.parametrize(
    "url",
    [
        "javascript:x",
        "JaVaScRiPt:x",
        "data:text/html,x",
        "vbscript:x",
        "file:///etc/passwd",
        "/dashboard",
        "//e.example",
    ],
)
def test_links_lead_only_to_web_and_mail(url: str) -> None:
    assert "href" not in render_markdown(f"[x]({url})")


def test_table_alignment_needs_no_style_attribute() -> None:
    html = render_markdown("| a | b |\n|:-:|--:|\n| 1 | 2 |\n")
    assert 'class="align-center"' in html
    assert 'class="align-right"' in html
    assert "style=" not in html


def test_long_code_block_is_left_uncoloured_and_whole() -> None:
    source = "x = 1\n" * 20_000
    html = render_markdown(f"```python\n{source}```\n")
    assert html.count("x = 1\n") == 20_000
    assert '<span class="k' not in html
