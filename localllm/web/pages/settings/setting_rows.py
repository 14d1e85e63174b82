"""The settings and versions that the settings page shows.

Does not know: HTTP, keys, files on disk.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from platform import python_version
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from localllm.config.config_file import BY_HAND
from localllm.config.settings import EngineConfig, ServerConfig, Settings
from localllm.units import format_bytes, format_count
from localllm.version import __version__
from localllm.web.pages.frame.static import VENDOR
from localllm.web.pages.frame.views import Fact
from localllm.web.pages.settings.views import SettingGroup, SettingRow
from localllm.web.pages.settings.words import GROUPS, WORDS, Words

if TYPE_CHECKING:
    from localllm.models.fit import MemoryPlan
    from localllm.serving.served import ServedModel

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "huggingface-hub", "litestar", "uvicorn", "msgspec")
PLANNED = {
    "max_model_len": "max_model_len", "max_num_batched_tokens": "max_num_batched_tokens", "block_size": "block_size",
    "long_prefill_token_threshold": "long_prefill_token_threshold", "dtype": "dtype", "kv_cache_dtype": "kv_dtype",
    "device": "device", "kv_cache_memory_bytes": "kv_bytes",
}  # fmt: skip
"""Settings that the memory plan decides if they are open -> name of the plan's field."""


def groups(settings: Settings, served: ServedModel | None) -> tuple[SettingGroup, ...]:
    """Return the groups; the first is open, and so is each with a changed setting."""
    made = []
    for number, (title, group) in enumerate(GROUPS.items()):
        rows = tuple(row(name, settings, served) for name in group)
        num_set = sum(each.is_set for each in rows)
        made.append(SettingGroup(f"group-{number}", title, rows, num_set, not number or num_set > 0))
    return tuple(made)


def row(name: str, settings: Settings, served: ServedModel | None) -> SettingRow:
    """Return the row of a setting. `served`: the ready model, whose profile and plan show the values of
    open settings.
    """
    tuned: Mapping[str, Any] = getattr(served, "tuned", None) or {}
    value, source = _asked(name, settings)
    if name in tuned and source == "default":
        value, source = tuned[name], "profile"
    plan = served.plan if served is not None else None
    words = WORDS[name]
    return SettingRow(
        name=name,
        meaning=words.meaning,
        value=_shown(name, value, words),
        unit=words.unit if isinstance(value, int | float) and not name.endswith("_bytes") else "",
        now=_decided(name, plan) if value in (None, "auto") else "",
        allowed=words.range,
        default=_shown(name, _default(name), words),
        source=source,
        is_set=source != "default",
        at_once=name == "log_level",
        change_url="" if name in BY_HAND else f"/settings/change?{urlencode({'name': name})}",
    )


def _asked(name: str, settings: Settings) -> tuple[Any, str]:
    """Return the value and its source for the model named at start, including its table in the config file."""
    first = settings.of_first_model()
    part = first.engine if hasattr(first.engine, name) else first.server
    source: str = settings.source(name)
    table = settings.table(settings.engine.model)
    if table is not None and name in table.engine and source not in ("flag", "environment"):
        source = "file"
    return getattr(part, name), source


def _default(name: str) -> Any:
    defaults = (EngineConfig(), ServerConfig())
    return getattr(next(part for part in defaults if hasattr(part, name)), name)


def _decided(name: str, plan: MemoryPlan | None) -> str:
    if plan is None or name not in PLANNED:
        return ""
    return _shown(name, getattr(plan, PLANNED[name]), WORDS[name])


def _shown(name: str, value: Any, words: Words) -> str:
    if name == "api_key":
        return "none" if value is None else "set, not shown"
    if value is None or value == ():
        return words.unset
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ", ".join("=".join(each) if isinstance(each, tuple) else str(each) for each in value)
    if name.endswith("_bytes"):
        return format_bytes(value)
    if isinstance(value, float):
        return "forever" if math.isinf(value) else f"{value:g}"
    return format_count(value) if isinstance(value, int) and name != "port" else str(value)


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
