"""How this server is restarted, in words: by the service manager that runs it, or at the terminal.

The page does not restart the server itself. A process that replaces itself would lose the socket that systemd passed,
and systemd's watchdog would end it while it loads a large model.
Does not know: pages, settings.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from localllm.machine.install_kind import InstallKind, install_kind
from localllm.web.pages.settings.views import Restart

CGROUP = Path("/proc/self/cgroup")
AT_A_TERMINAL = "Stop the server with Ctrl+C where it runs, and start it again with the same command."
AS_SERVICE = "This server is a service. Restart it on its machine:"


def how_to_restart() -> Restart:
    """Return what to do, and the command if one is enough."""
    if "NOTIFY_SOCKET" in os.environ and (unit := _unit()):
        manager = "systemctl --user" if "/user@" in _cgroup() else "sudo systemctl"
        return Restart(AS_SERVICE, f"{manager} restart {shlex.quote(unit)}")
    job = os.environ.get("XPC_SERVICE_NAME", "")
    if sys.platform == "darwin" and job.startswith("localllm"):
        return Restart(AS_SERVICE, f"launchctl kickstart -k gui/{os.getuid()}/{shlex.quote(job)}")
    if install_kind() is InstallKind.CONTAINER:
        return Restart("This server runs in a container. Restart the container:", "docker restart CONTAINER")
    return Restart(AT_A_TERMINAL)


def _unit() -> str:
    """Return the unit of systemd that this process belongs to; empty if it is in none."""
    name = _cgroup().strip().rpartition("/")[2]
    return name if name.endswith(".service") else ""


def _cgroup() -> str:
    try:
        return CGROUP.read_text()
    except OSError:
        return ""
