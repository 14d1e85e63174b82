"""Models of real shapes with random weights, made on the device, to measure speed without a download.

No file is read: an 8B model takes about as long as filling its memory. Each matrix keeps the variance of its input, so
activations stay of ordinary size, and kernels meet no infinities or denormals that a trained model would not have. The
model's output is meaningless.
Does not know: checkpoints; who measures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from localllm.kernels.cpu.pack import CpuPacker
from localllm.kernels.moe.weights import ExpertWeights, needs_stacked_experts
from localllm.kernels.quantized_weight import QuantizedWeight
from localllm.models.decoder.builder import DecoderBuilder
from localllm.models.decoder.decoder import DecoderModel
from localllm.models.layers.linear import Linear
from localllm.models.layers.moe import join_experts
from localllm.models.read_spec import spec_of_config
from localllm.models.spec.model_spec import ModelSpec

WeightFormat = Literal["16-bit", "fp8", "int8", "int4"]
"""int4: groups of 128 with zero points, as in most AWQ and GPTQ checkpoints. The head stays in 16 bits."""
GROUP_SIZE = 128

_LLAMA_3: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "torch_dtype": "bfloat16",
}
_LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_QWEN_3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "torch_dtype": "bfloat16",
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        **_LLAMA_3,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_scaling": {**_LLAMA_3_ROPE, "factor": 8.0},
        "tie_word_embeddings": False,
    },
    "llama-3.1-70b": {
        **_LLAMA_3,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "rope_scaling": {**_LLAMA_3_ROPE, "factor": 8.0},
        "tie_word_embeddings": False,
    },
    "llama-3.2-1b": {
        **_LLAMA_3,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rope_scaling": {**_LLAMA_3_ROPE, "factor": 32.0},
        "tie_word_embeddings": True,
    },
    "qwen2.5-0.5b": {
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "torch_dtype": "bfloat16",
    },
    "qwen3-4b": {
        **_QWEN_3,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
    "qwen3-14b": {
        **_QWEN_3,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": {
        **_QWEN_3,
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "gemma-3-4b": {
        "architectures": ["Gemma3ForCausalLM"],
        "vocab_size": 262208,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    },
    "tiny": {  # for a quick try of a script
        **_LLAMA_3,
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
    "qwen3.5-0.8b": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "full_attention_interval": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    },
}
"""Fields of the published config.json files that decide the shape."""


def shape_spec(name: str, **changes: Any) -> ModelSpec:
    """Return the spec of a shape in `SHAPES`; `changes` replace config fields, such as num_hidden_layers=1."""
    return spec_of_config({**SHAPES[name], **changes})


def random_model(
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    *,
    weights: WeightFormat = "16-bit",
    max_model_len: int | None = None,
    seed: int = 0,
    cpu_weights: str = "fast",
) -> DecoderModel:
    """Build a model of `spec` on `device`. The same seed, device type and torch version give the same numbers."""
    with torch.inference_mode():
        source = RandomTensors(device, dtype, seed, weights, cpu_weights)
        return DecoderBuilder(spec, source, device, dtype).build(
            min(max_model_len or spec.max_position, spec.max_position)
        )


class RandomTensors:
    """A `TensorSource` of random numbers. Each matrix is quantised as soon as it is made."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, seed: int, weights: WeightFormat = "16-bit",
        cpu_weights: str = "fast",
    ) -> None:  # fmt: skip
        self.device, self.dtype, self.packer = device, dtype, CpuPacker(cpu_weights)
        self._quantize = _quantizer(weights)
        self._generator = torch.Generator(device).manual_seed(seed)

    def head(self, rows: Tensor) -> None:
        return None

    def keeps_half(self, dtype: torch.dtype, shape: tuple[int, int]) -> bool:
        return False

    def has(self, name: str) -> bool:
        return not name.endswith(".A")  # rates of decay are made from A_log, so that states decay

    def take(
        self,
        names: Iterable[str],
        shape: tuple[int, ...],
        *,
        keep_narrow: bool = False,
        dtype: torch.dtype | None = None,
        rows: range | None = None,
    ) -> Tensor:
        """Return norm weights near 1, matrices with deviation 1/sqrt(inputs), or small biases."""
        name = next(iter(names))
        shape = shape if rows is None else (len(rows), *shape[1:])
        out = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        if name.endswith("norm.weight"):
            return out.normal_(1.0, 0.02, generator=self._generator)
        if name.endswith(".bias"):
            return out.normal_(0.0, 0.02, generator=self._generator)
        return out.normal_(0.0, 1 / math.sqrt(shape[-1]), generator=self._generator)

    def values(self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype | None = None) -> Tensor:
        return self.take([name], shape, dtype=dtype)

    def table(
        self,
        name: str,
        shape: tuple[int, int],
        *,
        keep_narrow: bool = False,
        rows: range | None = None,
        has_head: bool = False,
    ) -> Tensor:
        return self.take([name], shape, rows=rows)

    def widened(self, stem: str, columns: range, total: int) -> range:
        return columns

    def widened_experts(self, prefix: str, name: str, columns: range, total: int) -> range:
        return columns

    def linear(
        self,
        stems: Sequence[str],
        shape: tuple[int, int],
        *,
        bias: bool = False,
        order: Tensor | None = None,
        columns: range | None = None,
    ) -> Linear:
        """Return a random layer. The order of random rows does not matter. The head stays in 16 bits."""
        shape = (shape[0] if order is None else len(order), shape[1] if columns is None else len(columns))
        weight = self.take([f"{stem}.weight" for stem in stems], shape)
        biases = self.take([f"{stem}.bias" for stem in stems], shape[:1]) if bias else None
        matrix = weight if stems[0] == "lm_head" else self._quantize(weight)
        return Linear(matrix, biases, packer=self.packer)

    def experts(
        self,
        prefix: str,
        names: Sequence[str],
        shape: tuple[int, int, int],
        *,
        bias: bool = False,
        own: range | None = None,
        order: Tensor | None = None,
        columns: range | None = None,
    ) -> tuple[ExpertWeights, Tensor | None]:
        """Return random experts; tokens spread evenly over them."""
        count, rows = shape[0] if own is None else len(own), shape[1] if order is None else len(order)
        width = shape[2] if columns is None else len(columns)
        matrices = (self._quantize(self.take([f"{prefix}.{names[0]}.weight"], (rows, width))) for _ in range(count))
        biases = self.take([f"{prefix}.{names[0]}.bias"], (count, rows)) if bias else None
        at_once = needs_stacked_experts(self.device)
        return join_experts(matrices, count, at_once=at_once, packer=self.packer), biases


def _quantizer(weights: WeightFormat) -> Callable[[Tensor], Tensor | QuantizedWeight]:
    if weights == "int4":
        from localllm.kernels.int4_linear import quantize_int4

        return lambda weight: quantize_int4(weight, GROUP_SIZE)
    if weights == "fp8":
        from localllm.kernels.fp8_linear import quantize_fp8

        return lambda weight: quantize_fp8(weight, "channel")
    if weights == "int8":
        from localllm.kernels.int8_linear import quantize_int8

        return lambda weight: quantize_int8(weight)
    assert weights == "16-bit", weights
    return lambda weight: weight
