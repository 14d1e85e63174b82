"""Where this program keeps its own files: the XDG Base Directory Specification, and what it says to take instead.

Does not know: which files, or whether they are there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def config_home(environ: Mapping[str, str] | None = None) -> Path:
    """$XDG_CONFIG_HOME, of all programs."""
    environ = os.environ if environ is None else environ
    return Path(environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser()


def data_folder() -> Path:
    """$XDG_DATA_HOME/localllm"""
    return Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser() / "localllm"
