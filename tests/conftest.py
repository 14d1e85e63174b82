"""Fixtures every room may use: tiny random models on disk, one per family and session."""

import asyncio
import contextlib
import gc
import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

with contextlib.suppress(ImportError):
    import triton  # noqa: F401  before any kernel is defined: without a GPU kernels/launch.py would not import it

from tests.draws import DAY
from tests.rotation import COSTS, KIND, CostRecorder, left_for_other_days
from tests.tiny import make_tiny_model

freeze, thaw = gc.freeze, gc.unfreeze


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--costs", action="store_true", help="run every case, and write what they cost to tests/costs.json"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--costs"):
        config.pluginmanager.register(CostRecorder())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave to other days what is not this day's turn."""
    if not DAY or config.getoption("--costs"):
        return
    left = left_for_other_days([item.nodeid for item in items], int(DAY), json.loads(COSTS.read_text())[KIND])
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left])
    items[:] = [item for item in items if item.nodeid not in left]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(pyfuncitem.obj(**arguments))
    return True


def pytest_collection_finish() -> None:
    """Servers under test freeze and unfreeze objects themselves, which would undo `freeze_older_objects`."""
    gc.freeze = gc.unfreeze = lambda: None


@pytest.fixture(autouse=True, scope="module")
def freeze_older_objects() -> None:
    """Hide from the garbage collector what is older than this file of tests. A server collects garbage at each load and
    unload, and would walk over a million objects of pytest, torch and transformers for half a second."""
    gc.collect()
    freeze()


def pytest_sessionfinish() -> None:
    thaw()


@pytest.fixture(autouse=True)
def nobody_asks_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is not on this machine is refused; tests/hub lifts this for a hub of its own."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True, scope="session")
def no_keys_of_this_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A server under test opens to its own keys alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        yield


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`tiny_model_path(family)`: a folder with a tiny random checkpoint and a tokenizer, made once."""
    made: dict[str, Path] = {}

    def path_of(family: str = "llama") -> Path:
        if family not in made:
            made[family] = make_tiny_model(tmp_path_factory.mktemp("models") / f"tiny-{family}", family)
        return made[family]

    return path_of


@pytest.fixture(scope="session")
def tiny_llama_path(tiny_model_path: Callable[[str], Path]) -> Path:
    return tiny_model_path("llama")
