"""Run one request as one stream of events, whatever its number of prompts and choices.

Choice i of prompt p has the index `p * n + i`. Events that arrive together are yielded together, so that a dialect can
write them to the socket at once. Dialects and the chat page read events and usage from here and never call the engine
themselves.
Does not know: HTTP, JSON, any dialect's words.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

from msgspec import structs

from localllm.engine.admission import child_id
from localllm.engine.beam_search import beam_batches
from localllm.engine.client import EngineClient, GenerationRequest
from localllm.engine.outputs import DraftCounts, ExplainedMiss, GenerationEvent, Timings, Usage, most_missed
from localllm.engine.params import SamplingParams
from localllm.engine.request import NO_OPTIONS, RequestOptions
from localllm.engine.stats import generation_rate
from localllm.engine.step import PromptEmbeds, TokenLogprobs
from localllm.errors import StepFailed, UnsupportedParameter
from localllm.serving.answers.pictures import PromptIds
from localllm.serving.answers.sounds import Senses
from localllm.serving.served import ServedModel
from localllm.text.answers.parts import Content, Part, Reasoning, ToolArguments, joined
from localllm.text.answers.reader import AnswerReader
from localllm.text.answers.whole import ToolCall, add_up

ADMISSION_S = 0.02
"""How long to wait for a refusal. The engine refuses at once or not at all, so this only has to cover one crossing
between threads; an accepted request sends its headers after this time at the latest.
"""


@dataclass(slots=True)
class Progress:
    """Running counts of one API request, the source of usage and timings. Call `count` once per event, in order."""

    n: int  # choices per prompt
    prompt_tokens: int  # over all prompts, each counted once
    unfinished: int  # choices without a last event so far
    completion_tokens: int = 0  # over all choices, so far
    timings: Timings = field(default_factory=Timings)  # of the choice with the longest decode
    timed_tokens: int = 0  # completion tokens of that choice
    cache_miss: ExplainedMiss | None = None  # of the choice that missed most; the others find its prompt in the cache
    finish_reasons: list[str] = field(default_factory=list)  # of the ended choices, in the order of their ends
    _cached_by_prompt: dict[int, int] = field(default_factory=dict)
    _seen_by_choice: dict[int, int] = field(default_factory=dict)
    _silent_by_choice: dict[int, int] = field(default_factory=dict)  # tokens whose text has not appeared yet
    _drafts_by_choice: dict[int, DraftCounts] = field(default_factory=dict)
    _reasoning_tokens: float = 0.0
    image_tokens: int = 0  # of prompt_tokens
    audio_tokens: int = 0  # likewise

    def count(self, event: GenerationEvent) -> None:
        seen = self._seen_by_choice.get(event.index, 0) + len(event.token_ids)
        self._seen_by_choice[event.index] = seen
        self.completion_tokens += len(event.token_ids)
        if event.parts is not None:
            self._count_reasoning(event.index, len(event.token_ids), event.parts)
        if event.usage is not None:
            prompt, cached = event.index // self.n, event.usage.cached_tokens
            self._cached_by_prompt[prompt] = min(cached, self._cached_by_prompt.get(prompt, cached))
            self._drafts_by_choice[event.index] = event.usage.drafts
        if event.timings is not None and event.timings.decode_s >= self.timings.decode_s:
            self.timings = event.timings
            self.timed_tokens = seen if event.usage is None else event.usage.completion_tokens
        if event.timings is not None:
            self.cache_miss = most_missed(self.cache_miss, event.timings.cache_miss)
        if event.finish_reason is None:
            return
        self.unfinished -= 1
        self.finish_reasons.append(event.finish_reason)
        if event.usage is not None:  # the engine's count is exact and includes tokens without text
            self.completion_tokens += event.usage.completion_tokens - seen

    def _count_reasoning(self, index: int, num_tokens: int, parts: Sequence[Part]) -> None:
        silent = self._silent_by_choice.get(index, 0) + num_tokens
        sizes = [
            (type(part), len(part.text)) for part in parts if isinstance(part, Content | Reasoning | ToolArguments)
        ]
        if said := sum(size for _, size in sizes):
            self._reasoning_tokens += silent * sum(size for kind, size in sizes if kind is Reasoning) / said
            silent = 0
        self._silent_by_choice[index] = silent

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of reasoning among completion_tokens. In a step in which reasoning ends, tokens are split in
        proportion to characters.
        """
        return round(self._reasoning_tokens)

    @property
    def tokens_per_s(self) -> float | None:
        """The rate at which the choice with the longest decode was generated."""
        return generation_rate(self.timed_tokens, self.timings.decode_s)

    def usage(self) -> Usage:
        drafts = DraftCounts()
        for counts in self._drafts_by_choice.values():
            drafts = drafts.plus(counts)
        cached = sum(self._cached_by_prompt.values())
        return Usage(
            self.prompt_tokens, self.completion_tokens, cached, drafts, self.image_tokens, self.audio_tokens
        )  # fmt: skip


