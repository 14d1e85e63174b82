"""The offline .run file: unpacking, updating, going back and damage, with a payload of two small files.

The header and packaging/bundle's function that fills it in are the real ones; the payload's localllm is a shell script.
The slow tests at the end make the real file, and install from a real folder of wheels without a network.
"""

import json
import os
import shutil
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from localllm.version import __version__
from scripts.layout import ROOT
from tests.packaging.harness import bundle as bundle
from tests.packaging.harness import make_run, refusal


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def run(file: Path, home: Path, *arguments: str, shell: str = "sh", **environ: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": f"{home}/.local/bin:{os.environ['PATH']}", "HOME": str(home)} | environ
    command = [shell, str(file), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def unpack(file: Path, home: Path, *arguments: str, **environ: str) -> str:
    ended = run(file, home, *arguments, **environ)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def app(home: Path) -> Path:
    return home / ".local/share/localllm/app"


def versions(home: Path) -> set[str]:
    """Names in the folder of versions, those of unfinished ones included."""
    return {path.name for path in app(home).iterdir()}


def command(home: Path) -> str:
    return subprocess.check_output([home / ".local/bin/localllm", "list"], text=True).strip()


@pytest.mark.parametrize("shell", [shell for shell in ("dash", "bash") if shutil.which(shell)])
def test_it_unpacks_links_and_says_what_to_type(bundle: ModuleType, tmp_path: Path, home: Path, shell: str) -> None:
    file = make_run(bundle, tmp_path, "1.0")
    ended = run(file, home, shell=shell)
    assert ended.returncode == 0, ended.stderr
    assert "localllm up" in ended.stdout
    assert f"Place:   {app(home)}" in ended.stdout
    assert "is not in PATH" not in ended.stdout
    assert command(home) == "localllm 1.0  list"
    assert versions(home) == {"1.0"}
    assert stat.S_IMODE(app(home).parent.stat().st_mode) == 0o700
    assert (app(home) / "1.0/BUNDLE").read_text().startswith("1.0 ")


def test_words_after_the_options_are_a_command(bundle: ModuleType, tmp_path: Path, home: Path) -> None:
    file = make_run(bundle, tmp_path, "1.0")
    assert unpack(file, home, "--dir", str(tmp_path / "d"), "up", "--port", "1").endswith("localllm 1.0  up --port 1\n")
    assert not (home / ".local").exists()


def test_a_second_run_unpacks_nothing(bundle: ModuleType, tmp_path: Path, home: Path) -> None:
    file = make_run(bundle, tmp_path, "1.0")
    unpack(file, home)
    before = (app(home) / "1.0").stat()
    assert "is unpacked already" in unpack(file, home)
    assert (app(home) / "1.0").stat().st_ino == before.st_ino


def test_the_same_version_built_anew_replaces_the_old_one(bundle: ModuleType, tmp_path: Path, home: Path) -> None:
    unpack(make_run(bundle, tmp_path, "1.0", says="old"), home)
    unpack(make_run(bundle, tmp_path, "1.0", says="new"), home)
    assert command(home) == "localllm 1.0 new list"
    assert versions(home) == {"1.0"}


def test_an_update_keeps_one_older_version_to_go_back_to(bundle: ModuleType, tmp_path: Path, home: Path) -> None:
    files = {version: make_run(bundle, tmp_path, version) for version in ("1.0", "1.1", "1.2")}
    unpack(files["1.0"], home)
    unpack(files["1.1"], home)
    assert versions(home) == {"1.0", "1.1"}
    unpack(files["1.2"], home)
    assert versions(home) == {"1.1", "1.2"}
    unpack(files["1.2"], home)
    assert versions(home) == {"1.1", "1.2"}
    assert "localllm is 1.1 again; 1.2 is kept." in unpack(files["1.2"], home, "--back")
    assert command(home).startswith("localllm 1.1")
    assert "localllm is 1.2 again" in unpack(files["1.0"], home, "--back")


def test_there_is_no_way_back_from_the_first_version(bundle: ModuleType, tmp_path: Path, home: Path) -> None:
    file = make_run(bundle, tmp_path, "1.0")
    unpack(file, home)
    assert "no older version" in refusal(run(file, home, "--back"))
    assert command(home).startswith("localllm 1.0")


def test_one_changed_byte_is_refused_and_leaves_the_older_version(
    bundle: ModuleType, tmp_path: Path, home: Path
) -> None:
    unpack(make_run(bundle, tmp_path, "1.0"), home)
    file = make_run(bundle, tmp_path, "1.1")
    content = bytearray(file.read_bytes())
    content[-2_000] ^= 1
    file.write_bytes(content)
    assert "is damaged" in refusal(run(file, home))
    assert "is damaged" in refusal(run(file, home, "--check"))
    assert versions(home) == {"1.0"}
    assert command(home).startswith("localllm 1.0")


def test_a_file_cut_short_is_refused(bundle: ModuleType, tmp_path: Path, home: Path) -> None:
    file = make_run(bundle, tmp_path, "1.0")
    file.write_bytes(file.read_bytes()[:-100])
    assert "is damaged" in refusal(run(file, home))
    assert not (home / ".local").exists()


def test_a_moved_folder_still_runs(bundle: ModuleType, tmp_path: Path, home: Path) -> None:
    """The launcher of a real bundle, with a Python that prints its arguments."""
    place = tmp_path / "old/app/1.0"
    (place / "python/bin").mkdir(parents=True)
    (place / "localllm").write_text(bundle.LAUNCHER)
    (place / "python/bin/python3").write_text('#!/bin/sh\necho "$0" "$@"\n')
    for program in (place / "localllm", place / "python/bin/python3"):
        program.chmod(0o755)
    (tmp_path / "old").rename(tmp_path / "moved folder")
    moved = tmp_path / "moved folder/app/1.0"
    (home / "link").symlink_to(moved / "localllm")
    said = subprocess.check_output([home / "link", "up"], text=True)
    assert said == f"{moved}/python/bin/python3 -I -m localllm up\n"


def test_a_command_of_another_install_is_left_alone(bundle: ModuleType, tmp_path: Path, home: Path) -> None:
    (home / ".local/bin").mkdir(parents=True)
    (home / ".local/bin/localllm").write_text("mine")
    assert "belongs to another install" in refusal(run(make_run(bundle, tmp_path, "1.0"), home))
    assert (home / ".local/bin/localllm").read_text() == "mine"
    assert not app(home).exists()


def fake(folder: Path, name: str, body: str) -> str:
    """A PATH on which one program is another one."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


@pytest.mark.parametrize(
    ("program", "body", "what"),
    [
        ("uname", "echo made-up", "this machine is made-up-made-up"),
        ("ldd", "echo 'ldd (GNU libc) 2.27'", "needs glibc 2.28 or newer; this system has 2.27"),
        ("ldd", "echo 'musl libc (x86_64)' >&2; exit 1", "is musl"),
        ("df", "echo; echo x 1 1 100000 1% /", "has 102 MB free; localllm needs 103 MB"),
        ("tar", "exit 2", "could not be unpacked"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(
    bundle: ModuleType, tmp_path: Path, home: Path, program: str, body: str, what: str
) -> None:
    file = make_run(bundle, tmp_path, "1.0", glibc="2.28", size=2_500_000)
    assert what in refusal(run(file, home, PATH=fake(tmp_path / "fake", program, body)))
    assert not app(home).exists() or not versions(home)


def test_the_glibc_floor_is_a_number_not_a_word(bundle: ModuleType, tmp_path: Path, home: Path) -> None:
    file = make_run(bundle, tmp_path, "1.0", glibc="2.28")
    path = fake(tmp_path / "fake", "ldd", "echo 'ldd (Ubuntu GLIBC 2.100-0ubuntu8.4) 2.100'")
    unpack(file, home, PATH=path)


def test_the_floor_is_read_from_the_files(bundle: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.so.1").write_bytes(b"\0GLIBC_2.9\0GLIBC_2.31\0GLIBC_2.4\0")
    (tmp_path / "b.so").write_bytes(b"GLIBC_2.28")
    (tmp_path / "empty.so").write_bytes(b"")
    assert bundle.oldest_glibc(tmp_path) == "2.31"


def test_what_is_left_out_is_not_imported(bundle: ModuleType, tmp_path: Path) -> None:
    kept = [
        "torch/lib/libtorch_cpu.so",
        "torch/bin/torch_shm_manager",
        "torch/testing/__init__.py",
        "sympy/core/a.py",
        "localllm/tests/a.py",
    ]
    gone = ["torch/include/a.h", "torch/bin/protoc", "torch/lib/libx.a", "torch/test/a", "sympy/core/tests/a.py"]
    for name in kept + gone:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    bundle.leave_out(tmp_path)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == set(kept)


# ---- the real files (slow) -------------------------------------------------------------------------------------------


def environment_without_this_one(home: Path) -> dict[str, str]:
    """An empty home, no network for pip and uv, and PATH without this Python's environment."""
    path = os.pathsep.join(part for part in os.environ["PATH"].split(os.pathsep) if ".venv" not in part)
    offline = {"UV_OFFLINE": "1", "PIP_NO_INDEX": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return {"PATH": f"{home}/.local/bin:{path}", "HOME": str(home), **offline}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real folder of wheels, and localllm's own wheel with the libraries that this machine compiles."""
    folder = tmp_path_factory.mktemp("wheels")
    made = folder / "own"
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(made), str(ROOT)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        pytest.skip(f"the wheel cannot be built here: {ended.stderr[-500:]}")
    collected = folder / "all"
    script = [sys.executable, str(ROOT / "packaging/wheelhouse"), "--torch", "cpu", "--out", str(collected)]
    ended = subprocess.run(
        [*script, "--wheel", str(next(made.glob("*.whl")))], capture_output=True, text=True, check=False
    )
    if ended.returncode:
        pytest.skip(f"the wheels cannot be downloaded here: {ended.stderr[-500:]}")
    return collected


def answer_of_the_demo(launcher: Path, environ: dict[str, str]) -> str:
    """Start `localllm up`, ask the demo something, end the server. Return the answer."""
    command = [launcher, "up", "--port", "0", "--json"]
    with subprocess.Popen([str(word) for word in command], env=environ, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = address_in(server.stdout)
            body = {"model": "demo", "messages": [{"role": "user", "content": "What is localllm?"}], "max_tokens": 8}
            request = urllib.request.Request(
                f"{address}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
            )
            until = time.monotonic() + 60
            while True:
                try:
                    with urllib.request.urlopen(request, timeout=60) as response:
                        answer: Any = json.load(response)
                    return str(answer["choices"][0]["message"]["content"])
                except OSError:
                    assert time.monotonic() < until
                    time.sleep(0.2)
        finally:
            server.terminate()
            server.wait(30)


def address_in(lines: Iterator[str]) -> str:
    return next(found["url"] for line in lines if "url" in (found := json.loads(line)))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_wheels_of_a_cpu_install_are_small_and_have_no_triton(wheels: Path) -> None:
    names = [path.name for path in wheels.glob("*.whl") if not path.name.startswith("uv-")]
    assert not [name for name in names if name.startswith(("triton", "nvidia_c"))]
    size = sum((wheels / name).stat().st_size for name in names)
    print(f"download, CPU: {size / 1e6:.0f} MB")
    assert size <= 282e6  # Pillow has 7 MB of them


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_install_offline_from_the_folder_of_wheels(wheels: Path, tmp_path: Path, home: Path) -> None:
    environ = environment_without_this_one(home) | {"SHELL": "/bin/sh"}
    install = ["sh", str(wheels / "install.sh"), "--offline", str(wheels), "--yes"]
    began_s = time.monotonic()
    ended = subprocess.run(install, env=environ, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    print(f"install.sh --offline: {time.monotonic() - began_s:.0f} s")
    tool = home / ".local/share/localllm/tools/localllm"
    assert list((tool / "lib").rglob("localllm/__pycache__/__init__.*.pyc"))
    assert answer_of_the_demo(home / ".local/bin/localllm", environ)
    removed = subprocess.run([*install[:2], "--uninstall", "--yes"], env=environ, capture_output=True, check=False)
    assert removed.returncode == 0
    assert not tool.exists()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_real_file_answers_without_a_network(wheels: Path, tmp_path: Path, home: Path) -> None:
    python = os.environ.get("LOCALLLM_BUNDLE_PYTHON", "/usr/bin/python{}.{}".format(*sys.version_info))
    if not Path(python).exists():
        pytest.skip(f"{python} is missing: LOCALLLM_BUNDLE_PYTHON may name a Python that runs from any folder")
    make = [sys.executable, str(ROOT / "packaging/bundle"), "--wheels", str(wheels), "--python", python]
    ended = subprocess.run([*make, "--out", str(tmp_path / "dist")], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    [file] = (tmp_path / "dist").glob("*.run")
    assert file.name == f"localllm-{__version__}-linux-{os.uname().machine}-cpu.run"
    print(f"offline file: {file.stat().st_size / 1e6:.0f} MB")
    assert file.stat().st_size <= 237e6
    environ = environment_without_this_one(home) | {"PYTHONPATH": "/wrong", "PYTHONHOME": "/wrong"}
    assert answer_of_the_demo_from_the_file(file, environ)
    shutil.move(app(home) / __version__, tmp_path / "moved")
    assert "localllm" in subprocess.check_output([tmp_path / "moved/localllm", "--version"], env=environ, text=True)


def answer_of_the_demo_from_the_file(file: Path, environ: dict[str, str]) -> str:
    began_s = time.monotonic()
    unpacked = subprocess.run(["sh", str(file)], env=environ, capture_output=True, text=True, check=False)
    assert unpacked.returncode == 0, unpacked.stderr
    answer = answer_of_the_demo(Path(environ["HOME"], ".local/bin/localllm"), environ)
    print(f"from the file to an answer: {time.monotonic() - began_s:.1f} s")
    return answer


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("tool", ["pipx", "uv"])
def test_pipx_and_uv_install_the_wheel(tool: str, wheels: Path, tmp_path: Path, home: Path) -> None:
    """As a person types it, but from the folder of wheels in place of the index."""
    found = shutil.which(tool)
    if found is None:
        pytest.skip(f"{tool} is not on PATH: pip install {tool}")
    environ = environment_without_this_one(home)
    folder = ["--no-index", "--find-links", str(wheels)]
    words = ["tool", "install", *folder] if tool == "uv" else ["install", "--pip-args", " ".join(folder)]
    ended = subprocess.run(
        [found, *words, "--python", sys.executable, "localllm"],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    launcher = home / ".local/bin/localllm"
    assert __version__ in subprocess.check_output([launcher, "--version"], env=environ, text=True)
    assert answer_of_the_demo(launcher, environ)
