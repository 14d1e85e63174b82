"""`localllm top`: show a running server's activity, live at a terminal, otherwise as lines or JSON.

Quantiles are of the last minute. If the server stops answering, the verb keeps trying.
Does not know: how the statistics are polled (server_stats.py), how they are drawn (top_screen.py).
"""

from __future__ import annotations

import argparse
import json
import sys
import time

from localllm.cli.server import add_server
from localllm.cli.server_stats import ModelStats, ServerStats, StatsPoller, last_words, shown
from localllm.units import format_bytes, format_count, format_rate, format_seconds

EVERY_S = 0.5
LINES_EVERY_S = 2.0


def top_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--once", action="store_true", help="print the state once and exit")
    add_server(parser)


def top(options: argparse.Namespace) -> int:
    poller = StatsPoller(options)
    stats = poller.poll()
    tell = _tell_json if options.json else _tell_lines
    if options.once:
        tell(stats)
        return 0
    try:
        if sys.stdout.isatty() and not options.json:
            from localllm.cli.top_screen import show

            show(poller, stats, EVERY_S)
        while True:
            tell(stats)
            time.sleep(LINES_EVERY_S)
            stats = poller.poll_or_last()
    except KeyboardInterrupt:  # Ctrl-C is the normal way to leave
        return 0


def _tell_json(stats: ServerStats) -> None:
    models = [
        {**model.told, "latency_s": {name: {"p50": p50, "p95": p95} for name, (p50, p95) in model.latency_s.items()}}
        for model in stats.models
        if not stats.problem
    ]
    told = {"at_s": time.time(), "url": stats.url, "problem": stats.problem or None, "models": models}
    print(json.dumps(told), flush=True)


def _tell_lines(stats: ServerStats) -> None:
    now = time.strftime("%H:%M:%S")
    if stats.problem:
        print(f"{now} {stats.problem} No answer for {format_seconds(stats.silent_s)}; trying again.", flush=True)
        return
    for model in stats.models:
        print(f"{now} {model.name} {line_of(model)}", flush=True)
        for rank in model.stats.runner.ranks if model.stats is not None else ():
            if words := last_words(rank):
                print(f"{now} {model.name} {words}", flush=True)
    if not stats.models:
        print(f"{now} The server has no model.", flush=True)


def line_of(model: ModelStats) -> str:
    stats = model.stats
    if stats is None:
        return model.state
    quantiles = " ".join(
        f"{name}_p50={shown(p50)} {name}_p95={shown(p95)}".replace(" ms", "ms").replace(" s", "s")
        for name, (p50, p95) in model.latency_s.items()
    )
    seen, ranks = stats.speculation, stats.runner.ranks
    drafts = "drafts=off"
    if seen.is_on:
        drafts = f"tokens_per_step={seen.tokens_per_row:.2f} drafts_accepted={seen.acceptance:.0%}"
    stores = stats.tiers.stores
    kept = "".join([f" kv_{store.name}={format_bytes(store.used_bytes).replace(' ', '')}" for store in stores])
    ranks_up = f" ranks_up={sum(rank.is_up for rank in ranks)}/{len(ranks)}" if ranks else ""
    return (
        f"{model.state} running={stats.num_running} waiting={stats.num_waiting} "
        f"generation={format_rate(stats.decode_tokens_per_s, '').strip()} "
        f"prompt={format_rate(stats.prefill_tokens_per_s, '').strip()} "
        f"kv={stats.kv_usage:.0%}{kept} prefix_hits={stats.prefix_hit_rate:.0%} {quantiles} {drafts} "
        f"generated={format_count(stats.generation_tokens).replace(',', '')}{ranks_up}"
    )
