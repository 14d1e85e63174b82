"""Paged attention in plain torch: the reference for the kernels, and the implementation on a CPU.

There are two paths: requests with one query token run together as one batched matmul, the others one by one through
SDPA. The plan is made from lengths on the host. If a model modifies the scores (cap, slopes, sinks), they are
materialised.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.kernels.cpu.attention import rows_of
from localllm.kernels.kv_format import first_visible
from localllm.kernels.layer_cache import LayerKV, numbers_in
from localllm.kernels.quantize import dequantize_nibbles

GROUP_WASTE_TOKENS = 512  # padding at which a decode group costs more than another matmul call
CPU_CHUNK = 128  # query rows per SDPA call on a CPU, each with only its visible keys: 30 % less time at 512 rows
GPU_CHUNK = 2048  # bounds the mask and, with a cap, the scores


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode rows of similar length that share one batched matmul. b rows, L gathered tokens each."""

    rows: Tensor | None  # [b] int64 rows of the batch; None: all rows, in order
    num_rows: int
    length: int  # L
    block_index: (
        Tensor | None
    )  # [kv_heads * b * L / block_size] int64 into the cache seen as [kv_heads * num_blocks, ...]
    first_slot: int  # without block_index: the single row's tokens are at consecutive slots from here
    offset: int  # b == 1: gathered tokens to skip at the start
    hidden: Tensor | None  # [*] int64 flat gathered tokens that are hidden from all queries
    mask: Tensor  # [kv_heads * b, 1, L] fp32 added to the scores, or a single zero
    query_index: Tensor | None  # [b] int64 index of the query's own key among the L; None: the last


@dataclass(frozen=True, slots=True)
class QueryChunk:
    """Consecutive queries of a request, and the range of keys visible to at least one of them."""

    start: int  # first query in the flat batch
    end: int
    first_key: int  # among the request's gathered tokens
    last_key: int  # exclusive
    mask: Tensor | None  # [end - start, last_key - first_key] fp32 added; None: square and causal


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """One request with several query tokens."""

    block_index: Tensor  # [kv_heads * blocks] int64
    chunks: tuple[QueryChunk, ...]


@dataclass(frozen=True, slots=True)
class _Layout:
    num_kv_heads: int
    num_blocks: int
    block_size: int
    window: int | None
    first_key: int

    def first_visible(self, query_position: int) -> int:
        return max(self.first_key, first_visible(self.window, query_position))

    def over_heads(self, blocks: Tensor) -> Tensor:
        """Return the rows of block ids, of any shape, in the cache viewed as [kv_heads * num_blocks, ...],
        head by head."""
        heads = torch.arange(self.num_kv_heads, device=blocks.device).mul_(self.num_blocks)
        return (heads[:, None] + blocks.reshape(1, -1)).flatten()


@dataclass(frozen=True)
class DecodeRows:
    """The first rows of a step, which have one query each."""

    block_table: Tensor  # [B, max_blocks] int32, of all rows
    context_lens: tuple[int, ...]  # of the decode rows
    layout: _Layout

    def grouped(self) -> tuple[DecodeGroup, ...]:
        """Return the rows as few batched matmuls."""
        lengths, layout = self.context_lens, self.layout
        return tuple(
            _plan_group(self.block_table, rows, lengths, layout, whole=len(rows) == len(lengths))
            for rows in _group_rows(lengths, layout.window)
        )

    @cached_property
    def native_rows(self) -> Tensor | None:
        """The rows as the native library reads them; None: one is padding, or does not read from position 0 on."""
        if self.layout.first_key or not self.context_lens or not all(self.context_lens):
            return None
        return rows_of(self.block_table, self.context_lens)


@dataclass(frozen=True)
class HostPlan:
    """The plan that all layers with the same window share in one step."""

    decodes: DecodeRows
    prefill_rows: tuple[PrefillRow, ...]
    num_tokens: int  # without padding tokens

    @cached_property
    def decode_groups(self) -> tuple[DecodeGroup, ...]:
        return self.decodes.grouped()


