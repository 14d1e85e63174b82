"""An EAGLE drafter described by its folder, checked against the model that it drafts for.

    EAGLE-1, EAGLE-2 (Li et al. 2024, arXiv:2401.15077, arXiv:2406.16858)    one layer over the target's final hidden
        state; the target's embedding and head. The two differ in how drafts are arranged, not in their files.
    EAGLE-3 (Li et al. 2025, arXiv:2503.01840)    one layer over the streams before several layers of the target;
        a head of its own, often over the most frequent tokens alone.

Three forms of config.json are read: fields of a Llama (the authors' own), such fields under `model`, and the exports
of vLLM's speculators (`transformer_layer_config` with `speculators_config`).
Does not know: tensors (eagle.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from localllm.errors import CorruptModel, DrafterMismatch, UnsupportedModel
from localllm.files.json_file import read_json_object
from localllm.models.drafters.drafter import FINAL_HIDDEN
from localllm.models.formats.checkpoint import Checkpoint
from localllm.models.formats.safetensors import SafetensorsCheckpoint
from localllm.models.formats.torch_file import TorchFileCheckpoint, is_torch_folder
from localllm.models.read_spec import spec_of_config
from localllm.models.spec.fields import size
from localllm.models.spec.model_spec import ModelSpec

EagleMethod = Literal["eagle", "eagle3"]

_LAYER_FIELDS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "torch_dtype", "dtype",
    "max_position_embeddings", "original_max_position_embeddings",
)  # fmt: skip
_UNSUPPORTED_FIELDS = ("fc_norm", "layernorms", "add_para_norm", "quantization_config", "kv_lora_rank", "num_experts")
"""Fields of variants that compute something else."""


@dataclass(frozen=True, slots=True)
class EagleSpec:
    """An EAGLE drafter by its config.json."""

    method: EagleMethod
    layer: ModelSpec  # one Llama layer; vocab_size is the target's
    taps: tuple[int, ...]
    target_hidden_size: int
    draft_vocab_size: int  # rows of the drafter's own head; EAGLE-1 has none
    fuses: bool  # fc maps the features to the layer's width; False: the features are read as they are
    norm_before_residual: bool = False  # the residual stream begins with the normed features
    norm_before_fc: bool = False
    norm_output: bool = False  # what the next draft reads is normed

    @property
    def features_size(self) -> int:
        return len(self.taps) * self.target_hidden_size


def open_eagle(path: Path) -> Checkpoint:
    """Open a drafter's files: safetensors, or pytorch_model.bin where there are none."""
    if is_torch_folder(path):
        return TorchFileCheckpoint(path)
    return SafetensorsCheckpoint(path)


def as_eagle(path: Path, method: str) -> EagleMethod | None:
    """Return the EAGLE method by which to read a folder; None: none. method: as asked for; "": by the folder. A
    folder that says what it is counts more than the method: `eagle` is said of EAGLE-3 as well."""
    if method not in ("", "eagle", "eagle3"):
        return None
    found = eagle_method(path)
    if found is not None or not method:
        return found
    return "eagle3" if method == "eagle3" else "eagle"


def eagle_method(path: Path) -> EagleMethod | None:
    """Return which EAGLE drafter a folder holds; None: it holds none. Names in config.json count first. The authors'
    EAGLE-1 files call themselves Llama models, so their tensors decide."""
    if not (path / "config.json").is_file():
        return None
    config = read_json_object(path / "config.json")
    speculators = _object(config, "speculators_config")
    names = (
        config.get("model_type"), config.get("speculators_model_type"), speculators.get("algorithm"),
        *(config.get("architectures") or ()),
    )  # fmt: skip
    words = " ".join(str(name).lower() for name in names)
    if "eagle3" in words or ("draft_vocab_size" in config and not speculators):
        return "eagle3"
    if "eagle" in words:
        return "eagle"
    if not (any(path.glob("*.safetensors")) or is_torch_folder(path)):
        return None
    with open_eagle(path) as checkpoint:
        stored = {name.removeprefix("model.") for name in checkpoint.tensors}
    if "fc.weight" not in stored and "fusion_fc.weight" not in stored:
        return None
    return "eagle3" if any(name.endswith("hidden_norm.weight") for name in stored) else "eagle"


def why_no_eagle(target: ModelSpec) -> str:
    """Return why no EAGLE drafter reads a model, as a sentence; empty: one can."""
    return "" if target.altup is None else "Its layers work on several streams of each token."


def read_eagle(path: Path, method: EagleMethod, target: ModelSpec) -> EagleSpec:
    """Return the drafter's spec. Raises `DrafterMismatch` if it belongs to another model, `UnsupportedModel` for
    variants that are not supported, `CorruptModel`."""
    config = read_json_object(path / "config.json")
    if why := why_no_eagle(target):
        raise DrafterMismatch(f"{target.architecture} runs without EAGLE drafters.", why, "Leave out --draft.")
    nested = _object(config, "transformer_layer_config") or _object(config, "model")
    fields = {**config, **nested}
    try:
        _refuse_variants(path, fields)
        _check_vocabulary(path, fields, target)
        if method == "eagle":
            return _eagle1(path, config, fields, target)
        return _eagle3(path, config, fields, target)
    except (ArithmeticError, AttributeError, TypeError, ValueError, KeyError) as error:
        raise CorruptModel(f"Cannot parse {path}/config.json.", f"{type(error).__name__}: {error}.") from error


