"""Numbers of 4 bits in the KV cache, and the rotation of the keys that have them, against their definitions."""

import pytest
import torch
from torch import Tensor

from localllm.kernels.kv_format import KV_FORMATS, format_of
from localllm.kernels.layer_cache import LayerKV
from localllm.kernels.quantize import dequantize_nibbles, quantize_nibbles
from localllm.kernels.rotary_store_kv import (
    hadamard,
    plan_rotation,
    rotary,
    rotary_angles,
    rotary_store_kv,
    rotation_size,
)
from tests.kernels.harness import poison


def sylvester(head_dim: int) -> Tensor:
    """Return the rotation as a matrix, entry by entry."""
    size = rotation_size(head_dim)
    matrix = torch.zeros(head_dim, head_dim, dtype=torch.float64)
    for i in range(head_dim):
        for j in range(head_dim):
            if i // size == j // size:
                matrix[i, j] = (-1) ** (i % size & j % size).bit_count() / size**0.5
    return matrix


@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128])
def test_the_rotation_is_its_definition_and_leaves_scores_alone(head_dim: int) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 5, 3, head_dim)
    assert rotation_size(head_dim) == {80: 16, 96: 32}.get(head_dim, head_dim)
    torch.testing.assert_close(hadamard(q).double(), q.double() @ sylvester(head_dim), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close((hadamard(q) * hadamard(k)).sum(-1), (q * k).sum(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hadamard(hadamard(q)), q, rtol=1e-5, atol=1e-5)
    assert torch.equal(hadamard(q[3]), hadamard(q)[3]), "a row does not depend on the rows beside it"


def test_a_channel_that_is_much_larger_no_longer_costs_the_others_their_bits() -> None:
    torch.manual_seed(0)
    k = torch.randn(200, 64)
    k[:, 7] *= 20

    def error(x: Tensor) -> float:
        return float((dequantize_nibbles(*quantize_nibbles(x, 1)) - x).square().sum() / x.square().sum())

    assert error(hadamard(k)) < error(k) / 4


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_number_is_within_half_a_step(groups: int) -> None:
    torch.manual_seed(0)
    x = (torch.randn(7, 3, 128) + 0.5) * torch.logspace(-3, 3, 7)[:, None, None]
    codes, scales = quantize_nibbles(x, groups)
    assert codes.shape == (7, 3, 64)
    assert scales.shape == (7, 3, 2, groups)
    read = dequantize_nibbles(codes, scales)
    steps = scales[..., 0, :].float().repeat_interleave(128 // groups, -1)
    rounding = x.abs() * 2.0**-10 + steps * 0.01  # of the zero point, and of the last step, in fp16
    assert ((read - x).abs() <= steps / 2 + rounding).all()
    span = read.unflatten(-1, (groups, -1)).amax(-1) - read.unflatten(-1, (groups, -1)).amin(-1)
    torch.testing.assert_close(span, 15 * scales[..., 0, :].float(), rtol=2e-3, atol=1e-6)


def test_rows_without_a_range_and_rows_that_are_not_finite() -> None:
    x = torch.zeros(5, 64)
    x[1], x[2, 40], x[3, 3], x[4] = 0.75, torch.nan, torch.inf, 1e-9
    read = dequantize_nibbles(*quantize_nibbles(x, 2))
    assert torch.equal(read[:2], x[:2])
    assert not read[2, 32:].isfinite().any()
    assert not read[3, :32].isfinite().any()
    assert read[2, :32].isfinite().all()
    torch.testing.assert_close(read[4], x[4], rtol=0.0, atol=1e-6)


def test_formats_take_what_they_say() -> None:
    assert [KV_FORMATS[name].token_bytes(128) for name in ("bfloat16", "int8", "k8v4", "int4")] == [512, 264, 212, 148]
    for head_dim in (64, 128, 256):
        wide = KV_FORMATS["bfloat16"].token_bytes(head_dim)
        assert KV_FORMATS["int4"].token_bytes(head_dim) <= 0.30 * wide
        assert KV_FORMATS["k8v4"].token_bytes(head_dim) <= 0.43 * wide
    assert format_of("int4", 1024).name == "int8"
    assert format_of("float16", 1024).name == "float16"


# ---- stored with the rotation


def cache(kind: str, head_dim: int, device: torch.device, kv_heads: int = 2, blocks: int = 3) -> LayerKV:
    sides = []
    for plane in KV_FORMATS[kind][1:]:
        shape = (kv_heads, blocks, 4)
        codes = poison(torch.zeros(*shape, plane.stored_width(head_dim), dtype=getattr(torch, plane.stored)))
        wide = (*shape, 2, plane.num_groups(head_dim)) if plane.bits == 4 else shape
        scales = poison(torch.zeros(wide, dtype=torch.float16 if plane.bits == 4 else torch.float32))
        sides.append((codes.to(device), scales.to(device)))
    (k, k_scale), (v, v_scale) = sides
    return LayerKV(k, v, k_scale, v_scale)


def as_read(codes: Tensor, scales: Tensor | None) -> Tensor:
    """Return [kv_heads, slots, head_dim] fp32."""
    assert scales is not None
    wide = dequantize_nibbles(codes, scales) if codes.dtype == torch.uint8 else codes.float() * scales[..., None]
    return wide.flatten(1, 2).cpu()


STORED = {
    "half-split": {},
    "interleaved": {"interleaved": True},
    "a part turns": {"rotary_dim": 24},
    "no positions": {"rotary_dim": 0},
    "normed": {"norm": True},
    "96 numbers a head": {"head_dim": 96},
    "values from keys": {"made": "qk"},
    "fp16": {"dtype": torch.float16},
}


@pytest.mark.parametrize("kind", ["k8v4", "int4"])
@pytest.mark.parametrize("case", STORED)
def test_heads_are_rotated_and_stored(case: str, kind: str, device: torch.device) -> None:
    given: dict[str, object] = {"head_dim": 32, "dtype": torch.float32, "made": "qkv", **STORED[case]}
    head_dim, made, heads, kv_heads, tokens = int(given["head_dim"]), given["made"], 3, 2, 6  # type: ignore[call-overload]
    torch.manual_seed(0)
    total = heads + (2 if made == "qkv" else 1) * kv_heads
    qkv = torch.randn(tokens, total * head_dim).to(given["dtype"])  # type: ignore[call-overload]
    rotary_dim = given.get("rotary_dim", head_dim)
    table = torch.rand(40, rotary_dim) * 2 - 1  # type: ignore[call-overload]
    positions, slots = torch.randint(0, 40, (tokens,)), torch.tensor([11, -1, 0, 5, 7, 2])
    weight = torch.rand(heads + kv_heads, head_dim) + 0.5 if given.get("norm") else None
    interleaved = bool(given.get("interleaved"))
    kv = cache(kind, head_dim, device)
    before = [each.clone() for each in kv.tensors()]
    rotation = plan_rotation(table.to(device), positions.to(device), interleaved=interleaved) if rotary_dim else None
    q = rotary_store_kv(
        qkv.to(device), kv, slots.to(device), rotation, None if weight is None else weight.to(device), 1e-6,
        made=made,  # type: ignore[arg-type]
    )  # fmt: skip

    each = qkv.float().unflatten(1, (total, head_dim))
    qk, v = each[:, : heads + kv_heads], each[:, -kv_heads:]
    if weight is not None:
        qk = qk / (qk.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    if rotary_dim:
        qk = rotary(qk, *rotary_angles(table, positions, interleaved=interleaved), interleaved=interleaved)
    if kind == "int4":
        qk = (qk.double() @ sylvester(head_dim)).float()
    slack = 4e-3 if qkv.dtype == torch.float16 else 1e-4
    torch.testing.assert_close(q.float().cpu(), qk[:, :heads], rtol=slack, atol=slack)
    kept = slots >= 0
    for (codes, scales), wanted in zip(((kv.k, kv.k_scale), (kv.v, kv.v_scale)), (qk[:, heads:], v), strict=True):
        read = as_read(codes, scales)[:, slots[kept]].transpose(0, 1)
        groups = scales.shape[-1] if codes.dtype == torch.uint8 and scales is not None else 1  # type: ignore[union-attr]
        spans = wanted[kept].unflatten(-1, (groups, -1))
        steps = (spans.amax(-1) - spans.amin(-1)) / 15 if codes.dtype == torch.uint8 else spans.abs().amax(-1) / 127
        half = (steps / 2).repeat_interleave(head_dim // groups, -1)
        assert ((read - wanted[kept]).abs() <= half * 1.02 + slack * 2).all()
    unused = [slot for slot in range(12) if slot not in slots.tolist()]
    for now, then in zip(kv.tensors(), before, strict=True):
        left = [each.flatten(1, 2)[:, unused].contiguous().view(torch.uint8) for each in (now, then)]
        assert torch.equal(*left)


@pytest.mark.parametrize("kind", ["k8v4", "int4"])
def test_a_token_is_stored_alike_alone_and_among_others(kind: str, device: torch.device) -> None:
    torch.manual_seed(0)
    qkv, slots = torch.randn(5, 7 * 64, device=device), torch.tensor([3, 9, 0, 6, 5], device=device)
    table = (torch.rand(40, 64) * 2 - 1).to(device)
    positions = torch.arange(5, device=device)
    whole, single = cache(kind, 64, device), cache(kind, 64, device)
    q = rotary_store_kv(qkv, whole, slots, plan_rotation(table, positions))
    for i in range(5):
        rotation = plan_rotation(table, positions[i : i + 1])
        assert torch.equal(rotary_store_kv(qkv[i : i + 1], single, slots[i : i + 1], rotation), q[i : i + 1])
    for one, other in zip(whole.tensors(), single.tensors(), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_queries_of_layers_that_store_nothing_are_rotated_too(device: torch.device) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(3, 2 * 64, device=device)
    q = rotary_store_kv(qkv, cache("int4", 64, device), torch.zeros(3, dtype=torch.int64), None, made="q")
    torch.testing.assert_close(q.cpu(), hadamard(qkv.cpu().unflatten(1, (2, 64))), rtol=1e-4, atol=1e-4)
