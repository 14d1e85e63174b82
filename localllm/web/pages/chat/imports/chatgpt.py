"""ChatGPT's export: `conversations.json`, a list of conversations, each a tree of messages.

    {"title", "current_node": id, "mapping": {id: {"parent": id, "children": [id], "message": {"author": {"role"},
     "content": {"content_type", "parts": [...]}, "create_time", "recipient", "metadata": {"model_slug"}}}}}

Messages of tools and hidden ones are left out; what a model wrote before and after a tool becomes one reply.
Does not know: other formats.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from localllm.web.pages.chat.imports.records import Imported, MessageTree, mapping, number, rows, string

_CITATION = re.compile("\ue200[^\ue201]*\ue201")
"""A reference to a search result, which only ChatGPT's own page shows."""


@dataclass(frozen=True, slots=True)
class _Above:
    """The nodes above a node of the tree."""

    message_id: str | None = None  # the last message that was imported
    node_id: str = ""  # its node, or the last node that was joined to it
    reasoning: str = ""  # reasoning that belongs to the next reply


def read(chat: Mapping[str, Any]) -> Imported | None:
    """Return the chat; None if it has no message."""
    nodes = {key: node for key, node in mapping(chat.get("mapping")).items() if isinstance(node, dict)}
    tree, last, kept = MessageTree(), dict[str, str](), dict[str, str | None]()
    roots = [
        key for key, node in nodes.items() if not isinstance(node.get("parent"), str) or node["parent"] not in nodes
    ]
    waiting = [(key, _Above()) for key in reversed(roots)]
    while waiting:
        key, above = waiting.pop()
        if key in kept:
            continue
        above = _imported(tree, last, key, mapping(nodes[key].get("message")), above)
        kept[key] = above.message_id
        children = nodes[key].get("children")
        below = [each for each in children if isinstance(each, str)] if isinstance(children, list) else []
        waiting += [(each, above) for each in reversed(below) if each in nodes]
    return tree.chat(string(chat.get("title")), "", kept.get(string(chat.get("current_node"))))


def _imported(tree: MessageTree, last: dict[str, str], key: str, message: Mapping[str, Any], above: _Above) -> _Above:
    """Add a node's message to the tree. `last`: the node that was joined last, for each imported message."""
    role, content = string(mapping(message.get("author")).get("role")), mapping(message.get("content"))
    facts = mapping(message.get("metadata"))
    if role == "assistant" and content.get("content_type") == "thoughts":
        found = [string(each.get("content")) or string(each.get("summary")) for each in rows(content.get("thoughts"))]
        return replace(above, reasoning="\n\n".join(part for part in (above.reasoning, *found) if part))
    text = _text(content)
    is_hidden = facts.get("is_visually_hidden_from_conversation") or message.get("recipient", "all") != "all"
    if role not in ("user", "assistant") or is_hidden or not text.strip():
        return above
    parent = above.message_id
    joins = parent is not None and role == "assistant" and tree.messages[parent].role == "assistant"
    if joins and parent is not None and last[parent] == above.node_id:
        tree.extend(parent, text, above.reasoning)
        last[parent] = key
        return _Above(parent, key)
    found_id = tree.add(
        "user" if role == "user" else "assistant", text, parent, reasoning=above.reasoning if role != "user" else "",
        created_s=number(message.get("create_time")), model=string(facts.get("model_slug")),
    )  # fmt: skip
    last[found_id] = key
    return _Above(found_id, key)


def _text(content: Mapping[str, Any]) -> str:
    """Return the text of a message; an image becomes a word for it."""
    parts = content.get("parts")
    if content.get("content_type") not in ("text", "multimodal_text") or not isinstance(parts, list):
        return ""
    found = [part if isinstance(part, str) else _part(mapping(part)) for part in parts]
    return _CITATION.sub("", "\n\n".join(part for part in found if part))


def _part(part: Mapping[str, Any]) -> str:
    return "[Image]" if part.get("content_type") == "image_asset_pointer" else string(part.get("text"))
