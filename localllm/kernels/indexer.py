"""Attention to the keys that an indexer chooses, over the paged cache (DeepSeek-V3.2, arXiv:2512.02556).

    rows = chosen_rows(...)                              once per step: the rows that see more keys than are chosen
    positions = choose_keys(q, weights, index, rows, topk)       in a layer with an indexer
    attend_to_chosen(q, kv, rows, positions, scale, out)         in each layer

The score of a key is sum over heads h of weight[h] * relu(q[h] . k) in fp32. A query attends to the `topk` keys of the
largest scores among those up to its own, and to all of them if they are no more. The index keys are paged like K, in
[1, num_blocks, block_size, D]; attention reads one latent that is key and value. In plain torch, row by row; buffers
are bounded by BUFFER_NUMBERS.
Does not know: where q, weights and index keys come from (models/layers/latent_attention.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from localllm.kernels.layer_cache import LayerKV

BUFFER_NUMBERS = 2**24  # of scores, or of gathered keys, at a time


class ChosenRow(NamedTuple):
    """A request's queries of this step, the last of its context."""

    first: int  # token of the step
    num_queries: int
    context_len: int
    blocks: Tensor  # [ceil(context_len / block_size)] int64

    @property
    def tokens(self) -> slice:
        return slice(self.first, self.first + self.num_queries)


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
