"""Applies grammar masks, bits on the host, to logits.

Does not know: grammars, plans.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.runner.batch import Ints
from localllm.runner.upload import to_device


class RowMasks(NamedTuple):
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
