"""The tiny models that the runner's tests execute."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from localllm.models.loader import load_model
from localllm.models.read_spec import read_spec
from localllm.models.spec.model_spec import ModelSpec
from tests.tiny import make_tiny_model


@pytest.fixture(scope="module")
def spec(tiny_llama_path: Path) -> ModelSpec:
    return read_spec(tiny_llama_path)


@pytest.fixture(scope="module")
def model(tiny_llama_path: Path, spec: ModelSpec) -> Any:
    return load_model(tiny_llama_path, spec, torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, ModelSpec, list[int]]]:
    """`model_of(family)`: a tiny mixture, its spec and its layers with experts."""
    made: dict[str, tuple[Path, ModelSpec, list[int]]] = {}

    def make(family: str) -> tuple[Path, ModelSpec, list[int]]:
        if family not in made:
            path = make_tiny_model(tmp_path_factory.mktemp(family), family)
            spec = read_spec(path)
            assert spec.mixture is not None
            made[family] = path, spec, [i for i in range(spec.num_layers) if spec.mixture.is_in(i)]
        return made[family]

    return make
