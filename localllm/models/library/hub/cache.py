"""The Hugging Face cache on this machine: what it holds of a repository, its size, and deleting it.

It has huggingface_hub's layout: models--ORG--NAME with blobs/ (named by hash), snapshots/COMMIT/ (links to blobs) and
refs/. An interrupted download is blobs/HASH.incomplete until it is resumed or deleted.
Does not know: the hub.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from localllm.errors import ConfigError, ModelNotFound
from localllm.models.formats.gguf.file_names import gguf_models, prediction_layers_for, projectors_for
from localllm.models.library.catalog import hub_cache_dir, resolve_model
from localllm.models.library.names import delete_alias, looks_like_path, parse_name, target_of

PARTIAL = ".incomplete"


def repository_folder(repo_id: str) -> Path:
    return hub_cache_dir() / ("models--" + repo_id.replace("/", "--"))


def cached_bytes(repo_id: str, commit: str, name: str, etag: str, size: int) -> int:
    """Return how many bytes of a file are cached: all, the part of an interrupted download, or none."""
    folder = repository_folder(repo_id)
    if is_cached(repo_id, commit, name, etag):
        return size
    try:
        return min(size, (folder / "blobs" / (etag + PARTIAL)).stat().st_size) if etag else 0
    except OSError:
        return 0


def is_cached(repo_id: str, commit: str, name: str, etag: str) -> bool:
    folder = repository_folder(repo_id)
    return (folder / "snapshots" / commit / name).exists() or (bool(etag) and (folder / "blobs" / etag).exists())


def free_bytes() -> int:
    """Return the free bytes on the cache's disk."""
    folder = hub_cache_dir()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def incomplete_repositories() -> dict[str, int]:
    """Return the repositories with interrupted downloads, and the bytes of those."""
    held: dict[str, int] = {}
    for partial in hub_cache_dir().glob(f"models--*/blobs/*{PARTIAL}"):
        repo_id = partial.parent.parent.name.removeprefix("models--").replace("--", "/")
        with suppress(FileNotFoundError):  # finished or deleted meanwhile
            held[repo_id] = held.get(repo_id, 0) + partial.stat().st_size
    return held


@dataclass(frozen=True, slots=True)
class RemovalTarget:
    """The meaning of a name for `remove`: a repository, a commit of it, files of one GGUF model, or an alias."""

    name: str
    repo_id: str
    commit: str | None
    names: tuple[str, ...] | None
    size_bytes: int
    alias_of: str | None = None  # only the alias is removed, the model stays


def to_remove(name: str, revision: str | None = None) -> RemovalTarget:
    """Return what to delete. Raises `ModelNotFound`; `ConfigError` for demo, paths, other programs' models."""
    if looks_like_path(name):
        raise ConfigError(
            f"{name} is a path, and not in the Hugging Face cache.",
            "localllm deletes only models that it downloaded.",
            param="model",
        )
    if (target := target_of(name)) is not None:
        return RemovalTarget(name, "", None, None, 0, target)
    asked = parse_name(name)
    folder = repository_folder(asked.base)
    if asked.quant is None and asked.is_repository and folder.is_dir() and not (revision or asked.revision):
        return RemovalTarget(asked.base, asked.base, None, None, _size(folder))  # whether complete or partly downloaded
    model = resolve_model(name, revision)
    if model.source != "cache":
        whose = "belongs to the program" if model.source == "demo" else "is not in the Hugging Face cache"
        raise ConfigError(
            f"{model.name} {whose}.",
            f"It is {model.path}; localllm deletes only models that it downloaded.",
            param="model",
        )
    snapshot = next(parent for parent in (model.path, *model.path.parents) if parent.parent.name == "snapshots")
    repo_id = snapshot.parent.parent.name.removeprefix("models--").replace("--", "/")
    if model.format == "gguf":
        files, stored = list(model.files), [path for path in _pointers(snapshot) if path.exists()]
        if len(gguf_models(path.name for path in stored)) == 1:  # nothing is left that needs what is beside it
            names = _relative(stored, snapshot)
            for find in (projectors_for, prediction_layers_for):
                files += [snapshot / name for name in find(model.path.name, names)]
        size_bytes = sum(file.stat().st_size for file in files)
        return RemovalTarget(model.name, repo_id, snapshot.name, tuple(_relative(files, snapshot)), size_bytes)
    if revision or asked.revision:
        return RemovalTarget(f"{repo_id}@{snapshot.name[:12]}", repo_id, snapshot.name, None, model.size_bytes)
    return RemovalTarget(repo_id, repo_id, None, None, _size(snapshot.parent.parent))


