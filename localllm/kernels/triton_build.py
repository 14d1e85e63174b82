"""Give Triton a C compiler on machines that have none, and launch a first kernel to see that Triton works.

Each process loads a small C module before its first launch of a kernel. Triton compiles the module once, with gcc or
clang and the C headers of Python, and keeps it in its cache. Where neither compiler is installed, `launch.py` gives
Triton's hook for builds the function `build_with_zig`, which runs the compiler of the `ziglang` package.
Does not know: models, which kernels there are.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

ZIG = "ziglang==0.15.2"  # the version that was tested; build_native.py uses the same one
GLIBC = "2.28"  # the oldest that PyTorch runs on


class NoCompiler(RuntimeError):
    """There is no C compiler: neither of this machine nor in the package ziglang."""


def has_compiler() -> bool:
    """Return whether Triton finds a C compiler by itself."""
    return bool(os.environ.get("CC") or shutil.which("clang") or shutil.which("gcc"))


def python_header() -> Path:
    """Return the place of Python.h, by Triton's rule."""
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    return Path(sysconfig.get_paths(scheme=scheme)["include"]) / "Python.h"


def build_with_zig(
    name: str, src: str, srcdir: str, library_dirs: Sequence[str], include_dirs: Sequence[str], libraries: Sequence[str]
) -> str:
    """Compile a module as Triton does, with the compiler of ziglang. Return the library's path in `srcdir`."""
    if find_spec("ziglang") is None:
        raise NoCompiler("there is no C compiler (gcc, clang or $CC), and the package ziglang is not installed")
    output = os.path.join(srcdir, f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}")
    command = [sys.executable, "-m", "ziglang", "cc", "-target", f"{os.uname().machine}-linux-gnu.{GLIBC}"]
    command += ["-O3", "-shared", "-fPIC", "-s", "-Wno-psabi", src, "-o", output]
    command += [f"-I{folder}" for folder in (*include_dirs, srcdir, str(python_header().parent)) if folder]
    command += ["-idirafter", "/usr/include"]  # Debian's pyconfig.h includes a file below it
    command += [_library(each, library_dirs) for each in libraries]
    # Zig compiles parts of the C library for itself, into a folder that is deleted with `srcdir`.
    environ = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": srcdir, "ZIG_LOCAL_CACHE_DIR": srcdir}
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{ended.stderr}")
    return output


def _library(library: str, folders: Sequence[str]) -> str:
    """Return a library as an argument: Triton names some by their file, and linkers differ in how they look for one."""
    if not re.search(r"\.so(\.\d+)*$|\.a$", library):
        return f"-l{library}"
    return next((path for folder in folders if os.path.exists(path := os.path.join(folder, library))), f"-l:{library}")
