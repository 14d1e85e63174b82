"""`localllm service` on macOS: a launchd agent, which starts with the user's login and is started again if it fails.

Does not know: systemd (service.py). launchd has no counterpart of --system with a user of its own, and a socket that
launchd opens is passed by a library of macOS; both are refused.
"""

from __future__ import annotations

import argparse
import json
import os
import plistlib
import subprocess
from pathlib import Path
from typing import Any

from localllm.config.flags import settings_from
from localllm.errors import ConfigError, LocalLLMError, UnsupportedOption
from localllm.logs.log_file import log_path
from localllm.setup.units import STOP_S, kept_environment, service_command
from localllm.terminal import print_table, say

LABEL = "localllm"
MARK = "<!-- Written by `localllm service install`. Running it again overwrites this file. -->"
MIN_RESTART_S = 30


def service(options: argparse.Namespace) -> int:
    for flag in ("system", "socket"):
        if getattr(options, flag):
            what = f"--{flag} is not supported on macOS."
            raise UnsupportedOption(what, "It needs systemd.", f"leave --{flag} out", param=flag)
    return {"install": _install, "uninstall": _uninstall, "status": _status}[options.action](options)


def plist_path() -> Path:
    return Path("~/Library/LaunchAgents").expanduser() / f"{LABEL}.plist"


def plist_text(options: argparse.Namespace) -> str:
    """Return the agent's property list. Raises `ConfigError` for values that must not be in it."""
    settings = settings_from(options)
    if settings.server.exit_when_idle is not None:
        why = "Nothing would start the server again after it has ended."
        raise ConfigError("--exit-when-idle is not supported for a service on macOS.", why, "leave it out")
    output = str(log_path(settings.server.port).with_name("service.log"))
    facts: dict[str, Any] = {
        "Label": LABEL,
        "ProgramArguments": service_command(options),
        "EnvironmentVariables": kept_environment(),
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": MIN_RESTART_S,
        "ExitTimeOut": STOP_S,
        "ProcessType": "Interactive",  # otherwise macOS slows it down in the background
        "Umask": 0o077,
        "SoftResourceLimits": {"NumberOfFiles": 65536},
        "StandardErrorPath": output,
    }
    head, separator, body = plistlib.dumps(facts, sort_keys=False).decode().partition("<plist")
    return f"{head}{MARK}\n{separator}{body}"


def _install(options: argparse.Namespace) -> int:
    text, path = plist_text(options), plist_path()
    if options.print:
        print(text, end="")
        return 0
    _require_ours(path)
    print(text, end="", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    say(f"Written to {path}.")
    _launchctl("bootout", f"{_domain()}/{LABEL}", must=False)
    _launchctl("bootstrap", _domain(), str(path))
    say("Started; it starts with each login. See localllm service status and localllm logs.")
    if os.environ.get("LOCALLLM_API_KEY"):
        say("LOCALLLM_API_KEY was not written to the agent: create keys with localllm keys add NAME.")
    return 0


def _uninstall(options: argparse.Namespace) -> int:
    path = plist_path()
    if not path.exists():
        say(f"There is no {path}.")
        return 0
    _require_ours(path)
    _launchctl("bootout", f"{_domain()}/{LABEL}", must=False)
    path.unlink()
    say(f"Stopped and removed {path}.")
    return 0


def _status(options: argparse.Namespace) -> int:
    path = plist_path()
    is_loaded = path.exists() and bool(_launchctl("print", f"{_domain()}/{LABEL}", must=False))
    if options.json:
        print(json.dumps({"agent": str(path), "installed": path.exists(), "loaded": is_loaded}, indent=2))
    else:
        place = str(path) if path.exists() else f"none at {path}; localllm service install writes one"
        print_table([("agent", place), ("state", "loaded" if is_loaded else "not loaded"), ("log", "localllm logs")])
    return 0 if is_loaded else 3


def _require_ours(path: Path) -> None:
    if path.exists() and MARK not in path.read_text():
        raise ConfigError(f"{path} was not written by localllm.", "", "localllm service install --print")


def _domain() -> str:
    return f"gui/{os.getuid()}"


def _launchctl(*words: str, must: bool = True) -> str:
    """Run launchctl and return its output, empty if it failed. Raises `LocalLLMError` with its message."""
    done = subprocess.run(["launchctl", *words], capture_output=True, text=True)
    if done.returncode and must:
        raise LocalLLMError(
            f"launchctl {' '.join(words)} failed.", done.stderr.strip(), "the same at the Mac's own screen"
        )
    return "" if done.returncode else done.stdout
