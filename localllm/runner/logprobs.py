"""Log-probabilities of the model itself: log-softmax of the raw logits, before anything a request asked for.

The token's rank is counted, not sorted for; the likeliest tokens come from `selection.top`.
Does not know: which rows of a plan asked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.engine.step import TokenLogprobs
from localllm.kernels.sampling import selection
from localllm.runner.upload import to_host


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """R positions, the k likeliest tokens of each behind the token itself."""

    token_ids: Tensor  # [R, 1 + k] int64
    logprobs: Tensor  # [R, 1 + k] float32
    ranks: Tensor  # [R] int64

    def to_host(self) -> LogprobTensors:
        """Start the copy to the host; it has arrived when the device's stream has come this far."""
        return LogprobTensors(to_host(self.token_ids), to_host(self.logprobs), to_host(self.ranks))


def token_logprobs(logits: Tensor, token_ids: Tensor, k: int) -> LogprobTensors:
    """logits [R, V] float32 raw; token_ids [R] int64 the tokens that stand there; k may be 0."""
    ids, heads = token_ids.unsqueeze(-1), selection.group_heads(logits)
    values = logits.gather(-1, ids)
    sums, ranks = _sums_and_ranks(logits, heads.amax(-1, keepdim=True), values)
    if k:
        top_values, top_ids = selection.top(logits, heads, min(k, logits.shape[-1]))
        values, ids = torch.cat((values, top_values), -1), torch.cat((ids, top_ids), -1)
    return LogprobTensors(ids, values - sums, ranks)


def _sums_and_ranks(logits: Tensor, largest: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """log of the sum of exponentials [R, 1]; one more than the number of tokens with a larger logit [R]."""
    sums, ranks = torch.empty_like(own), torch.empty(len(own), dtype=torch.int64, device=own.device)
    for rows in selection.row_slices(logits):
        part = logits[rows]
        scratch = (part - largest[rows]).exp_()
        sums[rows] = largest[rows] + scratch.sum(-1, keepdim=True).log_()
        # counted as float, exact up to 2**24 tokens: summing booleans is five times slower
        ranks[rows] = 1 + torch.gt(part, own[rows], out=scratch).sum(-1).long()
    return sums, ranks


def as_results(tensors: LogprobTensors, counts: list[int]) -> list[TokenLogprobs]:
    """One `TokenLogprobs` per position; row i shows its own token and the first counts[i] others."""
    ids, values, ranks = tensors.token_ids.tolist(), tensors.logprobs.tolist(), tensors.ranks.tolist()
    return [TokenLogprobs(tuple(ids[i][: 1 + k]), tuple(values[i][: 1 + k]), ranks[i]) for i, k in enumerate(counts)]
