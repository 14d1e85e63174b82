"""In-place changes of logits by slot parameters, before temperature and before the draw.

The order is fixed by docs and tests: logit_bias, allowed_token_ids, min_tokens, penalties, bad_words. A grammar's mask
may come at any point, because -inf stays -inf. For the same reason the kernel writes every -inf first.

Kernel: one program per block of ids of each row; a row without edits returns at once. The entries of a slot's lists are
applied by the program whose block contains the id; masks and penalties are applied to a block as a whole.
Penalties keep no counts. A table of counts per slot and token would be 131 MB at 256 slots and 128,256 tokens,
allocated for all slots although few use it. It would also duplicate the tokens: it would have to be undone when a step
is dropped, and rebuilt when a request resumes. Instead each program reads the slot's tokens, which are on the device
anyway, and counts its own ids in shared memory (a histogram), 1,024 ids at a time. That reads 4 bytes per token for
every 1,024 ids (4 MB at 8,192 tokens) from L2 and L1; the cost grows with the text and not with the number of slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from localllm.kernels.launch import cdiv, early_launch, runs_triton, tl, triton, wait_for_inputs
from localllm.kernels.sampling.tables import (
    HAS_ALLOWED,
    HAS_BIAS,
    HAS_PENALTIES,
    HAS_STOPS,
    HAS_WORDS,
    MAX_BIAS,
    MAX_STOPS,
    MAX_WORDS,
    WORD_LEN,
    SlotTables,
)

BLOCK = 4096  # ids per program
PART = 1024  # ids per histogram: Triton 3.6's keeps PART / 32 counters in registers of each thread
CHUNK = 1024  # tokens counted at a time


def edit_logits(
    logits: Tensor, slots: Tensor, lengths: Tensor, tables: SlotTables, token_ids: Tensor, bitmask: Tensor | None = None
) -> None:
    """Apply all edits to logits [S, V] in place. slots [S] int64, -1: padding;
    lengths [S] int64, known tokens of each slot.

    token_ids [N, max_len] int32: known tokens of every slot. bitmask [S, ceil(V / 32)] int32, if a grammar applies: bit
    id % 32 of word id / 32 is set if the id is allowed; a row of -1 allows all.
    """
    if not runs_triton(logits, "sampling"):
        return edit_logits_reference(logits, slots, lengths, tables, token_ids, bitmask)
    num_rows, vocab_size = logits.shape
    _edit_kernel[(num_rows, cdiv(vocab_size, BLOCK))](
        logits, slots, lengths, tables.edits, tables.prompt_len, tables.min_tokens, tables.penalty_window,
        tables.repetition, tables.presence, tables.frequency, tables.bias_ids, tables.bias_values, tables.stop_ids,
        tables.words, tables.allowed, token_ids, logits if bitmask is None else bitmask, logits.stride(0),
        token_ids.stride(0), vocab_size, tables.allowed.shape[1], HAS_MASK=bitmask is not None, BLOCK=BLOCK,
        PART=PART, CHUNK=CHUNK, MAX_BIAS=MAX_BIAS, MAX_STOPS=MAX_STOPS, MAX_WORDS=MAX_WORDS, WORD_LEN=WORD_LEN,
        BIAS=HAS_BIAS, ALLOWED=HAS_ALLOWED, STOPS=HAS_STOPS, PENALTIES=HAS_PENALTIES, WORDS=HAS_WORDS, num_warps=8,
        **early_launch(logits.device),
    )  # fmt: skip
    return None


def edit_logits_reference(
    logits: Tensor, slots: Tensor, lengths: Tensor, tables: SlotTables, token_ids: Tensor, bitmask: Tensor | None = None
) -> None:
    for row, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
        if slot < 0:
            continue
        x = logits[row].float()
        _edit_row(x, slot, token_ids[slot, :length].long(), tables)
        if bitmask is not None:
            x[~_bits(bitmask[row], len(x))] = -torch.inf
        logits[row] = x


def _edit_row(x: Tensor, slot: int, tokens: Tensor, tables: SlotTables) -> None:
    flags, output = int(tables.edits[slot]), tokens[int(tables.prompt_len[slot]) :]
    if flags & HAS_BIAS:
        used = tables.bias_ids[slot] >= 0
        x[tables.bias_ids[slot, used].long()] += tables.bias_values[slot, used]
    if flags & HAS_ALLOWED:
        x[~_bits(tables.allowed[slot], len(x))] = -torch.inf
    if flags & HAS_STOPS and len(output) < int(tables.min_tokens[slot]):
        x[tables.stop_ids[slot, tables.stop_ids[slot] >= 0].long()] = -torch.inf
    if flags & HAS_PENALTIES:
        repetition, presence, frequency = (
            float(row[slot]) for row in (tables.repetition, tables.presence, tables.frequency)
        )
        begin = max(0, len(tokens) - int(tables.penalty_window[slot]))
        output_begin = max(begin, int(tables.prompt_len[slot]))
        seen = torch.bincount(tokens[begin:], minlength=len(x)) > 0
        count = torch.bincount(tokens[output_begin:], minlength=len(x))
        x.copy_(torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x))
        x.sub_(frequency * count + presence * (count > 0))
    if flags & HAS_WORDS:
        for word in tables.words[slot]:
            before, last = word[:-1][word[:-1] >= 0], int(word[-1])
            if (
                last >= 0
                and len(before) <= len(output)
                and torch.equal(output[len(output) - len(before) :].int(), before)
            ):
                x[last] = -torch.inf


def _bits(words: Tensor, count: int) -> Tensor:
    """Return [count] bool from int32 words."""
    return ((words.unsqueeze(-1) >> torch.arange(32, device=words.device)) & 1).flatten()[:count].bool()


@triton.jit
def _count_tokens(tokens_ptr, begin, end, first_id, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Count how often each id of the block occurs in tokens[begin:end]."""
    count = tl.zeros([BLOCK], tl.int32)
    for start in range(begin, end, CHUNK):
        places = start + tl.arange(0, CHUNK)
        ids = tl.load(tokens_ptr + places, mask=places < end, other=-1) - first_id
        inside = (ids >= 0) & (ids < BLOCK) & (places < end)
        if tl.max(inside.to(tl.int32), 0) > 0:
            count += tl.histogram(tl.where(inside, ids, 0), BLOCK, mask=inside)
    return count


