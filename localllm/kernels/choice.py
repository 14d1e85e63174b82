"""The kernels and the features of kernels that a model can be served without, and what their absence changes.

Every operation has a twin in plain torch beside its kernel. The twin is slower, and right where a GPU, its driver or a
compiler gets a kernel wrong. `LaunchOptions.without` names the groups whose twins are used; --kernels torch names all.
`LaunchOptions.avoids` names features that the kernels do without: one of them may be wrong where the rest is right.
checks/table.py lists in which order they are given up, and finds out where.

A matrix product of few rows has a kernel that reads W as stored. From some number of rows on another way is faster:
cuBLAS, 8-bit activations, or W converted to 16 bits first. Each file of a product has its own rule for the number;
`scripts/bench_kernels --tune` measures both on a GPU.
Does not know: the kernels, how a wrong one is found.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeVar, get_args

Kernel = Literal[
    "products", "attention", "indexer", "rotation", "norms", "activations", "experts", "adapters", "recurrent",
    "sampling", "steps",
]  # fmt: skip
"""A group is what is replaced at once: its kernels pass each other values that a twin neither makes nor reads."""

ALL_KERNELS: frozenset[Kernel] = frozenset(get_args(Kernel))

Feature = Literal[
    "early launch",  # a kernel starts while the previous one finishes
    "graphs",  # steps are recorded and replayed
    "drafts",  # drafts are proposed and accepted on the device
    "product TMA",  # weights are loaded by the tensor memory accelerator
    "product merge",  # where K of a product is split, the last program of a tile adds the parts
    "product kernel",  # few rows are multiplied by our kernel instead of cuBLAS
    "decode TMA",  # decode attention loads keys and values by TMA
    "decode merge",  # the last program of decode attention merges the parts
    "decode kernel",  # rows of one token have an attention kernel of their own
    "decode rotation",  # decode attention rotates and stores the newest token itself
    "prefill TMA",
    "prefill stages",  # loads of prefill attention are more than one tile ahead
    "expert TMA",
]

TMA_FEATURES: frozenset[Feature] = frozenset({"product TMA", "decode TMA", "prefill TMA", "expert TMA"})

RECORDED_TWINS: frozenset[Kernel] = frozenset({"norms", "activations", "rotation"})
"""Groups whose twins can be part of a recorded step: the others read values of the device on the host."""

SettingsT = TypeVar("SettingsT", bound=NamedTuple)

_CHANGES: dict[str, tuple[tuple[Feature, dict[str, Any]], ...]] = {
    "decode_attention": (("decode TMA", {"tma": False}),),
    "prefill_attention": (("prefill TMA", {"tma": False}), ("prefill stages", {"num_stages": 2})),
    "linear": (("product kernel", {"skinny_rows": 0}),),
    "planar_crossover": (("product kernel", {"skinny_rows": 0}),),
}
"""Launch settings without a feature, by the name under which `settings_for` is asked for them."""


def settings_without(kernel: str, settings: SettingsT, avoids: frozenset[Feature]) -> SettingsT:
    """Return the launch settings of a kernel that does without these features."""
    changed: dict[str, Any] = {}
    for feature, fields in _CHANGES.get(kernel, ()):
        changed |= fields if feature in avoids else {}
    return settings._replace(**changed) if changed else settings


class Crossover(NamedTuple):
    skinny_rows: int  # most rows for which the kernel for few rows is used
