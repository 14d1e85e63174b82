"""install.sh on made-up machines: what it says before it changes anything, and how it calls uv.

The script runs as it is, under dash and bash; only the machine around it is made up (sandbox.py).
Nothing here uses the network, and nothing is written outside the test's folder.
"""

import os
import re
import runpy
import shutil
import signal
import stat
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from localllm.version import __version__
from scripts.layout import ROOT
from tests.packaging.harness import PROC, RTX_3060, SHELLS, gpu, refusal
from tests.packaging.sandbox import INSTALL, PYPI, PYPI_ALONE, PYTORCH, UV_VERSION, Machine, Sandbox

OPEN_DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder@U16)\n"
WSL = {"proc/sys/kernel/osrelease": "5.15.167.4-microsoft-standard-WSL2\n"}


def pci(vendor: str) -> dict[str, str]:
    folder = "sys/bus/pci/devices/0000:01:00.0"
    return {f"{folder}/class": "0x030000\n", f"{folder}/vendor": f"{vendor}\n"}


INSTALLED = {  # name: machine, arguments, sentence, words of uv's command
    "no GPU": (Machine(), [], "no NVIDIA GPU.", "torch==2.13.0+cpu"),
    "driver 550": (gpu("550.54.14"), [], "NVIDIA GeForce RTX 3060, driver 550.54.14.", "torch==2.13.0+cu129"),
    "driver 580": (gpu("580.65.06"), [], "PyTorch for CUDA 13.0: about 2.8 GB", "torch==2.13.0+cu130"),
    "driver 579 of the open module": (gpu("579.9", OPEN_DRIVER), [], "driver 579.9.", "torch==2.13.0+cu129"),
    "oldest driver": (gpu("525.60.13"), [], "PyTorch for CUDA 12.9", "torch==2.13.0+cu129"),
    "new driver, told CUDA 12": (gpu("590.10"), ["--cuda", "12"], "PyTorch for CUDA 12.9", "torch==2.13.0+cu129"),
    "GPU, told --cpu": (gpu("470.1"), ["--cpu"], "about 280 MB to download, 1.3 GB on disk", "torch==2.13.0+cpu"),
    "driver only in /sys": (
        Machine(files={"sys/module/nvidia/version": "570.86.15\n"}), [], "NVIDIA GPU, driver 570.86.15.",
        "torch==2.13.0+cu129",
    ),
    "WSL2": (Machine(gpu=RTX_3060.format("581.29"), files=WSL), [], "glibc 2.36, WSL2,", "torch==2.13.0+cu130"),
    "GPU without a driver": (
        Machine(gpu="", files=pci("0x10de")), [], "NVIDIA GPU without a driver: the CPU is used.", "torch==2.13.0+cpu",
    ),
    "AMD GPU": (Machine(files=pci("0x1002")), [], "AMD GPU: not supported yet", "torch==2.13.0+cpu"),
    "Jetson": (
        Machine(processor="aarch64", files={PROC: OPEN_DRIVER.format("540.4.0"), "etc/nv_tegra_release": ""}), [],
        "Jetson: its GPU needs NVIDIA's own build of PyTorch", "torch==2.13.0+cpu",
    ),
    "aarch64": (Machine(processor="aarch64"), [], "Here: Linux aarch64", "torch==2.13.0+cpu"),
    "Fedora": (Machine(libc="ldd (GNU libc) 2.42"), [], "glibc 2.42", "--constraints"),
    "glibc 2.28": (Machine(libc="ldd (GNU libc) 2.28"), [], "glibc 2.28 is older than the tested packages", "cpu"),
    "macOS": (Machine("Darwin", "arm64", libc=None), [], "Here: Darwin arm64", "--constraints"),
    "just enough disk": (Machine(free_mb=2_010), [], "2.0 GB free", "torch==2.13.0+cpu"),
}  # fmt: skip

