"""Input items: check them, bring them into one form, and turn them into messages for the chat template.

A parsed item has an id, a type and everything that its type needs, so that it can be stored, listed and read again. The
model's output of one turn is several items and one message.
Does not know: HTTP, where items are stored, how an answer is written.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from localllm.errors import InvalidParameter, UnsupportedParameter
from localllm.web.api.reading import text_field, wrong_type
from localllm.web.api.responses import client_tools, mcp_items

Item = dict[str, Any]
Message = dict[str, Any]

ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Type of a part -> the field that holds its text."""
NO_NAMES: Mapping[tuple[str, str], str] = MappingProxyType({})


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


# From the client to items ------------------------------------------------------------------------------------------


def read_items(given: str | Sequence[Mapping[str, Any]], kept: Callable[[str], Item | None]) -> list[Item]:
    """Return the items. `kept`: returns a stored item by its id, for references. Raises the error that names the
    invalid item.
    """
    if isinstance(given, str):
        return [_message({"role": "user", "content": given}, "input")]
    return [_item(item, f"input[{i}]", kept) for i, item in enumerate(given)]


def _item(item: Mapping[str, Any], where: str, kept: Callable[[str], Item | None]) -> Item:
    match item.get("type") or ("message" if "role" in item else "item_reference" if "id" in item else None):
        case "message":
            return _message(item, where)
        case "function_call":
            return _call(item, where)
        case "function_call_output":
            call_id = text_field(item, "call_id", where)
            return _new("fco", item, type="function_call_output", call_id=call_id, output=_output(item, where))
        case "reasoning":
            return _reasoning(item, where)
        case "item_reference":
            id = text_field(item, "id", where)
            if (found := kept(id)) is None:
                why = "Items are stored with their responses: only the newest, in memory."
                raise InvalidParameter(f"There is no item {id!r}.", why, "Send the item itself.", param=f"{where}.id")
            return found
        case str(kind) if kind in client_tools.PREFIXES or kind in client_tools.LEFT_OUT:
            output = _output(item, where) if kind in client_tools.OUTPUTS else None
            id = new_id(client_tools.PREFIXES.get(kind, "item"))
            return client_tools.read_client_item(item, where, id, output)
        case str(kind) if kind in mcp_items.PREFIXES:
            return mcp_items.read_mcp_item(item, where, new_id(mcp_items.PREFIXES[kind]))
        case kind:
            raise UnsupportedParameter(
                f"{where} is of type {kind!r}." if kind else f"{where} has no type.",
                "Supported: messages, calls of tools with their outputs, and reasoning.",
                param=where,
            )


def _new(prefix: str, given: Mapping[str, Any], **fields: Any) -> Item:
    id = given.get("id")
    return {"id": id if isinstance(id, str) and id else new_id(prefix), **fields, "status": "completed"}


def _message(item: Mapping[str, Any], where: str) -> Item:
    role = item.get("role")
    if role not in ROLES:
        raise InvalidParameter(f"Unknown role {role!r}.", f"Known: {', '.join(ROLES)}.", param=f"{where}.role")
    kind, content = "output_text" if role == "assistant" else "input_text", item.get("content")
    parts = [_part(kind, content)] if isinstance(content, str) else _parts(content, f"{where}.content", kind)
    return _new("msg", item, type="message", role=role, content=parts)


def _call(item: Mapping[str, Any], where: str) -> Item:
    arguments = text_field(item, "arguments", where)
    if not _is_json(arguments):
        raise InvalidParameter(f"{where}.arguments is not JSON.", f"Got {arguments!r:.80}.", param=f"{where}.arguments")
    name, call_id = text_field(item, "name", where), text_field(item, "call_id", where)
    space = {"namespace": text_field(item, "namespace", where)} if item.get("namespace") is not None else {}
    return _new("fc", item, type="function_call", call_id=call_id, name=name, **space, arguments=arguments)


def _output(item: Mapping[str, Any], where: str) -> str | list[Item]:
    output = item.get("output")
    return output if isinstance(output, str) else _parts(output, f"{where}.output", "input_text")


def _is_json(arguments: str) -> bool:
    try:
        json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return False
    return True


def _reasoning(item: Mapping[str, Any], where: str) -> Item:
    """Return a reasoning item with its content; if another server kept the content secret, with its summary."""
    for name, kind in (("content", "reasoning_text"), ("summary", "summary_text")):
        if not isinstance(parts := item.get(name) or [], list):
            raise wrong_type(f"{where}.{name}", "a list", parts)
        if parts:
            texts = [_part_text(part, f"{where}.{name}[{i}]", {kind: "text"}) for i, part in enumerate(parts)]
            content = [{"type": "reasoning_text", "text": text} for text in texts]
            return _new("rs", item, type="reasoning", summary=[], content=content)
    return _new("rs", item, type="reasoning", summary=[], content=[])


