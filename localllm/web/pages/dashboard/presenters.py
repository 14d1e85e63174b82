"""Turn one snapshot into the dashboard: every tile is a plain function from `EngineStats` to its view.

Does not know: HTTP, templates, where the snapshot came from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from localllm.engine.stats import EngineStats, Histogram, StepComposition
from localllm.models.spec.kv_group import main_group
from localllm.units import format_bytes, format_count, format_seconds
from localllm.web.pages.dashboard.machine import MachineReading
from localllm.web.pages.dashboard.machine_presenter import machine_use
from localllm.web.pages.dashboard.plots import MINUTE, Span, colours, pool_map, sparkline, step_columns
from localllm.web.pages.dashboard.rank_presenters import ranks
from localllm.web.pages.dashboard.request_presenters import finished_requests, live_requests
from localllm.web.pages.dashboard.views import (
    Counters,
    Dashboard,
    GroupUsage,
    Headline,
    KVUsage,
    Latency,
    LatencyRow,
    ModelFacts,
    RecentSteps,
    StepRow,
)
from localllm.web.pages.frame.bars import stacked
from localllm.web.pages.frame.sampler import Sample, Tick
from localllm.web.pages.frame.views import Fact, Segment

if TYPE_CHECKING:
    from localllm.serving.served import ServedModel

HIGH_KV = 0.9
"""Use of the KV cache at which its meter shows a warning: preemption is near."""


def dashboard(
    stats: EngineStats, tick: Tick, served: ServedModel, machine: MachineReading, past: Sequence[Sample], span: Span
) -> Dashboard:
    """Return all tiles of one snapshot; `past` has the samples for the headlines' plots."""
    return Dashboard(
        headlines=headlines(stats, past, span),
        ranks=ranks(stats.runner),
        kv_usage=kv_usage(stats),
        steps=steps(stats.steps, stats.num_steps),
        latency=latency(stats, tick.minute_ago),
        counters=counters(stats),
        live_requests=live_requests(stats),
        finished_requests=finished_requests(stats.recent),
        machine=machine_use(machine),
        model=model_facts(served),
    )


def headlines(stats: EngineStats, samples: Sequence[Sample], span: Span = MINUTE) -> tuple[Headline, ...]:
    """Return the four main values, with their history."""

    def history(read: Callable[[Sample], float]) -> list[tuple[float, float]]:
        return [(sample.taken_s, read(sample)) for sample in samples]

    plot = partial(sparkline, span=span)
    generation = history(lambda sample: sample.decode_tokens_per_s)
    prompt = history(lambda sample: sample.prefill_tokens_per_s)
    running = history(lambda sample: sample.num_running + sample.num_waiting)
    kv = history(lambda sample: 100 * sample.kv_usage)
    return (
        Headline(
            "generation",
            "Generation",
            _short(stats.decode_tokens_per_s),
            "tok/s",
            f"{format_count(stats.generation_tokens)} tokens since start",
            plot("Generated tokens per second", generation, _short),
        ),
        Headline(
            "prompt",
            "Prompt",
            _short(stats.prefill_tokens_per_s),
            "tok/s",
            f"{format_count(stats.prompt_tokens)} computed, {format_count(stats.prompt_tokens_cached)} from cache",
            plot("Prompt tokens per second", prompt, _short),
        ),
        Headline(
            "requests",
            "Requests",
            str(stats.num_running),
            "running",
            f"{stats.num_waiting} waiting, at most {stats.max_num_seqs} running at once",
            plot("Requests running or waiting", running, lambda value: f"{value:.0f}"),
        ),
        Headline(
            "kv",
            "KV cache",
            f"{100 * stats.kv_usage:.0f}",
            "% in use",
            f"{format_count(stats.used_blocks)} of {format_count(stats.total_blocks)} blocks",
            plot("Share of the KV cache in use", kv, lambda value: f"{value:.0f} %", top=100.0),
        ),
    )


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == 0 else f"{value:.1f}"


def kv_usage(stats: EngineStats) -> KVUsage:
    block, used, cached, free = stats.block_size, stats.used_blocks, stats.cached_blocks, stats.free_blocks
    colour_of = colours([request.request_id for request in stats.requests])
    owners = [(colour_of[request.request_id], request.num_blocks) for request in stats.requests]
    cells, columns, rows, blocks_per_cell = pool_map(used, cached, free, owners)
    main = main_group(tuple(group.window for group in stats.kv_groups)) if stats.kv_groups else 0
    return KVUsage(
        total_blocks=stats.total_blocks,
        used_blocks=used,
        high_blocks=round(HIGH_KV * stats.total_blocks),
        block_size=block,
        used_tokens=used * block - stats.wasted_token_slots,
        total_tokens=stats.total_blocks * block,
        reusable_tokens=cached * block,
        wasted_token_slots=stats.wasted_token_slots,
        segments=_blocks(used, cached, free),
        cells=cells,
        columns=columns,
        rows=rows,
        blocks_per_cell=blocks_per_cell,
        others=tuple(_group_usage(stats, index) for index in range(len(stats.kv_groups)) if index != main),
    )


