"""The pages with models of other servers: chat, playground and the list of models, and what cannot work there."""

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from localllm.fleet import upstreams
from tests.fleet.front import ANSWER, Front, config_of
from tests.fleet.hostile import WORDS, HostileServer, chunk, good
from tests.mcp.programs import friendly, hostile
from tests.web.harness import browser_of
from tests.web.live_server import PacedRunner, fake_model, wait_until


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Front, HostileServer]]:
    with pytest.MonkeyPatch.context() as patch, HostileServer("theirs") as other:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        patch.setattr(upstreams, "CHECK_EVERY_S", 0.2)
        with Front(config_of(other, "laptop"), ui=True) as front:
            yield front, other


@pytest.fixture
def front(pair: tuple[Front, HostileServer]) -> Front:
    return pair[0]


@pytest.fixture
def theirs(pair: tuple[Front, HostileServer]) -> Iterator[HostileServer]:
    """The other server, which behaves well again after each test."""
    front, other = pair
    models = other.models
    yield other
    other.models, other.stream, other.status = models, good, 200
    other.seen.clear()
    other.closed.clear()
    wait_until(lambda: bool(front.others.models()))


@pytest.fixture
def page(front: Front) -> Iterator[httpx.Client]:
    with browser_of(front) as browser:
        yield browser


def say(page: httpx.Client, message: str, **more: Any) -> str:
    """The page with the whole reply, as a browser without scripts sees it."""
    answer = page.post("/chat", data={"message": message, **more}, follow_redirects=True)
    assert answer.status_code == 200, answer.text
    return answer.text


def test_a_chat_is_answered_by_the_server_that_has_the_model(page: httpx.Client, theirs: HostileServer) -> None:
    empty = page.get("/").text
    assert '<option value="theirs" selected>theirs · on laptop</option>' in empty
    assert "runs on laptop with a context of 4,096 tokens" in empty
    said = say(page, "Why is the sky blue?", system="Be brief.", temperature="0.5", stop="END", seed="3")
    assert ANSWER in said
    assert re.search(r'message__author">theirs <span class="message__mark">on laptop', said)
    path, body, _ = theirs.seen[-1]
    assert (path, body["model"], body["temperature"], body["stop"], body["seed"]) == (
        "/v1/chat/completions", "theirs", 0.5, ["END"], 3,
    )  # fmt: skip
    assert [each["role"] for each in body["messages"]] == ["system", "user"]
    chat = re.search(r'name="conversation" value="([^"]+)"', said)
    assert chat is not None
    say(page, "And at night?", conversation=chat[1])
    assert [each["role"] for each in theirs.seen[-1][1]["messages"]] == ["system", "user", "assistant", "user"]
    assert "12 of 4,096" in page.get(f"/c/{chat[1]}").text  # the tokens that the server has counted


def test_the_drawers_schema_tools_and_thinking_are_sent(page: httpx.Client, theirs: HostileServer) -> None:
    tools = [{"name": "look", "parameters": {"type": "object"}}]
    say(page, "Look.", schema='{"type": "object"}', tools=json.dumps(tools), thinking="off", model="theirs")
    body = theirs.seen[-1][1]
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert body["tools"][0]["function"]["name"] == "look"
    assert body["chat_template_kwargs"] == {"enable_thinking": False}


def test_calls_and_reasoning_of_another_server_are_shown(page: httpx.Client, theirs: HostileServer) -> None:
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"q": 1}'}}

    def stream() -> Iterator[bytes]:
        for delta in ({"reasoning_content": "Hmm."}, {"tool_calls": [call]}):
            yield b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta}]}).encode() + b"\n\n"
        yield chunk(finish="tool_calls")
        yield b"data: [DONE]\n\n"

    theirs.stream = stream
    said = say(page, "Look.", tools='[{"name": "look", "parameters": {"type": "object"}}]')
    assert "Hmm." in said
    assert "look" in said
    assert 'name="result-0"' in said


