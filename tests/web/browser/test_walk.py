"""Every page of the rail, in both themes and at four widths: no finding of axe-core, nothing too wide or too small."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from localllm.web.pages import PAGES as REGISTERED
from tests.web.browser.looks import overflow, small_targets

axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
if TYPE_CHECKING:
    from playwright.sync_api import Page

WIDTHS = (320, 360, 768, 1280)
PAGES = [page.entry.url for page in REGISTERED] + [
    "/memory",
    "/projects",
    "/settings/tools",
    "/dev/patterns",
    "/c/unknown",
]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("path", PAGES)
def test_page_is_for_everybody(open_page: Callable[..., Page], path: str, scheme: str) -> None:
    missing = "Failed to load resource: the server responded with a status of 404 (Not Found)"
    page = open_page(path, color_scheme=scheme, bypass_csp=True, expect=missing if "unknown" in path else "")
    asked = {"runOnly": ["color-contrast"]} if scheme == "dark" else {}  # all else is the same in both themes
    found = axe.Axe().run(page, options=asked).response["violations"]
    # Partials are there without their list, and several times.
    alone = ("listitem", "landmark-unique") if path == "/dev/patterns" else ()
    grave = [
        each for each in found if each["impact"] in ("moderate", "serious", "critical") and each["id"] not in alone
    ]
    assert [(each["id"], [node["html"][:120] for node in each["nodes"]][:5]) for each in grave] == []
    if scheme == "dark":
        return
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 740})
        assert overflow(page) == 0, width
        if path != "/dev/patterns":
            assert small_targets(page) == [], width
