"""`localllm doctor`: what it says of machines that are not this one, and what it does not import or contact."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from localllm.cli import doctor, doctor_files, doctor_machine, main, suggestion
from localllm.cli.doctor import brief_lines, next_command
from localllm.cli.doctor_files import check_crash, disk_of_models
from localllm.cli.doctor_machine import gpu_access, wsl_memory
from localllm.cli.findings import Finding
from localllm.config.resolve import resolve
from localllm.kernels.checks.choose import FallBack, KernelChoice
from localllm.kernels.checks.record import VariantFailure
from localllm.kernels.checks.table import TABLE
from localllm.logs.log_file import log_folder
from localllm.machine import hardware
from localllm.machine.gpu_support import NvidiaFacts, judge_driver
from localllm.machine.hardware import Hardware, Speeds
from localllm.machine.platforms import is_on_windows_drive, is_wsl
from localllm.machine.running_servers import announced, listener_in_words
from localllm.mcp import servers
from localllm.runner import self_check

GIB = 1024**3
WSL2 = "Linux version 5.15.153.1-microsoft-standard-WSL2 (root@941d701f84f1) (gcc (GCC) 11.2.0)"
DEBIAN = "Linux version 6.1.0-18-amd64 (debian-kernel@lists.debian.org)"


@pytest.fixture(autouse=True)
def _own_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for kind in ("CONFIG", "DATA", "CACHE"):
        monkeypatch.setenv(f"XDG_{kind}_HOME", str(tmp_path / kind.lower()))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


# ---- what fits -------------------------------------------------------------------------------------------------------


def small_machine(monkeypatch: pytest.MonkeyPatch, ram_gib: float = 8, bandwidth: float | None = 3e10) -> None:
    small = Hardware((), "CPU", 4, int(ram_gib * GIB), int(0.7 * ram_gib * GIB))
    monkeypatch.setattr(suggestion, "read_hardware", lambda: small)
    monkeypatch.setattr(suggestion, "memory_bandwidth", lambda hardware: bandwidth)
    kept = replace(small, speeds=Speeds(None, None, 3e11, 1e11))
    monkeypatch.setattr(suggestion, "with_kept_speeds", lambda hardware: kept)


def test_the_models_that_fit_come_with_size_speed_context_and_command(monkeypatch: pytest.MonkeyPatch) -> None:
    small_machine(monkeypatch)
    bandwidth, *fits = suggestion.check_fit()
    assert bandwidth.text.startswith("30 GB/s")
    assert len(fits) == 3
    for each in fits:
        assert " to download · " in each.text
        assert " tokens/s · " in each.text
        assert each.text.endswith(" tokens of context")
        assert each.remedy.startswith("localllm up ")
    assert next_command([bandwidth, *fits]) == fits[0].remedy


def test_without_a_bandwidth_no_speed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    small_machine(monkeypatch, bandwidth=None)
    findings = list(suggestion.check_fit())
    assert {each.subject for each in findings} == {"fits"}
    assert "tokens/s" not in findings[0].text


def test_a_speech_model_is_suggested_where_it_fits_and_none_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    small_machine(monkeypatch, ram_gib=16)
    [finding] = suggestion.check_speech()
    assert "Parakeet" in finding.text
    assert re.search(
        r"2.3 GiB to download, license cc-by-4.0; about [\d.]+ times real time; .* on the CPU$", finding.text
    )
    small_machine(monkeypatch, ram_gib=16, bandwidth=None)
    assert [each.text.endswith("cc-by-4.0") for each in suggestion.check_speech()] == [True], "an unknown speed"
    assert finding.remedy.startswith("localllm pull nvidia/parakeet-tdt-0.6b-v3")
    small_machine(monkeypatch, ram_gib=2)
    [finding] = suggestion.check_speech()
    assert "Whisper base" in finding.text
    small_machine(monkeypatch, ram_gib=1)
    assert list(suggestion.check_speech()) == []
    small_machine(monkeypatch, ram_gib=16)
    monkeypatch.setenv("LOCALLLM_SPEECH_MODEL", "none")
    assert list(suggestion.check_speech()) == []


def test_a_machine_without_room_gets_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    small_machine(monkeypatch, ram_gib=0.8)
    findings = list(suggestion.check_fit())
    assert [(each.subject, each.verdict) for each in findings][-1] == ("fits", "note")
    assert next_command(findings) == "localllm up"


def test_an_old_list_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "config" / "localllm"
    folder.mkdir(parents=True)
    (folder / "mine.toml").write_text("date = 2026-01-01\n")
    (folder / "config.toml").write_text('[picks]\nfile = "mine.toml"\n')
    assert resolve({}).picks is not None
    assert list(suggestion.old_list(date(2026, 12, 31))) == []
    [finding] = suggestion.old_list(date(2027, 3, 1))
    assert "mine.toml is 14 months old" in finding.text


def test_brief_is_what_an_installer_shows() -> None:
    findings = [
        Finding("python", "ok", "Python 3.12"),
        Finding("cpu", "ok", "A CPU, 4 cores"),
        Finding("memory", "ok", "5.0 GiB of 8.0 GiB available"),
        Finding("disk", "note", "little"),
        Finding("gpu", "problem", "The driver is old.", "Update the driver."),
        Finding("fits", "ok", "Name: 2 GiB to download", "localllm up org/name"),
        Finding("fits", "ok", "Other: 1 GiB to download", "localllm up org/other"),
    ]
    assert list(brief_lines(findings)) == [
        "Problem: The driver is old.",
        "  Try: Update the driver.",
        "This machine: A CPU, 4 cores; 5.0 GiB of 8.0 GiB available",
        "A model that fits: Name: 2 GiB to download",
        "Next: localllm up org/name",
    ]
    gpu = Finding("gpu 0", "ok", "RTX 3060, 11 GiB of 12 GiB free")
    assert list(brief_lines([gpu, *findings[:3]])) == [
        "This machine: RTX 3060, 11 GiB of 12 GiB free",
        "Next: localllm up",
    ]


# ---- the machine -----------------------------------------------------------------------------------------------------


def test_without_a_gpu_torch_is_not_imported(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from localllm.machine import hardware\n"
        "hardware.GPU_DEVICES = ()\n"
        "from localllm.cli import doctor_machine, main\n"
        "doctor_machine.GPU_DEVICES = ()\n"
        "main(['doctor', '--json'])\n"
        "print(sorted({'torch', 'transformers', 'triton'} & set(sys.modules)), file=sys.stderr)"
    )
    environ = os.environ | {"HF_HOME": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environ)
    assert ended.stderr.strip() == "[]"
    found = {each["subject"] for each in json.loads(ended.stdout)}
    assert {"installed as", "instructions", "cpu library", "gpu", "fits"} <= found
    assert "hub" not in found  # only with --network


def test_a_driver_makes_torch_worth_asking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(hardware.platform, "system", lambda: "Linux")
    monkeypatch.setattr(hardware, "GPU_DEVICES", (str(tmp_path / "nvidiactl"),))
    assert not hardware.may_have_gpu()
    (tmp_path / "nvidiactl").touch()
    assert hardware.may_have_gpu()


@pytest.mark.parametrize(
    ("flags", "verdict", "words"),
    [
        ({"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "abm", "avx512f", "avx512_vnni", "amx_tile"}, "ok",
         "AVX2, AVX-512, VNNI, AMX"),
        ({"avx", "sse4_2"}, "note", "needs AVX2"),
        (set(), "ok", "unknown"),
    ],
)  # fmt: skip
def test_the_instructions_that_matter_are_named(flags: set[str], verdict: str, words: str) -> None:
    finding = doctor_machine._instructions(flags, "x86_64")
    assert finding.verdict == verdict
    assert words in finding.text


@pytest.mark.parametrize(
    ("usable", "there", "words"),
    [(4, 4, "4 cores"), (1, 1, "1 core"), (2, 16, "2 of 16 cores may be used (container or affinity)")],
)
def test_cores_that_a_container_allows_are_counted(
    usable: int, there: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_machine.psutil, "cpu_count", lambda logical: there)
    assert doctor_machine._cores(usable) == words


H200 = (("NVIDIA H200", (9, 0)),)


@pytest.mark.parametrize(
    ("nvidia", "words", "remedy"),
    [
        (NvidiaFacts("580.65", (13, 0), H200), "runs builds for CUDA up to 13.0.", "torch"),
        (NvidiaFacts("550.54", (12, 4), H200), "up to 12.4, and not those for CUDA 13.", "torch"),
        (NvidiaFacts("470.82", (11, 4), H200), "torch needs driver 525.60.13", "Update the driver"),
        (NvidiaFacts(None, None, ()), "no NVIDIA GPU, or no driver", "nvidia-smi"),
        (NvidiaFacts("550.54", (12, 4), ()), "sees no GPU", "--gpus all"),
    ],
)
def test_before_torch_is_there_the_driver_says_which_build_it_runs(
    nvidia: NvidiaFacts, words: str, remedy: str
) -> None:
    [problem] = judge_driver(nvidia)
    assert words in problem.what
    assert remedy in problem.remedy


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may open anything")
def test_a_device_of_another_group_is_named(tmp_path: Path) -> None:
    (tmp_path / "kfd").touch(0o000)
    [finding] = gpu_access((str(tmp_path / "kfd"), str(tmp_path / "absent")))
    assert (tmp_path / "kfd").group() in finding.remedy


def test_a_device_that_may_be_opened_is_no_finding(tmp_path: Path) -> None:
    (tmp_path / "kfd").touch()
    assert list(gpu_access((str(tmp_path / "kfd"),))) == []


def test_a_device_without_access_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As another user than root sees it, also where tests run as root."""
    (tmp_path / "kfd").touch()
    monkeypatch.setattr(doctor_machine.os, "access", lambda path, mode: False)
    monkeypatch.setattr(doctor_machine, "_group_of", lambda path: "render")
    [finding] = gpu_access((str(tmp_path / "kfd"),))
    assert finding.verdict == "problem"
    assert finding.remedy == "sudo usermod -aG render $USER, then log in again"


