"""The packed layout gives what the plain weight gives, for any number of rows."""

import pytest
import torch
from torch.nn.functional import linear as torch_linear

from localllm.kernels.launch import INTERPRETED, LaunchOptions, launching_with
from localllm.kernels.linear import (
    PACK_MIN_ELEMENTS,
    crossover_heuristic,
    linear,
    linear_fp32,
    pack_weight,
    should_pack,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("rows", [0, 1, 2, 15, 16, 17, 63])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1031, 257), (64, 48)])
def test_matches_float64(rows: int, bias: bool, shape: tuple[int, int]) -> None:
    weight, offset = torch.randn(shape), torch.randn(shape[0]) if bias else None
    x = torch.randn(rows, shape[1])
    with torch.inference_mode():
        out = linear(x, pack_weight(weight), offset)
    wanted = x.double() @ weight.double().t() + (0 if offset is None else offset.double())
    assert out.shape == (rows, shape[0])
    torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-4)


def test_only_large_cpu_weights_are_packed() -> None:
    assert not should_pack(PACK_MIN_ELEMENTS - 1, CPU, torch.float32)
    assert not should_pack(PACK_MIN_ELEMENTS, torch.device("cuda"), torch.float32)
    assert not should_pack(PACK_MIN_ELEMENTS, CPU, torch.float16)
    plain = torch.randn(16, 16)
    assert pack_weight(plain) is plain
    large = torch.randn(512, PACK_MIN_ELEMENTS // 512)
    assert pack_weight(large).is_mkldnn == should_pack(large.numel(), CPU, torch.float32)


def test_packing_accepts_a_weight_that_is_not_contiguous() -> None:
    weight = torch.randn(600, 1024).t()
    x = torch.randn(3, 600)
    with torch.inference_mode():
        out = linear(x, pack_weight(weight))
    torch.testing.assert_close(out, x @ weight.t(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("rows", [1, 64, 65])
def test_a_gpu_takes_our_kernel_for_few_rows(
    rows: int, deterministic: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In deterministic mode for any number of them; a CPU takes it never."""
    taken = []
    monkeypatch.setattr(
        "localllm.kernels.linear.skinny_gemm_unfinished", lambda x, w, b: taken.append(len(x)) or torch_linear(x, w, b)
    )
    weight, x = torch.randn(48, 64, device=device).half(), torch.randn(rows, 64, device=device).half()
    with launching_with(LaunchOptions(deterministic=deterministic)):
        linear(x, pack_weight(weight))
    on_gpu = INTERPRETED or device.type == "cuda"
    assert bool(taken) == (on_gpu and (deterministic or rows <= crossover_heuristic(48, 64, 2, 80).skinny_rows))


@pytest.mark.parametrize("rows", [1, 5, 70])
@pytest.mark.parametrize("given", [False, True])
def test_logits_keep_the_digits_of_their_sums(rows: int, given: bool, device: torch.device) -> None:
    """On a GPU, both by our kernel and by cuBLAS. On a CPU the sums are rounded to the weights' type."""
    weight, offset = torch.randn(96, 128, device=device).half(), torch.randn(96, device=device).half()
    x = torch.randn(rows, 128, device=device).half()
    out = torch.full((rows, 96), torch.nan, device=device) if given else None
    with torch.inference_mode():
        got = linear_fp32(x, pack_weight(weight), offset, out)
    assert got.dtype == torch.float32
    assert out is None or got.data_ptr() == out.data_ptr()
    wanted = x.double() @ weight.double().t() + offset.double()
    has_kernel = device.type == "cuda" or (INTERPRETED and rows <= crossover_heuristic(96, 128, 2, 80).skinny_rows)
    tolerance = 1e-4 if has_kernel else 4e-2
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=tolerance)
