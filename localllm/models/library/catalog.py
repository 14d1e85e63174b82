"""Find the checkpoint that a name means: the demo, a path, the Hugging Face cache, or another program's GGUF file.

Only looks at this machine. The cache has huggingface_hub's layout (models--ORG--NAME with refs/ and snapshots/), but is
read without that library: importing it and letting it measure every file takes longer than answering.
Does not know: what is inside config.json (spec/) or a GGUF file, the network.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Literal

from localllm.errors import ConfigError, CorruptModel, ModelError, ModelNotFound, UnsupportedModel
from localllm.files.json_file import read_json, read_text
from localllm.models.formats.gguf.file_names import GGUFModel, gguf_models, parts_of, require_one, whole_stem
from localllm.models.library.names import ModelName, aliases, looks_like_path, parse_name, set_alias, target_of

log = logging.getLogger(__name__)
DEMO_NAME = "demo"
_SHOWN_NAMES = 10


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A checkpoint on this machine. `path` is a folder with a config.json, or a GGUF file (or its first part)."""

    name: str  # the name that clients use
    path: Path  # another program's GGUF file need not end in .gguf
    source: Literal["demo", "path", "cache", "ollama", "lmstudio", "llamacpp", "jan"]
    revision: str | None = None  # commit of a cached repository
    alias_of: str | None = None  # the name that `name` is an alias of

    @property
    def format(self) -> Literal["safetensors", "gguf"]:
        return "gguf" if self.path.is_file() else "safetensors"

    @property
    def files(self) -> list[Path]:
        """All files of the model: the parts of the GGUF file, or the files in the folder."""
        if self.path.is_file():
            return [self.path.parent / name for name in parts_of(self.path.name)]
        return [path for path in self.path.rglob("*") if path.is_file()]

    @property
    def size_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    @property
    def used_s(self) -> float:
        """Time of the last read, in seconds since 1970, as far as the disk records access times."""
        return max((file.stat().st_atime for file in self.files), default=0.0)


def resolve_model(name: str, revision: str | None = None, *, paths: bool = True) -> ResolvedModel:
    """Return the checkpoint that a name means.

    name: a path, ORG/NAME with :QUANT or @REVISION, the bare NAME of one, PROGRAM:NAME, demo, or an alias of one.
    paths: False for a name from a client: then the error does not reveal what else is on this machine.
    Raises `ModelNotFound` (with similar names), `UnsupportedModel` or `CorruptModel`; `ConfigError` for `revision`.
    """
    name = name.strip()
    target = target_of(name)
    return _resolve(name, revision, paths) if target is None else _resolve_alias(name, target, revision, paths)


def _resolve_alias(alias: str, target: str, revision: str | None, paths: bool = True) -> ResolvedModel:
    try:
        return replace(_resolve(target, revision, paths), name=alias, alias_of=target)
    except ModelNotFound as error:
        raise ModelNotFound(
            f"{alias} is a second name of {target}, which is not on this machine.",
            error.why,
            error.hint,
            param=error.param,
        ) from None


def _resolve(name: str, revision: str | None, paths: bool) -> ResolvedModel:
    if name == DEMO_NAME:
        _no_revision(name, revision)
        return _demo()
    if not paths:
        return _resolve_for_client(name, revision)
    if _is_taken_by_path(name):
        _no_revision(name, revision)
        return _from_path(_as_path(name))
    if looks_like_path(name) or not name:
        what = f"The path {name!r} does not exist." if name else "The name of a model is missing."
        raise ModelNotFound(what, _available(), "localllm up  (the demo model)", param="model")
    found = _by_name(name, revision)
    if found is not None:
        return found
    if _as_path(name).is_dir():
        return _from_path(_as_path(name))  # raises an error that says what the folder contains
    raise _not_found(name)


