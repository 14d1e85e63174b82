"""Answers of chat completions and completions: as server-sent events, and in one piece.

An event is a fixed prefix and suffix around the text, joined once per step.
Does not know: how a request is read, how tokens are made.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET
from msgspec.structs import asdict

from localllm.engine.outputs import GenerationEvent, PromptProgress, Usage
from localllm.errors import LocalLLMError
from localllm.serving.answers.generation import Choice, Progress
from localllm.text.answers.parts import Content, Reasoning, ToolArguments, ToolCallStart
from localllm.version import __version__
from localllm.web.api.openai.logprobs import CompletionLogprobsBuilder, TokenNames, chat_logprobs, prompt_logprobs
from localllm.web.api.openai.params import only_echoes
from localllm.web.api.openai.prompts import RawPrompt
from localllm.web.api.openai.schema import ChatBody, CompletionBody, GenerateBody
from localllm.web.api.openai.shapes import (
    ChatChoice,
    ChatCompletion,
    Completion,
    CompletionChoice,
    CompletionDetails,
    CompletionLogprobs,
    Delta,
    OpenAICalledFunction,
    OpenAIChunk,
    OpenAIHead,
    OpenAIMessage,
    OpenAIPromptProgress,
    OpenAIToolCall,
    OpenAIUsage,
    PromptDetails,
    ToolCallPiece,
)
from localllm.web.api.timings import timings_object
from localllm.web.errors import openai_error

to_json = msgspec.json.encode
FINGERPRINT = f"localllm-{__version__}"
CALLS = (ToolCallStart, ToolArguments)
DONE = b"data: [DONE]\n\n"


def new_head(prefix: str, object: str, model: str, request_id: str | None) -> OpenAIHead:
    return OpenAIHead(f"{prefix}-{request_id or uuid.uuid4().hex}", object, int(time.time()), model, FINGERPRINT)


class _Chunks:
    """The shared part of both encoders: the envelope, usage and the end."""

    def __init__(self, head: OpenAIHead, body: GenerateBody, prompts: Sequence[RawPrompt], n: int) -> None:
        options = body.stream_options
        self.head, self.prompts, self.n = head, prompts, n
        self.include_usage = bool(options and options.include_usage)
        self.continuous_usage = bool(options and options.continuous_usage_stats)
        self.token_ids = bool(body.return_token_ids)
        self.timed = bool(body.timings_per_token)
        self._open = b"data: " + to_json(head)[:-1] + b',"choices":['
        self._close = b'],"usage":null}\n\n' if self.include_usage else b"]}\n\n"
        self._started: set[int] = set()

    def end(self, progress: Progress) -> bytes:
        if not self.include_usage:
            return DONE
        last = OpenAIChunk(
            **asdict(self.head),
            choices=[],
            usage=usage_object(progress.usage()),
            timings=timings_object(progress),
        )
        return b"data: " + to_json(last) + b"\n\n" + DONE

    def error(self, error: LocalLLMError) -> bytes:
        return b"data: " + to_json(openai_error(error)) + b"\n\n"

    def _is_first(self, index: int) -> bool:
        if index in self._started:
            return False
        self._started.add(index)
        return True

    def _wrap(self, choice: bytes, progress: Progress, *, last: bool = False, more: bytes = b"") -> bytes:
        """Return one chunk. `last`: every choice has ended; that chunk has the timings unless a usage chunk follows, or
        every chunk has them. `more`: further fields beside `choices`.
        """
        close = self._close
        if self.continuous_usage:
            close = b'],"usage":' + to_json(usage_object(progress.usage())) + b"}\n\n"
        if self.timed or (last and not self.include_usage):
            more += b',"timings":' + to_json(timings_object(progress))
        return self._open + choice + (close[:-3] + more + b"}\n\n" if more else close)

    def _prompt_progress(self, choice: bytes, read: PromptProgress, progress: Progress) -> bytes:
        """Return llama.cpp's chunk that says how much of the prompt has been processed."""
        return self._wrap(choice, progress, more=b',"prompt_progress":' + to_json(progress_object(read)))

    def _ids(self, event: GenerationEvent) -> bytes:
        """Return vLLM's return_token_ids: the ids of the chunk's text."""
        return b',"token_ids":' + to_json(event.token_ids) if self.token_ids else b""

    def _prompt_ids(self, event: GenerationEvent) -> bytes:
        """Return the prompt's ids, for the first chunk of a choice."""
        if not self.token_ids:
            return b""
        return b',"prompt_token_ids":' + to_json(self.prompts[event.index // self.n].shown_token_ids)


def _finish(event: GenerationEvent, reason: str | None) -> bytes:
    return b',"finish_reason":' + to_json(reason) + b',"stop_reason":' + to_json(event.stop_reason) + b"}"


def finish_reason(reason: str | None, *, calls: bool) -> str | None:
    """Return the finish reason, which is tool_calls if the answer called a tool."""
    return "tool_calls" if calls and reason == "stop" else reason


class ChatChunks(_Chunks):
    """chat.completion.chunk: a role, pieces of content, a finish reason."""

    def __init__(
        self, head: OpenAIHead, body: ChatBody, prompts: Sequence[RawPrompt], n: int, names: TokenNames | None
    ) -> None:
        """`names` is given if logprobs were requested."""
        super().__init__(head, body, prompts, n)
        self.names = names
        self._role = to_json(Delta(role="assistant", content=""))
        self._prefixes = [b'{"index":%d,"delta":{"content":' % index for index in range(n)]
        self._called: set[int] = set()  # choices that have called a tool
        self._shows_reasoning = body.include_reasoning is not False

    def event(self, event: GenerationEvent, progress: Progress) -> bytes:
        chunks = []
        if self._is_first(event.index):
            choice = b'{"index":%d,"delta":' % event.index + self._role + b',"logprobs":null,"finish_reason":null'
            chunks.append(self._wrap(choice + self._prompt_ids(event) + b"}", progress))
            if echo := self.prompts[0].text:
                chunks.append(self._content(event.index, echo, b'},"logprobs":null', progress))
        if event.prompt_progress is not None:
            silent = b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":null}' % event.index
            chunks.append(self._prompt_progress(silent, event.prompt_progress, progress))
        text = event.text
        if event.parts is not None:
            text = "".join([part.text for part in event.parts if isinstance(part, Content)])
            if self._shows_reasoning:
                chunks += [
                    self._delta(event.index, Delta(reasoning_content=part.text, reasoning=part.text), progress)
                    for part in event.parts
                    if isinstance(part, Reasoning)
                ]
        if text or event.logprobs or (self.token_ids and event.token_ids):
            logprobs = to_json(chat_logprobs(event.logprobs, self.names)) if self.names else b"null"
            rest = b'},"logprobs":' + logprobs + self._ids(event)
            chunks.append(self._content(event.index, text, rest, progress))
        if event.parts is not None:
            chunks += [self._call(event.index, part, progress) for part in event.parts if isinstance(part, CALLS)]
        if event.finish_reason is not None:
            choice = b'{"index":%d,"delta":{},"logprobs":null' % event.index
            choice += _finish(event, finish_reason(event.finish_reason, calls=event.index in self._called))
            chunks.append(self._wrap(choice, progress, last=not progress.unfinished))
        return b"".join(chunks)

    def _call(self, index: int, part: ToolCallStart | ToolArguments, progress: Progress) -> bytes:
        """Return the chunk of a call part: the name comes first, then pieces of the arguments."""
        self._called.add(index)
        if isinstance(part, ToolCallStart):
            function = OpenAICalledFunction(name=part.name, arguments="")
            call = ToolCallPiece(index=part.index, id=part.id, type="function", function=function)
        else:
            call = ToolCallPiece(index=part.index, function=OpenAICalledFunction(arguments=part.text))
        return self._delta(index, Delta(tool_calls=[call]), progress)

    def _delta(self, index: int, delta: Delta, progress: Progress) -> bytes:
        choice = b'{"index":%d,"delta":' % index + to_json(delta) + b',"logprobs":null,"finish_reason":null}'
        return self._wrap(choice, progress)

    def _content(self, index: int, text: str, rest: bytes, progress: Progress) -> bytes:
        return self._wrap(self._prefixes[index] + to_json(text) + rest + b',"finish_reason":null}', progress)


class CompletionChunks(_Chunks):
    """text_completion chunks. An echoed prompt is part of the first chunk of a choice."""

    def __init__(
        self, head: OpenAIHead, body: CompletionBody, prompts: Sequence[RawPrompt], n: int, names: TokenNames | None
    ) -> None:
        super().__init__(head, body, prompts, n)
        self.echo = bool(body.echo)
        choices = range(n * len(prompts))
        self._prefixes = [b'{"index":%d,"text":' % index for index in choices]
        self.logprobs = [CompletionLogprobsBuilder(names) for _ in choices] if names else None

    def event(self, event: GenerationEvent, progress: Progress) -> bytes:
        prompt, text = self.prompts[event.index // self.n], event.text
        told = b""
        if event.prompt_progress is not None:
            silent = self._prefixes[event.index] + b'"","logprobs":null,"finish_reason":null}'
            told = self._prompt_progress(silent, event.prompt_progress, progress)
            if not (event.token_ids or event.finish_reason):  # an echo is part of the first chunk with tokens
                return told
        first = self._is_first(event.index)
        if first and self.echo:
            text = prompt.text + text
        finished = event.finish_reason is not None
        if not (text or finished or event.logprobs or (self.token_ids and event.token_ids)):
            return told
        logprobs = b"null"
        if self.logprobs is not None:
            logprobs = self._logprobs(self.logprobs[event.index], event, prompt if first and self.echo else None)
        choice = self._prefixes[event.index] + to_json(text) + b',"logprobs":' + logprobs + self._ids(event)
        if first:
            choice += self._prompt_ids(event)
        last = finished and not progress.unfinished
        return told + self._wrap(choice + _finish(event, event.finish_reason), progress, last=last)

    def _logprobs(self, builder: CompletionLogprobsBuilder, event: GenerationEvent, echoed: RawPrompt | None) -> bytes:
        if echoed is not None:
            builder.add_prompt(echoed.token_ids, event.prompt_logprobs or ())
        builder.add(event.logprobs)
        return to_json(builder.take())


def chat_response(
    head: OpenAIHead,
    body: ChatBody,
    prompt: RawPrompt,
    choices: Sequence[Choice],
    progress: Progress,
    names: TokenNames,
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


def _chat_choice(body: ChatBody, prompt: RawPrompt, choice: Choice, names: TokenNames) -> ChatChoice:
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
    prompts: Sequence[RawPrompt],
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


def _completion_choice(body: CompletionBody, prompt: RawPrompt, choice: Choice, names: TokenNames) -> CompletionChoice:
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
    body: CompletionBody, prompt: RawPrompt, choice: Choice, names: TokenNames
) -> CompletionLogprobs | None:
    if body.logprobs is None:
        return None
    builder = CompletionLogprobsBuilder(names)
    if body.echo:
        builder.add_prompt(prompt.token_ids, choice.prompt_logprobs or ())
    builder.add(choice.logprobs)
    return builder.take()


def usage_object(usage: Usage) -> OpenAIUsage:
    accepted, rejected = usage.drafts.predicted_accepted, usage.drafts.predicted_rejected
    return OpenAIUsage(
        usage.prompt_tokens, usage.completion_tokens, usage.total_tokens,
        PromptDetails(usage.cached_tokens, usage.image_tokens or UNSET, usage.audio_tokens or UNSET),
        CompletionDetails(accepted, rejected) if accepted or rejected else UNSET,
    )  # fmt: skip


def progress_object(progress: PromptProgress) -> OpenAIPromptProgress:
    return OpenAIPromptProgress(progress.total, progress.cached, progress.processed, round(progress.seconds * 1e3))
