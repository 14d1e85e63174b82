"""Compilation by Triton: its C module, where the machine has no C compiler, and kernels before they are launched.

Each process loads a small C module before its first launch of a kernel. Triton compiles the module once, with gcc or
clang and the C headers of Python, and keeps it in its cache. Where neither compiler is installed, `launch.py` gives
Triton's hook for builds the function `build_with_zig`, which runs the compiler of the `ziglang` package.

Triton compiles a kernel at its first launch, one after another. `compile_ahead` finds out what launches would compile,
by Triton's own rules, and compiles that in threads: most of the compiler runs without Python's lock.
Does not know: models, which kernels there are.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from importlib.util import find_spec
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

log = logging.getLogger(__name__)

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


# ---- kernels, before they are launched -------------------------------------------------------------------------------

COMPILE_S = 120.0
"""Most seconds until another of the kernels that are compiled side by side is ready."""


class KernelSource(NamedTuple):
    """The source, constants and options of a kernel for one launch, and the GPU that it is compiled for."""

    kernel: Any  # the @triton.jit function
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]
    target: Any

    def compile(self) -> None:
        """Compile into Triton's cache on disk, where the launch finds the result."""
        from triton import compiler

        source = compiler.ASTSource(self.kernel, self.signature, self.constants, self.attributes)
        compiler.compile(source, target=self.target, options=self.options)


def compiled_mark(served: str) -> Path:
    """Return a file of Triton's cache folder; if it exists, the kernels of what is served are in the cache. Whoever
    empties the cache deletes it as well."""
    import triton

    return Path(triton.knobs.cache.dir, f"localllm-{hashlib.blake2b(served.encode(), digest_size=16).hexdigest()}")


_found: ContextVar[Callable[[object, KernelSource], None] | None] = ContextVar("found", default=None)


def leave_out_launch(*, key: object, fn: Any, compile: Any, **facts: Any) -> bool:
    """Triton's hook before a launch whose kernel is not compiled yet. Within `compile_ahead` the kernel is noted, and
    True leaves the launch out; launches of other threads are not affected."""
    found = _found.get()
    if found is None:
        return False
    from triton.runtime import driver

    options = json.loads(compile["specialization_data"])["options"]
    found((fn.jit_function, key), KernelSource(
        fn.jit_function, compile["signature"], compile["constants"], compile["configs"][0],
        {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()},
        driver.active.get_current_target(),
    ))  # fmt: skip
    return True


class _ZeroedMemory(TorchFunctionMode):
    """Makes new tensors zero. Launches that are left out do not write what operations behind them read as indices."""

    UNWRITTEN = frozenset(
        (torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty, Tensor.new_empty_strided)
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in self.UNWRITTEN else made


def share_of(key: object, source: KernelSource, size: int) -> int:
    """Return which of `size` processes compiles a kernel first: the same in all of them."""
    name = f"{source.kernel.__name__} {key[1] if isinstance(key, tuple) else key}"
    return hashlib.blake2b(name.encode(), digest_size=4).digest()[0] % size


def compile_ahead(
    launch: Callable[[], None], workers: int, tell: Callable[[int], None], share: tuple[int, int] = (0, 1)
) -> int:
    """Compile every kernel that `launch` launches and that this process has not compiled, in threads. Return how many.

    The launches of these kernels are left out, so that what `launch` computes is worthless. tell: gets the number as
    soon as it is known. share: this process's number, and how many compile the same kernels at once, into one
    cache: each begins with a part of its own and finds most others in the cache. A kernel that does not compile is left
    to its launch, which raises the error. Raises what `launch` raises, once the kernels that were found until then are
    compiled, and `TimeoutError` if no kernel was ready for COMPILE_S seconds.
    """
    known: set[object] = set()
    of_others: list[KernelSource] = []
    waiting: SimpleQueue[KernelSource | None] = SimpleQueue()
    ended: SimpleQueue[str] = SimpleQueue()

    def find(key: object, source: KernelSource) -> None:
        if key not in known:
            known.add(key)
            if share_of(key, source, share[1]) == share[0]:
                waiting.put(source)
            else:
                of_others.append(source)

    def work() -> None:
        while (source := waiting.get()) is not None:
            try:
                source.compile()
            except Exception as error:  # the compiler and the assembler raise errors of many kinds
                log.info("kernel does not compile kernel=%s error=%r", source.kernel.__name__, error)
            ended.put(source.kernel.__name__)

    # Daemons: a compiler that hangs cannot be stopped, and must not keep the process from ending.
    threads = [threading.Thread(target=work, daemon=True, name="compile") for _ in range(max(1, workers))]
    for thread in threads:
        thread.start()
    before = _found.set(find)
    try:
        with _ZeroedMemory():
            launch()
    finally:
        _found.reset(before)
        for source in of_others:
            waiting.put(source)
        if known:
            tell(len(known))
        try:
            for _ in known:
                ended.get(timeout=COMPILE_S)
        except Empty:
            raise TimeoutError(f"no kernel was compiled within {COMPILE_S:.0f} s") from None
        finally:
            for _ in threads:
                waiting.put(None)
    return len(known)
