"""The build hook: what a wheel holds and is called, with and without a compiler, and what an installed one opens.

The quick tests build a small copy of the package, whose native library is a function of one line. The slow ones build
the real package, and make wheels for other platforms where the `ziglang` package is installed.
Building needs hatchling, a development tool; nothing here uses the network.
"""

import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import build_native
from localllm.kernels.cpu.native import choice, library, sources
from localllm.kernels.cpu.native.structures import Kind
from scripts.layout import PACKAGE, ROOT

PLACE = build_native.PLACE
HERE = build_native.find_target({})
NAMES = [] if HERE is None else [sources.library_name(each.name) for each in HERE.sets]
HASH_FUNCTION = (
    "const char* localllm_source_hash(void);\nconst char* localllm_source_hash(void) { return LOCALLLM_SOURCE_HASH; }\n"
)
READ_HASH = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
library.localllm_source_hash.restype = ctypes.c_char_p
print(library.localllm_source_hash().decode())
"""

needs_hatchling = pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="hatchling is not installed")
needs_compiler = pytest.mark.skipif(
    HERE is None or build_native.system_toolchain(HERE) is None, reason="no C compiler works here"
)
needs_zig = pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="ziglang is not installed")
pytestmark = needs_hatchling


def clean_environment(**more: str) -> dict[str, str]:
    """Return this process's environment without what directs the hook."""
    directs = ("CC", "LOCALLLM_NATIVE", "LOCALLLM_WHEEL_PLATFORM")
    return {name: value for name, value in os.environ.items() if name not in directs} | more


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the project whose package is next to empty."""
    root = tmp_path / "project"
    native = root / PLACE
    native.mkdir(parents=True)
    for name in ("build_native.py", "pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, root)
    for name in ("__init__.py", "version.py"):
        shutil.copy(PACKAGE / name, root / "localllm")
    shutil.copy(PACKAGE / "kernels/cpu/native/sources.py", native)
    for folder in (native, native.parent, native.parent.parent):
        (folder / "__init__.py").write_text("")
    (native / "step.c").write_text(HASH_FUNCTION)
    (native / "step.h").write_text("// Declarations.\n")
    return root


def run_hatchling(root: Path, target: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(root / "out")]
    return subprocess.run(
        command, cwd=root, env=clean_environment(**environ), capture_output=True, text=True, check=False
    )


def build(root: Path, target: str = "wheel", **environ: str) -> Path:
    """Build, and return the only file that came out."""
    ended = run_hatchling(root, target, **environ)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    [made] = (root / "out").iterdir()
    return made


def native_files(wheel: Path) -> set[str]:
    """Return the names of the files in the native library's folder that are not Python."""
    with zipfile.ZipFile(wheel) as archive:
        names = {Path(name) for name in archive.namelist() if name.startswith(PLACE)}
    return {path.name for path in names if path.suffix != ".py"}


def hash_of(path: Path) -> str:
    """Return what the library's function says, asked in a process of its own."""
    command = [sys.executable, "-c", READ_HASH, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


# ---- a wheel ---------------------------------------------------------------------------------------------------------


@needs_compiler
def test_a_compiler_makes_a_wheel_of_this_platform_with_every_library(project: Path, tmp_path: Path) -> None:
    wheel = build(project, LOCALLLM_NATIVE="require")
    assert re.fullmatch(r"localllm-.*-py3-none-(linux_\w+|macosx_11_0_arm64|win_amd64)\.whl", wheel.name), wheel.name
    assert native_files(wheel) == set(NAMES)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
        [metadata] = [name for name in archive.namelist() if name.endswith("/WHEEL")]
        assert "Root-Is-Purelib: false" in archive.read(metadata).decode()
    folder = tmp_path / "installed" / PLACE
    assert {hash_of(folder / name) for name in NAMES} == {sources.source_hash(project / PLACE)}
    assert sources.source_hash(folder) == ""


def test_without_a_compiler_the_wheel_is_pure_and_one_warning_says_so(project: Path) -> None:
    ended = run_hatchling(project, "wheel", PATH="")
    if importlib.util.find_spec("ziglang") is not None:
        pytest.skip("ziglang is installed, and compiles")
    assert ended.returncode == 0
    assert (ended.stdout + ended.stderr).count("runs on torch alone") == 1
    [wheel] = (project / "out").iterdir()
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not native_files(wheel)


def test_a_wheel_has_the_manual_page_and_the_changelog_where_they_are_in_the_sources(project: Path) -> None:
    for name in build_native.SHARED:
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, project / name)
    with zipfile.ZipFile(build(project, LOCALLLM_NATIVE="none")) as archive:
        names = {name.partition(".data/data/")[2] for name in archive.namelist() if ".data/data/" in name}
    assert names == set(build_native.SHARED.values())
    shutil.rmtree(project / "out")
    shutil.rmtree(project / "docs")
    with zipfile.ZipFile(build(project, LOCALLLM_NATIVE="none")) as archive:
        names = {name.partition(".data/data/")[2] for name in archive.namelist() if ".data/data/" in name}
    assert names == {"share/doc/localllm/CHANGELOG.md"}, "a build with the package only, as a container's, succeeds"


