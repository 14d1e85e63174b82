"""The installed localllm as a wheel: what `localllm update` keeps, so that an update can be undone without a network.

The wheel is made from the files that the installer recorded, with their recorded hashes.
Does not know: how it is installed again (update.py).
"""

from __future__ import annotations

import csv
import io
import shutil
import sys
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution, version
from pathlib import Path

OF_THE_INSTALLER = ("INSTALLER", "REQUESTED", "RECORD", "direct_url.json", "uv_cache.json")


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
