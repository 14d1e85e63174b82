"""The device code of paged attention: one body for prefill rows and decode rows, a plan kernel and a merge.

The body iterates over tiles of TILE consecutive keys with a running maximum and sum (Milakov & Gimelshein 2018,
arXiv:1805.02867; FlashAttention, Dao 2023, arXiv:2307.08691), in base 2: scale and log2(e) are one factor. Its rows are
the query heads of one key head, packed: row r is query r // GROUP_SIZE, head r % GROUP_SIZE of the group. Keys before
the diagonal need no mask, so their loop has none. Tiles begin at multiples of TILE in every request, so the result does
not depend on how a prompt was chunked.

NaN is kept out in two places. Slots past a request's context may hold any values, so a masked tile sets those values to
zero (0 * NaN is NaN). A row that has seen no key yet keeps a maximum of -inf that is never subtracted from itself.
"""

from __future__ import annotations

from localllm.kernels.kv_format import UNIT
from localllm.kernels.launch import is_last_program, tl, triton, wait_for_inputs
from localllm.kernels.paged_attention.newest import rotated_heads, store_newest

LOG2E = tl.constexpr(1.4426950408889634)
VALUE_GROUP = tl.constexpr(UNIT)
FP8_SHIFT = tl.constexpr(256.0)
"""e4m3 bits placed in an fp16's fields represent 2^-8 of their value (the two exponents' biases differ by 8)."""


