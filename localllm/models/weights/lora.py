"""Read a LoRA adapter from the folder that PEFT writes: adapter_config.json and adapter_model.safetensors.

The config is checked against the tensors. Unsupported features that would change the answers are refused by name: other
kinds of adapters, weights that were fully trained beside them, adapters of another base.
Does not know: where an adapter is stored on a device (layers/lora.py), who asks for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b, file_digest
from pathlib import Path
from typing import Any

from localllm.errors import CorruptModel, ModelNotFound, UnsupportedModel
from localllm.files.json_file import parse_json, read_bytes
from localllm.models.formats.checkpoint import FLOATS, TensorInfo
from localllm.models.formats.safetensors import read_header
from localllm.models.layers.lora import LoraBank, LoraMatrix

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
A, B = ".lora_A.weight", ".lora_B.weight"

_REFUSED: Mapping[str, str] = {
    "use_dora": "DoRA also changes the length of each row of the base's matrices",
    "lora_bias": "its matrices have biases of their own",
    "modules_to_save": "it holds whole modules that were trained together with the low-rank matrices",
    "trainable_token_indices": "it holds trained embeddings of single tokens",
    "layer_replication": "it runs layers of the base more than once",
    "alora_invocation_tokens": "it applies only after certain tokens (aLoRA)",
    "use_qalora": "QA-LoRA pools the inputs of a layer",
    "target_parameters": "it changes the matrices of experts",
}
"""Fields of adapter_config.json that must not be set, and what each means."""
_CHANGES_THE_BASE = ("pissa", "olora", "corda", "loftq")


@dataclass(frozen=True, slots=True)
class LoraFile:
    """An adapter as stored."""

    path: Path
    base: str  # the base model that its config names
    fingerprint: str  # hash of its contents
    scales: Mapping[str, float]  # by stem: the factor on b a
    tensors: Mapping[str, TensorInfo]  # by stored name

    @property
    def rank(self) -> int:
        """The largest of its ranks."""
        return max(self.tensors[f"{PREFIX}{stem}{A}"].shape[0] for stem in self.scales)


def open_lora(path: Path) -> LoraFile:
    """Read and check config and header. Raises `ModelNotFound`, `CorruptModel`, `UnsupportedModel`."""
    path = path.expanduser()
    config, raw = _read_config(path)
    _refuse_unsupported(path, config)
    file = path / WEIGHTS
    if not file.is_file():
        _refuse_missing(path)
    tensors = read_header(file)
    stems = _stems(path, tensors)
    scales = {stem: _scale(path, config, stem, tensors) for stem in stems}
    with file.open("rb") as stream:
        digest = file_digest(stream, lambda: blake2b(raw, digest_size=16))
    return LoraFile(path, str(config.get("base_model_name_or_path") or "?"), digest.hexdigest(), scales, tensors)


def put_lora(lora: LoraFile, bank: LoraBank, slot: int) -> None:
    """Load an adapter into a slot that no request uses: of a shard's bank, the part that the shard computes.

    Raises `UnsupportedModel` if the model lacks such layers.
    """
    own = {stem: scale for stem, scale in lora.scales.items() if not bank.is_elsewhere(stem)}
    _check_against(lora, bank, own)
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(lora.path / WEIGHTS), framework="pt", device="cpu") as stored:
            matrices = {
                stem: LoraMatrix(
                    stored.get_tensor(f"{PREFIX}{stem}{A}"), stored.get_tensor(f"{PREFIX}{stem}{B}").float() * scale
                )
                for stem, scale in own.items()
            }
    except (SafetensorError, OSError) as error:
        raise CorruptModel(f"Cannot read {lora.path / WEIGHTS}.", str(error), "Download the adapter again.") from error
    bank.put(slot, matrices)


def _check_against(lora: LoraFile, bank: LoraBank, own: Iterable[str]) -> None:
    if lora.rank > bank.max_rank:
        raise UnsupportedModel(
            f"The adapter in {lora.path} has rank {lora.rank}.",
            f"The largest supported rank is {bank.max_rank}.",
            f"Start with --max-lora-rank {lora.rank}.",
        )
    for stem in own:
        shape = bank.shape_of(stem)
        a, b = (lora.tensors[f"{PREFIX}{stem}{end}"].shape for end in (A, B))
        if shape is None:
            raise UnsupportedModel(
                f"The adapter in {lora.path} changes {stem}.", f"{_why_not(stem)} It was trained on {lora.base}."
            )
        if (b[0], a[1]) != shape:
            raise UnsupportedModel(
                f"The adapter in {lora.path} is for another base model.",
                f"Its {stem} is [{b[0]}, {a[1]}], the model's is [{shape[0]}, {shape[1]}]. "
                f"It was trained on {lora.base}.",
            )


def _why_not(stem: str) -> str:
    last = stem.rpartition(".")[2]
    if ".experts" in stem or last in ("gate", "router"):
        return "Adapters are not supported for experts and their router."
    if last in ("lm_head", "embed_out", "embed_tokens", "wte", "embed_in", "word_embeddings"):
        return "Adapters are not supported for embeddings and the output head."
    if re.search(r"\b(visual|vision_\w+|connector|multi_modal_projector)\.", stem):
        return "Adapters are not supported for the part that reads pictures."
    if last == "kv_b_proj":
        return (
            "Adapters are not supported for this matrix of latent attention, which is merged into queries and values."
        )
    return "The model has no layer of this name that supports adapters."


# -- the config


def _read_config(path: Path) -> tuple[Mapping[str, Any], bytes]:
    if not (path / CONFIG).is_file():
        raise ModelNotFound(
            f"{path} does not hold an adapter.", f"There is no {CONFIG} in it.", "Pass the folder that PEFT saved."
        )
    raw = read_bytes(path / CONFIG)
    config = parse_json(raw, path / CONFIG)
    if not isinstance(config, dict):
        raise CorruptModel(f"Cannot read {path / CONFIG}.", f"It holds a JSON {type(config).__name__}, not an object.")
    return config, raw


def _refuse_unsupported(path: Path, config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type")
    why = None if kind == "LORA" else f"Its peft_type is {kind}; supported: LORA."
    if config.get("bias", "none") != "none":
        why = f"It was trained with bias = {config['bias']!r}, which changes biases of the base model."
    for field, meaning in _REFUSED.items():
        if config.get(field):
            why = f"Its config has {field} = {config[field]!r}: {meaning}."
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_THE_BASE):
        why = f"It was initialised with {start}, which changes the matrices of the base model."
    if why is not None:
        raise UnsupportedModel(f"The adapter in {path} is not supported.", why[:300])


def _refuse_missing(path: Path) -> None:
    pickles = sorted(file.name for file in path.iterdir() if file.suffix in (".bin", ".pt", ".pth"))
    if pickles:
        raise UnsupportedModel(
            f"{path} holds the adapter only as a pickle ({pickles[0]}).",
            "Opening a pickle can run code, so only safetensors are supported.",
            "Load it with peft and save it again: PeftModel.from_pretrained(base, folder).save_pretrained(new_folder)",
        )
    raise ModelNotFound(f"{path} holds no {WEIGHTS}.", hint="Download the adapter again.")


# -- config and tensors together


def _stems(path: Path, tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Return the stems of the base's matrices that the adapter changes."""
    stems = sorted({_stem_of(path, name) for name in tensors})
    if not stems:
        raise CorruptModel(f"{path / WEIGHTS} holds no tensors.")
    for stem in stems:
        pair = [tensors.get(f"{PREFIX}{stem}{end}") for end in (A, B)]
        if None in pair:
            there, missing = (A, B) if pair[1] is None else (B, A)
            raise CorruptModel(f"{path / WEIGHTS} has {stem}{there} and no {stem}{missing}.")
        shapes = [info.shape for info in pair if info is not None]
        if any(len(shape) != 2 or 0 in shape for shape in shapes) or shapes[0][0] != shapes[1][1]:
            raise CorruptModel(
                f"{stem} in {path / WEIGHTS} is not a low-rank pair.",
                f"A is {list(shapes[0])}, B is {list(shapes[1])}.",
            )
        for info in pair:
            if info is not None and info.dtype not in FLOATS:
                raise UnsupportedModel(
                    f"{stem} in {path / WEIGHTS} is stored as {info.dtype}.", f"Supported: {', '.join(FLOATS)}."
                )
    return stems


