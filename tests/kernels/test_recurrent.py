"""Recurrent operations with states in numbered places: the two rules whose states are matrices, each against both of
transformers' versions of it, by tokens and by chunks, and the causal convolution against torch's in float64.
"""

import math
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from localllm.kernels.causal_conv import causal_conv
from localllm.kernels.gated_delta import gated_delta
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
CONV_TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


class Rule:
    """Random inputs of a request, and constants whose decays are from 0.01 to 0.999."""

    SHAPES: ClassVar[list[tuple[int, int, int, int]]]
    close: ClassVar[float]  # absolute difference from transformers in fp32
    close_rounded: ClassVar[float]  # relative difference of a result in 16 bits, beside TOLERANCE
    inputs: list[Tensor]
    state: tuple[int, int, int]

    def steps(self, heads: int, length: int, device: torch.device) -> Tensor:
        """Set the constants of the heads; return the time steps [T, H] before their softplus."""
        self.rate = -torch.linspace(0.3, 16, heads, device=device)
        self.dt_bias, self.skip = torch.randn(2, heads, device=device)
        decay = torch.empty(length, heads, device=device).uniform_(0.01, 0.999)
        return torch.log(torch.expm1(decay.double().log() / self.rate.double())).float() - self.dt_bias

    def pool(self) -> Tensor:
        return poisoned_pool(self.state, 3, torch.float32, self.rate.device)

    def expected(self) -> list[tuple[Tensor, Tensor]]:
        """Return transformers' output [T, H, D] and last state, by tokens and by chunks."""
        raise NotImplementedError

    def compute(self, dtype: torch.dtype = torch.float32) -> Compute:
        raise NotImplementedError


class Scan(Rule):
    """Mamba-2's selective scan. Shapes: H, G, P, N."""

    SHAPES = [(2, 1, 12, 20)] if INTERPRETED else [(2, 1, 16, 16), (4, 2, 24, 40), (6, 2, 72, 20), (3, 3, 8, 128)]
    close, close_rounded = 2e-4, 1e-2

    def __init__(self, shape: tuple[int, int, int, int], length: int, device: torch.device, seed: int = 0) -> None:
        self.shape = heads, groups, size, width = shape
        self.state = heads, size, width
        torch.manual_seed(seed)
        dt = self.steps(heads, length, device)
        mixed = torch.randn(length, heads * size + 2 * groups * width + 3, device=device)[:, 1:-2]
        x, b, c = mixed.split([heads * size, groups * width, groups * width], dim=1)
        self.inputs = [x.view(length, heads, size), dt, b.view(length, groups, width), c.view(length, groups, width)]

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

    def expected(self) -> list[tuple[Tensor, Tensor]]:
        return [self.by_tokens(), self.by_chunks()]


class Delta(Rule):
    """The gated delta rule. Shapes: Hk, Hv, dk, dv."""

    SHAPES = [(1, 2, 12, 20)] if INTERPRETED else [(2, 2, 16, 16), (2, 4, 24, 40), (1, 3, 128, 20), (2, 6, 8, 72)]
    close, close_rounded = 2e-5, 0.0
    beta_scale = 1.0

    def __init__(self, shape: tuple[int, int, int, int], length: int, device: torch.device, seed: int = 0) -> None:
        key_heads, heads, dk, dv = shape
        self.state = heads, dk, dv
        torch.manual_seed(seed)
        a, b = self.steps(heads, length, device), torch.randn(length, heads, device=device) * 2
        keys = key_heads * dk
        mixed = torch.randn(length, 2 * keys + heads * dv + 3, device=device)[:, 1:-2]
        q, k, v = mixed.split([keys, keys, heads * dv], dim=1)
        self.inputs = [q.view(length, key_heads, dk), k.view(length, key_heads, dk), v.view(length, heads, dv), a, b]

    def compute(self, dtype: torch.dtype = torch.float32, *, tiled: bool = False) -> Compute:
        def run(inputs: list[Tensor], pool: Tensor, step: StateStep) -> Tensor:
            q, k, v, a, b = inputs
            q, k, v = (each.to(dtype) for each in (q, k, v))
            scale = self.beta_scale
            return gated_delta(q, k, v, a, b, self.rate, self.dt_bias, pool, step, tiled=tiled, beta_scale=scale)

        return run

    def expected(self) -> list[tuple[Tensor, Tensor]]:
        from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

        q, k, v, a, b = (each[None].cpu() for each in self.inputs)
        g = self.rate.cpu() * torch.nn.functional.softplus(a + self.dt_bias.cpu())
        found = []
        for function in (qwen.torch_recurrent_gated_delta_rule, qwen.torch_chunk_gated_delta_rule):
            out, state = function(
                q, k, v, g=g, beta=b.sigmoid() * self.beta_scale, initial_state=None, output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )  # fmt: skip
            found.append((out[0], state[0]))
        return found


