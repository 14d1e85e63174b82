"""Files that are too long to be read whole: stored as passages, and searched for each message.

The passages that match a message are put before it in what the model reads, and are stored with the reply. A loaded
embedding model embeds passages in the background, and ranks them by meaning; no model is loaded for it. Without one,
passages are found by their words alone. The files of a project's folder are searched beside the chat's own.
Does not know: HTTP, templates, how a file is received (attachments.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localllm.errors import LocalLLMError
from localllm.serving.answers.off_loop import off_loop
from localllm.web.pages.chat.composer.views import card_of
from localllm.web.pages.chat.files import passages as question
from localllm.web.pages.chat.files.passages import (
    OWN_BYTES,
    by_sentence,
    cut,
    estimated_tokens,
    fitting,
    fused,
    nearest,
    packed,
)
from localllm.web.pages.chat.replies.claims import Claim
from localllm.web.pages.chat.replies.messages import fenced
from localllm.web.pages.chat.replies.prompt import ChatFull, prompt_of, reply_room
from localllm.web.pages.chat.state import ChatState
from localllm.web.pages.chat.store import Chat, Chats
from localllm.web.pages.chat.store.records import ChatNotFound, FilePassage

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


UNKNOWN_CONTEXT = 8_192
"""Tokens of context of a model that is not loaded yet, or whose server does not say it."""

MAX_READ_TOKENS = 3_000
"""Most tokens of passages before one message: a CPU reads them in half a minute."""

SHARE = 3
"""The passages take at most this part of the context: a third."""

MIN_READ_TOKENS = 400
"""The passages may take this many tokens even if that is more than their share: one passage."""

REPLY_SHARE = 4
"""Part of the context that whole files must leave free."""

CANDIDATES = 40
INTRODUCTION = "Passages of the attached {}, found by a search for this message:"
"""Also for files of a project's folder: to the model they are attached."""
SAMPLES = "No passage has the words of the question, so these are samples of the whole file."
NO_ROOM = "The chat is so full that no passage of its files fits. Leave out the oldest messages, or start a new chat."
GONE = "A file of this chat is not on this server, so it was not searched."
Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class _Question:
    """The words that are searched for on a branch, and the files."""

    text: str  # the last message of the user
    before: str  # the message of the user before it
    file_ids: tuple[str, ...]


