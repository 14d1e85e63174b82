"""kernels/checks/plain.py: a chain of kernels, and a tile loaded by the tensor memory accelerator."""

from localllm.kernels.checks.plain import BLOCK, SPIN_NS, TILE, _add_in_turn_kernel, _load_tile_kernel
from tests.kernels.ahead_of_time import Variant

VARIANTS = [
    Variant(
        "a link of the chain",
        _add_in_turn_kernel,
        {"x_ptr": "*fp32"},
        {"BLOCK": BLOCK, "SPIN_NS": 0, "PREFETCHES": False},
        archs=(75, 80, 89, 90, 120),
        hip=True,
    ),
    Variant(
        "a link that prefetches and stores late",
        _add_in_turn_kernel,
        {"x_ptr": "*fp32"},
        {"BLOCK": BLOCK, "SPIN_NS": SPIN_NS, "PREFETCHES": True},
        prefetches=1,
        archs=(75, 80, 89, 90, 120),
    ),
    *(
        Variant(
            f"the last tile of {depth}",
            _load_tile_kernel,
            {
                "out_ptr": "*fp16",
                "tile": f"tensordesc<fp16[{'2,' * (depth > 1)}{TILE[0]},{TILE[1]}]>",
                "first_row": "i32",
                "first_column": "i32",
            },
            {"DEPTH": depth, "ROWS": TILE[0], "COLUMNS": TILE[1]},
            archs=(90, 120),
            hip=depth == 1,
        )
        for depth in (1, 2)
    ),
]
