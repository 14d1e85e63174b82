"""Config and headers of a checkpoint that was not downloaded, read by what reads any checkpoint."""

from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
from gguf import GGUFWriter

from localllm.errors import CorruptModel, HubError, HubUnreachable, ModelNotFound
from localllm.models.formats.safetensors import read_headers
from localllm.models.library.hub import client
from localllm.models.library.hub import peek as peek_module
from localllm.models.library.hub.peek import peek
from localllm.models.read_spec import read_spec, weights_bytes
from tests.hub.conftest import make_checkpoint, write_safetensors
from tests.hub.local_hub import LocalHub, Trouble


def write_gguf(path: Path, name: str, num_words: int = 20_000) -> None:
    """A header of some hundred KiB, most of it the vocabulary, before one small tensor."""
    writer = GGUFWriter(str(path), "llama")
    writer.add_string("general.name", name)
    writer.add_uint32("llama.block_count", 2)
    writer.add_float64("some.double", 0.5)
    writer.add_array("tokenizer.ggml.tokens", [f"word{number}" for number in range(num_words)])
    writer.add_array("tokenizer.ggml.scores", [0.5] * num_words)
    writer.add_tensor("blk.0.weight", numpy.ones((256, 256), numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_look_tells_what_the_whole_would(hub: LocalHub, tiny_model_path: Callable[[str], Path]) -> None:
    folder = tiny_model_path("qwen3")
    hub.add_repo("org/tiny", folder)
    with peek("org/tiny") as remote:
        assert read_spec(remote.path) == read_spec(folder)
        assert weights_bytes(remote.path) == weights_bytes(folder)
        here, there = read_headers(folder), read_headers(remote.path)
        assert {name: (info.dtype, info.shape, info.num_bytes) for name, info in there.items()} == {
            name: (info.dtype, info.shape, info.num_bytes) for name, info in here.items()
        }
        size = (folder / "model.safetensors").stat().st_size
        assert remote.weights_bytes == (remote.path / "model.safetensors").stat().st_size == size
        assert remote.plan.needed_bytes == remote.plan.total_bytes
        seen = remote.path
    assert not seen.exists()
    assert hub.bytes_sent("model.safetensors") < size / 2
    assert hub.bytes_sent("tokenizer.json") == 0


def test_shards_are_looked_at_one_by_one(hub: LocalHub, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "sharded")
    (folder / "model.safetensors").unlink()
    names = [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
    for name in names:
        write_safetensors(folder / name, 500_000, name)
    index = '{"weight_map": {' + ", ".join(f'"{name}": "{name}"' for name in names) + "}}"
    (folder / "model.safetensors.index.json").write_text(index)
    hub.add_repo("org/sharded", folder)
    with peek("org/sharded") as remote:
        assert sorted(read_headers(remote.path)) == names
        assert remote.weights_bytes > 1_500_000
    assert all(hub.bytes_sent(name) < 150_000 for name in names)


def test_a_gguf_header_is_fetched_to_its_end(hub: LocalHub, tmp_path: Path) -> None:
    folder = tmp_path / "gguf"
    folder.mkdir()
    for quant in ("Q4_K_M", "Q8_0"):
        write_gguf(folder / f"tiny-{quant}.gguf", quant)
    hub.add_repo("org/tiny-GGUF", folder)
    with peek("org/tiny-GGUF:Q8_0") as remote:
        original = (folder / "tiny-Q8_0.gguf").read_bytes()
        seen = remote.path.read_bytes()
        assert remote.path.name == "tiny-Q8_0.gguf"
        assert len(seen) == len(original)
        end = original.index(b"blk.0.weight") + 44  # name, dimensions, type, offset
        assert seen[:end] == original[:end]
        assert remote.fetched_bytes >= end > 128 * 1024
    assert hub.bytes_sent("tiny-Q4_K_M.gguf") == 0


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff" * 8 + b"{}" * 100, "ends at 18,446,744,073,709,551,623"),
        (b"\x00\x10\x00\x00\x00\x00\x00\x00{}", "It has 10 bytes"),
        (b"\x01\x00", "It has 2 bytes"),
    ],
)
def test_a_header_that_lies_is_refused(hub: LocalHub, checkpoint: Path, content: bytes, words: str) -> None:
    (checkpoint / "model.safetensors").write_bytes(content)
    hub.add_repo("org/bad", checkpoint)
    with pytest.raises(CorruptModel, match=words), peek("org/bad"):
        pass


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"GGML" + bytes(40), "does not begin with GGUF"),
        (
            b"GGUF\x03\x00\x00\x00" + bytes(8) + b"\x01" + bytes(7) + b"\xff" * 8 + bytes(50),
            "ends at 18,446,744,073,709,551,",
        ),
        (b"GGUF\x03\x00\x00\x00" + bytes(8) + b"\x01" + bytes(7) + bytes(8) + b"\x63" + bytes(50), "value type 99"),
        (b"GGUF\x03\x00", "It has 6 bytes"),
    ],
)
def test_a_gguf_header_that_lies_is_refused(hub: LocalHub, tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "bad.gguf").write_bytes(content)
    hub.add_repo("org/bad", tmp_path / "gguf")
    with pytest.raises(CorruptModel, match=words), peek("org/bad"):
        pass


