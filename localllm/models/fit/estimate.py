"""The memory and context that a model would get on each device of a machine, also as table rows, a column per device.

Does not know: torch, files, how a table is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from localllm.config.settings import EngineConfig
from localllm.errors import ConfigError, DoesNotFit, LocalLLMError
from localllm.machine.hardware import Hardware
from localllm.models.fit.conversation_bytes import Need, RequestCost, request_cost
from localllm.models.fit.conversation_bytes import needs as one_request
from localllm.models.fit.devices import asked_division, gpus_of
from localllm.models.fit.far import FarPlan
from localllm.models.fit.memory_plan import MemoryPlan
from localllm.models.fit.options import FitOption, fit_options, placements
from localllm.models.fit.pictures import PictureSizes, SoundSizes
from localllm.models.fit.plan import make_plan
from localllm.models.fit.rank_budget import RankPlan, ResidentBytes
from localllm.models.fit.speed import AT_ONCE, PROMPTS, PlanSpeeds, SpeechSpeeds, predict, round_speed, speed_in_words
from localllm.models.spec.model_spec import ModelSpec
from localllm.units import format_bytes, format_count, format_seconds

LENGTHS = (4096, 8192, 32_768)
"""Context lengths for which the number of concurrent requests is shown."""

Verdict = Literal["fits", "fits with a shorter context", "does not fit"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimate for one device."""

    device: str  # cpu, cuda:0, cuda:0 + cuda:1, cuda:0 + RAM, cpu + disk
    name: str  # name of the GPU, or CPU
    plan: MemoryPlan | None  # None: it does not fit
    needs: MemoryPlan  # the plan, or the refused plan with a short context
    error: DoesNotFit | None
    cost: RequestCost  # memory of one request
    wanted: int  # the requested context, else the model's own
    options: tuple[FitOption, ...]  # alternatives if the wanted context does not fit
    is_chosen: bool  # `up` with the same flags would choose this device
    one_request: tuple[Need, ...] = ()  # the memory of one conversation at a usual and the longest length, if it fits
    speed: PlanSpeeds | None = None  # None: it does not fit, or a speed is unknown
    placements: tuple[FitOption, ...] = ()  # of experts in RAM, from the longest context to the fastest answers
    speech: SpeechSpeeds | None = None  # of a model that transcribes; None: it does not, or a speed is unknown

    @property
    def verdict(self) -> Verdict:
        if self.plan is None:
            return "does not fit"
        return "fits" if self.plan.max_model_len >= self.wanted else "fits with a shorter context"

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of one token position over all layers."""
        return self.cost.token_bytes

    @property
    def request_bytes(self) -> dict[int, int]:
        """Length -> bytes of one request of that length, up to the model's own context."""
        lengths = [length for length in LENGTHS if length <= self.wanted] or [self.wanted]
        return {length: self.cost.of(length, self.needs.block_size) for length in lengths}

    @property
    def concurrency(self) -> dict[int, int]:
        """Length -> concurrent requests of that length; 0: longer than the context."""
        return {length: self.plan.concurrency(length) if self.plan else 0 for length in LENGTHS}


def estimate(
    config: EngineConfig, spec: ModelSpec, weights_bytes: int, hardware: Hardware, resident_bytes: ResidentBytes | None
) -> list[Estimate]:
    """Estimate every usable GPU and the CPU, or only the device in `config`; the device that a load would choose comes
    first.

    Raises `ConfigError` and `UnsupportedOption` for settings that are not possible on that first device.
    """

    def plan(config: EngineConfig) -> MemoryPlan:
        return make_plan(config, spec, weights_bytes, hardware, resident_bytes=resident_bytes)

    def of_config(here: EngineConfig, is_chosen: bool) -> Estimate:
        made, error = None, None
        try:
            needs = made = plan(here)
        except DoesNotFit as caught:
            error, needs = caught, _needs(plan, here, caught)
        wanted = config.max_model_len or spec.max_position
        fits = made is not None and made.max_model_len >= wanted
        here = here if needs.ranks else replace(here, device=needs.device, device_ids=())
        options = () if fits else fit_options(here, spec, hardware, plan, made)
        cost = request_cost(spec, needs.dtype, needs.kv_dtype)
        devices = list(dict.fromkeys(rank.device for rank in needs.ranks)) or [needs.device]
        names = {f"cuda:{gpu.index}": gpu.name for gpu in hardware.gpus}
        name = ", ".join(dict.fromkeys(names.get(device, "CPU") for device in devices))
        device = " + ".join([*devices, *([needs.far.place] if needs.far else [])])
        alone = one_request(plan, here, spec, made.max_model_len) if made is not None else ()
        speed = None if made is None else predict(made, hardware)
        rows = placements(config, spec, hardware, plan, made) if made is not None and is_chosen else ()
        return Estimate(device, name, made, needs, error, cost, wanted, options, is_chosen, alone, speed, rows)

    found = [of_config(config, True)]
    first = found[0].needs
    if first.ranks and asked_division(config) is not None:
        return found
    if first.far is not None:
        whole = replace(
            config, device=first.device, n_cpu_moe="0", cpu_moe=False, cpu_offload_gb=0.0, weights_on="ram",
            expert_cache_gib=0.0, cpu_embeddings="off",
        )  # fmt: skip
        found.append(of_config(whole, False))
    gpus = [f"cuda:{gpu.index}" for gpu in gpus_of(config, hardware) if gpu.is_supported]
    for device in (*gpus, "cpu") if config.device == "auto" else ():
        if first.ranks or device != first.device:
            try:
                alone = replace(
                    config, device=device, device_ids=(), tensor_parallel_size=None, pipeline_parallel_size=None,
                    weights_on="ram" if config.weights_on == "auto" else config.weights_on,
                )  # fmt: skip
                found.append(of_config(alone, False))
            except ConfigError:  # a flag that this device does not support
                continue
    if config.weights_on == "auto" and not first.ranks and all(each.plan is None for each in found):
        with suppress(LocalLLMError):  # not a mixture of experts, or a flag that does not go with it
            found.append(of_config(replace(config, weights_on="disk"), False))
    return found