class TurningDelta(Delta):
    """States whose transition has negative eigenvalues."""

    SHAPES = Delta.SHAPES[:1]
    beta_scale = 2.0


RULES = [(rule, shape) for rule in (Scan, Delta, TurningDelta) for shape in rule.SHAPES]
both_rules = pytest.mark.parametrize("rule", [Scan, Delta])


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("rule", "shape"), RULES)
def test_matches_transformers(
    rule: type[Rule], shape: tuple[int, int, int, int], length: int, device: torch.device
) -> None:
    case = rule(shape, length, device)
    out, state = whole(case.compute(), case.inputs, case.pool())
    for wanted, wanted_state in case.expected():
        torch.testing.assert_close(out.cpu(), wanted, rtol=1e-4, atol=rule.close)
        torch.testing.assert_close(state.cpu(), wanted_state, rtol=1e-4, atol=rule.close)


@pytest.mark.parametrize("dtype", DTYPES)
@both_rules
def test_types(rule: type[Rule], dtype: torch.dtype, device: torch.device) -> None:
    """Only the result is rounded."""
    case = rule(rule.SHAPES[0], 20, device)
    case.inputs = [each.to(dtype).float() for each in case.inputs]
    out, _ = whole(case.compute(dtype), case.inputs, case.pool())
    assert out.dtype == dtype
    for wanted, _ in case.expected():
        torch.testing.assert_close(out.cpu().float(), wanted, rtol=rule.close_rounded, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("cut", [1, 16, 17] if INTERPRETED else [1, 15, 16, 17, 31, 64])
@both_rules
def test_resumes_from_a_state(rule: type[Rule], cut: int, device: torch.device) -> None:
    case = rule(rule.SHAPES[0], LONG, device)
    run = Run(case.compute(), [case.inputs], case.pool())
    run.step(Part(0, cut, -1, 1, 2))
    run.step(Part(0, LONG - cut, 2, 2))
    wanted, wanted_state = case.expected()[1]
    torch.testing.assert_close(run.output(0).cpu(), wanted, rtol=1e-4, atol=rule.close)
    torch.testing.assert_close(run.pool[2].cpu(), wanted_state, rtol=1e-4, atol=rule.close)


@pytest.mark.parametrize(("rule", "shape"), RULES)
def test_any_schedule_is_the_same(rule: type[Rule], shape: tuple[int, int, int, int], device: torch.device) -> None:
    case, seed = rule(shape, 0, device), rule.SHAPES.index(shape)
    requests = [rule(shape, length, device, seed=length).inputs for length in (LONG, 1, 17)]
    assert_any_schedule_is_the_same(case.compute(), requests, case.state, torch.float32, seed)


@pytest.mark.parametrize("length", [2, 5])
@both_rules
def test_places_are_respected(rule: type[Rule], length: int, device: torch.device) -> None:
    case = rule(rule.SHAPES[0], length, device)
    assert_places_are_respected(case.compute(), case.inputs, case.state)


@pytest.mark.parametrize("limits", [(0.05, 0.1), (0.0, 0.02), (0.2, float("inf"))])
def test_limits_of_the_time_step_of_a_scan(limits: tuple[float, float], device: torch.device) -> None:
    case = Scan(Scan.SHAPES[0], 17, device)
    out, state = whole(case.compute(limits=limits), case.inputs, case.pool())
    wanted, wanted_state = case.by_chunks(limits)
    torch.testing.assert_close(out.cpu(), wanted, rtol=1e-4, atol=2e-4)
    torch.testing.assert_close(state.cpu(), wanted_state, rtol=1e-4, atol=2e-4)


def test_tiled_heads_of_the_delta_rule(device: torch.device) -> None:
    """Value head j with key head j % Hk: the same as heads that are stored in the other order."""
    case = Delta((2, 6, 8, 24), 3, device)
    order = torch.tensor([0, 3, 1, 4, 2, 5])  # tiled place of each head: heads 0, 1, 2 have key head 0
    out, state = whole(case.compute(), case.inputs, case.pool())
    q, k, v, a, b = case.inputs
    case.rate, case.dt_bias = case.rate[order], case.dt_bias[order]
    tiled = whole(case.compute(tiled=True), [q, k, v[:, order], a[:, order], b[:, order]], case.pool())
    assert torch.equal(tiled[0], out[:, order])
    assert torch.equal(tiled[1], state[order])


def test_the_delta_rule_far_out(device: torch.device) -> None:
    """Gates at their ends: a decay of 0 or 1, a factor of 0 or 1 of the new value. Keys of length 0 add nothing."""
    case = Delta((1, 4, 16, 16), 3, device)
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


# The convolution ------------------------------------------------------------------------------------------------------


def convolution(weight: Tensor, bias: Tensor | None, *, silu: bool) -> Compute:
    def compute(inputs: list[Tensor], pool: Tensor, step: StateStep) -> Tensor:
        return causal_conv(inputs[0], weight, bias, pool, step, silu=silu)

    return compute


def weights(channels: int, taps: int, device: torch.device, *, with_bias: bool = True) -> tuple[Tensor, Tensor | None]:
    torch.manual_seed(1)
    return torch.randn(taps, channels, device=device), torch.randn(channels, device=device) if with_bias else None


def definition(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """x [T, C] -> [T, C] in float64, of a request from its first token."""
    taps, channels = weight.shape
    y = torch.nn.functional.conv1d(
        x.double().t()[None], weight.double().t()[:, None], None if bias is None else bias.double(),
        padding=taps - 1, groups=channels,
    )[0, :, : len(x)].t()  # fmt: skip
    return torch.nn.functional.silu(y) if silu else y


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", sorted({*LENGTHS, 2, 3}))
def test_a_convolution_matches_float64(length: int, dtype: torch.dtype, device: torch.device) -> None:
    for channels, taps, with_bias, silu in ((24, 4, False, True), (129, 3, True, False), (200, 4, True, True)):
        weight, bias = weights(channels, taps, device, with_bias=with_bias)
        x = torch.randn(length, channels + 5, device=device).to(dtype)[:, 2:-3]  # columns of a wider tensor
        pool = poisoned_pool((channels, taps - 1), 2, dtype, device)
        out, state = whole(convolution(weight, bias, silu=silu), [x], pool)
        assert out.dtype == dtype
        wanted = definition(x, weight, bias, silu)
        torch.testing.assert_close(out.double(), wanted, rtol=CONV_TOLERANCE[dtype], atol=CONV_TOLERANCE[dtype])
        inputs = torch.cat((torch.zeros(taps - 1, channels, dtype=dtype, device=device), x))
        assert torch.equal(state, inputs[length:].t())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(2))
def test_any_schedule_of_a_convolution_is_the_same(seed: int, dtype: torch.dtype, device: torch.device) -> None:
    channels, taps = (40, 4) if seed % 2 else (130, 3)
    weight, bias = weights(channels, taps, device)
    requests = [[torch.randn(length, channels, device=device).to(dtype)] for length in (18, 1, 33)]
    compute = convolution(weight, bias, silu=True)
    assert_any_schedule_is_the_same(compute, requests, (channels, taps - 1), dtype, seed)


@pytest.mark.parametrize("length", [2, 3, 20])
def test_places_of_a_convolution_are_respected(length: int, device: torch.device) -> None:
    weight, bias = weights(24, 4, device)
    compute = convolution(weight, bias, silu=True)
    assert_places_are_respected(compute, [torch.randn(length, 24, device=device)], (24, 3))


def test_a_convolution_far_out(device: torch.device) -> None:
    """SiLU's ends are 0 and its input."""
    x = torch.tensor([[-1e9, -1e4, -200.0, 200.0, 1e4, 1e38]], device=device)
    pool = poisoned_pool((6, 2), 2, torch.float32, device)
    out, _ = whole(convolution(torch.ones(3, 6, device=device), None, silu=True), [x], pool)
    torch.testing.assert_close(out, x.clamp(min=0.0), rtol=1e-6, atol=1e-28)
