"""GET /metrics: one `EngineStats` snapshot of each model in Prometheus format.

With --metrics-aliases the values also appear under the names of vLLM (`vllm:*`, with its labels) and llama.cpp
(`llamacpp:*`), for dashboards made for those servers. All names read the same snapshot, so they always agree with each
other and with the dashboard. The states of models and the counts of HTTP requests are included.
Does not know: how the numbers are computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter

from litestar import get
from litestar.response.base import ASGIResponse
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from localllm.engine.stats import EngineStats, Histogram
from localllm.engine.step import RankStats
from localllm.fleet.replicas import prefill_apart_of, replicas_of, stats_of_each
from localllm.fleet.upstream import Upstream
from localllm.serving.entry import ModelStatus
from localllm.serving.served import ServedModel
from localllm.web.api.batches.worker import BatchWorker
from localllm.web.api.exchange import ApiRequest, manager_of, upstreams_of
from localllm.web.api.openapi import TEXT, Operation

OWN, VLLM = "localllm:", "vllm:"
LABELS = ["model_name", "engine"]
RANK_LABELS = [*LABELS, "rank", "device"]

# name without prefix, help, attribute of EngineStats
GAUGES = (
    ("num_requests_running", "Requests in the running batch.", "num_running"),
    ("num_requests_waiting", "Requests waiting to be admitted.", "num_waiting"),
    ("kv_cache_usage_perc", "Share of the KV cache blocks held by requests, 0 to 1.", "kv_usage"),
)
COUNTERS = (
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prefix_cache_queries"),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", "prefix_cache_hits"),
    (
        "external_prefix_cache_queries",
        "Prompt tokens that the cache did not hold, looked up in RAM and on disk.",
        "tiers.queried_tokens",
    ),
    ("external_prefix_cache_hits", "Tokens loaded from RAM or disk.", "tiers.hit_tokens"),
    ("num_preemptions", "Requests preempted: their blocks were freed and they wait again.", "num_preemptions"),
    ("prompt_tokens", "Prompt tokens computed.", "prompt_tokens"),
    ("prompt_tokens_cached", "Prompt tokens taken from the prefix cache.", "prompt_tokens_cached"),
    ("generation_tokens", "Tokens generated.", "generation_tokens"),
    ("spec_decode_num_drafts", "Rows of steps that verified drafts.", "speculation.num_drafts"),
    ("spec_decode_num_draft_tokens", "Tokens guessed ahead and verified.", "speculation.num_draft_tokens"),
    ("spec_decode_num_accepted_tokens", "Guessed tokens that were right.", "speculation.num_accepted_tokens"),
)
HISTOGRAMS = (
    ("iteration_tokens_total", "Tokens per step.", "iteration_tokens"),
    ("time_to_first_token_seconds", "Arrival to first token.", "ttft"),
    ("inter_token_latency_seconds", "Time between two tokens of a request.", "inter_token"),
    ("request_time_per_output_token_seconds", "Mean time per token after the first.", "tpot"),
    ("e2e_request_latency_seconds", "Arrival to last token.", "e2e"),
    ("request_queue_time_seconds", "Arrival to first step.", "queue"),
    ("request_prefill_time_seconds", "First step to first token.", "prefill"),
    ("request_decode_time_seconds", "First to last token.", "decode"),
    ("request_inference_time_seconds", "First step to last token.", "inference"),
    ("request_prompt_tokens", "Prompt tokens per request.", "prompt_len"),
    ("request_generation_tokens", "Generated tokens per request.", "generation_len"),
)
# vLLM has no such metrics.
OWN_GAUGES = (
    ("kv_blocks_total", "Usable KV cache blocks.", "total_blocks"),
    ("kv_blocks_used", "Blocks held by requests.", "used_blocks"),
    ("kv_blocks_cached", "Blocks in the prefix cache that no request holds.", "cached_blocks"),
    ("kv_blocks_free", "Empty blocks.", "free_blocks"),
    ("kv_wasted_token_slots", "Positions in used blocks that hold no token yet.", "wasted_token_slots"),
    ("state_places_total", "Usable places of recurrent states; 0: the model has none.", "total_places"),
    ("state_places_used", "Places of recurrent states held by requests.", "used_places"),
    ("state_places_cached", "Checkpoints of recurrent states that no request reads.", "checkpoint_places"),
    ("prefill_tokens_per_second", "Prompt tokens computed per second, over the last seconds.", "prefill_tokens_per_s"),
    ("decode_tokens_per_second", "Tokens generated per second, over the last seconds.", "decode_tokens_per_s"),
    ("captured_graphs", "Step shapes recorded as CUDA graphs.", "runner.captured_graphs"),
    (
        "wanted_graphs",
        "Step shapes to record; above captured_graphs if some recordings failed.",
        "runner.wanted_graphs",
    ),
    ("failed_graphs", "Step shapes that could not be recorded as CUDA graphs.", "runner.failed_graphs"),
    ("graph_bytes", "Device memory used by CUDA graphs.", "runner.graph_bytes"),
    (
        "far_weights_bytes",
        "Bytes of experts and lookup tables in RAM beside a GPU, or of the cache of experts on disk.",
        "runner.far_bytes",
    ),
    ("spec_width", "Most drafts of a request in the last step that generated.", "speculation.last_width"),
    ("spec_tokens_per_step", "Tokens that a request generates in a step, on average.", "speculation.tokens_per_row"),
    ("uptime_seconds", "Seconds since the engine started.", "uptime_s"),
)
OWN_COUNTERS = (
    ("steps", "Steps run.", "num_steps"),
    (
        "prefix_cache_lacks_state",
        "Prompt tokens whose K and V were in the prefix cache, computed again for want of a recurrent state.",
        "prefix_cache_lacks_state",
    ),
    ("scheduled_requests", "Requests per step, summed over all steps.", "scheduled_requests"),
    ("failed_steps", "Steps that raised.", "num_failed_steps"),
    ("degraded_steps", "Steps that could not overlap with the one before.", "degraded_steps"),
    ("recomputed_tokens", "Tokens computed again after a preemption.", "recomputed_tokens"),
    ("kv_tier_lost_blocks", "Blocks that were evicted before they could be copied out.", "tiers.moves.num_lost_blocks"),
    ("resumed_requests", "Preempted requests whose blocks came back from RAM or disk.", "tiers.num_resumed"),
    ("corrupted_requests", "Requests that ended because the model's output was NaN.", "corrupted_requests"),
    ("replayed_steps", "Steps that ran as one CUDA graph.", "runner.replayed_steps"),
    ("launched_steps", "Steps launched kernel by kernel.", "runner.launched_steps"),
    ("far_seconds", "Seconds that the CPU has computed experts in RAM.", "runner.far_s"),
    ("far_read_bytes", "Bytes of experts in RAM that the CPU has read to compute them.", "runner.far_read_bytes"),
    ("streamed_bytes", "Bytes of experts in RAM copied to the GPU for prompts.", "runner.streamed_bytes"),
    ("disk_read_bytes", "Bytes of experts read from disk.", "runner.disk_read_bytes"),
    ("disk_expert_reads", "Experts read from disk.", "runner.disk_reads"),
    ("disk_expert_hits", "Experts of a model on disk that were found in RAM.", "runner.disk_hits"),
    ("late_compiles", "Kernels compiled while a request waited; expected to stay 0.", "runner.late_compiles"),
    ("late_allocations", "Device memory allocations during steps; expected to stay 0.", "runner.late_allocations"),
)
# One series per rank: name, help, attribute of RankStats.
RANK_GAUGES = (
    ("rank_up", "1 if the process of the rank runs, 0 if it is lost.", "is_up"),
    ("rank_step_seconds", "Mean time of the rank's recent steps, waits for other ranks included.", "step_s"),
    ("rank_lag_steps", "Steps behind the rank that has launched the most.", "lag_steps"),
)
RANK_COUNTERS = (("rank_restarts", "Processes of the rank started after the first one.", "restarts"),)
RANK_MEMORY = ("rank_memory_bytes", "Device memory that the rank holds, by part.")
RANK_PARTS = (
    ("weights", "memory.weights_bytes"),
    ("kv", "memory.kv_bytes"),
    ("activations", "memory.activation_bytes"),
    ("other", "memory.other_bytes"),
)
"""Value of the label `part`, attribute of RankStats."""
ROUTED = ("routed_requests", "Requests given to the replica.", "reason")
HANDED_OVER = ("handovers", "Prompts that a prefill replica was given for another replica, by outcome.", "outcome")
LEASES = ("handover_leases", "Prompts whose blocks are kept for another replica.")
LEASED = ("handover_bytes", "Bytes of these blocks.")
# One series per other server: name, help, attribute of Upstream.
UPSTREAM_GAUGES = (
    ("upstream_up", "1 if the server answered with its list of models when it was asked last, else 0.", "is_up"),
    ("upstream_requests_open", "Requests that the server is answering for this one.", "num_open"),
)
UPSTREAM_COUNTERS = (
    (
        "upstream_retries",
        "Requests that failed there before their first token and were sent elsewhere.",
        "stats.retried",
    ),
    ("upstream_generation_tokens", "Tokens that the server generated for this one.", "stats.completion_tokens"),
    ("upstream_failed_checks", "Looks at the server's list of models that failed.", "stats.failed_checks"),
    ("upstream_first_token_seconds", "Waits for a first token, added up.", "stats.ttft_s"),
    ("upstream_first_tokens", "Streamed answers that have had a first token.", "stats.first_tokens"),
)
UPSTREAM_LABELLED = (
    ("upstream_requests", "Requests sent to the server, by outcome.", "outcome", "stats.requests"),
    ("upstream_routed", "Requests for which the server was chosen, by reason.", "reason", "stats.routed"),
)
"""Counters with one more label: name, help, label, attribute of Upstream."""
KV_GROUP_GAUGES = (
    ("kv_group_blocks_total", "Usable blocks of the layers with one window.", "total_blocks"),
    ("kv_group_blocks_used", "Blocks of these layers held by requests.", "used_blocks"),
    ("kv_group_blocks_cached", "Blocks of these layers in the prefix cache that no request holds.", "cached_blocks"),
)
BUBBLE = ("pipeline_bubble_ratio", "Share of the recent time with steps in flight in which the stage was idle.")
# llama.cpp's names for some of the same metrics.
LLAMACPP_COUNTERS = (
    ("llamacpp:prompt_tokens", "Prompt tokens computed.", "prompt_tokens"),
    ("llamacpp:tokens_predicted", "Tokens generated.", "generation_tokens"),
)
LLAMACPP_GAUGES = (
    ("llamacpp:prompt_tokens_seconds", "Prompt tokens computed per second.", "prefill_tokens_per_s"),
    ("llamacpp:predicted_tokens_seconds", "Tokens generated per second.", "decode_tokens_per_s"),
    ("llamacpp:requests_processing", "Requests in the running batch.", "num_running"),
    ("llamacpp:requests_deferred", "Requests waiting to be admitted.", "num_waiting"),
    ("llamacpp:n_busy_slots_per_decode", "Requests in a step, on average.", "requests_per_step"),
)
SLEEP_STATES = {"awake": "ready", "weights_offloaded": "sleeping", "discard_all": "unloaded"}
"""vLLM's name for each of our states."""


