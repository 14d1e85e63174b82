"""Prompts, projects, the list of chats and the list behind Ctrl K in a real Chromium, by keyboard alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.web.browser.harness import Keyboard, finishing, say
from tests.web.browser.looks import overflow, small_targets, until
from tests.web.harness import browser_of, new_project
from tests.web.live_server import LiveServer
from tests.web.pages_stub import StubModel

if TYPE_CHECKING:
    from playwright.sync_api import Page

Open = Callable[..., "Page"]


@pytest.fixture(autouse=True)
def tidy(model: StubModel, server: LiveServer) -> Iterator[None]:
    model.client.every_s = 0.001
    yield
    with browser_of(server) as browser:
        browser.post("/chats/wipe", data={"sure": "1"})


def check(page: Page) -> None:
    """No finding of axe-core, nothing too wide, nothing too small."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    found = axe.Axe().run(page).response["violations"]
    grave = [each for each in found if each["impact"] in ("moderate", "serious", "critical")]
    assert [(each["id"], [node["html"][:160] for node in each["nodes"]][:5]) for each in grave] == []
    for width in (360, 768, 1280):
        page.set_viewport_size({"width": width, "height": 740})
        assert overflow(page) == 0, width
        assert small_targets(page) == [], width


def value(page: Page) -> str:
    return page.input_value("#composer-message")


def test_a_prompt_is_chosen_filled_and_sent_by_keyboard(open_page: Open, server: LiveServer) -> None:
    with browser_of(server) as browser:
        browser.post("/prompts", data={"name": "Translate", "text": "Into {{language}}:\n{{text}}"})
        browser.post("/prompts", data={"name": "Tidy up", "text": "Make a list", "system": "Be tidy."})
    page = open_page(bypass_csp=True)
    keys = page.keyboard
    keys.type("/t")
    page.wait_for_selector("#prompt-1")
    assert page.get_attribute("#composer-message", "aria-activedescendant") == "prompt-0"
    check(page)
    keys.press("ArrowDown")
    until(page, "document.querySelector('#prompt-1').ariaSelected === 'true'")
    keys.press("ArrowDown")
    until(page, "document.querySelector('#prompt-0').ariaSelected === 'true'")
    keys.press("Escape")
    until(page, "!document.querySelector('#prompt-0')")
    assert value(page) == "/t"
    keys.type("i")
    page.wait_for_selector("#prompt-0:has-text('Tidy up')")
    keys.press("Enter")
    until(page, "document.querySelector('#composer-message').value === 'Make a list'")
    assert page.input_value("#system") == "Be tidy."
    page.fill("#composer-message", "")
    keys.type("/tran")
    page.wait_for_selector("#prompt-0:has-text('Translate')")
    keys.press("Enter")
    page.wait_for_selector("#manage[open] #value-0")
    until(page, "document.activeElement.id === 'value-0'")
    check(page)
    keys.type("French")
    keys.press("Tab")
    keys.type("a tree")
    page.locator("#manage").get_by_role("button", name="Put into the message").focus()
    keys.press("Enter")
    until(page, "document.querySelector('#composer-message').value === 'Into French:\\na tree'")
    until(page, "!document.querySelector('#manage').open")
    assert page.input_value("#system") == "Be tidy."
    with finishing(page):
        keys.press("Enter")
    assert page.locator(".message__text").inner_text() == "Into French:\na tree"
    keys.type("/nothing like it")
    page.wait_for_timeout(150)
    with finishing(page):
        keys.press("Enter")  # no prompt is called that, so it is a message
    page.locator(".message--user").nth(1).wait_for()
    keys.press("ArrowUp")
    until(page, "document.activeElement.value === '/nothing like it'")


def test_the_palette_opens_everything_on_every_page(open_page: Open) -> None:
    page = open_page(bypass_csp=True)
    keys = page.keyboard
    say(page, "about zebras")
    page.goto(page.url.partition("/c/")[0] + "/dashboard")
    keys.press("Control+k")
    page.wait_for_selector("#palette-0[aria-selected=true]")
    until(page, "document.activeElement.id === 'palette-query'")
    check(page)
    keys.press("ArrowUp")
    assert page.locator("[role=option]").last.get_attribute("aria-selected") == "true"
    keys.type("zebra")
    page.wait_for_selector("#palette-0:has-text('about zebras')")
    until(page, "document.activeElement.getAttribute('aria-activedescendant') === 'palette-0'")
    keys.press("Enter")
    page.wait_for_url("**/c/*")
    keys.press("Control+Shift+O")
    page.wait_for_url(lambda url: url.endswith("/"))
    keys.press("Control+k")
    page.wait_for_selector("#palette-0")
    keys.type("shortcuts")
    page.wait_for_selector("#palette-0:has-text('Keyboard shortcuts')")
    keys.press("Enter")
    page.wait_for_selector("#help[open]")
    keys.press("Escape")
    page.wait_for_selector("#help", state="hidden")
    page.click("[data-help]:visible")
    page.wait_for_selector("#help[open]")


