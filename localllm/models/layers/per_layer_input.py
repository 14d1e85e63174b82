"""Per-layer embeddings (Gemma 3n, Gemma 4): every layer adds a small vector of the token to the stream, behind a gate.

    given  = (norm(projection(embeds)) + table[token] * sqrt(size)) / sqrt(2)      once per step, [T, layers, size]
    stream = stream + norm(up(act(gate(stream)) * given[:, layer]))                at the end of each layer

The table is a model's largest tensor and is only read by rows, so it keeps its stored type.
Does not know: where tensors come from.
"""

from __future__ import annotations

from torch import Tensor

from localllm.models.layers.embedding import EmbeddingTable
from localllm.models.layers.linear import Linear
from localllm.models.layers.mlp import UNGATED
from localllm.models.layers.norm import LayerNorm, RMSNorm
from localllm.models.spec.per_layer_input import PerLayerInputSpec


class PerLayerInputs:
    """The vectors of a step's tokens for all layers."""

    __slots__ = ("norm", "projection", "sizes", "table")

    def __init__(self, table: EmbeddingTable, projection: Linear, norm: RMSNorm, sizes: PerLayerInputSpec) -> None:
        """projection: [layers * size, hidden]. norm: of each layer's part of its output."""
        self.table, self.projection, self.norm, self.sizes = table, projection, norm, sizes

    def __call__(self, token_ids: Tensor, positions: Tensor, embeds: Tensor) -> Tensor:
        """Return [T, layers, size]. embeds [T, hidden]: the tokens' embeddings as the first layer reads them."""
        known: Tensor = token_ids.masked_fill(token_ids >= self.sizes.vocab_size, 0)
        given: Tensor = self.table(known, positions).unflatten(1, (-1, self.sizes.size))
        return given.add_(self.norm(self.projection(embeds).view(given.shape))).mul_(2**-0.5)


class PerLayerGate:
    """One layer's use of its vector; returns what is added to the stream."""

    __slots__ = ("activation", "gate", "norm", "up")

    def __init__(self, gate: Linear, up: Linear, norm: RMSNorm | LayerNorm, activation: str) -> None:
        self.gate, self.up, self.norm, self.activation = gate, up, norm, UNGATED[activation]

    def __call__(self, stream: Tensor, given: Tensor) -> Tensor:
        """Map the stream [T, hidden], and the layer's vectors [T, size], to a fresh tensor [T, hidden]."""
        return self.norm(self.up(self.activation(self.gate(stream)).mul_(given)))
