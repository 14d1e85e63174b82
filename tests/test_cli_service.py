"""`localllm service`: the unit that it writes, what it tells systemctl, and what it never touches."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from localllm.cli import main, parse, unit
from localllm.cli.flags import settings_from
from localllm.cli.service import unit_path
from localllm.cli.unit import MARK, unit_text

Capture = pytest.CaptureFixture[str]
SYSTEMCTL = """#!/bin/sh
echo "$@" >> {calls}
case "$*" in
  *restart*) exit ${{RESTART_CODE:-0}} ;;
  *show*) cat {state} ;;
esac
"""
FAILED = """LoadState=loaded
ActiveState=failed
SubState=failed
UnitFileState=enabled
MainPID=0
NRestarts=5
ExecMainStatus=7
"""


@pytest.fixture(autouse=True)
def own_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in unit.KEPT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """What was told to a systemctl that does nothing but listen."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (tmp_path / "state").write_text(FAILED)
    (folder / "systemctl").write_text(SYSTEMCTL.format(calls=tmp_path / "calls", state=tmp_path / "state"))
    (folder / "systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return tmp_path / "calls"


def command(text: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith("ExecStart=")]
    return [word.replace("%%", "%").replace("$$", "$") for word in shlex.split(line.removeprefix("ExecStart="))]


# ---- the unit --------------------------------------------------------------------------------------------------------


def test_the_command_in_the_unit_means_what_was_typed(tmp_path: Path) -> None:
    (tmp_path / "my model").mkdir()
    (tmp_path / "cert.pem").write_text("")
    typed = [
        "my model", "--port", "9000", "--no-ui", "--alias", "a,b", "--alias", "c$d 100%", "--lora-modules", "x=./x",
        "y=./y", "--kv-cache-dtype", "int8", "--max-model-len", "8K", "--enforce-eager", "--ssl-certfile", "cert.pem",
    ]  # fmt: skip
    words = command(unit_text(parse(["service", "install", *typed])))
    assert words[:5] == [sys.executable, "-P", "-m", "localllm", "serve"]
    assert words[5] == str(tmp_path / "my model")
    assert f"x={tmp_path}/x" in words
    assert str(tmp_path / "cert.pem") in words
    asked, kept = settings_from(parse(["serve", *typed])), settings_from(parse(words[4:]))
    for part in ("port", "ui", "served_model_name"):
        assert getattr(asked.server, part) == getattr(kept.server, part)
    for part in ("kv_cache_dtype", "max_model_len", "enforce_eager", "max_num_seqs"):
        assert getattr(asked.engine, part) == getattr(kept.engine, part)


def test_a_repository_stays_a_name() -> None:
    assert command(unit_text(parse(["service", "install", "org/name:Q4_K_M"])))[5] == "org/name:Q4_K_M"


def test_what_decides_how_it_runs_is_kept_of_the_environment_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {
        "HF_HOME": "/my $5 100% models",
        "LOCALLLM_PORT": "9",
        "HF_TOKEN": "hf_s",
        "LOCALLLM_API_KEY": "sk-s",
        "X": "1",
    }
    text = unit_text(parse(["service", "install"]), environ)
    kept = [line for line in text.splitlines() if line.startswith("Environment=")]
    assert kept == ['Environment="HF_HOME=/my $5 100%% models"', "Environment=LOCALLLM_PORT=9"]


def test_a_lost_gpu_starts_it_anew_and_a_wrong_setting_does_not() -> None:
    lines = unit_text(parse(["service", "install"])).splitlines()
    assert {"Restart=on-failure", "RestartForceExitStatus=7", "RestartPreventExitStatus=2"} <= set(lines)


def test_nothing_keeps_the_gpu_driver_from_its_setuid_helper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(unit, "NVIDIA", tmp_path)
    settings = [line for line in unit_text(parse(["service", "install"])).splitlines() if not line.startswith("#")]
    implies = ("NoNewPrivileges", "Restrict", "Private", "Protect", "SystemCall", "Lock", "MemoryDeny", "Device")
    assert not [line for line in settings if line.startswith(implies)]
    monkeypatch.setattr(unit, "NVIDIA", tmp_path / "none")
    assert "NoNewPrivileges=yes" in unit_text(parse(["service", "install"]))


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
@pytest.mark.parametrize("driver", [True, False])
def test_systemd_finds_nothing_wrong_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, driver: bool) -> None:
    monkeypatch.setattr(unit, "NVIDIA", tmp_path if driver else tmp_path / "none")
    monkeypatch.setenv("HF_HOME", "/my %models")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = tmp_path / "localllm.service"
    text = unit_text(parse(["service", "install", "org/na$me", "--alias", 'odd "name" \\ 100%']))

    def complaints(text: str) -> str:
        path.write_text(text)
        return subprocess.run(["systemd-analyze", "--user", "verify", str(path)], capture_output=True, text=True).stderr

    assert "localllm.service" in complaints(text.replace("on-failure", "sometimes"))
    assert "localllm.service" not in complaints(text)


