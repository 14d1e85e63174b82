"""The screen of `localllm top`: draw a server's statistics at the terminal, twice a second.

Does not know: where the statistics come from (server_stats.py).
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import NoReturn

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from localllm.cli.server_stats import LATENCIES, ModelStats, ServerStats, StatsPoller, last_words, shown
from localllm.engine.stats import EngineStats, SpeculationStats, TierStats
from localllm.engine.step import RankStats, RunnerStats
from localllm.units import format_bytes, format_count, format_rate, format_seconds

BAR = 30
HIGH_KV = 0.9
ID_CHARS = 12


def show(poller: StatsPoller, stats: ServerStats, every_s: float) -> NoReturn:
    """Draw the statistics until Ctrl-C, then restore the terminal.

    An interrupt that arrives in a finaliser or a callback is swallowed there, so it is also remembered.
    """
    interrupted = threading.Event()

    def on_interrupt(number: int, frame: FrameType | None) -> NoReturn:
        interrupted.set()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        with Live(screen=True, auto_refresh=False, console=Console(highlight=False)) as live:
            while not interrupted.is_set():
                started_s = time.monotonic()
                live.update(draw(stats), refresh=True)
                time.sleep(max(0.05, every_s - (time.monotonic() - started_s)))
                stats = poller.poll_or_last()
    finally:
        signal.signal(signal.SIGINT, before)
    raise KeyboardInterrupt


def draw(stats: ServerStats) -> RenderableType:
    parts: list[RenderableType] = [Text(f"localllm top · {stats.url} · Ctrl+C leaves", style="bold")]
    if stats.problem:
        told = (
            f"{stats.problem} No answer for {format_seconds(stats.silent_s)}; trying again. The figures are outdated."
        )
        parts.append(Text(told, style="bold red"))
    if not stats.models:
        parts.append(Text("The server has no model."))
    for model in stats.models:
        parts += [Text(), *_model(model)]
    return Group(*parts)


def _model(model: ModelStats) -> list[RenderableType]:
    told, stats = model.told, model.stats
    size = f" · {format_bytes(told['size_bytes'])}" if told["size_bytes"] else ""
    device = f" · {told['device']}" if told["device"] else ""
    head = Text(model.name, style="bold") + Text(f" · {model.state}{device}{size}", style="dim")
    if stats is None:
        return [head]
    head.append(f" · up {format_seconds(stats.uptime_s)}", style="dim")
    parts = [head, _figures(stats), _kv(stats), *_stores(stats.tiers), _drafts(stats.speculation), _latency(model)]
    if stats.runner.ranks:
        parts += _ranks(stats.runner)
    return [*parts, _requests(stats)] if stats.requests else parts


def _figures(stats: EngineStats) -> RenderableType:
    grid = Table.grid(padding=(0, 3))
    grid.add_row("Generation", "Prompt", "Running", "Waiting", "Prefix hits", "Finished", style="dim")
    grid.add_row(
        format_rate(stats.decode_tokens_per_s),
        format_rate(stats.prefill_tokens_per_s),
        f"{stats.num_running} of {stats.max_num_seqs}",
        str(stats.num_waiting),
        f"{stats.prefix_hit_rate:.0%}",
        format_count(sum(stats.finished.values())),
        style="bold",
    )
    return grid


def _kv(stats: EngineStats) -> Text:
    """Draw the KV cache bar. Used, reusable and free blocks differ in shape, not only in colour."""
    total = stats.total_blocks or 1
    used, cached = round(BAR * stats.used_blocks / total), round(BAR * stats.cached_blocks / total)
    bar = Text("KV cache  ")
    bar.append("█" * used, style="red" if stats.kv_usage > HIGH_KV else "green")
    bar.append("▒" * min(cached, BAR - used), style="cyan")
    bar.append("·" * max(0, BAR - used - cached), style="dim")
    counts = f"{format_count(stats.used_blocks)} of {format_count(stats.total_blocks)} blocks"
    return bar.append(f"  {stats.kv_usage:.0%}  {counts}, {format_count(stats.cached_blocks)} reusable")


def _stores(tiers: TierStats) -> list[Text]:
    """Draw a bar of each tier: blocks of preempted requests, other blocks, and what is free."""
    lines = []
    for store in tiers.stores:
        total = store.capacity_bytes or 1
        used, own = round(BAR * min(1, store.used_bytes / total)), round(BAR * tiers.held_in(store) / total)
        line = Text({"ram": "KV in RAM ", "disk": "KV on disk"}[store.name])
        line.append("█" * own, style="green").append("▒" * (used - own), style="cyan")
        line.append("·" * (BAR - used), style="dim")
        sizes = f"{format_bytes(store.used_bytes)} of {format_bytes(store.capacity_bytes)}"
        swaps = (
            f", {format_count(tiers.num_swapped_out)} swapped" if tiers.num_swapped_out and store.name == "ram" else ""
        )
        lines.append(line.append(f"  {sizes}, {format_count(store.hit_tokens)} tokens read{swaps}"))
    return lines


def _drafts(seen: SpeculationStats) -> Text:
    """Return the tokens that a request generates in a step, and how many drafts were right, since the start."""
    if not seen.is_on:
        return Text(f"Drafts    off: {seen.why_off}")
    counts = f"{format_count(seen.num_accepted_tokens)} of {format_count(seen.num_draft_tokens)} accepted"
    return Text(f"Drafts    {seen.tokens_per_row:.1f} tokens per request and step, {counts}")


def _latency(model: ModelStats) -> RenderableType:
    grid = Table.grid(padding=(0, 3))
    grid.add_row("", "p50", "p95", style="dim")
    for name, title in LATENCIES:
        p50, p95 = model.latency_s[name]
        grid.add_row(title, shown(p50), shown(p95))
    return grid


def _ranks(runner: RunnerStats) -> list[RenderableType]:
    """Draw a row per rank, then the last words of the ranks that are or were lost."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    has_pipeline = runner.ranks[-1].stage > 0
    table.add_column("RANK", no_wrap=True)
    table.add_column("DEVICE", no_wrap=True)
    table.add_column("STATE", no_wrap=True)
    for title in ("WEIGHTS", "KV", "OTHER", "STEP", "LAG", *(("IDLE",) if has_pipeline else ())):
        table.add_column(title, justify="right", no_wrap=True)
    bubbles = runner.bubble_ratios()
    for rank in runner.ranks:
        bubble = bubbles.get(rank.stage)
        idle = "-" if bubble is None else f"{bubble:.0%}"
        table.add_row(*_rank(rank), *((idle,) if has_pipeline else ()), style="" if rank.is_up else "bold red")
    told = [Text(last_words(rank), style="" if rank.is_up else "bold red") for rank in runner.ranks]
    return [table, *filter(None, told)]


def _rank(rank: RankStats) -> tuple[str, ...]:
    memory = rank.memory
    return (
        f"{rank.rank}",
        rank.device,
        "up" if rank.is_up else "LOST",
        format_bytes(memory.weights_bytes),
        format_bytes(memory.kv_bytes),
        format_bytes(memory.activation_bytes + memory.other_bytes),
        format_seconds(rank.step_s),
        format_count(rank.lag_steps),
    )


def _requests(stats: EngineStats) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("REQUEST", "STATE"):
        table.add_column(title, no_wrap=True)
    for title in ("PROMPT", "CACHED", "OUTPUT", "DRAFTS", "BLOCKS", "AGE", "TTFT"):
        table.add_column(title, justify="right", no_wrap=True)
    for request in stats.requests:
        table.add_row(
            Text(request.request_id[:ID_CHARS]),
            request.state,
            format_count(request.num_prompt_tokens),
            format_count(request.num_cached_tokens),
            format_count(request.num_output_tokens),
            f"{request.num_accepted_tokens}/{request.num_drafted_tokens}" if request.num_drafted_tokens else "-",
            format_count(request.num_blocks),
            format_seconds(max(0.0, stats.taken_s - request.arrived_s)),
            shown(request.ttft_s),
        )
    return table
