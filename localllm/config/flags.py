"""The flags shared by `up`, `serve`, `run` and others, spelled as in vLLM: one for each setting, made from its
description in config/settings.py.

A known but unsupported flag is refused by name, never ignored; for an unknown flag the nearest existing one is
suggested. Does not know: what a setting does, where else it can come from (config/settings.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

from localllm.config.resolve import resolve
from localllm.config.setting_spec import SettingSpec
from localllm.config.settings import ADAPTERS, SETTINGS, EngineConfig, ServerConfig, Settings
from localllm.config.unsupported import UNSUPPORTED
from localllm.errors import ConfigError, UnsupportedOption

_ENGINE = tuple(SETTINGS[each.name] for each in fields(EngineConfig) if SETTINGS[each.name].has_flag)
_SERVER = tuple(SETTINGS[each.name] for each in fields(ServerConfig))
FLAGS = (*_ENGINE, *_SERVER)
"""The settings that have a flag."""
CACHE_TYPES = {
    ("f16", "f16"): "auto",
    ("q8_0", "q8_0"): "int8",
    ("q8_0", "q4_0"): "k8v4",
    ("q4_0", "q4_0"): "int4",
}
"""llama.cpp's types of keys and values that have a format here, with the value of kv_cache_dtype. f16: as without."""
ADAPTER_FLAGS = tuple(spec.name for spec in _ENGINE if spec.group == ADAPTERS)


def add_engine_flags(parser: argparse.ArgumentParser, leave_out: Sequence[str] = ()) -> None:
    """Add the flags shared by `run`, `bench` and the server."""
    _add_flags(parser, _ENGINE, leave_out)
    _add_common(parser)


def add_server_flags(
    parser: argparse.ArgumentParser, json: str = "one JSON object per start-up phase instead of text"
) -> None:
    """Add the flags of `up` and `serve`, and of `service`, which passes them on."""
    _add_flags(parser, FLAGS)
    _add_common(parser)
    parser.add_argument("--json", action="store_true", help=json)


def settings_from(options: argparse.Namespace, environ: Mapping[str, str] | None = None) -> Settings:
    """Return the settings: the given flags, then the environment, the config file and the defaults."""
    given = {name: value for name, value in vars(options).items() if name in SETTINGS and value is not None}
    types = tuple(getattr(options, name, None) for name in ("cache_type_k", "cache_type_v"))
    if any(types):
        if "kv_cache_dtype" in given:
            raise ConfigError(
                "-ctk and -ctv cannot be combined with --kv-cache-dtype.", "Both set the KV cache's type."
            )
        given["kv_cache_dtype"] = _kv_cache_dtype(*(each or "f16" for each in types))
    return resolve(given, environ, options.config)


def _kv_cache_dtype(keys: str, values: str) -> str:
    """Return the setting for llama.cpp's types of keys and values."""
    if (keys, values) not in CACHE_TYPES:
        pairs = ", ".join(f"-ctk {k} -ctv {v}" for k, v in CACHE_TYPES)
        what, why = f"-ctk {keys} with -ctv {values} is not supported.", f"Supported pairs: {pairs}."
        raise UnsupportedOption(what, why, "--kv-cache-dtype int8 is the first choice of less memory", param="-ctk")
    return CACHE_TYPES[keys, values]


def refuse_unknown(leftover: Sequence[str], known: Iterable[str], hint: str) -> NoReturn:
    """Raise an error for the first unknown word: say that it is unsupported, or suggest the nearest flag."""
    word = next((w for w in leftover if w.startswith("-")), leftover[0])
    flag = word.split("=", 1)[0]
    if flag == "--model":
        raise ConfigError(
            "There is no --model flag: pass the model as an argument.", "", "localllm up MODEL", param=flag
        )
    name = flag.lstrip("-").removeprefix("no-").replace("-", "_")
    if flag.startswith("-") and name in UNSUPPORTED:
        raise UnsupportedOption(f"{flag} is not supported.", UNSUPPORTED[name], f"leave {flag} out", param=flag)
    if not flag.startswith("-"):
        raise ConfigError(f"Unexpected argument {word!r}.", "A prompt with spaces must be quoted.", param=word)
    from difflib import get_close_matches

    negated = [each for each in known if each.startswith("--no-")] if flag.startswith("--no-") else []
    near = get_close_matches(flag, negated, n=1, cutoff=0.6) or get_close_matches(flag, known, n=1, cutoff=0.6)
    raise ConfigError(f"Unknown flag {flag}.", f"Did you mean {near[0]}?" if near else "", hint, param=flag)


def _add_flags(parser: argparse.ArgumentParser, specs: Iterable[SettingSpec], leave_out: Sequence[str] = ()) -> None:
    for title, group in groupby((spec for spec in specs if spec.name not in leave_out), key=lambda spec: spec.group):
        arguments = parser.add_argument_group(title.lower())
        for spec in group:
            help = spec.help.replace("%", "%%")
            arguments.add_argument(spec.flag, *spec.aliases, dest=spec.name, help=help, default=None, **_kind(spec))


def _kind(spec: SettingSpec) -> dict[str, Any]:
    """Return argparse's arguments for a flag. Every default is None, 'not given', so that the configuration decides."""
    if spec.kind == "bool":
        return {"action": argparse.BooleanOptionalAction}
    if spec.takes_words:
        return {"metavar": spec.metavar, "action": "extend", "nargs": "+"}
    return {"metavar": spec.metavar, "action": "append" if spec.repeats else "store"}


def _add_common(parser: argparse.ArgumentParser) -> None:
    for flag, side in (("-ctk", "keys"), ("-ctv", "values")):
        help = f"type of the KV cache's {side}, as llama.cpp names it: f16, q8_0 or q4_0; --kv-cache-dtype sets both"
        parser.add_argument(flag, f"--cache-type-{flag[-1]}", metavar="TYPE", help=help)
    parser.add_argument("--config", type=Path, metavar="FILE", help="a TOML file of settings (or LOCALLLM_CONFIG)")
    # Prefill is always chunked: the flag is accepted without effect, and its negation is refused as unsupported.
    parser.add_argument("--enable-chunked-prefill", action="store_true", help="no effect: prefill is always chunked")
    add_debug_flag(parser)


def add_debug_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_debug_flag(parser)


def add_model(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add the argument MODEL, which is a setting without a flag."""
    help = SETTINGS["model"].allowed
    parser.add_argument("model", nargs=None if required else "?", metavar="MODEL", help=help)


def help_of(action: argparse.Action) -> str:
    """Return the help of an argument with its default, if it has one."""
    default = "" if action.default in (None, False, argparse.SUPPRESS) else f"; default: {action.default}"
    return f"{action.help or ''}{default}"