@dataclass(frozen=True, slots=True, eq=False)  # the registry hashes it
class EngineCollector(Collector):
    """Reads one snapshot of each model and writes every metric from it, labelled with the model's name."""

    engines: Sequence[tuple[ServedModel, EngineStats]]
    aliases: Sequence[str] = ()

    def collect(self) -> Iterator[Metric]:
        yield from self._shared(OWN)
        yield from (self._gauge(OWN, *row) for row in OWN_GAUGES)
        yield from (self._counter(OWN, *row) for row in OWN_COUNTERS)
        yield self._steps_without_drafts()
        yield self._kernel_fall_backs()
        yield from self._tiers()
        if "vllm" in self.aliases:
            yield from self._shared(VLLM)
        if "llamacpp" in self.aliases:
            yield from (self._counter("", *row) for row in LLAMACPP_COUNTERS)
            yield from (self._gauge("", *row) for row in LLAMACPP_GAUGES)

    def _shared(self, prefix: str) -> Iterator[Metric]:
        yield from (self._gauge(prefix, *row) for row in GAUGES)
        yield from (self._counter(prefix, *row) for row in COUNTERS)
        yield from (self._histogram(prefix, *row) for row in HISTOGRAMS)
        yield self._finished(prefix)
        yield self._accepted_by_place(prefix)
        yield self._cache_config(prefix)

    def _gauge(self, prefix: str, name: str, help: str, attribute: str) -> Metric:
        family = GaugeMetricFamily(prefix + name, help, labels=LABELS)
        for model, stats in self.engines:
            family.add_metric(_labels(model, stats), float(attrgetter(attribute)(stats)))
        return family

    def _counter(self, prefix: str, name: str, help: str, attribute: str) -> Metric:
        family = CounterMetricFamily(prefix + name, help, labels=LABELS)
        for model, stats in self.engines:
            family.add_metric(_labels(model, stats), float(attrgetter(attribute)(stats)))
        return family

    def _histogram(self, prefix: str, name: str, help: str, attribute: str) -> Metric:
        family = HistogramMetricFamily(prefix + name, help, labels=LABELS)
        for model, stats in self.engines:
            histogram: Histogram = getattr(stats, attribute)
            ends = [*(str(bound) for bound in histogram.bounds), "+Inf"]
            buckets = list(zip(ends, (float(count) for count in accumulate(histogram.counts)), strict=True))
            family.add_metric(_labels(model, stats), buckets, histogram.total)
        return family

    def _finished(self, prefix: str) -> Metric:
        """vLLM's name is "success" for every finish reason; dashboards divide by the reason label."""
        labels = [*LABELS, "finished_reason"]
        family = CounterMetricFamily(prefix + "request_success", "Requests that ended, by reason.", labels=labels)
        for model, stats in self.engines:
            for reason in sorted({"stop", "length", "abort", "error", *stats.finished}):
                family.add_metric([*_labels(model, stats), reason], float(stats.finished.get(reason, 0)))
        return family

    def _accepted_by_place(self, prefix: str) -> Metric:
        name, text = "spec_decode_num_accepted_tokens_per_pos", "Guessed tokens that were right, by place in their row."
        family = CounterMetricFamily(prefix + name, text, labels=[*LABELS, "position"])
        for model, stats in self.engines:
            for place, count in enumerate(stats.speculation.accepted_by_place):
                family.add_metric([*_labels(model, stats), str(place)], float(count))
        return family

    def _kernel_fall_backs(self) -> Metric:
        text = "1 for each kernel that is not served by its best variant on this GPU."
        family = GaugeMetricFamily(f"{OWN}kernel_fallback", text, labels=[*LABELS, "kernel", "variant"])
        for model, stats in self.engines:
            for each in stats.runner.fall_backs:
                family.add_metric([*_labels(model, stats), each.kernel, each.variant], 1.0)
        return family

    def _tiers(self) -> Iterator[Metric]:
        """Yield what is kept outside of the cache, by tier, and what moved, by direction."""
        labels, ways = [*LABELS, "tier"], [*LABELS, "way"]
        used = GaugeMetricFamily(f"{OWN}kv_tier_bytes", "Bytes of KV blocks in RAM and on disk.", labels=labels)
        hits = CounterMetricFamily(f"{OWN}kv_tier_hits", "Tokens whose KV was read there.", labels=labels)
        moved = CounterMetricFamily(f"{OWN}kv_transfer_bytes", "Bytes of KV blocks that moved.", labels=ways)
        seconds = CounterMetricFamily(f"{OWN}kv_transfer_seconds", "Time that it took a thread.", labels=ways)
        text = "Preempted requests whose blocks were kept in RAM (out), and that continued with them (in)."
        swaps = CounterMetricFamily(f"{OWN}num_swaps", text, labels=ways)
        text = "Preemptions, by what becomes of the blocks: kept in RAM (swap), or computed again if they are reused."
        modes = CounterMetricFamily(f"{OWN}preemptions", text, labels=[*LABELS, "mode"])
        for model, stats in self.engines:
            own, moves, swapped = _labels(model, stats), stats.tiers.moves, stats.tiers.num_swapped_out
            modes.add_metric([*own, "swap"], swapped)
            modes.add_metric([*own, "recompute"], stats.num_preemptions - swapped)
            for store in stats.tiers.stores:
                used.add_metric([*own, store.name], store.used_bytes)
                hits.add_metric([*own, store.name], store.hit_tokens)
            for way in ("in", "out") if stats.tiers.stores else ():
                moved.add_metric([*own, way], getattr(moves, f"bytes_{way}"))
                seconds.add_metric([*own, way], getattr(moves, f"seconds_{way}"))
                swaps.add_metric([*own, way], getattr(stats.tiers, f"num_swapped_{way}"))
        yield from (used, hits, moved, seconds, swaps, modes)

    def _steps_without_drafts(self) -> Metric:
        text = "Steps that generated without drafts, by reason."
        family = CounterMetricFamily(f"{OWN}spec_off_steps", text, labels=[*LABELS, "reason"])
        for model, stats in self.engines:
            for reason, count in stats.speculation.off_steps:
                family.add_metric([*_labels(model, stats), reason], float(count))
        return family

    def _cache_config(self, prefix: str) -> Metric:
        names = [*LABELS, "block_size", "num_gpu_blocks", "cache_dtype", "max_model_len"]
        family = GaugeMetricFamily(prefix + "cache_config_info", "How the KV cache is made.", labels=names)
        for model, stats in self.engines:
            sizes = (stats.block_size, stats.total_blocks, model.plan.kv_dtype, stats.max_model_len)
            family.add_metric([*_labels(model, stats), *map(str, sizes)], 1.0)
        return family


