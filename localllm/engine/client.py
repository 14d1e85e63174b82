"""The asyncio interface of the engine: submit, cancel, stats.

Each step crosses threads once in each direction. Requests enter through the loop's inbox; a step's outputs return in
one callback on the event loop, which makes text and wakes the streams. The engine could move to a child process behind
this module without any change above it.
Does not know: HTTP, dialects, torch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from typing import TypeVar

from localllm.engine.admission import Admission, GenerationRequest, ModelLimits, child_id
from localllm.engine.loop import EngineLoop
from localllm.engine.outputs import EngineOutput, ExplainedMiss, GenerationEvent, explained
from localllm.engine.params import SamplingParams
from localllm.engine.processor import OutputProcessor
from localllm.engine.pulse import LoopClient, TimedPool
from localllm.engine.stats import EngineStats, RequestTimeline
from localllm.engine.streams import Stream, Wakes
from localllm.errors import EngineStopped, InvalidParameter, LocalLLMError, QueueFull, StepFailed
from localllm.text.structured import UNUSABLE, StructuredOutputsParams
from localllm.text.tokenizer import Tokenizer

__all__ = ["EngineClient", "GenerationRequest"]

log = logging.getLogger(__name__)
T = TypeVar("T")

COMPILE_S, LARGE_COMPILE_S = 10.0, 30.0
"""Seconds a grammar may take to compile; llguidance's own limits end nearly all earlier.
Large grammars are compiled one at a time."""


class EngineClient(LoopClient):
    """Connects asyncio with the engine loop's thread. Create it, then `await start()` on the serving loop."""

    def __init__(self, loop: EngineLoop, admission: Admission, tokenizer: Tokenizer) -> None:
        super().__init__(loop)
        self._engine = loop
        self.admission, self.tokenizer = admission, tokenizer
        self._processor = OutputProcessor(tokenizer)
        self._streams: dict[str, Stream] = {}  # by engine request id: one entry per open choice
        self._wakes = Wakes()
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        # Grammars that may take seconds have their own thread, so they delay only each other.
        self._compilers = TimedPool(2, "localllm-grammar")
        self._large_compilers = TimedPool(1, "localllm-large-grammar")

    @property
    def limits(self) -> ModelLimits:
        return self.admission.limits

    async def start(self) -> None:
        self._event_loop = asyncio.get_running_loop()
        self._engine.deliver = self._deliver
        self._engine.on_ended = self._on_ended
        self._engine.start()

    async def stop(self) -> None:
        """End every stream with an error event, and end the engine's thread."""
        self._stopping.set()
        for compilers in (self._compilers, self._large_compilers):
            compilers.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self.admission.close)
        await asyncio.to_thread(self._engine.stop)
        await asyncio.sleep(0)  # the last outputs were posted before the thread ended

    async def prepare(self, params: SamplingParams) -> None:
        """Tokenise bad words and breakers, and compile the grammar, off the event loop, since either may take long.

        Raises `InvalidParameter` if the parameters are invalid or unsupported, `QueueFull` if no compiler was free in
        time, `EngineStopped`.
        """
        if params.bad_words or params.uses_dry:
            await asyncio.to_thread(self.admission.tokenise, params)
        asked = params.structured_outputs
        if asked is None:
            return
        try:
            await self._compile(asked, params)
        except (InvalidParameter, QueueFull) as error:
            if not asked.opened_by:
                raise
            log.info("calls are not enforced: %s", error)
            object.__setattr__(asked, "compiled", UNUSABLE)

    async def _compile(self, asked: StructuredOutputsParams, params: SamplingParams) -> None:
        if await self._compiled(self._compilers, lambda: self.admission.takes_long(params), asked, COMPILE_S):
            compilers, within_s = self._large_compilers, LARGE_COMPILE_S
        else:
            compilers, within_s = self._compilers, COMPILE_S
        await self._compiled(compilers, lambda: self.admission.prepare(params), asked, within_s)

    async def _compiled(
        self, compilers: TimedPool, work: Callable[[], T], asked: StructuredOutputsParams, within_s: float
    ) -> T:
        if self._stopping.is_set():
            raise _stopped()
        compiling = compilers.submit(work)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(compiling), within_s)
        except asyncio.CancelledError:
            if self._stopping.is_set() and compiling.cancelled():  # cancelled by `stop`, not by the caller
                raise _stopped() from None
            raise
        except TimeoutError as error:
            if compiling.cancelled():  # it had not started
                raise QueueFull(
                    "All grammar compilers are busy.",
                    f"None of {compilers.num_threads} was free within {within_s:g} s.",
                    "Try again in a moment.",
                ) from error
            raise asked.refusal(
                "This output format is too complex.",
                f"Compiling it took longer than {within_s:g} s.",
                "Ask for a simpler schema, expression or grammar.",
            ) from error

    async def generate(self, asked: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Yield the events of all choices, interleaved as they arrive, until each choice has had its last event.

        Raises `ContextTooLong`, `InvalidParameter` or `EngineStopped` before the first event; `QueueFull` arrives as a
        last event with `error`. Closing the iterator (`aclose`, cancellation) cancels the request; its blocks are free
        before the next step.
        """
        async with aclosing(self.generate_batches(asked)) as batches:
            async for events in batches:
                for event in events:
                    yield event

    async def generate_batches(self, *asked: GenerationRequest) -> AsyncGenerator[list[GenerationEvent], None]:
        """Yield lists of all events since the reader's last look; otherwise like `generate`. The choices of several
        requests are numbered consecutively.

        If a reader falls behind, each choice's tokens are joined into one event, so catching up is cheap.
        """
        admitted = [(request, each) for each in asked for request in self.admission.admit(each)]
        stream = Stream(len(admitted))
        requests = [request for request, _ in admitted]
        ids = [request.request_id for request in requests]
        self._refuse_open(ids)
        for index, (request, each) in enumerate(admitted):
            self._streams[request.request_id] = stream
            self._processor.open(request, index, timed=each.options.timings_per_token)
        try:
            self._engine.submit(*requests)
            while stream.open_choices or stream.events:
                yield await stream.take()
        finally:
            for request_id in ids:
                if self._processor.close(request_id):
                    self._engine.cancel(request_id)
                self._streams.pop(request_id, None)

    def _refuse_open(self, ids: list[str]) -> None:
        for request_id in ids:
            if request_id in self._streams:
                raise InvalidParameter(
                    f"A request with the id {request_id!r} is already running.",
                    "Each request needs its own id.",
                    param="request_id",
                )

    def cancel(self, request_id: str, n: int = 1, reason: str = "abort") -> None:
        """End a request now. Its stream gets a last event with `reason` as the finish reason,
        also in the statistics."""
        for index in range(n):
            self._engine.cancel(child_id(request_id, index, n), reason)

    def cancel_all(self) -> None:
        """End every request now, as `cancel` does."""
        for request_id in self._streams:
            self._engine.cancel(request_id)

    def report(self, search: RequestTimeline) -> None:
        """Count a beam search that has ended as one request."""
        self._engine.report(search)

    def stats(self) -> EngineStats:
        """Return the latest snapshot; at most 100 ms old while the engine works."""
        return self._engine.stats()

    def cache_miss(self, line: RequestTimeline, owner: str) -> ExplainedMiss | None:
        """Return why a recent request of this owner was not found in the prefix cache; None: not known, or it was."""
        miss = self._engine.cache_miss(line.request_id, owner)
        return None if miss is None else explained(miss, line.missed_s or 0.0, self.tokenizer.decode)

    @property
    def num_open(self) -> int:
        """Requests whose reader still waits for events: exact, while `stats()` may be a step behind."""
        return len(set(self._streams.values()))

    @property
    def compilers(self) -> tuple[TimedPool, ...]:
        return self._compilers, self._large_compilers

    def _on_ended(self) -> None:
        """Runs on the engine's thread, last of all."""
        assert self._event_loop is not None
        with suppress(RuntimeError):  # the event loop is closed: no reader is left
            self._event_loop.call_soon_threadsafe(self._end_streams)

    def _end_streams(self) -> None:
        """Runs on the event loop after all delivered outputs: end streams that the engine could not end itself."""
        assert self._engine.why_ended is not None
        for request_id in list(self._streams):
            self._fail(request_id, self._engine.why_ended)
        self._ended.set()

    def _fail(self, request_id: str, error: LocalLLMError) -> None:
        event = self._processor.fail(request_id, error)
        if event is not None:
            self._wakes.put(self._streams[request_id], event)

    def _deliver(self, outputs: list[EngineOutput]) -> None:
        """Runs on the engine's thread: pass a step's outputs to the event loop."""
        assert self._event_loop is not None
        try:
            self._event_loop.call_soon_threadsafe(self._dispatch, outputs)
        except RuntimeError:  # the event loop is closed: no reader is left
            log.info("dropped outputs=%d reason=event-loop-closed", len(outputs))

    def _dispatch(self, outputs: list[EngineOutput]) -> None:
        """Runs on the event loop: make text, wake the streams, cancel requests that a stop string ended."""
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            try:
                event = self._processor.process(output)
            except Exception as error:
                log.exception("text could not be produced request id=%s", output.request_id)
                self._engine.cancel(output.request_id, "error")
                why = f"{type(error).__name__}: {error}"
                self._fail(output.request_id, StepFailed("The text of this answer could not be produced.", why))
                continue
            if event is None:
                continue
            if event.finish_reason is not None and output.finish_reason is None:
                self._engine.cancel(output.request_id, "stop")
            self._wakes.put(stream, event)


def _stopped() -> EngineStopped:
    return EngineStopped("The engine is shutting down.", hint="Retry once the server is back.")
