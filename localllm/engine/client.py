"""The only way into the engine from asyncio: submit, cancel, stats. Contract first; the loop sits behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from localllm.engine.outputs import GenerationEvent
from localllm.engine.params import SamplingParams
from localllm.engine.stats import EngineStats


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What every dialect translates into: token ids and parameters, `params.n` choices."""

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    priority: int = 0                        # smaller runs first under --scheduling-policy priority
    cache_salt: str | None = None            # requests with different salts never share KV blocks


class EngineClient:
    """Thread crossing between asyncio and the engine loop."""

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        """Events of all choices, interleaved as they come; ends after each choice had its last event.

        Raises `ContextTooLong`, `InvalidParameter`, `QueueFull` or `EngineStopped` before the first event. Closing
        the iterator (`aclose`, cancellation) cancels the request; its blocks are free within one step.
        """
        raise NotImplementedError
        yield

    def cancel(self, request_id: str) -> None:
        """End a request now, from any thread; its stream gets a last event with finish_reason 'abort'."""

    def stats(self) -> EngineStats:
        """The latest snapshot; at most 100 ms old while the engine works."""
        raise NotImplementedError
