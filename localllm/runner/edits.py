"""Changes to logits by request parameters and grammars, applied in place to the rows that use them.

Order, as in vLLM's current runner: logit_bias, allowed_token_ids, min_tokens, penalties, bad_words. They do not
commute, so the order is part of the interface; docs and tests fix it.
Penalties keep no counts. They read the request's tokens from the runner's buffer, so they stay correct after a
preemption and with two steps in flight; the cost grows with the text and not with the vocabulary.
Does not know: when slots are assigned, randomness.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.runner.batch import Ints
from localllm.runner.upload import to_device


@dataclass(frozen=True, slots=True)
class Bias:
    rows: Tensor  # [n] int64
    token_ids: Tensor  # [n] int64
    values: Tensor  # [n] float32; -inf forbids


@dataclass(frozen=True, slots=True)
class Allowed:
    rows: Tensor  # [a] int64, each row once
    flat_rows: Tensor  # [n] int64, the row of each id
    token_ids: Tensor  # [n] int64


@dataclass(frozen=True, slots=True)
class Penalties:
    rows: Tensor  # [p] int64
    slots: Tensor  # [p] int64
    lengths: Tensor  # [p, 1] int64      prompt and output so far
    begins: Tensor  # [p, 1] int64       first token that counts as seen
    output_begins: Tensor  # [p, 1] int64 first output token that counts
    repetition: Tensor  # [p, 1] float32
    presence: Tensor  # [p, 1] float32
    frequency: Tensor  # [p, 1] float32
    max_length: int  # longest range of seen tokens in the batch
    max_output_len: int


@dataclass(frozen=True, slots=True)
class BadWords:
    """W words over all rows that have some."""

    rows: Tensor  # [W] int64
    slots: Tensor  # [W, 1] int64
    lengths: Tensor  # [W, 1] int64
    output_lens: Tensor  # [W] int64
    prefixes: Tensor  # [W, n] int64      all tokens but the last, right-aligned; -1: any token
    prefix_lens: Tensor  # [W] int64
    last: Tensor  # [W] int64


@dataclass(frozen=True, slots=True)
class Edits:
    """Edits of one batch; None for features that no row uses."""

    bias: Bias | None = None
    allowed: Allowed | None = None
    min_tokens: Bias | None = None
    penalties: Penalties | None = None
    bad_words: BadWords | None = None


def apply_edits(logits: Tensor, edits: Edits, token_ids: Tensor) -> None:
    """Apply the edits in place. logits [S, V] float32; token_ids [slots, max_model_len]: known tokens of every slot."""
    if edits.bias is not None:
        _add(logits, edits.bias)
    if edits.allowed is not None:
        kept = logits[edits.allowed.flat_rows, edits.allowed.token_ids]
        logits.index_fill_(0, edits.allowed.rows, -torch.inf)
        logits.index_put_((edits.allowed.flat_rows, edits.allowed.token_ids), kept)
    if edits.min_tokens is not None:
        _add(logits, edits.min_tokens)
    if edits.penalties is not None:
        _penalise_repetition(logits, edits.penalties, token_ids)
        _penalise_output(logits, edits.penalties, token_ids)
    if edits.bad_words is not None:
        _forbid_completions(logits, edits.bad_words, token_ids)


def _add(logits: Tensor, bias: Bias) -> None:
    logits.index_put_((bias.rows, bias.token_ids), bias.values, accumulate=True)


def _penalise_repetition(logits: Tensor, asked: Penalties, token_ids: Tensor) -> None:
    """Divide positive logits of seen tokens, and multiply negative ones. Every occurrence writes the same value."""
    places = asked.begins + torch.arange(asked.max_length, device=logits.device)
    places = torch.where(places < asked.lengths, places, asked.begins)  # past the end: repeat the first one
    seen = token_ids[asked.slots.unsqueeze(-1), places].long()
    values = logits[asked.rows.unsqueeze(-1), seen]
    values = torch.where(values > 0, values / asked.repetition, values * asked.repetition)
    logits.index_put_((asked.rows.unsqueeze(-1), seen), values)


def _penalise_output(logits: Tensor, asked: Penalties, token_ids: Tensor) -> None:
    """Subtract the frequency penalty for every occurrence in the output, and the presence penalty once per token."""
    if asked.max_output_len == 0:
        return
    vocab_size = logits.shape[-1]
    places = asked.output_begins + torch.arange(asked.max_output_len, device=logits.device)
    inside = places < asked.lengths
    ids = token_ids[asked.slots.unsqueeze(-1), torch.where(inside, places, 0)].long()
    ordered = torch.where(inside, ids, vocab_size).sort(-1).values
    is_first = torch.ones_like(ordered, dtype=torch.bool)
    is_first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    amounts = torch.where(ordered < vocab_size, asked.frequency + asked.presence * is_first, 0)
    index = (asked.rows.unsqueeze(-1), ordered.clamp_(max=vocab_size - 1))
    logits.index_put_(index, -amounts, accumulate=True)


def _forbid_completions(logits: Tensor, words: BadWords, token_ids: Tensor) -> None:
    """Set a word's last token to -inf if the output so far ends in the rest of the word."""
    width = words.prefixes.shape[-1]
    places = words.lengths + torch.arange(-width, 0, device=logits.device)
    recent = token_ids[words.slots, places.clamp_(min=0)]
    matches = ((recent == words.prefixes) | (words.prefixes < 0)).all(-1) & (words.output_lens >= words.prefix_lens)
    # added, not written: another word of the same request may end in the same token and not match
    values = torch.zeros(len(matches), device=logits.device).masked_fill_(matches, -torch.inf)
    logits.index_put_((words.rows, words.last), values, accumulate=True)


class RowMasks(NamedTuple):
    """Grammar masks: bits on the host."""

    rows: Ints  # [M] int64 sampling rows of a batch
    bits: Ints  # [M, ceil(V / 32)] int32: bit id % 32 of word id // 32 is 1 if the token is allowed

    def part(self, rows: slice) -> RowMasks | None:
        """Return the masks of consecutive sampling rows, counted from the first one; None if there is none."""
        inside = (self.rows >= rows.start) & (self.rows < rows.stop)
        return RowMasks(self.rows[inside] - rows.start, self.bits[inside]) if inside.any() else None

    def for_rows(self, places: Ints, num_rows: int) -> Ints:
        """Return [num_rows, ceil(V / 32)] int32 for the rows as laid out; sampling row i is at places[i].
        Rows without a mask allow every token."""
        laid_out = np.full((num_rows, self.bits.shape[1]), -1, np.int32)
        laid_out[places[self.rows]] = self.bits
        return laid_out


def apply_masks(logits: Tensor, masks: RowMasks) -> None:
    """Set forbidden tokens to -inf. logits [S, V], changed in place.

    The mask is added: on a CPU, filling by a mask takes ten times as long.
    """
    device = logits.device
    octets = to_device(masks.bits.view(np.uint8), device)
    added = F.embedding(octets.int(), _added_by_octet(device)).flatten(1)[:, : logits.shape[1]]
    logits.index_add_(0, to_device(masks.rows, device), added)


@cache
def _added_by_octet(device: torch.device) -> Tensor:
    """Return [256, 8] fp32: 0 for set bits, -inf for others, lowest bit first."""
    octets, places = torch.arange(256, device=device), torch.arange(8, device=device)
    return torch.where((octets[:, None] >> places) & 1 == 1, 0.0, -torch.inf)
