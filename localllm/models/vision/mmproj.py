"""The projector of a GGUF model: a second file (mmproj) with the part that reads pictures.

It is beside the model or in the folder above, where downloads and LM Studio put it; in Ollama's store the manifest
names both. A file for another model is recognised by its output size, which has to be the model's hidden size. What a
file says becomes transformers' configs; the published models say sizes of pictures that it leaves open.
Does not know: torch, how its tensors become a tower (tower.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from localllm.errors import CorruptModel, ModelError, ModelNotFound, UnsupportedModel
from localllm.models.formats.gguf.checkpoint import read_parts
from localllm.models.formats.gguf.file_names import ollama_manifests, projectors_for
from localllm.models.formats.gguf.header import GGUFHeader, plain, read_header
from localllm.models.spec.gguf import Metadata
from localllm.models.spec.vision import VisionSpec
from localllm.models.vision.families import family_of_type, read_vision

# ---- files ---------------------------------------------------------------------------------------------------------

NONE = "none"
"""The value of --mmproj that leaves the projector out."""
PROJECTION = "clip.vision.projection_dim"


def find_projector(path: Path, hidden_size: int, asked: str | None = None) -> Path | None:
    """Return the projector of the GGUF model at `path`; None: there is none, or none is wanted.

    asked: a file, `none`, or None: the file that is found. Raises `ModelNotFound`, `UnsupportedModel` and
    `CorruptModel` for a file that was asked for and does not fit.
    """
    if asked == NONE:
        return None
    if asked is not None:
        return _required(Path(asked).expanduser(), path, hidden_size)
    return next((file for file in _candidates(path) if _fits(file, hidden_size)), None)


def _required(file: Path, model: Path, hidden_size: int) -> Path:
    if not file.is_file():
        raise ModelNotFound(
            f"--mmproj {file} does not exist.", hint="--mmproj none serves the text part.", param="mmproj"
        )
    header = read_header(file)
    if PROJECTION not in header.metadata:
        raise UnsupportedModel(
            f"{file.name} is not a projector for pictures.", f"It has no {PROJECTION}.", "Pass a mmproj-*.gguf file."
        )
    if not _makes_rows(header, hidden_size):
        raise UnsupportedModel(
            f"{file.name} belongs to another model than {model.name}.",
            f"It makes rows of {header.metadata[PROJECTION]} numbers; the model reads {hidden_size}.",
            "Download the mmproj file of the same repository.",
        )
    return file


def _fits(file: Path, hidden_size: int) -> bool:
    try:
        return _makes_rows(read_header(file), hidden_size)
    except ModelError:
        return False


def _makes_rows(header: GGUFHeader, hidden_size: int) -> bool:
    """Return whether the rows of a picture have this size. Old files state the size of the tower's own projection."""
    sizes = {size for name, tensor in header.tensors.items() if name.startswith("mm.") for size in tensor.shape}
    return PROJECTION in header.metadata and hidden_size in {header.metadata[PROJECTION], *sizes}


def _candidates(path: Path) -> Iterator[Path]:
    """Yield files that may be the model's projector, the most likely one first."""
    if path.parent.name == "blobs":
        for _, blobs in ollama_manifests(path.parent.parent):
            if blobs.get("model") == [path.name]:
                yield from (path.parent / name for name in blobs.get("projector", ()))
    for folder in (path.parent, path.parent.parent):
        names = [file.name for file in folder.glob("*.gguf")] if folder.is_dir() else []
        yield from (folder / name for name in projectors_for(path.name, names))


# ---- what they say --------------------------------------------------------------------------------------------------

Fields = dict[str, Any]


class Described(NamedTuple):
    """A projector file as transformers' config.json and preprocessor_config.json."""

    config: Fields
    processor: Fields  # with image_processor_type, the class that reads pictures on Pillow


