"""One token per row: the argmax, or a draw from softmax(logits / temperature) by the Gumbel trick in two stages.

The draw (Maddison, Tarlow & Minka 2014, arXiv:1411.0030) takes the largest of log(mass) + noise over groups of 64
consecutive ids, then the largest of log(probability) + noise within that group. The product is exactly the softmax, and
noise is needed for V/64 + 64 numbers instead of V.

Kernels: `_gumbel_max_kernel` reads a row once in blocks of `BLOCK` ids and writes each block's largest logit and best
group; `_pick_kernel` takes the best block's group and reads its 64 tokens again. Neither needs the row's maximum
beforehand: comparing logarithms is not affected by a common factor, so each block counts from its own largest logit,
and the second kernel brings all blocks to one level. Greedy rows work the same way with the logit as score. The floor
is memory: V * 4 bytes of a row in fp32, read once; 256 rows of 128,256 are 131 MB.

In a step without drafts, `_pick_kernel` also appends the token to its slot's record (`DrawRecord`).
Rows with top_k, top_p or min_p are read twice: the first pass writes a `LogitSummary` for `nucleus`, the second reads
only the row's groups with a kept token.
The token equals the twin's, unless its two best scores differ by rounding only (see noise.py): sums of exponentials are
float32 here and start at another maximum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from localllm.kernels.accept_drafts import accept_drafts_reference
from localllm.kernels.launch import cdiv, early_launch, next_power_of_2, runs_triton, tl, triton, wait_for_inputs
from localllm.kernels.prepare_step import SlotTokens
from localllm.kernels.sampling import selection
from localllm.kernels.sampling.noise import GROUP_STREAM, gumbel, gumbel_noise, row_key, row_keys_of
from localllm.kernels.sampling.selection import GROUP
from localllm.kernels.sampling.tables import SlotTables
from localllm.kernels.tuned import settings_for

BLOCK = 4096  # ids per program; fixed, so that no result depends on the batch


@dataclass(frozen=True, slots=True)
class LogitSummary:
    """The result of one pass over the logits. G: groups of 64 ids; B: blocks of BLOCK ids."""

    best: Tensor  # [S, B] float32    largest logit of each block; NaN where one is NaN
    scores: Tensor  # [S, B] float32  score of the block's best group, relative to `best`
    groups: Tensor  # [S, B] int32    that group
    heads: Tensor  # [S, G] float32   largest logit of each group      } of rows with top_k, top_p or min_p,
    masses: Tensor  # [S, G] float32  sum of exp((x - head) / temperature) } if the batch has any


@dataclass(frozen=True, slots=True)
class Cutoff:
    """The likeliest tokens of each row, up to a last one: kept is x > value, or x == value and id <= last_id."""

    value: Tensor  # [S] float32  -inf: all
    last_id: Tensor  # [S] int64


class DrawRecord(NamedTuple):
    """The place where draws are recorded if each row has one: behind the known tokens of its slot."""

    tokens: SlotTokens
    counts: Tensor  # [2, S] int64  1 for each row that is not padding, and 0 verified drafts: see accept_drafts


def summarize_logits(
    logits: Tensor, slots: Tensor, lengths: Tensor, tables: SlotTables, *, filters: bool
) -> LogitSummary | None:
    """Make one pass over logits [S, V]. slots [S] int64, -1: padding; lengths [S] int64, the sampled position.

    filters: whether a row of the batch may have top_k, top_p or min_p; such rows do not choose a group yet. Only
    kernels exchange summaries; the twins return and need None.
    """
    if not runs_triton(logits, "sampling"):
        return None
    num_rows, vocab_size = logits.shape
    num_blocks, num_groups = cdiv(vocab_size, BLOCK), cdiv(vocab_size, GROUP)
    # Separate tensors: the divisibility of a view's address would depend on num_rows and recompile the kernels.
    best, scores = (torch.empty(num_rows, num_blocks, device=logits.device) for _ in range(2))
    groups = torch.empty(num_rows, num_blocks, dtype=torch.int32, device=logits.device)
    heads, masses = (torch.empty(num_rows, num_groups if filters else 1, device=logits.device) for _ in range(2))
    summary = LogitSummary(best, scores, groups, heads, masses)
    _gumbel_max(logits, slots, lengths, tables, summary, None, filters)
    return summary


def draw(
    logits: Tensor, slots: Tensor, lengths: Tensor, tables: SlotTables, cutoff: Cutoff | None = None,
    summary: LogitSummary | None = None, out: tuple[Tensor, Tensor] | None = None, record: DrawRecord | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return token ids [S] int64 and the largest logits [S] float32, NaN if a row contains one; in `out` if given.
    Padding rows give 0 and 0.

    cutoff: the last kept token of rows with top_k, top_p or min_p, from `nucleus`; None: the batch has no such rows.
    summary: the summary from which `cutoff` was made. record: where the tokens also go.
    """
    if not runs_triton(logits, "sampling"):
        drawn = draw_reference(logits, slots, lengths, tables, cutoff)
        if record is not None:
            at, place, ids, best = (each[:, None] for each in (slots, lengths, *drawn))
            token_ids, known, valid = record.tokens
            accept_drafts_reference(at, place, token_ids, ids, best, known, valid, record.counts)
        return drawn if out is None else (out[0].copy_(drawn[0]), out[1].copy_(drawn[1]))
    if summary is None:
        summary = summarize_logits(logits, slots, lengths, tables, filters=False)
    assert summary is not None
    if cutoff is not None:
        _gumbel_max(logits, slots, lengths, tables, summary, cutoff, True)
    return _pick(logits, slots, lengths, tables, summary, cutoff, out, record)


