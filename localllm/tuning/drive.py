"""Run a load against an engine in this process: a fixed number of open requests, until all are answered.

Requests go through the engine's client, as they do in the server, so the result is what a user gets without HTTP.
Memory is watched meanwhile: on a CPU the kernel does not refuse an allocation but kills the process, so a trial that
leaves the machine too little RAM is stopped before that.
Does not know: settings, goals, which trial comes next.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psutil

from localllm.engine.client import EngineClient, GenerationRequest
from localllm.engine.params import SamplingParams
from localllm.errors import LocalLLMError
from localllm.machine.hardware import process_bytes
from localllm.serving.served import ServedModel
from localllm.tuning.report import RequestTimes
from localllm.tuning.workload import WorkloadRequest

LOOK_EVERY_S = 0.02
IDLE_WORK_S = 30.0  # most time for the engine's idle work before a trial
LEAST_FREE_BYTES = 256 * 1024**2  # least RAM that the machine must keep free


class MemoryRanLow(LocalLLMError):
    """RAM ran so low that continuing might have ended the process."""

    code = "memory_ran_low"


class DeadlineExceeded(LocalLLMError):
    """The load did not end before its deadline."""

    code = "gave_up"


class Cancelled(LocalLLMError):
    """The run was cancelled."""

    code = "tuning_cancelled"


@dataclass(slots=True)
class LoadMonitor:
    """Checks made while a load runs: cancellation, deadline and memory. `peak_bytes` is the most that was held."""

    device: str
    should_stop: Callable[[], bool] = lambda: False
    deadline_s: float | None = None  # from the start of the load
    peak_bytes: int = 0

    def start_measuring(self) -> None:
        if self.device != "cpu":
            import torch

            torch.cuda.reset_peak_memory_stats(torch.device(self.device))

    def check(self, running_s: float) -> None:
        """Raise `Cancelled`, `DeadlineExceeded` or `MemoryRanLow` if the load has to stop."""
        if self.should_stop():
            raise Cancelled("The trial was cancelled.")
        if self.deadline_s is not None and running_s > self.deadline_s:
            raise DeadlineExceeded(f"It did not finish within {self.deadline_s:.1f} s.")
        if self.device == "cpu":
            self.peak_bytes = max(self.peak_bytes, process_bytes())
            available = int(psutil.virtual_memory().available)
            if available < LEAST_FREE_BYTES:
                raise MemoryRanLow(f"Only {available >> 20} MiB of RAM were free.")
            return
        import torch

        self.peak_bytes = int(torch.cuda.max_memory_allocated(torch.device(self.device)))


@asynccontextmanager
async def running(model: ServedModel) -> AsyncIterator[EngineClient]:
    """Start the engine's thread. At the end stop the engine and free its memory, but not the weights.

    The engine first does its idle work, as a server does: graphs for all shapes, huge pages under the weights.
    """
    client = model.generator
    try:
        until_s = time.perf_counter() + IDLE_WORK_S
        while model.engine[0].runner.use_idle_time() and time.perf_counter() < until_s:
            pass
        await client.start()
        yield client
    finally:
        await client.stop()
        model.close_engine()


async def drive(
    client: EngineClient, requests: Sequence[WorkloadRequest], streams: int, monitor: LoadMonitor
) -> list[RequestTimes]:
    """Run a closed loop of `streams` open requests. Raises the error of the first failed request, or of the monitor."""
    left: Iterator[tuple[int, WorkloadRequest]] = iter(list(enumerate(requests)))
    times: list[RequestTimes] = []

    async def stream() -> None:
        for number, request in left:
            times.append(await run_request(client, f"trial-{number}", request))

    await monitored([stream() for _ in range(min(streams, len(requests)))], monitor)
    return times


async def monitored(jobs: Sequence[Coroutine[Any, Any, None]], monitor: LoadMonitor) -> None:
    """Wait until all jobs are done. The first failed job, or the monitor, cancels the others."""
    monitor.start_measuring()
    started_s = time.perf_counter()
    tasks = [asyncio.create_task(job) for job in jobs]
    try:
        while pending := [task for task in tasks if not task.done()]:
            await asyncio.wait(pending, timeout=LOOK_EVERY_S, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                if task.done():
                    task.result()
            monitor.check(time.perf_counter() - started_s)
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError, LocalLLMError):
                await task


async def run_request(client: EngineClient, request_id: str, request: WorkloadRequest) -> RequestTimes:
    """Run one request to its last token, and return its times. Raises the error that ended it.

    Tokens are not detokenized: half a character would be held back, and its token would seem to come late.
    """
    params = SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True, detokenize=False)
    asked = GenerationRequest(request_id, request.prompt_token_ids, params)
    started_s, arrivals, usage = time.perf_counter(), [], None
    async with aclosing(client.generate_batches(asked)) as batches:
        async for events in batches:
            arrivals.append(time.perf_counter())
            for event in events:
                if event.error is not None:
                    raise event.error
                usage = event.usage or usage
    assert usage is not None, "the last event of a choice carries its usage"
    return RequestTimes.streamed(
        started_s, arrivals, prompt_tokens=usage.prompt_tokens, output_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )  # fmt: skip
