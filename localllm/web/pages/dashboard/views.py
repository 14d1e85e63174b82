"""The dashboard: its tiles and the functions that fill them from the engine's statistics.

Does not know: routes, templates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import psutil

from localllm.engine.stats import (
    NO_SPECULATION,
    OFF_REASONS,
    EngineStats,
    Histogram,
    SpeculationStats,
    StepComposition,
    StoreStats,
    TierStats,
)
from localllm.models.fit.memory_plan import MemoryPlan
from localllm.models.fit.pictures import PictureSizes, SoundSizes
from localllm.models.fit.speed import PlanSpeeds, round_speed, speed_in_words
from localllm.models.spec.model_spec import main_group
from localllm.units import format_bytes, format_count, format_seconds
from localllm.web.pages.dashboard.machine import (
    FarUse,
    MachineReading,
    MachineUse,
    OtherServers,
    Ranks,
    machine_use,
    ranks,
)
from localllm.web.pages.dashboard.plots import (
    MINUTE,
    PoolCell,
    Span,
    Sparkline,
    StepColumn,
    colours,
    pool_map,
    sparkline,
    step_columns,
)
from localllm.web.pages.dashboard.request_views import (
    FinishedRequests,
    LiveRequests,
    Viewer,
    finished_requests,
    first_request,
    live_requests,
)
from localllm.web.pages.dashboard.shown import DashboardLink
from localllm.web.pages.frame.sampler import StatsSample, Tick
from localllm.web.pages.frame.views import Fact, Loading, Segment, Shell, View, stacked, view

if TYPE_CHECKING:
    from localllm.serving.served import ServedModel


@view("dashboard/_headline.html")
class Headline(View):
    """A value with its history."""

    id: str
    title: str
    value: str
    unit: str
    note: str
    sparkline: Sparkline


@dataclass(frozen=True, slots=True)
class GroupUsage:
    """The use of the KV cache by layers with one window, beside those that keep every token."""

    window: int | None
    segments: tuple[Segment, ...]
    cells: tuple[PoolCell, ...]
    columns: int
    rows: int
    blocks_per_cell: int


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """Bytes of KV blocks in RAM or on a disk."""

    title: str
    used_bytes: int
    capacity_bytes: int
    segments: tuple[Segment, ...]
    note: str  # what was read from it


@view("dashboard/_kv_usage.html")
class KVUsage(View):
    """The use of the KV cache, by request."""

    used_share: float  # 0 to 1
    sparkline: Sparkline
    block_size: int
    used_tokens: int
    total_tokens: int
    reusable_tokens: int
    wasted_token_slots: int
    segments: tuple[Segment, ...]
    cells: tuple[PoolCell, ...]
    columns: int
    rows: int
    blocks_per_cell: int
    others: tuple[GroupUsage, ...] = ()  # the other KV groups
    state_places: str = ""  # use of the places of recurrent states; empty: the model has none
    stores: tuple[StoreUsage, ...] = ()  # of blocks that have left the cache


@dataclass(frozen=True, slots=True)
class StepRow:
    """A step of the plot, as text."""

    step_id: int
    prefill_tokens: int
    decode_tokens: int
    requests: int
    total_s: float


@view("dashboard/_steps.html")
class RecentSteps(View):
    """The batches of the last steps, and the time breakdown of the newest."""

    step_id: int
    num_steps: int
    prefill_tokens: int
    decode_tokens: int
    prefill_requests: int
    decode_requests: int
    budget_tokens: int
    columns: tuple[StepColumn, ...]
    rows: tuple[StepRow, ...]  # newest first
    most_tokens: int  # most tokens in one of these steps: the top of the plot
    times: tuple[Segment, ...]
    total_s: float


@dataclass(frozen=True, slots=True)
class LatencyRow:
    """Median and 95th percentile of one latency; None without observations."""

    name: str
    title: str  # an explanation of the latency
    p50_s: float | None
    p95_s: float | None


@view("dashboard/_latency.html")
class Latency(View):
    """Latencies of the last minute, or since the start if the last minute had no requests."""

    rows: tuple[LatencyRow, ...]
    span: str  # "last minute" or "since start"


@view("dashboard/_counters.html")
class Counters(View):
    """Prefix cache, preemptions and how requests ended, since the start."""

    prefix_hit_rate: float  # 0 to 1
    prefix_hits: int
    prefix_queries: int
    facts: tuple[Fact, ...]


@view("dashboard/_drafts.html")
class Drafts(View):
    """Figures of speculation in the last minute, or since the start if nothing was generated in that minute."""

    why_off: str = ""  # why there are no drafts at all; empty: there may be some
    tokens_per_step: str = ""  # of one request
    accepted: int = 0
    drafted: int = 0
    facts: tuple[Fact, ...] = ()
    span: str = ""  # "last minute" or "since start"

    @property
    def accepted_share(self) -> float:
        """Share of the verified drafts that were right, 0 to 1."""
        return self.accepted / self.drafted if self.drafted else 0.0


@view("dashboard/_model_facts.html")
class ModelFacts(View):
    """The model and its memory plan."""

    name: str
    memory: tuple[Segment, ...]
    facts: tuple[Fact, ...]
    notes: tuple[str, ...] = ()
    ram: tuple[Segment, ...] = ()  # of a model with experts in RAM; empty: it has none there


@view("dashboard/_board.html")
class Dashboard(View):
    """Every tile. The live stream sends the tiles that changed."""

    headlines: tuple[Headline, ...]
    ranks: Ranks
    kv_usage: KVUsage
    steps: RecentSteps
    latency: Latency
    counters: Counters
    drafts: Drafts
    live_requests: LiveRequests
    finished_requests: FinishedRequests
    machine: MachineUse
    model: ModelFacts


@view("dashboard/page.html")
class DashboardPage(View):
    """`/dashboard`."""

    shell: Shell
    dashboard: Dashboard | None = None
    loading: Loading | None = None
    spans: tuple[DashboardLink, ...] = ()  # time ranges of the sparklines
    models: tuple[DashboardLink, ...] = ()  # the loaded models; empty: there is one
    query: str = ""  # of this dashboard, for the files to download
    others: OtherServers = OtherServers()


def drafts(stats: SpeculationStats, minute_ago: SpeculationStats | None) -> Drafts:
    """Return the figures of the last minute; if nothing was generated in it, of the whole run."""
    if not stats.is_on:
        return Drafts(why_off=stats.why_off or NO_SPECULATION.why_off)
    recent = minute_ago is not None and stats.num_decode_rows > minute_ago.num_decode_rows
    seen = stats.since(minute_ago) if recent and minute_ago is not None else stats
    reason = OFF_REASONS.get(stats.last_reason, stats.last_reason)
    return Drafts(
        tokens_per_step=f"{seen.tokens_per_row:.1f}" if seen.num_decode_rows else "–",
        accepted=seen.num_accepted_tokens,
        drafted=seen.num_draft_tokens,
        facts=(
            Fact("Width of the last step", format_count(stats.last_width), reason or "drafts of a request, at most"),
            *_steps_without(seen),
        ),
        span="last minute" if recent else "since start",
    )


def _steps_without(seen: SpeculationStats) -> tuple[Fact, ...]:
    """Return how many steps generated without drafts, by reason, the most frequent first."""
    counts = sorted([(count, reason) for reason, count in seen.off_steps if count], reverse=True)
    if not counts:
        return ()
    reasons = "; ".join(f"{format_count(count)}: {OFF_REASONS.get(reason, reason)}" for count, reason in counts)
    return (Fact("Steps without drafts", format_count(sum(count for count, _ in counts)), reasons),)


def dashboard(
    stats: EngineStats,
    tick: Tick,
    served: ServedModel,
    machine: MachineReading,
    past: Sequence[StatsSample],
    span: Span,
    viewer: Viewer,
) -> Dashboard:
    """Return all tiles of one snapshot; `past` has the samples for the headlines' plots."""
    has_waited = stats.ttft.count or stats.requests or stats.recent
    return Dashboard(
        headlines=headlines(stats, tick.minute_ago, past, span),
        ranks=ranks(stats.runner),
        kv_usage=kv_usage(stats, past, span),
        steps=steps(stats.steps, stats.num_steps),
        latency=latency(stats, tick.minute_ago),
        counters=counters(stats),
        drafts=drafts(stats.speculation, None if tick.minute_ago is None else tick.minute_ago.speculation),
        live_requests=live_requests(stats, viewer, curl="" if has_waited else first_request(served.name, viewer)),
        finished_requests=finished_requests(stats.recent, viewer),
        machine=machine_use(machine, _far_use(stats, tick.minute_ago, served)),
        model=model_facts(served, stats.lone_tokens_per_s),
    )