REFUSED = {  # name: machine, arguments, what happened, what to type next
    "driver 470": (gpu("470.223.02"), [], "needs NVIDIA driver 525 or newer; this machine has 470.223.02", "--cpu"),
    "CUDA 13 on driver 550": (gpu("550.54"), ["--cuda", "13"], "needs NVIDIA driver 580 or newer", "--cuda 12"),
    "CUDA 11": (Machine(), ["--cuda", "11"], "--cuda is 12 or 13, not '11'", "--cuda 12"),
    "Alpine": (Machine(libc="musl libc (x86_64)"), [], "C library is musl", "docker run"),
    "CentOS 7": (Machine(libc="ldd (GNU libc) 2.17"), [], "glibc 2.17; PyTorch needs 2.28", "docker run"),
    "32 bit": (Machine(processor="i686"), [], "cannot be installed on Linux i686", "localllm up --host"),
    "Windows": (Machine("MINGW64_NT-10.0"), [], "On Windows, localllm runs in WSL2.", "wsl --install"),
    "Intel Mac": (
        Machine("Darwin", "x86_64", libc=None),
        [],
        "cannot be installed on Darwin x86_64",
        "another machine",
    ),
    "small disk": (Machine(free_mb=1_900), [], "has 1.9 GB free; the install needs 2 GB", "--dir"),
    "small disk for CUDA": (gpu("550.54", free_mb=8_000), [], "8.0 GB free; the install needs 9 GB", "--dir"),
    "unknown option": (Machine(), ["--slim"], "has no option '--slim'", "--help"),
    "no value": (Machine(), ["--dir"], "--dir needs a value", "--help"),
    "a version that the clone has not": (Machine(), ["--version", "9.9"], "has localllm 0.2.0, not 9.9", "git -C"),
    "an empty folder offline": (Machine(), ["--offline", "/"], "is not a folder of wheels", "packaging/wheelhouse"),
    "offline and --cpu": (Machine(), ["--offline", "/", "--cpu"], "do not go with --offline", "--offline /"),
}


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("name", INSTALLED)
def test_a_machine_gets_the_build_of_pytorch_that_suits_it(name: str, shell: str, tmp_path: Path) -> None:
    machine, arguments, sentence, words = INSTALLED[name]
    sandbox = Sandbox(tmp_path, machine)
    ended = sandbox.run("--yes", *arguments, shell=shell)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert sentence in ended.stdout
    call = sandbox.uv_call()
    assert words in call
    assert "--compile-bytecode" in call
    assert call.endswith(f" {sandbox.source}")
    assert ("--with torch==" in call) == (machine.system == "Linux")
    assert "--torch-backend" not in call, "uv says that it is experimental"
    lock = next((build for build in ("cu129", "cu130") if build in words), "cpu")
    assert (f"--constraints {sandbox.source}/packaging/lock/{lock}.txt" in call) == (name != "glibc 2.28")


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_before_anything_is_written(name: str, shell: str, tmp_path: Path) -> None:
    machine, arguments, what, remedy = REFUSED[name]
    sandbox = Sandbox(tmp_path, machine)
    said = refusal(sandbox.run("--yes", *arguments, shell=shell))
    assert what in said
    assert remedy in said.partition("\nTry: ")[2]
    assert sandbox.calls() == []
    assert not any(sandbox.data.iterdir())


# ---- the interpreter -------------------------------------------------------------------------------------------------


def without_download(sandbox: Sandbox, *, headers: bool) -> Path:
    """Take uv's own Pythons from the machine; the system's python3 says that its headers are in the returned folder."""
    (sandbox.log / "no-download").touch()
    include = sandbox.folder / "include/python3.12"
    include.mkdir(parents=True)
    if headers:
        (include / "Python.h").touch()
    sandbox.program("python3", f"echo {include}/Python.h")
    return include


def test_on_a_gpu_the_python_is_one_with_headers(tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path, gpu("550.54"))
    assert sandbox.run("--yes").returncode == 0
    assert f"--python {sandbox.installed}/python/cpython/bin/python3 " in sandbox.uv_call()


def test_where_no_python_can_be_downloaded_that_of_the_system_serves_if_it_has_headers(tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path, gpu("550.54"))
    without_download(sandbox, headers=True)
    assert sandbox.run("--yes").returncode == 0
    assert "--python python3 " in sandbox.uv_call()


def test_missing_headers_are_told_before_pytorch_is_downloaded(tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path, gpu("550.54"))
    include = without_download(sandbox, headers=False)
    said = refusal(sandbox.run("--yes"))
    assert f"{include}/Python.h is missing" in said
    assert "apt-get install -y python3.12-dev " in said
    assert not sandbox.uv_call()


