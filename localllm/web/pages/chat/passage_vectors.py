"""Passages of long files, embedded by a loaded embedding model: in the background, and to rank passages by meaning.

Does not know: HTTP, templates, which passages are read at the end (long_files.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from localllm.web.pages.chat.state import ChatState


async def ranked_by_meaning(state: ChatState, chat_id: str, file_ids: Sequence[str], text: str, most: int) -> list[int]:
    """Return the passages whose embeddings are nearest to the text's; none if no embedding model is loaded."""
    return []
