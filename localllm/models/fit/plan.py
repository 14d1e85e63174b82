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
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from localllm.config.settings import EngineConfig
from localllm.errors import ConfigError, DoesNotFit, UnsupportedOption
from localllm.machine.hardware import MIN_COMPUTE_CAPABILITY, Gpu, Hardware
from localllm.models.architectures.registry import FAMILY_OF
from localllm.models.fit.step import DTYPE_BYTES, StepMemory, kv_bytes_per_token
from localllm.models.formats.at_load import at_load, quantization_in_words, quantization_notes
from localllm.models.spec.model_spec import ModelSpec
from localllm.units import format_bytes, format_count

KV_DTYPES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "int8": "int8"}  # flag value -> torch's name
BLOCK_SIZE_CPU, BLOCK_SIZE_GPU = 16, 64  # a GPU reads a block of 64 tokens as one tile
GRAPH_BYTES = 256 * 1024**2  # the driver's memory for the CUDA graphs of all step shapes
GRAPH_ROWS = 136  # rows of the largest mixed shape (runner/graphs.py), if max_num_seqs is smaller
GIB = 1024**3
MIN_CONTEXT = 256  # the smallest context worth starting with
CPU_CONTEXTS, CPU_CONTEXT_LEN = 16, 4096  # the default KV cache on CPU holds this many contexts of this length
CPU_KV_SHARE = 0.5  # and takes at most this share of the memory after weights and activations


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The sizes of an engine on this machine. The engine uses every number as it is."""

    device: str  # cpu, cuda:0, ...
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

    @property
    def num_kv_tokens(self) -> int:
        """Token positions that requests can hold at the same time."""
        return (self.num_blocks - 1) * self.block_size

    @property
    def total_bytes(self) -> int:
        """Bytes that the model is expected to use."""
        return self.weights_bytes + self.kv_bytes + self.activation_bytes + self.graph_bytes

    @property
    def unused_bytes(self) -> int:
        """Free memory that the plan leaves unused, besides the reserve."""
        return max(0, self.free_bytes - self.reserve_bytes - self.total_bytes)

    def concurrency(self, length: int) -> int:
        """Return how many requests of this length run at the same time; 0: too long for the context."""
        if length > self.max_model_len:
            return 0
        return min(self.max_num_seqs, (self.num_blocks - 1) // -(-length // self.block_size))


@dataclass(frozen=True, slots=True)
class Measured:
    """Memory of a loaded model, from the allocator's counters."""

    weights_bytes: int
    activation_bytes: int  # the most that one full step held besides weights and KV cache, the runner's state included


class ResidentBytes(Protocol):
    """Bytes that the loader will hold (see loader.py); linear in `max_model_len`, due to rotary tables."""

    def __call__(self, device: str, dtype: str, max_model_len: int, quantization: str | None, /) -> int: ...


def make_plan(
    config: EngineConfig,
    spec: ModelSpec,
    weights_bytes: int,
    hardware: Hardware,
    *,
    resident_bytes: ResidentBytes | None = None,
    measured: Measured | None = None,
) -> MemoryPlan:
    """Return the plan. Raises `DoesNotFit`, `ConfigError`, `UnsupportedOption` with numbers and the next flag to try.

    weights_bytes: of the checkpoint as stored (models/spec/ reads it from the headers). resident_bytes: what the
    loader will hold; without it, the stored bytes are scaled to the dtype. measured: replaces both and the computed
    activations once the model is loaded. hardware: memory as it was before the load.
    """
    _refuse_unsupported(config, spec)
    _check_position_limit(config, spec)
    gpu = choose_gpu(config.device, hardware)
    if gpu is None and config.deterministic:
        raise _deterministic_on_cpu(config, spec)
    return _PlanAttempt(config, spec, weights_bytes, hardware, gpu, resident_bytes, measured).plan()


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


def _refuse_unsupported(config: EngineConfig, spec: ModelSpec) -> None:
    at_load(config.quantization, spec.quantization)
    if config.tensor_parallel_size > 1:
        _refuse_tensor_parallel(config.tensor_parallel_size, spec)


def _refuse_tensor_parallel(size: int, spec: ModelSpec) -> None:
    sizes = [n for n in range(1, min(spec.num_heads, 16) + 1) if spec.num_heads % n == 0]
    why = f"This version runs a model on one device, --tensor-parallel-size 1 (asked: {size})."
    if size not in sizes:
        why += f" {spec.num_heads} heads could only be split evenly by {', '.join(map(str, sizes))}."
    raise UnsupportedOption(
        f"--tensor-parallel-size {size} is not supported by this version.",
        why,
        "Leave the flag out, or pick a device with --device cuda:N.",
        param="tensor_parallel_size",
    )


def _check_position_limit(config: EngineConfig, spec: ModelSpec) -> None:
    if config.max_model_len is not None and config.max_model_len > spec.max_position:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is longer than this model's context.",
            f"It was trained for {format_count(spec.max_position)} positions.",
            f"--max-model-len {spec.max_position}, or leave it out: auto takes the largest that fits.",
            param="max_model_len",
        )