def _eagle1(path: Path, config: Mapping[str, Any], fields: Mapping[str, Any], target: ModelSpec) -> EagleSpec:
    layer = _layer(fields, target)
    if layer.hidden_size != target.hidden_size:
        raise _wrong_width(path, config, layer.hidden_size, target)
    return EagleSpec("eagle", layer, (FINAL_HIDDEN,), target.hidden_size, 0, fuses=True)


def _eagle3(path: Path, config: Mapping[str, Any], fields: Mapping[str, Any], target: ModelSpec) -> EagleSpec:
    layer = _layer(fields, target)
    given = config.get("target_hidden_size")
    width = layer.hidden_size if given is None else size(config, "target_hidden_size")
    if width != target.hidden_size:
        raise _wrong_width(path, config, width, target)
    own = _object(config, "eagle_config")
    fuses = own.get("use_aux_hidden_state", config.get("use_aux_hidden_state", True)) is not False
    if not fuses and layer.hidden_size != target.hidden_size:
        raise _wrong_width(path, config, layer.hidden_size, target)
    ids = config.get("eagle_aux_hidden_state_layer_ids") or own.get("eagle_aux_hidden_state_layer_ids")
    draft_vocab = fields["vocab_size"] if fields.get("draft_vocab_size") is None else size(fields, "draft_vocab_size")
    return EagleSpec(
        "eagle3",
        layer,
        _taps(path, config, ids, target) if fuses else (FINAL_HIDDEN,),
        width,
        draft_vocab,
        fuses=fuses,
        norm_before_residual=bool(config.get("norm_before_residual", "transformer_layer_config" in config)),
        norm_before_fc=bool(config.get("norm_before_fc")),
        norm_output=bool(config.get("norm_output")),
    )


def _taps(path: Path, config: Mapping[str, Any], ids: object, target: ModelSpec) -> tuple[int, ...]:
    """Return the layers of the target before which the drafter reads the stream, in the order of the layers: training
    collects them while the target runs."""
    count = target.num_layers
    if ids is None:
        ids = [2, count // 2, count - 3]
        if not 2 < ids[1] < ids[2]:
            raise DrafterMismatch(
                f"The drafter in {path} needs a model of at least 7 layers.",
                f"It reads the model before layer 2, half of the layers, and the third to last; this one has {count}.",
                _fitting(config),
            )
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise CorruptModel(f"{path}/config.json has eagle_aux_hidden_state_layer_ids = {ids!r}.", "It must be a list.")
    if min(ids) < 0 or max(ids) >= count or len(set(ids)) < len(ids):
        raise DrafterMismatch(
            f"The drafter in {path} reads the model before layers {', '.join(map(str, ids))}.",
            f"The model has {count} layers, 0 to {count - 1}, and each can be read once.",
            _fitting(config),
        )
    return tuple(sorted(ids))


def _layer(fields: Mapping[str, Any], target: ModelSpec) -> ModelSpec:
    """Return the drafter's layer as a Llama of one layer, with the target's context: published configs state the length
    of the training texts (2048), behind which drafts are still useful."""
    known = {name: fields[name] for name in _LAYER_FIELDS if fields.get(name) is not None}
    known.setdefault("max_position_embeddings", target.max_position)
    fixed = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "vocab_size": target.vocab_size}
    return replace(spec_of_config({**known, **fixed}), max_position=target.max_position)


def _refuse_variants(path: Path, fields: Mapping[str, Any]) -> None:
    for name in _UNSUPPORTED_FIELDS:
        if fields.get(name):
            raise UnsupportedModel(f"The drafter in {path} has {name}, which is not supported for EAGLE drafters.")
    if (layers := fields.get("num_hidden_layers", 1)) != 1:
        raise UnsupportedModel(f"The drafter in {path} has {layers} layers.", "Supported: EAGLE drafters of one layer.")
    if "sliding_attention" in (fields.get("layer_types") or ()):
        raise UnsupportedModel(f"The drafter in {path} has a sliding window, which is not supported.")


def _check_vocabulary(path: Path, fields: Mapping[str, Any], target: ModelSpec) -> None:
    found = size(fields, "vocab_size")
    if found != target.vocab_size:
        raise DrafterMismatch(
            f"The drafter in {path} was trained for a vocabulary of {found} tokens.",
            f"The model has {target.vocab_size}.",
            _fitting(fields),
        )


def _wrong_width(path: Path, config: Mapping[str, Any], width: int, target: ModelSpec) -> DrafterMismatch:
    return DrafterMismatch(
        f"The drafter in {path} reads hidden states of {width} numbers.",
        f"Those of the model have {target.hidden_size}.",
        _fitting(config),
    )


def _fitting(config: Mapping[str, Any]) -> str:
    """Return the next step: the model that the drafter names, if it names one."""
    verifier = _object(_object(config, "speculators_config"), "verifier").get("name_or_path")
    named = f" It was trained for {verifier}." if verifier else ""
    return f"Use a drafter that was trained for this model.{named}"


def _object(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name)
    return value if isinstance(value, Mapping) else {}
