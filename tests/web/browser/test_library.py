"""The Models page in a real Chromium: figures that move, the question before a delete, every part for everybody."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from localllm.models.library.hub.plan import plan_download
from localllm.models.library.hub.pull import pull
from tests.hub import conftest as hub_fixtures
from tests.hub.local_hub import LocalHub, Trouble, wait_until_stalled
from tests.web.browser.looks import overflow, small_targets
from tests.web.library_server import LibraryServer, Loads
from tests.web.live_server import LiveServer

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.slow

hub, checkpoint = hub_fixtures.hub, hub_fixtures.checkpoint
WEIGHTS = "model.safetensors"


@pytest.fixture
def server(hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    Loads(tmp_path / "made", monkeypatch)
    with LibraryServer() as live:
        yield live


def test_a_model_is_found_fetched_loaded_and_deleted(
    open_page: Callable[..., Page], hub: LocalHub, tiny_llama_path: Path
) -> None:
    hub.add_repo("org/tiny", tiny_llama_path)
    page = open_page("/library/discover")
    page.keyboard.type("tiny")
    page.keyboard.press("Enter")
    page.locator(".tag--fit-fits").wait_for()
    hub.troubles[WEIGHTS] = Trouble(stall_after=200_000)
    page.get_by_role("button", name="Download org/tiny").click()
    wait_until_stalled(hub)
    page.locator(".shelf__facts:has-text('files')").wait_for()
    assert page.locator("#library-tabs .tabs__count").inner_text().startswith("1")
    page.get_by_role("button", name="Pause").click()
    page.locator(".tag--paused").wait_for()
    hub.go_on.set()
    page.get_by_role("button", name="Resume").click()
    page.locator(".tag--done").wait_for()
    page.get_by_role("button", name="Load org/tiny").click()
    page.wait_for_url("**/library")
    page.locator(".shelf__row:has-text('Hugging Face cache') .tag--ready").wait_for()
    page.get_by_role("button", name="Unload tiny").click()
    page.get_by_role("link", name="Delete… tiny").click()
    question = page.locator("#question-dialog[open]")
    question.get_by_text("This frees").wait_for()
    page.keyboard.press("Escape")
    question.wait_for(state="hidden")
    page.get_by_role("link", name="Delete… tiny").click()
    question.get_by_role("button").click()
    page.get_by_text("was deleted").wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_part_is_for_everybody(
    open_page: Callable[..., Page], hub: LocalHub, checkpoint: Path, tiny_llama_path: Path, scheme: str
) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    hub.add_repo("org/tiny", tiny_llama_path)
    hub.add_repo("org/tiny-closed", checkpoint, gated=True)
    pull(plan_download("org/tiny"))
    page = open_page("/library", color_scheme=scheme, bypass_csp=True)
    page.request.post(page.url.replace("/library", "/library/downloads"), form={"model": "org/tiny-closed"})
    base = page.url.removesuffix("/library")
    for path in (
        "/library/discover?q=tiny",
        "/library/downloads",
        "/library/model/org/tiny",
        "/library/delete?model=org/tiny",
    ):
        page.goto(base + path)
        if "discover" in path:
            page.locator(".tag--fit-fits").wait_for()
        found = axe.Axe().run(page).response["violations"]
        grave = [each for each in found if each["impact"] in ("moderate", "serious", "critical")]
        assert [(path, each["id"], [node["html"][:120] for node in each["nodes"]][:5]) for each in grave] == []
        for width in (320, 768) if scheme == "light" else ():
            page.set_viewport_size({"width": width, "height": 740})
            assert (path, overflow(page), small_targets(page)) == (path, 0, [])
