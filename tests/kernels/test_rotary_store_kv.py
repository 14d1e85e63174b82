"""From one projection to q and the paged cache, against the definition in float64: one pair of dimensions at a time."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from localllm.kernels.layer_cache import LayerKV
from localllm.kernels.paged_attention import kv_cache_shape
from localllm.kernels.quantize import Quantized
from localllm.kernels.rotary_store_kv import plan_rotation, rotary, rotary_angles, rotary_store_kv
from tests.kernels.conftest import DTYPES
from tests.kernels.harness import EIGHT_BITS, EXAMPLES, TOLERANCE, assert_quantized, poison

MAX_POSITION = 50


def rope_table(rotary_dim: int, device: torch.device) -> Tensor:
    angles = torch.rand(MAX_POSITION, rotary_dim // 2, device=device) * 6
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def rotate_by_hand(x: Tensor, table: Tensor, positions: Tensor, interleaved: bool = False) -> Tensor:
    """x [T, heads, head_dim] -> float64"""
    out = x.double().clone()
    half = table.shape[1] // 2
    for token, position in enumerate(positions.tolist()):
        for i in range(half):
            first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
            cos, sin = table[position, i].double(), table[position, half + i].double()
            a, b = x[token, :, first].double(), x[token, :, second].double()
            out[token, :, first], out[token, :, second] = a * cos - b * sin, b * cos + a * sin
    return out


def norm_by_hand(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.double() / (x.double().pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@dataclass
class Case:
    """Everything one call takes, made from sizes."""

    device: torch.device
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype = torch.float32
    tokens: int = 5
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    rotary_dim: int = 16  # 0: none
    interleaved: bool = False
    has_norm: bool = False
    norm_last: bool = False
    block_size: int = 8
    made: str = "qkv"  # the heads that the projection makes
    norms_values: bool = False

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        device = self.device
        total = self.num_heads + {"qkv": 2, "qk": 1, "q": 0}[self.made] * self.num_kv_heads
        heads = self.num_heads + (0 if self.made == "q" else 1 + self.norms_values) * self.num_kv_heads
        wide = torch.randn(self.tokens, total * self.head_dim + 8, device=device)
        self.qkv = wide.to(self.dtype)[:, : total * self.head_dim]  # rows of a wider tensor
        self.table = rope_table(self.rotary_dim, device) if self.rotary_dim else None
        self.positions = torch.randint(0, MAX_POSITION, (self.tokens,), device=device)
        self.norm_weight = torch.randn(heads, self.head_dim, device=device) if self.has_norm else None
        num_blocks = -(-self.tokens // self.block_size) + 2
        self.slots = torch.randperm(num_blocks * self.block_size, device=device)[: self.tokens]
        self.kv = self.make_cache(num_blocks)

    def make_cache(self, num_blocks: int) -> LayerKV:
        shape = kv_cache_shape(num_blocks, self.block_size, self.num_kv_heads, self.head_dim)
        k, v = (poison(torch.zeros(shape, dtype=self.cache_dtype, device=self.device)) for _ in range(2))
        if self.cache_dtype == torch.int8:
            return LayerKV(k, v, *(poison(torch.zeros(shape[:3], device=self.device)) for _ in range(2)))
        if self.cache_dtype == torch.float8_e4m3fn:
            return LayerKV(k, v, *(torch.rand(2, self.num_kv_heads, device=self.device) * 0.1 + 0.004))
        return LayerKV(k, v)

    def run(self, tokens: slice = slice(None), kv: LayerKV | None = None) -> Tensor:
        table, positions = self.table, self.positions[tokens]
        return rotary_store_kv(
            self.qkv[tokens],
            kv or self.kv,
            self.slots[tokens],
            None if table is None else plan_rotation(table, positions, interleaved=self.interleaved),
            self.norm_weight,
            1e-6,
            norm_last=self.norm_last,
            made=self.made,
        )

    def wanted(self) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim], float64"""
        heads = self.qkv.unflatten(1, (-1, self.head_dim))
        qk = (heads[:, : -self.num_kv_heads] if self.made == "qkv" else heads).double()
        v = heads[:, -self.num_kv_heads :].double()
        turning = qk.shape[1]
        if self.norm_weight is not None and self.norms_values:
            v = norm_by_hand(v, self.norm_weight[turning:], 1e-6)
        if self.norm_weight is not None and not self.norm_last:
            qk = norm_by_hand(qk, self.norm_weight[:turning], 1e-6)
        if self.table is not None:
            qk = rotate_by_hand(qk, self.table, self.positions, self.interleaved)
        if self.norm_weight is not None and self.norm_last:
            qk = norm_by_hand(qk, self.norm_weight[:turning], 1e-6)
        return qk[:, : self.num_heads], qk[:, self.num_heads :], v


