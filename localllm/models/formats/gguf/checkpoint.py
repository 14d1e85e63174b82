"""A checkpoint in GGUF: one file, or the parts of a split one in the same folder. Tensor data is memory-mapped.

The header is parsed in header.py, the config that metadata describes in config.py; storage.py knows the names and order
of tensors, matrices.py what each block type becomes.

GGUF stores latent attention's second matrix of keys and values in two parts and in another order:

    DeepSeek's kv_b_proj    [heads x (key + value), latent]
    attn_k_b                [heads, latent, key]        the rows of each head's keys, transposed
    attn_v_b                [heads, value, latent]

The parts are joined into one tensor, `attn_kv_b`, and dequantised, as transposed blocks cannot be restored. It is
small.
Does not know: layers.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import replace
from math import isfinite, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from localllm.errors import CorruptModel, UnsupportedModel
from localllm.models.formats.checkpoint import FLOATS, TensorInfo
from localllm.models.formats.gguf.classes import CLASSES, ClassFacts, inside_layer
from localllm.models.formats.gguf.config import config_of_header
from localllm.models.formats.gguf.file_names import parts_of
from localllm.models.formats.gguf.header import GGUFHeader, StoredTensor, plain, read_header
from localllm.models.formats.gguf.storage import storage_of
from localllm.models.spec.family import Storage
from localllm.models.spec.gguf import Fields, Metadata

if TYPE_CHECKING:
    from torch import Tensor


def join_expansions(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return the tensors with each pair replaced by one joined tensor."""
    joined = dict(tensors)
    for name in tensors:
        if not re.fullmatch(r"blk\.\d+\.attn_k_b\.weight", name):
            continue
        keys, values = joined.pop(name), joined.pop(name.replace("_k_b", "_v_b"), None)
        if values is None or [len(keys.shape), len(values.shape)] != [3, 3] or keys.shape[0] != values.shape[0]:
            raise CorruptModel(f"{name} in {keys.file} has no attn_v_b that fits its shape {list(keys.shape)}.")
        heads, latent, key = keys.shape
        shape = (heads * (key + values.shape[1]), latent)
        num_bytes = keys.num_bytes + values.num_bytes
        joined[name.replace("_k_b", "_kv_b")] = TensorInfo(keys.file, "F32", shape, num_bytes)
    return joined


def halves(name: str) -> tuple[str, str]:
    """Return the stored names of the keys and of the values of a joined tensor."""
    return name.replace("_kv_b", "_k_b"), name.replace("_kv_b", "_v_b")


def expansion(keys: Tensor, values: Tensor) -> Tensor:
    """Join keys [heads, latent, key] and values [heads, value, latent] to [heads x (key + value), latent]."""
    import torch

    return torch.cat((keys.transpose(1, 2), values), dim=1).flatten(0, 1)


ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_PLAIN = {**FLOATS, "I8": 1, "I16": 2, "I32": 4, "I64": 8, "F64": 8}


