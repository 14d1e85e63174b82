"""Attention to the keys that an indexer chooses, over the paged cache (DeepSeek-V3.2, arXiv:2512.02556).

    rows = chosen_rows(...) or queries_on_device(...)    once per step: which keys each query sees
    positions = choose_keys(q, weights, index, rows, topk)       in a layer with an indexer
    attend_to_chosen(q, kv, rows, positions, scale, out)         in each layer; on a device attend_on_device(...)

The score of a key is sum over heads h of weight[h] * relu(q[h] . k) in fp32. A query attends to the `topk` keys of the
largest scores among those up to its own, and to all of them if they are no more. The index keys are paged like K, in
[1, num_blocks, block_size, D]; attention reads one latent that is key and value. Buffers are bounded by BUFFER_NUMBERS.

The twin is plain torch, row by row, for the rows that see more than `topk` keys. The kernels compute all queries of a
step, and read lengths on the device, so that a recorded step is valid for other lengths:

    _score_kernel     scores of a block of queries with all keys that they see; none if all of them are chosen
    _select_kernel    the positions of the largest scores: a threshold found in four passes of 8 bits each, then a pass
                      that writes the keys above it in order, and the first of those that are equal to it
    _attend_kernel    online softmax over tiles of chosen keys, whose latents are gathered
Does not know: where q, weights and index keys come from (models/layers/latent_attention.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from localllm.kernels.launch import (
    INTERPRETED,
    cdiv,
    device_features,
    early_launch,
    launch_options,
    next_power_of_2,
    tl,
    triton,
    wait_for_inputs,
)
from localllm.kernels.layer_cache import LayerKV
from localllm.kernels.paged_attention.kernels import reduce_kernel

BUFFER_NUMBERS = 2**24  # of scores, or of gathered keys, at a time
CPU_BUFFER_NUMBERS = 2**22  # the same for classes on a CPU, where a plan is not replaced by a measurement
PROGRAMS = 512  # of a launch, at least, if the work can be divided: several for each processor
SELECTED_AT_ONCE = 64 if INTERPRETED else 2048  # scores that a turn of `_select_kernel` reads
MIN_PART = 256  # chosen keys of a part: shorter ones cost more in the merge than they save
REDUCED_AT_ONCE = 16  # parts that a program of `reduce_kernel` merges at a time
LOG2E = tl.constexpr(1.4426950408889634)
FP8_SHIFT = tl.constexpr(256.0)  # e4m3 bits placed in an fp16's fields represent 2^-8 of their value
MUCH_SHARED_MEMORY = (80, 90, 100, 103)  # 163 KiB and more for one program; others have 99


class ChosenRow(NamedTuple):
    """A request's queries of this step, the last of its context."""

    first: int  # token of the step
    num_queries: int
    context_len: int
    blocks: Tensor  # [ceil(context_len / block_size)] int64

    @property
    def tokens(self) -> slice:
        return slice(self.first, self.first + self.num_queries)

    def cut(self, at_once: int) -> list[ChosenRow]:
        """Return rows of at most `at_once` queries each, whose contexts end with their last query."""
        begin, pieces = self.context_len - self.num_queries, []
        for at in range(0, self.num_queries, at_once):
            count = min(at_once, self.num_queries - at)
            pieces.append(ChosenRow(self.first + at, count, begin + at + count, self.blocks))
        return pieces


def buffer_numbers(of: Tensor) -> int:
    """Return how many numbers a class's code computes at a time, on the device of a tensor."""
    return CPU_BUFFER_NUMBERS if of.device.type == "cpu" else BUFFER_NUMBERS


