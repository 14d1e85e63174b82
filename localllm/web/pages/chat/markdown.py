"""Render a model's Markdown as safe HTML, block by block, while it is still being written.

Raw HTML is never passed through. Links lead to http, https and mailto only, and images become links: the browser loads
nothing because a model wrote its address. `BlockSplitter` finds where a block ends, so each block is rendered once; the
open block is shown as plain text.
Does not know: HTTP, templates, the engine.
"""

from __future__ import annotations

import re
from collections.abc import Callable, MutableMapping, Sequence
from functools import cache, partial
from html import escape
from typing import Any, Literal
from urllib.parse import urlsplit

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markdown_it.utils import OptionsDict
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexer import Lexer
from pygments.lexers import get_all_lexers, get_lexer_by_name

from localllm.web.pages.chat.markdown_rules import add_rules, bound_tables
from localllm.web.pages.chat.maths import add_maths, maths_html
from localllm.web.pages.chat.preview_blocks import preview_button

MAX_HIGHLIGHT_CHARS = 4_000
MAX_EMPTY_LINES = 200
"""A code block with more empty lines is not highlighted: many lexers take time quadratic in their input, within one
regular expression that no other thread can interrupt. At this size the slowest of `COLOURED` takes half a second.
"""

COLOURED = frozenset(
    {
        *("bash", "c", "console", "cpp", "css", "dart", "diff", "docker", "go", "haskell", "html", "ini", "java"),
        *("javascript", "json", "kotlin", "latex", "lua", "make", "markdown", "perl", "php", "powershell", "python"),
        *("r", "ruby", "rust", "scala", "scss", "sql", "swift", "toml", "tsx", "typescript", "xml", "yaml"),
    }
)
"""Languages that are highlighted. A model's answer or an imported chat names the language, so it could select any lexer
of Pygments, and some take hours for 20,000 tabs. Before a language is added, run `pytest
tests/web/test_pages_markdown.py -m slow`, which times them all.
"""

MAX_HIGHLIGHTED_CHARS = 100_000
"""Most characters that are highlighted in one text: the markup for a megabyte of code would take ten."""

MAX_INLINE_CHARS = 20_000
"""A longer paragraph is shown without inline markup: matching its delimiters takes quadratic time."""

MAX_PENDING_CHARS = 8_000
"""A longer open block is not parsed again at each line, but when it has grown by an eighth."""

SCHEMES = ("http", "https", "mailto")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})[^\n]*(?:\n|$)")
_CLOSED_BY_BLANK_LINE = ("paragraph_open", "table_open", "blockquote_open", "heading_open")


def render_markdown(text: str) -> str:
    """Return the safe HTML of a whole text."""
    return str(_renderer().render(text))


