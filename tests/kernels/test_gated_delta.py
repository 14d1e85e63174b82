"""The gated delta rule against transformers' two versions of it: by tokens and by chunks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from localllm.kernels.gated_delta import gated_delta
from localllm.kernels.launch import INTERPRETED
from localllm.kernels.layer_cache import StateStep
from tests.kernels.conftest import DTYPES
from tests.kernels.state_rows import (
    LENGTHS,
    LONG,
    MARKS,
    TOLERANCE,
    Compute,
    Part,
    Run,
    assert_any_schedule_is_the_same,
    assert_places_are_respected,
    poisoned_pool,
    whole,
)

pytestmark = MARKS
SHAPES = [(2, 2, 16, 16), (2, 4, 24, 40), (1, 3, 128, 20), (2, 6, 8, 72)]  # Hk, Hv, dk, dv
if INTERPRETED:
    SHAPES = [(1, 2, 12, 20)]


class Case:
    """Random inputs of a request, and constants whose decays are from 0.01 to 0.999."""

    def __init__(self, shape: tuple[int, int, int, int], length: int, device: torch.device, seed: int = 0) -> None:
        self.shape = key_heads, heads, dk, dv = shape
        torch.manual_seed(seed)
        self.rate = -torch.linspace(0.3, 16, heads, device=device)
        self.dt_bias = torch.randn(heads, device=device)
        decay = torch.empty(length, heads, device=device).uniform_(0.01, 0.999)
        softplus = decay.double().log() / self.rate.double()
        a = torch.log(torch.expm1(softplus)).float() - self.dt_bias  # the inverse of g = rate * softplus(a + dt_bias)
        b = torch.randn(length, heads, device=device) * 2
        mixed = torch.randn(length, 2 * key_heads * dk + heads * dv + 3, device=device)[:, 1:-2]
        keys = key_heads * dk
        q, k, v = mixed.split([keys, keys, heads * dv], dim=1)
        self.inputs = [q.view(length, key_heads, dk), k.view(length, key_heads, dk), v.view(length, heads, dv), a, b]

    @property
    def state(self) -> tuple[int, int, int]:
        _, heads, dk, dv = self.shape
        return heads, dk, dv

    def pool(self) -> Tensor:
        return poisoned_pool(self.state, 3, torch.float32, self.rate.device)

    def compute(self, dtype: torch.dtype = torch.float32, *, tiled: bool = False) -> Compute:
        def run(inputs: list[Tensor], pool: Tensor, step: StateStep) -> Tensor:
            q, k, v, a, b = inputs
            q, k, v = (each.to(dtype) for each in (q, k, v))
            return gated_delta(q, k, v, a, b, self.rate, self.dt_bias, pool, step, tiled=tiled)

        return run

    def expected(self, *, chunks: bool = False, before: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """transformers' output [T, Hv, dv] and last state [Hv, dk, dv]."""
        from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

        function = qwen.torch_chunk_gated_delta_rule if chunks else qwen.torch_recurrent_gated_delta_rule
        q, k, v, a, b = (each[None].cpu() for each in self.inputs)
        g = self.rate.cpu() * torch.nn.functional.softplus(a + self.dt_bias.cpu())
        out, state = function(
            q, k, v, g=g, beta=b.sigmoid(), initial_state=None if before is None else before.cpu()[None],
            output_final_state=True, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        return out[0], state[0]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_transformers(shape: tuple[int, int, int, int], length: int, device: torch.device) -> None:
    case = Case(shape, length, device)
    out, state = whole(case.compute(), case.inputs, case.pool())
    for chunks in (False, True):
        wanted, wanted_state = case.expected(chunks=chunks)
        torch.testing.assert_close(out.cpu(), wanted, rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(state.cpu(), wanted_state, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_types(dtype: torch.dtype, device: torch.device) -> None:
    """Only the result is rounded."""
    case = Case(SHAPES[0], 20, device)
    case.inputs = [each.to(dtype).float() for each in case.inputs]
    out, _ = whole(case.compute(dtype), case.inputs, case.pool())
    assert out.dtype == dtype
    torch.testing.assert_close(out.cpu().float(), case.expected()[0], rtol=0.0, atol=TOLERANCE[dtype])


def test_tiled_heads(device: torch.device) -> None:
    """Value head j with key head j % Hk: the same as heads that are stored in the other order."""
    case = Case((2, 6, 8, 24), 3, device)
    order = torch.tensor([0, 3, 1, 4, 2, 5])  # tiled place of each head: heads 0, 1, 2 have key head 0
    out, state = whole(case.compute(), case.inputs, case.pool())
    q, k, v, a, b = case.inputs
    case.rate, case.dt_bias = case.rate[order], case.dt_bias[order]
    tiled = whole(case.compute(tiled=True), [q, k, v[:, order], a[:, order], b[:, order]], case.pool())
    assert torch.equal(tiled[0], out[:, order])
    assert torch.equal(tiled[1], state[order])


@pytest.mark.parametrize("cut", [1, 16, 17] if INTERPRETED else [1, 15, 16, 17, 31, 64])
def test_resumes_from_a_state(cut: int, device: torch.device) -> None:
    case = Case(SHAPES[0], LONG, device)
    run = Run(case.compute(), [case.inputs], case.pool())
    run.step(Part(0, cut, -1, 1, 2))
    run.step(Part(0, LONG - cut, 2, 2))
    torch.testing.assert_close(run.output(0).cpu(), case.expected()[0], rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(run.pool[2].cpu(), case.expected()[1], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("seed", range(len(SHAPES)))
def test_any_schedule_is_the_same(seed: int, device: torch.device) -> None:
    case = Case(SHAPES[seed], 0, device)
    requests = [Case(SHAPES[seed], length, device, seed=length).inputs for length in (LONG, 1, 17)]
    assert_any_schedule_is_the_same(case.compute(), requests, case.state, torch.float32, seed)


@pytest.mark.parametrize("length", [2, 5])
def test_places_are_respected(length: int, device: torch.device) -> None:
    case = Case(SHAPES[0], length, device)
    assert_places_are_respected(case.compute(), case.inputs, case.state)


def test_far_out(device: torch.device) -> None:
    """Gates at their ends: a decay of 0 or 1, a factor of 0 or 1 of the new value. Keys of length 0 add nothing."""
    case = Case((1, 4, 16, 16), 3, device)
    q, k, v, _, _ = case.inputs
    k[1] = 0.0
    a = torch.tensor([[-1e4, -1e4, 1e4, 1e4]], device=device).expand(3, 4).contiguous()
    b = torch.tensor([[-1e4, 1e4, -1e4, 1e4]], device=device).expand(3, 4).contiguous()
    out, state = whole(case.compute(), [q, k, v, a, b], case.pool())
    assert bool(out.isfinite().all())
    assert not state[[0, 2]].any()  # nothing was added
    unit = k[2, 0] / k[2, 0].norm()
    torch.testing.assert_close(state[3], unit[:, None] * v[2, 3], rtol=1e-4, atol=1e-5)  # only the last token is left
    q_unit = q[2, 0] / q[2, 0].norm() / math.sqrt(16)
    torch.testing.assert_close(out[2, 3], (q_unit @ unit) * v[2, 3], rtol=1e-3, atol=1e-5)