def _needs(plan: Callable[[EngineConfig], MemoryPlan], config: EngineConfig, error: DoesNotFit) -> MemoryPlan:
    """Return the refused plan, or, if the requested KV cache was too large, the plan without that request."""
    if error.plan is None:
        try:
            return plan(replace(config, kv_cache_memory_bytes=None))
        except DoesNotFit as other:
            error = other
    made: MemoryPlan = error.plan
    return made


def fit_rows(estimates: Sequence[Estimate]) -> Iterator[tuple[str, list[str]]]:
    """Yield each row's name and value per device. Two leading spaces mark a detail of the row above."""

    def row(what: str) -> list[str]:
        return [format_bytes(getattr(each.needs, what)) for each in estimates]

    yield "weights", row("weights_bytes")
    pictures = [each.needs.pictures for each in estimates]
    sounds = [each.needs.sounds for each in estimates]
    yield from _media_rows(pictures, {"  of the part that sees": "tower_bytes"})
    yield from _media_rows(sounds, {"  of the part that hears": "tower_bytes"})
    yield "  held as", [each.needs.quantization or each.needs.dtype for each in estimates]
    yield from _far_rows([each.needs.far for each in estimates])
    is_uniform = all(each.cost.is_uniform for each in estimates)
    has_cache = any(each.kv_token_bytes for each in estimates)
    if has_cache:
        yield "KV cache, per token", [format_bytes(each.kv_token_bytes) for each in estimates]
        yield from _group_rows([each.cost for each in estimates])
        if is_uniform:
            yield "  per 1,000 tokens", [format_bytes(1000 * each.kv_token_bytes) for each in estimates]
        yield "  in all", [f"{format_bytes(each.needs.kv_bytes)} as {each.needs.kv_dtype}" for each in estimates]
    if any(each.needs.num_places for each in estimates):
        layers = format_count(estimates[0].cost.state_layers)
        yield "recurrent state, per request", [format_bytes(each.cost.state_bytes) for each in estimates]
        tokens = [each.cost.state_tokens for each in estimates]
        same = [f"the KV cache of {format_count(count)} tokens" if count else "" for count in tokens]
        yield f"  of {layers} layers, as much as", same
        yield "  in all", [_states_in_all(each) for each in estimates]
    if not is_uniform:
        for length in estimates[0].request_bytes:
            cells = [format_bytes(each.request_bytes[length]) for each in estimates]
            yield f"one request of {format_count(length)} tokens", cells
    yield "activations", [format_bytes(e.needs.activation_bytes - e.needs.sampler_bytes) for e in estimates]
    yield "  more for sampling", row("sampler_bytes")
    yield from _media_rows(pictures, {"  largest picture": "encode_bytes", "  encoded pictures": "kept_bytes"})
    yield from _media_rows(sounds, {"  longest sound": "encode_bytes", "  encoded sound": "kept_bytes"})
    if any(each.needs.graph_bytes for each in estimates):
        yield "CUDA graphs", row("graph_bytes")
    if any(each.needs.comm_bytes for each in estimates):
        on_cpu = all(each.device == "cpu" for each in estimates if each.needs.comm_bytes)
        yield "processes of the ranks" if on_cpu else "exchange between ranks", row("comm_bytes")
    yield "reserve", row("reserve_bytes")
    yield "free now", row("free_bytes")
    yield (
        "remains",
        [
            _left(needs.free_bytes - needs.reserve_bytes - needs.total_bytes)
            for needs in (each.needs for each in estimates)
        ],
    )
    tiers = {"KV blocks in RAM": "kv_ram_bytes", "  of preempted requests": "kv_swap_bytes"}
    for name, what in (tiers | {"KV blocks on disk": "kv_disk_bytes"}).items():
        sizes = [getattr(each.needs, what) for each in estimates]
        if any(sizes):
            yield name, [f"up to {format_bytes(size)}" if size else "" for size in sizes]
    yield "verdict", [each.verdict for each in estimates]
    yield "context", [_count(each.plan.max_model_len) if each.plan else "" for each in estimates]
    for length in estimates[0].concurrency if has_cache else ():
        if any(each.concurrency[length] or not each.plan for each in estimates):  # else longer than every context
            cells = [_count(each.concurrency[length]) or ("too long" if each.plan else "") for each in estimates]
            yield f"  requests of {format_count(length)}", cells
    yield from _speed_rows([each.speed for each in estimates])
    if any(each.speech for each in estimates):
        yield "expected speed", [each.speech.words() if each.speech else "" for each in estimates]
    if has_cache:
        yield "KV blocks", [each.plan.blocks_in_words if each.plan else "" for each in estimates]


