"""Compile localllm/kernels/cpu/native/ for each instruction set of an architecture.

hatchling runs this file as its build hook for wheels and editable installs. The hook also adds the manual page and the
changelog to wheels. By hand,

    python build_native.py

compiles the libraries whose sources have changed, and puts them beside the sources, where library.py finds them.

The compiler is $CC, cc, gcc or clang where one works, and else the `ziglang` package, which the hook then names as a
build dependency. Where neither is available, or the compiler fails, the wheel has no library, and localllm runs on
torch alone.

    LOCALLLM_NATIVE=require          fail where the libraries cannot be compiled; `none` compiles nothing, `built`
                                     leaves them as they are to another process (scripts/_venv.sh)
    LOCALLLM_WHEEL_PLATFORM=NAME     compile for another platform with ziglang: a key of TARGETS (scripts/make_wheels)

Does not know: localllm, except for the names and the hash in sources.py.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # by hand: hatchling is installed only while a wheel is built
    BuildHookInterface = object

ROOT = Path(__file__).resolve().parent
PLACE = "localllm/kernels/cpu/native"
FOLDER = ROOT / PLACE
SHARED = {"docs/reference/localllm.1": "share/man/man1/localllm.1", "CHANGELOG.md": "share/doc/localllm/CHANGELOG.md"}
"""Files that a wheel installs below the environment's folder. `localllm update` reads the changelog there."""

ZIG = "ziglang==0.15.2"  # the version that was tested
FLAGS = ("-O3", "-fPIC", "-shared", "-fno-math-errno", "-ffp-contract=fast", "-Wall", "-Wextra", "-Wno-psabi")


class InstructionSet(NamedTuple):
    """One library: the options of gcc and clang that select its instructions, and zig's name of the processor."""

    name: str
    options: tuple[str, ...]
    zig_cpu: str


X86_64 = (
    InstructionSet("avx2", ("-march=x86-64-v3",), "x86_64_v3"),
    InstructionSet("avxvnni", ("-march=x86-64-v3", "-mavxvnni"), "x86_64_v3+avxvnni"),
    InstructionSet(
        "avx512bf16", ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"), "x86_64_v4+avx512vnni+avx512bf16"
    ),
    InstructionSet("avx512vnni", ("-march=x86-64-v4", "-mavx512vnni"), "x86_64_v4+avx512vnni"),
)
AARCH64 = (InstructionSet("dotprod", ("-march=armv8.2-a+dotprod+fp16",), "generic+v8_2a+dotprod+fullfp16"),)
APPLE = (InstructionSet("dotprod", ("-mcpu=apple-m1",), "apple_m1"),)


class Target(NamedTuple):
    """A platform that wheels are made for."""

    system: str  # as in sys.platform
    sets: tuple[InstructionSet, ...]
    zig_target: str
    tag: str  # the platform in the name of a wheel whose libraries zig compiled
    options: tuple[str, ...] = ()  # of gcc and clang
    libraries: tuple[str, ...] = ()


LINUX = ("-lpthread", "-lm")
TARGETS = {
    "linux-x86_64": Target("linux", X86_64, "x86_64-linux-gnu.2.17", "manylinux_2_17_x86_64", libraries=LINUX),
    "linux-aarch64": Target("linux", AARCH64, "aarch64-linux-gnu.2.17", "manylinux_2_17_aarch64", libraries=LINUX),
    "darwin-arm64": Target(
        "darwin", APPLE, "aarch64-macos.11.0", "macosx_11_0_arm64", options=("-mmacosx-version-min=11.0",)
    ),
    "win32-AMD64": Target("win32", X86_64, "x86_64-windows-gnu", "win_amd64"),
}


class NotCompiled(Exception):
    """The libraries cannot be compiled."""