def choose_gpu(device: str, hardware: Hardware) -> Gpu | None:
    """Return the GPU to use, None for the CPU. 'auto' takes the GPU with the most free memory."""
    kind, _, index = device.partition(":")
    if device == "cpu" or (device == "auto" and not hardware.gpus):
        return None
    if kind not in ("auto", "cuda") or (index and not index.isdigit()) or (kind == "auto" and index):
        raise ConfigError(
            f"--device {device} is not known.", "Known: auto, cpu, cuda, cuda:N.", "--device auto", param="device"
        )
    if not hardware.gpus:
        raise ConfigError(
            f"--device {device} asks for a GPU and none is usable here.",
            "There is no GPU, or its driver does not match this build of torch.",
            "localllm doctor, or --device cpu",
            param="device",
        )
    if device == "auto":
        usable = [gpu for gpu in hardware.gpus if gpu.is_supported]
        return max(usable, key=lambda gpu: gpu.free_bytes) if usable else None
    found = next((gpu for gpu in hardware.gpus if gpu.index == int(index or 0)), None)
    if found is None:
        there = ", ".join(f"cuda:{gpu.index} ({gpu.name})" for gpu in hardware.gpus)
        raise ConfigError(f"--device {device} does not exist.", f"There is {there}.", param="device")
    if not found.is_supported:
        raise ConfigError(
            f"--device {device} is too old.", _too_old(found), "--device cpu, or leave the flag out.", param="device"
        )
    return found


def _too_old(gpu: Gpu) -> str:
    has, needs = (".".join(map(str, capability)) for capability in (gpu.compute_capability, MIN_COMPUTE_CAPABILITY))
    return f"{gpu.name} has compute capability {has}; the kernels need {needs} (Turing) or newer."


# ---- sizes -----------------------------------------------------------------------------------------------------------