# ---- the verb --------------------------------------------------------------------------------------------------------


def test_print_writes_nothing(calls: Path, capsys: Capture) -> None:
    assert main(["service", "install", "demo", "--print"]) == 0
    assert capsys.readouterr().out.startswith(MARK)
    assert not unit_path().exists()
    assert not calls.exists()


def test_install_shows_writes_and_starts_it_and_uninstall_takes_it_away(calls: Path, capsys: Capture) -> None:
    assert main(["service", "install", "demo", "--port", "9000"]) == 0
    out, err = capsys.readouterr()
    assert unit_path().read_text() == out
    assert "loginctl enable-linger" in err
    assert main(["service", "install", "demo"]) == 0  # anew
    assert main(["service", "uninstall"]) == 0
    assert not unit_path().exists()
    verbs = ["daemon-reload", "reset-failed localllm.service", "enable localllm.service", "restart localllm.service"]
    started = [f"--user {verb}" for verb in verbs]
    ended = ["--user disable --now localllm.service", "--user daemon-reload"]
    assert calls.read_text().splitlines() == started * 2 + ended


def test_status_tells_why_it_does_not_run(calls: Path, capsys: Capture) -> None:
    assert main(["service", "status"]) == 3
    assert "localllm service install" in capsys.readouterr().out
    assert main(["service", "install"]) == 0
    capsys.readouterr()
    assert main(["service"]) == 3
    assert "7: the GPU was lost" in capsys.readouterr().out
    (calls.parent / "state").write_text(FAILED.replace("failed", "active").replace("PID=0", "PID=42"))
    assert main(["service", "status", "--json"]) == 0
    assert '"MainPID": "42"' in capsys.readouterr().out


def test_without_systemctl_the_unit_is_shown_and_nothing_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["service", "install", "demo"]) == 1
    out, err = capsys.readouterr()
    assert out.startswith(MARK)
    assert "systemctl was not found, so nothing was written." in err
    assert not unit_path().exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["install", "--api-key", "k"], "A key must not be in a unit."),
        (["install", "--port", "99999"], "--port 99999 is out of range."),
        (["install", "a\nb"], "cannot be in a unit."),
        (["status", "demo"], "localllm service status does not accept MODEL."),
        (["uninstall", "--print"], "localllm service uninstall does not accept --print."),
        (["--port", "9000"], "localllm service status does not accept --port."),
        (["install", "--json"], "localllm service install has no --json."),
        (["begin"], "Argument action: invalid choice"),
    ],
)
def test_refusals_write_nothing(calls: Path, capsys: Capture, words: list[str], said: str) -> None:
    assert main(["service", *words]) == 2
    assert said in capsys.readouterr().err
    assert not unit_path().exists()
    assert not calls.exists()


def test_a_unit_of_somebody_else_is_left_alone(calls: Path, capsys: Capture) -> None:
    unit_path().parent.mkdir(parents=True)
    unit_path().write_text("[Service]\n")
    for action in ("install", "uninstall"):
        assert main(["service", action]) == 2
        assert "was not written by localllm." in capsys.readouterr().err
    assert unit_path().read_text() == "[Service]\n"


def test_what_systemctl_refuses_is_told(calls: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("RESTART_CODE", "5")
    assert main(["service", "install"]) == 1
    assert "systemctl --user restart localllm.service failed." in capsys.readouterr().err
