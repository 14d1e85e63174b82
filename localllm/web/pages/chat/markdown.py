"""Markdown from a model, made safe HTML block by block while it is still being written.

Raw HTML is never passed through, links lead to http, https and mailto only, and images become a link: nothing is
fetched from anywhere because a model wrote its address. `BlockSplitter` finds where a block has closed, so each
block is rendered once; what is still open is shown as plain text.
Does not know: HTTP, templates, the engine.
"""

from __future__ import annotations

import re
from collections.abc import MutableMapping, Sequence
from functools import cache
from html import escape
from typing import Any, Literal
from urllib.parse import urlsplit

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markdown_it.utils import OptionsDict
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

MAX_HIGHLIGHT_CHARS = 20_000
"""Above this a code block stays uncoloured: some lexers are slow on long or hostile input."""

SCHEMES = ("http", "https", "mailto")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})[^\n]*(?:\n|$)")
_CLOSED_BY_BLANK_LINE = ("paragraph_open", "table_open", "blockquote_open", "heading_open")


def render_markdown(text: str) -> str:
    """Safe HTML of a whole text."""
    return str(_renderer().render(text))


@cache
def _renderer() -> MarkdownIt:
    md = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    md.validateLink = _is_safe_link  # type: ignore[method-assign]
    for rule in (_link_open, _image, _fence, _code_block, _heading_open, _heading_close, _table_open, _table_close):
        md.add_render_rule(rule.__name__.lstrip("_"), rule)
    md.add_render_rule("th_open", _cell_open)
    md.add_render_rule("td_open", _cell_open)
    return md


@cache
def _block_parser() -> MarkdownIt:
    """Finds blocks, leaves their text alone."""
    return MarkdownIt("commonmark", {"html": False}).enable("table").disable("inline")


def _is_safe_link(url: str) -> bool:
    """Absolute links to the web or mail, nothing that runs or reads (javascript:, data:, file:) or is ours."""
    try:
        return urlsplit(url.strip()).scheme.lower() in SCHEMES
    except ValueError:
        return False


def _link_open(
    self: RendererHTML, tokens: Sequence[Token], idx: int, options: OptionsDict, env: MutableMapping[str, Any]
) -> str:
    tokens[idx].attrSet("rel", "noopener noreferrer nofollow")
    tokens[idx].attrSet("target", "_blank")
    return self.renderToken(tokens, idx, options, env)


def _image(
    self: RendererHTML, tokens: Sequence[Token], idx: int, options: OptionsDict, env: MutableMapping[str, Any]
) -> str:
    """A chip that says what the image is and leads there; the browser loads nothing."""
    token = tokens[idx]
    url = str(token.attrGet("src") or "")
    label = self.renderInlineAsText(token.children or [], options, env) or url
    return (
        f'<a class="chip" href="{escape(url)}" rel="noopener noreferrer nofollow" target="_blank">'
        f"Image: {escape(label)}</a>"
    )


def _fence(
    self: RendererHTML, tokens: Sequence[Token], idx: int, options: OptionsDict, env: MutableMapping[str, Any]
) -> str:
    return _code(tokens[idx].content, tokens[idx].info.strip().split(" ")[0])


def _code_block(
    self: RendererHTML, tokens: Sequence[Token], idx: int, options: OptionsDict, env: MutableMapping[str, Any]
) -> str:
    return _code(tokens[idx].content, "")


def _code(source: str, language: str) -> str:
    """A code block with its language and a copy button (shown when scripts run)."""
    name = escape(language[:32]) or "text"
    return (
        f'<div class="code"><div class="code__bar"><span class="code__language">{name}</span>'
        '<button class="code__copy" type="button" data-copy>Copy</button></div>'
        f'<pre tabindex="0"><code>{_highlighted(source, language)}</code></pre></div>\n'
    )


def _highlighted(source: str, language: str) -> str:
    if not language or len(source) > MAX_HIGHLIGHT_CHARS:
        return escape(source)
    try:
        lexer = get_lexer_by_name(language, stripnl=False)
    except ClassNotFound:
        return escape(source)
    return str(highlight(source, lexer, HtmlFormatter(nowrap=True)))


