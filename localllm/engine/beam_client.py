"""Runs a beam search through the engine's client: its steps are requests of one token.

Does not know: HTTP, dialects, torch, how beams are ranked (beam_search.py).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from localllm.engine.admission import GenerationRequest
from localllm.engine.beam_search import Beam, BeamSearch
from localllm.engine.client import EngineClient
from localllm.engine.outputs import GenerationEvent, Timings, Usage
from localllm.engine.params import SamplingParams
from localllm.engine.recorder import now_s
from localllm.errors import StepFailed
from localllm.text.cursor import TextCursor
from localllm.text.tokenizer import Tokenizer


async def beam_batches(client: EngineClient, asked: GenerationRequest) -> AsyncGenerator[list[GenerationEvent], None]:
    """Yield one event for each of the best beams, all at the end. `asked` has an `options.length_penalty`; otherwise
    like `EngineClient.generate_batches`. Closing the iterator cancels the running requests."""
    started_s = now_s()
    search = BeamSearch(asked, client.admission)
    first: GenerationEvent | None = None
    while not search.is_over:
        events = await _run(client, search.requests())
        first = first or events[0]
        search.advance([event.logprobs[0] for event in events])
    assert first is not None, "a search has at least one step"
    assert first.usage is not None
    assert first.timings is not None
    timings = first.timings
    decode_s = max(0.0, now_s() - started_s - timings.ttft_s)
    timings = Timings(timings.queue_s, timings.prefill_s, decode_s, timings.ttft_s)
    beams = search.best()
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
