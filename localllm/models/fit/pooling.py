"""The memory of a model that embeds, scores or transcribes: weights and one padded batch, no KV cache.

Does not know: torch; how batches are made (engine/pooling.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from localllm.config.settings import EngineConfig
from localllm.errors import ConfigError, DoesNotFit, UnsupportedOption
from localllm.machine.hardware import Gpu, Hardware
from localllm.models.encoders.recipe import MOST_BEAMS, PoolingRecipe, TranscriberSizes
from localllm.models.fit.activation_bytes import DTYPE_BYTES
from localllm.models.fit.devices import asked_division, choose_gpu, free_and_reserve, several_ranks_refused
from localllm.models.fit.memory_plan import MemoryPlan
from localllm.models.fit.speed import has_byte_products, speech_work
from localllm.models.formats.registry import quantization_in_words
from localllm.models.spec.model_spec import ModelSpec
from localllm.units import format_bytes

CPU_BATCHED_TOKENS, GPU_BATCHED_TOKENS = 2048, 16_384  # padded tokens of one batch
QUANTIZED_BYTES = {"int8": 1.0, "fp8": 1.0, "int4": 0.53}
"""Bytes of a weight that is quantised at load."""
WINDOW_FRAMES = 3000
"""Frames of features in the longest window of sound, 30 s."""


def plan_pooling(
    config: EngineConfig, spec: ModelSpec, recipe: PoolingRecipe, num_parameters: int, hardware: Hardware
) -> MemoryPlan:
    """Return the plan. Raises `DoesNotFit`, `ConfigError`, `UnsupportedOption` with numbers."""
    _refuse_options(config, spec, "A model that embeds or scores", ("quantization", "kv_cache_memory_bytes"))
    length = _length(config, recipe)
    gpu = choose_gpu(config, hardware)
    size = DTYPE_BYTES[_dtype(config, spec, gpu)]
    tokens = max(length, config.max_num_batched_tokens or (GPU_BATCHED_TOKENS if gpu else CPU_BATCHED_TOKENS))
    # Residual stream, projections and the widest part of a layer; attention's scores; the states in fp32 for pooling.
    width = 6 * spec.hidden_size + 2 * spec.intermediate_size
    scores = tokens * min(length, tokens) * spec.num_heads * size if length <= 1024 else 0
    activations = tokens * width * size + scores + 2 * tokens * spec.hidden_size * 4
    notes = (recipe.note,) if recipe.note else ()
    return _plan(config, spec, num_parameters * size, hardware, length, tokens, activations, notes)


def plan_transcriber(config: EngineConfig, spec: ModelSpec, sizes: TranscriberSizes, hardware: Hardware) -> MemoryPlan:
    """Return the plan of a model that transcribes. Its lengths are frames of features, of 10 ms. Raises like
    `plan_pooling`."""
    _refuse_options(config, spec, "A model that transcribes", ("kv_cache_memory_bytes",))
    if config.max_model_len is not None:
        what, why = f"--max-model-len does not apply to {spec.architecture}.", "Sound is cut into windows of 30 s."
        raise UnsupportedOption(what, why, "Leave the flag out.", param="max_model_len")
    gpu = choose_gpu(config, hardware)
    dtype = _dtype(config, spec, gpu)
    size = DTYPE_BYTES[dtype]
    frames = max(WINDOW_FRAMES, config.max_num_batched_tokens or WINDOW_FRAMES * (16 if gpu else 4))
    halves = gpu is None and sizes.halves_sources
    if sizes.per_position:
        # One window is encoded at a time. The decoder keeps keys and values of the sound and of the texts of all
        # windows that are written at once, and has their logits, in fp32, in a few copies.
        windows = frames // WINDOW_FRAMES
        rows = max(windows, MOST_BEAMS)
        own = 2 if halves else size
        kept = sizes.per_position * (windows * sizes.source_len * own + rows * sizes.text_len * size)
        activations = kept + max(sizes.encoded * size, 4 * 4 * windows * spec.vocab_size)
    else:
        # The first convolution halves frames and mels, and its activation is a copy. Then the encoder reads an eighth
        # of the frames: in attention with the scores of all others in its window and of their distances.
        sound = sizes.config.get("encoder_config") or {}
        mels, channels = sound.get("num_mel_bins", 80), sound.get("subsampling_conv_channels", 256)
        front = 2 * (frames // 2) * (mels // 2) * channels * size
        attention = 14 * spec.hidden_size + 4 * spec.num_heads * (WINDOW_FRAMES // 8)
        layer = frames // 8 * max(attention, 10 * spec.hidden_size + 2 * spec.intermediate_size) * size
        activations = 6 * frames * mels + max(front, layer)
    device = "cpu" if gpu is None else f"cuda:{gpu.index}"
    # On a CPU a decoder keeps the 16 bits of its checkpoint. int8 takes its head and the encoder, too.
    stored = 2 if halves and spec.dtype != "float32" else size
    is_narrow = config.quantization == "int8" and gpu is None and has_byte_products()
    read = QUANTIZED_BYTES.get(config.quantization or "", stored) if sizes.per_position else stored
    work = speech_work(sizes.config, read, 2 if halves else size, head_bytes=read if is_narrow else stored)
    weights = sizes.weights_bytes(device, dtype)
    plan = _plan(config, spec, weights, hardware, WINDOW_FRAMES, frames, activations, ())
    quantization = quantization_in_words(None, config.quantization, device, config.cpu_weights)
    return replace(plan, speech=work and replace(work, is_narrow=is_narrow), quantization=quantization)


def _refuse_options(config: EngineConfig, spec: ModelSpec, kind: str, names: Iterable[str]) -> None:
    for name in names:
        if getattr(config, name) is not None:
            raise UnsupportedOption(
                f"--{name.replace('_', '-')} does not apply to {spec.architecture}.",
                f"{kind} runs in 16 or 32 bits and has no KV cache.",
                "Leave the flag out.",
                param=name,
            )
    division = asked_division(config)
    if division is not None and division.num_ranks > 1:
        raise several_ranks_refused(spec.architecture, f"{kind} is not divided.")


def _dtype(config: EngineConfig, spec: ModelSpec, gpu: Gpu | None) -> str:
    if config.dtype != "auto":
        return config.dtype
    if gpu is None:
        return "float32"
    return "float16" if spec.dtype == "bfloat16" and not gpu.supports_bfloat16 else spec.dtype


def _plan(
    config: EngineConfig, spec: ModelSpec, weights: int, hardware: Hardware, length: int, tokens: int,
    activations: int, notes: tuple[str, ...],
) -> MemoryPlan:  # fmt: skip
    """Return the plan of batches of `tokens` whose inputs have at most `length`. Raises `DoesNotFit`."""
    gpu = choose_gpu(config, hardware)
    dtype = _dtype(config, spec, gpu)
    free, reserve = free_and_reserve(hardware, gpu)
    if weights + activations > free - reserve:
        where = gpu.name if gpu else "RAM"
        raise DoesNotFit(
            f"{spec.architecture} does not fit.",
            f"Weights take {format_bytes(weights)}, a batch {format_bytes(activations)}; of {where} "
            f"{format_bytes(max(0, free - reserve))} can be used.",
            "a smaller --max-num-batched-tokens" if weights < free - reserve else "Use a smaller model.",
        )
    return MemoryPlan(
        device=f"cuda:{gpu.index}" if gpu else "cpu",
        dtype=dtype,
        kv_dtype=dtype,
        max_model_len=length,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=tokens,
        long_prefill_token_threshold=tokens,
        num_blocks=(1,),
        block_size=1,
        weights_bytes=weights,
        kv_bytes=0,
        activation_bytes=activations,
        reserve_bytes=reserve,
        free_bytes=free,
        async_depth=1,
        notes=notes,
    )


def _length(config: EngineConfig, recipe: PoolingRecipe) -> int:
    if config.max_model_len is not None and config.max_model_len > recipe.max_length:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is longer than this model's context.",
            f"Its inputs have at most {recipe.max_length} tokens.",
            f"--max-model-len {recipe.max_length}, or leave it out.",
            param="max_model_len",
        )
    return config.max_model_len or recipe.max_length
