"""Checks of a group of fake ranks: it opens, it answers as it should, and it leaves nothing behind."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from localllm.config.settings import EngineConfig
from localllm.machine.hardware import Hardware
from localllm.ranks.executor import RankExecutor
from localllm.ranks.remote import RankRunner
from tests.engine.harness import SmallEngine, make_engine
from tests.fake_runner import expected_output
from tests.ranks.harness import fake_plan

PROMPTS = {"a": [1, 2, 3, 4, 5], "b": [7] * 9, "c": [3, 1]}
HARDWARE = Hardware((), "a processor", 2, 2**30, 2**30)


def open_fds() -> set[str]:
    return {f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}" for fd in os.listdir("/proc/self/fd") if _is_open(fd)}


def _is_open(fd: str) -> bool:
    try:
        os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return False
    return True


@contextmanager
def nothing_left() -> Iterator[None]:
    """Check that no process, file descriptor, thread or file is left."""
    fds, threads, files = open_fds(), set(threading.enumerate()), rank_files()
    children = set(psutil.Process().children(recursive=True))
    yield
    assert not set(psutil.Process().children(recursive=True)) - children
    assert open_fds() <= fds
    assert not [thread for thread in set(threading.enumerate()) - threads if thread.is_alive()]
    assert rank_files() <= files


def rank_files() -> set[Path]:
    folders = Path(os.environ.get("TMPDIR", "/tmp")), Path("/dev/shm")
    return {path for folder in folders for path in folder.glob("localllm-ranks*")}


def opened(executor: RankExecutor, size: int = 2) -> RankRunner:
    runner, plan = executor.open_runner(EngineConfig(), fake_plan(size), HARDWARE, lambda text: None)
    assert runner.num_blocks == plan.num_blocks == (64,)
    return runner


def engine_on(runner: RankRunner, max_tokens: int = 8) -> SmallEngine:
    engine = make_engine(depth=2, num_blocks=runner.num_blocks, fail_when=lambda plan: False)
    engine.loop.runner = runner
    for name, prompt in PROMPTS.items():
        engine.add(name, prompt, max_tokens=max_tokens)
    return engine


def check_tokens(runner: RankRunner) -> None:
    assert engine_on(runner).run() == {name: expected_output(prompt, 8) for name, prompt in PROMPTS.items()}