def test_files_and_pictures_go_to_the_server(page: httpx.Client, theirs: HostileServer) -> None:
    picture = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(picture, "PNG")
    files = [
        ("file", ("a.txt", b"The word is heron.", "text/plain")),
        ("file", ("b.png", picture.getvalue(), "image/png")),
    ]
    answer = page.post("/chat", data={"message": "What?"}, files=files, follow_redirects=True)
    assert ANSWER in answer.text
    shown, text = theirs.seen[-1][1]["messages"][-1]["content"]
    assert shown["image_url"]["url"].startswith("data:image/png;base64,iVBOR")
    assert "The word is heron." in text["text"]
    long = "heron " * 4_000
    files = [("file", ("long.txt", long.encode(), "text/plain"))]
    page.post("/chat", data={"message": "Which bird is it, heron?"}, files=files, follow_redirects=True)
    read = theirs.seen[-1][1]["messages"][-1]["content"]
    assert "Passages of the attached" in read
    assert len(read) < len(long)


def test_errors_of_the_server_are_the_replys(page: httpx.Client, theirs: HostileServer, front: Front) -> None:
    theirs.status, theirs.refusal = 400, "This context is too long."
    said = say(page, "Hi")
    assert "laptop refused the request." in said
    assert "This context is too long." in said
    theirs.status = 200

    def broken() -> Iterator[bytes]:
        yield chunk("The")
        yield b"data: {\n\n"

    theirs.stream = broken
    said = say(page, "Hi")
    assert "The" in said
    assert "laptop sent a broken answer." in said
    theirs.models = b"no"
    wait_until(lambda: not front.others.models())
    assert "theirs · not reached" in page.get("/", params={"model": "theirs"}).text
    assert "No upstream that has theirs answers." in say(page, "Hi", model="theirs")


def test_a_stopped_reply_ends_the_request(page: httpx.Client, theirs: HostileServer, front: Front) -> None:
    def endless() -> Iterator[bytes]:
        while not theirs.closed.wait(0.01):
            yield chunk("la ")

    theirs.stream = endless
    sent = page.post("/chat", data={"message": "Sing."}, headers={"HX-Request": "true"})
    chat = sent.headers["HX-Replace-Url"]
    wait_until(lambda: front.others.num_open == 1)
    assert page.post(f"{chat}/stop", headers={"HX-Request": "true"}).status_code == 204
    wait_until(lambda: front.others.num_open == 0)
    assert theirs.closed.wait(10)
    assert "stopped by you" in page.get(chat).text


def test_what_needs_the_tokenizer_is_refused_by_name(page: httpx.Client) -> None:
    said = say(page, "Hi")
    chat = re.search(r'name="conversation" value="([^"]+)"', said)
    assert chat is not None
    num_chats = page.get("/").text.count('class="chats__link')
    refused = page.post(f"/c/{chat[1]}/summary", data={"model": "theirs"})
    assert refused.status_code == 400
    assert "A summary is written by a model of this server." in refused.text
    assert page.get("/").text.count('class="chats__link') == num_chats  # no empty chat is left
    shown = page.post("/playground", data={"tab": "chat", "role": "user", "content": "Hi", "do": "prompt"})
    assert "The prompt of a model of another server is not shown." in shown.text
    assert page.post("/playground", data={"tab": "tokenize", "text": "Hi"}).status_code == 400


@pytest.mark.parametrize("streams", [False, True])
def test_the_playground_asks_the_server(page: httpx.Client, theirs: HostileServer, streams: bool) -> None:
    assert "theirs is a model of laptop." in page.get("/playground").text
    sent = {"tab": "chat", "role": "user", "content": "Hi", "model": "theirs", "temperature": "0.3"}
    headers = {"HX-Request": "true"} if streams else {}
    answer = page.post("/playground", data=sent | ({"stream": "yes"} if streams else {}), headers=headers)
    assert answer.status_code == 200
    for fact in (ANSWER, "Answered by", "laptop", "7 tokens", "5 tokens"):
        assert fact in answer.text
    assert theirs.seen[-1][1]["temperature"] == 0.3


def test_own_models_stay_this_servers(theirs: HostileServer, tmp_path: Path, own_data: None) -> None:
    """A model that runs here is answered here; both can be chosen, and two servers' replies compared."""
    own = fake_model(tmp_path / "own", PacedRunner())
    with Front(config_of(theirs, "laptop"), model=own, ui=True) as front, browser_of(front) as page:
        listed = page.get("/library").text
        assert "On other servers" in listed
        assert 'href="/?model=theirs"' in listed
        start = page.get("/").text
        assert re.search(r'value="tiny" selected.*value="theirs">theirs · on laptop', start)
        said = say(page, "Hi", max_tokens="4")
        assert not theirs.seen
        chat = re.search(r"/c/([\w-]+)/m/([\w-]+)/models\?compare", said)
        assert chat is not None
        compared = page.post(
            f"/c/{chat[1]}/m/{chat[2]}/answer",
            data={"model": "tiny", "beside": "theirs", "max_tokens": "4"},
            follow_redirects=True,
        )
        assert compared.status_code == 200
        wait_until(lambda: len(theirs.seen) == 1)
        wait_until(lambda: "".join(WORDS) in page.get(f"/c/{chat[1]}").text)
        assert 'name="model"' in page.get("/playground").text