@dataclass(frozen=True, slots=True, eq=False)
class KVGroupCollector(Collector):
    """The KV groups of models that have several. Without such a model neither series nor names are written."""

    engines: Sequence[tuple[ServedModel, EngineStats]]

    def collect(self) -> Iterator[Metric]:
        several = [(model, stats) for model, stats in self.engines if len(stats.kv_groups) > 1]
        for name, help, attribute in KV_GROUP_GAUGES if several else ():
            family = GaugeMetricFamily(OWN + name, help, labels=[*LABELS, "group"])
            for model, stats in several:
                for group in stats.kv_groups:
                    family.add_metric([*_labels(model, stats), group.name], float(attrgetter(attribute)(group)))
            yield family


@dataclass(frozen=True, slots=True, eq=False)
class RankCollector(Collector):
    """The ranks of models that run on several devices. Without such a model neither series nor names are written."""

    engines: Sequence[tuple[ServedModel, EngineStats]]

    def collect(self) -> Iterator[Metric]:
        if any(stats.runner.ranks for _, stats in self.engines):
            yield from (self._filled(GaugeMetricFamily, *row) for row in RANK_GAUGES)
            yield from (self._filled(CounterMetricFamily, *row) for row in RANK_COUNTERS)
            yield self._memory()
            yield self._bubbles()

    def _filled(
        self, kind: type[GaugeMetricFamily | CounterMetricFamily], name: str, help: str, attribute: str
    ) -> Metric:
        family = kind(OWN + name, help, labels=RANK_LABELS)
        for labels, rank in self._ranks():
            family.add_metric(labels, float(attrgetter(attribute)(rank)))
        return family

    def _memory(self) -> Metric:
        name, help = RANK_MEMORY
        family = GaugeMetricFamily(OWN + name, help, labels=[*RANK_LABELS, "part"])
        for labels, rank in self._ranks():
            for part, attribute in RANK_PARTS:
                family.add_metric([*labels, part], float(attrgetter(attribute)(rank)))
        return family

    def _bubbles(self) -> Metric:
        name, help = BUBBLE
        family = GaugeMetricFamily(OWN + name, help, labels=[*LABELS, "stage"])
        for model, stats in self.engines:
            for stage, ratio in sorted(stats.runner.bubble_ratios().items()):
                family.add_metric([*_labels(model, stats), str(stage)], ratio)
        return family

    def _ranks(self) -> Iterator[tuple[list[str], RankStats]]:
        for model, stats in self.engines:
            for rank in stats.runner.ranks:
                yield [*_labels(model, stats), str(rank.rank), rank.device], rank


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaCollector(Collector):
    """The choices among replicas, and prompts that one computes for another. Without replicas nothing is written."""

    models: Sequence[ServedModel]

    def collect(self) -> Iterator[Metric]:
        several = [(model, replicas) for model in self.models if (replicas := replicas_of(model))]
        if several:
            name, text, label = ROUTED
            routed = CounterMetricFamily(OWN + name, text, labels=[*LABELS, label])
            for model, replicas in several:
                for each in replicas:
                    for reason, count in sorted(each.routed.items()):
                        routed.add_metric([model.name, str(each.number), reason], float(count))
            yield routed
        apart = [(model.name, found) for model, _ in several if (found := prefill_apart_of(model)) is not None]
        if apart:
            name, text, label = HANDED_OVER
            ended = CounterMetricFamily(OWN + name, text, labels=["model_name", label])
            leases = GaugeMetricFamily(OWN + LEASES[0], LEASES[1], labels=["model_name"])
            leased = GaugeMetricFamily(OWN + LEASED[0], LEASED[1], labels=["model_name"])
            for model_name, found in apart:
                for outcome in ("continued", "failed", "expired", "cancelled"):
                    ended.add_metric([model_name, outcome], float(found.ended[outcome]))
                leases.add_metric([model_name], float(found.leases.num_open))
                leased.add_metric([model_name], float(found.leases.used_bytes))
            yield from (ended, leases, leased)


