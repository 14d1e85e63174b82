"""Mamba-2's selective scan against transformers' two versions of it: by tokens and by chunks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from localllm.kernels.launch import INTERPRETED
from localllm.kernels.layer_cache import StateStep
from localllm.kernels.selective_scan import NO_LIMITS, selective_scan
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
SHAPES = [(2, 1, 16, 16), (4, 2, 24, 40), (6, 2, 72, 20), (3, 3, 8, 128)]  # H, G, P, N
if INTERPRETED:
    SHAPES = [(2, 1, 12, 20)]


class Case:
    """Random inputs of a request, and constants whose decays are from 0.01 to 0.999."""

    def __init__(self, shape: tuple[int, int, int, int], length: int, device: torch.device, seed: int = 0) -> None:
        self.shape = heads, groups, size, width = shape
        torch.manual_seed(seed)
        self.rate = -torch.linspace(0.3, 16, heads, device=device)
        self.dt_bias, self.skip = torch.randn(2, heads, device=device)
        decay = torch.empty(length, heads, device=device).uniform_(0.01, 0.999)
        delta = decay.double().log() / self.rate.double()
        dt = torch.log(torch.expm1(delta)).float() - self.dt_bias  # the inverse of the softplus
        mixed = torch.randn(length, heads * size + 2 * groups * width + 3, device=device)[:, 1:-2]
        x, b, c = mixed.split([heads * size, groups * width, groups * width], dim=1)
        self.inputs = [x.view(length, heads, size), dt, b.view(length, groups, width), c.view(length, groups, width)]

    @property
    def state(self) -> tuple[int, int, int]:
        heads, _, size, width = self.shape
        return heads, size, width

    def pool(self) -> Tensor:
        return poisoned_pool(self.state, 3, torch.float32, self.rate.device)

    def compute(self, dtype: torch.dtype = torch.float32, limits: tuple[float, float] = NO_LIMITS) -> Compute:
        def run(inputs: list[Tensor], pool: Tensor, step: StateStep) -> Tensor:
            x, dt, b, c = inputs
            x, b, c = (each.to(dtype) for each in (x, b, c))
            return selective_scan(x, dt, b, c, self.rate, self.dt_bias, self.skip, pool, step, limits=limits)

        return run

    def by_chunks(self, limits: tuple[float, float] = NO_LIMITS) -> tuple[Tensor, Tensor]:
        """transformers' output [T, H, P] and last state [H, P, N]."""
        from transformers.models.granitemoehybrid import modeling_granitemoehybrid as granite

        x, dt, b, c = (each[None].cpu() for each in self.inputs)
        out, state = granite.mamba2_chunk_scan(
            x, dt, self.rate.cpu(), b, c, chunk_size=32, D=self.skip.cpu(), dt_bias=self.dt_bias.cpu(),
            dt_softplus=True, dt_limit=limits, return_final_states=True,
        )  # fmt: skip
        return out[0], state[0]

    def by_tokens(self) -> tuple[Tensor, Tensor]:
        from transformers.models.granitemoehybrid import modeling_granitemoehybrid as granite

        heads, _, size, width = self.shape
        rate, skip, bias = (each.cpu() for each in (self.rate, self.skip, self.dt_bias))
        state, out = torch.zeros(1, heads, size, width), []
        for x, dt, b, c in zip(*(each.cpu() for each in self.inputs), strict=True):
            out.append(granite.mamba2_selective_state_update(
                state, x[None], dt[None, :, None].expand(1, -1, size), rate[:, None, None].expand(-1, size, width),
                b[None], c[None], skip[:, None].expand(-1, size), dt_bias=bias[:, None].expand(-1, size),
                dt_softplus=True,
            )[0])  # fmt: skip
        return torch.stack(out), state[0]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_transformers(shape: tuple[int, int, int, int], length: int, device: torch.device) -> None:
    case = Case(shape, length, device)
    out, state = whole(case.compute(), case.inputs, case.pool())
    for wanted, wanted_state in (case.by_tokens(), case.by_chunks()):
        torch.testing.assert_close(out.cpu(), wanted, rtol=1e-4, atol=2e-4)
        torch.testing.assert_close(state.cpu(), wanted_state, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("limits", [(0.05, 0.1), (0.0, 0.02), (0.2, float("inf"))])
def test_limits_of_the_time_step(limits: tuple[float, float], device: torch.device) -> None:
    case = Case(SHAPES[0], 17, device)
    out, state = whole(case.compute(limits=limits), case.inputs, case.pool())
    wanted, wanted_state = case.by_chunks(limits)
    torch.testing.assert_close(out.cpu(), wanted, rtol=1e-4, atol=2e-4)
    torch.testing.assert_close(state.cpu(), wanted_state, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_types(dtype: torch.dtype, device: torch.device) -> None:
    """Only the result is rounded."""
    case = Case(SHAPES[0], 20, device)
    case.inputs = [each.to(dtype).float() for each in case.inputs]
    out, _ = whole(case.compute(dtype), case.inputs, case.pool())
    assert out.dtype == dtype
    torch.testing.assert_close(out.cpu().float(), case.by_chunks()[0], rtol=1e-2, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("cut", [1, 16, 17] if INTERPRETED else [1, 15, 16, 17, 31, 64])
def test_resumes_from_a_state(cut: int, device: torch.device) -> None:
    case = Case(SHAPES[0], LONG, device)
    run = Run(case.compute(), [case.inputs], case.pool())
    run.step(Part(0, cut, -1, 1, 2))
    run.step(Part(0, LONG - cut, 2, 2))
    wanted, wanted_state = case.by_chunks()
    torch.testing.assert_close(run.output(0).cpu(), wanted, rtol=1e-4, atol=2e-4)
    torch.testing.assert_close(run.pool[2].cpu(), wanted_state, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("seed", range(len(SHAPES)))
def test_any_schedule_is_the_same(seed: int, device: torch.device) -> None:
    case = Case(SHAPES[seed], 0, device)
    requests = [Case(SHAPES[seed], length, device, seed=length).inputs for length in (LONG, 1, 17)]
    assert_any_schedule_is_the_same(case.compute(), requests, case.state, torch.float32, seed)


@pytest.mark.parametrize("length", [2, 5])
def test_places_are_respected(length: int, device: torch.device) -> None:
    case = Case(SHAPES[0], length, device)
    assert_places_are_respected(case.compute(), case.inputs, case.state)
