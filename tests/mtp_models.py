"""Tiny checkpoints with a layer for multi-token prediction, and what that layer computes, by transformers' own layers.

A tiny model of three layers is made; its last layer becomes the prediction layer's, and the parts around it are random.
Does not know: localllm.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.gguf_files import ARCHITECTURES, write_gguf
from tests.gguf_hybrids import write_hybrid
from tests.models.vision_models import make_model
from tests.tiny import FAMILIES, load_reference, make_tiny_model, save_tiny_tokenizer

LAYERS = 2  # of the target; the third is the prediction layer's


@dataclass(frozen=True)
class MTPKind:
    base: str  # in tests/tiny.py, or of a text part in tests/models/vision_models.py
    names: dict[str, str]  # the parts around the layer
    hidden_first: bool = False
    hands_on_normed: bool = False
    has_copies: bool = True  # of the embedding and the head
    stored_prefix: str = f"model.layers.{LAYERS}."
    around: str | None = None  # prefix of the parts around the layer, if it is not the layer's own
    norm_plus_one: bool = False  # norms are stored as w - 1
    reads_normed: bool = True  # the target's hidden state after its final norm, not before it
    renames: tuple[tuple[str, str], ...] = ()  # of the layer's tensors
    window: int | None = None  # of the layer
    config: tuple[tuple[str, Any], ...] = ()
    overrides: tuple[tuple[str, Any], ...] = ()


_DEEPSEEK = {"embed": "enorm", "hidden": "hnorm", "projection": "eh_proj", "final": "shared_head.norm"}
_QWEN = {"embed": "pre_fc_norm_embedding", "hidden": "pre_fc_norm_hidden", "projection": "fc", "final": "norm"}
_GGUF = {"embed": "enorm", "hidden": "hnorm", "projection": "eh_proj", "final": "shared_head_norm"}
_STEP = (
    ("layer_types", ["full_attention", "sliding_attention", "sliding_attention"]),  # also of the prediction layer
    ("swiglu_limits_shared", [0.0, 0.0, 0.5]),
)
_HYBRID = (("layer_types", ["linear_attention", "full_attention", "full_attention"]),)
KINDS = {
    "deepseek_v3": MTPKind("deepseek_v3", _DEEPSEEK),
    "glm4_moe": MTPKind("glm4_moe", _DEEPSEEK),
    "glm4_moe_lite": MTPKind("glm4_moe_lite", _DEEPSEEK),
    "deepseek_v32": MTPKind("deepseek_v32", _DEEPSEEK, overrides=(("mlp_layer_types", ["sparse", "dense", "sparse"]),)),
    "qwen3_5": MTPKind(
        "qwen3_5",
        _QWEN,
        hands_on_normed=True,
        has_copies=False,
        stored_prefix="mtp.layers.0.",
        around="mtp.",
        norm_plus_one=True,
        overrides=_HYBRID,
    ),
    "qwen3_next": MTPKind(
        "qwen3_next",
        _QWEN,
        hands_on_normed=True,
        has_copies=False,
        stored_prefix="mtp.layers.0.",
        around="mtp.",
        norm_plus_one=True,
        overrides=_HYBRID,
    ),
    "mellum": MTPKind(
        "mellum",
        _QWEN,
        hands_on_normed=True,
        has_copies=False,
        stored_prefix="mtp.layers.0.",
        around="mtp.",
        window=20,
        overrides=(("layer_types", ["full_attention", "sliding_attention", "sliding_attention"]),),
    ),
    "mimo": MTPKind(
        "qwen2",
        {
            "embed": "token_layernorm",
            "hidden": "hidden_layernorm",
            "projection": "input_proj",
            "final": "final_layernorm",
        },
        hidden_first=True,
        hands_on_normed=True,
        has_copies=False,
        stored_prefix="model.mtp_layers.0.",
        config=(("architectures", ["MiMoForCausalLM"]), ("model_type", "mimo")),
        overrides=(("tie_word_embeddings", False),),
    ),
    "mimo_v2": MTPKind(
        "mimo_v2",
        {**_DEEPSEEK, "final": "final_layernorm"},
        hands_on_normed=True,
        has_copies=False,
        stored_prefix="model.mtp.layers.0.",
        window=20,
        renames=((r"\.post_attention_layernorm\.", ".pre_mlp_layernorm."),),
        overrides=(
            ("layer_types", ["full_attention", "sliding_attention", "sliding_attention"]),
            ("mlp_layer_types", ["dense", "sparse", "dense"]),
        ),
    ),
    "step3p5": MTPKind(
        "Step3p7Config",
        {**_DEEPSEEK, "final": "transformer.shared_head.norm", "head": "transformer.shared_head.output"},
        reads_normed=False,
        norm_plus_one=True,
        window=20,
        config=(("architectures", ["Step3p5ForCausalLM"]), ("model_type", "step3p5"), *_STEP),
        overrides=(("mlp_layer_types", ["dense", "sparse", "dense"]), ("swiglu_limits", [0.0, 0.4, 0.0]), *_STEP),
    ),
}


def make_mtp_model(path: Path, name: str, *, seed: int = 0) -> Path:
    """Write the checkpoint, and beside it the model with all layers in path/whole, which `MTPOracle` reads."""
    kind = KINDS[name]
    whole, layers = path / "whole", {"num_hidden_layers": LAYERS + 1, **dict(kind.overrides)}
    if kind.base in FAMILIES:
        make_tiny_model(whole, kind.base, seed=seed, **layers)
    else:
        make_model(whole, kind.base, **layers)
        save_tiny_tokenizer(whole)
    tensors = {key: each for key, each in load_file(whole / "model.safetensors").items() if "vi" not in key[:3]}
    own = {key for key in tensors if key.startswith(f"model.layers.{LAYERS}.")}
    stored = {key: tensors[key] for key in tensors.keys() - own}
    stored |= {_stored_name(kind, key): tensors[key] for key in own}
    around = _parts_around(tensors["model.embed_tokens.weight"].shape[1], seed)
    prefix = kind.stored_prefix if kind.around is None else kind.around
    for part, tensor in around.items():
        shift = 1.0 if kind.norm_plus_one and part != "projection" else 0.0
        stored[f"{prefix}{kind.names[part]}.weight"] = tensor - shift
    if kind.has_copies:
        stored[f"{kind.stored_prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        head = kind.names.get("head", "shared_head.head")
        stored[f"{kind.stored_prefix}{head}.weight"] = tensors["lm_head.weight"].clone()
    for file in whole.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    save_file(around, path / "around.bin")
    config = json.loads((whole / "config.json").read_text())
    config = config.get("text_config", config)
    lists = {key: value[:LAYERS] for key, value in config.items() if key in ("layer_types", "mlp_layer_types")}
    config |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1, **lists, **dict(kind.config)}
    (path / "config.json").write_text(json.dumps(config))
    return path


def converted_source(path: Path, name: str, out: Path) -> Path:
    """Write to folder `out` the checkpoint with the layer behind the model's own, and GGUF's names around it."""
    kind, whole = KINDS[name], path / "whole"
    tensors = load_file(whole / "model.safetensors")
    around = load_file(path / "around.bin")
    for part, stored in _GGUF.items():
        shift = 1.0 if kind.norm_plus_one and part != "projection" else 0.0
        tensors[f"blk.{LAYERS}.nextn.{stored}.weight"] = around[part] - shift
    if kind.has_copies:
        tensors[f"blk.{LAYERS}.nextn.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"blk.{LAYERS}.nextn.shared_head_head.weight"] = tensors["lm_head.weight"].clone()
    out.mkdir()
    for file in whole.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def as_gguf(path: Path, name: str, file: Path, block_type: str = "F32", *, has_layer: bool = True) -> Path:
    """Write the checkpoint as a GGUF file, with the prediction layer as its last one or without it."""
    source = converted_source(path, name, file.with_suffix(".source"))
    if name.startswith("qwen"):
        layers = {"nextn_predict_layers": 1} if has_layer else {"block_count": 2}
        return write_hybrid(source, file, block_type, metadata=layers, left_out="" if has_layer else r"blk\.2\.")
    write_gguf(source, file, block_type, metadata={f"{ARCHITECTURES[name]}.nextn_predict_layers": 1})
    return file


def _stored_name(kind: MTPKind, name: str) -> str:
    """Return the name of a tensor of the prediction layer, which is the last one of the whole model."""
    for pattern, replacement in ((rf"^model\.layers\.{LAYERS}\.", kind.stored_prefix), *kind.renames):
        name = re.sub(pattern, replacement, name)
    return name


def _parts_around(hidden: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed + 1)
    norms = {part: 1 + torch.randn(hidden, generator=generator) * 0.2 for part in ("embed", "hidden", "final")}
    return {**norms, "projection": torch.randn(hidden, 2 * hidden, generator=generator) * 0.2}


class MTPOracle:
    """The prediction layer over a whole text at once, without a cache, in float32."""

    def __init__(self, path: Path, name: str, other: dict[str, Tensor] | None = None) -> None:
        """other: tensors of the prediction layer by their stored names, in place of those in the checkpoint."""
        self.kind, self.parts = KINDS[name], load_file(path / "around.bin")
        reference = load_reference(path / "whole")
        if other is not None:
            prefix, own = self.kind.stored_prefix, f"model.layers.{LAYERS}."
            reference.load_state_dict({key.replace(prefix, own): other[key] for key in other}, strict=False)
            self.parts["projection"] = other[f"{prefix}{self.kind.names['projection']}.weight"]
        self._model, self._head = getattr(reference.model, "language_model", reference.model), reference.lm_head
        self._layer = self._model.layers[LAYERS]
        self.embedding_scale = 1.0  # of a copy of the embedding
        self._model.layers = self._model.layers[:LAYERS]

    @torch.no_grad()
    def target_hidden(self, token_ids: list[int]) -> Tensor:
        """Return [T, hidden] of the target after its final norm, or before it if the layer reads this."""
        streams = list[Tensor]()
        hook = self._model.norm.register_forward_pre_hook(lambda _, given: streams.append(given[0]))
        normed = self._model(torch.tensor([token_ids])).last_hidden_state
        hook.remove()
        return (normed if self.kind.reads_normed else streams[-1])[0]

    @torch.no_grad()
    def hidden(self, token_ids: list[int], before: Tensor) -> Tensor:
        """Return [T - 1, hidden], what each pair hands on. before: [T - 1, hidden], of the token before each pair's."""
        embedded = self._norm("embed", self._model.embed_tokens(torch.tensor(token_ids[1:])) * self.embedding_scale)
        read = self._norm("hidden", before)
        both = (read, embedded) if self.kind.hidden_first else (embedded, read)
        x = (torch.cat(both, dim=1) @ self.parts["projection"].T)[None]
        positions = torch.arange(x.shape[1])[None]
        mask = torch.full((x.shape[1],) * 2, torch.finfo(torch.float32).min).triu(1)[None, None]
        kinds = ()
        if (window := self.kind.window) is not None:
            mask += torch.full_like(mask, torch.finfo(torch.float32).min).tril(-window)
            kinds = ("sliding_attention",)
        rotation = self._model.rotary_emb(x, positions, *kinds)
        out = self._layer(x, attention_mask=mask, position_ids=positions, position_embeddings=rotation)
        out = (out[0] if isinstance(out, tuple) else out)[0]
        return self._norm("final", out) if self.kind.hands_on_normed else out

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        return self._head(hidden if self.kind.hands_on_normed else self._norm("final", hidden))

    def _norm(self, part: str, x: Tensor) -> Tensor:
        norm = self._model.norm
        eps = norm.eps if self.kind.norm_plus_one else norm.variance_epsilon
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * self.parts[part]
