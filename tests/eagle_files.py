"""Tiny EAGLE drafters, made from a target's config and a seed, in the forms in which they are published.

Does not know: localllm.
"""

import json
import math
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

Form = Literal["authors", "speculators"]


def eagle_tensors(
    target: dict[str, Any], method: str, *, draft_vocab: int, num_taps: int = 3, seed: int = 0
) -> dict[str, Tensor]:
    """Return a drafter's tensors by the names of speculators. Norms are shaken, so that each of them matters."""
    made = torch.Generator().manual_seed(seed)
    width, hidden, vocab = target["hidden_size"], target["intermediate_size"], target["vocab_size"]
    heads, kv_heads = target["num_attention_heads"], target["num_key_value_heads"]
    head = width // heads
    is_third = method == "eagle3"
    inputs = 2 * width if is_third else width

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=made) / math.sqrt(columns)

    def norm(size: int) -> Tensor:
        return 1 + torch.randn(size, generator=made) * 0.2

    tensors = {
        "fc.weight": matrix(width, (num_taps if is_third else 2) * width),
        "layers.0.self_attn.q_proj.weight": matrix(heads * head, inputs),
        "layers.0.self_attn.k_proj.weight": matrix(kv_heads * head, inputs),
        "layers.0.self_attn.v_proj.weight": matrix(kv_heads * head, inputs),
        "layers.0.self_attn.o_proj.weight": matrix(width, heads * head),
        "layers.0.mlp.gate_proj.weight": matrix(hidden, width),
        "layers.0.mlp.up_proj.weight": matrix(hidden, width),
        "layers.0.mlp.down_proj.weight": matrix(width, hidden),
        "layers.0.post_attention_layernorm.weight": norm(width),
        "embed_tokens.weight": matrix(vocab, width),  # a stale copy
    }
    if is_third:
        tokens = torch.randperm(vocab, generator=made)[:draft_vocab].sort().values
        tensors |= {
            "layers.0.input_layernorm.weight": norm(width),
            "layers.0.hidden_norm.weight": norm(width),
            "norm.weight": norm(width),
            "lm_head.weight": matrix(draft_vocab, width),
            "d2t": tokens - torch.arange(draft_vocab),
            "t2d": torch.zeros(vocab, dtype=torch.bool).index_fill_(0, tokens, True),
        }
    return tensors


def write_eagle(
    path: Path,
    target: dict[str, Any],
    method: str = "eagle3",
    *,
    form: Form = "authors",
    taps: list[int] | None = None,
    draft_vocab: int = 96,
    seed: int = 0,
    tensors: dict[str, Tensor] | None = None,
    as_bin: bool = False,
    **fields: Any,
) -> Path:
    """Write a drafter for a target with this config.json. authors: a flat config and `midlayer`, as the authors of
    EAGLE publish. as_bin: in pytorch_model.bin. fields: further fields of config.json, or other values of these."""
    given = tensors is not None
    tensors = tensors or eagle_tensors(target, method, draft_vocab=draft_vocab, num_taps=len(taps or "123"), seed=seed)
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    layer = {name: target[name] for name in names} | {
        "model_type": "llama", "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0,
        "max_position_embeddings": 2048, "torch_dtype": "float32",
    }  # fmt: skip
    is_third = method == "eagle3"
    own: dict[str, Any] = {"draft_vocab_size": draft_vocab} if is_third else {}
    if taps is not None:
        own["eagle_aux_hidden_state_layer_ids"] = taps
    if form == "speculators":
        own |= {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": method,
            "transformer_layer_config": layer,
            "speculators_config": {"algorithm": method, "verifier": {"name_or_path": "somebody/target"}},
        }
    else:
        own |= {**layer, "architectures": ["LlamaForCausalLMEagle3" if is_third else "LlamaForCausalLM"]}
        if is_third and not given:
            tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({**own, **fields}), encoding="utf-8")
    if as_bin:
        torch.save(tensors, path / "pytorch_model.bin")
    else:
        from safetensors.torch import save_file

        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    return path