def _far_rows(far: Sequence[FarPlan | None]) -> Iterator[tuple[str, list[str]]]:
    """Yield the rows of the tables and parts in RAM beside a GPU or on disk; none if all are where the device is."""
    for name in dict.fromkeys(table.name for each in far if each for table in each.tables):
        tables = [dict(each.tables).get(name, 0) if each else 0 for each in far]
        yield f"{name} in RAM", [format_bytes(size) if size else "" for size in tables]
    moved = [each if each and each.layers else None for each in far]
    if not any(moved):
        return
    yield (
        f"{next(each.what for each in moved if each)} in RAM",
        [format_bytes(each.expert_bytes) if each else "" for each in moved],
    )
    if any(each.disk for each in moved if each):
        sizes = [each.disk.file_bytes if each and each.disk else 0 for each in moved]
        yield "  of those on disk", [format_bytes(size) if size else "" for size in sizes]
    yield "  of layers", [f"{len(each.layers)} of {each.num_layers}" if each else "" for each in moved]


def _speed_rows(speeds: Sequence[PlanSpeeds | None]) -> Iterator[tuple[str, list[str]]]:
    """Yield the rows of predicted speeds; none if all of them are unknown."""
    if not any(speeds):
        return
    yield "speed of one answer", [speed_in_words(each.decode) if each else "" for each in speeds]
    for number in AT_ONCE[1:]:
        rates = [round_speed(each.streams.get(number, 0.0)) if each else 0.0 for each in speeds]
        yield f"  each of {number} at once", [f"about {rate:,g} tokens/s" if rate else "" for rate in rates]
    for length in PROMPTS:
        times = [each.first_token_s.get(length) if each else None for each in speeds]
        if any(times):
            cells = [f"about {format_seconds(seconds)}" if seconds else "" for seconds in times]
            yield f"first token of {format_count(length)}", cells


def _media_rows(
    sizes: Sequence[PictureSizes | SoundSizes | None], names: Mapping[str, str]
) -> Iterator[tuple[str, list[str]]]:
    """Yield rows of the memory for pictures or sound; none for a model that has no such part. names: of a row, its
    field."""
    for name, what in names.items() if any(sizes) else ():
        yield name, [format_bytes(getattr(each, what)) if each else "" for each in sizes]


def _group_rows(costs: Sequence[RequestCost]) -> Iterator[tuple[str, list[str]]]:
    """Yield the bytes per token of each KV group, where a model has several or has layers without K and V."""
    groups = costs[0].groups
    if len(groups) == 1 and not costs[0].state_layers:
        return
    for index, group in enumerate(groups):
        layers = f"{format_count(group.num_layers)} {'layer' if group.num_layers == 1 else 'layers'}"
        seen = "all tokens" if group.window is None else f"{format_count(abs(group.window))} tokens"
        cells = [format_bytes(cost.groups[index].token_bytes) for cost in costs]
        yield f"  {layers} that {'sees' if group.num_layers == 1 else 'see'} {seen}", cells


