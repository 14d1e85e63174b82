"""Attention of this step's queries over the paged KV cache (Kwon et al. 2023, arXiv:2309.06180).

    plan = plan_attention(...)                 once per step and window: which blocks each query reads
    y = paged_attention(q, k_cache, v_cache, plan, scale=...)   once per layer

Causal; any grouping of query heads over key/value heads; sliding window; softcap; softmax in fp32. Two paths:
requests with one query token run together as one batched matmul, the others one by one through SDPA.
Slots past a request's context may hold anything, NaN included: they never reach the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP_WASTE_TOKENS = 512  # padding a decode group may carry before another matmul call is cheaper
SOFTCAP_CHUNK = 128  # query rows at a time where the scores must be materialised


def kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, int, int, int]:
    """Shape of one layer's K (or V) cache. Heads first: gathering blocks then yields each head's keys contiguous,
    ready for a batched matmul, and a block of one head is one contiguous tile of block_size x head_dim."""
    return (num_kv_heads, num_blocks, block_size, head_dim)


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode rows of similar length that share one batched matmul. b rows, L gathered tokens each."""

    rows: Tensor | None  # [b] int64 rows of the batch; None: all rows, in order
    num_rows: int
    length: int  # L
    block_index: (
        Tensor | None
    )  # [kv_heads * b * L / block_size] int64 into the cache seen as [kv_heads * num_blocks, ...]
    first_slot: int  # without block_index: the one row's tokens lie at consecutive slots from here
    offset: int  # b == 1: gathered tokens to skip in front
    hidden: Tensor | None  # [*] int64 flat gathered tokens that no query may see
    mask: Tensor | None  # [kv_heads * b, 1, L] fp32 to add to the scores


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """One request with several query tokens."""

    start: int  # of its queries in the flat batch
    query_len: int
    block_index: Tensor  # [kv_heads * blocks] int64
    offset: int  # gathered tokens to skip in front
    length: int  # keys read
    mask: Tensor | None  # [query_len, length] fp32 to add; None: square and causal


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What every layer with the same window shares in one step."""

    num_tokens: int
    decode_groups: tuple[DecodeGroup, ...]
    prefill_rows: tuple[PrefillRow, ...]


def plan_attention(
    block_table: Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    num_decodes: int,
    cache_shape: Sequence[int],
    window: int | None = None,
) -> AttentionPlan:
    """block_table [B, max_blocks]; lengths on the host; the first num_decodes requests have one query token each.

    window: tokens a query sees, itself included; None: all before it.
    """
    layout = _Layout(cache_shape[0], cache_shape[1], cache_shape[2], window)
    groups = [
        _plan_group(block_table, rows, context_lens, layout, whole=len(rows) == num_decodes)
        for rows in _group_rows(context_lens[:num_decodes], window)
    ]
    prefills, start = [], num_decodes
    for row in range(num_decodes, len(query_lens)):
        prefills.append(_plan_prefill(block_table, row, start, query_lens[row], context_lens[row], layout))
        start += query_lens[row]
    return AttentionPlan(start, tuple(groups), tuple(prefills))


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionPlan, *, scale: float, softcap: float | None = None
) -> Tensor:
    """q [T, num_heads, head_dim] -> [T, num_heads * head_dim] in q's dtype. K and V of the step are in the cache."""
    return paged_attention_reference(q, k_cache, v_cache, plan, scale=scale, softcap=softcap)


def paged_attention_reference(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: AttentionPlan, *, scale: float, softcap: float | None = None
) -> Tensor:
    """The plain-torch twin; written for CPU speed, and what a kernel is compared with."""
    queries = q.to(k_cache.dtype)
    if len(plan.decode_groups) == 1 and not plan.prefill_rows:
        return _decode(queries, k_cache, v_cache, plan.decode_groups[0], scale, softcap).to(q.dtype)
    out = torch.empty_like(queries).flatten(1)
    for group in plan.decode_groups:
        rows = slice(0, group.num_rows) if group.rows is None else group.rows
        out[rows] = _decode(queries[rows], k_cache, v_cache, group, scale, softcap)
    for row in plan.prefill_rows:
        tokens = slice(row.start, row.start + row.query_len)
        out[tokens] = _prefill(queries[tokens], k_cache, v_cache, row, scale, softcap)
    return out.to(q.dtype)


# Planning: once per step.


@dataclass(frozen=True, slots=True)
class _Layout:
    num_kv_heads: int
    num_blocks: int
    block_size: int
    window: int | None

    def first_visible(self, query_position: int) -> int:
        return 0 if self.window is None else max(0, query_position + 1 - self.window)

    def over_heads(self, blocks: Tensor) -> Tensor:
        """Block ids, any shape -> their rows in the cache seen as [kv_heads * num_blocks, ...], head by head."""
        heads = torch.arange(self.num_kv_heads, device=blocks.device).mul_(self.num_blocks)
        return (heads[:, None] + blocks.reshape(1, -1)).flatten()


