"""Open WebUI's export: a list of chats, each a tree of messages.

    {"title", "chat": {"title", "params": {"system"}, "history": {"currentId", "messages": {id: {"parentId", "role",
     "content", "timestamp", "model"}}}, "messages": [the shown branch]}}

A reply holds its reasoning and its tool calls as `<details type="...">` blocks in the text.
Does not know: other formats.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from typing import Any

from localllm.web.pages.chat.imports.records import Imported, MessageTree, mapping, number, rows, string

_DETAILS = re.compile(r'<details type="(reasoning|tool_calls|code_interpreter)"([^>]*)>(.*?)</details>\s*', re.DOTALL)
_SUMMARY = re.compile(r"<summary>.*?</summary>", re.DOTALL)
_NAME = re.compile(r'\bname="([^"]*)"')


def read(export: Mapping[str, Any]) -> Imported | None:
    """Return the chat; None if it has no message."""
    chat = mapping(export.get("chat"))
    history, tree, ids = mapping(chat.get("history")), MessageTree(), dict[str, str | None]()
    messages = mapping(history.get("messages"))
    if not messages:  # an old export has the shown branch alone
        messages = {f"{at}": {**each, "parentId": f"{at - 1}"} for at, each in enumerate(rows(chat.get("messages")))}
    for key in _parents_first(messages):
        message = mapping(messages[key])
        ids[key] = _imported(tree, message, ids.get(string(message.get("parentId"))))
    system = string(mapping(chat.get("params")).get("system")) or string(chat.get("system"))
    title = string(chat.get("title")) or string(export.get("title"))
    return tree.chat(title, system, ids.get(string(history.get("currentId"))))


def _parents_first(messages: Mapping[str, Any]) -> list[str]:
    """Return the keys so that a parent precedes its children; a message in a cycle is left out."""
    below: dict[str, list[str]] = {}
    for key, message in messages.items():
        parent = string(mapping(message).get("parentId"))
        below.setdefault(parent if parent in messages else "", []).append(key)
    found = below.get("", [])[:]
    for key in found:
        found += below.get(key, []) if key else []
    return found


def _imported(tree: MessageTree, message: Mapping[str, Any], parent: str | None) -> str | None:
    """Add a message; return its id, or that of its parent if the message has no text."""
    role, content = message.get("role"), message.get("content")
    text = (
        "\n".join(string(each.get("text")) for each in rows(content)) if isinstance(content, list) else string(content)
    )
    if role not in ("user", "assistant") or not text.strip():
        return parent
    created_s, model = number(message.get("timestamp")), string(message.get("model"))
    if role == "user":
        return tree.add("user", text, parent, created_s=created_s)
    thoughts = list[str]()
    text = _DETAILS.sub(lambda block: _replaced(block, thoughts), text)
    reasoning = "\n\n".join(thoughts)
    return tree.add("assistant", text.strip(), parent, reasoning=reasoning, created_s=created_s, model=model)


def _replaced(block: re.Match[str], thoughts: list[str]) -> str:
    """Return what a block of a reply becomes in its text: nothing for reasoning, its name for a tool call."""
    if block[1] != "reasoning":
        name = _NAME.search(block[2])
        return f"*Called {html.unescape(name[1])}.*\n\n" if name else ""
    lines = html.unescape(_SUMMARY.sub("", block[3])).strip().split("\n")
    thoughts.append("\n".join(line.removeprefix(">").removeprefix(" ") for line in lines).strip())
    return ""
