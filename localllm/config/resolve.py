"""Resolve the settings from the given flags, the environment and the config file.

Does not know: what a setting means (config/settings.py), the command line.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from localllm.config.mcp_servers import read_mcp_servers
from localllm.config.setting_spec import SettingSpec
from localllm.config.settings import SETTINGS, EngineConfig, ModelTable, PicksTable, ServerConfig, Settings, Source
from localllm.config.upstreams import read_upstreams
from localllm.errors import ConfigError
from localllm.files.folders import config_folder

CREDENTIAL = "api-key"
"""Name of the file in $CREDENTIALS_DIRECTORY, where systemd puts what a unit names with LoadCredential=."""


def resolve(
    flags: Mapping[str, Any],
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
    text: str | None = None,
) -> Settings:
    """Build the `Settings` from the given flags (None: not given), the environment and the config file.

    text: the text of `file`, before the file is written. Raises `ConfigError` naming the flag, the variable or the
    line of the file that is wrong.
    """
    environ = os.environ if environ is None else environ
    explicit_file = file or (Path(environ["LOCALLLM_CONFIG"]) if environ.get("LOCALLLM_CONFIG") else None)
    path = explicit_file or default_config_path(environ)
    if text is None:
        text = _read_text(path, must_exist=explicit_file is not None)
    in_file = _parsed(text, path)
    tables, picks = in_file.pop("models", {}), in_file.pop("picks", None)
    mcp = read_mcp_servers(in_file.pop("mcp", None), path)
    upstreams = in_file.pop("upstreams", None)
    layers: list[tuple[Source, Mapping[str, Any]]] = [
        ("file", in_file),
        ("environment", _from_environment(environ)),
        ("flag", {name: value for name, value in flags.items() if value is not None}),
    ]
    values: dict[str, Any] = {}
    sources: dict[str, Source] = {}
    for source, layer in layers:
        for name, raw in layer.items():
            if name not in SETTINGS:
                raise _unknown(name, str(path), SETTINGS.keys())
            said = _said(SETTINGS[name], raw, source, path)
            values[name], sources[name] = SETTINGS[name].parse(raw, said), source
            SETTINGS[name].check(values[name], said)
    try:
        engine = EngineConfig(**{f.name: values[f.name] for f in fields(EngineConfig) if f.name in values})
        server = ServerConfig(**{f.name: values[f.name] for f in fields(ServerConfig) if f.name in values})
    except ConfigError as error:  # settings contradict each other
        name = error.param or ""
        if sources.get(name, "flag") != "flag":
            place = path if sources[name] == "file" else SETTINGS[name].environment
            error.why = f"{error.why} {name} is set by {place}.".strip()
        raise
    servers = read_upstreams(upstreams, server.upstream, path)
    return Settings(engine, server, sources, _read_tables(tables, path), path, _read_picks(picks, path), mcp, servers)


def _said(spec: SettingSpec, raw: Any, source: Source, place: object) -> str:
    """Return a value as it was given, for an error: with the variable, or with the file or table (`place`). Empty for a
    flag."""
    if source == "environment":
        return f"{spec.environment}={'...' if spec.is_secret else raw}"
    text = "..." if spec.is_secret else json.dumps(raw, default=str)
    return f"{spec.name} = {text} in {place}" if source == "file" else ""


def _unknown(name: str, place: str, known: Iterable[str]) -> ConfigError:
    """Return the error of a name that is not a setting: first the nearest names, then all."""
    from difflib import get_close_matches  # 6 ms, and most starts have no wrong name

    near = get_close_matches(name, known, n=3, cutoff=0.65)
    why = f"Did you mean {' or '.join(near)}? " if near else ""
    return ConfigError(f"Unknown setting {name!r} in {place}.", f"{why}Known: {', '.join(sorted(known))}.")


_OTHER_VARIABLES = frozenset(
    f"LOCALLLM_{name}"
    for name in (
        "CHECK_RESTARTED",
        "CLUSTER_KEY",
        "CONFIG",
        "CPU_SET",
        "GATE_KEY",
        "LAUNCH_API_KEY",
        "NATIVE",
        "RESTARTED",
        "SOURCE",
        "TORCH",
        "TORCH_INDEX",
        "URL",
        "WHEEL_PLATFORM",
    )
)
"""Variables of this name that are read elsewhere: before the settings are, by the installer, by examples."""


def unknown_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return a sentence for each LOCALLLM_ variable that nothing reads, with the nearest known one. Variables with
    which Kubernetes describes a service of this name (LOCALLLM_SERVICE_HOST, LOCALLLM_PORT_8000_TCP) are left out.
    """
    known = {each.environment for each in SETTINGS.values() if each.environment} | _OTHER_VARIABLES
    names = sorted(name for name in (os.environ if environ is None else environ) if name.startswith("LOCALLLM_"))
    told = []
    for name in names:
        if name not in known and not re.match(r"LOCALLLM_(SERVICE|PORT_\d+)_", name):
            from difflib import get_close_matches

            near = get_close_matches(name, known, n=1, cutoff=0.6)
            told.append(
                f"The variable {name} is not known, and ignored." + (f" Did you mean {near[0]}?" if near else "")
            )
    return told


