"""The memory of one rank: its weights, its part of the KV cache, its step, and how many blocks its budget holds.

A model in one process is the case of a single rank that holds the whole model.
Does not know: how ranks share a machine's memory, which context is chosen (plan.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

from localllm.config.settings import EngineConfig
from localllm.machine.hardware import Gpu
from localllm.models.fit.activation_bytes import DTYPE_BYTES, StepMemory, block_bytes, kv_bytes_per_token
from localllm.models.fit.cache_sizes import COPIED_STATES, KVSplit, most_blocks
from localllm.models.fit.pictures import EncoderSizes, PictureSizes, SoundSizes, SourceSizes, source_sizes
from localllm.models.spec.model_spec import DrafterPlan, ModelSpec, state_bytes
from localllm.models.spec.shard import Shard, drafter_shard, local_spec
from localllm.units import format_bytes

MIB = 1024**2
GRAPH_BYTES = 256 * MIB  # the driver's memory for the CUDA graphs of all step shapes
GRAPH_PROMPTS = 32  # most prompts of a recorded step, beside max_num_seqs decodes (runner/graphs.py)
MOST_DRAFTED = 256  # tokens of a step with drafts on a GPU (runner/device_drafts.py)
NCCL_BYTES = 512 * MIB  # of a rank's communicators; NCCL takes 0.2 to 1 GiB, outside of torch's counters
CPU_RANK_BYTES = 256 * MIB  # of a rank's process on a CPU: interpreter, torch, gloo's buffers


@dataclass(frozen=True, slots=True)
class RankPlan:
    """The memory of one rank of several. Its number is its place in `MemoryPlan.ranks`."""

    device: str  # cpu, cuda:0, ...
    name: str  # name of the GPU, or CPU
    stage: int
    shard: Shard
    weights_bytes: int
    kv_bytes: int
    activation_bytes: int
    graph_bytes: int
    comm_bytes: int  # of the exchange between ranks; on a CPU mostly the rank's process
    free_bytes: int  # of the device; on a CPU all ranks share it
    reserve_bytes: int
    state_bytes: int = 0  # of all places of its recurrent layers' states
    numa_node: int | None = None

    @property
    def total_bytes(self) -> int:
        """Bytes that the rank is expected to use."""
        step = self.activation_bytes + self.graph_bytes + self.comm_bytes
        return self.weights_bytes + self.kv_bytes + self.state_bytes + step


@dataclass(frozen=True, slots=True)
class Measured:
    """Memory of a loaded model or of one rank of it, from the allocator's counters."""

    weights_bytes: int
    activation_bytes: int  # the most that one full step held besides weights and KV cache, the runner's state included
    comm_bytes: int | None = None  # of the exchange between ranks; None: not measured


class ResidentBytes(Protocol):
    """Bytes that the loader will hold (see loader.py); linear in `max_model_len`, due to rotary tables."""

    def __call__(
        self, device: str, dtype: str, max_model_len: int, quantization: str | None, shard: Shard | None = None, /
    ) -> int: ...


