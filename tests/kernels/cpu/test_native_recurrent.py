"""The recurrent operations of the native library against their twins, and the same bits with any number of threads."""

import pytest
import torch
from torch import Tensor

from localllm.kernels.causal_conv import causal_conv_reference
from localllm.kernels.cpu import recurrent
from localllm.kernels.cpu.native.choice import usable_sets
from localllm.kernels.cpu.native.library import Library, Pool, native, why_none
from localllm.kernels.cpu.native.structures import (
    NativeConvolution,
    NativeGatedDelta,
    NativeSelectiveScan,
    Recurrent,
)
from localllm.kernels.gated_delta import gated_delta_reference
from localllm.kernels.gated_norm import gated_norm_reference
from localllm.kernels.layer_cache import StateStep
from localllm.kernels.selective_scan import NO_LIMITS, selective_scan_reference
from tests.kernels.state_rows import Part, state_step

CPU = torch.device("cpu")
PARTS = [Part(0, 1, -1, 1), Part(1, 1, 2, 2, 3), Part(2, 17, -1, 4), Part(3, 9, 5, 6, 7), Part(4, 30, 8)]
TOKENS = sum(part.count for part in PARTS)


@pytest.fixture(scope="module")
def library() -> Library:
    library = native()
    if library is None:
        pytest.skip(f"there is no native library: {why_none()}")
    return library


class Inputs:
    """Tensors of a step of PARTS, the same for each run."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.step: StateStep = state_step(PARTS, CPU)
        self.mixed = torch.randn(TOKENS, 520)
        self.conv, self.matrix = torch.randn(9, 520, 3), torch.randn(9, 6, 24, 40)
        self.weight, self.bias = torch.randn(4, 520), torch.randn(520)
        self.a, self.b = torch.randn(2, TOKENS, 6)
        self.rate, self.dt_bias, self.skip = -torch.rand(6) * 4, torch.randn(6), torch.randn(6)

    def heads(self, first: int, count: int, size: int) -> Tensor:
        return self.mixed[:, first : first + count * size].unflatten(1, (count, size))


def run_all(runs: Library | Pool) -> list[Tensor]:
    """Return the outputs and states of all operations."""
    i = Inputs()
    scanned = i.matrix.clone()
    q, k, v = i.heads(0, 3, 24), i.heads(72, 3, 24), i.heads(144, 6, 40)
    b, c, x = i.heads(0, 2, 40), i.heads(80, 2, 40), i.heads(160, 6, 24)
    return [
        recurrent.causal_conv(runs, i.mixed, i.weight, i.bias, i.conv, i.step, True), i.conv,
        recurrent.gated_delta(runs, q, k, v, i.a, i.b, i.rate, i.dt_bias, i.matrix, i.step, True, 2.0), i.matrix,
        recurrent.selective_scan(runs, x, i.a, b, c, i.rate, i.dt_bias, i.skip, scanned, i.step, NO_LIMITS), scanned,
        recurrent.gated_norm(runs, v, i.heads(0, 6, 40), i.bias[:240], 1e-6, True),
    ]  # fmt: skip


def run_twins() -> list[Tensor]:
    i = Inputs()
    scanned = i.matrix.clone()
    q, k, v = i.heads(0, 3, 24), i.heads(72, 3, 24), i.heads(144, 6, 40)
    b, c, x = i.heads(0, 2, 40), i.heads(80, 2, 40), i.heads(160, 6, 24)
    return [
        causal_conv_reference(i.mixed, i.weight, i.bias, i.conv, i.step, silu=True), i.conv,
        gated_delta_reference(q, k, v, i.a, i.b, i.rate, i.dt_bias, i.matrix, i.step, tiled=True, beta_scale=2.0),
        i.matrix,
        selective_scan_reference(x, i.a, b, c, i.rate, i.dt_bias, i.skip, scanned, i.step), scanned,
        gated_norm_reference(v, i.heads(0, 6, 40), i.bias[:240], 1e-6, gate_first=True),
    ]  # fmt: skip


@pytest.mark.parametrize("name", usable_sets())
def test_every_instruction_set_agrees_with_the_twins(name: str) -> None:
    from localllm.kernels.cpu.native.library import open_library

    library, reason = open_library(name)
    if library is None:
        pytest.skip(reason)
    for ours, wanted in zip(run_all(library), run_twins(), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_threads_change_no_bit(library: Library, threads: int) -> None:
    pool, one = library.open_pool(threads), library.open_pool(1)
    wanted = run_all(one)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(run_all(pool), wanted, strict=True))
    pool.close()
    one.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_convolution_states_in_16_bits(library: Library, dtype: torch.dtype) -> None:
    """Inputs of the model's type are kept as they are."""
    i = Inputs()
    x, kept = i.mixed.to(dtype), i.conv.to(dtype)
    twins = kept.clone()
    y = recurrent.causal_conv(library, x, i.weight, None, kept, i.step, False)
    wanted = causal_conv_reference(x, i.weight, None, twins, i.step, silu=False)
    torch.testing.assert_close(y, wanted, rtol=1e-2, atol=1e-2)
    assert torch.equal(kept, twins)


@pytest.mark.parametrize(
    "operation",
    [
        NativeConvolution(channels=1, taps=1 << 45),
        NativeGatedDelta(key_heads=1, heads=1, key_dim=1 << 45, value_dim=1),
        NativeSelectiveScan(heads=1, groups=1, head_dim=1, state_size=1 << 45),
    ],
    ids=lambda operation: type(operation).__name__,
)
def test_no_memory_is_an_error_of_the_call_alone(library: Library, operation: Recurrent) -> None:
    """More than a process can address is wanted, before and after ordinary calls."""
    pool, wanted = library.open_pool(2), run_all(library)
    step = state_step(PARTS, CPU)
    rows = recurrent._rows(step)
    for _ in range(2):
        with pytest.raises(MemoryError, match="No memory for the buffers of a recurrent operation on 5 rows"):
            pool.run_recurrent(operation, rows)
        assert all(torch.equal(a, b) for a, b in zip(run_all(pool), wanted, strict=True))
    pool.close()


def test_no_rows_and_rows_without_tokens(library: Library) -> None:
    i = Inputs()
    before = i.matrix.clone()
    empty = state_step([Part(0, 0, 2, 3, 4)], CPU)
    for step in (state_step([], CPU), empty):
        none = i.mixed[:0]
        q, k, v = none[:, :72].unflatten(1, (3, 24)), none[:, 72:144].unflatten(1, (3, 24)), none[:, :240]
        v = v.unflatten(1, (6, 40))
        out = recurrent.gated_delta(library, q, k, v, i.a[:0], i.b[:0], i.rate, i.dt_bias, i.matrix, step, False)
        assert out.shape == (0, 6, 40)
    assert torch.equal(i.matrix[3], before[2])
    assert torch.equal(i.matrix[4], before[2])
    assert torch.equal(i.matrix[[0, 1, 2, 5, 6, 7, 8]], before[[0, 1, 2, 5, 6, 7, 8]])
