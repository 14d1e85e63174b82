"""GGUF files: refused for the moment."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

from localllm.errors import UnsupportedModel
from localllm.models.formats.checkpoint import Checkpoint


def config_of(path: Path) -> dict[str, Any]:
    _refuse(path)


def open_gguf(path: Path) -> Checkpoint:
    _refuse(path)


def _refuse(path: Path) -> NoReturn:
    raise UnsupportedModel(f"{path} is a GGUF file.", "This version reads safetensors checkpoints.")
