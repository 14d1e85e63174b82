"""Give the ids that a tensor-parallel model's first shard has sampled to the other shards.

Does not know: how they were sampled, where they are kept.
"""

from __future__ import annotations

import numpy as np
import torch

from localllm.models.layers.group import Group
from localllm.runner.host_steps import Drawn
from localllm.runner.upload import to_device


class IdExchange:
    """Gives the ids that a tensor-parallel model's first shard has sampled to the others."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group, self._device = group, device

    def send(self, drawn: Drawn) -> None:
        """Send the ids of the S sampling rows."""
        places = drawn.places
        ids = drawn.token_ids
        if places is not None:
            ids = ids.index_select(0, to_device(np.array(places), self._device))
        self._group.broadcast_(ids)

    def receive(self, count: int) -> Drawn:
        """Return the ids of the S sampling rows; the other fields are zeros."""
        ids = torch.empty(count, dtype=torch.int64, device=self._device)
        return Drawn(self._group.broadcast_(ids), torch.zeros(count, device=self._device))


def exchange_of(group: Group | None, device: torch.device) -> IdExchange | None:
    """Return the exchange of a group; None: there is one shard."""
    return None if group is None or group.size == 1 else IdExchange(group, device)
