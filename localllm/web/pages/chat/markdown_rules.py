"""Two rules beside Markdown's own, as GitHub has them: task lists, and addresses that are links without brackets; and a
limit on the size of tables.

Does not know: how links and check boxes are drawn (markdown.py).
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock
from markdown_it.rules_core import StateCore
from markdown_it.token import Token

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
