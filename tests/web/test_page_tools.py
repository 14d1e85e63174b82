"""Tools that servers run, in the chat, over a real socket: a scripted model calls them, real servers answer."""

import html
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
from tests.web.chat_page import ChatPage, listen, parse, stream_url, stream_urls
from tests.web.harness import browser_of
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
        consents = ChatPage(client).get("/chats/tools")
        for server, tool in zip(consents.fields("server"), consents.fields("tool"), strict=True):
            client.post("/chats/tools/revoke", data={"server": server, "tool": tool})


def tools_page(client: httpx.Client) -> str:
    return client.get("/chats/tools").text


def choose(*names: str) -> dict[str, str]:
    """The fields of the drawer that choose servers."""
    return {"mcp_shown": "1"} | {f"mcp-{name}": "on" for name in names}


def buttons(chat: ChatPage) -> list[str]:
    """The addresses to which the buttons of the calls post; those before the last message are hidden."""
    return re.findall(r'(?:form)?action="(/c/[^"]+/calls/\d+/\w+)"', chat.html)


def url_of(chat: ChatPage, decision: str) -> str:
    return [url for url in buttons(chat) if url.endswith(f"/{decision}")][-1]


def decide(chat: ChatPage, decision: str, *, scripted: bool = False) -> httpx.Response:
    """Press a button of the last call."""
    return chat.post(url_of(chat, decision), scripted=scripted)


def type_result(chat: ChatPage, **results: str) -> None:
    chat.post(chat.tree.all("form", class_="results")[-1].attrs["action"], **results)


def test_a_call_runs_after_consent_and_the_model_uses_its_result(chat: ChatPage, script: Script) -> None:
    """Without scripts."""
    script.says(called("add", {"a": 2, "b": 40}), "It is **42**.")
    chat.send("2 + 40?", **choose("friendly"))
    assert '"name": "add"' in script.prompts[0]
    assert "Add two whole numbers." in script.prompts[0]
    assert chat.shows("of friendly?")
    assert [url.rsplit("/", 1)[1] for url in buttons(chat)] == ["once", "always", "later", "never"]
    assert chat.shows("Type the result instead")
    assert len(script.prompts) == 1, "nothing runs before the consent"
    decide(chat, "once")
    assert "<strong>42</strong>" in chat.html
    assert "<tool_response>\n42\n</tool_response>" in script.prompts[1]
    assert chat.shows("Called add of friendly")
    script.says(called("add", {"a": 1, "b": 1}))
    assert chat.send("1 + 1?").shows("of friendly?"), "allowed once is not allowed always"


def test_always_runs_by_itself_from_then_on_and_can_be_taken_back(chat: ChatPage, script: Script) -> None:
    script.says(called(), "One.")
    decide(chat.send("go"), "always")
    assert chat.reply.text == "One."
    script.says(called(), called(), "Two calls.")
    assert chat.send("again").reply.text == "Two calls.", "the page without scripts shows the end of the chain"
    assert script.prompts[-1].count("<tool_response>") == 3
    assert "always allowed" in tools_page(chat.browser)
    chat.browser.post("/chats/tools/revoke", data={"server": "plain", "tool": "tool"})
    assert "always allowed" not in tools_page(chat.browser)
    script.says(called())
    assert chat.send("more").shows("of plain?")


def test_never_is_told_to_the_model_and_the_tool_is_no_longer_offered(chat: ChatPage, script: Script) -> None:
    script.says(called(), "A pity.")
    decide(chat.send("go"), "never")
    assert chat.reply.text == "A pity."
    assert runs.DECLINED["never"] in script.prompts[1]
    chat.send("again")
    assert "Does things" not in script.prompts[-1]
    assert "never run" in tools_page(chat.browser)


def test_never_can_be_undone_at_once(chat: ChatPage, script: Script) -> None:
    script.says(called(), "A pity.")
    decided = decide(chat.send("go"), "never", scripted=True)
    (undo,) = re.findall(r'<form class="undo" action="([^"]+)"', decided.text)
    chat.browser.post(html.unescape(undo))
    assert "never run" not in tools_page(chat.browser)
    chat.send("again")
    assert "Does things" in script.prompts[-1]


