"""Read a checkpoint's config through the config class of `transformers`.

Does not know: fields, ModelSpec, weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from localllm.errors import CorruptModel, ModelError, UnsupportedModel


def first_line(error: Exception) -> str:
    """Return the first line of an exception's text, or its class if there is none."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def load_config(path: Path, *, trust_remote_code: bool) -> Any:
    """Return the `PreTrainedConfig` of folder `path`; the checkpoint's own class only if its code is trusted."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # validators raise many kinds of errors
        raise _translated(path, error) from error


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
    return CorruptModel(f"Cannot parse {path}/config.json.", text)
