"""Triton's C module is compiled and loaded on a machine without a C compiler and without a GPU.

The driver is a stub that is compiled here, whose functions return 0; a process of its own has an empty PATH, so that
Triton finds neither gcc nor clang. scripts/check --slow runs this file with each Triton that an install brings.
"""

import os
import runpy
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("triton")
import triton

from localllm.errors import ConfigError
from localllm.kernels import first_launch, triton_build
from localllm.kernels.triton_build import ZIG, NoCompiler
from scripts.layout import ROOT

BUILD = """
import os, sys
import triton  # before localllm, which imports it only where there is a GPU
from localllm.kernels import launch
print("hook", getattr(triton.knobs.build.impl, "__name__", None))
from triton.backends.nvidia import driver
print("built", driver.CudaUtils())
"""


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a libcuda.so.1 that defines each function of the driver that Triton's module calls."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc compiles the stub of the driver")
    import re

    folder = tmp_path_factory.mktemp("driver")
    source = (Path(triton.__file__).parent / "backends/nvidia/driver.c").read_text()
    names = {"cuInit", *re.findall(r"\b(cu[A-Z]\w+)\s*\(", source)}
    (folder / "stub.c").write_text("".join(f"int {name}() {{ return 0; }}\n" for name in sorted(names)))
    library = folder / "libcuda.so.1"
    soname = "-Wl,-soname,libcuda.so.1"
    subprocess.run(["gcc", "-w", "-shared", "-fPIC", soname, "-o", library, folder / "stub.c"], check=True)
    return folder


def build(stub: Path, cache: Path, *, path: str, zig: str = "") -> subprocess.CompletedProcess[str]:
    """Build and load Triton's C module in a process whose PATH is `path`. zig: a folder with the package ziglang."""
    environ = {name: value for name, value in os.environ.items() if name not in ("CC", "TRITON_INTERPRET")}
    environ |= {
        "PATH": path,
        "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), zig, str(ROOT)])),
        "TRITON_LIBCUDA_PATH": str(stub),
        "LD_LIBRARY_PATH": str(stub),
        "TRITON_CACHE_DIR": str(cache),
    }
    return subprocess.run([sys.executable, "-c", BUILD], env=environ, capture_output=True, text=True, check=False)


def test_with_a_compiler_triton_builds_as_ever(stub: Path, tmp_path: Path) -> None:
    ended = build(stub, tmp_path, path=os.environ["PATH"])
    assert "hook None" in ended.stdout
    assert "built" in ended.stdout, ended.stderr


@pytest.mark.skipif(find_spec("ziglang") is not None, reason="ziglang is installed")
def test_without_any_compiler_the_error_says_so(stub: Path, tmp_path: Path) -> None:
    ended = build(stub, tmp_path, path="/nonexistent")
    assert "hook build_with_zig" in ended.stdout
    assert "NoCompiler: there is no C compiler (gcc, clang or $CC), and the package ziglang" in ended.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_without_a_compiler_zig_builds(stub: Path, tmp_path: Path) -> None:
    folder = Path(sys.prefix, ZIG)
    if find_spec("ziglang") is None and not folder.exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), "--no-deps", ZIG]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip(f"{ZIG} cannot be downloaded")
    ended = build(stub, tmp_path, path="/nonexistent", zig=str(folder))
    assert "hook build_with_zig" in ended.stdout
    assert "built" in ended.stdout, ended.stderr


def test_one_version_of_zig_serves_all() -> None:
    assert runpy.run_path(str(ROOT / "build_native.py"))["ZIG"] == ZIG
    assert f"\nzig_version={ZIG.removeprefix('ziglang==')} " in (ROOT / "install.sh").read_text()


HEADER = Path("/usr/include/python3.12/Python.h")
FAILED = subprocess.CalledProcessError(1, "gcc", stderr=b"c.c:1: fatal error: math.h: No such file")


@pytest.mark.parametrize(
    ("error", "has_header", "what", "remedy"),
    [
        (NoCompiler("none"), True, "no C compiler", "ziglang==0.15.2"),
        (RuntimeError("Failed to find C compiler. Please specify"), True, "no C compiler", "ziglang==0.15.2"),
        (FAILED, False, f"{HEADER} is missing", "apt-get install -y python3.12-dev"),
        (FAILED, True, "C compiler failed: c.c:1: fatal error: math.h", "gcc libc6-dev"),
        (RuntimeError("PTX was compiled with an unsupported toolchain."), True, "does not suit", "NVIDIA driver"),
        (RuntimeError("Triton Error [CUDA]: device kernel image is invalid"), True, "does not suit", "NVIDIA driver"),
        (AssertionError("libcuda.so cannot found!\n"), True, "driver's library", "--gpus all"),
        (ArithmeticError("a kernel that adds 1 gave wrong numbers"), True, "wrong numbers", "localllm doctor"),
    ],
)
def test_a_failed_first_launch_is_explained(
    error: Exception, has_header: bool, what: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Header(type(HEADER)):  # type: ignore[misc]
        def exists(self, **named: bool) -> bool:
            return has_header

    def fail(device: object) -> bool:
        raise error

    monkeypatch.setattr(first_launch, "python_header", lambda: Header(HEADER))
    monkeypatch.setattr(first_launch, "_add_one_is_right", fail)
    monkeypatch.setattr(triton_build, "has_compiler", lambda: False)
    with pytest.raises(ConfigError, match="kernels cannot be launched") as refused:
        first_launch.require_launch(None)  # type: ignore[arg-type]
    assert what in refused.value.why
    assert remedy in refused.value.hint
    assert "--device cpu" in refused.value.hint


def test_the_first_kernel_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_launch, "_add_one_is_right", lambda device: False)
    with pytest.raises(ConfigError, match="gave wrong numbers"):
        first_launch.require_launch(None)  # type: ignore[arg-type]


def test_the_first_kernel_adds_one() -> None:
    import torch

    from localllm.kernels.launch import INTERPRETED

    if not INTERPRETED:
        pytest.skip("needs TRITON_INTERPRET=1")
    first_launch.require_launch(torch.device("cpu"))
