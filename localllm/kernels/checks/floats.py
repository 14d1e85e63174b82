"""Checks of the kernels of rounded numbers, at a model's shapes and with its own matrices.

The inputs are what breaks kernels: one channel that is a thousand times as large as the others, contexts that end at
and beside the end of a block, and NaN in every slot of the cache that no token uses.
Does not know: layers, the order of operations in a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.kernels.checks.case import Case, CheckedProduct, IndexReads, Judgement, Subject, close_to
from localllm.kernels.gated import gated, gated_reference
from localllm.kernels.indexer import (
    attend_on_device,
    attend_to_chosen,
    choose_on_device,
    chosen_rows,
    queries_on_device,
)
from localllm.kernels.kv_format import UNIT, window_name
from localllm.kernels.layer_cache import LayerKV
from localllm.kernels.paged_attention import (
    AttentionPlan,
    KVReads,
    RawHeads,
    paged_attention,
    plan_attention,
    rotates_heads,
)
from localllm.kernels.paged_attention.device import MATRIX_D
from localllm.kernels.quantize import dequantize_nibbles, quantize_nibbles, quantize_reference, round_to
from localllm.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_reference
from localllm.kernels.rotary_store_kv import plan_rotation, rotary_store_kv

ROWS = (1, 8, 16, 64)  # of a product
FEW_ROWS = (1, 8, 16)  # of one that quantises the inputs of more rows
QUANTISED_ROWS = 64
QUANTISED_SHARE = 0.06  # rounding of inputs to float8_e4m3fn changes a product by 3 %, to int8 by less
OUTLIER = 1e3
MOST_CONTEXT = 4096  # a longer one reads the cache in the same way, and would need more memory than is free
CONTEXTS = (1, 63, 64, 65, 300)
DRAFT_QUERIES = 4
PROMPT = 70
TOKENS = 5
ROTATED_SHARES = {32: 1e-5, 16: 0.01, 8: 0.06, 4: 0.3}
"""Allowed error of rotated and stored numbers by the cache's bits: kernel and twin may round to neighbours."""


def product_cases(subject: Subject) -> Iterator[Case]:
    """Yield the products of the model's matrices with few rows and many."""
    for product in subject.products:
        rows_of = (*FEW_ROWS, QUANTISED_ROWS) if product.quantises_inputs else ROWS
        for rows in rows_of:
            is_quantised = product.quantises_inputs and rows > FEW_ROWS[-1]
            yield _product_case(subject, product, rows, is_quantised)


