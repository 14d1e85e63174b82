"""The frame in a real Chromium: the menu of a phone, the banner, and a first key from its making to the log out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from localllm.config.settings import ServerConfig, Settings
from localllm.web.access.keys import keys_path
from localllm.web.pages import PAGES
from tests.web.browser.looks import opened, overflow, small_targets, until
from tests.web.live_server import LiveServer
from tests.web.pages_stub import StubModel

axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

MARKED = "[...document.querySelectorAll('.nav [aria-current]')].filter(e => e.checkVisibility())"
FOCUS = "document.activeElement"


def look(page: Page) -> None:
    """Nothing is too wide or too low, and axe-core finds nothing serious."""
    assert overflow(page) == 0
    assert small_targets(page) == []
    found = axe.Axe().run(page).response["violations"]
    assert [
        (each["id"], each["nodes"]) for each in found if each["impact"] in ("moderate", "serious", "critical")
    ] == []


def test_a_phone_reaches_each_page_in_two_taps_and_sees_where_it_is(open_page: Callable[..., Page]) -> None:
    page = open_page(width=360, height=740, has_touch=True, is_mobile=True, bypass_csp=True)
    assert page.evaluate("document.querySelector('#main').getBoundingClientRect().top") <= 92
    more = page.locator(".nav__more")
    for entry in [each.entry for each in PAGES]:
        link = page.locator(".nav").get_by_role("link", name=entry.title, exact=True)
        if not link.is_visible():
            more.tap()
        with page.expect_navigation():
            link.tap()
        page.locator(f".nav__link[aria-current=page]:has-text('{entry.title}')").wait_for(state="attached")
        assert page.evaluate(f"{MARKED}.map(e => e.textContent.trim())") in ([entry.title], ["More"])
        inside = f"{MARKED}.every(e => e.getBoundingClientRect().right <= innerWidth)"
        assert page.evaluate(inside), entry.title
    more.focus()
    page.keyboard.press("Enter")
    page.locator("#nav-menu:popover-open").wait_for()
    page.keyboard.press("Tab")
    assert page.evaluate(f"{FOCUS}.textContent.trim()") == "Tune"
    look(page)
    page.keyboard.press("Escape")
    page.locator("#nav-menu").wait_for(state="hidden")
    assert page.evaluate(f"{FOCUS}.className").startswith("nav__link nav__more")


def test_the_menu_opens_without_scripts(open_page: Callable[..., Page]) -> None:
    page = open_page(width=360, height=740, java_script_enabled=False)
    page.click(".nav__more")
    page.get_by_role("link", name="Settings", exact=True).click()
    page.wait_for_url("**/settings")


def test_the_banner_covers_nothing(open_page: Callable[..., Page]) -> None:
    """The page is told what the script is told by a server that does not answer."""
    page = open_page("/", bypass_csp=True)
    page.evaluate("document.getElementById('live').remove()")  # which would find the server and hide the banner
    for width in (360, 1280):
        page.set_viewport_size({"width": width, "height": 740})
        page.evaluate("document.getElementById('connection').hidden = false")
        bottom = page.evaluate("document.getElementById('connection').getBoundingClientRect().bottom")
        assert bottom > 40
        for part in (".brand", "#status-pill", "#main", ".rail"):
            top = page.evaluate(f"document.querySelector('{part}').getBoundingClientRect().top")
            assert top >= bottom, (width, part)
        assert page.evaluate("document.documentElement.scrollHeight <= innerHeight")
        look(page)


@pytest.fixture
def keyless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    with LiveServer(StubModel(), Settings(server=ServerConfig(port=0))) as live:  # type: ignore[arg-type]
        yield live


@pytest.mark.parametrize("width", [360, pytest.param(1280, marks=pytest.mark.slow)])
def test_a_first_key_is_copied_and_opens_the_server_again(chromium: Browser, keyless: LiveServer, width: int) -> None:
    with opened(chromium, width, 740, bypass_csp=True) as page:
        page.set_default_timeout(10_000)
        page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=keyless.url)
        page.goto(keyless.link())
        page.goto(f"{keyless.url}/settings")
        find_and_change_a_setting(page)
        page.goto(f"{keyless.url}/settings")
        page.fill("#key-name", "laptop")
        page.get_by_role("button", name="Create a key").click()
        page.locator("h1:text('Key “laptop” is made')").wait_for()
        look(page)
        page.get_by_role("button", name="Copy").click()
        page.get_by_role("button", name="Copied").wait_for()
        key = page.evaluate("navigator.clipboard.readText()")
        assert key == page.locator("#new-key").inner_text()
        page.get_by_role("link", name="Done, it is saved").click()
        assert page.input_value("#key-scope") == "infer"
        if width < 720:
            page.click(".nav__more")
        page.get_by_role("button", name="Log out").click()
        page.wait_for_url("**/login")
        assert page.locator(".nav, .header").count() == 0
        look(page)
        page.keyboard.type("sk-")
        page.get_by_role("button", name="Show").click()
        assert page.get_attribute("#key", "type") == "text"
        page.fill("#key", key)
        page.keyboard.press("Enter")
        page.wait_for_url("**/")
        assert keys_path().exists()


def find_and_change_a_setting(page: Page) -> None:
    assert page.locator(".settings__group[open]").count() == 0
    page.locator("#find").press_sequentially("max-num-seqs")
    until(page, "document.querySelectorAll('.settings__group').length === 1")
    look(page)
    page.get_by_role("link", name="Change max_num_seqs").click()
    assert page.input_value("#setting-value") == "64"
    assert page.get_by_role("button", name="Remove the line from the file").count() == 0
    page.fill("#setting-value", "8")
    page.get_by_role("button", name="Preview the line").click()
    page.get_by_role("button", name="Write the line").click()
    page.get_by_text("The change takes effect at the next start.").wait_for()
    look(page)


@pytest.mark.parametrize(("motion", "expected"), [("no-preference", ["appear 120"]), ("reduce", [])])
def test_what_comes_upon_the_page_fades_in_unless_motion_is_reduced(
    open_page: Callable[..., Page], motion: str, expected: list[str]
) -> None:
    page = open_page(reduced_motion=motion)
    running = "e => e.getAnimations().map(a => `${a.animationName} ${a.effect.getTiming().duration}`)"
    assert page.evaluate(f"(() => {{ help.showModal(); return ({running})(help) }})()") == expected
    page.keyboard.press("Escape")
    page.fill("#composer-message", "hello")
    shown = page.evaluate(
        f"""new Promise(done => {{
            new MutationObserver((_, observer) => {{
                observer.disconnect();
                done(({running})(document.querySelector(".message--sending")));
            }}).observe(document.querySelector("#messages"), {{childList: true}});
            document.querySelector("#composer").requestSubmit(document.querySelector("[data-send]")); }})"""
    )
    assert shown == expected
    page.wait_for_selector(".figures")
