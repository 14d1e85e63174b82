"""The groups of kernels that a model can be served without: PyTorch then computes what they compute.

Every operation has a twin in plain torch beside its kernel. The twin is slower, and right where a GPU, its driver or a
compiler gets a kernel wrong. `LaunchOptions.without` names the groups whose twins are used; --kernels torch names all.
Does not know: the kernels, how a wrong one is found.
"""

from __future__ import annotations

from typing import Literal, get_args

Kernel = Literal[
    "products", "attention", "rotation", "norms", "activations", "experts", "adapters", "recurrent", "sampling", "steps"
]
"""A group is what is replaced at once: its kernels pass each other values that a twin neither makes nor reads."""

ALL_KERNELS: frozenset[Kernel] = frozenset(get_args(Kernel))