def test_a_cpu_needs_no_headers(tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path, Machine())
    without_download(sandbox, headers=False)
    assert sandbox.run("--yes").returncode == 0
    assert "--python >=3.11,<3.14 " in sandbox.uv_call()


@pytest.mark.parametrize("headers", [True, False])
def test_a_clone_asks_for_headers_before_pytorch_is_downloaded(headers: bool, tmp_path: Path) -> None:
    commands = f"""source scripts/_venv.sh; venv={tmp_path}; has_torch() {{ false; }}
        torch_for_machine() {{ echo build cu129; echo requirement torch==2.13.0+cu129; }}
        find_torch; echo pip: $torch"""
    sandbox = Sandbox(tmp_path / "machine", gpu("550.54"))
    include = without_download(sandbox, headers=headers)
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin/python"  # a real one, whose sysconfig names another folder
    lines = f'import sysconfig; sysconfig.get_paths = lambda scheme: dict(include="{include}")'
    python.write_text(f"#!/bin/sh\n{{ echo '{lines}'; cat; }} | {sys.executable} -\n")
    python.chmod(0o755)
    command = [shutil.which("bash") or "bash", "-euo", "pipefail", "-c", commands, str(ROOT / "scripts/up")]
    ended = subprocess.run(command, cwd=ROOT, env=sandbox.environ(), capture_output=True, text=True, check=False)
    assert (ended.returncode == 0) == headers == ("pip: torch==" in ended.stdout), ended.stderr
    assert headers or "apt-get install -y python3-dev" in ended.stderr


# ---- asking ----------------------------------------------------------------------------------------------------------


def test_without_a_terminal_only_yes_goes_on(tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path, Machine())
    said = refusal(sandbox.run())
    assert "no terminal to ask at" in said
    assert "--yes" in said
    assert sandbox.calls() == []


@pytest.mark.parametrize(("answer", "installs"), [("\n", True), ("y\n", True), ("n\n", False), ("\x04", False)])
def test_at_a_terminal_it_asks_after_saying_sizes_and_place(answer: str, installs: bool, tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path, Machine())
    ended = sandbox.run(answer=answer)
    plan = "about 280 MB to download, 1.3 GB on disk, in ~/.local/share/localllm.\nGo on? [Y/n]"
    assert plan in ended.stdout
    assert bool(sandbox.uv_call()) == installs
    assert ended.returncode == (0 if installs else 1)
    assert installs or "Nothing was changed." in ended.stderr


def test_look_says_the_plan_and_stops(tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path, gpu("550.54"))
    ended = sandbox.run("--look")
    assert (ended.returncode, sandbox.calls()) == (0, [])
    assert "localllm 0.2.0 with PyTorch for CUDA 12.9" in ended.stdout


# ---- uv --------------------------------------------------------------------------------------------------------------


def test_uv_gets_folders_of_its_own_and_no_active_environment(tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path, Machine())
    wrong = {"UV_PYTHON": "/wrong", "VIRTUAL_ENV": "/wrong", "PYTHONPATH": "/wrong", "PYTHONHOME": "/wrong"}
    assert sandbox.run("--yes", **wrong).returncode == 0
    environment = (sandbox.log / "environment").read_text()
    assert "/wrong" not in environment
    assert f"UV_TOOL_DIR={sandbox.installed}/tools\n" in environment
    assert f"UV_TOOL_BIN_DIR={sandbox.home}/.local/bin\n" in environment
    assert f"UV_PYTHON_INSTALL_DIR={sandbox.installed}/python\n" in environment


@pytest.mark.parametrize(("version", "downloads"), [("0.12.9", True), ("0.9.1", True), ("0.14.0", False), (None, True)])
def test_an_own_uv_is_used_if_it_is_new_enough(version: str | None, downloads: bool, tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path, Machine(), own_uv=version)
    old = (sandbox.bin / "uv").read_text() if version else ""
    sandbox.serve_uv()
    if version:
        sandbox.program("uv", old)
    ended = sandbox.run("--yes")
    assert ended.returncode == 0, ended.stderr
    assert any(call.startswith("curl") for call in sandbox.calls()) == downloads
    assert (sandbox.installed / "bin/uv").exists() == downloads