class GGUFCheckpoint:
    """The named tensors of one model; a `Checkpoint`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stored: dict[str, tuple[Path, StoredTensor]] = {}
        headers = read_parts(path)
        for header in headers:
            for name, tensor in header.tensors.items():
                if name in self._stored:
                    first = self._stored[name][0].name
                    raise CorruptModel(f"{name} is stored twice, in {first} and in {header.file.name}.")
                self._stored[name] = header.file, tensor
        _check_total(headers, len(self._stored))
        tensors = {
            name: TensorInfo(file, tensor.block_type, tensor.shape, tensor.num_bytes, tensor.start)
            for name, (file, tensor) in self._stored.items()
        }
        self.tensors: Mapping[str, TensorInfo] = join_expansions(tensors)
        self._maps: dict[Path, mmap.mmap] = {}
        read = [re.escape(name) for name in ROPE_FACTORS if self.values(name) is not None]
        self.storage: Storage = storage_of(headers[0], self.tensors, (*read, *_later_layers(headers[0])))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._maps.clear()  # each map is released with the last view into it

    def tensor(self, name: str) -> Tensor:
        """Return a view into the map; copy it to keep it. Block types come as uint8 [rows, bytes of a row]."""
        import torch

        if name not in self._stored:
            return expansion(*map(self.widened, halves(name)))
        file, stored = self._stored[name]
        data = torch.frombuffer(self._map(file), dtype=torch.uint8, count=stored.num_bytes, offset=stored.start)
        if stored.block_type not in _PLAIN:
            return data.view(*stored.shape[:-1], -1)
        dtype = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}.get(stored.block_type)
        dtype = dtype or "int" + stored.block_type[1:]
        if stored.start % _PLAIN[stored.block_type]:
            data = data.clone()  # the file's alignment may be smaller than the type's
        return data.view(getattr(torch, dtype)).view(stored.shape)

    def widened(self, name: str) -> Tensor:
        """Return the values of a stored tensor in fp32."""
        import torch

        from localllm.models.formats.gguf.matrices import widen

        file, stored = self._stored[name]
        info = TensorInfo(file, stored.block_type, stored.shape, stored.num_bytes)
        return widen(self.tensor(name), info, torch.float32)

    def values(self, name: str) -> list[float] | None:
        """Return config values that are stored as a tensor; None: missing.

        All zeros mean a hole, in a file of which only the header was downloaded. The weights of such a file are never
        used, so the tensor is then ignored.
        """
        info = self.tensors.get(name)
        if info is None:
            return None
        if info.dtype != "F32" or len(info.shape) != 1 or info.shape[0] > 65_536:
            raise CorruptModel(f"{name} in {info.file} is {info.dtype} {list(info.shape)}.", "It should be a list.")
        file, stored = self._stored[name]
        values = struct.unpack_from(f"<{info.shape[0]}f", self._map(file), stored.start)
        if not any(values):
            return None
        if not all(value > 0 and isfinite(value) for value in values):
            raise CorruptModel(
                f"{name} in {info.file} contains values that are not positive.", "All of them must be above 0."
            )
        return list(values)

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            try:
                with file.open("rb") as stream:
                    # Private and writable, because torch warns about read-only views.
                    self._maps[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
            except OSError as error:
                raise CorruptModel(f"Cannot read {file}.", str(error), "Download the file again.") from error
        return self._maps[file]


class ClassCheckpoint:
    """A GGUF checkpoint with the values that a class of transformers expects, under stored names; a `Checkpoint`. In
    the order of the class's table."""

    def __init__(self, whole: GGUFCheckpoint, facts: ClassFacts, metadata: Metadata, config: Fields) -> None:
        """config: the class's, as `config_of_header` returns it."""
        self.path, self._whole, self._undone = whole.path, whole, facts.undone(config)
        self._constants = facts.constants(metadata)
        left_out = re.compile("|".join((*whole.storage.ignored, *facts.ignored)) or "(?!)")
        moved = facts.moved(metadata)
        self._stored = {moved.get(name, name): name for name in whole.tensors if not left_out.fullmatch(name)}
        infos = {name: self._info(name) for name in self._stored}
        infos |= {name: TensorInfo(whole.path, "I64", (len(n),), 8 * len(n)) for name, n in self._constants.items()}
        self.tensors: Mapping[str, TensorInfo] = {name: infos[name] for name in sorted(infos, key=facts.order())}

    def _info(self, name: str) -> TensorInfo:
        info = self._whole.tensors[self._stored[name]]
        if not self._is_widened(name):
            return info
        return replace(info, dtype="F32", num_bytes=4 * prod(info.shape), start=None)

    def _is_widened(self, name: str) -> bool:
        undo = self._undone.get(inside_layer(name))
        is_in_blocks = self._whole.tensors[self._stored[name]].dtype not in _PLAIN
        return undo is not None and not undo.moves_rows and is_in_blocks

    def tensor(self, name: str) -> Tensor:
        """Return a view into the file, or what it stands for; copy it to keep it."""
        import torch

        if name in self._constants:
            return torch.tensor(self._constants[name], dtype=torch.int64, device="cpu")
        stored, undo = self._stored[name], self._undone.get(inside_layer(name))
        if undo is None:
            return self._whole.tensor(stored)
        return undo.change(self._whole.widened(stored) if self._is_widened(name) else self._whole.tensor(stored))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._whole.__exit__(*exc)