def scaled_bytes(drafter: DrafterPlan, dtype: str) -> int:
    """Return the bytes of a drafter's tensors in another type than they are stored in."""
    return -(-drafter.stored_bytes * DTYPE_BYTES[dtype] // DTYPE_BYTES[drafter.spec.dtype])


def drafter_note(drafter: DrafterPlan, dtype: str, kv_dtype: str) -> str:
    """Return what a drafter adds to the numbers of a plan, as a sentence."""
    kv = kv_bytes_per_token(drafter.spec, kv_dtype)
    return (
        f"Drafter ({drafter.method}): about {format_bytes(scaled_bytes(drafter, dtype))} of the weights, and "
        f"{format_bytes(kv)} of KV cache per token beside the model's own."
    )


class PlanInputs(NamedTuple):
    """The settings and sizes that all ranks have in common."""

    config: EngineConfig
    spec: ModelSpec  # of the whole model
    dtype: str
    kv_dtype: str
    block_size: int
    batched_tokens: int
    resident_bytes: ResidentBytes
    split: KVSplit
    num_places: int = 0  # of recurrent states
    pictures: PictureSizes | None = None  # of each rank, which all encode; None: the tower is not loaded
    sources: SourceSizes | None = None  # of an encoder-decoder
    sounds: SoundSizes | None = None  # as `pictures`
    far_bytes: int = 0  # of `resident_bytes`, that are in RAM instead
    staging_bytes: int = 0  # of the device, for experts in RAM that are copied to it
    unpacked_bytes: int = 0  # of a step, for the same

    @property
    def encoder(self) -> EncoderSizes | None:
        """Memory of the model's encoders; None: the model has none, or its towers are not loaded."""
        return EncoderSizes.of([each for each in (self.pictures, self.sounds, self.sources) if each is not None])


class RankMemory:
    """The memory of one rank. shard None: one rank holds the whole model."""

    def __init__(
        self,
        inputs: PlanInputs,
        gpu: Gpu | None,
        budget: int,
        shard: Shard | None = None,
        measured: Measured | None = None,
    ) -> None:
        self.inputs, self.gpu, self.budget, self.shard, self.measured = inputs, gpu, budget, shard, measured
        self.device = "cpu" if gpu is None else f"cuda:{gpu.index}"
        whole = inputs.spec
        spec = whole if shard is None else local_spec(whole, shard)
        is_last = shard is None or shard.layers.stop == whole.num_layers
        self._spec, self._drafter = spec, whole.drafter if is_last else None
        config = inputs.config
        self.step = StepMemory(
            spec, inputs.dtype, inputs.kv_dtype, gpu is not None, config.max_num_seqs, inputs.batched_tokens,
            inputs.block_size,
            is_quantized=whole.quantization is not None or config.quantization is not None,
            given_rows=1 + (whole.vision.deep if whole.vision else 0) if inputs.pictures or inputs.sounds else 0,
            prompt_embeds=config.enable_prompt_embeds,
            samples=is_last and (shard is None or shard.index == 0),
            copied_bytes=0 if gpu or config.speculation.is_off else self._copied_bytes,
            own_logits=len(shard.vocab) if shard is not None and is_last and shard.size > 1 else 0,
        )  # fmt: skip
        self.graphs = self._graph_bytes() if gpu and not config.enforce_eager else 0

    # -- parts

    @cached_property
    def _weights_line(self) -> tuple[int, int]:
        """Bytes of the weights without rotary tables, and of the tables per position."""
        one, two = (self._resident(length) for length in (1, 2))
        return 2 * one - two, two - one

    def _resident(self, max_model_len: int) -> int:
        inputs, shard = self.inputs, self.shard
        quantization = inputs.config.quantization
        if shard is None:
            whole = inputs.resident_bytes(self.device, inputs.dtype, max_model_len, quantization)
            return whole - inputs.far_bytes
        return inputs.resident_bytes(self.device, inputs.dtype, max_model_len, quantization, shard)

    def weights(self, max_model_len: int) -> int:
        """Return the bytes of the weights, with the tables for this context."""
        if self.measured is not None:
            return self.measured.weights_bytes
        at_none, each = self._weights_line
        tower = 0 if self.inputs.encoder is None else self.inputs.encoder.tower_bytes
        return at_none + each * max_model_len + tower

    @cached_property
    def _block_bytes(self) -> tuple[tuple[int, ...], int]:
        """Bytes of a block of each group, and of a drafter's block."""
        inputs, drafter = self.inputs, self._drafter
        own = block_bytes(self._spec, inputs.block_size, inputs.kv_dtype)
        if drafter is None:
            return own, 0
        held = drafter.spec
        if self.shard is not None:
            held = local_spec(held, drafter_shard(held, self.shard))
        return own, inputs.block_size * kv_bytes_per_token(held, inputs.kv_dtype)

    def kv(self, num_blocks: int) -> int:
        """Return the bytes of the rank's KV cache with `num_blocks` blocks of the main group."""
        sizes, drafter = self._block_bytes
        own = zip(self.inputs.split.blocks(num_blocks), sizes, strict=True)
        return sum(count * size for count, size in own) + num_blocks * drafter

    @cached_property
    def bytes_per_state(self) -> int:
        """Bytes of one request's recurrent state on this rank."""
        return state_bytes(self._spec, self.inputs.dtype)

    @property
    def states(self) -> int:
        """Bytes of all places of recurrent states."""
        return self.inputs.num_places * self.bytes_per_state

    def activations(self, max_model_len: int, num_blocks: int) -> int:
        """Return the most that a step holds with this context and cache."""
        if self.measured is not None:
            return self.measured.activation_bytes
        step, encoder = self.step.bytes_at(max_model_len, num_blocks) + self._beside_layers, self.inputs.encoder
        if encoder is None:
            return step
        own = source_sizes(self._spec, self.inputs.dtype, self.inputs.block_size)  # of the rank's heads
        return max(step, encoder.encode_bytes) + (encoder if own is None else own).kept_bytes

    def sampler_bytes(self, max_model_len: int, num_blocks: int) -> int:
        """Return the bytes that sampling needs beyond the layers; 0 where they were measured."""
        return 0 if self.measured else self.step.sampler_bytes(max_model_len, num_blocks)

    @property
    def _beside_layers(self) -> int:
        """Bytes of experts that a step unpacks, of the features that a drafter reads, of its logits, which a GPU
        computes for every row, and of the projections that recurrent layers keep on a GPU since drafts may be wrong.
        """
        inputs, drafter = self.inputs, self._drafter
        width = 0 if drafter is None else len(drafter.taps) * inputs.spec.hidden_size
        features = inputs.batched_tokens * width * DTYPE_BYTES[inputs.dtype] + inputs.unpacked_bytes
        if drafter is not None and self.gpu is not None:
            rows = min(inputs.config.max_num_seqs, inputs.batched_tokens)
            features += rows * (drafter.spec.vocab_size + inputs.spec.vocab_size) * 4
        recurrent, config = self._spec.recurrent, inputs.config
        if recurrent is not None and self.gpu is not None and not config.speculation.is_off:
            tokens = min(MOST_DRAFTED, config.max_num_seqs * 16, inputs.batched_tokens)
            width = (recurrent.conv_channels + 2 * recurrent.inner_size) * DTYPE_BYTES[inputs.dtype]
            return features + tokens * width * len(self._spec.recurrent_layers)
        return features

    @property
    def _copied_bytes(self) -> int:
        """Bytes of the states that a step with drafts copies on a CPU."""
        return min(self.inputs.config.max_num_seqs, COPIED_STATES) * self.bytes_per_state

    def _graph_bytes(self) -> int:
        """Return the bytes of the driver, one step's activations in the graphs' pool, and the shared logits buffer."""
        rows = self.inputs.config.max_num_seqs + GRAPH_PROMPTS
        logits = self.inputs.spec.vocab_size if self.step.samples else self.step.own_logits
        return GRAPH_BYTES + rows * logits * 4 + self.activations(0, 0)

    @property
    def comm(self) -> int:
        """Bytes of the exchange with other ranks."""
        if self.shard is None:
            return 0
        if self.measured is not None and self.measured.comm_bytes is not None:
            return self.measured.comm_bytes
        stream = 2 * self.inputs.batched_tokens * self.inputs.spec.hidden_size * DTYPE_BYTES[self.inputs.dtype]
        is_stage = len(self.shard.layers) < self.inputs.spec.num_layers
        return (CPU_RANK_BYTES if self.gpu is None else NCCL_BYTES) + (stream if is_stage else 0)

    # -- sizes

    def fixed_bytes(self, max_model_len: int) -> int:
        """Return the bytes that do not depend on the size of the KV cache."""
        step = (
            self.measured.activation_bytes
            if self.measured
            else self.step.fixed_bytes(max_model_len) + self._beside_layers
        )
        rest = self.graphs + self.comm + self.states + self.inputs.staging_bytes
        return self.weights(max_model_len) + step + rest

    def blocks_within(self, budget: int, max_model_len: int) -> int:
        """Return how many blocks of the main group fit into `budget` bytes besides everything else."""
        needs = self.needs_with(max_model_len)
        return most_blocks(lambda num_blocks: needs(num_blocks) <= budget)

    def needs(self, max_model_len: int, num_blocks: int) -> int:
        """Return all bytes of the rank with this context and cache."""
        return self.needs_with(max_model_len)(num_blocks)

    def needs_with(self, max_model_len: int) -> Callable[[int], int]:
        """Return the function from the size of the cache to all bytes of the rank with this context. A search for the
        largest cache calls it often, so what the cache does not change is summed once.
        """
        rest = self.weights(max_model_len) + self.states + self.graphs + self.comm + self.inputs.staging_bytes
        if self.measured is not None:
            rest += self.measured.activation_bytes
            return lambda num_blocks: rest + self.kv(num_blocks)
        step, rest = self.step.at(max_model_len), rest + self._beside_layers
        return lambda num_blocks: rest + self.kv(num_blocks) + step.with_cache(num_blocks)

    def plan(self, stage: int, max_model_len: int, num_blocks: int, free_bytes: int, reserve_bytes: int) -> RankPlan:
        """Return the plan of a rank of several."""
        assert self.shard is not None
        return RankPlan(
            device=self.device,
            name=self.gpu.name if self.gpu else "CPU",
            stage=stage,
            shard=self.shard,
            weights_bytes=self.weights(max_model_len),
            kv_bytes=self.kv(num_blocks),
            activation_bytes=self.activations(max_model_len, num_blocks),
            graph_bytes=self.graphs,
            comm_bytes=self.comm,
            free_bytes=free_bytes,
            reserve_bytes=reserve_bytes,
            state_bytes=self.states,
            numa_node=self.gpu.place.numa_node if self.gpu else None,
        )
