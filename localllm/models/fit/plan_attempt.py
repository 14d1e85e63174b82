"""One attempt to plan for given devices: each rank's share, the context and the KV blocks, or a refusal.

    budget      CUDA: (free - reserve) x gpu_memory_utilization      CPU: available RAM - reserve, for all ranks
    weights     exact, from the file headers, as the loader will hold them
    activations the largest memory of one step (activation_bytes.py)
    KV cache    CUDA: the rest of the budget      CPU: a bounded part of it (see `_default_blocks`)

The budget starts from *free* memory, not from the total, as a GPU often drives a desktop too.
Does not know: torch, files, how devices are chosen (plan.py), alternatives (options.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from localllm.config.settings import EngineConfig
from localllm.errors import DoesNotFit, UnsupportedOption
from localllm.machine.hardware import Gpu, Hardware
from localllm.models import read_spec
from localllm.models.families import text_part
from localllm.models.fit.activation_bytes import DTYPE_BYTES
from localllm.models.fit.balance import SplitDevice
from localllm.models.fit.cache_sizes import most_blocks, split_of, state_places
from localllm.models.fit.devices import (
    MIN_CONTEXT,
    bandwidths,
    choose_dtype,
    choose_kv_dtype,
    exchange_note,
    free_and_reserve,
    too_old,
)
from localllm.models.fit.far import FarPlan
from localllm.models.fit.memory_plan import MemoryPlan
from localllm.models.fit.pictures import (
    GOOD_CONTEXT,
    most_tokens_to_try,
    picture_sizes,
    sound_sizes,
    source_sizes,
    why_deaf,
    why_text_only,
)
from localllm.models.fit.rank_budget import (
    Measured,
    PlanInputs,
    RankMemory,
    RankPlan,
    ResidentBytes,
    drafter_note,
    scaled_bytes,
)
from localllm.models.fit.shard_sizes import (
    Division,
    count_shard,
    feature_unit,
    model_bytes,
    split_in_words,
    split_model,
)
from localllm.models.formats.registry import quantization_in_words, quantization_notes
from localllm.models.spec.model_spec import ModelSpec, kv_groups
from localllm.models.spec.shard import Shard
from localllm.models.vision.families import family_of
from localllm.units import format_bytes, format_count

BLOCK_SIZE_CPU, BLOCK_SIZE_GPU = 16, 64  # a GPU reads a block of 64 tokens as one tile
TARGET_STEP_S = 0.2  # on a CPU: a step with prompts and decodes; a stream that decodes waits for it
LEAST_RAM_BYTES, MOST_RAM_BYTES = 8 * 2**30, 8 * 2**30
"""On a GPU, KV blocks are kept in RAM by themselves if so much of it is available, and in at most so much of it."""
FIXED_CHUNK = 128  # tokens of a prompt's chunks in deterministic mode on a CPU; any block size divides it
SPLIT_CONTEXT = 16_384  # the context of one request for which shares are balanced, unless the user names one
CPU_CONTEXTS, CPU_CONTEXT_LEN = 16, 4096  # the default KV cache on CPU holds this many contexts of this length
THROUGH_TRANSFORMERS = (
    "transformers' code computes this model{why}: on a CPU an answer takes one and a half to three times as long as "
    "that of a model which localllm's own code computes, and prompts as long."
)  # docs/lab.md
CPU_KV_SHARE = 0.5  # and takes at most this share of the memory after weights and activations


class PlanAttempt:
    """A planning attempt on given devices: its inputs, its ranks' budgets, and what fits."""

    def __init__(
        self, config: EngineConfig, spec: ModelSpec, stored_bytes: int, hardware: Hardware,
        gpus: Sequence[Gpu | None], resident_bytes: ResidentBytes | None, measured: Sequence[Measured],
        division: Division, shards: Sequence[Shard], far: FarPlan | None = None, *, far_is_loaded: bool = False,
    ) -> None:  # fmt: skip
        """far: the parts that are in RAM. far_is_loaded: whether `resident_bytes` leaves them out already."""
        self.config, self.spec, self.hardware, self.division = config, spec, hardware, division
        self.far = far
        self.gpus, self.measured = gpus, measured
        self.gpu = min((gpu for gpu in gpus if gpu), key=lambda gpu: gpu.compute_capability, default=None)
        self.stored_bytes, self.resident_bytes = stored_bytes, resident_bytes or self._scaled
        self.notes: list[str] = self._first_notes()
        self.places = [free_and_reserve(hardware, gpu) for gpu in gpus]
        share = config.gpu_memory_utilization if self.gpu else 1.0
        self.budgets = [int(max(0, free - reserve) * share) for free, reserve in self.places]
        self.dtype, note = choose_dtype(config, spec, self.gpu, self.resident_bytes, self.budgets[0])
        kv_dtype, kv_note = choose_kv_dtype(config, spec, self.dtype)
        self.notes += filter(None, (note, kv_note))
        _refuse_prompt_embeds(config, spec)
        if spec.drafter is not None:
            self.notes.append(drafter_note(spec.drafter, self.dtype, kv_dtype))
        batched = config.max_num_batched_tokens or (2048 if self.gpu else 1024)
        size = config.block_size or (BLOCK_SIZE_GPU if self.gpu else BLOCK_SIZE_CPU)
        self.split = split_of(kv_groups(spec), size, batched, config.max_num_seqs)
        sources = source_sizes(spec, self.dtype, size)
        self.inputs = PlanInputs(
            config, spec, self.dtype, kv_dtype, size, batched, self.resident_bytes, self.split, sources=sources,
            far_bytes=0 if far is None or far_is_loaded else far.gpu_bytes,
            staging_bytes=0 if far is None else far.staging_bytes,
            unpacked_bytes=0 if far is None else far.unpacked_bytes,
        )  # fmt: skip
        self.notes += [] if sources is None else [sources.note()]
        in_processes = len(gpus) > 1 or config.data_parallel_size > 1  # a replica never runs in the server's process
        self.shards = shards or (self._split() if in_processes else ())
        self.ranks = self._rank_memories(self.shards)
        self._add_sounds()
        self._add_pictures()
        self.num_places = 0
        if spec.recurrent is not None:
            self._add_states()
        why_no_tiers = "" if config.enable_prefix_caching else "they have no names without --enable-prefix-caching"
        if in_processes:
            why_no_tiers = "the model is divided over several ranks or replicas, which have memory of their own"
        elif self.num_places:
            why_no_tiers = "it keeps recurrent states, which are not moved with the blocks"
        tiers = _tier_bytes(config, spec, hardware, why_no_tiers, on_gpu=self.gpu is not None)
        self.kv_ram_bytes, self.kv_swap_bytes, self.kv_disk_bytes = tiers

    def _add_pictures(self) -> None:
        """Choose the tokens of the largest picture: fewer, if the context would become short otherwise."""
        first_layers = len(self.shards[0].layers) if self.shards else self.spec.num_layers
        why = why_text_only(self.spec, self.config, first_layers=first_layers, on_gpu=self.gpu is not None)
        if why:
            self.notes.append(why)
        if why or self.spec.vision is None:
            return
        wanted = min(self.config.max_model_len or GOOD_CONTEXT, self.spec.max_position)
        for most_tokens in most_tokens_to_try(self.spec, self.config):
            batched = self.inputs.batched_tokens
            sizes = picture_sizes(self.spec, self.config, self.dtype, batched, most_tokens)
            least = sizes.rows + self.config.max_num_seqs  # a picture that attends both ways is computed in one step
            if self.spec.vision.both_ways and batched < least:
                self.notes.append(
                    f"Steps hold {format_count(least)} tokens instead of {format_count(batched)}: a picture of "
                    f"{format_count(sizes.rows)} tokens is computed in one step."
                )
                self.split = split_of(kv_groups(self.spec), self.inputs.block_size, least, self.config.max_num_seqs)
                self.inputs = self.inputs._replace(batched_tokens=least, split=self.split)
                sizes = picture_sizes(self.spec, self.config, self.dtype, least, most_tokens)
            self.inputs = self.inputs._replace(pictures=sizes)
            self.ranks = self._rank_memories(self.shards)
            if self._context_fits(wanted):
                break
        self.notes.append(sizes.note())
        if not family_of(self.spec.vision).scales and (self.config.image_max_tokens or self.config.image_min_tokens):
            self.notes.append("--image-max-tokens and --image-min-tokens have no effect: this model's sizes are fixed.")

    def _add_sounds(self) -> None:
        why = why_deaf(self.spec, self.config, on_gpu=self.gpu is not None)
        if why:
            self.notes.append(why)
        if why or self.spec.hearing is None:
            return
        sizes = sound_sizes(self.spec, self.config, self.dtype, self.inputs.batched_tokens)
        self.inputs = self.inputs._replace(sounds=sizes)
        self.ranks = self._rank_memories(self.shards)
        self.notes.append(sizes.note())

    def _add_states(self) -> None:
        """Choose the places of recurrent states, and fewer requests at once if theirs would take too much."""
        asked, length = self.config.max_num_seqs, self._least_context
        fixed, sizes = [rank.fixed_bytes(length) for rank in self.ranks], [rank.bytes_per_state for rank in self.ranks]
        left = [budget - own for budget, own in zip(self.budgets, fixed, strict=True)]
        if self.gpu is None:  # all ranks share the memory
            left, sizes = [int((self.budgets[0] - sum(fixed)) * CPU_KV_SHARE)], [sum(sizes)]
        num_blocks = self._num_blocks(self.config.max_model_len or self.spec.max_position)
        caches = self.config.enable_prefix_caching
        found = [  # a stage of a pipeline may have no recurrent layer
            state_places(room, size, asked, num_blocks, caches_prefixes=caches)
            for room, size in zip(left, sizes, strict=True)
            if size
        ]
        seqs = min(each.max_num_seqs for each in found)
        if seqs < asked:
            self.config = replace(self.config, max_num_seqs=seqs)
            self.notes.append(
                f"{seqs} requests at once instead of {asked}: the recurrent state of one takes "
                f"{format_bytes(sum(sizes))}, and all states at most a quarter of the memory beside the weights."
            )
        self.num_places = min(each.num_places for each in found)
        self.split = self.split._replace(max_num_seqs=seqs)
        self.inputs = self.inputs._replace(config=self.config, split=self.split, num_places=self.num_places)
        self.ranks = self._rank_memories(self.shards)

    @property
    def _least_context(self) -> int:
        return min(MIN_CONTEXT, self.config.max_model_len or MIN_CONTEXT, self.spec.max_position)

    def _first_notes(self) -> list[str]:
        spec, config = self.spec, self.config
        notes = list(quantization_notes(spec.quantization, "cpu" if self.gpu is None else "cuda"))
        note = read_spec.family_of(spec).note if spec.implementation == "localllm" else ""
        if note == text_part.NOTE and (spec.why_unseeing or spec.hearing is not None):
            note = ""  # the plan's notes about pictures and sound say more
        if note and spec.vision is None and (spec.drafter is None or spec.drafter.method != "mtp"):
            notes.append(note)
        if spec.implementation != "localllm" and self.gpu is None:
            because = f", because {spec.why_transformers}" if spec.why_transformers else ""
            notes.append(THROUGH_TRANSFORMERS.format(why=because))
        if spec.context_limit:
            notes.append(f"Context {format_count(spec.max_position)} tokens: {spec.context_limit}")
        if config.stream_prompts.isdecimal() and (self.far is None or not self.far.staging_bytes):
            notes.append(
                f"--stream-prompts {config.stream_prompts} changes nothing: no weights are in RAM beside a GPU."
            )
        if config.trust_remote_code and spec.implementation != "remote":
            notes.append("--trust-remote-code changes nothing: this model needs no code of its checkpoint.")
        if self.gpu is None and config.device == "auto":
            notes += [f"{too_old(each)} The model runs on the CPU." for each in self.hardware.gpus[:1]]
        return notes

    def holds(self, max_model_len: int) -> bool:
        """Return whether the weights and this context fit."""
        least = self._least_context
        needs = [rank.needs(least, self.split.needs(least)) for rank in self.ranks]
        is_held = all(need <= budget for need, budget in zip(needs, self.budgets, strict=True))
        return is_held and self._context_fits(max_model_len)

    def bytes_with(self, max_model_len: int) -> int:
        """Return all bytes of the first rank with a cache for one request of this context, if so much fits."""
        length = max_model_len if self.holds(max_model_len) else self._least_context
        return self.ranks[0].needs(length, self.split.needs(length))

    def refused_with(self, error: DoesNotFit) -> DoesNotFit:
        """Return the error with the plan of a short context, for its sizes."""
        error.plan = self._plan_for(self._least_context, self.split.needs(self._least_context))
        return error

    def plan(self) -> MemoryPlan:
        self._require_weights()
        max_model_len = self._choose_context()
        plan = self._with_ram_that_remains(self._plan_for(max_model_len, self._num_blocks(max_model_len)))
        return replace(plan, notes=(*self.notes, *self._closing_notes(plan)))

    def _plan_for(self, max_model_len: int, num_blocks: int) -> MemoryPlan:
        """Return the plan for this context and cache, whether it fits or not."""
        ranks, inputs = self.ranks, self.inputs
        places = self.places if self.gpu else self.places[:1]  # on a CPU all ranks share the memory
        asked = self.config.async_scheduling
        return MemoryPlan(
            device=ranks[0].device,
            dtype=self.dtype,
            kv_dtype=inputs.kv_dtype,
            max_model_len=max_model_len,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=inputs.batched_tokens,
            long_prefill_token_threshold=self._long_prefill_threshold(),
            num_blocks=self.split.blocks(num_blocks),
            windows=self.split.windows,
            block_size=inputs.block_size,
            weights_bytes=sum(rank.weights(max_model_len) for rank in ranks),
            kv_bytes=self._kv(num_blocks),
            activation_bytes=sum(rank.activations(max_model_len, num_blocks) for rank in ranks),
            reserve_bytes=sum(reserve for _, reserve in places),
            free_bytes=sum(free for free, _ in places),
            async_depth=2 if (self.gpu is not None if asked is None else asked) else 1,
            graph_bytes=sum(rank.graphs for rank in ranks),
            num_places=self.num_places,
            state_bytes=sum(rank.states for rank in ranks),
            sampler_bytes=sum(rank.sampler_bytes(max_model_len, num_blocks) for rank in ranks),
            is_measured=bool(self.measured),
            quantization=quantization_in_words(
                self.spec.quantization, self.config.quantization, ranks[0].device, self.config.cpu_weights
            ),
            comm_bytes=sum(rank.comm for rank in ranks),
            target_step_s=TARGET_STEP_S if self._is_paced() else 0.0,
            fixed_chunk=FIXED_CHUNK if self.gpu is None and self.config.deterministic else 0,
            pictures=inputs.pictures,
            sources=inputs.sources,
            sounds=inputs.sounds,
            ranks=self._rank_plans(max_model_len, num_blocks),
            far=self.far,
            kv_ram_bytes=self.kv_ram_bytes,
            kv_swap_bytes=self.kv_swap_bytes,
            kv_disk_bytes=self.kv_disk_bytes,
        )

    def _with_ram_that_remains(self, plan: MemoryPlan) -> MemoryPlan:
        """Return the plan with as much RAM for KV blocks as the model leaves, and note if that is less than asked."""
        room = plan.unused_bytes if self.gpu is None else self.hardware.ram_available_bytes
        if plan.kv_ram_bytes <= room:
            return plan
        self.notes.append(
            f"KV blocks take at most {format_bytes(room)} of RAM instead of {format_bytes(plan.kv_ram_bytes)}: no more "
            "remains."
        )
        most_swapped = room // 2 if self.config.swap_space is None else room
        return replace(plan, kv_ram_bytes=room, kv_swap_bytes=min(plan.kv_swap_bytes, most_swapped))

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
        device = f"cuda:{self.gpu.index}" if self.gpu else "cpu"
        resident = self.resident_bytes(device, self.dtype, 1, self.config.quantization)
        sizes = model_bytes(self.spec, resident, DTYPE_BYTES[self.dtype], self.inputs.kv_dtype)
        unit = feature_unit(self.spec.quantization, self.config.quantization)
        shares = self.budgets if self.gpu else [budget // len(self.gpus) for budget in self.budgets]
        even = split_model(self.spec, [SplitDevice(1, 1)] * len(self.gpus), self.division, sizes, 0, unit)
        length = self.config.max_model_len or min(self.spec.max_position, SPLIT_CONTEXT)
        speeds = bandwidths(self.gpus) or [1.0] * len(self.gpus)
        devices = [
            SplitDevice(share - rank.activations(length, 0) - rank.graphs - rank.comm, speed)
            for rank, share, speed in zip(self._rank_memories(even), shares, speeds, strict=True)
        ]
        return split_model(self.spec, devices, self.division, sizes, length, unit)

    def _scaled(
        self, device: str, dtype: str, max_model_len: int, quantization: str | None, shard: Shard | None = None, /
    ) -> int:
        """Scale the stored bytes to the dtype, and to a rank's share by arithmetic."""
        whole = math.ceil(self.stored_bytes * DTYPE_BYTES[dtype] / DTYPE_BYTES[self.spec.dtype])
        if self.spec.drafter is not None:
            whole += scaled_bytes(self.spec.drafter, dtype)
        return whole if shard is None else count_shard(self.spec, shard, whole, dtype)

    def split_note(self) -> str:
        """Return what the shares became, and what their exchanges cost."""
        words = split_in_words(self.spec, self.shards)
        weights = sum(rank.weights(1) for rank in self.ranks)
        return " ".join(
            filter(None, (f"{words}." if words else "", exchange_note(self.spec, self.gpus, weights, self.division)))
        )

    # -- sizes

    def _kv(self, num_blocks: int) -> int:
        """Return the bytes of the KV caches of all ranks with `num_blocks` blocks of the main group."""
        return sum(rank.kv(num_blocks) for rank in self.ranks)

    def _within(self, kv_bytes: int) -> int:
        """Return how many blocks of the main group fit into a KV cache of `kv_bytes` bytes."""
        return most_blocks(lambda num_blocks: self._kv(num_blocks) <= kv_bytes)

    def _blocks_left(self, max_model_len: int) -> int:
        """Return the blocks of the main group that fit on every rank. On a CPU ranks share one budget."""
        if self.gpu is not None or len(self.ranks) == 1:
            return min(rank.blocks_within(rank.budget, max_model_len) for rank in self.ranks)
        needs = [rank.needs_with(max_model_len) for rank in self.ranks]
        return most_blocks(lambda n: sum(each(n) for each in needs) <= self.budgets[0])

    def _num_blocks(self, max_model_len: int) -> int:
        left = self._blocks_left(max_model_len)
        if self.config.kv_cache_memory_bytes is not None:
            return min(left, self._within(self.config.kv_cache_memory_bytes))
        return left if self.gpu else self._default_blocks(max_model_len, left)

    def _default_blocks(self, max_model_len: int, left: int) -> int:
        """Return a CPU's default KV blocks: one full or several modest contexts, within a share of the memory left."""
        contexts = min(self.config.max_num_seqs, CPU_CONTEXTS)
        tokens = max(max_model_len, contexts * min(max_model_len, CPU_CONTEXT_LEN))
        return min(self._within(int(self._kv(left) * CPU_KV_SHARE)), 1 + -(-tokens // self.inputs.block_size))

    def _context_fits(self, max_model_len: int) -> bool:
        """Return whether this context fits, together with the requested size of the cache if there is one."""
        asked = self.config.kv_cache_memory_bytes or 0
        has_blocks = self._num_blocks(max_model_len) >= self.split.needs(max_model_len)
        return has_blocks and (not asked or asked <= self._kv(self._blocks_left(max_model_len)))

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
        least = self._least_context
        blocks = self.split.needs(least)
        needs = [rank.needs(least, blocks) for rank in self.ranks]
        if self.gpu is None:
            needs = [sum(needs)] * len(needs)
        short = [index for index, need in enumerate(needs) if need > self.budgets[index]]
        if not short:
            return
        error = self._rank_too_small(short[0], needs) if self.gpu and self.shards else self._too_small(needs[0], least)
        raise self.refused_with(error)

    def _too_small(self, need: int, least: int) -> DoesNotFit:
        weights = sum(rank.weights(least) for rank in self.ranks)
        states = f", the recurrent states of {self.config.max_num_seqs} requests and their checkpoints "
        states += format_bytes(sum(rank.states for rank in self.ranks))
        return DoesNotFit(
            f"The model does not fit {self._place()}.",
            f"Weights need {format_bytes(weights)} in {self.dtype}{states if self.num_places else ''}, with one short "
            f"request and a step of "
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
            _rank_hint(self.division, needs, self.budgets),
            param="tensor_parallel_size",
        )

    def _room_hint(self, need: int) -> str:
        usable = max(1, self.places[0][0] - self.places[0][1])
        if self.gpu is not None and need <= usable:
            return f"--gpu-memory-utilization {math.ceil(need / usable * 100) / 100:.2f} is the smallest that works."
        half = "--dtype bfloat16, " if self.dtype == "float32" else ""
        if self.far is not None and len(self.far.layers) < self.far.num_layers:
            half = f"a larger --n-cpu-moe (at most {self.far.num_layers}), {half}"
        moves_none = self.far is None or not self.far.layers
        if self.spec.mixture is not None and moves_none and self.spec.implementation == "localllm":
            half = f"--weights-on disk (slow), {half}"
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
        asked, left = self.config.kv_cache_memory_bytes, self._kv(self._blocks_left(length))
        if asked is not None and asked > left:
            raise DoesNotFit(
                f"--kv-cache-memory-bytes {format_bytes(asked)} does not fit {self._place()}.",
                f"{format_bytes(left)} are left ({self._budget_in_words()}) after the weights, "
                f"which take {format_bytes(sum(rank.weights(length) for rank in self.ranks))}.",
                "Leave out the flag, or set a smaller size.", param="kv_cache_memory_bytes",
            )  # fmt: skip

    def _refuse_context(self, asked: int, largest: int) -> None:
        need, planned = map(self._kv, (self.split.needs(asked), self._num_blocks(asked)))
        options = [f"--max-model-len {largest}"] if largest else []
        place, budget, cache = self._place(), self._budget_in_words(), self.config.kv_cache_memory_bytes
        if cache is not None and need > cache:
            place, budget = "into the requested KV cache", f"--kv-cache-memory-bytes {format_bytes(cache)}"
            left = self._kv(self._blocks_left(asked))
            options.append(f"--kv-cache-memory-bytes {need}" if need <= left else "a larger --kv-cache-memory-bytes")
        elif cache is not None:
            options.append("a larger --kv-cache-memory-bytes")
        elif self.gpu is not None and self.config.gpu_memory_utilization < 0.95:
            options.append("a higher --gpu-memory-utilization")
        elif self.gpu is None and self._kv(self._blocks_left(asked)) >= need:
            options.append(f"--kv-cache-memory-bytes {need}")
        steps, windowed = self.inputs.batched_tokens, any(self.split.windows)
        fewer = f"less than --max-num-batched-tokens {steps}"
        fewer += ", whose blocks layers with a window hold besides their windows" if windowed else ""
        options += ["fewer --max-num-seqs", fewer]
        options += ["--dtype bfloat16"] if self.dtype == "float32" else []
        auto = (
            " Without --max-model-len the largest length is chosen automatically." if self.config.max_model_len else ""
        )
        error = DoesNotFit(
            f"A context of {format_count(asked)} tokens does not fit {place}.",
            f"It needs {format_bytes(need)} of KV cache and {format_bytes(planned)} are planned for it "
            f"({budget}); the largest length that works with steps of {format_count(steps)} tokens is "
            f"{format_count(largest)}.",
            f"{', or '.join(options)}.{auto}",
            param="max_model_len",
        )
        error.plan = self._plan_for(asked, self.split.needs(asked))
        raise error

    def _long_prefill_threshold(self) -> int:
        asked = self.config.long_prefill_token_threshold
        if asked is None:
            streams = self.far is not None and self.far.staging_bytes  # whose pace counts seconds (engine/prefill.py)
            is_whole = self._is_paced() or streams
            return self.inputs.batched_tokens if is_whole else max(1, self.inputs.batched_tokens // 4)
        return min(asked, self.inputs.batched_tokens)

    def _is_paced(self) -> bool:
        """Return whether times of steps limit prompts beside decodes. Not with ranks: a pipeline's steps overlap."""
        reads_disk = self.far is not None and self.far.disk is not None  # a short step takes as long as a large one
        return (
            self.gpu is None and not self.shards and not reads_disk and self.config.long_prefill_token_threshold is None
        )

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
        if plan.kv_disk_bytes:
            notes.append(
                f"KV blocks of prompts are kept on disk, up to {format_bytes(plan.kv_disk_bytes)}. They can be turned "
                "back into text: localllm kv clear deletes them."
            )
        if plan.max_num_batched_tokens < plan.max_num_seqs:
            notes.append(
                f"A step holds {plan.max_num_batched_tokens} tokens, so no more of the {plan.max_num_seqs} "
                "requests can decode together."
            )
        timid = self.config.kv_cache_memory_bytes is not None or (
            self.gpu is not None and self.config.gpu_memory_utilization < 0.85
        )
        more = (self._within(plan.kv_bytes + plan.unused_bytes) - max(plan.num_blocks)) * plan.block_size
        if timid and more >= plan.max_model_len:
            notes.append(
                f"{format_bytes(plan.unused_bytes)} stay unused; as KV cache they would hold "
                f"{format_count(more)} more tokens."
            )
        return notes


def _refuse_prompt_embeds(config: EngineConfig, spec: ModelSpec) -> None:
    if config.enable_prompt_embeds and (spec.per_layer_input is not None or spec.reads_token_ids):
        raise UnsupportedOption(
            f"--enable-prompt-embeds is not supported for {spec.architecture}.",
            "Some of its layers read the ids of tokens, which given embeddings do not have.",
            "Leave the flag out.", param="enable_prompt_embeds",
        )  # fmt: skip


def _rank_hint(division: Division, needs: Sequence[int], budgets: Sequence[int]) -> str:
    """Return what would give each rank a share that it holds: other shares, a pipeline, a smaller model."""
    whole, budget, hints = sum(needs), sum(budgets), list[str]()
    if division.shares:
        gib = [max(1, round(own / 1024**3)) for own in budgets[: division.tensor]]
        hints.append(f"--tensor-split {','.join(map(str, gib))}")
    if division.layers:
        hints.append("leave out --pipeline-layer-partition")
    if division.tensor > 1 and whole <= budget:
        hints.append(f"-pp {division.num_ranks}")
    hints += ["more GPUs"] if whole > budget else []
    return f"{', '.join([*hints, 'a smaller model'])} or a higher --gpu-memory-utilization."


def _tier_bytes(
    config: EngineConfig, spec: ModelSpec, hardware: Hardware, why_none: str, *, on_gpu: bool
) -> tuple[int, int, int]:
    """Return the most bytes of KV blocks that have left the cache: in RAM, there of preempted requests, on disk.

    why_none: why the blocks of this model cannot move; empty: they can. Raises `UnsupportedOption` if tiers were asked
    for that cannot be.
    """
    asked, swap_space = int((config.kv_offloading_size or 0) * 2**30), int((config.swap_space or 0) * 2**30)
    disk, available = int(config.kv_disk_gib * 2**30), hardware.ram_available_bytes
    if why_none and (asked or swap_space or disk):
        set_ = [("--kv-disk-gib", disk), ("--kv-offloading-size", asked), ("--swap-space", swap_space)]
        flag = next(flag for flag, size in set_ if size)
        what = f"{flag} is not supported here: the KV blocks of {spec.architecture} stay in the cache."
        why, hint = f"They cannot be kept elsewhere: {why_none}.", f"Leave out {flag}."
        raise UnsupportedOption(what, why, hint, param=flag.removeprefix("--").replace("-", "_"))
    if why_none:
        return 0, 0, 0
    if config.kv_offloading_size is None and on_gpu and available >= LEAST_RAM_BYTES:
        asked = min(MOST_RAM_BYTES, available // 8)  # on a CPU the cache itself is in RAM
    ram = max(asked, swap_space)
    return ram, ram // 2 if config.swap_space is None else swap_space, disk
