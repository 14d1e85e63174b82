"""Passages of long files, embedded by a loaded embedding model: in the background, and to rank passages by meaning.

No model is loaded for it. Without one, passages are found by their words alone.
Does not know: HTTP, templates, which passages are read at the end (long_files.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from localllm.errors import LocalLLMError
from localllm.web.api.off_loop import off_loop
from localllm.web.pages.chat.passages.vectors import nearest, packed
from localllm.web.pages.chat.state import ChatState
from localllm.web.pages.chat.store import Chats

log = logging.getLogger(__name__)

MAX_EMBEDDED = 4_000
"""Passages of a file that are embedded, from its beginning: a million tokens."""

BATCH = 16
WAIT_S = 2.0
"""How long a question waits for embeddings that are missing; the others are made after it."""

PAUSE_S = 0.5
"""How often the work looks whether a reply is still being written: replies go first."""

QUESTION_PROMPTS, PASSAGE_PROMPTS = ("query", "question"), ("document", "passage")
"""Names that checkpoints give to the prompts before a question and before a passage."""


async def ranked_by_meaning(state: ChatState, chat_id: str, file_ids: Sequence[str], text: str, most: int) -> list[int]:
    """Return the passages whose embeddings are nearest to the text's; none if no embedding model is loaded."""
    name = embedder(state)
    if name is None or not text.strip():
        return []
    try:
        (wanted,) = await _embedded(state, name, [text], QUESTION_PROMPTS)
    except LocalLLMError as error:
        log.warning("question not embedded model=%s error=%s", name, error)
        return []
    await asyncio.wait({embed_later(state, chat_id, name)}, timeout=WAIT_S)
    rows = await state.store.call(Chats.vectors, chat_id, file_ids, name)
    return await off_loop(100 * len(rows), lambda: nearest(wanted, rows, most))


def embedder(state: ChatState) -> str | None:
    """Return the name of a loaded embedding model; None if there is none."""
    return next((model.name for model in state.pages.manager.ready if model.spec.task == "embed"), None)


def embed_later(state: ChatState, chat_id: str, name: str) -> asyncio.Task[None]:
    """Embed the passages of a chat that are not embedded yet, in a task; one for each chat."""
    running = state.embedding.get(chat_id)
    if running is None:
        running = asyncio.create_task(_embed_all(state, chat_id, name), name=f"embed {chat_id}")
        state.embedding[chat_id] = running
        running.add_done_callback(lambda _: state.embedding.pop(chat_id, None))
    return running


async def _embed_all(state: ChatState, chat_id: str, name: str) -> None:
    try:
        while rows := await state.store.call(Chats.without_vector, chat_id, name, BATCH, MAX_EMBEDDED):
            while state.replies.is_writing:
                await asyncio.sleep(PAUSE_S)
            if embedder(state) != name:  # unloaded meanwhile: the next question goes on
                return
            vectors = await _embedded(state, name, [text for _, text in rows], PASSAGE_PROMPTS)
            found = {number: vector for (number, _), vector in zip(rows, vectors, strict=True)}
            await state.store.call(Chats.add_vectors, name, found)
    except LocalLLMError as error:
        log.warning("passages not embedded chat=%s model=%s error=%s", chat_id, name, error)


async def _embedded(state: ChatState, name: str, texts: Sequence[str], prompts: Sequence[str]) -> list[bytes]:
    with await state.pages.manager.acquire(name, "embed") as model:
        pooler = model.pooler
        prompt = next((pooler.prompts[each] for each in prompts if each in pooler.prompts), "")
        answers = await pooler.embed(list(texts), truncate=-1, prompt=prompt)
    return [packed(vector) for vector in answers.values]
