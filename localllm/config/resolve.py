"""Resolve the settings from the given flags, the environment and the config file.

Does not know: what a setting means (config/settings.py), the command line.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from localllm.config.mcp_servers import read_mcp_servers
from localllm.config.setting_spec import SettingSpec
from localllm.config.settings import SETTINGS, EngineConfig, ModelTable, PicksTable, ServerConfig, Settings, Source
from localllm.errors import ConfigError
from localllm.files.folders import config_folder

CREDENTIAL = "api-key"
"""Name of the file in $CREDENTIALS_DIRECTORY, where systemd puts what a unit names with LoadCredential=."""


def resolve(flags: Mapping[str, Any], environ: Mapping[str, str] | None = None, file: Path | None = None) -> Settings:
    """Build the `Settings` from the given flags (None: not given), the environment and the config file.

    Raises `ConfigError` naming the flag, variable or line that is wrong.
    """
    environ = os.environ if environ is None else environ
    explicit_file = file or (Path(environ["LOCALLLM_CONFIG"]) if environ.get("LOCALLLM_CONFIG") else None)
    path = explicit_file or default_config_path(environ)
    in_file = dict(_read_file(path, must_exist=explicit_file is not None))
    tables, picks = in_file.pop("models", {}), in_file.pop("picks", None)
    mcp = read_mcp_servers(in_file.pop("mcp", None), path)
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
                known = ", ".join(sorted(SETTINGS))
                raise ConfigError(f"Unknown setting {name!r} in the {source}.", f"Known: {known}.")
            values[name], sources[name] = SETTINGS[name].parse(raw), source
    engine = EngineConfig(**{f.name: values[f.name] for f in fields(EngineConfig) if f.name in values})
    server = ServerConfig(**{f.name: values[f.name] for f in fields(ServerConfig) if f.name in values})
    return Settings(engine, server, sources, _read_tables(tables, path), path, _read_picks(picks, path), mcp)


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


def _read_file(path: Path, *, must_exist: bool) -> Mapping[str, Any]:
    try:
        text = path.read_text()
    except FileNotFoundError:
        if must_exist:
            raise ConfigError(f"Config file {path} does not exist.") from None
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read config file {path}.", str(error)) from error
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
            why = f"Known: {', '.join(sorted(known))}."
            raise ConfigError(f"Unknown setting {unknown[0]!r} in [models.{name}] of {path}.", why)
        values = {key: (_TABLE_KEYS.get(key) or SETTINGS[key]).parse(raw) for key, raw in given.items()}
        engine = {key: values.pop(key) for key in engine_names & values.keys()}
        EngineConfig(**engine)  # report a value out of range now, not when the model is first requested
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
