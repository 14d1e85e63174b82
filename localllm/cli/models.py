"""Verbs about models on this machine: `list`, `show`, `cp`, `rm`. `show` also reads models that are only on the hub.

They print text, or JSON with --json. Does not know: how a model is downloaded (cli/hub.py), loaded or served.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from localllm.config.flags import add_json, add_model
from localllm.errors import ConfigError, UnsupportedModel
from localllm.models.library.about import SOURCES, ago, gguf_rows, spec_or_reason, spec_rows
from localllm.terminal import confirmed, print_table
from localllm.units import format_bytes

if TYPE_CHECKING:
    from localllm.models.library.catalog import ResolvedModel
    from localllm.models.library.hub.peek import RemoteCheckpoint


def list_models_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--names", action="store_true", help="only the names, one per line")
    add_json(parser)


def list_models(options: argparse.Namespace) -> int:
    """List the models that can be served now: the demo, the Hugging Face cache, other programs' GGUF files."""
    from localllm.models.library import catalog
    from localllm.models.library.hub.cache import incomplete_repositories

    models, cut = catalog.list_models(), incomplete_repositories()
    if options.json:
        print(json.dumps([_listed(model) for model in models], indent=2, default=str))
        return 0
    if options.names:
        print(*(model.name for model in models), sep="\n")
        return 0
    rows = [
        (model.name, format_bytes(model.size_bytes), model.format, _from(model), ago(model.used_s)) for model in models
    ]
    print_table([("MODEL", "SIZE", "FORMAT", "FROM", "LAST READ"), *rows])
    for repo_id, held_bytes in cut.items():
        print(f"{repo_id} is downloaded in part ({format_bytes(held_bytes)}): localllm pull {repo_id} resumes it.")
    return 0


def show_model_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, required=True)
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a repository")
    add_json(parser)


def show_model(options: argparse.Namespace) -> int:
    """Show the checkpoint's facts, read from its headers. No weights are loaded or downloaded."""
    from localllm.models.library.catalog import is_for_the_hub, resolve_model

    if is_for_the_hub(options.model, options.revision):
        from localllm.models.library.hub.peek import peek

        with peek(options.model, options.revision) as remote:
            facts, rows = _remote_facts(remote), _remote_rows(remote)
            spec, problem = spec_or_reason(remote.path)
    else:
        model = resolve_model(options.model, options.revision)
        weights = [file for file in model.files if model.format == "gguf" or file.suffix == ".safetensors"]
        weights_bytes = sum(file.stat().st_size for file in weights)
        facts, rows = {**_listed(model), "weights_bytes": weights_bytes}, _local_rows(model)
        spec, problem = spec_or_reason(model.path)
        if problem is not None and not isinstance(problem, UnsupportedModel):
            raise problem
    if options.json:
        told = {**facts, "spec": asdict(spec) if spec else None, "problem": str(problem) if problem else None}
        print(json.dumps(told, indent=2, default=str))
        return 0
    rows = {**rows, **(spec_rows(spec) if spec else {"runs here": f"no: {problem}"})}
    print_table(list(rows.items()))
    return 0


def remove_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="ORG/NAME, ORG/NAME:QUANT, ORG/NAME@REVISION, or a second name")
    parser.add_argument("--revision", metavar="NAME", help="only this branch, tag or commit")
    parser.add_argument("--yes", "-y", action="store_true", help="do not ask for confirmation")
    add_json(parser)


def remove_model(options: argparse.Namespace) -> int:
    """Delete a model from the Hugging Face cache after a confirmation. Print how much space was freed."""
    from localllm.config.resolve import resolve
    from localllm.engine.memory.block_stores import delete_of_removed, kv_folder
    from localllm.models.library.hub.cache import remove_target, repository_folder, to_remove

    target = to_remove(options.model, options.revision)
    if not options.yes:
        if not sys.stdin.isatty():
            raise ConfigError(
                f"{target.name} was not deleted: confirmation is required.", "", f"localllm rm {options.model} --yes"
            )
        what = f"({format_bytes(target.size_bytes)}) from the Hugging Face cache"
        if target.alias_of is not None:
            what = f"as a second name of {target.alias_of}, which is kept"
        if not confirmed(f"Delete {target.name} {what}?"):
            print("Not deleted.")
            return 0
    removed = remove_target(target)
    folder = kv_folder(resolve({}).engine.kv_offload_dir)
    num_blocks, kv_bytes = delete_of_removed(folder, repository_folder(target.repo_id))
    if options.json:
        facts = {"removed": target.name, "freed_bytes": removed.freed_bytes, "freed_kv_bytes": kv_bytes}
        print(json.dumps(facts))
    else:
        more = f" {num_blocks} of its KV blocks, {format_bytes(kv_bytes)}, were deleted too." if num_blocks else ""
        print(f"Removed {target.name}: {format_bytes(removed.freed_bytes)} freed.{more}")
    return 0


def copy_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a name that `localllm list` shows")
    parser.add_argument("name", metavar="NAME", help="the second name")
    add_json(parser)


def copy_model(options: argparse.Namespace) -> int:
    """Give a model a second name, which stays until `rm`."""
    from localllm.models.library.catalog import copy_model as give_name

    model = give_name(options.model, options.name)
    if options.json:
        print(json.dumps({"name": model.name, "alias_of": model.alias_of}))
    else:
        print(f"{model.name} is now a second name of {model.alias_of}: localllm up {model.name}")
    return 0


def _from(model: ResolvedModel) -> str:
    return SOURCES[model.source] if model.alias_of is None else f"second name of {model.alias_of}"


def _listed(model: ResolvedModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "alias_of": model.alias_of,
        "source": model.source,
        "format": model.format,
        "path": str(model.path),
        "revision": model.revision,
        "size_bytes": model.size_bytes,
        "last_read_s": model.used_s,
    }


def _remote_facts(remote: RemoteCheckpoint) -> dict[str, Any]:
    from localllm.models.library.hub.pull import plan_facts

    return {
        "name": remote.name,
        "source": "hub",
        "format": "gguf" if remote.path.is_file() else "safetensors",
        "size_bytes": remote.plan.total_bytes,
        "weights_bytes": remote.weights_bytes,
        **plan_facts(remote.plan),
    }


def _remote_rows(remote: RemoteCheckpoint) -> dict[str, str]:
    plan = remote.plan
    return {
        "model": remote.name,
        "from": f"the hub, not on this machine: localllm pull {remote.name}",
        "revision": f"{plan.revision} ({plan.commit[:12]})",
        "files": _files_line([(file.name, file.size) for file in plan.files]),
        "download": f"{format_bytes(plan.needed_bytes)} of {format_bytes(plan.total_bytes)}; "
        f"{format_bytes(plan.free_bytes)} free on the disk",
        "license": plan.license or "unknown",
        **({"gated": "its owner asks you to accept terms first"} if plan.gated else {}),
    }


def _local_rows(model: ResolvedModel) -> dict[str, str]:
    return {
        "model": model.name,
        "path": str(model.path),
        "from": _from(model),
        "files": _files_line([(file.name, file.stat().st_size) for file in model.files]),
        "format": model.format,
        **(gguf_rows(model.path) if model.format == "gguf" else {}),
    }


def _files_line(files: Sequence[tuple[str, int]]) -> str:
    weights = [size for name, size in files if name.endswith((".safetensors", ".gguf"))] or [s for _, s in files]
    total = format_bytes(sum(size for _, size in files))
    return f"{len(files)}, {total}; weights {format_bytes(sum(weights))} in {len(weights)}"
