"""Tools of MCP servers through /v1/responses: the official client over a real socket, a scripted model, servers."""

import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from localllm.serving.answers import generation
from localllm.web.access.keys import add_key, keys_path
from localllm.web.api.responses import mcp_rounds
from localllm.web.api.responses.asked import droppable
from localllm.web.pages.chat.state import chat_state_of
from tests.mcp.programs import friendly, hostile
from tests.web.harness import open_request
from tests.web.live_server import LiveServer, wait_until
from tests.web.scripted import Script, called

PATH = "/v1/responses"
ASKED: dict[str, Any] = {"model": "tiny", "input": "2 + 40?"}
ADD = called("add", {"a": 2, "b": 40})
FUNCTION: Any = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}


def entry(label: str, **fields: Any) -> Any:
    return {"type": "mcp", "server_label": label, **fields}


def kinds(answer: Any) -> list[str]:
    return [item.type for item in answer.output]


@pytest.fixture(scope="module")
def served(start: Callable[..., LiveServer], counted: Path) -> LiveServer:
    return start(
        friendly(api="run"),
        friendly("asking", api="ask"),
        hostile("plain"),
        hostile("changing", str(counted), api="ask"),
        *(hostile(mode, api="run") for mode in ("dies", "exits", "flood", "long")),
        hostile("hangs", api="run", timeout_s=0.2),
        hostile("plain", name="waits", api="run"),
        hostile("hangs", name="slow", api="run", timeout_s=600.0),
        hostile("plain", name="closed", api="off"),
        hostile("plain", name="disabled", api="run", enabled=False),
    )


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, served: LiveServer) -> Script:
    return Script().direct(monkeypatch, generation, served)


def client_of(server: LiveServer, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60)


@pytest.fixture
def sdk(served: LiveServer) -> Iterator[openai.OpenAI]:
    with client_of(served) as client:
        yield client


def decide(server: LiveServer, name: str, choice: str, owner: str = "", digest: str = "") -> None:
    """Write what an owner decided about all tools of a server, as the chat does. The server has listed its tools."""
    app = server.server.app
    path = chat_state_of(app).store.path
    assert path is not None
    if not path.exists():
        server.http.get("/chats/tools")
    with closing(sqlite3.connect(path, timeout=30)) as database, database:
        for tool in app.state.mcp.state(name).listing.tools:
            row = (owner, name, tool.name, digest or tool.digest, choice, 0.0)
            database.execute("INSERT OR REPLACE INTO tool_consent VALUES (?, ?, ?, ?, ?, ?)", row)


# Calls --------------------------------------------------------------------------------------------------------------


def test_a_call_runs_and_the_model_uses_its_result(sdk: openai.OpenAI, script: Script) -> None:
    script.says(f"Let me add.\n{ADD}", "It is 42.")
    tools = [entry("friendly", allowed_tools=["add"], require_approval="never")]
    found = sdk.responses.create(**ASKED, tools=tools)
    assert kinds(found) == ["mcp_list_tools", "message", "mcp_call", "message"]
    listed, _, call, _ = found.output
    assert listed.type == "mcp_list_tools"
    assert [(tool.name, tool.description) for tool in listed.tools] == [("add", "Add two whole numbers.")]
    assert call.type == "mcp_call"
    assert (call.server_label, call.name, json.loads(call.arguments)) == ("friendly", "add", {"a": 2, "b": 40})
    assert (call.output, call.error, call.status, call.approval_request_id) == ("42", None, "completed", None)
    assert (found.output_text, found.status) == ("Let me add.\nIt is 42.", "completed")
    assert "<tool_response>\n42\n</tool_response>" in script.prompts[1]
    assert len(script.prompts) == 2
    usage = found.usage
    assert usage is not None
    assert served_tokens(sdk, script.prompts) == usage.input_tokens, "the sum of the prompts of both rounds"
    assert 0 < usage.input_tokens_details.cached_tokens < usage.input_tokens
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens

    script.says("Still 42.")
    again = sdk.responses.create(model="tiny", input="Sure?", tools=tools, previous_response_id=found.id)
    assert kinds(again) == ["message"], "the list is in the conversation already"
    assert script.prompts[-1].startswith(script.prompts[1].removesuffix("<|im_start|>assistant\n")), "the same prompt"
    items: Any = [{"role": "user", "content": "2 + 40?"}, *[item.model_dump() for item in found.output]]
    sdk.responses.create(model="tiny", input=[*items, {"role": "user", "content": "Sure?"}], tools=tools, store=False)
    assert script.prompts[-1] == script.prompts[-2], "sent by the client or stored, the items are one prompt"


