"""Differences between operating systems: the event loop, signals, the options of a listening socket, limits of files,
and what is promised on each.

Linux is tested in full. macOS and Windows are supported on the CPU; what they lack has a replacement here.
WSL2, a Linux inside Windows, and folders that are Windows' own are detected here, too.
Does not know: hardware, folders (files/folders.py), what is served.
"""

from __future__ import annotations

import platform
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import asyncio


SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Promise(NamedTuple):
    """The support that a platform has, and what would do more."""

    is_full: bool
    text: str
    remedy: str = ""


def promise_of(system: str, machine: str) -> Promise:
    """Return the promise for a platform. system: of `sys.platform`; machine: of `platform.machine`."""
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(machine.lower(), machine.lower())
    if system == "linux" and machine in ("x86_64", "aarch64"):
        return Promise(True, f"Linux on {machine}: models run on NVIDIA GPUs and on the CPU")
    if system == "darwin" and machine == "aarch64":
        return Promise(False, "macOS on Apple silicon: models run on the CPU only; less tested than Linux")
    if system == "darwin":
        return Promise(False, "macOS on Intel: unsupported, since PyTorch has no current version for it", "use Linux")
    if system == "win32":
        text = "Windows: models run on the CPU only, and several processes for one model are unsupported"
        return Promise(False, text, "wsl --install, then install localllm inside WSL2: it supports NVIDIA GPUs")
    return Promise(False, f"{system} on {machine}: untested; models run on the CPU")


def this_platform() -> Promise:
    return promise_of(sys.platform, platform.machine())


def has_file_modes() -> bool:
    """Return whether a file's mode decides who may read it. On Windows the folder's access list does."""
    return sys.platform != "win32"


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return uvloop's event loop, which answers faster; asyncio's where uvloop is not available (Windows)."""
    try:
        import uvloop
    except ImportError:
        import asyncio

        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


@contextmanager
def handled_signals(handler: Callable[[], None]) -> Iterator[None]:
    """Call `handler` on the running event loop at SIGINT and SIGTERM, until the block ends.

    Windows' event loops have no `add_signal_handler`; there Python's own handler passes the signal to the loop.
    """
    from asyncio import get_running_loop

    loop = get_running_loop()
    with ExitStack() as undo:
        for number in SIGNALS:
            undo.callback(signal.signal, number, signal.getsignal(number))  # a loop leaves Python's own handler
            try:
                loop.add_signal_handler(number, handler)
                undo.callback(loop.remove_signal_handler, number)
            except NotImplementedError:
                signal.signal(number, lambda *_: loop.call_soon_threadsafe(handler))
        yield


def use_port_alone(sock: socket.socket) -> None:
    """Let a socket that is going to be bound reuse the port of a server that has ended, and share it with nobody.

    On Windows SO_REUSEADDR would let two running servers share the port, and each would get some of the requests.
    """
    if sys.platform == "win32":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
    else:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def raise_file_limit(most: int) -> None:
    """Raise the process's limit of open files to `most`, or to what the system grants. Windows has no such limit."""
    try:
        import resource
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most if hard == resource.RLIM_INFINITY else min(hard, most)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # some systems report a higher limit than they grant
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def most_open_files() -> int | None:
    """Return the process's limit of open files; None: there is no limit."""
    try:
        import resource
    except ImportError:
        return None
    soft: int = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if soft == resource.RLIM_INFINITY else soft


VERSION = Path("/proc/version")
_DRIVE = re.compile(r"/mnt/[a-z](/|$)")


def is_wsl(version: Path = VERSION) -> bool:
    """Return whether the kernel is the one that Microsoft builds for WSL2."""
    try:
        text = version.read_text(errors="replace").lower()
    except OSError:
        return False
    return "microsoft" in text or "wsl2" in text


def is_on_windows_drive(path: Path) -> bool:
    """Return whether a path is on a drive of Windows, which WSL reads over a network protocol."""
    return bool(_DRIVE.match(str(path.expanduser().absolute())))