def draw_reference(
    logits: Tensor, slots: Tensor, lengths: Tensor, tables: SlotTables, cutoff: Cutoff | None = None
) -> tuple[Tensor, Tensor]:
    logits, at = logits.float(), slots.clamp(min=0)
    heads = selection.group_heads(logits)
    temperature = tables.temperature[at].float().unsqueeze(-1)
    weights = torch.softmax(logits / torch.where(temperature > 0, temperature, 1), -1)
    if cutoff is not None:
        ids, value = torch.arange(logits.shape[-1], device=logits.device), cutoff.value.unsqueeze(-1)
        inside = (logits > value) | ((logits == value) & (ids <= cutoff.last_id.unsqueeze(-1)))
        weights = torch.where(inside, weights, 0)
    drawn = draw_by_weight(weights, row_keys_of(tables.seed[at], lengths).unsqueeze(-1))
    token_ids = torch.where(temperature.squeeze(-1) > 0, drawn, selection.argmax(logits, heads))
    return torch.where(slots < 0, 0, token_ids), torch.where(slots < 0, 0, heads.amax(-1))


# ---- the same draw from weights, in plain torch ----------------------------------------------------------------------


def draw_by_weight(weights: Tensor, keys: Tensor) -> Tensor:
    """Draw [S] ids. weights [S, V], not negative, of any scale; keys [S, 1]."""
    members = selection.grouped(weights, 0.0)
    group = _draw_group(members.sum(-1).double(), keys)
    inside = members.gather(1, group.unsqueeze(-1).expand(-1, -1, GROUP)).squeeze(1)
    ids = group * GROUP + torch.arange(GROUP, device=weights.device)
    place = (inside.double().log() + gumbel(keys, ids)).argmax(-1, keepdim=True)
    return (group * GROUP + place).squeeze(-1).clamp_(max=weights.shape[-1] - 1)


def draw_among(weights: Tensor, ids: Tensor, keys: Tensor, num_groups: int) -> Tensor:
    """Draw among candidates [S, k] with their ids: by the same two stages and noise, so the token is the same."""
    groups = ids // GROUP
    masses = torch.zeros(len(ids), num_groups, dtype=torch.float64, device=ids.device)
    masses.scatter_add_(-1, groups, weights.double())  # float64: the order of the sum does not matter
    group = _draw_group(masses, keys)
    score = torch.where(groups == group, weights, 0).double().log() + gumbel(keys, ids)
    return ids.gather(-1, score.argmax(-1, keepdim=True)).squeeze(-1)


def _draw_group(masses: Tensor, keys: Tensor) -> Tensor:
    """Draw a group of each row: masses [S, G] float64 -> [S, 1]."""
    counters = torch.arange(GROUP_STREAM, GROUP_STREAM + masses.shape[-1], device=masses.device)
    return (masses.log() + gumbel(keys, counters)).argmax(-1, keepdim=True)


# ---- launches --------------------------------------------------------------------------------------------------------


