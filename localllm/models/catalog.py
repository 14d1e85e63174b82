"""From what the user typed to a folder with a checkpoint: the bundled demo, a path, or the Hugging Face cache.

Looks only at this machine. The cache is read as huggingface_hub lays it out (models--ORG--NAME with refs/ and
snapshots/), by hand: importing the library and letting it measure every file takes longer than answering.
Does not know: what is inside config.json (spec.py), the network.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from localllm.errors import ConfigError, CorruptModel, ModelNotFound, UnsupportedModel

DEMO_NAME = "demo"
_SHOWN_NAMES = 10


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A checkpoint on this machine."""

    name: str  # what clients call it
    path: Path  # the folder that holds config.json
    source: Literal["demo", "path", "cache"]
    revision: str | None = None  # commit of a cached repository


def resolve_model(name: str, revision: str | None = None) -> ResolvedModel:
    """Raises `ModelNotFound` (with near names), `UnsupportedModel` or `CorruptModel`; `ConfigError` for `revision`."""
    name = name.strip()
    folder = Path(name).expanduser()
    if name == DEMO_NAME:
        _no_revision(name, revision)
        return _demo()
    looks_like_path = name.startswith((".", "/", "~")) or name.endswith("/") or folder.suffix == ".gguf"
    if name and folder.exists() and (looks_like_path or folder.is_file() or (folder / "config.json").is_file()):
        _no_revision(name, revision)
        return _from_path(folder.resolve())
    if looks_like_path or not name:
        raise ModelNotFound(f"There is no {name!r}.", _available(), "localllm up  (the demo model)", param="model")
    cached = _from_cache(name, revision)
    if cached is not None:
        return cached
    if folder.is_dir():
        return _from_path(folder.resolve())  # to be told what is in there
    raise _not_found(name)


def list_models() -> list[ResolvedModel]:
    """Everything that `resolve_model` would accept by name: the demo, then complete cached checkpoints by name."""
    found = []
    for repo_id in _cached_repositories():
        try:
            found.append(_resolve_cached(repo_id, None))
        except (ModelNotFound, UnsupportedModel, CorruptModel):
            continue  # data sets, adapters, half-finished downloads
    demo = [ResolvedModel(DEMO_NAME, _demo_path(), "demo")] if (_demo_path() / "config.json").is_file() else []
    return [*demo, *found]


