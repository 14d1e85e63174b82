"""A soak test of the pick: every slot taken and more requests waiting, one request as long as the context,
conversations that grow on their own prefixes, and readers that disconnect in the middle.

A good score in a minute of well-behaved requests does not show that the settings last. A soak finds memory that only
the longest context needs, blocks that are not freed, and steps that fail.
Does not know: how the pick was found.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from localllm.engine.client import EngineClient, GenerationRequest
from localllm.engine.params import SamplingParams
from localllm.errors import DeviceLost, LocalLLMError
from localllm.serving.compute import clear_tracebacks, release_cached_memory
from localllm.serving.served import ServedModel
from localllm.tuning.drive import Cancelled, LoadMonitor, monitored, running
from localllm.tuning.trial import TrialRunner
from localllm.tuning.workload import PromptSource

WAITING = 2  # more requests than the engine runs at a time
MOST_TALKERS = 64
CANCELLED_SHARE = 0.2
PATIENCE = 4  # factor on the soak's length: on a slow machine the first and the longest answer may take so long
FIRST_WORDS = (8, 4)  # tokens in and out of a first short request, which completes on any machine
SETTLE_S = 5.0  # time for cancelled requests to end
SETTLE_STEPS = 2  # and steps: the running step holds its blocks until it ends
LONGEST_STEP_S = 120.0


@dataclass(frozen=True, slots=True)
class SoakReport:
    """The result of a soak. A failure is a request that ended with an error, or blocks that were not freed."""

    duration_s: float
    finished: int
    cancelled: int
    failures: int
    longest_tokens: int  # prompt and output of the longest request
    peak_bytes: int
    num_preemptions: int
    why: str = ""  # the first failure

    @property
    def passed(self) -> bool:
        return self.failures == 0 and self.finished > 0


def soak(
    runner: TrialRunner,
    settings: Mapping[str, Any],
    seconds: float,
    *,
    seed: int = 0,
    should_stop: Callable[[], bool] = lambda: False,
) -> SoakReport:
    """Run the soak. Raises `Cancelled` and `DeviceLost`; any other error counts as a failure of the soak."""
    try:
        return asyncio.run(_soak(runner.open(settings), runner.vocab_size, seconds, seed, should_stop))
    except (Cancelled, DeviceLost):
        raise
    except (LocalLLMError, MemoryError, RuntimeError) as error:
        clear_tracebacks(error)
        return SoakReport(0.0, 0, 0, 1, 0, 0, 0, str(error).splitlines()[0])
    finally:
        release_cached_memory()


async def _soak(
    model: ServedModel, vocab_size: int, seconds: float, seed: int, should_stop: Callable[[], bool]
) -> SoakReport:
    monitor = LoadMonitor(model.plan.device, should_stop)
    async with running(model) as client:
        crowd = _SimulatedUsers(model, client, PromptSource(seed, vocab_size), seconds)
        talkers = min(MOST_TALKERS, model.plan.max_num_seqs) + WAITING
        started_s = time.perf_counter()
        await monitored([crowd.first_words()], monitor)
        await monitored([crowd.longest(), *(crowd.converse(number) for number in range(talkers))], monitor)
        duration_s = time.perf_counter() - started_s
        await crowd.require_free_blocks()
        stats = client.stats()
    return SoakReport(
        duration_s,
        crowd.finished,
        crowd.cancelled,
        len(crowd.failures),
        crowd.longest_tokens,
        monitor.peak_bytes,
        stats.num_preemptions,
        crowd.failures[0] if crowd.failures else "",
    )


class _SimulatedUsers:
    """The simulated users of one engine, until time is up."""

    def __init__(self, model: ServedModel, client: EngineClient, source: PromptSource, seconds: float) -> None:
        self.client, self.source, self.limit = client, source, model.plan.max_model_len
        self.ends_s = time.perf_counter() + seconds
        self.last_s = self.ends_s + (PATIENCE - 1) * seconds
        self.finished = self.cancelled = self.longest_tokens = 0
        self.failures: list[str] = []

    @property
    def is_over(self) -> bool:
        return time.perf_counter() >= self.ends_s

    async def first_words(self) -> None:
        prompt, output = (min(length, self.limit // 2) for length in FIRST_WORDS)
        await self.ask("first", self.source.prompt(prompt), output, gives_up=False, waits=True)

    async def longest(self) -> None:
        """Send one request that fills the context to its last token; on a slow machine, until the time limit."""
        output = min(32, self.limit // 2)
        await self.ask("longest", self.source.prompt(self.limit - output), output, gives_up=False, waits=True)

    async def converse(self, number: int) -> None:
        """Hold one conversation after another. Each turn's prompt is the whole conversation so far, and more."""
        source = random.Random(number)
        turn = 0
        while not self.is_over:
            said = self.source.prompt(source.randint(1, max(1, self.limit // 16)))
            while len(said) + 2 < self.limit and not self.is_over:
                turn += 1
                output = source.randint(1, max(1, min(48, self.limit - len(said) - 1)))
                gives_up = source.random() < CANCELLED_SHARE and number > 0
                said += await self.ask(f"talk-{number}-{turn}", said, output, gives_up=gives_up)
                said += self.source.prompt(source.randint(1, max(1, self.limit // 16)))

    async def ask(
        self, name: str, prompt: tuple[int, ...], output: int, *, gives_up: bool, waits: bool = False
    ) -> tuple[int, ...]:
        """Send a request and return its answer. gives_up: disconnect after the first tokens. Requests end when time
        is up; with `waits` they may run until the end of the extended time.
        """
        params = SamplingParams(temperature=0.7, max_tokens=output, ignore_eos=True, detokenize=False)
        answer: list[int] = []
        try:
            asked = GenerationRequest(name, prompt, params)
            left_s = max(0.0, (self.last_s if waits else self.ends_s) - time.perf_counter())
            async with asyncio.timeout(left_s), aclosing(self.client.generate(asked)) as events:
                async for event in events:
                    if event.error is not None:
                        self.failures.append(str(event.error))
                        return ()
                    answer += event.token_ids
                    if gives_up and answer:
                        break
        except TimeoutError:
            gives_up = True
        except DeviceLost:
            raise
        except LocalLLMError as error:
            self.failures.append(str(error))
            return ()
        self.finished, self.cancelled = self.finished + (not gives_up), self.cancelled + gives_up
        self.longest_tokens = max(self.longest_tokens, len(prompt) + len(answer))
        return tuple(answer)

    async def require_free_blocks(self) -> None:
        """Wait until all KV blocks are free again, and record a failure if they are not."""
        began_s, began_steps = time.perf_counter(), self.client.stats().num_steps
        waited_s = 0.0
        while waited_s < LONGEST_STEP_S:
            stats = self.client.stats()
            if not (stats.num_running or stats.num_waiting or stats.used_blocks):
                return
            is_idle = not (stats.num_running or stats.num_waiting)
            if waited_s > SETTLE_S and (is_idle or stats.num_steps >= began_steps + SETTLE_STEPS):
                break
            await asyncio.sleep(0.02)
            waited_s = time.perf_counter() - began_s
        self.failures.append(
            f"{stats.used_blocks} KV blocks were not freed, {stats.num_running} requests are still running"
        )