def _group_usage(stats: EngineStats, index: int) -> GroupUsage:
    """Return the use of one KV group."""
    group, colour_of = stats.kv_groups[index], colours([request.request_id for request in stats.requests])
    owners = [(colour_of[each.request_id], each.held_blocks[index]) for each in stats.requests if each.held_blocks]
    used, cached, free = group.used_blocks, group.cached_blocks, group.free_blocks
    return GroupUsage(group.window, _blocks(used, cached, free), *pool_map(used, cached, free, owners))


def _blocks(used: int, cached: int, free: int) -> tuple[Segment, ...]:
    parts = [("In use", "used", used), ("Reusable", "cached", cached), ("Free", "free", free)]
    return stacked([(name, kind, n, f"{format_count(n)} blocks") for name, kind, n in parts])


def steps(recent: Sequence[StepComposition], num_steps: int) -> RecentSteps:
    newest = recent[-1] if recent else StepComposition()
    times = [
        ("Schedule", "queue", newest.schedule_s),
        ("Forward", "decode", newest.forward_s),
        ("Sample", "prefill", newest.sample_s),
        ("Update", "cached", newest.update_s),
    ]
    return RecentSteps(
        step_id=newest.step_id,
        num_steps=num_steps,
        prefill_tokens=newest.prefill_tokens,
        decode_tokens=newest.decode_tokens,
        prefill_requests=newest.prefill_requests,
        decode_requests=newest.decode_requests,
        budget_tokens=newest.budget_tokens,
        columns=step_columns([(step.prefill_tokens, step.decode_tokens) for step in recent]),
        rows=tuple(_step_row(step) for step in reversed(recent[-10:])),
        most_tokens=max((step.prefill_tokens + step.decode_tokens for step in recent), default=0),
        times=stacked([(name, kind, spent, format_seconds(spent)) for name, kind, spent in times]),
        total_s=sum(spent for _, _, spent in times),
    )


def _step_row(step: StepComposition) -> StepRow:
    return StepRow(
        step.step_id,
        step.prefill_tokens,
        step.decode_tokens,
        step.prefill_requests + step.decode_requests,
        step.schedule_s + step.forward_s + step.sample_s + step.update_s,
    )


def latency(stats: EngineStats, minute_ago: EngineStats | None) -> Latency:
    """Return the quantiles of the last minute; if it had no requests, of the whole run."""
    recent = minute_ago is not None and stats.ttft.count > minute_ago.ttft.count
    rows = (
        ("TTFT", "From arrival to the first token", "ttft"),
        ("Between tokens", "From one token to the next of the same request", "inter_token"),
        ("Queue", "From arrival to the first step", "queue"),
        ("Whole request", "From arrival to the last token", "e2e"),
    )

    def row(name: str, title: str, attribute: str) -> LatencyRow:
        histogram: Histogram = getattr(stats, attribute)
        if recent and minute_ago is not None:
            histogram = histogram.since(getattr(minute_ago, attribute))
        return LatencyRow(name, title, histogram.quantile(0.5), histogram.quantile(0.95))

    return Latency(tuple(row(*entry) for entry in rows), "last minute" if recent else "since start")


def counters(stats: EngineStats) -> Counters:
    ends = ", ".join(f"{count} {reason}" for reason, count in sorted(stats.finished.items()) if count)
    return Counters(
        prefix_hit_rate=stats.prefix_hit_rate,
        prefix_hits=stats.prefix_cache_hits,
        prefix_queries=stats.prefix_cache_queries,
        facts=(
            Fact(
                "Preemptions",
                format_count(stats.num_preemptions),
                f"{format_count(stats.recomputed_tokens)} tokens recomputed",
            ),
            Fact("Finished", format_count(sum(stats.finished.values())), ends),
            Fact("Failed steps", format_count(stats.num_failed_steps)),
            Fact(
                "Steps in flight", str(stats.async_depth), f"{format_count(stats.degraded_steps)} steps without overlap"
            ),
            Fact("Up", format_seconds(stats.uptime_s)),
        ),
    )


def model_facts(served: ServedModel) -> ModelFacts:
    """Return the checkpoint's facts and the memory plan."""
    spec, plan = served.spec, served.plan
    planned = [
        ("Weights", "weights", plan.weights_bytes),
        ("KV cache", "used", plan.kv_bytes),
        ("Activations", "prefill", plan.activation_bytes),
        ("Reserve", "queue", plan.reserve_bytes),
        ("Unused", "idle", plan.unused_bytes),
    ]
    return ModelFacts(
        name=served.name,
        memory=stacked([(name, kind, size, format_bytes(size)) for name, kind, size in planned]),
        facts=(
            Fact("Architecture", spec.architecture, f"{spec.num_layers} layers, hidden size {spec.hidden_size}"),
            Fact(
                "Attention heads",
                f"{spec.num_heads}",
                f"{spec.num_kv_heads} key/value heads, head size {spec.head_dim}",
            ),
            Fact("Vocabulary", format_count(spec.vocab_size)),
            Fact("Device", plan.place, str(plan.dtype).removeprefix("torch.")),
            Fact(
                "Context",
                f"{format_count(plan.max_model_len)} tokens",
                f"trained for {format_count(spec.max_position)}",
            ),
            Fact(
                "Step", f"{format_count(plan.max_num_batched_tokens)} tokens", f"{plan.max_num_seqs} requests at most"
            ),
        ),
        notes=tuple(plan.notes),
    )
