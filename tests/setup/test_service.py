"""`localllm service`: what it writes, what it tells systemctl or launchctl, and what it never touches."""

import os
import plistlib
import sys
from pathlib import Path

import pytest

from localllm.cli import main
from localllm.machine import systemd
from localllm.setup import launchd, service, units
from localllm.setup.service import unit_path
from localllm.setup.units import KEPT, MARK, SOCKET
from localllm.web.access.keys import add_key, keys_path

Capture = pytest.CaptureFixture[str]
SYSTEMCTL = """#!/bin/sh
echo "$@" >> {calls}
case "$*" in
  *restart*) exit ${{RESTART_CODE:-0}} ;;
  *show*) cat {state} ;;
  *is-active*) echo ${{SOCKET_STATE:-inactive}} ;;
esac
"""
FAILED = """LoadState=loaded
ActiveState=failed
SubState=failed
StatusText=
UnitFileState=enabled
MainPID=0
NRestarts=5
ExecMainStatus=7
"""


@pytest.fixture(autouse=True)
def own_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (*KEPT, "LOCALLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr(systemd, "BOOTED", tmp_path)
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
    verbs = ["daemon-reload", "reset-failed localllm.service", "enable localllm.service"]
    verbs.append("restart --no-block localllm.service")
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
    assert "systemctl was not found. So nothing was written." in err
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
    assert "systemctl --user restart --no-block localllm.service failed." in capsys.readouterr().err


# ---- the machine's service -------------------------------------------------------------------------------------------


@pytest.fixture
def system(calls: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of the machine's units, of a root user whose installation everybody may read."""
    monkeypatch.setattr(service, "SYSTEM_FOLDER", tmp_path / "system")
    monkeypatch.setattr(service, "KEY_FILE", tmp_path / "api-key")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(units, "why_unreadable", lambda path: "")
    return tmp_path / "system"


def test_the_machines_service_is_shown_before_it_is_written_and_removed_again(
    system: Path, calls: Path, capsys: Capture
) -> None:
    assert main(["service", "install", "--system", "--dry-run"]) == 0
    shown = capsys.readouterr()
    assert str(system) in shown.err
    assert not system.exists()
    assert main(["service", "install", "--system"]) == 0
    assert capsys.readouterr().out == (system / "localllm.service").read_text() == shown.out
    assert main(["service", "uninstall", "--system"]) == 0
    assert "stay in /var/lib/localllm" in capsys.readouterr().err
    assert not list(system.iterdir())
    assert "--user" not in calls.read_text()
    assert not unit_path().exists()


def test_only_root_may_write_it(system: Path, calls: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["service", "install", "--system"]) == 2
    assert 'Try: sudo "$(command -v localllm)" service install --system' in capsys.readouterr().err
    assert not system.exists()
    assert not calls.exists()


def test_it_needs_a_key_of_its_own_on_the_network(system: Path, capsys: Capture) -> None:
    add_key(keys_path(), "mine", "admin")  # root's own keys are not the service's
    assert main(["service", "install", "--system", "--host", "0.0.0.0"]) == 2
    assert "sudo install -D -m 600 /dev/stdin" in capsys.readouterr().err
    (system.parent / "api-key").write_text("sk-1\n")
    assert main(["service", "install", "--system", "--host", "0.0.0.0"]) == 0


def test_the_users_service_needs_a_key_on_the_network(
    calls: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("LOCALLLM_API_KEY", "sk-2")  # not written to the unit, so it does not count
    assert main(["service", "install", "--host", "0.0.0.0"]) == 2
    assert "Try: localllm keys add NAME" in capsys.readouterr().err
    add_key(keys_path(), "mine", "admin")
    assert main(["service", "install", "--host", "0.0.0.0"]) == 0
    assert "LOCALLLM_API_KEY was not written to the unit" in capsys.readouterr().err


def test_a_port_for_root_needs_the_socket(system: Path, capsys: Capture) -> None:
    assert main(["service", "install", "--system", "--port", "443"]) == 2
    assert "--port 443 needs --socket." in capsys.readouterr().err
    assert main(["service", "install", "--system", "--port", "443", "--socket"]) == 0
    assert "ListenStream=127.0.0.1:443\n" in (system / SOCKET).read_text()


@pytest.mark.parametrize("closed", ["folder", "file"])
def test_files_that_another_user_cannot_read_are_named(tmp_path: Path, closed: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").touch()
    for path in (*reversed(tmp_path.relative_to("/tmp").parents), tmp_path.relative_to("/tmp")):
        (Path("/tmp") / path).chmod(0o755)
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        assert "of its own, which is empty" in units.why_unreadable(folder / "file")
        patch.setattr(units, "PRIVATE", ())
        assert units.why_unreadable(folder / "file") == ""
        (folder if closed == "folder" else folder / "file").chmod(0o600)
        assert closed in units.why_unreadable(folder / "file").split(" is closed")[0].rsplit("/", 1)[1]


# ---- the socket ------------------------------------------------------------------------------------------------------


def test_a_socket_listens_instead_of_the_service_until_it_is_installed_without(
    calls: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    assert main(["service", "install", "demo"]) == 0
    assert main(["service", "install", "demo", "--socket", "--exit-when-idle", "30m", "--port", "9000"]) == 0
    assert "ListenStream=127.0.0.1:9000\n" in unit_path(SOCKET).read_text()
    assert "--port" not in unit_path().read_text()
    told = calls.read_text().splitlines()
    assert told[-4:] == [
        f"--user {each}"
        for each in (
            "stop localllm.socket localllm.service", "disable localllm.service", "enable localllm.socket",
            "restart --no-block localllm.socket",
        )
    ]  # fmt: skip
    assert main(["service", "status"]) == 3
    monkeypatch.setenv("SOCKET_STATE", "active")
    capsys.readouterr()
    assert main(["service", "status"]) == 0
    assert "a request starts the server" in capsys.readouterr().out
    assert main(["service", "install", "demo"]) == 0
    assert not unit_path(SOCKET).exists()
    assert "--user disable --now localllm.socket" in calls.read_text()
    assert main(["service", "uninstall"]) == 0
    assert not list(unit_path().parent.iterdir())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["install", "--exit-when-idle", "30m"], "--exit-when-idle needs --socket."),
        (["install", "--socket", "--port", "0"], "--socket needs a fixed port."),
        (["install", "--socket", "--host", "my.home", "--allowed-hosts", "x"], "--socket cannot listen on 'my.home'."),
        (["install", "--socket", "--exit-when-idle", "0"], "--exit-when-idle 0.0 is out of range."),
        (["status", "--socket"], "localllm service status does not accept --socket."),
    ],
)
def test_what_a_socket_cannot_do_is_refused(calls: Path, capsys: Capture, words: list[str], said: str) -> None:
    add_key(keys_path(), "mine", "admin")
    assert main(["service", *words]) == 2
    assert said in capsys.readouterr().err
    assert not calls.exists()


# ---- machines without systemd ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("on_wsl", "said"),
    [(True, "systemd=true into /etc/wsl.conf"), (False, "systemd does not manage this machine")],
)
def test_without_systemd_nothing_is_written_and_wsl_is_told_how_to_turn_it_on(
    calls: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture, on_wsl: bool, said: str
) -> None:
    monkeypatch.setattr(systemd, "BOOTED", tmp_path / "none")
    for module in (systemd, service):
        monkeypatch.setattr(module, "is_wsl", lambda: on_wsl)
    assert main(["service", "install", "demo"]) == 1
    assert said in capsys.readouterr().err
    assert not unit_path().exists()
    assert not calls.exists()
    main(["service", "status"])
    assert ("systemd is off in this WSL" in capsys.readouterr().out) == on_wsl


LAUNCHCTL = """#!/bin/sh
echo "$@" >> {calls}
[ "$1" != bootout ]
"""


def test_macos_gets_an_agent_of_launchd(
    calls: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", "/a & b")
    (tmp_path / "bin" / "launchctl").write_text(LAUNCHCTL.format(calls=calls))
    (tmp_path / "bin" / "launchctl").chmod(0o755)
    assert main(["service", "install", "org/name", "--port", "9000", "--print"]) == 0
    shown = capsys.readouterr().out
    assert not calls.exists()
    assert main(["service", "install", "org/name", "--port", "9000"]) == 0
    assert launchd.plist_path().read_text() == shown
    agent = plistlib.loads(shown.encode())
    assert agent["ProgramArguments"][-4:] == ["serve", "org/name", "--port", "9000"]
    assert agent["EnvironmentVariables"]["HF_HOME"] == "/a & b"
    assert agent["KeepAlive"] == {"SuccessfulExit": False}
    assert main(["service", "uninstall"]) == 0
    assert not launchd.plist_path().exists()
    domain = f"gui/{os.getuid()}"
    path = launchd.plist_path()
    lines = [f"bootout {domain}/localllm", f"bootstrap {domain} {path}", f"bootout {domain}/localllm"]
    assert calls.read_text().splitlines() == lines
    launchd.plist_path().write_text("<plist/>")
    for action in ("install", "uninstall"):
        assert main(["service", action]) == 2
        assert "was not written by localllm." in capsys.readouterr().err
    for words in (["--system"], ["--socket"], ["--exit-when-idle", "5m"]):
        assert main(["service", "install", "--print", *words]) == 2
        assert words[0] in capsys.readouterr().err


def test_windows_is_refused_with_the_command_of_its_scheduler(
    calls: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert main(["service", "install", "demo"]) == 2
    assert "schtasks /Create /SC ONLOGON" in capsys.readouterr().err
    assert not calls.exists()
