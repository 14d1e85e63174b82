"""Routing, alignment and the experts' products against definitions in float64, one token and one expert at a time."""

import dataclasses
import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from localllm.kernels.int4_linear import pack_int4
from localllm.kernels.launch import INTERPRETED
from localllm.kernels.moe import grouped_gemm as grouped_gemm_module
from localllm.kernels.moe.align import align, align_single, combine, max_blocks
from localllm.kernels.moe.experts import experts, experts_by_code
from localllm.kernels.moe.grouped_gemm import MoeGemmTile, act_reference, block_rows, grouped_gemm
from localllm.kernels.moe.route import route
from localllm.kernels.moe.weights import ExpertWeights, ScaledExperts, pack_experts, stack_experts
from tests.kernels.conftest import DTYPES

# numpy warns where the interpreter's sigmoid goes to 0 by way of exp(large) = inf, as it does on a GPU without a word.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
EXAMPLES = settings(max_examples=5 if INTERPRETED else 25, deadline=None)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swiglu_clamped")


def route_by_hand(
    logits: Tensor,
    top_k: int,
    scoring: str,
    renormalize: bool,
    bias: Tensor | None,
    num_groups: int,
    top_groups: int,
    scale: float,
) -> tuple[list[list[int]], list[list[float]]]:
    """Plain lists, sorted by (score, lower id first)."""
    all_ids, all_weights = [], []
    for row in logits.double().tolist():
        if scoring == "sigmoid":
            scores = [1 / (1 + math.exp(-v)) for v in row]
        else:
            total = sum(math.exp(v - max(row)) for v in row)
            scores = [math.exp(v - max(row)) / total for v in row]
        choice = scores if bias is None else [s + b for s, b in zip(scores, bias.tolist(), strict=True)]
        size = len(row) // num_groups
        members = [range(g * size, (g + 1) * size) for g in range(num_groups)]
        best = 1 if bias is None else 2
        values = [sum(sorted((choice[e] for e in group), reverse=True)[:best]) for group in members]
        kept = sorted(range(num_groups), key=lambda g: (-values[g], g))[:top_groups]
        ids = sorted((e for g in kept for e in members[g]), key=lambda e: (-choice[e], e))[:top_k]
        weights = [scores[e] for e in ids]
        if renormalize:
            weights = [w / sum(weights) for w in weights]
        all_ids.append(ids)
        all_weights.append([w * scale for w in weights])
    return all_ids, all_weights


ROUTINGS = {
    "mixtral": (8, 2, "softmax", True, False, 1, 1, 1.0),
    "qwen2-moe": (60, 4, "softmax", False, False, 1, 1, 1.0),
    "qwen3-moe": (128, 8, "softmax", True, False, 1, 1, 1.0),
    "gpt-oss": (32, 4, "softmax", True, False, 1, 1, 1.0),
    "deepseek-v2": (160, 6, "softmax", False, False, 8, 3, 16.0),
    "deepseek-v3": (256, 8, "sigmoid", True, True, 8, 4, 2.5),
    "glm": (24, 3, "sigmoid", True, True, 1, 1, 1.5),
    "ernie": (64, 6, "softmax", True, True, 1, 1, 1.0),
    "command-a-plus": (128, 8, "sigmoid", True, False, 1, 1, 1.0),
    "llama-4": (16, 1, "sigmoid", False, False, 1, 1, 1.0),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ROUTINGS)
def test_route(name: str, dtype: torch.dtype, device: torch.device) -> None:
    num_experts, top_k, scoring, renormalize, has_bias, num_groups, top_groups, scale = ROUTINGS[name]
    torch.manual_seed(0)
    logits = torch.randn(5, num_experts + 3).to(dtype)[:, 1:-2].to(device)  # a slice, as of a fused projection
    bias = torch.randn(num_experts) * 0.1 if has_bias else None
    ids, weights = route(
        logits,
        top_k,
        scoring=scoring,
        renormalize=renormalize,
        bias=None if bias is None else bias.to(device),
        num_groups=num_groups,
        top_groups=top_groups,
        scale=scale,
    )
    wanted = route_by_hand(logits.cpu(), top_k, scoring, renormalize, bias, num_groups, top_groups, scale)
    assert ids.dtype == torch.int32
    assert weights.dtype == torch.float32
    assert ids.tolist() == wanted[0]
    torch.testing.assert_close(weights.cpu().double(), torch.tensor(wanted[1], dtype=torch.float64), rtol=1e-5, atol=0)


