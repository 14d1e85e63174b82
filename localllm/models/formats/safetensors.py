"""A checkpoint in safetensors files: a single one, or several with an index. They are memory-mapped, so reading a
tensor only costs the copy that its user makes.

Headers are checked before any tensor is read (safetensors_header.py), so an incomplete download gives an error with its
numbers instead of a failure later. Does not know: what the tensors mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from localllm.errors import CorruptModel, ModelNotFound, UnsupportedModel
from localllm.files.json_file import read_json
from localllm.models.formats.checkpoint import TensorInfo
from localllm.models.formats.safetensors_header import DTYPES, read_header

if TYPE_CHECKING:
    from torch import Tensor

INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")


class SafetensorsCheckpoint:
    """The named tensors of a folder; a `Checkpoint`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: Mapping[str, TensorInfo] = read_headers(path)
        self._open: dict[Path, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.clear()

    def tensor(self, name: str) -> Tensor:
        """Return a view into the map; copy it to keep it."""
        info = self.tensors[name]
        if info.dtype not in DTYPES:
            raise UnsupportedModel(
                f"{name} in {info.file.name} is stored as {info.dtype}.", f"Supported: {', '.join(DTYPES)}."
            )
        tensor: Tensor = self._file(info.file).get_tensor(name)
        return tensor

    def _file(self, file: Path) -> Any:
        if file not in self._open:
            from safetensors import SafetensorError, safe_open

            try:
                self._open[file] = safe_open(str(file), framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise CorruptModel(f"Cannot read {file}.", str(error), "Download the file again.") from error
        return self._open[file]


def read_headers(path: Path) -> dict[str, TensorInfo]:
    """Return every tensor of the folder by name. Raises `CorruptModel` with the file and the numbers that disagree."""
    tensors: dict[str, TensorInfo] = {}
    for file in _files(path):
        for name, info in read_header(file).items():
            if name in tensors:
                raise CorruptModel(f"{name} is stored twice, in {tensors[name].file.name} and in {file.name}.")
            tensors[name] = info
    return tensors


def _files(path: Path) -> list[Path]:
    if (path / INDEX).is_file():
        return _indexed_files(path)
    files = sorted(path.glob("*.safetensors"))
    if (path / "model.safetensors") in files:
        return [path / "model.safetensors"]  # some repositories also have a consolidated copy
    if not files:
        _refuse(path)
    return files


def _indexed_files(path: Path) -> list[Path]:
    try:
        names = sorted(set(read_json(path / INDEX)["weight_map"].values()))
        files = [path / name for name in names]
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptModel(f"Cannot read {path / INDEX}.", f"{type(error).__name__}: {error}.") from error
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CorruptModel(
            f"{len(missing)} of the checkpoint's {len(files)} files are missing from {path}.",
            f"Missing: {', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}.",
            "Download the model again; the download is not complete.",
        )
    return files


def _refuse(path: Path) -> None:
    names = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
    if any(name.endswith(".gguf") for name in names):
        raise UnsupportedModel(f"{path} holds GGUF files.", "Pass the path of one GGUF file.")
    pickles = [name for name in names if name.endswith(PICKLES)]
    if pickles:
        raise UnsupportedModel(
            f"{path} holds weights only as pickles ({', '.join(pickles[:3])}).",
            "Opening a pickle can run code, so only safetensors are supported.",
            "Convert it with transformers: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)",
        )
    raise ModelNotFound(
        f"{path} holds no weights.",
        "There is no .safetensors file in it.",
        "Download the model again; the download is not complete.",
    )