def test_an_array_of_arrays_without_end_is_refused(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each level holds one array: a header that only nests, 12 bytes a level."""
    monkeypatch.setattr(peek_module, "LARGEST_HEADER", 2**20)
    head = b"GGUF\x03\x00\x00\x00" + bytes(8) + b"\x01" + bytes(7) + bytes(8) + b"\x09\x00\x00\x00"
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "deep.gguf").write_bytes(head + b"\x09\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00" * 20_000)
    hub.add_repo("org/deep", tmp_path / "gguf")
    with pytest.raises(CorruptModel, match="nested"), peek("org/deep"):
        pass


def test_a_look_survives_a_busy_hub_and_reports_a_dead_one(hub: LocalHub, checkpoint: Path) -> None:
    hub.add_repo("org/name", checkpoint)
    hub.troubles["model.safetensors"] = Trouble(cut_after=1000, times=1)
    with peek("org/name") as remote:
        assert "weight" in read_headers(remote.path)
    hub.troubles["model.safetensors"] = Trouble(status=503, times=99)
    with pytest.raises(HubUnreachable), peek("org/name"):
        pass
    with pytest.raises(ModelNotFound), peek("org/absent"):
        pass


def test_what_goes_wrong_while_looking_is_the_lookers(hub: LocalHub, checkpoint: Path) -> None:
    hub.add_repo("org/name", checkpoint)
    with pytest.raises(ValueError, match="mine"), peek("org/name"):
        raise ValueError("mine")


def padded(path: Path, count: int) -> None:
    """A weight file whose header goes on with blanks, which the format allows."""
    header = b"{}" + b" " * count
    path.write_bytes(len(header).to_bytes(8, "little") + header)


def test_a_look_has_an_end(hub: LocalHub, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peek_module, "LARGEST_HEADER", 2**20)
    monkeypatch.setattr(peek_module, "LARGEST_LOOK", 3 * 2**20)
    (checkpoint / "model.safetensors").unlink()
    for number in range(6):
        padded(checkpoint / f"model-{number}.safetensors", 900_000 + number)
    hub.add_repo("org/blanks", checkpoint)
    with pytest.raises(CorruptModel, match=r"At most 3\.0 MiB"), peek("org/blanks"):
        pass
    assert sum(hub.bytes_sent(f"model-{number}.safetensors") for number in range(6)) < 4 * 2**20


def test_a_header_has_an_end(hub: LocalHub, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peek_module, "LARGEST_HEADER", 2**20)
    padded(checkpoint / "model.safetensors", 2**21)
    hub.add_repo("org/blanks", checkpoint)
    with pytest.raises(CorruptModel, match="at most 1,048,576"), peek("org/blanks"):
        pass
    assert hub.bytes_sent("model.safetensors") <= 2**20


def test_only_so_many_weight_files_are_looked_at(
    hub: LocalHub, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peek_module, "MOST_WEIGHT_FILES", 3)
    (checkpoint / "model.safetensors").unlink()
    for number in range(4):
        padded(checkpoint / f"model-{number}.safetensors", 10)
    hub.add_repo("org/many", checkpoint)
    with pytest.raises(CorruptModel, match="It has 4; at most 3"), peek("org/many"):
        pass


def test_an_answer_without_end_is_not_read(hub: LocalHub, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add_repo("org/name", checkpoint)
    monkeypatch.setattr(client, "LARGEST_ANSWER", 100)
    with pytest.raises(HubError, match="100 B"):
        client.get_json("/api/models/org/name", about="org/name")