@pytest.mark.parametrize("tolerance", [0.02, 0.4, 3.0])
@pytest.mark.parametrize("shift", [0.0, -4.0, 4.0])
def test_sparse_mixer_is_that_of_transformers(shift: float, tolerance: float, device: torch.device) -> None:
    """Logits of either sign, whose shares of the best one differ."""
    from transformers.models.phimoe.modeling_phimoe import sparsemixer

    logits = (torch.randn(7, 16) + shift).to(device)
    options: dict[str, Any] = {"scoring": "sparsemixer", "renormalize": False, "tolerance": tolerance}
    ids, weights = route(logits, 2, **options)
    wanted, chosen = sparsemixer(logits.cpu(), tolerance / 2, training=False)
    assert torch.equal(ids.cpu().long(), chosen)
    torch.testing.assert_close(weights.cpu(), wanted, rtol=1e-5, atol=0)
    slots = torch.tensor([5, -1, 7, 0, 1, 2, 3], device=device)
    logits[2, 4] = float("nan")
    padded, none = route(logits, 2, slot_mapping=slots, **options)
    assert padded[1].tolist() == [-1, -1]
    assert none[1].tolist() == [0, 0]
    assert all(0 <= expert < 16 for expert in padded[2].tolist())
    assert torch.equal(padded[3:], ids[3:])


@pytest.mark.parametrize(("least", "total"), [(1e-20, 1.0), (0.01, 1.0), (0.5, 0.2)])
def test_route_divides_by_no_less_than_asked(least: float, total: float, device: torch.device) -> None:
    """ERNIE 4.5's moe_norm_min. The two chosen have a tenth of all scores together."""
    scores = torch.tensor([[0.45, 0.06, 0.45, 0.04]], device=device)
    bias = torch.tensor([0.0, 2.0, 0.0, 1.0], device=device)
    ids, weights = route(scores.log(), 2, bias=bias, least_sum=least)
    assert ids.tolist() == [[1, 3]]
    torch.testing.assert_close(weights.cpu(), torch.tensor([[0.6, 0.4]]) * total, rtol=1e-5, atol=0)


def test_route_prefers_the_lower_id_among_equals(device: torch.device) -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, -0.0, 0.0, 2.0], [0.0, -0.0, 0.0, -0.0, 0.0, 0.0]], device=device)
    ids, _ = route(logits, 4)
    assert ids.tolist() == [[1, 2, 5, 0], [0, 1, 2, 3]]


@pytest.mark.parametrize("groups", [1, 4])
def test_route_marks_padding_and_keeps_a_nan_to_its_row(groups: int, device: torch.device) -> None:
    logits, slots = torch.randn(4, 16, device=device), torch.tensor([5, -1, 7, 0], device=device)
    clean, clean_weights = route(logits, 3, num_groups=groups, top_groups=groups, slot_mapping=slots)
    assert clean[1].tolist() == [-1, -1, -1]
    assert clean_weights[1].tolist() == [0, 0, 0]
    logits[2, 4] = float("nan")
    ids, weights = route(logits, 3, num_groups=groups, top_groups=groups)
    assert weights[2].isnan().all()
    assert len(set(ids[2].tolist())) == 3
    assert all(0 <= i < 16 for i in ids[2].tolist())
    assert torch.equal(ids[[0, 3]], clean[[0, 3]])
    assert torch.equal(weights[[0, 3]], clean_weights[[0, 3]])


def test_route_takes_no_token(device: torch.device) -> None:
    ids, weights = route(torch.empty(0, 8, device=device), 2)
    assert ids.shape == weights.shape == (0, 2)


