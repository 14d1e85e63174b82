"""Profiles: tuned settings, stored for later starts of the same model on the same device with the same versions.

    $XDG_DATA_HOME/localllm/profiles/MODEL--NAME--KEY.toml      `localllm tune` writes them, a start reads them

A profile records what it was measured on. A start uses the newest applied profile (or the one that `--profile` names)
if device, driver, versions, model and the form of the weights are unchanged. Flags, environment and config file take
precedence over it. If less memory is free than at tuning time, its settings are dropped in steps. A model is recognised
by a hash over its files.
Does not know: how settings are found (tuning/), how they are planned.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localllm.config.settings import PLACEMENT, EngineConfig, Settings, Source
from localllm.errors import ConfigError, DoesNotFit
from localllm.files.folders import data_folder, make_private, translated_write, write_whole
from localllm.machine.hardware import Hardware
from localllm.units import format_count
from localllm.version import __version__

if TYPE_CHECKING:
    from localllm.models.fit import MemoryPlan
    from localllm.models.spec.model_spec import ModelSpec


SCHEMA = 1
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HEAD = "# Written by `localllm tune`. It is used only while everything under [key] is unchanged.\n"
FORM = ("dtype", "quantization", "cpu_weights", "model_impl", "enable_lora", "max_loras", "max_lora_rank")
"""Fields of EngineConfig that determine the stored form of the weights, and thereby their speed."""
SUFFIXES = (".json", ".safetensors", ".bin", ".py")
"""Files of a checkpoint that its numbers depend on: .bin of a drafter, .py with --trust-remote-code."""
SIZES = ("max_model_len", "kv_cache_memory_bytes", "gpu_memory_utilization", "n_cpu_moe", "expert_cache_gib")


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """The conditions under which a measurement is valid."""

    device: str  # name of the GPU, or of the CPU with its cores
    driver: str  # empty on a CPU
    torch: str
    triton: str
    localllm: str
    model: str  # fingerprint of its files
    form: str  # settings of the weights' stored form

    def differs_from(self, now: ProfileKey) -> str:
        """Return the first difference, in words; empty if there is none."""
        for name, words in _WORDS.items():
            then, today = getattr(self, name), getattr(now, name)
            if then != today:
                if name in ("model", "form"):
                    return words
                return f"{words} was {then or 'none'} and is {today or 'none'}"
        return ""


_WORDS = {
    "model": "the model's files have changed",
    "device": "the device",
    "driver": "the driver",
    "localllm": "localllm",
    "torch": "torch",
    "triton": "triton",
    "form": "the stored form of the weights has changed",
}


@dataclass(frozen=True, slots=True)
class Profile:
    """Tuned settings for a goal."""

    name: str  # the name for --profile; by default the goal's
    goal: str
    settings: Mapping[str, Any]  # fields of EngineConfig; those at their default are left out
    key: ProfileKey
    created: str  # UTC, ISO 8601
    applied: bool = False  # used by every start, without --profile
    context: int = 0  # longest context, in tokens
    free_bytes: int = 0  # free memory of the device at tuning time
    score: float = 0.0  # in `unit`, measured
    unit: str = ""
    lengths: str = ""  # seed of the requests it was measured with
    load: Mapping[str, Any] = field(default_factory=dict)  # the workload, so that a later check can repeat it

    @property
    def date(self) -> str:
        return self.created[:10]

    @property
    def in_words(self) -> str:
        return f"plan: {self.name}, tuned {self.date}"


# ---- conditions of a measurement -------------------------------------------------------------------------------------


def key_of(path: Path, config: EngineConfig, hardware: Hardware, device: str) -> ProfileKey:
    """Return the present conditions. device: cpu or cuda:0, as in plans."""
    from localllm.version import __version__

    gpu = next((gpu for gpu in hardware.gpus if f"cuda:{gpu.index}" == device), None)
    return ProfileKey(
        device=gpu.name if gpu is not None else f"{hardware.cpu_name}, {hardware.cpu_cores} cores",
        driver=(gpu.driver_version or "") if gpu is not None else "",
        torch=_version("torch"),
        triton=_version("triton"),
        localllm=__version__,
        model=model_fingerprint(path),
        form=" ".join(f"{name}={getattr(config, name)}" for name in FORM),
    )


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return ""


# ---- the files -------------------------------------------------------------------------------------------------------


def profiles_folder() -> Path:
    """Return $XDG_DATA_HOME/localllm/profiles."""
    return data_folder() / "profiles"


def save_profile(profile: Profile, model: str, folder: Path | None = None) -> Path:
    """Write a profile atomically, replacing one of the same name and key. An applied profile un-applies the others.

    Raises `ConfigError` for an invalid name, `NotWritable` for a folder that cannot be written.
    """
    if not _WORD.fullmatch(profile.name) or profile.name in ("auto", "none"):
        why = "A name has up to 64 letters, digits and . _ -, and is not auto or none."
        raise ConfigError(f"{profile.name!r} is not a valid name for a profile.", why, "--save chat", param="save")
    folder = folder or profiles_folder()
    digest = hashlib.blake2b(json.dumps(asdict(profile.key), sort_keys=True).encode(), digest_size=4).hexdigest()
    shown = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(model).name) or "model"
    path = folder / f"{shown}--{profile.name}--{digest}.toml"
    with translated_write(f"The profile {profile.name}", path, param="save"):
        make_private(folder)
        if profile.applied:
            _unmark_others(profile, folder)
        _write(path, profile)
    return path


def _unmark_others(applied: Profile, folder: Path) -> None:
    for path in sorted(folder.glob("*.toml")):
        other = _read(path)
        if other is not None and other.applied and other.key == applied.key and other.name != applied.name:
            _write(path, replace(other, applied=False))


def _write(path: Path, profile: Profile) -> None:
    facts: dict[str, Any] = {f.name: getattr(profile, f.name) for f in fields(profile)}
    tables = {name: facts.pop(name) for name in ("settings", "load")} | {"key": asdict(facts.pop("key"))}
    lines = [_HEAD, f"schema = {SCHEMA}"] + [f"{name} = {toml_value(value)}" for name, value in facts.items()]
    for name, table in tables.items():
        lines += ["", f"[{name}]"] + [
            f"{key} = {toml_value(value)}" for key, value in table.items() if value is not None
        ]
    write_whole(path, "\n".join(lines) + "\n")


def toml_value(value: Any) -> str:
    """Format a string, number or boolean as TOML; JSON's escapes are valid in TOML."""
    return json.dumps(value, ensure_ascii=True)


