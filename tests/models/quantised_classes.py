"""Tiny quantised checkpoints of classes of transformers, each beside one that holds what its weights stand for."""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.class_models import make_class_model
from tests.models.formats.quantised import Store, Stored, e2m1
from tests.models.formats.stores import BLOCKS, MXFP8, mxfp8, per_block

E8M0 = torch.float8_e8m0fnu
PLAIN = re.compile(
    r"embed|lm_head|^head|norm|gate\.weight|router|conv|weights_proj|vision|visual|compressor|^output|projector|hc_|merg"
)
"""Names of tensors that quantised checkpoints leave as they are."""
EXPERT = re.compile(r"\.experts\.\d+\.")


def quantise(path: Path, folder: Path, config: Mapping[str, Any], store: Store, **changes: Any) -> tuple[Path, Path]:
    """Return two copies of a checkpoint: its matrices as `store` makes them, and what they stand for. changes: of
    config.json."""
    packed, dense = folder / "packed", folder / "dense"
    for target in (packed, dense):
        shutil.copytree(path, target)
    stored, meant = load_file(path / "model.safetensors"), load_file(path / "model.safetensors")
    for name, tensor in list(stored.items()):
        if tensor.ndim not in (2, 3) or not name.endswith((".weight", "_proj")) or PLAIN.search(name):
            continue
        stem, dot = name.removesuffix(".weight"), "." if name.endswith(".weight") else ""
        made = store(stem, tensor.float()) if tensor.ndim == 2 else stacked(store, stem, tensor.float())
        if made is not None:
            del stored[name]
            endings = {ending if dot else ending.removeprefix("weight"): part for ending, part in made[0].items()}
            stored |= {f"{stem}{dot}{ending}": part.contiguous().clone() for ending, part in endings.items()}
            meant[name] = made[1].float()
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    save_file(meant, dense / "model.safetensors", {"format": "pt"})
    file = packed / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes, "quantization_config": config}))
    return packed, dense


def stacked(store: Store, stem: str, weight: Tensor) -> Stored | None:
    """The matrices of all experts [E, N, K], each as `store` makes it, as one."""
    each = [made for matrix in weight if (made := store(stem, matrix)) is not None]
    if not each:
        return None
    tensors = {ending: torch.stack([made[0][ending] for made in each]) for ending in each[0][0]}
    return tensors, torch.stack([made[1] for made in each])


def named(store: Store, **endings: str) -> Store:
    """The same under other names."""

    def renamed(stem: str, weight: Tensor) -> Stored | None:
        made = store(stem, weight)
        return made and ({endings.get(name, name): tensor for name, tensor in made[0].items()}, made[1])

    return renamed


def packed_fp4(stem: str, weight: Tensor) -> Stored:
    """Two weights per byte of int8, and a power of two for each 32."""
    groups = weight.unflatten(1, (-1, 32))
    exponents = (groups.abs().amax(-1) / 6).clamp(min=2.0**-20).log2().ceil()
    codes, values = e2m1(groups / exponents.exp2()[..., None])
    codes = codes.flatten(1)
    meant = (values * exponents.exp2()[..., None]).flatten(1)
    return {"weight": (codes[:, ::2] | codes[:, 1::2] << 4).view(torch.int8), "scale": exponents.exp2().to(E8M0)}, meant


def deepseek_v4(stem: str, weight: Tensor) -> Stored | None:
    """As DeepSeek V4 is published: FP8 in blocks, experts in FP4, scales that are powers of two."""
    fp8 = named(per_block(kind=E8M0), weight_scale_inv="scale")
    return (packed_fp4 if EXPERT.search(stem) else fp8)(stem, weight)


Row = tuple[Mapping[str, Any], Store, dict[str, Any]]
CLASSES: dict[str, Row] = {
    "deepseek_v4": ({**BLOCKS, "scale_fmt": "ue8m0"}, deepseek_v4, {"expert_dtype": "fp4"}),
    "glm5_next": (BLOCKS, per_block(), {}),
    "hy_v4": (MXFP8, mxfp8("weight_scale_inv"), {}),
    "minimax_m3_vl": (BLOCKS, per_block(), {}),
    "qwen4_exp": (BLOCKS, per_block(), {}),
    "mistral_large4": (BLOCKS, named(per_block(), weight_scale_inv="qscale_weight"), {}),
}
OURS: dict[str, Row] = {"step3p7": (BLOCKS, per_block(), {})}
"""Classes that a decoder of ours computes. Step stores the experts of a layer as one."""


def quantised_class(model_type: str, folder: Path) -> tuple[Path, Path]:
    """Return a quantised model of a class of `CLASSES` or `OURS`, and what its weights stand for."""
    sizes = {"moe_intermediate_size": 64} if model_type == "deepseek_v4" else {}  # a multiple of FP4's groups
    make_class_model(folder / "model", model_type, **sizes)
    config, store, changes = (CLASSES | OURS)[model_type]
    return quantise(folder / "model", folder, config, store, **changes)