@triton.jit
def _halves(x, FORMAT: tl.constexpr, dtype: tl.constexpr):
    """Convert a tile of the cache for the matrix units. Exact, except for the factor FP8_SHIFT of "fp8_bits"."""
    if FORMAT == "int8":
        # 0x6400 is 1024 in fp16, whose last bit is then worth 1: an `or` and a subtraction instead of a conversion.
        biased = (x.to(tl.uint8, bitcast=True) ^ 0x80).to(tl.uint16) | 0x6400
        return biased.to(tl.float16, bitcast=True) - 1152.0
    elif FORMAT == "int8_ptx":
        # The same for four values at once: two bytes and two bytes 0x64 form a pair of fp16.
        return tl.inline_asm_elementwise(
            """
            {
                .reg .b32 biased, offset;
                mov.b32 offset, 0x64806480;
                xor.b32 biased, $2, 0x80808080;
                prmt.b32 $0, biased, 0x64646464, 0x4140;
                prmt.b32 $1, biased, 0x64646464, 0x4342;
                sub.f16x2 $0, $0, offset;
                sub.f16x2 $1, $1, offset;
            }
            """,
            "=r,=r,r", [x], dtype=tl.float16, is_pure=True, pack=4,
        )  # fmt: skip
    elif FORMAT == "fp8_bits":
        bits = x.to(tl.uint16)
        return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def _load_nibbles(cache, rows, seen, MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load a tile of 4 bits: rows of the cache as codes - 8, fp16 [TILE, BLOCK_D]. MASKED: only those that are seen."""
    pairs = tl.arange(0, BLOCK_D // 2)
    places = rows[:, None] * (HEAD_DIM // 2) + pairs[None, :]
    if MASKED:
        x = tl.load(cache + places, mask=seen[:, None] & (pairs < HEAD_DIM // 2)[None, :], other=0)
    elif HEAD_DIM == BLOCK_D:
        x = tl.load(cache + places)
    else:
        x = tl.load(cache + places, mask=(pairs < HEAD_DIM // 2)[None, :], other=0)
    low = ((x & 15).to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - 1032.0
    high = ((x >> 4).to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - 1032.0
    return tl.interleave(low, high)


@triton.jit
def _scale_groups(steps, scales, rows, seen, MASKED: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Return the numbers of a tile, fp16, from their steps [TILE, BLOCK_D], with a scale and a zero point for each
    group of a row; 0 in rows that are not seen if MASKED."""
    GROUPS: tl.constexpr = HEAD_DIM // VALUE_GROUP
    PARTS: tl.constexpr = steps.shape[1] // VALUE_GROUP  # padding included
    parts = tl.arange(0, PARTS)
    places = scales + rows[:, None] * (2 * GROUPS) + parts[None, :]
    if MASKED:
        present = seen[:, None] & (parts < GROUPS)[None, :]
        scale, zero = tl.load(places, mask=present, other=0.0), tl.load(places + GROUPS, mask=present, other=0.0)
    elif PARTS == GROUPS:
        scale, zero = tl.load(places), tl.load(places + GROUPS)
    else:
        present = (parts < GROUPS)[None, :]
        scale, zero = tl.load(places, mask=present, other=0.0), tl.load(places + GROUPS, mask=present, other=0.0)
    grouped = tl.reshape(steps, [steps.shape[0], PARTS, VALUE_GROUP]) * scale[:, :, None] + zero[:, :, None]
    return tl.reshape(grouped, steps.shape)


@triton.jit
def _capped(scores, scale, SOFTCAP: tl.constexpr):
    """Return softcap * tanh(score / softcap) as powers of two. scale: from scores to powers of two."""
    # tanh(x) = 1 - 2 / (e^2x + 1): overflow is harmless at both ends
    return (SOFTCAP * LOG2E) * (1.0 - 2.0 / (tl.exp2(scores * (scale * (2.0 / SOFTCAP))) + 1.0))


@triton.jit
def _attend_tile(
    acc, row_max, row_sum, q, q_positions, q_limits, slopes, k_cache, v_cache, k_scale, v_scale, table, head_blocks,
    tile, first_key, end_key, scale,
    MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
    FIRST_KEY: tl.constexpr, SOFTCAP: tl.constexpr, FORMAT: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Add the keys of one tile to (acc, row_max, row_sum). scale: from scores to powers of two.

    MASKED: some key of the tile is hidden from some row; keys outside first_key .. end_key-1 are hidden from all rows.
    q_positions None: all others are visible to all rows. q_limits: the first key that each row does not see; None: the
    one behind its own.
    """
    BLOCK_D: tl.constexpr = acc.shape[1]
    ONE_BLOCK: tl.constexpr = BLOCK_SIZE % TILE == 0
    K_FORMAT: tl.constexpr = "int8" if FORMAT == "k8v4" else "int8_ptx" if FORMAT == "k8v4_ptx" else FORMAT
    KEY_SCALES: tl.constexpr = K_FORMAT == "int8" or K_FORMAT == "int8_ptx"  # of each token
    VALUE_SCALES: tl.constexpr = FORMAT == "int8" or FORMAT == "int8_ptx"
    NIBBLES: tl.constexpr = FORMAT == "int4" or K_FORMAT != FORMAT  # values of 4 bits
    offsets = tl.arange(0, TILE)
    dims = tl.arange(0, BLOCK_D)
    positions = tile * TILE + offsets
    seen = (positions >= first_key) & (positions < end_key)
    if ONE_BLOCK:
        block = tl.load(table + tile * TILE // BLOCK_SIZE)
        cache_row = (head_blocks + block) * BLOCK_SIZE + tile * TILE % BLOCK_SIZE
        cache_rows = cache_row + offsets
    else:
        blocks = tl.load(table + positions // BLOCK_SIZE, mask=seen if MASKED else None, other=0 if MASKED else None)
        cache_rows = (head_blocks + blocks) * BLOCK_SIZE + positions % BLOCK_SIZE
    if TMA:
        k = k_cache.load([cache_row.to(tl.int32), 0])
    elif FORMAT == "int4":
        k = _load_nibbles(k_cache, cache_rows, seen, MASKED, HEAD_DIM, BLOCK_D)
    else:
        places = cache_rows[:, None] * HEAD_DIM + dims[None, :]
        if MASKED:
            present = seen[:, None] & (dims < HEAD_DIM)[None, :]
            k = tl.load(k_cache + places, mask=present, other=0.0)
        elif HEAD_DIM == BLOCK_D:
            k = tl.load(k_cache + places)
        else:
            k = tl.load(k_cache + places, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    scores = tl.dot(q, tl.trans(_halves(k, K_FORMAT, q.dtype)), input_precision="ieee")
    if KEY_SCALES:
        k_scales = tl.load(k_scale + cache_rows, mask=seen if MASKED else None, other=0.0 if MASKED else None)
        scores = scores * k_scales[None, :]
    elif FORMAT == "int4":
        k_scales = tl.load(k_scale + cache_rows * 2, mask=seen if MASKED else None, other=0.0 if MASKED else None)
        zeros = tl.load(k_scale + cache_rows * 2 + 1, mask=seen if MASKED else None, other=0.0 if MASKED else None)
        scores = scores * k_scales.to(tl.float32)[None, :]
        scores += tl.sum(q.to(tl.float32), 1)[:, None] * zeros.to(tl.float32)[None, :]

    # From scores to powers of two. Without cap and slopes the factor is applied in the exponent's subtraction.
    factor = scale
    if SOFTCAP > 0:
        scores = _capped(scores, scale, SOFTCAP)
        factor = 1.0
    if slopes is not None:
        distance = (positions[None, :] - q_positions[:, None]).to(tl.float32)
        scores = scores * factor + slopes[:, None] * distance
        factor = 1.0
    if MASKED:
        if q_positions is None:
            visible = seen[None, :]
        else:
            if q_limits is None:
                visible = positions[None, :] <= q_positions[:, None]
            else:
                visible = positions[None, :] < q_limits[:, None]
            if FIRST_KEY > 0:
                visible = visible & seen[None, :]
            if WINDOW != 0:
                visible = visible & (positions[None, :] >= _first_visible(q_positions, WINDOW)[:, None])
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1) * factor)
    shift = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
    p = tl.exp2(scores * factor - shift[:, None])
    alpha = tl.exp2(row_max - shift)
    row_sum = row_sum * alpha + tl.sum(p, 1)
    row_max = new_max

    if TMA:
        v = v_cache.load([cache_row.to(tl.int32), 0])
    elif NIBBLES:
        v = _load_nibbles(v_cache, cache_rows, seen, MASKED, HEAD_DIM, BLOCK_D)
        v = _scale_groups(v, v_scale, cache_rows, seen, MASKED, HEAD_DIM)
    elif MASKED:
        v = tl.load(v_cache + places, mask=present, other=0.0)
    elif HEAD_DIM == BLOCK_D:
        v = tl.load(v_cache + places)
    else:
        v = tl.load(v_cache + places, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    v = _halves(v, FORMAT, q.dtype)
    if TMA and MASKED:
        v = tl.where(seen[:, None], v, 0.0)
    if VALUE_SCALES:
        v_scales = tl.load(v_scale + cache_rows, mask=seen if MASKED else None, other=0.0 if MASKED else None)
        # Scale the weights, not the values, each row relative to its largest: fp16's range then loses nothing, and a
        # row does not depend on keys that are hidden from it.
        p = p * v_scales[None, :]
        largest = tl.maximum(tl.max(p, 1), 1e-30)
        p = p * (1.0 / largest)[:, None]
        acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v) * largest[:, None]
    else:
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    return acc, row_max, row_sum


@triton.jit
def _attend_tiles(
    acc, row_max, row_sum, q, q_positions, q_limits, slopes, k_cache, v_cache, k_scale, v_scale, table, head_blocks,
    first_tile, end_tile, first_key, end_key, scale,
    MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
    FIRST_KEY: tl.constexpr, SOFTCAP: tl.constexpr, FORMAT: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Process tiles first_tile .. end_tile-1 with prefetching."""
    for tile in tl.range(first_tile, end_tile, num_stages=STAGES):
        acc, row_max, row_sum = _attend_tile(
            acc, row_max, row_sum, q, q_positions, q_limits, slopes, k_cache, v_cache, k_scale, v_scale, table,
            head_blocks, tile, first_key, end_key, scale,
            MASKED, HEAD_DIM, BLOCK_SIZE, TILE, WINDOW, FIRST_KEY, SOFTCAP, FORMAT, TMA,
        )  # fmt: skip
    return acc, row_max, row_sum


@triton.jit
def _load_queries(
    q, tokens, heads, present, token_stride, head_stride, k_cache,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, FORMAT: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Load [BLOCK_M, BLOCK_D] of rows (tokens, heads), in the keys' type; zeros for rows that are not present."""
    dims = tl.arange(0, BLOCK_D)
    places = tokens[:, None].to(tl.int64) * token_stride + heads[:, None] * head_stride + dims[None, :]
    queries = tl.load(q + places, mask=present[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    return _as_keys(queries, k_cache, FORMAT, TMA)


@triton.jit
def _as_keys(queries, k_cache, FORMAT: tl.constexpr, TMA: tl.constexpr):
    """Convert queries to the keys' type."""
    if FORMAT != "plain":
        return queries.to(tl.float16)  # the type to which 8 bits convert cheaply and exactly
    elif TMA:
        return queries.to(k_cache.dtype)
    else:
        return queries.to(k_cache.dtype.element_ty)


@triton.jit
def _head_scales(scale, k_scale, v_scale, kv_head, FORMAT: tl.constexpr):
    """Return (factor of the scores as powers of two, factor of the output) of one key head."""
    scale = scale * LOG2E
    v_factor = 1.0
    if FORMAT == "fp8" or FORMAT == "fp8_bits":
        scale = scale * tl.load(k_scale + kv_head)
        v_factor = tl.load(v_scale + kv_head)
        if FORMAT == "fp8_bits":
            scale = scale * FP8_SHIFT
            v_factor = v_factor * FP8_SHIFT
    return scale, v_factor


@triton.jit
def _load_slopes(alibi_slopes, heads, present):
    return tl.load(alibi_slopes + heads, mask=present, other=0.0) * LOG2E


@triton.jit
def _find_row(cu_seqlens_q, first_row, num_rows, place, BLOCK_Q: tl.constexpr):
    """Return which of num_rows requests from first_row on block `place` belongs to;
    num_rows: padding tokens after all requests.

    Request i begins at block (its first token) // BLOCK_Q + i: enough blocks for each request, without a prefix sum.
    """
    base = tl.load(cu_seqlens_q + first_row)
    row = -1
    for at in range(0, num_rows + 1, 64):
        index = at + tl.arange(0, 64)
        starts = tl.load(cu_seqlens_q + first_row + index, mask=index <= num_rows, other=0) - base
        row += tl.sum(((starts // BLOCK_Q + index <= place) & (index <= num_rows)).to(tl.int32), 0)
    return row, base


@triton.jit(do_not_specialize=["num_tokens", "first_row", "num_rows", "num_blocks", "table_stride"])
def prefill_kernel(
    out, q, k_cache, v_cache, k_scale, v_scale, block_table, context_lens, cu_seqlens_q, positions, key_limits, sinks,
    alibi_slopes, scale, num_tokens, first_row, num_rows, num_blocks, table_stride, q_token_stride, q_head_stride,
    out_stride, GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, FORMAT: tl.constexpr,
    TMA: tl.constexpr, ONE_LOOP: tl.constexpr, STAGES: tl.constexpr, FIRST_KEY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per block of consecutive queries of one request, and key head.

    ONE_LOOP: every tile uses the masked loop, so that a query's bits do not depend on other queries in the block.
    positions [num_tokens] int64: read if given, of each request's first query; its queries from the context's end on
    are padding. None: a request's last query is at its context's end. key_limits [num_tokens] int32: the first key that
    each query does not see, behind its own or later; None: the one behind its own.
    """
    wait_for_inputs(PDL)
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP_SIZE
    place = tl.num_programs(0) - 1 - tl.program_id(0)  # the last block of a prompt has most work: it starts first
    kv_head = tl.program_id(1)
    row, base = _find_row(cu_seqlens_q, first_row, num_rows, place, BLOCK_Q)
    batch_row = first_row + row
    start = tl.load(cu_seqlens_q + batch_row)
    end = tl.load(cu_seqlens_q + batch_row + 1, mask=row < num_rows, other=num_tokens)
    context_len = tl.load(context_lens + batch_row, mask=row < num_rows, other=0)
    first_query = (place - (start - base) // BLOCK_Q - row) * BLOCK_Q
    query_len = end - start
    if first_query >= query_len:
        return

    rows = tl.arange(0, BLOCK_M)
    queries = first_query + rows // GROUP_SIZE
    heads = kv_head * GROUP_SIZE + rows % GROUP_SIZE
    present = (queries < query_len) & (rows < BLOCK_Q * GROUP_SIZE)
    computed = context_len - query_len if positions is None else tl.load(positions + start).to(tl.int32)
    q_positions = computed + queries
    q_block = _load_queries(
        q, start + queries, heads, present, q_token_stride, q_head_stride, k_cache, HEAD_DIM, BLOCK_D, FORMAT, TMA
    )
    scale, v_factor = _head_scales(scale, k_scale, v_scale, kv_head, FORMAT)
    slopes = None if alibi_slopes is None else _load_slopes(alibi_slopes, heads, present)
    if sinks is None:
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
    else:
        row_max = tl.load(sinks + heads, mask=present, other=0.0) * LOG2E
        row_sum = tl.full([BLOCK_M], 1.0, tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    first_position = computed + first_query
    last_position = tl.minimum(first_position + BLOCK_Q, context_len) - 1
    end_key = tl.maximum(last_position + 1, 0)
    q_limits = None
    if key_limits is not None:
        q_limits = tl.load(key_limits + start + queries, mask=present, other=0)
        end_key = tl.minimum(tl.maximum(tl.max(q_limits, 0), end_key), context_len)
    first_key = tl.maximum(_first_visible(first_position, WINDOW), FIRST_KEY) if WINDOW != 0 else FIRST_KEY
    first_tile = first_key // TILE
    end_tile = tl.cdiv(end_key, TILE)
    table = block_table + batch_row.to(tl.int64) * table_stride
    head_blocks = kv_head.to(tl.int64) * num_blocks
    if not ONE_LOOP:
        # Tiles whose keys are all visible to all rows: from the start of the last query's window to the first query.
        free_tile = first_tile
        if WINDOW != 0 or FIRST_KEY > 0:
            last_first_key = tl.maximum(_first_visible(last_position, WINDOW), FIRST_KEY) if WINDOW != 0 else FIRST_KEY
            free_tile = tl.minimum(tl.cdiv(last_first_key, TILE), end_tile)
            acc, row_max, row_sum = _attend_tiles(
                acc, row_max, row_sum, q_block, q_positions, q_limits, slopes, k_cache, v_cache, k_scale, v_scale,
                table, head_blocks, first_tile, free_tile, first_key, end_key, scale,
                True, HEAD_DIM, BLOCK_SIZE, TILE, WINDOW, FIRST_KEY, SOFTCAP, FORMAT, TMA, STAGES,
            )  # fmt: skip
        first_tile = tl.maximum((first_position + 1) // TILE, free_tile)
        acc, row_max, row_sum = _attend_tiles(
            acc, row_max, row_sum, q_block, q_positions, q_limits, slopes, k_cache, v_cache, k_scale, v_scale, table,
            head_blocks, free_tile, first_tile, first_key, end_key, scale,
            False, HEAD_DIM, BLOCK_SIZE, TILE, WINDOW, FIRST_KEY, SOFTCAP, FORMAT, TMA, STAGES,
        )  # fmt: skip
    acc, row_max, row_sum = _attend_tiles(
        acc, row_max, row_sum, q_block, q_positions, q_limits, slopes, k_cache, v_cache, k_scale, v_scale, table,
        head_blocks, first_tile, end_tile, first_key, end_key, scale,
        True, HEAD_DIM, BLOCK_SIZE, TILE, WINDOW, FIRST_KEY, SOFTCAP, FORMAT, TMA, STAGES,
    )  # fmt: skip

    acc = acc * (v_factor / tl.where(row_sum == 0.0, 1.0, row_sum))[:, None]
    dims = tl.arange(0, BLOCK_D)
    places = (start + queries)[:, None].to(tl.int64) * out_stride + heads[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out + places, acc.to(out.dtype.element_ty), mask=present[:, None] & (dims < HEAD_DIM)[None, :])


@triton.jit
def _first_visible(positions, window):
    """Return the first key that queries at these positions see; it may be negative. window: not 0 (kv_format.py)."""
    return positions - window + 1 if window > 0 else positions - positions % -window


@triton.jit
def _first_key(context_lens, window, queries):
    """Return the first key of a decode row: that of its first query's window, if none of its queries is padding.
    window 0: all keys."""
    return tl.maximum(_first_visible(context_lens - queries, window), 0) if window != 0 else context_lens * 0


@triton.jit
def _merge_parts(
    partial_out, partial_max, partial_sum, start, end, rows, present, rows_of_part,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Return the attention [ROWS, BLOCK_D] of items start .. end-1 together, which are all parts of one request's keys.

    rows [ROWS]: query heads within an item's rows_of_part. The order of the sum is that of the items, PARTS at a time.
    """
    ROWS: tl.constexpr = rows.shape[0]
    dims = tl.arange(0, BLOCK_D)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for at in range(start, end, PARTS):
        items = at + tl.arange(0, PARTS)
        loaded = (items < end)[:, None] & present[None, :]
        places = items[:, None] * rows_of_part + rows[None, :]
        # Other programs have just written the parts, so they are in L2 and not in this processor's L1.
        part_max = tl.load(partial_max + places, mask=loaded, other=float("-inf"), cache_modifier=".cg")
        part_sum = tl.load(partial_sum + places, mask=loaded, other=0.0, cache_modifier=".cg")
        part_out = tl.load(
            partial_out + places[:, :, None].to(tl.int64) * HEAD_DIM + dims[None, None, :],
            mask=loaded[:, :, None] & (dims < HEAD_DIM)[None, None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        new_max = tl.maximum(row_max, tl.max(part_max, 0))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(part_max - shift[None, :])
        alpha = tl.exp2(row_max - shift)
        acc = acc * alpha[:, None] + tl.sum(part_out * weights[:, :, None], 0)
        row_sum = row_sum * alpha + tl.sum(part_sum * weights, 0)
        row_max = new_max
    return acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]


@triton.jit
def _merge_if_last(
    out, partial_out, partial_max, partial_sum, split_starts, counters, row, out_stride,
    GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, QUERIES: tl.constexpr,
    TILE_QUERIES: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Count this program's part of a decode row; in the program that counts the last one, merge them all."""
    kv_head, query_tile = tl.program_id(1), tl.program_id(2)
    counter = counters + (row * tl.num_programs(1) + kv_head) * tl.num_programs(2) + query_tile
    start = tl.load(split_starts + row)
    end = tl.load(split_starts + row + 1)
    if is_last_program(counter, end - start):
        num_heads = tl.num_programs(1) * GROUP_SIZE
        rows = tl.arange(0, ROWS)
        queries = query_tile * TILE_QUERIES + rows // GROUP_SIZE
        heads = kv_head * GROUP_SIZE + rows % GROUP_SIZE
        present = (rows < TILE_QUERIES * GROUP_SIZE) & (queries < QUERIES)
        acc = _merge_parts(
            partial_out, partial_max, partial_sum, start, end, queries * num_heads + heads, present,
            QUERIES * num_heads, HEAD_DIM, BLOCK_D, PARTS,
        )  # fmt: skip
        dims = tl.arange(0, BLOCK_D)
        tokens = row.to(tl.int64) * QUERIES + queries
        places = tokens[:, None] * out_stride + heads[:, None] * HEAD_DIM + dims[None, :]
        tl.store(out + places, acc.to(out.dtype.element_ty), mask=present[:, None] & (dims < HEAD_DIM)[None, :])


@triton.jit
def _read_newest(stored, own_scale, FORMAT: tl.constexpr):
    """Return what `store_newest` has stored as `_attend_tile` reads it, fp32."""
    if FORMAT == "plain":
        return stored.to(tl.float32)
    elif FORMAT == "int8" or FORMAT == "int8_ptx":
        return _halves(stored.to(tl.int8, bitcast=True), "int8", tl.float16).to(tl.float32) * own_scale
    elif FORMAT == "fp8":
        return stored.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        return _halves(stored, FORMAT, tl.float16).to(tl.float32)


@triton.jit
def _begin_with_newest(
    q, row, kv_head, heads, is_last, slots, angles, positions, norms, eps, k_store, v_store, k_cache, k_scale, v_scale,
    num_slots, q_token_stride, scale,
    GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, SOFTCAP: tl.constexpr,
    FORMAT: tl.constexpr, TMA: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Return (queries, acc, row_max, row_sum) of a decode row whose heads are raw, after its newest key if `is_last`:
    the program whose part ends with the newest key stores it and its value."""
    num_kv_heads = tl.num_programs(1)
    key_head = num_kv_heads * GROUP_SIZE + kv_head
    token = q + row.to(tl.int64) * q_token_stride
    table, key_norm, query_norms = None, None, None
    if ROTARY_DIM > 0:
        table = angles + tl.load(positions + row).to(tl.int64) * ROTARY_DIM
    one = tl.arange(0, 1)
    if norms is not None:
        key_norm = norms + key_head * HEAD_DIM + one
        query_norms = norms + heads * HEAD_DIM
    k = rotated_heads(
        token + key_head * HEAD_DIM + one, key_norm, table, eps, HEAD_DIM, BLOCK_D, ROTARY_DIM, INTERLEAVED
    )
    v = rotated_heads(token + (key_head + num_kv_heads) * HEAD_DIM + one, None, None, eps, HEAD_DIM, BLOCK_D, 0, False)
    slot = tl.load(slots + row).to(tl.int64)
    place = kv_head.to(tl.int64) * num_slots + slot
    is_stored = is_last & (slot >= 0)
    k, own_scale = store_newest(k, k_store, k_scale, kv_head, place, is_stored, HEAD_DIM, FORMAT)
    k = _read_newest(k, own_scale, FORMAT)
    v, own_scale = store_newest(v, v_store, v_scale, kv_head, place, is_stored, HEAD_DIM, FORMAT)
    v = _read_newest(v, own_scale, FORMAT)
    queries = rotated_heads(
        token + heads * HEAD_DIM, query_norms, table, eps, HEAD_DIM, BLOCK_D, ROTARY_DIM, INTERLEAVED
    )
    queries = _as_keys(queries.to(q.dtype.element_ty), k_cache, FORMAT, TMA)
    scores = tl.sum(queries.to(tl.float32) * k, 1)
    scores = _capped(scores, scale, SOFTCAP) if SOFTCAP > 0 else scores * scale
    row_max = tl.where(is_last, scores, float("-inf"))
    row_sum = tl.where(is_last, 1.0, 0.0) + tl.zeros([heads.shape[0]], tl.float32)
    acc = tl.where(is_last, v, 0.0) + tl.zeros([heads.shape[0], BLOCK_D], tl.float32)
    return queries, acc, row_max, row_sum


@triton.jit(do_not_specialize=["num_blocks", "table_stride"])
def decode_kernel(
    out, partial_out, partial_max, partial_sum, q, k_cache, v_cache, k_scale, v_scale, block_table, context_lens,
    items, split_starts, counters, sinks, alibi_slopes, scale, num_blocks, table_stride, q_token_stride, q_head_stride,
    out_stride, positions, slots, angles, norms, eps, k_store, v_store,
    GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, FORMAT: tl.constexpr,
    TMA: tl.constexpr, STAGES: tl.constexpr, QUERIES: tl.constexpr, TILE_QUERIES: tl.constexpr,
    MERGE_ROWS: tl.constexpr, MERGE_PARTS: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
    FIRST_KEY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per item of the work list, key head and TILE_QUERIES query tokens: part of one request's keys for its
    QUERIES query tokens.

    counters [num_decodes, kv heads, cdiv(QUERIES, TILE_QUERIES)] int32: how many of a request's parts are written. The
    program that writes the last one merges them all, MERGE_PARTS at a time, and sets the counter to zero. MERGE_PARTS
    0: the parts are left to `reduce_kernel`. MERGE_ROWS: a power of two, at least TILE_QUERIES * GROUP_SIZE.

    positions [num_decodes * QUERIES] int64: read if QUERIES > 1, of each row's first query. A query from the context's
    end on is padding; its output is not defined.

    slots [num_decodes] int64: given if heads are raw (newest.py). QUERIES is 1 then, q points to a row's queries, keys
    and values, and the newest key is not in the cache yet: k_store and v_store are the cache as pointers. angles:
    of positions, [max_pos, ROTARY_DIM] fp32. norms [query heads + kv heads, HEAD_DIM] fp32, with eps; None: no norm.
    """
    wait_for_inputs(PDL)
    item = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.load(items + item * 3)
    first_tile = tl.load(items + item * 3 + 1)
    end_tile = tl.load(items + item * 3 + 2)
    if row < 0:
        return
    context_len = tl.load(context_lens + row)

    tile_rows = tl.arange(0, BLOCK_M)
    loaded = tl.full([BLOCK_M], 1, tl.int1)
    # Rows beyond the tile's queries repeat a row of the last: their results are not stored, and loads need no mask.
    if QUERIES == 1:
        present = tile_rows < GROUP_SIZE
        heads = kv_head * GROUP_SIZE + tl.minimum(tile_rows, GROUP_SIZE - 1)
        tokens = tl.zeros([BLOCK_M], tl.int32) + row
        first_position = context_len - 1
        q_positions = tl.zeros([BLOCK_M], tl.int32) + first_position
    else:
        first_query = tl.program_id(2) * TILE_QUERIES
        queries = first_query + tile_rows // GROUP_SIZE
        present = (tile_rows < TILE_QUERIES * GROUP_SIZE) & (queries < QUERIES)
        heads = kv_head * GROUP_SIZE + tile_rows % GROUP_SIZE
        tokens = row * QUERIES + tl.minimum(queries, QUERIES - 1)
        first_position = tl.load(positions + row * QUERIES).to(tl.int32) + first_query
        q_positions = first_position + tile_rows // GROUP_SIZE
    scale, v_factor = _head_scales(scale, k_scale, v_scale, kv_head, FORMAT)
    first_key = tl.maximum(_first_visible(first_position, WINDOW), FIRST_KEY) if WINDOW != 0 else FIRST_KEY
    end_key = context_len
    free_end = first_position + 1  # keys before it are visible to all queries
    is_first = first_tile == _first_key(context_len, WINDOW, QUERIES) // TILE
    is_last = end_tile * TILE >= context_len
    if slots is not None:
        # The last of several parts may be empty, and so is a padding row: the newest key belongs to neither.
        q_block, acc, row_max, row_sum = _begin_with_newest(
            q, row, kv_head, heads, is_last & (first_tile < end_tile), slots, angles, positions, norms, eps, k_store,
            v_store, k_cache, k_scale, v_scale, num_blocks.to(tl.int64) * BLOCK_SIZE, q_token_stride, scale,
            GROUP_SIZE, HEAD_DIM, BLOCK_D, SOFTCAP, FORMAT, TMA, ROTARY_DIM, INTERLEAVED,
        )  # fmt: skip
        end_key = context_len - 1
        free_end = end_key
        q_positions = None
    else:
        q_block = _load_queries(
            q, tokens, heads, loaded, q_token_stride, q_head_stride, k_cache, HEAD_DIM, BLOCK_D, FORMAT, TMA
        )
        if sinks is None:
            row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
            row_sum = tl.zeros([BLOCK_M], tl.float32)
        else:  # the sink belongs to the first part
            has_sink = present & is_first
            row_max = tl.where(has_sink, tl.load(sinks + heads) * LOG2E, float("-inf"))
            row_sum = tl.where(has_sink, 1.0, 0.0)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    slopes = None if alibi_slopes is None else _load_slopes(alibi_slopes, heads, loaded)

    table = block_table + row.to(tl.int64) * table_stride
    head_blocks = kv_head.to(tl.int64) * num_blocks
    # Only the first and the last tiles contain hidden keys: before a query's window, and after its position. These are
    # loops of one or two iterations: with a branch instead, the compiler keeps more in registers.
    free_tile = first_tile
    if WINDOW != 0 or FIRST_KEY > 0:
        last_first_key = FIRST_KEY
        if WINDOW != 0:
            last_query = tl.minimum(first_position + TILE_QUERIES, context_len) - 1
            last_first_key = tl.maximum(first_key, _first_visible(last_query, WINDOW))
        free_tile = tl.minimum(tl.maximum(tl.cdiv(last_first_key, TILE), first_tile), end_tile)
        acc, row_max, row_sum = _attend_tiles(
            acc, row_max, row_sum, q_block, q_positions, None, slopes, k_cache, v_cache, k_scale, v_scale, table,
            head_blocks, first_tile, free_tile, first_key, end_key, scale,
            True, HEAD_DIM, BLOCK_SIZE, TILE, WINDOW, FIRST_KEY, SOFTCAP, FORMAT, TMA, 1,
        )  # fmt: skip
    last_tile = tl.maximum(tl.minimum(free_end // TILE, end_tile), free_tile)
    acc, row_max, row_sum = _attend_tiles(
        acc, row_max, row_sum, q_block, q_positions, None, slopes, k_cache, v_cache, k_scale, v_scale, table,
        head_blocks, free_tile, last_tile, first_key, end_key, scale,
        False, HEAD_DIM, BLOCK_SIZE, TILE, WINDOW, FIRST_KEY, SOFTCAP, FORMAT, TMA, STAGES,
    )  # fmt: skip
    acc, row_max, row_sum = _attend_tiles(
        acc, row_max, row_sum, q_block, q_positions, None, slopes, k_cache, v_cache, k_scale, v_scale, table,
        head_blocks, last_tile, end_tile, first_key, end_key, scale,
        True, HEAD_DIM, BLOCK_SIZE, TILE, WINDOW, FIRST_KEY, SOFTCAP, FORMAT, TMA, 1,
    )  # fmt: skip

    dims = tl.arange(0, BLOCK_D)
    stored = present[:, None] & (dims < HEAD_DIM)[None, :]
    if is_first & is_last:
        acc = acc * (v_factor / tl.where(row_sum == 0.0, 1.0, row_sum))[:, None]
        places = tokens[:, None].to(tl.int64) * out_stride + heads[:, None] * HEAD_DIM + dims[None, :]
        tl.store(out + places, acc.to(out.dtype.element_ty), mask=stored)
    else:
        num_heads = tl.num_programs(1) * GROUP_SIZE
        parts = (item * QUERIES + tokens - row * QUERIES) * num_heads + heads
        tl.store(partial_max + parts, row_max, mask=present)
        tl.store(partial_sum + parts, row_sum, mask=present)
        tl.store(partial_out + parts[:, None].to(tl.int64) * HEAD_DIM + dims[None, :], acc * v_factor, mask=stored)
        if MERGE_PARTS > 0:
            _merge_if_last(
                out, partial_out, partial_max, partial_sum, split_starts, counters, row, out_stride, GROUP_SIZE,
                HEAD_DIM, BLOCK_D, QUERIES, TILE_QUERIES, MERGE_ROWS, MERGE_PARTS,
            )  # fmt: skip


@triton.jit(do_not_specialize=["queries"])
def reduce_kernel(
    out, partial_out, partial_max, partial_sum, split_starts, out_stride, queries,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per query token of a decode row, which has `queries`, and query head merges its parts."""
    wait_for_inputs(PDL)
    token = tl.program_id(0)
    row = token // queries
    heads = tl.program_id(1) + tl.arange(0, 1)
    start = tl.load(split_starts + row)
    end = tl.load(split_starts + row + 1)
    if end - start <= 1:
        return  # the decode kernel has written rows with one part
    num_heads = tl.num_programs(1)
    acc = _merge_parts(
        partial_out, partial_max, partial_sum, start, end, token % queries * num_heads + heads, heads >= 0,
        queries * num_heads, HEAD_DIM, BLOCK_D, PARTS,
    )  # fmt: skip
    dims = tl.arange(0, BLOCK_D)
    places = token.to(tl.int64) * out_stride + heads[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out + places, acc.to(out.dtype.element_ty), mask=(dims < HEAD_DIM)[None, :])


@triton.jit
def _key_tiles(context_lens, rows, num_rows, tile_bits, window, queries):
    """Return (first, end) of the tiles whose keys a decode row sees; an empty range for a padding row."""
    lengths = tl.load(context_lens + rows, mask=rows < num_rows, other=0)
    return _first_key(lengths, window, queries) >> tile_bits, (lengths + (1 << tile_bits) - 1) >> tile_bits


@triton.jit(do_not_specialize=["num_rows", "max_items", "spare_items", "num_counters"])
def plan_kernel(
    items, split_starts, counters, context_lens, num_rows, max_items, spare_items, num_counters,
    TILE_BITS: tl.constexpr, WINDOW: tl.constexpr, MIN_TILES: tl.constexpr, ROWS: tl.constexpr, QUERIES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program plans a step whose work list was not filled by `prepare_step`."""
    wait_for_inputs(PDL)
    split_rows(
        items, split_starts, counters, context_lens, num_rows, max_items, spare_items, num_counters, TILE_BITS,
        WINDOW, MIN_TILES, QUERIES, ROWS,
    )  # fmt: skip


@triton.jit
def split_rows(
    items, split_starts, counters, context_lens, num_rows, max_items, spare_items, num_counters, tile_bits, window,
    min_tiles, queries, ROWS: tl.constexpr,
):  # fmt: skip
    """Split the decode kernel's work into parts of nearly equal length, at most num_rows + spare_items; one program.

    items [max_items, 3]: row (-1: no work), first tile, end tile. split_starts [num_rows + 1]. counters [num_counters]:
    set to zero.
    """
    total = 0
    for at in range(0, num_rows, ROWS):
        first, end = _key_tiles(context_lens, at + tl.arange(0, ROWS), num_rows, tile_bits, window, queries)
        total += tl.sum(end - first, 0)
    tiles_per_item = tl.maximum(tl.cdiv(total, spare_items), min_tiles)
    used = 0
    for at in range(0, num_rows, ROWS):
        rows = at + tl.arange(0, ROWS)
        first, end = _key_tiles(context_lens, rows, num_rows, tile_bits, window, queries)
        # A padding row is one empty item, which writes its zeros.
        splits = tl.where(rows < num_rows, tl.maximum(tl.cdiv(end - first, tiles_per_item), 1), 0)
        starts = used + tl.cumsum(splits, 0) - splits
        share = tl.cdiv(end - first, tl.maximum(splits, 1))
        tl.store(split_starts + rows, starts, mask=rows < num_rows)
        for part in range(tl.max(splits, 0)):
            entry = items + (starts + part) * 3
            real = part < splits
            tl.store(entry, rows, mask=real)
            tl.store(entry + 1, tl.minimum(first + part * share, end), mask=real)
            tl.store(entry + 2, tl.minimum(first + (part + 1) * share, end), mask=real)
        used += tl.sum(splits, 0)
    tl.store(split_starts + num_rows, used)
    for at in range(used, max_items, ROWS):
        idle = at + tl.arange(0, ROWS)
        tl.store(items + idle * 3, -1, mask=idle < max_items)
    for at in range(0, num_counters, ROWS):
        counted = at + tl.arange(0, ROWS)
        tl.store(counters + counted, 0, mask=counted < num_counters)
