"""Other servers behind this address, over real sockets: each dialect, and each way in which a server can misbehave."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

from localllm.config.upstreams import UpstreamConfig, read_upstreams
from localllm.fleet import sse, upstream, upstreams
from tests.fleet.front import ANSWER, CHAT, MESSAGES, Front, config_of
from tests.fleet.hostile import ROLE, HostileServer, chunk, good
from tests.web.live_server import LiveServer, PacedRunner, fake_model, wait_until


def behind_another(server: LiveServer) -> Front:
    return Front(UpstreamConfig("behind", f"{server.url}/v1"))


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstreams, "CHECK_EVERY_S", 0.2)


@pytest.fixture
def theirs() -> Iterator[HostileServer]:
    with HostileServer("theirs") as server:
        yield server


@pytest.fixture
def front(theirs: HostileServer) -> Iterator[Front]:
    with Front(config_of(theirs, "laptop")) as server:
        yield server


@pytest.fixture
def two() -> Iterator[tuple[Front, dict[str, HostileServer]]]:
    """A server in front of two others that have the same model."""
    with ExitStack() as stack:
        servers = {name: stack.enter_context(HostileServer("theirs")) for name in ("first", "second")}
        front = stack.enter_context(Front(*(config_of(each, name) for name, each in servers.items())))
        yield front, servers


# The dialects ---------------------------------------------------------------------------------------------------------


def test_openai_clients_reach_an_upstream(front: Front) -> None:
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(**CHAT)  # type: ignore[call-overload]
        assert (whole.choices[0].message.content, whole.model, whole.usage.total_tokens) == (ANSWER, "theirs", 12)
        pieces = list(client.chat.completions.create(**CHAT, stream=True))  # type: ignore[call-overload]
        assert "".join(each.choices[0].delta.content or "" for each in pieces if each.choices) == ANSWER
        assert client.completions.create(model="theirs", prompt="Why").choices[0].text == ANSWER
        assert [each.id for each in client.models.list()] == ["theirs"]
        assert client.models.retrieve("theirs").owned_by == "laptop"


def test_fields_that_this_server_does_not_know_are_passed_on(front: Front, theirs: HostileServer) -> None:
    assert front.chat(mirostat=2, stop=["x"]).status_code == 200
    _, body, headers = theirs.seen[-1]
    assert (body["mirostat"], body["stop"], headers[upstream.FORWARDED]) == (2, ["x"], "1")


@pytest.mark.parametrize("streams", [False, True])
def test_anthropics_clients_reach_an_upstream(front: Front, theirs: HostileServer, streams: bool) -> None:
    asked: dict[str, Any] = {
        "model": "theirs",
        "max_tokens": 20,
        "system": "Be brief.",
        "messages": [
            {"role": "user", "content": "Look it up."},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "look", "input": {"q": "sky"}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "blue"}]},
        ],
        "tools": [{"name": "look", "input_schema": {"type": "object"}}],
        "stop_sequences": ["END"],
    }
    with anthropic.Anthropic(base_url=front.url, api_key="none", max_retries=0) as client:
        if streams:
            with client.messages.stream(**asked) as stream:
                said = stream.get_final_message()
        else:
            said = client.messages.create(**asked)
    assert (said.content[0].text, said.stop_reason, said.model) == (ANSWER, "end_turn", "theirs")  # type: ignore[union-attr]
    assert (said.usage.input_tokens, said.usage.output_tokens) == (7, 5)
    body = theirs.seen[-1][1]
    assert [each["role"] for each in body["messages"]] == ["system", "user", "assistant", "tool"]
    assert json.loads(body["messages"][2]["tool_calls"][0]["function"]["arguments"]) == {"q": "sky"}
    assert (body["stop"], body["max_tokens"], body["tools"][0]["function"]["name"]) == (["END"], 20, "look")


def test_ollamas_clients_reach_an_upstream(front: Front, theirs: HostileServer) -> None:
    client = ollama.Client(host=front.url)
    whole = client.chat(model="theirs:latest", messages=MESSAGES, options={"num_predict": 9}, stream=False)
    assert (whole.message.content, whole.prompt_eval_count, whole.eval_count) == (ANSWER, 7, 5)
    assert theirs.seen[-1][1]["max_tokens"] == 9
    assert (
        "".join(each.response or "" for each in client.generate(model="theirs", prompt="Why?", stream=True)) == ANSWER
    )
    assert "theirs" in [each.model for each in client.list().models]
    client._client.close()


def test_calls_of_tools_and_reasoning_are_translated(front: Front, theirs: HostileServer) -> None:
    def calls() -> Iterator[bytes]:
        piece = {"index": 0, "id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"q"'}}
        for delta in (
            {"reasoning_content": "Hm."},
            {"tool_calls": [piece]},
            {"tool_calls": [{"index": 0, "function": {"arguments": ': "sky"}'}}]},
        ):
            yield b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta}]}).encode() + b"\n\n"
        yield chunk(finish="tool_calls")

    theirs.stream = calls
    body = {"model": "theirs", "max_tokens": 9, "messages": [{"role": "user", "content": "Look."}]}
    said = front.post("/v1/messages", {**body, "tools": [{"name": "look", "input_schema": {"type": "object"}}]}).json()
    assert said["stop_reason"] == "tool_use"
    assert [each["type"] for each in said["content"]] == ["thinking", "tool_use"]
    assert said["content"][1]["input"] == {"q": "sky"}


def test_responses_of_an_upstream_are_stored_and_continued(front: Front, theirs: HostileServer) -> None:
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as client:
        asked: dict[str, Any] = {"model": "theirs", "instructions": "Be brief.", "temperature": 0.5}
        tool = {"type": "function", "name": "look", "parameters": {"type": "object"}}
        whole = client.responses.create(**asked, input="Why?", tools=[tool], reasoning={"effort": "low"})
        assert (whole.output_text, whole.status, whole.usage.total_tokens) == (ANSWER, "completed", 12)
        body = theirs.seen[-1][1]
        told = body["messages"], body["temperature"], body["reasoning_effort"], body["tools"][0]["function"]["name"]
        system, question = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}
        assert told == ([system, question], 0.5, "low", "look")
        with client.responses.stream(**asked, input="And?", previous_response_id=whole.id) as stream:
            again = stream.get_final_response()
        assert (again.output_text, again.model) == (ANSWER, "theirs")
        said = [(each["role"], each["content"]) for each in theirs.seen[-1][1]["messages"]]
        assert said == [("system", "Be brief."), ("user", "Why?"), ("assistant", ANSWER), ("user", "And?")]
    schema = {"type": "json_schema", "name": "a", "schema": {"type": "object"}}
    assert front.post("/v1/responses", {**asked, "input": "x", "text": {"format": schema}}).status_code == 200
    form = theirs.seen[-1][1]["response_format"]
    assert form == {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    mcp = {"type": "mcp", "server_label": "time"}
    refused = front.post("/v1/responses", {**asked, "input": "x", "tools": [mcp]})
    assert refused.json()["error"]["param"] == "tools"


def test_endpoints_that_are_not_passed_on_say_so(front: Front) -> None:
    refused = front.post("/v1/responses/input_tokens", {"model": "theirs", "input": "Hi"})
    assert refused.status_code == 400
    assert "theirs is a model of laptop" in refused.json()["error"]["message"]


# Servers that misbehave -----------------------------------------------------------------------------------------------


def cut() -> Iterator[bytes]:
    yield ROLE
    yield chunk("The")


def not_json() -> Iterator[bytes]:
    yield chunk("The")
    yield b"data: {oops\n\n"


def a_list() -> Iterator[bytes]:
    yield chunk("The")
    yield b"data: [1, 2]\n\n"


def an_error() -> Iterator[bytes]:
    yield chunk("The")
    yield b'data: {"error": {"message": "out of memory"}}\n\n'


def endless_line() -> Iterator[bytes]:
    yield chunk("The") + b"data: "
    while True:
        yield b"a" * 65536


def endless_events() -> Iterator[bytes]:
    yield chunk("The")
    while True:
        yield chunk("a" * 4000) * 16


def silence() -> Iterator[bytes]:
    yield chunk("The")
    time.sleep(30)


def comments() -> Iterator[bytes]:
    yield chunk("The")
    while True:
        yield b": ping\n\n"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("stream", "words"),
    [
        (cut, "ended its answer too early"),
        (not_json, "is not JSON"),
        (a_list, "type list"),
        (an_error, "out of memory"),
        (endless_line, "An event of its answer is longer"),
        (endless_events, "Its answer is longer"),
        (silence, "sent no"),
        (comments, "sent no part"),
    ],
)
def test_a_broken_answer_ends_with_an_error_that_names_the_server(
    two: tuple[Front, dict[str, HostileServer]],
    monkeypatch: pytest.MonkeyPatch,
    stream: Callable[[], Iterator[bytes]],
    words: str,
) -> None:
    """The other server could answer, but the client has had a part of this answer."""
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 2**20)
    monkeypatch.setattr(sse, "MAX_ANSWER_BYTES", 2**22)
    front, servers = two
    for each in front.others.all:
        each._timeout_s = 1.0
    for server in servers.values():
        server.stream = stream
    said, errors = front.streamed()
    assert said.startswith("The")
    assert len(errors) == 1
    assert errors[0]["message"].startswith(("first ", "second "))
    assert words in errors[0]["message"]
    assert errors[0]["code"] == "upstream_failed"
    assert sum(len(server.seen) for server in servers.values()) == 1


def before_a_token(kind: str) -> Callable[[], Iterator[bytes]]:
    def stream() -> Iterator[bytes]:
        yield ROLE
        yield {"cut": b"", "not JSON": b"data: {\n\n", "error": b'data: {"error": "no memory"}\n\n'}[kind]

    return stream


@pytest.mark.parametrize("kind", ["cut", "not JSON", "error"])
@pytest.mark.parametrize("dialect", ["openai", "anthropic", "ollama"])
def test_an_answer_without_a_token_is_asked_for_elsewhere(
    two: tuple[Front, dict[str, HostileServer]], kind: str, dialect: str
) -> None:
    front, servers = two
    servers["first"].stream = before_a_token(kind)
    for _ in range(2):  # one of the two goes to the first server
        if dialect == "openai":
            assert front.streamed() == (ANSWER, [])
        elif dialect == "anthropic":
            said = front.post("/v1/messages", {**CHAT, "max_tokens": 9}).json()
            assert said["content"][0]["text"] == ANSWER
        else:
            said = front.post("/api/chat", {**CHAT, "stream": False}).json()
            assert said["message"]["content"] == ANSWER
    first, second = front.others.all
    assert (first.stats.retried, second.stats.routed["retry"], second.stats.requests["ok"]) == (1, 1, 2)


@pytest.mark.parametrize("status", [500, 502, 503, 429])
def test_a_failing_server_is_not_noticed_where_another_has_the_model(
    two: tuple[Front, dict[str, HostileServer]], status: int
) -> None:
    front, servers = two
    servers["first"].status = status
    assert [front.chat().status_code for _ in range(4)] == [200] * 4
    assert [front.streamed() for _ in range(2)] == [(ANSWER, [])] * 2


def test_a_refusal_is_the_servers_and_is_not_retried(two: tuple[Front, dict[str, HostileServer]]) -> None:
    front, servers = two
    for server in servers.values():
        server.status, server.refusal = 422, "temperature is too high"
    refused = front.chat()
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (422, "theirs")
    assert "temperature is too high" in error["message"]
    assert sum(len(server.seen) for server in servers.values()) == 1


def test_a_refused_key_is_this_servers_trouble(front: Front, theirs: HostileServer) -> None:
    theirs.status, theirs.refusal = 401, "wrong key"
    refused = front.chat()
    assert (refused.status_code, refused.json()["error"]["code"]) == (502, "upstream_failed")
    assert "--upstream-api-key" in refused.json()["error"]["message"]


def test_a_server_that_lies_about_its_models_is_asked_once(two: tuple[Front, dict[str, HostileServer]]) -> None:
    front, servers = two
    servers["first"].status, servers["first"].refusal = 404, "no such model"
    assert [front.chat().status_code for _ in range(4)] == [200] * 4
    assert len(servers["first"].seen) == 1
    servers["second"].status = 404
    assert front.chat().status_code == 502
    refused = front.chat()
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "upstream_unavailable")
    assert "first lists it, and refused it a moment ago" in refused.json()["error"]["message"]


@pytest.mark.parametrize("models", [b"[1, 2", b'"x"', b'{"data": 5}', b"x" * 2**20])
def test_a_server_without_a_list_of_models_is_down(front: Front, theirs: HostileServer, models: bytes) -> None:
    wait_until(lambda: front.others.all[0].is_up)
    theirs.models = models
    wait_until(lambda: not front.others.all[0].is_up)
    refused = front.chat()
    assert refused.status_code == 503
    assert "laptop sent" in refused.json()["error"]["message"]


def test_a_server_that_is_slow_to_list_its_models_keeps_no_request_waiting(
    two: tuple[Front, dict[str, HostileServer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    front, servers = two
    assert front.chat().status_code == 200
    monkeypatch.setattr(upstream, "CHECK_S", 0.2)
    servers["first"].list_delay_s = 1.0
    wait_until(lambda: not front.others.all[0].is_up)
    began_s = time.monotonic()
    assert front.chat().status_code == 200
    assert time.monotonic() - began_s < 0.5
    assert "first" in str(front.others.all[0].failure)
    servers["first"].list_delay_s = 0.0
    wait_until(lambda: front.others.all[0].is_up)


def test_names_that_no_request_could_have_are_left_out(theirs: HostileServer) -> None:
    theirs.models = [{"id": "a" * 301}, {"id": 5}, "x", {"id": "a\nb"}, {"id": ""}, {}, {"id": "good"}]
    with Front(config_of(theirs, "laptop")) as front:
        wait_until(lambda: front.others.all[0].is_up)
        assert list(front.others.models()) == ["good"]


def test_a_server_that_comes_back_is_used_again(front: Front, theirs: HostileServer) -> None:
    assert front.chat().status_code == 200
    good_models, theirs.models = theirs.models, b"broken"
    wait_until(lambda: not front.others.all[0].is_up)
    assert front.get("/v1/models").json()["data"] == []
    theirs.models = good_models
    wait_until(lambda: front.others.all[0].is_up)
    assert front.chat().status_code == 200


def test_a_server_that_is_gone_is_named(front: Front, theirs: HostileServer) -> None:
    assert front.chat().status_code == 200
    theirs.stop()
    wait_until(lambda: not front.others.all[0].is_up)
    refused = front.chat()
    assert refused.status_code == 503
    assert "laptop" in refused.json()["error"]["message"]


def test_a_client_that_leaves_ends_the_request_of_the_upstream(front: Front, theirs: HostileServer) -> None:
    theirs.stream = endless_events
    with front.http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as answer:
        next(answer.iter_bytes())
    assert theirs.closed.wait(10)
    wait_until(lambda: front.others.all[0].num_open == 0 and front.others.num_open == 0)
    assert front.others.all[0].stats.requests["cancelled"] == 1


def test_a_flood_does_not_harm_other_streams(two: tuple[Front, dict[str, HostileServer]]) -> None:
    front, servers = two
    servers["first"].stream = endless_events
    left = threading.Event()

    def read_the_flood() -> None:
        pinned = {"x-localllm-upstream": "first"}
        body = {**CHAT, "stream": True}
        with (
            httpx.Client(base_url=front.url, timeout=20) as http,
            http.stream("POST", "/v1/chat/completions", json=body, headers=pinned) as answer,
        ):
            for _ in answer.iter_raw():
                if left.is_set():
                    return

    reader = threading.Thread(target=read_the_flood)
    reader.start()
    try:
        wait_until(lambda: front.others.all[0].num_open == 1)
        assert [front.streamed() for _ in range(10)] == [(ANSWER, [])] * 10
    finally:
        left.set()
        reader.join(20)


# Which server ---------------------------------------------------------------------------------------------------------


def test_a_header_pins_the_server(two: tuple[Front, dict[str, HostileServer]]) -> None:
    front, servers = two
    for name in ("second", "second", "first"):
        answer = front.post("/v1/chat/completions", CHAT, headers={"x-localllm-upstream": name})
        assert answer.headers["x-localllm-upstream"] == name
    assert (len(servers["first"].seen), len(servers["second"].seen)) == (1, 2)
    unknown = front.post("/v1/chat/completions", CHAT, headers={"x-localllm-upstream": "third"})
    assert unknown.status_code == 400
    assert "first, second" in unknown.json()["error"]["message"]


def test_conversations_stay_where_their_prefix_is(two: tuple[Front, dict[str, HostileServer]]) -> None:
    front, servers = two
    turns = [[{"role": "user", "content": f"{start} {'word ' * 400}"}] for start in ("One.", "Two.", "Three.", "Four.")]
    for _ in range(4):
        for messages in turns:
            assert front.streamed(messages=messages)[0] == ANSWER
            messages += [{"role": "assistant", "content": ANSWER}, {"role": "user", "content": "And then?"}]
    for server in servers.values():
        starts = [body["messages"][0]["content"][:5] for _, body, _ in server.seen]
        assert {starts.count(start) for start in set(starts)} == {4}  # all turns of a conversation, or none


def test_a_model_that_is_here_too_is_answered_by_both(tmp_path: Path) -> None:
    with (
        HostileServer("tiny") as other,
        Front(config_of(other, "laptop"), model=fake_model(tmp_path, PacedRunner())) as front,
    ):
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        by = [front.post("/v1/chat/completions", body).headers.get("x-localllm-upstream", "here") for _ in range(6)]
        assert set(by) == {"here", "laptop"}
        pinned = front.post("/v1/chat/completions", body, headers={"x-localllm-upstream": "here"})
        assert "x-localllm-upstream" not in pinned.headers
        assert [each["id"] for each in front.get("/v1/models").json()["data"]] == ["tiny"]


def test_two_servers_may_be_upstreams_of_each_other(tmp_path: Path) -> None:
    """A request that was passed on is answered by the server that receives it."""
    with LiveServer(fake_model(tmp_path, PacedRunner())) as behind, behind_another(behind) as front:
        wait_until(lambda: front.others.all[0].is_up)
        with Front(UpstreamConfig("front", f"{front.url}/v1")) as third:  # its upstream has no model of its own
            wait_until(lambda: third.others.all[0].is_up)
            assert third.others.models() == {}
        assert front.chat(model="tiny", max_tokens=4).json()["choices"][0]["finish_reason"] == "length"


def test_keys_are_checked_here_and_another_is_sent(theirs: HostileServer) -> None:
    servers = (config_of(theirs, "laptop", api_key="for-laptop"),)
    with Front(*servers, api_key=("ours",), upstream_api_key="for-all") as front:
        assert front.chat().status_code == 401
        answer = front.post("/v1/chat/completions", CHAT, headers={"authorization": "Bearer ours"})
        assert answer.status_code == 200
        assert theirs.seen[-1][2]["authorization"] == "Bearer for-laptop"


def test_only_named_models_of_an_upstream_are_used() -> None:
    with HostileServer("one", "two") as server, Front(config_of(server, "laptop", models=("two",))) as front:
        wait_until(lambda: front.others.all[0].is_up)
        assert list(front.others.models()) == ["two"]
        assert front.chat(model="one").status_code == 404


def test_a_second_localllm_answers_in_all_dialects(tmp_path: Path) -> None:
    with LiveServer(fake_model(tmp_path, PacedRunner())) as behind, behind_another(behind) as front:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6, "temperature": 0}
        direct = behind.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
        assert front.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"] == direct
        assert front.post("/v1/messages", body).json()["content"][0]["text"] == direct
        options = {"num_predict": 6, "temperature": 0}
        lines = front.post("/api/chat", {"model": "tiny", "messages": body["messages"], "options": options}).text
        assert "".join(json.loads(each)["message"]["content"] for each in lines.splitlines()) == direct
        assert front.streamed(**body) == (direct, [])


# What is seen ---------------------------------------------------------------------------------------------------------


def test_metrics_have_a_series_for_each_server(theirs: HostileServer, tmp_path: Path) -> None:
    with Front(config_of(theirs, "laptop"), model=fake_model(tmp_path, PacedRunner())) as front:
        assert front.streamed() == (ANSWER, [])
        text = front.get("/metrics").text
    assert 'localllm:upstream_up{upstream="laptop"} 1.0' in text
    assert 'localllm:upstream_requests_total{outcome="ok",upstream="laptop"} 1.0' in text
    assert 'localllm:upstream_generation_tokens_total{upstream="laptop"} 5.0' in text


def test_the_dashboard_has_a_tile_for_each_server(theirs: HostileServer, tmp_path: Path, own_data: None) -> None:
    with Front(config_of(theirs, "laptop"), model=fake_model(tmp_path, PacedRunner()), ui=True) as front:
        wait_until(lambda: front.others.all[0].is_up)
        page = front.get("/dashboard").text
        assert all(words in page for words in ("Other servers", "laptop", "theirs"))
        theirs.models = b"broken"
        wait_until(lambda: not front.others.all[0].is_up)
        assert "laptop sent a broken answer" in front.get("/dashboard").text


# Settings -------------------------------------------------------------------------------------------------------------


def test_tables_and_flags_name_upstreams() -> None:
    table = {"desk": {"url": "http://desk:9000", "weight": 2, "api_key": "k", "models": ["a"]}}
    found = read_upstreams(table, ["laptop=http://10.0.0.2:8000/", "https://example.com/v1beta/openai"], "config.toml")
    assert found["desk"] == UpstreamConfig("desk", "http://desk:9000/v1", "k", 2.0, ("a",))
    assert found["laptop"].url == "http://10.0.0.2:8000/v1"
    assert found["example.com:443"].url == "https://example.com/v1beta/openai"


@pytest.mark.parametrize(
    ("table", "asked", "words"),
    [
        ({"a": {"url": "ftp://x"}}, [], "url"),
        ({"a": {"url": "http://x", "weight": 0}}, [], "weight"),
        ({"a": {"url": "http://x", "weight": True}}, [], "weight"),
        ({"a": {"url": "http://x", "models": "m"}}, [], "models"),
        ({"a": {"url": "http://x", "api_key": "a\nb"}}, [], "api_key"),
        ({"a": {"url": "http://x", "speed": 1}}, [], "speed"),
        ({"a": 5}, [], "upstreams"),
        ({"a": {"url": "http://x"}}, ["a=http://y"], "Two upstreams"),
    ],
)
def test_wrong_tables_are_refused_by_name(table: Any, asked: list[str], words: str) -> None:
    from localllm.errors import ConfigError

    with pytest.raises(ConfigError, match=words):
        read_upstreams(table, asked, "config.toml")


def test_good_is_good() -> None:
    """The server of these tests speaks the protocol unless it is told otherwise."""
    assert b"".join(good()).endswith(b"[DONE]\n\n")
    assert replace(UpstreamConfig("a", "b")) == UpstreamConfig("a", "b")
