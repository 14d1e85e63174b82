"""Read a model's description from its config.json, before its weights.

Does not know: the machine, the settings, where weights are in memory (fit/ and weights/ do).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from localllm.errors import CorruptModel, ModelError, ModelNotFound, UnsupportedModel
from localllm.files.json_file import read_json_object
from localllm.models.families.text_part import is_thinker, without_thinker
from localllm.models.formats.checkpoint import is_gguf
from localllm.models.formats.registry import Headers, linear_format
from localllm.models.spec.family import Family
from localllm.models.spec.fields import LARGEST, NormSpec, activation_of, number, size
from localllm.models.spec.model_spec import ModelSpec
from localllm.models.spec.rope import RopeSpec, context_length, read_ropes

_GATED_ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
_DTYPES = ("float32", "bfloat16", "float16")
_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
_FACTORS = (
    "attention_scale",
    "attention_softcap",
    "final_softcap",
    "clip_qkv",
    "embedding_scale",
    "residual_multiplier",
    "logits_multiplier",
)
_RECOGNISED = (
    "localllm's own code computes this model: its class in transformers has the same parts and the same logits."
)
_QUANTIZATION_FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Separate files in which older quantisers described their quantisation, and the method each implies."""
_GENERATION_FIELDS = ("do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")


def read_spec(
    path: Path, *, model_impl: str = "auto", trust_remote_code: bool = False, mmproj: str | None = None
) -> ModelSpec:
    """Read the spec of the model in folder or GGUF file `path`.

    model_impl: auto, localllm (its own decoder or an error), or transformers. mmproj: the file of a GGUF model that
    reads pictures, `none`, or None: the one beside the model. Raises `ModelNotFound` if there is no
    model, `UnsupportedModel` for an unsupported one, `CorruptModel` if config.json contradicts itself.
    """
    path = Path(path)
    config = _read_config(path)
    try:
        if model_impl == "transformers" or (model_impl == "auto" and not _has_family(config)):
            if path.is_file() and mmproj not in (None, "none"):
                raise UnsupportedModel(
                    f"{path.name} is computed by {_architecture(config)} of transformers, which does not see pictures.",
                    "The file of its projector was named.",
                    "Leave --mmproj out, or use the safetensors of the same model.",
                )
            spec = _through_transformers(path, config, trust_remote_code=trust_remote_code)
            return spec if model_impl == "transformers" else _as_own(path, spec)
        family = _family_of(config)
        generation = _read_generation_config(path)
        spec = _build(_filled(config, family), family, generation)
        if path.is_file():
            return _with_projector(path, spec, mmproj)
        return replace(
            _with_source(spec, config, generation), **_read_vision(path, config), **_read_hearing(path, config)
        )
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        # Any field may hold any JSON; what the named checks let through fails in the arithmetic on it.
        raise CorruptModel(f"Cannot parse {path}/config.json.", f"{type(error).__name__}: {error}.") from error


