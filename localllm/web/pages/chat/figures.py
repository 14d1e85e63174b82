"""The figures below a finished reply: a line in words, and the details that the line opens.

Does not know: templates, where the numbers are measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localllm.units import format_count, format_rate, format_seconds
from localllm.web.pages.chat.views import ReplyFigures

ENDS = {
    "length": "cut off: token limit",
    "abort": "stopped by you",
    "error": "failed",
    "interrupted": "interrupted: the server stopped",
}
"""The unusual ends. A reply that ended by itself says nothing."""
BROKEN = ("length", "error", "interrupted")


def figures(details: Mapping[str, Any]) -> ReplyFigures | None:
    """Return the figures of a stored reply; None if it has neither counts nor an unusual end."""
    reason = str(details.get("finish_reason", ""))
    end = ENDS.get(reason, "")
    if "prompt_tokens" not in details:
        return ReplyFigures((), end, is_broken=True) if reason == "interrupted" else None
    return ReplyFigures(tuple(_line(details)), end, reason in BROKEN, tuple(_details(details)))


def _line(details: Mapping[str, Any]) -> list[str]:
    found = []
    if details.get("ttft_s") is not None:
        found.append(f"{_waiting(details['ttft_s'])} to first word")
    if details.get("tokens_per_s") is not None:
        found.append(format_rate(details["tokens_per_s"]))
    count = details.get("completion_tokens", 0)
    return [*found, f"{format_count(count)} token{'s' * (count != 1)}"]


def _waiting(seconds: float) -> str:
    """0.1512 -> '0.15 s', as a person counts; from two seconds on as everywhere."""
    return f"{seconds:.2f} s" if seconds < 2 else format_seconds(seconds)


def _details(details: Mapping[str, Any]) -> list[tuple[str, str]]:
    prompt, cached = details["prompt_tokens"], details.get("cached_tokens", 0)
    share = f", {cached / prompt:.0%} of it from the prefix cache" if cached and prompt else ""
    found = [("Read", f"{format_count(prompt)} tokens{share}")]
    drafted, accepted = details.get("drafted_tokens", 0), details.get("accepted_tokens", 0)
    if drafted:
        share = f"{format_count(accepted)} of {format_count(drafted)} tokens accepted ({accepted / drafted:.0%})"
        found.append(("Drafts", share))
    return found