@triton.jit
def _forbid(row_ptr, ids, first_id, V, chosen, BLOCK: tl.constexpr):
    """Set the chosen ids of this block to -inf. Added, not written, so that NaN stays NaN."""
    here = chosen & (ids >= first_id) & (ids < first_id + BLOCK) & (ids < V)
    x = tl.load(row_ptr + ids, mask=here, other=0.0)
    tl.store(row_ptr + ids, x - float("inf"), mask=here)


@triton.jit
def _edit_kernel(
    logits_ptr, slots_ptr, lengths_ptr, edits_ptr, prompt_len_ptr, min_tokens_ptr, penalty_window_ptr, repetition_ptr,
    presence_ptr, frequency_ptr, bias_ids_ptr, bias_values_ptr, stop_ids_ptr, words_ptr, allowed_ptr, token_ids_ptr,
    bitmask_ptr, row_stride, token_stride, V, mask_words, HAS_MASK: tl.constexpr, BLOCK: tl.constexpr,
    PART: tl.constexpr, CHUNK: tl.constexpr, MAX_BIAS: tl.constexpr, MAX_STOPS: tl.constexpr, MAX_WORDS: tl.constexpr,
    WORD_LEN: tl.constexpr, BIAS: tl.constexpr, ALLOWED: tl.constexpr, STOPS: tl.constexpr, PENALTIES: tl.constexpr,
    WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One block of ids of one row."""
    wait_for_inputs(PDL)
    row, first_id = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        return
    flags = tl.load(edits_ptr + slot).to(tl.int32)
    if HAS_MASK:
        words = first_id // 32 + tl.arange(0, BLOCK // 32)
        words = tl.load(bitmask_ptr + row * mask_words + words, mask=words < mask_words, other=-1)
        masked = tl.min((words == -1).to(tl.int32), 0) == 0
        if (flags == 0) & (not masked):
            return
    else:
        if flags == 0:
            return
    row_ptr = logits_ptr + row * row_stride
    tokens_ptr = token_ids_ptr + slot * token_stride
    length, prompt_len = tl.load(lengths_ptr + row).to(tl.int32), tl.load(prompt_len_ptr + slot).to(tl.int32)

    if flags & BIAS:
        places = tl.arange(0, MAX_BIAS)
        bias_ids = tl.load(bias_ids_ptr + slot * MAX_BIAS + places)  # -1: unused; each id occurs once
        here = (bias_ids >= first_id) & (bias_ids < first_id + BLOCK) & (bias_ids < V)
        x = tl.load(row_ptr + bias_ids, mask=here, other=0.0)
        bias = tl.load(bias_values_ptr + slot * MAX_BIAS + places, mask=here, other=0.0)
        tl.store(row_ptr + bias_ids, x.to(tl.float32) + bias, mask=here)
        tl.debug_barrier()
    if flags & STOPS:
        stop_ids = tl.load(stop_ids_ptr + slot * MAX_STOPS + tl.arange(0, MAX_STOPS))
        stop_ids = tl.where(length - prompt_len < tl.load(min_tokens_ptr + slot), stop_ids, -1)
        _forbid(row_ptr, stop_ids, first_id, V, stop_ids >= 0, BLOCK)
    if flags & WORDS:
        word, place = tl.arange(0, MAX_WORDS), tl.arange(0, WORD_LEN)
        at = (slot * MAX_WORDS + word)[:, None] * WORD_LEN + place[None, :]
        expected = tl.load(words_ptr + at, mask=place[None, :] < WORD_LEN - 1, other=-1)
        last = tl.load(words_ptr + (slot * MAX_WORDS + word) * WORD_LEN + WORD_LEN - 1)
        recent_at = length - (WORD_LEN - 1) + place
        recent = tl.load(tokens_ptr + recent_at, mask=(recent_at >= prompt_len) & (recent_at < length), other=-2)
        differ = (expected >= 0) & (expected != recent[None, :])  # -2 before the start of the output
        _forbid(row_ptr, last, first_id, V, (last >= 0) & (tl.max(differ.to(tl.int32), 1) == 0), BLOCK)
    tl.debug_barrier()

    dense = (flags & (ALLOWED | PENALTIES)) != 0
    if HAS_MASK:
        dense |= masked
    if dense:
        for part in range(0, BLOCK, PART):
            first_of_part = first_id + part
            ids = first_of_part + tl.arange(0, PART)
            x = tl.load(row_ptr + ids, mask=ids < V, other=0.0).to(tl.float32)
            if flags & ALLOWED:
                bits = tl.load(allowed_ptr + slot * mask_words + ids // 32, mask=ids < V, other=0)
                x = tl.where((bits >> (ids % 32)) & 1 != 0, x, -float("inf"))
            if HAS_MASK:
                bits = tl.load(bitmask_ptr + row * mask_words + ids // 32, mask=ids < V, other=0)
                x = tl.where((bits >> (ids % 32)) & 1 != 0, x, -float("inf"))
            if flags & PENALTIES:
                repetition = tl.load(repetition_ptr + slot).to(tl.float32)
                begin = tl.maximum(length - tl.load(penalty_window_ptr + slot).to(tl.int32), 0)
                output_begin = tl.maximum(begin, prompt_len)
                count = _count_tokens(tokens_ptr, output_begin, length, first_of_part, PART, CHUNK)
                if repetition != 1.0:
                    seen = count + _count_tokens(tokens_ptr, begin, prompt_len, first_of_part, PART, CHUNK)
                    x = tl.where(seen > 0, tl.where(x > 0, x / repetition, x * repetition), x)
                presence, frequency = tl.load(presence_ptr + slot), tl.load(frequency_ptr + slot)
                x -= frequency.to(tl.float32) * count.to(tl.float32)
                x -= tl.where(count > 0, presence.to(tl.float32), 0.0)
            tl.store(row_ptr + ids, x, mask=ids < V)
