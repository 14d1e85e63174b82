"""The ordered sum of a token's top-k outputs, without padding. Reads each output once: limited by memory.

No atomics: the sum runs over k = 0, 1, ... in fp32, so its bits depend only on the token's own outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from localllm.kernels.launch import cdiv, early_launch, next_power_of_2, runs_triton, tl, triton, wait_for_inputs


def combine(partial: Tensor, ids: Tensor) -> Tensor:
    """Sum partial [T * top_k, N], already weighted; ids [T, top_k], -1 for rows to skip -> [T, N]"""
    if not runs_triton(partial, "experts"):
        return combine_reference(partial, ids)
    (num_tokens, top_k), width = ids.shape, partial.shape[1]
    out = torch.empty((num_tokens, width), dtype=partial.dtype, device=partial.device)
    if num_tokens:
        block = min(1024, next_power_of_2(width))
        _combine_kernel[(num_tokens, cdiv(width, block))](
            partial, ids, out, width, TOP_K=top_k, BLOCK=block, num_warps=4, **early_launch(partial.device)
        )
    return out


def combine_reference(partial: Tensor, ids: Tensor) -> Tensor:
    """The definition in plain torch."""
    answers = partial.view(*ids.shape, -1).float().masked_fill((ids < 0)[:, :, None], 0.0)
    total = torch.zeros_like(answers[:, 0])
    for k in range(ids.shape[1]):
        total += answers[:, k]
    return total.to(partial.dtype)


@triton.jit
def _combine_kernel(partial_ptr, ids_ptr, out_ptr, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program per token and block of columns."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        row = token * TOP_K + k
        mask = columns < tl.where(tl.load(ids_ptr + row) < 0, 0, width)
        total += tl.load(partial_ptr + row * width + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * width + columns, total.to(out_ptr.dtype.element_ty), mask=columns < width)