def test_not_now_declines_this_call_and_the_next_one_asks_again(chat: ChatPage, script: Script) -> None:
    script.says(called(), "As you wish.", called())
    decide(chat.send("go"), "later")
    assert runs.DECLINED["later"] in script.prompts[1]
    assert chat.reply.text == "As you wish."
    assert chat.send("again").shows("of plain?")


def test_several_calls_each_ask_and_continue_together(chat: ChatPage, script: Script) -> None:
    script.says(called() + called(arguments={"n": 2}), "Both.")
    first, second = (url for url in buttons(chat.send("go")) if url.endswith("/once"))
    chat.post(second)
    assert len(script.prompts) == 1
    assert chat.shows('called with {"n": 2}')
    chat.post(first)
    assert chat.reply.text == "Both."
    assert script.prompts[1].index('called with {"n": 1}') < script.prompts[1].index('called with {"n": 2}')


def test_a_result_can_still_be_typed(chat: ChatPage, script: Script) -> None:
    script.says(called() + called(arguments={"n": 2}), "Thanks.")
    chat.post(buttons(chat.send("go"))[0])
    type_result(chat, **{"result-1": "typed"})
    assert chat.reply.text == "Thanks."
    assert "<tool_response>\ntyped\n</tool_response>" in script.prompts[1]
    assert 'called with {"n": 1}' in script.prompts[1]


def test_with_scripts_the_page_follows_the_calls_to_the_next_reply(chat: ChatPage, script: Script) -> None:
    script.says(called(), "First.")
    ended = chat.send("go", scripted=True).listen()
    calls = stream_url(ended[ended.rindex("outerMorph") :])
    assert calls.endswith("/calls")
    chat.html = listen(chat.browser, calls)
    assert chat.shows("of plain?")
    assert not stream_urls(chat.html), "nothing to follow while it asks"
    decide(chat, "always", scripted=True)
    if "/calls" in "".join(stream_urls(chat.html)):
        chat.html = chat.listen()
    replies = [number for number, url in enumerate(stream_urls(chat.html)) if url.endswith("/stream")]
    assert replies, "the reply to the result is on the page, and is followed"
    assert "First." in chat.listen(replies[-1])


def test_a_chain_asks_after_some_replies(chat: ChatPage, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "MAX_ROUNDS", 2)
    script.says(called())
    decide(chat.send("go"), "always")
    assert chat.shows("2 replies in a row have called tools by themselves.")
    assert len(script.prompts) == 4, "the click, its reply, and two by themselves"
    decide(chat, "once")
    assert len(script.prompts) == 7


def test_html_of_a_server_is_text(chat: ChatPage, script: Script) -> None:
    script.says(called("markup", {}), "Done.")
    decide(chat.send("go", **choose("friendly")), "once")
    assert chat.shows("<img src=x onerror=alert(1)>")
    assert "<img src=x" not in chat.html


@pytest.mark.parametrize(
    ("server", "says"),
    [
        ("dies", "The call failed. dies ended. Its process ended with status 3."),
        ("huge", "a line of more than 4.0 MiB"),
        ("long", "[cut: the result has 200,000 characters"),
    ],
)
def test_a_server_that_fails_in_a_call_is_told_and_the_chat_goes_on(
    chat: ChatPage, script: Script, server: str, says: str
) -> None:
    script.says(called(), "I see.")
    decide(chat.send("go", **choose(server)), "once")
    assert says in chat.html
    assert chat.reply.text == "I see."
    assert says in script.prompts[1]


def test_arguments_that_do_not_fit_are_told_to_the_model(chat: ChatPage, script: Script) -> None:
    script.says(called(arguments={"n": "three"}), "Sorry.")
    decide(chat.send("go"), "once")
    assert chat.reply.text == "Sorry."
    assert "'three' is not of type 'integer'" in script.prompts[1]


def test_a_server_that_does_not_start_is_told_at_the_reply(chat: ChatPage, script: Script) -> None:
    script.says("Without tools.")
    reply = chat.send("go", **choose("exits", "plain")).reply
    assert reply.text == "Without tools."
    assert reply.says("The tools of exits are left out. exits did not start. Its process ended with status 7.")
    assert reply.says("missing configuration")
    assert "Does things" in script.prompts[0], "the other server's tools are offered"