class _File:
    """The header of a projector file with type checks."""

    def __init__(self, header: GGUFHeader, architecture: str) -> None:
        """architecture: general.architecture of the model's own file."""
        values = {**header.metadata, "general.architecture": "clip.vision"}
        self.tensors, self.architecture, self.metadata = header.tensors, architecture, Metadata(header.file, values)
        self.hidden = self.count("embedding_length")
        self.patch, self.size = self.count("patch_size"), self.count("image_size")

    def count(self, key: str, default: int | None = None) -> int:
        found = self.metadata.optional_count(key)
        if found is None and default is not None:
            return default
        return self.metadata.count(key)

    def has(self, name: str) -> bool:
        return name in self.tensors

    def flag(self, name: str) -> bool:
        return bool(self.metadata.values.get(f"clip.{name}"))

    @property
    def mlp_width(self) -> int:
        """Width of the feed-forward part, from its matrix: what the metadata says is wrong in files of Qwen2-VL."""
        first = self.tensors.get("v.blk.0.ffn_up.weight")
        if first is None or len(first.shape) != 2:
            raise CorruptModel(f"{self.metadata.file.name} has no matrix v.blk.0.ffn_up.weight.")
        return next((size for size in first.shape if size != self.hidden), self.hidden)

    def tower(self, **names: Any) -> Fields:
        """Return the fields that most towers have. names: further ones."""
        return {
            "hidden_size": self.hidden, "intermediate_size": self.mlp_width,
            "num_hidden_layers": self.count("block_count"), "num_attention_heads": self.count("attention.head_count"),
            "image_size": self.size, "patch_size": self.patch, **names,
        }  # fmt: skip

    def qwen(self, **names: Any) -> Fields:
        return {
            "depth": self.count("block_count"), "num_heads": self.count("attention.head_count"),
            "patch_size": self.patch, "spatial_merge_size": self.count("spatial_merge_size", 2), **names,
        }  # fmt: skip

    def processor(self, name: str, **fields: Any) -> Fields:
        mean, std = (self.metadata.get(f"image_{key}") for key in ("mean", "std"))
        colours = {"image_mean": mean, "image_std": std}
        return {"image_processor_type": name, **{key: value for key, value in colours.items() if value}, **fields}


def _qwen_processor(file: _File, least: int, most: int) -> Fields:
    size = {
        "shortest_edge": file.count("image_min_pixels", least), "longest_edge": file.count("image_max_pixels", most)
    }  # fmt: skip
    merge = file.count("spatial_merge_size", 2)
    return file.processor("Qwen2VLImageProcessorPil", patch_size=file.patch, merge_size=merge, size=size)


