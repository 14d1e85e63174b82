"""The files that servers of this user keep on disk beside models: list or delete them.

    localllm kv list | clear [MODEL]        KV blocks, which can be turned back into the text of chats
    localllm experts list | clear [FILE]    experts of models that are larger than RAM

Does not know: when blocks are written (engine/memory/tiers.py).
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.config.flags import add_json
from localllm.config.resolve import resolve
from localllm.errors import ConfigError, NotWritable
from localllm.terminal import print_table
from localllm.units import format_bytes, format_count

if TYPE_CHECKING:
    from localllm.engine.memory.block_stores import KeptModel
    from localllm.files.record_file import KeptRecords


def kv_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("list", "clear"), nargs="?", default="list", help="without it: list")
    parser.add_argument("model", nargs="?", metavar="MODEL", help="with clear: only of this model, as list shows it")
    help = "the folder that servers were given; default: as in the settings, else kv in the cache folder"
    parser.add_argument("--kv-offload-dir", type=Path, metavar="FOLDER", help=help)
    add_json(parser)


def kv(options: argparse.Namespace) -> int:
    from localllm.engine.memory.block_stores import kept_models, kv_folder

    folder = options.kv_offload_dir or kv_folder(resolve({}).engine.kv_offload_dir)
    found = kept_models(folder)
    if options.action == "clear":
        return _clear(options, folder, found)
    if options.model:
        raise ConfigError(f"Unexpected argument {options.model!r}.", "", "localllm kv list")
    if options.json:
        facts = [
            {"model": each.name, "blocks": each.num_blocks, "bytes": each.num_bytes, "folder": str(each.folder),
             "last_used": _date(each)}
            for each in found
        ]  # fmt: skip
        print(json.dumps(facts, indent=2))
    elif found:
        rows = [(each.name or "?", str(each.num_blocks), format_bytes(each.num_bytes), _date(each)) for each in found]
        print_table([("MODEL", "BLOCKS", "SIZE", "LAST USED"), *rows])
    else:
        print(f"No KV blocks are kept in {folder}.")
    return 0


def _clear(options: argparse.Namespace, folder: Path, found: list[KeptModel]) -> int:
    from localllm.engine.memory.block_stores import delete_kept

    chosen = [each for each in found if not options.model or each.name == options.model]
    if options.model and not chosen:
        known = (
            f"Kept: {', '.join(sorted({each.name for each in found if each.name}))}." if found else "Nothing is kept."
        )
        raise ConfigError(f"No KV blocks of {options.model} are kept in {folder}.", known, "localllm kv list")
    for each in chosen:
        try:
            delete_kept(each)
        except OSError as error:
            why = f"{error.strerror or error}."
            raise NotWritable(f"{each.folder} could not be deleted.", why, f"ls -ld {each.folder}") from error
    num_blocks, num_bytes = sum(each.num_blocks for each in chosen), sum(each.num_bytes for each in chosen)
    if options.json:
        print(json.dumps({"deleted_blocks": num_blocks, "deleted_bytes": num_bytes}))
    else:
        print(f"Deleted {num_blocks} blocks, {format_bytes(num_bytes)}.")
    return 0


def _date(model: KeptModel) -> str:
    return _day(model.used_s) if model.num_blocks else "-"


def experts_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("list", "clear"), nargs="?", default="list", help="without it: list")
    help = "with clear: only this file, as list shows it; without it all that no loaded model reads"
    parser.add_argument("file", nargs="?", metavar="FILE", help=help)
    add_json(parser)


def experts(options: argparse.Namespace) -> int:
    """List or delete the files of experts. Raises `ConfigError` for a file that is not there, or in use."""
    from localllm.files.folders import experts_folder
    from localllm.files.record_file import kept_records

    folder = experts_folder()
    found = kept_records(folder)
    if options.action == "clear":
        return _clear_experts(options, folder, found)
    if options.file:
        raise ConfigError(f"Unexpected argument {options.file!r}.", "", "localllm experts list")
    if options.json:
        facts = [
            {"file": each.path.name, "bytes": each.num_bytes, "in_use": each.is_used, "whole": each.is_whole,
             "last_used": _day(each.used_s), "folder": str(folder)}
            for each in found
        ]  # fmt: skip
        print(json.dumps(facts, indent=2))
    elif found:
        words = {True: "in use", False: ""}
        rows = [
            (each.path.name, format_bytes(each.num_bytes), _day(each.used_s),
             words[each.is_used] if each.is_whole else "being written" if each.is_used else "unfinished")
            for each in found
        ]  # fmt: skip
        print_table([("FILE", "SIZE", "LAST USED", ""), *rows])
    else:
        print(f"No experts are kept in {folder}.")
    return 0


def _clear_experts(options: argparse.Namespace, folder: Path, found: list[KeptRecords]) -> int:
    from localllm.files.record_file import delete_unused

    chosen = next((each for each in found if each.path.name == options.file), None)
    if options.file and chosen is None:
        raise ConfigError(f"{options.file} is not kept in {folder}.", "", "localllm experts list")
    if chosen is not None and chosen.is_used:
        why = "A running server reads its experts from it."
        raise ConfigError(f"{options.file} is in use.", why, "localllm ps; localllm unload MODEL")
    deleted = delete_unused(folder, () if chosen is None else (chosen.path.name,))
    num_bytes, kept = sum(each.num_bytes for each in deleted), len(found) - len(deleted)
    if options.json:
        print(json.dumps({"deleted_files": len(deleted), "deleted_bytes": num_bytes}))
        return 0
    files = f"{format_count(len(deleted))} {'file' if len(deleted) == 1 else 'files'}"
    rest = f" {format_count(kept)} in use {'is' if kept == 1 else 'are'} kept." if kept and not options.file else ""
    print(f"Deleted {files}, {format_bytes(num_bytes)}.{rest}")
    return 0


def _day(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at_s))