def in_slots(cache: Tensor) -> Tensor:
    """[kv_heads, num_blocks, block_size, ...] -> [slots, kv_heads, ...]"""
    return cache.flatten(1, 2).transpose(0, 1)


def check(case: Case) -> None:
    before = LayerKV(*(None if tensor is None else tensor.clone() for tensor in case.kv))  # type: ignore[arg-type]
    q = case.run()
    wanted_q, *wanted_kv = case.wanted()
    tolerance = max(TOLERANCE[case.dtype], TOLERANCE.get(case.cache_dtype, 0.0)) * 2
    assert q.dtype == case.dtype
    torch.testing.assert_close(q.double(), wanted_q, rtol=tolerance, atol=tolerance)
    written = case.slots[case.slots >= 0]
    rest = torch.ones(in_slots(case.kv.k).shape[0], dtype=torch.bool).index_fill_(0, written.cpu(), False)
    for new, old, wanted in zip(case.kv[:2], before[:2], wanted_kv, strict=True):
        check_cache(case, new, wanted[case.slots >= 0], written, tolerance)
        assert torch.equal(in_slots(new.view(torch.uint8))[rest], in_slots(old.view(torch.uint8))[rest])


def check_cache(case: Case, cache: Tensor, wanted: Tensor, slots: Tensor, tolerance: float) -> None:
    got = in_slots(cache)[slots]
    slack = TOLERANCE[case.dtype]
    if case.cache_dtype not in EIGHT_BITS:
        torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance)
        return
    scale = case.kv.k_scale if cache is case.kv.k else case.kv.v_scale
    assert scale is not None
    if case.cache_dtype == torch.int8:
        assert_quantized(Quantized(got, in_slots(scale)[slots].unsqueeze(-1)), wanted, torch.int8, slack)
        return
    limit = 448 * scale.double()[:, None]
    limited = torch.maximum(torch.minimum(wanted, limit), -limit)
    error = (got.double() * scale.double()[:, None] - limited).abs()
    assert bool((error <= limited.abs() * (2**-4 + slack) + limit * (2**-19 + slack * 2**-6)).all())


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 5)),
    pairs=st.integers(1, 20),
    turning=st.integers(0, 20),
    interleaved=st.booleans(),
    has_norm=st.booleans(),
    norm_last=st.booleans(),
    block_size=st.sampled_from([1, 3, 16]),
    dtype=st.sampled_from(DTYPES),
    eight_bits=st.sampled_from([None, *EIGHT_BITS]),
)
def test_matches_float64(
    sizes: tuple[int, int, int], pairs: int, turning: int, interleaved: bool, has_norm: bool, norm_last: bool,
    block_size: int, dtype: torch.dtype, eight_bits: torch.dtype | None, device: torch.device,
) -> None:  # fmt: skip
    tokens, kv_heads, group = sizes
    check(Case(device, dtype, eight_bits or dtype, tokens, kv_heads * group, kv_heads, 2 * pairs,
               2 * min(turning, pairs), interleaved, has_norm, norm_last, block_size))  # fmt: skip


SERVED = {
    "llama": {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "rotary_dim": 128},
    "qwen2.5": {"num_heads": 14, "num_kv_heads": 2, "head_dim": 64, "rotary_dim": 64},
    "gemma": {"num_heads": 2, "num_kv_heads": 1, "head_dim": 256, "rotary_dim": 256, "has_norm": True},
    "hunyuan": {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 128,
        "rotary_dim": 128,
        "has_norm": True,
        "norm_last": True,
    },
    "phi": {"num_heads": 6, "num_kv_heads": 2, "head_dim": 96, "rotary_dim": 72},
    "nope": {"num_heads": 4, "num_kv_heads": 1, "head_dim": 64, "rotary_dim": 0},
}


@pytest.mark.parametrize("cache_dtype", [None, *EIGHT_BITS])
@pytest.mark.parametrize("shape", SERVED)
def test_heads_as_served(shape: str, cache_dtype: torch.dtype | None, device: torch.device) -> None:
    check(Case(device, torch.float16, cache_dtype or torch.float16, tokens=3, **SERVED[shape]))


@pytest.mark.parametrize("cache_dtype", [torch.float16, *EIGHT_BITS])
def test_a_cache_may_be_narrower_and_padding_writes_nothing(cache_dtype: torch.dtype, device: torch.device) -> None:
    case = Case(device, torch.float32, cache_dtype, has_norm=True)
    case.slots[1::2] = -1
    check(case)
    case.slots.fill_(-1)
    case.qkv = case.qkv.clone().fill_(float("nan"))
    before = case.kv.k.clone()
    case.run()
    assert torch.equal(case.kv.k.view(torch.uint8), before.view(torch.uint8))


