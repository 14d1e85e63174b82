"""The tools of a chat as its forms have them: typed functions, chosen servers, and the results of the model's calls.

A call to a typed function is not run: the user types its result. Calls to servers are run by tool_runs.py.
Does not know: HTTP, templates, where chats are stored, which servers there are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from localllm.config.mcp_servers import McpServer
from localllm.errors import InvalidParameter
from localllm.web.api.tools import checked, read_tool
from localllm.web.pages.chat.store import StoredMessage
from localllm.web.pages.chat.template_messages import calls_of
from localllm.web.pages.frame.errors import MessageTooLong

NO_SERVERS = "-"
"""The value of the setting `mcp` if a chat has chosen no server."""
_CHOICE = re.compile(r"-|[a-z0-9_-]{1,32}( [a-z0-9_-]{1,32}){0,99}")
MAX_TOOLS_CHARS = 64 * 1024
MAX_RESULT_CHARS = 256 * 1024
EXAMPLE = """[{"name": "get_weather", "description": "Weather now",
  "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}]"""


def read_tools(text: str) -> list[dict[str, Any]]:
    """Return the functions, in OpenAI's format or without its outer object. Raises the error that names the wrong
    field.
    """
    if not text.strip():
        return []
    if len(text) > MAX_TOOLS_CHARS:
        why = f"It has {len(text):,} characters; at most {MAX_TOOLS_CHARS:,} are allowed here."
        raise MessageTooLong("The list of tools is too long.", why, "Use the API.")
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _unreadable(f"It is not JSON: {error}.") from error
    if not isinstance(found, list):
        raise _unreadable(f"It is {'an object, not a list' if isinstance(found, dict) else 'not a list'}.")
    tools = []
    for number, tool in enumerate(found):
        if not isinstance(tool, dict):
            raise _unreadable(f"tools[{number}] is not an object.")
        tools.append(read_tool(tool if "function" in tool else {"function": tool}, f"tools[{number}]"))
    return list(checked(tools, "tools"))  # type: ignore[arg-type]


def _unreadable(why: str) -> InvalidParameter:
    return InvalidParameter("Tools must be a JSON list of functions.", why, f"For example: {EXAMPLE}", param="tools")


def chosen_servers(form: Mapping[str, str], before: Mapping[str, str]) -> str:
    """Return the setting: names separated by spaces, NO_SERVERS, or empty if the chat has not chosen.

    The form has a check box for each server, and a field that tells that they were shown.
    """
    if "mcp_shown" in form:
        names = sorted(name.removeprefix("mcp-") for name in form if name.startswith("mcp-"))
        chosen = " ".join(names) or NO_SERVERS
    else:
        chosen = form.get("mcp", before.get("mcp", "")).strip()
    return chosen if _CHOICE.fullmatch(chosen) else ""


def is_chosen(server: McpServer, settings: Mapping[str, str]) -> bool:
    chosen = settings.get("mcp", "")
    return server.name in chosen.split() if chosen else server.in_new_chats


def results_of(message: StoredMessage, form: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the result of each call of a reply: what its server returned, else what was typed. Raises
    `InvalidParameter`.
    """
    calls = calls_of(message.details)
    if not calls:
        raise InvalidParameter("This reply calls no tool.", hint="Write a message instead.")
    results = []
    for number, call in enumerate(calls):
        stored = message.details["calls"][number]
        if stored.get("state") == "done":
            results.append({"id": call.id, "name": call.name, "text": stored["result"]})
            continue
        text = form.get(f"result-{number}", "").strip().replace("\r\n", "\n")
        if not text:
            raise InvalidParameter(f"The result of {call.name} is empty.", hint="Type the result of the call.")
        if len(text) > MAX_RESULT_CHARS:
            why = f"It has {len(text):,} characters; at most {MAX_RESULT_CHARS:,} are allowed here."
            raise MessageTooLong(f"The result of {call.name} is too long.", why, "Send a part of it.")
        results.append({"id": call.id, "name": call.name, "text": text})
    return results
