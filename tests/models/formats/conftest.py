"""The tiny Llama that the tests of quantised formats start from."""

from pathlib import Path

import pytest

from tests.models.formats.quantised import SHAPE
from tests.tiny import make_tiny_model


@pytest.fixture(scope="package")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("source"), "llama", **SHAPE)