async def free_tokens(state: ChatState, owner: str, form: Mapping[str, Any]) -> int:
    """Return how many tokens of files fit beside the chat so far, the typed message and a reply."""
    settings = {"model": form["model"]} if form.get("model") else {}
    card, used = card_of(state, settings), 0
    elsewhere = state.pages.elsewhere(form.get("model", ""))
    context = state.pages.upstreams.context_of(elsewhere) if card is None else card.plan.max_model_len
    context = context or UNKNOWN_CONTEXT
    if form.get("conversation"):
        try:
            chat = await state.store.call(Chats.get, owner, form["conversation"])
        except ChatNotFound:  # said when the message is sent
            return context
        branch = await state.store.call(Chats.branch, chat.id, chat.leaf, limit=4)
        for details in (message.details for message in branch.messages if "prompt_tokens" in message.details):
            used = details["prompt_tokens"] + details.get("completion_tokens", 0)
    return max(0, context - context // REPLY_SHARE - used - estimated_tokens(form.get("message", "")))


async def keep_long_files(state: ChatState, chat_id: str, details: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message's details; the text of each searched file is stored as passages, and its id stays."""
    files = [
        await _kept(state, chat_id, file) if file.get("searched") and "body" in file else file
        for file in details.get("files", [])
    ]
    if any("file" in file for file in files) and (name := embedder(state)) is not None:
        embed_later(state, chat_id, name)
    return {**details, "files": files} if files else dict(details)


async def _kept(state: ChatState, chat_id: str, file: Mapping[str, Any]) -> dict[str, Any]:
    found = await off_loop(len(file["body"]), lambda: cut(file["body"], paged=file["paged"]))
    passages = [each for each in found if each.text.strip()]
    file_id = await state.store.call(Chats.add_long_file, chat_id, file["name"], file["paged"], passages)
    return {"name": file["name"], "num_bytes": file["num_bytes"], "searched": True, "file": file_id}


async def with_passages(
    state: ChatState, chat: Chat, leaf: str | None, read: Messages, settings: Mapping[str, str], claim: Claim
) -> tuple[Messages, dict[str, Any]]:
    """Return what the model reads, with the passages that match its last message; and the details to store with the
    reply: nothing if the branch has no long file. The claim's prompt is made anew.
    """
    branch = await state.store.call(Chats.branch, chat.id, leaf)
    typed = [m.text for m in branch.messages if m.role == "user" and "results" not in m.details]
    files = [file["file"] for m in branch.messages for file in m.details.get("files", []) if "file" in file]
    asked = _Question(typed[-1] if typed else "", typed[-2] if len(typed) > 1 else "", tuple(dict.fromkeys(files)))
    folder = await state.store.call(Chats.folder, chat.project_id)
    if not asked.file_ids and folder is None:
        return read, {}
    known = await state.store.call(Chats.known_files, chat.id, asked.file_ids)
    searched, folder_note = {chat.id: known}, ""
    if folder is not None:
        folder_note = (await state.folders.look(folder)).note
        searched[folder.chat_id] = await state.store.call(Chats.file_ids, folder.chat_id)
    rankings = [await _ranking(state, chat_id, file_ids, asked) for chat_id, file_ids in searched.items() if file_ids]
    ranking, note = fused([each for each in rankings if each])[:CANDIDATES], ""
    if known and not ranking:
        ranking, note = await state.store.call(Chats.sampled, chat.id, known, CANDIDATES // 4), SAMPLES
    found = dict[int, FilePassage]()
    for chat_id in searched:
        found |= await state.store.call(Chats.passages, chat_id, ranking)
    chosen = await _fitting(found, [each for each in ranking if each in found], read, claim)
    if ranking and not chosen:
        note = NO_ROOM
    elif len(known) < len(asked.file_ids):
        note = GONE
    note = " ".join(each for each in (note, folder_note) if each)
    if not chosen and not note:
        return read, {}
    sources = {"note": note, "passages": [{"name": it.name, "where": it.where, "text": it.text} for it in chosen]}
    details = {"sources": sources}
    try:
        return await resumed(read, details, settings, claim), details
    except ChatFull:  # the template needs more than was counted
        return read, {"sources": {"note": NO_ROOM, "passages": []}}


async def resumed(read: Messages, details: Mapping[str, Any], settings: Mapping[str, str], claim: Claim) -> Messages:
    """Return what the model reads, with the passages that are stored with a reply. Raises `ChatFull`."""
    passages = details.get("sources", {}).get("passages", [])
    at = max((index for index, message in enumerate(read) if message["role"] == "user"), default=None)
    if not passages or at is None:
        return read
    names = ", ".join(dict.fromkeys(f"`{each['name']}`" for each in passages))
    blocks = [_block(each["name"], each["where"], each["text"]) for each in passages]
    said = read[at]["content"]
    text = said if isinstance(said, str) else said[-1]["text"]  # behind pictures
    content: Any = "\n\n".join(part for part in (INTRODUCTION.format(names), *blocks, text) if part)
    content = content if isinstance(said, str) else [*said[:-1], {"type": "text", "text": content}]
    found = [*read[:at], {**read[at], "content": content}, *read[at + 1 :]]
    if claim.prompt is not None and claim.served is not None:
        goes_on = bool(claim.prompt.conversation.template.get("continue_final_message"))
        claim.prompt = await prompt_of(claim.served, found, settings, goes_on=goes_on)
    return found


def sources_of(details: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a reply's details that this module stored."""
    return {"sources": details["sources"]} if "sources" in details else {}


def _block(name: str, where: str, text: str) -> str:
    return f"{name}, {where}:\n\n{fenced(text.strip())}"


async def _ranking(state: ChatState, chat_id: str, file_ids: Sequence[str], asked: _Question) -> list[int]:
    """Return the best passages of these files by words and by meaning; none if nothing matches."""
    terms = question.with_context(asked.text, asked.before)
    rankings = []
    if terms:
        matching = await state.store.call(Chats.matching, chat_id, file_ids, question.query(terms), CANDIDATES)
        found = await state.store.call(Chats.passages, chat_id, matching)
        rankings.append(
            await off_loop(
                1_000 * len(found),
                lambda: by_sentence(terms, {each: found[each].text for each in matching if each in found}),
            )
        )
    rankings.append(await ranked_by_meaning(state, chat_id, file_ids, asked.text, CANDIDATES))
    return fused(rankings)[:CANDIDATES]


async def _fitting(
    found: Mapping[int, FilePassage], ranking: Sequence[int], read: Messages, claim: Claim
) -> list[FilePassage]:
    """Return the best passages that fit into their share of the context, in the order of the files."""
    served, prompt = claim.served, claim.prompt
    context = claim.context_tokens or UNKNOWN_CONTEXT
    used = sum(estimated_tokens(str(message["content"])) for message in read)
    if prompt is not None:
        used = len(prompt.token_ids) + reply_room(context, prompt.params.max_tokens)

    def tokens(text: str) -> int:
        if served is None:
            return estimated_tokens(text)
        return len(served.tokenizer.encode(text, add_special_tokens=False))

    def choose() -> list[int]:
        names = {f"`{each.name}`" for each in found.values()}
        room = min(max(context // SHARE, MIN_READ_TOKENS), MAX_READ_TOKENS, context - used)
        room -= tokens(INTRODUCTION.format(", ".join(names)))
        sizes = {each: tokens(f"{_block(it.name, it.where, it.text)}\n\n") for each, it in found.items()}
        return fitting(ranking, sizes, room)

    return [found[each] for each in await off_loop(len(ranking) * OWN_BYTES, choose)]