class _PlanAttempt:
    """One planning attempt: its inputs, its budget, and what fits."""

    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        stored_bytes: int,
        hardware: Hardware,
        gpu: Gpu | None,
        resident_bytes: ResidentBytes | None,
        measured: Measured | None,
    ) -> None:
        self.config, self.spec, self.gpu, self.measured = config, spec, gpu, measured
        self.stored_bytes, self.resident_bytes = stored_bytes, resident_bytes
        self.notes: list[str] = list(quantization_notes(spec.quantization))
        if spec.architecture in FAMILY_OF and (note := FAMILY_OF[spec.architecture].note):
            self.notes.append(note)
        if config.trust_remote_code and spec.implementation != "remote":
            self.notes.append("--trust-remote-code changes nothing: this model needs no code of its checkpoint.")
        if gpu is None and config.device == "auto":
            self.notes += [f"{_too_old(each)} The model runs on the CPU." for each in hardware.gpus[:1]]
        self.free, self.reserve = free_and_reserve(hardware, gpu)
        share = config.gpu_memory_utilization if gpu else 1.0
        self.budget = int(max(0, self.free - self.reserve) * share)
        self.device = f"cuda:{gpu.index}" if gpu else "cpu"
        self.dtype = self._choose_dtype()
        self._refuse_latents()
        self.batched_tokens = config.max_num_batched_tokens or (2048 if gpu else 1024)
        self.block_size = config.block_size or (BLOCK_SIZE_GPU if gpu else BLOCK_SIZE_CPU)
        self.kv_dtype = KV_DTYPES.get(config.kv_cache_dtype, self.dtype)
        self.block_bytes = self.block_size * kv_bytes_per_token(spec, self.kv_dtype)
        self.step = StepMemory(
            spec, self.dtype, self.kv_dtype, gpu is not None, config.max_num_seqs, self.batched_tokens, self.block_size,
            is_quantized=spec.quantization is not None or config.quantization is not None,
            prompt_embeds=config.enable_prompt_embeds,
        )  # fmt: skip
        self.graphs = self._graph_bytes() if gpu and not config.enforce_eager else 0

    def plan(self) -> MemoryPlan:
        self._require_weights()
        max_model_len = self._choose_context()
        plan = self._plan_for(max_model_len, self._num_blocks(max_model_len))
        return replace(plan, notes=(*self.notes, *self._closing_notes(plan)))

    def _plan_for(self, max_model_len: int, num_blocks: int) -> MemoryPlan:
        """Return the plan for this context and cache, whether it fits or not."""
        return MemoryPlan(
            device=self.device,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            max_model_len=max_model_len,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.batched_tokens,
            long_prefill_token_threshold=self._long_prefill_threshold(),
            num_blocks=num_blocks,
            block_size=self.block_size,
            weights_bytes=self._weights(max_model_len),
            kv_bytes=num_blocks * self.block_bytes,
            activation_bytes=self._activation_bytes(max_model_len, num_blocks),
            reserve_bytes=self.reserve,
            free_bytes=self.free,
            async_depth=self._async_depth(),
            graph_bytes=self.graphs,
            sampler_bytes=0 if self.measured else self.step.sampler_bytes(max_model_len, num_blocks),
            is_measured=self.measured is not None,
            quantization=quantization_in_words(
                self.spec.quantization, self.config.quantization, self.device, self.config.cpu_weights
            ),
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
        as_float32, as_bfloat16 = (self._resident(dtype, MIN_CONTEXT) for dtype in ("float32", "bfloat16"))
        if 2 * as_float32 <= self.budget or as_bfloat16 == as_float32:
            return "float32"
        self.notes.append(
            f"bfloat16 instead of float32: in float32 the weights would take {format_bytes(as_float32)}, more than "
            f"half of the usable {format_bytes(self.budget)}. --dtype float32 forces float32."
        )
        return "bfloat16"

    # -- sizes

    def _resident(self, dtype: str, max_model_len: int) -> int:
        if self.resident_bytes is not None:
            return self.resident_bytes(self.device, dtype, max_model_len, self.config.quantization)
        return math.ceil(self.stored_bytes * DTYPE_BYTES[dtype] / DTYPE_BYTES[self.spec.dtype])

    @cached_property
    def _weights_line(self) -> tuple[int, int]:
        """Bytes of the weights without rotary tables, and of the tables per position."""
        one, two = (self._resident(self.dtype, length) for length in (1, 2))
        return 2 * one - two, two - one

    def _weights(self, max_model_len: int) -> int:
        if self.measured is not None:
            return self.measured.weights_bytes
        at_none, each = self._weights_line
        return at_none + each * max_model_len

    def _activation_bytes(self, max_model_len: int, num_blocks: int) -> int:
        if self.measured is not None:
            return self.measured.activation_bytes
        return self.step.bytes_at(max_model_len, num_blocks)

    def _graph_bytes(self) -> int:
        """Return the bytes of the driver, one step's activations in the graphs' pool, and the shared logits buffer."""
        logits = max(GRAPH_ROWS, self.config.max_num_seqs) * self.spec.vocab_size * 4
        return GRAPH_BYTES + logits + self._activation_bytes(0, 0)

    def _blocks_for(self, tokens: int) -> int:
        """Return the blocks that one request of this length needs, plus the null block."""
        return math.ceil(tokens / self.block_size) + 1

    def _room_for_kv(self, max_model_len: int) -> int:
        """Return the bytes left for KV cache and activations."""
        return self.budget - self._weights(max_model_len) - self.graphs

    def _blocks_left(self, max_model_len: int) -> int:
        available = self._room_for_kv(max_model_len)
        if self.measured is not None:
            return max(0, available - self.measured.activation_bytes) // self.block_bytes
        step = self.step  # takes the larger of two amounts, one of which grows with the cache
        blocks = (available - step.fixed_bytes(max_model_len)) // self.block_bytes
        gathered = step.gathered_per_block()
        if gathered:
            for_blocks = available - step.gathering_bytes(max_model_len)
            most = max(0, for_blocks - step.most_gathered_blocks() * gathered) // self.block_bytes
            blocks = min(blocks, max(for_blocks // (self.block_bytes + gathered), most))
        return max(0, blocks)

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
        low, high = 0, math.ceil(self.spec.max_position / self.block_size)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._context_fits(middle * self.block_size) else (low, middle)
        return low * self.block_size

    # -- decisions and refusals

    def _require_weights(self) -> None:
        least = min(MIN_CONTEXT, self.config.max_model_len or MIN_CONTEXT, self.spec.max_position)
        plan = self._plan_for(least, self._blocks_for(least))
        need = plan.total_bytes
        if need <= self.budget:
            return
        error = DoesNotFit(
            f"The model does not fit {self._place()}.",
            f"Weights need {format_bytes(plan.weights_bytes)} in {self.dtype}, with one short request and a step of "
            f"{format_count(self.batched_tokens)} tokens {format_bytes(need)}; the budget is "
            f"{format_bytes(self.budget)} ({self._budget_in_words()}).",
            self._room_hint(need),
        )
        error.plan = plan
        raise error

    def _room_hint(self, need: int) -> str:
        usable = max(1, self.free - self.reserve)
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
                f"which take {format_bytes(self._weights(length))}.",
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
            return max(1, self.batched_tokens // 4)
        return min(asked, self.batched_tokens)

    def _async_depth(self) -> int:
        asked = self.config.async_scheduling
        return 2 if (self.gpu is not None if asked is None else asked) else 1

    # -- words

    def _place(self) -> str:
        return f"on {self.gpu.name}" if self.gpu else "in this machine's memory"

    def _budget_in_words(self) -> str:
        words = f"{format_bytes(self.free)} free, {format_bytes(self.reserve)} kept in reserve"
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


def free_and_reserve(hardware: Hardware, gpu: Gpu | None) -> tuple[int, int]:
    """Return the free bytes, and the reserve that is left alone.

    GPU: the reserve is for the device context, library workspaces, fragmentation, and a desktop that may grow.
    CPU: for the interpreter and its libraries, the page cache of the weights file, and other programs.
    """
    if gpu is not None:
        return gpu.free_bytes, max(GIB // 2, int(0.03 * gpu.total_bytes))
    return hardware.ram_available_bytes, max(GIB // 2, int(0.05 * hardware.ram_total_bytes))


def _capability_name(gpu: Gpu) -> str:
    return ".".join(map(str, gpu.compute_capability))
