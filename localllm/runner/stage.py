"""A pipeline stage as a model that a runner drives: it takes the stream of the stage before, and passes its own on.

Does not know: how streams travel (ranks/), which layers a stage has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from localllm.kernels.layer_cache import LayerCache
from localllm.models.decoder.decoder import DecoderModel
from localllm.models.inputs import ForwardInputs


class Pipe(Protocol):
    """The connections of a rank to the same shard of the stages before and after."""

    def receive(self, stream: Tensor) -> Tensor:
        """Receive the stream [T, hidden] of the stage before, in place."""
        ...

    def send(self, stream: Tensor) -> None:
        """Send the stream [T, hidden] to the next stage."""
        ...


class StageModel:
    """A `CausalModel` of some layers. The hidden states of a stage that is not the last are its stream."""

    def __init__(self, model: DecoderModel, pipe: Pipe) -> None:
        self._model, self._pipe = model, pipe

    def forward(self, inputs: ForwardInputs, cache: Sequence[LayerCache | None]) -> Tensor:
        model, stream = self._model, None
        if model.embedding is None:
            shape = (len(inputs.token_ids), model.spec.hidden_size)
            stream = self._pipe.receive(inputs.token_ids.new_empty(shape, dtype=model.dtype))
        hidden = model.forward(inputs, cache, stream)
        if model.lm_head is None:
            self._pipe.send(hidden)
        return hidden

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor | None:
        return self._model.compute_logits(hidden, out)
