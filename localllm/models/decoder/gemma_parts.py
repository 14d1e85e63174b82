"""Build what Gemma 3n and Gemma 4 add to a decoder: their layers, per-layer embeddings, and Gemma 3n's streams.

Does not know: files, formats; attention and the feed-forward part, which the builder makes for all families.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.models.decoder.layer import FeedForward, Gemma3nLayer, Gemma4Layer, LayerKind, MixerPart
from localllm.models.decoder.mixture import build_mixture
from localllm.models.layers.embedding import EmbeddingTable, SplitEmbeddingTable
from localllm.models.layers.gemma import AltUp, AltUpEnds, Laurel, PerLayerGate, PerLayerInputs
from localllm.models.layers.linear import Linear
from localllm.models.layers.moe import ExpertsOfStream
from localllm.models.layers.norm import LayerNorm, RMSNorm
from localllm.models.spec.model_spec import AltUpSpec, ModelSpec
from localllm.models.weights.source import PER_LAYER_EMBEDDING, ShardWeights

NormOf = Callable[..., RMSNorm | LayerNorm]
"""(stem, factor on its output) -> a norm of the stream."""


@dataclass(frozen=True, slots=True)
class GemmaParts:
    """The source of the parts' tensors. All are whole on each shard but for the table and the experts."""

    spec: ModelSpec
    share: ShardWeights
    norm: NormOf
    dtype: torch.dtype

    @property
    def _first_layer(self) -> int:
        """The shard's first layer: the first of those whose per-layer embeddings it has."""
        return self.share.shard.layers.start

    def layer(
        self, index: int, kind: LayerKind, prefix: str, attention: MixerPart, mlp: FeedForward
    ) -> Gemma3nLayer | Gemma4Layer:
        """Return the layer around the two parts. prefix: model.layers.N."""
        make = self._gemma3n if self.spec.altup is not None else self._gemma4
        return make(index, kind, prefix, attention, mlp)

    def layer_inputs(self) -> PerLayerInputs | None:
        """Return the per-layer embeddings. Their table keeps its stored type: only rows are read."""
        spec, sizes, weights = self.spec, self.spec.per_layer_input, self.share.source
        if sizes is None or self._first_layer:
            return None
        width = spec.num_layers * sizes.size
        shard, shape = self.share.shard, (sizes.vocab_size, width)
        if shard.is_whole:
            rows = self.share.looked_up(PER_LAYER_EMBEDDING, shape, keep_narrow=True)
            table = EmbeddingTable(rows, self.dtype, sizes.size**0.5)
        else:
            first, last = (sizes.vocab_size * end // shard.size for end in (shard.index, shard.index + 1))
            own = range(first, last)
            rows = weights.table(PER_LAYER_EMBEDDING, shape, keep_narrow=True, rows=own)
            table = SplitEmbeddingTable(rows, self.dtype, own, self.share.group, scale=sizes.size**0.5)
        # Its norm divides out the factor hidden_size ** -0.5 on the projection's output, except from epsilon.
        weight = weights.take(["model.per_layer_projection_norm.weight"], (sizes.size,))
        norm = RMSNorm(weight, spec.norm.eps * spec.hidden_size)
        projection = weights.linear(["model.per_layer_model_projection"], (width, spec.hidden_size))
        return PerLayerInputs(table, projection, norm, sizes)

    def streams(self) -> AltUpEnds | None:
        """Return what makes several streams of one and one of several."""
        altup, own = self.spec.altup, self.share.shard.layers
        if altup is None:
            return None
        is_here = {"": own.start == 0, "unembed_": own.stop == self.spec.num_layers}
        return AltUpEnds(*(
            self._matrices(f"model.altup_{name}", altup.num_streams - 1) if here else None
            for name, here in is_here.items()
        ))  # fmt: skip

    # -- Gemma 4

    def _gemma4(self, index: int, kind: LayerKind, prefix: str, attention: MixerPart, mlp: FeedForward) -> Gemma4Layer:
        norm, scalar = self.norm, float(self.share.source.take([f"{prefix}layer_scalar"], (1,)))
        gate, experts = self._gate(prefix, scalar), self._experts(index, prefix)
        return Gemma4Layer(
            kind, norm(f"{prefix}input_layernorm"), attention, norm(f"{prefix}post_attention_layernorm"),
            norm(f"{prefix}pre_feedforward_layernorm"), mlp,
            norm(f"{prefix}post_feedforward_layernorm", scalar if gate is None else 1.0),
            experts, None if experts is None else norm(f"{prefix}post_feedforward_layernorm_1"),
            gate, index - self._first_layer, scalar,
        )  # fmt: skip

    def _gate(self, prefix: str, factor: float = 1.0) -> PerLayerGate | None:
        spec, sizes, linear = self.spec, self.spec.per_layer_input, self.share.source.linear
        if sizes is None:
            return None
        gate = linear([f"{prefix}per_layer_input_gate"], (sizes.size, spec.hidden_size))
        up = linear([f"{prefix}per_layer_projection"], (spec.hidden_size, sizes.size))
        return PerLayerGate(gate, up, self.norm(f"{prefix}post_per_layer_input_norm", factor), spec.hidden_act)

    def _experts(self, index: int, prefix: str) -> ExpertsOfStream | None:
        """Return the experts beside the feed-forward part, and their norms; the router's has a weight of its own."""
        spec = self.spec
        if spec.mixture is None:
            return None
        router_norm = self._scaled_norm(f"{prefix}mlp.gate.scale", spec.hidden_size**-0.5)
        mixture = build_mixture(spec, spec.mixture, self.share, index)
        before, after = (self.norm(f"{prefix}{side}_feedforward_layernorm_2") for side in ("pre", "post"))
        return ExpertsOfStream(mixture, router_norm, before, after, self.share.group)

    # -- Gemma 3n

    def _gemma3n(
        self, index: int, kind: LayerKind, prefix: str, attention: MixerPart, mlp: FeedForward
    ) -> Gemma3nLayer:
        norm, gate, altup = self.norm, self._gate(prefix), self.spec.altup
        assert gate is not None
        assert altup is not None
        return Gemma3nLayer(
            kind, self._altup(altup, f"{prefix}altup."), norm(f"{prefix}input_layernorm"),
            self._laurel(altup, f"{prefix}laurel."), attention, norm(f"{prefix}post_attention_layernorm"),
            norm(f"{prefix}pre_feedforward_layernorm"), mlp, norm(f"{prefix}post_feedforward_layernorm"), gate,
            index - self._first_layer,
        )  # fmt: skip

    def _altup(self, altup: AltUpSpec, prefix: str) -> AltUp:
        take, count, hidden = self.share.source.take, altup.num_streams, self.spec.hidden_size
        return AltUp(
            altup.active,
            take([f"{prefix}modality_router.weight"], (count, hidden)),
            self._scaled_norm(f"{prefix}router_norm.weight", 1 / hidden),
            take([f"{prefix}prediction_coefs.weight"], (count * count, count)),
            take([f"{prefix}correction_coefs.weight"], (count, count)),
            take([f"{prefix}correct_output_scale"], (hidden,)) if altup.scales_output else None,
        )

    def _laurel(self, altup: AltUpSpec, prefix: str) -> Laurel:
        linear, rank, hidden = self.share.source.linear, altup.laurel_rank, self.spec.hidden_size
        left, right = (
            linear([f"{prefix}linear_left"], (rank, hidden)),
            linear([f"{prefix}linear_right"], (hidden, rank)),
        )
        return Laurel(left, right, self.norm(f"{prefix}post_laurel_norm"))

    def _matrices(self, stem: str, count: int) -> list[Linear]:
        """Return `count` square matrices, stored as one stack or one by one. They are not quantised: they are few."""
        weights, hidden = self.share.source, self.spec.hidden_size
        stack = f"{stem}projections.weight"
        if weights.has(stack):
            return [Linear(matrix.contiguous()) for matrix in weights.take([stack], (count, hidden, hidden))]
        names = [f"{stem}projections.{index}.weight" for index in range(count)]
        return [Linear(weights.take([name], (hidden, hidden))) for name in names]

    def _scaled_norm(self, name: str, factor: float) -> RMSNorm:
        weight: Tensor = self.share.source.take([name], (self.spec.hidden_size,))
        return RMSNorm(weight.float() * factor, self.spec.norm.eps)
