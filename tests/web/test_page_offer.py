"""The offered model on the chat page, over a real socket: a local hub, its real client, an engine made of memory."""

import asyncio
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.config.settings import EngineConfig, ServerConfig, Settings
from localllm.errors import DoesNotFit
from localllm.models.library.hub import cache, plan
from localllm.models.library.hub.plan import plan_download
from localllm.models.library.hub.pull import pull
from localllm.models.library.picks import FittingPick, fitting_picks
from localllm.serving import suggestions
from localllm.web import pages
from localllm.web.access.keys import add_key, keys_path
from localllm.web.pages.chat.thread.views import DEMO_EXAMPLES
from scripts.demo_model.held_out import HELD_OUT
from tests.hub import conftest as hub_fixtures
from tests.hub.local_hub import LocalHub, Trouble, wait_until_stalled
from tests.web.library_server import LibraryServer, Loads, only_pick
from tests.web.live_server import ManagedServer, wait_until

hub, checkpoint = hub_fixtures.hub, hub_fixtures.checkpoint
WEIGHTS = "model.safetensors"
NAME = "org/tiny"
PICKS = only_pick(NAME)
LONG_S = 60.0
SCRIPTED = {"hx-request": "true"}
HTML = {"accept": "text/html,*/*;q=0.8"}


@pytest.fixture
def loads(hub: LocalHub, tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Loads:
    hub.add_repo(NAME, checkpoint)
    monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "60")  # a stalled answer stays stalled on a loaded machine
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return Loads(tmp_path / "made", monkeypatch)


@pytest.fixture
def browser(loads: Loads) -> Iterator[httpx.Client]:
    with LibraryServer(picks=PICKS) as live, browser_of(live) as client:
        yield client


def browser_of(live: LibraryServer, **headers: str) -> httpx.Client:
    """A browser without scripts, once the card is known: until then the page reloads every two seconds."""
    wait_until(lambda: live.manager.current is not None)
    wait_until(lambda: "Looking for a model" not in httpx.get(live.url, headers=HTML | headers, timeout=20).text)
    return httpx.Client(base_url=live.url, timeout=20, follow_redirects=True, headers=HTML | headers)


def card(browser: httpx.Client, path: str = "/") -> str:
    """The card of a page, in one line; empty: the page has none."""
    return card_in(browser.get(path).text)


def card_in(page: str) -> str:
    found = re.search(r'<section class="offer".*?</section>', page, re.DOTALL)
    return re.sub(r"\s+", " ", found[0]) if found else ""


def buttons(part: str) -> dict[str, str]:
    return dict(re.findall(r'name="verb" value="([a-z]+)">([^<]*)<', part))


def act(browser: httpx.Client, verb: str, model: str = NAME, **headers: str) -> httpx.Response:
    return browser.post("/chat/model", data={"model": model, "verb": verb}, headers=headers)


def held(browser: httpx.Client, words: str) -> str:
    """The card once it has these words."""
    wait_until(lambda: words in card(browser), LONG_S)
    return card(browser)


def test_the_first_page_says_that_the_demo_is_a_toy_and_offers_a_real_model(
    browser: httpx.Client, hub: LocalHub
) -> None:
    page = browser.get("/").text
    assert "<strong>demo</strong> is a 4 M-parameter toy that answers questions about localllm." in page
    shown = card_in(page)
    assert "Tiny" in shown
    assert "293 KiB to download · up to" in shown
    assert "tokens of context" in shown
    assert buttons(shown) == {"start": "Download and use (293 KiB)"}
    assert hub.sent == [], "the hub is asked when somebody clicks, and not before"
    assert set(DEMO_EXAMPLES) <= {question for question, _ in HELD_OUT}, "the demo's own test asks its examples"