def _qwen2(file: _File) -> Described:
    width, depth, every = file.count("projection_dim"), file.count("block_count"), file.count("n_wa_pattern", 8)
    processor = _qwen_processor(file, 3136, 12_845_056)
    if not file.has("v.blk.0.ffn_gate.weight"):
        vision = file.qwen(embed_dim=file.hidden, hidden_size=width, mlp_ratio=file.mlp_width // file.hidden)
        return Described({"model_type": "qwen2_vl", "vision_config": vision}, processor)
    vision = file.qwen(
        hidden_size=file.hidden, intermediate_size=file.mlp_width, out_hidden_size=width,
        window_size=file.count("window_size", 112), fullatt_block_indexes=list(range(every - 1, depth, every)),
    )  # fmt: skip
    return Described({"model_type": "qwen2_5_vl", "vision_config": vision}, processor)


_QWEN3 = {"qwen3vlmoe": "qwen3_vl_moe", "qwen35": "qwen3_5", "qwen35moe": "qwen3_5_moe"}


def _qwen3(file: _File) -> Described:
    deep = file.metadata.get("is_deepstack_layers") or []
    positions = file.tensors.get("v.position_embd.weight")
    vision = file.qwen(
        hidden_size=file.hidden, intermediate_size=file.mlp_width, out_hidden_size=file.count("projection_dim"),
        deepstack_visual_indexes=[layer for layer, is_deep in enumerate(deep) if is_deep],
        num_position_embeddings=(file.size // file.patch) ** 2 if positions is None else positions.shape[0],
    )  # fmt: skip
    kind = _QWEN3.get(file.architecture, "qwen3_vl")
    return Described({"model_type": kind, "vision_config": vision}, _qwen_processor(file, 65_536, 16_777_216))


def _gemma3(file: _File) -> Described:
    side = file.size // file.patch // file.count("projector.scale_factor", 4)
    config = {
        "model_type": "gemma3", "mm_tokens_per_image": side * side,
        "vision_config": file.tower(model_type="siglip_vision_model", vision_use_head=False),
    }  # fmt: skip
    square = {"height": file.size, "width": file.size}
    return Described(config, file.processor("Gemma3ImageProcessorPil", size=square))


def _pixtral(file: _File) -> Described:
    merge = file.count("spatial_merge_size", 1)
    vision = file.tower(
        model_type="pixtral", head_dim=file.hidden // file.count("attention.head_count"),
        hidden_act="silu" if file.flag("use_silu") else "gelu",
    )  # fmt: skip
    projector = {"vision_feature_layer": -1, "multimodal_projector_bias": file.has("mm.1.bias")}
    config = {"model_type": "mistral3", "spatial_merge_size": merge}
    if not file.has("mm.patch_merger.weight"):
        config = {"model_type": "llava", "vision_feature_select_strategy": "full"}
    edge = {"longest_edge": file.size}
    processor = file.processor("PixtralImageProcessorPil", patch_size=file.patch, size=edge)
    return Described({**config, **projector, "vision_config": vision}, processor)


def _idefics(file: _File) -> Described:
    config = {
        "model_type": "smolvlm", "scale_factor": file.count("projector.scale_factor", 2),
        "vision_config": file.tower(), "text_config": {"model_type": "llama"},
    }  # fmt: skip
    edges = {
        "size": {"longest_edge": file.count("preproc_image_size", 4 * file.size)},
        "max_image_size": {"longest_edge": file.size},
    }
    return Described(config, file.processor("SmolVLMImageProcessorPil", **edges))


def _llava(file: _File) -> Described:
    is_clip = file.has("v.class_embd")
    act = "gelu" if file.flag("use_gelu") else "quick_gelu"
    vision = file.tower(model_type="clip_vision_model" if is_clip else "siglip_vision_model", hidden_act=act)
    vision |= {} if is_clip else {"vision_use_head": False, "hidden_act": "gelu_pytorch_tanh"}
    config = {
        "model_type": "llava", "vision_feature_layer": -1, "vision_config": vision,
        "vision_feature_select_strategy": "default" if is_clip else "full",
    }  # fmt: skip
    square = {"height": file.size, "width": file.size}
    sizes = {"size": {"shortest_edge": file.size}, "crop_size": square} if is_clip else {"size": square}
    name = "CLIPImageProcessorPil" if is_clip else "SiglipImageProcessorPil"
    is_tiled = file.metadata.get("mm_patch_merge_type") not in (None, "flat") or file.has("model.image_newline")
    if is_tiled or file.metadata.get("feature_layer") is not None:
        raise UnsupportedModel(
            f"{file.metadata.file.name} is a projector of LLaVA 1.6 or Granite Vision, which is not supported in GGUF.",
            "Supported with this type of projector: LLaVA 1.5.",
            "--mmproj none serves the text part; the safetensors repository of the model sees.",
        )
    return Described(config, file.processor(name, **sizes))


KINDS: dict[str, Callable[[_File], Described]] = {
    "qwen2vl_merger": _qwen2,
    "qwen2.5vl_merger": _qwen2,
    "qwen3vl_merger": _qwen3,
    "gemma3": _gemma3,
    "pixtral": _pixtral,
    "idefics3": _idefics,
    "mlp": _llava,
}
"""By clip.projector_type."""


def describe(projector: Path, architecture: str) -> Described:
    """Return the configs of a projector file. architecture: general.architecture of the model's own file.

    Raises `UnsupportedModel` for a type that is not read, and `CorruptModel`.
    """
    header = read_parts(projector)[0]
    values = header.metadata
    kind = values.get("clip.projector_type") or values.get("clip.vision.projector_type")
    if kind not in KINDS:
        raise UnsupportedModel(
            f"{projector.name} has a projector of type {kind!r}, which is not supported.",
            f"Supported: {', '.join(sorted(KINDS))}.",
            "--mmproj none serves the text part; the safetensors repository of the model may see.",
        )
    made = KINDS[str(kind)](_File(header, architecture))
    width = values.get("clip.vision.projection_dim")
    text = {"hidden_size": width, "num_hidden_layers": 1, **made.config.get("text_config", {})}
    return Described({**made.config, "text_config": text}, made.processor)


def vision_of(projector: Path, model: Path, hidden_size: int) -> VisionSpec | None:
    """Return the part that reads pictures of a GGUF model with this projector. Raises like `describe`."""
    values = read_parts(model)[0].metadata
    config, processor = describe(projector, str(values["general.architecture"]))
    config["text_config"]["hidden_size"] = hidden_size
    kind = "pixtral" if config["vision_config"].get("model_type") == "pixtral" else config["model_type"]
    stored, pad = plain(values.get("tokenizer.ggml.tokens", [])), family_of_type(kind).frame[1]
    tokens = stored if isinstance(stored, list) else []
    config["image_token_id"] = tokens.index(pad) if pad in tokens else len(tokens)  # `read_tokenizer` adds it
    vision = read_vision(config, processor)
    return None if vision is None else replace(vision, projector=str(projector))


def model_config(spec: VisionSpec) -> Any:
    """Return transformers' config of the model, whose decoder has one small layer."""
    from transformers import AutoConfig

    config = described(spec).config
    text = {**config["text_config"], "num_attention_heads": 1, "num_key_value_heads": 1,
            "vocab_size": 8, "pad_token_id": 0}  # fmt: skip
    return AutoConfig.for_model(**{**config, "text_config": text})


def image_processor(spec: VisionSpec) -> Any:
    """Return transformers' image processor for the pictures of a projector file."""
    from transformers.models.auto.image_processing_auto import get_image_processor_class_from_name

    fields = dict(described(spec).processor)
    return get_image_processor_class_from_name(fields.pop("image_processor_type"))(**fields)


def described(spec: VisionSpec) -> Described:
    """Return the configs of the projector of a model."""
    architecture = next((name for name, kind in _QWEN3.items() if kind == spec.model_type), "")
    return describe(Path(spec.projector), architecture)