def some_ids(num_tokens: int, top_k: int, num_experts: int, skewed: bool, padding: int) -> Tensor:
    """Distinct experts per token, as a router gives; skewed: most tokens want the same ones."""
    order = torch.arange(num_experts) / (1.0 if skewed else 1e9)
    ids = torch.stack([(torch.rand(num_experts) * 2 + order).argsort()[:top_k] for _ in range(max(num_tokens, 1))])
    ids = ids[:num_tokens].int()
    ids[num_tokens - padding :] = -1
    return ids


@EXAMPLES
@given(
    num_tokens=st.integers(0, 70),
    num_experts=st.integers(2, 40),
    top_k=st.integers(1, 4),
    block_m=st.sampled_from([1, 16, 32]),
    skewed=st.booleans(),
    padding=st.integers(0, 3),
)
def test_align_brings_every_id_to_its_expert(
    device: torch.device, num_tokens: int, num_experts: int, top_k: int, block_m: int, skewed: bool, padding: int
) -> None:
    torch.manual_seed(num_tokens)
    top_k = min(top_k, num_experts)
    ids = some_ids(num_tokens, top_k, num_experts, skewed, min(padding, num_tokens))
    blocks = align(ids.to(device), num_experts, block_m)
    assert blocks.rows is not None
    assert blocks.experts.numel() == max_blocks(ids.numel(), num_experts, block_m)
    flat, found = ids.flatten().tolist(), []
    owners = blocks.experts.tolist()
    for owner, rows in zip(owners, blocks.rows.view(-1, block_m).tolist(), strict=True):
        filled = [row for row in rows if row >= 0]
        assert rows == filled + [-1] * (block_m - len(filled)), "padding comes last"
        assert bool(filled) == (owner >= 0), "a block has rows if, and only if, it has an expert"
        assert all(flat[row] == owner for row in filled)
        found += filled
    assert sorted(found) == [i for i, expert in enumerate(flat) if expert >= 0]
    used = [owner for owner in owners if owner >= 0]
    assert used == sorted(used)
    assert owners == used + [-1] * (len(owners) - len(used))
    assert found == sorted(found, key=lambda row: (flat[row], row)), "in their order"
    full = {expert: flat.count(expert) for expert in used}
    assert len(used) == sum(math.ceil(count / block_m) for count in full.values())


def test_align_passes_the_chunk_it_reads_at_a_time(device: torch.device) -> None:
    ids = torch.randint(-1, 3, (2100, 2), dtype=torch.int32, device=device)
    rows = align(ids, 3, 64).rows
    assert rows is not None
    flat = ids.flatten().cpu()
    wanted = torch.cat([(flat == expert).nonzero()[:, 0] for expert in range(3)])
    assert torch.equal(rows.cpu()[rows.cpu() >= 0].long(), wanted)


