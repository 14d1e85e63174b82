"""One comparison of a kernel with plain torch: what is launched, and whether its result is right.

Whole numbers must be equal. Rounded numbers are compared with the same operation in fp32, and may differ from it a
little more than torch's operation in the model's own type does.
Does not know: which kernel, which variants it has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from localllm.kernels.choice import ALL_KERNELS
from localllm.kernels.launch import LaunchOptions, launching_with
from localllm.kernels.paged_attention import KVReads


class IndexReads(NamedTuple):
    """An indexer of a model, and the latents that its choice is read from; fixed while serving."""

    reads: KVReads  # of a layer with an indexer; num_heads: of the whole layer
    rope_size: int  # of the latent: its first numbers, which belong to the key alone
    topk: int
    num_heads: int  # of the indexer
    head_dim: int
    dtype: torch.dtype  # of index keys


RMS_FACTOR, MAX_FACTOR = 1.5, 8.0
"""Limits of a kernel's error as multiples of torch's error in the same type: on average, and of a single number."""
ROUNDINGS = {torch.float32: 32.0}
"""Units in the last place that are allowed in any case, by type, as a share of the usual number; else one."""
TWINS = LaunchOptions(without=ALL_KERNELS)

Record = Callable[[Callable[[], None]], Callable[[], None]]
"""Records what a function launches as a graph, and returns what replays it."""


class Judgement(NamedTuple):
    """Distance of a result from the right one, and how large it may be. The error of NaN is NaN."""

    error: float
    limit: float

    @property
    def is_right(self) -> bool:
        return self.error <= self.limit


class Case(NamedTuple):
    """run: launches the kernel and returns its results, without waiting for the device. judge: compares them."""

    name: str
    run: Callable[[], Sequence[Tensor]]
    judge: Callable[[Sequence[Tensor]], Judgement]


class CheckedProduct(NamedTuple):
    """A matrix of the model. y: its product with x [T, K], through whatever kernel serves it."""

    name: str
    columns: int
    y: Callable[[Tensor], Tensor]
    dequantized: Callable[[], Tensor]  # [N, K] fp32, or some of its rows
    rows: slice  # of the outputs that `dequantized` returns
    bias: Tensor | None
    quantises_inputs: bool  # of many rows


@dataclass(frozen=True)
class Subject:
    """The device and the shapes that are going to be served. The shapes are empty before there is a model."""

    device: torch.device
    dtype: torch.dtype = torch.float16
    vocab_size: int = 32_000
    max_model_len: int = 4096
    record: Record | None = None  # None: no step is recorded
    products: tuple[CheckedProduct, ...] = ()
    attention: tuple[KVReads, ...] = ()
    indexer: IndexReads | None = None
    block_size: int = 64
    hidden_size: int = 0
    widths: tuple[int, ...] = ()  # of gated activations
    norm_eps: float = 1e-5
    seed: int = field(default=8)

    @property
    def arch(self) -> int:
        """Return the compute capability as 90; a large number in the interpreter, where every variant is tried."""
        if self.device.type != "cuda" or torch.version.hip is not None:
            return 999 if self.device.type != "cuda" else 80
        major, minor = torch.cuda.get_device_capability(self.device)
        return 10 * major + minor

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return normal numbers, the same at each call and on each machine."""
        generator = torch.Generator().manual_seed(self.seed + sum(shape))
        return torch.randn(*shape, generator=generator).to(self.device, dtype or self.dtype)


def equal_to(expected: Callable[[], Sequence[Tensor]]) -> Callable[[Sequence[Tensor]], Judgement]:
    """Judge by equality. The error is the number of numbers that differ."""

    def judge(results: Sequence[Tensor]) -> Judgement:
        pairs = zip(results, expected(), strict=True)
        return Judgement(sum(int((got.cpu() != right.cpu()).sum()) for got, right in pairs), 0)

    return judge


def close_to(
    expected: Callable[[], Tensor], twin: Callable[[], Tensor] | None = None, share: float = 0.0
) -> Callable[[Sequence[Tensor]], Judgement]:
    """Judge by the distance from `expected`, in fp32, of all results as one. twin: the same in the model's type, whose
    own error is the measure. share: of the usual number, in its place."""

    def judge(results: Sequence[Tensor]) -> Judgement:
        got = torch.cat([each.flatten() for each in results])
        with launching_with(TWINS):
            right = expected().float().flatten()
            rounded = None if twin is None else twin().float().flatten() - right
        usual = _rms(right)
        least = usual * max(share, torch.finfo(got.dtype).eps * ROUNDINGS.get(got.dtype, 1.0))
        off = got.float() - right
        mean = Judgement(_rms(off), least + (0.0 if rounded is None else RMS_FACTOR * _rms(rounded)))
        worst = 0.0 if rounded is None else float(rounded.abs().max())
        peak = Judgement(float(off.abs().max()), MAX_FACTOR * max(worst, least))
        return max(mean, peak, key=lambda each: _ratio(each))

    return judge


def _ratio(judged: Judgement) -> float:
    ratio = judged.error / max(judged.limit, 1e-30)
    return ratio if ratio == ratio else float("inf")  # not a number


def _rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())
