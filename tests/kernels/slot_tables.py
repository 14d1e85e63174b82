"""Slot tables written by hand: what `SamplingState` does for requests, here for keyword arguments."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from localllm.kernels.sampling.noise import mix_seeds
from localllm.kernels.sampling.tables import SlotTables


def tables_of(asked: Sequence[Mapping[str, Any]], vocab_size: int, device: torch.device) -> SlotTables:
    """One slot per mapping: fields of `SlotTables`, seeds unmixed, the rest as if nothing was asked."""
    tables = SlotTables.empty(len(asked), vocab_size, torch.device("cpu"))
    for slot, fields in enumerate(asked):
        usual = {"top_k": vocab_size, "top_p": 1.0, "repetition": 1.0, "temperature": 1.0, "num_logprobs": -1}
        for name, value in {**usual, **fields}.items():
            row = getattr(tables, name)[slot]
            if name == "seed":
                value = int(mix_seeds(np.array([value % 2**64], np.uint64)).view(np.int64)[0])
            if row.ndim:
                row[: len(value)] = torch.tensor(value)
            else:
                row.fill_(value)
    return moved(tables, device)


def moved(tables: SlotTables, device: torch.device) -> SlotTables:
    return SlotTables(*(getattr(tables, name).to(device) for name in SlotTables.__dataclass_fields__))


def longs(values: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int64, device=device)