class Scoring(NamedTuple):
    """Changes that a layer makes to the products of queries and keys, besides the softmax."""

    scale: float
    softcap: float | None
    sinks: Tensor | None  # [num_heads]
    alibi_slopes: Tensor | None  # [num_heads]
    distance_bias: Tensor | None = None  # [num_heads, D]

    @property
    def is_plain(self) -> bool:
        return all(each is None for each in self[1:])

    @property
    def is_biased(self) -> bool:
        return self.alibi_slopes is not None or self.distance_bias is not None

    def bias(self, ahead: Tensor) -> Tensor:
        """Return what is added to scores [heads, queries, L], from the positions [queries, L] by which keys are ahead
        of queries."""
        if self.distance_bias is not None:
            return self.distance_bias[:, (-ahead).clamp(0, self.distance_bias.shape[1] - 1)]
        assert self.alibi_slopes is not None
        return self.alibi_slopes.float()[:, None, None] * ahead


def plan_on_host(
    block_table: Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    num_decodes: int,
    cache_shape: Sequence[int],
    window: int | None = None,
    first_key: int = 0,
    key_limits: Sequence[int] | None = None,
) -> HostPlan:
    """Do plan_attention from lengths on the host."""
    layout = _Layout(cache_shape[0], cache_shape[1], cache_shape[2], window, first_key)
    decodes = DecodeRows(block_table, tuple(context_lens[:num_decodes]), layout)
    prefills, start = [], num_decodes
    num_tokens = num_decodes
    for row in range(num_decodes, len(query_lens)):
        if context_lens[row]:  # otherwise padding
            limits = None if key_limits is None else key_limits[start : start + query_lens[row]]
            prefills.append(_plan_prefill(block_table, row, start, query_lens[row], context_lens[row], layout, limits))
            num_tokens += query_lens[row]
        start += query_lens[row]
    return HostPlan(decodes, tuple(prefills), num_tokens)


def plan_drafts_on_host(
    block_table: Tensor,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    first_positions: Sequence[int],
    cache_shape: Sequence[int],
    window: int | None = None,
    first_key: int = 0,
) -> HostPlan:
    """Do plan_attention for requests of which the first ones verify drafts: each of their queries is one of a prompt.

    first_positions: of these requests; their queries from the context's end on are padding, whose output is zero.
    """
    layout = _Layout(cache_shape[0], cache_shape[1], cache_shape[2], window, first_key)
    prefills, start, num_tokens = [], 0, 0
    for row, (query_len, context) in enumerate(zip(query_lens, context_lens, strict=True)):
        if context:
            real = context - first_positions[row] if row < len(first_positions) else query_len
            prefills.append(_plan_prefill(block_table, row, start, min(real, query_len), context, layout))
            num_tokens += min(real, query_len)
        start += query_len
    return HostPlan(DecodeRows(block_table, (), layout), tuple(prefills), num_tokens)


def paged_attention_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: HostPlan,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    distance_bias: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """The plain-torch twin of paged_attention."""
    scoring = Scoring(scale, softcap, sinks, alibi_slopes, distance_bias)
    return attend_on_host(q, LayerKV(k_cache, v_cache, k_scale, v_scale), plan, scoring)


def attend_on_host(
    q: Tensor, kv: LayerKV, plan: HostPlan, scoring: Scoring, attend_decodes: Callable[[Tensor], None] | None = None
) -> Tensor:
    """Return [T, heads * dim] in q's dtype. attend_decodes: fills the decode rows of [T, heads * dim], in place of the
    batched matmuls."""
    queries = q.to(kv.k.dtype) if kv.k_scale is None else q.float()
    if attend_decodes is None and len(plan.decode_groups) == 1 and plan.decode_groups[0].num_rows == len(q):
        return _decode(queries, kv, plan.decode_groups[0], scoring).to(q.dtype)
    new = torch.empty_like if plan.num_tokens == len(q) else torch.zeros_like
    out = new(queries, memory_format=torch.contiguous_format).flatten(1)
    if attend_decodes is not None:
        attend_decodes(out)
    else:
        for group in plan.decode_groups:
            rows = slice(0, group.num_rows) if group.rows is None else group.rows
            out[rows] = _decode(queries[rows], kv, group, scoring)
    for row in plan.prefill_rows:
        _prefill(queries, kv, row, scoring, out)
    return out.to(q.dtype)