def test_a_changed_uv_is_refused_and_never_started(tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path, Machine(), own_uv=None)
    sandbox.serve_uv(sha256=None)
    real = shutil.which("sha256sum")
    assert real
    (sandbox.bin / "sha256sum").symlink_to(real)
    assert "The SHA-256 of" in refusal(sandbox.run("--yes"))
    assert not (sandbox.installed / "bin/uv").exists()


NETWORK = {  # curl's exit status, environment, what happened, what to type
    "no network": (6, {}, "files.pythonhosted.org cannot be reached", "--offline FOLDER"),
    "proxy": (7, {"HTTPS_PROXY": "http://me:secret@proxy:3128"}, "through the proxy proxy:3128.", "HTTPS_PROXY="),
    "own certificate": (60, {}, "certificate of files.pythonhosted.org was not accepted", "SSL_CERT_FILE="),
    "no such file": (22, {}, "answers, but not with the file", "pip install uv"),
    "disk full": (23, {}, "its disk is full", "df -h"),
}


@pytest.mark.parametrize("name", NETWORK)
def test_a_failed_download_is_explained(name: str, tmp_path: Path) -> None:
    status, environ, what, remedy = NETWORK[name]
    sandbox = Sandbox(tmp_path, Machine(), own_uv=None)
    sandbox.serve_uv(exit_status=status)
    said = refusal(sandbox.run("--yes", **environ))
    assert what in said
    assert remedy in said.partition("\nTry: ")[2]
    assert "secret" not in said


@pytest.mark.parametrize(
    ("host", "status", "what"),
    [("", 0, "uv's message is above"), (PYPI, 6, "No network: pypi.org"), (PYPI, 60, "certificate of pypi.org"),
     (PYTORCH, 7, "No network: download.pytorch.org")],
)  # fmt: skip
def test_a_failed_uv_is_explained_and_its_downloads_are_kept(host: str, status: int, what: str, tmp_path: Path) -> None:
    """The host that failed is named; only if all answer, a second run continues."""
    sandbox = Sandbox(tmp_path, Machine())
    (sandbox.log / "uv-fails").touch()
    uv = sandbox.bin / "uv"
    if host:
        fails = f'mkdir -p "$PAGES/fails"; echo {status} >"$PAGES/fails/{host}"; exit 2;'
        uv.write_text(uv.read_text().replace("exit 2;", fails, 1))
    said = refusal(sandbox.run("--yes"))
    assert "error: made up" in said
    assert what in said
    assert ("(continues)" in said) == (not host)
    assert (sandbox.installed / "cache").is_dir()
    (sandbox.log / "uv-fails").unlink()
    shutil.rmtree(sandbox.pages / "fails", ignore_errors=True)
    assert sandbox.run("--yes").returncode == 0
    assert not (sandbox.installed / "cache").exists()


def test_an_interrupt_says_that_a_second_run_continues(tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path, Machine())
    (sandbox.log / "uv-waits").touch()
    command = ["sh", str(sandbox.source / "install.sh"), "--yes"]
    process = subprocess.Popen(
        command, env=sandbox.environ(), stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
        text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where tests run in the background
    )  # fmt: skip
    until = time.monotonic() + 30
    while not (sandbox.log / "uv-runs").exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate(timeout=30)[1]
    assert process.returncode == 1
    assert "Interrupted. What was downloaded is kept" in said
    assert (sandbox.installed / "cache").is_dir()


def test_a_disk_without_exec_is_named(tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path, Machine(), own_uv=None)
    sandbox.serve_uv()
    sandbox.program("chmod", "exit 0")  # what is unpacked cannot be started
    said = refusal(sandbox.run("--yes"))
    assert "noexec" in said
    assert "--dir" in said


# ---- places ----------------------------------------------------------------------------------------------------------


def test_a_read_only_home_is_refused(tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path, Machine())
    sandbox.data.rmdir()
    sandbox.data.parent.chmod(stat.S_IRUSR | stat.S_IXUSR)
    if os.access(sandbox.data.parent, os.W_OK):  # root may write: /proc refuses root, too
        said = refusal(sandbox.run("--yes", XDG_DATA_HOME="/proc/made-up"))
    else:
        said = refusal(sandbox.run("--yes"))
    assert "cannot be" in said
    assert "--dir" in said
    assert sandbox.calls() == []


