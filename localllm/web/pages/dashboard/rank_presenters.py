"""Turn the ranks of a snapshot into their tile, stage by stage, and other servers into theirs.

Does not know: HTTP, templates, how a rank measures itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from localllm.engine.step import RankStats, RunnerStats
from localllm.fleet.upstream import Upstream
from localllm.fleet.upstreams import Upstreams
from localllm.units import format_bytes, format_count, format_seconds
from localllm.web.pages.dashboard.views import OtherServers, Ranks, RankTile, ServerTile, StageTile
from localllm.web.pages.frame.bars import stacked
from localllm.web.pages.frame.views import Fact, Segment

MOST_NAMES = 8
"""Models of a server that its tile names."""


def ranks(runner: RunnerStats) -> Ranks:
    """Return the tile of all ranks; it has no stages if the model runs in the server's process."""
    bubbles = runner.bubble_ratios()
    grouped = {stage: tuple(map(_rank, members)) for stage, members in groupby(runner.ranks, lambda rank: rank.stage)}
    stages = [StageTile(stage, tiles, bubbles.get(stage)) for stage, tiles in grouped.items()]
    return Ranks(tuple(stages), len(runner.ranks), sum(not rank.is_up for rank in runner.ranks))


def other_servers(upstreams: Upstreams) -> OtherServers:
    """Return the tile of the servers behind this address; it has none if there are none."""
    return OtherServers(tuple(map(_server, upstreams.all)))


def _server(server: Upstream) -> ServerTile:
    stats = server.stats
    names = [each.name for each in server.models]
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    ended = {outcome: format_count(stats.requests[outcome]) for outcome in ("ok", "refused", "failed", "cancelled")}
    facts = [
        Fact("Requests", format_count(server.num_open), "running"),
        Fact("Answered", ended["ok"], f"{ended['failed']} failed, {ended['refused']} refused"),
        Fact("Sent elsewhere", format_count(stats.retried), "failed before their first token"),
        Fact("Generated", f"{format_count(stats.completion_tokens)} tokens"),
    ]
    if stats.first_tokens:
        facts.append(Fact("To the first token", format_seconds(stats.ttft_s / stats.first_tokens), "on average"))
    return ServerTile(
        name=server.name,
        url=server.config.url,
        is_up=server.is_up,
        failure="" if server.failure is None else str(server.failure),
        models=(", ".join(names[:MOST_NAMES]) + more) or "No models.",
        facts=tuple(facts),
    )


def _rank(rank: RankStats) -> RankTile:
    size = f" of {format_bytes(rank.device_bytes)}" if rank.device_bytes else ""
    return RankTile(
        number=rank.rank,
        device=", ".join(filter(None, (rank.device, rank.device_name))),
        is_up=rank.is_up,
        memory=_memory(rank),
        held=format_bytes(rank.memory.held_bytes) + size,
        facts=tuple(_facts(rank)),
        last_words=rank.last_words,
    )


def _memory(rank: RankStats) -> tuple[Segment, ...]:
    memory = rank.memory
    parts = [
        ("Weights", "weights", memory.weights_bytes),
        ("KV cache", "used", memory.kv_bytes),
        ("Activations", "prefill", memory.activation_bytes),
        ("Other", "queue", memory.other_bytes),
    ]
    return stacked([(name, kind, size, format_bytes(size)) for name, kind, size in parts], rank.device_bytes)


def _facts(rank: RankStats) -> Iterator[Fact]:
    yield Fact("Step", format_seconds(rank.step_s))
    yield Fact("Lag", f"{format_count(rank.lag_steps)} {'step' if rank.lag_steps == 1 else 'steps'}")
    if rank.busy_ratio is not None:
        yield Fact("Computing", f"{rank.busy_ratio:.0%}")
    if rank.restarts:
        yield Fact("Restarts", format_count(rank.restarts), rank.last_words if rank.is_up else "")
