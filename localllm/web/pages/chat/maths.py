"""Find a model's maths: `$…$`, `\\(…\\)`, and on lines of their own `$$…$$`, `\\[…\\]`.

The result is an element with the TeX, which a script renders (static/messages.js); without scripts the TeX is shown.
A dollar sign is a delimiter only if it touches the text inside and no text outside: "$5 and $6" stays text.
Does not know: TeX, Markdown's other rules.
"""

from __future__ import annotations

from functools import lru_cache
from html import escape

from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock
from markdown_it.rules_inline import StateInline

MAX_MATH_CHARS = 5_000
"""A longer formula stays text, because rendering it would take long."""

MAX_MATH_LINES = 60
"""Most lines of a display formula; the search for its end stops there."""

DISPLAYS = {"$$": "$$", "\\[": "\\]"}


def add_maths(md: MarkdownIt, *, open_ended: bool = False) -> MarkdownIt:
    """Teach a parser to find maths. `open_ended`: also accept a display formula that is not closed yet."""

    def block(state: StateBlock, start: int, end: int, silent: bool) -> bool:
        return _block(state, start, end, silent, open_ended)

    md.block.ruler.before("fence", "maths", block, {"alt": ["paragraph", "reference", "blockquote", "list"]})
    md.inline.ruler.before("escape", "maths", _inline)
    return md


def maths_html(tex: str, *, display: bool) -> str:
    """Return the element that a script renders; its text is the TeX."""
    if display:
        return f'<div class="maths maths--display" tabindex="0" data-maths="display">{escape(tex.strip())}</div>\n'
    return f'<span class="maths" data-maths="inline">{escape(tex.strip())}</span>'


def _block(state: StateBlock, start: int, end: int, silent: bool, open_ended: bool) -> bool:
    """Parse a display formula on lines of its own. TeX allows no blank line in it, so with one it is plain text."""
    if state.is_code_block(start):
        return False
    first = _line(state, start)
    closer = DISPLAYS.get(first[:2])
    if closer is None:
        return False
    may_be_open = open_ended and end - start <= MAX_MATH_LINES
    if not may_be_open and _last(state.src, closer) < state.bMarks[start] + 2:
        return False
    line, text = start, first[2:]
    while not text.rstrip().endswith(closer):
        line += 1
        if line >= end and may_be_open:
            break
        if line >= end or line - start > MAX_MATH_LINES or state.isEmpty(line):
            return False
        text += "\n" + _line(state, line)
    closed = text.rstrip().endswith(closer)
    tex = text.rstrip().removesuffix(closer)
    if closer in tex or (closed and not tex.strip()) or len(tex) > MAX_MATH_CHARS:
        return False
    if not silent:
        token = state.push("maths_block", "div", 0)
        token.content, token.markup, token.block = tex, closer if closed else "", True
        token.map = [start, min(line + 1, end)]
        state.line = min(line + 1, end)
    return True


def _line(state: StateBlock, line: int) -> str:
    return state.src[state.bMarks[line] + state.tShift[line] : state.eMarks[line]]


def _inline(state: StateInline, silent: bool) -> bool:
    source, at = state.src, state.pos
    opener = source[at : at + 2]
    if opener in ("\\(", "\\[", "$$"):
        closer = {"\\(": "\\)"}.get(opener) or DISPLAYS[opener]
        end = _find(source, closer, at + 2)
    elif opener[:1] == "$":
        opener = closer = "$"
        end = _end_of_dollars(source, at)
    else:
        return False
    tex = source[at + len(opener) : end] if end >= 0 else ""
    if not tex.strip() or len(tex) > MAX_MATH_CHARS:
        return False
    if not silent:
        token = state.push("maths_inline", "span", 0)
        token.content, token.markup = tex, opener
    state.pos = end + len(closer)
    return True


def _end_of_dollars(source: str, at: int) -> int:
    """Return the position of the closing dollar, or -1. Only the next dollar is considered, so that prices and shell
    variables cost no search.
    """
    before, inside = source[at - 1 : at], source[at + 1 : at + 2]
    if not inside or inside.isspace() or before.isalnum() or before == "$":
        return -1
    end = _find(source, "$", at + 1)
    while end > 0 and source[end - 1] == "\\":
        end = _find(source, "$", end + 1)
    if end < 0 or source[end - 1].isspace() or source[end + 1 : end + 2].isalnum() or source[end + 1 : end + 2] == "$":
        return -1
    return end


def _find(source: str, closer: str, start: int) -> int:
    """Return what `str.find` does, but search an unclosed formula only once and not again from every opener."""
    return source.find(closer, start) if start <= _last(source, closer) else -1


@lru_cache(maxsize=8)
def _last(source: str, closer: str) -> int:
    return source.rfind(closer)
