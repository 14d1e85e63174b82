"""One snapshot becomes the dashboard: every tile is a plain function from `EngineStats` to its view.

Does not know: HTTP, templates, where the snapshot came from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING
from urllib.parse import quote

from localllm.engine.stats import EngineStats, Histogram, RequestTimeline, StepComposition
from localllm.units import format_bytes, format_count, format_seconds
from localllm.web.live import Sample, Tick
from localllm.web.pages.dashboard.machine import MachineReading
from localllm.web.pages.dashboard.plots import colours, pool_map, sparkline, stacked
from localllm.web.views.dashboard import (
    Counters,
    Dashboard,
    FinishedRequests,
    FinishedRow,
    Headline,
    KVUsage,
    LastStep,
    Latency,
    LatencyRow,
    LiveRequests,
    MachineUse,
    ModelFacts,
    RequestRow,
)
from localllm.web.views.shared import Fact, Gauge, Segment, StatusPill

if TYPE_CHECKING:
    from localllm.served import ServedModel

MAX_ROWS, MAX_FINISHED = 24, 8
HIGH_KV = 0.9
"""Where the KV cache meter starts to warn: preemption is near."""


def status_pill(model: str | None, state: str, stats: EngineStats | None) -> StatusPill:
    """The header's pill; without an engine it says what the model does instead."""
    if model is None or stats is None:
        return StatusPill("error" if state == "failed" else "loading", state or "loading")
    busy = stats.num_running + stats.num_waiting
    waiting = f", {stats.num_waiting} waiting" if stats.num_waiting else ""
    label = f"{stats.num_running} running{waiting}" if busy else "ready"
    return StatusPill("busy" if busy else "ready", label, model, stats.decode_tokens_per_s, stats.kv_usage)


def dashboard(stats: EngineStats, tick: Tick, served: ServedModel, machine: MachineReading) -> Dashboard:
    """All tiles from one snapshot."""
    return Dashboard(
        headlines=headlines(stats, tick.samples),
        kv_usage=kv_usage(stats),
        last_step=last_step(stats.last_step, stats.num_steps),
        latency=latency(stats, tick.minute_ago),
        counters=counters(stats),
        live_requests=live_requests(stats),
        finished_requests=finished_requests(stats.recent),
        machine=machine_use(machine),
        model=model_facts(served),
    )


def headlines(stats: EngineStats, samples: Sequence[Sample]) -> tuple[Headline, ...]:
    """The four figures that come first."""

    def history(read: Callable[[Sample], float]) -> list[tuple[float, float]]:
        return [(sample.taken_s, read(sample)) for sample in samples]

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
            sparkline("Generated tokens per second", generation, _short),
        ),
        Headline(
            "prompt",
            "Prompt",
            _short(stats.prefill_tokens_per_s),
            "tok/s",
            f"{format_count(stats.prompt_tokens)} computed, {format_count(stats.prompt_tokens_cached)} from cache",
            sparkline("Prompt tokens per second", prompt, _short),
        ),
        Headline(
            "requests",
            "Requests",
            str(stats.num_running),
            "running",
            f"{stats.num_waiting} waiting, at most {stats.max_num_seqs} at once",
            sparkline("Requests running or waiting", running, lambda value: f"{value:.0f}"),
        ),
        Headline(
            "kv",
            "KV cache",
            f"{100 * stats.kv_usage:.0f}",
            "% in use",
            f"{format_count(stats.used_blocks)} of {format_count(stats.total_blocks)} blocks",
            sparkline("Share of the KV cache in use", kv, lambda value: f"{value:.0f} %", top=100.0),
        ),
    )


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == 0 else f"{value:.1f}"