def test_one_click_ends_in_a_chat_with_the_model(browser: httpx.Client, hub: LocalHub, loads: Loads) -> None:
    hub.troubles[WEIGHTS] = Trouble(stall_after=100_000)
    loads.gate.clear()
    answered = act(browser, "start", **SCRIPTED)
    assert answered.status_code == 200
    assert '<section class="offer" id="offer"' in answered.text
    assert "<html" not in answered.text
    wait_until_stalled(hub)
    shown = held(browser, " of 293 KiB")
    assert '<progress class="offer__bar" max="1" value="0.' in shown
    assert buttons(shown) == {"stop": "Cancel"}
    assert "Reload this page" in shown
    hub.go_on.set()
    shown = held(browser, "2.3 of 5.7 GiB")
    assert 'class="phase__bar"' in shown
    loads.gate.set()
    wait_until(lambda: card(browser) == "", LONG_S)
    page = browser.get("/").text
    assert "<strong>tiny</strong> runs on this machine" in page
    assert '<option value="tiny" selected>' in page
    sent = browser.post("/chat", data={"message": "Hi", "max_tokens": "3"})
    assert sent.status_code == 200
    assert 'class="message__author">tiny' in re.sub(r">\s+", ">", sent.text)


def test_a_chat_that_has_begun_shows_the_progress_but_no_advertisement(
    browser: httpx.Client, hub: LocalHub, loads: Loads
) -> None:
    chat = browser.post("/chat", data={"message": "Hi", "max_tokens": "3"}).url.path
    assert card(browser, chat) == ""
    hub.troubles[WEIGHTS] = Trouble(stall_after=100_000)
    act(browser, "start")
    wait_until_stalled(hub)
    wait_until(lambda: " of 293 KiB" in card(browser, chat))
    hub.go_on.set()
    wait_until(lambda: card(browser, chat) == "", LONG_S)


def test_a_cancelled_download_can_be_resumed_or_deleted(browser: httpx.Client, hub: LocalHub, loads: Loads) -> None:
    hub.troubles[WEIGHTS] = Trouble(stall_after=100_000)
    act(browser, "start")
    wait_until_stalled(hub)
    act(browser, "stop")
    hub.go_on.set()
    shown = held(browser, "The download was interrupted.")
    labels = buttons(shown)
    assert re.fullmatch(r"Resume \([\d.]+ KiB left\)", labels["start"])
    assert re.fullmatch(r"Delete the [\d.]+ KiB", labels["discard"])
    assert labels.keys() == {"start", "discard"}
    wait_until(lambda: all(each.is_over for each in browser_downloads(browser)))
    act(browser, "discard")
    assert buttons(card(browser)) == {"start": "Download and use (293 KiB)"}
    assert not cache.repository_folder(NAME).exists()
    act(browser, "start")
    wait_until(lambda: card(browser) == "", LONG_S)


class _Over:
    def __init__(self, state: str) -> None:
        self.is_over = state not in ("waiting", "running")


def browser_downloads(browser: httpx.Client) -> list[_Over]:
    listed = browser.get("/localllm/v1/models/downloads", headers={"accept": "application/json"}).json()
    return [_Over(each["state"]) for each in listed["data"]]


def test_a_server_that_starts_again_offers_to_resume(hub: LocalHub, loads: Loads) -> None:
    hub.troubles[WEIGHTS] = Trouble(stall_after=100_000)
    with LibraryServer(picks=PICKS) as live, browser_of(live) as browser:
        act(browser, "start")
        wait_until_stalled(hub)
    hub.go_on.set()
    with LibraryServer(picks=PICKS) as live, browser_of(live) as browser:
        wait_until(lambda: "97.7 KiB are on this machine." in card(browser))  # once the first transfer has ended
        assert buttons(card(browser))["start"] == "Resume (195 KiB left)"
        act(browser, "start")
        wait_until(lambda: card(browser) == "", LONG_S)
    size = next(iter(hub.repos[NAME].commits.values()))[WEIGHTS].size
    wait_until(lambda: hub.bytes_sent(WEIGHTS) >= size)  # the hub notes a transfer once its client has all of it
    assert hub.bytes_sent(WEIGHTS) == size, "no byte came twice"