def _stem_of(path: Path, name: str) -> str:
    end = next((end for end in (A, B) if name.endswith(end)), None)
    if end is None or not name.startswith(PREFIX):
        kinds = {"lora_magnitude_vector": "DoRA", "lora_embedding_": "An adapter of embeddings"}
        kind = next((words for part, words in kinds.items() if part in name), "A tensor that is not part of LoRA")
        raise UnsupportedModel(f"{path / WEIGHTS} holds {name}.", f"{kind} is not supported.")
    return name.removeprefix(PREFIX).removesuffix(end)


def _scale(path: Path, config: Mapping[str, Any], stem: str, tensors: Mapping[str, TensorInfo]) -> float:
    rank = _of_layer(config, "rank_pattern", stem, config.get("r"))
    alpha = _of_layer(config, "alpha_pattern", stem, config.get("lora_alpha"))
    stored = tensors[f"{PREFIX}{stem}{A}"].shape[0]
    if type(rank) is not int or rank != stored:
        raise CorruptModel(
            f"{CONFIG} in {path} gives {stem} the rank {rank!r}.", f"Its tensors in {WEIGHTS} have rank {stored}."
        )
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise CorruptModel(f"{CONFIG} in {path} gives {stem} lora_alpha = {alpha!r}.", "It must be a number.")
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)


def _of_layer(config: Mapping[str, Any], patterns: str, stem: str, otherwise: Any) -> Any:
    """Return a layer's value by PEFT's rule: the first pattern that matches the end of the layer's name."""
    table = config.get(patterns) or {}
    if not isinstance(table, Mapping):
        raise CorruptModel(f"{CONFIG} has {patterns} = {table!r}."[:300], "It must be an object.")
    return next((value for pattern, value in table.items() if _matches(pattern, stem)), otherwise)


def _matches(pattern: str, stem: str) -> bool:
    try:
        return re.match(rf"(.*\.)?({pattern})$", stem) is not None
    except re.error:
        return False
