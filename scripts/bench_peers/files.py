"""The weights of one model in both forms: a folder for most engines, a GGUF file for llama.cpp.

tests/gguf_files.py makes the file if it can, tensor for tensor; else it has to be given.
Does not know: engines.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from localllm.errors import ConfigError

BLOCK_TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


@dataclass(frozen=True, slots=True)
class Files:
    """The same weights in both forms."""

    folder: Path
    gguf: Path

    @classmethod
    def random(cls, parent: Path) -> Files:
        """Make a model of two layers, 64 wide, heads of 32 (vLLM's minimum): it costs little beside its server."""
        from tests.tiny import make_tiny_model

        folder = make_tiny_model(parent / "tiny", num_attention_heads=2, num_key_value_heads=1)
        return cls(folder, make_gguf(folder, parent / "tiny.gguf", "float32"))


def make_gguf(folder: Path, path: Path, dtype: str) -> Path:
    """Write the model of `folder` as a GGUF file of this type. Raises `ConfigError` if that is not supported."""
    from tests.gguf_files import write_gguf

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    try:
        if kind != "default":
            raise ValueError(f"rope_type {kind}")
        write_gguf(folder, path, BLOCK_TYPES[dtype])
    except (AssertionError, KeyError, OSError, ValueError) as error:
        raise ConfigError(
            f"No GGUF file of {folder} can be made here.",
            f"{type(error).__name__}: {error}",
            "--gguf FILE, made of the same weights by llama.cpp's convert_hf_to_gguf.py",
        ) from error
    return path
