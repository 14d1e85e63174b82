"""Broken checkpoints: each is refused with the file, the tensor and the numbers; none loads half a model."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from localllm.errors import CorruptModel, LocalLLMError, ModelNotFound, UnsupportedModel
from localllm.models.formats.safetensors import INDEX
from localllm.models.loader import load_model
from localllm.models.read_spec import read_spec, weights_bytes
from tests.models.harness import CPU

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def folder(tiny_llama_path: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_llama_path, tmp_path / "model"))


def load(folder: Path) -> None:
    load_model(folder, read_spec(folder), CPU, torch.float32)


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def shard(folder: Path) -> list[str]:
    """Two files and an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return sorted(set(weight_map.values()))


def test_weights_bytes_are_exact(folder: Path) -> None:
    wanted = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    assert weights_bytes(folder) == wanted
    shard(folder)
    assert weights_bytes(folder) == wanted
    load(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, 5_000, -1], ids=lambda n: f"{n} bytes")
def test_truncated_file(folder: Path, keep: int) -> None:
    file = folder / "model.safetensors"
    data = file.read_bytes()[:keep]
    file.write_bytes(data)
    with pytest.raises(CorruptModel, match=rf"model\.safetensors is cut short.*{len(data):,} bytes"):
        load(folder)
    with pytest.raises(CorruptModel):
        weights_bytes(folder)


@pytest.mark.parametrize("header", [b"not json", b"[]", b'{"a": 1}', b'{"a": {"dtype": "F32", "shape": [2]}}', b"\xff"])
def test_damaged_header(folder: Path, header: bytes) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    with pytest.raises(CorruptModel, match=r"header of .*model\.safetensors is damaged"):
        load(folder)


def test_shape_that_contradicts_its_bytes(folder: Path) -> None:
    header = json.dumps({"x": {"dtype": "F32", "shape": [3, 5], "data_offsets": [0, 8]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(CorruptModel, match=r"needs 60 bytes, but the header says 8"):
        load(folder)


def test_missing_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.__delitem__(Q_PROJ))
    with pytest.raises(CorruptModel, match=f"lacks {Q_PROJ}"):
        load(folder)


def test_file_without_tensors(folder: Path) -> None:
    save_file({}, folder / "model.safetensors")
    with pytest.raises(CorruptModel, match=r"lacks model\.embed_tokens\.weight"):
        load(folder)


def test_missing_head_is_named_when_it_is_not_tied(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.__delitem__("lm_head.weight"))
    with pytest.raises(CorruptModel, match=r"lacks lm_head\.weight"):
        load(folder)


def test_unexpected_tensors_are_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}))
    with pytest.raises(CorruptModel, match=r"1 tensors.*q_proj\.bias"):
        load(folder)


def test_recomputed_tables_are_no_surprise(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    load(folder)


def test_wrong_shape_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({Q_PROJ: torch.zeros(64, 32)}))
    with pytest.raises(CorruptModel, match=r"q_proj.*\[64, 32\].*64\]"):
        load(folder)


def test_integer_weights_are_refused(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({Q_PROJ: torch.zeros(64, 64, dtype=torch.int8)}))
    with pytest.raises(UnsupportedModel, match="I8"):
        load(folder)


def test_missing_shard_is_named(folder: Path) -> None:
    files = shard(folder)
    (folder / files[1]).unlink()
    with pytest.raises(CorruptModel, match=f"1 of the checkpoint's 2 files are missing.*{files[1]}"):
        load(folder)


@pytest.mark.parametrize("index", ["", "{}", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'])
def test_damaged_index(folder: Path, index: str) -> None:
    shard(folder)
    (folder / INDEX).write_text(index)
    with pytest.raises(CorruptModel, match=INDEX):
        load(folder)


def test_tensor_stored_twice(folder: Path) -> None:
    files = shard(folder)
    first = load_file(folder / files[0])
    second = load_file(folder / files[1])
    save_file({**second, next(iter(first)): next(iter(first.values()))}, folder / files[1])
    with pytest.raises(CorruptModel, match="stored twice"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        (None, ModelNotFound, "holds no weights"),
        ("pytorch_model.bin", UnsupportedModel, "pickle"),
        ("model.gguf", UnsupportedModel, "GGUF"),
    ],
)
def test_folder_without_safetensors(folder: Path, name: str | None, error: type[LocalLLMError], message: str) -> None:
    (folder / "model.safetensors").unlink()
    if name is not None:
        (folder / name).write_bytes(b"x")
    with pytest.raises(error, match=message):
        load(folder)


def test_the_model_does_not_keep_the_file(folder: Path) -> None:
    """Rewriting a checkpoint in place must not change a model that is being served."""
    from tests.models.harness import Harness

    harness = Harness(folder)
    _, before = harness.prefill([5, 6, 7, 8])
    file = folder / "model.safetensors"
    with file.open("r+b") as stream:
        stream.seek(-400_000, 2)
        stream.write(b"\x42" * 400_000)
    _, after = harness.prefill([5, 6, 7, 8])
    assert torch.equal(before, after)
