"""Paged attention against attention written out in float64, over caches that hold NaN wherever nothing was stored."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from localllm.kernels.paged_attention import (
    GROUP_WASTE_TOKENS,
    AttentionPlan,
    kv_cache_shape,
    paged_attention,
    plan_attention,
)
from localllm.kernels.store_kv import has_no_skipped_slot, store_kv


@dataclass
class Batch:
    """Requests with their whole K and V, stored in shuffled blocks."""

    query_lens: list[int]
    context_lens: list[int]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    block_size: int = 4
    in_order: bool = False
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        counts = [-(-length // self.block_size) for length in self.context_lens]
        ids = list(range(1, sum(counts) + 1))
        if not self.in_order:
            random.Random(0).shuffle(ids)
        shape = kv_cache_shape(len(ids) + 1, self.block_size, self.num_kv_heads, self.head_dim)
        self.k_cache, self.v_cache = (torch.full(shape, torch.nan, dtype=self.dtype) for _ in range(2))
        self.block_table = torch.zeros((len(counts), max(counts) + 2), dtype=torch.int32)
        self.keys, self.values = [], []
        for row, (count, length) in enumerate(zip(counts, self.context_lens, strict=True)):
            blocks, ids = ids[:count], ids[count:]
            self.block_table[row, :count] = torch.tensor(blocks)
            k, v = torch.randn(2, length, self.num_kv_heads, self.head_dim).to(self.dtype)
            slots = torch.tensor([blocks[p // self.block_size] * self.block_size + p % self.block_size
                                  for p in range(length)])  # fmt: skip
            store_kv(k, v, self.k_cache, self.v_cache, slots)
            self.keys.append(k)
            self.values.append(v)
        self.q = torch.randn(sum(self.query_lens), self.num_heads, self.head_dim).to(self.dtype)

    def plan(self, window: int | None = None) -> AttentionPlan:
        decodes = sum(n == 1 for n in self.query_lens)
        return plan_attention(self.block_table, self.query_lens, self.context_lens, decodes, self.k_cache.shape, window)

    def attend(self, window: int | None = None, softcap: float | None = None, scale: float = 0.3) -> Tensor:
        return paged_attention(self.q, self.k_cache, self.v_cache, self.plan(window), scale=scale, softcap=softcap)

    def definition(self, window: int | None = None, softcap: float | None = None, scale: float = 0.3) -> Tensor:
        out, start, group = [], 0, self.num_heads // self.num_kv_heads
        for row, (n, length) in enumerate(zip(self.query_lens, self.context_lens, strict=True)):
            k = self.keys[row].double().repeat_interleave(group, dim=1)
            v = self.values[row].double().repeat_interleave(group, dim=1)
            for i in range(n):
                position = length - n + i
                first = 0 if window is None else max(0, position - window + 1)
                scores = torch.einsum("hd,lhd->hl", self.q[start + i].double(), k[first : position + 1]) * scale
                if softcap is not None:
                    scores = torch.tanh(scores / softcap) * softcap
                out.append(torch.einsum("hl,lhd->hd", scores.softmax(-1), v[first : position + 1]).flatten())
            start += n
        return torch.stack(out)


def assert_matches(batch: Batch, tolerance: float = 1e-5, **options: float | int | None) -> None:
    ours = batch.attend(**options)  # type: ignore[arg-type]
    assert ours.dtype == batch.dtype
    torch.testing.assert_close(ours.double(), batch.definition(**options), rtol=tolerance, atol=tolerance)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(
    decodes=st.lists(st.integers(1, 40), max_size=6),
    prefills=st.lists(st.tuples(st.integers(2, 20), st.integers(0, 30)), max_size=3),
    kv_heads=st.integers(1, 5),
    group=st.integers(1, 7),
    block_size=st.sampled_from([1, 3, 4, 16]),
    window=st.one_of(st.none(), st.integers(1, 45)),
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


@pytest.mark.parametrize("window", [None, 1, 16, 50])
def test_odd_sizes(window: int | None) -> None:
    """63 tokens, 5 key heads, a half-filled last block."""
    assert_matches(Batch([1, 1, 63, 7], [63, 8, 63, 63], 15, 5, 24, 16), window=window)


def test_one_long_request_does_not_make_short_ones_pay() -> None:
    batch = Batch([1, 1, 1], [8, GROUP_WASTE_TOKENS * 2, 9])
    groups = batch.plan().decode_groups
    assert [group.num_rows for group in groups] == [1, 2]
    assert groups[1].length == 12
    assert_matches(batch)


def test_a_window_gathers_only_the_blocks_it_sees() -> None:
    batch = Batch([1, 1, 4], [400, 399, 300])
    plan = batch.plan(window=6)
    assert plan.decode_groups[0].length == 8
    chunk = plan.prefill_rows[0].chunks[0]
    assert chunk.last_key - chunk.first_key == 9
    assert len(plan.prefill_rows[0].block_index) == 2 * 3
    assert_matches(batch, window=6)


def test_consecutive_blocks_of_a_lone_request_are_read_without_a_copy() -> None:
    batch = Batch([1], [21], in_order=True)
    assert batch.plan().decode_groups[0].block_index is None
    assert_matches(batch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    assert_matches(Batch([1, 1, 9], [33, 30, 21], dtype=dtype), tolerance=3e-2 if dtype == torch.bfloat16 else 4e-3)


def test_queries_of_another_type_than_the_cache() -> None:
    batch = Batch([1, 5], [33, 21])
    wanted = batch.attend()
    batch.q = batch.q.bfloat16()
    out = batch.attend()
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), wanted, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 5, 100, 200])
@pytest.mark.parametrize("context_len", [300, 310])
def test_long_prompts_are_cut_into_chunks(context_len: int, window: int | None, softcap: float | None) -> None:
    batch = Batch([1, 300], [7, context_len])
    assert len(batch.plan().prefill_rows[0].chunks) == 3
    assert_matches(batch, window=window, softcap=softcap)


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
