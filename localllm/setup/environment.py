"""The packages of this environment: install another localllm with pip or uv, keep the one before as a wheel, remove it.

The kept wheel is made from the files that the installer recorded, with their recorded hashes, so that `localllm update`
can be undone without a network.
Does not know: where releases are found (releases.py), the other ways to install localllm (installers.py).
"""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution, version
from pathlib import Path

from localllm.machine.install_kind import uv
from localllm.setup.releases import Source, SourceKind, UpdateError

OF_THE_INSTALLER = ("INSTALLER", "REQUESTED", "RECORD", "direct_url.json", "uv_cache.json")


def install_command(source: Source, wanted: str, *, is_complete: bool) -> tuple[list[str], dict[str, str]]:
    """Return the command that installs a release, and its variables. is_complete: all other packages are installed."""
    build = re.search(r"\+(cpu|cu\d+)$", version_of("torch"))
    same_build = ["--torch-backend", build[1]] if build and importlib.util.find_spec("pip") is None else []
    command = [*installer_command(), f"localllm=={wanted}", *(["--no-deps"] if is_complete else same_build)]
    if source.kind is SourceKind.INDEX:  # in the environment: the address may have a password
        return command, dict.fromkeys(("UV_DEFAULT_INDEX", "PIP_INDEX_URL"), source.address)
    command += ["--find-links", source.address]
    if is_complete or (Path(source.address) / "wheelhouse.txt").is_file():
        command += ["--no-index"]
    return command, {}


def installer_command() -> list[str]:
    """Return the command that installs packages into this environment: pip's if it has pip, else uv's."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    found = shutil.which(shlex.split(uv())[0])
    if found is None:
        why = f"{sys.prefix} has no pip, and uv is not in PATH."
        raise UpdateError("There is no program to install packages with.", why, "sh install.sh")
    return [found, "pip", "install", "--python", sys.prefix, "--compile-bytecode"]


def install(command: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Run the installer, and keep the release that it replaces instead of an earlier one. Return whether it is kept.

    Raises `UpdateError` if the installer fails; the earlier release is then still kept.
    """
    before, replaced = kept_wheel(), keep_wheel()
    try:
        _run(command, environ)
    except BaseException:
        if replaced is not None:
            replaced.unlink()
        raise
    if before is not None:
        before.unlink()
    return replaced is not None


def _run(command: Sequence[str], environ: Mapping[str, str]) -> None:
    """Run the installer with its output shown. Raises `UpdateError` if it fails."""
    print(f"$ {shlex.join(command)}", flush=True)
    kept = {name: value for name, value in os.environ.items() if name not in ("UV_PYTHON", "VIRTUAL_ENV")}
    with contextlib.ExitStack() as stack:
        if uv() != "uv":  # made by install.sh, which leaves no cache behind; hard links need the same file system
            root = Path(sys.prefix).parent.parent
            cache = tempfile.TemporaryDirectory(prefix=".cache-", dir=root, ignore_cleanup_errors=True)
            kept["UV_CACHE_DIR"] = stack.enter_context(cache)
        code = subprocess.run(command, env={**kept, **environ}, check=False).returncode
    if code:
        what = f"localllm was not updated: {Path(command[0]).name} ended with exit code {code}."
        raise UpdateError(what, "Its message is above.", "localllm update again; localllm doctor checks the install")


def remove_package() -> list[str]:
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


def version_of(package: str) -> str:
    """Return the version of an installed package, or "(not installed)"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"


# The kept wheel ------------------------------------------------------------------------------------------------------


def kept_folder() -> Path:
    """Return the folder of the kept wheel, in this environment."""
    return Path(sys.prefix) / "share" / "localllm" / "before"


def kept_wheel() -> Path | None:
    """Return the wheel of the release before the installed one."""
    try:
        installed = version("localllm")
    except PackageNotFoundError:
        installed = ""
    return next((path for path in kept_folder().glob("localllm-*.whl") if path.name.split("-")[1] != installed), None)


def keep_wheel() -> Path | None:
    """Store the installed release as a wheel. Return None for an editable install or an unknown one, which have no
    files of their own."""
    try:
        installed = distribution("localllm")
        tag = _tag(installed)
    except (PackageNotFoundError, KeyError):
        return None
    files = dict(_files(installed))
    if not any(name.startswith("localllm/") for name in files):
        return None
    folder = kept_folder()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"localllm-{installed.version}-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, (source, _) in files.items():
            archive.write(source, name)
        archive.writestr(f"localllm-{installed.version}.dist-info/RECORD", _record(files, installed.version))
    return path


def drop_kept() -> None:
    """Delete the kept wheel."""
    shutil.rmtree(kept_folder().parent, ignore_errors=True)


def _tag(installed: Distribution) -> str:
    """Return the tag of the wheel that was installed. Raises `KeyError` if it is not recorded."""
    tags = [line.partition(": ")[2] for line in (installed.read_text("WHEEL") or "").splitlines() if line[:4] == "Tag:"]
    if not tags:
        raise KeyError("Tag")
    parts = [list(dict.fromkeys(part)) for part in zip(*(tag.split("-") for tag in tags), strict=True)]
    return "-".join(".".join(part) for part in parts)


def _files(installed: Distribution) -> Iterator[tuple[str, tuple[Path, list[str]]]]:
    """Yield each file's name in a wheel, with its path and its recorded hash and size."""
    prefix, info = Path(sys.prefix).resolve(), f"localllm-{installed.version}.dist-info"
    for name, *rest in csv.reader((installed.read_text("RECORD") or "").splitlines()):
        path = Path(str(installed.locate_file(name))).resolve()
        if name.endswith(".pyc") or not path.is_file():
            continue
        if name.startswith("localllm/") or (name.startswith(f"{info}/") and path.name not in OF_THE_INSTALLER):
            yield name, (path, rest)
        elif path.is_relative_to(prefix / "share"):  # the man page and the changelog
            yield f"localllm-{installed.version}.data/data/{path.relative_to(prefix).as_posix()}", (path, rest)


def _record(files: dict[str, tuple[Path, list[str]]], release: str) -> str:
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerows([name, *rest] for name, (_, rest) in files.items())
    rows.writerow([f"localllm-{release}.dist-info/RECORD", "", ""])
    return text.getvalue()
