"""A posted form becomes a request to the engine, by the same road that the API takes.

Does not know: HTTP, templates.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from localllm.engine.client import GenerationRequest
from localllm.engine.params import SamplingParams
from localllm.errors import InvalidParameter, RequestError, UnsupportedOption
from localllm.units import format_count
from localllm.web.pages.chat.conversations import (
    MAX_CONVERSATION_CHARS,
    MAX_MESSAGE_CHARS,
    Conversation,
    Exchange,
    new_id,
)
from localllm.web.pages.chat.replies import Reply
from localllm.web.pages.errors import MessageTooLong, StillWriting
from localllm.web.pages.room import Room

if TYPE_CHECKING:
    from localllm.served import ServedModel


async def ask(room: Room, conversation: Conversation | None, form: Mapping[str, str]) -> tuple[Conversation, Exchange]:
    """Start a reply to the form's message, in a new conversation if there is none yet. Raises `RequestError`."""
    text = checked_message(form)
    lease = await room.manager.acquire(None)  # wakes or loads it; raises what says why there is none
    try:
        conversation, exchange = await _ask(room, lease.model, conversation, text, form)
    except BaseException:
        lease.release()
        raise
    exchange.reply.when_done(lease.release)
    return conversation, exchange


async def _ask(
    room: Room, served: ServedModel, conversation: Conversation | None, text: str, form: Mapping[str, str]
) -> tuple[Conversation, Exchange]:
    served.require("generate")
    if conversation is not None and conversation.writing is not None:
        raise StillWriting("A reply is still being written.", hint="Stop it, or wait until it ends.")
    if conversation is not None and conversation.num_chars > MAX_CONVERSATION_CHARS:
        raise _too_long("This chat", conversation.num_chars, MAX_CONVERSATION_CHARS, "Start a new chat.")
    params = sampling_params(served, form.get("temperature", ""), form.get("max_tokens", ""))
    system = form.get("system", "").strip()
    if len(system) > MAX_MESSAGE_CHARS:
        raise _too_long("The system prompt", len(system))
    if conversation is None:
        conversation = room.conversations.new()
    conversation.system = system
    conversation.temperature, conversation.max_tokens = form.get("temperature", ""), form.get("max_tokens", "")
    return conversation, await _start(served, conversation, text, params)


async def _start(served: ServedModel, conversation: Conversation, text: str, params: SamplingParams) -> Exchange:
    exchange_id = new_id()
    reply = Reply(f"chat-{exchange_id}", served.name, served.plan.max_model_len)
    exchange = Exchange(exchange_id, text, reply)
    messages: list[dict[str, Any]] = list(conversation.history(text))
    conversation.exchanges.append(exchange)  # before the first await: a second post must find it
    try:
        prompt_token_ids = await asyncio.to_thread(_prompt, served, messages)
    except RequestError as error:
        reply.fail(error)
        return exchange
    reply.start(served.generator, GenerationRequest(reply.request_id, prompt_token_ids, params))
    return exchange


def _prompt(served: ServedModel, messages: list[dict[str, Any]]) -> list[int]:
    if not served.chat_template:
        raise UnsupportedOption(
            f"{served.name} has no chat template.",
            "It continues text and was not trained for turns of a conversation.",
            "Use POST /v1/completions, or serve an instruct or chat model.",
        )
    prompt = served.chat_template.render(messages, add_generation_prompt=True)
    return served.tokenizer.encode(prompt, add_special_tokens=False)


def checked_message(form: Mapping[str, str]) -> str:
    """The typed message, or the example that was pressed."""
    text = (form.get("message", "").strip() or form.get("example", "").strip()).replace("\r\n", "\n")
    if not text:
        raise InvalidParameter("The message is empty.", hint="Type something first.", param="message")
    if len(text) > MAX_MESSAGE_CHARS:
        raise _too_long("The message", len(text))
    return text


def _too_long(
    what: str, length: int, limit: int = MAX_MESSAGE_CHARS, hint: str = "Send a part of it, or use the API."
) -> MessageTooLong:
    why = f"It has {format_count(length)} characters; at most {format_count(limit)} are taken here."
    return MessageTooLong(f"{what} is too long.", why, hint)


def sampling_params(served: ServedModel, temperature: str, max_tokens: str) -> SamplingParams:
    """The model's defaults with what the user set on top; empty fields set nothing."""
    values: dict[str, Any] = {"max_tokens": None, **served.sampling_defaults}
    if temperature.strip():
        values["temperature"] = _number(temperature, float, "Temperature", "a number such as 0.7")
    if max_tokens.strip():
        values["max_tokens"] = _number(max_tokens, int, "Most tokens", "a whole number such as 256")
    return SamplingParams(**values)


def _number(text: str, kind: type[int] | type[float], name: str, example: str) -> int | float:
    try:
        return kind(text.strip())
    except ValueError:
        raise InvalidParameter(f"{name} must be {example}.", f"Got {text.strip()[:40]!r}.") from None