def served_tokens(sdk: openai.OpenAI, prompts: Sequence[str]) -> int:
    """The tokens of these prompts, as the server counts them."""
    with httpx.Client(base_url=str(sdk.base_url).removesuffix("v1/")) as http:
        counts = [http.post("/tokenize", json={"prompt": each, "add_special_tokens": False}).json() for each in prompts]
    return sum(each["count"] for each in counts)


def test_the_events_are_those_of_the_client(sdk: openai.OpenAI, script: Script) -> None:
    script.says(f"{ADD}\n{called('fail', {})}", "Done.")
    seen: list[Any] = []
    with sdk.responses.stream(**ASKED, tools=[entry("friendly", require_approval="never")]) as stream:
        seen += stream
        final = stream.get_final_response()
    assert [event.sequence_number for event in seen if hasattr(event, "sequence_number")][-1] > 20
    names = [event.type for event in seen if not event.type.endswith(".delta")]
    call = ["response.output_item.added", "response.mcp_call.in_progress", "response.mcp_call_arguments.done"]
    assert names[:6] == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.mcp_list_tools.in_progress", "response.mcp_list_tools.completed", "response.output_item.done",
    ]  # fmt: skip
    assert names[6:16] == [
        *call, *call, "response.mcp_call.completed", "response.output_item.done",
        "response.mcp_call.failed", "response.output_item.done",
    ]  # fmt: skip
    assert names[-1] == "response.completed"
    written = "".join(event.delta for event in seen if event.type == "response.mcp_call_arguments.delta")
    _, added, failed, message = final.output
    assert added.type == failed.type == "mcp_call"
    assert written == added.arguments + failed.arguments
    assert (added.output, message.type) == ("42", "message")
    assert (failed.output, failed.status) == (None, "failed")
    assert failed.error is not None
    assert failed.error.type == "mcp_tool_execution_error"
    assert "Error: " in script.prompts[1]
    assert "the disk is full" in script.prompts[1]
    for event in seen:
        item = getattr(event, "item", None)
        assert item is None or item.type in kinds(final)


def test_own_functions_and_servers_in_one_answer(sdk: openai.OpenAI, script: Script) -> None:
    script.says(f"{ADD}\n{called('weather', {})}", "Fine.")
    tools = [FUNCTION, entry("friendly", allowed_tools={"tool_names": ["add"]}, require_approval="never")]
    found = sdk.responses.create(**ASKED, tools=tools)
    assert kinds(found) == ["mcp_list_tools", "mcp_call", "function_call"]
    assert len(script.prompts) == 1, "the client's own function is the client's to run"
    own = found.output[2]
    assert own.type == "function_call"
    output: Any = [{"type": "function_call_output", "call_id": own.call_id, "output": "sunny"}]
    end = sdk.responses.create(model="tiny", input=output, tools=tools, previous_response_id=found.id)
    assert end.output_text == "Fine."
    assert script.prompts[1].index("\n42\n") < script.prompts[1].index("\nsunny\n")