# ---- WSL2 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "is_so"), [(WSL2, True), (DEBIAN, False), ("", False)])
def test_wsl_is_known_by_its_kernel(text: str, is_so: bool, tmp_path: Path) -> None:
    (tmp_path / "version").write_text(text)
    assert is_wsl(tmp_path / "version") == is_so
    found = list(wsl_memory(int(7.7 * GIB), tmp_path / "version"))
    assert [each.subject for each in found] == ["WSL2"] * is_so
    if is_so:
        assert "7.7 GiB" in found[0].text
        assert ".wslconfig" in found[0].remedy
    assert not is_wsl(tmp_path / "absent")


@pytest.mark.parametrize(
    ("path", "is_so"), [("/mnt/c/models", True), ("/mnt/d", True), ("/mnt/data/x", False), ("/home/c", False)]
)
def test_drives_of_windows(path: str, is_so: bool) -> None:
    assert is_on_windows_drive(Path(path)) == is_so
    found = [each.subject for each in disk_of_models(Path(path), is_in_wsl=True)]
    assert ("WSL2" in found) == is_so
    assert "WSL2" not in [each.subject for each in disk_of_models(Path(path), is_in_wsl=False)]


# ---- ports, logs, network --------------------------------------------------------------------------------------------


def test_a_port_held_by_this_users_server_names_it() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
        with announced(f"http://127.0.0.1:{port}", "my-model"):
            said = listener_in_words(port)
        assert said == f"It is yours: localllm (pid {os.getpid()}) serves my-model at http://127.0.0.1:{port}."
        assert f"pid {os.getpid()}" in listener_in_words(port)  # no server of ours: the program


