"""The verbs `config` and `version`, which only print facts: as text, or as JSON with --json.

Does not know: models.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from localllm.config.flags import add_json
from localllm.config.resolve import default_config_path, resolve, unknown_variables
from localllm.config.settings import SETTINGS, Settings
from localllm.terminal import print_table
from localllm.version import __version__

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "huggingface-hub", "litestar", "uvicorn")


def show_config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("show", "path"), nargs="?", default="show", help="without it: show")
    parser.add_argument("--config", type=Path, metavar="FILE", help="a TOML file of settings (or LOCALLLM_CONFIG)")
    add_json(parser)


def show_config(options: argparse.Namespace) -> int:
    """Print every setting with its value and source, or the path of the config file."""
    if options.action == "path":
        print(default_config_path())
        return 0
    settings = resolve({}, file=options.config)
    rows = list(_settings_rows(settings))
    for sentence in unknown_variables():
        print(sentence, file=sys.stderr)
    if options.json:
        print(json.dumps({name: {"value": value, "source": source} for name, value, source in rows}, indent=2))
        return 0
    print(f"# {options.config or default_config_path()}")
    print_table([(name, SETTINGS[name].shown(value), source) for name, value, source in rows])
    return 0


def _settings_rows(settings: Settings) -> Iterable[tuple[str, Any, str]]:
    for name, spec in SETTINGS.items():
        value = settings.value(name)
        # A secret is never printed: terminals are shared and pasted into issues.
        yield name, "(set)" if value and spec.is_secret else value, settings.source(name)


def show_versions_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser)


def show_versions(options: argparse.Namespace) -> int:
    """Print the versions of localllm, Python and the main packages."""
    versions = {"localllm": __version__, "python": platform.python_version(), **package_versions()}
    if options.json:
        print(json.dumps(versions, indent=2))
    else:
        print_table(list(versions.items()))
    return 0


def package_versions() -> dict[str, str]:
    """Return package versions from the installed metadata, since importing torch would take a second."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
