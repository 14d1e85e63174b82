"""The bytes of recurrent states, against the sizes that llama.cpp prints for the same models (its states are fp32)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from localllm.models.fit import kv_bytes_per_token
from localllm.models.spec.model_spec import ModelSpec, RopeSpec
from localllm.models.spec.recurrent import RecurrentSpec
from localllm.models.spec.states import StateTensor, state_bytes, state_group

MIB = 1024**2
PLAIN = ModelSpec("Some", 4, 64, 96, 8, 4, 8, 100, 512, "silu", True, "bfloat16", RopeSpec(1e4))


def hybrid(recurrent: RecurrentSpec, num_recurrent: int, num_attention: int, **fields: object) -> ModelSpec:
    kinds = ("recurrent",) * num_recurrent + ("attention",) * num_attention
    return replace(PLAIN, num_layers=len(kinds), layer_kinds=kinds, recurrent=recurrent, **fields)


def gated_delta(num_heads: int) -> RecurrentSpec:
    return RecurrentSpec("gated_delta", 4, num_heads=num_heads, num_groups=16, head_size=128, state_size=128)


LFM2 = hybrid(RecurrentSpec("short_conv", 3, width=2048), 10, 6)
MAMBA_2 = hybrid(RecurrentSpec("mamba2", 4, num_heads=128, num_groups=8, head_size=64, state_size=128), 1, 1)


@pytest.mark.parametrize(
    ("spec", "dtype", "expected"),
    [
        (hybrid(gated_delta(32), 24, 8), "bfloat16", 48 * MIB + 9 * MIB // 8),  # Qwen3.5-4B
        (hybrid(gated_delta(32), 30, 10), "float32", int(62.8125 * MIB)),  # Qwen3.6-35B-A3B: 502.5 MiB for 8 places
        (hybrid(gated_delta(48), 48, 16), "float32", int((144 + 5.625) * MIB)),  # Qwen3.6-27B: S 144.00 + R 5.62
        (MAMBA_2, "bfloat16", 4 * MIB + 60 * 1024),
        (LFM2, "bfloat16", 80 * 1024),
        (PLAIN, "bfloat16", 0),
    ],
)
def test_state_bytes(spec, dtype, expected):
    assert state_bytes(spec, dtype) == expected


def test_the_matrix_is_fp32_and_the_convolution_has_the_type_of_the_activations():
    group = state_group(hybrid(gated_delta(32), 2, 1), "float16")
    assert group.layers == (0, 1)
    assert group.tensors[0] == (
        StateTensor("conv", (2 * 16 * 128 + 32 * 128, 3), "float16"),
        StateTensor("matrix", (32, 128, 128), "float32"),
    )
    assert state_group(PLAIN, "float16") is None


def test_a_short_convolution_keeps_no_matrix():
    assert [tensor.name for tensor in state_group(LFM2, "float32").tensors[0]] == ["conv"]


def test_only_attention_layers_have_kv():
    """The KV of a hybrid is that of its attention layers: over all of them, LFM2-1.2B would count 2.7 times as much."""
    assert kv_bytes_per_token(replace(LFM2, num_kv_heads=8, head_dim=64), "bfloat16") == 12 * 1024