def read_profiles(folder: Path | None = None) -> list[Profile]:
    """Return all profiles, newest first. Unreadable files are skipped, so that a start does not fail."""
    return [stored.profile for stored in stored_profiles(folder)]


@dataclass(frozen=True, slots=True)
class StoredProfile:
    """A profile and its file."""

    path: Path
    profile: Profile

    @property
    def model(self) -> str:
        """Name of the model, as far as the file name preserves it."""
        return self.path.stem.rsplit("--", 2)[0]


def stored_profiles(folder: Path | None = None) -> list[StoredProfile]:
    """Return all profiles with their files, newest first."""
    paths = sorted((folder or profiles_folder()).glob("*.toml"))
    found = [StoredProfile(path, profile) for path in paths if (profile := _read(path)) is not None]
    return sorted(found, key=lambda each: each.profile.created, reverse=True)


def stored_profile(file: str, folder: Path | None = None) -> StoredProfile:
    """Return the profile in the file of that name. Raises `ConfigError` if there is none."""
    stored = next((each for each in stored_profiles(folder) if each.path.name == file), None)
    if stored is None:
        raise ConfigError(f"There is no profile {file[:120]!r}.", "It may have been deleted already.", param="file")
    return stored


def delete_profile(file: str, folder: Path | None = None) -> Profile:
    """Delete the profile in the file of that name. Raises `ConfigError`."""
    stored = stored_profile(file, folder)
    try:
        stored.path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"Cannot delete {stored.path}.", f"{error}.", param="file") from error
    return stored.profile


def _read(path: Path) -> Profile | None:
    try:
        facts = tomllib.loads(path.read_text(encoding="utf-8"))
        if facts.pop("schema", None) != SCHEMA:
            return None
        profile = Profile(**{**facts, "key": ProfileKey(**facts["key"])})
        known = {f.name for f in fields(EngineConfig)} - {"model"}
        EngineConfig(**profile.settings)
        return profile if profile.settings.keys() <= known else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ConfigError):
        return None


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


# ---- a start ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProfileChoice:
    """The profile that a start uses. profile None: no profile is used, and `why` says the reason."""

    profile: Profile | None
    why: str = ""


def choose(asked: str, key: ProfileKey, profiles: Sequence[Profile]) -> ProfileChoice | None:
    """Choose the profile of a start. asked: auto, none or a name. Return None if nothing was ever tuned for this model.

    Raises `ConfigError` if this model has no profile of the given name.
    """
    if asked == "none":
        return None
    own = [each for each in profiles if each.key.model == key.model]
    named = [each for each in own if each.name == asked or (asked == "auto" and each.applied)]
    if not named:
        if asked == "auto":
            return None
        known = ", ".join(sorted({each.name for each in own})) or "none for this model"
        raise ConfigError(f"There is no profile {asked!r}.", f"Known: {known}.", "localllm tune MODEL", param="profile")
    fitting = [each for each in named if each.key == key]
    if fitting:
        return ProfileChoice(fitting[0])
    return ProfileChoice(None, f"{named[0].name}, tuned {named[0].date}, is not used: {named[0].key.differs_from(key)}")