def _far_use(stats: EngineStats, before: EngineStats | None, served: ServedModel) -> FarUse | None:
    """Return how the CPU computed experts in RAM while the GPU waited; None: none are there."""
    far, speed, now = served.plan.far, served.speed, stats.runner
    if far is None or not far.layers:
        return None
    seconds, read_bytes, span_s = now.far_s, now.far_read_bytes, stats.uptime_s
    if before is not None and stats.goes_on_from(before):
        seconds, read_bytes = seconds - before.runner.far_s, read_bytes - before.runner.far_read_bytes
        span_s = stats.taken_s - before.taken_s
    rate = read_bytes / seconds if seconds > 0 and far.disk is None else None
    return FarUse(min(1.0, seconds / max(span_s, 1e-9)), rate, None if speed is None else speed.ram_bandwidth)


def headlines(
    stats: EngineStats, minute_ago: EngineStats | None, samples: Sequence[StatsSample], span: Span = MINUTE
) -> tuple[Headline, ...]:
    """Return the four main values, with their history. The time that people wait comes first."""

    def history(read: Callable[[StatsSample], float]) -> list[tuple[float, float]]:
        return [(sample.taken_s, read(sample)) for sample in samples]

    plot = partial(sparkline, span=span)
    generation = history(lambda sample: sample.decode_tokens_per_s)
    prompt = history(lambda sample: sample.prefill_tokens_per_s)
    running = history(lambda sample: sample.num_running + sample.num_waiting)
    return (
        _waiting(stats, minute_ago, plot("Time to first token", _waits(samples), format_seconds)),
        Headline(
            "generation",
            "Generation speed",
            _short(stats.decode_tokens_per_s),
            "tok/s",
            f"{format_count(stats.generation_tokens)} tokens since start",
            plot("Generated tokens per second", generation, _short),
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
            "prompt",
            "Prompt speed",
            _short(stats.prefill_tokens_per_s),
            "tok/s",
            f"{format_count(stats.prompt_tokens)} computed, {format_count(stats.prompt_tokens_cached)} from cache",
            plot("Prompt tokens per second", prompt, _short),
        ),
    )