# Tools of servers -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Front, HostileServer]]:
    """Pages whose new chats offer the tools of a server over stdio; another one can be chosen."""
    with pytest.MonkeyPatch.context() as patch, HostileServer("theirs") as other:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        patch.setattr(upstreams, "CHECK_EVERY_S", 0.2)
        servers = {"plain": hostile("plain"), "friendly": friendly(in_new_chats=False)}
        with Front(config_of(other, "laptop"), ui=True, mcp=servers) as front:
            yield front, other


def no_tools(body: dict[str, Any]) -> str:
    """The refusal of a server whose model cannot call tools."""
    return "This model does not support tools." if "tools" in body else ""


@pytest.mark.parametrize(
    ("server", "tool", "arguments", "result"),
    [
        ("plain", "tool", {"n": 1}, 'called with {"n": 1}'),
        pytest.param("friendly", "add", {"a": 2, "b": 40}, "42", marks=pytest.mark.slow),  # the official package
    ],
)
def test_an_upstream_calls_a_real_tool_after_consent(
    with_tools: tuple[Front, HostileServer], server: str, tool: str, arguments: dict[str, int], result: str
) -> None:
    front, theirs = with_tools
    function = {"name": tool, "arguments": json.dumps(arguments)}
    call = {"index": 0, "id": "c1", "type": "function", "function": function}

    def stream() -> Iterator[bytes]:
        yield b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]}).encode() + b"\n\n"
        yield chunk(finish="tool_calls")

    theirs.stream = stream
    with browser_of(front) as page:
        page.timeout = httpx.Timeout(90)
        asks = say(page, "Go.", mcp_shown="1", **{f"mcp-{server}": "on"})
        assert tool in {each["function"]["name"] for each in theirs.seen[-1][1]["tools"]}
        theirs.stream = good
        once = re.search(r'(?:form)?action="(/c/[^"]+/calls/0/once)"', asks)
        assert once is not None
        assert ANSWER in page.post(once[1], follow_redirects=True).text
    told = theirs.seen[-1][1]["messages"][-1]
    assert (told["role"], told["content"], told["tool_call_id"]) == ("tool", result, "c1")


def test_an_upstream_without_tools_answers_without_them(with_tools: tuple[Front, HostileServer]) -> None:
    """The first refusal is noted at the reply; then the drawer says it, and no tools are sent."""
    front, theirs = with_tools
    theirs.refuses = no_tools
    try:
        with browser_of(front) as page:
            before = len(theirs.seen)
            said = say(page, "Hi")
            assert ANSWER in said
            assert "The tools of servers are left out. laptop refused the request. This model does not" in said
            assert "theirs cannot call tools." in page.get("/").text
            said = say(page, "Hi again")
            assert ANSWER in said
            assert "are left out" not in said
            assert ["tools" in body for _, body, _ in theirs.seen[before:]] == [True, False, False]
            typed = say(page, "Look.", tools='[{"name": "look", "parameters": {"type": "object"}}]')
            assert "This model does not support tools." in typed  # asked for by name, so not left out
    finally:
        theirs.refuses = lambda body: ""


def test_a_listed_ability_is_believed(with_tools: tuple[Front, HostileServer]) -> None:
    front, theirs = with_tools
    [listed] = theirs.models
    theirs.models = [{**listed, "id": "plain", "capabilities": ["completion"]}]
    try:
        wait_until(lambda: "plain" in front.others.models())
        with browser_of(front) as page:
            assert "plain cannot call tools." in page.get("/", params={"model": "plain"}).text
            assert ANSWER in say(page, "Hi", model="plain")
        assert "tools" not in theirs.seen[-1][1]
    finally:
        theirs.models = [listed]
        wait_until(lambda: "theirs" in front.others.models())
