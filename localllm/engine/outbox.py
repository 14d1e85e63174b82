"""The outputs that are not delivered yet, and the requests that wait for their last one.

Does not know: steps, the scheduler, threads.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Container

from localllm.engine.adapter import Adapter
from localllm.engine.outputs import EngineOutput
from localllm.engine.request import Request
from localllm.errors import LocalLLMError

log = logging.getLogger(__name__)

Deliver = Callable[[list[EngineOutput]], None]
"""Callback that takes all outputs. If it raises, it has taken none of them, and they are offered again."""


class Outbox:
    """Gives each request that it was told of exactly one output with a finish reason, and releases the request's
    adapter then. An interrupt may come between any two instructions: what it cut short is done by the next call."""

    def __init__(self) -> None:
        self.num_refused = 0  # deliveries in a row that raised
        self._open: dict[str, Request] = {}  # requests without a last output
        self._left: deque[Adapter] = deque()  # adapters of ended requests, to be released
        self._outputs: list[EngineOutput] = []

    def __bool__(self) -> bool:
        return bool(self._outputs)

    def open(self, request: Request) -> None:
        self._open[request.request_id] = request

    def add(self, outputs: list[EngineOutput]) -> None:
        """Add outputs to the next delivery, and close the requests that they end."""
        self._outputs += outputs
        self._close(outputs)

    def fail(self, request_id: str, error: LocalLLMError) -> None:
        self.add([EngineOutput(request_id, finish_reason="error", error=error)])

    def fail_open(self, error: LocalLLMError) -> None:
        self.add([EngineOutput(name, finish_reason="error", error=error) for name in self._open])

    def add_with_lost(self, outputs: list[EngineOutput], running: Container[str], error: LocalLLMError) -> None:
        """Add outputs, and end every open request that is not among the running ones: a failure has lost it."""
        self._outputs += outputs
        ended = [output for output in self._outputs if output.finish_reason and output.request_id not in running]
        known = {output.request_id for output in ended}
        lost = [
            EngineOutput(name, finish_reason="error", error=error)
            for name in self._open
            if name not in running and name not in known
        ]
        self._outputs += lost
        self._close(ended + lost)  # an interrupt may have prevented this earlier

    def hand_over(self, deliver: Deliver) -> None:
        """Deliver all outputs. Raises what the callback raises; the outputs are kept then."""
        outputs, self._outputs = self._outputs, []
        if not outputs:
            return
        try:
            deliver(outputs)
        except BaseException:
            self._outputs = outputs + self._outputs
            self.num_refused += 1
            raise
        self.num_refused = 0

    def _close(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            if output.finish_reason is not None:
                request = self._open.pop(output.request_id, None)
                if request is not None and (adapter := request.options.adapter) is not None:
                    self._left.append(adapter)
        while self._left:
            end_use(self._left.popleft())


def begin_use(adapters: list[Adapter]) -> None:
    """Count one request on each adapter, or on none if one of them is unloaded."""
    begun: list[Adapter] = []
    try:
        for adapter in adapters:
            adapter.begin()
            begun.append(adapter)
    except BaseException:
        for adapter in begun:
            end_use(adapter)
        raise


def end_use(adapter: Adapter) -> None:
    try:
        adapter.end()
    except Exception:
        log.exception("an adapter did not release a request name=%s", adapter.name)
