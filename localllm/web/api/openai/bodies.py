"""Responses in one piece, for both endpoints.

Does not know: streams, sockets, the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from localllm.web.api.generation import Choice, Progress
from localllm.web.api.openai.chunks import Head, finish_reason
from localllm.web.api.openai.logprobs import CompletionLogprobs, TokenNames, chat_logprobs, prompt_logprobs
from localllm.web.api.openai.params import only_echoes
from localllm.web.api.openai.prompts import Prompt
from localllm.web.api.openai.schema import ChatBody, CompletionBody
from localllm.web.api.openai.usage import timings_object, usage_object


def chat_response(
    head: Head, body: ChatBody, prompt: Prompt, choices: Sequence[Choice], progress: Progress, names: TokenNames
) -> dict[str, Any]:
    response = {
        **head.fields(),
        "choices": [_chat_choice(body, prompt, choice, names) for choice in choices],
        "usage": usage_object(progress.usage()),
        "timings": timings_object(progress),
    }
    if body.prompt_logprobs is not None:
        response["prompt_logprobs"] = prompt_logprobs(choices[0].prompt_logprobs, names)
    if body.return_token_ids:
        response["prompt_token_ids"] = prompt.shown_token_ids
    return response


def _chat_choice(body: ChatBody, prompt: Prompt, choice: Choice, names: TokenNames) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": prompt.text + choice.text or (None if choice.calls else ""),
        "refusal": None,
        "annotations": [],
    }
    if choice.reasoning and body.include_reasoning is not False:
        message |= {"reasoning_content": choice.reasoning, "reasoning": choice.reasoning}
    if choice.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in choice.calls
        ]
    ready: dict[str, Any] = {
        "index": choice.index,
        "message": message,
        "logprobs": chat_logprobs(choice.logprobs, names) if body.logprobs else None,
        "finish_reason": finish_reason(choice.finish_reason, calls=bool(choice.calls)),
        "stop_reason": choice.stop_reason,
    }
    if body.return_token_ids:
        ready["token_ids"] = choice.token_ids
    return ready


def completion_response(
    head: Head,
    body: CompletionBody,
    prompts: Sequence[Prompt],
    choices: Sequence[Choice],
    progress: Progress,
    names: TokenNames,
) -> dict[str, Any]:
    n = len(choices) // len(prompts)
    if only_echoes(body):
        _leave_out_answers(choices, progress)
    return {
        **head.fields(),
        "choices": [_completion_choice(body, prompts[choice.index // n], choice, names) for choice in choices],
        "usage": usage_object(progress.usage()),
        "timings": timings_object(progress),
    }


def _leave_out_answers(choices: Sequence[Choice], progress: Progress) -> None:
    progress.completion_tokens = 0
    for choice in choices:
        choice.text, choice.token_ids, choice.logprobs = "", [], []
        choice.finish_reason, choice.stop_reason = "length", None


def _completion_choice(body: CompletionBody, prompt: Prompt, choice: Choice, names: TokenNames) -> dict[str, Any]:
    ready: dict[str, Any] = {
        "index": choice.index,
        "text": prompt.text + choice.text if body.echo else choice.text,
        "logprobs": None,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
    if body.logprobs is not None:
        builder = CompletionLogprobs(names)
        if body.echo:
            builder.add_prompt(prompt.token_ids, choice.prompt_logprobs or ())
        builder.add(choice.logprobs)
        ready["logprobs"] = builder.take()
    if body.prompt_logprobs is not None:
        ready["prompt_logprobs"] = prompt_logprobs(choice.prompt_logprobs, names)
    if body.return_token_ids:
        ready |= {"token_ids": choice.token_ids, "prompt_token_ids": prompt.shown_token_ids}
    return ready
