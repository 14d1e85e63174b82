"""Finds the likeliest tokens of a large vocabulary without sorting it.

All functions use one total order: larger value first, equal values by lower token id. The vocabulary is divided into
groups of `GROUP` consecutive ids. The k likeliest tokens can only be in the k groups with the largest heads, so one
pass over the row and a little work on k * GROUP numbers is enough.
Does not know: sampling parameters, randomness.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

GROUP = 64
SLICE_SIZE = 1 << 19
FEW_ROWS = 8
"""Rows whose heads numpy computes on a CPU, in one thread. torch wakes its threads for them, which takes longer, and
these then spin beside the threads of the next native step."""


def row_slices(values: Tensor) -> list[slice]:
    """Return slices of about 2 MiB of rows on a CPU, so that temporaries stay in memory that is already mapped.

    Temporaries of the whole batch would exceed what the allocator keeps, and the page faults of mapping new memory cost
    several times the arithmetic. A GPU processes all rows in one launch.
    """
    step = max(1, len(values) if values.is_cuda else SLICE_SIZE // values.shape[-1])
    return [slice(i, min(i + step, len(values))) for i in range(0, len(values), step)]


def grouped(values: Tensor, fill: float) -> Tensor:
    """View [S, V] as [S, G, GROUP]; copied only if V is not a multiple of GROUP."""
    short = -values.shape[-1] % GROUP
    if short:
        values = functional.pad(values, (0, short), value=fill)
    return values.view(values.shape[0], -1, GROUP)


def group_heads(values: Tensor) -> Tensor:
    """Return [S, G] the largest value of each group; NaN if the group contains one."""
    groups = grouped(values, -torch.inf)
    if groups.device.type == "cpu" and groups.dtype == torch.float32 and len(groups) <= FEW_ROWS:
        return torch.from_numpy(np.max(groups.numpy(force=True), axis=-1))
    return groups.amax(-1)


def argmax(values: Tensor, heads: Tensor) -> Tensor:
    """Return [S] the id of the largest value, the lowest id on ties;
    several times faster than torch's argmax on a CPU."""
    best = heads.argmax(-1, keepdim=True)
    inside = _members(values, best).argmax(-1, keepdim=True)
    return (best * GROUP + inside).squeeze(-1).clamp_(max=values.shape[-1] - 1)


def top(values: Tensor, heads: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the first k tokens in order: values [S, k] and ids [S, k]. k is at most the vocabulary size."""
    num_groups = min(k, heads.shape[-1])
    best = _top_indices(heads, num_groups)
    best = best.sort(-1).values  # so that an earlier candidate always has the lower id
    members = _members(values, best)
    inside = _top_indices(members, k)
    ids = best.gather(-1, inside // GROUP) * GROUP + inside % GROUP
    return members.gather(-1, inside), ids


def _members(values: Tensor, groups: Tensor) -> Tensor:
    """Return [S, g * GROUP] the values in the given groups [S, g]."""
    index = groups.unsqueeze(-1).expand(-1, -1, GROUP)
    return grouped(values, -torch.inf).gather(1, index).flatten(1)


def _top_indices(values: Tensor, k: int) -> Tensor:
    """Return [S, k] positions of the largest values in order, lower positions first on ties:
    topk over distinct keys."""
    places = torch.arange(values.shape[-1] - 1, -1, -1, device=values.device)
    keys = order_keys(values).to(torch.int64) << 32 | places
    return keys.topk(k, -1).indices


def order_keys(values: Tensor) -> Tensor:
    """Map float32 to int32 in the same order (positive floats' bits are ordered; negative ones are inverted)."""
    bits = (values + 0.0).view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0
    return bits ^ (bits >> 31 & 0x7FFFFFFF)


def keep_first(values: Tensor, weights: Tensor, enough: Tensor) -> Tensor:
    """Return [S, V] bool: the shortest prefix of the order whose weights sum to at least `enough` [S, 1], never empty.

    Two rounds over 2^16 buckets, for the high and low half of the key, find the value at which the sum is reached;
    tokens of equal value are counted by id. There is no sort, and no size depends on the data.
    """
    keys = order_keys(values)
    high, low = (keys >> 16) + (1 << 15), keys & 0xFFFF
    at_high, above = _reach(high, weights, enough)
    in_bucket = high == at_high
    at_low, above_low = _reach(low, torch.where(in_bucket, weights, 0), enough - above)
    tied = in_bucket & (low == at_low)
    missing = enough - above - above_low
    each = torch.where(tied, weights, 0).amax(-1, keepdim=True).double().clamp_min(1e-300)
    allowed = (missing / each).ceil().clamp(min=1, max=values.shape[-1])
    first_ties = tied & (tied.cumsum(-1) <= allowed)
    return (high > at_high) | (in_bucket & (low > at_low)) | first_ties


def _reach(buckets: Tensor, weights: Tensor, enough: Tensor) -> tuple[Tensor, Tensor]:
    """Return [S, 1] the highest bucket at which the sum from above reaches `enough`, and the sum above that bucket."""
    size = 1 << 16
    sums = torch.zeros(len(buckets), size, dtype=torch.float64, device=weights.device)
    sums.scatter_add_(-1, buckets.long(), weights.double())
    from_above = sums.flip(-1).cumsum(-1)
    # rounding may leave the whole sum just below `enough`: then use the last bucket that adds anything
    target = torch.minimum(enough, from_above[:, -1:])
    place = (from_above < target).sum(-1, keepdim=True).clamp_(max=size - 1)
    bucket = size - 1 - place
    return bucket, from_above.gather(-1, place) - sums.gather(-1, bucket)