@pytest.mark.slow
def test_a_project_by_keyboard_and_chosen_chats(open_page: Open) -> None:
    page = open_page("/projects", bypass_csp=True)
    hand, keys = Keyboard(), page.keyboard
    hand.write(page.locator("#project-name"), "Kernels")
    keys.press("Enter")
    page.wait_for_selector("#panel-title:text('Kernels')")
    page.set_input_files("#project-file", files=[{"name": "a.md", "mimeType": "text/plain", "buffer": b"alpha"}])
    hand.press(page.get_by_role("button", name="Add", exact=True))
    page.wait_for_selector("text=context tokens")
    hand.press(page.locator("summary:has-text('System prompt, model and sampling')"))
    hand.write(page.locator("#form-system"), "Be short.")
    with page.expect_navigation():
        hand.press(page.get_by_role("button", name="Save", exact=True))
    check(page)
    hand.press(page.get_by_role("link", name="New chat in this project"))
    page.wait_for_selector(".head__project[aria-label='Project Kernels']")
    assert page.input_value("#system") == "Be short."
    say(page, "inside")
    page.wait_for_selector("#chat-list .chats__project + .chats__list :text('inside')")
    page.goto(page.url.partition("/c/")[0] + "/")
    say(page, "outside")
    page.click(".head__more")
    page.select_option("#chat-project", label="Kernels")
    page.click("#manage >> text=Move")
    page.wait_for_selector(".head__project[aria-label='Project Kernels']")
    hand.press(page.locator(".side__pages").get_by_role("link", name="All chats"))
    page.wait_for_selector("#selection")
    check(page)
    page.check("[data-choose-all]")
    chosen = page.locator("[name=chat]:checked").count()  # the server's other chats, too
    assert chosen == page.locator("[name=chat]").count() >= 2
    hand.press(page.get_by_role("button", name="Archive", exact=True))
    page.wait_for_selector("text=There are no chats yet.")
    hand.press(page.get_by_role("link", name="Archived chats"))
    page.wait_for_url("**/chats?archived=1")
    assert page.locator("[name=chat]").count() == chosen
    page.goto(page.url.partition("/chats")[0] + "/projects")
    hand.press(page.locator(".item__name:text('Kernels')"))
    hand.press(page.get_by_role("button", name="Delete the project, keep its chats"))
    page.click(".undo__button")
    page.wait_for_url("**/projects/*")
    assert page.locator("#panel-title").inner_text() == "Kernels"


def test_a_folder_is_chosen_for_a_project_and_its_file_is_named_under_the_answer(
    open_page: Open, server: LiveServer, tmp_path: Path
) -> None:
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans" / "harbour.md").write_text("# Plans\n\nThe lighthouse was painted vermilion.\n")
    page = open_page(bypass_csp=True)
    page.goto(server.link())
    with browser_of(server) as browser:
        url = new_project(browser, "Harbour")
    page.goto(server.url + url)
    check(page)
    page.get_by_label("Folder of this machine").fill(str(tmp_path))
    page.keyboard.press("Enter")
    page.get_by_text("1 file is searched").wait_for()
    check(page)
    page.get_by_role("link", name="New chat in this project").click()
    say(page, "What colour is the lighthouse, vermilion?")
    page.get_by_text("From plans/harbour.md, lines 1–3").click()
    page.get_by_text("The lighthouse was painted vermilion.").wait_for()


def test_a_link_to_read_is_made_moved_forward_and_ended(open_page: Open, server: LiveServer) -> None:
    page = open_page(bypass_csp=True, width=360)
    say(page, "What is a block?")

    def manage() -> None:
        page.locator(".head__more").click()
        page.get_by_role("heading", name="A link to read").wait_for()

    manage()
    page.get_by_role("button", name="Make a link").click()
    address = page.locator("#chat-link-address").inner_text()
    check(page)
    page.get_by_role("button", name="Close").click()
    page.set_viewport_size({"width": 360, "height": 740})
    say(page, "And a slot?")
    manage()
    page.get_by_role("button", name="Show the newest messages too").click()
    page.get_by_role("button", name="Show the newest messages too").wait_for(state="detached")
    with page.context.expect_page() as opened:
        page.locator("#chat-link-address").click()
    reader = opened.value
    assert reader.url == address
    for scheme in ("dark", "light"):
        reader.emulate_media(color_scheme=scheme)
        check(reader)
    assert reader.get_by_text("And a slot?").is_visible()
    page.get_by_role("button", name="End the link").click()
    page.get_by_role("button", name="Make a link").wait_for()
    reader.reload()
    assert reader.get_by_text("This link shows nothing.", exact=False).first.is_visible()
