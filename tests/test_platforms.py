"""What macOS and Windows lack is replaced: each gate is tried with the platform's name, as far as it can be here."""

import ast
import asyncio
import logging
import os
import signal
import socket
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from localllm.cli import doctor_files, doctor_machine
from localllm.files import folders
from localllm.logs.log_file import LogFile
from localllm.machine import hardware, platforms, processes
from localllm.machine.platforms import promise_of
from localllm.machine.running_servers import announced, is_running, running_servers
from localllm.models.formats.gguf.checkpoint import open_gguf
from localllm.models.loader import load_model
from localllm.models.read_spec import read_spec
from scripts.layout import PACKAGE, ROOT
from tests.gguf_files import write_gguf

HIDDEN = """
import sys, asyncio, litestar, psutil, uvicorn, filelock
sys.modules.update(dict.fromkeys({names!r}))
sys.path.insert(0, {root!r})
"""
"""Each import of a module whose entry is None raises ImportError. Other packages have their own gates."""
POSIX_ONLY = ("uvloop", "resource", "fcntl", "pwd", "grp", "termios")


def run_without(names: tuple[str, ...], program: str) -> str:
    code = HIDDEN.format(names=names, root=str(ROOT)) + program
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


# ---- the server ------------------------------------------------------------------------------------------------------


def test_the_server_is_imported_without_what_only_posix_has() -> None:
    run_without(POSIX_ONLY, "import localllm.up, localllm.web.pages, localllm.cli.announce, localllm.web.app")


def test_without_uvloop_asyncio_serves() -> None:
    program = "from localllm.machine.platforms import new_event_loop\nprint(type(new_event_loop()).__module__)"
    assert run_without(("uvloop",), program).startswith("asyncio")
    assert run_without((), program) == "uvloop"


def test_without_resource_there_is_no_limit_of_files() -> None:
    program = (
        "from localllm.machine.platforms import most_open_files, raise_file_limit\n"
        "raise_file_limit(10)\nprint(most_open_files())"
    )
    assert run_without(("resource",), program) == "None"


@pytest.mark.parametrize("has_add_signal_handler", [True, False])
def test_signals_reach_the_event_loop_and_are_restored(has_add_signal_handler: bool) -> None:
    async def main() -> list[int]:
        loop, came, seen = asyncio.get_running_loop(), asyncio.Event(), []
        if not has_add_signal_handler:  # as on Windows

            def refuse(*_: object) -> None:
                raise NotImplementedError

            loop.add_signal_handler = refuse  # type: ignore[assignment]
        with platforms.handled_signals(lambda: (seen.append(1), came.set())):
            for number in (signal.SIGINT, signal.SIGTERM):
                came.clear()
                signal.raise_signal(number)
                await asyncio.wait_for(came.wait(), 20)
        return seen

    before = [signal.getsignal(number) for number in platforms.SIGNALS]
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        assert runner.run(main()) == [1, 1]
    assert [signal.getsignal(number) for number in platforms.SIGNALS] == before


