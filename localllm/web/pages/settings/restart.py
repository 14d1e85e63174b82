"""Restart the server from the settings page, or say how: by the service manager that runs it, or at the terminal.

`up.up` puts `app.state.restart` there if this process may replace itself (machine/processes.py).
Does not know: how a process is replaced, settings.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shlex
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from litestar import Request, get, post
from litestar.response import Redirect, Response, Stream

from localllm.errors import RequestError
from localllm.machine.install_kind import InstallKind, install_kind
from localllm.web.pages.frame.live import live_stream, sse
from localllm.web.pages.frame.state import html, pages_state
from localllm.web.pages.frame.views import Shell, View, view


@view("settings/_restart.html")
class Restart(View):
    """The next step after a change of the file: a restart, by the page or by hand."""

    what: str  # what to do; empty: the page offers it
    command: str = ""  # to be typed on the server's machine; empty: a command alone does not do it


@view("settings/restarting.html")
class RestartingPage(View):
    """Shown until the server has restarted."""

    shell: Shell


log = logging.getLogger(__name__)
CGROUP = Path("/proc/self/cgroup")

PROCESS = secrets.token_hex(4)
"""Tells this process from the one that replaces it, which has the same id."""

AT_A_TERMINAL = "Stop the server with Ctrl+C where it runs, and start it again with the same command."
AS_SERVICE = "This server is a service. Restart it on its machine:"


class CannotRestart(RequestError):
    """This process may not replace itself."""

    status, code = 409, "cannot_restart"


@post("/settings/restart", status_code=303, request_max_body_size=100_000, sync_to_thread=False)
def restart_server(request: Request[Any, Any, Any]) -> Redirect:
    """Stop as after Ctrl+C, and start again."""
    start_again = _restart_of(request)
    if start_again is None:
        way = _in_words()
        raise CannotRestart("This server cannot restart itself.", way.what, way.command)
    log.info("restart asked client=%s", request.client.host if request.client else "-")
    # The answer to this request goes out first: a server that stops closes its idle connections.
    asyncio.get_running_loop().call_soon(start_again)
    return Redirect(f"/settings/restarting?from={PROCESS}", status_code=303)


@get("/settings/restarting", sync_to_thread=False)
def restarting_page(request: Request[Any, Any, Any]) -> Response[Any]:
    """Wait for the process that replaces this one; that one shows the settings."""
    if request.query_params.get("from") != PROCESS:
        return Redirect("/settings", status_code=303)
    shell = pages_state(request).shell(
        request, "Restarting", "settings", f"/settings/live/restart?from={PROCESS}", moves=True
    )
    return html(RestartingPage(shell))


@get("/settings/live/restart", sync_to_thread=False)
def live_restart(request: Request[Any, Any, Any]) -> Stream:
    """Tell the page to reload, from the process that replaced this one."""
    events = _ready_after(request.query_params.get("from", ""))
    return live_stream(request, events)


async def _ready_after(process: str) -> AsyncIterator[bytes]:
    if process == PROCESS:
        await asyncio.Event().wait()  # until this process stops
    yield sse("", "ready")


def how_to_restart(request: Request[Any, Any, Any]) -> Restart:
    """Return an empty `what` if the page can restart the server, else what to do."""
    return Restart("") if _restart_of(request) is not None else _in_words()


def _restart_of(request: Request[Any, Any, Any]) -> Callable[[], None] | None:
    found: Callable[[], None] | None = request.app.state.get("restart")
    return found


def _in_words() -> Restart:
    """Return what to do on the server's machine, and the command if one is enough."""
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


HANDLERS = (restart_server, restarting_page, live_restart)
