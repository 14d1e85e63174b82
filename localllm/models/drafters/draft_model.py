"""A draft model: a smaller model of the same vocabulary, which reads the text alone.

Steps of a few tokens run natively where the model has such steps (native_program.py), as its target's steps do, so
that the same weights draw the same tokens. Between two calls it keeps only its logits.
Does not know: features of its target, how its drafts are drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from localllm.errors import DrafterMismatch
from localllm.kernels.layer_cache import LayerKV
from localllm.models.decoder.decoder import DecoderModel
from localllm.models.decoder.native_program import (
    DecodeRows,
    NativeProgram,
    NotSupportedNatively,
    open_native_program,
)
from localllm.models.drafters.drafter import DraftStep
from localllm.models.read_spec import weights_bytes
from localllm.models.spec.model_spec import DrafterPlan, ModelSpec


def plan_draft_model(path: Path, spec: ModelSpec) -> DrafterPlan:
    """Return the plan of a model as a drafter. Raises `DrafterMismatch` for models that cannot draft."""
    why = ""
    if spec.implementation != "localllm":
        why = f"{spec.architecture} runs through transformers' code."
    elif spec.recurrent is not None:
        why = f"{spec.architecture} keeps a recurrent state, which cannot take back a wrong guess."
    if why:
        raise DrafterMismatch(f"{path.name} cannot be a draft model.", why, "Use a model whose layers all attend.")
    return DrafterPlan("draft_model", path, spec, weights_bytes(path))


class DraftModel:
    """A decoder as a drafter of a model with `vocab_size` tokens. Tokens beyond its own vocabulary are read as token 0
    and never guessed. Between two calls a decoder divided over shards keeps its hidden states instead of its logits,
    which the first shard alone has."""

    taps: tuple[int, ...] = ()
    first_key = 0

    def __init__(self, model: DecoderModel, vocab_size: int) -> None:
        self.spec, self._model, self._vocab_size = model.spec, model, vocab_size
        self._is_divided = model.group.size > 1
        self._lone: NativeProgram | None = None
        self._lone_cache: Sequence[LayerKV | None] | None = None  # that `_lone` was made for

    def serve_context(self, max_model_len: int) -> None:
        self._model.serve_context(max_model_len)

    def table_bytes(self, max_model_len: int) -> int:
        return self._model.table_bytes(max_model_len)

    def extend(self, step: DraftStep, cache: Sequence[LayerKV | None], features: Tensor | None) -> Tensor:
        return self._forward(step, cache)

    def step(self, step: DraftStep, cache: Sequence[LayerKV | None], hidden: Tensor) -> Tensor:
        return self._forward(step, cache)

    def logits(self, hidden: Tensor) -> Tensor | None:
        """hidden: the logits of its own vocabulary, or what they are computed from."""
        own = self._model.compute_logits(hidden) if self._is_divided else hidden
        if own is None:
            return None
        missing = self._vocab_size - own.shape[1]
        if missing <= 0:
            return own[:, : self._vocab_size].clone()  # the sampler overwrites them
        return torch.nn.functional.pad(own, (0, missing), value=float("-inf"))

    def _forward(self, step: DraftStep, cache: Sequence[LayerKV | None]) -> Tensor:
        """Return the logits [R, own vocabulary] of each row's newest token, or its hidden state (see the class)."""
        if self.spec.vocab_size < self._vocab_size:
            step.token_ids.masked_fill_(step.token_ids >= self.spec.vocab_size, 0)
        lone = self._native(cache)
        if lone is not None and len(step.token_ids) <= lone.most_rows:
            logits = lone.forward(_decode_rows(step))
            return logits[step.logits_indices]
        hidden = self._model.forward(step, cache).index_select(0, step.logits_indices)
        own = hidden if self._is_divided else self._model.compute_logits(hidden)
        assert own is not None, "a model on one device has its head"
        return own

    def _native(self, cache: Sequence[LayerKV | None]) -> NativeProgram | None:
        if cache is not self._lone_cache:
            self._lone_cache = cache
            try:
                self._lone = open_native_program(self._model, cache)
            except NotSupportedNatively:
                self._lone = None
        return self._lone


def _decode_rows(step: DraftStep) -> DecodeRows:
    """Return the step's tokens as rows of a native step."""
    rows = np.repeat(np.arange(len(step.query_lens)), step.query_lens)
    tables = [group.block_table for group in step.groups]
    assert all(table.is_contiguous() for table in tables)
    starts = np.array([table.data_ptr() for table in tables])[:, None]
    strides = np.array([table.shape[1] * table.element_size() for table in tables])[:, None]
    slots = np.stack([group.slot_mapping.numpy() for group in step.groups])
    return DecodeRows(step.token_ids.numpy(), step.positions.numpy(), slots, starts + rows * strides)
