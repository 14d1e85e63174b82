"""`localllm uninstall`: list what localllm put on this machine, and remove it.

The service, the command, the environment and the caches are removed; settings and data only if the person says so;
models and other files that programs share, never.
Does not know: how localllm was installed (machine/install_kind.py).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from localllm.config.flags import add_debug_flag
from localllm.config.resolve import default_config_path
from localllm.errors import ConfigError, LocalLLMError
from localllm.files.folders import cache_folder, config_home, data_folder
from localllm.machine.install_kind import bundle_folder, is_bundle
from localllm.setup import launchd
from localllm.setup.completion import SHELLS, installed_path, is_ours
from localllm.setup.environment import kept_folder, remove_package
from localllm.setup.installers import Installer, installer
from localllm.setup.service import Systemd, refuse_servers, running_services, unit_path
from localllm.setup.units import MARK
from localllm.terminal import confirmed, print_table
from localllm.units import format_bytes

PROGRAMS = ("tools", "python", "cache", "bin", "torch", "app")
"""Folders and a file in the data folder that install.sh and an offline bundle make."""

MARKER = ".localllm-install"
"""File in which install.sh and an offline bundle list what they make in its folder: a name or a pattern a line."""

MADE_BEFORE_MARKERS = ("tools/localllm", "tools/.lock", "tools/.gitignore", "python/cpython-*", "python/.lock",
                       "python/.temp", "python/.gitignore", "bin/uv", "torch")  # fmt: skip
"""What install.sh made in its folder before it wrote a marker."""

CACHES = ("bandwidth.json", "peers.json", "kernels", "triton")
"""Files and folders in the cache folder."""

DATA = {"keys": "keys", "chats": "chats", "logs": "logs", "profiles": "profiles", "aliases": "names of models"}
"""Contents of a file of the data folder, by its name up to the first dot."""


class FileGroup(StrEnum):
    """Groups of parts, by how `uninstall` treats them."""

    PROGRAM = "removed"
    DATA = "asked for"
    KEPT = "kept"


@dataclass(frozen=True, slots=True)
class OwnedPart:
    """Files with one purpose. `note` says why they are kept, and how to remove them."""

    what: str
    paths: tuple[Path, ...]
    group: FileGroup
    note: str = ""

    @property
    def size_bytes(self) -> int:
        return sum(map(size_of, self.paths))


def footprint() -> list[OwnedPart]:
    """Return the parts that exist, those that are removed first."""
    environment = list(_environment(installer()))
    inside = [path for part in environment if part.group is FileGroup.PROGRAM for path in part.paths]
    parts = [
        OwnedPart("service", tuple(_units()), FileGroup.PROGRAM),
        OwnedPart("command", tuple(_links(inside)), FileGroup.PROGRAM),
        OwnedPart("completions", tuple(filter(is_ours, map(installed_path, SHELLS))), FileGroup.PROGRAM),
        *environment,
        OwnedPart("caches", (*(cache_folder() / name for name in CACHES), data_folder() / "run"), FileGroup.PROGRAM),
        OwnedPart("settings", (default_config_path(),), FileGroup.DATA),
        *_data(),
        *_others(),
    ]
    there = (OwnedPart(part.what, tuple(_existing(part.paths)), part.group, part.note) for part in parts)
    return [part for part in there if part.paths or part.what == "environment"]


def size_of(path: Path) -> int:
    """Return the size in bytes of a file, or of the files of a folder; links count as themselves."""
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size if os.path.lexists(path) else 0
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except OSError:  # deleted meanwhile
                continue
    return total


def _existing(paths: Iterable[Path]) -> Iterator[Path]:
    kept: list[Path] = []
    for path in paths:
        if os.path.lexists(path) and not any(path.is_relative_to(folder) for folder in kept):
            kept.append(path)
            yield path


def _units() -> Iterator[Path]:
    """Yield the unit files and the agent of launchd that localllm wrote, and the links by which units are enabled."""
    agent = launchd.plist_path()
    if _has_mark(agent, launchd.MARK):
        yield agent
    folder = unit_path().parent
    for path in [*folder.glob("localllm*.service"), *folder.glob("localllm*.socket")]:
        if _has_mark(path):
            yield path
            yield from folder.glob(f"*.wants/{path.name}")


def _has_mark(path: Path, mark: str = MARK) -> bool:
    return path.is_file() and mark in path.read_text(errors="replace")


def _links(environment: Iterable[Path]) -> Iterator[Path]:
    """Yield the links to the environment's command and manual page in the folders where installers put them."""
    named = (os.environ.get(name) for name in ("UV_TOOL_BIN_DIR", "XDG_BIN_HOME", "PIPX_BIN_DIR"))
    folders = [Path(name) for name in named if name]
    folders += [Path("~/.local/bin").expanduser(), *(root / "bin" for root in own_root())]
    manual = Path(os.environ.get("PIPX_MAN_DIR") or data_folder().parent / "man") / "man1" / "localllm.1"
    inside = [path.resolve() for path in environment]
    for link in dict.fromkeys([*(folder / "localllm" for folder in folders), manual]):
        if link.is_symlink() and any(link.resolve().is_relative_to(folder) for folder in inside):
            yield link


