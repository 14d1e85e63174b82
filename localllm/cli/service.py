"""`localllm service install|uninstall|status`: a server that starts with the user's session and comes back by itself.

Does not know: what stands in the unit (unit.py).
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

from localllm.cli.flags import SERVER_GROUPS, settings_from
from localllm.cli.tell import print_table
from localllm.cli.unit import MARK, unit_text
from localllm.errors import ConfigError, LocalLLMError
from localllm.folders import config_home

NAME = "localllm.service"
EXIT_CODES = {
    2: "a flag or a setting is wrong; it is not tried again",
    4: "the model does not fit",
    5: "the model was not found, could not be fetched, or is damaged",
    6: "the port is taken",
    7: "the GPU was lost",
}
SHOWN = ("LoadState", "ActiveState", "SubState", "UnitFileState", "MainPID", "NRestarts", "ExecMainStatus")


class ServiceError(LocalLLMError):
    """systemctl said no."""

    code = "service_error"


def service(options: argparse.Namespace) -> int:
    if options.action != "install":
        given = [
            flag.spelling for _, flags in SERVER_GROUPS for flag in flags if getattr(options, flag.name) is not None
        ]
        given += ["MODEL"] * bool(options.model) + ["--print"] * options.print
        if given:
            why = "There is one service, and its unit says what it runs."
            raise ConfigError(f"localllm service {options.action} takes no {given[0]}.", why)
    if options.json and options.action != "status":
        raise ConfigError(f"localllm service {options.action} has no --json.", "Only status does.")
    return {"install": _install, "uninstall": _uninstall, "status": _status}[options.action](options)


def unit_path() -> Path:
    """$XDG_CONFIG_HOME/systemd/user/localllm.service"""
    return config_home() / "systemd" / "user" / NAME


def _install(options: argparse.Namespace) -> int:
    """Write the unit, enable it, and start it, or start it anew."""
    settings_from(options)  # refuses now what the service would be refused later
    text, path = unit_text(options), unit_path()
    if options.print:
        print(text, end="")
        return 0
    if not shutil.which("systemctl"):
        print(text, end="")
        _say(f"There is no systemctl here: nothing was written. With systemd the unit belongs into {path}.")
        return 1
    _require_ours(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    print(text, end="")
    _say(f"Written to {path}.")
    _systemctl("daemon-reload")
    _systemctl("reset-failed", NAME, must=False)  # one that failed too often would not start
    _systemctl("enable", NAME)
    _systemctl("restart", NAME)
    _say("Started, as it will be with each session. localllm service status and localllm logs tell how it fares.")
    if not _lingers():
        _say("To start it with the machine, and keep it when you log out: loginctl enable-linger")
    if os.environ.get("LOCALLLM_API_KEY"):
        _say("LOCALLLM_API_KEY was not written into the unit: give out keys with localllm keys add NAME.")
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
    _say(f"Stopped, and {path} removed.")
    return 0


def _require_ours(path: Path) -> None:
    if path.exists() and MARK not in path.read_text():
        why = f"Its first line is not {MARK!r}."
        raise ConfigError(f"{path} is not localllm's.", why, "localllm service install --print")


def _status(options: argparse.Namespace) -> int:
    """0: it runs; 3, as systemctl says it: it does not."""
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
            ("starts by itself", "yes" if state["UnitFileState"] == "enabled" else "no"),
            ("restarts", state["NRestarts"]),
        ]
        code = int(state["ExecMainStatus"] or 0)
        if runs:
            rows.append(("process", state["MainPID"]))
        elif code:
            rows.append(("last exit code", f"{code}: {EXIT_CODES.get(code, 'the log says why')}"))
        rows.append(("log", "localllm logs"))
        if not _lingers():
            rows.append(("when you log out", "it stops; loginctl enable-linger keeps it"))
    elif path.exists():
        rows.append(("state", "unknown: there is no systemctl here"))
    print_table(rows)
    return 0 if runs else 3


def _properties() -> dict[str, str]:
    told = _systemctl("show", NAME, *(f"--property={name}" for name in SHOWN))
    found = dict(line.split("=", 1) for line in told.splitlines() if "=" in line)
    return {name: found.get(name, "") for name in SHOWN}


def _systemctl(*words: str, must: bool = True) -> str:
    """What it printed. Raises `ServiceError` in its words."""
    done = subprocess.run(["systemctl", "--user", *words], capture_output=True, text=True)
    if done.returncode and must:
        what = f"systemctl --user {' '.join(words)} failed."
        raise ServiceError(what, done.stderr.strip(), "the same in a session of your own, not under sudo or su")
    return done.stdout


def _lingers() -> bool:
    """Whether this user's services run without a session."""
    return (Path("/var/lib/systemd/linger") / getpass.getuser()).exists()


def _say(text: str) -> None:
    print(text, file=sys.stderr)
