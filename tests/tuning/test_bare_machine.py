"""scripts/gpu_check on a machine that has torch, transformers and the wheels, and nothing else: imports that only the
development environment has are refused in every process.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.gpu_check_lib import serving
from scripts.gpu_check_lib.stages import Context
from scripts.gpu_check_lib.wheels import PRESENT, WHEELS

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow
FEW_WHEELS = ("msgspec", "platformdirs")  # what figures need
BLOCKER = """
import importlib.metadata, re, sys

def plain(name):
    return re.sub(r"[-_.]+", "-", name).lower()

def with_needs(names):
    to_do, found = list(names), set()
    while to_do:
        if (name := plain(to_do.pop())) in found:
            continue
        found.add(name)
        try:
            needs = importlib.metadata.requires(name) or ()
        except importlib.metadata.PackageNotFoundError:
            continue
        to_do += [re.match(r"[\\w.-]+", need)[0] for need in needs if "extra ==" not in need]
    return found

allowed = with_needs({present}) | {{plain(name) for name in {wheels}}}
modules = importlib.metadata.packages_distributions().items()
refused = {{module for module, of in modules if not any(plain(name) in allowed for name in of)}} - {{"localllm"}}

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if (module := name.partition(".")[0]) in refused:
            raise ModuleNotFoundError(f"a bare machine has no {{module}}", name=module)

sys.meta_path.insert(0, Refuse())
"""


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Refuse in all processes that this one starts."""
    return refuse(tmp_path, monkeypatch, WHEELS)


def refuse(folder: Path, monkeypatch: pytest.MonkeyPatch, wheels: tuple[str, ...]) -> Path:
    """Write a module that every Python imports when it starts; return its folder."""
    (folder / "sitecustomize.py").write_text(BLOCKER.format(present=PRESENT, wheels=wheels))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(folder), str(ROOT))))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    return folder


def run(*words: str) -> str:
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_the_refusal_works(bare: Path) -> None:
    run("-c", "import torch, transformers, litestar")
    with pytest.raises(AssertionError, match="a bare machine has no mypy"):
        run("-c", "import mypy")


def test_every_test_on_a_device_can_be_collected(bare: Path) -> None:
    plugins = [word for name in ("xdist", "pytest_timeout", "_hypothesis_pytestplugin") for word in ("-p", name)]
    lenient = ["-o", "addopts=", "-W", "default", "-p", "no:cacheprovider", "--collect-only", "-q"]
    said = run("-m", "pytest", *plugins, *lenient, "tests/device", "tests/kernels")
    assert "error" not in said.splitlines()[-1]


def test_the_first_requests_are_answered(bare: Path) -> None:
    found = list(serving.smoke(Context(bare, device="cpu")))
    assert [verdict for _, verdict, *_ in found] == ["ok"] * 5


def test_figures_need_few_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(tmp_path, monkeypatch, FEW_WHEELS)
    names = (
        "activity ceilings compiling counters drafts engine environment families figures profiling roofline sanitizer"
    )
    run("-c", f"from scripts.gpu_check_lib import {names.replace(' ', ', ')}, tuning, variants, pytest_stage, report")
    said = run("-m", "scripts.gpu_check_lib.sanitizer", "16-bit", "cpu")
    assert said == ""
