"""Read a checkpoint's config through the config class of `transformers`, and find the part that answers.

Does not know: fields, ModelSpec, weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from localllm.errors import CorruptModel, ModelError, UnsupportedModel
from localllm.models.formats.checkpoint import is_gguf


def first_line(error: Exception) -> str:
    """Return the first line of an exception's text, or its class if there is none."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def load_config(path: Path, *, trust_remote_code: bool) -> Any:
    """Return the `PreTrainedConfig` of folder or GGUF file `path`; the checkpoint's own class only if its code is
    trusted."""
    from transformers import AutoConfig

    fields: dict[str, Any] | None = None
    if is_gguf(path):
        from localllm.models.formats.gguf.checkpoint import config_of_class

        fields = config_of_class(path)
    try:
        if fields is not None:
            return AutoConfig.for_model(**fields)
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # validators raise many kinds of errors
        raise _translated(path, error) from error


def load_causal_config(path: Path, architecture: str, *, trust_remote_code: bool) -> Any:
    """Return the config that `AutoModelForCausalLM` takes: the checkpoint's, or its text part's if the model reads more
    than text; so, too, if only the whole model has a class. Raises `UnsupportedModel` if there is none."""
    config = load_config(path, trust_remote_code=trust_remote_code)
    is_remote = trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    names = [kind.__name__ for kind in causal_classes(config)]
    if architecture in names or is_remote:
        return config
    text = text_part(config)
    if text is not config and (causal_classes(text) or architecture in whole_names(config)):
        tied = getattr(text, "tie_word_embeddings", False)
        text.tie_word_embeddings = getattr(config, "tie_word_embeddings", tied)
        return text
    kind = getattr(config, "model_type", "?")
    instead = f"of type {kind!r} it has {', '.join(names)}" if names else f"it has none of type {kind!r}"
    raise UnsupportedModel(
        f"{architecture} is not supported.",
        f"localllm has no decoder for it, and among the causal language models of transformers {instead}.",
        "docs/reference/models.md lists the families.",
    )


def text_part(config: Any) -> Any:
    """Return the config of the text part; of a model of text alone the config itself."""
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def causal_classes(config: Any) -> list[type[Any]]:
    """Return the classes of transformers that compute a model of text with this config, or a config of this type."""
    from transformers import AutoModelForCausalLM

    kind = config if isinstance(config, type) else type(config)
    known = AutoModelForCausalLM._model_mapping.get(kind, None)
    return [kind for kind in (known if isinstance(known, tuple) else (known,)) if kind is not None]


def whole_names(config: Any) -> list[str]:
    """Return the names of the classes of transformers that answer about pictures with this config."""
    from transformers import AutoModelForImageTextToText

    known = AutoModelForImageTextToText._model_mapping.get(type(config), None)
    return [kind.__name__ for kind in (known if isinstance(known, tuple) else (known,)) if kind is not None]


def _translated(path: Path, error: Exception) -> ModelError:
    text = first_line(error)
    if "trust_remote_code" in str(error) or "custom code" in str(error):
        return UnsupportedModel(
            f"{path.name} needs its own Python code, which is not run by default.",
            "Neither localllm nor the installed transformers supports its architecture.",
            "--trust-remote-code runs this code with your rights: read it first.",
        )
    if "model type" in str(error) or "model_type" in str(error):
        return UnsupportedModel(f"transformers does not know the model in {path}.", text)
    return CorruptModel(f"Cannot parse {path if is_gguf(path) else path / 'config.json'}.", text)