def test_a_call_that_hangs_can_be_stopped_and_typed(chat: ChatPage, script: Script) -> None:
    script.says(called(), "All right.")
    once = url_of(chat.send("go", **choose("hangs")), "once")
    chat.post(once, scripted=True)
    assert chat.shows("Running …")
    stop = url_of(chat, "stop")
    assert chat.post(once, scripted=True).status_code == 200, "a second click runs nothing twice"
    chat.post(stop)
    assert chat.shows("You stopped this call.")
    type_result(chat, **{"result-0": "never mind"})
    assert chat.reply.text == "All right."


def test_a_tool_that_has_changed_asks_again(
    chat: ChatPage, script: Script, counted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "LISTED_S", 0.0)
    script.says(called(), "Ok.")
    decide(chat.send("go", **choose("changing")), "always")
    counted.write_text("7")
    script.says(called())
    chat.send("again")
    assert "Version 7" in script.prompts[-1]
    assert chat.shows("The tool has changed since you allowed it.")


def test_two_servers_with_one_name_for_a_tool_are_told_apart(chat: ChatPage, script: Script) -> None:
    script.says(called("long_tool"), "Fine.")
    chat.send("go", **choose("plain", "long"))
    assert '"name": "plain_tool"' in script.prompts[0]
    assert chat.shows("of long?")


def test_a_call_of_a_tool_that_is_not_offered_is_said_and_not_shown_as_its_text(chat: ChatPage, script: Script) -> None:
    script.says(f"Let me look. {called('get_current_time', {'zone': 'CET'})}")
    chat.send("What time is it?", **choose())
    assert chat.shows("Asked for get_current_time, which this chat does not offer")
    assert "&lt;tool_call" not in chat.html
    assert buttons(chat) == []
    assert not chat.shows("Type the result")
    script.says("It is **noon**.")
    chat.send("Then guess.")
    assert 'Let me look. \n\nget_current_time {"zone": "CET"}' in script.prompts[-1]
    assert "No result was given" not in script.prompts[-1]


def test_what_nobody_offered_runs_nothing(chat: ChatPage, script: Script) -> None:
    script.says(called())
    once = url_of(chat.send("go"), "once")
    for wrong in (once.replace("/calls/0/", "/calls/7/"), once.replace("/once", "/yes")):
        assert chat.post(wrong).status_code == 400, wrong
    chat.send("never mind")
    assert chat.post(once).status_code == 400, "the chat has gone on"
    none = ChatPage(chat.browser).send("go", **choose())
    assert not none.shows("Allow once")
    assert "Does things" not in script.prompts[-1]
    assert chat.browser.post(once, headers={"origin": "http://evil.example"}).status_code == 403


def test_the_choice_of_servers_is_the_chats_own_and_survives_a_refusal(chat: ChatPage, script: Script) -> None:
    def checked(page: str) -> list[str]:
        return [
            box.attrs["name"].removeprefix("mcp-")
            for box in parse(page).all("input", checked="")
            if box.attrs["name"].startswith("mcp-")
        ]

    assert checked(chat.get().html) == ["plain"]
    refused = chat.try_to_send("go", temperature="hot", **choose("dies", "long")).text
    assert "hot" in refused
    assert checked(refused) == ["dies", "long"]
    script.says("Ok.")
    assert checked(chat.send("go", **choose("long")).html) == ["long"]
    assert "Does things" in script.prompts[-1]
    assert checked(chat.send("go").html) == ["long"], "a form without the choice keeps it"


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
        chat = ChatPage(ann).send("go", **choose("plain", "dies"))
        assert script.prompts[-1].count("Does things") == 1, "the server for admins is left out"
        assert bob.post(url_of(chat, "always")).status_code == 404, "the chat of another key"
        script.says("Ok.")
        decide(chat, "always")
        assert chat.reply.text == "Ok."
        assert "always allowed" in tools_page(ann)
        assert "always allowed" not in tools_page(bob) + tools_page(boss)
