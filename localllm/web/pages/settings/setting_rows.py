"""The settings and versions that the settings page shows.

Does not know: HTTP, keys, files on disk.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from platform import python_version
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from localllm.config.setting_spec import SettingSpec
from localllm.config.settings import SETTINGS, EngineConfig, ServerConfig, Settings
from localllm.units import format_count
from localllm.version import __version__
from localllm.web.pages.frame.static import VENDOR
from localllm.web.pages.frame.views import Fact, View, view

if TYPE_CHECKING:
    from localllm.serving.served import ServedModel


@dataclass(frozen=True, slots=True)
class SettingRow:
    """One setting. All texts are ready to show."""

    name: str
    text: str  # what it does, as a title
    meaning: str  # the text with the allowed values and the note
    value: str
    unit: str
    now: str  # the value that was chosen at the start if the setting leaves it open; empty: none
    typed: str  # the value in force, as it can be typed; empty: none
    allowed: str
    default: str
    source: str  # flag, environment, file, profile, default
    is_set: bool  # differs from the default because a source sets it
    at_once: bool = False  # a change takes effect without a restart
    change_url: str = ""  # empty: the page cannot change this setting
    note: str = ""


@view("settings/_group.html")
class SettingGroup(View):
    """Settings of one subject."""

    id: str
    title: str
    rows: tuple[SettingRow, ...]
    num_set: int  # not at their default
    is_open: bool


@view("settings/_groups.html")
class SettingGroups(View):
    """All groups, or those with a setting that a search found."""

    groups: tuple[SettingGroup, ...]
    query: str = ""  # empty: all


PACKAGES = ("torch", "triton", "transformers", "tokenizers", "huggingface-hub", "litestar", "uvicorn", "msgspec")

PLANNED = {
    "max_model_len": "max_model_len", "max_num_batched_tokens": "max_num_batched_tokens", "block_size": "block_size",
    "long_prefill_token_threshold": "long_prefill_token_threshold", "dtype": "dtype", "kv_cache_dtype": "kv_dtype",
    "device": "device", "kv_cache_memory_bytes": "kv_bytes",
}  # fmt: skip
"""Settings that the memory plan decides if they are open -> name of the plan's field."""


def groups(settings: Settings, served: ServedModel | None, query: str = "") -> SettingGroups:
    """Return the groups, folded. `query`: words that a setting must contain; its groups are then open."""
    words = query.casefold().replace("-", "_").split()
    server_first = [SETTINGS[each.name] for config in (ServerConfig, EngineConfig) for each in fields(config)]
    made = []
    for number, (title, group) in enumerate(groupby(server_first, key=lambda spec: spec.group)):
        rows = tuple(row(spec.name, settings, served) for spec in group if _has(spec, words))
        num_set = sum(each.is_set for each in rows)
        if rows:
            made.append(SettingGroup(f"group-{number}", title, rows, num_set, is_open=bool(words)))
    return SettingGroups(tuple(made), query.strip())


def _has(spec: SettingSpec, words: Sequence[str]) -> bool:
    """Return whether a setting contains each word: in its name, its group, its meaning, or a spelling of its flag."""
    text = " ".join((spec.name, spec.group, spec.meaning, *spec.aliases)).casefold().replace("-", "_")
    return all(word in text for word in words)


def row(name: str, settings: Settings, served: ServedModel | None) -> SettingRow:
    """Return the row of a setting. `served`: the ready model, whose profile and plan show the values of
    open settings.
    """
    tuned: Mapping[str, Any] = getattr(served, "tuned", None) or {}
    value, source = _value_and_source(name, settings)
    if name in tuned and source == "default":
        value, source = tuned[name], "profile"
    spec = SETTINGS[name]
    planned = served is not None and spec.name in PLANNED and value in (None, "auto")
    decided = getattr(served.plan, PLANNED[spec.name]) if served is not None and planned else None
    return SettingRow(
        name=name,
        text=spec.text[:1].upper() + spec.text[1:],
        meaning=spec.meaning,
        value=_printed(spec, value),
        unit=spec.unit if _has_unit(spec, value) else "",
        now=_printed(spec, decided) + (f" {spec.unit}" if _has_unit(spec, decided) else "")
        if decided is not None
        else "",
        typed=spec.typed(value) or spec.typed(decided),
        allowed=spec.allowed + (", separated by commas" if spec.kind == "tuple" else ""),
        default=_printed(spec, spec.default),
        source=source,
        is_set=source != "default",
        at_once=name == "log_level",
        change_url="" if spec.by_hand else f"/settings/change?{urlencode({'name': name})}",
        note=spec.note,
    )


def _value_and_source(name: str, settings: Settings) -> tuple[Any, str]:
    """Return the value and its source for the model named at start, including its table in the config file."""
    first = settings.of_first_model()
    source: str = settings.source(name)
    table = settings.table(settings.engine.model)
    if table is not None and name in table.engine and source not in ("flag", "environment"):
        source = "file"
    return first.value(name), source


def _has_unit(spec: SettingSpec, value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and spec.unit != "bytes" and bool(spec.unit)


def _printed(spec: SettingSpec, value: Any) -> str:
    return format_count(value) if spec.unit not in ("", "bytes") and isinstance(value, int) else spec.shown(value)


def versions() -> tuple[Fact, ...]:
    found = [Fact("localllm", __version__, "Apache-2.0"), Fact("Python", python_version())]
    return (*found, *(Fact(name, _version(name)) for name in PACKAGES))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def licences() -> tuple[Fact, ...]:
    """Return the licences of the third-party code that the pages include."""
    manifest = tomllib.loads((VENDOR / "MANIFEST.toml").read_text(encoding="utf-8"))
    return tuple(
        Fact(f"{each['name']} {each['version']}", each["licence"], each["home"]) for each in manifest["package"]
    )