def _product_case(subject: Subject, product: CheckedProduct, rows: int, is_quantised: bool) -> Case:
    x = subject.random(rows, product.columns)
    if not is_quantised:
        x[:, product.columns // 2] *= OUTLIER
    bias = None if product.bias is None else product.bias[product.rows]

    def right(dtype: torch.dtype) -> Tensor:
        weight = product.dequantized().to(dtype)
        return F.linear(x.to(dtype), weight, None if bias is None else bias.to(dtype))

    twin = None if is_quantised else (lambda: right(subject.dtype))
    judge = close_to(lambda: right(torch.float32), twin, QUANTISED_SHARE if is_quantised else 0.0)
    return Case(f"{product.name} of {rows} rows", lambda: [product.y(x)[:, product.rows]], judge)


def decode_cases(subject: Subject) -> Iterator[Case]:
    """Yield attention of rows of one token, and of rows that verify drafts."""
    for reads in subject.attention:
        yield _attention_case(subject, reads, 1)
        yield _attention_case(subject, reads, DRAFT_QUERIES)


def prefill_cases(subject: Subject) -> Iterator[Case]:
    """Yield attention of prompts and chunks of prompts."""
    for reads in subject.attention:
        yield _attention_case(subject, reads, 0)


def rotating_decode_cases(subject: Subject) -> Iterator[Case]:
    """Yield attention of rows of one token that rotates and stores that token itself, and what it has stored."""
    for reads in subject.attention:
        # Wider heads, and keys and values of 4 bits, are rotated and stored by a kernel of their own.
        if reads.head_dim <= MATRIX_D and reads.least_bits > 4:
            yield from _rotating_decode_cases(subject, reads)


def _rotating_decode_cases(subject: Subject, reads: KVReads) -> Iterator[Case]:
    (num_kv_heads, _, block_size, _), head_dim = reads.cache_shape, reads.head_dim
    contexts = _contexts(subject, 1)
    kv, table = _cache(subject, reads, contexts)
    qkv = subject.random(len(contexts), (reads.num_heads + 2 * num_kv_heads) * head_dim)
    positions = torch.tensor(contexts, device=subject.device) - 1
    blocks = table.long().gather(1, positions[:, None] // block_size)[:, 0]
    slots = blocks * block_size + positions % block_size

    def attend(kv: LayerKV, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output, and the keys and values of the rows' tokens as they are in the cache."""
        plan = _plan(reads, kv, table, contexts, [1] * len(contexts), 1)
        angles = _angles(head_dim, contexts[-1]).to(subject.device)
        heads = RawHeads(qkv, slots, plan_rotation(angles, positions), None, 0.0)
        q = heads if rotates_heads(plan, heads, kv) else rotary_store_kv(qkv, kv, slots, heads.rotation)
        out = paged_attention(
            q, kv.k, kv.v, plan, scale=head_dim**-0.5, k_scale=kv.k_scale, v_scale=kv.v_scale
        )  # fmt: skip
        stored = [side.view(len(side), -1, head_dim)[:, slots] for side in _in_fp32(kv)[:2]]
        return out, torch.cat([side.flatten() for side in stored])

    named = f"{_kind_of_reads(reads)}, rotated"
    right = close_to(lambda: attend(_in_fp32(kv), qkv.float())[0], lambda: attend(kv, qkv)[0], _in_16_bits(reads))
    yield Case(named, lambda: [attend(kv, qkv)[0]], right)
    as_stored = close_to(lambda: attend(kv, qkv)[1], share=ROTATED_SHARES[reads.bits])
    yield Case(f"{named}, as stored", lambda: [attend(kv, qkv)[1]], as_stored)


def _contexts(subject: Subject, least: int) -> list[int]:
    most = min(MOST_CONTEXT, subject.max_model_len)
    return sorted({min(max(context, least), most) for context in (*CONTEXTS, most)})


def _attention_case(subject: Subject, reads: KVReads, queries: int) -> Case:
    """queries: of each row; 0: rows are prompts of different lengths."""
    contexts = _contexts(subject, queries)
    lengths = [queries or min(context, PROMPT) for context in contexts]
    head_dim = reads.head_dim
    kv, table = _cache(subject, reads, contexts)
    q = subject.random(sum(lengths), reads.num_heads, head_dim)

    def attend(kv: LayerKV, q: Tensor) -> Tensor:
        plan = _plan(reads, kv, table, contexts, lengths, queries)
        return paged_attention(
            q, kv.k, kv.v, plan, scale=head_dim**-0.5, k_scale=kv.k_scale, v_scale=kv.v_scale
        )  # fmt: skip

    kind = f"{queries} quer{'y' if queries == 1 else 'ies'} a row" if queries else "prompts"
    return Case(
        f"{kind}, {_kind_of_reads(reads)}", lambda: [attend(kv, q)],
        close_to(lambda: attend(_in_fp32(kv), q.float()), lambda: attend(kv, q), _in_16_bits(reads)),
    )  # fmt: skip


def _plan(
    reads: KVReads, kv: LayerKV, table: Tensor, contexts: list[int], lengths: list[int], queries: int
) -> AttentionPlan:
    device = table.device
    positions = [context - n + i for context, n in zip(contexts, lengths, strict=True) for i in range(n)]
    return plan_attention(
        table, torch.tensor(contexts, dtype=torch.int32, device=device),
        torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device),
        num_decodes=len(contexts) if queries else 0, query_lens=lengths, context_lens_host=contexts,
        num_heads=reads.num_heads, cache_shape=kv.k.shape, cache_dtype=kv.k.dtype, window=reads.window,
        decode_queries=max(1, queries), positions=torch.tensor(positions, device=device) if queries > 1 else None,
    )  # fmt: skip


def _kind_of_reads(reads: KVReads) -> str:
    num_kv_heads, _, block_size, _ = reads.cache_shape
    window = "" if reads.window is None else f", {window_name(reads.window).replace('_', ' ')}"
    shape = f"{reads.num_heads} heads over {num_kv_heads} of {reads.head_dim}"
    return f"{shape}, {_stored_as(reads)} in blocks of {block_size}{window}"


def _stored_as(reads: KVReads) -> str:
    if reads.least_bits > 4:
        return str(reads.cache_dtype).removeprefix("torch.")
    return "int4" if reads.bits == 4 else "k8v4"


def _in_16_bits(reads: KVReads) -> float:
    """Return the error of a cache of 8 or 4 bits: kernels multiply its keys and values as float16."""
    return 2.0**-9 if reads.bits <= 8 else 0.0


def _cache(subject: Subject, reads: KVReads, contexts: list[int]) -> tuple[LayerKV, Tensor]:
    """Return a cache with random keys and values of each context, in the order of the blocks reversed, and the block
    table. What no token uses is NaN, or NaN times the scale."""
    (num_kv_heads, _, size, _), head_dim = reads.cache_shape, reads.head_dim
    counts = [-(-context // size) for context in contexts]
    total = 1 + sum(counts)
    table = torch.zeros(len(contexts), max(counts), dtype=torch.int32)
    used = torch.zeros(total, size, dtype=torch.bool)
    free = list(range(1, total))
    for row, (context, count) in enumerate(zip(contexts, counts, strict=True)):
        blocks = [free.pop() for _ in range(count)]
        table[row, :count] = torch.tensor(blocks, dtype=torch.int32)
        for place, block in enumerate(blocks):
            used[block, : context - place * size] = True
    unused = ~used.to(subject.device)
    sides = [subject.random(num_kv_heads, total, size, head_dim, dtype=torch.float32) for _ in range(2)]
    sides[1] = sides[1].flip(-1)
    scales: list[Tensor | None] = [None, None]
    for side, values in enumerate(sides):
        dtype = reads.cache_dtype if side == 0 else reads.value_dtype or reads.cache_dtype
        if dtype == torch.uint8:
            values, scale = quantize_nibbles(values, 1 if side == 0 else head_dim // UNIT)
            scales[side] = scale.masked_fill(unused[..., None, None], torch.nan)
        elif dtype == torch.int8:
            values, scale = quantize_reference(values, torch.int8)
            scales[side] = scale.squeeze(-1).masked_fill(unused, torch.nan)
        elif dtype.itemsize == 1:
            scales[side] = torch.full((num_kv_heads,), 0.02, device=subject.device)
            values = round_to(values.masked_fill(unused[..., None], torch.nan) / 0.02, dtype)
        else:
            values = values.masked_fill(unused[..., None], torch.nan).to(dtype)
        sides[side] = values.contiguous()
    return LayerKV(sides[0], sides[1], scales[0], scales[1]), table.to(subject.device)


def _in_fp32(kv: LayerKV) -> LayerKV:
    """Return the same keys and values in fp32, without scales."""
    wide = []
    for values, scale in ((kv.k, kv.k_scale), (kv.v, kv.v_scale)):
        if values.dtype == torch.uint8 and scale is not None:
            wide.append(dequantize_nibbles(values, scale))
            continue
        factor = 1.0 if scale is None else scale[:, None, None, None] if scale.ndim == 1 else scale[..., None]
        wide.append(values.float() * factor)
    return LayerKV(wide[0], wide[1])


def chosen_cases(subject: Subject) -> Iterator[Case]:
    """Yield the choice of keys by an indexer, and attention to them, for rows of one token and for prompts."""
    index = subject.indexer
    if index is None or subject.max_model_len <= index.topk:
        return
    least = index.topk - 1
    contexts = sorted({min(context, subject.max_model_len) for context in (1, 65, least, least + 2, 2 * least + 67)})
    for queries in (1, 0):
        lengths = [queries or min(context, TOKENS) for context in contexts]
        yield from _chosen_cases(subject, index, contexts, lengths)


def _chosen_cases(subject: Subject, index: IndexReads, contexts: list[int], lengths: list[int]) -> Iterator[Case]:
    kv, table = _cache(subject, index.reads, contexts)
    kv = LayerKV(kv.k, kv.k, kv.k_scale, kv.k_scale)
    _, total, block_size, width = kv.k.shape
    tokens = sum(lengths)
    keys = subject.random(1, total, block_size, index.head_dim, dtype=torch.float32).to(index.dtype)
    q = subject.random(tokens, index.num_heads, index.head_dim)
    weights = subject.random(tokens, index.num_heads, dtype=torch.float32)
    heads = subject.random(tokens, index.reads.num_heads, width)
    positions = [context - n + i for context, n in zip(contexts, lengths, strict=True) for i in range(n)]
    queries = queries_on_device(
        table, torch.tensor(contexts, dtype=torch.int32, device=subject.device),
        torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=subject.device),
        torch.tensor(positions, device=subject.device),
    )  # fmt: skip
    rows = [row for row in chosen_rows(table, block_size, lengths, contexts, 0) if row is not None]

    def scores() -> Tensor:
        """Return [T, longest context] fp32; -inf: not seen."""
        found = torch.full((tokens, contexts[-1]), float("-inf"), device=subject.device)
        for row in rows:
            own = keys[0].index_select(0, row.blocks).view(-1, index.head_dim)[: row.context_len].float()
            products = torch.einsum("thd,kd->thk", q[row.tokens].to(index.dtype).float(), own).relu_()
            found[row.tokens, : row.context_len] = torch.einsum("thk,th->tk", products, weights[row.tokens])
        for token, position in enumerate(positions):
            found[token, position + 1 :] = float("-inf")
        return found

    def chosen() -> list[Tensor]:
        return [choose_on_device(q, weights, keys, queries, index.topk)]

    def judge(results: Sequence[Tensor]) -> Judgement:
        """Judge the scores of the chosen keys, each once, against the largest."""
        (picked,), known = results, scores()
        marked = torch.zeros(tokens, contexts[-1] + 1, dtype=torch.bool, device=subject.device)
        marked[:, :-1].scatter_(1, picked.clamp(min=0).long(), True)
        marked[:, 0] &= (picked == 0).any(1)
        got = known.masked_fill(~marked[:, :-1], float("-inf")).topk(min(index.topk, contexts[-1])).values
        best = known.topk(min(index.topk, contexts[-1])).values
        if not torch.equal(got.isinf(), best.isinf()):
            return Judgement(float("nan"), 0.0)
        return close_to(lambda: best.nan_to_num(neginf=0.0), share=1e-3)([got.nan_to_num(neginf=0.0)])

    named = f"{'1 query a row' if tokens == len(lengths) else 'prompts'}, {index.topk} keys"
    yield Case(f"choice of {named}", chosen, judge)
    some = torch.full((tokens, index.topk), -1, dtype=torch.int32)
    for token, position in enumerate(positions):
        own = torch.linspace(0, position, min(position + 1, index.topk)).int()
        some[token, : len(own)] = own
    some = some.to(subject.device)
    scale = width**-0.5

    def attended(kv: LayerKV, heads: Tensor) -> Tensor:
        """Return what the twin gives."""
        out = torch.zeros(tokens, index.reads.num_heads * width, dtype=heads.dtype, device=subject.device)
        by_row = [some[row.tokens].long() for row in rows]
        attend_to_chosen(heads, kv, rows, by_row, scale, out)
        return out.view(tokens, -1, width)[:, :, index.rope_size :]

    wide = _in_fp32(kv).k
    yield Case(
        f"attention to {named}, {_kind_of_reads(index.reads)}",
        lambda: [attend_on_device(heads, kv, queries, some, scale, index.rope_size)],
        close_to(lambda: attended(LayerKV(wide, wide), heads.float()), lambda: attended(kv, heads),
                 _in_16_bits(index.reads)),
    )  # fmt: skip


def norm_cases(subject: Subject) -> Iterator[Case]:
    """Yield RMSNorm of a stream with an outlier, alone and behind an addition."""
    if not subject.hidden_size:
        return
    x = subject.random(TOKENS, subject.hidden_size)
    x[:, subject.hidden_size // 3] *= OUTLIER
    weight, residual = 1 + subject.random(subject.hidden_size, dtype=torch.float32) / 8, x.flip(0)

    def right(stream: Tensor) -> Tensor:
        return rms_norm_reference(stream, weight, subject.norm_eps)

    yield Case(
        f"norm of {subject.hidden_size}", lambda: [rms_norm(x, weight, subject.norm_eps)],
        close_to(lambda: right(x.float()), lambda: right(x)),
    )  # fmt: skip
    yield Case(
        f"sum and norm of {subject.hidden_size}",
        lambda: [add_rms_norm(x, residual.clone(), weight, subject.norm_eps)],
        close_to(lambda: right((residual + x).float()), lambda: right(residual + x)),
    )  # fmt: skip


def activation_cases(subject: Subject) -> Iterator[Case]:
    """Yield gated activations as wide as the model's."""
    for width in subject.widths:
        x = subject.random(TOKENS, 2 * width)
        yield Case(
            f"activation of {width}", lambda x=x: [gated(x, "silu")],  # type: ignore[misc]
            close_to(lambda x=x: gated_reference(x.float(), "silu"), lambda x=x: gated_reference(x.clone(), "silu")),  # type: ignore[misc]
        )  # fmt: skip


def rotation_cases(subject: Subject) -> Iterator[Case]:
    """Yield the rotation of q and k with the store of k and v, into each cache of the model."""
    for reads in subject.attention:
        num_kv_heads, head_dim = reads.cache_shape[0], reads.head_dim
        if head_dim > 256:
            continue  # one latent for all heads has another layout; the check of the whole model covers it
        qkv = subject.random(TOKENS, (reads.num_heads + 2 * num_kv_heads) * head_dim)
        yield Case(
            f"rotation of {reads.num_heads} heads of {head_dim}, {_stored_as(reads)}",
            lambda reads=reads, qkv=qkv: [_rotated(subject, reads, qkv)],  # type: ignore[misc]
            close_to(
                lambda reads=reads, qkv=qkv: _rotated(subject, reads, qkv),  # type: ignore[misc]
                share=ROTATED_SHARES[reads.least_bits],
            ),
        )  # fmt: skip


def _rotated(subject: Subject, reads: KVReads, qkv: Tensor) -> Tensor:
    """Return q, the stored k and v, and what was stored where nothing should be, all in fp32."""
    (num_kv_heads, _, size, _), head_dim = reads.cache_shape, reads.head_dim
    kv = _empty_cache(subject, reads)
    table = _angles(head_dim, 64).to(subject.device)
    slots = torch.tensor([size, -1, size + 1, 2 * size, 3], device=subject.device)
    positions = torch.tensor([63, 0, 1, 17, 5], device=subject.device)
    q = rotary_store_kv(qkv, kv, slots, plan_rotation(table, positions))
    parts = [q[slots >= 0].float()]
    for side in _in_fp32(kv)[:2]:
        rows = side.view(num_kv_heads, -1, head_dim)
        parts.append(rows[:, slots[slots >= 0]])
        rows[:, slots[slots >= 0]] = 0
        parts.append(rows.abs().amax()[None])
    return torch.cat([part.flatten() for part in parts])


def _angles(head_dim: int, positions: int) -> Tensor:
    """Return cosines and sines [positions, head_dim] fp32."""
    angles = torch.outer(torch.arange(float(positions)), 1e4 ** (-torch.arange(0, head_dim, 2) / head_dim))
    return torch.cat([angles.cos(), angles.sin()], 1)


def _empty_cache(subject: Subject, reads: KVReads) -> LayerKV:
    """Return a zeroed cache of a few blocks."""
    (num_kv_heads, _, size, _), head_dim = reads.cache_shape, reads.head_dim

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=subject.device)

    def side(dtype: torch.dtype, groups: int) -> tuple[Tensor, Tensor | None]:
        if dtype == torch.uint8:
            codes = zeros(num_kv_heads, 4, size, head_dim // 2, dtype=dtype)
            return codes, zeros(num_kv_heads, 4, size, 2, groups, dtype=torch.float16)
        shape = (num_kv_heads, 4, size) if dtype == torch.int8 else (num_kv_heads,)
        scale = zeros(*shape) + 0.02 if dtype.itemsize == 1 else None
        return zeros(num_kv_heads, 4, size, head_dim, dtype=dtype), scale

    (k, k_scale), (v, v_scale) = (
        side(reads.cache_dtype, 1),
        side(reads.value_dtype or reads.cache_dtype, head_dim // UNIT),
    )
    return LayerKV(k, v, k_scale, v_scale)
