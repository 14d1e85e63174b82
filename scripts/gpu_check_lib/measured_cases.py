"""Which cases `scripts/bench_kernels` measures, in which order: the largest part of a step first, since time may run
out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from scripts.gpu_check_lib.kernel_cases import (
    Bench,
    Maker,
    attention_cases,
    linear_cases,
    row_cases,
    sampling_cases,
)
from scripts.random_weights import shape_spec

GROUPS = ("linear", "attention", "rows", "sampling")


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    makers: list[Maker]
    formats: tuple[str, ...] = ()  # of weights: where another kernel takes over is measured after these cases


@dataclass(frozen=True, slots=True)
class Wanted:
    """The arguments of the script. Another process makes the same cases of them."""

    shape: str
    device: str  # "cuda" or "cpu"
    groups: tuple[str, ...] = GROUPS
    rows: tuple[int, ...] = ()  # of x; (): the default

    def bench(self) -> Bench:
        spec = shape_spec(self.shape)
        if self.device == "cpu":
            return Bench(spec, torch.device("cpu"), torch.float32, 1 << 16)
        device = torch.device("cuda")
        dtype = torch.bfloat16 if torch.cuda.get_device_capability() >= (8, 0) else torch.float16
        return Bench(spec, device, dtype, torch.cuda.get_device_properties(device).L2_cache_size)

    def parts(self, bench: Bench) -> Iterator[Part]:
        on_gpu = self.device == "cuda"
        rows = list(self.rows) or ([1, 16, 64, 256, 2048] if on_gpu else [1, 7])
        decodes = [(1, 1024), (16, 1024), (64, 1024), (256, 1024), (1, 32768), (16, 8192)] if on_gpu else [(3, 100)]
        prompts = [2048, 8192] if on_gpu else [70]
        if "linear" in self.groups:
            yield Part("16-bit", list(linear_cases(bench, rows, ["16-bit"])), ("16-bit",))
            yield Part("int4", list(linear_cases(bench, rows, ["int4"])), ("int4",))
        if "attention" in self.groups:
            yield Part("attention", list(attention_cases(bench, decodes, prompts)))
        if "linear" in self.groups:
            yield Part("8-bit", list(linear_cases(bench, rows, ["fp8", "int8"])), ("fp8", "int8"))
        if "rows" in self.groups:
            yield Part("rows", list(row_cases(bench, rows)))
        if "sampling" in self.groups:
            yield Part("sampling", list(sampling_cases(bench, rows)))
