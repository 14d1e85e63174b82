"""The recurrent part of a hybrid decoder as described by config.json: its kind, its sizes, the state that it keeps.

    short_conv      LFM2: a gated convolution over the last few tokens; keeps no matrix
    gated_delta     Qwen3-Next, Qwen3.5, OLMo Hybrid: gated delta net (arXiv:2412.06464)
    mamba2          Granite 4 H, Nemotron-H, Bamba, Falcon-H1: state space duality (arXiv:2405.21060)
    module          any other, computed by a class of transformers: only the sizes of its states are known

All recurrent layers of one model have the same sizes. Does not know: which layers are recurrent
(ModelSpec.layer_kinds), weights, how states are kept (engine/memory/state_pool.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from localllm.errors import CorruptModel, UnsupportedModel

RecurrentKind = Literal["short_conv", "gated_delta", "mamba2", "module"]
LayerPart = Literal["attention", "recurrent", "both", "mlp", "moe"]
"""What mixes tokens in a layer: attention, a recurrent part, or both side by side (Falcon-H1). With the
topology `single`, a layer has one part only, and may be a feed-forward part (mlp, moe) alone (Nemotron-H)."""


@dataclass(frozen=True, slots=True)
class RecurrentSpec:
    """Sizes of a recurrent part. Fields without a meaning for a kind keep their defaults."""

    kind: RecurrentKind
    conv_kernel: int = 0  # K: taps of the causal convolution; a state keeps the last K - 1 inputs
    conv_bias: bool = False
    num_heads: int = 0  # Hv, value heads of gated_delta; H, heads of mamba2
    num_groups: int = 0  # Hk, key heads of gated_delta; G, groups of B and C of mamba2. Divides num_heads
    head_size: int = 0  # dv of gated_delta; P of mamba2
    state_size: int = 0  # dk of gated_delta; N of mamba2
    width: int = 0  # channels of short_conv: hidden_size
    norm: Literal["norm_then_gate", "gate_then_norm", "gate"] = "norm_then_gate"
    """Order of the norm and the gate on the output; gate: a gate without a norm."""
    time_step_limits: tuple[float, float] = (0.0, float("inf"))  # of mamba2's time step, after softplus
    tiled_heads: bool = False
    """gated_delta: value head j reads key head j % num_groups, as GGUF orders Qwen3.5's; False: consecutive value heads
    share a key head."""
    separate_inputs: bool = False  # gated_delta: q, k and v are made by three matrices and convolved by three
    beta_scale: float = 1.0  # gated_delta: on the sigmoid of b
    norm_eps: float | None = None  # of the norm of the output; None: as of the other norms
    held: tuple[int, int] = (0, 0)  # module: numbers of a request's conv states and matrix states in a layer
    projection_bias: bool = False  # on the matrices before and after the recurrence
    input_factors: tuple[float, ...] = ()  # mamba2: on z, x, B, C and dt as they are projected; empty: none (Falcon-H1)
    output_factor: float = 1.0  # on the part's output (Falcon-H1)

    def __post_init__(self) -> None:
        """Raise `CorruptModel` for heads that cannot share groups."""
        if self.num_groups and self.num_heads % self.num_groups:
            raise CorruptModel(
                f"config.json's {self.num_heads} recurrent heads cannot share {self.num_groups} groups.",
                "The first must be a multiple of the second.",
            )

    @property
    def inner_size(self) -> int:
        """Return the width of the recurrence's output."""
        return self.width if self.kind == "short_conv" else self.num_heads * self.head_size

    @property
    def conv_channels(self) -> int:
        """Return the channels of the convolution: q, k and v; x, B and C; or the whole width."""
        return self.width if self.kind == "short_conv" else self.inner_size + 2 * self.num_groups * self.state_size

    @property
    def conv_shape(self) -> tuple[int, ...]:
        """Return the shape of a request's conv state in a layer: [channels, K - 1]; of a module [numbers]."""
        if self.kind == "module":
            return self.held[:1]
        return self.conv_channels, self.conv_kernel - 1

    @property
    def matrix_shape(self) -> tuple[int, ...] | None:
        """Return the shape of a request's matrix state in a layer, which is fp32: [Hv, dk, dv] of gated_delta,
        [H, P, N] of mamba2; [numbers] of a module. None: there is none."""
        if self.kind == "module":
            return self.held[1:] if self.held[1] else None
        if self.kind == "short_conv":
            return None
        if self.kind == "gated_delta":
            return self.num_heads, self.state_size, self.head_size
        return self.num_heads, self.head_size, self.state_size


def kinds_of_layers(stated: object, known: Mapping[str, LayerPart]) -> tuple[LayerPart, ...]:
    """Return what mixes tokens in each layer, from a config's list of its layers' kinds.

    known: each kind's name in the config. Raises `UnsupportedModel` for another name.
    """
    if not isinstance(stated, list | tuple | str) or not stated:
        raise CorruptModel(f"config.json describes its layers as {stated!r}.", "It must list the kind of every layer.")
    for index, name in enumerate(stated):
        if name not in known:
            raise UnsupportedModel(
                f"Layer {index} is of the kind {name!r}, which is not supported.", f"Supported: {', '.join(known)}."
            )
    return tuple(known[name] for name in stated)