def _resolve_for_client(name: str, revision: str | None) -> ResolvedModel:
    """Resolve a client's name. The error names no folder of this machine, and paths are never accepted."""
    found = None if looks_like_path(name) or not name else _by_name(name, revision)
    if found is None or _is_taken_by_path(name):
        raise ModelNotFound(f"The model {name!r} is not on this machine.", "", "localllm list", param="model")
    return found


def _is_taken_by_path(name: str) -> bool:
    """Return whether the name is an existing path, which takes precedence over a model of that name."""
    place = _as_path(name)
    if not name or not place.is_dir():
        return bool(name) and place.is_file()
    return looks_like_path(name) or (place / "config.json").is_file() or any(place.glob("*.gguf"))


def _by_name(name: str, revision: str | None) -> ResolvedModel | None:
    asked = parse_name(name)
    if asked.program is not None:
        _no_revision(name, revision)
        return _from_program(asked)
    return _from_cache(asked, revision or asked.revision)


def _as_path(name: str) -> Path:
    """Return the name as a path; a path that does not exist if the name cannot be a path."""
    try:
        path = Path(name).expanduser()
        path.exists()
    except (RuntimeError, OSError, ValueError):  # an unknown user's home, a name too long for the disk, a NUL
        return Path(os.devnull) / "nothing"
    return path


def adapter_folder(name: str) -> Path:
    """Return the folder of a LoRA adapter: a local folder, or a repository's snapshot in the Hugging Face cache."""
    path = _as_path(name)
    if path.is_dir() or name not in _cached_repositories():
        return path
    return _snapshot(hub_cache_dir() / _folder_name(name), name, None)


def is_for_the_hub(name: str, revision: str | None = None, *, paths: bool = True) -> bool:
    """Return whether the name is a repository's and this machine does not have it completely."""
    if looks_like_path(name.strip()) or not parse_name(name).is_repository or target_of(name.strip()) is not None:
        return False
    try:
        resolve_model(name, revision, paths=paths)
    except (ModelNotFound, CorruptModel):
        return not paths or not _as_path(name).exists()
    except UnsupportedModel:
        return False
    return False


def list_models() -> list[ResolvedModel]:
    """Return all models that `resolve_model` accepts by name: demo, cache, other programs, and aliases."""
    own, second = _list_own_names(), list[ResolvedModel]()
    for alias, target in aliases().items():
        second += _skip_broken(alias, partial(_alias_entry, alias, target))
    return [*own, *second]


def _alias_entry(alias: str, target: str) -> list[ResolvedModel]:
    return [_resolve_alias(alias, target, None)]


def _list_own_names() -> list[ResolvedModel]:
    found = []
    for repo_id in _cached_repositories():
        found += _skip_broken(repo_id, partial(_list_repository, repo_id))
    demo = [ResolvedModel(DEMO_NAME, demo_path(), "demo")] if (demo_path() / "config.json").is_file() else []
    return [*demo, *found, *_skip_broken("other programs", _list_programs)]


def _skip_broken(name: str, look: Callable[[], list[ResolvedModel]]) -> list[ResolvedModel]:
    """Return what `look` finds, or nothing if it fails, so that one bad file does not break the list."""
    try:
        return look()
    except ModelError:
        return []
    except Exception as error:
        _log_once(name, f"{type(error).__name__}: {error}")
        return []


@cache
def _log_once(name: str, reason: str) -> None:
    log.warning("model left out of the list name=%s reason=%s", name, reason)


def copy_model(source: str, name: str) -> ResolvedModel:
    """Give an installed model a second name, like `ollama cp`; no weights are copied, and the first name stays.

    Raises `ModelNotFound` for `source`, `ConfigError` for an invalid name or a name that is already a model's own.
    """
    model = resolve_model(source)
    if model.source == "path":
        why = "A second name needs a model's name, as `localllm list` shows it."
        raise ConfigError(f"{source} is a path.", why, "localllm list", param="source")
    with suppress(ModelError):
        if resolve_model(name).alias_of is None:
            raise ConfigError(
                f"{name} is the name of a model.",
                "The model would become unreachable.",
                "Choose another name.",
                param="destination",
            )
    set_alias(name, model.alias_of or model.name)
    return resolve_model(name)


