"""The memory plan: combines the request, the checkpoint and the machine into sizes, by arithmetic without a device.

`plan_memory` decides the device, the dtype, the context length and the number of KV blocks, or refuses with the
numbers and with flags that would work.

    budget      CUDA: (free - reserve) x gpu_memory_utilization      CPU: available RAM - reserve
    weights     exact, from the file headers, as the loader will hold them
    activations the largest memory of one step (step.py)
    KV cache    CUDA: the rest of the budget      CPU: a bounded part of it (see `_default_blocks`)

The budget starts from *free* memory, not from the total, as a GPU often drives a desktop too.
Does not know: torch, files, how the memory is used (loader.py, runner/kv_cache.py), alternatives (options.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from localllm.config.settings import EngineConfig
from localllm.errors import ConfigError, DoesNotFit, UnsupportedOption
from localllm.machine.hardware import Gpu, Hardware
from localllm.models.architectures.registry import FAMILY_OF
from localllm.models.fit.devices import (
    choose_gpu,
    choose_gpus,
    free_and_reserve,
    gpus_of,
    require_shared_memory,
    too_old,
)
from localllm.models.fit.parallel import USEFUL_CONTEXT, asked_division, choose_kind, exchange_note, require_possible
from localllm.models.fit.rank import Measured, PlanInputs, RankMemory, RankPlan, ResidentBytes
from localllm.models.fit.shares import (
    Division,
    ModelBytes,
    count_shard,
    feature_unit,
    model_bytes,
    split_in_words,
    split_model,
)
from localllm.models.fit.split import SplitDevice
from localllm.models.fit.step import DTYPE_BYTES
from localllm.models.formats.at_load import at_load, quantization_in_words, quantization_notes
from localllm.models.spec.model_spec import ModelSpec
from localllm.models.spec.shard import Shard
from localllm.units import format_bytes, format_count

KV_DTYPES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "int8": "int8"}  # flag value -> torch's name
BLOCK_SIZE_CPU, BLOCK_SIZE_GPU = 16, 64  # a GPU reads a block of 64 tokens as one tile
MIN_CONTEXT = 256  # the smallest context worth starting with
SPLIT_CONTEXT = 16_384  # the context of one request for which shares are balanced, unless the user names one
CPU_CONTEXTS, CPU_CONTEXT_LEN = 16, 4096  # the default KV cache on CPU holds this many contexts of this length
CPU_KV_SHARE = 0.5  # and takes at most this share of the memory after weights and activations


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The sizes of an engine on this machine. The engine uses every number as it is.

    With several ranks, bytes are sums over all of them; on a CPU, where ranks share the memory, free_bytes and
    reserve_bytes are those of the machine.
    """

    device: str  # cpu, cuda:0, ...; of the first rank
    dtype: str  # of weights and activations
    kv_dtype: str  # of the KV cache
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    long_prefill_token_threshold: int
    num_blocks: int  # the null block 0 included
    block_size: int
    weights_bytes: int  # on the device, in `dtype`
    kv_bytes: int  # num_blocks blocks, exactly
    activation_bytes: int
    reserve_bytes: int  # left free: device context, libraries, other programs
    free_bytes: int  # free memory of the device when the plan was made
    async_depth: int  # steps in flight, 1 or 2
    graph_bytes: int = 0  # kept for CUDA graphs
    sampler_bytes: int = 0  # part of activation_bytes: what sampling needs beyond the layers
    is_measured: bool = False  # weights and activations come from the allocator, not from arithmetic
    quantization: str = ""  # how matrices are stored and run, for display; empty: not quantised
    notes: tuple[str, ...] = ()  # decisions to show to the user, one sentence each
    comm_bytes: int = 0  # of the exchange between ranks
    ranks: tuple[RankPlan, ...] = ()  # stage after stage; empty: one device, in this process

    @property
    def num_kv_tokens(self) -> int:
        """Token positions that requests can hold at the same time."""
        return (self.num_blocks - 1) * self.block_size

    @property
    def total_bytes(self) -> int:
        """Bytes that the model is expected to use."""
        return self.weights_bytes + self.kv_bytes + self.activation_bytes + self.graph_bytes + self.comm_bytes

    @property
    def unused_bytes(self) -> int:
        """Free memory that the plan leaves unused, besides the reserve."""
        return max(0, self.free_bytes - self.reserve_bytes - self.total_bytes)

    def concurrency(self, length: int) -> int:
        """Return how many requests of this length run at the same time; 0: too long for the context."""
        if length > self.max_model_len:
            return 0
        return min(self.max_num_seqs, (self.num_blocks - 1) // -(-length // self.block_size))


def make_plan(
    config: EngineConfig,
    spec: ModelSpec,
    weights_bytes: int,
    hardware: Hardware,
    *,
    resident_bytes: ResidentBytes | None = None,
    measured: Measured | Sequence[Measured] | None = None,
    ranks: Sequence[RankPlan] = (),
) -> MemoryPlan:
    """Return the plan. Raises `DoesNotFit`, `ConfigError`, `UnsupportedOption` with numbers and the next flag to try.

    weights_bytes: of the checkpoint as stored (models/spec/ reads it from the headers). resident_bytes: what the
    loader will hold; without it, the stored bytes are scaled to the dtype. measured: replaces both and the computed
    activations once the model is loaded, one for each rank. ranks: of a loaded model, whose devices and shards stay.
    hardware: memory as it was before the load.
    """
    at_load(config.quantization, spec.quantization)
    _check_position_limit(config, spec)
    seen = () if measured is None else (measured,) if isinstance(measured, Measured) else tuple(measured)
    planner = _Planner(config, spec, weights_bytes, hardware, resident_bytes, seen)
    return planner.for_ranks(ranks) if ranks else planner.choose()


def _deterministic_on_cpu(config: EngineConfig, spec: ModelSpec) -> UnsupportedOption:
    why = "On a CPU the summation order of the matrix libraries depends on the batch size."
    hint = "Leave the flag out: in float32, the default on a CPU, only the last bits differ."
    if config.cpu_weights != "exact" and (spec.quantization is not None or config.quantization is not None):
        why += (
            f" --cpu-weights {config.cpu_weights} also rounds depending on the batch: logprobs differ by 0.01 to 0.1."
        )
        hint = "Use --cpu-weights exact instead: it is slower, and only the last bits of float32 differ."
    return UnsupportedOption("--deterministic needs a GPU.", why, hint, param="deterministic")


# ---- checks of the settings ------------------------------------------------------------------------------------------


def _check_position_limit(config: EngineConfig, spec: ModelSpec) -> None:
    if config.max_model_len is not None and config.max_model_len > spec.max_position:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is longer than this model's context.",
            f"It was trained for {format_count(spec.max_position)} positions.",
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

    def choose(self) -> MemoryPlan:
        division = asked_division(self.config)
        require_possible(self.spec, division or Division(), len(self.hardware.gpus))
        if division is not None and division.num_ranks > 1:
            return self._several(division)
        if division is None and self._may_use_several():
            return self._least()
        return self._one()

    def for_ranks(self, ranks: Sequence[RankPlan]) -> MemoryPlan:
        """Plan for the ranks of a loaded model."""
        by_device = {f"cuda:{gpu.index}": gpu for gpu in self.hardware.gpus}
        gpus = [by_device.get(rank.device) for rank in ranks]
        return self._attempt(gpus, shards=[rank.shard for rank in ranks]).plan()

    def _one(self) -> MemoryPlan:
        gpu = choose_gpu(self.config, self.hardware)
        if gpu is None and self.config.deterministic:
            raise _deterministic_on_cpu(self.config, self.spec)
        return self._attempt([gpu]).plan()

    def _several(self, division: Division, gpus: Sequence[Gpu] = (), note: str = "") -> MemoryPlan:
        chosen = gpus or choose_gpus(self.config, self.hardware, division.num_ranks)
        if not chosen and self.config.deterministic:
            raise _deterministic_on_cpu(self.config, self.spec)
        if chosen:
            require_shared_memory(self.hardware, division.num_ranks)
        places: list[Gpu | None] = [*chosen] if chosen else [None] * division.num_ranks
        attempt = self._attempt(places, division)
        attempt.notes += filter(None, (note, attempt.split_note()))
        return attempt.plan()

    def _attempt(
        self, gpus: Sequence[Gpu | None], division: Division | None = None, shards: Sequence[Shard] = ()
    ) -> _PlanAttempt:
        return _PlanAttempt(
            self.config, self.spec, self.stored_bytes, self.hardware, gpus, self.resident_bytes, self.measured,
            division or Division(), shards,
        )  # fmt: skip

    # -- automatic

    def _may_use_several(self) -> bool:
        """Return whether more than one GPU could be used: several, none of them named, and a model that divides."""
        gpus = [gpu for gpu in gpus_of(self.config, self.hardware) if gpu.is_supported]
        free = self.config.device == "auto" or (self.config.device == "cuda" and bool(self.config.device_ids))
        return len(gpus) > 1 and free and not self.measured and self.spec.implementation == "localllm"

    def _least(self) -> MemoryPlan:
        """Plan for as few GPUs as hold the model with a useful context; failing that, for the longest context."""
        useful = min(USEFUL_CONTEXT, self.config.max_model_len or self.spec.max_position)
        gpus = [gpu for gpu in gpus_of(self.config, self.hardware) if gpu.is_supported]
        found: list[MemoryPlan] = []
        refused: DoesNotFit | None = None
        for count in range(1, min(len(gpus), self.spec.num_layers) + 1):
            try:
                plan = self._one() if count == 1 else self._of_gpus(count, found)
            except DoesNotFit as error:
                refused = error
                continue
            if plan.max_model_len >= useful:
                note = f"One of {len(gpus)} GPUs holds the model with a context of {format_count(plan.max_model_len)}."
                return plan if plan.ranks else replace(plan, notes=(*plan.notes, note))
            found.append(plan)
        if found:
            return max(found, key=lambda plan: plan.max_model_len)
        assert refused is not None
        raise refused

    def _of_gpus(self, count: int, found: Sequence[MemoryPlan]) -> MemoryPlan:
        gpus = choose_gpus(self.config, self.hardware, count)
        division, why = choose_kind(self.spec, gpus, self._whole_bytes(gpus[0]), self.config)
        fewer = "One GPU does" if count == 2 else f"{count - 1} GPUs do"
        short = f" with more than {format_count(found[-1].max_model_len)} tokens of context" if found else ""
        return self._several(division, gpus, f"{fewer} not hold this model{short}. {why}")

    def _whole_bytes(self, gpu: Gpu) -> float:
        attempt = self._attempt([gpu])
        return attempt.ranks[0].weights(1)


# ---- sizes -----------------------------------------------------------------------------------------------------------


class _PlanAttempt:
    """One planning attempt on given devices: its inputs, its ranks' budgets, and what fits."""

    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        stored_bytes: int,
        hardware: Hardware,
        gpus: Sequence[Gpu | None],
        resident_bytes: ResidentBytes | None,
        measured: Sequence[Measured],
        division: Division,
        shards: Sequence[Shard],
    ) -> None:
        self.config, self.spec, self.hardware, self.division = config, spec, hardware, division
        self.gpus, self.measured = gpus, measured
        self.gpu = min((gpu for gpu in gpus if gpu), key=lambda gpu: gpu.compute_capability, default=None)
        self.stored_bytes, self.resident_bytes = stored_bytes, resident_bytes or self._scaled
        self.notes: list[str] = self._first_notes()
        self.places = [free_and_reserve(hardware, gpu) for gpu in gpus]
        share = config.gpu_memory_utilization if self.gpu else 1.0
        self.budgets = [int(max(0, free - reserve) * share) for free, reserve in self.places]
        self.dtype = self._choose_dtype()
        self._refuse_latents()
        kv_dtype = KV_DTYPES.get(config.kv_cache_dtype, self.dtype)
        batched = config.max_num_batched_tokens or (2048 if self.gpu else 1024)
        size = config.block_size or (BLOCK_SIZE_GPU if self.gpu else BLOCK_SIZE_CPU)
        self.inputs = PlanInputs(config, spec, self.dtype, kv_dtype, size, batched, self.resident_bytes)
        self.shards = shards or (self._split() if len(gpus) > 1 else ())
        self.ranks = self._rank_memories(self.shards)
        self.block_bytes = sum(rank.block_bytes for rank in self.ranks)

    def _first_notes(self) -> list[str]:
        spec, config, notes = self.spec, self.config, list(quantization_notes(self.spec.quantization))
        if spec.architecture in FAMILY_OF and (note := FAMILY_OF[spec.architecture].note):
            notes.append(note)
        if config.trust_remote_code and spec.implementation != "remote":
            notes.append("--trust-remote-code changes nothing: this model needs no code of its checkpoint.")
        if self.gpu is None and config.device == "auto":
            notes += [f"{too_old(each)} The model runs on the CPU." for each in self.hardware.gpus[:1]]
        return notes

    def plan(self) -> MemoryPlan:
        self._require_weights()
        max_model_len = self._choose_context()
        plan = self._plan_for(max_model_len, self._num_blocks(max_model_len))
        return replace(plan, notes=(*self.notes, *self._closing_notes(plan)))

    def _plan_for(self, max_model_len: int, num_blocks: int) -> MemoryPlan:
        """Return the plan for this context and cache, whether it fits or not."""
        ranks, inputs = self.ranks, self.inputs
        places = self.places if self.gpu else self.places[:1]  # on a CPU all ranks share the memory
        return MemoryPlan(
            device=ranks[0].device,
            dtype=self.dtype,
            kv_dtype=inputs.kv_dtype,
            max_model_len=max_model_len,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=inputs.batched_tokens,
            long_prefill_token_threshold=self._long_prefill_threshold(),
            num_blocks=num_blocks,
            block_size=inputs.block_size,
            weights_bytes=sum(rank.weights(max_model_len) for rank in ranks),
            kv_bytes=num_blocks * self.block_bytes,
            activation_bytes=sum(rank.activations(max_model_len, num_blocks) for rank in ranks),
            reserve_bytes=sum(reserve for _, reserve in places),
            free_bytes=sum(free for free, _ in places),
            async_depth=self._async_depth(),
            graph_bytes=sum(rank.graphs for rank in ranks),
            sampler_bytes=sum(rank.sampler_bytes(max_model_len, num_blocks) for rank in ranks),
            is_measured=bool(self.measured),
            quantization=quantization_in_words(
                self.spec.quantization, self.config.quantization, ranks[0].device, self.config.cpu_weights
            ),
            comm_bytes=sum(rank.comm for rank in ranks),
            ranks=self._rank_plans(max_model_len, num_blocks),
        )

    # -- ranks

    def _rank_memories(self, shards: Sequence[Shard]) -> list[RankMemory]:
        own: Sequence[Shard | None] = shards or [None] * len(self.gpus)
        seen: Sequence[Measured | None] = self.measured or [None] * len(self.gpus)
        return [RankMemory(self.inputs, *each) for each in zip(self.gpus, self.budgets, own, seen, strict=True)]

    def _rank_plans(self, max_model_len: int, num_blocks: int) -> tuple[RankPlan, ...]:
        if not self.shards:
            return ()
        stages = sorted({shard.layers.start for shard in self.shards})
        return tuple(
            rank.plan(stages.index(shard.layers.start), max_model_len, num_blocks, *place)
            for rank, shard, place in zip(self.ranks, self.shards, self.places, strict=True)
        )

    def _split(self) -> list[Shard]:
        """Divide the model by the memory that each rank has left, counted with even shares first."""
        sizes, unit = self._sizes(), feature_unit(self.spec.quantization, self.config.quantization)
        shares = self.budgets if self.gpu else [budget // len(self.gpus) for budget in self.budgets]
        even = split_model(self.spec, [SplitDevice(1, 1)] * len(self.gpus), self.division, sizes, 0, unit)
        length = self.config.max_model_len or min(self.spec.max_position, SPLIT_CONTEXT)
        devices = [
            SplitDevice(share - rank.activations(length, 0) - rank.graphs - rank.comm, speed)
            for rank, share, speed in zip(self._rank_memories(even), shares, self._speeds(), strict=True)
        ]
        return split_model(self.spec, devices, self.division, sizes, length, unit)

    def _speeds(self) -> list[float]:
        """Return the memory bandwidth of each rank, or 1 for all of them if one is not known."""
        speeds = [gpu.place.bandwidth if gpu else None for gpu in self.gpus]
        return [1.0] * len(speeds) if None in speeds else [speed or 1.0 for speed in speeds]

    def _sizes(self) -> ModelBytes:
        device = f"cuda:{self.gpu.index}" if self.gpu else "cpu"
        resident = self.resident_bytes(device, self.dtype, 1, self.config.quantization)
        return model_bytes(self.spec, resident, DTYPE_BYTES[self.dtype], self.inputs.kv_dtype)

    def _scaled(
        self, device: str, dtype: str, max_model_len: int, quantization: str | None, shard: Shard | None = None, /
    ) -> int:
        """Scale the stored bytes to the dtype, and to a rank's share by arithmetic."""
        whole = math.ceil(self.stored_bytes * DTYPE_BYTES[dtype] / DTYPE_BYTES[self.spec.dtype])
        return whole if shard is None else count_shard(self.spec, shard, whole, dtype)

    def split_note(self) -> str:
        """Return what the shares became, and what their exchanges cost."""
        words = split_in_words(self.spec, self.shards)
        weights = sum(rank.weights(1) for rank in self.ranks)
        return " ".join(
            filter(None, (f"{words}." if words else "", exchange_note(self.spec, self.gpus, weights, self.division)))
        )

    # -- dtype

    def _choose_dtype(self) -> str:
        asked = self.config.dtype
        if self.gpu is None:
            return self._cpu_dtype() if asked == "auto" else asked
        if asked == "bfloat16" and not self.gpu.supports_bfloat16:
            raise UnsupportedOption(
                f"--dtype bfloat16 is not supported by {self.gpu.name}.",
                f"It needs compute capability 8.0; this GPU has {_capability_name(self.gpu)}.",
                "--dtype float16",
                param="dtype",
            )
        if asked == "auto" and self.spec.dtype == "bfloat16" and not self.gpu.supports_bfloat16:
            self.notes.append(
                f"float16 instead of the checkpoint's bfloat16: {self.gpu.name} has compute capability "
                f"{_capability_name(self.gpu)}, bfloat16 needs 8.0."
            )
            return "float16"
        return self.spec.dtype if asked == "auto" else asked

    def _refuse_latents(self) -> None:
        """Refuse latent attention where its kernels cannot run: its long rows need 16-bit matrix units."""
        if self.gpu is None or self.spec.latent is None:
            return
        if self.gpu.compute_capability < (8, 0):
            raise UnsupportedOption(
                f"Latent attention is not supported by {self.gpu.name}.",
                f"Its kernels need compute capability 8.0; this GPU has {_capability_name(self.gpu)}.",
                "--device cpu",
                param="device",
            )
        if self.dtype == "float32":
            raise UnsupportedOption(
                "Latent attention does not run in float32 on a GPU.",
                "A float32 tile of the keys takes more shared memory and registers than most GPUs have.",
                "--dtype bfloat16",
                param="dtype",
            )

    def _cpu_dtype(self) -> str:
        """Choose float32, which is faster on most CPUs, or bfloat16, which halves the memory of unquantised weights."""
        count, quantization = self.resident_bytes, self.config.quantization
        as_float32, as_bfloat16 = (count("cpu", dtype, MIN_CONTEXT, quantization) for dtype in ("float32", "bfloat16"))
        if 2 * as_float32 <= self.budgets[0] or as_bfloat16 == as_float32:
            return "float32"
        self.notes.append(
            f"bfloat16 instead of float32: in float32 the weights would take {format_bytes(as_float32)}, more than "
            f"half of the usable {format_bytes(self.budgets[0])}. --dtype float32 forces float32."
        )
        return "bfloat16"

    # -- sizes

    def _blocks_for(self, tokens: int) -> int:
        """Return the blocks that one request of this length needs, plus the null block."""
        return math.ceil(tokens / self.inputs.block_size) + 1

    def _budgets_at(self, max_model_len: int) -> list[int]:
        """Return each rank's budget. On a CPU ranks share one: each gets what it needs, and the rest goes to caches."""
        if self.gpu is not None or len(self.ranks) == 1:
            return self.budgets
        fixed = [rank.fixed_bytes(max_model_len) for rank in self.ranks]
        rest = self.budgets[0] - sum(fixed)
        return [
            need + rest * rank.block_bytes // self.block_bytes for need, rank in zip(fixed, self.ranks, strict=True)
        ]

    def _blocks_left(self, max_model_len: int) -> int:
        budgets = self._budgets_at(max_model_len)
        return min(rank.blocks_within(own, max_model_len) for rank, own in zip(self.ranks, budgets, strict=True))

    def _num_blocks(self, max_model_len: int) -> int:
        left = self._blocks_left(max_model_len)
        if self.config.kv_cache_memory_bytes is not None:
            return min(left, self.config.kv_cache_memory_bytes // self.block_bytes)
        return left if self.gpu else self._default_blocks(max_model_len, left)

    def _default_blocks(self, max_model_len: int, left: int) -> int:
        """Return a CPU's default KV blocks: one full or several modest contexts, within a share of the memory left."""
        contexts = min(self.config.max_num_seqs, CPU_CONTEXTS)
        tokens = max(max_model_len, contexts * min(max_model_len, CPU_CONTEXT_LEN))
        return min(int(left * CPU_KV_SHARE), self._blocks_for(tokens))

    def _context_fits(self, max_model_len: int) -> bool:
        """Return whether this context fits, together with the requested size of the cache if there is one."""
        asked = self.config.kv_cache_memory_bytes or 0
        has_blocks = self._num_blocks(max_model_len) >= self._blocks_for(max_model_len)
        return has_blocks and asked <= self._blocks_left(max_model_len) * self.block_bytes

    def _largest_context(self) -> int:
        """Return the longest context that fits, 0 if none does, by bisection (fitting is monotone)."""
        if self._context_fits(self.spec.max_position):
            return self.spec.max_position
        low, high = 0, math.ceil(self.spec.max_position / self.inputs.block_size)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._context_fits(middle * self.inputs.block_size) else (low, middle)
        return low * self.inputs.block_size

    # -- decisions and refusals

    def _require_weights(self) -> None:
        least = min(MIN_CONTEXT, self.config.max_model_len or MIN_CONTEXT, self.spec.max_position)
        blocks = self._blocks_for(least)
        needs = [rank.needs(least, blocks) for rank in self.ranks]
        if self.gpu is None:
            needs = [sum(needs)] * len(needs)
        short = [index for index, need in enumerate(needs) if need > self.budgets[index]]
        if not short:
            return
        error = self._rank_too_small(short[0], needs) if self.gpu and self.shards else self._too_small(needs[0], least)
        error.plan = self._plan_for(least, blocks)
        raise error

    def _too_small(self, need: int, least: int) -> DoesNotFit:
        weights = sum(rank.weights(least) for rank in self.ranks)
        return DoesNotFit(
            f"The model does not fit {self._place()}.",
            f"Weights need {format_bytes(weights)} in {self.dtype}, with one short request and a step of "
            f"{format_count(self.inputs.batched_tokens)} tokens {format_bytes(need)}; the budget is "
            f"{format_bytes(self.budgets[0])} ({self._budget_in_words()}).",
            self._room_hint(need),
        )

    def _rank_too_small(self, index: int, needs: Sequence[int]) -> DoesNotFit:
        rank, (free, reserve) = self.ranks[index], self.places[index]
        assert rank.gpu is not None
        return DoesNotFit(
            f"Rank {index} ({rank.device}, {rank.gpu.name}) has {format_bytes(rank.budget)} and needs "
            f"{format_bytes(needs[index])}.",
            f"{format_bytes(free)} are free, {format_bytes(reserve)} kept in reserve, utilisation "
            f"{self.config.gpu_memory_utilization:g}; weights take {format_bytes(rank.weights(1))}.",
            self._rank_hint(needs),
            param="tensor_parallel_size",
        )

    def _rank_hint(self, needs: Sequence[int]) -> str:
        """Return what would give each rank a share that it holds: other shares, a pipeline, a smaller model."""
        division, hints = self.division, []
        whole, budget = sum(needs), sum(self.budgets)
        if division.shares:
            gib = [max(1, round(own / 1024**3)) for own in self.budgets[: division.tensor]]
            hints.append(f"--tensor-split {','.join(map(str, gib))}")
        if division.layers:
            hints.append("leave out --pipeline-layer-partition")
        if division.tensor > 1 and whole <= budget:
            hints.append(f"-pp {division.num_ranks}")
        hints += ["more GPUs"] if whole > budget else []
        return f"{', '.join([*hints, 'a smaller model'])} or a higher --gpu-memory-utilization."

    def _room_hint(self, need: int) -> str:
        usable = max(1, self.places[0][0] - self.places[0][1])
        if self.gpu is not None and need <= usable:
            return f"--gpu-memory-utilization {math.ceil(need / usable * 100) / 100:.2f} is the smallest that works."
        half = "--dtype bfloat16, " if self.dtype == "float32" else ""
        cpu = " or --device cpu" if self.gpu is not None else ""
        return f"{half}a smaller model, fewer --max-num-seqs or --max-num-batched-tokens{cpu}."

    def _choose_context(self) -> int:
        asked, largest = self.config.max_model_len, self._largest_context()
        self._require_kv_budget()
        if asked is not None and asked > largest:
            self._refuse_context(asked, largest)
        if asked is None and largest < min(MIN_CONTEXT, self.spec.max_position):
            self._refuse_context(min(MIN_CONTEXT, self.spec.max_position), largest)
        if asked is None and largest < self.spec.max_position:
            self.notes.append(
                f"Context {format_count(largest)} of the model's {format_count(self.spec.max_position)} tokens: "
                "the KV cache holds no more."
            )
        return asked if asked is not None else largest

    def _require_kv_budget(self) -> None:
        length = self.config.max_model_len or MIN_CONTEXT
        asked, left = self.config.kv_cache_memory_bytes, self._blocks_left(length) * self.block_bytes
        if asked is not None and asked > left:
            raise DoesNotFit(
                f"--kv-cache-memory-bytes {format_bytes(asked)} does not fit {self._place()}.",
                f"{format_bytes(left)} are left ({self._budget_in_words()}) after the weights, "
                f"which take {format_bytes(sum(rank.weights(length) for rank in self.ranks))}.",
                "Leave out the flag, or set a smaller size.",
                param="kv_cache_memory_bytes",
            )

    def _refuse_context(self, asked: int, largest: int) -> None:
        need, planned = (n * self.block_bytes for n in (self._blocks_for(asked), self._num_blocks(asked)))
        options = [f"--max-model-len {largest}"] if largest else []
        place, budget, cache = self._place(), self._budget_in_words(), self.config.kv_cache_memory_bytes
        if cache is not None and need > cache:
            place, budget = "into the requested KV cache", f"--kv-cache-memory-bytes {format_bytes(cache)}"
            left = self._blocks_left(asked) * self.block_bytes
            options.append(f"--kv-cache-memory-bytes {need}" if need <= left else "a larger --kv-cache-memory-bytes")
        elif cache is not None:
            options.append("a larger --kv-cache-memory-bytes")
        elif self.gpu is not None and self.config.gpu_memory_utilization < 0.95:
            options.append("a higher --gpu-memory-utilization")
        elif self.gpu is None and self._blocks_left(asked) * self.block_bytes >= need:
            options.append(f"--kv-cache-memory-bytes {need}")
        options += ["fewer --max-num-seqs", "a smaller --max-num-batched-tokens"]
        options += ["--dtype bfloat16"] if self.dtype == "float32" else []
        auto = (
            " Without --max-model-len the largest length is chosen automatically." if self.config.max_model_len else ""
        )
        error = DoesNotFit(
            f"A context of {format_count(asked)} tokens does not fit {place}.",
            f"It needs {format_bytes(need)} of KV cache and {format_bytes(planned)} are planned for it "
            f"({budget}); the largest length that works is {format_count(largest)}.",
            f"{', or '.join(options)}.{auto}",
            param="max_model_len",
        )
        error.plan = self._plan_for(asked, self._blocks_for(asked))
        raise error

    def _long_prefill_threshold(self) -> int:
        asked = self.config.long_prefill_token_threshold
        if asked is None:
            return max(1, self.inputs.batched_tokens // 4)
        return min(asked, self.inputs.batched_tokens)

    def _async_depth(self) -> int:
        asked = self.config.async_scheduling
        return 2 if (self.gpu is not None if asked is None else asked) else 1

    # -- words

    def _place(self) -> str:
        if self.gpu and self.shards:
            return f"on {len(self.gpus)} GPUs"
        return f"on {self.gpu.name}" if self.gpu else "in this machine's memory"

    def _budget_in_words(self) -> str:
        places = self.places if self.gpu else self.places[:1]
        free, reserve = (sum(numbers) for numbers in zip(*places, strict=True))
        words = f"{format_bytes(free)} free, {format_bytes(reserve)} kept in reserve"
        return f"{words}, utilisation {self.config.gpu_memory_utilization:g}" if self.gpu else words

    def _closing_notes(self, plan: MemoryPlan) -> list[str]:
        notes = []
        if plan.max_num_batched_tokens < plan.max_num_seqs:
            notes.append(
                f"A step holds {plan.max_num_batched_tokens} tokens, so no more of the {plan.max_num_seqs} "
                "requests can decode together."
            )
        timid = self.config.kv_cache_memory_bytes is not None or (
            self.gpu is not None and self.config.gpu_memory_utilization < 0.85
        )
        more = plan.unused_bytes // self.block_bytes * plan.block_size
        if timid and more >= plan.max_model_len:
            notes.append(
                f"{format_bytes(plan.unused_bytes)} stay unused; as KV cache they would hold "
                f"{format_count(more)} more tokens."
            )
        return notes


def _capability_name(gpu: Gpu) -> str:
    return ".".join(map(str, gpu.compute_capability))
