"""GGUF files of tiny models that see: the text part, and the projector file (mmproj) with the rest.

Names come from the gguf package's table, by the names under which transformers saves; what llama.cpp's converter does
to a tensor besides is done here again, from what it does.
Does not know: how localllm reads any of it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.gguf_files import ARCHITECTURES, write_gguf
from tests.gguf_hybrids import write_hybrid

TYPES = {
    "qwen2_vl": "qwen2vl_merger", "qwen2_5_vl": "qwen2.5vl_merger", "qwen3_vl": "qwen3vl_merger", "gemma3": "gemma3",
    "qwen3_5": "qwen3vl_merger", "mistral3": "pixtral", "pixtral": "pixtral", "smolvlm": "idefics3", "llava": "mlp",
}  # fmt: skip
"""Name in tests/models/seeing.py -> clip.projector_type."""
_SEES = re.compile(r"visual\.|vision_tower\.|vision_model\.|multi_modal_projector\.|connector\.")
_UNUSED = re.compile(r"vision_tower\.(vision_model\.)?head\.")
_TEXT_TYPES = {
    "qwen3_5_text": "qwen35",
    "qwen2_vl_text": "qwen2vl",
    "qwen2_5_vl_text": "qwen2vl",
    "qwen3_vl_text": "qwen3vl",
    "mistral": "llama",
}


def write_text_part(source: Path, path: Path, more: dict[str, Any] | None = None) -> None:
    """Write the text part of the model in folder `source`. more: metadata."""
    config = json.loads((source / "config.json").read_text())
    text = {**config["text_config"], "tie_word_embeddings": config.get("tie_word_embeddings", False)}
    folder = path.parent / f"{path.stem}-text"
    folder.mkdir()
    (folder / "tokenizer.json").write_text((source / "tokenizer.json").read_text())
    state = load_file(source / "model.safetensors")
    spelled = r"^(model\.)?(language_model|text_model)\.(model\.)?"
    kept = {re.sub(spelled, "model.", name): tensor for name, tensor in state.items() if not _SEES.search(name)}
    save_file(
        {name.replace("model.lm_head", "lm_head"): tensor for name, tensor in kept.items()},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps(text))
    architecture = _TEXT_TYPES.get(text["model_type"], text["model_type"])
    ARCHITECTURES.setdefault(text["model_type"], architecture)
    sections = (text.get("rope_parameters") or {}).get("mrope_section")
    if architecture == "qwen35":
        write_hybrid(folder, path, metadata={"rope.dimension_sections": [*sections, 0]})
        return
    metadata: dict[str, Any] = {f"{architecture}.rope.dimension_sections": [*sections, 0]} if sections else {}
    added = json.loads((source / "tokenizer.json").read_text())["added_tokens"]
    special = {token["id"] for token in added if token["special"]}
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    kinds = [int(control if index in special else normal) for index in range(config["text_config"]["vocab_size"])]
    write_gguf(folder, path, metadata={**metadata, "tokenizer.ggml.token_type": kinds, **(more or {})})


def write_projector(source: Path, path: Path, *, half: bool = False, **metadata: Any) -> None:
    """Write the rest. half: matrices in 16 bits. metadata: keys of clip.vision that are added or replaced."""
    config = json.loads((source / "config.json").read_text())
    kind, vision = _kind(config), config["vision_config"]
    processor = json.loads((source / "preprocessor_config.json").read_text())
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_string("clip.projector_type", TYPES[kind])
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_bool("clip.use_gelu", kind in ("gemma3", "smolvlm", "qwen3_vl", "qwen3_5"))
    writer.add_bool("clip.use_silu", vision.get("hidden_act") == "silu")
    facts = {**_facts(config, vision, processor), **metadata}
    for key, value in facts.items():
        kinds: dict[type, Any] = {int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
        kinds[type(value)](f"clip.vision.{key}", value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 8)
    for name, tensor in load_file(source / "model.safetensors").items():
        layer = re.search(r"\.layers\.(\d+)\.", name)
        is_cut = kind == "llava" and layer is not None and int(layer[1]) == vision["num_hidden_layers"] - 1
        if not _SEES.search(name) or _UNUSED.search(name) or is_cut:
            continue
        for stored, made in _converted(name, tensor.float(), kind, vision, names).items():
            is_half = half and made.ndim > 1 and "position" not in stored
            writer.add_tensor(stored, made.contiguous().numpy().astype(np.float16 if is_half else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _kind(config: dict[str, Any]) -> str:
    """Return the key of `TYPES`: transformers has Pixtral 12B as a LLaVA."""
    is_pixtral = config["model_type"] == "llava" and config["vision_config"]["model_type"] == "pixtral"
    return "pixtral" if is_pixtral else str(config["model_type"])


def _facts(config: dict[str, Any], vision: dict[str, Any], processor: dict[str, Any]) -> dict[str, Any]:
    kind = _kind(config)
    width = config["text_config"]["hidden_size"]
    hidden = vision.get("embed_dim") or vision["hidden_size"]
    positions = int(vision.get("num_position_embeddings", 0) ** 0.5)
    facts = {
        "projection_dim": width, "embedding_length": hidden, "patch_size": vision["patch_size"],
        "feed_forward_length": vision["hidden_size"] if kind == "qwen2_vl" else vision["intermediate_size"],
        "block_count": vision.get("depth") or vision["num_hidden_layers"],
        "attention.head_count": vision.get("num_heads") or vision["num_attention_heads"],
        "image_size": positions * vision["patch_size"] or vision.get("image_size") or 560,
        "image_mean": processor["image_mean"], "image_std": processor["image_std"],
    }  # fmt: skip
    if kind.startswith("qwen"):
        facts["spatial_merge_size"] = vision["spatial_merge_size"]
        facts["image_min_pixels"], facts["image_max_pixels"] = (
            processor["size"][edge] for edge in ("shortest_edge", "longest_edge")
        )
    if kind == "qwen2_5_vl":
        facts["n_wa_pattern"] = vision["fullatt_block_indexes"][0] + 1
    if kind == "qwen3_vl":
        deep = vision["deepstack_visual_indexes"]
        facts["is_deepstack_layers"] = [layer in deep for layer in range(vision["depth"])]
    if kind == "gemma3":
        facts["projector.scale_factor"] = (
            vision["image_size"] // vision["patch_size"] // int(config["mm_tokens_per_image"] ** 0.5)
        )
    if kind == "mistral3":
        facts |= {"spatial_merge_size": config["spatial_merge_size"], "image_size": processor["size"]["longest_edge"]}
    if kind == "pixtral":
        facts["image_size"] = processor["size"]["longest_edge"]
    if kind == "llava":
        facts["block_count"] -= 1  # the output of the last layer is not read
    if kind == "smolvlm":
        facts["projector.scale_factor"] = config["scale_factor"]
        facts["preproc_image_size"] = processor["size"]["longest_edge"]
        facts["image_size"] = processor["max_image_size"]["longest_edge"]
    return facts


def _converted(name: str, tensor: Tensor, kind: str, vision: dict[str, Any], names: Any) -> dict[str, Tensor]:
    """Return one saved tensor as the converter stores it."""
    if name.startswith(("model.visual.", "visual.")):
        name = name.removeprefix("model.")
        if name == "visual.patch_embed.proj.weight":
            return {"v.patch_embd.weight": tensor[:, :, 0], "v.patch_embd.weight.1": tensor[:, :, 1]}
        if deep := re.match(r"visual\.deepstack_merger_list\.(\d+)\.(?:linear_)?(\w+)\.(\w+)", name):
            return {f"v.deepstack.{vision['deepstack_visual_indexes'][int(deep[1])]}.{deep[2]}.{deep[3]}": tensor}
        if merger := re.match(r"visual\.merger\.(norm|linear_fc1|linear_fc2)\.(\w+)", name):
            stem = {"norm": "v.post_ln", "linear_fc1": "mm.0", "linear_fc2": "mm.2"}[merger[1]]
            return {f"{stem}.{merger[2]}": tensor}
    if kind == "gemma3":
        name = name.replace("_weight", ".weight")
        tensor = tensor + 1 if "soft_emb_norm" in name else tensor
    if kind in ("mistral3", "pixtral") and re.search(r"[qk]_proj\.weight$", name):
        heads = vision["num_attention_heads"]
        tensor = tensor.reshape(heads, 2, -1, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)
    if kind == "llava" and (linear := re.search(r"linear_([12])\.(\w+)$", name)):
        return {f"mm.{2 * int(linear[1]) - 2}.{linear[2]}": tensor}
    bare = name.removeprefix("model.")
    spelled = (name, bare, f"model.{name}", bare.replace("vision_tower.", "vision_tower.vision_model."))  # as published
    stored = next(filter(None, (names.get_name(each, (".weight", ".bias")) for each in spelled)), None)
    assert stored is not None, name
    return {stored: tensor}