def open_gguf_of_class(path: Path) -> ClassCheckpoint:
    """Open a GGUF checkpoint for its class of transformers. Raises `CorruptModel`, `UnsupportedModel`."""
    facts, whole, header = class_facts(path), GGUFCheckpoint(path), read_parts(path)[0]
    config = config_of_header(header, whole)
    return ClassCheckpoint(whole, facts, Metadata(header.file, header.metadata), config)


def class_facts(path: Path) -> ClassFacts:
    """Return the facts of the file's class. Raises `UnsupportedModel` if a decoder of localllm's computes it."""
    architecture = str(read_parts(path)[0].metadata["general.architecture"])
    if architecture not in CLASSES:
        raise UnsupportedModel(
            f"{path.name} is a GGUF file of {architecture!r}, which transformers does not compute here.",
            f"Supported through its classes: {', '.join(sorted(CLASSES))}.",
            "Leave --verify and --model-impl transformers out, or use the safetensors of the same model.",
        )
    return CLASSES[architecture]


def config_of_class(path: Path) -> dict[str, Any]:
    """Return the fields of the class's config. Raises as `class_facts` and `config_of`."""
    class_facts(path)
    fields = config_of(path)
    del fields["quantization_config"], fields["dtype"]  # neither is the class's matter
    return fields


def open_gguf(path: Path) -> GGUFCheckpoint:
    """Open a GGUF checkpoint. Raises `CorruptModel`, `UnsupportedModel`."""
    return GGUFCheckpoint(path)


def config_of(path: Path) -> dict[str, Any]:
    """Return the config.json that the file's metadata describes. Raises `CorruptModel`, `UnsupportedModel`."""
    with GGUFCheckpoint(path) as checkpoint:
        return config_of_header(read_parts(path)[0], checkpoint)


def metadata_of(path: Path) -> dict[str, Any]:
    """Return all metadata as plain values: lists, texts, numbers. Raises `CorruptModel`, `UnsupportedModel`."""
    return {key: plain(value) for key, value in read_parts(path)[0].metadata.items()}


def read_parts(path: Path) -> list[GGUFHeader]:
    """Return the headers of all parts in order, given any part; a single one if the file is not split."""
    header = read_header(path)
    files = [path.with_name(name) for name in parts_of(path.name)]
    stated = header.metadata.get("split.count", 1)
    if stated not in (0, 1, len(files)):
        raise CorruptModel(
            f"{path.name} is one of {stated} parts by its metadata, and one of {len(files)} by its name.",
            "Parts are named NAME-00001-of-00003.gguf and must be in the same folder.",
            "Restore the original file names.",
        )
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CorruptModel(
            f"{len(missing)} of the {len(files)} parts of {path.name} are missing.",
            f"Missing: {', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}.",
            "Download the model again; the download is not complete.",
        )
    headers = [read_header(file) for file in files]
    for number, part in enumerate(headers):
        if len(headers) > 1 and part.metadata.get("split.no") != number:
            raise CorruptModel(
                f"{part.file.name} is part {part.metadata.get('split.no')} (counted from 0) by its metadata, "
                f"and {number} by its name."
            )
    if "general.architecture" not in headers[0].metadata:
        raise UnsupportedModel(f"{path.name} names no architecture.", "It has no key general.architecture.")
    return headers


def _later_layers(header: GGUFHeader) -> list[str]:
    """Return patterns of the layers after the model's own, which predict further tokens and are not run."""
    name = header.metadata["general.architecture"]
    count, extra = (header.metadata.get(f"{name}.{key}") for key in ("block_count", "nextn_predict_layers"))
    if type(count) is not int or type(extra) is not int:
        return []
    return [rf"blk\.{layer}\..*" for layer in range(max(0, count - extra), count)][:1000]


def _check_total(headers: list[GGUFHeader], found: int) -> None:
    stated = headers[0].metadata.get("split.tensors.count", found)
    if stated != found:
        raise CorruptModel(
            f"The parts of {headers[0].file.name} hold {found} tensors; they should hold {stated}.",
            hint="Download the model again.",
        )
