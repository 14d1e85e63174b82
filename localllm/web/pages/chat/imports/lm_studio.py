"""LM Studio's conversations: one file each, messages in order with their versions.

    {"name", "createdAt": ms, "systemPrompt", "messages": [{"currentlySelected": n, "versions": [
     {"role": "user", "content": [{"type": "text", "text"}]},
     {"role": "assistant", "senderInfo": {"senderName"}, "steps": [{"type": "contentBlock", "content": [...],
      "style": {"type": "thinking"}}]}]}]}

Does not know: other formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localllm.web.pages.chat.imports.records import Imported, MessageTree, mapping, number, rows, string

SYSTEM = "llm.prediction.systemPrompt"


def read(chat: Mapping[str, Any]) -> Imported | None:
    """Return the chat; None if it has no message."""
    tree, parent = MessageTree(), None
    created_s = number(chat.get("createdAt")) / 1000 if isinstance(chat.get("createdAt"), int | float) else 0.0
    for message in rows(chat.get("messages")):
        versions = [_imported(tree, version, parent, created_s) for version in rows(message.get("versions"))]
        chosen = message.get("currentlySelected")
        at = chosen if type(chosen) is int and 0 <= chosen < len(versions) else -1
        found = [each for each in versions if each is not None]
        if found:
            parent = versions[at] or found[-1]
    fields = rows(mapping(chat.get("perChatPredictionConfig")).get("fields"))
    system = next((string(each.get("value")) for each in fields if each.get("key") == SYSTEM), "")
    return tree.chat(string(chat.get("name")), string(chat.get("systemPrompt")) or system, parent)


def _imported(tree: MessageTree, version: Mapping[str, Any], parent: str | None, created_s: float) -> str | None:
    """Add a version of a message; return its id, or None if it has no text."""
    if version.get("role") == "user":
        text = _text(version)
        return tree.add("user", text, parent, created_s=created_s) if text.strip() else None
    steps = [step for step in rows(version.get("steps")) if step.get("type") == "contentBlock"]
    if version.get("role") != "assistant":
        return None
    thinks = [mapping(step.get("style")).get("type") == "thinking" for step in steps]
    said = [_text(step) for step in steps] or [_text(version)]
    texts = [text for text, thought in zip(said, thinks or [False], strict=True) if text.strip() and not thought]
    thoughts = [text.strip() for text, thought in zip(said, thinks or [False], strict=True) if thought]
    if not texts and not thoughts:
        return None
    model = string(mapping(version.get("senderInfo")).get("senderName"))
    reasoning = "\n\n".join(text.removeprefix("<think>").removesuffix("</think>").strip() for text in thoughts)
    return tree.add("assistant", "\n\n".join(texts), parent, reasoning=reasoning, created_s=created_s, model=model)


def _text(holder: Mapping[str, Any]) -> str:
    """Return the text of a message or step; a file becomes its name."""
    parts = rows(holder.get("content"))
    return "\n".join(
        f"[File {string(part.get('fileIdentifier'))}]" if part.get("type") == "file" else string(part.get("text"))
        for part in parts
    )
