"""Open a checkpoint in its file format.

Does not know: what the tensors mean.
"""

from __future__ import annotations

from pathlib import Path

from localllm.models.formats.checkpoint import Checkpoint, is_gguf


def open_checkpoint(path: Path) -> Checkpoint:
    """Open the checkpoint in folder or GGUF file `path`. Raises `CorruptModel`, `UnsupportedModel`, `ModelNotFound`."""
    if is_gguf(path):
        from localllm.models.formats.gguf import open_gguf

        return open_gguf(path)
    from localllm.models.formats.safetensors import SafetensorsCheckpoint

    return SafetensorsCheckpoint(path)
