"""The files of a checkpoint, and hashes that tell whether two checkpoints are the same.

Does not know: what the files contain.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from localllm.models.fit import MemoryPlan


def fingerprint(path: Path, plan: MemoryPlan) -> bytes:
    """Return a key of everything besides the tokens that KV cache values depend on: files, dtype, block size."""
    digest = hashlib.blake2b(digest_size=16)
    for file in files_of(path):
        status = file.stat()
        digest.update(f"{file.name}:{status.st_size}:{status.st_mtime_ns};".encode())
    digest.update(f"{path.resolve()}:{plan.dtype}:{plan.kv_dtype}:{plan.block_size}".encode())
    return digest.digest()


def model_fingerprint(path: Path) -> str:
    """Return a hash of the names and sizes of a checkpoint's files and the content of the small ones. A copy in another
    folder has the same fingerprint."""
    digest = hashlib.blake2b(digest_size=16)
    for file in files_of(path):
        digest.update(f"{file.name}:{file.stat().st_size};".encode())
        if file.name == "config.json":
            digest.update(file.read_bytes())
    return digest.hexdigest()


def files_of(path: Path) -> list[Path]:
    """Return the files of a checkpoint: the JSON and safetensors files of a folder, or all parts of a GGUF model."""
    if path.is_file():
        from localllm.models.formats.gguf.file_names import parts_of

        return [path.with_name(name) for name in parts_of(path.name)]
    return sorted(path.glob("*.json")) + sorted(path.glob("*.safetensors"))
