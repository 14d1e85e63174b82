"""Sampling parameters of every slot on the device: one row per slot, written when a request enters it.

The numbers of one slot are one column of `columns`, so a request needs one small copy; the named tensors are views of
its rows. Parameters that are lists have separate tables, written only for requests that use them.
A request that does not fit into the tables is sampled by the runner's general method, which supports lists of any
length.
Does not know: SamplingParams, which request holds a slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.kernels.launch import cdiv

MAX_BIAS = 512  # logit_bias entries of one slot
MAX_STOPS = 64  # eos and stop ids masked by min_tokens
MAX_WORDS = 64  # bad words of one slot
WORD_LEN = 8  # tokens of one bad word

HAS_BIAS, HAS_ALLOWED, HAS_STOPS, HAS_PENALTIES, HAS_WORDS = (1 << bit for bit in range(5))

INTS = ("seed", "top_k", "edits", "prompt_len", "min_tokens", "num_logprobs", "penalty_window")
FLOATS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")


@dataclass(frozen=True, slots=True)
class SlotTables:
    """Tables of N slots and V tokens."""

    columns: Tensor  # [13, N] int64: the rows below, floats as float64
    seed: Tensor  # [N] int64           mixed, see noise.mix_seeds
    top_k: Tensor  # [N] int64          V if not requested
    edits: Tensor  # [N] int64          HAS_ flags
    prompt_len: Tensor  # [N] int64
    min_tokens: Tensor  # [N] int64
    num_logprobs: Tensor  # [N] int64   -1: none, 0: only the sampled token's
    penalty_window: Tensor  # [N] int64 penalties look at this many of the last tokens, below 2^31
    temperature: Tensor  # [N] float64  0: greedy
    top_p: Tensor  # [N] float64        1 if not requested
    min_p: Tensor  # [N] float64        0 if not requested
    repetition: Tensor  # [N] float64
    presence: Tensor  # [N] float64
    frequency: Tensor  # [N] float64
    bias_ids: Tensor  # [N, MAX_BIAS] int32         -1: unused, here and below
    bias_values: Tensor  # [N, MAX_BIAS] float32
    stop_ids: Tensor  # [N, MAX_STOPS] int32
    words: Tensor  # [N, MAX_WORDS, WORD_LEN] int32 right-aligned: the last column is the forbidden token
    allowed: Tensor  # [N, ceil(V / 32)] int32      bit id % 32 of word id / 32

    @staticmethod
    def empty(num_slots: int, vocab_size: int, device: torch.device) -> SlotTables:
        columns = torch.zeros(len(INTS) + len(FLOATS), num_slots, dtype=torch.int64, device=device)
        unused = torch.full((num_slots, MAX_BIAS + MAX_STOPS), -1, dtype=torch.int32, device=device)
        ints, floats = columns[: len(INTS)], columns[len(INTS) :].view(torch.float64)
        return SlotTables(
            columns=columns,
            **{name: ints[row] for row, name in enumerate(INTS)},
            **{name: floats[row] for row, name in enumerate(FLOATS)},
            bias_ids=unused[:, :MAX_BIAS].contiguous(),
            bias_values=torch.zeros(num_slots, MAX_BIAS, device=device),
            stop_ids=unused[:, MAX_BIAS:].contiguous(),
            words=torch.full((num_slots, MAX_WORDS, WORD_LEN), -1, dtype=torch.int32, device=device),
            allowed=torch.full((num_slots, cdiv(vocab_size, 32)), -1, dtype=torch.int32, device=device),
        )
