"""Tiny random LoRA adapters, in the folder and under the names that PEFT gives them; and the base with one merged in.

Names come from transformers' own modules, as PEFT's do. Does not know: localllm.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.tiny import load_reference

SKIPPED = ("lm_head", "embed_out", "gate", "wg", "experts")
"""By the last word: the head, and what chooses between experts, which take no adapters here."""

_DENSE = ("q_proj", "k_proj", "v_proj", "o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
LORA_TARGETS = {
    "deepseek_v3": (
        "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "shared_experts.gate_proj", "shared_experts.down_proj",
    ),
    "gemma3n": (
        *_DENSE, "laurel.linear_left", "laurel.linear_right", "per_layer_input_gate", "per_layer_projection",
        "per_layer_model_projection",
    ),
    "gemma4_moe": _DENSE,
}  # fmt: skip
"""Matrices that adapters may change; of the other families all of them."""


def make_tiny_adapter(
    path: Path, base: Path, *, seed: int = 0, rank: int = 4, alpha: float = 8, targets: tuple[str, ...] = (),
    dtype: str = "float32", **config: Any,
) -> Path:  # fmt: skip
    """Random A and B for every linear layer of the base, or for those whose names end so; returns `path`."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (rows, columns) in linear_shapes(load_reference(base)).items():
        if targets and not name.endswith(targets):
            continue
        own = next((r for end, r in config.get("rank_pattern", {}).items() if name.endswith(end)), rank)
        a, b = (torch.randn(shape, generator=generator) * 0.3 for shape in ((own, columns), (rows, own)))
        tensors[f"base_model.model.{name}.lora_A.weight"] = a.to(getattr(torch, dtype))
        tensors[f"base_model.model.{name}.lora_B.weight"] = b.to(getattr(torch, dtype))
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(path / "adapter_model.safetensors"))
    write_config(path, r=rank, lora_alpha=alpha, base_model_name_or_path=str(base), **config)
    return path


def write_config(path: Path, **fields: Any) -> None:
    plain = {"peft_type": "LORA", "bias": "none", "use_dora": False, "modules_to_save": None, "task_type": "CAUSAL_LM"}
    (path / "adapter_config.json").write_text(json.dumps({**plain, **fields}))


def linear_shapes(model: Any) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of every linear layer that may have an adapter, Conv1D's included."""
    import torch

    shapes = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in SKIPPED:
            continue
        if isinstance(module, torch.nn.Linear):
            shapes[name] = tuple(module.weight.shape)
        elif type(module).__name__ == "Conv1D":
            shapes[name] = tuple(module.weight.shape)[::-1]
    return shapes


def merged(base: Path, adapter: Path) -> Any:
    """The base in transformers with W + scale * B A in place of W."""
    import torch
    from safetensors.torch import load_file

    config: Mapping[str, Any] = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(str(adapter / "adapter_model.safetensors"))
    model = load_reference(base)
    modules = dict(model.named_modules())
    for key in tensors:
        if not key.endswith(".lora_A.weight"):
            continue
        name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        a, b = tensors[key].float(), tensors[key.replace("lora_A", "lora_B")].float()
        rank = len(a)
        own = next((v for end, v in (config.get("alpha_pattern") or {}).items() if name.endswith(end)), None)
        alpha = config["lora_alpha"] if own is None else own
        change = b @ a * (alpha / (rank**0.5 if config.get("use_rslora") else rank))
        with torch.no_grad():
            weight = modules[name].weight
            weight.add_(change.t() if type(modules[name]).__name__ == "Conv1D" else change)
    return model