def hub_cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Where huggingface_hub keeps models: HF_HUB_CACHE, else HF_HOME/hub, else ~/.cache/huggingface/hub."""
    environ = os.environ if environ is None else environ
    direct = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE")
    home = environ.get("HF_HOME") or os.path.join(environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.path.expandvars(direct or os.path.join(home, "hub"))).expanduser()


def _demo_path() -> Path:
    return Path(__file__).parent / "demo"


def _demo() -> ResolvedModel:
    if not (_demo_path() / "config.json").is_file():
        raise ModelNotFound(
            "The demo model is not part of this installation.",
            f"{_demo_path()} holds no config.json.",
            "In a checkout, make it with scripts/make_demo_model.",
            param="model",
        )
    return ResolvedModel(DEMO_NAME, _demo_path(), "demo")


def _no_revision(name: str, revision: str | None) -> None:
    if revision is not None:
        raise ConfigError(
            f"--revision {revision} does not apply to {name!r}.",
            "Only repositories in the Hugging Face cache have revisions; a folder is what it is.",
            param="revision",
        )


def _from_path(path: Path) -> ResolvedModel:
    if path.is_file():
        if path.suffix == ".gguf":
            raise _is_gguf(str(path))
        raise UnsupportedModel(f"{path} is a file.", "A model is a folder with a config.json.", f"Try {path.parent}")
    _check_checkpoint(path, str(path))
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
        return ResolvedModel(_repo_id(path.parent.parent), path, "path", path.name)
    return ResolvedModel(path.name, path, "path")


def _from_cache(name: str, revision: str | None) -> ResolvedModel | None:
    """By full name, or by the part behind the slash where only one repository has it. None: not in the cache."""
    repositories = _cached_repositories()
    if name in repositories:
        return _resolve_cached(name, revision)
    same = [repo_id for repo_id in repositories if repo_id.rpartition("/")[2] == name]
    if len(same) > 1:
        raise ModelNotFound(
            f"{name!r} is the name of {len(same)} cached models.",
            f"They are {', '.join(same)}.",
            f"localllm up {same[0]}",
            param="model",
        )
    return _resolve_cached(same[0], revision) if same else None


def _resolve_cached(repo_id: str, revision: str | None) -> ResolvedModel:
    snapshot = _snapshot(hub_cache_dir() / _folder_name(repo_id), repo_id, revision)
    _check_checkpoint(snapshot, repo_id)
    return ResolvedModel(repo_id, snapshot, "cache", snapshot.name)


def _snapshot(repository: Path, repo_id: str, revision: str | None) -> Path:
    """The snapshot of a branch, a tag or a commit (its first 7 digits will do); without a revision, of main."""
    snapshots = {path.name: path for path in _folders(repository / "snapshots")}
    wanted = revision or "main"
    commit = _ref(repository, wanted) or wanted
    if commit in snapshots:
        return snapshots[commit]
    near = [name for name in snapshots if len(commit) >= 7 and name.startswith(commit)]
    if len(near) == 1:
        return snapshots[near[0]]
    if revision is None and len(snapshots) == 1:
        return next(iter(snapshots.values()))  # fetched by commit: there never was a main
    refs = [str(path.relative_to(repository / "refs")) for path in (repository / "refs").rglob("*") if path.is_file()]
    raise ModelNotFound(
        f"Revision {wanted!r} of {repo_id} is not in the Hugging Face cache.",
        f"Cached are: {', '.join(sorted([*refs, *(name[:12] for name in snapshots)])) or 'none'}.",
        f"hf download {repo_id} --revision {wanted}",
        param="revision",
    )


def _ref(repository: Path, name: str) -> str | None:
    """The commit that a branch or tag stood for when it was fetched."""
    file = repository / "refs" / name
    if ".." in Path(name).parts or Path(name).is_absolute() or not file.is_file():
        return None
    return file.read_text(encoding="utf-8").strip()


def _check_checkpoint(folder: Path, name: str) -> None:
    """Refuse what cannot be a whole checkpoint in safetensors, saying what was found instead."""
    files = sorted(path.name for path in folder.iterdir() if path.exists())
    found = (
        f"Found: {', '.join(files[:_SHOWN_NAMES])}{', ...' if len(files) > _SHOWN_NAMES else ''}."
        if files
        else ("It is empty.")
    )
    if "config.json" not in files:
        raise _no_config(folder, name, files, found)
    if not any(file.endswith(".safetensors") for file in files):
        if any(file.endswith((".bin", ".pt", ".pth")) for file in files):
            raise UnsupportedModel(
                f"{name} has its weights in PyTorch's pickle format.",
                found,
                "Loading a pickle can run code. Fetch a revision with safetensors files, or convert it.",
            )
        raise CorruptModel(f"{name} has no weights.", found, _fetch_hint(name))
    missing = [file for file in _indexed_shards(folder) if file not in files]
    if missing:
        raise CorruptModel(
            f"{name} is incomplete.",
            f"{len(missing)} of {len(_indexed_shards(folder))} weight files are missing, {missing[0]} among them.",
            _fetch_hint(name),
        )


def _no_config(folder: Path, name: str, files: list[str], found: str) -> ModelNotFound | UnsupportedModel:
    if any(file.endswith(".gguf") for file in files):
        return _is_gguf(name)
    if "adapter_config.json" in files:
        return UnsupportedModel(
            f"{name} is an adapter, not a model.",
            "It changes the weights of another checkpoint.",
            "Merge it into its base model and save that.",
        )
    if "params.json" in files or any(file.startswith("consolidated.") for file in files):
        return UnsupportedModel(
            f"{name} is in its maker's own format.", found, "Fetch the version for transformers: it has a config.json."
        )
    inside = [path for path in _folders(folder) if (path / "config.json").is_file()]
    hint = f"localllm up {inside[0]}" if inside else _fetch_hint(name)
    return ModelNotFound(f"{name} is no model: it has no config.json.", found, hint, param="model")


def _is_gguf(name: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{name} holds GGUF weights.",
        "This version reads safetensors checkpoints.",
        "Fetch the repository that it was converted from: hf download ORG/NAME",
    )


def _indexed_shards(folder: Path) -> list[str]:
    """The weight files that a sharded checkpoint says it has; [] where it has no index."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return []
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CorruptModel(f"{index} cannot be read.", f"{error!r}.", "Fetch the file again.") from error


def _not_found(name: str) -> ModelNotFound:
    names = [DEMO_NAME, *_cached_repositories()]
    short = {known.rpartition("/")[2].lower(): known for known in names}
    asked = name.rpartition("/")[2].lower()
    near = [short[match] for match in difflib.get_close_matches(asked, short, n=3, cutoff=0.6)]
    near += [known for known in names if asked in known.lower() and known not in near]
    meant = f"Did you mean {' or '.join(near[:3])}? " if near else ""
    hint = _fetch_hint(name) if "/" in name else "Give a folder, or ORG/NAME after: hf download ORG/NAME"
    return ModelNotFound(
        f"{name!r} is neither a folder nor in the Hugging Face cache.", f"{meant}{_available()}", hint, param="model"
    )


def _available() -> str:
    names = [model.name for model in list_models()]
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return f"Available: {', '.join(names[:_SHOWN_NAMES]) or 'none'}{more} (cache: {hub_cache_dir()})."


def _fetch_hint(name: str) -> str:
    """This version does not download; the hub's own command does."""
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return f"hf download {name}  (localllm itself does not download yet)"
    return "Copy the missing files into the folder."


def _cached_repositories() -> list[str]:
    return sorted(_repo_id(path) for path in _folders(hub_cache_dir()) if path.name.startswith("models--"))


def _repo_id(folder: Path) -> str:
    return folder.name.removeprefix("models--").replace("--", "/")


def _folder_name(repo_id: str) -> str:
    return "models--" + repo_id.replace("/", "--")


def _folders(parent: Path) -> Iterable[Path]:
    """Folders inside a folder; none where it is absent or may not be read."""
    try:
        return [path for path in parent.iterdir() if path.is_dir()]
    except OSError:
        return []
