"""A new chat that begins with the summary of another one, which the model writes.

A chat that is longer than the model's context is read in pieces: each step sums up the summary so far with the next
piece. The last step is the reply that the person sees being written.
Does not know: HTTP, templates.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from localllm.errors import InvalidParameter, UnsupportedOption
from localllm.serving.answers.conversation import require_readable
from localllm.serving.answers.generation import collect
from localllm.serving.served import ServedModel
from localllm.web.pages.chat.replies.active import ActiveReply
from localllm.web.pages.chat.replies.claims import Claim, reply_of, start_with
from localllm.web.pages.chat.replies.messages import SUMMARY, SUMMARY_OF, failed_turns, files_of, is_summary, with_files
from localllm.web.pages.chat.replies.prompt import ReplyPrompt, prompt_of
from localllm.web.pages.chat.state import ChatState
from localllm.web.pages.chat.store import Chat, Chats, StoredMessage

SUMMARY_TOKENS = 512
"""Longest summary; a quarter of the context if that is less."""

SPARE_TOKENS = 16
"""A piece is cut between tokens, and its text may be tokenised differently where it was cut."""

ASK = (
    "Summarise the conversation below, so that it can be continued from the summary alone. Keep names, numbers, "
    "decisions, code and open questions. Write only the summary."
)


async def begin_with_summary(
    state: ChatState, owner: str, source: Chat, settings: Mapping[str, str], claim: Claim, draft: Mapping[str, Any]
) -> tuple[Chat, ActiveReply]:
    """Create a chat and start the summary of `source` as its first message. Raises `InvalidParameter`,
    `UnsupportedOption`.

    draft: details that are stored with the summary: the text and the files which wait in the composer.
    """
    _require_own(claim)
    transcript = await _transcript(state, source)
    chat = await state.store.call(Chats.create, owner, f"{source.title[:180]} (continued)", settings)
    return chat, await _write(state, owner, chat, {"chat": source.id, "title": source.title}, transcript, claim, draft)


async def rewrite_summary(
    state: ChatState, owner: str, chat: Chat, message: StoredMessage, claim: Claim
) -> ActiveReply:
    """Write another summary beside this one. Raises `ChatNotFound` if the summarised chat was deleted, and
    `UnsupportedOption`."""
    _require_own(claim)
    origin = message.details[SUMMARY_OF]
    source = await state.store.call(Chats.get, owner, origin["chat"])
    return await _write(state, owner, chat, origin, await _transcript(state, source), claim, {})


def _require_own(claim: Claim) -> None:
    """Raise `UnsupportedOption` for a model of another server: what it can read at once is not known."""
    if claim.upstreams is not None:
        raise UnsupportedOption(
            "A summary is written by a model of this server.",
            f"{claim.name} is a model of another server, whose tokens are not counted here.",
            "Choose a model of this server for the summary.",
            param="model",
        )


async def _write(
    state: ChatState, owner: str, chat: Chat, origin: Mapping[str, str], transcript: str, claim: Claim,
    draft: Mapping[str, Any],
) -> ActiveReply:  # fmt: skip
    kept = {SUMMARY_OF: dict(origin), **draft}
    details = {"model": claim.name, "finish_reason": "", **kept}
    message = await state.store.call(Chats.add, chat.id, None, "assistant", "", details)
    message = await state.store.call(Chats.message, chat.id, message.id)
    writing = ActiveReply(owner, chat.id, message, reply_of(claim, message.id), kept=kept)
    state.replies.add(writing)

    async def request(served: ServedModel) -> None:
        prompt = await _last_prompt(writing, claim, served, transcript)
        writing.reply.start(prompt.generation(served, writing.reply.request_id, claim.options))

    start_with(writing, claim, request)
    return writing


async def _transcript(state: ChatState, chat: Chat) -> str:
    """Return the shown branch as text, without failed turns."""
    branch = await state.store.call(Chats.branch, chat.id, chat.leaf)
    messages = [state.replies.current(message) for message in branch.messages]
    failed = failed_turns(messages)
    parts = [_said(message) for message in messages if message.id not in failed]
    if not parts:
        raise InvalidParameter("This chat has nothing to summarise.", hint="Start a new chat.")
    return "\n\n".join(parts)


def _said(message: StoredMessage) -> str:
    if is_summary(message):
        return f"{SUMMARY} {message.text}"
    author = "User" if message.role == "user" else "Assistant"
    return f"{author}: {with_files(message.text, files_of(message.details))}"


async def _last_prompt(writing: ActiveReply, claim: Claim, served: ServedModel, transcript: str) -> ReplyPrompt:
    """Sum up all pieces but the last, and return the prompt for the summary of the whole."""
    most = min(SUMMARY_TOKENS, served.plan.max_model_len // 4)
    around = await _prompt(served, " ", "", most)
    piece_tokens = served.plan.max_model_len - len(around.token_ids) - 2 * most - SPARE_TOKENS
    if piece_tokens < 1:
        raise InvalidParameter(
            f"The context of {served.name} is too short to write a summary.",
            f"It has {served.plan.max_model_len} tokens.",
            "Choose a model with a longer context.",
        )
    pieces, summary = await _pieces(served, transcript, piece_tokens), ""
    for number, piece in enumerate(pieces[:-1], 1):
        writing.reply.announce(f"Reading part {number} of {len(pieces)} …")
        prompt = await _prompt(served, summary, piece, most)
        summary = await _answer(f"{writing.reply.request_id}-{number}", claim, served, prompt)
        summary = (await _pieces(served, summary, most))[0] if summary else ""  # its text may need more tokens again
    return await _prompt(served, summary, pieces[-1], most)


async def _pieces(served: ServedModel, text: str, piece_tokens: int) -> Sequence[str]:
    require_readable(len(text), served)

    def cut() -> list[str]:
        ids = served.tokenizer.encode(text, add_special_tokens=False)
        starts = range(0, len(ids), piece_tokens)
        return [served.tokenizer.decode(ids[at : at + piece_tokens]).strip("\ufffd") for at in starts]

    return await asyncio.to_thread(cut)


async def _prompt(served: ServedModel, summary: str, piece: str, most_tokens: int) -> ReplyPrompt:
    before = f"{SUMMARY}\n{summary}\n\n" if summary else ""
    content = f"{ASK}\n\n{before}Conversation:\n{piece}"
    settings = {"max_tokens": str(most_tokens), "thinking": "off"}
    return await prompt_of(served, [{"role": "user", "content": content}], settings)


async def _answer(request_id: str, claim: Claim, served: ServedModel, prompt: ReplyPrompt) -> str:
    """Return the content of the model's answer, without its reasoning."""
    async with prompt.generation(served, request_id, claim.options) as generation:
        [choice] = await collect(generation)
    return choice.text.strip()