@cache
def _renderer() -> MarkdownIt:
    md = bound_tables(MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"]))
    add_rules(add_maths(md))
    md.validateLink = _is_safe_link  # type: ignore[method-assign]
    md.inline.parse = partial(_bounded, md.inline.parse)  # type: ignore[method-assign]
    for rule in (
        *(_link_open, _image, _fence, _code_block, _heading_open, _heading_close, _table_open, _table_close),
        *(_maths_block, _maths_inline, _task),
    ):
        md.add_render_rule(rule.__name__.lstrip("_"), rule)
    md.add_render_rule("th_open", _cell_open)
    md.add_render_rule("td_open", _cell_open)
    return md


def _bounded(
    parse: Callable[..., list[Token]], text: str, md: MarkdownIt, env: MutableMapping[str, Any], tokens: list[Token]
) -> list[Token]:
    if len(text) <= MAX_INLINE_CHARS:
        return parse(text, md, env, tokens)
    tokens.append(Token("text", "", 0, content=text))
    return tokens


@cache
def _block_parser() -> MarkdownIt:
    """Return a parser that finds blocks and does not parse their text."""
    md = bound_tables(MarkdownIt("commonmark", {"html": False}).enable("table").disable("inline"))
    return add_maths(md, open_ended=True)


def _is_safe_link(url: str) -> bool:
    """Accept absolute links to the web or mail; refuse links that run or read something (javascript:, data:, file:),
    and links to this server.
    """
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
    """Return a link that names the image; the browser loads nothing."""
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
    return fenced_code(tokens[idx].content, tokens[idx].info.strip().split(" ")[0], env)


def _code_block(
    self: RendererHTML, tokens: Sequence[Token], idx: int, options: OptionsDict, env: MutableMapping[str, Any]
) -> str:
    return fenced_code(tokens[idx].content, "", env)


def _maths_block(
    self: RendererHTML, tokens: Sequence[Token], idx: int, options: OptionsDict, env: MutableMapping[str, Any]
) -> str:
    return maths_html(tokens[idx].content, display=True)


def _maths_inline(
    self: RendererHTML, tokens: Sequence[Token], idx: int, options: OptionsDict, env: MutableMapping[str, Any]
) -> str:
    return maths_html(tokens[idx].content, display=False)


def _task(
    self: RendererHTML, tokens: Sequence[Token], idx: int, options: OptionsDict, env: MutableMapping[str, Any]
) -> str:
    """Return the box of a task, which only shows whether the task is done."""
    state = 'checked aria-label="Done"' if tokens[idx].content else 'aria-label="Not done"'
    return f'<input class="task__box" type="checkbox" disabled {state}> '


def code_block(source: str, language: str) -> str:
    """Return a code block, for a reply's text that is not Markdown."""
    return fenced_code(source, language, {})


def fenced_code(source: str, language: str, env: MutableMapping[str, Any]) -> str:
    """Return a code block with its language, a switch for long lines and a copy button (both shown when
    scripts run).
    """
    name = escape(language[:32]) or "text"
    room = MAX_HIGHLIGHTED_CHARS - env.get("highlighted_chars", 0)
    if language and len(source) <= room:
        env["highlighted_chars"] = env.get("highlighted_chars", 0) + len(source)
    else:
        language = ""
    return (
        f'<div class="code"><div class="code__bar"><span class="code__language">{name}</span>'
        '<button class="code__copy" type="button" aria-pressed="false" data-wrap>Wrap</button>'
        f'{preview_button(language, source)}<button class="code__copy" type="button" data-copy>Copy</button></div>'
        f'<pre tabindex="0"><code>{_highlighted(source, language)}</code></pre></div>\n'
    )


def _highlighted(source: str, language: str) -> str:
    if language.lower() not in _coloured_names() or not _is_soon_coloured(source):
        return escape(source)
    return str(highlight(source, _lexer_of(language), HtmlFormatter(nowrap=True)))


def _lexer_of(language: str) -> Lexer:
    """Return the lexer without nested lexers: a code block inside Markdown could name any language again."""
    return get_lexer_by_name(language, stripnl=False, handlecodeblocks=False)


def _is_soon_coloured(source: str) -> bool:
    return len(source) <= MAX_HIGHLIGHT_CHARS and _num_empty_lines(source) <= MAX_EMPTY_LINES


def _num_empty_lines(source: str) -> int:
    return sum(not line.strip() for line in source.splitlines())


@cache
def _coloured_names() -> frozenset[str]:
    """Return all names of the languages in `COLOURED`."""
    every = (names for _, names, _, _ in get_all_lexers(plugins=False))
    return frozenset(name.lower() for names in every if not COLOURED.isdisjoint(names) for name in names)


def _heading_open(
    self: RendererHTML, tokens: Sequence[Token], idx: int, options: OptionsDict, env: MutableMapping[str, Any]
) -> str:
    return f"<h{_level(tokens[idx])}>"


def _heading_close(
    self: RendererHTML, tokens: Sequence[Token], idx: int, options: OptionsDict, env: MutableMapping[str, Any]
) -> str:
    return f"</h{_level(tokens[idx])}>\n"


def _level(token: Token) -> int:
    """Return the level of a heading; headings of a reply are below the page's own h1 and h2."""
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
    """Set the alignment as a class: the pages' content security policy allows no style attributes."""
    side = str(tokens[idx].attrs.pop("style", "")).removeprefix("text-align:")
    if side in ("center", "right"):
        tokens[idx].attrSet("class", f"align-{side}")
    return self.renderToken(tokens, idx, options, env)


class BlockSplitter:
    """Takes text as it arrives and returns the blocks that no further text can change."""

    def __init__(self) -> None:
        self.pending = ""  # the open block, and the text after it
        self._fence = ""  # the marks that close a fenced code block; empty outside of one
        self._looked_at = 0  # length of the open block when it was last parsed

    def push(self, text: str) -> str:
        """Add text; return the Markdown of the blocks that it finished, empty if there are none."""
        old_length = len(self.pending)
        self.pending += text
        if "\n" not in text or (self._fence and not self._fence_may_close(old_length)):
            return ""
        if self._looked_at > MAX_PENDING_CHARS and len(self.pending) < self._looked_at * 9 // 8:
            return ""
        end = self._closed_end()
        closed, self.pending = self.pending[:end], self.pending[end:]
        self._looked_at = len(self.pending)
        return closed

    def finish(self) -> str:
        """Return the rest at the end of the text."""
        closed, self.pending, self._fence = self.pending, "", ""
        return closed

    def open_block(self) -> tuple[Literal["text", "code"], str]:
        """Return the open block for display; a fenced block without its first line."""
        fence = _FENCE.match(self.pending)
        return ("code", self.pending[fence.end() :]) if fence else ("text", self.pending.lstrip("\n"))

    def _fence_may_close(self, old_length: int) -> bool:
        """Return whether a line that could close the fence arrived. This avoids parsing a long code
        block repeatedly.
        """
        start = self.pending.rfind("\n", 0, old_length) + 1
        return any(line.strip().startswith(self._fence) for line in self.pending[start:].split("\n"))

    def _closed_end(self) -> int:
        """Return where the open block starts in `pending`, from complete lines only."""
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
    """Return whether no further line can belong to this block."""
    assert block.map is not None
    start, end = block.map
    if block.type == "fence":
        return end - start > 1 and _closes(lines[end - 1], block.markup)
    if block.type == "maths_block":
        return bool(block.markup)
    if block.type == "hr" or (block.type == "heading_open" and block.markup.startswith("#")):
        return True
    return block.type in _CLOSED_BY_BLANK_LINE and end < len(lines)


def _closes(line: str, markup: str) -> bool:
    """Return whether a line closes the fence that `markup` opened."""
    line = line.strip()
    return line.startswith(markup) and not line.strip(markup[0])
