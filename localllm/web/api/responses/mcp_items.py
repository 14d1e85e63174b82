"""Items of MCP servers' tools: check those that clients send, and turn all into functions, calls and results.

An `mcp_call` has its result; an `mcp_approval_request` is a call that waits, and an `mcp_approval_response` answers it.
The id of a request for approval is signed, so that only calls that the model has made of a tool as it was then can be
approved.
Does not know: HTTP, which tools are offered, how calls are run.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from localllm.errors import InvalidParameter
from localllm.mcp.values import ServerTool
from localllm.web.api.reading import text_field, wrong_type

Item = dict[str, Any]

PREFIXES = {
    "mcp_list_tools": "mcpl",
    "mcp_call": "mcp",
    "mcp_approval_request": "mcpr",
    "mcp_approval_response": "mcpa",
}
"""Type of an item -> prefix of its ids."""
NOT_APPROVED = "The user did not approve this call. It was not run."
_SECRET = secrets.token_bytes(32)
"""Of this process: after a restart open requests for approval cannot be approved."""


def read_mcp_item(item: Mapping[str, Any], where: str, new_id: str) -> Item:
    """Return an item that a client sent. `new_id`: its id if it has none. Raises the error that names the field."""
    given = item.get("id")
    found: Item = {"id": given if isinstance(given, str) and given else new_id, "type": item["type"]}
    match item["type"]:
        case "mcp_list_tools":
            tools = item.get("tools")
            if not isinstance(tools, list):
                raise wrong_type(f"{where}.tools", "a list of tools", tools)
            return found | {"server_label": text_field(item, "server_label", where), "tools": tools, "error": None}
        case "mcp_approval_response":
            if not isinstance(item.get("approve"), bool):
                raise wrong_type(f"{where}.approve", "true or false", item.get("approve"))
            reason = text_field(item, "reason", where) if item.get("reason") is not None else None
            request_id = text_field(item, "approval_request_id", where)
            return found | {"approval_request_id": request_id, "approve": item["approve"], "reason": reason}
    call = {name: text_field(item, name, where) for name in ("server_label", "name", "arguments")}
    if item["type"] == "mcp_approval_request":
        return found | call
    return found | call | _result_fields(item, where)


def _result_fields(item: Mapping[str, Any], where: str) -> Item:
    output = text_field(item, "output", where) if item.get("output") is not None else None
    if not isinstance(error := item.get("error"), dict | str | None):
        raise wrong_type(f"{where}.error", "an object", error)
    approved = item.get("approval_request_id")
    if not isinstance(approved, str | None):
        raise wrong_type(f"{where}.approval_request_id", "text", approved)
    status = "failed" if error else "completed"
    return {"approval_request_id": approved, "output": output, "error": error, "status": item.get("status") or status}


# From items to functions -------------------------------------------------------------------------------------------


def as_functions(items: Sequence[Item], names: Mapping[tuple[str, str], str]) -> Iterator[Item]:
    """Yield the items with each call of a server's tool as a function call and its output. `names`: (server, tool) ->
    the name that the model uses. Raises `InvalidParameter` for an answer to a request that is not there.
    """
    answers, run = _answers(items), {item.get("approval_request_id") for item in items if item["type"] == "mcp_call"}
    for item in items:
        match item["type"]:
            case "mcp_call" if item["status"] not in ("incomplete", "in_progress", "calling"):
                yield from _call(item, names, result_of(item))
            case "mcp_approval_request" if item["id"] not in run:
                reason = answers[item["id"]]["reason"] if item["id"] in answers else None
                yield from _call(item, names, f"{NOT_APPROVED} Reason: {reason}" if reason else NOT_APPROVED)
            case kind if kind not in PREFIXES:
                yield item


def approved_calls(items: Sequence[Item]) -> list[Item]:
    """Return the requests for approval that were approved and have not been run."""
    answers, run = _answers(items), {item.get("approval_request_id") for item in items if item["type"] == "mcp_call"}
    return [
        item
        for item in items
        if item["type"] == "mcp_approval_request"
        and item["id"] not in run
        and item["id"] in answers
        and answers[item["id"]]["approve"]
    ]


def arguments_of(text: str) -> dict[str, Any] | None:
    """Return the arguments of a call; None if they are not one JSON object."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def result_of(call: Item) -> str:
    """Return what the model reads as the result of a call."""
    error = call["error"]
    if not error:
        return call["output"] or ""
    if isinstance(error, dict):
        content = error.get("content")
        parts = content if isinstance(content, list) else []
        texts = [str(part["text"]) for part in parts if isinstance(part, dict) and "text" in part]
        error = error.get("message") or "\n".join(texts)
    return f"Error: {error}"


def _answers(items: Sequence[Item]) -> dict[str, Item]:
    """Return the answers to requests for approval, by the id of the request."""
    asked = {item["id"] for item in items if item["type"] == "mcp_approval_request"}
    found = {item["approval_request_id"]: item for item in items if item["type"] == "mcp_approval_response"}
    if unknown := sorted(found.keys() - asked):
        raise InvalidParameter(
            f"There is no request for approval with the id {unknown[0][:80]!r}.",
            "An answer comes after the item mcp_approval_request.",
            "Send previous_response_id, or the item itself.",
            param="input",
        )
    return found


def _call(item: Item, names: Mapping[tuple[str, str], str], result: str) -> Iterator[Item]:
    name = names.get((item["server_label"], item["name"]), item["name"])
    arguments = item["arguments"] if arguments_of(item["arguments"]) is not None else "{}"
    call = {"type": "function_call", "call_id": item["id"], "name": name, "arguments": arguments or "{}"}
    yield {**call, "status": "completed"}
    yield {"type": "function_call_output", "call_id": item["id"], "output": result}


# Approval ----------------------------------------------------------------------------------------------------------


def approval_id(owner: str, tool: ServerTool, arguments: str) -> str:
    """Return the id of a request for approval of one call of a tool as it is now."""
    nonce = secrets.token_hex(8)
    return f"mcpr_{nonce}{_signature(nonce, owner, tool, arguments)}"


def is_approvable(id: str, owner: str, tool: ServerTool, arguments: str) -> bool:
    """Return whether this process made the id, for this owner, these arguments and the tool as it is now."""
    nonce, signature = id.removeprefix("mcpr_")[:16], id.removeprefix("mcpr_")[16:]
    return hmac.compare_digest(signature.encode(), _signature(nonce, owner, tool, arguments).encode())


def _signature(nonce: str, owner: str, tool: ServerTool, arguments: str) -> str:
    text = json.dumps([nonce, owner, tool.server, tool.name, tool.digest, arguments])
    return hmac.new(_SECRET, text.encode(), hashlib.sha256).hexdigest()[:32]