def default_config_path(environ: Mapping[str, str] | None = None) -> Path:
    """Return $XDG_CONFIG_HOME/localllm/config.toml."""
    return config_folder(environ) / "config.toml"


def _from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    given = {name: environ[each.environment] for name, each in SETTINGS.items() if environ.get(each.environment)}
    if "api_key" not in given and environ.get("CREDENTIALS_DIRECTORY"):
        given |= _credential(Path(environ["CREDENTIALS_DIRECTORY"]) / CREDENTIAL)
    return given


def _credential(path: Path) -> dict[str, str]:
    """Return the API key in a file that systemd made readable for this service only; nothing without that file."""
    try:
        return {"api_key": path.read_text().strip()}
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read the API key in {path}.", f"{error}.", param="api_key") from error


def _read_text(path: Path, *, must_exist: bool) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        if must_exist:
            raise ConfigError(f"Config file {path} does not exist.") from None
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read config file {path}.", str(error)) from error


def _parsed(text: str, path: Path) -> dict[str, Any]:
    if not text:
        return {}
    import tomllib  # most machines have no such file

    try:
        return {name.replace("-", "_"): value for name, value in tomllib.loads(text).items()}
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"Cannot read config file {path}.", str(error)) from error


_TABLE_KEYS = {
    "alias": SettingSpec("", "further names of the model", name="alias", type="tuple"),
    "pin": SettingSpec("", "never unload the model for another", name="pin", type="bool"),
    "keep_alive": SETTINGS["keep_alive"],
}
"""Keys that a `[models.NAME]` table may hold besides the engine's settings."""


def _read_tables(tables: Any, path: Path) -> dict[str, ModelTable]:
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise ConfigError(f"{path}: models must be a table of tables.", "Write one table per model: [models.NAME].")
    engine_names = {f.name for f in fields(EngineConfig)}
    known = engine_names | _TABLE_KEYS.keys()
    read: dict[str, ModelTable] = {}
    for name, table in tables.items():
        given = {key.replace("-", "_"): value for key, value in table.items()}
        if unknown := sorted(given.keys() - known):
            raise _unknown(unknown[0], f"[models.{name}] of {path}", known)
        values = {}
        for key, raw in given.items():  # a wrong value is reported now, not when the model is first requested
            spec = _TABLE_KEYS.get(key) or SETTINGS[key]
            said = _said(spec, raw, "file", f"[models.{name}] of {path}")
            values[key] = spec.parse(raw, said)
            spec.check(values[key], said)
        engine = {key: values.pop(key) for key in engine_names & values.keys()}
        EngineConfig(**engine)  # settings that contradict each other
        read[name] = ModelTable(name, engine, values.pop("alias", ()), **values)
    return read


def _read_picks(table: Any, path: Path) -> PicksTable | None:
    """Return the `[picks]` table. `file` is relative to the config file."""
    if table is None:
        return None
    known = {"file", "pick"}
    if not isinstance(table, dict) or (unknown := sorted(table.keys() - known)):
        why = f"Unknown: {unknown[0]!r}. " if isinstance(table, dict) else ""
        hint = '[picks] with file = "PATH", or one [[picks.pick]] for each model'
        raise ConfigError(f"{path}: picks must be a table with file or pick.", f"{why}Known: file, pick.", hint)
    if len(table) != 1:
        raise ConfigError(f"{path}: [picks] needs either file or pick.", "It has both." if table else "It has none.")
    if "file" not in table:
        entries = table["pick"]
        if not isinstance(entries, list):
            raise ConfigError(f"{path}: [picks] pick is not a list.", "Write one [[picks.pick]] for each model.")
        return PicksTable(path, entries=tuple(entries))
    if not isinstance(table["file"], str):
        raise ConfigError(f"{path}: [picks] file = {table['file']!r} is not a path.")
    return PicksTable(path, file=path.parent / Path(table["file"]).expanduser())
