"""`localllm service install|uninstall|status`: a server that systemd or launchd starts and restarts.

systemd's service belongs to this user, and starts with the user's session; with --system it belongs to the machine, and
runs as a user of its own. With --socket systemd listens, and the first request starts the server.
Does not know: the texts of the units (units.py), launchd (launchd.py).
"""

from __future__ import annotations

import argparse
import getpass
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from localllm.config.flags import FLAGS, add_server_flags, settings_from
from localllm.config.settings import ServerConfig, Settings
from localllm.errors import ConfigError, LocalLLMError
from localllm.files.folders import config_home
from localllm.machine import systemd
from localllm.machine.platforms import is_wsl
from localllm.machine.running_servers import running_servers
from localllm.setup.units import (
    KEY_FILE,
    MARK,
    SERVICE,
    SOCKET,
    kept_environment,
    leave_out,
    require_readable,
    unit_texts,
)
from localllm.terminal import print_table, say

NAME = SERVICE
SYSTEM_FOLDER = Path("/etc/systemd/system")
EXIT_CODES = {
    2: "a flag or a setting is wrong; the service is not restarted",
    4: "the model does not fit",
    5: "the model was not found, could not be downloaded, or is damaged",
    6: "the port is in use",
    7: "the GPU was lost",
}
SHOWN = ("LoadState", "ActiveState", "SubState", "StatusText", "UnitFileState", "MainPID", "NRestarts")
LAST_CODE = "ExecMainStatus"
FIRST_PRIVILEGED, FIRST_FREE = 1, 1024
"""Ports that only root may bind: from the first of these up to the second."""


class ServiceError(LocalLLMError):
    """systemctl or launchctl failed."""

    code = "service_error"


def service_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", choices=("install", "uninstall", "status"), nargs="?", default="status", help="without it: status"
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="the model to serve, as for `localllm serve`")
    help = "only print the unit; write and start nothing"
    parser.add_argument("--print", "--dry-run", action="store_true", help=help)
    help = "the machine's service, with a user of its own, instead of this user's; needs root"
    parser.add_argument("--system", action="store_true", help=help)
    help = "let systemd listen on the address, and start the server with the first request"
    parser.add_argument("--socket", action="store_true", help=help)
    add_server_flags(parser, json="with status: print JSON")


def service(options: argparse.Namespace) -> int:
    _refuse_what_has_no_effect(options)
    if sys.platform == "win32":
        what, why = "localllm service is not supported on Windows.", "It needs systemd or launchd; WSL2 has systemd."
        hint = f'schtasks /Create /SC ONLOGON /TN localllm /TR "{sys.executable} -m localllm serve"'
        raise ConfigError(what, why, hint)
    if sys.platform == "darwin":
        from localllm.setup import launchd

        return launchd.service(options)
    return {"install": _install, "uninstall": _uninstall, "status": _status}[options.action](options)


def unit_path(name: str = SERVICE, *, is_system: bool = False) -> Path:
    """Return $XDG_CONFIG_HOME/systemd/user/NAME, or /etc/systemd/system/NAME."""
    return Systemd(is_system).folder / name


@dataclass(frozen=True, slots=True)
class Systemd:
    """The user's own systemd, or the machine's."""

    is_system: bool

    @property
    def folder(self) -> Path:
        return SYSTEM_FOLDER if self.is_system else config_home() / "systemd" / "user"

    def run(self, *words: str, must: bool = True) -> str:
        """Run systemctl and return its output. Raises `ServiceError` with its message."""
        command = ["systemctl", *([] if self.is_system else ["--user"]), *words]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode and must:
            hint = "" if self.is_system else "the same in a session of your own, not under sudo or su"
            raise ServiceError(f"{' '.join(command)} failed.", done.stderr.strip(), systemd.why_not_running() or hint)
        return done.stdout

    def require_rights(self, action: str) -> None:
        """Raise unless this user may change the units."""
        if self.is_system and os.geteuid() != 0:
            what, why = f"Only root may change {self.folder}.", "--system is for a service of the whole machine."
            raise ConfigError(what, why, f'sudo "$(command -v localllm)" service {action} --system')

    def installed(self) -> list[str]:
        """Return the names of our units that exist. Raises `ConfigError` for one that is not ours."""
        names = [name for name in (SOCKET, SERVICE) if (self.folder / name).exists()]
        self.require_ours(names)
        return names

    def require_ours(self, names: Iterable[str]) -> None:
        for path in (self.folder / name for name in names):
            if path.exists() and MARK not in path.read_text():
                why, flag = f"Its first line is not {MARK!r}.", " --system" if self.is_system else ""
                raise ConfigError(
                    f"{path} was not written by localllm.", why, f"localllm service install{flag} --print"
                )


# ---- install ---------------------------------------------------------------------------------------------------------


