"""The data that localllm stores on disk: location, size, and how to delete it.

Does not know: pages.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from localllm.config.resolve import default_config_path
from localllm.engine.memory.block_stores import kept_models
from localllm.files.folders import experts_folder
from localllm.files.record_file import kept_records
from localllm.logs.log_file import log_folder
from localllm.models.library.catalog import hub_cache_dir
from localllm.models.library.hub.cache import free_bytes, incomplete_repositories
from localllm.serving.profiles import profiles_folder
from localllm.units import format_bytes
from localllm.web.access.keys import keys_path
from localllm.web.pages.chat.store.database import chats_path
from localllm.web.pages.frame.views import View, view


@dataclass(frozen=True, slots=True)
class StoredRow:
    """One kind of data on disk."""

    name: str
    what: str
    size_bytes: int
    path: str
    delete: str = "delete the files"
    delete_url: str = ""  # URL of the page that deletes it; empty: there is none
    deletes_at_once: bool = False  # the URL is posted to, and nothing is asked: what is deleted is only computed again


@view("settings/_storage.html")
class StorageCard(View):
    """All data that localllm stores on this machine."""

    rows: tuple[StoredRow, ...]
    free_bytes: int


def read_storage(config_file: Path | None, kv: Path, *, keeps_chats: bool) -> StorageCard:
    """Return all stored data. It walks folders, which takes milliseconds, or a second with many models.

    kv: the folder of KV blocks. keeps_chats: whether chats are written to disk, which the first one begins.
    """
    cache, chats, profiles = hub_cache_dir(), chats_path(), profiles_folder()
    cut = incomplete_repositories()
    halves = f" {format_bytes(sum(cut.values()))} belong to unfinished downloads, which can be resumed." if cut else ""
    models, where = ("Downloads", "/library/downloads") if cut else ("Models", "/library")
    path = config_file or default_config_path()
    rows = (
        StoredRow("Models", f"Weights from the hub.{halves}", size_of(cache), str(cache), models, where),
        _chats(chats, keeps_chats=keeps_chats),
        *_kv_blocks(kv),
        *_experts(experts_folder()),
        StoredRow(
            "Logs",
            "Events of each request by its id; no prompts, no answers.",
            size_of(log_folder()),
            str(log_folder()),
        ),
        StoredRow("Tuned profiles", "Settings found by tuning.", size_of(profiles), str(profiles), "Tune", "/tune"),
        StoredRow(
            "Keys", "Names, scopes and hashes of the keys.", size_of(keys_path()), str(keys_path()), "Keys", "#keys"
        ),
        StoredRow("Settings", "The config.toml file.", size_of(path), str(path)),
    )
    return StorageCard(rows, free_bytes())


def _kv_blocks(folder: Path) -> list[StoredRow]:
    """Return what is kept of KV caches, by model; nothing if there has never been anything."""
    kept = [each for each in kept_models(folder) if each.num_blocks]
    if not kept:
        return []
    names = ", ".join(f"{each.name or 'an unknown model'} {format_bytes(each.num_bytes)}" for each in kept)
    what = f"Prompts that are not computed again after a restart: {names}. They can be turned back into text."
    size = sum(each.num_bytes for each in kept)
    return [StoredRow("KV blocks", what, size, str(folder), "Delete now", "/settings/kv/delete", deletes_at_once=True)]


def _experts(folder: Path) -> list[StoredRow]:
    """Return the files of experts that models read from disk; nothing if there are none."""
    kept = kept_records(folder)
    if not kept:
        return []
    unused = sum(not each.is_used for each in kept)
    what = f"Experts of models larger than RAM: {len(kept)} {'file' if len(kept) == 1 else 'files'}, "
    what += f"{unused} of them of no loaded model. A start that needs one writes it again."
    size, url = sum(each.num_bytes for each in kept), "/settings/experts/delete" if unused else ""
    delete = "Delete unused" if unused else "unload the model"
    return [StoredRow("Experts on disk", what, size, str(folder), delete, url, deletes_at_once=True)]


def _chats(path: Path, *, keeps_chats: bool) -> StoredRow:
    if not path.exists():
        if keeps_chats:
            return StoredRow("Chats", "None yet. They are written here with the first one.", 0, str(path))
        return StoredRow("Chats", "Kept in memory until the server stops.", 0, "", "stop the server")
    beside = sum(map(size_of, path.parent.glob(f"{path.name}*")))  # the write-ahead log, and files set aside
    what = "Messages and answers of all chats, prompts, and the text of searched folders."
    what += " The newest are in the files beside it (-wal, -shm)."
    return StoredRow("Chats", what, beside, str(path), "Privacy", "#privacy")


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files below a folder. Links count as 0, and so does a missing file."""
    if path.is_file():
        return path.stat().st_size
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                file = os.lstat(os.path.join(folder, name))
            except OSError:  # deleted meanwhile
                continue
            total += 0 if os.path.islink(os.path.join(folder, name)) else file.st_size
    return total
