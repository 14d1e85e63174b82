"""Questions that every browser test asks of a page."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page


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
    """Controls that are too low for a finger."""
    script = """[...document.querySelectorAll('a, button, summary, select, input:not([type=hidden])')]
        .filter(e => e.checkVisibility() && !e.matches('.skip, .hidden, .text-link, .prose *, .field__note *'))
        .filter(e => !['checkbox', 'radio'].includes(e.type))
        .filter(e => e.getBoundingClientRect().height < 44).map(e => e.outerHTML.slice(0, 120))"""
    found: list[str] = page.evaluate(script)
    return found