def spec_of_config(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a config.json with these values. Raises as `read_spec` does."""
    family = _family_of(config)
    return _build(_filled(config, family), family, {})


def weights_bytes(path: Path) -> int:
    """Return the exact bytes of all tensors as stored, from the headers."""
    return Headers(path).stored_bytes


def families() -> Mapping[str, Family]:
    """Return every family by the class names in config.json. The descriptions, about fifty modules, are imported when
    the first model is read."""
    from localllm.models.families.registry import FAMILY_OF

    return FAMILY_OF


def family_of(spec: ModelSpec) -> Family:
    """Return the family of the model, which knows how its checkpoints store tensors."""
    from localllm.models.families.registry import family_of_class

    if spec.recognised is not None:
        return Family(spec.architecture, (spec.architecture,), storage=spec.recognised, note=_RECOGNISED)
    family = family_of_class(spec.architecture, spec.text_type)
    assert family is not None, "another implementation computes the model"
    return family


def _read_config(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise ModelNotFound(
            f"{path} does not exist.", hint="Pass a folder that holds config.json and safetensors files."
        )
    if is_gguf(path):
        from localllm.models.formats.gguf.checkpoint import config_of

        return config_of(path)
    if path.is_file():
        raise UnsupportedModel(f"{path} is a file.", "A model is a folder with a config.json, or a .gguf file.")
    if not (path / "config.json").is_file():
        _refuse_folder(path)
    config = read_json_object(path / "config.json")
    config = without_thinker(config) if is_thinker(config) else config
    if config.get("quantization_config") is None and config.get("compression_config") is None:
        config |= _quantization_beside(path)
    return config


def _quantization_beside(path: Path) -> dict[str, Any]:
    """Return the quantization_config from the separate file that older quantisers wrote."""
    for name, method in _QUANTIZATION_FILES.items():
        if (path / name).is_file():
            found = read_json_object(path / name)
            found = found.get("quantization") or {} if method == "modelopt" else found
            return {"quantization_config": {"quant_method": method, **found}}
    return {}


def _refuse_folder(path: Path) -> None:
    names = sorted(entry.name for entry in path.iterdir())
    if any(name.endswith(".gguf") for name in names):
        raise UnsupportedModel(f"{path} holds GGUF files.", hint="Pass the path of one GGUF file.")
    if "adapter_config.json" in names:
        raise UnsupportedModel(f"{path} holds a LoRA adapter, not a model.", hint="Merge it into its base model first.")
    found = f"It holds {len(names)} files: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}." if names else ""
    raise ModelNotFound(f"{path} is not a model folder: it has no config.json.", found or "It is empty.")


def _quantization(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return `quantization_config` or compressed-tensors' older name for it; None if there is neither."""
    quantization = config.get("quantization_config") or config.get("compression_config")
    if quantization is not None and not isinstance(quantization, Mapping):
        raise CorruptModel(f"config.json's quantization_config should be an object, not {quantization!r}.")
    linear_format(quantization)  # raises for unsupported formats, before any download or allocation
    return quantization


def _has_family(config: Mapping[str, Any]) -> bool:
    return not _architecture(config) or _known_family(config) is not None  # none is refused by `_family_of`


def _architecture(config: Mapping[str, Any]) -> str:
    """Return the class in config.json; empty: it names none."""
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def _known_family(config: Mapping[str, Any]) -> Family | None:
    from localllm.models.families.registry import family_of_class

    return family_of_class(_architecture(config), _text_type(config))


def _text_type(config: Mapping[str, Any]) -> str:
    """Return the model_type of the text part; empty: the config has no such part."""
    part = config.get("text_config")
    return str(part.get("model_type", "")) if isinstance(part, Mapping) else ""


def _through_transformers(path: Path, config: dict[str, Any], *, trust_remote_code: bool) -> ModelSpec:
    from localllm.models.transformers_backend.spec import transformers_fields

    architecture = str(config["architectures"][0])
    if path.is_file():
        from localllm.models.formats.gguf.checkpoint import class_facts

        class_facts(path)  # raises for other architectures
    fields = transformers_fields(path, architecture, trust_remote_code=trust_remote_code)
    return ModelSpec(
        architecture=architecture,
        text_type=_text_type(config),
        why_unseeing=f"Pictures of {config.get('model_type')} are not supported." if "vision_config" in config else "",
        implementation="remote" if trust_remote_code and config.get("auto_map") else "transformers",
        hidden_act="silu",
        rope=RopeSpec(rotary_dim=fields["head_dim"]),
        dtype=_dtype({**_DEFAULTS, **config}),
        quantization=_quantization_of_class(config),
        **_generation(config, _read_generation_config(path), fields["vocab_size"]),
        **fields,
    )


def _as_own(path: Path, spec: ModelSpec) -> ModelSpec:
    """Return the spec of a model that a class of transformers computes as that of localllm's decoder, if the class is
    recognised; else with the reason."""
    if spec.implementation != "transformers" or path.is_file():
        return spec
    from localllm.models.transformers_backend.recognition import Recognised, missing_names, recognise

    found = recognise(path, spec.architecture)
    if not isinstance(found, Recognised):
        return replace(spec, why_transformers=found)
    own = replace(spec, implementation="localllm", recognised=found.storage, **found.fields)
    try:
        _check(own)
        why = missing_names(path, own)
    except ModelError as error:
        why = error.what
    return replace(spec, why_transformers=why) if why else own


def _quantization_of_class(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the quantisation of the model or of its text part. DeepSeek V4 names the type of its experts beside it."""
    text = config.get("text_config")
    found = _quantization(config) or _quantization(text if isinstance(text, Mapping) else {})
    if found is None or "expert_dtype" not in config:
        return found
    return _quantization({"quantization_config": {"expert_dtype": config["expert_dtype"], **found}})


def _generation(config: Mapping[str, Any], generation: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """Return the tokens that end an answer, and the recommended sampling parameters. Ids behind the vocabulary's end,
    which configs of shortened models still have, are left out: no logit belongs to them."""
    ends = _token_ids(generation, "eos_token_id") or _token_ids(config, "eos_token_id")
    return {
        "eos_token_ids": tuple(token_id for token_id in ends if token_id < vocab_size),
        "bos_token_id": next(iter(_token_ids(config, "bos_token_id")), None),
        "generation_defaults": {n: generation[n] for n in _GENERATION_FIELDS if generation.get(n) is not None},
    }


def _family_of(config: Mapping[str, Any]) -> Family:
    supported = f"Supported: {', '.join(sorted(families()))}."
    if not _architecture(config):
        raise UnsupportedModel("config.json names no architecture.", supported)
    family = _known_family(config)
    if family is None:
        raise UnsupportedModel(f"{_architecture(config)} is not supported.", supported)
    return family


def _filled(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the config with common field names and defaults."""
    return {**_DEFAULTS, **family.defaults, **family.common_names(config)}


def _build(config: dict[str, Any], family: Family, generation: Mapping[str, Any]) -> ModelSpec:
    sizes = _sizes(config)
    config["num_key_value_heads"] = sizes["num_kv_heads"]
    rope, local_rope = read_ropes(config, sizes["head_dim"])
    differences = family.differences(config)
    if "norm" not in differences:
        differences["norm"] = NormSpec(number(config, "rms_norm_eps"))
    common = {
        "architecture": config["architectures"][0],
        "text_type": _text_type(config),
        "max_position": context_length(config, rope),
        "tie_word_embeddings": bool(config["tie_word_embeddings"]),
        "dtype": _dtype(config),
        "rope": rope,
        "local_rope": local_rope,
        "quantization": _quantization(config),
        **_generation(config, generation, sizes["vocab_size"]),
    }
    activation = activation_of(differences.get("hidden_act", config["hidden_act"]))
    spec = ModelSpec(**{**sizes, **common, **differences, "hidden_act": activation})
    _check(spec)
    return spec


def _sizes(config: Mapping[str, Any]) -> dict[str, int]:
    hidden, heads = size(config, "hidden_size"), size(config, "num_attention_heads")
    size(config, "max_position_embeddings")
    return {
        "num_layers": size(config, "num_hidden_layers"),
        "hidden_size": hidden,
        "intermediate_size": size(config, "intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": heads if config.get("num_key_value_heads") is None else size(config, "num_key_value_heads"),
        "head_dim": _head_dim(config, hidden, heads),
        "vocab_size": size(config, "vocab_size"),
    }


def _head_dim(config: Mapping[str, Any], hidden: int, heads: int) -> int:
    if config.get("head_dim") is not None:
        return size(config, "head_dim")
    if hidden % heads:
        raise CorruptModel(f"config.json's hidden_size {hidden} does not divide into {heads} attention heads.")
    return hidden // heads


def _dtype(config: Mapping[str, Any]) -> str:
    name = str(config.get("dtype") or config["torch_dtype"] or "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise UnsupportedModel(f"Weights of type {name!r} are not supported.", f"Supported: {', '.join(_DTYPES)}.")
    return name


def _token_ids(config: Mapping[str, Any], name: str) -> tuple[int, ...]:
    value = config.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise CorruptModel(f"The checkpoint has {name} = {value!r}.", "It must be one token id or a list of them.")
    return tuple(ids)


def _with_source(spec: ModelSpec, config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelSpec:
    """Return the spec with the limits of its encoder, if it is an encoder-decoder."""
    from localllm.models.families.encoder_decoder import ENCODER_DECODERS, source_of

    is_one = any(spec.architecture in family.architectures for family in ENCODER_DECODERS)
    return replace(spec, source=source_of(config, generation, spec.max_position)) if is_one else spec


def _read_vision(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `ModelSpec` about the part that reads pictures."""
    from localllm.models.vision.families import kind_of, read_vision, sees

    if not sees(config):
        kind = kind_of(config)
        return {"why_unseeing": f"Pictures of {kind} are not supported."} if "vision_config" in config else {}
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (path / name).is_file():
            found = read_json_object(path / name)
            return {"vision": read_vision(config, found.get("image_processor") or found)}
    return {"why_unseeing": f"{path.name} has no preprocessor_config.json, which says how pictures are prepared."}


def _read_hearing(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `ModelSpec` about the part that reads sound."""
    from localllm.models.vision.sound import hears, read_hearing, require_extractor

    if not hears(config):
        is_deaf = "audio_config" in config and "vision_config" not in config
        return {"why_unseeing": f"Sound of {config.get('model_type')} is not supported."} if is_deaf else {}
    hearing = read_hearing(config, path)
    require_extractor(path, hearing)
    return {"hearing": hearing}


def _with_projector(path: Path, spec: ModelSpec, asked: str | None) -> ModelSpec:
    """Return the spec of a GGUF model with the part that reads pictures, which is in a file of its own.

    A file that was found and is of a type that is not read leaves the text part; one that was asked for raises.
    """
    from localllm.models.formats.gguf.checkpoint import read_parts
    from localllm.models.vision.mmproj import find_projector

    projector = find_projector(path, spec.hidden_size, asked)
    if projector is None:
        return spec
    from localllm.models.vision.mmproj import vision_of

    try:
        vision = vision_of(projector, path, spec.hidden_size)
    except UnsupportedModel as error:
        if asked is not None:
            raise
        return replace(spec, why_unseeing=f"{error.what} {error.why}")
    metadata = read_parts(path)[0].metadata
    architecture = str(metadata["general.architecture"])
    sections = metadata.get(f"{architecture}.rope.dimension_sections")
    if vision is None or not vision.grids or not isinstance(sections, list):
        return replace(spec, vision=vision)
    interleaved = architecture != "qwen2vl"
    rope = replace(spec.rope, sections=tuple(map(int, sections[:3])), interleaved_sections=interleaved)
    if sum(rope.sections) != rope.rotary_dim // 2:
        raise CorruptModel(
            f"{path.name} has rope.dimension_sections = {sections}.", f"They must add up to {rope.rotary_dim // 2}."
        )
    return replace(spec, vision=vision, rope=rope)


def _read_generation_config(path: Path) -> Mapping[str, Any]:
    file = path / "generation_config.json"
    return read_json_object(file) if file.is_file() else {}


def _check(spec: ModelSpec) -> None:
    if spec.num_heads % spec.num_kv_heads:
        raise CorruptModel(
            f"config.json's {spec.num_heads} attention heads cannot share {spec.num_kv_heads} key/value heads.",
            "The first must be a multiple of the second.",
        )
    for name in ("layer_is_windowed", "layer_has_rope", "layer_has_sinks", "layer_kinds"):
        count = len(getattr(spec, name))
        if count not in (0, spec.num_layers):
            raise CorruptModel(f"config.json describes {count} layers in one place and {spec.num_layers} in another.")
    if not any(spec.has_attention(layer) for layer in range(spec.num_layers)):
        raise UnsupportedModel("A model without attention is not supported.", "All of its layers are recurrent.")
    if spec.mlp_gated and spec.hidden_act not in _GATED_ACTIVATIONS:
        raise UnsupportedModel(
            f"A gate with activation {spec.hidden_act!r} is not supported.",
            f"Supported: {', '.join(_GATED_ACTIVATIONS)}.",
        )
    for name in _FACTORS:
        value = getattr(spec, name)
        if value is not None and not (isinstance(value, int | float) and 0 < value < LARGEST):
            raise CorruptModel(f"config.json has {name} = {value!r}.", "It must be a number above 0.")
    window = spec.sliding_window
    if any(spec.layer_is_windowed) and (not isinstance(window, int) or window < 1):
        raise CorruptModel(
            f"config.json has sliding_window = {window!r}, and layers that use it.", "It must be above 0."
        )