def _install(options: argparse.Namespace) -> int:
    """Write the units, enable them, and start or restart them."""
    manager = Systemd(options.system)
    settings = _settings(options)  # reports wrong settings now, not when the service starts
    texts = unit_texts(options, settings.server)
    if options.print:
        print("\n".join(texts.values()), end="")
        say(f"Nothing was written. The units belong in {manager.folder}: {', '.join(texts)}.")
        return 0
    why_not = systemd.why_not_running() if shutil.which("systemctl") else "systemctl was not found."
    if why_not:
        print("\n".join(texts.values()), end="")
        say(
            f"{why_not} So nothing was written. With systemd, the units belong in {manager.folder}: {', '.join(texts)}."
        )
        return 1
    manager.require_rights(options.action)
    manager.require_ours(texts)
    print("\n".join(texts.values()), end="", flush=True)
    _remove(manager, [name for name in manager.installed() if name not in texts])
    manager.folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (manager.folder / name).write_text(text)
        say(f"Written to {manager.folder / name}.")
    _start(manager, options, settings.server)
    return 0


def _settings(options: argparse.Namespace) -> Settings:
    """Return the settings that the service will have. Raises `ConfigError` for those that cannot work."""
    environ = {**kept_environment(leave_out(options)), "XDG_CONFIG_HOME": "/etc"} if options.system else None
    settings = settings_from(options, environ)
    _require_key(settings, is_system=options.system)
    if options.system:
        require_readable(options)
        if not options.socket and FIRST_PRIVILEGED <= settings.server.port < FIRST_FREE:
            why = f"Port {settings.server.port} is for root, and the service runs as a user of its own."
            raise ConfigError(f"--port {settings.server.port} needs --socket.", why, "--socket: systemd listens on it")
    if settings.server.exit_when_idle is not None and not options.socket:
        why = "Nothing would start the server again after it has ended."
        raise ConfigError("--exit-when-idle needs --socket.", why, "localllm service install --socket ...")
    return settings


def _require_key(settings: Settings, *, is_system: bool) -> None:
    """Raise if the service would refuse to start, because it listens on the network and has no key."""
    from localllm.web.access.keys import keys_path, read_keys

    server = settings.server
    if server.is_loopback or (server.api_keys and settings.source("api_key") == "file"):
        return
    what = f"The service would refuse to listen on {server.host} without a key."
    if is_system and not KEY_FILE.exists():
        why = f"{KEY_FILE} does not exist. systemd passes this file to the service (LoadCredential=)."
        hint = f"openssl rand -hex 32 | sudo install -D -m 600 /dev/stdin {KEY_FILE}"
        raise ConfigError(what, why, hint, param="host")
    if not is_system and not read_keys(keys_path()):
        raise ConfigError(what, f"There is no key in {keys_path()}.", "localllm keys add NAME", param="host")


def _start(manager: Systemd, options: argparse.Namespace, server: ServerConfig) -> None:
    started = SOCKET if options.socket else SERVICE
    manager.run("daemon-reload")
    manager.run("reset-failed", *([SOCKET, SERVICE] if options.socket else [SERVICE]), must=False)
    if options.socket:
        manager.run("stop", SOCKET, SERVICE, must=False)  # a server that runs has the address
        manager.run("disable", SERVICE, must=False)  # otherwise it would start with the session, before a request
    manager.run("enable", started)
    manager.run("restart", "--no-block", started)  # a service is started when its model has loaded
    flag = " --system" if options.system else ""
    if options.socket:
        say(f"systemd listens on {server.host}:{server.port}; the first request starts the server.")
        if server.exit_when_idle is None:
            say("It then runs until it is stopped; --exit-when-idle 30m ends it when it is not used.")
    else:
        say(f"Started; it starts with {'the machine' if options.system else 'each session'}.")
    as_root = 'sudo "$(command -v localllm)"' if options.system else "localllm"
    say(f"To manage it in a browser, open the one-time link that this prints: {as_root} link")
    say(f"See localllm service status{flag} and {'journalctl -u localllm' if options.system else 'localllm logs'}.")
    if not options.system and not _lingers():
        say("To start it at boot and keep it running after you log out: loginctl enable-linger")
    if os.environ.get("LOCALLLM_API_KEY"):
        where = f"write it to {KEY_FILE}, mode 600" if options.system else "create keys with localllm keys add NAME"
        say(f"LOCALLLM_API_KEY was not written to the unit: {where}.")


# ---- uninstall and status --------------------------------------------------------------------------------------------


def _uninstall(options: argparse.Namespace) -> int:
    manager = Systemd(options.system)
    names = manager.installed()
    if not names:
        say(f"There is no {manager.folder / SERVICE}.")
        return 0
    manager.require_rights(options.action)
    _remove(manager, names)
    if options.system:
        say("Models, chats and settings stay in /var/lib/localllm, /var/cache/localllm and /etc/localllm.")
    return 0


def _remove(manager: Systemd, names: list[str]) -> None:
    """Stop and delete units."""
    if not names:
        return
    if shutil.which("systemctl"):
        manager.run("disable", "--now", *names)
    for name in names:
        (manager.folder / name).unlink()
    if shutil.which("systemctl"):
        manager.run("daemon-reload")
    say(f"Stopped and removed {', '.join(str(manager.folder / name) for name in names)}.")


