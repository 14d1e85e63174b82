"""File names of the native library, and a hash of its sources, by which an outdated library is found.

build_native.py and library.py share this module. The build hook reads it before localllm is installed, so it imports
only the standard library.
Does not know: compilers, processors.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SUFFIXES = {"darwin": ".dylib", "win32": ".dll"}


def library_name(instruction_set: str, system: str = sys.platform) -> str:
    """Return the file name of the library for an instruction set; `system` is one of `sys.platform`'s names."""
    return f"localllm_{instruction_set}{SUFFIXES.get(system, '.so')}"


def source_files(folder: Path = FOLDER) -> list[Path]:
    """Return the C sources and headers, sorted by name. A wheel has none."""
    return sorted([*folder.glob("*.c"), *folder.glob("*.h")])


def source_hash(folder: Path = FOLDER) -> str:
    """Return 16 hexadecimal digits that change with the sources, as `localllm_source_hash()` of a library returns
    them; "" without sources."""
    digest = hashlib.sha256()
    files = source_files(folder)
    for path in files:
        content = path.read_bytes().replace(b"\r\n", b"\n")
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16] if files else ""