def _waiting(stats: EngineStats, minute_ago: EngineStats | None, plot: Sparkline) -> Headline:
    """Return the median time to first token of the last minute; without requests in it, of the whole run."""
    recent = minute_ago if minute_ago is not None and stats.ttft.count > minute_ago.ttft.count else None
    ttft = stats.ttft.since(recent.ttft) if recent is not None else stats.ttft
    median, most = ttft.quantile(0.5), ttft.quantile(0.95)
    if median is None or most is None:
        return Headline("waiting", "Time to first token", "–", "", "No request yet", plot)
    value, _, unit = format_seconds(median).rpartition(" ")
    since = "last minute" if recent is not None else "since start"
    note = f"95 % within {format_seconds(most)}, {since}"
    return Headline("waiting", "Time to first token", value, unit, note, plot)


def _waits(samples: Sequence[StatsSample]) -> list[tuple[float, float]]:
    """Return the mean time to first token of the requests that had theirs between two samples; until the next ones have
    theirs, that of the last ones.
    """
    waits: list[tuple[float, float]] = []
    for before, sample in pairwise(samples):
        count = sample.first_tokens - before.first_tokens
        if count > 0:
            waits.append((sample.taken_s, (sample.ttft_total_s - before.ttft_total_s) / count))
        elif waits:
            waits.append((sample.taken_s, waits[-1][1]))
    return waits


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == 0 else f"{value:.1f}"


