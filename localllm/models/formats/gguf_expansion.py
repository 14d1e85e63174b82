"""Latent attention's second matrix of keys and values, which GGUF stores in two parts and in another order.

    DeepSeek's kv_b_proj    [heads x (key + value), latent]
    attn_k_b                [heads, latent, key]        the rows of each head's keys, transposed
    attn_v_b                [heads, value, latent]

The parts are joined into one tensor, `attn_kv_b`, and dequantised, as transposed blocks cannot be restored. It is
small.
Does not know: layers, files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from localllm.errors import CorruptModel
from localllm.models.formats.checkpoint import TensorInfo

if TYPE_CHECKING:
    from torch import Tensor


def join_expansions(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return the tensors with each pair replaced by one joined tensor."""
    joined = dict(tensors)
    for name in tensors:
        if not re.fullmatch(r"blk\.\d+\.attn_k_b\.weight", name):
            continue
        keys, values = joined.pop(name), joined.pop(name.replace("_k_b", "_v_b"), None)
        if values is None or [len(keys.shape), len(values.shape)] != [3, 3] or keys.shape[0] != values.shape[0]:
            raise CorruptModel(f"{name} in {keys.file} has no attn_v_b that fits its shape {list(keys.shape)}.")
        heads, latent, key = keys.shape
        shape = (heads * (key + values.shape[1]), latent)
        num_bytes = keys.num_bytes + values.num_bytes
        joined[name.replace("_k_b", "_kv_b")] = TensorInfo(keys.file, "F32", shape, num_bytes)
    return joined


def halves(name: str) -> tuple[str, str]:
    """Return the stored names of the keys and of the values of a joined tensor."""
    return name.replace("_kv_b", "_k_b"), name.replace("_kv_b", "_v_b")


def expansion(keys: Tensor, values: Tensor) -> Tensor:
    """Join keys [heads, latent, key] and values [heads, value, latent] to [heads x (key + value), latent]."""
    import torch

    return torch.cat((keys.transpose(1, 2), values), dim=1).flatten(0, 1)