def test_doctor_says_whose_the_port_is(tmp_path: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
        folder = tmp_path / "config" / "localllm"
        folder.mkdir(parents=True)
        (folder / "config.toml").write_text(f"port = {port}\n")
        with announced(f"http://127.0.0.1:{port}", "my-model"):
            finding = list(doctor_files.check_settings())[-1]
    assert finding.verdict == "note"
    assert f"localllm (pid {os.getpid()}) serves my-model" in finding.text
    assert f"--port {port + 1}" in finding.remedy


def test_configured_servers_of_tools_need_their_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = tmp_path / "localllm"
    folder.mkdir()
    (folder / "config.toml").write_text('[mcp.servers.time]\ncommand = "uvx"\n')
    found = [each for each in doctor_files.check_settings() if each.subject == "tools"]
    assert [(each.verdict, each.text) for each in found] == [("ok", "MCP servers: time")]
    monkeypatch.setattr(servers, "find_spec", lambda name: None)
    [missing] = [each for each in doctor_files.check_settings() if each.subject == "tools"]
    assert missing.verdict == "problem"
    assert "need the package mcp" in missing.text
    assert "Configured servers: time." in missing.text
    assert "[mcp]" in missing.remedy
    (folder / "config.toml").write_text("")
    assert [each for each in doctor_files.check_settings() if each.subject == "tools"] == []


def test_the_last_crash_is_reported_for_a_month() -> None:
    assert list(check_crash()) == []
    log_folder().mkdir(parents=True)
    (log_folder() / "faults-8000.log").write_text("\n2026-01-01 thread x: ValueError\n")
    assert list(check_crash()) == []  # an exception that was handled ends no server
    for name, what, age_s in (
        ("faults-8000.log.1", "Segmentation fault", 7200),
        ("faults-9000.log", "Aborted", 86_400),
    ):
        path = log_folder() / name
        path.write_text(f"Fatal Python error: {what}\n\nCurrent thread 0x1 (most recent call first):\n")
        os.utime(path, (time.time() - age_s,) * 2)
    [finding] = check_crash()
    assert "120 min 0 s ago: Fatal Python error: Segmentation fault" in finding.text.replace("2 h 0 min", "120 min 0 s")
    assert "faults-8000.log.1" in finding.remedy
    for path in log_folder().glob("faults*"):
        os.utime(path, (time.time() - 40 * 86_400,) * 2)
    assert list(check_crash()) == []


def test_offline_the_hub_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HTTPS_PROXY", "http://me:secret@proxy:3128")
    findings = {each.subject: each for each in doctor_files.check_network()}
    assert "proxy:3128" in findings["proxy"].text
    assert "secret" not in findings["proxy"].text
    assert findings["hub"].verdict == "note"


@pytest.mark.parametrize("words", [["doctor"], ["doctor", "--brief"], ["doctor", "--report"], ["doctor", "--json"]])
def test_the_network_is_asked_only_when_told_to(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def check_network() -> object:
        asked.append("network")
        return iter([Finding("hub", "ok", "answered")])

    monkeypatch.setattr(doctor, "check_network", check_network)
    monkeypatch.setattr(doctor, "CHECKS", (doctor.check_python,))
    assert main(words) == 0
    assert asked == []
    assert main([*words, "--network"]) == 0
    assert asked == ["network"]
    capsys.readouterr()


def test_kernels_that_fell_back_at_an_earlier_start_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = next(kernel for kernel in TABLE if kernel.name == "decode attention")
    failure = VariantFailure(decode.name, "TMA", "a case", "the error was 0.7 (limit 0.004)")
    fallen = FallBack(decode.name, decode.variants[1], (failure,))
    monkeypatch.setattr(doctor_machine, "_has_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(self_check, "known_choice", lambda *_, **__: KernelChoice(fall_backs=(fallen,)))
    monkeypatch.setattr(self_check, "read_record", lambda _: SimpleNamespace(passed=["a", "b"], seconds=1.6))
    told, checked = doctor_machine.check_recorded()
    assert told.text.startswith("decode attention: pointers (TMA: the error was 0.7 (limit 0.004))")
    assert "2 comparisons with PyTorch passed on this GPU, in 1.6 s" in checked.text
