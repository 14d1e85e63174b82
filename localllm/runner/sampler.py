"""Turns logits into one token per row. Rows pay only for the features that they use.

The order is part of the interface (the docs quote it):
    0. a grammar's mask
    1. logit_bias   2. allowed_token_ids   3. min_tokens (eos and stop_token_ids are forbidden)
    4. penalties: repetition over prompt and output, then frequency and presence over the output alone
    5. bad_words    6. temperature   7. min_p   8. top_k   9. top_p, each of the last three renormalised
    10. draw
Rows that use a sampler that only llama.cpp has do its order instead of steps 6 to 9 (sampler_chain.py).
At temperature 0, steps 6 to 10 are an argmax: nothing is divided, and the lowest id wins a tie. Ties go to the lower id
everywhere: "likelier" means larger value, then lower id, so top_k keeps exactly k tokens and top_p the shortest prefix
that reaches its mass.

The draw is the Gumbel trick in two stages (Maddison, Tarlow & Minka 2014, arXiv:1411.0030): the largest of log(mass) +
noise over groups of 64 consecutive token ids, then the largest of log(probability) + noise within that group. The
product is exactly the softmax, and noise is needed for V/64 + 64 numbers instead of V. The noise is a function of
(seed, position, group or token id), see kernels/sampling/noise.py.
Does not know: slots, requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.engine.params import MAX_LOGPROBS
from localllm.kernels.sampling import logprobs as on_device
from localllm.kernels.sampling import selection
from localllm.kernels.sampling.draw import DrawRecord, draw, draw_among, draw_by_weight, summarize_logits
from localllm.kernels.sampling.edit import edit_logits
from localllm.kernels.sampling.nucleus import keep_nucleus, keep_sorted, nucleus
from localllm.kernels.sampling.tables import SlotTables
from localllm.models.layers.group import Group
from localllm.runner.edits import RowMasks, apply_edits, apply_masks
from localllm.runner.logprobs import LogprobTensors, token_logprobs
from localllm.runner.sampler_chain import ChainRow, apply_chains, observe
from localllm.runner.sampling import GREEDY, PLAIN, TOP_K, KindRows, SamplingBatch, SamplingFeatures

NOT_A_NUMBER = -(2**63)  # the id that is sent for a draw from NaN or infinity
Draws = tuple[Tensor, Tensor]  # ids int64, and the largest logit of each draw fp32
FIRST_TRY = 128  # candidates among which a nucleus is searched before the whole row


@dataclass(frozen=True, slots=True)
class Sampled:
    token_ids: Tensor  # [S] int64
    best: Tensor  # [S] float32 largest processed logit: NaN, inf or -inf if unusable
    logprobs: LogprobTensors | None  # for the batch's logprob_rows


class IdExchange:
    """Gives the ids that a tensor-parallel model's first shard has drawn to the others. The id of a draw that is not
    usable is sent as a negative number, since a row with drafts ends before such a draw."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group, self._device = group, device
        self.sends = group.index == 0

    def send(self, token_ids: Tensor, best: Tensor) -> None:
        """Send the ids [N] int64 of all draws of a step. best: [N] fp32, see `Sampled`."""
        nothing_left = torch.where(best == -torch.inf, ~token_ids, NOT_A_NUMBER)
        self._group.broadcast_(torch.where(best.isfinite(), token_ids, nothing_left))

    def receive(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the ids [count] of all draws of a step, 0 for one whose logits are not numbers, and in place of their
        largest logits 0, -inf, or NaN where they are not numbers."""
        sent = self._group.broadcast_(torch.empty(count, dtype=torch.int64, device=self._device))
        best = torch.where(sent == NOT_A_NUMBER, torch.nan, torch.where(sent < 0, -torch.inf, 0.0))
        return torch.where(sent == NOT_A_NUMBER, 0, torch.where(sent < 0, ~sent, sent)), best


def draw_on_first(exchange: IdExchange | None, count: int, draw: Callable[[], Draws]) -> Draws:
    """Return what the first shard draws, `count` ids, and the others receive. exchange: None if there is one shard."""
    if exchange is not None and not exchange.sends:
        return exchange.receive(count)
    token_ids, best = draw()
    if exchange is not None:
        exchange.send(token_ids, best)
    return token_ids, best


def sample(logits: Tensor, batch: SamplingBatch, token_ids: Tensor, masks: RowMasks | None = None) -> Sampled:
    """Sample one token per row. logits [S, V] float32, may be overwritten;
    token_ids [slots, max_model_len]: known tokens."""
    raw = None
    if batch.logprob_rows is not None:
        unchanged = len(batch.logprob_counts) == batch.size and not (batch.edits or masks or batch.chains)
        raw = logits if unchanged else logits.index_select(0, batch.logprob_rows)
    if masks is not None:
        apply_masks(logits, masks)
    if batch.edits is not None:
        apply_edits(logits, batch.edits, token_ids)
    apply_chains(logits, batch.chains, token_ids)
    heads = selection.group_heads(logits)
    chosen = _choose(logits, heads, batch)
    observe(logits, batch.chains, chosen)
    return Sampled(chosen, heads.amax(-1), None if raw is None else _logprobs(raw, chosen, batch))


def sample_on_device(
    logits: Tensor, slots: Tensor, lengths: Tensor, tables: SlotTables, token_ids: Tensor, features: SamplingFeatures,
    bitmask: Tensor | None = None, out: tuple[Tensor, Tensor] | None = None, record: DrawRecord | None = None,
    chains: Sequence[ChainRow] = (),
) -> Sampled:  # fmt: skip
    """Sample one token per row with parameters from tables on the device.
    Can be captured in a CUDA graph, one per `features`.

    logits [S, V], may be overwritten; slots [S] int64, -1: padding, which gives token 0; lengths [S] int64, known
    tokens of each slot; tables: the slots' parameters; token_ids [slots, max_model_len]; bitmask [S, ceil(V / 32)]
    int32, see `edit_logits`. out: where the ids [S] int64 and the best logits [S] float32 go. record: where the ids are
    recorded, of rows with one draw each. features: what rows may use; unused ones cost time and change nothing.
    Logprobs have a row for each of the S and room for the maximum number; rows that did not ask for any have
    meaningless values. chains: rows with further samplers, launched one by one.
    """
    edited = features.edits or bitmask is not None
    raw = logits.clone() if features.logprobs and (edited or chains) else logits
    if edited:
        edit_logits(logits, slots, lengths, tables, token_ids, bitmask)
    apply_chains(logits, chains, token_ids, lengths)
    summary = summarize_logits(logits, slots, lengths, tables, filters=features.filters)
    cutoff = nucleus(logits, slots, tables, summary) if features.filters else None
    chosen, best = draw(logits, slots, lengths, tables, cutoff, summary, out, record)
    observe(logits, chains, chosen, lengths)
    if not features.logprobs:
        return Sampled(chosen, best, None)
    return Sampled(chosen, best, LogprobTensors(*on_device.token_logprobs(raw, chosen, MAX_LOGPROBS, slots, tables)))


def _logprobs(raw: Tensor, chosen: Tensor, batch: SamplingBatch) -> LogprobTensors:
    assert batch.logprob_rows is not None
    return token_logprobs(raw, chosen[batch.logprob_rows], [k for _, k in batch.logprob_counts])


def _choose(logits: Tensor, heads: Tensor, batch: SamplingBatch) -> Tensor:
    if not batch.kinds:
        return selection.argmax(logits, heads)
    if batch.kinds[0].index is None:
        return _choose_kind(logits, heads, batch.kinds[0])
    chosen = torch.empty(batch.size, dtype=torch.int64, device=logits.device)
    for rows in batch.kinds:
        assert rows.index is not None
        chosen[rows.index] = _choose_kind(logits[rows.index], heads[rows.index], rows)
    return chosen


def _choose_kind(logits: Tensor, heads: Tensor, rows: KindRows) -> Tensor:
    if rows.kind == GREEDY:
        return selection.argmax(logits, heads)
    if rows.kind == TOP_K:
        return _draw_top_k(logits, heads, rows)
    parts = selection.row_slices(logits)
    return torch.cat([_draw_whole(logits[part], heads[part], rows.part(part)) for part in parts])


# ---- candidates first: 1 <= top_k <= MAX_CANDIDATES ------------------------------------------------------------------


def _draw_top_k(logits: Tensor, heads: Tensor, rows: KindRows) -> Tensor:
    values, ids = selection.top(logits, heads, rows.max_top_k)
    weights = ((values - values[:, :1]) / rows.temperature).exp()
    places = torch.arange(rows.max_top_k, device=logits.device)
    weights = torch.where((places < rows.top_k) & (weights >= rows.min_p), weights, 0)
    return draw_among(keep_sorted(weights, rows.top_p), ids, rows.keys, heads.shape[-1])


# ---- whole rows ------------------------------------------------------------------------------------------------------


def _draw_whole(logits: Tensor, heads: Tensor, rows: KindRows) -> Tensor:
    probabilities = torch.softmax(logits / rows.temperature, -1)
    if rows.any_min_p:
        floor = rows.min_p * probabilities.amax(-1, keepdim=True)
        probabilities = torch.where(probabilities >= floor, probabilities, 0)
    if rows.kind == PLAIN:
        return draw_by_weight(probabilities, rows.keys)
    if logits.is_cuda:  # checking which rows need more would make the host wait
        return draw_by_weight(keep_nucleus(logits, probabilities, rows.top_k, rows.top_p), rows.keys)
    return _draw_nucleus_on_cpu(logits, heads, probabilities, rows)


def _draw_nucleus_on_cpu(logits: Tensor, heads: Tensor, probabilities: Tensor, rows: KindRows) -> Tensor:
    """Draw from a nucleus. Most nuclei are small;
    rows whose nucleus exceeds the first candidates take the slower path."""
    _, ids = selection.top(logits, heads, min(FIRST_TRY, logits.shape[-1]))
    first = probabilities.gather(-1, ids)
    total = probabilities.sum(-1, dtype=torch.float64, keepdim=True)
    reached = first.double().sum(-1, keepdim=True) >= rows.top_p * total
    summary = (reached & (rows.top_k >= logits.shape[-1]) & (rows.top_p < 1)).squeeze(-1)
    chosen = draw_among(keep_sorted(first, rows.top_p, total), ids, rows.keys, heads.shape[-1])
    for row in (~summary).nonzero().flatten().tolist():
        one = slice(row, row + 1)
        cutoff = keep_nucleus(logits[one], probabilities[one], rows.top_k[one], rows.top_p[one])
        chosen[one] = draw_by_weight(cutoff, rows.keys[one])
    return chosen
