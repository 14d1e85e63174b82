"""The layer for multi-token prediction (MTP) that some checkpoints bring: how each kind names and joins its parts.

The layer reads the target's last hidden state and the embedding of the token that followed, both normed, through one
projection, then a whole decoder layer of the family (DeepSeek-V3, arXiv:2412.19437, section 2.2; MiMo,
arXiv:2505.07608).
Does not know: tensors, the model's other layers, how its drafts are verified.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MTPLayout:
    """The names of the layer's own parts, below its prefix, and the differences between the kinds."""

    prefix: str  # of the stored names, with {layer} for the number after the model's own layers
    embed_norm: str
    hidden_norm: str
    projection: str  # [hidden, 2 * hidden]
    hidden_first: bool  # the projection reads [hidden, embedding], not [embedding, hidden]
    final_norm: str  # before the head
    hands_on_normed: bool  # the next draft starts from the output after the final norm, not before it
    embedding: str = ""  # copies of the model's embedding and head that checkpoints may store; "": none do
    head: str = ""

    def stored_prefix(self, num_layers: int) -> str:
        """Return how the stored names of the layer begin, in a model of so many layers of its own."""
        return self.prefix.format(layer=num_layers)


DEEPSEEK_MTP = MTPLayout(
    prefix="model.layers.{layer}.",
    embed_norm="enorm",
    hidden_norm="hnorm",
    projection="eh_proj",
    hidden_first=False,
    final_norm="shared_head.norm",
    hands_on_normed=False,
    embedding="embed_tokens",
    head="shared_head.head",
)
MIMO_MTP = MTPLayout(
    prefix="model.mtp_layers.0.",
    embed_norm="token_layernorm",
    hidden_norm="hidden_layernorm",
    projection="input_proj",
    hidden_first=True,
    final_norm="final_layernorm",
    hands_on_normed=True,
)
