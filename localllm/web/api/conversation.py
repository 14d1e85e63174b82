"""A conversation to answer; every dialect translates its chat requests into this form. Filling in the middle of a text,
for models that were trained for it.

The chat template checks and renders messages (text/messages.py). This module fills in the values that a request leaves
open, and renders and tokenises in a thread, so that other streams are not delayed: the time that an unknown template or
tokenizer takes cannot be predicted from the length of the text.
Does not know: any dialect's words, HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import anyio.to_thread

from localllm.engine.params import SamplingParams
from localllm.engine.request import NO_OPTIONS, RequestOptions
from localllm.errors import ContextTooLong, UnsupportedParameter
from localllm.serving.chat import Conversation
from localllm.serving.served import ServedModel
from localllm.text.fill_in import ExtraFile, FillIn, find_fill_in
from localllm.units import format_count
from localllm.web.api.answer import generation_of
from localllm.web.api.generation import Generation
from localllm.web.api.off_loop import on_thread

CHARS_OF_A_PART = 10
"""Characters that a message, or one part of it, counts in addition to its text."""

MOST_CHARS = 1_000_000
MOST_CHARS_PER_TOKEN = 16
"""A text may have `MOST_CHARS` characters, or this many per token of the context if that is more: prose has about four
per token. A tokenizer takes some 130 bytes of memory per character, and a second for a few million of them.
"""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat request in localllm's own terms."""

    conversation: Conversation
    params: SamplingParams
    options: RequestOptions = NO_OPTIONS

    async def token_ids(self, model: ServedModel) -> Sequence[int]:
        """Return the prompt as token ids."""
        return truncate(await chat_token_ids(model, self.conversation), self.params.truncate_prompt_tokens)

    async def prompt(self, model: ServedModel) -> str:
        """Return the prompt as text."""
        return await anyio.to_thread.run_sync(self.conversation.prompt, model)

    def within_context(self, num_prompt_tokens: int, model: ServedModel) -> ChatRequest:
        return replace(self, params=within_context(self.params, num_prompt_tokens, model))

    def generation(self, model: ServedModel, token_ids: Sequence[int]) -> Generation:
        params, new_reader = self.conversation.reading(model, self.params, token_ids)
        return generation_of(model, params, [token_ids], self.options, new_reader=new_reader)


def sampling_params(model: ServedModel, asked: Mapping[str, Any]) -> SamplingParams:
    """Return the parameters: the client's value, else the model's generation_config, else the default of
    `SamplingParams`.
    """
    values: dict[str, Any] = {**model.sampling_defaults, **asked}
    if isinstance(values.get("top_k"), int):
        values["top_k"] = min(values["top_k"], model.spec.vocab_size)  # a larger value means all
    return SamplingParams(**values)


def within_context(params: SamplingParams, num_prompt_tokens: int, model: ServedModel) -> SamplingParams:
    """Drop a max_tokens beyond the end of the context, for dialects in which it is an upper limit and not a
    requirement.
    """
    room = model.plan.max_model_len - num_prompt_tokens
    return replace(params, max_tokens=None) if params.max_tokens is not None and params.max_tokens > room else params


async def chat_token_ids(model: ServedModel, conversation: Conversation) -> list[int]:
    """Return the prompt of a conversation as token ids. Raises `ContextTooLong`."""

    def render() -> list[int]:
        text = conversation.prompt(model)
        require_readable(len(text), model)
        return conversation.encode(text, model)

    size = sum(CHARS_OF_A_PART + _size(message.get("content")) for message in conversation.messages)
    require_readable(size, model)  # also checked before rendering
    return await on_thread(size, render)


async def encode(text: str, special: bool, model: ServedModel) -> list[int]:
    """Return the token ids of a text; `special`: with the tokenizer's special tokens (often BOS)."""
    return (await encode_all([text], special, model))[0]


async def encode_all(texts: Sequence[str], special: bool, model: ServedModel) -> list[list[int]]:
    """Return the token ids of several texts in one thread call: many short texts take as long as a long one."""
    for text in texts:
        require_readable(len(text), model)
    return await on_thread(
        sum(map(len, texts)), lambda: [model.tokenizer.encode(text, add_special_tokens=special) for text in texts]
    )


def most_chars(model: ServedModel) -> int:
    """Return the most characters of a text that is tokenised at all, even if only to count its tokens."""
    return max(MOST_CHARS, MOST_CHARS_PER_TOKEN * model.plan.max_model_len)


def require_readable(num_chars: int, model: ServedModel) -> None:
    """Raise `ContextTooLong` for a text that is too long to tokenise."""
    most = most_chars(model)
    if num_chars > most:
        raise ContextTooLong(
            f"The text has {format_count(num_chars)} characters.",
            f"At most {format_count(most)} are tokenised at once, and the context of {model.name} has "
            f"{format_count(model.plan.max_model_len)} tokens.",
            "Send a shorter text, or send it in parts.",
        )


def truncate(token_ids: Sequence[int], keep: int | None) -> Sequence[int]:
    return token_ids[-keep:] if keep is not None and keep > 0 else token_ids


def _size(content: Any) -> int:
    """Return roughly how many characters must be rendered and tokenised."""
    if isinstance(content, list):
        return sum(CHARS_OF_A_PART + _size(part.get("text")) for part in content if isinstance(part, dict))
    return len(content) if isinstance(content, str) else 0


def fill_in_of(model: ServedModel, param: str = "suffix") -> FillIn:
    """Return the model's tokens for filling in the middle. Raises `UnsupportedParameter`."""
    found = find_fill_in(model.tokenizer)
    if found is None:
        raise UnsupportedParameter(
            f"{model.shown_name} cannot fill in the middle of a text.",
            "Its vocabulary has no tokens for that, such as <|fim_prefix|>, <|fim_suffix|> and <|fim_middle|>.",
            "Use a model that was trained for it, such as Qwen2.5-Coder, StarCoder2, Codestral or CodeGemma.",
            param=param,
        )
    return found


def ended(params: SamplingParams, fill_in: FillIn) -> SamplingParams:
    """Return the parameters with the tokens that end an answer: padding, or the beginning of another file."""
    return replace(params, stop_token_ids=tuple(dict.fromkeys((*params.stop_token_ids, *fill_in.end_ids))))


async def infill_token_ids(
    model: ServedModel,
    fill_in: FillIn,
    before: str,
    behind: str,
    extra: Sequence[ExtraFile] = (),
    room: int | None = None,
) -> list[int]:
    """Return the prompt. room: most tokens of it; None: any number. Raises `ContextTooLong`."""
    size = len(before) + len(behind) + sum(len(file.name) + len(file.text) for file in extra)
    require_readable(size, model)
    return await on_thread(size, lambda: fill_in.prompt(before, behind, extra, room))
