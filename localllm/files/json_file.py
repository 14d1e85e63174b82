"""Read untrusted JSON: files of checkpoints, of the Hugging Face cache and of other programs, answers of the hub.

Any fault raises `CorruptModel` with the file's name: the file is too long, nested too deeply, not UTF-8, not JSON, or
not readable.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from localllm.errors import CorruptModel

MOST_BYTES = 32 * 2**20
"""Largest file that is read. The index of a checkpoint with 200,000 tensors has 20 MiB. A parsed file takes up to fifty
times its size."""


def read_json(path: Path, most_bytes: int = MOST_BYTES) -> Any:
    """Raises `CorruptModel`."""
    return parse_json(read_bytes(path, most_bytes), path, most_bytes)


def read_json_object(path: Path, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """Raises `CorruptModel`."""
    value = read_json(path, most_bytes)
    if not isinstance(value, dict):
        raise CorruptModel(f"{path} must hold a JSON object.", f"It holds a {type(value).__name__}.")
    return value


def read_bytes(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the content of a file. Raises `CorruptModel`."""
    try:
        with path.open("rb") as file:
            raw = file.read(most_bytes + 1)
    except (OSError, ValueError) as error:
        raise CorruptModel(f"Cannot read {path}.", f"{error}.", "Download the file again.") from error
    if len(raw) > most_bytes:
        raise CorruptModel(
            f"{path} is too long.", f"It has more than {most_bytes:,} bytes.", "Download the file again."
        )
    return raw


def read_text(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """Raises `CorruptModel`."""
    try:
        return read_bytes(path, most_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorruptModel(f"Cannot read {path}.", f"{error}.", "Download the file again.") from error


def parse_json(raw: bytes | str, name: object, most_bytes: int = MOST_BYTES) -> Any:
    """Parse JSON text; `name` is the file's name in the error. Raises `CorruptModel`."""
    if len(raw) > most_bytes:
        raise CorruptModel(f"{name} is too long.", f"It has {len(raw):,} bytes; the limit is {most_bytes:,}.")
    try:
        return json.loads(raw)
    except RecursionError as error:
        raise CorruptModel(f"Cannot read {name}.", "It is nested too deeply.", "Download the file again.") from error
    except (ValueError, MemoryError) as error:
        why = f"{error}." if str(error) else f"{type(error).__name__}."
        raise CorruptModel(f"Cannot read {name}.", why, "Download the file again.") from error