def test_others_cannot_read_the_folder_that_will_hold_chats(tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path, Machine())
    assert sandbox.run("--yes").returncode == 0
    assert stat.S_IMODE(sandbox.installed.stat().st_mode) == 0o700


def test_everything_goes_into_the_folder_that_was_named(tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path, Machine())
    ended = sandbox.run("--yes", "--dir", str(tmp_path / "here"))
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "here/bin/localllm").is_symlink()
    assert not any(sandbox.data.iterdir())
    assert "is not in PATH" in ended.stdout
    assert f'export PATH="{tmp_path}/here/bin:$PATH"' in ended.stdout


def test_a_command_of_another_install_is_left_alone(tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path, Machine())
    sandbox.command.parent.mkdir(parents=True)
    sandbox.command.symlink_to("/opt/pipx/venvs/localllm/bin/localllm")
    said = refusal(sandbox.run("--yes"))
    assert "belongs to another install (/opt/pipx" in said
    assert sandbox.command.is_symlink()


def test_a_second_run_updates_and_keeps_the_environment(tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path, Machine())
    assert sandbox.run("--yes").returncode == 0
    (sandbox.log / "calls").unlink()
    ended = sandbox.run("--yes")
    assert ended.returncode == 0, ended.stderr
    assert "Installed: 0.0.9; it is replaced" in ended.stdout
    assert "--force" not in sandbox.uv_call()


def test_another_build_of_pytorch_makes_the_environment_anew(tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path, gpu("580.65"))
    assert sandbox.run("--yes", "--cpu").returncode == 0
    (sandbox.log / "calls").unlink()
    assert sandbox.run("--yes").returncode == 0
    assert "--force" in sandbox.uv_call()


def test_uninstall_removes_what_install_made_and_nothing_else(tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path, Machine(), own_uv=None)
    sandbox.serve_uv()
    before = set(sandbox.home.rglob("*"))
    assert sandbox.run("--yes").returncode == 0
    (sandbox.installed / "chats.sqlite").write_text("a chat")
    ended = sandbox.run("--uninstall", "--yes")
    assert ended.returncode == 0, ended.stderr
    assert sandbox.calls()[-1] == "localllm uninstall --keep-data --yes"
    made = set(sandbox.home.rglob("*")) - before
    assert made == {sandbox.installed, sandbox.installed / "chats.sqlite"}
    assert "is not installed in" in refusal(sandbox.run("--uninstall", "--yes"))


# ---- where localllm comes from ---------------------------------------------------------------------------------------


def test_a_script_alone_asks_for_the_source_of_the_wheel(tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path, Machine())
    alone = Path(shutil.copy(INSTALL, tmp_path))
    said = refusal(sandbox.run("--yes", script=alone))
    assert "LOCALLLM_SOURCE=" in said
    assert sandbox.run("--yes", script=alone, LOCALLLM_SOURCE="https://example.org/wheels/").returncode == 0
    call = sandbox.uv_call()
    assert call.endswith(f"--find-links https://example.org/wheels localllm=={__version__}")
    assert "--constraints https://example.org/wheels/cpu.txt" in call


def test_a_source_that_is_not_a_folder_is_refused(tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path, Machine())
    assert "is not a folder" in refusal(sandbox.run("--yes", LOCALLLM_SOURCE=str(tmp_path / "nothing")))


def wheelhouse(folder: Path, **facts: str) -> Path:
    """A folder as packaging/wheelhouse makes it, with empty wheels."""
    folder.mkdir()
    facts = {"version": "0.2.0", "torch": "cpu", "python": "3.12", "platform": "Linux-x86_64"} | facts
    (folder / "wheelhouse.txt").write_text("".join(f"{name} {value}\n" for name, value in facts.items()))
    for name in ("localllm-0.2.0-py3-none-any.whl", f"uv-{UV_VERSION}-py3-none-any.whl", "lock.txt"):
        (folder / name).write_text("")
    return folder


