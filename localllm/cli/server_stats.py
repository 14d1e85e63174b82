"""Poll a running server for its models' statistics, and keep the last minute's for the quantiles.

The statistics are the same as on the dashboard and in /metrics.
Does not know: how the server computes them, how they are printed (top.py) or drawn (top_screen.py).
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from localllm.cli.running import ROOT, state_of
from localllm.cli.server import ServerClient, ServerRefused
from localllm.units import format_seconds

if TYPE_CHECKING:
    from localllm.engine.stats import EngineStats
    from localllm.engine.step import RankStats

ANSWER_WITHIN_S = 3.0
MINUTE_S = 60.0
LATENCIES = (("ttft", "time to first token"), ("inter_token", "between tokens"), ("queue", "in the queue"))


@dataclass(frozen=True, slots=True)
class ModelStats:
    """A model of the server. `told`: its entry as the server sent it."""

    name: str
    state: str
    told: Mapping[str, Any]
    stats: EngineStats | None  # None: the model is not ready
    latency_s: Mapping[str, tuple[float | None, float | None]]  # p50 and p95 of each of LATENCIES


@dataclass(frozen=True, slots=True)
class ServerStats:
    """The state of a server at one time. With a `problem`, the models are from the last successful request."""

    url: str
    models: tuple[ModelStats, ...]
    problem: str = ""
    silent_s: float = 0.0


class StatsPoller:
    """Polls a server and keeps the statistics of the last minute."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._server = ServerClient.of(options)
        self._past: dict[str, deque[EngineStats]] = {}
        self._last = ServerStats(self._server.url, ())
        self._answered_s = time.monotonic()

    def poll(self) -> ServerStats:
        """Return the server's statistics. Raises `ServerRefused` if it does not answer."""
        told = self._server.ask("GET", f"{ROOT}/stats", timeout_s=ANSWER_WITHIN_S)
        self._answered_s = time.monotonic()
        try:
            self._last = ServerStats(self._server.url, tuple(self._model(model) for model in told["data"]))
        except (msgspec.ValidationError, KeyError, TypeError) as error:
            why = f"It is another version of localllm: {error}."
            raise ServerRefused("The server reports its statistics in another format.", why) from error
        return self._last

    def poll_or_last(self) -> ServerStats:
        """Return the server's statistics, or the last ones with the problem."""
        try:
            return self.poll()
        except ServerRefused as error:
            self._server = ServerClient.of(self._options)  # a restarted server may have another address
            return ServerStats(self._last.url, self._last.models, str(error), time.monotonic() - self._answered_s)

    def _model(self, told: Mapping[str, Any]) -> ModelStats:
        from localllm.engine.stats import EngineStats

        if told["stats"] is None:
            return ModelStats(told["name"], state_of(told), told, None, {})
        stats = msgspec.convert(told["stats"], EngineStats)
        before = self._minute_ago(told["name"], stats)
        return ModelStats(told["name"], state_of(told), told, stats, _latencies(stats, before))

    def _minute_ago(self, name: str, stats: EngineStats) -> EngineStats:
        past = self._past.setdefault(name, deque())
        if past and stats.num_steps < past[-1].num_steps:
            past.clear()  # another engine: its totals started at zero
        past.append(stats)
        while past[0].taken_s < stats.taken_s - MINUTE_S:
            past.popleft()
        return past[0]


def _latencies(stats: EngineStats, before: EngineStats) -> dict[str, tuple[float | None, float | None]]:
    """Return the latencies of the last minute, or of the whole run if there were none in it."""
    recent = stats.ttft.count > before.ttft.count
    found = {}
    for name, _ in LATENCIES:
        histogram = getattr(stats, name)
        if recent:
            histogram = histogram.since(getattr(before, name))
        found[name] = (histogram.quantile(0.5), histogram.quantile(0.95))
    return found


def shown(seconds: float | None) -> str:
    return "-" if seconds is None else format_seconds(seconds)


def last_words(rank: RankStats) -> str:
    """Return why the last lost process of a rank was lost; empty for a rank that was never lost."""
    if rank.is_up and not rank.restarts:
        return ""
    words = rank.last_words or "Its process ended without a message."
    return f"rank {rank.rank} ({rank.device}) {'was restarted' if rank.is_up else 'is lost'}. {words}"