def _list_repository(repo_id: str) -> list[ResolvedModel]:
    """Return a cached repository's checkpoint and GGUF models; nothing for data sets and unfinished downloads."""
    try:
        snapshot = _snapshot(hub_cache_dir() / _folder_name(repo_id), repo_id, None)
        models = gguf_models(_names(snapshot))
    except ModelNotFound:
        return []
    found = []
    if not models or (snapshot / "config.json").exists():
        try:
            found.append(_resolve_cached(repo_id, None, None))
        except ModelError:
            pass  # its GGUF files may still be whole
    ggufs = [_gguf_of(repo_id, snapshot, model, models) for model in models if not model.missing]
    return found + [each for each in ggufs if each.path not in [other.path for other in found]]


def hub_cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder of huggingface_hub's models: HF_HUB_CACHE, else HF_HOME/hub, else ~/.cache/huggingface/hub."""
    environ = os.environ if environ is None else environ
    direct = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE")
    home = environ.get("HF_HOME") or os.path.join(environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.path.expandvars(direct or os.path.join(home, "hub"))).expanduser()


def demo_path() -> Path:
    """Return the folder of the bundled demo model."""
    return Path(__file__).parent.parent / "demo"


def _demo() -> ResolvedModel:
    if not (demo_path() / "config.json").is_file():
        raise ModelNotFound(
            "The demo model is not part of this installation.",
            f"{demo_path()} holds no config.json.",
            "In a checkout, make it with scripts/make_demo_model.",
            param="model",
        )
    return ResolvedModel(DEMO_NAME, demo_path(), "demo")


def _no_revision(name: str, revision: str | None) -> None:
    if revision is not None:
        raise ConfigError(
            f"--revision {revision} does not apply to {name!r}.",
            "Only repositories in the Hugging Face cache have revisions.",
            param="revision",
        )


def _from_path(path: Path) -> ResolvedModel:
    """Resolve a folder or a file. A GGUF file may be a link into a store of hashes, so the link's own name counts."""
    path = path.absolute()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise UnsupportedModel(
                f"{path} is a file.", "A model is a folder with a config.json, or a GGUF file.", f"Try {path.parent}"
            )
        return _from_gguf_file(path)
    path = path.resolve()
    if not (path / "config.json").is_file():
        ggufs = gguf_models(file.name for file in path.glob("*.gguf"))
        if ggufs:
            return _from_gguf_file(
                path / require_one(str(path), ggufs, None, "Copy the missing files into the folder.").files[0]
            )
    _check_checkpoint(path, str(path))
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
        return ResolvedModel(_repo_id(path.parent.parent), path, "path", path.name)
    return ResolvedModel(path.name, path, "path")


def _from_gguf_file(path: Path) -> ResolvedModel:
    """Resolve a GGUF file. Any part of a split file stands for the whole model."""
    parts = parts_of(path.name)
    missing = [name for name in parts if not (path.parent / name).is_file()]
    if missing:
        raise CorruptModel(
            f"{path.name} is one of {len(parts)} parts.",
            f"{len(missing)} of them are missing from {path.parent}, {missing[0]} among them.",
            "Copy the missing files into the folder.",
        )
    return ResolvedModel(whole_stem(path.name), path.parent / parts[0], "path")


def _from_program(asked: ModelName) -> ResolvedModel:
    from localllm.models.library.programs import program_models

    found = [ResolvedModel(model.name, model.path, model.program) for model in program_models(asked.program)]
    wanted = str(asked).lower()
    for model in found:
        if wanted in (model.name.lower(), model.name.lower().removesuffix(":latest")):
            return model
    raise ModelNotFound(
        f"{asked} is not among the files of {asked.program}.",
        f"There are: {', '.join(model.name for model in found[:_SHOWN_NAMES]) or 'none'}.",
        "localllm list",
        param="model",
    )


