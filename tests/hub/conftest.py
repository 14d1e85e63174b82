"""A local hub, and an empty cache that belongs to one test."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from localllm.models.library.hub import client
from tests.hub.local_hub import LocalHub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """This process asks the local hub and keeps its own cache; nothing of the user's is read or written."""
    for name in (
        "HF_TOKEN",
        "HF_HUB_CACHE",
        "HUGGINGFACE_HUB_CACHE",
        "HF_HUB_OFFLINE",
        "TRANSFORMERS_OFFLINE",
        "OLLAMA_MODELS",
        "LLAMA_CACHE",
    ):
        monkeypatch.delenv(name, raising=False)
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # read when it was imported
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "hf" / "token"))
    monkeypatch.setattr(client, "FIRST_WAIT_S", 0.01)
    with LocalHub() as hub:
        for name, value in hub.environ(tmp_path).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        yield hub


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A repository as owners fill them: what a load needs, and much that it does not."""
    return make_checkpoint(tmp_path / "repo")


def make_checkpoint(folder: Path, *, weights_bytes: int = 300_000) -> Path:
    """Valid safetensors headers over repeating bytes; the files beside them hold a word each."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "README.md", "LICENSE"):
        (folder / name).write_text(f'{{"file": "{name}"}}')
    for name in ("pytorch_model.bin", "consolidated.safetensors", "model.onnx", "onnx/model.onnx", "original/x.pth"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"not needed" * 10)
    write_safetensors(folder / "model.safetensors", weights_bytes)
    return folder


def write_safetensors(path: Path, num_bytes: int, name: str = "weight") -> None:
    header = json.dumps({name: {"dtype": "F32", "shape": [num_bytes // 4], "data_offsets": [0, num_bytes // 4 * 4]}})
    body = bytes(i * 31 % 251 for i in range(4096)) * (num_bytes // 4096 + 1)
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + body[: num_bytes // 4 * 4])