def test_a_port_is_shared_with_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "SO_EXCLUSIVEADDRUSE", -5, raising=False)
    asked: list[tuple[int, ...]] = []
    fake: Any = SimpleNamespace(setsockopt=lambda *option: asked.append(option))
    for system in ("win32", "darwin", "linux"):
        monkeypatch.setattr(sys, "platform", system)
        platforms.use_port_alone(fake)
    reuse = (socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    assert asked == [(socket.SOL_SOCKET, -5, 1), reuse, reuse]


def test_no_process_is_asked_for_with_signal_0() -> None:
    """On Windows `os.kill(pid, 0)` sends CTRL_C_EVENT, which would end the server that `localllm ps` looks for."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "os.kill":
                assert ast.unparse(node.args[1]).startswith("signal."), f"{path}:{node.lineno}"


def test_a_process_is_found_by_psutil_where_there_is_no_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    from localllm.machine import running_servers as module

    monkeypatch.setattr(module, "Path", lambda *_: Path("/nowhere"))
    since = module.began(os.getpid())
    assert is_running(os.getpid(), since)
    assert not is_running(os.getpid(), since + 1)
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    assert not is_running(ended.pid, since)


def test_a_server_is_found_without_a_runtime_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    with announced("http://127.0.0.1:4711", "tiny"):
        assert [server.url for server in running_servers()] == ["http://127.0.0.1:4711"]
        assert stat.S_IMODE((tmp_path / "localllm" / "run").stat().st_mode) == 0o700


def test_only_linux_ends_a_child_with_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(processes.ctypes, "CDLL", lambda *_: pytest.fail("macOS has no prctl"))
    processes.end_with_parent(1)


# ---- folders and files -----------------------------------------------------------------------------------------------

MAC = ("Library/Application Support/localllm", "Library/Application Support/localllm", "Library/Caches/localllm")
WINDOWS = ("AppData/Local/localllm", "AppData/Local/localllm", "AppData/Local/localllm/Cache")
LINUX = (".config/localllm", ".local/share/localllm", ".cache/localllm")


def folders_now(home: Path) -> tuple[str, ...]:
    found = (folders.config_folder(), folders.data_folder(), folders.cache_folder())
    return tuple(path.relative_to(home).as_posix() for path in found)


@pytest.mark.parametrize(("system", "expected"), [("linux", LINUX), ("darwin", MAC), ("win32", WINDOWS)])
def test_folders_are_where_the_platform_has_them(
    system: str, expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import platformdirs.windows

    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platformdirs.windows, "get_win_folder", lambda name: str(tmp_path / "AppData" / "Local"))
    monkeypatch.setenv("HOME", str(tmp_path))
    for variable in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    assert folders_now(tmp_path) == expected
    for folder in LINUX:  # of an older version
        (tmp_path / folder).mkdir(parents=True)
    assert folders_now(tmp_path) == LINUX
    for variable in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    assert folders_now(tmp_path) == tuple(
        f"{variable}/localllm" for variable in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME")
    )


def test_a_log_that_cannot_be_renamed_is_continued_on_windows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "The process cannot access the file because it is being used by another process")

    path = tmp_path / "server-1.log"
    monkeypatch.setattr(os, "rename", refuse)
    monkeypatch.setattr(sys, "platform", "win32")
    with closing(LogFile(path)) as log:
        log.maxBytes = 10
        for number in range(3):
            log.handle(logging.makeLogRecord({"msg": f"line {number} of the log"}))
    assert path.read_text().splitlines() == [f"line {number} of the log" for number in range(3)]


def test_doctor_says_that_windows_ignores_modes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    (tmp_path / "localllm").mkdir(mode=0o755)
    (tmp_path / "localllm").chmod(0o755)
    [found] = doctor_files.check_data_folder()
    assert "chmod" in found.remedy
    monkeypatch.setattr(sys, "platform", "win32")
    [found] = doctor_files.check_data_folder()
    assert (found.verdict, "chmod" in found.remedy) == ("note", False)
    assert "access list" in found.text


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/maps is Linux's")
@pytest.mark.parametrize("block_type", ["F32", "Q8_0"])
def test_the_file_of_a_loaded_model_is_not_mapped(block_type: str, tmp_path: Path, tiny_llama_path: Path) -> None:
    """Windows does not delete a mapped file: `localllm rm` would fail while a model is loaded, and afterwards."""
    path = tmp_path / "mapped.gguf"
    write_gguf(tiny_llama_path, path, block_type)
    with open_gguf(path) as checkpoint:
        view = checkpoint.tensor("output_norm.weight")
        assert str(path) in Path("/proc/self/maps").read_text()
    del view
    model = load_model(path, read_spec(path), torch.device("cpu"), torch.float32, max_model_len=64)
    assert model is not None
    assert str(path) not in Path("/proc/self/maps").read_text()


# ---- what is told ----------------------------------------------------------------------------------------------------


def test_the_processor_of_a_mac_has_the_name_that_macos_shows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "sysctl"
    program.write_text('#!/bin/sh\n[ "$*" = "-n machdep.cpu.brand_string" ] && echo Apple M2 Pro\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert hardware._read_cpu_name(tmp_path / "missing") != "Apple M2 Pro"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert hardware._read_cpu_name(tmp_path / "missing") == "Apple M2 Pro"
    program.unlink()
    assert hardware._read_cpu_name(tmp_path / "missing")


@pytest.mark.parametrize(
    ("system", "machine", "is_full", "words"),
    [
        ("linux", "x86_64", True, ["NVIDIA"]),
        ("linux", "aarch64", True, ["aarch64"]),
        ("linux", "riscv64", False, ["riscv64", "untested"]),
        ("darwin", "arm64", False, ["Apple silicon", "CPU only"]),
        ("darwin", "x86_64", False, ["Intel", "unsupported"]),
        ("win32", "AMD64", False, ["CPU only", "wsl --install"]),
        ("freebsd14", "amd64", False, ["untested"]),
    ],
)
def test_doctor_names_the_platforms_promise(
    system: str, machine: str, is_full: bool, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    promise = promise_of(system, machine)
    assert promise.is_full == is_full
    assert not [word for word in words if word not in f"{promise.text} {promise.remedy}"]
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platforms.platform, "machine", lambda: machine)
    [told] = [finding for finding in doctor_machine.check_python() if finding.subject == "platform"]
    assert (told.text, told.remedy, told.verdict) == (promise.text, promise.remedy, "ok" if is_full else "note")