def _list_programs() -> list[ResolvedModel]:
    from localllm.models.library.programs import program_models

    return [ResolvedModel(model.name, model.path, model.program) for model in program_models()]


def _from_cache(asked: ModelName, revision: str | None) -> ResolvedModel | None:
    """Find a model by its full name, or by the part after the slash if that is unique. None: not in the cache."""
    repositories = _cached_repositories()
    if asked.base in repositories:
        return _resolve_cached(asked.base, asked.quant, revision)
    same = [repo_id for repo_id in repositories if repo_id.rpartition("/")[2] == asked.base]
    if len(same) > 1:
        raise ModelNotFound(
            f"{asked.base!r} is the name of {len(same)} cached models.",
            f"They are {', '.join(same)}.",
            f"localllm up {same[0]}",
            param="model",
        )
    return _resolve_cached(same[0], asked.quant, revision) if same else None


def _resolve_cached(repo_id: str, quant: str | None, revision: str | None) -> ResolvedModel:
    """Return the checkpoint of a snapshot, or one of its GGUF files: with `quant`, or if it has no other checkpoint."""
    snapshot = _snapshot(hub_cache_dir() / _folder_name(repo_id), repo_id, revision)
    names = _names(snapshot)
    models = gguf_models(names)
    if quant is not None or (models and "config.json" not in names):
        name = str(ModelName(repo_id, quant))
        if not models:
            raise ModelNotFound(
                f"{name} is not on this machine.",
                f"{_found(names)} There is no GGUF file.",
                _fetch_hint(name),
                param="model",
            )
        return _gguf_of(repo_id, snapshot, require_one(repo_id, models, quant, _fetch_hint(name)), models)
    _check_checkpoint(snapshot, repo_id)
    return ResolvedModel(repo_id, snapshot, "cache", snapshot.name)


def _gguf_of(repo_id: str, snapshot: Path, model: GGUFModel, among: list[GGUFModel]) -> ResolvedModel:
    """Resolve one GGUF model, named by its quantisation if that is unique."""
    same = [other for other in among if other.quant == model.quant]
    quant = model.quant if model.quant and len(same) == 1 else model.stem
    return ResolvedModel(str(ModelName(repo_id, quant)), snapshot / model.files[0], "cache", snapshot.name)