@dataclass(slots=True)
class Observed:
    """The outcome of an API request, for tracing."""

    model: str = ""
    asked_model: str | None = None  # the name that the request used
    progress: Progress | None = None


observed: ContextVar[Observed | None] = ContextVar("observed", default=None)
"""The outcome of the current request; None: tracing is off."""


class Answering(Protocol):
    """A request whose answer arrives as events, from an engine of this server or from another server.

    `open`, or entering its context, raises a refusal; leaving it, or `aclose`, ends the work for it.
    """

    @property
    def progress(self) -> Progress: ...

    @property
    def engine_id(self) -> str: ...

    async def open(self) -> None: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc_info: object) -> None: ...

    async def aclose(self) -> None: ...

    def batches(self) -> AsyncGenerator[list[GenerationEvent], None]: ...


class Generation:
    """Runs requests (one per prompt, each with `params.n` choices). Use it as an async context manager.

    Leaving the context cancels whatever still runs, and waits until the engine has been told.
    """

    def __init__(
        self,
        client: EngineClient,
        requests: Sequence[GenerationRequest],
        new_reader: Callable[[], AnswerReader] | None = None,
        senses: Senses | None = None,
    ) -> None:
        """`new_reader` makes, for each choice, a reader that separates content, reasoning and tool calls; None: all
        text is content. `senses` decode the pictures and sounds of prompts that have some.
        """
        n = requests[0].params.n
        prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        self.progress = Progress(n, prompt_tokens, unfinished=n * len(requests))
        prompt = requests[0].prompt_token_ids  # a request with pictures has one prompt
        self._seeing = (senses, prompt) if senses and isinstance(prompt, PromptIds) and prompt.has_media else None
        if isinstance(prompt, PromptIds):
            self.progress.image_tokens, self.progress.audio_tokens = prompt.num_image_tokens, prompt.num_audio_tokens
        self._holds_pictures = False
        self._new_reader, self._readers = new_reader, dict[int, AnswerReader]()
        self._client, self._requests, self._params = client, requests, requests[0].params
        if (facts := observed.get()) is not None:
            facts.progress = self.progress
        self._source: AsyncGenerator[list[GenerationEvent], None] | None = None
        self._first: asyncio.Future[list[GenerationEvent]] | None = None

    @property
    def is_open(self) -> bool:
        """Return whether the requests were submitted."""
        return self._first is not None

    @property
    def engine_id(self) -> str:
        """The engine's id of the first choice."""
        return child_id(self._requests[0].request_id, 0, self._params.n)

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def open(self) -> None:
        """Submit the requests, once. Raises the refusal if there is one (context too long, invalid grammar, queue full,
        engine stopped).
        """
        if self._first is not None:
            return
        await self._client.prepare(self._params)
        if self._seeing is not None:
            (senses, prompt), options = self._seeing, self._requests[0].options
            options = replace(options, adapter=senses.adapter_for(prompt, options.adapter))
            spans = await senses.spans(prompt, options.cache_salt)
            self._holds_pictures = True
            self._requests = [replace(self._requests[0], media=spans, options=options)]
        one = len(self._requests) == 1
        self._source = _events_of(self._client, self._requests[0]) if one else _merged(self._client, self._requests)
        self._first = asyncio.ensure_future(anext(self._source))
        try:
            await asyncio.wait({self._first}, timeout=ADMISSION_S)
            if self._first.done():
                _raise_error(self._first.result())
        except BaseException:
            await self.aclose()
            raise

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        if self._first is not None and not self._first.done():
            self._first.cancel()
            await asyncio.wait({self._first})
        if self._source is not None:
            await self._source.aclose()
        if self._seeing is not None and self._holds_pictures:
            self._holds_pictures = False
            self._seeing[0].release(self._seeing[1])

    def cancel(self) -> None:
        """Ask the engine to end every choice; each still gets its last event."""
        for request in self._requests:
            self._client.cancel(request.request_id, self._params.n)

    async def batches(self) -> AsyncGenerator[list[GenerationEvent], None]:
        """Yield events in order of arrival, until `progress` has counted the last event of each choice (the consumer
        counts).

        Raises the error that ended a choice, after the events that came before it; its last event is counted here.
        """
        assert self._first is not None, "enter the context first"
        assert self._source is not None
        batch = await self._first
        while True:
            if sound := [event for event in batch if not _failed(event)]:
                yield sound if self._new_reader is None else [self._read(event, self._new_reader) for event in sound]
            for event in batch:
                if _failed(event):
                    self.progress.count(event)
            _raise_error(batch)
            if not self.progress.unfinished:
                return
            batch = await anext(self._source)

    def _read(self, event: GenerationEvent, new_reader: Callable[[], AnswerReader]) -> GenerationEvent:
        """Return the event with its parsed text. If the parsed answer is over before the model ends it, stop the
        choice.
        """
        reader = self._readers.get(event.index)
        if reader is None:
            reader = self._readers[event.index] = new_reader()
        was_over = reader.is_over
        if was_over:
            event = structs.replace(event, token_ids=(), logprobs=())
        parts = reader.feed(event.text)
        if event.finish_reason is not None:
            parts += reader.end()
            if reader.is_over:
                event = structs.replace(event, finish_reason="stop", stop_reason=None)
        elif reader.is_over and not was_over:
            prompt, choice = divmod(event.index, self._params.n)
            self._client.cancel(child_id(self._requests[prompt].request_id, choice, self._params.n), reason="stop")
        return structs.replace(event, parts=tuple(parts))


