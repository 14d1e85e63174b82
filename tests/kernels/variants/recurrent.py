"""The recurrent operations at the sizes of Qwen3.5 4B, LFM2 1.2B, Granite 4 H Tiny and Nemotron-H."""

from typing import Any

from localllm.kernels.causal_conv import TOKENS, _causal_conv_kernel
from localllm.kernels.gated_delta import EPS, _gated_delta_kernel
from localllm.kernels.gated_norm import _gated_norm_kernel
from localllm.kernels.rms_norm import norm_launch
from localllm.kernels.selective_scan import _selective_scan_kernel
from tests.kernels.ahead_of_time import MEMORY, Variant

ROWS = dict.fromkeys(("cu_seqlens_ptr", "read_ptr", "write_ptr", "save_ptr"), "*i32")


def convolution(name: str, taps: int, silu: bool, dtype: str = "bf16", *, bias: bool = False, **fields: Any) -> Variant:
    pointers = dict.fromkeys(("x_ptr", "state_ptr", "out_ptr"), f"*{dtype}")
    signature = {**pointers, **ROWS, "weight_ptr": "*fp32", "x_stride": "i32", "channels": "i32"}
    constants = {"TAPS": taps, "SILU": silu, "TOKENS": TOKENS, "BLOCK": 128}
    if bias:
        signature["bias_ptr"] = "*fp32"
    else:
        constants["bias_ptr"] = None
    aligned = ("x_stride", "channels")
    return Variant(
        name, _causal_conv_kernel, signature, constants, aligned=aligned, max_registers=160, not_early=MEMORY, **fields
    )


def delta(name: str, key_heads: int, heads: int, dtype: str = "bf16", tiled: bool = False, **fields: bool) -> Variant:
    strides = [f"{each}_stride" for each in "qkvab"]
    signature = {
        **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "a_ptr", "b_ptr", "out_ptr"), f"*{dtype}"),
        **dict.fromkeys(("rate_ptr", "dt_bias_ptr", "state_ptr"), "*fp32"),
        **ROWS, **dict.fromkeys(strides, "i32"), "scale": "fp32", "beta_scale": "fp32",
    }  # fmt: skip
    constants = {
        "HEADS": heads, "KEY_HEADS": key_heads, "DK": 128, "DV": 128, "TILED": tiled, "EPS": EPS, "ROWS": 128,
        "COLUMNS": 16,
    }  # fmt: skip
    return Variant(
        name, _gated_delta_kernel, signature, constants, num_warps=1, aligned=tuple(strides), max_registers=224,
        not_early=MEMORY, **fields,
    )  # fmt: skip


def scan(name: str, heads: int, groups: int, size: int, dtype: str = "bf16", **fields: bool) -> Variant:
    strides = [f"{each}_stride" for each in ("x", "dt", "b", "c")]
    signature = {
        **dict.fromkeys(("x_ptr", "dt_ptr", "b_ptr", "c_ptr", "out_ptr"), f"*{dtype}"),
        **dict.fromkeys(("rate_ptr", "dt_bias_ptr", "skip_ptr", "state_ptr"), "*fp32"),
        **ROWS, **dict.fromkeys(strides, "i32"), "least": "fp32", "most": "fp32",
    }  # fmt: skip
    constants = {"HEADS": heads, "GROUPS": groups, "SIZE": size, "WIDTH": 128, "ROWS": 16, "COLUMNS": 128}
    return Variant(
        name, _selective_scan_kernel, signature, constants, num_warps=1, aligned=tuple(strides), max_registers=224,
        not_early=MEMORY, **fields,
    )  # fmt: skip


def norm(name: str, groups: int, width: int, gate_first: bool, **fields: bool) -> Variant:
    block, num_warps = norm_launch(width)
    signature = {
        **dict.fromkeys(("x_ptr", "gate_ptr", "out_ptr"), "*bf16"), "weight_ptr": "*fp32", "x_stride": "i32",
        "gate_stride": "i32", "eps": "fp32",
    }  # fmt: skip
    constants = {
        "GROUPS": groups, "WIDTH": width, "SHARED": not gate_first, "GATE_FIRST": gate_first, "BLOCK": block,
        "PDL": False,
    }  # fmt: skip
    return Variant(
        name, _gated_norm_kernel, signature, constants, num_warps=num_warps, aligned=("x_stride", "gate_stride"),
        max_registers=64, **fields,
    )  # fmt: skip


VARIANTS = [
    convolution("Qwen3.5, bf16", 4, True, hip=True),
    convolution("LFM2, bf16", 3, False),
    convolution("Granite 4 H, with a bias, fp16", 4, True, "fp16", bias=True, max_spills=4),
    delta("Qwen3.5 4B, bf16", 16, 32, hip=True),
    delta("Qwen3.5 4B from GGUF, fp16", 16, 32, "fp16", True),
    scan("Granite 4 H Tiny, bf16", 48, 1, 64, hip=True),
    scan("Nemotron-H 8B, bf16", 128, 8, 64),
    norm("Qwen3.5 4B, norm before gate", 32, 128, False, hip=True),
    norm("Granite 4 H Tiny, gate before norm", 1, 3072, True),
]