def kv_usage(stats: EngineStats) -> KVUsage:
    block, used, cached, free = stats.block_size, stats.used_blocks, stats.cached_blocks, stats.free_blocks
    colour_of = colours([request.request_id for request in stats.requests])
    owners = [(colour_of[request.request_id], request.num_blocks) for request in stats.requests]
    cells, columns, rows, blocks_per_cell = pool_map(used, cached, free, owners)
    parts = [("In use", "used", used), ("Reusable", "cached", cached), ("Free", "free", free)]
    return KVUsage(
        total_blocks=stats.total_blocks,
        used_blocks=used,
        high_blocks=round(HIGH_KV * stats.total_blocks),
        block_size=block,
        used_tokens=used * block - stats.wasted_token_slots,
        total_tokens=stats.total_blocks * block,
        reusable_tokens=cached * block,
        wasted_token_slots=stats.wasted_token_slots,
        segments=stacked([(name, kind, n, f"{format_count(n)} blocks") for name, kind, n in parts]),
        cells=cells,
        columns=columns,
        rows=rows,
        blocks_per_cell=blocks_per_cell,
    )


def last_step(step: StepComposition, num_steps: int) -> LastStep:
    idle = max(0, step.budget_tokens - step.prefill_tokens - step.decode_tokens)
    batch = [
        ("Prefill", "prefill", step.prefill_tokens, format_count(step.prefill_tokens)),
        ("Decode", "decode", step.decode_tokens, format_count(step.decode_tokens)),
        ("Unused budget", "idle", idle, format_count(idle)),
    ]
    times = [
        ("Schedule", "queue", step.schedule_s),
        ("Forward", "decode", step.forward_s),
        ("Sample", "prefill", step.sample_s),
        ("Update", "cached", step.update_s),
    ]
    return LastStep(
        step_id=step.step_id,
        num_steps=num_steps,
        prefill_tokens=step.prefill_tokens,
        decode_tokens=step.decode_tokens,
        prefill_requests=step.prefill_requests,
        decode_requests=step.decode_requests,
        budget_tokens=step.budget_tokens,
        batch=stacked(batch),
        times=stacked([(name, kind, spent, format_seconds(spent)) for name, kind, spent in times]),
        total_s=sum(spent for _, _, spent in times),
    )


def latency(stats: EngineStats, minute_ago: EngineStats | None) -> Latency:
    """Quantiles of the last minute; of the whole run while the last minute saw nothing."""
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
            histogram = _since(histogram, getattr(minute_ago, attribute))
        return LatencyRow(name, title, histogram.quantile(0.5), histogram.quantile(0.95))

    return Latency(tuple(row(*entry) for entry in rows), "last minute" if recent else "since start")


def _since(now: Histogram, before: Histogram) -> Histogram:
    counts = tuple(new - old for new, old in zip(now.counts, before.counts, strict=True))
    return Histogram(now.bounds, counts, now.total - before.total)


def counters(stats: EngineStats) -> Counters:
    ends = ", ".join(f"{count} {reason}" for reason, count in sorted(stats.finished.items()) if count)
    return Counters(
        prefix_hit_rate=stats.prefix_hit_rate,
        prefix_hits=stats.prefix_cache_hits,
        prefix_queries=stats.prefix_cache_queries,
        facts=(
            Fact("Preemptions", format_count(stats.num_preemptions), "blocks taken back for a while"),
            Fact("Finished", format_count(sum(stats.finished.values())), ends),
            Fact("Failed steps", format_count(stats.num_failed_steps)),
            Fact("Steps in flight", str(stats.async_depth), f"{format_count(stats.degraded_steps)} steps ran alone"),
            Fact("Up", format_seconds(stats.uptime_s)),
        ),
    )


def live_requests(stats: EngineStats) -> LiveRequests:
    colour_of = colours([request.request_id for request in stats.requests])
    rows = tuple(_live_row(line, colour_of[line.request_id], stats.taken_s) for line in stats.requests[:MAX_ROWS])
    return LiveRequests(rows, hidden=max(0, len(stats.requests) - MAX_ROWS))


def _live_row(request: RequestTimeline, colour: str, now_s: float) -> RequestRow:
    decoding_s = now_s - request.first_token_s if request.first_token_s else 0.0
    known = decoding_s > 0.2 and request.num_output_tokens > 1
    return RequestRow(
        id=request.request_id,
        state=request.state,
        colour=colour,
        prompt_tokens=request.num_prompt_tokens,
        cached_tokens=request.num_cached_tokens,
        output_tokens=request.num_output_tokens,
        blocks=request.num_blocks,
        tokens_per_s=(request.num_output_tokens - 1) / decoding_s if known else None,
        age_s=max(0.0, now_s - request.arrived_s),
        cancel_url=f"/dashboard/requests/{quote(request.request_id, safe='')}/cancel",
    )