def settings_that_fit(
    settings: Settings, choice: ProfileChoice, context_of: Callable[[Settings], int]
) -> tuple[Settings, str]:
    """Return the settings of a start, and one line that describes what was used.

    context_of: returns the context that settings would get, or raises `DoesNotFit`. A profile's sizes assume the memory
    that was free at tuning time. If less is free now, first its sizes are dropped, then the whole profile.
    """
    profile = choice.profile
    if profile is None:
        return settings, choice.why
    for without, how in ((), ""), (SIZES, "sizes are planned again"):
        made = with_profile(settings, profile, without)
        try:
            context = context_of(made)
        except DoesNotFit:
            continue
        if context < profile.context and settings.source("max_model_len") == "default":
            how = f"{how}: " if how else ""
            how += (
                f"a context of {format_count(context)} instead of {format_count(profile.context)}, less memory is free"
            )
        return made, f"{profile.in_words} · {how}" if how else profile.in_words
    return settings, f"{profile.name}, tuned {profile.date}, is not used: too little memory is free"


def from_profile(settings: Settings) -> dict[str, Any]:
    """Return the settings whose values came from a profile."""
    return {name: getattr(settings.engine, name) for name in settings.sources if settings.source(name) == "profile"}


def with_profile(settings: Settings, profile: Profile, without: Sequence[str] = ()) -> Settings:
    """Apply the profile to every field that still has its default, except those in `without`. A user who says where
    experts are says all of it."""
    default = EngineConfig()
    table = settings.table(settings.engine.model)
    said = set(table.engine) if table is not None else set()
    if said.intersection(PLACEMENT) or any(settings.source(name) != "default" for name in PLACEMENT):
        said = said.union(PLACEMENT)
    values = {
        name: value
        for name, value in profile.settings.items()
        if settings.source(name) == "default"
        and name not in said
        and name not in without
        and getattr(settings.engine, name) == getattr(default, name)
    }
    source: Source = "profile"
    sources = {**settings.sources, **dict.fromkeys(values, source)}
    return replace(settings, engine=replace(settings.engine, **values), sources=sources)


def fingerprint(path: Path, plan: MemoryPlan, config: EngineConfig, spec: ModelSpec) -> bytes:
    """Return a key of everything besides the tokens that KV cache values depend on: files, dtype, block size, how the
    weights are stored, by what and where they are computed, LongRoPE's factors, the drafter, whose K and V are in the
    same blocks, and this version, since blocks on disk outlive it."""
    digest, drafter = hashlib.blake2b(digest_size=16), spec.drafter
    for owner in (path,) if drafter is None else (path, drafter.path):
        digest.update(f"{owner.resolve()}:".encode())
        for file in files_of(owner):
            status = file.stat()
            digest.update(f"{file.name}:{status.st_size}:{status.st_mtime_ns};".encode())
    kind, moved = plan.device.partition(":")[0], (plan.far and plan.far.layers) or None
    digest.update(f"{plan.dtype}:{plan.kv_dtype}:{plan.block_size}:{kind}:{__version__}".encode())
    made_by = (
        config.quantization, config.cpu_weights, config.model_impl, config.kernels, config.deterministic,
        moved and (moved if plan.far is None or plan.far.disk is None else (moved, "disk")),
        spec.rope.has_long_factors(plan.max_model_len),
        drafter and (drafter.method, drafter.quantization, drafter.spec.rope.has_long_factors(plan.max_model_len)),
    )  # fmt: skip
    digest.update(repr(made_by).encode())
    return digest.digest()


def model_fingerprint(path: Path) -> str:
    """Return a hash of the names and sizes of a checkpoint's files and the content of the small ones. A copy in another
    folder has the same fingerprint."""
    digest = hashlib.blake2b(digest_size=16)
    for file in files_of(path):
        digest.update(f"{file.name}:{file.stat().st_size};".encode())
        if file.name == "config.json":
            digest.update(file.read_bytes())
    return digest.hexdigest()


def files_of(path: Path) -> list[Path]:
    """Return the files of a checkpoint: of a folder the ones with one of `SUFFIXES`, or all parts of a GGUF model."""
    if path.is_file():
        from localllm.models.formats.gguf.file_names import parts_of

        return [path.with_name(name) for name in parts_of(path.name)]
    return [file for suffix in SUFFIXES for file in sorted(path.glob(f"*{suffix}"))]