def test_fp8_saturates(device: torch.device) -> None:
    case = Case(device, cache_dtype=torch.float8_e4m3fn)
    case.qkv = case.qkv * 1e4
    check(case)
    assert in_slots(case.kv.k)[case.slots].float().abs().max() == 448


@pytest.mark.parametrize("cache_dtype", [torch.float32, *EIGHT_BITS])
def test_two_chunkings_of_a_prompt_give_identical_caches(cache_dtype: torch.dtype, device: torch.device) -> None:
    case = Case(device, cache_dtype=cache_dtype, tokens=6, has_norm=True)
    whole = case.run()
    for size in (1, 4):
        other = case.make_cache(case.kv.k.shape[1])
        if cache_dtype == torch.float8_e4m3fn:
            other = other._replace(k_scale=case.kv.k_scale, v_scale=case.kv.v_scale)
        parts = [case.run(slice(start, start + size), other) for start in range(0, 6, size)]
        assert torch.equal(torch.cat(parts), whole)
        for mine, theirs in zip(other.tensors(), case.kv.tensors(), strict=True):
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


def test_no_tokens(device: torch.device) -> None:
    assert Case(device, tokens=0).run().shape == (0, 4, 16)


@settings(max_examples=EXAMPLES, deadline=None)
@given(tokens=st.integers(1, 9), heads=st.integers(1, 7), half=st.integers(1, 8), rest=st.integers(0, 5))
def test_rotary_turns_pairs_and_passes_the_rest(tokens: int, heads: int, half: int, rest: int) -> None:
    torch.manual_seed(0)
    table, positions = rope_table(2 * half, torch.device("cpu")), torch.randint(0, MAX_POSITION, (tokens,))
    x = torch.randn(tokens, heads + 2, 2 * half + rest)[:, 1:-1]  # a slice, as of a fused projection
    for interleaved in (False, True):
        out = rotary(x, *rotary_angles(table, positions, interleaved=interleaved), interleaved=interleaved)
        wanted = rotate_by_hand(x, table, positions, interleaved)
        torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)


def test_rotary_keeps_the_type_and_computes_in_fp32() -> None:
    table = torch.cat((torch.full((1, 4), 0.8), torch.full((1, 4), 0.6)), dim=-1)
    x = torch.randn(3, 2, 8).bfloat16()
    out = rotary(x, *rotary_angles(table, torch.zeros(3, dtype=torch.int64)))
    assert out.dtype == torch.bfloat16
    wanted = rotate_by_hand(x, table, torch.zeros(3, dtype=torch.int64)).bfloat16()
    torch.testing.assert_close(out, wanted, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("cache_dtype", [None, *EIGHT_BITS])
@pytest.mark.parametrize(("made", "norms_values"), [("qkv", True), ("qk", True), ("qk", False)])
def test_values_are_normed_and_made_from_keys(
    made: str, norms_values: bool, cache_dtype: torch.dtype | None, device: torch.device
) -> None:
    """Gemma 4: v is normed without being rotated, and in some layers it is k before norm and rotation."""
    check(Case(device, torch.float16, cache_dtype or torch.float16, has_norm=True, made=made, norms_values=norms_values,
               head_dim=32, rotary_dim=32))  # fmt: skip


def test_queries_alone_write_nothing(device: torch.device) -> None:
    case = Case(device, has_norm=True, made="q")
    before = [tensor.clone() for tensor in case.kv.tensors()]
    wanted = norm_by_hand(case.qkv.unflatten(1, (-1, case.head_dim)), case.norm_weight, 1e-6)
    wanted = rotate_by_hand(wanted, case.table, case.positions)
    torch.testing.assert_close(case.run().double(), wanted, rtol=1e-5, atol=1e-5)
    for now, then in zip(case.kv.tensors(), before, strict=True):
        assert torch.equal(now.view(torch.uint8), then.view(torch.uint8))


@pytest.mark.parametrize("cache_dtype", [torch.float32, *EIGHT_BITS])
def test_values_that_are_keys_are_stored_once(cache_dtype: torch.dtype, device: torch.device) -> None:
    """Attention over latents: no v comes in, and k is written as it is beside a v."""
    case = Case(device, cache_dtype=cache_dtype, num_heads=3, num_kv_heads=1, head_dim=24, rotary_dim=8)
    case.slots[1] = -1
    k = case.kv.k.clone()
    scale = None if case.kv.k_scale is None else case.kv.k_scale.clone()
    q = case.run()
    case.qkv = case.qkv[:, : 4 * case.head_dim]
    latents = LayerKV(k, k, scale, scale)
    assert torch.equal(case.run(kv=latents), q)
    assert torch.equal(k.view(torch.uint8), case.kv.k.view(torch.uint8))
    if scale is not None and case.kv.k_scale is not None:
        assert torch.equal(scale.nan_to_num(), case.kv.k_scale.nan_to_num())
    assert len(latents.tensors()) == (1 if scale is None else 2)