def chosen_rows(
    block_table: Tensor, block_size: int, query_lens: Sequence[int], context_lens: Sequence[int], topk: int,
    first_positions: Sequence[int] | None = None,
) -> list[ChosenRow | None]:  # fmt: skip
    """Return for each row of the step how its queries read chosen keys; None: all keys are seen, or it is padding.

    block_table [B, max_blocks] int32. first_positions [B]: of the first query of each row, if queries beyond the
    context are padding; None: the last query is the last of the context.
    """
    rows: list[ChosenRow | None] = []
    first = 0
    for row, (query_len, context) in enumerate(zip(query_lens, context_lens, strict=True)):
        real = query_len if first_positions is None else min(query_len, context - first_positions[row])
        sees_all = context <= topk
        blocks = block_table[row, : -(-context // block_size)]
        rows.append(None if sees_all else ChosenRow(first, real, context, blocks.long()))
        first += query_len
    return rows


class DeviceQueries(NamedTuple):
    """The queries of a step as the kernels read them. T: tokens of the step, padding included."""

    block_table: Tensor  # [B, max_blocks] int32
    rows: Tensor  # [T] int32 of the block table
    ends: Tensor  # [T] int32 the first key that a query does not see; 0: padding
    first_key: int  # keys before this position are not chosen


def queries_on_device(
    block_table: Tensor, context_lens: Tensor, cu_seqlens_q: Tensor, positions: Tensor, first_key: int = 0
) -> DeviceQueries:
    """Return the queries of a step. context_lens [B], cu_seqlens_q [B + 1] int32, positions [T] int64, counted from
    first_key, as in ForwardInputs. Launches the same operations whatever the lengths."""
    tokens = torch.arange(len(positions), dtype=torch.int32, device=positions.device)
    rows = torch.searchsorted(cu_seqlens_q[1:], tokens, right=True, out_int32=True)
    ends = torch.minimum(positions.int() + (1 + first_key), context_lens[rows.clamp(max=len(context_lens) - 1)])
    return DeviceQueries(
        block_table, rows.clamp(max=len(context_lens) - 1), ends.masked_fill_(tokens >= cu_seqlens_q[-1], 0), first_key
    )


def choose_keys(
    q: Tensor, weights: Tensor, index: Tensor, rows: Sequence[ChosenRow], topk: int, first_key: int = 0
) -> list[Tensor]:
    """Return for each row the positions [count, topk] int64 of the chosen keys, in any order; -1: there are no more.

    q [T, H, D], weights [T, H] fp32 with all factors of the scores, index [1, num_blocks, block_size, D]. first_key:
    keys before this position are not chosen.
    """
    chosen = []
    for row in rows:
        keys = _of_blocks(index, row)[: row.context_len].float()
        own, own_weights = q[row.tokens].float(), weights[row.tokens, None]
        first_position = row.context_len - row.num_queries
        at_once = max(1, BUFFER_NUMBERS // (q.shape[1] * row.context_len))
        parts = []
        for at in range(0, row.num_queries, at_once):
            end = min(at + at_once, row.num_queries)
            products = torch.matmul(own[at:end].flatten(0, 1), keys.t()).relu_().view(end - at, -1, row.context_len)
            scores = torch.bmm(own_weights[at:end], products).squeeze(1)
            scores[:, :first_key] = float("-inf")
            if end - at > 1 or end < row.num_queries:
                last = torch.arange(first_position + at, first_position + end, device=q.device)[:, None]
                later = torch.arange(row.context_len, device=q.device) > last
                scores.masked_fill_(later, float("-inf"))
                best = scores.topk(topk, dim=1, sorted=False).indices
                parts.append(best.masked_fill_((best > last) | (best < first_key), -1))
            else:
                parts.append(scores.topk(topk, dim=1, sorted=False).indices)
        chosen.append(parts[0] if len(parts) == 1 else torch.cat(parts))
    return chosen


def attend_to_chosen(
    q: Tensor, kv: LayerKV, rows: Sequence[ChosenRow], chosen: Sequence[Tensor], scale: float, out: Tensor
) -> None:
    """Write attention to chosen keys to the rows' tokens of out [T, heads * W]. q [T, heads, W]; kv: one latent of W
    numbers per token, key and value."""
    assert kv.values_are_keys
    _, num_blocks, block_size, width = kv.k.shape
    latents = kv.k.view(num_blocks * block_size, width)
    for row, positions in zip(rows, chosen, strict=True):
        own = q[row.tokens]
        at_once = max(1, BUFFER_NUMBERS // (positions.shape[1] * width))
        for at in range(0, row.num_queries, at_once):
            seen = positions[at : at + at_once]
            read = seen.where(seen >= 0, row.context_len - 1)  # hidden, but a key that exists: 0 * NaN is NaN
            blocks = row.blocks.index_select(0, (read // block_size).flatten())  # several times as fast as row.blocks[]
            slots = blocks.mul_(block_size).add_((read % block_size).flatten())
            keys = latents.index_select(0, slots)  # [n * topk, W]
            if kv.k_scale is not None:
                scales = kv.k_scale if kv.k_scale.dim() == 1 else kv.k_scale.view(-1, 1).index_select(0, slots)
                keys = keys.float() * scales
            keys = keys.view(*seen.shape, width)
            queries = own[at : at + at_once].to(keys.dtype)
            scores = torch.matmul(queries, keys.transpose(1, 2)).float().mul_(scale)
            scores.masked_fill_(seen[:, None] < 0, float("-inf"))
            weights = scores.softmax(-1).to(keys.dtype)
            tokens = slice(row.first + at, row.first + at + len(seen))
            out[tokens] = torch.matmul(weights, keys).flatten(1).to(out.dtype)


def _of_blocks(index: Tensor, row: ChosenRow) -> Tensor:
    """Return the index keys [blocks * block_size, D] of a row: a view where its blocks are consecutive."""
    blocks, size = row.blocks, index.shape[3]
    if blocks.device.type == "cpu" and bool((blocks.diff() == 1).all()):
        first = int(blocks[0])
        return index[0, first : first + len(blocks)].view(-1, size)
    return index[0].index_select(0, blocks).view(-1, size)


# ---- kernels ---------------------------------------------------------------------------------------------------------


class ScoreLaunch(NamedTuple):
    """Launch settings of `_score_kernel`."""

    queries: int  # of a program
    tile: int  # keys
    num_warps: int
    num_stages: int


def score_launch(arch: int, bits: int, num_heads: int, rows_of_one: bool) -> ScoreLaunch:
    """Return settings. arch: compute capability as 90; 0 in the interpreter. bits: of a number of the index keys.
    rows_of_one: neighbouring queries belong to different requests, which share no keys."""
    if arch == 0:
        return ScoreLaunch(1 if rows_of_one else 2, 16, 1, 1)
    heads = max(16, next_power_of_2(num_heads))
    queries = 1 if rows_of_one else max(1, 128 // heads)
    if bits == 32 or arch < 80:
        return ScoreLaunch(1, 16, 8, 1)
    return ScoreLaunch(queries, 64, 8, 3)


class ChosenLaunch(NamedTuple):
    """Launch settings of `_attend_kernel`."""

    heads: int  # of a program
    tile: int  # chosen keys
    num_warps: int
    num_stages: int


def chosen_launch(arch: int, bits: int, latent_size: int, *, is_prompt: bool) -> ChosenLaunch:
    """Return settings. arch: compute capability as 90; 0 in the interpreter. bits: of a number of the latent."""
    if arch == 0:
        return ChosenLaunch(16, 16, 1, 1)
    if bits == 32 or arch < 80:
        return ChosenLaunch(16, 16, 8, 1)
    if is_prompt and arch in MUCH_SHARED_MEMORY:
        return ChosenLaunch(32 if latent_size <= 512 else 16, 32, 8, 2)
    return ChosenLaunch(16, 32, 8, 2)


def _arch(device: torch.device) -> int:
    """Return the compute capability as 90; 0 in the interpreter; 75 for other vendors' GPUs, which have few registers
    for matrices."""
    if INTERPRETED:
        return 0
    return 75 if torch.version.hip is not None else device_features(device).arch


def choose_on_device(q: Tensor, weights: Tensor, index: Tensor, queries: DeviceQueries, topk: int) -> Tensor:
    """Return the positions [T, topk] int32 of the chosen keys of each query in ascending order; -1 behind the last.

    q [T, H, D], weights [T, H] fp32 with all factors of the scores, index [1, num_blocks, block_size, D].
    """
    num_tokens, num_heads, head_dim = q.shape
    table, block_size = queries.block_table, index.shape[2]
    assert q.is_contiguous()
    assert weights.is_contiguous()
    assert index.is_contiguous()
    chosen = torch.empty((num_tokens, topk), dtype=torch.int32, device=q.device)
    most_keys = table.shape[1] * block_size
    how = score_launch(_arch(q.device), index.itemsize * 8, num_heads, num_tokens <= len(table))
    at_once = max(how.queries, BUFFER_NUMBERS // most_keys // how.queries * how.queries)
    scores = torch.empty((min(at_once, num_tokens), most_keys), dtype=torch.float32, device=q.device)
    for first in range(0, num_tokens, at_once):
        end = min(first + at_once, num_tokens)
        blocks = cdiv(end - first, how.queries)
        _score_kernel[(blocks, max(1, min(cdiv(PROGRAMS, blocks), cdiv(most_keys, how.tile))))](
            scores, q, weights, index, table, queries.rows, queries.ends, first, end, queries.first_key, topk,
            table.stride(0), most_keys, HEADS=num_heads, BLOCK_H=max(16 // how.queries, next_power_of_2(num_heads)),
            HEAD_DIM=head_dim, BLOCK_D=max(16, next_power_of_2(head_dim)), QUERIES=how.queries, BLOCK_SIZE=block_size,
            TILE=how.tile, STAGES=how.num_stages, num_warps=how.num_warps, **early_launch(q.device),
        )  # fmt: skip
        _select_kernel[(end - first,)](
            chosen, scores, queries.ends, first, queries.first_key, most_keys, TOPK=topk,
            TILE=SELECTED_AT_ONCE, num_warps=8, **early_launch(q.device),
        )  # fmt: skip
    return chosen


def attend_on_device(
    q: Tensor, kv: LayerKV, queries: DeviceQueries, chosen: Tensor, scale: float, rope_size: int
) -> Tensor:
    """Return attention to the chosen keys, [T, heads, W - rope_size] in q's type. q [T, heads, W]; kv: one latent of W
    numbers per token, of which all are the key, and those behind the first rope_size the value. chosen: of
    `choose_on_device`. A query that sees no key gets zeros."""
    assert kv.values_are_keys
    assert q.is_contiguous()
    num_tokens, num_heads, width = q.shape
    (_, _, block_size, _), topk, latent = kv.k.shape, chosen.shape[1], width - rope_size
    stored_in = {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}.get(kv.k.dtype, "plain")
    deterministic = launch_options().deterministic
    is_prompt = deterministic or num_tokens > len(queries.block_table)
    bits = 16 if kv.k.itemsize == 1 else kv.k.itemsize * 8
    how = chosen_launch(_arch(q.device), bits, next_power_of_2(latent), is_prompt=is_prompt)
    head_tiles, parts = cdiv(num_heads, how.heads), 1
    if not deterministic:  # the order of sums depends on the number of parts
        least = MIN_PART if not INTERPRETED else how.tile
        parts = max(1, min(PROGRAMS // max(1, num_tokens * head_tiles), cdiv(topk, least)))
    part = cdiv(cdiv(topk, parts), how.tile) * how.tile
    parts = cdiv(topk, part)
    out = torch.empty((num_tokens, num_heads, latent), dtype=q.dtype, device=q.device)
    partial_out, partial_max, partial_sum = None, None, None
    if parts > 1:
        shape = (num_tokens * parts, num_heads)
        partial_out = torch.empty((*shape, latent), dtype=torch.float32, device=q.device)
        partial_max, partial_sum = torch.empty((2, *shape), dtype=torch.float32, device=q.device)
    cache = kv.k.view(torch.uint8) if stored_in == "fp8" else kv.k
    _attend_kernel[(num_tokens, head_tiles, parts)](
        out, partial_out, partial_max, partial_sum, q, cache, kv.k_scale, queries.block_table, queries.rows,
        queries.ends, chosen, scale, queries.first_key, queries.block_table.stride(0), part,
        HEADS=num_heads, BLOCK_M=how.heads, ROPE=rope_size, BLOCK_R=max(16, next_power_of_2(rope_size)), LATENT=latent,
        BLOCK_L=max(16, next_power_of_2(latent)), TOPK=topk, BLOCK_SIZE=block_size, TILE=how.tile, FORMAT=stored_in,
        STAGES=how.num_stages, num_warps=how.num_warps, **early_launch(q.device),
    )  # fmt: skip
    if parts > 1:
        starts = torch.arange(0, num_tokens * parts + 1, parts, dtype=torch.int32, device=q.device)
        reduce_kernel[(num_tokens, num_heads)](
            out, partial_out, partial_max, partial_sum, starts, num_heads * latent, 1, HEAD_DIM=latent,
            BLOCK_D=max(16, next_power_of_2(latent)), PARTS=REDUCED_AT_ONCE, num_warps=4, **early_launch(q.device),
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["first_token", "end_token", "first_key", "table_stride", "scores_stride"])
def _score_kernel(
    scores, q, weights, keys, block_table, token_rows, token_ends, first_token, end_token, first_key, topk,
    table_stride, scores_stride, HEADS: tl.constexpr, BLOCK_H: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, QUERIES: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program per QUERIES consecutive tokens, and share of their keys: scores [end_token - first_token, keys]."""
    wait_for_inputs(PDL)
    first = first_token + tl.program_id(0) * QUERIES
    lanes = tl.arange(0, QUERIES * BLOCK_H)
    tokens, heads = first + lanes // BLOCK_H, lanes % BLOCK_H
    present = (tokens < end_token) & (heads < HEADS)
    dims = tl.arange(0, BLOCK_D)
    vectors = (tokens.to(tl.int64) * HEADS + heads)[:, None] * HEAD_DIM + dims[None, :]
    queries = tl.load(q + vectors, mask=present[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    queries = queries.to(keys.dtype.element_ty)
    factors = tl.load(weights + tokens.to(tl.int64) * HEADS + heads, mask=present, other=0.0)
    own_tokens = first + tl.arange(0, QUERIES)
    real = own_tokens < end_token
    rows = tl.load(token_rows + own_tokens, mask=real, other=-1)
    ends = tl.load(token_ends + own_tokens, mask=real, other=0)
    places = (own_tokens - first_token) * scores_stride
    offsets = tl.arange(0, TILE)
    for row in range(tl.load(token_rows + first), tl.max(rows, 0) + 1):  # nearly always one: its queries share keys
        end = tl.max(tl.where(rows == row, ends, 0), 0)
        num_tiles = tl.where(end - first_key > topk, tl.cdiv(end, TILE), 0)
        table = block_table + (tl.zeros([], tl.int64) + row) * table_stride
        for tile in tl.range(tl.program_id(1), num_tiles, tl.num_programs(1), num_stages=STAGES):
            positions = tile * TILE + offsets
            seen = (positions >= first_key) & (positions < end)
            blocks = tl.load(table + positions // BLOCK_SIZE, mask=seen, other=0)
            slots = blocks.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
            present_keys = seen[:, None] & (dims < HEAD_DIM)[None, :]
            k = tl.load(keys + slots[:, None] * HEAD_DIM + dims[None, :], mask=present_keys, other=0.0)
            products = tl.dot(queries, tl.trans(k), input_precision="ieee")
            products = tl.maximum(products, 0.0) * factors[:, None]
            sums = tl.sum(tl.reshape(products, [QUERIES, BLOCK_H, TILE]), 1)
            stored = (rows == row)[:, None] & seen[None, :]
            tl.store(scores + places[:, None] + positions[None, :], sums, mask=stored)


@triton.jit
def _load_ordered(scores, positions, seen):
    """Load scores as unsigned numbers in the same order."""
    bits = tl.load(scores + positions, mask=seen, other=0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -0x80000000)).to(tl.uint32, bitcast=True)


@triton.jit(do_not_specialize=["first_token", "first_key", "scores_stride"])
def _select_kernel(
    chosen, scores, token_ends, first_token, first_key, scores_stride, TOPK: tl.constexpr, TILE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program per token: the positions of its TOPK largest scores, or all if it sees no more keys."""
    wait_for_inputs(PDL)
    token = first_token + tl.program_id(0)
    end = tl.load(token_ends + token)
    out = chosen + token.to(tl.int64) * TOPK
    offsets = tl.arange(0, TILE)
    if end - first_key <= TOPK:
        for at in range(0, TOPK, TILE):
            places = at + offsets
            positions = tl.where(first_key + places < end, first_key + places, -1)
            tl.store(out + places, positions, mask=places < TOPK)
        return
    scores += tl.program_id(0) * scores_stride
    bins = tl.arange(0, 256)
    found = tl.zeros([], tl.uint32)  # the leading bits of the least chosen score
    left = tl.zeros([], tl.int32) + TOPK  # keys that have these bits, and are chosen
    for step in tl.static_range(4):
        counts = tl.zeros([256], tl.int32)
        for at in range(first_key, end, TILE):
            seen = at + offsets < end
            bits = _load_ordered(scores, at + offsets, seen)
            if step > 0:
                seen = seen & ((bits >> (32 - 8 * step)) == found)
            counts += tl.histogram(((bits >> (24 - 8 * step)) & 255).to(tl.int32), 256, mask=seen)
        above = tl.sum(counts, 0) - tl.cumsum(counts, 0)  # keys with a larger byte
        hit = (above < left) & (above + counts >= left)
        found = (found << 8) | tl.sum(tl.where(hit, bins, 0), 0).to(tl.uint32)
        left -= tl.sum(tl.where(hit, above, 0), 0)
    written = 0
    ties = 0
    for at in range(first_key, end, TILE):
        seen = at + offsets < end
        bits = _load_ordered(scores, at + offsets, seen)
        tie = (seen & (bits == found)).to(tl.int32)
        earlier = ties + tl.cumsum(tie, 0) - tie
        taken = (seen & (bits > found)).to(tl.int32) + tie * (earlier < left).to(tl.int32)
        places = written + tl.cumsum(taken, 0) - taken
        tl.store(out + places, at + offsets, mask=taken > 0)
        written += tl.sum(taken, 0)
        ties += tl.sum(tie, 0)


@triton.jit
def _in_halves(x, dtype: tl.constexpr, FORMAT: tl.constexpr):
    """Convert a tile of the cache for the matrix units. Exact, except for the factor FP8_SHIFT of "fp8"."""
    if FORMAT == "fp8":
        bits = x.to(tl.uint16)
        return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit(do_not_specialize=["first_key", "table_stride", "part_keys"])
def _attend_kernel(
    out, partial_out, partial_max, partial_sum, q, cache, k_scale, block_table, token_rows, token_ends, chosen, scale,
    first_key, table_stride, part_keys, HEADS: tl.constexpr, BLOCK_M: tl.constexpr, ROPE: tl.constexpr,
    BLOCK_R: tl.constexpr, LATENT: tl.constexpr, BLOCK_L: tl.constexpr, TOPK: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, FORMAT: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per token, BLOCK_M heads and part_keys of the chosen keys. partial_out None: there is one part, which
    writes the result; else `reduce_kernel` merges the parts."""
    wait_for_inputs(PDL)
    token = tl.program_id(0)
    heads = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    present = heads < HEADS
    table = block_table + tl.load(token_rows + token).to(tl.int64) * table_stride
    count = tl.minimum(tl.load(token_ends + token) - first_key, TOPK)
    first = tl.program_id(2) * part_keys
    rotated, dims = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_L)
    vectors = (token.to(tl.int64) * HEADS + heads)[:, None] * (ROPE + LATENT)
    q_rotated = tl.load(q + vectors + rotated[None, :], mask=present[:, None] & (rotated < ROPE)[None, :], other=0.0)
    q_latent = tl.load(q + vectors + ROPE + dims[None, :], mask=present[:, None] & (dims < LATENT)[None, :], other=0.0)
    half: tl.constexpr = cache.dtype.element_ty if FORMAT == "plain" else tl.float16
    q_rotated, q_latent = q_rotated.to(half), q_latent.to(half)
    factor = scale * LOG2E
    v_factor = 1.0
    if FORMAT == "fp8":
        v_factor = tl.load(k_scale) * FP8_SHIFT
        factor = factor * v_factor
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_L], tl.float32)
    positions = chosen + token.to(tl.int64) * TOPK
    for at in tl.range(first, tl.minimum(first + part_keys, count), TILE, num_stages=STAGES):
        places = at + tl.arange(0, TILE)
        seen = places < count
        own = tl.load(positions + places, mask=seen, other=0)
        blocks = tl.load(table + own // BLOCK_SIZE, mask=seen, other=0)
        slots = blocks.to(tl.int64) * BLOCK_SIZE + own % BLOCK_SIZE
        keys = cache + slots[:, None] * (ROPE + LATENT)
        k_rotated = tl.load(keys + rotated[None, :], mask=seen[:, None] & (rotated < ROPE)[None, :], other=0.0)
        k_latent = tl.load(keys + ROPE + dims[None, :], mask=seen[:, None] & (dims < LATENT)[None, :], other=0.0)
        k_rotated, k_latent = _in_halves(k_rotated, half, FORMAT), _in_halves(k_latent, half, FORMAT)
        scores = tl.dot(q_rotated, tl.trans(k_rotated), input_precision="ieee")
        scores = tl.dot(q_latent, tl.trans(k_latent), scores, input_precision="ieee")
        if FORMAT == "int8":
            scales = tl.load(k_scale + slots, mask=seen, other=0.0)
            scores = scores * scales[None, :]
        scores = tl.where(seen[None, :], scores * factor, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))  # at least one key of a tile is seen
        p = tl.exp2(scores - new_max[:, None])
        alpha = tl.exp2(row_max - new_max)
        row_sum = row_sum * alpha + tl.sum(p, 1)
        row_max = new_max
        if FORMAT == "int8":
            # Scale the weights, not the values, each row relative to its largest: fp16's range then loses nothing.
            p = p * scales[None, :]
            largest = tl.maximum(tl.max(p, 1), 1e-30)
            p = p * (1.0 / largest)[:, None]
            acc = acc * alpha[:, None] + tl.dot(p.to(half), k_latent) * largest[:, None]
        else:
            acc = tl.dot(p.to(half), k_latent, acc * alpha[:, None], input_precision="ieee")
    stored = present[:, None] & (dims < LATENT)[None, :]
    acc = acc * v_factor
    if partial_out is None:
        acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
        results = out + (token.to(tl.int64) * HEADS + heads)[:, None] * LATENT + dims[None, :]
        tl.store(results, acc.to(out.dtype.element_ty), mask=stored)
    else:
        parts = (token * tl.num_programs(2) + tl.program_id(2)) * HEADS + heads
        tl.store(partial_max + parts, row_max, mask=present)
        tl.store(partial_sum + parts, row_sum, mask=present)
        tl.store(partial_out + parts[:, None].to(tl.int64) * LATENT + dims[None, :], acc, mask=stored)
