"""Tools that servers run, in the chat, over a real socket: a scripted model calls them, real servers answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from localllm.mcp import servers
from localllm.web.access.keys import add_key, keys_path
from localllm.web.pages.chat.replies import prompt
from localllm.web.pages.chat.tools import runs
from tests.mcp.programs import friendly, hostile
from tests.web.harness import SCRIPTED, browser_of, conversation, listen, stream_url
from tests.web.live_server import LiveServer, wait_until
from tests.web.scripted import Script, called


@pytest.fixture(scope="module")
def served(start: Callable[..., LiveServer], counted: Path) -> LiveServer:
    off = {"in_new_chats": False}
    return start(
        hostile("plain"),
        friendly(**off),
        *(hostile(mode, **off) for mode in ("dies", "exits", "long", "huge")),
        hostile("hangs", timeout_s=600.0, **off),
        hostile("changing", str(counted), **off),
    )


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, served: LiveServer) -> Script:
    return Script().direct(monkeypatch, prompt, served)


@pytest.fixture
def browser(served: LiveServer) -> Iterator[httpx.Client]:
    with browser_of(served) as client:
        yield client
        allowed = re.findall(r'name="server" value="([^"]+)".*?name="tool" value="([^"]+)"', tools_page(client))
        for server, tool in allowed:
            client.post("/chats/tools/revoke", data={"server": server, "tool": tool})


def tools_page(client: httpx.Client) -> str:
    return client.get("/chats/tools").text


def choose(*names: str) -> dict[str, str]:
    """The fields of the drawer that choose servers."""
    return {"mcp_shown": "1"} | {f"mcp-{name}": "on" for name in names}


def decisions(page: str) -> list[str]:
    """The addresses to which the buttons of the calls post; those before the last message are hidden."""
    return re.findall(r'(?:form)?action="(/c/[^"]+/calls/\d+/\w+)"', page)


def url_of(page: str, decision: str) -> str:
    return [url for url in decisions(page) if url.endswith(f"/{decision}")][-1]


def test_a_call_runs_after_consent_and_the_model_uses_its_result(browser: httpx.Client, script: Script) -> None:
    """Without scripts."""
    script.says(called("add", {"a": 2, "b": 40}), "It is **42**.")
    page = browser.post("/chat", data={"message": "2 + 40?", **choose("friendly")}).text
    assert '"name": "add"' in script.prompts[0]
    assert "Add two whole numbers." in script.prompts[0]
    assert "Run this on the server friendly?" in page
    assert [url.rsplit("/", 1)[1] for url in decisions(page)] == ["once", "always", "never"]
    assert "Type the result instead" in page
    assert len(script.prompts) == 1, "nothing runs before the consent"
    page = browser.post(url_of(page, "once")).text
    assert "<strong>42</strong>" in page
    assert "<tool_response>\n42\n</tool_response>" in script.prompts[1]
    assert "Result of" in page
    script.says(called("add", {"a": 1, "b": 1}))
    page = browser.post("/chat", data={"message": "1 + 1?", "conversation": conversation(page)}).text
    assert "Run this on the server friendly?" in page, "allowed once is not allowed always"


def test_always_runs_by_itself_from_then_on_and_can_be_taken_back(browser: httpx.Client, script: Script) -> None:
    script.says(called(), "One.")
    page = browser.post("/chat", data={"message": "go"}).text
    page = browser.post(url_of(page, "always")).text
    assert "One." in page
    script.says(called(), called(), "Two calls.")
    page = browser.post("/chat", data={"message": "again", "conversation": conversation(page)}).text
    assert "Two calls." in page, "the page without scripts shows the end of the chain"
    assert script.prompts[-1].count("<tool_response>") == 3
    assert "always allowed" in tools_page(browser)
    browser.post("/chats/tools/revoke", data={"server": "plain", "tool": "tool"})
    assert "always allowed" not in tools_page(browser)
    script.says(called())
    page = browser.post("/chat", data={"message": "more", "conversation": conversation(page)}).text
    assert "Run this on the server plain?" in page


def test_never_is_told_to_the_model_and_the_tool_is_no_longer_offered(browser: httpx.Client, script: Script) -> None:
    script.says(called(), "A pity.")
    page = browser.post("/chat", data={"message": "go"}).text
    page = browser.post(url_of(page, "never")).text
    assert "A pity." in page
    assert runs.NEVER in script.prompts[1]
    browser.post("/chat", data={"message": "again", "conversation": conversation(page)})
    assert "Does things" not in script.prompts[-1]
    assert "never run" in tools_page(browser)


def test_several_calls_each_ask_and_continue_together(browser: httpx.Client, script: Script) -> None:
    script.says(called() + called(arguments={"n": 2}), "Both.")
    page = browser.post("/chat", data={"message": "go"}).text
    first, second = (url for url in decisions(page) if url.endswith("/once"))
    page = browser.post(second).text
    assert len(script.prompts) == 1
    assert "called with {&#34;n&#34;: 2}" in page
    page = browser.post(first).text
    assert "Both." in page
    assert script.prompts[1].index('called with {"n": 1}') < script.prompts[1].index('called with {"n": 2}')


def test_a_result_can_still_be_typed(browser: httpx.Client, script: Script) -> None:
    script.says(called() + called(arguments={"n": 2}), "Thanks.")
    page = browser.post("/chat", data={"message": "go"}).text
    page = browser.post(decisions(page)[0]).text
    action = re.findall(r'<form class="results" action="([^"]+)"', page)[-1]
    page = browser.post(action, data={"result-1": "typed"}).text
    assert "Thanks." in page
    assert "<tool_response>\ntyped\n</tool_response>" in script.prompts[1]
    assert 'called with {"n": 1}' in script.prompts[1]


def test_with_scripts_the_page_follows_the_calls_to_the_next_reply(browser: httpx.Client, script: Script) -> None:
    script.says(called(), "First.")
    turn = browser.post("/chat", data={"message": "go"}, headers=SCRIPTED)
    ended = listen(browser, stream_url(turn.text))
    calls = stream_url(ended[ended.rindex("outerMorph") :])
    assert calls.endswith("/calls")
    asks = listen(browser, calls)
    assert "Run this on the server plain?" in asks
    assert "hx-sse:connect" not in asks, "nothing to follow while it asks"
    update = browser.post(url_of(asks, "always"), headers=SCRIPTED).text
    if "/calls" in "".join(re.findall(r'hx-sse:connect="([^"]+)"', update)):
        update = listen(browser, stream_url(update))
    reply = re.findall(r'hx-sse:connect="(/c/[^"]+/stream)"', update)
    assert reply, "the reply to the result is on the page, and is followed"
    assert "First." in listen(browser, reply[-1])


def test_a_chain_asks_after_some_replies(
    browser: httpx.Client, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "MAX_ROUNDS", 2)
    script.says(called())
    page = browser.post("/chat", data={"message": "go"}).text
    page = browser.post(url_of(page, "always")).text
    assert "2 replies in a row have called tools by themselves." in page
    assert len(script.prompts) == 4, "the click, its reply, and two by themselves"
    page = browser.post(url_of(page, "once")).text
    assert len(script.prompts) == 7


def test_html_of_a_server_is_text(browser: httpx.Client, script: Script) -> None:
    script.says(called("markup", {}), "Done.")
    page = browser.post("/chat", data={"message": "go", **choose("friendly")}).text
    page = browser.post(url_of(page, "once")).text
    assert "&lt;img src=x onerror=alert(1)&gt;" in page
    assert "<img src=x" not in page


@pytest.mark.parametrize(
    ("server", "says"),
    [
        ("dies", "The call failed. dies ended. Its process ended with status 3."),
        ("huge", "a line of more than 4.0 MiB"),
        ("long", "[cut: the result has 200,000 characters"),
    ],
)
def test_a_server_that_fails_in_a_call_is_told_and_the_chat_goes_on(
    browser: httpx.Client, script: Script, server: str, says: str
) -> None:
    script.says(called(), "I see.")
    page = browser.post("/chat", data={"message": "go", **choose(server)}).text
    page = browser.post(url_of(page, "once")).text
    assert says in page
    assert "I see." in page
    assert says in script.prompts[1]


def test_arguments_that_do_not_fit_are_told_to_the_model(browser: httpx.Client, script: Script) -> None:
    script.says(called(arguments={"n": "three"}), "Sorry.")
    page = browser.post("/chat", data={"message": "go"}).text
    assert "Sorry." in browser.post(url_of(page, "once")).text
    assert "'three' is not of type 'integer'" in script.prompts[1]


def test_a_server_that_does_not_start_is_told_at_the_reply(browser: httpx.Client, script: Script) -> None:
    script.says("Without tools.")
    page = browser.post("/chat", data={"message": "go", **choose("exits", "plain")}).text
    assert "Without tools." in page
    assert "The tools of exits are left out. exits did not start. Its process ended with status 7." in page
    assert "missing configuration" in page
    assert "Does things" in script.prompts[0], "the other server's tools are offered"


def test_a_call_that_hangs_can_be_stopped_and_typed(browser: httpx.Client, script: Script) -> None:
    script.says(called(), "All right.")
    page = browser.post("/chat", data={"message": "go", **choose("hangs")}).text
    running = browser.post(url_of(page, "once"), headers=SCRIPTED).text
    assert "Running …" in running
    again = browser.post(url_of(page, "once"), headers=SCRIPTED)
    assert again.status_code == 200, "a second click runs nothing twice"
    page = browser.post(url_of(running, "stop")).text
    assert "You stopped this call." in page
    action = re.findall(r'<form class="results" action="([^"]+)"', page)[-1]
    assert "All right." in browser.post(action, data={"result-0": "never mind"}).text


def test_a_tool_that_has_changed_asks_again(
    browser: httpx.Client, script: Script, counted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "LISTED_S", 0.0)
    script.says(called(), "Ok.")
    page = browser.post("/chat", data={"message": "go", **choose("changing")}).text
    page = browser.post(url_of(page, "always")).text
    counted.write_text("7")
    script.says(called())
    page = browser.post("/chat", data={"message": "again", "conversation": conversation(page)}).text
    assert "Version 7" in script.prompts[-1]
    assert "The tool has changed since you allowed it." in page


def test_two_servers_with_one_name_for_a_tool_are_told_apart(browser: httpx.Client, script: Script) -> None:
    script.says(called("long_tool"), "Fine.")
    page = browser.post("/chat", data={"message": "go", **choose("plain", "long")}).text
    assert '"name": "plain_tool"' in script.prompts[0]
    assert "Run this on the server long?" in page


def test_what_nobody_offered_runs_nothing(browser: httpx.Client, script: Script) -> None:
    script.says(called())
    page = browser.post("/chat", data={"message": "go"}).text
    once = url_of(page, "once")
    for wrong in (once.replace("/calls/0/", "/calls/7/"), once.replace("/once", "/yes")):
        assert browser.post(wrong).status_code == 400, wrong
    browser.post("/chat", data={"message": "never mind", "conversation": conversation(page)})
    assert browser.post(once).status_code == 400, "the chat has gone on"
    none = browser.post("/chat", data={"message": "go", **choose()}).text
    assert "Run this" not in none
    assert "Does things" not in script.prompts[-1]
    assert browser.post(once, headers={"origin": "http://evil.example"}).status_code == 403


def test_the_choice_of_servers_is_the_chats_own_and_survives_a_refusal(browser: httpx.Client, script: Script) -> None:
    def checked(page: str) -> list[str]:
        return re.findall(r'name="mcp-(\w+)" value="on" checked', page)

    assert checked(browser.get("/").text) == ["plain"]
    refused = browser.post("/chat", data={"message": "go", "temperature": "hot", **choose("dies", "long")}).text
    assert "hot" in refused
    assert checked(refused) == ["dies", "long"]
    script.says("Ok.")
    page = browser.post("/chat", data={"message": "go", **choose("long")}).text
    assert checked(page) == ["long"]
    assert "Does things" in script.prompts[-1]
    again = browser.post("/chat", data={"message": "go", "conversation": conversation(page)}).text
    assert checked(again) == ["long"], "a form without the choice keeps it"


def test_keys_use_the_servers_that_their_scope_allows_and_see_their_own_consents(
    start: Callable[..., LiveServer], script: Script
) -> None:
    server = start(hostile("plain"), hostile("dies", scope="infer"))
    scopes = {"boss": "admin", "ann": "infer", "bob": "infer"}
    keys = {name: add_key(keys_path(), name, scope) for name, scope in scopes.items()}  # type: ignore[arg-type]
    wait_until(lambda: server.http.get("/chats/tools").status_code != 200)

    def client(name: str) -> httpx.Client:
        found = browser_of(server)
        found.headers["Authorization"] = f"Bearer {keys[name]}"
        return found

    with client("boss") as boss, client("ann") as ann, client("bob") as bob:
        assert ">plain " in tools_page(boss)
        assert ">plain " not in tools_page(ann)
        assert ">dies " in tools_page(ann)
        script.says(called())
        page = ann.post("/chat", data={"message": "go", **choose("plain", "dies")}).text
        assert script.prompts[-1].count("Does things") == 1, "the server for admins is left out"
        always = url_of(page, "always")
        assert bob.post(always).status_code == 404, "the chat of another key"
        script.says("Ok.")
        assert "Ok." in ann.post(always).text
        assert "always allowed" in tools_page(ann)
        assert "always allowed" not in tools_page(bob) + tools_page(boss)