@needs_compiler
def test_a_compiler_that_fails_makes_a_pure_wheel_unless_the_library_is_required(project: Path) -> None:
    (project / PLACE / "step.c").write_text("#error broken on purpose\n")
    required = run_hatchling(project, "wheel", LOCALLLM_NATIVE="require")
    assert required.returncode != 0
    assert "broken on purpose" in required.stdout + required.stderr
    wheel = build(project)
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not native_files(wheel)


def test_required_libraries_fail_without_a_compiler(project: Path) -> None:
    if importlib.util.find_spec("ziglang") is not None:
        pytest.skip("ziglang is installed, and compiles")
    assert run_hatchling(project, "wheel", LOCALLLM_NATIVE="require", PATH="").returncode != 0


def test_no_libraries_are_compiled_on_demand(project: Path) -> None:
    wheel = build(project, LOCALLLM_NATIVE="none", CC="false")
    assert wheel.name.endswith("-py3-none-any.whl")


def test_an_unknown_choice_is_refused(project: Path) -> None:
    ended = run_hatchling(project, "wheel", LOCALLLM_NATIVE="yes")
    assert ended.returncode != 0
    assert "LOCALLLM_NATIVE is 'yes'" in ended.stdout + ended.stderr


@needs_compiler
def test_libraries_of_another_platform_stay_out_of_a_wheel(project: Path) -> None:
    """Also without git, whose .gitignore names them."""
    (project / ".gitignore").unlink()
    for name in ("localllm_dotprod.dylib", "localllm_avx2.dll", "localllm_old.so"):
        (project / PLACE / name).write_bytes(b"of another platform")
    assert native_files(build(project)) == set(NAMES)


def test_the_source_distribution_has_the_sources_and_builds_a_wheel(project: Path, tmp_path: Path) -> None:
    (project / PLACE / "localllm_old.so").write_bytes(b"compiled")
    with tarfile.open(build(project, "sdist")) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    [root] = (tmp_path / "unpacked").iterdir()
    names = {path.relative_to(root).as_posix() for path in root.rglob("*")}
    assert {"build_native.py", f"{PLACE}/step.c", f"{PLACE}/step.h", f"{PLACE}/sources.py"} <= names
    assert not [name for name in names if name.endswith(".so")]
    wheel = build(root)
    assert native_files(wheel) == (set(NAMES) if "none-any" not in wheel.name else set())


# ---- a checkout ------------------------------------------------------------------------------------------------------


@needs_compiler
def test_an_editable_install_has_the_libraries_beside_the_sources(project: Path) -> None:
    ended = run_hatchling(project, "wheel:editable")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert {path.name for path in (project / PLACE).glob("localllm_*")} == set(NAMES)
    [wheel] = (project / "out").iterdir()
    assert wheel.name.endswith("-py3-none-any.whl")


@needs_compiler
def test_compiling_by_hand_follows_the_sources(project: Path) -> None:
    """Neither hatchling nor localllm is needed: the interpreter sees its standard library only."""
    command = [sys.executable, "-I", "-S", "build_native.py"]
    (project / PLACE / "localllm_old.so").write_bytes(b"of an older state")
    for text in (HASH_FUNCTION, HASH_FUNCTION + "\n"):
        (project / PLACE / "step.c").write_text(text)
        subprocess.run(command, cwd=project, env=clean_environment(), check=True, capture_output=True)
        assert {path.name for path in (project / PLACE).glob("localllm_*")} == set(NAMES)
        assert hash_of(project / PLACE / NAMES[0]) == sources.source_hash(project / PLACE)


@needs_compiler
def test_compiling_by_hand_says_what_the_compiler_said(project: Path) -> None:
    (project / PLACE / "step.c").write_text("#error broken on purpose\n")
    ended = subprocess.run(
        [sys.executable, "build_native.py"], cwd=project, env=clean_environment(), capture_output=True, text=True
    )
    assert ended.returncode == 1
    assert "broken on purpose" in ended.stderr
    assert not list((project / PLACE).glob("localllm_*"))