# Planning: once per step.


def _group_rows(context_lens: Sequence[int], window: int | None) -> list[list[int]]:
    """Group decode rows by length, so that a long request does not slow down short ones."""
    seen = [length - first_visible(window, length - 1) for length in context_lens]
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
    return [sorted(group) for group in groups]


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
        query_index=(ends - 1 - first_blocks * size).to(device),
    )


def _plan_single(block_table: Tensor, row: int, context_len: int, layout: _Layout, *, whole: bool) -> DecodeGroup:
    """Plan one row, which reads exactly its visible tokens:
    without a mask, and without a copy if its blocks are consecutive."""
    start = layout.first_visible(context_len - 1)
    blocks, offset = _blocks_between(block_table, row, start, context_len, layout.block_size)
    consecutive = blocks.device.type == "cpu" and bool((blocks.diff() == 1).all())
    return DecodeGroup(
        rows=None if whole else torch.tensor([row], device=block_table.device),
        num_rows=1,
        length=context_len - start,
        block_index=None if consecutive else layout.over_heads(blocks),
        first_slot=int(blocks[0]) * layout.block_size + offset if consecutive and len(blocks) else 0,
        offset=offset,
        hidden=None,
        mask=torch.zeros(1, device=block_table.device),
        query_index=None,
    )


def _plan_prefill(
    block_table: Tensor, row: int, start: int, query_len: int, context_len: int, layout: _Layout,
    key_limits: Sequence[int] | None = None,
) -> PrefillRow:  # fmt: skip
    first_query = context_len - query_len
    blocks, offset = _blocks_between(
        block_table, row, layout.first_visible(first_query), context_len, layout.block_size
    )
    gathered_from = layout.first_visible(first_query) - offset  # position of the first gathered token
    step = CPU_CHUNK if block_table.device.type == "cpu" else GPU_CHUNK
    chunks = []
    for at in range(first_query, context_len, step):
        end, first_key = min(at + step, context_len), layout.first_visible(at)
        limits = None if key_limits is None else key_limits[at - first_query : end - first_query]
        last_key = end if limits is None else min(max(end, *limits), context_len)
        chunks.append(
            QueryChunk(
                start=start + at - first_query,
                end=start + end - first_query,
                first_key=first_key - gathered_from,
                last_key=last_key - gathered_from,
                mask=_chunk_mask(first_key, at, end, layout.window, block_table.device, last_key, limits),
            )
        )
    return PrefillRow(layout.over_heads(blocks), tuple(chunks))