def test_a_choice_names_a_tool_of_a_server_and_holds_for_one_round(sdk: openai.OpenAI, script: Script) -> None:
    script.says(ADD, "42.")
    tools = [FUNCTION, entry("friendly", require_approval="never")]
    choices: Any = (
        entry("friendly", name="add"),
        {"type": "allowed_tools", "mode": "required", "tools": [entry("friendly", name="add")]},
        "required",
    )
    for choice in choices:
        script.says(ADD, "42.")
        assert sdk.responses.create(**ASKED, tools=tools, tool_choice=choice).output_text == "42."
    with pytest.raises(openai.BadRequestError, match="not offered"):
        sdk.responses.create(**ASKED, tools=tools, tool_choice=entry("friendly", name="subtract"))


# Limits -------------------------------------------------------------------------------------------------------------


def test_a_chain_ends_with_an_answer(sdk: openai.OpenAI, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = [entry("friendly", require_approval="never")]
    monkeypatch.setattr(mcp_rounds, "MAX_ROUNDS", 2)
    script.says(ADD, ADD, "Enough.")
    found = sdk.responses.create(**ASKED, tools=tools)
    assert kinds(found)[1:] == ["mcp_call", "mcp_call", "message"]
    assert '"name": "add", "description"' not in script.prompts[2], "the last reply is offered no tools of servers"
    monkeypatch.undo()


def test_the_number_of_calls_is_limited(sdk: openai.OpenAI, script: Script) -> None:
    script.says(ADD + ADD + ADD, "Enough.")
    found = sdk.responses.create(**ASKED, tools=[entry("friendly", require_approval="never")], max_tool_calls=2)
    calls: list[Any] = [item for item in found.output if item.type == "mcp_call"]
    assert [call.status for call in calls] == ["completed", "completed", "failed"]
    assert "may run 2 calls" in calls[2].error.message
    assert "Add two whole numbers" not in script.prompts[1]
    assert found.output_text == "Enough."


def test_tokens_are_limited_over_all_rounds(sdk: openai.OpenAI, script: Script) -> None:
    script.says(ADD, "word " * 100)
    tools = [entry("friendly", require_approval="never")]
    found = sdk.responses.create(**ASKED, tools=tools, max_output_tokens=200)
    assert found.usage is not None
    assert (found.status, found.usage.output_tokens) == ("incomplete", 200)
    script.says(ADD)
    cut = sdk.responses.create(**ASKED, tools=tools, max_output_tokens=served_tokens(sdk, [ADD]) - 12)
    call = cut.output[1]
    assert call.type == "mcp_call"
    assert (cut.status, call.status, call.output) == ("incomplete", "incomplete", None)


@pytest.mark.parametrize(
    ("server", "says"),
    [("dies", "status 3"), ("flood", "messages"), ("hangs", "did not answer")],
)
def test_a_server_that_fails_is_told_to_the_model_and_the_client(
    sdk: openai.OpenAI, script: Script, server: str, says: str
) -> None:
    script.says(called(), "It is broken.")
    found = sdk.responses.create(**ASKED, tools=[entry(server, require_approval="never")])
    call: Any = found.output[1]
    assert (call.status, call.error.type) == ("failed", "mcp_protocol_error")
    assert says in call.error.message
    assert "The call failed." in script.prompts[1]
    assert found.output_text == "It is broken."


def test_a_long_result_is_cut_to_what_fits(sdk: openai.OpenAI, script: Script) -> None:
    script.says(called() + called(), "Long.")
    found = sdk.responses.create(**ASKED, tools=[entry("long", require_approval="never")])
    calls: list[Any] = [item for item in found.output if item.type == "mcp_call"]
    assert all("[cut: the result has 200,000 characters" in call.output for call in calls)
    assert found.output_text == "Long."


def test_arguments_that_cannot_be_used_fail_the_call(sdk: openai.OpenAI, script: Script) -> None:
    script.says(called("add", {"a": "x", "b": 1}), "Sorry.")
    found = sdk.responses.create(**ASKED, tools=[entry("friendly", require_approval="never")])
    call: Any = found.output[1]
    assert "do not fit the schema" in call.error.message


def test_a_client_that_leaves_ends_the_call(served: LiveServer, script: Script) -> None:
    script.says(called())
    slots = served.server.app.state.mcp._slots

    def running() -> int:
        return sum(slot.connection.calls for slot in slots.values() if slot.connection is not None)

    for stream in (True, False):
        asked = {**ASKED, "tools": [entry("slow", require_approval="never")], "stream": stream}
        with open_request(served, asked, PATH):
            wait_until(lambda: running() == 1)
        wait_until(lambda: running() == 0)
        served.wait_idle()


# Approval -----------------------------------------------------------------------------------------------------------


def test_the_client_approves_a_call_where_the_owner_lets_it(sdk: openai.OpenAI, script: Script) -> None:
    tools = [entry("asking")]
    script.says(f"I will add.\n{ADD}", "It is 42.")
    asked = sdk.responses.create(**ASKED, tools=tools)
    assert kinds(asked) == ["mcp_list_tools", "message", "mcp_approval_request"]
    request = asked.output[2]
    assert request.type == "mcp_approval_request"
    assert (request.server_label, request.name, json.loads(request.arguments)) == ("asking", "add", {"a": 2, "b": 40})
    yes: Any = [{"type": "mcp_approval_response", "approval_request_id": request.id, "approve": True}]
    found = sdk.responses.create(model="tiny", input=yes, tools=tools, previous_response_id=asked.id)
    assert kinds(found) == ["mcp_call", "message"]
    call: Any = found.output[0]
    assert (call.output, call.approval_request_id, found.output_text) == ("42", request.id, "It is 42.")
    later = sdk.responses.create(model="tiny", input="Thanks", tools=tools, previous_response_id=found.id)
    assert kinds(later) == ["message"], "the call is not run again"
    assert script.prompts[-1].count("<tool_response>") == 1
    with sdk.responses.stream(model="tiny", input=yes, tools=tools, previous_response_id=asked.id) as stream:
        names = [event.type for event in stream]
    assert "response.mcp_call.completed" in names

    no: Any = [{**yes[0], "approve": False, "reason": "too risky"}]
    script.says("A pity.")
    denied = sdk.responses.create(model="tiny", input=no, tools=tools, previous_response_id=asked.id)
    assert kinds(denied) == ["message"]
    assert "did not approve this call. It was not run. Reason: too risky" in script.prompts[-1]
    items: Any = [*[item.model_dump() for item in asked.output], *yes]
    kept = sdk.responses.create(model="tiny", input=[{"role": "user", "content": "2 + 40?"}, *items], tools=tools)
    assert kept.output[0].type == "mcp_call", "without previous_response_id"


def test_only_what_the_model_has_called_can_be_approved(
    served: LiveServer, sdk: openai.OpenAI, script: Script, counted: Path
) -> None:
    script.says(called(), "Never said.")
    tools: list[Any] = [entry("changing")]
    asked = sdk.responses.create(**ASKED, tools=tools)
    request: dict[str, Any] = asked.output[1].model_dump()
    yes = {"type": "mcp_approval_response", "approval_request_id": request["id"], "approve": True}
    question: Any = {"role": "user", "content": "go"}

    def refusal(*items: Any, tools: list[Any] = tools) -> str:
        with pytest.raises(openai.APIStatusError) as caught:
            sdk.responses.create(model="tiny", input=[question, *items], tools=tools)
        return str(caught.value)

    assert "has not asked for it" in refusal(request | {"arguments": '{"n": 7}'}, yes), "other arguments"
    made = request | {"id": "mcpr_1"}
    assert "has not asked for it" in refusal(made, yes | {"approval_request_id": "mcpr_1"})
    assert "no request for approval" in refusal(yes)
    assert "does not offer the tool" in refusal(request, yes, tools=[entry("asking")])
    counted.write_text("1")
    served.server.app.state.mcp._slots["changing"].listed_s = 0.0
    assert "has changed since" in refusal(request, yes), "another description"
    assert len(script.prompts) == 1, "nothing of this reached the model"


# Consent and keys ---------------------------------------------------------------------------------------------------


def test_without_consent_of_an_admin_nothing_runs(served: LiveServer, sdk: openai.OpenAI, script: Script) -> None:
    script.says(called(), "Ok.")
    for approval in ("never", "always", {"never": {"tool_names": ["tool"]}}):
        with pytest.raises(openai.PermissionDeniedError, match="may not call tool of plain"):
            sdk.responses.create(**ASKED, tools=[entry("plain", require_approval=approval)])
    decide(served, "plain", "always", digest="of an older tool")
    with pytest.raises(openai.PermissionDeniedError, match="as it is now"):
        sdk.responses.create(**ASKED, tools=[entry("plain", require_approval="never")])
    decide(served, "plain", "always", owner="somebody else")
    with pytest.raises(openai.PermissionDeniedError):
        sdk.responses.create(**ASKED, tools=[entry("plain", require_approval="never")])
    decide(served, "plain", "always")
    found = sdk.responses.create(**ASKED, tools=[entry("plain", require_approval="never")])
    assert found.output[1].type == "mcp_call"
    script.says(called(), "Ok.")
    assert kinds(sdk.responses.create(**ASKED, tools=[entry("plain")]))[-1] == "mcp_approval_request"
    decide(served, "plain", "never")
    with pytest.raises(openai.PermissionDeniedError):
        sdk.responses.create(**ASKED, tools=[entry("plain")])


def test_tools_that_may_not_run_are_left_out_with_a_warning(
    served: LiveServer, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    script.says("Hi.")
    served.post(PATH, {**ASKED, "tools": [entry("asking")]})
    decide(served, "asking", "never")
    only_add = served.server.app.state.tool_decisions

    async def all_but_add(owner: str) -> Any:
        return [each for each in await only_add(owner) if each.tool != "add"]

    monkeypatch.setitem(served.server.app.state, "tool_decisions", all_but_add)
    answered = served.post(PATH, {**ASKED, "tools": [entry("asking")]})
    listed = answered.json()["output"][0]["tools"]
    assert [tool["name"] for tool in listed] == ["add"]
    assert "left out: markup, picture, fail, environment" in answered.headers["x-localllm-warning"]
    refused = served.post(PATH, {**ASKED, "tools": [entry("asking", allowed_tools=["add", "fail"])]})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "tool_not_allowed")
    with_never = served.post(PATH, {**ASKED, "tools": [entry("asking", require_approval="never")]})
    assert with_never.status_code == 403
    assert 'Send require_approval \\"always\\"' in with_never.text


def test_keys_use_the_servers_that_their_scope_allows(start: Callable[..., LiveServer], script: Script) -> None:
    server = start(hostile("plain", api="run"), hostile("plain", name="shared", scope="infer", api="consent"))
    keys = {name: add_key(keys_path(), name, scope) for name, scope in (("boss", "admin"), ("ann", "infer"))}  # type: ignore[arg-type]
    wait_until(lambda: server.http.get("/v1/models").status_code == 401)
    never = {"require_approval": "never"}
    with client_of(server, keys["boss"]) as boss, client_of(server, keys["ann"]) as ann:
        with pytest.raises(openai.PermissionDeniedError, match="scope admin is required"):
            ann.responses.create(**ASKED, tools=[entry("plain", **never)])
        with pytest.raises(openai.BadRequestError, match="Configured: shared"):
            ann.responses.create(**ASKED, tools=[entry("other")])
        with pytest.raises(openai.PermissionDeniedError, match="An admin has not"):
            ann.responses.create(**ASKED, tools=[entry("shared")])
        decide(server, "shared", "always", owner=server.server.app.state.key_ring.find([keys["ann"].encode()]).owner)
        with pytest.raises(openai.PermissionDeniedError, match="An admin has not"):
            ann.responses.create(**ASKED, tools=[entry("shared", **never)])
        decide(server, "shared", "always")
        for client in (boss, ann):
            script.says(called(), "Ok.")
            assert client.responses.create(**ASKED, tools=[entry("shared", **never)]).output_text == "Ok."


# Bad input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        (entry("nowhere"), "tools[0].server_label", "Configured: friendly, asking, plain"),
        (entry("disabled"), "tools[0].server_label", "no MCP server 'disabled'"),
        ({"type": "mcp"}, "tools[0].server_label", "Missing"),
        (entry("friendly", server_url="https://example.com/mcp"), "tools[0].server_url", "that the owner"),
        (entry("friendly", connector_id="connector_gmail"), "tools[0].connector_id", "that the owner"),
        (entry("friendly", headers={"a": "b"}), "tools[0].headers", "sets the headers"),
        (entry("friendly", authorization="token"), "tools[0].authorization", "sets the headers"),
        (entry("friendly", allowed_tools=["subtract"]), "tools[0]", "Its tools: add, markup"),
        (entry("friendly", allowed_tools="add"), "tools[0].allowed_tools", "Expected"),
        (entry("friendly", allowed_tools={"read_only": True}), "tools[0].allowed_tools", "not trusted"),
        (entry("friendly", require_approval="sometimes"), "tools[0].require_approval", "Known: always, never"),
        (
            entry("friendly", require_approval={"always": {"tool_names": ["add"]}, "never": {"tool_names": ["add"]}}),
            "tools[0].require_approval",
            "in always and in never",
        ),
    ],
)  # fmt: skip
def test_bad_entries_are_named(served: LiveServer, fields: Any, param: str, says: str) -> None:
    refused = served.post(PATH, {**ASKED, "tools": [fields]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text
    assert says in refused.text


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "mcp_call", "server_label": "a", "name": "b"}, "input[0].arguments"),
        ({"type": "mcp_call", "server_label": "a", "name": "b", "arguments": "{}", "output": 3}, "input[0].output"),
        ({"type": "mcp_call", "server_label": "a", "name": "b", "arguments": "{}", "error": 3}, "input[0].error"),
        ({"type": "mcp_list_tools", "server_label": "a"}, "input[0].tools"),
        ({"type": "mcp_approval_response", "approval_request_id": "x"}, "input[0].approve"),
        ({"type": "mcp_approval_response", "approval_request_id": "x", "approve": True}, "input"),
        ({"type": "mcp_approval_request", "name": "x"}, "input[0].server_label"),
    ],
)
def test_bad_items_are_named(served: LiveServer, item: Any, param: str) -> None:
    refused = served.post(PATH, {**ASKED, "input": [item]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text


def test_refusals_that_are_not_the_fields(served: LiveServer, start: Callable[..., LiveServer]) -> None:
    twice = served.post(PATH, {**ASKED, "tools": [entry("friendly"), entry("friendly")]})
    assert (twice.status_code, twice.json()["error"]["param"]) == (400, "tools[1].server_label")
    closed = served.post(PATH, {**ASKED, "tools": [entry("closed")]})
    assert (closed.status_code, closed.json()["error"]["code"]) == (403, "tool_not_allowed")
    broken = served.post(PATH, {**ASKED, "tools": [entry("exits")]})
    assert (broken.status_code, broken.json()["error"]["code"]) == (502, "tool_server_failed")
    assert "missing configuration" in broken.text
    silent = start(friendly(api="run"), template="{% for m in messages %}{{ m.content }}{% endfor %}", ui=False)
    refused = silent.post(PATH, {**ASKED, "tools": [entry("friendly")]})
    assert refused.status_code == 400, refused.text
    assert "tools" in refused.json()["error"]["message"]


def test_a_request_for_approval_is_dropped_with_its_answer() -> None:
    items: list[dict[str, Any]] = [
        {"type": "message", "role": "user"},
        {"type": "mcp_approval_request", "id": "r"},
        {"type": "mcp_approval_response", "id": "a", "approval_request_id": "r"},
        {"type": "mcp_call", "id": "c", "approval_request_id": "r"},
        {"type": "mcp_call", "id": "d", "approval_request_id": None},
        {"type": "message", "role": "assistant"},
    ]
    assert droppable(items) == [[1, 2, 3], [4]]
