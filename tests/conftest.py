"""Fixtures every room may use: tiny random models on disk, one per family and session."""

import asyncio
import contextlib
import gc
import inspect
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

with contextlib.suppress(ImportError):
    import triton  # noqa: F401  before any kernel is defined: without a GPU kernels/launch.py would not import it

from tests.draws import DAY
from tests.tiny import make_tiny_model

freeze, thaw = gc.freeze, gc.unfreeze


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test that is marked `rotates(days)`, run the cases whose turn it is, at least one of each test. A test that
    is marked `one_day_in(days)` runs on the days that its name chooses."""
    if not DAY:
        return
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("rotates"):
            cases[item.nodeid.partition("[")[0]].append(item)
    left = {id(item) for each in cases.values() for item in left_for_other_days(each, int(DAY))}
    for item in items:
        marker = item.get_closest_marker("one_day_in")
        if marker is not None and (zlib.crc32(item.nodeid.encode()) + int(DAY)) % marker.args[0]:
            left.add(id(item))
    config.hook.pytest_deselected(items=[item for item in items if id(item) in left])
    items[:] = [item for item in items if id(item) not in left]


def left_for_other_days(cases: list[pytest.Item], day: int) -> list[pytest.Item]:
    """Return the cases of one test that do not run on this day."""
    marker = cases[0].get_closest_marker("rotates")
    assert marker is not None
    days = min(marker.args[0], len(cases))
    return [item for number, item in enumerate(cases) if (number + day) % days]


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
