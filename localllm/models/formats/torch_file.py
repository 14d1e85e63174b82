"""A checkpoint in one file that torch.save wrote: `pytorch_model.bin`. Drafters alone may be stored so, since several
are published in no other form.

The file is a pickle, and a pickle can run code. torch reads it with `weights_only`, which builds tensors and plain
containers and refuses everything else. Does not know: what the tensors mean.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from localllm.errors import CorruptModel, UnsupportedModel
from localllm.models.formats.checkpoint import TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

FILE = "pytorch_model.bin"
_TYPES = {
    "float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64", "bool": "BOOL", "uint8": "U8",
    "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
}  # fmt: skip
_CONVERT = "Convert it to safetensors on a machine where you trust the file: safetensors.torch.save_file(tensors, path)"


def is_torch_folder(path: Path) -> bool:
    """Return whether a folder has its weights in `pytorch_model.bin` alone."""
    return (path / FILE).is_file() and not any(path.glob("*.safetensors"))


class TorchFileCheckpoint:
    """The named tensors of `pytorch_model.bin` in a folder; a `Checkpoint`.

    Raises `UnsupportedModel` if the file would run code or has other values than tensors, `CorruptModel` if it is not
    readable.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._loaded = _load(path / FILE)
        self.tensors: Mapping[str, TensorInfo] = {
            name: _describe(path / FILE, name, tensor) for name, tensor in self._loaded.items()
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._loaded = {}

    def tensor(self, name: str) -> Tensor:
        """Return a view into the file; copy it to keep it."""
        return self._loaded[name]


def _load(file: Path) -> dict[str, Tensor]:
    import torch

    if not zipfile.is_zipfile(file):
        raise UnsupportedModel(
            f"{file} is not an archive of torch.",
            "Supported: files that torch.save has written since torch 1.6.",
            "Download the file again, or use a repository of the drafter with safetensors.",
        )
    try:
        with torch.device("cpu"):
            loaded: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise UnsupportedModel(
            f"{file} does more than hold tensors, so it is not opened.",
            f"Reading it would run code: {_told(error)}",
            f"Use a repository of the drafter with safetensors. {_CONVERT}",
        ) from error
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, AttributeError) as error:
        raise CorruptModel(f"Cannot read {file}.", _told(error), "Download the file again.") from error
    if not isinstance(loaded, dict):
        raise UnsupportedModel(f"{file} holds a {type(loaded).__name__}, not named tensors.", hint=_CONVERT)
    for name, value in loaded.items():
        if not (isinstance(name, str) and isinstance(value, torch.Tensor)):
            raise UnsupportedModel(
                f"{file} holds other values than named tensors.", f"{name!r} is a {type(value).__name__}.", _CONVERT
            )
    return loaded


def _describe(file: Path, name: str, tensor: Tensor) -> TensorInfo:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in _TYPES:
        raise UnsupportedModel(f"{name} in {file.name} is stored as {dtype}.", f"Supported: {', '.join(_TYPES)}.")
    return TensorInfo(file, _TYPES[dtype], tuple(tensor.shape), tensor.numel() * tensor.itemsize)


def _told(error: Exception) -> str:
    """Return what happened in one line. torch's own message goes on with advice to trust the file."""
    if named := re.search(r"GLOBAL (\S+)", str(error)):
        return f"it calls {named[1]}."
    return f"{(str(error).splitlines() or [type(error).__name__])[0]}."
