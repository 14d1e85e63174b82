"""Responses in one piece, for both endpoints.

Does not know: streams, sockets, the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET
from msgspec.structs import asdict

from localllm.web.api.generation import Choice, Progress
from localllm.web.api.openai.chunks import finish_reason
from localllm.web.api.openai.logprobs import CompletionLogprobsBuilder, TokenNames, chat_logprobs, prompt_logprobs
from localllm.web.api.openai.params import only_echoes
from localllm.web.api.openai.prompts import Prompt
from localllm.web.api.openai.schema import ChatBody, CompletionBody
from localllm.web.api.openai.shapes import (
    ChatChoice,
    ChatCompletion,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    OpenAICalledFunction,
    OpenAIHead,
    OpenAIMessage,
    OpenAIToolCall,
)
from localllm.web.api.openai.usage import usage_object
from localllm.web.api.timings import timings_object


def chat_response(
    head: OpenAIHead, body: ChatBody, prompt: Prompt, choices: Sequence[Choice], progress: Progress, names: TokenNames
) -> ChatCompletion:
    response = ChatCompletion(
        **asdict(head),
        choices=[_chat_choice(body, prompt, choice, names) for choice in choices],
        usage=usage_object(progress.usage()),
        timings=timings_object(progress),
    )
    if body.prompt_logprobs is not None:
        response.prompt_logprobs = prompt_logprobs(choices[0].prompt_logprobs, names)
    if body.return_token_ids:
        response.prompt_token_ids = prompt.shown_token_ids
    return response


def _chat_choice(body: ChatBody, prompt: Prompt, choice: Choice, names: TokenNames) -> ChatChoice:
    content = prompt.text + choice.text or (None if choice.calls else "")
    message = OpenAIMessage("assistant", content, refusal=None, annotations=[])
    if choice.reasoning and body.include_reasoning is not False:
        message.reasoning_content = message.reasoning = choice.reasoning
    if choice.calls:
        message.tool_calls = [
            OpenAIToolCall(call.id, "function", OpenAICalledFunction(name=call.name, arguments=call.arguments))
            for call in choice.calls
        ]
    reason: Any = finish_reason(choice.finish_reason, calls=bool(choice.calls))
    return ChatChoice(
        index=choice.index,
        message=message,
        logprobs=chat_logprobs(choice.logprobs, names) if body.logprobs else None,
        finish_reason=reason,
        stop_reason=choice.stop_reason,
        token_ids=choice.token_ids if body.return_token_ids else UNSET,
    )


def completion_response(
    head: OpenAIHead,
    body: CompletionBody,
    prompts: Sequence[Prompt],
    choices: Sequence[Choice],
    progress: Progress,
    names: TokenNames,
) -> Completion:
    n = len(choices) // len(prompts)
    if only_echoes(body):
        _leave_out_answers(choices, progress)
    return Completion(
        **asdict(head),
        choices=[_completion_choice(body, prompts[choice.index // n], choice, names) for choice in choices],
        usage=usage_object(progress.usage()),
        timings=timings_object(progress),
    )


def _leave_out_answers(choices: Sequence[Choice], progress: Progress) -> None:
    progress.completion_tokens = 0
    for choice in choices:
        choice.text, choice.token_ids, choice.logprobs = "", [], []
        choice.finish_reason, choice.stop_reason = "length", None


def _completion_choice(body: CompletionBody, prompt: Prompt, choice: Choice, names: TokenNames) -> CompletionChoice:
    reason: Any = choice.finish_reason
    ready = CompletionChoice(
        index=choice.index,
        text=prompt.text + choice.text if body.echo else choice.text,
        logprobs=_completion_logprobs(body, prompt, choice, names),
        finish_reason=reason,
        stop_reason=choice.stop_reason,
    )
    if body.prompt_logprobs is not None:
        ready.prompt_logprobs = prompt_logprobs(choice.prompt_logprobs, names)
    if body.return_token_ids:
        ready.token_ids, ready.prompt_token_ids = choice.token_ids, prompt.shown_token_ids
    return ready


def _completion_logprobs(
    body: CompletionBody, prompt: Prompt, choice: Choice, names: TokenNames
) -> CompletionLogprobs | None:
    if body.logprobs is None:
        return None
    builder = CompletionLogprobsBuilder(names)
    if body.echo:
        builder.add_prompt(prompt.token_ids, choice.prompt_logprobs or ())
    builder.add(choice.logprobs)
    return builder.take()