@needs_compiler
def test_scripts_compile_again_when_the_sources_have_changed_and_only_then(project: Path) -> None:
    (project / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "_venv.sh", project / "scripts")
    python = project / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)

    def update() -> str:
        command = ["bash", "-euo", "pipefail", "-c", "source scripts/_venv.sh; update_native"]
        ended = subprocess.run(
            command, cwd=project, env=clean_environment(), capture_output=True, text=True, check=True
        )
        assert hash_of(project / PLACE / NAMES[0]) == sources.source_hash(project / PLACE)
        return ended.stdout

    assert "Compiling" in update()
    assert update() == ""
    (project / PLACE / "step.h").write_text("// Other declarations.\n")
    assert "Compiling" in update()


def test_the_hash_changes_with_names_and_contents(tmp_path: Path) -> None:
    seen = {sources.source_hash(tmp_path)}
    assert seen == {""}
    for name, text in (("a.c", "1"), ("a.c", "2"), ("b.h", "2"), ("b.py", "3")):
        (tmp_path / name).write_text(text)
        seen.add(sources.source_hash(tmp_path))
    assert len(seen) == 4, "every file but the last one counts"
    assert sources.source_hash(tmp_path / "..") == ""


def test_every_set_that_the_library_knows_is_compiled() -> None:
    compiled = {each.name for target in build_native.TARGETS.values() for each in target.sets}
    assert compiled == {name for names in choice.SETS.values() for name in names}


@pytest.mark.skipif(library.native() is None, reason="no native library for this processor")
def test_a_library_of_other_sources_is_refused_and_sources_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = library.native()
    assert opened is not None
    name = opened.instruction_set
    monkeypatch.setattr(library, "source_hash", lambda: "0" * 16)
    assert "older than their sources" in library.open_library(name)[1]
    monkeypatch.setattr(library, "source_hash", lambda: "")
    assert library.open_library(name)[1] == ""


@pytest.mark.skipif(len(choice.chosen_sets()[0]) < 2, reason="this processor has one library or none")
def test_a_library_with_wrong_results_is_left_for_the_next_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, *_ = choice.chosen_sets()[0]
    faulty, find = {first}, library.wrong_kind

    def wrong_kind(pool: library.Pool) -> Kind | None:
        is_faulty = pool._functions.localllm_instruction_set().decode() in faulty
        return Kind.BF16 if is_faulty else find(pool)

    monkeypatch.setattr(library, "wrong_kind", wrong_kind)
    opened, why = library._library_or_reason.__wrapped__()
    assert opened is not None
    assert (opened.instruction_set, why) == (second, "")
    wrong = f"A product with BF16 weights gave wrong results in the library for {first}."
    assert caplog.messages == [f"{wrong} The library for {second} is used instead."]
    faulty |= set(choice.chosen_sets()[0])
    assert library._library_or_reason.__wrapped__() == (None, wrong)
    faulty = {first}
    monkeypatch.setenv(choice.VARIABLE, first)
    assert library._library_or_reason.__wrapped__() == (None, wrong), "a set that was asked for is used or refused"


# ---- build dependencies ----------------------------------------------------------------------------------------------


@pytest.fixture
def hook() -> build_native.NativeBuildHook:
    return object.__new__(build_native.NativeBuildHook)