@dataclass(frozen=True, slots=True, eq=False)
class UpstreamCollector(Collector):
    """Other servers behind this address. Without one neither series nor names are written."""

    upstreams: Sequence[Upstream]

    def collect(self) -> Iterator[Metric]:
        for kind, rows in ((GaugeMetricFamily, UPSTREAM_GAUGES), (CounterMetricFamily, UPSTREAM_COUNTERS)):
            for name, help, attribute in rows if self.upstreams else ():
                family: GaugeMetricFamily | CounterMetricFamily = kind(OWN + name, help, labels=["upstream"])
                for each in self.upstreams:
                    family.add_metric([each.name], float(attrgetter(attribute)(each)))
                yield family
        for name, help, label, attribute in UPSTREAM_LABELLED if self.upstreams else ():
            counter = CounterMetricFamily(OWN + name, help, labels=["upstream", label])
            for each in self.upstreams:
                for value, count in sorted(attrgetter(attribute)(each).items()):
                    counter.add_metric([each.name, value], float(count))
            yield counter


@dataclass(frozen=True, slots=True, eq=False)
class ModelCollector(Collector):
    """All models, with their states."""

    statuses: Sequence[ModelStatus]
    aliases: Sequence[str] = ()

    def collect(self) -> Iterator[Metric]:
        help = "1 for the current state of the model."
        family = GaugeMetricFamily(OWN + "model_state", help, labels=["model_name", "state"])
        for status in self.statuses:
            family.add_metric([status.name, status.state], 1.0)
        yield family
        yield self._sleep_state(OWN)
        if "vllm" in self.aliases:
            yield self._sleep_state(VLLM)

    def _sleep_state(self, prefix: str) -> Metric:
        labels = [*LABELS, "sleep_state"]
        family = GaugeMetricFamily(
            prefix + "engine_sleep_state", "1 for the engine's current sleep state, 0 for the others.", labels=labels
        )
        for status in self.statuses:
            for said, state in SLEEP_STATES.items():
                family.add_metric([status.name, "0", said], float(status.state == state))
        return family


