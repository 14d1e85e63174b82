"""Render a model's Markdown as safe HTML, block by block, while it is still being written.

Raw HTML is never passed through. Links lead to http, https and mailto only, and images become links: the browser loads
nothing because a model wrote its address. `BlockSplitter` finds where a block ends, so each block is rendered once; the
open block is shown as plain text. As on GitHub, task lists are drawn and addresses become links; the size of a table is
limited. HTML and SVG blocks get a button for a preview (transfer/previews.py); a block is named by a digest of its text
and not by its number, because a reply is rendered block by block while it is written.
Does not know: HTTP, templates, the engine.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from html import escape
from typing import Any, Literal
from urllib.parse import urlsplit

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.rules_block import StateBlock
from markdown_it.rules_core import StateCore
from markdown_it.token import Token
from markdown_it.utils import OptionsDict
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_all_lexers, get_lexer_by_name

from localllm.web.pages.chat.markdown.maths import add_maths, maths_html

MOST_COLUMNS, MOST_CELLS = 200, 20_000
"""The largest table that is drawn as one."""
_TASK = re.compile(r"\[([ xX])\][ \t]+")
_ADDRESS = re.compile(r"(?<![A-Za-z0-9])https?://[^\s<>\"`\\|。，、；：！？）】」』]+")
_END = ".,;:!?'*_~"
"""Characters that belong to the sentence around an address when they end it."""


def add_rules(md: MarkdownIt) -> MarkdownIt:
    """Teach a parser both rules."""
    md.core.ruler.push("tasks", _tasks)
    md.core.ruler.push("addresses", lambda state: _addresses(state, md))
    return md


def bound_tables(md: MarkdownIt) -> MarkdownIt:
    """Have a parser show a table beyond the limits as text: thousands of cells take seconds to draw."""
    table = next(rule.fn for rule in md.block.ruler.__rules__ if rule.name == "table")

    def bounded(state: StateBlock, start: int, end: int, silent: bool) -> bool:
        if not table(state, start, end, True):
            return False
        columns = state.src.count("|", state.bMarks[start + 1], state.eMarks[start + 1]) or 1
        most_lines = MOST_CELLS // columns if columns <= MOST_COLUMNS else 0
        lines = next((n for n in range(min(end - start, most_lines + 1)) if state.isEmpty(start + n)), end - start)
        if lines > most_lines:
            return False
        return silent or table(state, start, end, silent)

    md.block.ruler.at("table", bounded, {"alt": ["paragraph", "reference"]})
    return md


def _tasks(state: StateCore) -> None:
    """Turn `[ ]` and `[x]` at the beginning of a list's item into a token `task`."""
    before = [Token("", "", 0), Token("", "", 0), *state.tokens]
    for item, paragraph, inline in zip(before, before[1:], before[2:], strict=False):
        children = inline.children
        if (item.type, paragraph.type) != ("list_item_open", "paragraph_open") or not children:
            continue
        mark = _TASK.match(children[0].content) if children[0].type == "text" else None
        if mark is not None:
            item.attrSet("class", "task")
            children[0].content = children[0].content[mark.end() :]
            children.insert(0, Token("task", "input", 0, content=mark[1].strip().lower()))


def _addresses(state: StateCore, md: MarkdownIt) -> None:
    """Turn addresses in the text outside of links into links."""
    for token in state.tokens:
        if token.children and any("://" in child.content for child in token.children):
            token.children = _with_links(token.children, md)


def _with_links(children: list[Token], md: MarkdownIt) -> list[Token]:
    found, depth = list[Token](), 0
    for child in children:
        depth += {"link_open": 1, "link_close": -1}.get(child.type, 0)
        found += _parts(child, md) if child.type == "text" and not depth else [child]
    return found


def _parts(token: Token, md: MarkdownIt) -> list[Token]:
    text, at, found = token.content, 0, list[Token]()
    for match in _ADDRESS.finditer(text):
        address = _trimmed(match[0])
        if not _has_host(address) or not md.validateLink(address):
            continue
        found += _plain(text[at : match.start()])
        found += [
            Token("link_open", "a", 1, {"href": md.normalizeLink(address)}),
            Token("text", "", 0, content=address),
            Token("link_close", "a", -1),
        ]
        at = match.start() + len(address)
    return [*found, *_plain(text[at:])]


def _plain(text: str) -> list[Token]:
    return [Token("text", "", 0, content=text)] if text else []


def _trimmed(address: str) -> str:
    """Return an address without the end of the sentence around it; brackets that it opens itself stay."""
    while address:
        last = address[-1]
        opener = {")": "(", "]": "[", "}": "{"}.get(last)
        if last not in _END and (opener is None or address.count(last) <= address.count(opener)):
            return address
        address = address[:-1]
    return address


def _has_host(address: str) -> bool:
    try:
        return bool(urlsplit(address).hostname)
    except ValueError:
        return False


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
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})[ \t]*(\S*)[^\n]*(?:\n|$)")
_CLOSED_BY_BLANK_LINE = ("paragraph_open", "table_open", "blockquote_open", "heading_open")


ABOVE = 2
"""Level of the heading that a reply is below: the name of its author."""


@dataclass(slots=True)
class LastHeading:
    """The last heading of a text that is drawn piece by piece."""

    level: int = ABOVE


def render_markdown(text: str, last: LastHeading | None = None) -> str:
    """Return the safe HTML of a whole text, or of a piece whose last heading before it is given and noted."""
    return str(_renderer().render(text, {"last": last or LastHeading()}))


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
    num_empty = sum(not line.strip() for line in source.splitlines())
    is_long = len(source) > MAX_HIGHLIGHT_CHARS or num_empty > MAX_EMPTY_LINES
    if language.lower() not in _coloured_names() or is_long:
        return escape(source)
    # Without nested lexers: a code block inside Markdown could name any language again.
    lexer = get_lexer_by_name(language, stripnl=False, handlecodeblocks=False)
    return str(highlight(source, lexer, HtmlFormatter(nowrap=True)))


@cache
def _coloured_names() -> frozenset[str]:
    """Return all names of the languages in `COLOURED`."""
    every = (names for _, names, _, _ in get_all_lexers(plugins=False))
    return frozenset(name.lower() for names in every if not COLOURED.isdisjoint(names) for name in names)


def _heading_open(
    self: RendererHTML, tokens: Sequence[Token], idx: int, options: OptionsDict, env: MutableMapping[str, Any]
) -> str:
    # Never more than one level below the heading before it, so that no level is left out.
    env["last"].level = min(6, int(tokens[idx].tag[1]) + ABOVE, env["last"].level + 1)
    return f"<h{env['last'].level}>"


def _heading_close(
    self: RendererHTML, tokens: Sequence[Token], idx: int, options: OptionsDict, env: MutableMapping[str, Any]
) -> str:
    return f"</h{env['last'].level}>\n"


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

    def open_block(self) -> tuple[Literal["text", "code"], str, str]:
        """Return the open block for display, and the language of a fenced block, which is shown without its first
        line.
        """
        fence = _FENCE.match(self.pending)
        if fence:
            return "code", self.pending[fence.end() :], fence[2][:32] or "text"
        return "text", self.pending.lstrip("\n"), ""

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