def own_root() -> Iterator[Path]:
    """Yield the folder that install.sh or an offline bundle installed into."""
    prefix, folder = Path(sys.prefix), bundle_folder()
    if folder is not None and folder.parent.name == "app":
        yield folder.parent.parent
    elif prefix.parent.name == "tools" and (prefix.parent.parent / "torch").is_file():
        yield prefix.parent.parent


def _environment(install: Installer) -> Iterator[OwnedPart]:
    """Yield the environment of this localllm, or what of it is localllm's."""
    if install.kept_note:
        yield OwnedPart("environment", (install.folder,), FileGroup.KEPT, install.kept_note)
    elif install.is_shared:
        yield OwnedPart(
            "environment", tuple(_package()), FileGroup.PROGRAM, "only the package localllm; the environment stays"
        )
    else:
        made = [path for root in own_root() for path in _made_in(root)]
        yield OwnedPart("environment", tuple(made) or (install.folder,), FileGroup.PROGRAM)
    if install.clone is not None:
        note = f"yours; git -C {install.clone} clean -Xdf removes what was built in it"
        yield OwnedPart("clone", (install.clone,), FileGroup.KEPT, note)


def _made_in(root: Path) -> Iterator[Path]:
    """Yield what installers made in their folder: what its marker lists, the offline bundles, and the marker itself.
    Nothing is yielded that only a link leads to: it is somewhere else."""
    marker = root / MARKER
    lines = marker.read_text(errors="replace").splitlines() if marker.is_file() and not marker.is_symlink() else []
    marked = bool(lines) and lines[0].startswith("localllm ")
    for pattern in lines[1:] if marked else MADE_BEFORE_MARKERS:
        top = pattern.split("/")[0]
        if top in PROGRAMS and ".." not in pattern and not (root / top).is_symlink():
            yield from (path for path in sorted(root.glob(pattern)) if path.parent.name != "app")
    if not (root / "app").is_symlink():
        yield from (path for path in sorted(root.glob("app/*")) if is_bundle(path))
    if marked:
        yield marker


def _package() -> Iterator[Path]:
    """Yield the top folders of the installed package."""
    yield kept_folder().parent
    try:
        installed = distribution("localllm")
    except PackageNotFoundError:
        return
    tops = {file.parts[0] for file in installed.files or () if file.parts[0].startswith("localllm")}
    yield from (Path(str(installed.locate_file(top))) for top in sorted(tops))


def _data() -> Iterator[OwnedPart]:
    """Yield the parts of the data folder that are not programs."""
    found: dict[str, list[Path]] = {}
    if data_folder().is_dir():
        for path in sorted(data_folder().iterdir()):
            if path.name not in (*PROGRAMS, MARKER, "run"):
                what = DATA.get(path.name.lstrip(".").split(".")[0].split("-")[0], "other files")
                found.setdefault(what, []).append(path)
    others = found.pop("other files", [])
    for what, paths in found.items():
        yield OwnedPart(what, tuple(paths), FileGroup.DATA)
    yield OwnedPart("other files", tuple(others), FileGroup.KEPT, "localllm did not make these")


