"""Questions that every browser test asks of a page."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image, ImageChops

from tests.serving import ROOT

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


AGREED = ROOT / "docs" / "images"
LOOKS = ("-small", "-dark", "-wide")  # suffixes of pictures; those of 1280 px have none
CELL = 16  # pixels along a side of what is compared
SEEN = 16  # steps of 255 by which a cell's mean colour may differ unseen
MOST = 0.02  # share of the cells that may differ: 0.004 do at a second time, 0.02 to 0.04 with messages moved by 12 rem
MOST_LIVE = 0.2  # of a page that draws the figures of a machine, and of a dialog over what was scrolled


def changed_pictures(taken: Path, look: str) -> dict[str, float]:
    """Return which pictures of a tour are unlike those of docs/images that have this suffix: the share of their cells
    that differ, by name. A picture of another width differs whole."""
    changed = {}
    for agreed in AGREED.glob("*.png"):
        own = next((each for each in LOOKS if agreed.stem.endswith(each)), "")
        if own == look and (taken / agreed.name).exists():
            with Image.open(agreed) as one, Image.open(taken / agreed.name) as other:
                share = _difference(one.convert("RGB"), other.convert("RGB"))
            if share > (MOST_LIVE if agreed.stem.startswith(("dashboard", "tune", "link")) else MOST):
                changed[agreed.stem] = share
    return changed


def _difference(one: Image.Image, other: Image.Image) -> float:
    if one.width != other.width:
        return 1.0
    size, cells = (one.width // CELL, max(one.height, other.height) // CELL), []
    for each in (one, other):  # the lower part of a longer page is compared with the other's background
        whole = Image.new("RGB", (one.width, size[1] * CELL), each.getpixel((0, each.height - 1)))
        whole.paste(each)
        cells.append(whole.resize(size, Image.Resampling.BOX))
    counts = ImageChops.difference(*cells).convert("L").histogram()
    return sum(counts[SEEN:]) / sum(counts)


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
