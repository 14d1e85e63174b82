"""The sampler's kernels at the vocabularies of Llama 3 and Qwen 2.5: memory bound, so few registers and no tensor core."""

from __future__ import annotations

from typing import Any

from localllm.kernels.launch import next_power_of_2
from localllm.kernels.sampling import draw, nucleus
from tests.kernels.ahead_of_time import Variant

LLAMA, QWEN = 128_256, 151_936
SLOTS = {"slots_ptr": "*i64", "lengths_ptr": "*i64", "seed_ptr": "*i64", "temperature_ptr": "*fp64"}
LESS = {"top_k_ptr": "*i64", "top_p_ptr": "*fp64", "min_p_ptr": "*fp64"}
KEPT = {"value_ptr": "*fp32", "last_id_ptr": "*i64"}
FOUND = {"best_ptr": "*fp32", "scores_ptr": "*fp32", "groups_ptr": "*i32", "heads_ptr": "*fp32", "masses_ptr": "*fp32"}
ROW = {"row_stride": "i32", "V": "i32"}


def _race(name: str, logits: str, **constants: Any) -> Variant:
    return Variant(
        name, draw._race_kernel, {"logits_ptr": f"*{logits}", **SLOTS, **LESS, **KEPT, **FOUND, **ROW},
        {"BLOCK": draw.BLOCK, **constants}, aligned=("row_stride", "V"), max_registers=128,
    )  # fmt: skip


def _pick(name: str, logits: str, vocab_size: int, kept: bool) -> Variant:
    found = {"best_ptr": "*fp32", "scores_ptr": "*fp32", "groups_ptr": "*i32"}
    out = {"token_ids_ptr": "*i64", "out_best_ptr": "*fp32", **ROW, "num_blocks": "i32"}
    return Variant(
        name, draw._pick_kernel, {"logits_ptr": f"*{logits}", **SLOTS, **KEPT, **found, **out},
        {"KEPT": kept, "BLOCKS": next_power_of_2(-(-vocab_size // draw.BLOCK))}, num_warps=1,
        aligned=("row_stride", "V"), max_registers=64,
    )  # fmt: skip


def _nucleus(name: str, logits: str, vocab_size: int) -> Variant:
    ends = {"heads_ptr": "*fp32", "masses_ptr": "*fp32", "near_ptr": "*i32", "between_ptr": "*fp32", **KEPT, **ROW}
    return Variant(
        name, nucleus._nucleus_kernel,
        {"logits_ptr": f"*{logits}", "slots_ptr": "*i64", "temperature_ptr": "*fp64", **LESS, **ends},
        {"GROUPS": next_power_of_2(-(-vocab_size // 64)), "TRIES": nucleus.TRIES}, num_warps=16,
        aligned=("row_stride", "V"), max_registers=128,
    )  # fmt: skip


VARIANTS = [
    _race("V 128256 and 151936, fp32, plain rows", "fp32", FILTERS=False, KEPT=False),
    _race("V 128256 and 151936, bf16, first pass", "fp32", FILTERS=True, KEPT=False),
    _race("V 128256 and 151936, fp32, second pass", "fp32", FILTERS=True, KEPT=True),
    _pick("V 128256, fp32", "fp32", LLAMA, False),
    _pick("V 151936, fp32, kept in part", "fp32", QWEN, True),
    _nucleus("V 128256, fp32", "fp32", LLAMA),
    _nucleus("V 151936, fp32", "fp32", QWEN),
]