def kv_usage(stats: EngineStats, samples: Sequence[StatsSample] = (), span: Span = MINUTE) -> KVUsage:
    history = [(sample.taken_s, 100 * sample.kv_usage) for sample in samples]
    block, used, cached, free = stats.block_size, stats.used_blocks, stats.cached_blocks, stats.free_blocks
    colour_of = colours([request.request_id for request in stats.requests])
    owners = [(colour_of[request.request_id], request.num_blocks) for request in stats.requests]
    cells, columns, rows, blocks_per_cell = pool_map(used, cached, free, owners)
    main = main_group(tuple(group.window for group in stats.kv_groups)) if stats.kv_groups else 0
    return KVUsage(
        used_share=stats.kv_usage,
        sparkline=sparkline(
            "Share of the KV cache in use", history, lambda part: f"{part:.0f} %", top=100.0, span=span
        ),
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
        state_places=_state_places(stats),
        stores=tuple(_store_usage(stats.tiers, store) for store in stats.tiers.stores),
    )


def _store_usage(tiers: TierStats, store: StoreStats) -> StoreUsage:
    """Return what a tier holds, and how much of it for preempted requests."""
    held = tiers.held_in(store)
    parts = (
        ("Preempted requests", "used", held),
        ("Reusable", "cached", store.used_bytes - held),
        ("Free", "free", store.capacity_bytes - store.used_bytes),
    )
    segments = stacked([(name, kind, size, format_bytes(size)) for name, kind, size in parts if size or kind != "used"])
    title = {"ram": "In RAM", "disk": "On disk"}[store.name]
    note = f"{format_count(store.hit_tokens)} tokens read"
    return StoreUsage(title, store.used_bytes, store.capacity_bytes, segments, note)


def _group_usage(stats: EngineStats, index: int) -> GroupUsage:
    """Return the use of one KV group."""
    group, colour_of = stats.kv_groups[index], colours([request.request_id for request in stats.requests])
    owners = [(colour_of[each.request_id], each.held_blocks[index]) for each in stats.requests if each.held_blocks]
    used, cached, free = group.used_blocks, group.cached_blocks, group.free_blocks
    return GroupUsage(group.window, _blocks(used, cached, free), *pool_map(used, cached, free, owners))


def _blocks(used: int, cached: int, free: int) -> tuple[Segment, ...]:
    parts = [("In use", "used", used), ("Reusable", "cached", cached), ("Free", "free", free)]
    return stacked([(name, kind, n, f"{format_count(n)} blocks") for name, kind, n in parts])


def _state_places(stats: EngineStats) -> str:
    used, checkpoints, total = map(format_count, (stats.used_places, stats.checkpoint_places, stats.total_places))
    return f"{used} in use, {checkpoints} checkpoints, of {total}" if stats.total_places else ""


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
                f"{format_count(stats.recomputed_tokens)} tokens recomputed"
                + (f"; {format_count(stats.tiers.num_swapped_out)} swapped" if stats.tiers.num_swapped_out else ""),
            ),
            Fact("Finished", format_count(sum(stats.finished.values())), ends),
            *_state_facts(stats),
            Fact("Failed steps", format_count(stats.num_failed_steps)),
            *_overlap_facts(stats),
            Fact("Up", format_seconds(stats.uptime_s)),
        ),
    )