@dataclass(frozen=True, slots=True, eq=False)
class HTTPCollector(Collector):
    """The requests the server received and the statuses of its answers."""

    counts: Mapping[tuple[str, str, int], int]  # by method, route and status

    def collect(self) -> Iterator[Metric]:
        labels = ["method", "route", "status"]
        help = "HTTP requests answered; route other: unknown URL, or refused before routing."
        family = CounterMetricFamily(OWN + "http_requests", help, labels=labels)
        for (method, route, status), count in sorted(self.counts.items()):
            family.add_metric([method, route, str(status)], float(count))
        yield family


@dataclass(frozen=True, slots=True, eq=False)
class BatchCollector(Collector):
    """The batches and their files."""

    worker: BatchWorker

    def collect(self) -> Iterator[Metric]:
        states = Counter(each.status for each in self.worker.records.all())
        family = GaugeMetricFamily(OWN + "batches", "Batches on record, by status.", labels=["status"])
        for status in sorted(states):
            family.add_metric([status], float(states[status]))
        yield family
        lines = CounterMetricFamily(OWN + "batch_lines", "Lines of batches answered.", labels=["outcome"])
        for outcome in ("completed", "failed"):
            lines.add_metric([outcome], float(self.worker.counts[outcome]))
        yield lines
        files = self.worker.files
        yield GaugeMetricFamily(OWN + "batch_files", "Stored files of batches.", value=float(len(files)))
        help = "Total size of the stored files of batches."
        yield GaugeMetricFamily(OWN + "batch_files_bytes", help, value=float(files.num_bytes))


def _labels(model: ServedModel, stats: EngineStats) -> list[str]:
    return [model.name, stats.engine]


@get("/metrics", operation=Operation(TEXT, guide="metrics"))
async def metrics(request: ApiRequest) -> ASGIResponse:
    """Metrics for Prometheus."""
    manager = manager_of(request)
    manager.loads.require_working()
    aliases = request.app.state.settings.server.metrics_aliases
    registry = CollectorRegistry(auto_describe=False)
    engines = [(model, stats) for model in manager.ready for stats in stats_of_each(model)]
    registry.register(EngineCollector(engines, aliases))
    registry.register(KVGroupCollector(engines))
    registry.register(RankCollector(engines))
    registry.register(ReplicaCollector(manager.ready))
    registry.register(UpstreamCollector(upstreams_of(request).all))
    registry.register(ModelCollector(manager.statuses(), aliases))
    registry.register(HTTPCollector(request.app.state.http_counts))
    registry.register(BatchCollector(request.app.state.batches))
    return ASGIResponse(body=generate_latest(registry), headers={"content-type": CONTENT_TYPE_LATEST})
