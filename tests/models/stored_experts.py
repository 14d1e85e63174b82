"""Mixtures of experts as checkpoints store them: fused, per expert, MXFP4."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from localllm.kernels.moe.weights import PlanarExperts, ScaledExperts
from tests.models.formats.quantised import Store
from tests.models.formats.stores import BLOCKS, DYNAMIC, GPTQ, MXFP8, STATIC, gptq, mxfp8, per_block, per_tensor
from tests.tiny import make_tiny_model

PathOf = Callable[[str], Path]
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def copy(source: Path, target: Path, **config: Any) -> Path:
    shutil.copytree(source, target)
    set_config(target, **config)
    return target


def set_config(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def rewrite(path: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    return path


def fuse(tensors: dict[str, Tensor], router: str, names: tuple[str, str, str], fused: str) -> None:
    """One tensor [E, n, K] a layer, as transformers 5 holds them; `names` are those of gate, up and down."""
    gates = sorted(name for name in tensors if name.endswith(f"experts.0.{names[0]}.weight"))
    assert gates
    for gate in gates:
        prefix = gate.removesuffix(f"0.{names[0]}.weight")
        count = sum(name.startswith(prefix) for name in tensors) // 3
        gate_up, down = [], []
        for expert in range(count):
            gate_part, up_part, down_part = (tensors.pop(f"{prefix}{expert}.{name}.weight") for name in names)
            gate_up.append(torch.cat((gate_part, up_part)))
            down.append(down_part)
        new = prefix.replace(router, fused)
        tensors[f"{new}gate_up_proj"], tensors[f"{new}down_proj"] = torch.stack(gate_up), torch.stack(down)


def mxfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """weight [E, n, K] -> blocks [E, n, K / 32, 16], scales [E, n, K / 32], what they mean."""
    groups = weight.unflatten(-1, (-1, 32))
    exponents = (groups.abs().amax(-1) / 6).clamp(min=2.0**-20).log2().ceil()
    values = groups / exponents.exp2()[..., None]
    table = torch.tensor(E2M1)
    codes = (values.abs()[..., None] - table).abs().argmin(-1)
    meant = table[codes] * values.sign() * exponents.exp2()[..., None]
    codes = codes | ((values < 0).long() << 3)
    return (
        (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8),
        (exponents + 127).to(torch.uint8),
        meant.flatten(-2),
    )


@pytest.fixture(scope="module")
def gpt_oss(tiny_model_path: PathOf, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """In MXFP4 as it is published, and the same in fp32."""
    folder = tmp_path_factory.mktemp("gpt-oss")
    dense = copy(tiny_model_path("gpt_oss"), folder / "dense")
    packed = copy(dense, folder / "mxfp4", quantization_config={"quant_method": "mxfp4"})
    wide, narrow = load_file(dense / "model.safetensors"), load_file(packed / "model.safetensors")
    for name in [name for name in wide if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        blocks, scales, meant = mxfp4(narrow.pop(name).transpose(1, 2))
        narrow |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        wide[name] = meant.transpose(1, 2).contiguous()
    save_file(wide, dense / "model.safetensors")
    save_file(narrow, packed / "model.safetensors")
    return packed, dense


@pytest.fixture(scope="module")
def wide_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sizes that groups of 32 and blocks of 128 divide."""
    path = tmp_path_factory.mktemp("moe") / "model"
    return make_tiny_model(path, "qwen3_moe", hidden_size=128, moe_intermediate_size=128, intermediate_size=128)


def quantise_experts(source: Path, folder: Path, config: dict[str, Any], store: Store) -> tuple[Path, Path]:
    """A checkpoint whose experts are stored by `store`, and the same in fp32."""
    packed, dense = copy(source, folder / "packed", quantization_config=config), copy(source, folder / "dense")
    tensors, meant = load_file(packed / "model.safetensors"), load_file(dense / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        stem = name.removesuffix(".weight")
        stored = store(stem, tensors.pop(name))
        assert stored is not None
        tensors |= {f"{stem}.{ending}": tensor.contiguous() for ending, tensor in stored[0].items()}
        meant[name] = stored[1].float()
    save_file(tensors, packed / "model.safetensors")
    save_file(meant, dense / "model.safetensors")
    return packed, dense


WAYS: dict[str, tuple[dict[str, Any], Store, type]] = {
    "gptq": (GPTQ, gptq(4, 32), PlanarExperts),
    "fp8": ({**DYNAMIC, "ignored_layers": None}, per_tensor(), ScaledExperts),
    "fp8 static": ({**STATIC, "ignored_layers": None}, per_tensor(static="input_scale"), ScaledExperts),
    "mxfp8": (MXFP8, mxfp8(), ScaledExperts),
    "fp8 in blocks": ({**BLOCKS, "ignored_layers": None}, per_block(), ScaledExperts),
}
