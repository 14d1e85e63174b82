"""The memory plan: combines the request, the checkpoint and the machine into sizes, by arithmetic without a device.

`plan_memory` decides the device, the dtype, the context length and the number of KV blocks, or refuses with the
numbers and with flags that would work.

Devices are those that the settings name. Without a name one GPU, or as few GPUs as hold the model with a useful
context; then a GPU with the experts of some layers in RAM; then the CPU alone, or earlier if its answers are expected
first; and experts on disk if nothing else holds them, and only at one token per second or more
(docs/decisions/0034-which-place-runs-a-model.md). Lookup tables go to RAM before experts do.
Does not know: torch, files, sizes (plan_attempt.py), how the memory is used (loader.py, runner/kv_cache.py),
alternatives (options.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache

from localllm.config.settings import SETTINGS, EngineConfig
from localllm.errors import ConfigError, DoesNotFit, LocalLLMError, UnsupportedOption
from localllm.machine.hardware import Gpu, Hardware
from localllm.models.fit.devices import (
    MIN_CONTEXT,
    USEFUL_CONTEXT,
    asked_division,
    choose_gpu,
    choose_gpus,
    choose_kind,
    division_of,
    free_and_reserve,
    gpus_of,
    require_possible,
    require_replicable,
    require_shared_memory,
)
from localllm.models.fit.far import (
    CROSSING_S,
    GPU_SHARE,
    LONG_STEPS,
    RAM_SHARE,
    SLOW_TOKENS_PER_S,
    CheckpointBytes,
    FarChoice,
    FarPlan,
    LayerExperts,
    LookupTables,
    far_plan,
    fewest_layers,
    last_layers,
    most_more,
    quickest_layers,
)
from localllm.models.fit.memory_plan import MemoryPlan
from localllm.models.fit.plan_attempt import PlanAttempt
from localllm.models.fit.rank_budget import Measured, RankPlan, ResidentBytes
from localllm.models.fit.shard_sizes import Division
from localllm.models.fit.speed import predict, quickest, work_of
from localllm.models.formats.registry import load_method
from localllm.models.spec.model_spec import ModelSpec
from localllm.models.spec.shard import Shard, divides_by_layers
from localllm.units import format_count

USUAL_RAM, USUAL_GPU = 60e9, 600e9  # bytes/s of a desktop, where they are not measured
USUAL_SHARE = SETTINGS["gpu_memory_utilization"].default  # of a GPU's memory; with less it is lowered on purpose
FINE_BYTES = 2**20  # to which the bytes that have to leave a GPU are found


def make_plan(
    config: EngineConfig,
    spec: ModelSpec,
    weights_bytes: int,
    hardware: Hardware,
    *,
    resident_bytes: ResidentBytes | None = None,
    measured: Measured | Sequence[Measured] | None = None,
    ranks: Sequence[RankPlan] = (),
    far: FarPlan | None = None,
) -> MemoryPlan:
    """Return the plan. Raises `DoesNotFit`, `ConfigError`, `UnsupportedOption` with numbers and the next flag to try.

    weights_bytes: of the checkpoint as stored (models/spec/ reads it from the headers). resident_bytes: what the
    loader will hold; without it, the stored bytes are scaled to the dtype. measured: replaces both and the computed
    activations once the model is loaded, one for each rank. ranks: of a loaded model, whose devices and shards stay.
    far: of a loaded model, whose experts stay in RAM; resident_bytes leaves them out.
    hardware: memory as it was before the load.
    """
    load_method(config.quantization, spec.quantization)  # raises for a combination that is unsupported
    _check_position_limit(config, spec)
    if spec.source is not None:
        config = _of_encoder_decoder(config, spec)
    seen = () if measured is None else (measured,) if isinstance(measured, Measured) else tuple(measured)
    planner = _Planner(config, spec, weights_bytes, hardware, resident_bytes, seen, far)
    return planner.for_ranks(ranks) if ranks else planner.choose()


def _of_encoder_decoder(config: EngineConfig, spec: ModelSpec) -> EngineConfig:
    """Return the settings of an encoder-decoder, which runs on a CPU. Raises `UnsupportedOption` for settings that such
    a model does not have."""
    refused = {
        "device": (config.device not in ("auto", "cpu"), "Cross-attention has not been tested on a GPU."),
        "enable_lora": (config.takes_adapters, "Adapters are supported for models without an encoder."),
        "enable_prompt_embeds": (config.enable_prompt_embeds, "The encoder reads tokens."),
        "verify": (config.verify, "The comparison with transformers has no encoder."),
        "speculative": (config.speculation.has_drafter, "No drafter reads what its encoder makes."),
    }
    for name, (is_set, why) in refused.items():
        if is_set:
            flag = f"--{name.replace('_', '-')}"
            hint = "--device cpu, or leave the flag out." if name == "device" else "Leave the flag out."
            raise UnsupportedOption(f"{flag} is not supported for {spec.architecture}.", why, hint, param=name)
    return replace(config, device="cpu")


def _check_deterministic(plan: MemoryPlan) -> MemoryPlan:
    """Refuse sizes without room for a prompt's fixed chunk beside a token of every request."""
    chunk, rows = plan.fixed_chunk, plan.max_num_seqs
    if chunk and chunk + rows > plan.max_num_batched_tokens:
        raise ConfigError(
            f"--max-num-batched-tokens {plan.max_num_batched_tokens} is too small for --deterministic on a CPU.",
            f"A prompt is computed in chunks of {chunk} tokens, beside up to {rows} requests that decode.",
            f"--max-num-batched-tokens {chunk + rows}, or fewer --max-num-seqs.",
            param="max_num_batched_tokens",
        )
    return plan


