"""Loading experts to RAM: the memory beside them while a checkpoint is read, and the pages of its files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from localllm.kernels.cpu.half import HalfRows
from localllm.models.decoder.decoder import DecoderModel
from localllm.models.formats.checkpoint import drop_pages
from localllm.models.formats.registry import open_checkpoint
from localllm.models.loader import DiskExperts, load_model
from localllm.models.read_spec import read_spec
from tests.gguf_files import write_gguf
from tests.marks import needs_library
from tests.models.load_memory import resident_bytes
from tests.tiny import make_tiny_model

MIB = 2**20
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="page caches are measured as Linux describes them"),
    needs_library,
]


def make_cold(file: Path) -> None:
    """Write a file to its disk and drop it from the page cache."""
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if resident_bytes(file):
        pytest.skip("this file system keeps its pages in RAM")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with 96 MiB of experts in four layers."""
    return make_tiny_model(
        tmp_path_factory.mktemp("mixture"), "qwen3_moe", dtype="bfloat16", num_hidden_layers=4, hidden_size=512,
        moe_intermediate_size=1024, num_experts=8, num_experts_per_tok=2, mlp_only_layers=[],
    )  # fmt: skip


@pytest.fixture(params=["safetensors", "GGUF"])
def stored(request: pytest.FixtureRequest, mixture: Path, tmp_path: Path) -> tuple[Path, Path]:
    """The path of a model, and its file of weights."""
    if request.param == "GGUF":
        write_gguf(mixture, tmp_path / "model.gguf", "BF16")
        return tmp_path / "model.gguf", tmp_path / "model.gguf"
    return mixture, mixture / "model.safetensors"


def test_pages_of_some_tensors_leave_and_are_read_again(stored: tuple[Path, Path]) -> None:
    path, file = stored
    make_cold(file)
    with torch.inference_mode(), open_checkpoint(path) as checkpoint:
        views, whole = {name: checkpoint.tensor(name) for name in checkpoint.tensors}, file.read_bytes()
        for name, info in checkpoint.tensors.items():
            assert info.start is not None
            held = views[name].contiguous().flatten().view(torch.uint8).numpy().tobytes()
            assert whole[info.start : info.start + info.num_bytes] == held, name
        del whole
        copies = {name: view.clone() for name, view in views.items()}
        size = file.stat().st_size
        assert resident_bytes(file) > 0.99 * size
        some = [info for name, info in checkpoint.tensors.items() if ".1." in name or ".3." in name]
        dropped = sum(info.num_bytes for info in some)
        assert 0.4 * size < dropped < 0.9 * size
        drop_pages(some)
        shared = 0.15 * size  # at the ends: the cache may hold a file in steps of up to 2 MiB, and keeps those in part
        assert size - dropped <= resident_bytes(file) <= size - dropped + shared
        assert all(torch.equal(views[name], copy) for name, copy in copies.items())


def test_a_load_holds_the_arena_and_little_else(stored: tuple[Path, Path]) -> None:
    """The contract is 256 MiB beside the arena, for experts of any size. All experts of this model are 96 MiB."""
    path, file = stored
    make_cold(file)
    command = [sys.executable, "-m", "tests.models.load_memory", str(path), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    arena, anonymous, most_resident, left = json.loads(done.stdout)
    assert arena == 96 * MIB
    assert anonymous <= arena + 64 * MIB
    # Of the file, the layer that is packed and the next one; of what is read behind the layers, what comes along.
    assert most_resident <= 0.7 * file.stat().st_size
    assert left <= 0.2 * file.stat().st_size


def test_experts_of_16_bits_are_packed_from_the_mapped_file(
    stored: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No copy comes between the file and the arena."""
    path, _ = stored
    seen, whole = list[tuple[Tensor, ...]](), HalfRows.write

    def write(rows: HalfRows, address: int) -> None:
        seen.append(rows.parts)
        whole(rows, address)

    monkeypatch.setattr(HalfRows, "write", write)
    model = load_model(path, read_spec(path), torch.device("cpu"), torch.float32, far_layers=[1, 3])
    assert isinstance(model, DecoderModel)
    assert not model.unused_tensors
    assert len(seen) == 2 * 8 * 2
    exact = load_model(path, read_spec(path), torch.device("cpu"), torch.float32, half_weights=True)
    assert isinstance(exact, DecoderModel)
    for layer in (1, 3):
        ours, theirs = (each.layers[layer].mlp.experts for each in (model, exact))  # type: ignore[union-attr]
        for mine, other in zip((ours.experts.gate_up, ours.experts.down), (theirs.gate_up, theirs.down), strict=True):
            assert all(
                torch.equal(mine[i].dequantize(torch.bfloat16), other[i].dequantize(torch.bfloat16)) for i in range(8)
            )


def test_writing_the_file_of_experts_drops_the_pages_of_the_checkpoint(mixture: Path, tmp_path: Path) -> None:
    file = mixture / "model.safetensors"
    make_cold(file)
    spec, disk = read_spec(mixture), DiskExperts(2**30, lambda: 2**31, tmp_path)
    model = load_model(mixture, spec, torch.device("cpu"), torch.float32, far_layers=range(4), disk=disk)
    assert isinstance(model, DecoderModel)
    assert model.crossing is not None
    assert model.crossing.cache is not None
    model.crossing.cache.close()
    assert resident_bytes(file) <= 0.5 * file.stat().st_size  # what comes along with the other parts
