"""Fields of a ModelSpec from a checkpoint's config class, for models that `transformers` computes.

The class fills in what config.json omits, so no family needs to be known here. Refused by name: models that are not
causal language models, models with a state other than keys and values, models that need the checkpoint's own code.
Does not know: weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from localllm.errors import CorruptModel, ModelError, UnsupportedModel

OTHER_STATE = ("linear_attention", "mamba", "recurrent", "conv", "hybrid")  # kinds of layers that are not attention
_LENGTHS = ("max_position_embeddings", "max_seq_len", "seq_length", "n_positions", "model_max_length")


def transformers_fields(path: Path, architecture: str, *, trust_remote_code: bool) -> dict[str, Any]:
    """Return sizes and context length by ModelSpec's names. Raises `UnsupportedModel`, `CorruptModel`."""
    config = load_config(path, trust_remote_code=trust_remote_code)
    _refuse(config, architecture, trust_remote_code=trust_remote_code)
    return sizes_of(config)


def sizes_of(config: Any) -> dict[str, Any]:
    """Return the sizes in a `PreTrainedConfig` by ModelSpec's names. Raises `CorruptModel`."""
    heads = _whole(config, "num_attention_heads")
    hidden = _whole(config, "hidden_size")
    return {
        "num_layers": _whole(config, "num_hidden_layers"),
        "hidden_size": hidden,
        "intermediate_size": _whole(config, "intermediate_size", 4 * hidden),
        "num_heads": heads,
        "num_kv_heads": _whole(config, "num_key_value_heads", heads),
        "head_dim": _whole(config, "head_dim", hidden // heads),
        "vocab_size": _whole(config, "vocab_size"),
        "max_position": next(value for name in (*_LENGTHS, None) if (value := _length(config, name))),
        "tie_word_embeddings": bool(getattr(config, "tie_word_embeddings", False)),
    }


def load_config(path: Path, *, trust_remote_code: bool) -> Any:
    """Return the `PreTrainedConfig` of folder `path`; the checkpoint's own class only if its code is trusted."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # validators raise many kinds of errors
        raise _translated(path, error) from error


def _translated(path: Path, error: Exception) -> ModelError:
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if "trust_remote_code" in str(error) or "custom code" in str(error):
        return UnsupportedModel(
            f"{path.name} needs its own Python code, which is not run by default.",
            "Neither localllm nor the installed transformers supports its architecture.",
            "--trust-remote-code runs this code with your rights: read it first.",
        )
    if "model type" in str(error) or "model_type" in str(error):
        return UnsupportedModel(f"transformers does not know the model in {path}.", text)
    return CorruptModel(f"Cannot parse {path}/config.json.", text)


def _refuse(config: Any, architecture: str, *, trust_remote_code: bool) -> None:
    from transformers import AutoModelForCausalLM

    is_remote = trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    known = AutoModelForCausalLM._model_mapping.get(type(config), None)
    names = [kind.__name__ for kind in (known if isinstance(known, tuple) else (known,)) if kind is not None]
    if architecture not in names and not is_remote:
        kind = getattr(config, "model_type", "?")
        instead = f"of type {kind!r} it has {', '.join(names)}" if names else f"it has none of type {kind!r}"
        raise UnsupportedModel(
            f"{architecture} is not supported.",
            f"localllm has no decoder for it, and among the causal language models of transformers {instead}.",
            "docs/reference/models.md lists the families.",
        )
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{architecture} is not supported.", "It has an encoder; only decoders are supported.")
    kinds = {str(kind) for kind in getattr(config, "layer_types", None) or ()}
    other = sorted(kind for kind in kinds if any(word in kind for word in OTHER_STATE))
    if other:
        raise UnsupportedModel(
            f"{architecture} is not supported.",
            f"It has layers of type {', '.join(other)}, whose state is not a KV cache; only attention layers run here.",
        )


def _whole(config: Any, name: str, default: int | None = None) -> int:
    value = getattr(config, name, None)
    if isinstance(value, list) and value:
        value = max(value)  # layers of different widths: use an upper bound
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CorruptModel(f"config.json has {name} = {value!r}.", "It must be a whole number above 0.")
    return value


def _length(config: Any, name: str | None) -> int:
    if name is None:
        return 2048
    value = getattr(config, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