def finished_requests(recent: Sequence[RequestTimeline]) -> FinishedRequests:
    shown = [request for request in recent if request.finished_s is not None][:MAX_FINISHED]
    scale_s = max((_total_s(request) for request in shown), default=0.0)
    return FinishedRequests(tuple(_finished_row(request, scale_s) for request in shown), scale_s)


def _total_s(request: RequestTimeline) -> float:
    return max(0.0, (request.finished_s or request.arrived_s) - request.arrived_s)


def _finished_row(request: RequestTimeline, scale_s: float) -> FinishedRow:
    return FinishedRow(
        id=request.request_id,
        finish_reason=request.finish_reason or "unknown",
        prompt_tokens=request.num_prompt_tokens,
        cached_tokens=request.num_cached_tokens,
        output_tokens=request.num_output_tokens,
        ttft_s=request.ttft_s,
        tokens_per_s=1 / request.tpot_s if request.tpot_s else None,
        total_s=_total_s(request),
        segments=_waterfall(request, scale_s),
    )


def _waterfall(request: RequestTimeline, scale_s: float) -> tuple[Segment, ...]:
    """Queue, prefill, decode; a request that ended early has fewer parts."""
    end = request.finished_s or request.arrived_s
    marks = [request.arrived_s, request.scheduled_s or end, request.first_token_s or end, end]
    spans = [max(0.0, after - before) for before, after in pairwise(marks)]
    names = (("Queue", "queue"), ("Prefill", "prefill"), ("Decode", "decode"))
    parts = [(name, kind, span, format_seconds(span)) for (name, kind), span in zip(names, spans, strict=True)]
    return stacked(parts, total=scale_s)


def machine_use(machine: MachineReading) -> MachineUse:
    gauges = [
        Gauge("CPU", machine.cpu, f"{machine.cpu:.0%} of {machine.cores} cores"),
        _memory_gauge("Memory", machine.memory_used_bytes, machine.memory_total_bytes),
    ]
    facts = [Fact("This server", format_bytes(machine.process_bytes), "resident memory")]
    for index, gpu in enumerate(machine.gpus):
        gauges.append(Gauge(f"GPU {index}", gpu.utilization, f"{gpu.utilization:.0%}"))
        gauges.append(_memory_gauge(f"GPU {index} memory", gpu.used_bytes, gpu.total_bytes))
        heat = f"{gpu.temperature_c} °C" if gpu.temperature_c is not None else ""
        power = f"{gpu.power_w:.0f} W" if gpu.power_w is not None else ""
        facts.append(Fact(f"GPU {index}", gpu.name, ", ".join(part for part in (heat, power) if part)))
    return MachineUse(tuple(gauges), tuple(facts))


def _memory_gauge(name: str, used: int, total: int) -> Gauge:
    return Gauge(name, used / total if total else 0.0, f"{format_bytes(used)} of {format_bytes(total)}")


def model_facts(served: ServedModel) -> ModelFacts:
    """What the checkpoint says and what was planned for it."""
    spec, plan = served.spec, served.plan
    planned = [
        ("Weights", "weights", plan.weights_bytes),
        ("KV cache", "used", plan.kv_bytes),
        ("Activations", "prefill", plan.activation_bytes),
        ("Reserve", "queue", plan.reserve_bytes),
        ("Left free", "idle", plan.unused_bytes),
    ]
    return ModelFacts(
        name=served.name,
        memory=stacked([(name, kind, size, format_bytes(size)) for name, kind, size in planned]),
        facts=(
            Fact("Architecture", spec.architecture, f"{spec.num_layers} layers, {spec.hidden_size} wide"),
            Fact(
                "Attention heads", f"{spec.num_heads}", f"{spec.num_kv_heads} for keys and values, {spec.head_dim} wide"
            ),
            Fact("Vocabulary", format_count(spec.vocab_size)),
            Fact("Device", str(plan.device), str(plan.dtype).removeprefix("torch.")),
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
