"""Packages for a machine that has torch and transformers but no package index: collected elsewhere, unpacked there.

The machine's own Python is not changed: the wheels are installed into a folder of this run, which is put on PYTHONPATH.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

WHEELS = (
    "msgspec", "platformdirs",                      # every stage
    "gguf",                                         # the tests of GGUF kernels
    "pytest-timeout", "pytest-xdist", "execnet", "hypothesis", "sortedcontainers",  # tests in several processes
    "httptools", "litestar", "litestar-htmx", "uvicorn", "multipart", "multidict", "sniffio", "rich-click",  # a server
    "llguidance",
)  # fmt: skip
"""Packages besides those of torch and transformers; installed without their other dependencies. Of 6.7 MB llguidance
takes 3.1, hypothesis 1.2."""

PRESENT = (
    "torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "psutil", "nvidia-ml-py", "uvloop",
    "anyio", "click", "rich", "jinja2", "markdown-it-py", "pygments", "prometheus-client", "filelock", "packaging",
    "pytest", "httpx", "requests", "tqdm",
)  # fmt: skip
"""Packages that such a machine is expected to have, with those that they need."""

PLATFORMS = ("manylinux2014_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in (17, 24, 27, 28, 31, 34)))


def collect(folder: Path, python: str) -> int:
    """Download the wheels for a Python version on Linux x86-64; return pip's exit code."""
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--implementation", "cp",
               "--python-version", python, *platforms, "--dest", str(folder), *WHEELS]  # fmt: skip
    return subprocess.run(command, check=False).returncode


def unpack(folder: Path, into: Path) -> None:
    """Install each wheel of `folder` whose package is missing, and make it importable in this process and its children.

    Raises `FileNotFoundError` if the folder has no wheels, `CalledProcessError` if pip refuses one.
    """
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise FileNotFoundError(f"{folder} has no wheels. Try: scripts/gpu_check --collect-wheels {folder}")
    if absent := missing(wheels):
        into.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(into),
             *map(str, absent)], check=True,
        )  # fmt: skip
    sys.path.append(str(into))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(into))))


def missing(wheels: Sequence[Path]) -> list[Path]:
    """Return the wheels whose package this Python does not have."""
    from scripts.gpu_check_lib.environment import installed

    return [wheel for wheel in wheels if installed(wheel.name.split("-")[0].replace("_", "-")) is None]