def _no_network(hub: LocalHub, loads: Loads, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")


def _no_room(hub: LocalHub, loads: Loads, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cache, "free_bytes", lambda: plan.SPARE_BYTES)


def _gated(hub: LocalHub, loads: Loads, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(hub.repos[NAME], "gated", True)


def _too_large(hub: LocalHub, loads: Loads, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(loads, "error", DoesNotFit("tiny does not fit.", "27.5 GiB needed, 2.1 GiB free.", "Try another."))


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        (_no_network, "The hub cannot be reached at http://127.0.0.1:9."),
        pytest.param(_no_room, "other programs; 64.0 MiB are free where", marks=pytest.mark.slow),
        pytest.param(_gated, "is gated, and no token was sent.", marks=pytest.mark.slow),
        (_too_large, "27.5 GiB needed, 2.1 GiB free."),
    ],
)
def test_a_failure_is_told_in_place_with_what_to_do_next(
    browser: httpx.Client, hub: LocalHub, loads: Loads, trouble: Callable[..., None], said: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        trouble(hub, loads, patch)
        act(browser, "start")
        shown = held(browser, 'class="notice"')
        assert said in shown
        assert buttons(shown)["start"] == "Try again"
        assert 'action="/library/import"' in shown, "a file or a folder instead"
        assert 'href="/library"' in shown
    act(browser, "start")
    wait_until(lambda: card(browser) == "", LONG_S)


def test_a_server_without_the_hub_offers_files(hub: LocalHub, loads: Loads) -> None:
    with LibraryServer(EngineConfig(offline=True), picks=PICKS) as live, browser_of(live) as browser:
        shown = card(browser)
        assert "This server runs offline (--offline is set)" in shown
        assert buttons(shown) == {}
        assert 'action="/library/import"' in shown
        act(browser, "start")
        assert "downloads are disabled" in held(browser, 'class="notice"')
    assert hub.sent == []


def test_a_server_that_has_loaded_nothing_offers_the_model(hub: LocalHub, loads: Loads) -> None:
    settings = Settings(EngineConfig(), ServerConfig(port=0, ui=True, load_at_start=False), picks=PICKS)
    with ManagedServer(settings) as live, httpx.Client(base_url=live.url, timeout=20, headers=HTML) as browser:
        wait_until(lambda: live.manager.register.default is not None and "Tiny" in card(browser))
        assert buttons(card(browser)) == {"start": "Download and use (293 KiB)"}
        act(browser, "start")
        wait_until(lambda: card(browser) == "", LONG_S)
        assert "<strong>tiny</strong> runs on this machine" in browser.get("/").text


def test_an_installed_model_is_loaded_without_the_hub(browser: httpx.Client, hub: LocalHub, loads: Loads) -> None:
    pull(plan_download(NAME))
    asked = len(hub.sent)
    assert buttons(card(browser)) == {"start": "Load and use"}
    act(browser, "start")
    wait_until(lambda: card(browser) == "", LONG_S)
    assert len(hub.sent) == asked


def test_another_installed_model_needs_no_offer(browser: httpx.Client, hub: LocalHub, checkpoint: Path) -> None:
    hub.add_repo("org/other", checkpoint)
    pull(plan_download("org/other"))
    assert card(browser) == ""
    shutil.rmtree(cache.repository_folder("org/other"))
    assert card(browser) != ""


def test_a_key_that_may_not_download_sees_who_can(hub: LocalHub, loads: Loads) -> None:
    infer, admin = add_key(keys_path(), "phone", "infer"), add_key(keys_path(), "desk", "admin")
    with LibraryServer(picks=PICKS) as live, browser_of(live, authorization=f"Bearer {infer}") as phone:
        shown = card(phone)
        assert "293 KiB to download" in shown
        assert buttons(shown) == {}
        assert "Your key can use models but not download them. An admin can" in shown
        assert "localllm pull org/tiny" in shown
        assert "/library/import" not in shown
        assert act(phone, "start").status_code == 403
        hub.troubles[WEIGHTS] = Trouble(stall_after=100_000)
        with browser_of(live, authorization=f"Bearer {admin}") as desk:
            act(desk, "start")
            wait_until_stalled(hub)
            assert buttons(held(desk, " of 293 KiB")) == {"stop": "Cancel"}
        shown = held(phone, " of 293 KiB")
        assert (buttons(shown), "Your key" in shown) == ({}, False)
        hub.go_on.set()
        wait_until(lambda: card(phone) == "", LONG_S)
    assert pages.rules().scope_of("POST", "/chat/model") == "admin"
    assert pages.rules().scope_of("GET", "/live/chat") == "infer"


@pytest.mark.parametrize(
    ("form", "status"),
    [
        ({"model": NAME, "verb": "explode"}, 400),
        ({"model": NAME}, 400),
        ({"model": "org/other", "verb": "start"}, 400),
        ({"model": "../../etc/passwd", "verb": "discard"}, 400),
        ({"model": "x" * 5000, "verb": "start"}, 400),
        ({"verb": "start"}, 400),
    ],
)
def test_refusals(refusing: httpx.Client, form: dict[str, str], status: int) -> None:
    page = refusing.post("/chat/model", data=form)
    assert (page.status_code, "<html" in page.text, 'class="notice"' in page.text or "plain" in page.text) == (
        status, True, True,
    )  # fmt: skip
    fragment = refusing.post("/chat/model", data=form, headers=SCRIPTED)
    assert (fragment.status_code, "<html" in fragment.text, len(fragment.text) < 1000) == (status, False, True)
    assert refusing.post("/chat/model", data=form, headers={"origin": "https://evil.example"}).status_code == 403
    assert refusing.get("/live/chat?offer=org/other").status_code == 400


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("home")))
        Loads(tmp_path_factory.mktemp("made"), patch)
        with LibraryServer(picks=PICKS) as live, browser_of(live) as client:
            yield client


