"""Log-probabilities of the model's raw logits, before any request parameter is applied, and their copy to the host.

Does not know: which rows of a plan asked.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.engine.params import MAX_LOGPROBS
from localllm.engine.step import TokenLogprobs
from localllm.kernels.sampling import logprobs
from localllm.runner.upload import to_host


class LongRow(NamedTuple):
    """A position with more than `MAX_LOGPROBS` logprobs, up to the whole vocabulary."""

    token_ids: Tensor  # [1 + k] int32
    logprobs: Tensor  # [1 + k] float32


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Logprobs of R positions: each token itself, then the k likeliest ones."""

    token_ids: Tensor  # [R, 1 + k] int64
    logprobs: Tensor  # [R, 1 + k] float32
    ranks: Tensor  # [R] int64
    long: Mapping[int, LongRow] = field(default_factory=dict)  # rows with more logprobs, which replace their row above

    def to_host(self) -> LogprobTensors:
        """Start the copy to the host; it is complete when the device's stream has reached this point."""
        long = {row: LongRow(*map(to_host, each)) for row, each in self.long.items()}
        return LogprobTensors(to_host(self.token_ids), to_host(self.logprobs), to_host(self.ranks), long)


def joined(parts: Sequence[LogprobTensors]) -> LogprobTensors:
    """Return the positions of all parts, one after the other. A row is as wide as the widest; what it lacks is 0."""
    width = max(part.token_ids.shape[1] for part in parts)
    firsts = accumulate((len(part.ranks) for part in parts), initial=0)
    long = {first + row: each for first, part in zip(firsts, parts, strict=False) for row, each in part.long.items()}
    ids, logprobs = (
        torch.cat([F.pad(each, (0, width - each.shape[1])) for each in column])
        for column in zip(*((part.token_ids, part.logprobs) for part in parts), strict=True)
    )
    return LogprobTensors(ids, logprobs, torch.cat([part.ranks for part in parts]), long)


def token_logprobs(logits: Tensor, token_ids: Tensor, counts: Sequence[int]) -> LogprobTensors:
    """Return the logprobs of `token_ids` [R] int64, the token at each position, and of the likeliest others. logits [R,
    V] float32 raw; counts [R] how many others, may be 0. A row with many is sorted separately, at no cost to the other
    rows."""
    k = max((count for count in counts if count <= MAX_LOGPROBS), default=0)
    long = {
        row: _long_row(logits[row], token_ids[row : row + 1], count)
        for row, count in enumerate(counts)
        if count > MAX_LOGPROBS
    }
    return LogprobTensors(*logprobs.token_logprobs(logits, token_ids, k), long)


def _long_row(logits: Tensor, token_id: Tensor, k: int) -> LongRow:
    """Return one row with many logprobs. logits [V], token_id [1]."""
    values, ids = logits.sort(descending=True, stable=True)  # stable: on ties the lower id comes first, as everywhere
    ids = torch.cat((token_id, ids[:k]))
    values = torch.cat((logits.index_select(0, token_id), values[:k]))
    return LongRow(ids.int(), values - logits.logsumexp(0))


def as_results(tensors: LogprobTensors, counts: list[int]) -> list[TokenLogprobs]:
    """Return one `TokenLogprobs` per position; row i has its own token and the first counts[i] others."""
    ids, values, ranks = tensors.token_ids.tolist(), tensors.logprobs.tolist(), tensors.ranks.tolist()
    return [
        _long_result(tensors.long[i], ranks[i])
        if i in tensors.long
        else TokenLogprobs(tuple(ids[i][: 1 + k]), tuple(values[i][: 1 + k]), ranks[i])
        for i, k in enumerate(counts)
    ]


def _long_result(row: LongRow, rank: int) -> TokenLogprobs:
    """Return a long row as arrays: a vocabulary as tuples of Python numbers would take ten times the memory."""
    ids, values = row.token_ids.numpy().tobytes(), row.logprobs.numpy().tobytes()
    return TokenLogprobs(array("i", ids), array("f", values), rank)