def _names(folder: Path) -> list[str]:
    """Return the files below a folder, dead links left out; empty if it is not a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _snapshot(repository: Path, repo_id: str, revision: str | None) -> Path:
    """Return the snapshot of a branch, a tag or a commit (at least 7 digits of it); without a revision, of main."""
    snapshots = {path.name: path for path in _folders(repository / "snapshots")}
    wanted = revision or "main"
    commit = _ref(repository, wanted) or wanted
    if commit in snapshots:
        return snapshots[commit]
    near = [name for name in snapshots if len(commit) >= 7 and name.startswith(commit)]
    if len(near) == 1:
        return snapshots[near[0]]
    if revision is None and len(snapshots) == 1:
        return next(iter(snapshots.values()))  # downloaded by commit, without a ref for main
    refs = [str(path.relative_to(repository / "refs")) for path in (repository / "refs").rglob("*") if path.is_file()]
    raise ModelNotFound(
        f"Revision {wanted!r} of {repo_id} is not in the Hugging Face cache.",
        f"Cached revisions: {', '.join(sorted([*refs, *(name[:12] for name in snapshots)])) or 'none'}.",
        f"localllm pull {repo_id}@{wanted}",
        param="revision",
    )


def _ref(repository: Path, name: str) -> str | None:
    """Return the commit of a branch or tag at the time of its download."""
    file = repository / "refs" / name
    if ".." in Path(name).parts or Path(name).is_absolute() or not file.is_file():
        return None
    try:
        return read_text(file, 1024).strip()
    except CorruptModel:
        return None


def _check_checkpoint(folder: Path, name: str) -> None:
    """Refuse a folder that is not a complete safetensors checkpoint; the error says what was found instead."""
    files = sorted(path.name for path in folder.iterdir() if path.exists())
    found = _found(files)
    if "config.json" not in files:
        raise _no_config(folder, name, files, found)
    if not any(file.endswith(".safetensors") for file in files):
        if any(file.endswith((".bin", ".pt", ".pth")) for file in files):
            raise UnsupportedModel(
                f"{name} has its weights in PyTorch's pickle format.",
                found,
                "Loading a pickle can run code. Download a revision with safetensors files, or convert it.",
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
    if "adapter_config.json" in files:
        return UnsupportedModel(
            f"{name} is an adapter, not a model.",
            "It changes the weights of another checkpoint.",
            f"localllm up BASE --lora-modules NAME={name}",
        )
    if "params.json" in files or any(file.startswith("consolidated.") for file in files):
        return UnsupportedModel(
            f"{name} is in its vendor's own format, which is not supported.",
            found,
            "Download the version for transformers: it has a config.json.",
        )
    inside = [path for path in _folders(folder) if (path / "config.json").is_file()]
    hint = f"localllm up {inside[0]}" if inside else _fetch_hint(name)
    return ModelNotFound(f"{name} is not a model: it has no config.json.", found, hint, param="model")


def _found(files: list[str]) -> str:
    more = ", ..." if len(files) > _SHOWN_NAMES else ""
    return f"Found: {', '.join(files[:_SHOWN_NAMES])}{more}." if files else "It is empty."


def _indexed_shards(folder: Path) -> list[str]:
    """Return the weight files that the index of a sharded checkpoint names; [] if it has no index."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return []
    try:
        return sorted(set(read_json(index)["weight_map"].values()))
    except (KeyError, AttributeError, TypeError) as error:
        raise CorruptModel(f"{index} cannot be read.", f"{error!r}.", "Download the file again.") from error


def _not_found(name: str) -> ModelNotFound:
    names = [DEMO_NAME, *_cached_repositories(), *aliases()]
    short = {known.rpartition("/")[2].lower(): known for known in names}
    asked = name.rpartition("/")[2].lower()
    near = [short[match] for match in difflib.get_close_matches(asked, short, n=3, cutoff=0.6)]
    near += [known for known in names if asked in known.lower() and known not in near]
    meant = f"Did you mean {' or '.join(near[:3])}? " if near else ""
    hint = _fetch_hint(name) if parse_name(name).is_repository else f"localllm search {name}"
    return ModelNotFound(
        f"{name!r} is not a folder and not in the Hugging Face cache.", f"{meant}{_available()}", hint, param="model"
    )


def _available() -> str:
    names = [*(model.name for model in _list_own_names()), *aliases()]
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return f"Available: {', '.join(names[:_SHOWN_NAMES]) or 'none'}{more} (cache: {hub_cache_dir()})."


def _fetch_hint(name: str) -> str:
    if parse_name(name).is_repository and not looks_like_path(name):
        return f"localllm pull {name}"
    return "Copy the missing files into the folder."


def _cached_repositories() -> list[str]:
    return sorted(_repo_id(path) for path in _folders(hub_cache_dir()) if path.name.startswith("models--"))


def _repo_id(folder: Path) -> str:
    return folder.name.removeprefix("models--").replace("--", "/")


def _folder_name(repo_id: str) -> str:
    return "models--" + repo_id.replace("/", "--")


def _folders(parent: Path) -> Iterable[Path]:
    """Return the folders inside a folder; none if it is missing or unreadable."""
    try:
        return [path for path in parent.iterdir() if path.is_dir()]
    except OSError:
        return []
