"""Questions that every browser test asks of a page."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


STILL = {"reduced_motion": "reduce"}
"""Nothing fades in: axe-core takes what is half transparent for text of too little contrast."""


@contextmanager
def opened(chromium: Browser, width: int, height: int, **options: Any) -> Iterator[Page]:
    """A page that may not complain. It is closed before its server is: one that looks for it would."""
    options = {**STILL, **options}
    context = chromium.new_context(viewport={"width": width, "height": height}, **options)
    page, complaints = context.new_page(), list[str]()
    page.on("console", lambda note: complaints.append(note.text) if note.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    yield page
    context.close()
    assert complaints == []


def overflow(page: Page) -> int:
    return int(page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


def until(page: Page, expression: str) -> None:
    """Playwright's own wait_for_function needs eval, which the pages' policy forbids."""
    for _ in range(200):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"never true: {expression}")


def small_targets(page: Page) -> list[str]:
    """Controls that are too low for a finger, or where there is a mouse, for that."""
    script = """(() => { const least = matchMedia("(pointer: fine)").matches ? 32 : 44;
        return [...document.querySelectorAll('a, button, summary, select, input:not([type=hidden])')]
        .filter(e => e.checkVisibility() && !e.matches('.skip, .hidden, .text-link, .prose *, .field__note *'))
        .filter(e => !['checkbox', 'radio'].includes(e.type))
        .filter(e => e.getBoundingClientRect().height < least).map(e => e.outerHTML.slice(0, 120)) })()"""
    found: list[str] = page.evaluate(script)
    return found