class Toolchain(NamedTuple):
    """A compiler and the platform that it compiles for."""

    command: tuple[str, ...]
    target: Target
    is_zig: bool

    @property
    def tag(self) -> str:
        """Tag of a wheel with the compiled libraries: gcc links the glibc of this machine, which may be a new one."""
        is_portable = self.is_zig or self.target.system != "linux"
        return f"py3-none-{self.target.tag if is_portable else f'linux_{platform.machine()}'}"

    def options_for(self, chosen: InstructionSet) -> list[str]:
        if self.is_zig:
            return ["-target", self.target.zig_target, f"-mcpu={chosen.zig_cpu}", "-s"]
        return [*chosen.options, *self.target.options]


def native_choice(environ: Mapping[str, str] = os.environ) -> str:
    """Return LOCALLLM_NATIVE: auto, require, none or built."""
    choice = environ.get("LOCALLLM_NATIVE") or "auto"
    if choice not in ("auto", "require", "none", "built"):
        raise SystemExit(f"LOCALLLM_NATIVE is {choice!r}. It may be require, none, or not set.")
    return choice


def find_target(environ: Mapping[str, str] = os.environ) -> Target | None:
    """Return the platform to compile for; None if there are no libraries for it."""
    name = environ.get("LOCALLLM_WHEEL_PLATFORM")
    if not name:
        return TARGETS.get(f"{sys.platform}-{platform.machine()}") if sys.maxsize > 2**32 else None
    if name not in TARGETS:
        raise SystemExit(f"LOCALLLM_WHEEL_PLATFORM is {name!r}. It may be one of {', '.join(TARGETS)}.")
    return TARGETS[name]


def find_toolchain(target: Target | None) -> Toolchain:
    """Return this machine's compiler if it knows all instruction sets, else zig. Raises `NotCompiled`."""
    if target is None:
        raise NotCompiled(f"There are no libraries for {sys.platform} on {platform.machine()}.")
    if is_for_this_machine() and (system := system_toolchain(target)):
        return system
    if is_for_this_machine() and not suits_zig():
        raise NotCompiled("No C compiler works, and ziglang compiles for glibc, which this system does not have.")
    if importlib.util.find_spec("ziglang") is None:
        raise NotCompiled("No C compiler works, and ziglang is not installed.")
    return Toolchain((sys.executable, "-m", "ziglang", "cc"), target, is_zig=True)


def is_for_this_machine() -> bool:
    return not os.environ.get("LOCALLLM_WHEEL_PLATFORM")


def suits_zig() -> bool:
    return sys.platform != "linux" or platform.libc_ver()[0] == "glibc"


def system_toolchain(target: Target) -> Toolchain | None:
    found = (Toolchain(command, target, is_zig=False) for command in system_compilers())
    return next((toolchain for toolchain in found if knows_all_sets(toolchain)), None)


def system_compilers() -> Iterator[tuple[str, ...]]:
    """Yield the commands of this machine's C compilers: $CC alone where it is set."""
    if os.environ.get("CC"):
        yield tuple(shlex.split(os.environ["CC"]))
    elif sys.platform != "win32":  # a gcc on Windows links libraries that no other machine has
        yield from ((name,) for name in ("cc", "gcc", "clang") if shutil.which(name))