def _parts(content: object, where: str, kind: str) -> list[Item]:
    if not isinstance(content, list):
        raise wrong_type(where, "text or a list of parts", content)
    return [
        _picture(part) or _part(kind, _part_text(part, f"{where}[{i}]", TEXT_PARTS)) for i, part in enumerate(content)
    ]


def _picture(part: object) -> Item | None:
    """Return a part that is a picture or a sound; None for another one."""
    if isinstance(part, dict) and part.get("type") == "input_audio":
        sound = part.get("input_audio")
        return {"type": "input_audio", "input_audio": dict(sound) if isinstance(sound, dict) else {}}
    if not isinstance(part, dict) or part.get("type") != "input_image":
        return None
    pixels = {name: part[name] for name in ("min_pixels", "max_pixels") if name in part}
    return {"type": "input_image", "image_url": part.get("image_url") or "", "detail": part.get("detail"), **pixels}


def _part(kind: str, text: str) -> Item:
    return {"type": kind, "text": text} | ({"annotations": []} if kind == "output_text" else {})


def _part_text(part: object, where: str, known: Mapping[str, str]) -> str:
    if not isinstance(part, dict):
        raise wrong_type(where, "an object with a type", part)
    kind = part.get("type")
    if not isinstance(kind, str) or kind not in known:
        why = f"Supported: {', '.join(known)}."
        raise UnsupportedParameter(f"{where} is of type {kind!r}.", why, param=where)
    return text_field(part, known[kind], where)


# From items to messages --------------------------------------------------------------------------------------------


def messages_of(items: Sequence[Item], mcp_names: Mapping[tuple[str, str], str] = NO_NAMES) -> Iterator[Message]:
    """Yield the messages. `mcp_names`: (MCP server, tool) -> the name that the model uses. Raises `InvalidParameter` if
    a result has no call, or a call was not finished.
    """
    turn: Message | None = None  # the model's turn, while more items may belong to it
    names: dict[str, str] = {}  # call id -> name of the function
    for item in client_tools.as_functions(mcp_items.as_functions(items, mcp_names)):
        is_answer = item["type"] in ("reasoning", "function_call") or item.get("role") == "assistant"
        if turn is not None and not (is_answer and _goes_on(turn, item)):
            yield turn
            turn = None
        if is_answer:
            turn = turn or {"role": "assistant", "content": None}
            _say(turn, item, names)
        elif item["type"] == "message":
            yield {"role": item["role"], "content": _plain(item["content"])}
        else:
            yield _result(item, names)
    if turn is not None:
        yield turn


def _goes_on(turn: Message, item: Item) -> bool:
    """Return whether the item belongs to the same turn, in which reasoning, content and calls come in this order."""
    if item["type"] == "function_call":
        return True
    return "tool_calls" not in turn and turn["content"] is None


def _say(turn: Message, item: Item, names: dict[str, str]) -> None:
    if item["type"] == "message":
        turn["content"] = _plain(item["content"])
    elif item["type"] == "reasoning":
        said = [turn["reasoning_content"]] if "reasoning_content" in turn else []
        turn["reasoning_content"] = "\n".join([*said, *(part["text"] for part in item["content"])])
    else:
        if item["status"] == "incomplete" and not _is_json(item["arguments"]):  # stored like this by this server
            raise InvalidParameter(
                f"The call {item['call_id']} of {item['name']} is incomplete, so it cannot be continued.",
                f"Its arguments are {item['arguments']!r:.80}.",
                "Continue from the previous response, with a larger max_output_tokens.",
                param="previous_response_id",
            )
        names[item["call_id"]] = item["name"]
        function = {"name": item["name"], "arguments": item["arguments"]}
        turn.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})


def _result(item: Item, names: Mapping[str, str]) -> Message:
    if (id := item["call_id"]) not in names:
        raise InvalidParameter(
            f"No tool call found for function call output with call_id {id}.",
            "The call must come before its output.",
            "Send the function_call item too, or previous_response_id.",
            param="input",
        )
    output = item["output"]
    content = output if isinstance(output, str) else _plain(output)
    return {"role": "tool", "tool_call_id": id, "name": names[id], "content": content}


def _plain(parts: Sequence[Item]) -> str | list[Message]:
    """Return text if there is only one part and it has a text, because every template supports text."""
    if len(parts) == 1 and "text" in parts[0]:
        text: str = parts[0]["text"]
        return text
    return [{"type": "text", "text": part["text"]} if "text" in part else dict(part) for part in parts]
