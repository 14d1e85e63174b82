"""The parts of a message, as views: reasoning and files.

Does not know: handlers, how a reply is generated, where chats are stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localllm.units import format_count
from localllm.web.pages.chat.live_reply import Reply, ReplyUpdate
from localllm.web.pages.chat.markdown_stream import cached_html
from localllm.web.pages.chat.message_views import AttachmentChip, ReasoningView, SourcePassage, Sources
from localllm.web.pages.chat.template_messages import files_of
from localllm.web.pages.chat.views import OpenBlock, ReplyProgress

PREVIEW_CHARS = 20_000
"""Characters of a file that are shown in its message."""


def live_thinking(message_id: str, reply: Reply) -> ReasoningView | None:
    """Return the reasoning of a reply that is being written."""
    if not reply.thinking.text:
        return None
    num_blocks, kind, text = reply.thinking.settled
    rest = OpenBlock(f"{message_id}-thinking", kind, text) if reply.thinks else None
    html = "".join(reply.thinking.blocks[:num_blocks])
    return ReasoningView(message_id, html, reply.thought_s, reply.reasoning_tokens, rest)


def stored_thinking(message_id: str, details: Mapping[str, Any]) -> ReasoningView | None:
    reasoning = details.get("reasoning")
    if not reasoning:
        return None
    return ReasoningView(
        message_id, cached_html(reasoning), details.get("reasoning_s", 0.0), details.get("reasoning_tokens", 0)
    )


def file_chips(details: Mapping[str, Any]) -> tuple[AttachmentChip, ...]:
    searched = [file for file in details.get("files", []) if "text" not in file]
    return (
        *(AttachmentChip(name, len(text.encode()), text=_preview(text)) for name, text in files_of(details)),
        *(
            AttachmentChip(file["name"], file.get("num_bytes", 0), searched=True, is_missing="file" not in file)
            for file in searched
        ),
    )


def sources(details: Mapping[str, Any]) -> Sources | None:
    """Return the passages that the model read before this reply; None if no long file was searched."""
    found = details.get("sources")
    if not found:
        return None
    by_name: dict[str, list[str]] = {}
    for each in found["passages"]:
        by_name.setdefault(each["name"], []).append(each["where"])
    title = "; ".join(f"{name}, {', '.join(dict.fromkeys(where))}" for name, where in by_name.items())
    passages = tuple(
        SourcePassage(f"{each['name']}, {each['where']}", each["text"].strip()) for each in found["passages"]
    )
    return Sources(f"From {title}" if title else "No passage was found", passages, found.get("note", ""))


def _preview(text: str) -> str:
    left = len(text) - PREVIEW_CHARS
    return (
        text if left <= 0 else f"{text[:PREVIEW_CHARS]}\n… {format_count(left)} more characters, which the model reads"
    )


def reply_progress(message_id: str, reply: Reply, progress: ReplyUpdate) -> ReplyProgress:
    """Return the live update of a reply for one follower."""
    body, thinking = progress.body, progress.thinking
    turns = progress.thinking_turns
    kind = body.open_kind if body else None
    thought = thinking.open_kind if thinking and not turns else None
    return ReplyProgress(
        message_id=message_id,
        html=body.html if body else "",
        replaces=body.restarts if body else False,
        open=OpenBlock(message_id, kind, body.open_text) if body and kind else None,
        appended=body.open_text if body and not kind else "",
        thinking=live_thinking(message_id, reply) if turns else None,
        thinking_html=thinking.html if thinking and not turns else "",
        thinking_open=OpenBlock(f"{message_id}-thinking", thought, thinking.open_text)
        if thinking and thought
        else None,
        thinking_appended=thinking.open_text if thinking and not turns and not thought else "",
    )