def _far_ranks(flag: str) -> UnsupportedOption:
    return UnsupportedOption(
        f"{flag} cannot be combined with several ranks.",
        "Parts in RAM or on disk are supported beside one GPU, or on the CPU in one process.",
        f"Leave out {flag}, or --tensor-parallel-size, --pipeline-parallel-size and --data-parallel-size.",
        param="n_cpu_moe",
    )


def _deterministic_ranks() -> UnsupportedOption:
    return UnsupportedOption(
        "--deterministic on a CPU cannot be combined with several ranks.",
        "Each request is computed by itself there, and ranks have not been tested with it.",
        "Leave out --tensor-parallel-size and --pipeline-parallel-size, or --deterministic.",
        param="deterministic",
    )


# ---- checks of the settings ------------------------------------------------------------------------------------------


def _check_position_limit(config: EngineConfig, spec: ModelSpec) -> None:
    if config.max_model_len is not None and config.max_model_len > spec.max_position:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is longer than this model's context.",
            spec.context_limit or f"It was trained for {format_count(spec.max_position)} positions.",
            f"--max-model-len {spec.max_position}, or leave it out: auto takes the largest that fits.",
            param="max_model_len",
        )


# ---- devices ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Planner:
    """Chooses the number of ranks and their devices, and plans for them."""

    config: EngineConfig
    spec: ModelSpec
    stored_bytes: int
    hardware: Hardware
    resident_bytes: ResidentBytes | None
    measured: tuple[Measured, ...]
    far: FarPlan | None = None  # of a loaded model

    def choose(self) -> MemoryPlan:
        division = asked_division(self.config)
        num_gpus = 0 if self.config.device == "cpu" else len(self.hardware.gpus)
        require_possible(self.spec, division or division_of(self.config, 1, 1), num_gpus)
        if self.config.data_parallel_size > 1:
            require_replicable(self.spec, self.config)
            if (flag := self.config.ram_flag) and num_gpus:
                raise _far_ranks(flag)
        if division is not None and division.num_ranks > 1:
            if (flag := self.config.ram_flag) and (num_gpus or self.config.weights_on == "disk"):
                raise _far_ranks(flag)
            return self._several(division)
        if division is not None:
            return self._with_work(self._one())
        return self._best_place(self._least if self._may_use_several() else self._one)

    def for_ranks(self, ranks: Sequence[RankPlan]) -> MemoryPlan:
        """Plan for the ranks of a loaded model."""
        by_device = {f"cuda:{gpu.index}": gpu for gpu in self.hardware.gpus}
        gpus = [by_device.get(rank.device) for rank in ranks]
        return self._attempt(gpus, shards=[rank.shard for rank in ranks]).plan()

    def _best_place(self, on_gpus: Callable[[], MemoryPlan]) -> MemoryPlan:
        """Plan for the devices that the settings mean; for the CPU or the disk only if these are not named, and for
        the disk only at a usable speed. on_gpus: plans for one or several GPUs, or for the CPU if there is none."""
        refused: DoesNotFit | None = None
        plan: MemoryPlan | None = None
        try:
            plan = self._with_work(on_gpus())
        except DoesNotFit as error:
            refused = error
        leaves = self._is_too_large(refused) if refused is not None else plan is not None and self._may_be_slower(plan)
        if leaves and self._may_leave_gpus():
            plan = self._or_cpu(plan)
        if plan is None and self.config.weights_on == "auto" and not self.measured and self.far is None:
            plan = self._or_disk()
        if plan is None:
            assert refused is not None
            raise refused
        return plan

    def _may_leave_gpus(self) -> bool:
        """Return whether the CPU may be chosen though there are GPUs: where no setting is about them."""
        config = self.config
        names_gpus = config.device != "auto" or bool(config.device_ids) or config.data_parallel_size > 1
        moves = config.moves_experts or config.n_cpu_moe != "auto" or config.cpu_embeddings == "on"
        usable = any(gpu.is_supported for gpu in gpus_of(config, self.hardware))
        return usable and not (names_gpus or moves or self.measured or self.far is not None)

    def _is_too_large(self, refused: DoesNotFit) -> bool:
        """Return whether the GPUs do not hold the model, rather than a context, a cache or a share of their memory that
        the settings ask for: then there are other flags than the CPU."""
        config = self.config
        is_size = refused.param in ("max_model_len", "kv_cache_memory_bytes")
        asked = config.max_model_len is not None or config.kv_cache_memory_bytes is not None
        return not (is_size and asked) and config.gpu_memory_utilization >= USUAL_SHARE

    def _may_be_slower(self, plan: MemoryPlan) -> bool:
        """Return whether the CPU alone could answer earlier than this plan: it multiplies faster, or reading all from
        RAM takes less time than reading the GPU's memory and waiting for the CPU in each layer."""
        gpu = next((gpu for gpu in self.hardware.gpus if f"cuda:{gpu.index}" == plan.device), None)
        ram, near = self.hardware.speeds.ram, None if gpu is None else gpu.place.bandwidth
        if plan.work is None or ram is None or near is None:
            return False
        read = plan.work.dense_bytes + plan.work.expert_bytes
        crossings = 0 if plan.far is None else len(plan.far.layers)
        if gpu is not None and (gpu.place.multiplies or math.inf) < (self.hardware.speeds.narrow or 0.0):
            return True
        return read / (RAM_SHARE * ram) < read / (GPU_SHARE * near) + crossings * CROSSING_S

    def _or_cpu(self, plan: MemoryPlan | None) -> MemoryPlan | None:
        """Return the plan for the CPU alone if it is the quicker one, or the only one and not too slow."""
        try:
            found = self._with_work(replace(self, config=replace(self.config, device="cpu"))._one())
        except LocalLLMError:  # it does not fit, or a flag does not go with a CPU
            return plan
        if plan is not None:
            return quickest([plan, found], self.hardware)
        speed = predict(found, self.hardware)
        if speed is not None and speed.decode[1] < SLOW_TOKENS_PER_S:
            return None
        note = "The GPU does not hold this model: it runs on the CPU"
        return replace(found, notes=(*found.notes, f"{note}{'' if speed is None else f', {speed.words()}'}."))

    def _or_disk(self) -> MemoryPlan | None:
        """Return the plan with experts on disk; None: they cannot be there, or would be too slow or at an unknown
        speed to be chosen by themselves."""
        try:
            found = self._with_work(replace(self, config=replace(self.config, weights_on="disk"))._one())
        except LocalLLMError:  # not a mixture, or a flag that does not go with it
            return None
        speed = predict(found, self.hardware)
        return found if speed is not None and speed.decode[0] >= SLOW_TOKENS_PER_S else None

    def _with_work(self, plan: MemoryPlan) -> MemoryPlan:
        work = work_of(plan, self.spec, self.resident_bytes, self.config.quantization)
        return replace(plan, work=work)

    def _one(self) -> MemoryPlan:
        gpu = choose_gpu(self.config, self.hardware)
        choice = FarChoice(self.config, self.spec, self.resident_bytes, gpu)
        if not self.measured and self.far is None:
            choice.require_possible()
        return _check_deterministic(self._on(gpu, choice))

    def _on(self, gpu: Gpu | None, choice: FarChoice) -> MemoryPlan:
        """Plan for one device. By itself a GPU holds all of a model if a useful context fits beside it; otherwise
        lookup tables are in RAM, and as few layers of experts as are needed then."""
        whole = self._attempt([gpu])
        asked, needs_tables = self.config.far_layers, self.config.cpu_embeddings == "on"
        if self.config.weights_on == "disk" and self.far is None and not self.measured:
            return self._on_disk(whole, choice)
        if gpu is None or self.measured or self.far is not None:
            return self._noted(whole) if gpu is None and (asked or needs_tables) else whole.plan()
        useful = min(USEFUL_CONTEXT, self.config.max_model_len or self.spec.max_position)
        if not (asked or needs_tables) and whole.holds(useful):
            return whole.plan()
        may_move = not choice.why_none and asked != 0
        tables = choice.tables(whole.dtype)
        experts = choice.experts(whole.dtype) if may_move else ()
        if tables.movable and not needs_tables and asked and may_move:  # a useful context may fit beside them
            moved = last_layers(experts, choice.asked(experts) or 0)
            if self._attempt([gpu], far=far_plan(experts, moved, self.spec, tables.near())).holds(useful):
                tables = tables.near()
        lighter = whole
        if tables.movable:
            lighter = self._attempt([gpu], far=far_plan((), (), self.spec, tables))
        found = None
        if may_move and (asked or lighter is whole or not lighter.holds(useful)):
            found = self._with_layers(gpu, choice, experts, tables, useful)
        return self._in_ram(found or lighter, whole, choice)

    def _in_ram(self, found: PlanAttempt, whole: PlanAttempt, choice: FarChoice) -> MemoryPlan:
        """Return the plan of an attempt, or the plan with all of the model on the GPU if RAM is too small and no
        setting asks for parts there: a short context is better than none."""
        if found.far is None:
            return found.plan()
        try:
            choice.require_ram(found.far, found.ranks[0].weights(1), *free_and_reserve(self.hardware, None))
        except DoesNotFit as error:
            if not self.config.ram_flag and whole.holds(MIN_CONTEXT):
                return whole.plan()
            raise found.refused_with(error) from None
        found.notes.append(found.far.words())
        return found.plan()

    def _with_layers(
        self, gpu: Gpu, choice: FarChoice, experts: Sequence[LayerExperts], tables: LookupTables, useful: int
    ) -> PlanAttempt | None:
        """Return the attempt with the experts of some layers in RAM; None: not even all of them are enough."""

        @cache
        def attempt(layers: tuple[int, ...], steps: int | None, streams: bool) -> PlanAttempt:
            config = self.config if steps is None else replace(self.config, max_num_batched_tokens=steps)
            far = far_plan(experts, layers, self.spec, tables, streams=streams)
            return replace(self, config=config)._attempt([gpu], far=far)

        def chosen(steps: int | None, *, streams: bool) -> tuple[int, ...] | None:
            return self._far_layers(choice, experts, lambda layers: attempt(layers, steps, streams).holds(useful))

        layers, is_demand = chosen(None, streams=False), self.config.stream_prompts.isdecimal()
        if not layers:
            return None
        # Long prompts on the GPU are worth a few more layers in RAM, for the buffers and for longer steps.
        most = len(experts) if is_demand else len(layers) + most_more(len(experts))
        lengths = LONG_STEPS if self.config.max_num_batched_tokens is None else ()
        for tokens in (*lengths, None) if self.config.streams_prompts else ():
            context = MIN_CONTEXT if tokens is None and choice.asked(experts) is not None else useful
            more = chosen(tokens, streams=True)
            if more is not None and len(more) <= most and attempt(more, tokens, True).holds(context):
                return attempt(more, tokens, True)
        return attempt(layers, None, is_demand)

    def _on_disk(self, whole: PlanAttempt, choice: FarChoice) -> MemoryPlan:
        """Plan with experts on disk: on a GPU of as few layers as a useful context needs, on a CPU of all."""
        experts = choice.experts(whole.dtype)
        useful = min(USEFUL_CONTEXT, self.config.max_model_len or self.spec.max_position)
        every, tables = last_layers(experts, len(experts)), choice.tables(whole.dtype).near()

        def attempt(layers: Collection[int], room: int | None = None) -> PlanAttempt:
            far = far_plan(experts, layers, self.spec, tables)
            far = replace(far, ram_bytes=0) if room is None else choice.on_disk(far, room)
            return self._attempt([choice.gpu], far=far)

        layers = every
        if choice.gpu is not None:
            layers = self._far_layers(choice, experts, lambda layers: attempt(layers).holds(useful)) or every
        free, reserve = free_and_reserve(self.hardware, None)
        rest = attempt(layers)
        room = free - reserve - (rest.bytes_with(useful) if choice.gpu is None else 0)
        try:
            moved = attempt(layers, room)
        except DoesNotFit as error:
            raise rest.refused_with(error) from None
        assert moved.far is not None
        moved.notes.append(moved.far.words())
        return moved.plan()

    def _far_layers(
        self, choice: FarChoice, experts: Sequence[LayerExperts], holds: Callable[[tuple[int, ...]], bool]
    ) -> tuple[int, ...] | None:
        """Return the layers whose experts leave the GPU: the last ones that the settings ask for, else those that make
        a token the least slower, as few as are needed. None: not even all of them are enough."""
        count = choice.asked(experts)
        if count is not None:
            return last_layers(experts, count)
        count = fewest_layers(len(experts), lambda count: holds(last_layers(experts, count)))
        if count is None or len({each[1:] for each in experts}) == 1:
            return None if count is None else last_layers(experts, count)
        # Layers of several sizes: find how many bytes are missing, then the layers that have them.
        assert choice.gpu is not None
        mixture = self.spec.mixture
        used = 1.0 if mixture is None else mixture.top_k / mixture.num_experts
        ram, near = self.hardware.speeds.ram or USUAL_RAM, choice.gpu.place.bandwidth or USUAL_GPU

        def token_s_of(each: LayerExperts) -> float:
            read_s = each.ram_bytes / (RAM_SHARE * ram) - each.gpu_bytes / (GPU_SHARE * near)
            return used * read_s + CROSSING_S

        low, high = (sum(each.gpu_bytes for each in experts[len(experts) - n :]) for n in (count - 1, count))
        found = last_layers(experts, count)
        while high - low > FINE_BYTES:
            middle = (low + high) // 2
            layers = quickest_layers(experts, middle, token_s_of)
            if holds(layers):
                high, found = middle, layers
            else:
                low = middle
        return found

    def _noted(self, attempt: PlanAttempt) -> MemoryPlan:
        attempt.notes.append(f"{self.config.ram_flag} changes nothing: on the CPU all weights are in RAM.")
        return attempt.plan()

    def _several(self, division: Division, gpus: Sequence[Gpu] = (), note: str = "") -> MemoryPlan:
        chosen = gpus or choose_gpus(self.config, self.hardware, division.num_ranks)
        if not chosen and self.config.deterministic:
            raise _deterministic_ranks()
        if chosen:
            require_shared_memory(self.hardware, division.num_ranks)
        places: list[Gpu | None] = [*chosen] if chosen else [None] * division.num_ranks
        attempt = self._attempt(places, division)
        attempt.notes += filter(None, (note, attempt.split_note()))
        return attempt.plan()

    def _attempt(
        self, gpus: Sequence[Gpu | None], division: Division | None = None, shards: Sequence[Shard] = (),
        far: FarPlan | None = None,
    ) -> PlanAttempt:  # fmt: skip
        far, is_loaded = (self.far, True) if self.far is not None else (far, False)
        hardware = self.hardware
        if far is not None:  # KV blocks that leave the cache share the RAM
            left = max(0, hardware.ram_available_bytes - far.ram_bytes)
            hardware = replace(hardware, ram_available_bytes=left)
        return PlanAttempt(
            self.config, self.spec, self.stored_bytes, hardware, gpus, self.resident_bytes, self.measured,
            division or Division(), shards, far, far_is_loaded=is_loaded,
        )  # fmt: skip

    # -- automatic

    def _may_use_several(self) -> bool:
        """Return whether more than one GPU could be used: several, none of them named, and a model that divides."""
        gpus = [gpu for gpu in gpus_of(self.config, self.hardware) if gpu.is_supported]
        free = self.config.device == "auto" or (self.config.device == "cuda" and bool(self.config.device_ids))
        divides = self.spec.implementation == "localllm" and divides_by_layers(self.spec)
        return len(gpus) > 1 and free and not self.measured and divides and not self.config.moves_experts

    def _least(self) -> MemoryPlan:
        """Plan for as few GPUs as hold the model with a useful context; failing that, for the longest context. Experts
        are in RAM only if all GPUs together do not hold them."""
        useful = min(USEFUL_CONTEXT, self.config.max_model_len or self.spec.max_position)
        gpus = [gpu for gpu in gpus_of(self.config, self.hardware) if gpu.is_supported]
        resident, found = self.resident_bytes, list[MemoryPlan]()
        whole = resident.whole if isinstance(resident, CheckpointBytes) else resident
        refused: DoesNotFit | None = None
        for count in range(1, min(len(gpus), self.spec.num_layers) + 1):
            try:
                plan = self._of_gpus(count, found) if count > 1 else replace(self, resident_bytes=whole)._one()
            except DoesNotFit as error:
                refused = error
                continue
            if plan.max_model_len >= useful:
                note = f"One of {len(gpus)} GPUs holds the model with a context of {format_count(plan.max_model_len)}."
                return plan if plan.ranks else replace(plan, notes=(*plan.notes, note))
            found.append(plan)
        if resident is not whole and self.config.far_layers is None:
            with suppress(DoesNotFit):
                plan = self._one()
                found += [plan] if plan.far is not None else []
        if found:
            return max(found, key=lambda plan: plan.max_model_len)
        assert refused is not None
        raise refused

    def _of_gpus(self, count: int, found: Sequence[MemoryPlan]) -> MemoryPlan:
        gpus = choose_gpus(self.config, self.hardware, count)
        division, why = choose_kind(self.spec, gpus, self._attempt([gpus[0]]).ranks[0].weights(1), self.config)
        fewer = "One GPU does" if count == 2 else f"{count - 1} GPUs do"
        short = f" with more than {format_count(found[-1].max_model_len)} tokens of context" if found else ""
        return self._several(division, gpus, f"{fewer} not hold this model{short}. {why}")
