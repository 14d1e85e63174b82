"""Runs a beam search through the engine's client: its steps are requests of one token.

Does not know: HTTP, dialects, torch, how beams are ranked (beam_search.py).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from localllm.engine.admission import GenerationRequest
from localllm.engine.beam_search import Beam, BeamSearch
from localllm.engine.client import EngineClient
from localllm.engine.outputs import GenerationEvent, Timings, Usage
from localllm.engine.params import SamplingParams
from localllm.engine.recorder import now_s
from localllm.engine.stats import RequestTimeline
from localllm.errors import LocalLLMError, StepFailed
from localllm.text.cursor import TextCursor
from localllm.text.tokenizer import Tokenizer


async def beam_batches(client: EngineClient, asked: GenerationRequest) -> AsyncGenerator[list[GenerationEvent], None]:
    """Yield one event for each of the best beams, all at the end. `asked` has an `options.length_penalty`; otherwise
    like `EngineClient.generate_batches`. Closing the iterator cancels the running requests."""
    search = BeamSearch(asked, client.admission)
    ended = RequestTimeline(asked.request_id, "finished", len(search.prompt), 0, 0, 0, 0, now_s(),
                            source=asked.options.source, key_name=asked.options.key_name)  # fmt: skip
    first: GenerationEvent | None = None
    reason = "abort"
    try:
        while not search.is_over:
            events = await _run(client, search.requests())
            first = first or events[0]
            search.advance([event.logprobs[0] for event in events])
        beams = search.best()
        reason = beams[0].finish_reason
    except LocalLLMError:
        reason = "error"
        raise
    finally:
        if first is not None:
            ended = _begun(ended, first)
        if first is not None or reason == "abort":  # otherwise it was refused
            client.report(replace(ended, num_output_tokens=search.num_steps, finished_s=now_s(), finish_reason=reason))
    assert first is not None, "a search has at least one step"
    assert first.usage is not None
    assert first.timings is not None
    timings = first.timings
    decode_s = max(0.0, now_s() - ended.arrived_s - timings.ttft_s)
    timings = Timings(timings.queue_s, timings.prefill_s, decode_s, timings.ttft_s)
    yield [
        GenerationEvent(
            index=index,
            text=beam_text(client.tokenizer, search.prompt, beam, asked.params),
            token_ids=beam.token_ids,
            logprobs=beam.logprobs,
            finish_reason=beam.finish_reason,
            usage=Usage(len(search.prompt), len(beam.token_ids), first.usage.cached_tokens),
            timings=timings,
        )
        for index, beam in enumerate(beams)
    ]


def _begun(search: RequestTimeline, first: GenerationEvent) -> RequestTimeline:
    """Return the timeline of a search with the times of its first step, which reads the prompt."""
    assert first.timings is not None
    assert first.usage is not None
    scheduled_s, first_token_s = (search.arrived_s + each for each in (first.timings.queue_s, first.timings.ttft_s))
    cached = first.usage.cached_tokens
    return replace(search, num_cached_tokens=cached, scheduled_s=scheduled_s, first_token_s=first_token_s)


async def _run(client: EngineClient, requests: list[GenerationRequest]) -> list[GenerationEvent]:
    """Run the requests and return the one event of each."""
    told: dict[int, GenerationEvent] = {}
    async with aclosing(client.generate_batches(*requests)) as batches:
        async for batch in batches:
            for event in batch:
                if not event.logprobs:
                    raise event.error or StepFailed("The engine aborted this request.", "The log has the details.")
                told[event.index] = event
    return [told[index] for index in range(len(requests))]


def beam_text(tokenizer: Tokenizer, prompt: Sequence[int], beam: Beam, params: SamplingParams) -> str:
    cursor = TextCursor(tokenizer, prompt[-16:], skip_special_tokens=params.skip_special_tokens)
    return cursor.finish(beam.token_ids).text
