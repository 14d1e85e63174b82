"""The code blocks that can be previewed, HTML and SVG: the button on a block, and the block found again in its message.

A block is named by a digest of its text and not by its number, because a reply is rendered block by block while it is
written.
Does not know: HTTP, how a preview is isolated (previews.py).
"""

from __future__ import annotations

import hashlib
from functools import cache

from markdown_it import MarkdownIt

from localllm.web.pages.chat.maths import add_maths

SVG_PAGE = (
    "<!doctype html><meta charset=utf-8><style>html,body{height:100%;margin:0}body{display:grid;place-items:center}"
    "svg{max-width:100%;max-height:100%}</style>\n"
)
"""Begins the page of an SVG block; an HTML block is a page by itself."""


def preview_button(language: str, source: str) -> str:
    """Return the button that shows a preview of a block (only with scripts); empty if the block has no preview."""
    if _kind(language, source) is None:
        return ""
    return (
        '<button class="code__copy" type="button" aria-expanded="false" '
        f'data-preview="{_digest(source)}">Preview</button>'
    )


def preview_page(text: str, digest: str) -> str | None:
    """Return the page of the block with this digest; None if the text has no such block. Blocking for a long text."""
    for token in _parser().parse(text):
        kind = _kind(token.info.strip().split(" ")[0], token.content) if token.type == "fence" else None
        if kind is not None and _digest(token.content) == digest:
            return token.content if kind == "html" else SVG_PAGE + token.content
    return None


def _kind(language: str, source: str) -> str | None:
    language = language.lower()
    if language == "xml" and source.lstrip().startswith("<svg"):
        return "svg"
    return language if language in ("html", "svg") else None


def _digest(source: str) -> str:
    return hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()[:20]


@cache
def _parser() -> MarkdownIt:
    """Return a parser that finds the blocks which the renderer finds, and does not parse their text."""
    return add_maths(MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"]).disable("inline"))