def _overlap_facts(stats: EngineStats) -> tuple[Fact, ...]:
    """Return how often steps ran one after the other although two may overlap; empty if they never overlap here."""
    if stats.async_depth < 2:
        return ()
    note = "the next one starts before the last has ended"
    alone = f"; {format_count(stats.degraded_steps)} waited for it" if stats.degraded_steps else ""
    return (Fact("Overlapping steps", str(stats.async_depth), f"{note}{alone}"),)


def _state_facts(stats: EngineStats) -> tuple[Fact, ...]:
    """Return how many tokens were in the prefix cache in vain, if the model has recurrent states."""
    if not stats.total_places:
        return ()
    return (Fact("Without a state", format_count(stats.prefix_cache_lacks_state), "prompt tokens with known K and V"),)


def _media_facts(name: str, sizes: PictureSizes | SoundSizes | None) -> tuple[Fact, ...]:
    """Return the memory of reading pictures or sound; empty for a model that has no such part."""
    if sizes is None:
        return ()
    parts = f"tower {format_bytes(sizes.tower_bytes)}, encoding {format_bytes(sizes.encode_bytes)}"
    kept = f"encoded {name.lower()} {format_bytes(sizes.kept_bytes)}"
    return (Fact(name, f"{format_count(sizes.rows)} tokens at most", f"{parts}, {kept}"),)


def _speed_facts(speed: PlanSpeeds | None, measured: float) -> tuple[Fact, ...]:
    """Return what was predicted before the load, and what was measured since; empty: neither is known."""
    seen = f"measured: {round_speed(measured):,g} tokens/s" if measured else ""
    if speed is None:
        return (Fact("Speed of one answer", seen),) if seen else ()
    expected = f"predicted: {speed_in_words(speed.decode)}"
    return (Fact("Speed of one answer", seen or expected, expected if seen else speed.why),)


def _ram_parts(plan: MemoryPlan) -> tuple[Segment, ...]:
    """Return the use of RAM by a model that is also on a GPU or on disk; empty: it needs none."""
    if plan.far is None:
        return ()
    total = psutil.virtual_memory().total
    name = "Experts" if plan.far.disk is None else "Latest experts"
    own = [(name, "weights", plan.far.expert_bytes)] if plan.far.layers else []
    own += [("Lookup tables", "used", sum(dict(plan.far.tables).values()))] if plan.far.tables else []
    own += [("KV blocks at most", "cached", plan.kv_ram_bytes)] if plan.kv_ram_bytes else []
    parts = [*own, ("Rest of RAM", "idle", max(0, total - sum(size for _, _, size in own)))]
    return stacked([(name, kind, float(size), format_bytes(size)) for name, kind, size in parts])


def model_facts(served: ServedModel, measured: float = 0.0) -> ModelFacts:
    """Return the checkpoint's facts and the memory plan. measured: tokens/s of one answer; 0: unknown."""
    spec, plan = served.spec, served.plan
    planned = [
        ("Weights", "weights", plan.weights_bytes),
        ("KV cache", "used", plan.kv_bytes),
        *([("Recurrent states", "cached", plan.state_bytes)] if plan.num_places else []),
        ("Activations", "prefill", plan.activation_bytes),
        ("Reserve", "queue", plan.reserve_bytes),
        ("Unused", "idle", plan.unused_bytes),
    ]
    return ModelFacts(
        name=served.name,
        memory=stacked([(name, kind, size, format_bytes(size)) for name, kind, size in planned]),
        ram=_ram_parts(plan),
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
                f"{'supported up to' if spec.context_limit else 'trained for'} {format_count(spec.max_position)}",
            ),
            *_media_facts("Pictures", plan.pictures),
            *_media_facts("Sound", plan.sounds),
            *_speed_facts(served.speed, measured),
            Fact(
                "Step", f"{format_count(plan.max_num_batched_tokens)} tokens", f"{plan.max_num_seqs} requests at most"
            ),
        ),
        notes=tuple(plan.notes),
    )
