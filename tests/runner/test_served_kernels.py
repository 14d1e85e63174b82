"""What served models launch compiles for each kind of GPU, and fits into its shared memory.

The variants of tests/kernels/variants are written by hand, with real sizes and budgets; here the arguments are those of
the launches themselves, of small models in every way of serving.
"""

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from localllm.kernels.checks.plain import _add_in_turn_kernel, _load_tile_kernel
from localllm.kernels.first_launch import _add_one_kernel
from localllm.kernels.launch import INTERPRETED
from localllm.kernels.paged_attention.kernels import plan_kernel
from tests.kernels.ahead_of_time import SHARED_BYTES
from tests.kernels.ahead_of_time import launched_kernels as kernels
from tests.runner.pretend_gpu import pretend_gpu
from tests.runner.served import SERVED, runner_of

pytestmark = [pytest.mark.slow, pytest.mark.skipif(INTERPRETED, reason="the interpreter replaces the compiler")]

EVERYWHERE = (
    "dense",
    "int4",
    "fp8",
    "int8",
    "mixture",
    "mixture-int4",
    "windows",
    "delta",
    "mamba",
    "adapters",
    "latent",
)
ON_HOPPER = (*EVERYWHERE, "convolution", "sinks", "latent-fp8", "int8", "windows-int8-cache", "deterministic", "rank-0")
ON_TURING = tuple(name for name in EVERYWHERE if name != "latent")
"""Without latent attention: a tile of 576 numbers a head takes 128 KiB of shared memory, and Turing has 64."""


NOT_OF_SMALL_MODELS = tuple(
    f"localllm.kernels.{name}"
    for name in (
        "indexer",  # no model in SERVED chooses keys
        "moe.from_lanes",  # nor has experts in RAM
        "prepare_drafts",  # nor a drafter
    )
)
"""Modules whose kernels are compiled by their variants alone (tests/kernels/variants)."""


def sources(arch: int, names: Sequence[str]) -> list[Any]:
    """Return what the warm-up of these models compiles, each once."""
    found: dict[str, Any] = {}
    for served in SERVED:
        if served.name not in names:
            continue
        dtype = torch.float16 if arch < 80 else served.dtype
        with pretend_gpu(arch) as compiled:
            runner = runner_of(replace(served, dtype=dtype, arch=arch), None)
            runner.warm_up()
            runner.close()
        found |= {f"{kernel.__name__} {rest}": (kernel, *rest) for kernel, *rest in compiled.sources}
    return list(found.values())


_sources: list[Any] = []  # of a child


def _collect(arch: int, names: Sequence[str]) -> None:
    _sources[:] = sources(arch, names)


def _compile(number: int, arch: int) -> str:
    """Compile in a child; return what is wrong."""
    kernel, options, signature, constants, attributes = _sources[number]
    try:
        made = triton.compile(
            ASTSource(kernel, signature, constants, attributes), target=GPUTarget("cuda", arch, 32), options=options
        )
    except Exception as error:
        return f"{kernel.__name__} {constants}: {type(error).__name__} {str(error)[:200]}"
    if made.metadata.shared > SHARED_BYTES[arch] * 1024:
        return f"{kernel.__name__} {constants}: {made.metadata.shared} bytes of shared memory"
    return ""


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("arch", [75, 80, 86, 89, 90, 100, 120])
def test_what_models_launch_compiles(arch: int) -> None:
    names = {75: ON_TURING, 90: ON_HOPPER}.get(arch, EVERYWHERE)
    found = sources(arch, names)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), spawn, initializer=_collect, initargs=(arch, names)) as pool:
        wrong = list(filter(None, pool.map(_compile, range(len(found)), [arch] * len(found), chunksize=4)))
    assert not wrong, "\n".join(wrong)


def test_small_models_launch_every_kernel() -> None:
    launched = {id(kernel) for kernel, *_ in sources(90, [served.name for served in SERVED])}
    others = {id(_add_one_kernel), id(_add_in_turn_kernel), id(_load_tile_kernel)}  # launched before there is a model
    others.add(id(plan_kernel))  # only where torch prepares the steps (test_prepare_step.py compares it)
    others |= {key for key, kernel in kernels().items() if kernel.fn.__module__ in NOT_OF_SMALL_MODELS}
    assert not [kernel.__name__ for key, kernel in kernels().items() if key not in launched | others]
