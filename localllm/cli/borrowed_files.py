"""JSON files of other programs, changed while one of them runs: merge entries, and undo that later.

Before a file is changed, a record beside localllm's data holds its content, so that the next `restore_ended` undoes the
change of a process that was killed. A record is removed once its file is restored.
Does not know: which programs, what the entries mean.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from localllm.errors import ConfigError
from localllm.files.folders import data_folder, make_private, translated_write, write_whole
from localllm.machine.running_servers import has_ended, process_mark

_COMMENT = re.compile(r'("(?:[^"\\]|\\.)*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
_TRAILING_COMMA = re.compile(r'("(?:[^"\\]|\\.)*")|,(?=\s*[\]}])')
ABSENT = object()


@contextmanager
def borrowed(entries: Sequence[tuple[Path, Any]]) -> Iterator[None]:
    """Merge the entries into their files until the block ends. Raises `ConfigError` for a file that cannot be parsed,
    or that another running `launch` has changed."""
    records: list[Path] = []
    try:
        for path, content in entries:
            records.append(_borrow(path.resolve(), content))  # settings are often links to a repository of dotfiles
        yield
    finally:
        for record in reversed(records):
            _restore(record)


def restore_ended() -> list[Path]:
    """Undo the changes of processes that have ended without doing so. Return the restored files."""
    restored = []
    for record in sorted(_folder().glob("*.json")):
        with suppress(OSError, ValueError, KeyError):
            told = json.loads(record.read_text(encoding="utf-8"))
            if has_ended(told["mark"]):
                _restore(record)
                restored.append(Path(told["path"]))
    return restored


def merged(text: str | None, content: Any) -> str:
    """Return a file's text with the content merged into it: objects key by key, lists by appending. None: no file.
    Raises `ValueError` if the text is not JSON, with or without comments and trailing commas."""
    return json.dumps(_merged(ABSENT if text is None or not text.strip() else parsed(text), content), indent=2) + "\n"


def parsed(text: str) -> Any:
    """Parse JSON that may have comments and trailing commas, as editors write it. Raises `ValueError`."""
    return json.loads(_TRAILING_COMMA.sub(r"\1", _COMMENT.sub(r"\1", text.removeprefix("\ufeff"))))


def undone(now: Any, before: Any, content: Any) -> Any:
    """Return `now` with the places that `content` names as they were `before`; `ABSENT` where nothing is left.
    Other places keep what was written since."""
    if isinstance(content, Mapping) and isinstance(now, Mapping):
        old = before if isinstance(before, Mapping) else {}
        left = dict(now)
        for key, inner in content.items():
            value = undone(now.get(key, ABSENT), old.get(key, ABSENT), inner)
            if value is ABSENT:
                left.pop(key, None)
            else:
                left[key] = value
        return left if left or isinstance(before, Mapping) else before
    if isinstance(content, list) and isinstance(now, list):
        kept = [each for each in now if each not in content or (isinstance(before, list) and each in before)]
        return kept if kept or isinstance(before, list) else before
    return before


def _merged(old: Any, new: Any) -> Any:
    if isinstance(new, Mapping) and isinstance(old, Mapping):
        return {**old, **{key: _merged(old.get(key, ABSENT), value) for key, value in new.items()}}
    if isinstance(new, list) and isinstance(old, list):
        return [*old, *(each for each in new if each not in old)]
    return new


def _borrow(path: Path, content: Any) -> Path:
    """Change a file, after its record is written. Return the record."""
    record = _folder() / f"{sha256(str(path).encode()).hexdigest()[:16]}.json"
    if record.exists():
        hint = "end that program first"
        raise ConfigError(f"Another `localllm launch` has changed {path}.", "Its program is still running.", hint)
    try:
        before = path.read_bytes().decode("utf-8") if path.exists() else None
        text = merged(before, content)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be changed.", f"{error}.", "mend or move that file") from error
    folders = [str(folder) for folder in path.parents if not folder.exists()]
    make_private(record.parent)
    told = {"mark": process_mark(), "path": str(path), "before": before, "written": text, "content": content,
            "folders": folders, "mode": path.stat().st_mode & 0o777 if before is not None else 0o600}  # fmt: skip
    with translated_write("The record of a changed file", record):
        write_whole(record, json.dumps(told))
    with translated_write("A program's settings", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    return record


def _restore(record: Path) -> None:
    """Undo the change that a record describes. A file that was changed since keeps its other entries."""
    told = json.loads(record.read_text(encoding="utf-8"))
    path, before = Path(told["path"]), told["before"]
    now = path.read_bytes().decode("utf-8") if path.exists() else None
    wanted = before
    if now not in (None, told["written"], before):
        with suppress(ValueError):  # not JSON any more: the content from before is the best there is
            left = undone(parsed(now), ABSENT if before is None else parsed(before or "{}"), told["content"])
            wanted = None if left is ABSENT else json.dumps(left, indent=2) + "\n"
    if now is not None and wanted is None:
        path.unlink()
    elif now is not None and wanted is not None and wanted != now:
        with open(path, "w", encoding="utf-8", newline="") as file:  # in place: the file keeps its owner and mode
            file.write(wanted)
        path.chmod(told["mode"])
    for folder in told["folders"]:
        with suppress(OSError):  # not empty: the program wrote files of its own
            Path(folder).rmdir()
    record.unlink()
    with suppress(OSError):
        record.parent.rmdir()


def _folder() -> Path:
    return data_folder() / "launch"