def _heading_open(
    self: RendererHTML, tokens: Sequence[Token], idx: int, options: OptionsDict, env: MutableMapping[str, Any]
) -> str:
    return f"<h{_level(tokens[idx])}>"


def _heading_close(
    self: RendererHTML, tokens: Sequence[Token], idx: int, options: OptionsDict, env: MutableMapping[str, Any]
) -> str:
    return f"</h{_level(tokens[idx])}>\n"


def _level(token: Token) -> int:
    """Headings of a reply sit below the page's own h1 and h2."""
    return min(6, int(token.tag[1]) + 2)


def _table_open(
    self: RendererHTML, tokens: Sequence[Token], idx: int, options: OptionsDict, env: MutableMapping[str, Any]
) -> str:
    return '<div class="table-scroll" tabindex="0"><table>\n'


def _table_close(
    self: RendererHTML, tokens: Sequence[Token], idx: int, options: OptionsDict, env: MutableMapping[str, Any]
) -> str:
    return "</table></div>\n"


def _cell_open(
    self: RendererHTML, tokens: Sequence[Token], idx: int, options: OptionsDict, env: MutableMapping[str, Any]
) -> str:
    """Alignment as a class: the pages' content security policy allows no style attributes."""
    side = str(tokens[idx].attrs.pop("style", "")).removeprefix("text-align:")
    if side in ("center", "right"):
        tokens[idx].attrSet("class", f"align-{side}")
    return self.renderToken(tokens, idx, options, env)


class BlockSplitter:
    """Takes text as it arrives and gives back the blocks that nothing further can change."""

    def __init__(self) -> None:
        self.pending = ""  # the open block, and what came after it
        self._fence = ""  # the marks that close it, while it is a fenced code block

    def push(self, text: str) -> str:
        """The Markdown that closed with this text; empty while the block is open."""
        old_length = len(self.pending)
        self.pending += text
        if "\n" not in text or (self._fence and not self._fence_may_close(old_length)):
            return ""
        end = self._closed_end()
        closed, self.pending = self.pending[:end], self.pending[end:]
        return closed

    def finish(self) -> str:
        """What is left when the text ends."""
        closed, self.pending, self._fence = self.pending, "", ""
        return closed

    def open_block(self) -> tuple[Literal["text", "code"], str]:
        """The open block for display: a fenced block without its first line."""
        fence = _FENCE.match(self.pending)
        return ("code", self.pending[fence.end() :]) if fence else ("text", self.pending.lstrip("\n"))

    def _fence_may_close(self, old_length: int) -> bool:
        """Whether a line that could end the fence arrived: parsing a long code block again and again is wasted."""
        start = self.pending.rfind("\n", 0, old_length) + 1
        return any(line.strip().startswith(self._fence) for line in self.pending[start:].split("\n"))

    def _closed_end(self) -> int:
        """Where the open block starts in `pending`, looking at complete lines only."""
        lines = self.pending.split("\n")[:-1]
        tokens = _block_parser().parse("\n".join(lines) + "\n")
        blocks = [token for token in tokens if token.level == 0 and token.nesting >= 0 and token.map]
        if not blocks:
            return 0
        last = blocks[-1]
        assert last.map is not None
        open_from = len(lines) if _is_closed(last, lines) else last.map[0]
        self._fence = last.markup if last.type == "fence" and open_from < len(lines) else ""
        return sum(len(line) + 1 for line in lines[:open_from])


def _is_closed(block: Token, lines: list[str]) -> bool:
    """Whether no further line can belong to this block."""
    assert block.map is not None
    start, end = block.map
    if block.type == "fence":
        return end - start > 1 and _closes(lines[end - 1], block.markup)
    if block.type == "hr" or (block.type == "heading_open" and block.markup.startswith("#")):
        return True
    return block.type in _CLOSED_BY_BLANK_LINE and end < len(lines)


def _closes(line: str, markup: str) -> bool:
    """Whether a line is the end of the fence that `markup` began."""
    line = line.strip()
    return line.startswith(markup) and not line.strip(markup[0])
