"""Heads on token states: rewards of a conversation or of its steps, and the token vectors of late interaction.

The recipe names the head, which is read from the checkpoint's tensors: transformers has no class for these models.

    reward      Linear, ReLU, Linear of each token; the last token's value counts    Qwen2ForRewardModel
    process     the same, and each token's values count                              Qwen2ForProcessRewardModel
    colbert     Linear of each token, brought to length 1                            HF_ColBERT, ColBERTModel

Does not know: the states.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.errors import CorruptModel
from localllm.models.formats.safetensors import SafetensorsCheckpoint

TENSORS: dict[str, tuple[tuple[str, bool], ...]] = {
    "reward": (("score.0", True), ("score.2", True)),
    "process": (("score.0", True), ("score.2", True)),
    "colbert": (("linear", False),),
}
"""Layers of each head, in order: the name of its weight, and whether it has a bias."""

HEAD_LAYERS = {kind: tuple(f"{name}." for name, _ in layers) for kind, layers in TENSORS.items()}
"""Beginnings of the names of a head's tensors."""


class TokenHead:
    """A head of one or two layers, in fp32."""

    def __init__(self, kind: str, layers: Sequence[tuple[Tensor, Tensor | None]]) -> None:
        self.kind, self.layers = kind, tuple(layers)

    @property
    def dim(self) -> int:
        """Numbers for each token."""
        return int(self.layers[-1][0].shape[0])

    def __call__(self, states: Tensor) -> Tensor:
        """Map states [T, H] to [T, dim] fp32."""
        x = states.float()
        for i, (weight, bias) in enumerate(self.layers):
            x = F.linear(torch.relu(x) if i else x, weight, bias)
        return F.normalize(x, dim=-1) if self.kind == "colbert" else x


def load_head(path: Path, kind: str, device: torch.device) -> TokenHead:
    """Load a head. Raises `CorruptModel` if the checkpoint lacks one of its tensors."""
    with SafetensorsCheckpoint(path) as checkpoint:
        wanted = [f"{name}.{part}" for name, has_bias in TENSORS[kind] for part in ("weight", *["bias"] * has_bias)]
        if missing := [name for name in wanted if name not in checkpoint.tensors]:
            raise CorruptModel(
                f"{path} lacks {', '.join(missing)}.", f"The head of its architecture has {len(wanted)}."
            )
        tensors = {name: checkpoint.tensor(name).to(device, torch.float32, copy=True) for name in wanted}
    return TokenHead(kind, [(tensors[f"{name}.weight"], tensors.get(f"{name}.bias")) for name, _ in TENSORS[kind]])