def test_offline_uv_sees_only_the_folder(tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path, Machine())
    folder = wheelhouse(tmp_path / "wheels")
    ended = sandbox.run("--yes", "--offline", str(folder))
    assert ended.returncode == 0, ended.stderr
    assert "localllm 0.2.0 with PyTorch for CPUs: nothing to download" in ended.stdout
    call = sandbox.uv_call()
    assert f"--offline --no-index --find-links {folder} --python 3.12 --constraints {folder}/lock.txt" in call
    assert call.endswith("localllm==0.2.0")
    assert "--with" not in call
    assert sandbox.asked() == []


def damaged(folder: Path, name: str) -> None:
    next(folder.glob(f"{name}*")).unlink()


OFFLINE = {
    "CUDA 13 for an old driver": ({"torch": "cu130"}, "", "needs NVIDIA driver 580", "cu129"),
    "another platform": (
        {"platform": "Linux-aarch64"},
        "",
        "are for Linux-aarch64; this machine is Linux-x86_64",
        "--out",
    ),
    "uv's wheel is missing": ({}, "uv-", "was not copied whole", "copy it again"),
    "localllm's wheel is missing": ({}, "localllm-", "has no file localllm-0.2.0", "copy it again"),
    "no such Python": ({}, "python", "are for Python 3.12, which is not installed", "python3.12"),
}


@pytest.mark.parametrize("name", OFFLINE)
def test_a_folder_of_wheels_that_cannot_work_is_refused(name: str, tmp_path: Path) -> None:
    facts, missing, what, remedy = OFFLINE[name]
    sandbox = Sandbox(tmp_path, gpu("550.54"))
    folder = wheelhouse(tmp_path / "wheels", **facts)
    if missing == "python":
        (sandbox.log / "no-python").touch()
    elif missing:
        damaged(folder, missing)
    said = refusal(sandbox.run("--yes", "--offline", str(folder)))
    assert what in said
    assert remedy in said.partition("\nTry: ")[2]
    assert not sandbox.uv_call()


# ---- the files -------------------------------------------------------------------------------------------------------