def _blocks_between(block_table: Tensor, row: int, start: int, end: int, block_size: int) -> tuple[Tensor, int]:
    """Return the blocks of positions start .. end-1, and how many tokens of the first block precede start."""
    first = start // block_size
    return block_table[row, first : -(-end // block_size)].long(), start - first * block_size


def _hidden_tokens(visible: Tensor, num_kv_heads: int, device: torch.device) -> Tensor | None:
    flat = (~visible).flatten().nonzero().squeeze(1)
    if not len(flat):
        return None
    return (torch.arange(num_kv_heads)[:, None] * visible.numel() + flat).flatten().to(device)


def _decode_mask(visible: Tensor, num_kv_heads: int, device: torch.device) -> Tensor:
    # The lowest finite number, not -inf: a padding row without visible keys then gives zeros instead of NaN.
    mask = torch.zeros(visible.shape).masked_fill_(~visible, torch.finfo(torch.float32).min)
    return mask.repeat(num_kv_heads, 1).unsqueeze(1).to(device)


def _chunk_mask(
    first_key: int, first_query: int, end: int, window: int | None, device: torch.device, last_key: int,
    key_limits: Sequence[int] | None,
) -> Tensor | None:  # fmt: skip
    """Return the mask of keys first_key .. last_key-1 for queries first_query .. end-1; None for a plain causal
    triangle. key_limits: the first key that each query does not see; None: the one behind its own."""
    if key_limits is None and first_key == first_query and first_visible(window, end - 1) <= first_query:
        return None
    keys = torch.arange(first_key, last_key, device=device)
    queries = torch.arange(first_query, end, device=device)[:, None]
    hidden = keys > queries if key_limits is None else keys >= torch.tensor(key_limits, device=device)[:, None]
    if window is not None:
        hidden |= keys < (queries - window + 1 if window > 0 else queries - queries % -window)
    return torch.zeros(hidden.shape, device=device).masked_fill_(hidden, float("-inf"))


# Computing: once per layer.


def _gather(cache: Tensor, scale: Tensor | None, block_index: Tensor) -> Tensor:
    """Gather [kv_heads * n] blocks of a cache [kv_heads, num_blocks, size, dim] -> [kv_heads * n * size, dim];
    fp32 if scaled."""
    heads, blocks, size, dim = cache.shape
    if scale is None or cache.dtype == torch.uint8:
        rows = cache.view(heads * blocks, size * dim).index_select(0, block_index).view(-1, dim)
        if scale is None:
            return rows
        return dequantize_nibbles(rows, scale.flatten(0, 1).index_select(0, block_index).flatten(0, 1))
    rows = cache.view(torch.int8).view(heads * blocks, size * dim).index_select(0, block_index)
    tokens = rows.view(cache.dtype).to(torch.float32)
    if scale.ndim == 1:
        return tokens.view(heads, -1).mul_(scale[:, None]).view(-1, dim)
    return tokens.view(-1, dim).mul_(scale.view(heads * blocks, size).index_select(0, block_index).view(-1, 1))


def _read_group(cache: Tensor, scale: Tensor | None, group: DecodeGroup) -> Tensor:
    """Return the group's keys or values, [kv_heads * b, L, dim]; a view of the cache if the tokens are consecutive."""
    heads = cache.shape[0]
    if group.block_index is None:
        tokens = cache.flatten(1, 2)[:, group.first_slot : group.first_slot + group.length]
        return tokens if scale is None else _scaled(tokens, scale, group)
    tokens = _gather(cache, scale, group.block_index)
    if group.hidden is not None:
        tokens.index_fill_(0, group.hidden, 0.0)
    return tokens.view(heads * group.num_rows, -1, numbers_in(cache))[:, group.offset : group.offset + group.length]


def _scaled(tokens: Tensor, scale: Tensor, group: DecodeGroup) -> Tensor:
    """Return tokens [kv_heads, L, dim], consecutive in the cache, scaled in fp32."""
    if scale.ndim > 1:
        scale = scale.flatten(1, 2)[:, group.first_slot : group.first_slot + group.length]
    if tokens.dtype == torch.uint8:
        return dequantize_nibbles(tokens, scale)
    return tokens.float() * scale.view(len(scale), -1, 1)


def _decode(q: Tensor, kv: LayerKV, group: DecodeGroup, scoring: Scoring) -> Tensor:
    """q [b, heads, dim] -> [b, heads * dim]. The query heads of a key head are the rows of one small matmul."""
    rows, heads, dim = q.shape
    kv_heads = kv.k.shape[0]
    packed = q.view(rows, kv_heads, -1, dim).transpose(0, 1).reshape(kv_heads * rows, -1, dim)
    keys, values = _read_group(kv.k, kv.k_scale, group), _read_group(kv.v, kv.v_scale, group)
    mask = group.mask
    if scoring.is_biased:
        mask = mask + _decode_bias(scoring, keys.shape[1], group, kv_heads)
    scores = _scores(packed, keys, mask, scoring.scale, scoring.softcap)
    if scoring.sinks is None:
        probabilities = torch.softmax(scores, dim=-1)
    else:
        sinks = scoring.sinks.view(kv_heads, 1, -1, 1).expand(-1, rows, -1, -1).reshape(kv_heads * rows, -1, 1)
        probabilities = _softmax_with_sinks(scores, sinks)
    out = torch.bmm(probabilities if values.dtype == torch.float32 else probabilities.to(values.dtype), values)
    return out.view(kv_heads, rows, -1, dim).transpose(0, 1).reshape(rows, heads * dim)


def _decode_bias(scoring: Scoring, length: int, group: DecodeGroup, kv_heads: int) -> Tensor:
    """Return [kv_heads * b, group_size, L]: what is added for the distance from each key to its query."""
    device = group.mask.device
    last = torch.tensor([length - 1], device=device) if group.query_index is None else group.query_index
    bias = scoring.bias(torch.arange(length, device=device) - last[:, None])  # [heads, b, L]
    rows = bias.shape[1]
    return bias.view(kv_heads, -1, rows, length).transpose(1, 2).reshape(kv_heads * rows, -1, length)


def _scores(q: Tensor, keys: Tensor, mask: Tensor, scale: float, softcap: float | None) -> Tensor:
    """[n, queries, dim] x [n, L, dim] -> [n, queries, L] fp32, capped, then the mask is added."""
    if q.dtype != torch.float32:
        q, keys = q.float(), keys.float()
    if softcap is None:
        return torch.baddbmm(mask, q, keys.transpose(1, 2), alpha=scale)
    return torch.bmm(q, keys.transpose(1, 2)).mul_(scale / softcap).tanh_().mul_(softcap).add_(mask)


def _softmax_with_sinks(scores: Tensor, sinks: Tensor) -> Tensor:
    """Return the softmax with a sink: an additional score without a value. sinks:
    like scores, with a last dimension of 1."""
    return torch.softmax(torch.cat([scores, sinks.float()], dim=-1), dim=-1)[..., :-1]


def _prefill(q: Tensor, kv: LayerKV, row: PrefillRow, scoring: Scoring, out: Tensor) -> None:
    """Compute the row's part of out [T, heads * dim] from q [T, heads, dim]."""
    heads, dim = kv.k.shape[0], kv.head_dim
    keys = _gather(kv.k, kv.k_scale, row.block_index).view(heads, -1, dim)
    values = _gather(kv.v, kv.v_scale, row.block_index).view(heads, -1, dim)
    for chunk in row.chunks:
        k, v = keys[:, chunk.first_key : chunk.last_key], values[:, chunk.first_key : chunk.last_key]
        queries = q[chunk.start : chunk.end]
        if scoring.is_plain:
            part = _sdpa(queries, k, v, chunk.mask, scoring.scale)
        else:
            part = _materialised(queries, k, v, chunk.mask, scoring)
        out[chunk.start : chunk.end] = part.flatten(1)


def _sdpa(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """q [n, heads, dim], keys and values [kv_heads, L, dim] -> [n, heads, dim]"""
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        keys[None],
        values[None],
        attn_mask=None if mask is None else mask.to(q.dtype),
        is_causal=mask is None,
        scale=scale,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)


def _materialised(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
    """Do `_sdpa` with caps, slopes and sinks."""
    rows, heads, dim = q.shape
    kv_heads, length, _ = keys.shape
    if mask is None:
        mask = torch.full((rows, rows), float("-inf"), device=q.device).triu_(1)
    if not scoring.is_biased:
        mask = mask.repeat(heads // kv_heads, 1)
    else:
        # A chunk ends with its last query's own key: no family with a bias has queries that see further.
        queries = torch.arange(length - rows, length, device=q.device)
        bias = scoring.bias(torch.arange(length, device=q.device) - queries[:, None])  # [heads, rows, L]
        mask = (mask + bias).view(kv_heads, -1, length)
    grouped = q.view(rows, kv_heads, -1, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
    scores = _scores(grouped, keys, mask, scoring.scale, scoring.softcap)
    if scoring.sinks is None:
        probabilities = torch.softmax(scores, dim=-1)
    else:
        sinks = scoring.sinks.view(kv_heads, -1, 1).repeat_interleave(rows, dim=1)
        probabilities = _softmax_with_sinks(scores, sinks)
    out = torch.bmm(probabilities.to(values.dtype), values)
    return out.view(heads, rows, dim).transpose(0, 1)
