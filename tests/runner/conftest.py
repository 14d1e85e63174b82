"""The tiny Llama that the runner's tests execute."""

from pathlib import Path
from typing import Any

import pytest
import torch

from localllm.models.loader import load_model
from localllm.models.read_spec import read_spec
from localllm.models.spec.model_spec import ModelSpec


@pytest.fixture(scope="module")
def spec(tiny_llama_path: Path) -> ModelSpec:
    return read_spec(tiny_llama_path)


@pytest.fixture(scope="module")
def model(tiny_llama_path: Path, spec: ModelSpec) -> Any:
    return load_model(tiny_llama_path, spec, torch.device("cpu"), torch.float32)
