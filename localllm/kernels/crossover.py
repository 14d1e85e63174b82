"""Up to how many rows of x a matrix product uses its kernel for few rows, which reads W as it is stored.

With more rows another one is faster: cuBLAS, 8-bit activations, or W converted to 16 bits first. Each file of a product
has its own rule for the number; `scripts/bench_kernels --tune` measures both on a GPU.
Does not know: the kernels.
"""

from __future__ import annotations

from typing import NamedTuple


class Crossover(NamedTuple):
    skinny_rows: int  # the kernel for few rows is used up to so many
