"""Tiny checkpoints as the quantising tools save them, each beside the model that it encodes.

`save_quantised` takes the matrices of a tiny model one by one; a `Store` turns each into the tensors of a format and
into what they stand for, computed here from the format's definition. `agrees` then compares our logits with those of
transformers in fp32 on the dequantised matrices.
Does not know: localllm's formats.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from localllm.errors import LocalLLMError
from localllm.kernels.quantized_weight import QuantizedWeight
from localllm.models.loader import load_model, resident_bytes
from localllm.models.read_spec import read_spec
from localllm.models.weights.parameters import held_bytes
from tests.models.harness import CPU, Harness, prompt, reference_logits
from tests.tiny import load_reference

Stored = tuple[Mapping[str, Tensor], Tensor]  # endings and tensors of a matrix; what they stand for [N, K] fp32
Store = Callable[[str, Tensor], Stored | None]  # stem, weight [N, K] fp32; None: it stays plain

SHAPE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "dtype": "float16"}
"""Every matrix has 128 or 256 inputs; q has 128 outputs, k and v 64."""
MATRICES = ("_proj.weight", "lm_head.weight", "in_proj_qkv.weight", "in_proj_z.weight")
reference = cache(load_reference)


class Saved:
    """A quantised checkpoint and the state of the model it encodes."""

    def __init__(self, source: Path, path: Path, meant: Mapping[str, Tensor]) -> None:
        self.source, self.path, self.meant = source, path, meant

    def logits(self, token_ids: list[int]) -> Tensor:
        model = reference(self.source)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items() if name in self.meant}
        model.load_state_dict(dict(self.meant), strict=False)
        try:
            return reference_logits(model, token_ids)
        finally:
            model.load_state_dict(before, strict=False)


def save_quantised(source: Path, path: Path, config: Mapping[str, Any], store: Store, *, head: bool = False) -> Saved:
    """Write a copy of `source` with its matrices as `store` makes them; the head only if `head` is set."""
    shutil.copytree(source, path)
    tensors, meant = load_file(path / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith(MATRICES)]:
        stem = name.removesuffix(".weight")
        if stem == "lm_head" and not head:
            continue
        if (stored := store(stem, tensors[name].float())) is not None:
            del tensors[name]
            tensors |= {f"{stem}.{ending}": tensor.contiguous().clone() for ending, tensor in stored[0].items()}
            meant[name] = stored[1].float()
    save_file(tensors, path / "model.safetensors")
    set_quantization(path, config)
    return Saved(source, path, meant)


def set_quantization(path: Path, config: Mapping[str, Any] | None) -> None:
    """Write the config of a quantised checkpoint, or remove it."""
    file = path / "config.json"
    whole = {**json.loads(file.read_text()), "quantization_config": config}
    file.write_text(json.dumps({key: value for key, value in whole.items() if key != "quantization_config" or value}))


def rewrite(path: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Damage a checkpoint."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def assert_refused(saved: Saved, kind: type[LocalLLMError], message: str) -> None:
    """Loading raises an error of this kind, whose text matches `message`."""
    with pytest.raises(kind, match=message):
        load_model(saved.path, read_spec(saved.path), CPU, torch.float32)


def agrees(saved: Saved, within: float = 1e-4) -> Harness:
    """Logits are those of the model that is meant, and the bytes those that were predicted.

    Matrices stay as stored: what a CPU's own layouts round further has its tests beside kernels/cpu. That the bytes
    are predicted is asked of both.
    """
    tokens = prompt(29)
    for layout in ("fast", "exact"):
        harness = Harness(saved.path, cpu_weights=layout)
        predicted = resident_bytes(saved.path, harness.spec, CPU, torch.float32, cpu_weights=layout)
        assert held_bytes(harness.model) == predicted
    _, ours = harness.prefill(tokens)
    theirs = saved.logits(tokens)
    error = float((ours - theirs).abs().max() / theirs.abs().max())
    assert error < within, f"relative error {error:.2e}"
    return harness


def weights_agree(saved: Saved, harness: Harness, within: float) -> None:
    """Every weight of a matrix is off by at most this part of itself."""
    meant = saved.meant["model.layers.0.mlp.down_proj.weight"]
    (down,) = quantised_matrices(harness)[3:]
    assert bool(((down.dequantize(torch.float32) - meant).abs() <= within * meant.abs()).all())


def quantised_matrices(harness: Harness) -> list[Any]:
    """The weights of the first layer that are not plain: qkv, o, gate and up, down."""
    layer = harness.model.layers[0]
    linears = (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down)
    weights: list[Tensor | QuantizedWeight] = [linear.weight for linear in linears]
    return [weight for weight in weights if not isinstance(weight, Tensor)]


# ---- rounding --------------------------------------------------------------------------------------------------------


def rounded(
    weight: Tensor, group_of: Tensor, bits: int, *, sym: bool, dtype: torch.dtype = torch.float16
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """weight [N, K], group_of [K] -> codes [N, K], zeros [N, G], scales [N, G] of dtype, what they mean [N, K]."""
    groups, top = int(group_of.max()) + 1, (1 << bits) - 1
    least = torch.stack([weight[:, group_of == g].amin(1) for g in range(groups)], 1).clamp(max=0)
    most = torch.stack([weight[:, group_of == g].amax(1) for g in range(groups)], 1).clamp(min=0)
    if sym:
        most = torch.maximum(most, -least)
        least = -most
    scales = ((most - least) / top).clamp(min=1e-6).to(dtype)
    step = scales.float()
    zeros = torch.full_like(step, 1 << (bits - 1)) if sym else (-least / step).round().clamp(0, top)
    codes = ((weight / step[:, group_of]).round() + zeros[:, group_of]).clamp(0, top)
    return codes.long(), zeros.long(), scales, (codes - zeros[:, group_of]) * step[:, group_of]


def in_order(columns: int, group: int) -> Tensor:
    return torch.arange(columns) // (columns if group == -1 else group)


def to_int32(words: Tensor) -> Tensor:
    """Words of 32 bits in int64, as the signed integers that files hold."""
    words = words & 0xFFFFFFFF
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def shuffled(columns: int, group: int, seed: int) -> Tensor:
    """g_idx as desc_act makes it: each input's group, inputs sorted by importance."""
    generator = torch.Generator().manual_seed(seed)
    return in_order(columns, group)[torch.randperm(columns, generator=generator)]


def e2m1(scaled: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest 4-bit floats: codes as uint8 (the sign in bit 3), values."""
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    nearest = scaled.abs()[..., None].sub(magnitudes).abs().argmin(-1)
    negative = scaled < 0
    return (nearest + negative * 8).to(torch.uint8), magnitudes[nearest] * torch.where(negative, -1.0, 1.0)
