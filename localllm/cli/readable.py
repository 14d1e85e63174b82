"""Files that a service with a user of its own can read: its interpreter, this package, and the files that flags name.

Does not know: units.
"""

from __future__ import annotations

import argparse
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from localllm.cli.flags import FLAGS
from localllm.errors import ConfigError

PRIVATE = (Path("/tmp"), Path("/var/tmp"))
"""Folders that systemd replaces by empty ones for a service with `DynamicUser=`."""


def require_readable(options: argparse.Namespace) -> None:
    """Raise `ConfigError` for the first file that another user than its owner cannot read."""
    for path in (Path(sys.executable), Path(sys.executable).resolve(), Path(__file__).resolve()):
        if why := why_unreadable(path):
            hint = "python3 -m venv /opt/localllm && /opt/localllm/bin/pip install localllm"
            raise ConfigError("A service with a user of its own cannot run this installation.", why, hint)
    for path in _named_files(options):
        if why := why_unreadable(path):
            hint = "move it to /srv or /opt, and let everybody read it: chmod -R a+rX FOLDER"
            raise ConfigError(f"A service with a user of its own cannot read {path}.", why, hint)


def why_unreadable(path: Path) -> str:
    """Return why other users cannot read a file or folder; empty if they can."""
    path = path.absolute()
    for folder in PRIVATE:
        if path.is_relative_to(folder):
            return f"The service has a {folder} of its own, which is empty."
    for each in (*reversed(path.parents), path):
        needed = stat.S_IROTH if each == path else stat.S_IXOTH
        mode = each.stat().st_mode
        if not mode & needed:
            return f"{each} is closed to other users (mode {stat.S_IMODE(mode):o})."
    return ""


def _named_files(options: argparse.Namespace) -> Iterator[Path]:
    """Yield the existing files and folders that the flags name."""
    named = [options.model, *(getattr(options, spec.name) for spec in FLAGS if spec.is_path)]
    named += [module.partition("=")[2] for module in options.lora_modules or ()]
    yield from (path.resolve() for name in named if name and (path := Path(name).expanduser()).exists())
    if options.config:
        yield options.config.expanduser().resolve()