@pytest.fixture
def no_directions(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    for name in ("CC", "LOCALLLM_NATIVE", "LOCALLLM_WHEEL_PLATFORM"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@needs_compiler
def test_ziglang_is_not_asked_for_beside_a_compiler(
    hook: build_native.NativeBuildHook, no_directions: pytest.MonkeyPatch
) -> None:
    assert hook.dependencies() == []


@pytest.mark.skipif(HERE is None or not build_native.suits_zig(), reason="ziglang does not compile for this platform")
@pytest.mark.parametrize("compiler", ["", "false", "/nowhere/cc"])
def test_ziglang_is_asked_for_where_no_compiler_works(
    hook: build_native.NativeBuildHook, no_directions: pytest.MonkeyPatch, compiler: str
) -> None:
    no_directions.setenv("PATH", "")
    no_directions.setenv("CC", compiler)
    assert hook.dependencies() == [build_native.ZIG]
    no_directions.setenv("LOCALLLM_NATIVE", "none")
    assert hook.dependencies() == []


def test_an_unknown_platform_needs_nothing(
    hook: build_native.NativeBuildHook, no_directions: pytest.MonkeyPatch
) -> None:
    no_directions.setattr(platform, "machine", lambda: "riscv64")
    assert hook.dependencies() == []
    with pytest.raises(build_native.NotCompiled, match="riscv64"):
        build_native.find_toolchain(build_native.find_target())


def test_a_release_is_compiled_with_ziglang_even_beside_a_compiler(
    hook: build_native.NativeBuildHook, no_directions: pytest.MonkeyPatch
) -> None:
    no_directions.setattr(build_native.importlib.util, "find_spec", lambda name: name)
    for name, target in build_native.TARGETS.items():
        no_directions.setenv("LOCALLLM_WHEEL_PLATFORM", name)
        assert hook.dependencies() == [build_native.ZIG]
        toolchain = build_native.find_toolchain(build_native.find_target())
        assert toolchain.is_zig
        assert toolchain.tag == f"py3-none-{target.tag}"
    no_directions.setenv("LOCALLLM_WHEEL_PLATFORM", "linux-riscv64")
    with pytest.raises(SystemExit, match="linux-aarch64"):
        hook.dependencies()


# ---- the real package ------------------------------------------------------------------------------------------------

OPEN = """
import json
from localllm.kernels.cpu.native import library
print(json.dumps([library.__file__, getattr(library.native(), "instruction_set", None), library.why_none()]))
"""


def opened_from(folder: Path, chosen: str = "") -> tuple[str, str | None, str]:
    """Return where the package was imported from, the opened library's set, and why there is none."""
    environ = clean_environment(PYTHONPATH=str(folder), LOCALLLM_CPU_SET=chosen)
    ended = subprocess.run(
        [sys.executable, "-c", OPEN], cwd=folder, env=environ, capture_output=True, text=True, check=True
    )
    file, instruction_set, why = json.loads(ended.stdout)
    return file, instruction_set, why


def install(wheel: Path, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(folder), str(wheel)]
    subprocess.run(command, check=True, capture_output=True)


def pip_wheel(folder: Path, **environ: str) -> Path:
    """Build a wheel of the checkout as `pip wheel . --no-build-isolation` does, without the network."""
    command = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-build-isolation", "--no-deps", "--no-index"]
    subprocess.run(
        [*command, "--wheel-dir", str(folder)], check=True, capture_output=True, env=clean_environment(**environ)
    )
    [wheel] = folder.iterdir()
    return wheel


@pytest.mark.slow
@pytest.mark.timeout(600)
@needs_compiler
def test_an_installed_wheel_opens_each_library_that_the_processor_runs(tmp_path: Path) -> None:
    install(pip_wheel(tmp_path / "wheels", LOCALLLM_NATIVE="require"), tmp_path / "installed")
    usable = choice.usable_sets()
    for chosen in ("", *usable):
        file, instruction_set, why = opened_from(tmp_path / "installed", chosen)
        assert file.startswith(str(tmp_path))
        assert (instruction_set, why) == (chosen or usable[0], "") if usable else (None, why)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_installed_pure_wheel_says_why_it_has_no_library(tmp_path: Path) -> None:
    install(pip_wheel(tmp_path / "wheels", LOCALLLM_NATIVE="none"), tmp_path / "installed")
    file, instruction_set, why = opened_from(tmp_path / "installed")
    assert file.startswith(str(tmp_path))
    assert instruction_set is None
    assert "without compiled libraries" in why or "none of the instruction sets" in why


@pytest.mark.slow
@pytest.mark.timeout(1200)
@needs_zig
@pytest.mark.parametrize("name", ["linux-x86_64", "linux-aarch64", "darwin-arm64"])
def test_ziglang_compiles_for_a_platform(name: str, tmp_path: Path) -> None:
    """Windows, whose C library alone takes minutes, is left to scripts/make_wheels."""
    wheel = pip_wheel(tmp_path / "wheels", LOCALLLM_NATIVE="require", LOCALLLM_WHEEL_PLATFORM=name)
    target = build_native.TARGETS[name]
    assert wheel.name.endswith(f"-py3-none-{target.tag}.whl")
    assert native_files(wheel) == {sources.library_name(each.name, target.system) for each in target.sets}
    install_folder = tmp_path / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(install_folder)
    if target.system == "linux":
        for path in (install_folder / PLACE).glob("*.so"):
            assert newest_glibc(path) <= (2, 17)
    if target == HERE:
        for chosen in choice.usable_sets():
            assert opened_from(install_folder, chosen)[1:] == (chosen, "")


def newest_glibc(path: Path) -> tuple[int, int]:
    """Return the newest version of glibc that the names in a library ask for."""
    found = re.findall(rb"GLIBC_(\d+)\.(\d+)", path.read_bytes())
    return max(((int(major), int(minor)) for major, minor in found), default=(0, 0))
