"""The content of a tool's result as text: the model reads text only, so other content is named with its size.

Does not know: the protocol's messages (connection.py), where the text is shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from localllm.units import format_bytes, format_count

MIN_RESULT_CHARS, MAX_RESULT_CHARS = 2_000, 64_000

_CUT = re.compile(r"\n\[cut: the result has ([\d,]+) characters, [\d,]+ are given\]$")


def limit_for(context_tokens: int) -> int:
    """Return the most characters of one result for a model: about half of its context."""
    return min(MAX_RESULT_CHARS, max(MIN_RESULT_CHARS, 2 * context_tokens))


def text_of(content: Sequence[Any], structured: Any = None) -> str:
    """Return the blocks of a result, each as text. `structured` is used where there are none."""
    if not content and structured is not None:
        return json.dumps(structured, indent=1, ensure_ascii=False)
    return "\n\n".join(_text(block) for block in content)


def bounded(text: str, limit: int) -> str:
    """Return the text; a long one is cut, and its last line says so. A text that was cut before may be cut again."""
    if len(text) <= limit:
        return text
    before = _CUT.search(text)
    whole = before[1] if before else format_count(len(text))
    return f"{text[:limit]}\n[cut: the result has {whole} characters, {format_count(limit)} are given]"


def _text(block: Any) -> str:
    if block.type == "text":
        return str(block.text)
    if block.type in ("image", "audio"):
        return f"[{block.type}, {_size(block.data)}, not shown to the model]"
    if block.type == "resource_link":
        return f"[link to {block.name}: {block.uri}]"
    resource = block.resource
    if isinstance(getattr(resource, "text", None), str):
        return f"{resource.uri}:\n{resource.text}"
    return f"[file {resource.uri}, {_size(resource.blob)}, not shown to the model]"


def _size(base64: str) -> str:
    return format_bytes(len(base64) * 3 // 4)