def _failed(event: GenerationEvent) -> bool:
    return event.error is not None or event.finish_reason == "error"


def _raise_error(batch: Sequence[GenerationEvent]) -> None:
    for event in batch:
        if _failed(event):
            raise event.error or StepFailed("The engine aborted this request.", "The log has the details.")


def _events_of(client: EngineClient, request: GenerationRequest) -> AsyncGenerator[list[GenerationEvent], None]:
    if request.options.length_penalty is not None:
        return beam_batches(client, request)
    return client.generate_batches(request)


async def _merged(
    client: EngineClient, requests: Sequence[GenerationRequest]
) -> AsyncGenerator[list[GenerationEvent], None]:
    """Run several prompts as one stream: one task per prompt, their events renumbered and yielded together."""
    arrived: list[GenerationEvent] = []
    news = asyncio.Event()

    async def pump(prompt: int, request: GenerationRequest) -> None:
        offset = prompt * request.params.n
        async with aclosing(_events_of(client, request)) as batches:
            async for batch in batches:
                arrived.extend(structs.replace(event, index=offset + event.index) for event in batch)
                news.set()

    pumps = [asyncio.create_task(pump(p, request)) for p, request in enumerate(requests)]
    for task in pumps:
        task.add_done_callback(lambda _: news.set())
    try:
        while arrived or not all(task.done() for task in pumps):
            await news.wait()
            news.clear()
            for task in pumps:
                if task.done():
                    task.result()
            if arrived:
                batch = arrived.copy()
                arrived.clear()
                yield batch
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


def parts_of(event: GenerationEvent) -> Sequence[Part]:
    """Return the parsed parts of an event's text; without a reader all of it is content."""
    if event.parts is not None:
        return event.parts
    return (Content(event.text),) if event.text else ()


@dataclass(slots=True)
class Choice:
    """The complete output of one choice."""

    index: int
    text: str = ""  # content
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    parts: Sequence[Part] = ()  # all parts in their order
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


async def collect(generation: Answering) -> list[Choice]:
    """Wait for the end; return the choices in order of their index."""
    choices = [Choice(index) for index in range(generation.progress.unfinished)]
    parts: list[list[Part]] = [[] for _ in choices]
    async for batch in generation.batches():
        for event in batch:
            generation.progress.count(event)
            choice = choices[event.index]
            parts[event.index] += parts_of(event)
            choice.token_ids.extend(event.token_ids)
            choice.logprobs.extend(event.logprobs)
            choice.prompt_logprobs = event.prompt_logprobs or choice.prompt_logprobs
            if event.finish_reason is not None:
                choice.finish_reason, choice.stop_reason = event.finish_reason, event.stop_reason
    for choice, said in zip(choices, parts, strict=True):
        choice.parts = joined(said)
        add_up(choice, choice.parts)
    return choices


def salted(prefix_owner: str, cache_salt: str | None) -> str | None:
    """Return the cache salt that combines the owner with the request's own salt, which another client may know."""
    return f"{prefix_owner}\0{cache_salt or ''}" if prefix_owner else cache_salt


def generation_of(
    model: ServedModel,
    params: SamplingParams,
    prompts: Sequence[Sequence[int]],
    options: RequestOptions = NO_OPTIONS,
    *,
    new_reader: Callable[[], AnswerReader] | None = None,
    embeds: Mapping[int, PromptEmbeds] | None = None,
) -> Generation:
    """Return the generation for these prompts. `embeds`: prompt index -> embeddings in place of the prompt's tokens."""
    form = params.structured_outputs
    if options.length_penalty is not None and form is not None and form.opened_by:
        params = replace(params, structured_outputs=None)  # calls that are not enforced
    elif options.length_penalty is not None and form is not None:
        raise UnsupportedParameter(
            f"{form.param!r} cannot be combined with a beam search.",
            "A beam search does not support grammars.",
            "Leave out one of the two.",
            param=form.param,
        )
    model.require_queue_room(params.n * len(prompts))
    salt = salted(model.prefix_owner, options.cache_salt)
    given = embeds or {}
    options = replace(
        options,
        cache_salt=salt,
        owner=model.owner,
        adapter=model.adapter,
        source=model.source,
        key_name=model.key_name,
        is_background=model.is_background,
        replica=model.replica,
    )
    name = uuid.uuid4().hex
    requests = [
        GenerationRequest(f"{name}-{i}", token_ids, params, options, given.get(i))
        for i, token_ids in enumerate(prompts)
    ]
    return Generation(model.generator, requests, new_reader, model.senses)