def rank_columns(ranks: Sequence[RankPlan]) -> list[str]:
    """Return a heading for each rank: rank 0 cuda:0 RTX 4090."""
    return [
        " ".join(["rank", str(number), *(["CPU"] if rank.device == "cpu" else [rank.device, rank.name])])
        for number, rank in enumerate(ranks)
    ]


def rank_rows(ranks: Sequence[RankPlan]) -> Iterator[tuple[str, list[str]]]:
    """Yield each row's name and value per rank, for the ranks of one plan."""
    shards = [rank.shard for rank in ranks]
    yield "layers", [f"{len(shard.layers)} ({shard.layers.start} to {shard.layers.stop - 1})" for shard in shards]
    yield "heads", [format_count(len(shard.heads)) for shard in shards]
    yield "KV heads", [format_count(len(shard.kv_heads)) for shard in shards]
    yield "features", [format_count(len(shard.features)) for shard in shards]
    if any(len(shard.experts) for shard in shards):
        yield "experts", [format_count(len(shard.experts)) for shard in shards]
        yield "features of an expert", [format_count(len(shard.expert_features)) for shard in shards]
    yield "vocabulary", [format_count(len(shard.vocab)) for shard in shards]
    names = {"weights": "weights_bytes", "KV cache": "kv_bytes", "activations": "activation_bytes"}
    names |= {"CUDA graphs": "graph_bytes"} if any(rank.graph_bytes for rank in ranks) else {}
    on_cpu = any(rank.device == "cpu" for rank in ranks)
    names |= {
        "process" if on_cpu else "exchange": "comm_bytes",
        "in all": "total_bytes",
        "reserve": "reserve_bytes",
        "free now": "free_bytes",
    }
    for title, name in names.items():
        yield title, [format_bytes(getattr(rank, name)) for rank in ranks]
    if not on_cpu:  # on a CPU all ranks share what is free
        yield "remains", [_left(rank.free_bytes - rank.reserve_bytes - rank.total_bytes) for rank in ranks]


def _states_in_all(each: Estimate) -> str:
    needs = each.needs
    checkpoints = max(0, needs.num_places - 1 - needs.max_num_seqs)
    return f"{format_bytes(needs.state_bytes)}: {needs.max_num_seqs} requests, {format_count(checkpoints)} checkpoints"


def _left(count: int) -> str:
    return format_bytes(count) if count >= 0 else f"{format_bytes(-count)} are missing"


def _count(number: int) -> str:
    return format_count(number) if number else ""


# ---- for programs ----------------------------------------------------------------------------------------------------


def fit_facts(name: str, spec: ModelSpec, download_bytes: int | None, estimates: Sequence[Estimate]) -> dict[str, Any]:
    """Return the estimates of a model as plain values. download_bytes: None if it is on this machine."""
    return {
        "model": name,
        "architecture": spec.architecture,
        "max_position": spec.max_position,
        "download_bytes": download_bytes or 0,
        "devices": [_device_facts(each) for each in estimates],
    }


def _device_facts(each: Estimate) -> dict[str, Any]:
    return {
        "device": each.device,
        "name": each.name,
        "is_chosen": each.is_chosen,
        "verdict": each.verdict,
        "error": str(each.error) if each.error else None,
        "max_model_len": each.plan.max_model_len if each.plan else None,
        "tokens_per_s": each.speed.decode if each.speed else None,
        "predicted": asdict(each.speed) if each.speed else None,
        "speech": asdict(each.speech) if each.speech else None,
        "kv_bytes_per_token": each.kv_token_bytes,
        "kv_groups": [group._asdict() for group in each.cost.groups],
        "state_bytes_per_request": each.cost.state_bytes,
        "state_layers": each.cost.state_layers,
        "request_bytes": {str(length): size for length, size in each.request_bytes.items()},
        "concurrency": {str(length): number for length, number in each.concurrency.items()},
        "plan" if each.plan else "needs": _plan_facts(each.needs),
        "options": [_option_facts(option) for option in each.options],
        "placements": [_option_facts(option) for option in each.placements],
    }


def _plan_facts(plan: MemoryPlan) -> dict[str, Any]:
    """Return a plan's fields. A range becomes its first number and the one after its last."""
    ranks = []
    for rank in plan.ranks:
        shard = asdict(rank.shard)
        cut = {name: [each.start, each.stop] for name, each in shard.items() if isinstance(each, range)}
        ranks.append(asdict(rank) | {"shard": shard | cut})
    return asdict(plan) | {"ranks": ranks}


def _option_facts(option: FitOption) -> dict[str, Any]:
    return {
        "flags": option.flags,
        "changes": dict(option.changes),
        "max_model_len": option.context,
        "concurrency": round(option.concurrency, 2),
        "cost": option.cost,
    }
