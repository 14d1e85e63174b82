"""A person's own message as HTML: fenced code blocks and inline code are drawn, and all else stays as it was typed.

Does not know: Markdown's other rules, HTTP, templates.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from typing import Any

from localllm.web.pages.chat.markdown import fenced_code
from localllm.web.pages.chat.markdown_stream import HTMLCache

MAX_KEPT_CHARS = 2_000_000
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})([^`\n]*)\n?")
_RUN = re.compile("`+")


def user_html(text: str) -> str:
    """Return the safe HTML of a message. Line breaks of its text stay line breaks; the style sheet shows them."""
    env: dict[str, Any] = {}
    parts = (_code(body, language, env) if is_code else _text(body) for is_code, language, body in _parts(text))
    return "".join(parts)


def _parts(text: str) -> Iterator[tuple[bool, str, str]]:
    """Yield the parts of a text: whether it is code, its language, and its lines. A fence that is not closed goes on to
    the end.
    """
    lines, plain, at = text.splitlines(keepends=True), list[str](), 0
    while at < len(lines):
        fence = _FENCE.fullmatch(lines[at])
        if fence is None:
            plain.append(lines[at])
            at += 1
            continue
        end = next((n for n in range(at + 1, len(lines)) if _closes(lines[n], fence[1])), len(lines))
        if plain:
            yield False, "", "".join(plain)
        yield True, fence[2].strip().split(" ")[0], "".join(lines[at + 1 : end])
        plain, at = [], end + 1
    if plain:
        yield False, "", "".join(plain)


def _closes(line: str, opener: str) -> bool:
    mark = line.strip()
    return mark.startswith(opener) and not mark.strip(opener[0]) and len(line) - len(line.lstrip(" ")) < 4


def _code(source: str, language: str, env: dict[str, Any]) -> str:
    return fenced_code(source, language, env).rstrip("\n")


def _text(text: str) -> str:
    return "".join(_line(line) for line in text.splitlines(keepends=True))


def _line(line: str) -> str:
    """Return a line of text; what stands between two equal runs of backticks is code."""
    runs, closing, after = [run.span() for run in _RUN.finditer(line)], dict[int, int](), dict[int, int]()
    for number in reversed(range(len(runs))):
        length = runs[number][1] - runs[number][0]
        if length in after:
            closing[number] = after[length]
        after[length] = number
    found, at, number = list[str](), 0, 0
    while number < len(runs):
        if number in closing:
            start, end = runs[number], runs[closing[number]]
            found += [escape(line[at : start[0]]), f"<code>{escape(line[start[1] : end[0]])}</code>"]
            at, number = end[1], closing[number]
        number += 1
    return "".join([*found, escape(line[at:])])


cached_user_html = HTMLCache(MAX_KEPT_CHARS, user_html)