def test_shellcheck_finds_nothing() -> None:
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed: apt-get install shellcheck")
    files = ["install.sh", "packaging/header.sh", "scripts/_venv.sh"]
    ended = subprocess.run(["shellcheck", *files], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout


def test_the_script_installs_the_version_of_its_clone() -> None:
    assert f"\nversion={__version__}\n" in INSTALL.read_text()


def test_the_locks_pin_everything_with_a_hash_but_pytorch() -> None:
    builds = runpy.run_path(str(ROOT / "packaging/make_lock"))["BUILDS"]
    assert [path.stem for path in sorted((ROOT / "packaging/lock").iterdir())] == sorted(builds)
    rest = set()
    for build, versions in builds.items():
        lines = (ROOT / f"packaging/lock/{build}.txt").read_text().splitlines()
        assert [line for line in lines if "==" in line and not line.endswith("\\")] == list(versions)
        rest.add("".join(line for line in lines if line not in versions))
    assert len(rest) == 1
    assert not re.search(r"(torch|triton|nvidia-c\w+)==", rest.pop())


def test_the_tritons_of_the_locks_are_within_the_bounds_of_the_extra() -> None:
    builds = runpy.run_path(str(ROOT / "packaging/make_lock"))["BUILDS"]
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["gpu"]
    bounds = Requirement(extra[0]).specifier
    pinned = {version.removeprefix("triton==") for versions in builds.values() for version in versions[1:]}
    assert pinned
    assert all(version in bounds for version in pinned)


# ---- scripts/up ------------------------------------------------------------------------------------------------------


CLONES = {  # name: machine, LOCALLLM_TORCH, what is said, what is asked for, where uv or pip looks, too
    "no GPU": (
        Machine(), "", "PyTorch (cpu) comes from https://download.pytorch.org/whl/cpu; with localllm's packages:",
        "torch==2.13.0+cpu", "/whl/cpu/torch/",
    ),
    "driver 580": (gpu("580.65"), "", "about 2.8 GB", "torch==2.13.0+cu130", "/whl/cu130/torch/"),
    "driver 550": (gpu("550.54"), "", "about 3.1 GB", "torch==2.13.0+cu129", "/whl/cu129/torch/"),
    "driver 470": (gpu("470.1"), "", "driver 470.1 is older than 525", "torch==2.13.0+cpu", "/whl/cpu/torch/"),
    "PyPI alone": (
        Machine(pages=PYPI_ALONE), "", "from PyPI; with localllm's packages: about 2.8 GB", "torch==2.13.0", "",
    ),
    "an own choice": (gpu("550.54"), "torch==2.9.1", "", "torch==2.9.1", ""),
}  # fmt: skip


def run_venv(sandbox: Sandbox, commands: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run functions of scripts/_venv.sh in a venv whose uv and pip only print their arguments."""
    sandbox.program("python", "echo 3.12")
    commands = (
        f"source scripts/_venv.sh; venv={sandbox.folder}/venv; mkdir -p $venv; ln -sfn {sandbox.bin} $venv/bin; "
        "make_venv() { :; }; find_uv() { :; }; "
        'uv_install() { echo "uv: $* from ${UV_FIND_LINKS:-}"; }; '
        f'pip_install() {{ echo "pip: $* from ${{PIP_FIND_LINKS:-}}"; }}; {commands}'
    )
    command = [shutil.which("bash") or "bash", "-euo", "pipefail", "-c", commands, str(ROOT / "scripts/up")]
    return subprocess.run(
        command, cwd=ROOT, env=sandbox.environ(**environ), capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("name", CLONES)
@pytest.mark.parametrize("installer", ["uv", "pip"])
def test_a_clone_gets_the_same_build_of_pytorch(installer: str, name: str, tmp_path: Path) -> None:
    machine, own, said, asked, page = CLONES[name]
    sandbox = Sandbox(tmp_path, machine)
    sandbox.program("cksum", "cat >/dev/null; echo 1 1")
    absent = "" if installer == "uv" else "find_uv() { false; }; "
    ended = run_venv(sandbox, f"{absent}has_torch() {{ false; }}; install_localllm dev", LOCALLLM_TORCH=own)
    assert ended.returncode == 0, ended.stderr
    assert said in ended.stdout
    [line] = [line for line in ended.stdout.splitlines() if line.startswith(("uv:", "pip:"))]
    extra = "dev" if asked.endswith("cpu") or not machine.gpu else "gpu,dev"
    options = "pip" if installer == "uv" else "--no-compile"
    assert line.startswith(f"{installer}: {options} {asked} --editable {ROOT}[{extra}] from ")
    assert line.endswith(page)


def test_a_clone_installs_with_pip_where_uv_fails(tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path, Machine())
    sandbox.program("cksum", "cat >/dev/null; echo 1 1")
    ended = run_venv(sandbox, "uv_install() { false; }; has_torch() { false; }; install_localllm")
    assert ended.returncode == 0, ended.stderr
    assert "uv did not install localllm; pip is tried.\npip: --no-compile torch==2.13.0+cpu " in ended.stdout


def test_uv_looks_where_pip_of_this_machine_looks(tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path, Machine())
    sandbox.program("cksum", "cat >/dev/null; echo 1 1")
    pip = {
        "PIP_INDEX_URL": "https://mirror.example/simple",
        "PIP_EXTRA_INDEX_URL": "https://extra.example/simple",
        "PIP_FIND_LINKS": str(tmp_path),
        "PIP_CERT": "/own/authority.pem",
    }
    shown = "UV_DEFAULT_INDEX UV_INDEX UV_FIND_LINKS UV_INDEX_STRATEGY SSL_CERT_FILE"
    ended = run_venv(
        sandbox,
        f"uv_install() {{ for name in {shown}; do echo $name ${{!name}}; done; }}; "
        "has_torch() { true; }; install_localllm",
        **pip,
    )
    assert ended.returncode == 0, ended.stderr
    for line in [
        "UV_DEFAULT_INDEX https://mirror.example/simple",
        "UV_INDEX https://extra.example/simple",
        f"UV_FIND_LINKS {tmp_path}",
        "UV_INDEX_STRATEGY unsafe-best-match",
        "SSL_CERT_FILE /own/authority.pem",
    ]:
        assert f"\n{line}\n" in ended.stdout


def test_a_torch_that_is_installed_stays(tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path, gpu("550.54"))
    ended = run_venv(sandbox, "has_torch() { true; }; find_torch; echo \"torch: '$torch', build: $build\"")
    assert ended.stdout == "torch: '', build: cu129\n"
    assert sandbox.asked() == []