def knows_all_sets(toolchain: Toolchain) -> bool:
    """Return whether the compiler makes an empty library of each instruction set: an old compiler does not know all
    of them, and a compiler without the C library's headers makes none."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "empty.c")
        source.write_text("#include <math.h>\n#include <pthread.h>\nint localllm_empty(void) { return 0; }\n")
        commands = [
            compile_command(toolchain, each, [source], Path(folder, each.name)) for each in toolchain.target.sets
        ]
        return not any(first_error(commands))


def compile_command(toolchain: Toolchain, chosen: InstructionSet, sources: list[Path], output: Path) -> list[str]:
    options = [*toolchain.options_for(chosen), *FLAGS, f'-DLOCALLLM_SOURCE_HASH="{sources_module().source_hash()}"']
    names = [str(path) for path in sources]
    return [*toolchain.command, *options, *names, "-o", str(output), *toolchain.target.libraries]


def first_error(commands: list[list[str]]) -> str:
    """Run the commands at the same time. Return what the first one that failed has said; "" if none failed."""
    with tempfile.TemporaryDirectory() as cache:
        environ = {"ZIG_GLOBAL_CACHE_DIR": cache, "ZIG_LOCAL_CACHE_DIR": cache, **os.environ}
        try:
            running = [
                subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                for command in commands
            ]
        except OSError as error:
            return str(error)
        said = [process.communicate()[0] for process in running]
    finished = zip(commands, running, said, strict=True)
    failed = (f"{shlex.join(command)}\n{text}" for command, process, text in finished if process.returncode)
    return next(failed, "")


def compile_libraries(toolchain: Toolchain, folder: Path) -> list[Path]:
    """Compile a library for each instruction set into `folder`. Raises `NotCompiled`."""
    sources = sorted(FOLDER.glob("*.c"))
    name_of = sources_module().library_name
    with tempfile.TemporaryDirectory(dir=folder) as scratch:  # a process may have the old libraries open
        outputs = [Path(scratch, name_of(each.name, toolchain.target.system)) for each in toolchain.target.sets]
        pairs = zip(toolchain.target.sets, outputs, strict=True)
        error = first_error([compile_command(toolchain, each, sources, output) for each, output in pairs])
        if error:
            raise NotCompiled(f"The compiler failed: {error}")
        return [output.replace(folder / output.name) for output in outputs]


def remove_libraries() -> None:
    """Remove the libraries beside the sources, so that none of an older state remains."""
    for suffix in (".so", ".dylib", ".dll"):
        for path in FOLDER.glob(f"localllm_*{suffix}"):
            path.unlink()


def sources_module() -> ModuleType:
    """Return localllm/kernels/cpu/native/sources.py, without importing localllm."""
    spec = importlib.util.spec_from_file_location("localllm_native_sources", FOLDER / "sources.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class NativeBuildHook(BuildHookInterface):  # type: ignore[misc]
    """Put the compiled libraries into a wheel, or beside the sources for an editable install."""

    def dependencies(self) -> list[str]:
        """Return ziglang where it can compile and no compiler of this machine does."""
        if native_choice() in ("none", "built"):
            return []
        target = find_target()
        if target is None or (is_for_this_machine() and (system_toolchain(target) or not suits_zig())):
            return []
        return [ZIG]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        # A container's build has only the package: its wheel has neither of them.
        build_data["shared_data"].update({path: place for path, place in SHARED.items() if (ROOT / path).is_file()})
        if native_choice() == "built":
            return
        if version == "editable":
            remove_libraries()
        if native_choice() == "none":
            return
        try:
            self._add_libraries(version, build_data, find_toolchain(find_target()))
        except NotCompiled as error:
            if native_choice() == "require":
                raise
            self.app.display_warning(
                f"{error}\nlocalllm is installed without its native library and runs on torch alone."
            )

    def _add_libraries(self, version: str, build_data: dict[str, Any], toolchain: Toolchain) -> None:
        if version == "editable":
            compile_libraries(toolchain, FOLDER)
            return
        self._folder = tempfile.TemporaryDirectory()  # until the wheel is written
        libraries = compile_libraries(toolchain, Path(self._folder.name))
        build_data["force_include"].update({str(path): f"{PLACE}/{path.name}" for path in libraries})
        build_data["pure_python"] = False
        build_data["tag"] = toolchain.tag


def main() -> int:
    """Compile the libraries beside the sources."""
    remove_libraries()
    if native_choice() == "none":
        return 0
    try:
        for path in compile_libraries(find_toolchain(find_target()), FOLDER):
            print(path.relative_to(ROOT))
    except NotCompiled as error:
        print(f"{error}\nTry: pip install -e .   (brings a compiler for the build)", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
