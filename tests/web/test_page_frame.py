"""The frame of the pages over a real socket: the menu, errors, the form that asks for a key, and the log out button."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from localllm.config.settings import ServerConfig, Settings
from localllm.errors import RequestError
from localllm.web.access.keys import add_key, keys_path
from localllm.web.pages import PAGES
from localllm.web.pages.frame.errors import notice
from localllm.web.pages.frame.navigation import Page
from localllm.web.pages.frame.render import render
from localllm.web.pages.frame.status import status_pill
from localllm.web.pages.frame.views import LOOKS, NUM_IN_BAR
from tests.web.live_server import LiveServer, settings
from tests.web.pages_stub import StubModel, stub_plan

BROWSER = {"accept": "text/html,*/*;q=0.8"}
MENU = re.compile(r'<div class="nav__menu" id="nav-menu" popover>(.*?)<div class="rail__foot">', re.DOTALL)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with LiveServer(StubModel(), settings(ui=True)) as live:  # type: ignore[arg-type]
        yield live


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("home")))
        asked = Settings(server=ServerConfig(port=0, api_key="sk-boss"))
        with LiveServer(StubModel(), asked) as live:  # type: ignore[arg-type]
            yield live


@contextmanager
def browser_of(server: LiveServer, key: str = "") -> Iterator[httpx.Client]:
    """A browser that has logged in, if there is a key."""
    with httpx.Client(base_url=server.url, timeout=20, follow_redirects=True, headers=BROWSER) as browser:
        if key:
            assert browser.post("/login", data={"key": key}).status_code == 200
        yield browser


def is_framed(page: str) -> bool:
    return '<div class="nav">' in page


# The menu -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.entry.key)
def test_each_page_is_in_the_bar_or_the_menu_and_marked_there(server: LiveServer, page: Page) -> None:
    entry = page.entry
    with browser_of(server) as browser:
        text = browser.get(entry.url).text
    [menu] = MENU.findall(text)
    urls = re.findall(r'class="nav__link" href="([^"]+)"', text)
    assert urls == [each.entry.url for each in PAGES]
    assert re.findall(r'class="nav__link" href="([^"]+)"', menu) == urls[NUM_IN_BAR:]
    assert re.findall(r'href="([^"]+)" aria-current="page"', text)[:1] == [entry.url]
    assert ('popovertarget="nav-menu" aria-current="true"' in text) == (entry.url in urls[NUM_IN_BAR:])


def test_the_theme_has_one_word_everywhere(server: LiveServer) -> None:
    with browser_of(server) as browser:
        seen = []
        for _ in range(len(LOOKS["theme"]) + 1):
            page = browser.get("/settings").text
            [shown] = re.findall(r"Theme: </span>(\w+)</span>", page)
            [pressed] = re.findall(r'name="theme" value="\w+" aria-pressed="true">(\w+)</button>', page)
            assert shown == pressed
            seen.append(shown)
            [following] = re.findall(r'name="theme" value="(\w+)" title="Switch to', page)
            browser.post("/look", data={"theme": following})
    assert seen == [*LOOKS["theme"].values(), seen[0]]


def test_a_browser_keeps_the_size_of_text_and_the_width_of_the_column(server: LiveServer) -> None:
    with browser_of(server) as browser:
        browser.post("/look", data={"text": "large", "column": "nonsense"})
        page = browser.get("/").text
    assert 'data-text="large"' in page
    assert 'data-column="normal"' in page
    assert 'data-theme="auto"' in page


def test_the_pages_can_be_installed_as_an_app(server: LiveServer) -> None:
    with browser_of(server) as browser:
        [link] = re.findall(r'rel="manifest" href="([^"]+)"', browser.get("/").text)
        told = browser.get(link)
        assert told.headers["content-type"].startswith("application/manifest+json")
        for icon in told.json()["icons"]:
            assert browser.get(f"/static/{icon['src']}").headers["content-type"].startswith(icon["type"])


def test_the_pill_counts_the_other_models_that_are_loaded() -> None:
    stats, plan = StubModel().client.stats(), stub_plan()
    assert ">+2<" in render(status_pill("demo", "ready", stats, plan, 2))
    assert "2 more models are loaded" in render(status_pill("demo", "ready", stats, plan, 2))
    assert "1 more model is loaded" in render(status_pill("demo", "ready", stats, plan, 1))
    assert "loaded" not in render(status_pill("demo", "ready", stats, plan))


# Errors -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/nonsense", "/settings/nonsense", "/settings/keys", "/<b>x</b>", "/" + "x" * 3000])
def test_an_unknown_address_has_the_frame_of_the_pages(server: LiveServer, path: str) -> None:
    refused = server.get(path, headers=BROWSER)
    assert refused.status_code == (405 if path == "/settings/keys" else 404)
    assert "No page here." in refused.text
    assert is_framed(refused.text)
    assert "<b>x" not in refused.text
    assert len(refused.text) < 12_000
    assert "script" not in refused.headers["content-security-policy"]
    assert "default-src 'self'" in refused.headers["content-security-policy"]
    assert refused.headers["x-request-id"]


def test_programs_get_the_error_of_the_api(server: LiveServer) -> None:
    assert server.get("/nonsense").json()["error"]["code"] == "unknown_url"
    assert server.get("/v1/nonsense", headers=BROWSER).json()["error"]["code"] == "unknown_url"


def test_a_browser_is_led_from_the_list_of_models_to_their_page(server: LiveServer) -> None:
    answer = server.http.get("/models", headers={"accept": "text/html,*/*;q=0.8"}, follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/library")


def test_a_browser_gets_the_icon_that_it_asks_for_by_itself(server: LiveServer) -> None:
    icon = server.http.get("/favicon.ico")
    assert icon.status_code == 200
    assert icon.headers["content-type"].startswith("image/svg+xml")


def test_a_host_that_is_not_ours_gets_no_frame(server: LiveServer) -> None:
    refused = server.get("/nonsense", headers={**BROWSER, "host": "evil.example"})
    assert refused.status_code == 403
    assert not is_framed(refused.text)


def test_without_pages_an_error_stays_small() -> None:
    with LiveServer(StubModel(), settings(ui=False)) as server:  # type: ignore[arg-type]
        refused = server.get("/nonsense", headers=BROWSER)
        assert refused.status_code == 404
        assert not is_framed(refused.text)
        assert "default-src 'none'" in refused.headers["content-security-policy"]


@pytest.mark.parametrize(
    ("path", "way_out"),
    [
        ("/dashboard/requests/none", 'href="/dashboard">Back to Dashboard'),
        ("/library/nonsense", 'href="/library">Back to Models'),
        ("/c/unknown", 'href="/">New chat'),
        ("/settingsx", 'href="/">New chat'),
    ],
)
def test_an_error_leads_back_to_its_page_and_shows_no_number(server: LiveServer, path: str, way_out: str) -> None:
    page = server.get(path, headers=BROWSER).text
    assert way_out in page
    assert not re.search(r">\s*404\s*<", page)


def test_pages_of_ours_in_a_hint_are_links() -> None:
    drawn = render(
        notice(RequestError("x", "/tune", "Cancel it at /tune, or see /dashboard/requests. <b> /tuned /etc"))
    )
    assert '<a class="text-link" href="/tune">/tune</a>, or' in drawn
    assert '<a class="text-link" href="/dashboard/requests">/dashboard/requests</a>.' in drawn
    assert "&lt;b&gt; /tuned /etc" in drawn
    assert drawn.count("<a ") == 2


# Keys ---------------------------------------------------------------------------------------------------------------


def test_the_form_for_a_key_stands_alone(locked: LiveServer) -> None:
    with browser_of(locked) as browser:
        page = browser.get("/dashboard")
        assert page.url.path == "/login"
        assert not is_framed(page.text)
        assert 'href="/dashboard"' not in page.text
        assert 'data-show="key"' in page.text
        assert browser.get("/nonsense").url.path == "/login"  # what there is, is told to nobody without a key
        wrong = browser.post("/login", data={"key": "sk-wrong"})
        assert wrong.status_code == 401
        assert "That is not a key of this server." in wrong.text
        assert wrong.text.count("localllm keys add") == 1
        assert "sk-wrong" not in wrong.text


def test_a_browser_with_a_key_can_log_out(locked: LiveServer, server: LiveServer) -> None:
    with browser_of(locked, "sk-boss") as browser:
        page = browser.get("/settings").text
        assert '<form action="/logout" method="post">' in page
        assert "One more key, from the command line or the environment, works until the server stops." in page
        assert browser.post("/logout").url.path == "/login"
        assert browser.get("/settings").url.path == "/login"
    assert "Log out" not in locked.get("/settings", headers={**BROWSER, "x-api-key": "sk-boss"}).text  # no session
    assert "Log out" not in server.get("/settings", headers=BROWSER).text


def test_a_key_without_the_scope_sees_why_in_the_frame(locked: LiveServer) -> None:
    with browser_of(locked, add_key(keys_path(), "phone", "infer")) as browser:
        refused = browser.get("/logs")
        assert refused.status_code == 403
        assert "The key phone is not allowed to do this." in refused.text
        assert is_framed(refused.text)
        assert "Log out" in refused.text
