"""The parts of a model that turn pictures and sound into rows of the decoder's input: transformers' own modules.

The whole model is built without memory, its decoder is deleted, and the weights of the rest are read. A tower answers
for one picture or sound at a time; of families that cut pictures into tiles, few tiles run at once on a CPU, and long
sound is read in pieces, where the family reads pieces by themselves.

Projector files of GGUF hold llama.cpp's names, which the gguf package maps from the published ones, and some tensors in
another form:

    Qwen      the two times of a patch are two matrices
    Pixtral   rows of q and k are moved, as for Llama
    Gemma 3   a norm is stored as w + 1
    LLaVA     the last layer of CLIP, whose output is not read, is left out

Does not know: which requests read the rows, where they are kept (runner/pictures.py).
"""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from localllm.errors import CorruptModel, UnsupportedModel
from localllm.files.json_file import read_json_object
from localllm.models.families.text_part import is_thinker, without_thinker
from localllm.models.formats.gguf.checkpoint import GGUFCheckpoint, open_gguf
from localllm.models.formats.gguf.matrices import widen
from localllm.models.formats.registry import open_checkpoint
from localllm.models.spec.gguf import LLAMA_ROWS
from localllm.models.spec.vision import HearingSpec, VisionSpec
from localllm.models.transformers_backend.config_class import load_config
from localllm.models.transformers_backend.module import read_module
from localllm.models.vision.families import TILES_AT_ONCE, family_of
from localllm.models.vision.mmproj import described, model_config
from localllm.models.vision.sound import sound_family_of

_OF_SOUND = (
    r"(^|\.)(language_model|text_model|vision_tower|embed_vision|visual)\.", r"^lm_head",
    r"^model\.(layers|embed_tokens|norm)\b",
)  # fmt: skip
"""Stored names of what a tower of sound does not read."""
_SHORT_TEXT = {
    "model_type": "qwen3", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
    "head_dim": 8, "intermediate_size": 8, "vocab_size": 8, "pad_token_id": 0,
}  # fmt: skip
"""Sizes of a decoder that is built and dropped before any weight is read."""
_OF_OTHERS = (
    r"(^|\.)(language_model|text_model|audio_tower|embed_audio)\.", r"^lm_head",
    r"^model\.(layers|embed_tokens|norm)\b", r"^mtp\.",
)  # fmt: skip
"""Stored names of what is not read: the decoder, and parts that read sound."""