def _status(options: argparse.Namespace) -> int:
    """Print the service's state. Return 0 if it runs or its socket listens, else 3, like systemctl."""
    manager = Systemd(options.system)
    path, flag = manager.folder / SERVICE, " --system" if options.system else ""
    facts = {"unit": str(path), "installed": path.exists()}
    asks = path.exists() and bool(shutil.which("systemctl"))
    state = _properties(manager) if asks else {}
    has_socket = asks and (manager.folder / SOCKET).exists()
    listens = has_socket and manager.run("is-active", SOCKET, must=False).strip() == "active"
    answers = state.get("ActiveState") == "active" or listens
    if options.json:
        print(json.dumps({**facts, **state, **({"socket": "listening"} if listens else {})}, indent=2))
        return 0 if answers else 3
    rows = [("unit", str(path) if path.exists() else f"none at {path}; localllm service install{flag} writes one")]
    if listens:
        rows.append(("socket", "systemd listens; a request starts the server"))
    if state:
        rows += _state_rows(state, is_system=options.system)
    elif path.exists():
        rows.append(("state", "unknown: systemctl was not found"))
    if is_wsl():
        rows.append(("WSL", systemd.why_not_running() or "systemd is on"))
    print_table(rows)
    return 0 if answers else 3


def _state_rows(state: dict[str, str], *, is_system: bool) -> list[tuple[str, str]]:
    rows = [("state", f"{state['ActiveState']} ({state['SubState']})")]
    if state["StatusText"]:
        rows.append(("says", state["StatusText"]))
    automatic = {"enabled": "yes", "indirect": "no, its socket starts it"}
    rows += [
        ("starts automatically", automatic.get(state["UnitFileState"], "no")),
        ("restarts", state["NRestarts"]),
    ]
    code = int(state[LAST_CODE] or 0)
    if state["ActiveState"] in ("active", "activating") and state["MainPID"] != "0":
        rows.append(("process", state["MainPID"]))
    elif code:
        rows.append(("last exit code", f"{code}: {EXIT_CODES.get(code, 'the log says why')}"))
    rows.append(("log", "journalctl -u localllm" if is_system else "localllm logs"))
    if not is_system and not _lingers():
        rows.append(("when you log out", "it stops; loginctl enable-linger keeps it running"))
    return rows


def _properties(manager: Systemd) -> dict[str, str]:
    names = (*SHOWN, LAST_CODE)
    told = manager.run("show", SERVICE, *(f"--property={name}" for name in names))
    found = dict(line.split("=", 1) for line in told.splitlines() if "=" in line)
    return {name: found.get(name, "") for name in names}


def _lingers() -> bool:
    """Return whether this user's services keep running without a session."""
    return (Path("/var/lib/systemd/linger") / getpass.getuser()).exists()


def _refuse_what_has_no_effect(options: argparse.Namespace) -> None:
    if options.action != "install":
        given = [spec.flag for spec in FLAGS if getattr(options, spec.name) is not None]
        given += ["MODEL"] * bool(options.model) + ["--print"] * options.print + ["--socket"] * options.socket
        if given:
            why = "There is only one service, and its unit defines what it runs."
            raise ConfigError(f"localllm service {options.action} does not accept {given[0]}.", why)
    if options.json and options.action != "status":
        raise ConfigError(f"localllm service {options.action} has no --json.", "Only status has it.")


# ---- servers that use this install -----------------------------------------------------------------------------------


def refuse_servers(verb: str, allowed: Collection[int] = ()) -> None:
    """Refuse a verb while servers of this user, or the machine's service, run. allowed: processes that may run."""
    services, why = running_services(), "It uses the files of this environment."
    for server in running_servers():
        if server.pid not in allowed:
            what = f"A server runs: {server.url} ({server.model}), process {server.pid}."
            hint = f"Ctrl-C in its terminal, or: kill {server.pid}"
            service = services.get(server.pid)
            raise ConfigError(what, why, hint if service is None else _how_to_stop(service, verb))
    for pid, manager in services.items():
        if pid not in allowed:
            raise ConfigError(f"The service runs, process {pid}.", why, _how_to_stop(manager, verb))


def running_services() -> dict[int, Systemd]:
    """Return the managers whose localllm service runs, by the service's process."""
    found = {}
    for manager in (Systemd(is_system=False), Systemd(is_system=True)):
        if shutil.which("systemctl") and (manager.folder / SERVICE).exists():
            told = re.search(r"MainPID=(\d+)", manager.run("show", SERVICE, "--property=MainPID", must=False))
            if told and told[1] != "0":
                found[int(told[1])] = manager
    return found


def _how_to_stop(manager: Systemd, verb: str) -> str:
    restart = "localllm update --restart, or: " if verb == "update" else ""
    return f"{restart}{'sudo systemctl' if manager.is_system else 'systemctl --user'} stop {SERVICE}"


def restart_services(services: Iterable[Systemd]) -> None:
    """Restart services after an update."""
    for manager in services:
        manager.run("restart", SERVICE)
        print("The service was restarted.")