def _group_rows(context_lens: Sequence[int], window: int | None) -> list[list[int]]:
    """Decode rows split so that a long request does not make the short ones pay for its length."""
    seen = [length if window is None else min(length, window) for length in context_lens]
    order = sorted(range(len(seen)), key=seen.__getitem__, reverse=True)
    groups: list[list[int]] = []
    waste = 0
    for row in order:
        extra = seen[groups[-1][0]] - seen[row] if groups else 0
        if not groups or waste + extra > GROUP_WASTE_TOKENS:
            groups.append([])
            waste = extra = 0
        groups[-1].append(row)
        waste += extra
    return [sorted(group) for group in groups] if len(groups) > 1 else [list(range(len(seen)))] if seen else []


def _plan_group(
    block_table: Tensor, rows: list[int], context_lens: Sequence[int], layout: _Layout, *, whole: bool
) -> DecodeGroup:
    if len(rows) == 1:
        return _plan_single(block_table, rows[0], context_lens[rows[0]], layout, whole=whole)
    device, size = block_table.device, layout.block_size
    ends = torch.tensor([context_lens[row] for row in rows])
    starts = torch.tensor([layout.first_visible(context_lens[row] - 1) for row in rows])
    first_blocks = starts // size
    num_blocks = int((-(-ends // size) - first_blocks).max())
    columns = first_blocks[:, None] + torch.arange(num_blocks)
    positions = first_blocks[:, None] * size + torch.arange(num_blocks * size)
    visible = (positions >= starts[:, None]) & (positions < ends[:, None])  # [b, L]
    index = None if whole else torch.tensor(rows, device=device)
    table = block_table[: len(rows)] if index is None else block_table.index_select(0, index)
    blocks = table.gather(1, columns.clamp_(max=block_table.shape[1] - 1).to(device)).long()
    return DecodeGroup(
        rows=index,
        num_rows=len(rows),
        length=num_blocks * size,
        block_index=layout.over_heads(blocks),
        first_slot=0,
        offset=0,
        hidden=_hidden_tokens(visible, layout.num_kv_heads, device),
        mask=_decode_mask(visible, layout.num_kv_heads, device),
    )


def _plan_single(block_table: Tensor, row: int, context_len: int, layout: _Layout, *, whole: bool) -> DecodeGroup:
    """One row reads exactly the tokens it sees: no mask, and no copy at all where its blocks are consecutive."""
    start = layout.first_visible(context_len - 1)
    blocks, offset = _blocks_between(block_table, row, start, context_len, layout.block_size)
    consecutive = blocks.device.type == "cpu" and bool((blocks.diff() == 1).all())
    return DecodeGroup(
        rows=None if whole else torch.tensor([row], device=block_table.device),
        num_rows=1,
        length=context_len - start,
        block_index=None if consecutive else layout.over_heads(blocks),
        first_slot=int(blocks[0]) * layout.block_size + offset if consecutive else 0,
        offset=offset,
        hidden=None,
        mask=None,
    )


def _plan_prefill(
    block_table: Tensor, row: int, start: int, query_len: int, context_len: int, layout: _Layout
) -> PrefillRow:
    first_query = context_len - query_len
    first_key = layout.first_visible(first_query)
    blocks, offset = _blocks_between(block_table, row, first_key, context_len, layout.block_size)
    all_before_seen = layout.window is None or context_len <= layout.window
    mask = None
    if first_query > 0 or not all_before_seen:
        mask = _prefill_mask(first_key, first_query, context_len, layout.window, block_table.device)
    return PrefillRow(start, query_len, layout.over_heads(blocks), offset, context_len - first_key, mask)


def _blocks_between(block_table: Tensor, row: int, start: int, end: int, block_size: int) -> tuple[Tensor, int]:
    """The blocks that hold positions start .. end-1, and how many tokens of the first come before start."""
    first = start // block_size
    return block_table[row, first : -(-end // block_size)].long(), start - first * block_size


def _hidden_tokens(visible: Tensor, num_kv_heads: int, device: torch.device) -> Tensor | None:
    flat = (~visible).flatten().nonzero().squeeze(1)
    if not len(flat):
        return None
    return (torch.arange(num_kv_heads)[:, None] * visible.numel() + flat).flatten().to(device)


def _decode_mask(visible: Tensor, num_kv_heads: int, device: torch.device) -> Tensor | None:
    if bool(visible.all()):
        return None
    # The lowest finite number, not -inf: a padding row that sees nothing then gives zeros instead of NaN.
    mask = torch.zeros(visible.shape).masked_fill_(~visible, torch.finfo(torch.float32).min)
    return mask.repeat(num_kv_heads, 1).unsqueeze(1).to(device)


def _prefill_mask(first_key: int, first_query: int, end: int, window: int | None, device: torch.device) -> Tensor:
    keys = torch.arange(first_key, end, device=device)
    queries = torch.arange(first_query, end, device=device)[:, None]
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    return torch.zeros(hidden.shape, device=device).masked_fill_(hidden, float("-inf"))


# Computing: once per layer.


def _gather(cache: Tensor, block_index: Tensor) -> Tensor:
    """[kv_heads, num_blocks, size, dim] and [kv_heads * n] -> [kv_heads * n * size, dim]."""
    heads, blocks, size, dim = cache.shape
    return cache.view(heads * blocks, size * dim).index_select(0, block_index).view(-1, dim)


def _read_group(cache: Tensor, group: DecodeGroup) -> Tensor:
    """The group's keys or values, [kv_heads * b, L, dim]; a view of the cache where the tokens lie in a row."""
    heads, _, _, dim = cache.shape
    if group.block_index is None:
        return cache.view(heads, -1, dim)[:, group.first_slot : group.first_slot + group.length]
    tokens = _gather(cache, group.block_index)
    if group.hidden is not None:
        tokens.index_fill_(0, group.hidden, 0.0)
    return tokens.view(heads * group.num_rows, -1, dim)[:, group.offset : group.offset + group.length]


def _decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, group: DecodeGroup, scale: float, softcap: float | None
) -> Tensor:
    """q [b, heads, dim] -> [b, heads * dim]: the query heads of a key head are the rows of one small matmul."""
    rows, heads, dim = q.shape
    kv_heads = k_cache.shape[0]
    packed = q.view(rows, kv_heads, -1, dim).transpose(0, 1).reshape(kv_heads * rows, -1, dim)
    keys, values = _read_group(k_cache, group), _read_group(v_cache, group)
    probabilities = torch.softmax(_scores(packed, keys, group.mask, scale, softcap), dim=-1)
    out = torch.bmm(probabilities.to(values.dtype), values)
    return out.view(kv_heads, rows, -1, dim).transpose(0, 1).reshape(rows, heads * dim)


def _scores(q: Tensor, keys: Tensor, mask: Tensor | None, scale: float, softcap: float | None) -> Tensor:
    """[n, queries, dim] x [n, L, dim] -> [n, queries, L] fp32, capped and masked."""
    q, transposed = q.float(), keys.float().transpose(1, 2)
    if mask is not None and softcap is None:
        return torch.baddbmm(mask, q, transposed, alpha=scale)
    scores = torch.bmm(q, transposed).mul_(scale)
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    return scores if mask is None else scores.add_(mask)


def _prefill(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, row: PrefillRow, scale: float, softcap: float | None
) -> Tensor:
    """q [query_len, heads, dim] -> [query_len, heads * dim]."""
    heads, dim = k_cache.shape[0], k_cache.shape[3]
    keys, values = (
        _gather(cache, row.block_index).view(heads, -1, dim)[:, row.offset : row.offset + row.length]
        for cache in (k_cache, v_cache)
    )
    if softcap is not None:
        return _prefill_softcap(q, keys, values, row, scale, softcap)
    mask = None if row.mask is None else row.mask.to(q.dtype)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        keys[None],
        values[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1).reshape(row.query_len, -1)


def _prefill_softcap(q: Tensor, keys: Tensor, values: Tensor, row: PrefillRow, scale: float, softcap: float) -> Tensor:
    """SDPA has no cap: materialise the scores, a chunk of queries at a time."""
    query_len, heads, dim = q.shape
    kv_heads = keys.shape[0]
    mask = row.mask if row.mask is not None else _prefill_mask(0, 0, query_len, None, q.device)
    grouped = q.view(query_len, kv_heads, -1, dim).permute(1, 2, 0, 3)  # [kv_heads, group, T, dim]
    group = grouped.shape[1]
    out = torch.empty_like(grouped)
    for at in range(0, query_len, SOFTCAP_CHUNK):
        part = grouped[:, :, at : at + SOFTCAP_CHUNK]
        rows = part.shape[2]
        scores = _scores(part.reshape(kv_heads, group * rows, dim), keys, None, scale, softcap)
        scores.view(kv_heads, group, rows, -1).add_(mask[at : at + rows])
        probabilities = torch.softmax(scores, dim=-1).to(values.dtype)
        out[:, :, at : at + rows] = torch.bmm(probabilities, values).view(kv_heads, group, rows, dim)
    return out.permute(2, 0, 1, 3).reshape(query_len, heads * dim)
