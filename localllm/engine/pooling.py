"""Batches inputs for models that embed, score or transcribe, on a thread of its own.

Each input is one forward pass without a KV cache, so only the choice of the batch is scheduled. Requests take turns: a
batch has the oldest input of the request whose turn it is, and the inputs nearest in length among the next ones of all
requests, because a batch is padded to its longest input. Inputs whose results are written token by token (windows of
sound) join and leave between two steps instead (`JoiningLoop`).
Does not know: torch, text; what is computed (the runner does).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Any, Protocol

from localllm.engine.pulse import Pulse, pulse_of
from localllm.errors import (
    DeviceLost,
    EngineCrashed,
    EngineError,
    EngineStopped,
    LocalLLMError,
    QueueFull,
    StepFailed,
)
from localllm.models.encoders.recipe import Want
from localllm.version import __version__

log = logging.getLogger(__name__)

WINDOW = 256  # waiting inputs searched for ones of similar length
QUEUE_SHARE = 4  # one request counts as at most 1/4 of a full queue, so that it does not shut others out


@dataclass(frozen=True, slots=True)
class PoolingInput:
    token_ids: tuple[int, ...]
    type_ids: tuple[int, ...] | None = None  # 0 and 1 for the two texts of a pair
    want: Want = "pooled"  # raw: scores without an activation; tokens: the values of all tokens, one after the other

    @property
    def length(self) -> int:
        return len(self.token_ids)


class BatchInput(Protocol):
    """An input of a batch, which is padded to the largest length in it."""

    @property
    def length(self) -> int: ...


PooledValues = list[Any]
"""The result of one input: numbers, or the tokens of a window of sound."""


class PoolingRunner(Protocol):
    def __call__(self, batch: Sequence[Any], /) -> list[PooledValues]: ...

    def close(self) -> None:
        """Free the model."""


class JoiningRunner(Protocol):
    """A runner whose inputs join between two steps, under keys."""

    def fits(self, each: Any, /) -> bool:
        """Return whether an input can join now. It can if no other has joined, so that none waits for ever."""
        ...

    def is_last_place(self) -> bool:
        """Return whether only one more input can join."""
        ...

    def join(self, key: Any, each: Any, /) -> None: ...
    def step(self) -> list[tuple[Any, PooledValues | Exception]]:
        """Run a step. Return the keys of the inputs that have left, with their results or errors. If it raises, all
        inputs have left."""
        ...

    def drop(self, key: Any, /) -> None: ...
    def close(self) -> None:
        """Free the model."""


@dataclass(frozen=True, slots=True)
class PoolingStats:
    num_waiting: int  # inputs
    num_running: int
    num_requests: int  # answered since the start
    num_tokens: int  # computed since the start, padding not counted
    busy_s: float


OnAnswer = Callable[[int, PooledValues], None]
"""Called on the loop's thread with the index of an input and its answer, before the request is answered."""


class _Request:
    """Inputs submitted together, answered together."""

    __slots__ = ("answers", "future", "is_background", "missing", "on_answer", "waiting")

    def __init__(
        self, inputs: Sequence[BatchInput], *, is_background: bool = False, on_answer: OnAnswer | None = None
    ) -> None:
        self.is_background, self.on_answer = is_background, on_answer
        self.answers: list[PooledValues | None] = [None] * len(inputs)
        self.missing = len(inputs)
        self.waiting = dict(enumerate(inputs))  # inputs in no batch yet, by index
        self.future: Future[list[PooledValues]] = Future()


_Waiting = tuple[_Request, int, BatchInput]


