"""Checks of `localllm doctor` on settings, ports, folders and logs, and with --network of the hub.

Does not know: the machine (doctor_machine.py).
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from urllib.request import getproxies

from localllm.cli.findings import Finding
from localllm.config.resolve import resolve
from localllm.config.settings import Settings
from localllm.errors import LocalLLMError
from localllm.machine.platforms import has_file_modes, is_on_windows_drive, is_wsl
from localllm.units import format_bytes, format_seconds

LITTLE_DISK_BYTES = 5 * 1024**3
RECENT_S = 30 * 86_400.0
"""Age of a crash that is still reported."""


def check_settings() -> Iterator[Finding]:
    settings = resolve({})
    changed = ", ".join(f"{name} ({source})" for name, source in sorted(settings.sources.items()))
    yield Finding("settings", "ok", changed or "all at their defaults")
    yield _port(settings)
    yield from _tool_servers(settings)


def _tool_servers(settings: Settings) -> Iterator[Finding]:
    """Report the MCP servers of the config file, and the package that they need if it is missing."""
    from localllm.mcp.servers import require_mcp
    from localllm.mcp.values import McpMissing

    names = ", ".join(server.name for server in settings.mcp.values() if server.enabled)
    if not names:
        return
    try:
        require_mcp()
    except McpMissing as error:
        yield Finding("tools", "problem", f"{error} Configured servers: {names}.", error.hint)
    else:
        yield Finding("tools", "ok", f"MCP servers: {names}")


def _port(settings: Settings) -> Finding:
    from localllm.up import bind_address

    try:
        bind_address(settings.server).close()
    except LocalLLMError as error:
        return Finding("port", "note", str(error), error.hint)
    return Finding("port", "ok", f"{settings.server.host}:{settings.server.port} is free")


def check_models() -> Iterator[Finding]:
    from localllm.models.library.catalog import list_models

    models = list_models()
    names = ", ".join(model.name for model in models)
    yield Finding("models", "ok", names) if names else Finding("models", "problem", "none", "reinstall localllm")


def check_disk() -> Iterator[Finding]:
    """Report the free space where models and torch are."""
    from localllm.models.library.catalog import hub_cache_dir

    cache = hub_cache_dir()
    yield from disk_of_models(cache)
    spec = find_spec("torch")
    if spec is not None and spec.origin is not None:
        folder = Path(spec.origin).parent
        yield Finding("disk", "ok", f"{format_bytes(shutil.disk_usage(folder).free)} free for torch in {folder}")


def disk_of_models(cache: Path, *, is_in_wsl: bool | None = None) -> Iterator[Finding]:
    """Report the folder of downloaded models: whether it can be written, its free space, and a drive of Windows."""
    folder = next(parent for parent in (cache, *cache.parents) if parent.exists())
    free = shutil.disk_usage(folder).free
    text = f"{format_bytes(free)} free for models in {cache}"
    if not os.access(folder, os.W_OK):
        yield Finding("disk", "note", f"{folder} is not writable", "Set HF_HOME to another folder for models.")
    elif free < LITTLE_DISK_BYTES:
        yield Finding("disk", "note", text, "Free some space: a 7B model in 16 bits takes 15 GiB.")
    else:
        yield Finding("disk", "ok", text)
    if (is_wsl() if is_in_wsl is None else is_in_wsl) and is_on_windows_drive(cache):
        text = f"{cache} is on a drive of Windows, from which WSL2 reads models many times slower"
        yield Finding("WSL2", "note", text, "export HF_HOME=~/.cache/huggingface, a folder of Linux")


def check_data_folder() -> Iterator[Finding]:
    """Check that other users of this machine cannot read the chats, key hashes and logs."""
    from localllm.files.folders import data_folder

    folder = data_folder()
    if not folder.exists():
        return
    mode = stat.S_IMODE(folder.stat().st_mode)
    if not has_file_modes():
        text = f"{folder}; Windows ignores the mode of its files, so the folder's access list decides who may read them"
        yield Finding("data folder", "note", text, f'icacls "{folder}"')
    elif mode & 0o077:
        text = f"other users of this machine can read {folder} (mode {mode:o})"
        yield Finding("data folder", "note", text, f"chmod -R go= {folder}")
    else:
        yield Finding("data folder", "ok", str(folder))


def check_crash() -> Iterator[Finding]:
    """Report the last native crash or kill of a server in the last month."""
    from localllm.logs.fault_log import KILLED, OUT_OF_MEMORY, REPORT, last_crash

    crash = last_crash()
    ago_s = time.time() - crash.at_s if crash is not None else RECENT_S
    if crash is None or ago_s >= RECENT_S:
        return
    ago = format_seconds(max(0.0, ago_s))
    if crash.what == KILLED:
        yield Finding("last crash", "note", f"a server (pid {crash.pid}) was {KILLED}, {ago} ago", OUT_OF_MEMORY)
    else:
        remedy = f"report it, with {REPORT} and the content of {crash.path}"
        yield Finding("last crash", "note", f"a server crashed {ago} ago: {crash.what}", remedy)


def check_network() -> Iterator[Finding]:
    """Ask the hub for an answer; only with --network, since nothing contacts the network by itself."""
    from localllm.models.library.hub import client

    proxies = ", ".join(f"{kind} {address}" for kind, address in sorted(getproxies().items()))
    if proxies:
        yield Finding("proxy", "ok", re.sub(r"//[^/@\s]+@", "//", proxies))
    url = client.endpoint()
    if client.is_offline():
        yield Finding("hub", "note", "HF_HUB_OFFLINE is set: nothing is downloaded", "unset HF_HUB_OFFLINE")
        return
    began_s = time.perf_counter()
    try:
        client.get_json("/api/models", {"limit": "1"}, about=url)
    except LocalLLMError as error:
        yield Finding("hub", "problem", str(error), error.hint)
        return
    yield Finding("hub", "ok", f"{url} answered in {format_seconds(time.perf_counter() - began_s)}")
