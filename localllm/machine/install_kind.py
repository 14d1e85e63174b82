"""The way this localllm was installed, and the command that adds a package to its environment.

Read from marks that installers leave: uv's receipt, pipx's metadata, the BUNDLE file of an offline bundle, pip's
record of an editable install, and the marks of container engines.
Does not know: versions, updates (setup/installers.py), torch.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

CONTAINER_MARKS = (Path("/run/.containerenv"), Path("/.dockerenv"))
CONTAINER_VARIABLES = ("KUBERNETES_SERVICE_HOST", "container")
"""Set by Kubernetes, and by podman and localllm's own image; a read-only container of podman has no file as a mark."""
REINSTALLED = ("torch", "localllm")
"""Packages that are always there: a command that adds one has to replace it."""


class InstallKind(StrEnum):
    """The program that made this environment."""

    UV_TOOL = "uv tool"
    PIPX = "pipx"
    BUNDLE = "offline bundle"
    CHECKOUT = "checkout"
    CONTAINER = "container"
    PIP = "pip"


def install_kind() -> InstallKind:
    """Return how the running localllm was installed."""
    prefix = Path(sys.prefix)
    if (prefix / "uv-receipt.toml").is_file():
        return InstallKind.UV_TOOL
    if (prefix / "pipx_metadata.json").is_file():
        return InstallKind.PIPX
    if bundle_folder() is not None:
        return InstallKind.BUNDLE
    if checkout_folder() is not None:
        return InstallKind.CHECKOUT
    if any(os.environ.get(name) for name in CONTAINER_VARIABLES) or any(mark.exists() for mark in CONTAINER_MARKS):
        return InstallKind.CONTAINER
    return InstallKind.PIP


def bundle_folder() -> Path | None:
    """Return the folder of the offline bundle that this Python belongs to: the one with the file BUNDLE."""
    prefix = Path(sys.prefix)
    places = (prefix, prefix.parent, Path(sys.executable).parent)
    return next((place for place in places if (place / "BUNDLE").is_file()), None)


def is_bundle(folder: Path) -> bool:
    """Return whether a folder is an unpacked offline bundle: its file BUNDLE begins with the version, its name."""
    mark = folder / "BUNDLE"
    return not folder.is_symlink() and mark.is_file() and mark.read_text(errors="replace").split()[:1] == [folder.name]


def checkout_folder() -> Path | None:
    """Return the folder of the sources that are installed as editable. Without a record of an install: the folder
    around the package, if it has a pyproject.toml."""
    try:
        recorded = distribution("localllm").read_text("direct_url.json")
    except PackageNotFoundError:
        root = Path(__file__).parent.parent.parent
        return root if (root / "pyproject.toml").is_file() else None
    try:
        record = json.loads(recorded or "{}")
        editable = record.get("dir_info", {}).get("editable", False)
        return Path(unquote(urlsplit(record["url"]).path)) if editable else None
    except (ValueError, KeyError, AttributeError):
        return None


def how_to_install(requirement: str) -> str:
    """Return the command that installs a requirement into this environment: 'torch', 'localllm[pdf]', 'tiktoken'.

    Several packages may be separated by spaces. torch and localllm themselves are installed again.
    """
    kind = install_kind()
    # An extra's brackets always get quotes, because zsh expands them.
    words = " ".join(f"'{word}'" if "[" in word else shlex.quote(word) for word in requirement.split())
    again = requirement in REINSTALLED
    if kind is InstallKind.UV_TOOL:
        backend = " --torch-backend auto" if requirement == "torch" else ""
        reinstall = f"--reinstall-package {requirement} " if again else ""
        return f"{uv()} pip install --python {shlex.quote(sys.prefix)} {reinstall}{words}{backend}"
    if kind is InstallKind.CONTAINER:
        return f"an image of your own: FROM this image, USER 0, RUN python -m pip install {words}, USER 10001"
    if kind is InstallKind.BUNDLE:
        why = "has PyTorch for CPUs only" if requirement == "torch" else "does not take further packages"
        return f"sh install.sh   (an offline bundle {why})"
    folder = checkout_folder() if kind is InstallKind.CHECKOUT else None
    if folder is not None and requirement.startswith("localllm"):
        extra = requirement.removeprefix("localllm")
        return f"{_pip()} install --editable {shlex.quote(f'{folder}{extra}')}"
    pip = "pipx runpip localllm" if kind is InstallKind.PIPX else _pip()
    return f"{pip} install {'--force-reinstall ' if again else ''}{'--no-deps ' * (requirement == 'localllm')}{words}"


def uv() -> str:
    """Return how to call uv: the one that install.sh stored two folders above the environment, else that of PATH."""
    own = Path(sys.prefix).parent.parent / "bin" / "uv"
    return shlex.quote(str(own)) if os.access(own, os.X_OK) else "uv"


def _pip() -> str:
    return f"{shlex.quote(sys.executable)} -m pip"