def activate_by_hand(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    if activation == "silu<=1.5":
        return (gate / (1 + (-gate).exp())).clamp(max=1.5) * up.clamp(-1.5, 1.5)
    if activation == "silu":
        return gate / (1 + (-gate).exp()) * up
    if activation == "swiglu_clamped":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return gate / (1 + (-1.702 * gate).exp()) * (up + 1)
    if activation == "gelu":
        return gate * 0.5 * (1 + torch.erf(gate / 2**0.5)) * up
    return gate * 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up


class Mixture:
    """Random experts, and what a token should get from them."""

    def __init__(
        self, num_experts: int, hidden: int, width: int, dtype: torch.dtype, *, biased: bool = False, seed: int = 0
    ) -> None:
        torch.manual_seed(seed)
        self.gate_up = (torch.randn(num_experts, 2 * width, hidden) / hidden**0.5).to(dtype)
        self.down = (torch.randn(num_experts, hidden, width) / width**0.5).to(dtype)
        self.gate_up_bias = torch.randn(num_experts, 2 * width).to(dtype) if biased else None
        self.down_bias = torch.randn(num_experts, hidden).to(dtype) if biased else None

    def by_hand(self, x: Tensor, ids: Tensor, weights: Tensor, activation: str) -> Tensor:
        out = torch.zeros(x.shape, dtype=torch.float64)
        for token, chosen in enumerate(ids.tolist()):
            for k, expert in enumerate(chosen):
                if expert < 0:
                    continue
                gate_up = self.gate_up[expert].double() @ x[token].double()
                if self.gate_up_bias is not None:
                    gate_up += self.gate_up_bias[expert].double()
                answer = self.down[expert].double() @ activate_by_hand(*gate_up.chunk(2), activation)
                if self.down_bias is not None:
                    answer += self.down_bias[expert].double()
                out[token] += weights[token, k].double() * answer
        return out

    def run(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        activation: str,
        device: torch.device,
        gate_up: ExpertWeights | None = None,
        down: ExpertWeights | None = None,
    ) -> Tensor:
        operands, biases = self._laid_out(device, gate_up, down)
        return experts(
            x.to(device), ids.to(device), weights.to(device), *operands, activation,
            gate_up_bias=biases[0], down_bias=biases[1],
        ).cpu()  # fmt: skip

    def run_by_code(
        self, x: Tensor, ids: Tensor, weights: Tensor, activation: str, device: torch.device,
        gate_up: ExpertWeights | None = None, down: ExpertWeights | None = None,
    ) -> Tensor:  # fmt: skip
        operands, biases = self._laid_out(device, gate_up, down)
        return experts_by_code(
            x.to(device), ids.long().to(device), weights.to(device), *operands,
            partial(act_reference, activation=activation), first_bias=biases[0], down_bias=biases[1],
        ).cpu()  # fmt: skip

    def _laid_out(
        self, device: torch.device, gate_up: ExpertWeights | None, down: ExpertWeights | None
    ) -> tuple[list[ExpertWeights], list[Tensor | None]]:
        """The weights packed for a CPU where the twin runs, plain for the kernel; and the biases."""

        def laid_out(weight: Tensor) -> ExpertWeights:
            return weight.to(device) if INTERPRETED else pack_experts(weight.to(device))

        operands = [
            laid_out(self.gate_up) if gate_up is None else gate_up,
            laid_out(self.down) if down is None else down,
        ]
        return operands, [None if b is None else b.to(device) for b in (self.gate_up_bias, self.down_bias)]


def assert_near(out: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert out.dtype == dtype
    scale = max(1.0, wanted.abs().max().item() if len(wanted) else 0.0)
    torch.testing.assert_close(out.double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("activation", "biased"),
    [("silu", False), ("silu<=1.5", True), ("gelu", True), ("gelu_tanh", False), ("swiglu_clamped", True)],
)
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_experts(num_tokens: int, activation: str, biased: bool, dtype: torch.dtype, device: torch.device) -> None:
    mixture = Mixture(5, 72, 40, dtype, biased=biased)
    x = (torch.randn(num_tokens, 72) * 3).to(dtype)
    ids = some_ids(num_tokens, 2, 5, skewed=True, padding=0)
    weights = torch.rand(num_tokens, 2)
    out = mixture.run(x, ids, weights, activation, device)
    assert_near(out, mixture.by_hand(x, ids, weights, activation), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_experts_without_a_gate(num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    mixture = Mixture(5, 72, 40, dtype)
    mixture.gate_up = mixture.gate_up[:, :40].contiguous()
    x = torch.randn(num_tokens, 72).to(dtype)
    ids, weights = some_ids(num_tokens, 2, 5, skewed=True, padding=0), torch.rand(num_tokens, 2)
    wanted = torch.zeros(x.shape, dtype=torch.float64)
    for token, k in ((token, k) for token in range(num_tokens) for k in range(2)):
        up, down = (matrices[ids[token, k]].double() for matrices in (mixture.gate_up, mixture.down))
        wanted[token] += weights[token, k].double() * (down @ (up @ x[token].double()).relu().square())
    assert_near(mixture.run(x, ids, weights, "relu2", device), wanted, dtype)


@EXAMPLES
@given(
    num_tokens=st.integers(0, 40),
    num_experts=st.integers(2, 9),
    hidden=st.integers(1, 9),
    width=st.integers(1, 70),
    padding=st.integers(0, 2),
)
def test_experts_of_any_shape(
    device: torch.device, num_tokens: int, num_experts: int, hidden: int, width: int, padding: int
) -> None:
    mixture = Mixture(num_experts, 8 * hidden, width, torch.float32, seed=num_tokens)
    padding = min(padding, num_tokens)
    ids = some_ids(num_tokens, 2, num_experts, skewed=False, padding=padding)
    x, weights = torch.randn(num_tokens, 8 * hidden), torch.rand(num_tokens, 2)
    x[num_tokens - padding :] = float("nan")
    out = mixture.run(x, ids, weights, "silu", device)
    assert_near(out, mixture.by_hand(x, ids, weights, "silu"), torch.float32)


TILES = {
    "swapped, by TMA": MoeGemmTile(64, 128, 1, True, True, 4, 3),
    "swapped": MoeGemmTile(64, 64, 1, True, False, 4, 3),
    "by TMA": MoeGemmTile(64, 64, 4, False, True, 4, 3),
    "grouped": MoeGemmTile(64, 64, 3, False, False, 4, 3),
}


@pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="tiles are the kernel's")
@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize("tile", TILES)
def test_every_tile(tile: str, block_m: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = TILES[tile]
    if not INTERPRETED and torch.cuda.get_device_capability() < (9, 0):
        choice = choice._replace(tma=False)
    monkeypatch.setattr(grouped_gemm_module, "grouped_gemm_tile", lambda *key, **kinds: choice)
    mixture = Mixture(4, 136, 72, torch.float16)
    x, weights = torch.randn(33, 136).half(), torch.rand(33, 2)
    ids = some_ids(33, 2, 4, skewed=True, padding=1)
    blocks = align(ids.to(device), 4, block_m)
    hidden = grouped_gemm(x.to(device), mixture.gate_up.to(device), blocks, weights.to(device), "silu")
    partial = grouped_gemm(hidden, mixture.down.to(device), blocks, weights.to(device))
    out = combine(partial, ids.to(device)).cpu()
    assert_near(out, mixture.by_hand(x, ids, weights, "silu"), torch.float16)


@pytest.mark.parametrize("num_tokens", [1, 6])
@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
def test_weights_of_eight_bits_with_a_scale_per_output(
    stored: torch.dtype, num_tokens: int, device: torch.device
) -> None:
    mixture = Mixture(3, 64, 48, torch.float16, biased=True)
    quantized = []
    for name in ("gate_up", "down"):
        weight = getattr(mixture, name)
        scales = weight.abs().amax(-1).float() / 127
        values = (weight / scales[..., None]).round().to(stored)
        quantized.append(ScaledExperts(values.to(device), scales.to(device)))
        setattr(mixture, name, values.float() * scales[..., None])
    x, weights = torch.randn(num_tokens, 64).half(), torch.rand(num_tokens, 2)
    ids = some_ids(num_tokens, 2, 3, skewed=False, padding=0)
    out = mixture.run(x, ids, weights, "silu", device, *quantized)
    assert_near(out, mixture.by_hand(x, ids, weights, "silu"), torch.float16)


@pytest.mark.parametrize("num_tokens", [1, 70])
def test_weights_of_eight_bits_with_a_scale_per_block(num_tokens: int, device: torch.device) -> None:
    """Scales of neighbouring blocks lie far apart: one taken from next door would show."""
    hidden, width, count = 192, 128, 3
    mixture = Mixture(count, hidden, width, torch.float16, biased=False)
    quantized = []
    for name in ("gate_up", "down"):
        weight = getattr(mixture, name).float()
        rows, columns = weight.shape[1:]
        shape = (count, -(-rows // 128), -(-columns // 128))
        scales = torch.rand(shape) * 0.002 * torch.tensor([0.25, 4.0])[torch.randint(0, 2, shape)]
        wide = scales.repeat_interleave(128, 1)[:, :rows].repeat_interleave(128, 2)[:, :, :columns]
        values = (torch.randn(weight.shape) * 20).to(torch.float8_e4m3fn)
        quantized.append(ScaledExperts(values.to(device), scales.to(device)))
        setattr(mixture, name, values.float() * wide)
    x, weights = torch.randn(num_tokens, hidden).half(), torch.rand(num_tokens, 2)
    ids = some_ids(num_tokens, 2, count, skewed=True, padding=num_tokens // 10)
    out = mixture.run(x, ids, weights, "silu", device, *quantized)
    assert_near(out, mixture.by_hand(x, ids, weights, "silu"), torch.float16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 70])
def test_weights_of_eight_bits_with_powers_of_two(num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    """Powers of neighbouring outputs and of neighbouring groups of 32 inputs lie far apart."""
    hidden, width, count = 96, 72, 3
    mixture = Mixture(count, hidden, width, dtype, biased=False)
    quantized = []
    for name in ("gate_up", "down"):
        rows, columns = getattr(mixture, name).shape[1:]
        powers = torch.randint(116, 120, (count, rows, -(-columns // 32)), dtype=torch.uint8)
        values = (torch.randn(count, rows, columns) * 20).to(torch.float8_e4m3fn)
        quantized.append(ScaledExperts(values.to(device), powers.to(device)))
        wide = torch.exp2(powers.float() - 127).repeat_interleave(32, 2)[:, :, :columns]
        setattr(mixture, name, values.float() * wide)
    x, weights = torch.randn(num_tokens, hidden).to(dtype), torch.rand(num_tokens, 2)
    ids = some_ids(num_tokens, 2, count, skewed=True, padding=num_tokens // 10)
    out = mixture.run(x, ids, weights, "silu", device, *quantized)
    assert_near(out, mixture.by_hand(x, ids, weights, "silu"), dtype)


PLANAR = {
    "groups of 128": {"group": 128},
    "groups of 32 and zero points": {"group": 32, "zeros": True},
    "one group per row": {"group": -1},
    "short rows": {"group": 64, "hidden": 72, "width": 40},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", PLANAR)
@pytest.mark.parametrize("num_tokens", [1, 11])
def test_weights_of_four_bits(num_tokens: int, kind: str, dtype: torch.dtype, device: torch.device) -> None:
    choice = PLANAR[kind]
    hidden, width, group = choice.get("hidden", 128), choice.get("width", 136), choice["group"]
    mixture = Mixture(3, hidden, width, dtype, biased=num_tokens > 1)
    stacked = []
    for name in ("gate_up", "down"):
        packed, plain = [], []
        for matrix in getattr(mixture, name).float():
            outputs, columns = matrix.shape
            groups = 1 if group == -1 else math.ceil(columns / group)
            codes = torch.randint(0, 16, (outputs, columns), dtype=torch.uint8)
            scales = (torch.rand(groups, outputs) / 8 / columns**0.5).half()
            zeros = torch.randint(0, 16, (groups, outputs), dtype=torch.uint8) if choice.get("zeros") else None
            matrix = pack_int4(codes.to(device), scales.to(device), None if zeros is None else zeros.to(device), group)
            packed.append(matrix)
            size = columns if group == -1 else group
            of_column = torch.arange(columns) // size
            middle = 8 if zeros is None else zeros.t()[:, of_column].double()
            plain.append((codes.double() - middle) * scales.t()[:, of_column].double())
        stacked.append(stack_experts(packed, len(packed)))
        setattr(mixture, name, torch.stack(plain))
    x, weights = torch.randn(num_tokens, hidden).to(dtype), torch.rand(num_tokens, 2)
    ids = some_ids(num_tokens, 2, 3, skewed=True, padding=num_tokens // 10)
    out = mixture.run(x, ids, weights, "silu", device, *stacked)
    assert_near(out, mixture.by_hand(x, ids, weights, "silu"), dtype)
    if num_tokens == 1:
        assert_near(mixture.run_by_code(x, ids, weights, "silu", device, *stacked), out.double(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "biased"), [(1, True), (9, False), (40, True)])
def test_experts_whose_activation_is_code(
    num_tokens: int, biased: bool, dtype: torch.dtype, device: torch.device
) -> None:
    mixture = Mixture(5, 72, 40, dtype, biased=biased)
    x, weights = (torch.randn(num_tokens, 72) * 3).to(dtype), torch.rand(num_tokens, 2).to(dtype)
    ids = some_ids(num_tokens, 2, 5, skewed=True, padding=0)
    out = mixture.run_by_code(x, ids, weights, "swiglu_clamped", device)
    assert_near(out, mixture.by_hand(x, ids, weights, "swiglu_clamped"), dtype)


def test_experts_with_an_order_of_inputs_are_refused() -> None:
    weight = pack_int4(torch.zeros(8, 32, dtype=torch.uint8), torch.ones(1, 8).half(), None, 32)
    sorted_inputs = dataclasses.replace(weight, input_order=torch.arange(31, -1, -1))
    with pytest.raises(ValueError, match="desc_act"):
        stack_experts([weight, sorted_inputs], 2)


def test_reference_product_is_the_definition(device: torch.device) -> None:
    """The blockwise product, for one token with its blocks of one row and for many."""
    for num_tokens in (1, 7):
        mixture = Mixture(3, 24, 16, torch.float32, biased=True)
        x, weights = torch.randn(num_tokens, 24).to(device), torch.rand(num_tokens, 2).to(device)
        ids = some_ids(num_tokens, 2, 3, skewed=False, padding=0).to(device)
        blocks = align_single(ids, 16) if num_tokens == 1 else align(ids, 3, 16)
        bias = mixture.gate_up_bias.to(device), mixture.down_bias.to(device)
        hidden = grouped_gemm(x, mixture.gate_up.to(device), blocks, weights, "gelu", bias=bias[0])
        partial = grouped_gemm(hidden, mixture.down.to(device), blocks, weights, bias=bias[1])
        wanted = mixture.by_hand(x.cpu(), ids.cpu(), weights.cpu(), "gelu")
        assert_near(combine(partial, ids).cpu(), wanted, torch.float32)


def test_combine_leaves_padding_out(device: torch.device) -> None:
    partial = torch.randn(8, 1500).half()
    partial[[3, 6, 7]] = float("nan")
    ids = torch.tensor([[0, 1], [2, -1], [0, 2], [-1, -1]], dtype=torch.int32)
    out = combine(partial.to(device), ids.to(device)).cpu()
    wanted = torch.stack([partial[0].double() + partial[1], partial[2].double(), partial[4].double() + partial[5]])
    torch.testing.assert_close(out[:3].double(), wanted, rtol=1e-3, atol=1e-3)
    assert not out[3].any()


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_depend_on_their_neighbours(dtype: torch.dtype, device: torch.device) -> None:
    """Deterministic mode: the same bits alone, among few and among many."""
    mixture = Mixture(3, 40, 24, dtype)
    x, weights = torch.randn(30, 40).to(dtype), torch.rand(30, 2)
    ids = some_ids(30, 2, 3, skewed=True, padding=0)
    if INTERPRETED or device.type == "cuda":
        assert len({block_rows(count, 3, x.to(device)) for count in (2, 6, 140, 100_000)}) == 1
        whole = mixture.run(x, ids, weights, "silu", device)
        for part in (slice(4, 5), slice(3, 6), slice(1, 20)):
            assert torch.equal(mixture.run(x[part], ids[part], weights[part], "silu", device), whole[part])


def test_a_nan_stays_in_its_row(device: torch.device) -> None:
    mixture = Mixture(3, 16, 16, torch.float32)
    x, weights = torch.randn(5, 16), torch.rand(5, 2)
    ids = some_ids(5, 2, 3, skewed=False, padding=0)
    clean = mixture.run(x, ids, weights, "silu", device)
    x[2, 3] = float("nan")
    out = mixture.run(x, ids, weights, "silu", device)
    assert out[2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.equal(out[others], clean[others])
