"""Paged attention against attention written out in float64, over caches that hold NaN wherever nothing was stored."""

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from localllm.kernels.launch import INTERPRETED, LaunchOptions, launching_with
from localllm.kernels.layer_cache import LayerKV
from localllm.kernels.paged_attention import (
    AttentionPlan,
    RawHeads,
    kv_cache_shape,
    paged_attention,
    paged_attention_reference,
    plan_attention,
    rotates_heads,
)
from localllm.kernels.paged_attention import device as device_code
from localllm.kernels.paged_attention.device import AttentionLaunch, DevicePlan
from localllm.kernels.paged_attention.twin import GROUP_WASTE_TOKENS, HostPlan
from localllm.kernels.rotary_store_kv import has_no_skipped_slot, plan_rotation, rotary_store_kv, store_kv
from tests.fake_runner import first_seen
from tests.kernels.conftest import DTYPES

DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
BY_KERNEL = INTERPRETED or DEVICE.type == "cuda"
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
FP8, INT8, NIBBLES = torch.float8_e4m3fn, torch.int8, torch.uint8

twin_only = pytest.mark.skipif(BY_KERNEL, reason="looks into the twin's plan")
kernel_only = pytest.mark.skipif(not BY_KERNEL, reason="looks at what only kernels do")


@dataclass
class Batch:
    """Requests with their whole K and V, stored in shuffled blocks. A context_len of 0 is a padding row."""

    query_lens: list[int]
    context_lens: list[int]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    block_size: int = 4
    in_order: bool = False
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None  # None: as dtype; uint8: 4 bits
    value_dtype: torch.dtype | None = None  # None: as cache_dtype
    padding_tokens: int = 0  # behind the last request
    decode_queries: int = 1
    padding_queries: tuple[int, ...] = ()  # of each of the first rows: so many at the end are padding
    first_key: int = 0  # keys before it are not read: they are NaN
    pictures: tuple[tuple[int, int, int], ...] = ()  # (request, first position, end): all of it is seen by all of it
    keys: list[Tensor] = field(default_factory=list)  # of each request [context_len, kv_heads, head_dim] fp64, as read
    values: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        counts = [-(-length // self.block_size) for length in self.context_lens]
        ids = list(range(1, sum(counts) + 1))
        if not self.in_order:
            random.Random(0).shuffle(ids)
        shape = kv_cache_shape(len(ids) + 1, self.block_size, self.num_kv_heads, self.head_dim)
        cache_dtype = self.cache_dtype or self.dtype
        self.kv = _poisoned_cache(shape, cache_dtype, self.value_dtype or cache_dtype)
        table = torch.zeros((len(counts), max(counts) + 2), dtype=torch.int32)
        for row, (count, length) in enumerate(zip(counts, self.context_lens, strict=True)):
            blocks, ids = ids[:count], ids[count:]
            table[row, :count] = torch.tensor(blocks, dtype=torch.int32)
            slots = [blocks[p // self.block_size] * self.block_size + p % self.block_size for p in range(length)]
            for cache, scale, kept in (
                (self.kv.k, self.kv.k_scale, self.keys), (self.kv.v, self.kv.v_scale, self.values),
            ):  # fmt: skip
                new = torch.randn(length, self.num_kv_heads, self.head_dim).to(self.dtype).float()
                kept.append(_store(cache, scale, slots, new))
                if self.first_key and slots and cache.dtype.itemsize > 1:
                    cache.view(self.num_kv_heads, -1, self.head_dim)[:, slots[: self.first_key]] = torch.nan
        self.block_table = table.to(DEVICE)
        self.kv = LayerKV(*(None if tensor is None else tensor.to(DEVICE) for tensor in self.kv))
        num_tokens = sum(self.query_lens) + self.padding_tokens
        # As a layer has them: the heads' first part of a wider row.
        self.q = torch.randn(num_tokens, self.num_heads + 1, self.head_dim, device=DEVICE).to(self.dtype)
        self.q = self.q[:, : self.num_heads]

    def plan(self, window: int | None = None) -> AttentionPlan:
        starts = torch.tensor([0, *self.query_lens]).cumsum(0).int()
        return plan_attention(
            self.block_table,
            torch.tensor(self.context_lens, dtype=torch.int32, device=DEVICE),
            starts.to(DEVICE),
            num_decodes=sum(n == self.decode_queries for n in self.query_lens),
            query_lens=self.query_lens,
            context_lens_host=self.context_lens,
            num_heads=self.num_heads,
            cache_shape=self.kv.k.shape,
            cache_dtype=self.kv.k.dtype,
            window=window,
            decode_queries=self.decode_queries,
            positions=self.positions() if self.decode_queries > 1 else None,
            first_key=self.first_key,
            key_limits=self.key_limits() if self.pictures else None,
        )

    def starts(self) -> list[int]:
        """Return the position of each request's first query."""
        padding = [*self.padding_queries, *[0] * (len(self.query_lens) - len(self.padding_queries))]
        lens = zip(self.query_lens, self.context_lens, padding, strict=True)
        return [max(0, length - n + behind) for n, length, behind in lens]

    def limit(self, row: int, position: int) -> int:
        """Return the first key that a query does not see."""
        ends = [end for request, first, end in self.pictures if request == row and first <= position < end]
        return max([position + 1, *ends])

    def key_limits(self) -> Tensor:
        rows = enumerate(zip(self.starts(), self.query_lens, strict=True))
        limits = [self.limit(row, start + i) for row, (start, n) in rows for i in range(n)]
        return torch.tensor(limits + [0] * self.padding_tokens, dtype=torch.int32, device=DEVICE)

    def positions(self) -> Tensor:
        rows = zip(self.starts(), self.query_lens, strict=True)
        return torch.cat([torch.arange(start, start + n) for start, n in rows]).to(DEVICE)

    def attend(
        self, window: int | None = None, scale: float = 0.3, by: Callable[..., Tensor] = paged_attention, **terms: Any
    ) -> Tensor:
        kv, terms = self.kv, {name: t.to(DEVICE) if isinstance(t, Tensor) else t for name, t in terms.items()}
        return by(self.q, kv.k, kv.v, self.plan(window), scale=scale, k_scale=kv.k_scale, v_scale=kv.v_scale, **terms)

    def definition(
        self, window: int | None = None, scale: float = 0.3, softcap: float | None = None,
        sinks: Tensor | None = None, alibi_slopes: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        out = torch.zeros(len(self.q), self.num_heads, self.head_dim, dtype=torch.float64)
        start, group, starts = 0, self.num_heads // self.num_kv_heads, self.starts()
        for row, (n, length) in enumerate(zip(self.query_lens, self.context_lens, strict=True)):
            k, v = (kept[row].repeat_interleave(group, dim=1) for kept in (self.keys, self.values))
            for i in range(n if length else 0):
                position = starts[row] + i
                if position >= length:
                    out[start + i] = torch.nan  # not defined
                    continue
                first = max(self.first_key, first_seen(window, position))
                end = self.limit(row, position)
                scores = torch.einsum("hd,lhd->hl", self.q[start + i].cpu().double(), k[first:end]) * scale
                if softcap is not None:
                    scores = torch.tanh(scores / softcap) * softcap
                if alibi_slopes is not None:
                    scores += alibi_slopes.double()[:, None] * (torch.arange(first, end) - position)
                if sinks is not None:
                    scores = torch.cat([scores, sinks.double()[:, None]], dim=1)
                weights = scores.softmax(-1)[:, : end - first]
                out[start + i] = torch.einsum("hl,lhd->hd", weights, v[first:end])
            start += n
        return out.flatten(1)


def _poisoned_cache(shape: tuple[int, ...], key_dtype: torch.dtype, value_dtype: torch.dtype) -> LayerKV:
    """What nobody stored is NaN, or wrong where a number cannot be NaN: then its scale is."""
    k, k_scale = _poisoned(shape, key_dtype, 1)
    v, v_scale = _poisoned(shape, value_dtype, shape[3] // 32)
    return LayerKV(k, v, k_scale, v_scale)


def _poisoned(shape: tuple[int, ...], dtype: torch.dtype, groups: int) -> tuple[Tensor, Tensor | None]:
    heads, blocks, size, dim = shape
    if dtype == NIBBLES:
        scales = torch.full((heads, blocks, size, 2, groups), torch.nan, dtype=torch.float16)
        return torch.full((heads, blocks, size, dim // 2), 0x5F, dtype=NIBBLES), scales
    if dtype == INT8:
        return torch.full(shape, -77, dtype=INT8), torch.full((heads, blocks, size), torch.nan)
    values = torch.full(shape, torch.nan, dtype=torch.float32).to(dtype)
    return values, torch.rand(heads) / 50 + 0.01 if dtype == FP8 else None


def _store(cache: Tensor, scale: Tensor | None, slots: list[int], new: Tensor) -> Tensor:
    """Writes new [n, heads, dim] and gives it back as a reader finds it, fp64."""
    heads, blocks, size, _ = cache.shape
    stored = new.transpose(0, 1)  # [heads, n, dim]
    if cache.dtype == NIBBLES:
        assert scale is not None
        return _store_nibbles(cache, scale, slots, stored.double()).transpose(0, 1)
    factor = torch.ones(1)
    if cache.dtype == FP8:
        assert scale is not None
        factor = scale[:, None, None]
    elif cache.dtype == INT8:
        assert scale is not None
        factor = stored.abs().amax(-1, keepdim=True) / 127
        scale.view(heads, -1)[:, slots] = factor[..., 0]
    stored = stored / factor
    stored = (stored.round() if cache.dtype == INT8 else stored).to(cache.dtype)
    cache.view(torch.uint8).view(heads, blocks * size, -1)[:, slots] = stored.contiguous().view(torch.uint8)
    return (stored.double() * factor.double()).transpose(0, 1)


def _store_nibbles(cache: Tensor, scale: Tensor, slots: list[int], stored: Tensor) -> Tensor:
    """Write stored [heads, n, dim] in 4 bits, and return it as a reader finds it."""
    groups = stored.unflatten(-1, (scale.shape[-1], -1))
    low, high = groups.aminmax(dim=-1, keepdim=True)
    step = ((high - low) / 15).half().double()
    zero = (low + 8 * step).half().double()
    codes = ((groups - zero) / step).round().clamp(-8, 7)
    scale.flatten(1, 2)[:, slots] = torch.stack((step, zero), -3).squeeze(-1).half()
    pairs = (codes + 8).flatten(-2).to(NIBBLES).unflatten(-1, (-1, 2))
    cache.flatten(1, 2)[:, slots] = pairs[..., 0] + 16 * pairs[..., 1]
    return (zero + codes * step).flatten(-2)


def assert_matches(batch: Batch, tolerance: float | None = None, **terms: Any) -> None:
    tolerance = tolerance or TOLERANCE[batch.dtype]
    wanted = batch.definition(**terms)
    is_defined = ~wanted.isnan().any(1)
    for by in (paged_attention,) if BY_KERNEL else (paged_attention, paged_attention_reference):
        ours = batch.attend(by=by, **terms)
        assert ours.dtype == batch.dtype
        torch.testing.assert_close(ours.cpu().double()[is_defined], wanted[is_defined], rtol=tolerance, atol=tolerance)


@pytest.fixture(autouse=True)
def _unwritten_outputs_are_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that a kernel forgets to write must not be right by accident."""
    real = torch.empty

    def empty(*args: Any, **kwargs: Any) -> Tensor:
        out = real(*args, **kwargs)
        return out.fill_(torch.nan) if out.is_floating_point() else out.fill_(-(2**20))

    if BY_KERNEL:
        monkeypatch.setattr(device_code.torch, "empty", empty)


# Each window, group and block size is a kernel of its own: on a GPU few of them, or compiling would take minutes.
ON_GPU = DEVICE.type == "cuda"
WINDOWS = (
    st.sampled_from([None, 1, 16, 45, -16, -20])
    if ON_GPU
    else st.one_of(st.none(), st.integers(1, 45), st.integers(-45, -1))
)


@settings(max_examples=8 if INTERPRETED else 20 if ON_GPU else 60, deadline=None)
@given(
    decodes=st.lists(st.integers(1, 40), max_size=3 if INTERPRETED else 6),
    prefills=st.lists(st.tuples(st.integers(2, 20), st.integers(0, 30)), max_size=2 if INTERPRETED else 3),
    kv_heads=st.integers(1, 2 if INTERPRETED else 5),
    group=st.sampled_from([1, 3, 4, 7]) if ON_GPU else st.integers(1, 7),
    block_size=st.sampled_from([1, 3, 4, 16, 32]),
    window=WINDOWS,
    softcap=st.sampled_from([None, 2.0]),
    in_order=st.booleans(),
)
def test_any_batch_matches_float64(
    decodes: list[int],
    prefills: list[tuple[int, int]],
    kv_heads: int,
    group: int,
    block_size: int,
    window: int | None,
    softcap: float | None,
    in_order: bool,
) -> None:
    if not decodes and not prefills:
        return
    query_lens = [1] * len(decodes) + [n for n, _ in prefills]
    context_lens = decodes + [n + prefix for n, prefix in prefills]
    batch = Batch(query_lens, context_lens, kv_heads * group, kv_heads, 8, block_size, in_order)
    assert_matches(batch, window=window, softcap=softcap)


@settings(max_examples=8 if INTERPRETED else 20 if ON_GPU else 40, deadline=None)
@given(
    queries=st.sampled_from([2, 4]) if ON_GPU else st.integers(2, 8),
    contexts=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    padding=st.lists(st.integers(0, 7), max_size=3),
    has_prompt=st.booleans(),
    kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 4]) if ON_GPU else st.integers(1, 5),
    block_size=st.sampled_from([1, 4, 16, 32]),
    window=WINDOWS,
)
def test_several_queries_of_a_decode_row_match_float64(
    queries: int, contexts: list[int], padding: list[int], has_prompt: bool, kv_heads: int, group: int,
    block_size: int, window: int | None,
) -> None:  # fmt: skip
    """Rows that verify drafts. A context of 0 is a padding row; another row has a query that is not padding."""
    behind = tuple(min(n, queries - 1) for n in padding[: len(contexts)])
    lens = [length and length + queries for length in contexts]
    prompt = ([9], [9 + 5]) if has_prompt else ([], [])
    batch = Batch(
        [queries] * len(lens) + prompt[0], lens + prompt[1], kv_heads * group, kv_heads, 8, block_size,
        decode_queries=queries, padding_queries=behind,
    )  # fmt: skip
    assert_matches(batch, window=window)


@pytest.mark.parametrize("cache_dtype", [None, FP8, INT8])
@pytest.mark.parametrize("queries", [4, 8])
def test_several_queries_with_what_a_layer_may_add(queries: int, cache_dtype: torch.dtype | None) -> None:
    batch = Batch(
        [queries, queries, 15], [70, 34, 40], 3, 1, 16, 32, dtype=DTYPES[0], cache_dtype=cache_dtype,
        decode_queries=queries,
    )  # fmt: skip
    sinks, slopes = torch.linspace(-2, 3, 3), torch.tensor([2.0**-i for i in range(3)])
    tolerance = 4e-3 if cache_dtype and DTYPES[0] == torch.float32 else None
    assert_matches(batch, tolerance, sinks=sinks, softcap=3.0)
    assert_matches(batch, tolerance, window=20, alibi_slopes=slopes, sinks=sinks)


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_what_is_kept_of_no_token_is_not_read(queries: int, window: int | None, is_deterministic: bool) -> None:
    """A drafter has no key of the first token. Rows of one tile and of several, a padding row, and prompts."""
    with launching_with(LaunchOptions(deterministic=is_deterministic)):
        batch = Batch(
            [queries] * 4 + [6, 3], [70, 1 + queries, 0, 5 + queries, 7, 40], 4, 2, 16, 4, decode_queries=queries,
            padding_queries=(0, 0, 0, queries - 1), first_key=1,
        )  # fmt: skip
        assert_matches(batch, window=window)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("window", [None, 20])
def test_rows_that_verify_drafts_in_deterministic_mode(window: int | None) -> None:
    """They are rows of the prefill kernel, which takes their positions from the step: some queries are padding."""
    batch = Batch([4, 4, 4], [70, 0, 34], 4, 2, 16, 32, decode_queries=4, padding_queries=(2, 0, 3))
    assert_matches(batch, window=window)


def test_queries_that_take_more_rows_than_a_program_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_code, "DECODE_ROWS", 9)
    batch = Batch([5, 5], [60, 21], 8, 2, 8, 16, decode_queries=5)
    assert_matches(batch, window=17)
    assert_matches(batch)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 50, -20] if INTERPRETED else [None, 1, 16, 50, -16, -20])
def test_odd_sizes(window: int | None, dtype: torch.dtype) -> None:
    """63 tokens, 5 key heads, a half-filled last block."""
    lens = [1, 1, 7] if INTERPRETED and (window or dtype == torch.float16) else [1, 1, 63, 7]
    assert_matches(Batch(lens, [63, 8, 63, 63][: len(lens)], 15, 5, 24, 16, dtype=dtype), window=window)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(14, 2), (2, 2), (16, 1), (71, 1)])
def test_any_group_size(num_heads: int, num_kv_heads: int) -> None:
    assert_matches(Batch([1, 3], [37, 21], num_heads, num_kv_heads, 8, 16))


@pytest.mark.parametrize(
    ("head_dim", "block_size"), [(64, 16), (80, 8), (80, 16), (96, 16), (128, 8), (256, 16), (512, 16)]
)
def test_any_head_dim(head_dim: int, block_size: int) -> None:
    assert_matches(Batch([1, 9], [21, 18], 2, 1, head_dim, block_size, dtype=torch.float16), scale=head_dim**-0.5)


@pytest.mark.parametrize("cache_dtype", [None, FP8, INT8])
@pytest.mark.parametrize(("block_size", "dtype"), [(4, DTYPES[0]), *((32, dtype) for dtype in DTYPES)])
def test_what_a_layer_may_add_to_the_scores(
    block_size: int, dtype: torch.dtype, cache_dtype: torch.dtype | None
) -> None:
    """Sinks, slopes and cap, with rows of one query and of many, over caches of every kind."""
    batch = Batch([1, 1, 15], [70, 34, 40], 3, 1, 16, block_size, dtype=dtype, cache_dtype=cache_dtype)
    sinks, slopes = torch.linspace(-2, 3, 3), torch.tensor([2.0**-i for i in range(3)])
    tolerance = 4e-3 if cache_dtype and dtype == torch.float32 else None
    assert_matches(batch, tolerance, sinks=sinks, softcap=3.0)
    assert_matches(batch, tolerance, window=20, alibi_slopes=slopes, sinks=sinks)
    if not INTERPRETED:
        assert_matches(batch, tolerance, alibi_slopes=slopes)
        assert_matches(batch, tolerance, window=20, softcap=3.0)
        assert_matches(Batch([1], [21], 6, 2, 16, block_size, True, dtype, cache_dtype), tolerance)


FOUR_BITS: dict[str, dict[str, Any]] = {
    "k8v4": {"cache_dtype": INT8, "value_dtype": NIBBLES, "head_dim": 64},
    "int4": {"cache_dtype": NIBBLES, "head_dim": 64},
    "int4, 96 numbers a head": {"cache_dtype": NIBBLES, "head_dim": 96},
    "k8v4, blocks of 4": {"cache_dtype": INT8, "value_dtype": NIBBLES, "head_dim": 32, "block_size": 4},
    "int4, blocks of 4": {"cache_dtype": NIBBLES, "head_dim": 32, "block_size": 4},
}


@pytest.mark.parametrize("kind", FOUR_BITS)
@pytest.mark.parametrize("dtype", DTYPES[:1] if INTERPRETED else DTYPES)
def test_caches_of_four_bits(kind: str, dtype: torch.dtype) -> None:
    """Rows of one query, of drafts and of many, beside padding, with what a layer may add to the scores."""
    given = {"block_size": 16, "dtype": dtype, **FOUR_BITS[kind]}
    batch = Batch([1, 1, 1, 9], [70, 0, 33, 20], 6, 2, **given)
    tolerance = max(TOLERANCE[dtype], 6e-3) if BY_KERNEL else None
    assert_matches(batch, tolerance, sinks=torch.linspace(-2, 3, 6), softcap=3.0)
    assert_matches(batch, tolerance, window=20)
    drafts = Batch([4, 4], [70, 21], 6, 2, decode_queries=4, padding_queries=(1, 0), **given)
    assert_matches(drafts, tolerance)
    if not BY_KERNEL:
        assert_matches(Batch([1], [45], 6, 2, in_order=True, **given))
        return
    with launching_with(LaunchOptions(deterministic=True)):
        assert_matches(batch, tolerance)


VERIFIED: dict[str, dict[str, Any]] = {
    "plain": {},
    "int8": {"cache_dtype": INT8, "head_dim": 16},
    "latents": {"num_heads": 4, "num_kv_heads": 1, "head_dim": 72},
    **FOUR_BITS,
}


@pytest.mark.parametrize("queries", [3] if INTERPRETED else [2, 5, 8])
@pytest.mark.parametrize("kind", VERIFIED)
def test_queries_that_verify_drafts_see_what_single_rows_see(kind: str, queries: int) -> None:
    """As queries of one row, as a chunk of a prompt, and one by one, with what a layer may add to the scores."""
    given = {"block_size": 16, **VERIFIED[kind]}
    chunk = Batch([queries], [60], **given)
    if kind == "latents":  # of MLA: the values are the keys
        chunk.kv = LayerKV(chunk.kv.k, chunk.kv.k)
    heads, tolerance = chunk.num_heads, 6e-3 if BY_KERNEL else 1e-5  # kernels multiply narrow keys as fp16
    sinks, slopes = torch.linspace(-2, 3, heads), torch.tensor([2.0**-i for i in range(heads)])
    single = replace(chunk, query_lens=[1] * queries, context_lens=[60 - queries + 1 + i for i in range(queries)])
    together = replace(chunk, decode_queries=queries)
    for batch in (single, together):
        batch.kv, batch.q = chunk.kv, chunk.q
        batch.block_table = chunk.block_table.expand(len(batch.query_lens), -1).contiguous()
    for terms in ({"softcap": 3.0, "sinks": sinks}, {"window": 20}, {"alibi_slopes": slopes}):
        wanted = single.attend(**terms)
        assert wanted.isfinite().all()
        for batch in (together, chunk):
            torch.testing.assert_close(batch.attend(**terms), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("decodes", [1, 3])
def test_padding_is_answered_with_zeros(decodes: int) -> None:
    batch = Batch([1] * decodes + [5, 3], [33] + [0] * (decodes - 1) + [9, 0], block_size=16, padding_tokens=6)
    sinks = torch.ones(4)
    for terms in ({"sinks": sinks}, {"window": 7}):
        out = batch.attend(**terms)
        wanted = batch.definition(**terms)
        torch.testing.assert_close(out.cpu().double(), wanted, rtol=1e-5, atol=1e-5)
        assert not out[1:decodes].any()
        assert not out[decodes + 5 :].any()


def test_a_batch_of_padding_rows() -> None:
    assert not Batch([1, 1], [0, 0], block_size=16).attend().any()


@pytest.mark.parametrize("cache_dtype", [FP8, INT8])
def test_values_far_from_one_survive_eight_bits(cache_dtype: torch.dtype) -> None:
    """Scales of 1e-7 and of 1e3: fp16, which kernels compute in, has room for neither."""
    batch = Batch([1, 20], [60, 30], 2, 1, 16, 16, cache_dtype=cache_dtype)
    assert batch.kv.v_scale is not None
    wanted = batch.attend()
    for factor in (2.0**-20, 2.0**12):
        v_scale = batch.kv.v_scale * factor
        out = paged_attention(
            batch.q, batch.kv.k, batch.kv.v, batch.plan(), scale=0.3, k_scale=batch.kv.k_scale, v_scale=v_scale
        )
        torch.testing.assert_close(out / factor, wanted, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("window", [None, 9, 30])
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_tokens_of_a_picture_see_all_of_it(window: int | None, is_deterministic: bool) -> None:
    """Pictures at both ends of a chunk, one behind the other, begun in an earlier chunk, and longer than a tile."""
    pictures = ((1, 0, 37), (2, 20, 26), (2, 26, 41), (3, 3, 12))
    batch = Batch([1, 37, 25, 7, 5], [13, 37, 45, 12, 30], pictures=pictures, padding_tokens=2)
    with launching_with(LaunchOptions(deterministic=is_deterministic)):
        assert_matches(batch, window=window)


@pytest.mark.skipif(INTERPRETED, reason="long")
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_picture_longer_than_a_chunk_of_the_twin(softcap: float | None) -> None:
    assert_matches(Batch([300], [320], pictures=((0, 30, 310),)), window=50, softcap=softcap)


@twin_only
def test_one_long_request_does_not_make_short_ones_pay() -> None:
    batch = Batch([1, 1, 1], [8, GROUP_WASTE_TOKENS * 2, 9])
    plan = batch.plan()
    assert isinstance(plan, HostPlan)
    assert [group.num_rows for group in plan.decode_groups] == [1, 2]
    assert plan.decode_groups[1].length == 12
    assert_matches(batch)


@twin_only
def test_a_window_gathers_only_the_blocks_it_sees() -> None:
    batch = Batch([1, 1, 4], [400, 399, 300])
    plan = batch.plan(window=6)
    assert isinstance(plan, HostPlan)
    assert plan.decode_groups[0].length == 8
    chunk = plan.prefill_rows[0].chunks[0]
    assert chunk.last_key - chunk.first_key == 9
    assert len(plan.prefill_rows[0].block_index) == 2 * 3
    assert_matches(batch, window=6)


@twin_only
def test_consecutive_blocks_of_a_lone_request_are_read_without_a_copy() -> None:
    batch = Batch([1], [21], in_order=True)
    plan = batch.plan()
    assert isinstance(plan, HostPlan)
    assert plan.decode_groups[0].block_index is None
    assert_matches(batch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@twin_only
def test_half_precision(dtype: torch.dtype) -> None:
    assert_matches(Batch([1, 1, 9], [33, 30, 21], dtype=dtype))


def test_queries_of_another_type_than_the_cache() -> None:
    batch = Batch([1, 5], [33, 21])
    wanted = batch.attend()
    batch.q = batch.q.to(DTYPES[-1])
    out = batch.attend()
    assert out.dtype == DTYPES[-1]
    torch.testing.assert_close(out.float(), wanted, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 5, 100, 200, -100])
@pytest.mark.parametrize("context_len", [300, 310])
@pytest.mark.skipif(INTERPRETED, reason="too long for the interpreter, and the twin is what cuts prompts")
def test_long_prompts_are_cut_into_chunks(context_len: int, window: int | None, softcap: float | None) -> None:
    batch = Batch([1, 300], [7, context_len])
    if isinstance(plan := batch.plan(), HostPlan):
        assert len(plan.prefill_rows[0].chunks) == 3
    assert_matches(batch, window=window, softcap=softcap)


@kernel_only
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("window", [None, 40, -40])
def test_a_long_row_is_split_and_put_together(window: int | None, queries: int) -> None:
    long = 300 if INTERPRETED else 6 * device_code.MIN_SPLIT_TOKENS + 44
    batch = Batch([queries] * 4, [long, 0, 31, 64], 6, 2, 16, 16, decode_queries=queries)
    plan = batch.plan(window)
    assert isinstance(plan, DevicePlan)
    assert plan.splits is not None
    parts = plan.splits.split_starts.diff().tolist()
    assert parts[1] == 1, "a padding row is one item that writes zeros"
    assert window or parts[0] > 4
    items = plan.splits.items.tolist()
    assert all(row == -1 for row, *_ in items[sum(parts) :])
    for row, length in enumerate(batch.context_lens):
        spans = [(first, end) for item_row, first, end in items if item_row == row]
        first = first_seen(window, max(0, length - queries)) if window else 0
        covered = [tile for first, end in spans for tile in range(first, end)]
        assert covered == list(range(first // plan.decode.tile, -(-length // plan.decode.tile)))
    assert_matches(batch, window=window)


ROTATED: dict[str, dict[str, Any]] = {
    "half precision": {"dtype": torch.float16},
    "fp32": {},
    "normed": {"norm": True, "dtype": torch.float16},
    "interleaved, a part of the dimensions": {"rotary_dim": 8, "interleaved": True},
    "half-split, a part of the dimensions": {"rotary_dim": 8},
    "no positions": {"rotary_dim": 0},
    "window and cap": {"window": 20, "softcap": 3.0},
    "heads of 24, three of keys' one": {"head_dim": 24, "num_heads": 3, "num_kv_heads": 1},
    "blocks of 4": {"block_size": 4},
    "int8 cache": {"cache_dtype": INT8, "dtype": torch.float16},
    "fp8 cache": {"cache_dtype": FP8, "dtype": torch.float16},
}


@kernel_only
@pytest.mark.parametrize("kind", ROTATED)
def test_raw_heads_are_rotated_stored_and_attended_to(kind: str) -> None:
    """As by the kernel that rotates and stores, and attention behind it. The newest slot is poisoned until then, a
    long row has several parts, and a padding row stores nothing."""
    given = dict(ROTATED[kind])
    rotary_dim, interleaved, norm = (
        given.pop("rotary_dim", 16),
        given.pop("interleaved", False),
        given.pop("norm", False),
    )
    terms = {name: given.pop(name) for name in ("window", "softcap") if name in given}
    sizes = {"head_dim": 16, "block_size": 16, **given}
    batch = Batch([1] * 6, [1, 16, 17, 0, 33, 130], **sizes)
    rotary_dim = batch.head_dim if rotary_dim == 16 else rotary_dim
    heads = _raw_heads(batch, rotary_dim, interleaved=interleaved, norm=norm)
    plan = batch.plan(terms.pop("window", None))
    assert rotates_heads(plan, heads, batch.kv)
    before, raw = (LayerKV(*(None if each is None else each.clone() for each in batch.kv)) for _ in range(2))
    if batch.kv.k.itemsize > 1:
        stored = heads.slot_mapping[heads.slot_mapping >= 0]
        for side in (raw.k, raw.v):
            side.view(batch.num_kv_heads, -1, batch.head_dim)[:, stored] = torch.nan

    def attend(kv: LayerKV, q: Any) -> Tensor:
        return paged_attention(q, kv.k, kv.v, plan, scale=0.3, k_scale=kv.k_scale, v_scale=kv.v_scale, **terms)

    q = rotary_store_kv(
        heads.qkv, before, heads.slot_mapping, heads.rotation, heads.norm_weight, heads.norm_eps
    )  # fmt: skip
    wanted, out = attend(before, q), attend(raw, heads)
    tolerance = 4e-3 if batch.kv.k.itemsize == 1 else TOLERANCE[batch.dtype]
    torch.testing.assert_close(out, wanted, rtol=tolerance, atol=tolerance)
    assert not out[3].any()
    for one, other in zip(raw.tensors(), before.tensors(), strict=True):
        if norm:  # whose sum of squares has another order
            torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3, equal_nan=True)
        else:
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _raw_heads(batch: Batch, rotary_dim: int, *, interleaved: bool = False, norm: bool = False) -> RawHeads:
    """Return heads of a batch of decode rows, of random numbers."""
    heads, kv_heads = batch.num_heads, batch.num_kv_heads
    positions = torch.tensor([max(0, length - 1) for length in batch.context_lens], device=DEVICE)
    blocks = batch.block_table.long().gather(1, positions[:, None] // batch.block_size)[:, 0]
    slots = blocks * batch.block_size + positions % batch.block_size
    slots[torch.tensor(batch.context_lens, device=DEVICE) == 0] = -1
    rotation = None
    if rotary_dim:
        angles = torch.outer(torch.arange(200.0), 1e3 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim))
        table = torch.cat([angles.cos(), angles.sin()], 1).to(DEVICE)
        rotation = plan_rotation(table, positions, interleaved=interleaved)
    weight = 1 + torch.randn(heads + kv_heads, batch.head_dim, device=DEVICE) / 4 if norm else None
    qkv = torch.randn(len(slots), (heads + 2 * kv_heads) * batch.head_dim, device=DEVICE).to(batch.dtype)
    return RawHeads(qkv, slots, rotation, weight, 1e-5)


@kernel_only
def test_the_newest_key_belongs_to_one_part() -> None:
    """Nine tiles in parts of equal length: some rows end with an empty part."""
    batch = Batch([1] * 5, [144, 80, 97, 33, 16], head_dim=16, block_size=16)
    plan = batch.plan()
    assert isinstance(plan, DevicePlan)
    assert plan.splits is not None
    first, end = plan.splits.items[:, 1], plan.splits.items[:, 2]
    heads = _raw_heads(batch, 16)
    wanted = None
    for last_is_empty in (False, True):
        if last_is_empty:  # the last part of the longest row gives its tiles to the one before it
            last = int(plan.splits.split_starts[1]) - 1
            end[last - 1] = end[last]
            first[last] = end[last]
        kv = LayerKV(batch.kv.k.clone(), batch.kv.v.clone())
        out = paged_attention(heads, kv.k, kv.v, plan, scale=0.3)
        wanted = out if wanted is None else wanted
        torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("why", ["prompt", "drafts", "switched off", "deterministic", "wide heads"])
def test_other_steps_rotate_by_a_kernel_of_their_own(why: str) -> None:
    lens = {"prompt": [1, 5], "drafts": [3, 3]}.get(why, [1, 1])
    queries = 3 if why == "drafts" else 1
    batch = Batch(
        lens, [20, 20], head_dim=512 if why == "wide heads" else 16, block_size=16, decode_queries=queries,
    )  # fmt: skip
    qkv = torch.zeros(sum(lens), 8 * batch.head_dim, device=DEVICE)
    heads = RawHeads(qkv, torch.zeros(sum(lens), dtype=torch.int64), None, None, 0.0)
    options = {
        "switched off": LaunchOptions(avoids=frozenset({"decode rotation"})),
        "deterministic": LaunchOptions(deterministic=True),
    }
    with launching_with(options.get(why, LaunchOptions())):
        assert not rotates_heads(batch.plan(), heads, batch.kv)


@pytest.mark.skipif(not INTERPRETED, reason="only the interpreter runs programs in an order that is asked for")
@pytest.mark.parametrize(("queries", "decode_rows", "window"), [(1, 64, None), (3, 8, 90)])
def test_whichever_part_is_last_merges_all(
    queries: int, decode_rows: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs in any order, layer after layer with one plan: the bits are those of a kernel that only merges."""
    monkeypatch.setattr(device_code, "DECODE_ROWS", decode_rows)  # 8: two programs share a row's queries
    batch = Batch([queries] * 4, [150, 0, 31, 80], 4, 1, 64, 16, decode_queries=queries)
    sinks = torch.linspace(-2, 3, 4)
    plan = batch.plan(window)
    assert isinstance(plan, DevicePlan)
    assert plan.splits is not None
    assert plan.splits.split_starts.diff()[[0, 3]].min() > 2
    monkeypatch.setattr(batch, "plan", lambda window: plan)
    _, at_once = device_code.merge_tile(4 * min(queries, decode_rows // 4), 64, plan.decode.num_warps)

    def attend() -> Tensor:
        for part in (plan.splits.partial_out, plan.splits.partial_max, plan.splits.partial_sum):
            part.fill_(torch.nan)
        out = batch.attend(window, sinks=sinks)
        assert not plan.splits.counters.any(), "the next layer begins at zero"
        return out

    with monkeypatch.context() as patch:
        patch.setattr(device_code, "MERGED_BY_ONE", 0)
        patch.setattr(device_code, "REDUCED_AT_ONCE", at_once)
        wanted = attend()
    for seed in range(2):
        with shuffled_programs(seed):
            assert torch.equal(attend(), wanted)
    real = batch.definition(window, sinks=sinks)
    torch.testing.assert_close(wanted.double(), real, rtol=1e-5, atol=1e-5)


@contextmanager
def shuffled_programs(seed: int) -> Iterator[None]:
    """The interpreter runs a grid's programs one by one, in another order than that of their ids."""
    from triton.runtime.interpreter import InterpreterBuilder

    real, orders = InterpreterBuilder.set_grid_idx, dict[tuple[int, ...], list[int]]()

    def shuffled(builder: Any, x: int, y: int, z: int) -> None:
        _, ys, zs = grid = tuple(builder.grid_dim)
        if grid not in orders:
            orders[grid] = random.Random(seed).sample(range(math.prod(grid)), math.prod(grid))
        rest, z = divmod(orders[grid][(x * ys + y) * zs + z], zs)
        real(builder, *divmod(rest, ys), z)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "set_grid_idx", shuffled)
        yield


@kernel_only
def test_more_rows_than_the_plan_kernel_takes_at_once() -> None:
    lens = [(7 * i) % 50 for i in range(300)]
    batch = Batch([1] * 300, lens, 1, 1, 8, 16)
    plan = batch.plan()
    assert isinstance(plan, DevicePlan)
    assert plan.splits is not None
    starts = plan.splits.split_starts
    assert starts[0] == 0
    assert (starts.diff() >= 1).all()
    assert starts[-1] <= len(plan.splits.items)
    rows = [row for row, *_ in plan.splits.items.tolist() if row >= 0]
    assert rows == [row for row, n in enumerate(starts.diff().tolist()) for _ in range(n)]


@kernel_only
@pytest.mark.parametrize("cache_dtype", [None, FP8, INT8])
def test_whole_tiles_and_gathered_ones_agree(monkeypatch: pytest.MonkeyPatch, cache_dtype: torch.dtype | None) -> None:
    """By descriptor, by one block's address, key by key."""
    batch = Batch([1, 40], [101, 75], 2, 1, 16, 64, dtype=torch.float16, cache_dtype=cache_dtype)
    wanted = batch.definition().float()
    monkeypatch.setattr(device_code, "settings_for", lambda kernel, key, heuristic: heuristic(*key))
    seen: list[tuple[int, bool]] = []
    for tile, tma in ((16, False), (32, False), (64, False), (16, True), (64, True)):
        if tma and ON_GPU and torch.cuda.get_device_capability() < (9, 0):
            continue
        monkeypatch.setattr(device_code, "decode_launch", lambda *_, t=tile, m=tma: AttentionLaunch(16, t, 1, 1, m))
        monkeypatch.setattr(device_code, "prefill_launch", lambda *_, t=tile, m=tma: AttentionLaunch(32, t, 1, 1, m))
        plan = batch.plan()
        assert isinstance(plan, DevicePlan)
        seen.append((plan.decode.tile, plan.prefill.tma))
        torch.testing.assert_close(batch.attend().cpu().float(), wanted, rtol=4e-3, atol=4e-3)
    assert len(set(seen)) == len(seen) >= 3, "each setting reached the launch"


@pytest.fixture
def as_served(monkeypatch: pytest.MonkeyPatch) -> Callable[[Batch, int | None], None]:
    """A function that asks for Hopper's tiles and for TMA, in the interpreter as well, and fails where a GPU that has
    TMA does not take a batch's blocks whole."""

    def choose(batch: Batch, window: int | None = None) -> None:
        has_tma = INTERPRETED or torch.cuda.get_device_capability() >= (9, 0)
        if INTERPRETED:
            monkeypatch.setattr(device_code, "settings_for", lambda kernel, key, heuristic: heuristic(*key))
            for name in ("decode_launch", "prefill_launch"):
                real = getattr(device_code, name)
                monkeypatch.setattr(device_code, name, lambda arch, *shape, real=real: real(90, *shape))
        plan = batch.plan(window)
        assert isinstance(plan, DevicePlan)
        assert (plan.decode.tma, plan.prefill.tma) == (has_tma, has_tma)

    return choose


@kernel_only
@pytest.mark.parametrize("cache_dtype", [None, FP8, INT8])
@pytest.mark.parametrize(("head_dim", "group", "dtype"), [(64, 7, DTYPES[1]), (128, 4, DTYPES[-1])])
def test_blocks_as_served(
    head_dim: int, group: int, dtype: torch.dtype, cache_dtype: torch.dtype | None, as_served: Callable[..., None]
) -> None:
    """Blocks of 64 tokens, fetched whole where the GPU can."""
    lens = [1, 1, 9] if INTERPRETED else [1, 1, 1, 150, 9]
    context_lens = [130, 64, 70] if INTERPRETED else [700, 64, 130, 150, 333]
    batch = Batch(lens, context_lens, group, 1, head_dim, 64, dtype=dtype, cache_dtype=cache_dtype)
    as_served(batch)
    assert_matches(batch, scale=head_dim**-0.5)


@kernel_only
@pytest.mark.parametrize("cache_dtype", [None, INT8] if INTERPRETED else [None, FP8, INT8])
@pytest.mark.parametrize(("queries", "window", "has_sinks"), [(1, 80, True), (4, None, True), (4, 80, False)])
def test_windows_sinks_and_drafts_in_blocks_as_served(
    queries: int, window: int | None, has_sinks: bool, cache_dtype: torch.dtype | None, as_served: Callable[..., None]
) -> None:
    batch = Batch(
        [queries, queries, 9], [150, 64, 90], 8, 2, 64, 64, dtype=DTYPES[1], cache_dtype=cache_dtype,
        decode_queries=queries, padding_queries=(queries // 2,),
    )  # fmt: skip
    as_served(batch, window)
    terms = {"sinks": torch.linspace(-2, 3, 8)} if has_sinks else {}
    assert_matches(batch, window=window, **terms)


@kernel_only
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(("window", "cache_dtype"), [(None, None), (30, None), (None, INT8), (None, NIBBLES)])
def test_bits_do_not_depend_on_chunks_or_neighbours(window: int | None, cache_dtype: torch.dtype | None) -> None:
    """The last 24 queries of a request: as one chunk, as several, one by one, alone and among others."""
    whole = Batch([24], [59], 3, 1, 32 if cache_dtype == NIBBLES else 16, 8, cache_dtype=cache_dtype)
    wanted = whole.attend(window)
    assert_matches(whole, 4e-3 if cache_dtype else None, window=window)
    for lens, neighbours in (([7, 1, 13, 3], 0), ([23, 1], 2), ([1] * 4, 1)):
        at, parts = 0, []
        for n in lens:
            parts.append(_chunk_of(whole, at, n, neighbours).attend(window)[neighbours:])
            at += n
        assert torch.equal(torch.cat(parts), wanted[:at])


def _chunk_of(whole: Batch, at: int, n: int, neighbours: int) -> Batch:
    """Queries at .. at+n-1 of `whole`, behind `neighbours` decode rows of the same request."""
    end = whole.context_lens[0] - whole.query_lens[0] + at + n
    part = Batch([1] * neighbours + [n], [5 + row for row in range(neighbours)] + [end], 3, 1, whole.head_dim, 8)
    part.kv, part.block_table = whole.kv, whole.block_table.expand(neighbours + 1, -1).contiguous()
    part.q = torch.cat([torch.randn_like(whole.q[:neighbours]), whole.q[at : at + n]])
    return part


def test_store_skips_slot_minus_one_and_touches_nothing_else() -> None:
    shape = kv_cache_shape(4, 4, 2, 3)
    k_cache, v_cache = torch.full(shape, -7.0), torch.full(shape, -7.0)
    k, v = torch.randn(2, 5, 2, 3)
    slots = torch.tensor([9, -1, 4, 15, -1])
    assert not has_no_skipped_slot(slots)
    store_kv(k, v, k_cache, v_cache, slots)
    for new, cache in ((k, k_cache), (v, v_cache)):
        flat = cache.view(2, 16, 3)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                assert torch.equal(flat[:, slot], new[token])
        assert (flat == -7.0).all(dim=-1).all(dim=0).sum() == 13


def test_store_of_only_skipped_slots_writes_nothing() -> None:
    cache = torch.zeros(kv_cache_shape(2, 4, 1, 3))
    store_kv(torch.ones(2, 1, 3), torch.ones(2, 1, 3), cache, cache, torch.tensor([-1, -1]))
    assert not cache.any()


def test_store_converts_to_the_type_of_the_cache() -> None:
    cache = torch.zeros(kv_cache_shape(2, 4, 1, 3))
    k = torch.randn(1, 1, 3).bfloat16()
    store_kv(k, k, cache, cache.clone(), torch.tensor([5]), all_valid=True)
    assert torch.equal(cache.view(1, 8, 3)[0, 5], k[0, 0].float())
