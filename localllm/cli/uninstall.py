"""`localllm uninstall`: list what localllm put on this machine, and remove it.

The service, the command, the environment and the caches are removed; settings and data only if the person says so;
models and other files that programs share, never.
Does not know: where the files are (footprint.py).
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from localllm.cli.footprint import Group, Part, footprint, own_root, remove_path, removes_package_only
from localllm.cli.installed_wheel import drop_kept
from localllm.cli.tell import confirmed, print_table
from localllm.cli.update import refuse_servers, running_services
from localllm.errors import ConfigError, LocalLLMError
from localllm.files.folders import cache_folder, config_home, data_folder
from localllm.machine.install_kind import uv
from localllm.units import format_bytes


class NotRemoved(LocalLLMError):
    """Some files could not be removed."""

    code = "not_removed"


def uninstall(options: argparse.Namespace) -> int:
    """Run the verb. Raises `ConfigError` while a server runs, or where there is no terminal to ask at."""
    parts = footprint()
    _print_parts(parts, options)
    if options.dry_run:
        return 0
    # The user's own service is stopped below.
    refuse_servers("uninstall", allowed=[pid for pid, manager in running_services().items() if not manager.is_system])
    _require_answers(options)
    chosen = [part for part in parts if part.group is Group.PROGRAM]
    if options.all:
        chosen += [part for part in parts if part.group is Group.DATA]
    if not options.yes and not confirmed(f"Remove {', '.join(part.what for part in chosen)}?"):
        print("Nothing was changed.")
        return 1
    if not (options.all or options.keep_data or options.yes):
        chosen += [
            part
            for part in parts
            if part.group is Group.DATA and confirmed(f"Remove {part.what}, too ({format_bytes(part.size_bytes)})?")
        ]
    _remove(chosen)
    left = [part for part in parts if part not in chosen and part.group is Group.DATA]
    print("localllm is removed." + (f" Kept: {', '.join(part.what for part in left)}." if left else ""))
    return 0


def _print_parts(parts: Iterable[Part], options: argparse.Namespace) -> None:
    """Show what the answers that were given as flags do with each part."""
    data = Group.PROGRAM if options.all else Group.KEPT if options.keep_data or options.yes else Group.DATA
    rows = [("", "part", "size", "where")]
    for part in parts:
        where = ", ".join(map(_short, part.paths)) + (f"   ({part.note})" if part.note else "")
        rows.append((data if part.group is Group.DATA else part.group, part.what, format_bytes(part.size_bytes), where))
    print_table(rows)


def _short(path: Path) -> str:
    return f"~/{path.relative_to(Path.home())}" if path.is_relative_to(Path.home()) else str(path)


def _require_answers(options: argparse.Namespace) -> None:
    if not options.yes and not sys.stdin.isatty():
        hint = "localllm uninstall --yes --keep-data, or: localllm uninstall --yes --all"
        raise ConfigError("Nothing was changed.", "There is no terminal to ask at.", hint)


def _remove(parts: Iterable[Part]) -> None:
    """Remove parts, the environment of this process last. Raises `NotRemoved` with what is left."""
    roots = [Path.home(), config_home(), data_folder().parent, cache_folder().parent]
    own = list(own_root())
    roots += [root.parent for root in own]
    package_only = removes_package_only()
    failed: list[str] = []
    for part in sorted(parts, key=lambda part: part.what == "environment"):
        if part.what == "environment" and package_only:
            failed += _remove_package()
            continue
        if part.what == "service":
            _stop_service(part.paths)
        for path in part.paths:
            try:
                remove_path(path)
            except OSError as error:
                failed.append(f"{path}: {error.strerror}")
            _remove_empty(path.parent, roots)
        if part.what == "service":
            _run("systemctl", "--user", "daemon-reload")
    for folder in (*(root / "bin" for root in own), data_folder()):  # install.sh makes bin also where it needs no uv
        _remove_empty(folder, roots)
    if failed:
        raise NotRemoved("Not everything could be removed.", "; ".join(failed), "the same with the rights to do so")


def _stop_service(paths: Iterable[Path]) -> None:
    """Stop units and agents, and disable them."""
    units = sorted({path.name for path in paths if path.suffix != ".plist"})
    if units:
        _run("systemctl", "--user", "disable", "--now", *units)
    for agent in (path for path in paths if path.suffix == ".plist"):
        _run("launchctl", "unload", str(agent))


def _run(*command: str) -> None:
    """Run a program if it is installed. Without a session of its manager there is nothing that it would stop."""
    if shutil.which(command[0]):
        subprocess.run(command, capture_output=True, check=False)


def _remove_package() -> list[str]:
    """Uninstall the package localllm with pip or uv. Return what failed."""
    drop_kept()
    if importlib.util.find_spec("pip") is not None:
        command = [sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", "localllm"]
    else:
        command = [uv(), "pip", "uninstall", "--quiet", "--python", sys.prefix, "localllm"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return [f"{command[0]}: {error.strerror}"]
    return [] if done.returncode == 0 else [" ".join(done.stderr.split())]


def _remove_empty(folder: Path, roots: Iterable[Path]) -> None:
    """Remove a folder below one of the roots, and the folders between the root and it, while they are empty."""
    while any(folder != root and folder.is_relative_to(root) for root in roots):
        try:
            folder.rmdir()
        except FileNotFoundError:
            pass
        except OSError:  # not empty
            return
        folder = folder.parent