def test_pages_come_before_the_suggested_models_are_planned_and_plan_them_once(
    loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, planned = threading.Event(), list[str]()

    def plan_slowly(*given: Any) -> list[FittingPick]:
        gate.wait(LONG_S)
        planned.append(threading.current_thread().name)
        return fitting_picks(*given)

    monkeypatch.setattr(suggestions, "fitting_picks", plan_slowly)
    with LibraryServer(picks=PICKS) as live, httpx.Client(base_url=live.url, timeout=20, headers=HTML) as browser:
        wait_until(lambda: live.manager.current is not None)
        first, models = browser.get("/").text, browser.get("/library").text
        assert "Looking for a model" in first
        assert "Looking for models" in models
        follow = [
            re.search(r'hx-sse:connect="(/live/[^"]+)"', page)[1].replace("&amp;", "&") for page in (first, models)
        ]  # type: ignore[index]
        assert planned == []
        gate.set()
        for path, part in zip(follow, ("Download and use", "Models to start with"), strict=True):
            with browser.stream("GET", path) as live_parts:
                assert any(part in line for line in live_parts.iter_lines())
        for _ in range(5):
            assert "Download and use" in browser.get("/").text
            assert "Models to start with" in browser.get("/library").text
    assert len(planned) == 1


def test_two_tabs_follow_one_download_to_its_end(browser: httpx.Client, hub: LocalHub, loads: Loads) -> None:
    hub.troubles[WEIGHTS] = Trouble(stall_after=100_000)
    base = str(browser.base_url)

    async def tab(said: list[str]) -> None:
        url = f"/live/chat?offer={NAME}"
        async with httpx.AsyncClient(base_url=base, timeout=20) as client, client.stream("GET", url) as response:
            async for text in response.aiter_text():
                said.append(text)
                if "is ready. The next message goes to it." in text and "#model-choices" in text:
                    return

    async def both() -> tuple[str, str]:
        first, second = list[str](), list[str]()
        tabs = asyncio.gather(tab(first), tab(second))
        while not (first and second):
            await asyncio.sleep(0.01)
        await asyncio.to_thread(act, browser, "start")
        await asyncio.to_thread(wait_until_stalled, hub)
        while not all(" of 293 KiB" in "".join(each) for each in (first, second)):
            await asyncio.sleep(0.01)
        hub.go_on.set()
        await tabs
        return "".join(first), "".join(second)

    async def limited() -> tuple[str, str]:
        async with asyncio.timeout(LONG_S):
            return await both()

    for said in asyncio.run(limited()):
        assert 'hx-target="#offer"' in said
        assert "The download of Tiny starts." in said or "Tiny is being downloaded." in said
        assert "<strong>tiny</strong> runs on this machine" in said
        assert '<option value="tiny" selected>' in said