class PoolingLoop:
    """Batches and runs inputs. Call `start`, then `submit` from any thread;
    `stop` ends waiting requests with an error."""

    def __init__(
        self, runner: PoolingRunner, *, max_num_seqs: int, max_num_batched_tokens: int, max_num_queued: int
    ) -> None:
        self.runner: Any = runner
        self._max_seqs, self._max_tokens = max_num_seqs, max_num_batched_tokens
        self._max_queued = max_num_queued
        self._waiting: deque[_Request] = deque()  # requests with inputs in no batch yet; the next one's turn is first
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_stopping = False
        self.on_ended: Callable[[], None] = lambda: None  # called last on the thread, if the engine ended by itself
        self.why_ended: EngineError | None = None  # None while it runs, and after `stop`
        self._stats = PoolingStats(0, 0, 0, 0, 0.0)
        self._num_notes = 0  # counts the start and the end of each batch

    def start(self) -> None:
        self._thread = threading.Thread(target=self._loop, name="localllm-pooling", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End waiting requests with an error, and the thread after its current batch. Idempotent."""
        self._refuse_all(EngineStopped("The engine was stopped."))
        if self._thread is not None:
            self._thread.join()

    def _refuse_all(self, error: LocalLLMError) -> None:
        with self._changed:
            self._is_stopping = True
            left, self._waiting = list(self._waiting), deque()
            self._changed.notify()
        for request in left:
            _fail(request, error)

    def submit(
        self, inputs: Sequence[BatchInput], *, is_background: bool = False, on_answer: OnAnswer | None = None
    ) -> Future[list[PooledValues]]:
        """Queue inputs; the future gives one answer per input, in order. Cancelling it drops the inputs that still
        wait. is_background: every other request runs first. on_answer: is told of each answer as soon as it is known.

        Raises `QueueFull`, `EngineStopped`.
        """
        request = _Request(inputs, is_background=is_background, on_answer=on_answer)
        if not inputs:
            request.future.set_result([])
            return request.future
        with self._changed:
            if self.why_ended is not None:
                raise EngineStopped(f"The engine has ended: {self.why_ended.what}", self.why_ended.why)
            if self._is_stopping:
                raise EngineStopped("The engine is stopping.")
            most = max(1, self._max_queued // QUEUE_SHARE)
            if sum(min(most, len(each.waiting)) for each in (*self._waiting, request)) > self._max_queued:
                raise QueueFull(
                    f"{self._num_waiting()} inputs of {len(self._waiting)} requests are waiting already.",
                    f"At most {self._max_queued} may wait; one request counts as {most} at most.",
                    "Retry in a moment, or start with a larger --max-num-queued-reqs.",
                )
            self._waiting.append(request)
            self._changed.notify()
        return request.future

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def stats(self) -> PoolingStats:
        return self._stats

    def pulse(self) -> Pulse:
        has_work = bool(self._waiting) or self._stats.num_running > 0
        return pulse_of(self._thread, has_work=has_work, progress=self._num_notes)

    # -- on the thread

    def _loop(self) -> None:
        try:
            while self.why_ended is None and self._turn():
                pass
        except BaseException as error:
            log.critical("the engine's thread ended; please report this: localllm %s", __version__, exc_info=error)
            self.why_ended = EngineCrashed("The engine crashed.", f"{type(error).__name__}: {error}")
        finally:
            if self.why_ended is not None:
                self._refuse_all(self.why_ended)
                self.on_ended()

    def _turn(self) -> bool:
        """Run the next batch; False once stopped."""
        batch = self._next_batch()
        if batch is not None:
            self._run(batch)
        return batch is not None

    def _run(self, batch: list[_Waiting]) -> None:
        """Run a batch. If it fails, its requests end with an error;
        if the device is lost, all requests and the thread end."""
        self._note(running=len(batch))
        started_s = time.perf_counter()
        try:
            answers = self.runner([each for _, _, each in batch])
            finished = [request for (request, i, _), answer in zip(batch, answers, strict=True)
                        if _answered(request, i, answer)]  # fmt: skip
        except BaseException as error:
            self._failed([request for request, _, _ in batch], error)
            self._note()
            if not isinstance(error, Exception):
                raise
            return
        tokens = sum(each.length for _, _, each in batch)
        self._note(requests=len(finished), tokens=tokens, seconds=time.perf_counter() - started_s)
        _finish(finished)

    def _failed(self, requests: Sequence[_Request], error: BaseException) -> None:
        """End requests with an error, and the engine if its device is lost."""
        log.error("batch failed inputs=%d", len(requests), exc_info=error)
        why = f"{type(error).__name__}: {error}"
        told = error if isinstance(error, LocalLLMError) else StepFailed("The batch of this request failed.", why)
        for request in requests:
            _fail(request, told)
        if isinstance(error, DeviceLost):
            self.why_ended = error

    def _next_batch(self) -> list[_Waiting] | None:
        """Wait for the next batch and return it; None once stopped."""
        with self._changed:
            while not (window := self._window()) and not self._is_stopping:
                self._changed.wait()
            if self._is_stopping:
                return None
            batch = self._of_like_length(window)
            for request, index, _ in batch:
                del request.waiting[index]
            self._waiting.remove(window[0][0])  # its turn is over
            self._waiting.append(window[0][0])
            self._waiting = deque(each for each in self._waiting if each.waiting)
            return batch

    def _window(self) -> list[_Waiting]:
        """Return the next input of every request in turn, then the one after it, and so on. Background requests have
        a turn only while no other request waits."""
        # A request may be done before its last input: it was cancelled, or one of its batches failed.
        self._waiting = deque(each for each in self._waiting if not each.future.done())
        urgent = [each for each in self._waiting if not each.is_background]
        requests = islice(urgent or self._waiting, WINDOW)
        inputs = [[(request, *each) for each in islice(request.waiting.items(), WINDOW)] for request in requests]
        return list(islice((each for turn in zip_longest(*inputs) for each in turn if each is not None), WINDOW))

    def _num_waiting(self) -> int:
        return sum(len(request.waiting) for request in self._waiting)

    def _of_like_length(self, window: list[_Waiting]) -> list[_Waiting]:
        """Return the first input of the window and those nearest to it in length,
        until rows or padded tokens are used up."""
        by_length = sorted(window, key=lambda each: each[2].length)
        low = high = next(i for i, each in enumerate(by_length) if each is window[0])

        def fits(start: int, stop: int) -> bool:
            rows = stop - start + 1
            return rows <= self._max_seqs and rows * by_length[stop][2].length <= self._max_tokens

        while True:
            if low > 0 and fits(low - 1, high):
                low -= 1
            elif high + 1 < len(by_length) and fits(low, high + 1):
                high += 1
            else:
                return by_length[low : high + 1]

    def _note(self, *, running: int = 0, requests: int = 0, tokens: int = 0, seconds: float = 0.0) -> None:
        with self._changed:
            num_waiting = self._num_waiting()
        old = self._stats
        self._num_notes += 1
        self._stats = PoolingStats(
            num_waiting, running, old.num_requests + requests, old.num_tokens + tokens, old.busy_s + seconds
        )


class JoiningLoop(PoolingLoop):
    """Inputs join one at a time, between two steps of those that have joined before, and leave when they are done.

    The next one is of the request with the fewest inputs inside. A request that has one inside leaves the last place to
    others, so that a short request never waits for the end of a long one's inputs.
    """

    def __init__(self, runner: JoiningRunner, *, max_num_queued: int) -> None:
        super().__init__(runner, max_num_seqs=1, max_num_batched_tokens=1, max_num_queued=max_num_queued)  # type: ignore[arg-type]
        self._inside: dict[int, _Waiting] = {}  # by key
        self._num_joined = 0

    def _turn(self) -> bool:
        with self._changed:
            while not (self._inside or self._window() or self._is_stopping):
                self._changed.wait()
            if self._is_stopping:
                for key in list(self._inside):
                    _fail(self._inside.pop(key)[0], EngineStopped("The engine was stopped."))
                    self.runner.drop(key)
                return False
            for key in [key for key, (request, _, _) in self._inside.items() if request.future.done()]:
                del self._inside[key]  # its request was cancelled, or another input of it has failed
                self.runner.drop(key)
            joining = self._next()
        if joining is not None:
            self._join(joining)
        if self._inside:
            self._step()
        return True

    def _next(self) -> _Waiting | None:
        """Take the input that joins next from its request; None: none waits, or none that fits."""
        inside = Counter(id(request) for request, _, _ in self._inside.values())
        for each in sorted(self._window(), key=lambda each: inside[id(each[0])]):
            request, index, given = each
            is_left_to_others = inside[id(request)] > 0 and self.runner.is_last_place()
            if self.runner.fits(given) and not is_left_to_others:
                del request.waiting[index]
                self._waiting.remove(request)  # its turn is over
                self._waiting.append(request)
                self._waiting = deque(each for each in self._waiting if each.waiting)
                return each
            if inside[id(request)] == 0:
                return None  # it waits for more room than there is, which later ones must not take
        return None

    def _join(self, joining: _Waiting) -> None:
        self._num_joined += 1
        self._inside[self._num_joined] = joining
        self._note(running=len(self._inside))
        try:
            self.runner.join(self._num_joined, joining[2])
        except BaseException as error:
            del self._inside[self._num_joined]
            self._failed([joining[0]], error)
            if not isinstance(error, Exception):
                raise

    def _step(self) -> None:
        started_s = time.perf_counter()
        try:
            ended = self.runner.step()
        except BaseException as error:
            inside, self._inside = [request for request, _, _ in self._inside.values()], {}
            self._failed(inside, error)
            self._note()
            if not isinstance(error, Exception):
                raise
            return
        finished, tokens = list[_Request](), 0
        for key, answer in ended:
            request, index, given = self._inside.pop(key)
            if isinstance(answer, Exception):
                self._failed([request], answer)
            else:
                tokens += given.length
                finished += [request] if _answered(request, index, answer) else []
        self._note(
            running=len(self._inside), requests=len(finished), tokens=tokens, seconds=time.perf_counter() - started_s
        )
        _finish(finished)


def _finish(requests: Sequence[_Request]) -> None:
    """Answer requests. The last thing of a batch, so that statistics already count a request whose answer arrives."""
    for request in requests:
        with suppress(InvalidStateError):  # cancelled, or failed with an earlier batch
            request.future.set_result([answer for answer in request.answers if answer is not None])


def _answered(request: _Request, index: int, answer: PooledValues) -> bool:
    """Store an answer, and return whether the request now has all its answers."""
    request.answers[index] = answer
    request.missing -= 1
    if request.on_answer is not None:
        request.on_answer(index, answer)
    return request.missing == 0


def _fail(request: _Request, error: LocalLLMError) -> None:
    with suppress(InvalidStateError):
        request.future.set_exception(error)
