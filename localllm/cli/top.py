"""`localllm top`: show a running server's activity, live at a terminal, otherwise as lines or JSON.

It requests the engine's statistics, the same as on the dashboard and in /metrics; quantiles are of the last minute. If
the server stops answering, it keeps trying.
Does not know: how the statistics are computed, how they are drawn (top_screen.py).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from localllm.cli.running import ROOT, state_of
from localllm.cli.server import Server, ServerRefused
from localllm.engine.stats import EngineStats
from localllm.units import format_count, format_rate, format_seconds

EVERY_S = 0.5
LINES_EVERY_S = 2.0
ANSWER_WITHIN_S = 3.0
MINUTE_S = 60.0
LATENCIES = (("ttft", "time to first token"), ("inter_token", "between tokens"), ("queue", "in the queue"))


@dataclass(frozen=True, slots=True)
class ModelView:
    """A model of the server. `told`: its entry as the server sent it."""

    name: str
    state: str
    told: Mapping[str, Any]
    stats: EngineStats | None  # None: the model is not ready
    latency_s: Mapping[str, tuple[float | None, float | None]]  # p50 and p95 of each of LATENCIES


@dataclass(frozen=True, slots=True)
class View:
    """The state of a server at one time. With a `problem`, the models are those of the last successful request."""

    url: str
    models: tuple[ModelView, ...]
    problem: str = ""
    silent_s: float = 0.0


class Watch:
    """Polls a server and keeps the statistics of the last minute."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._server = Server.of(options)
        self._past: dict[str, deque[EngineStats]] = {}
        self._last = View(self._server.url, ())
        self._answered_s = time.monotonic()

    def first(self) -> View:
        """Return the first view. Raises `ServerRefused` if the server does not answer."""
        told = self._server.ask("GET", f"{ROOT}/stats", timeout_s=ANSWER_WITHIN_S)
        self._answered_s = time.monotonic()
        try:
            self._last = View(self._server.url, tuple(self._model(model) for model in told["data"]))
        except (msgspec.ValidationError, KeyError, TypeError) as error:
            why = f"It is another version of localllm: {error}."
            raise ServerRefused("The server reports its statistics in another format.", why) from error
        return self._last

    def next(self) -> View:
        try:
            return self.first()
        except ServerRefused as error:
            self._server = Server.of(self._options)  # a restarted server may have another address
            return View(self._last.url, self._last.models, str(error), time.monotonic() - self._answered_s)

    def _model(self, told: Mapping[str, Any]) -> ModelView:
        if told["stats"] is None:
            return ModelView(told["name"], state_of(told), told, None, {})
        try:
            stats = msgspec.convert(told["stats"], EngineStats)
        except msgspec.ValidationError as error:
            raise ServerRefused(
                "The server reports its statistics in another format.", f"It is another version of localllm: {error}."
            ) from error
        before = self._minute_ago(told["name"], stats)
        return ModelView(told["name"], state_of(told), told, stats, _latencies(stats, before))

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


def top(options: argparse.Namespace) -> int:
    watch = Watch(options)
    view = watch.first()
    tell = _tell_json if options.json else _tell_lines
    if options.once:
        tell(view)
        return 0
    try:
        if sys.stdout.isatty() and not options.json:
            from localllm.cli.top_screen import show

            show(watch, view, EVERY_S)
        while True:
            tell(view)
            time.sleep(LINES_EVERY_S)
            view = watch.next()
    except KeyboardInterrupt:  # Ctrl-C is the normal way to leave
        return 0


def _tell_json(view: View) -> None:
    models = [
        {**model.told, "latency_s": {name: {"p50": p50, "p95": p95} for name, (p50, p95) in model.latency_s.items()}}
        for model in view.models
        if not view.problem
    ]
    told = {"at_s": time.time(), "url": view.url, "problem": view.problem or None, "models": models}
    print(json.dumps(told), flush=True)


def _tell_lines(view: View) -> None:
    now = time.strftime("%H:%M:%S")
    if view.problem:
        print(f"{now} {view.problem} No answer for {format_seconds(view.silent_s)}; trying again.", flush=True)
        return
    for model in view.models:
        print(f"{now} {model.name} {line_of(model)}", flush=True)
    if not view.models:
        print(f"{now} The server has no model.", flush=True)


def line_of(model: ModelView) -> str:
    stats = model.stats
    if stats is None:
        return model.state
    quantiles = " ".join(
        f"{name}_p50={shown(p50)} {name}_p95={shown(p95)}".replace(" ms", "ms").replace(" s", "s")
        for name, (p50, p95) in model.latency_s.items()
    )
    return (
        f"{model.state} running={stats.num_running} waiting={stats.num_waiting} "
        f"generation={format_rate(stats.decode_tokens_per_s, '').strip()} "
        f"prompt={format_rate(stats.prefill_tokens_per_s, '').strip()} "
        f"kv={stats.kv_usage:.0%} prefix_hits={stats.prefix_hit_rate:.0%} {quantiles} "
        f"generated={format_count(stats.generation_tokens).replace(',', '')}"
    )


def shown(seconds: float | None) -> str:
    return "-" if seconds is None else format_seconds(seconds)
