"""Files that are too long to be read whole: stored as passages, and searched for each message.

The passages that match a message are put before it in what the model reads, and are stored with the reply.
Does not know: HTTP, templates, how a file is received (attachments.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from localllm.web.api.off_loop import off_loop
from localllm.web.pages.chat.claims import Claim
from localllm.web.pages.chat.passage_vectors import ranked_by_meaning
from localllm.web.pages.chat.passages import question
from localllm.web.pages.chat.passages.cut import cut, estimated_tokens
from localllm.web.pages.chat.passages.ranking import by_sentence, fitting, fused
from localllm.web.pages.chat.presenters import card_of
from localllm.web.pages.chat.state import ChatState
from localllm.web.pages.chat.store import Chat, Chats, StoredMessage
from localllm.web.pages.chat.store.records import ChatNotFound, FilePassage
from localllm.web.pages.chat.template_messages import fenced

if TYPE_CHECKING:
    from localllm.serving.served import ServedModel

UNKNOWN_CONTEXT = 8_192
"""Tokens of context of a model that is not loaded yet."""

MAX_READ_TOKENS = 3_000
"""Most tokens of passages before one message: a CPU reads them in half a minute."""

SHARE = 3
"""The passages take at most this part of the context: a third."""

REPLY_SHARE = 4
CANDIDATES = 40
Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class _Question:
    """What is searched for on a branch, and where."""

    text: str  # the last message of the user
    before: str  # the message of the user before it
    file_ids: tuple[str, ...]


async def free_tokens(state: ChatState, owner: str, form: Mapping[str, Any]) -> int:
    """Return how many tokens of files fit beside the chat so far, the typed message and a reply."""
    settings = {"model": form["model"]} if form.get("model") else {}
    card, used = card_of(state, settings), 0
    context = card.plan.max_model_len if card is not None else UNKNOWN_CONTEXT
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
    return {**details, "files": files} if files else dict(details)


async def _kept(state: ChatState, chat_id: str, file: Mapping[str, Any]) -> dict[str, Any]:
    found = await off_loop(len(file["body"]), lambda: cut(file["body"], paged=file["paged"]))
    passages = [each for each in found if each.text.strip()]
    file_id = await state.store.call(Chats.add_file, chat_id, file["name"], file["paged"], passages)
    return {"name": file["name"], "num_bytes": file["num_bytes"], "searched": True, "file": file_id}


async def with_passages(
    state: ChatState, owner: str, chat: Chat, leaf: str | None, read: Messages, claim: Claim
) -> tuple[Messages, dict[str, Any]]:
    """Return what the model reads, with the passages that match its last message; and the details to store with the
    reply: nothing if the branch has no long file.
    """
    branch = await state.store.call(Chats.branch, chat.id, leaf)
    asked = _question(branch.messages)
    if not asked.file_ids:
        return read, {}
    known = await state.store.call(Chats.known_files, chat.id, asked.file_ids)
    ranking, matched = await _ranking(state, owner, chat.id, known, asked)
    served = claim.lease.result().model if claim.lease.done() else None
    found = await state.store.call(Chats.passages, chat.id, ranking)
    chosen = await _fitting(found, [each for each in ranking if each in found], read, served)
    note = "" if matched else "No passage has the words of the question, so these are samples of the whole file."
    if len(known) < len(set(asked.file_ids)):
        note = "A file of this chat is not on this server, so it was not searched."
    sources = {"note": note, "passages": [{"name": it.name, "where": it.where, "text": it.text} for it in chosen]}
    return with_sources(read, sources), {"sources": sources}


def with_sources(read: Messages, sources: Mapping[str, Any] | None) -> Messages:
    """Return what the model reads, with stored passages before the last message of the user."""
    passages = (sources or {}).get("passages", [])
    at = max((index for index, message in enumerate(read) if message["role"] == "user"), default=None)
    if not passages or at is None:
        return read
    names = ", ".join(dict.fromkeys(f"`{each['name']}`" for each in passages))
    parts = [f"Passages of the attached {names}, found by a search for this message:"]
    parts += [f"{each['name']}, {each['where']}:\n\n{fenced(each['text'].strip())}" for each in passages]
    message = {**read[at], "content": "\n\n".join([*parts, read[at]["content"]])}
    return [*read[:at], message, *read[at + 1 :]]


def _question(messages: Sequence[StoredMessage]) -> _Question:
    """Return the question: the last message that a person typed."""
    typed = [m.text for m in messages if m.role == "user" and "results" not in m.details]
    files = [file["file"] for m in messages for file in m.details.get("files", []) if "file" in file]
    return _Question(typed[-1] if typed else "", typed[-2] if len(typed) > 1 else "", tuple(dict.fromkeys(files)))


async def _ranking(
    state: ChatState, owner: str, chat_id: str, file_ids: Sequence[str], asked: _Question
) -> tuple[list[int], bool]:
    """Return the best passages by words and by meaning, and whether any matched; if not, samples of the files."""
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
    if best := fused(rankings)[:CANDIDATES]:
        return best, True
    return await state.store.call(Chats.sampled, chat_id, file_ids, CANDIDATES // 4), False


async def _fitting(
    found: Mapping[int, FilePassage], ranking: Sequence[int], read: Messages, served: ServedModel | None
) -> list[FilePassage]:
    """Return the passages that fit into their share of the context, in the order of the files; at least the best."""
    context = served.plan.max_model_len if served is not None else UNKNOWN_CONTEXT
    left = context - context // REPLY_SHARE - sum(estimated_tokens(str(message["content"])) for message in read)
    room = min(context // SHARE, MAX_READ_TOKENS, left)

    def count() -> dict[int, int]:
        if served is None:
            return {each: estimated_tokens(found[each].text) for each in ranking}
        encode = served.tokenizer.encode
        return {each: len(encode(found[each].text, add_special_tokens=False)) for each in ranking}

    sizes = await off_loop(len(ranking) * 1_000, count)
    return [found[each] for each in fitting(ranking, sizes, room) or ranking[:1]]