class Tower:
    """A loaded tower and its projector."""

    def __init__(self, module: Any, spec: VisionSpec, device: torch.device, dtype: torch.dtype) -> None:
        self.module, self.spec, self.device, self.dtype = module, spec, device, dtype
        taken = inspect.signature(module.get_image_features).parameters
        self._keywords = frozenset(taken)
        self._per_tile = family_of(spec).per_tile and device.type == "cpu"

    @property
    def bytes_held(self) -> int:
        tensors = [*self.module.parameters(), *self.module.buffers()]
        return sum(tensor.nbytes for tensor in tensors)

    @torch.inference_mode()
    def expected_row_s(self) -> float:
        """Return about how many seconds one row takes: all weights for each of its patches, at the speed of one matrix
        product. Attention is not counted, so a large picture takes longer."""
        width = self.spec.width or 1024
        patches, weights = (torch.ones(rows, width, device=self.device, dtype=self.dtype) for rows in (256, 4 * width))
        took = []
        for _ in range(3):
            started = time.perf_counter()
            float((patches @ weights.T)[-1, -1])  # waits for a device
            took.append(time.perf_counter() - started)
        num_weights: int = sum(each.numel() for each in self.module.parameters())
        spec, of_patch = self.spec, min(took) * num_weights / weights.numel() / len(patches)
        return of_patch * (spec.tile_patches / spec.tile_tokens if spec.tile_tokens else spec.merge**2)

    @torch.inference_mode()
    def encode(self, pixels: Mapping[str, Any]) -> Tensor:
        """Return the rows [rows, (1 + deep) * hidden] of one picture: the decoder's input, then what is added
        behind its first layers. pixels: `Processed.tensors`."""
        kept = {name: self._on_device(value) for name, value in pixels.items() if name in self._keywords}
        values, sizes = kept["pixel_values"], kept.get("image_sizes")
        if self.spec.model_type == "pixtral" and sizes is not None and sizes.max() <= self.spec.patch * self.spec.merge:
            # transformers 5.23 loses a dimension of pictures of one row: two of them are encoded
            return self._encode({name: torch.cat([each, each]) for name, each in kept.items()})[:1]
        axis = values.ndim - 4  # tiles are the dimension before channels, height and width
        if not self._per_tile or values.ndim < 4 or values.shape[axis] <= TILES_AT_ONCE:
            return self._encode(kept)
        parts = []
        for first in range(0, values.shape[axis], TILES_AT_ONCE):
            some = {
                name: each.narrow(axis, first, min(TILES_AT_ONCE, values.shape[axis] - first))
                for name, each in kept.items()
            }
            parts.append(self._encode(some))
        return torch.cat(parts)

    def _encode(self, kept: Mapping[str, Any]) -> Tensor:
        out = self.module.get_image_features(**kept, return_dict=True)
        rows = _rows(out.pooler_output)
        deep = getattr(out, "deepstack_features", None)
        if self.spec.deep and deep is not None:
            rows = torch.cat([rows, *map(_rows, deep)], dim=1)
        return rows

    def _on_device(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = value.to(self.device, non_blocking=True)
        return value.to(self.dtype) if value.is_floating_point() else value


class SoundTower:
    """A loaded tower that reads sound, and its projector."""

    def __init__(self, module: Any, spec: HearingSpec, device: torch.device, dtype: torch.dtype) -> None:
        self.module, self.spec, self.device, self.dtype = module, spec, device, dtype

    @property
    def bytes_held(self) -> int:
        tensors = [*self.module.parameters(), *self.module.buffers()]
        return sum(tensor.nbytes for tensor in tensors)

    @torch.inference_mode()
    def encode(self, tensors: Mapping[str, Any]) -> Tensor:
        """Return the rows [rows, hidden] of one sound. tensors: `ProcessedSound.tensors`."""
        features, frames = tensors["input_features"], self.spec.piece
        if len(features) > 1:  # windows of 30 s
            pieces = [{name: each[i : i + 1] for name, each in tensors.items()} for i in range(len(features))]
        elif frames and "input_features_mask" in tensors:
            masks = tensors["input_features_mask"].split(frames, -1)
            parts = zip(features.split(frames, -1), masks, strict=True)
            pieces = [{"input_features": part, "input_features_mask": mask} for part, mask in parts]
        else:
            pieces = [dict(tensors)]
        found = [self._encode(piece) for piece in pieces]
        return found[0] if len(found) == 1 else torch.cat(found)

    def _encode(self, piece: Mapping[str, Tensor]) -> Tensor:
        kept = {name: each.to(self.device, non_blocking=True) for name, each in piece.items()}
        kept["input_features"] = kept["input_features"].to(self.dtype)
        return _rows(self.module.get_audio_features(**kept, return_dict=True).pooler_output)


class Towers:
    """The towers of one model. A picture is told from a sound by its tensors."""

    def __init__(self, pictures: Tower | None, sounds: SoundTower | None) -> None:
        self.pictures, self.sounds = pictures, sounds

    @property
    def bytes_held(self) -> int:
        return sum(each.bytes_held for each in (self.pictures, self.sounds) if each is not None)

    def expected_row_s(self) -> float:
        """Return about how many seconds a row of a picture takes; 0 for a model that does not see."""
        return 0.0 if self.pictures is None else self.pictures.expected_row_s()

    def encode(self, tensors: Mapping[str, Any]) -> Tensor:
        """Return the rows of one picture, or of one sound."""
        tower = self.sounds if "input_features" in tensors else self.pictures
        assert tower is not None, "tensors of a tower that is not loaded"
        rows = tower.encode(tensors)
        deep = 0 if self.pictures is None or tower is self.pictures else self.pictures.spec.deep
        return torch.cat([rows, rows.new_zeros(len(rows), deep * rows.shape[1])], dim=1) if deep else rows


def _rows(features: Any) -> Tensor:
    """Return features as [rows, hidden]."""
    parts = [features] if isinstance(features, Tensor) else list(features)
    rows = [part.reshape(-1, part.shape[-1]) for part in parts]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def tower_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type that a tower computes in: the decoder's, but float32 where that is float16, in which towers
    overflow."""
    return torch.float32 if dtype is torch.float16 else dtype


def load_tower(path: Path, spec: VisionSpec, device: torch.device, dtype: torch.dtype) -> Tower:
    """Load the tower of the model in folder `path`, to compute in `dtype`. Raises `CorruptModel`,
    `UnsupportedModel`."""
    config = _config(path, spec)
    kind = _without(_base(config), (family_of(spec).text,), _OF_OTHERS)
    state = read_state(spec, _on_meta(kind, config).state_dict()) if spec.projector else None
    module = read_module(kind, path, config, dtype, attention="sdpa", trust_remote_code=False, state=state)
    return Tower(module.to(device), spec, device, dtype)


def tower_bytes(path: Path, spec: VisionSpec, dtype: torch.dtype) -> int:
    """Return the exact bytes of `load_tower`'s result, without reading a weight."""
    config = _config(path, spec)
    module = _on_meta(_without(_base(config), (family_of(spec).text,), _OF_OTHERS), config)
    return Tower(module.to(dtype), spec, torch.device("meta"), dtype).bytes_held


def load_sound_tower(path: Path, spec: HearingSpec, device: torch.device, dtype: torch.dtype) -> SoundTower:
    """Load the tower that reads sound of the model in folder `path`. Raises like `load_tower`."""
    config = _sound_config(path)
    kind = _without(_base(config), sound_family_of(spec).others, _OF_SOUND)
    state = _of_thinker(path) if is_thinker(read_json_object(path / "config.json")) else None
    attention = sound_family_of(spec).attention
    module = read_module(kind, path, config, dtype, attention=attention, trust_remote_code=False, state=state)
    return SoundTower(module.to(device), spec, device, dtype)


def _of_thinker(path: Path) -> dict[str, Tensor]:
    """Return the tensors of the tower of sound that Qwen publishes, by transformers' names."""
    found = dict[str, Tensor]()
    with open_checkpoint(path) as checkpoint:
        for stored in checkpoint.tensors:
            if stored.startswith("thinker.audio_tower."):
                name = stored.removeprefix("thinker.")
                name = re.sub(r"^audio_tower\.proj([12])\.", r"multi_modal_projector.linear_\1.", name)
                found[name] = checkpoint.tensor(stored).clone()
    return found


def sound_tower_bytes(path: Path, spec: HearingSpec, dtype: torch.dtype) -> int:
    """Return the exact bytes of `load_sound_tower`'s result, without reading a weight."""
    config = _sound_config(path)
    module = _on_meta(_without(_base(config), sound_family_of(spec).others, _OF_SOUND), config)
    return SoundTower(module.to(dtype), spec, torch.device("meta"), dtype).bytes_held


def load_towers(
    path: Path, vision: VisionSpec | None, hearing: HearingSpec | None, device: torch.device, dtype: torch.dtype
) -> Towers:
    """Load the towers of the model in folder `path`. Raises like `load_tower`."""
    return Towers(
        None if vision is None else load_tower(path, vision, device, dtype),
        None if hearing is None else load_sound_tower(path, hearing, device, dtype),
    )


def _sound_config(path: Path) -> Any:
    if is_thinker(stored := read_json_object(path / "config.json")):
        from transformers import AutoConfig

        flat = without_thinker(stored)
        return AutoConfig.for_model("qwen3_asr", audio_config=flat["audio_config"], text_config=_SHORT_TEXT)
    config = load_config(path, trust_remote_code=False)
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    if getattr(config, "vision_config", None) is not None:
        config.vision_config = None
    return config


def _on_meta(kind: type[Any], config: Any) -> Any:
    with torch.device("meta"):
        return kind(config)


def _config(path: Path, spec: VisionSpec) -> Any:
    """Return the config, without the quantisation that its text part may have, and without a part that reads sound."""
    if spec.projector:
        return model_config(spec)
    config = load_config(path, trust_remote_code=False)
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    if getattr(config, "audio_config", None) is not None:
        config.audio_config = None
    return config


def _base(config: Any) -> type[Any]:
    """Return transformers' class of the model without a head."""
    from transformers import MODEL_MAPPING

    if type(config) not in MODEL_MAPPING:
        raise UnsupportedModel(
            f"Pictures and sound of {config.model_type} are not supported.", "transformers has no tower of it."
        )
    base: type[Any] = MODEL_MAPPING[type(config)]
    return base


def _without(base: type[Any], others: tuple[str, ...], ignored: tuple[str, ...]) -> type[Any]:
    """Return a class of the same model that has no decoder. others: attributes that are not the tower; ignored: names
    of tensors of theirs."""

    class WithoutText(base):  # type: ignore[misc]
        _keys_to_ignore_on_load_unexpected = ignored

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for name in others:
                delattr(self, name)

        def tie_weights(self, *args: Any, **keywords: Any) -> None:
            """Nothing to tie."""

    WithoutText.__name__, WithoutText.__module__ = base.__name__, base.__module__  # else no tensor is renamed
    return WithoutText


# ---- projector files of GGUF ---------------------------------------------------------------------------------------

_PUBLISHED = (
    (r"^vision_tower\.(embeddings|encoder\.layers|pre_layrnorm|post_layernorm)\b", r"vision_tower.vision_model.\1"),
    (r"_projection_weight$", "_projection.weight"),
    (r"^(vision_model|connector)\.", r"model.\1."),
)
"""transformers 5's names to those that the gguf package knows."""
_MERGER = (
    (r"^visual\.merger\.norm\.", "v.post_ln."),
    (r"^visual\.merger\.linear_fc1\.", "mm.0."),
    (r"^visual\.merger\.linear_fc2\.", "mm.2."),
)  # of Qwen3-VL
_TWO_LAYERS = ((r"^multi_modal_projector\.linear_1\.", "mm.0."), (r"^multi_modal_projector\.linear_2\.", "mm.2."))
_SUFFIXES = (".weight", ".bias")


def read_state(spec: VisionSpec, shapes: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a projector file by transformers' names, in float32 on the CPU.

    shapes: tensors of the module, by name. Raises `CorruptModel` for a missing tensor.
    """
    from gguf import MODEL_ARCH, get_tensor_name_map

    names = get_tensor_name_map(MODEL_ARCH.MMPROJ, 512)
    vision = described(spec).config["vision_config"]

    def stored_name(name: str) -> str:
        if deep := re.match(r"visual\.deepstack_merger_list\.(\d+)\.(?:linear_)?(\w+)\.(\w+)$", name):
            layer = vision["deepstack_visual_indexes"][int(deep[1])]  # llama.cpp names it after the tower's layer
            return f"v.deepstack.{layer}.{deep[2]}.{deep[3]}"
        for pattern, stored in (*_MERGER, *(_TWO_LAYERS if spec.model_type == "llava" else ())):
            if re.match(pattern, name):
                return re.sub(pattern, stored, name)
        for pattern, published in _PUBLISHED:
            name = re.sub(pattern, published, name)
        return str(names.get_name(name, _SUFFIXES) or names.get_name(f"model.{name}", _SUFFIXES) or name)

    with open_gguf(Path(spec.projector)) as file:
        tensors = _Tensors(file, spec, vision)
        return {name: tensors.read(name, stored_name(name), tuple(of.shape)) for name, of in shapes.items()}


class _Tensors:
    """The tensors of a projector file in the form that transformers' modules have."""

    def __init__(self, file: GGUFCheckpoint, spec: VisionSpec, vision: Mapping[str, Any]) -> None:
        self.file, self.spec, self.heads = file, spec, vision.get("num_attention_heads", 0)

    def read(self, name: str, stored: str, shape: tuple[int, ...]) -> Tensor:
        """Return one tensor. name: transformers' own."""
        found = self._found(stored, shape)
        if found is None and self.spec.model_type == "llava" and ".post_layernorm." in f".{name}":
            return torch.ones(shape) if name.endswith("weight") else torch.zeros(shape)  # its output is not read
        if found is None or tuple(found.shape) != shape:
            raise CorruptModel(
                f"{Path(self.spec.projector).name} has no tensor {stored} of {list(shape)}.",
                f"transformers' name is {name}.", "Download the file again.",
            )  # fmt: skip
        if self.spec.model_type == "pixtral" and re.search(r"\.attention\.[qk]_proj\.weight$", name):
            rows = LLAMA_ROWS["q_proj"](self.heads, self.heads, shape[0] // self.heads)
            found = found[torch.tensor(rows)]
        return found - 1 if stored == "mm.soft_emb_norm.weight" else found

    def _found(self, stored: str, shape: tuple[int, ...]) -> Tensor | None:
        if len(shape) == 5:  # two times of a patch
            times = [self._one(stored), self._one(f"{stored}.1")]
            return None if times[0] is None or times[1] is None else torch.stack([times[0], times[1]], dim=2)
        found = self._one(stored)
        if found is None and ".attn_qkv." in stored:
            parts = [self._one(stored.replace("attn_qkv", f"attn_{each}")) for each in "qkv"]
            return (
                None if any(part is None for part in parts) else torch.cat([part for part in parts if part is not None])
            )
        if found is not None and tuple(found.shape) != shape:  # the converter of 2024 named the two the other way
            found = self._one(re.sub(r"ffn_(up|down)", lambda each: _OTHER[each[1]], stored))
        return found

    def _one(self, stored: str) -> Tensor | None:
        info = self.file.tensors.get(stored)
        return (
            None if info is None else widen(self.file.tensor(stored), info, torch.float32).reshape(info.shape).clone()
        )


_OTHER = {"up": "ffn_down", "down": "ffn_up"}
