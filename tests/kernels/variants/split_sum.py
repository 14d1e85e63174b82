"""The sum of a product's splits where no other kernel adds them."""

from __future__ import annotations

from localllm.kernels.split_sum import _sum_splits_kernel
from tests.kernels.ahead_of_time import Variant

VARIANTS = [
    Variant(
        "8 splits, bf16",
        _sum_splits_kernel,
        {"out_ptr": "*bf16", "parts_ptr": "*fp32", "bias_ptr": "*bf16", "rows": "i32", "N": "i32"},
        {"SPLITS": 8, "BLOCK_N": 1024, "PDL": False},
        aligned=("N",),
        max_registers=64,
        hip=True,
    ),
]