def _relative(files: Iterable[Path], folder: Path) -> list[str]:
    return [str(file.relative_to(folder)) for file in files]


def _size(folder: Path) -> int:
    """Return the bytes of a repository's files, interrupted downloads included."""
    files = [path for part in ("blobs", "snapshots") for path in (folder / part).rglob("*")]
    return sum(path.stat().st_size for path in files if path.is_file() and not path.is_symlink())


@dataclass(frozen=True, slots=True)
class RemovalResult:
    """The result of `remove`."""

    what: str
    freed_bytes: int


def remove_target(target: RemovalTarget) -> RemovalResult:
    """Delete what a name means. Raises `ModelNotFound`."""
    if target.alias_of is not None:
        delete_alias(target.name)
        return RemovalResult(target.name, 0)
    return remove(target.repo_id, target.commit, target.names)


def remove(repo_id: str, commit: str | None = None, names: Iterable[str] | None = None) -> RemovalResult:
    """Delete a repository from the cache, or one of its commits, or some files of a commit.

    Files that another commit still uses stay. Raises `ModelNotFound`.
    """
    folder = repository_folder(repo_id)
    if not folder.is_dir():
        raise ModelNotFound(
            f"{repo_id} is not in the Hugging Face cache.", f"It is {hub_cache_dir()}.", "localllm list", param="model"
        )
    if commit is None:
        return _remove_all(repo_id, folder)
    snapshot = folder / "snapshots" / commit
    wanted = None if names is None else {snapshot / name for name in names}
    gone = [path for path in _pointers(snapshot) if wanted is None or path in wanted]
    blobs = {path.resolve() for path in gone if path.is_symlink()}
    freed = sum(path.lstat().st_size for path in gone if not path.is_symlink())  # on disks without links
    for path in gone:
        path.unlink()
    for parent, _, _ in os.walk(snapshot, topdown=False):
        if not os.listdir(parent):
            os.rmdir(parent)
    freed += _remove_unused(folder, blobs)
    if not any(_pointers(folder / "snapshots")) and (names is None or not _partials(folder)):
        freed += _remove_all(repo_id, folder).freed_bytes
    elif not snapshot.exists():
        for ref in [path for path in (folder / "refs").rglob("*") if path.is_file()]:
            if ref.read_text(encoding="utf-8").strip() == commit:
                ref.unlink()
    return RemovalResult(f"{repo_id}@{commit[:12]}", freed)


def remove_partial(repo_id: str, etags: Iterable[str] | None = None) -> int:
    """Delete interrupted downloads, of these files or of all. Returns the freed bytes."""
    folder = repository_folder(repo_id)
    named = None if etags is None else {etag + PARTIAL for etag in etags if etag}
    freed = 0
    for partial in _partials(folder):
        if named is None or partial.name in named:
            freed += partial.stat().st_size
            partial.unlink()
    if folder.is_dir() and not any(_pointers(folder / "snapshots")) and not _partials(folder):
        freed += _remove_all(repo_id, folder).freed_bytes
    return freed


def _partials(folder: Path) -> list[Path]:
    return list(folder.glob(f"blobs/*{PARTIAL}"))


def _remove_all(repo_id: str, folder: Path) -> RemovalResult:
    freed = _size(folder)
    shutil.rmtree(folder)
    shutil.rmtree(hub_cache_dir() / ".locks" / folder.name, ignore_errors=True)
    return RemovalResult(repo_id, freed)


def _remove_unused(folder: Path, blobs: set[Path]) -> int:
    """Delete the blobs that no snapshot links to any more. Returns the freed bytes."""
    used = {path.resolve() for path in _pointers(folder / "snapshots")}
    freed = 0
    for blob in blobs - used:
        if blob.parent == (folder / "blobs").resolve() and blob.is_file():
            freed += blob.stat().st_size
            blob.unlink()
    return freed


def _pointers(folder: Path) -> Iterator[Path]:
    """Yield the files and links below a folder, dead links included."""
    for parent, _, names in os.walk(folder):
        for name in names:
            yield Path(parent) / name