def _gumbel_max(
    logits: Tensor,
    slots: Tensor,
    lengths: Tensor,
    tables: SlotTables,
    summary: LogitSummary,
    cutoff: Cutoff | None,
    filters: bool,
) -> None:
    num_rows, vocab_size = logits.shape
    value, last_id = (summary.best, slots) if cutoff is None else (cutoff.value, cutoff.last_id)
    launch = settings_for("gumbel_max", (vocab_size, filters, cutoff is not None), gumbel_max_launch)
    _gumbel_max_kernel[(num_rows, cdiv(vocab_size, BLOCK))](
        logits, slots, lengths, tables.seed, tables.temperature, tables.top_k, tables.top_p, tables.min_p,
        value, last_id, summary.best, summary.scores, summary.groups, summary.heads, summary.masses,
        logits.stride(0), vocab_size, FILTERS=filters, KEPT=cutoff is not None, BLOCK=BLOCK,
        num_warps=launch.num_warps,
        **early_launch(logits.device),
    )  # fmt: skip


class GumbelMaxLaunch(NamedTuple):
    num_warps: int


def gumbel_max_launch(vocab_size: int, filters: bool, kept: bool) -> GumbelMaxLaunch:
    """Return settings with 32 logits per thread."""
    return GumbelMaxLaunch(4)


