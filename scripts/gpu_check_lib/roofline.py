"""The least time of a step on a GPU of known ceilings, and the target figures.

    decode    max(weight bytes / copy, 2 x batch x parameters / GEMM) + KV bytes / copy
    prefill   2 x layer parameters x tokens / GEMM + causal attention / GEMM          the head runs on one row

Floors are arithmetic; figures.py measures.
Does not know: how anything is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from localllm.models.spec.model_spec import ModelSpec, kv_numbers_per_token
from localllm.tuning.workload import Workload

WEIGHT_BITS = {"16-bit": 16.0, "fp8": 8.0, "int8": 8.0, "int4": 4 + 20 / 128}
"""Bits per weight of a layer; int4: with a 16-bit scale and a 4-bit zero per 128. The head has 16."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured limits of this GPU."""

    copy_bytes_per_s: float  # read and written together
    bf16_flops_per_s: float
    fp8_flops_per_s: float | None  # None: not supported by this GPU or this torch

    def flops_per_s(self, weights: str) -> float:
        """Return the GEMM limit for weights of this format when many rows share them."""
        return self.fp8_flops_per_s or self.bf16_flops_per_s if weights == "fp8" else self.bf16_flops_per_s


@dataclass(frozen=True, slots=True)
class Work:
    """The numbers that a model of this shape reads and multiplies."""

    layer_parameters: int  # in the matrices of all layers
    head_parameters: int
    kv_bytes_per_token: int
    attention_width: int  # query heads x head_dim x layers

    def weight_bytes(self, weights: str = "16-bit") -> float:
        """Return the bytes that one decode step reads."""
        return self.layer_parameters * WEIGHT_BITS[weights] / 8 + self.head_parameters * 2

    def decode_s(self, batch: int, context: float, ceilings: Ceilings, weights: str = "16-bit") -> float:
        reading = self.weight_bytes(weights) / ceilings.copy_bytes_per_s
        multiplying = 2 * batch * (self.layer_parameters + self.head_parameters) / ceilings.flops_per_s(weights)
        return max(reading, multiplying) + batch * context * self.kv_bytes_per_token / ceilings.copy_bytes_per_s

    def prefill_s(self, tokens: int, ceilings: Ceilings, weights: str = "16-bit") -> float:
        matrices = 2 * self.layer_parameters * tokens / ceilings.flops_per_s(weights)
        # QK^T and PV, 2 FLOPs each per pair, over half of the square
        return matrices + 2 * tokens**2 * self.attention_width / ceilings.bf16_flops_per_s

    def workload_s(self, workload: Workload, ceilings: Ceilings, weights: str = "16-bit") -> float:
        """Return the arithmetic limit for a workload: all tokens through the layers, output tokens through the head."""
        tokens = workload.prompt_tokens + workload.output_tokens
        flops = 2 * (self.layer_parameters * tokens + self.head_parameters * workload.output_tokens)
        return flops / ceilings.flops_per_s(weights)


def work_of(spec: ModelSpec, kv_dtype_bytes: int = 2) -> Work:
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attention = spec.hidden_size * (q + 2 * kv) + q * spec.hidden_size
    mlp = 3 * spec.hidden_size * spec.intermediate_size
    return Work(
        layer_parameters=spec.num_layers * (attention + mlp),
        head_parameters=spec.vocab_size * spec.hidden_size,
        kv_bytes_per_token=kv_numbers_per_token(spec) * kv_dtype_bytes,
        attention_width=spec.num_layers * q,
    )


# ---- the target figures ----------------------------------------------------------------------------------------------

Kind = Literal["decode", "prefill"]
ASKED_OF = "H200"
"""The GPU for which the targets are set. On any other, figures are shown without a verdict."""


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure with a target and a floor."""

    name: str
    shape: str
    weights: str
    kind: Kind
    batch: int
    context: int  # decode: tokens before each query; prefill: tokens of the prompt
    asked_fraction: float  # floor / measured
    asked_ms: float | None = None  # a target in ms, if there is one

    @property
    def what(self) -> str:
        work = f"batch {self.batch}, context {_count(self.context)}" if self.kind == "decode" else "prefill"
        work += f" {_count(self.context)}" if self.kind == "prefill" else ""
        return f"{self.shape} {self.weights}, {work}"


GOALS: Sequence[Goal] = (
    Goal("G1", "llama-3.1-8b", "16-bit", "decode", 1, 1024, 0.87),
    Goal("G10", "llama-3.1-8b", "16-bit", "prefill", 1, 2048, 0.70, 54.0),
    Goal("G10", "llama-3.1-8b", "16-bit", "prefill", 1, 8192, 0.74, 225.0),
    Goal("G10", "llama-3.1-8b", "16-bit", "prefill", 1, 32768, 0.70, 1335.0),
    Goal("G7", "llama-3.1-8b", "16-bit", "decode", 16, 1024, 0.82),
    Goal("G7", "llama-3.1-8b", "16-bit", "decode", 64, 1024, 0.76),
    Goal("G7", "llama-3.1-8b", "16-bit", "decode", 256, 1024, 0.65),
    Goal("G9", "llama-3.1-8b", "16-bit", "decode", 1, 32768, 0.85),
    Goal("G9", "llama-3.1-8b", "16-bit", "decode", 16, 8192, 0.85),
    Goal("G2", "llama-3.2-1b", "16-bit", "decode", 1, 1024, 0.70),
    Goal("G3", "qwen2.5-0.5b", "16-bit", "decode", 1, 1024, 0.45),
    Goal("G4", "llama-3.1-8b", "fp8", "decode", 1, 1024, 0.78),
    Goal("G11", "llama-3.1-8b", "fp8", "prefill", 1, 8192, 0.62, 160.0),
    Goal("G5", "llama-3.1-8b", "int4", "decode", 1, 1024, 0.65),
    Goal("G8", "llama-3.1-8b", "int4", "decode", 16, 1024, 0.60),
    Goal("G8", "llama-3.1-8b", "int4", "decode", 64, 1024, 0.55),
    Goal("G6", "llama-3.1-70b", "int4", "decode", 1, 1024, 0.80),
)
"""In the order in which one model's goals are measured: the most important first, in case time runs out."""

OFFLINE_TOKENS_PER_S, HTTP_TOKENS_PER_S, HTTP_P99_ITL_S = 17_000.0, 13_000.0, 0.060  # G12
CROWD_TOKENS_PER_S = {(128, 1024): 60_000.0, (1024, 128): 32_000.0}  # G13, by tokens in and out
IDLE_TTFT_S = 0.015  # G14
IDLE_GAP, CRITICAL_PATH_S = 0.03, 0.3e-3  # G15
START_S = {"qwen2.5-0.5b": (12.0, None), "llama-3.1-8b": (25.0, 60.0)}
"""Seconds from the command to the first token: with the files and kernels cached, and with neither; None: any."""


def _count(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)
