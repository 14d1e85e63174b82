"""The prompt of a chat: its messages in the model's own template, its tokens, and the model's context they must fit.

A prompt fits if the context still has room for a reply behind it. The longest reply that a person sets is an upper
limit and not a requirement: it never makes a prompt too long.
A server that has the model counts the tokens itself: it gets the same as a body of OpenAI's API.
Does not know: HTTP, where messages are stored, how a reply is generated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localllm.engine.client import GenerationRequest
from localllm.engine.params import SamplingParams
from localllm.engine.request import RequestOptions
from localllm.errors import ContextTooLong, UnsupportedOption
from localllm.serving.answers.conversation import (
    CONTINUE,
    Conversation,
    Tools,
    calls_tools,
    chat_token_ids,
    within_context,
)
from localllm.serving.answers.generation import Generation
from localllm.serving.served import ServedModel
from localllm.units import format_count
from localllm.web.api.hints import thinking_switch
from localllm.web.api.remote import openai_messages, openai_tools
from localllm.web.pages.chat.composer.settings import read_tools, sampling_params, typed_params, typed_schema
from localllm.web.pages.chat.files.pictures import seen_by, sent_as_urls
from localllm.web.pages.chat.replies.messages import messages_of, turn_beginnings
from localllm.web.pages.chat.store import StoredMessage

REPLY_TOKENS = 256
"""Room for a reply that a prompt must leave in the context; an eighth of the context if that is less."""

USED_AFTER_LEAVING_OUT = 0.75
"""Share of the context up to which a chat may be filled after its oldest messages were left out, if that is possible:
otherwise the next message would find it full again."""


class ChatFull(ContextTooLong):
    """The chat with the new message does not fit into the context; `room_tokens` of `used_tokens` are for the reply."""

    def __init__(self, model: str, used_tokens: int, room_tokens: int, context_tokens: int) -> None:
        used, size = format_count(used_tokens), format_count(context_tokens)
        needs, room = format_count(used_tokens - room_tokens), format_count(room_tokens)
        super().__init__(
            f"This chat is full: {used} of {size} tokens.",
            f"Its messages need {needs}, and {room} are kept free for the reply of {model}.",
            "Choose Reply or Regenerate under the message: the ways on are offered there.",
        )
        self.used_tokens, self.room_tokens, self.context_tokens = used_tokens, room_tokens, context_tokens
        self.can_leave_out = False  # whether the last turn fits once older ones are left out

    @property
    def over_tokens(self) -> int:
        return self.used_tokens - self.context_tokens


@dataclass(frozen=True, slots=True)
class ReplyPrompt:
    """A rendered and tokenised chat."""

    conversation: Conversation
    token_ids: list[int]
    params: SamplingParams

    def generation(self, served: ServedModel, request_id: str, options: RequestOptions) -> Generation:
        """Return the generation of the answer. Raises like `Conversation.reading`."""
        params, new_reader = self.conversation.reading(served, self.params, self.token_ids)
        request = GenerationRequest(request_id, self.token_ids, params, options=options)
        return Generation(served.generator, [request], new_reader, served.senses)


async def prompt_of(
    served: ServedModel, messages: Sequence[Mapping[str, object]], settings: Mapping[str, str], *, goes_on: bool = False
) -> ReplyPrompt:
    """Return the prompt of these messages. Raises `ChatFull`, and what the template and the settings raise."""
    params, tools = sampling_params(served.sampling_defaults, settings), read_tools(settings.get("tools", ""))
    if tools and not calls_tools(served):
        raise UnsupportedOption(
            f"{served.name} cannot call tools.",
            "Its chat template does not support tools, or its tool call format is unknown.",
            "Empty the list of tools in the model's behaviour, or choose another model.",
        )
    free = params.structured_outputs is None  # text of a schema is never a call
    template = dict(CONTINUE if goes_on else {"add_generation_prompt": True})
    if thinking := settings.get("thinking"):
        template |= thinking_switch(served, thinking == "on", "thinking")[0]
    conversation = Conversation(seen_by(served, messages), template, Tools(tools, tools, any_name=free))
    token_ids = await chat_token_ids(served, conversation)
    size = served.plan.max_model_len
    room = reply_room(size, params.max_tokens)
    if len(token_ids) + room > size:
        raise ChatFull(served.name, len(token_ids) + room, room, size)
    return ReplyPrompt(conversation, token_ids, within_context(params, len(token_ids), served))


def reply_room(context_tokens: int, max_tokens: int | None) -> int:
    """Return the tokens that must stay free for a reply."""
    return max(1, min(REPLY_TOKENS, context_tokens // 8, max_tokens or REPLY_TOKENS))


def body_for_another_server(
    messages: Sequence[Mapping[str, Any]], settings: Mapping[str, str], *, goes_on: bool = False
) -> dict[str, Any]:
    """Return the chat completion with which another server is asked for the reply. Its defaults apply to what the user
    has not set, and it says whether the prompt fits. Raises the error of a wrong setting."""
    tools = read_tools(settings.get("tools", ""))
    body = {"messages": openai_messages(sent_as_urls(messages)), **typed_params(settings)}
    body |= openai_tools(Tools(tools, tools))
    if (schema := typed_schema(settings)) is not None:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "reply", "schema": schema}}
    if thinking := settings.get("thinking"):
        body["chat_template_kwargs"] = {"enable_thinking": thinking == "on"}
    return body | CONTINUE if goes_on else body


async def can_leave_out(
    served: ServedModel, settings: Mapping[str, str], messages: Sequence[StoredMessage], new: StoredMessage | None,
    *, goes_on: bool = False,
) -> bool:  # fmt: skip
    """Return whether there are older turns without which the last one fits, with the new message. Raises `ChatFull` of
    the last turn alone if it does not fit.
    """
    beginnings = turn_beginnings(messages, new)
    if beginnings:
        await prompt_of(served, _read(settings, messages[beginnings[-1] :], new), settings, goes_on=goes_on)
    return bool(beginnings)


async def beginning_that_fits(
    served: ServedModel, settings: Mapping[str, str], messages: Sequence[StoredMessage], new: StoredMessage | None,
    *, goes_on: bool = False,
) -> int:  # fmt: skip
    """Return the index of the first message to keep, so that the rest fits with the new message; at least the last turn
    is kept. The prompt gets shorter with each turn that is left out, so the search halves the turns.
    """
    beginnings, sizes = turn_beginnings(messages, new), dict[int, int]()
    size = served.plan.max_model_len

    async def used(at: int) -> int:
        if at not in sizes:
            try:
                prompt = await prompt_of(served, _read(settings, messages[at:], new), settings, goes_on=goes_on)
                sizes[at] = len(prompt.token_ids)
            except ContextTooLong:
                sizes[at] = size + 1
        return sizes[at]

    for limit in (int(size * USED_AFTER_LEAVING_OUT), size):
        low, high = 0, len(beginnings)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if await used(beginnings[middle]) <= limit else (middle + 1, high)
        if low < len(beginnings):
            return beginnings[low]
    return beginnings[-1]


def _read(
    settings: Mapping[str, str], messages: Sequence[StoredMessage], new: StoredMessage | None
) -> list[dict[str, Any]]:
    return messages_of(settings.get("system", ""), [*messages, *([new] if new is not None else [])])