def _others() -> Iterator[OwnedPart]:
    """Yield the machine's service, and what other programs use, too."""
    units = [path for path in Systemd(is_system=True).folder.glob("localllm.*") if _has_mark(path)]
    yield OwnedPart("machine's service", tuple(units), FileGroup.KEPT, "sudo localllm service uninstall --system")
    try:
        from huggingface_hub import constants

        hub, token = Path(constants.HF_HUB_CACHE), Path(constants.HF_TOKEN_PATH)
        yield OwnedPart("models", (hub,), FileGroup.KEPT, "shared with other programs; localllm rm MODEL deletes one")
        yield OwnedPart("hub token", (token,), FileGroup.KEPT, "shared with other programs; localllm logout deletes it")
    except ImportError:
        pass
    triton = Path(os.environ.get("TRITON_HOME") or Path.home()) / ".triton" / "cache"
    yield OwnedPart("Triton's cache", (triton,), FileGroup.KEPT, f"shared with other programs; rm -r {triton} is safe")


def remove_path(path: Path) -> None:
    """Delete a file, a link or a folder with its contents. Raises `OSError`."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path)


class NotRemoved(LocalLLMError):
    """Some files could not be removed."""

    code = "not_removed"


def uninstall_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="only list what would be removed, with sizes")
    data = parser.add_mutually_exclusive_group()
    help = "keep settings, keys, chats, logs and profiles, without asking"
    data.add_argument("--keep-data", action="store_true", help=help)
    data.add_argument("--all", action="store_true", help="also remove settings, keys, chats, logs and profiles")
    parser.add_argument(
        "--yes", "-y", action="store_true", help="do not ask for confirmation; data is kept without --all"
    )
    add_debug_flag(parser)


def uninstall(options: argparse.Namespace) -> int:
    """Run the verb. Raises `ConfigError` while a server runs, or where there is no terminal to ask at."""
    parts = footprint()
    _print_parts(parts, options)
    if options.dry_run:
        return 0
    # The user's own service is stopped below.
    refuse_servers("uninstall", allowed=[pid for pid, manager in running_services().items() if not manager.is_system])
    if not options.yes and not sys.stdin.isatty():
        hint = "localllm uninstall --yes --keep-data, or: localllm uninstall --yes --all"
        raise ConfigError("Nothing was changed.", "There is no terminal to ask at.", hint)
    chosen = [part for part in parts if part.group is FileGroup.PROGRAM]
    if options.all:
        chosen += [part for part in parts if part.group is FileGroup.DATA]
    if not options.yes and not confirmed(f"Remove {', '.join(part.what for part in chosen)}?"):
        print("Nothing was changed.")
        return 1
    if not (options.all or options.keep_data or options.yes):
        chosen += [
            part
            for part in parts
            if part.group is FileGroup.DATA and confirmed(f"Remove {part.what}, too ({format_bytes(part.size_bytes)})?")
        ]
    _remove(chosen)
    left = [part for part in parts if part not in chosen and part.group is FileGroup.DATA]
    print("localllm is removed." + (f" Kept: {', '.join(part.what for part in left)}." if left else ""))
    return 0


def _print_parts(parts: Iterable[OwnedPart], options: argparse.Namespace) -> None:
    """Show what the answers that were given as flags do with each part."""
    data = FileGroup.PROGRAM if options.all else FileGroup.KEPT if options.keep_data or options.yes else FileGroup.DATA
    rows = [("", "part", "size", "where")]
    for part in parts:
        where = ", ".join(map(_short, part.paths)) + (f"   ({part.note})" if part.note else "")
        rows.append(
            (data if part.group is FileGroup.DATA else part.group, part.what, format_bytes(part.size_bytes), where)
        )
    print_table(rows)


def _short(path: Path) -> str:
    return f"~/{path.relative_to(Path.home())}" if path.is_relative_to(Path.home()) else str(path)


def _remove(parts: Iterable[OwnedPart]) -> None:
    """Remove parts, the environment of this process last. Raises `NotRemoved` with what is left."""
    roots = [Path.home(), config_home(), data_folder().parent, cache_folder().parent]
    own = list(own_root())
    roots += [root.parent for root in own]
    package_only = installer().is_shared
    failed: list[str] = []
    for part in sorted(parts, key=lambda part: part.what == "environment"):
        if part.what == "environment" and package_only:
            failed += remove_package()
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
