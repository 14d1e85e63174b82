"""Tools of clients beside plain functions, as Codex sends them to /v1/responses: namespaces, tools with a text, hosted
tools, and the items of their calls.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest

from localllm.text.messages import TemplateTraits, plain_messages
from localllm.web.api.responses.client_tools import client_tools, plain_choice
from localllm.web.api.responses.items import messages_of, read_items
from tests.web.harness import events_of
from tests.web.live_server import LiveServer

PATH = "/v1/responses"
AGENT: dict[str, Any] = {"type": "function", "name": "spawn_agent", "parameters": {
    "type": "object", "properties": {"task": {"type": "string"}}, "required": ["task"]}}  # fmt: skip
SPACE: dict[str, Any] = {"type": "namespace", "name": "multi_agent_v1", "description": "Agents.", "tools": [AGENT]}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
PATCH: dict[str, Any] = {"type": "custom", "name": "apply_patch", "description": "Edit.", "format": GRAMMAR}
SHELL: dict[str, Any] = {"type": "function", "name": "shell"}
ASKED: dict[str, Any] = {"model": "tiny", "input": "Go.", "max_output_tokens": 120}


def call_of(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_a_function_of_a_namespace_is_called_and_mapped_back(hermes: LiveServer, say: Callable[[str], None]) -> None:
    say(call_of("multi_agent_v1__spawn_agent", task="look"))
    answer = hermes.post(PATH, {**ASKED, "tools": [SHELL, SPACE]}).json()
    (call,) = answer["output"]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "multi_agent_v1", "spawn_agent")
    assert json.loads(call["arguments"]) == {"task": "look"}
    done = {"type": "function_call_output", "call_id": call["call_id"], "output": "done"}
    follow = {**ASKED, "previous_response_id": answer["id"], "input": [done], "tools": [SHELL, SPACE]}
    assert hermes.post(PATH, follow).status_code == 200  # from the store
    sent = {**ASKED, "input": [{"role": "user", "content": "Go."}, call, done], "tools": [SHELL, SPACE]}
    assert hermes.post(PATH, sent).status_code == 200  # from the client


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_with_a_text_is_called_with_its_text(
    hermes: LiveServer, say: Callable[[str], None], stream: bool
) -> None:
    say(call_of("apply_patch", input="*** Begin\n+é\n"))
    answer = hermes.post(PATH, {**ASKED, "tools": [PATCH], "stream": stream})
    assert "'tools[0].format' is only described" in answer.headers["x-localllm-warning"]
    if stream:
        events = events_of(answer.text)
        kinds = [each["type"] for each in events if "custom_tool_call_input" in each["type"]]
        assert kinds == ["response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"]
        assert [each["sequence_number"] for each in events] == list(range(len(events)))
        item = next(each["item"] for each in events if each["type"] == "response.output_item.done")
    else:
        (item,) = answer.json()["output"]
    assert (item["type"], item["name"], item["status"]) == ("custom_tool_call", "apply_patch", "completed")
    assert item["input"] == "*** Begin\n+é\n"
    assert "arguments" not in item


def test_the_grammar_of_a_tool_is_described_to_the_model() -> None:
    (function,) = client_tools([PATCH]).functions
    assert "start: /.+/" in function["function"]["description"]
    assert function["function"]["parameters"]["required"] == ["input"]


def test_hosted_tools_are_left_out_with_a_warning(hermes: LiveServer) -> None:
    hosted: list[dict[str, Any]] = [
        {"type": "web_search", "external_web_access": False}, {"type": "image_generation"}, {"type": "local_shell"},
        {"type": "file_search", "vector_store_ids": []}, {"type": "web_search_preview_2025_03_11"},
    ]  # fmt: skip
    answer = hermes.post(PATH, {**ASKED, "max_output_tokens": 1, "tools": [SHELL, *hosted]})
    assert answer.status_code == 200, answer.text
    assert all(tool["type"] in answer.headers["x-localllm-warning"] for tool in hosted)
    for choice in (
        {"type": "web_search"},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "image_generation"}]},
    ):
        refused = hermes.post(PATH, {**ASKED, "tools": [SHELL, *hosted], "tool_choice": choice})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "custom", "name": "apply_patch"}, ["apply_patch"]),
        ({"type": "namespace", "name": "multi_agent_v1"}, ["multi_agent_v1__spawn_agent"]),
        ({"type": "function", "name": "spawn_agent", "namespace": "multi_agent_v1"}, ["multi_agent_v1__spawn_agent"]),
        ({"type": "function", "name": "shell"}, ["shell"]),
    ],
)
def test_a_choice_names_tools_as_the_client_does(choice: dict[str, Any], names: list[str]) -> None:
    assert [plain_choice(choice, client_tools([SHELL, PATCH, SPACE]))["name"]] == names


BAD_TOOLS: list[tuple[dict[str, Any], str]] = [
    ({"type": "robot"}, "tools[0].type"),
    ({"type": "namespace", "name": "a"}, "tools[0].tools"),
    ({"type": "namespace", "tools": []}, "tools[0].name"),
    ({"type": "namespace", "name": "a", "tools": [{"type": "custom", "name": "b"}]}, "tools[0].tools[0]"),
    ({"type": "custom", "name": "a", "format": {"type": "regex"}}, "tools[0].format"),
    ({"type": "custom"}, "tools[0].name"),
]


@pytest.mark.parametrize(("tool", "param"), BAD_TOOLS)
def test_bad_tools_are_named(hermes: LiveServer, tool: dict[str, Any], param: str) -> None:
    refused = hermes.post(PATH, {**ASKED, "tools": [tool]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_items_of_earlier_calls_become_messages() -> None:
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "Go."},
        {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search", "query": "q"}},
        {"type": "compaction", "encrypted_content": "x"},
        {"type": "custom_tool_call", "call_id": "a", "name": "apply_patch", "input": "+1"},
        {"type": "custom_tool_call_output", "call_id": "a", "output": "ok"},
        {"type": "local_shell_call", "call_id": "b", "status": "completed",
         "action": {"type": "exec", "command": ["ls"], "timeout_ms": None}},
        {"type": "local_shell_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "a.py"}]},
        {"type": "function_call", "call_id": "c", "namespace": "mcp__fs__", "name": "read", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "text"},
    ]  # fmt: skip
    messages = plain_messages(list(messages_of(read_items(items, lambda id: None))), TemplateTraits())
    assert [message["role"] for message in messages] == ["user", *["assistant", "tool"] * 3]
    called = [message["tool_calls"][0]["function"] for message in messages if "tool_calls" in message]
    assert [(call["name"], call["arguments"]) for call in called] == [
        ("apply_patch", {"input": "+1"}), ("local_shell", {"type": "exec", "command": ["ls"]}), ("mcp__fs__read", {}),
    ]  # fmt: skip
    assert [message["content"] for message in messages if message["role"] == "tool"] == ["ok", "a.py", "text"]


def test_items_without_a_text_are_accepted_with_a_warning(hermes: LiveServer) -> None:
    items = [{"type": "web_search_call", "status": "completed"}, {"role": "user", "content": "Hi"}]
    answer = hermes.post(PATH, {"input": items, "max_output_tokens": 1})
    assert "web_search_call" in answer.headers["x-localllm-warning"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_empty_probe_only_loads_the_model(hermes: LiveServer, stream: bool) -> None:
    answer = hermes.post(PATH, {"model": "tiny", "input": "", "max_output_tokens": 1, "stream": stream})
    assert answer.status_code == 200, answer.text
    response = events_of(answer.text)[-1]["response"] if stream else answer.json()
    assert (response["status"], response["output"], response["usage"]["total_tokens"]) == ("completed", [], 0)
    assert hermes.post(PATH, {"model": "tiny", "input": ""}).status_code == 400
    assert hermes.post(PATH, {"model": "tiny", "input": [], "max_output_tokens": 1}).status_code == 400
