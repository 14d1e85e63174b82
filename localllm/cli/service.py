"""`localllm service install|uninstall|status`: a server that systemd starts with the user's session and restarts.

Does not know: the text of the unit (unit.py).
"""

from __future__ import annotations

import argparse
import getpass
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from localllm.cli.flags import FLAGS, settings_from
from localllm.cli.tell import print_table
from localllm.cli.unit import MARK, unit_text
from localllm.errors import ConfigError, LocalLLMError
from localllm.files.folders import config_home

NAME = "localllm.service"
EXIT_CODES = {
    2: "a flag or a setting is wrong; the service is not restarted",
    4: "the model does not fit",
    5: "the model was not found, could not be downloaded, or is damaged",
    6: "the port is in use",
    7: "the GPU was lost",
}
SHOWN = ("LoadState", "ActiveState", "SubState", "UnitFileState", "MainPID", "NRestarts", "ExecMainStatus")


class ServiceError(LocalLLMError):
    """systemctl failed."""

    code = "service_error"


def service(options: argparse.Namespace) -> int:
    if options.action != "install":
        given = [spec.flag for spec in FLAGS if getattr(options, spec.name) is not None]
        given += ["MODEL"] * bool(options.model) + ["--print"] * options.print
        if given:
            why = "There is only one service, and its unit defines what it runs."
            raise ConfigError(f"localllm service {options.action} does not accept {given[0]}.", why)
    if options.json and options.action != "status":
        raise ConfigError(f"localllm service {options.action} has no --json.", "Only status has it.")
    return {"install": _install, "uninstall": _uninstall, "status": _status}[options.action](options)


def unit_path() -> Path:
    """Return $XDG_CONFIG_HOME/systemd/user/localllm.service."""
    return config_home() / "systemd" / "user" / NAME


def _install(options: argparse.Namespace) -> int:
    """Write the unit, enable it, and start or restart it."""
    settings_from(options)  # reports wrong settings now, not when the service starts
    text, path = unit_text(options), unit_path()
    if options.print:
        print(text, end="")
        return 0
    if not shutil.which("systemctl"):
        print(text, end="")
        _say(f"systemctl was not found, so nothing was written. With systemd, the unit belongs in {path}.")
        return 1
    _require_ours(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    print(text, end="")
    _say(f"Written to {path}.")
    _systemctl("daemon-reload")
    _systemctl("reset-failed", NAME, must=False)  # a unit that failed too often would not start
    _systemctl("enable", NAME)
    _systemctl("restart", NAME)
    _say("Started; it starts with each session. See localllm service status and localllm logs.")
    if not _lingers():
        _say("To start it at boot and keep it running after you log out: loginctl enable-linger")
    if os.environ.get("LOCALLLM_API_KEY"):
        _say("LOCALLLM_API_KEY was not written to the unit: create keys with localllm keys add NAME.")
    return 0


def _uninstall(options: argparse.Namespace) -> int:
    path = unit_path()
    if not path.exists():
        _say(f"There is no {path}.")
        return 0
    _require_ours(path)
    if shutil.which("systemctl"):
        _systemctl("disable", "--now", NAME)
    path.unlink()
    if shutil.which("systemctl"):
        _systemctl("daemon-reload")
    _say(f"Stopped and removed {path}.")
    return 0


def _require_ours(path: Path) -> None:
    if path.exists() and MARK not in path.read_text():
        why = f"Its first line is not {MARK!r}."
        raise ConfigError(f"{path} was not written by localllm.", why, "localllm service install --print")


def _status(options: argparse.Namespace) -> int:
    """Print the service's state. Return 0 if it runs, else 3, like systemctl."""
    path = unit_path()
    facts = {"unit": str(path), "installed": path.exists()}
    state = _properties() if path.exists() and shutil.which("systemctl") else {}
    runs = state.get("ActiveState") == "active"
    if options.json:
        print(json.dumps({**facts, **state}, indent=2))
        return 0 if runs else 3
    rows = [("unit", str(path) if path.exists() else f"none at {path}; localllm service install writes one")]
    if state:
        rows += [
            ("state", f"{state['ActiveState']} ({state['SubState']})"),
            ("starts automatically", "yes" if state["UnitFileState"] == "enabled" else "no"),
            ("restarts", state["NRestarts"]),
        ]
        code = int(state["ExecMainStatus"] or 0)
        if runs:
            rows.append(("process", state["MainPID"]))
        elif code:
            rows.append(("last exit code", f"{code}: {EXIT_CODES.get(code, 'the log says why')}"))
        rows.append(("log", "localllm logs"))
        if not _lingers():
            rows.append(("when you log out", "it stops; loginctl enable-linger keeps it running"))
    elif path.exists():
        rows.append(("state", "unknown: systemctl was not found"))
    print_table(rows)
    return 0 if runs else 3


def _properties() -> dict[str, str]:
    told = _systemctl("show", NAME, *(f"--property={name}" for name in SHOWN))
    found = dict(line.split("=", 1) for line in told.splitlines() if "=" in line)
    return {name: found.get(name, "") for name in SHOWN}


def _systemctl(*words: str, must: bool = True) -> str:
    """Run systemctl and return its output. Raises `ServiceError` with its message."""
    done = subprocess.run(["systemctl", "--user", *words], capture_output=True, text=True)
    if done.returncode and must:
        what = f"systemctl --user {' '.join(words)} failed."
        raise ServiceError(what, done.stderr.strip(), "the same in a session of your own, not under sudo or su")
    return done.stdout


def _lingers() -> bool:
    """Return whether this user's services keep running without a session."""
    return (Path("/var/lib/systemd/linger") / getpass.getuser()).exists()


def _say(text: str) -> None:
    print(text, file=sys.stderr)