def _pick(
    logits: Tensor, slots: Tensor, lengths: Tensor, tables: SlotTables, summary: LogitSummary, cutoff: Cutoff | None,
    out: tuple[Tensor, Tensor] | None, record: DrawRecord | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    num_rows, vocab_size = logits.shape
    if out is None:
        best = torch.empty(num_rows, device=logits.device)
        out = torch.empty(num_rows, dtype=torch.int64, device=logits.device), best
    token_ids, best = out
    value, last_id = (best, slots) if cutoff is None else (cutoff.value, cutoff.last_id)
    num_blocks = cdiv(vocab_size, BLOCK)
    _pick_kernel[(num_rows,)](
        logits, slots, lengths, tables.seed, tables.temperature, value, last_id, summary.best, summary.scores,
        summary.groups, token_ids, best, *_slot_tokens(record), logits.stride(0), vocab_size, num_blocks,
        int(cutoff is not None), RECORDED=record is not None, BLOCKS=next_power_of_2(num_blocks), num_warps=1,
        **early_launch(logits.device),
    )  # fmt: skip
    return token_ids, best


def _slot_tokens(record: DrawRecord | None) -> tuple[Any, ...]:
    if record is None:
        return None, None, None, None, 0
    token_ids, known, valid = record.tokens
    return token_ids, known, valid, record.counts, token_ids.stride(0)


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def is_filtered(slot, top_k_ptr, top_p_ptr, min_p_ptr, temperature_ptr, V):
    """Return whether a slot samples from less than the whole vocabulary."""
    less = (tl.load(top_k_ptr + slot) < V) | (tl.load(top_p_ptr + slot) < 1.0) | (tl.load(min_p_ptr + slot) > 0.0)
    return less & (tl.load(temperature_ptr + slot) > 0.0)


@triton.jit
def _gumbel_max_kernel(
    logits_ptr, slots_ptr, lengths_ptr, seed_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    value_ptr, last_id_ptr, best_ptr, scores_ptr, groups_ptr, heads_ptr, masses_ptr,
    row_stride, V, FILTERS: tl.constexpr, KEPT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One block of one row. First pass: its largest logit, and its best group or (FILTERS) all its groups."""
    wait_for_inputs(PDL)
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_blocks = tl.num_programs(1)
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        return
    less = False
    if FILTERS:
        less = is_filtered(slot, top_k_ptr, top_p_ptr, min_p_ptr, temperature_ptr, V)
    if KEPT:  # noqa: SIM102  one condition for the compiler, the other for the device
        if not less:  # done in the first pass
            return
    temperature = tl.load(temperature_ptr + slot).to(tl.float32)
    scale = tl.where(temperature > 0, 1.0 / tl.where(temperature > 0, temperature, 1.0), 0.0)

    GROUPS: tl.constexpr = BLOCK // 64
    groups = block * GROUPS + tl.arange(0, GROUPS)
    ids = groups[:, None] * 64 + tl.arange(0, 64)[None, :]
    num_groups = (V + 63) // 64
    wanted = ids < V
    if KEPT:
        value, last_id = tl.load(value_ptr + row), tl.load(last_id_ptr + row)
        heads = tl.load(heads_ptr + row * num_groups + groups, mask=groups < num_groups, other=-float("inf"))
        wanted &= (heads >= value)[:, None]
    x = tl.load(logits_ptr + row * row_stride + ids, mask=wanted, other=-float("inf")).to(tl.float32)
    at = row * num_blocks + block
    if KEPT:
        x = tl.where((x > value) | ((x == value) & (ids <= last_id)), x, -float("inf"))
    heads = tl.max(x, 1)
    largest = tl.max(heads, 0)
    score = heads
    if temperature > 0:
        head = tl.where(tl.abs(heads) == float("inf"), 0.0, heads)
        masses = tl.sum(tl.exp2((x - head[:, None]) * (scale * 1.4426950408889634)), 1)  # 0: none is kept
        broken = tl.max((masses != masses).to(tl.int32), 0)  # tl.max ignores NaN, a sum does not
        if FILTERS and not KEPT:  # noqa: SIM102
            if less:
                tl.store(heads_ptr + row * num_groups + groups, heads, mask=groups < num_groups)
                tl.store(masses_ptr + row * num_groups + groups, masses, mask=groups < num_groups)
        key = row_key(tl.load(seed_ptr + slot), tl.load(lengths_ptr + row))
        level = tl.where(tl.abs(largest) == float("inf"), 0.0, largest)
        noise = gumbel_noise(key, groups.to(tl.int64) + 1099511627776)
        some = masses > 0
        score = tl.where(some, (head - level) * scale + tl.log(tl.where(some, masses, 1.0)) + noise, -float("inf"))
    else:
        broken = tl.max(tl.max((x != x).to(tl.int32), 1), 0)
    if not KEPT:
        tl.store(best_ptr + at, tl.where(broken > 0, float("nan"), largest))
    top, place = tl.max(score, 0, return_indices=True)
    tl.store(scores_ptr + at, top)
    tl.store(groups_ptr + at, block * GROUPS + place)


@triton.jit(do_not_specialize=["is_cut"])
def _pick_kernel(
    logits_ptr, slots_ptr, lengths_ptr, seed_ptr, temperature_ptr, value_ptr, last_id_ptr, best_ptr, scores_ptr,
    groups_ptr, token_ids_ptr, out_best_ptr, tokens_ptr, known_ptr, valid_ptr, counts_ptr, tokens_stride, row_stride, V,
    num_blocks, is_cut, RECORDED: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row: the best block's group, then the best token in it, within the cutoff if `is_cut`."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if RECORDED:
        tl.store(counts_ptr + row, (slot >= 0).to(tl.int64))
        tl.store(counts_ptr + tl.num_programs(0) + row, 0)
    if slot < 0:
        tl.store(token_ids_ptr + row, 0)
        tl.store(out_best_ptr + row, 0.0)
        return
    temperature = tl.load(temperature_ptr + slot).to(tl.float32)
    draws = temperature > 0
    scale = 1.0 / tl.where(draws, temperature, 1.0)

    blocks = tl.arange(0, BLOCKS)
    at = row * num_blocks + blocks
    best = tl.load(best_ptr + at, mask=blocks < num_blocks, other=-float("inf"))
    scores = tl.load(scores_ptr + at, mask=blocks < num_blocks, other=-float("inf"))
    broken = tl.max((best != best).to(tl.int32), 0)
    best = tl.where(best != best, -float("inf"), best)
    largest = tl.max(best, 0)
    tl.store(out_best_ptr + row, tl.where(broken > 0, float("nan"), largest))
    level = tl.where(tl.abs(largest) == float("inf"), 0.0, largest)
    if draws:  # each block is relative to its own largest logit
        scores = tl.where(scores > -float("inf"), scores + (best - level) * scale, scores)
    winner = tl.minimum(tl.argmax(scores, 0), num_blocks - 1)  # never out of range, even for an invalid row
    group = tl.load(groups_ptr + row * num_blocks + winner)

    ids = group.to(tl.int64) * 64 + tl.arange(0, 64)
    x = tl.load(logits_ptr + row * row_stride + ids, mask=ids < V, other=-float("inf")).to(tl.float32)
    if is_cut != 0:
        value, last_id = tl.load(value_ptr + row), tl.load(last_id_ptr + row)
        x = tl.where((x > value) | ((x == value) & (ids <= last_id)), x, -float("inf"))
    if draws:
        key = row_key(tl.load(seed_ptr + slot), tl.load(lengths_ptr + row))
        head = tl.max(x, 0)
        x = (x - tl.where(tl.abs(head) == float("inf"), 0.0, head)) * scale + gumbel_noise(key, ids)
    token = tl.minimum(group.to(tl.int64) * 64 + tl.argmax(x, 0), V - 1)
    tl.store(token_ids_ptr + row, token)
    if RECORDED:
        length = tl.load(lengths_ptr + row)
        tl.store(tokens_ptr + slot * tokens_stride + length, token.to(tl.int32))
        tl.store(known_ptr + slot, length + 1)
        tl.store(valid_ptr + slot, 0)
