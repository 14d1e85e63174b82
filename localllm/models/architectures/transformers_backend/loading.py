"""Load a folder as a verified `TransformersModel`, count its bytes, and verify native decoders the same way.

Does not know: how the rest of localllm finds and fits models.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from localllm.kernels.linear import should_pack
from localllm.models.architectures.transformers_backend.model import TransformersModel
from localllm.models.architectures.transformers_backend.module import load_module, module_on_meta
from localllm.models.architectures.transformers_backend.verify import (
    eager_logits,
    guarded,
    paged_logits,
    require_equal,
    short_prompt,
)
from localllm.models.inputs import CausalModel
from localllm.models.spec.model_spec import ModelSpec

log = logging.getLogger(__name__)


@torch.inference_mode()
def load_through_transformers(
    path: Path, spec: ModelSpec, device: torch.device, dtype: torch.dtype, max_model_len: int, *, verify: bool
) -> TransformersModel:
    """Load the model and compare it with eager attention. Raises `UnsupportedModel` with the difference."""
    module = load_module(path, spec, device, dtype, trust_remote_code=spec.implementation == "remote")
    token_ids = short_prompt(spec)
    name, expected = spec.architecture, None
    if verify:
        expected = guarded(lambda: eager_logits(module, token_ids, device), name, "by itself")
    model = guarded(
        lambda: TransformersModel(module, spec, device, dtype, max_model_len), name, "with its attention replaced"
    )
    if expected is not None:
        ours = guarded(lambda: paged_logits(model, spec, token_ids, device, dtype), name, "over paged attention")
        error = require_equal(ours, expected, dtype, name)
        log.info("verified architecture=%s logits_error=%.1e", spec.architecture, error)
    return model


@torch.inference_mode()
def verify_decoder(path: Path, model: CausalModel, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> None:
    """Compare a native decoder with a copy of the model that transformers loads temporarily on the CPU."""
    token_ids = short_prompt(spec)
    module = load_module(path, spec, torch.device("cpu"), torch.float32, trust_remote_code=False)
    expected = eager_logits(module, token_ids, torch.device("cpu"))
    ours = paged_logits(model, spec, token_ids, device, dtype).cpu()
    error = require_equal(ours, expected, dtype, spec.architecture)
    log.info("verified architecture=%s logits_error=%.1e", spec.architecture, error)


def bytes_through_transformers(path: Path, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> int:
    """Return the bytes of weights and buffers that `load_through_transformers` will hold, from shapes alone."""
    module: Any = module_on_meta(path, trust_remote_code=spec.implementation == "remote")
    total: int = sum(parameter.numel() for parameter in module.parameters()) * dtype.itemsize
    total += sum(buffer.numel() * buffer.dtype.itemsize for buffer in module.buffers())
    head = spec.vocab_size * spec.hidden_size
    if spec.tie_word_embeddings and should_pack(head, device, dtype):
        total += head * dtype.itemsize  # the packed head is a second copy of the embedding
    return total
