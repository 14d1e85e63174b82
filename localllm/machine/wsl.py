"""Whether this Linux runs inside Windows (WSL2), and which folders are Windows' own.

Does not know: what is stored where.
"""

from __future__ import annotations

import re
from pathlib import Path

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
