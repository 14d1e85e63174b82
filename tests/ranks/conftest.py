"""A tiny model, and its runner in this process."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from localllm.engine.step import Runner
from localllm.models.fit import MemoryPlan
from localllm.models.read_spec import read_spec
from localllm.runner.executor import LocalExecutor
from tests.ranks.real import HARDWARE, config_for, plan_for
from tests.tiny import make_tiny_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny_model(path)
    return path


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> Iterator[tuple[Runner, MemoryPlan]]:
    config = config_for()
    plan = plan_for(checkpoint, config)
    executor = LocalExecutor.load(checkpoint, read_spec(checkpoint), config, plan, lambda loaded, total: None)
    runner, plan = executor.open_runner(config, plan, HARDWARE, lambda text: None)
    yield runner, plan
    executor.close()
