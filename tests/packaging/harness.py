"""Helpers for the tests of install.sh and of the bundle."""

import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

from scripts.layout import ROOT
from tests.packaging.sandbox import Machine


@pytest.fixture(scope="module")
def bundle() -> ModuleType:
    """packaging/bundle as a module."""
    loader = importlib.machinery.SourceFileLoader("localllm_bundle", str(ROOT / "packaging/bundle"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    loader.exec_module(module)
    sys.dont_write_bytecode = writes
    return module


def make_run(
    bundle: ModuleType, folder: Path, version: str, *, glibc: str = "2.17", says: str = "", size: int = 1
) -> Path:
    """A .run file whose localllm prints its version, a word, and its arguments."""
    tree = folder / f"tree-{version}-{says}"
    tree.mkdir(parents=True)
    launcher = tree / "localllm"
    launcher.write_text(f'#!/bin/sh\necho "localllm {version} {says}" "$@"\n')
    launcher.chmod(0o755)
    (tree / "data").write_bytes(os.urandom(5_000))
    payload = tree / "payload"
    with tarfile.open(payload, "w:gz") as archive:
        archive.add(launcher, "localllm")
        archive.add(tree / "data", "data")
    name = f"localllm-{version}-linux-x86_64-cpu.run"
    made: Path = bundle.write_run(payload, tree / name, version=version, glibc=glibc, unpacked_bytes=size)
    return made


SHELLS = [shell for shell in ("dash", "bash") if shutil.which(shell)]
DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Thu Feb 22 01:44:30 UTC 2024\nGCC version:  gcc 12.2.0\n"
PROC = "proc/driver/nvidia/version"
RTX_3060 = "NVIDIA GeForce RTX 3060, {}"


def gpu(driver: str, line: str = DRIVER, **more: object) -> Machine:
    return Machine(gpu=RTX_3060.format(driver), files={PROC: line.format(driver)}, **more)  # type: ignore[arg-type]


def refusal(ended: subprocess.CompletedProcess[str]) -> str:
    """Return the refusal: two lines on stderr, the second of which is a command."""
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "\nTry: " in ended.stderr
    return ended.stderr
