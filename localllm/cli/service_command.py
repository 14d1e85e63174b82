"""The command line and the environment of a server that a service manager starts.

Paths are absolute, since a service starts in another folder, with an almost empty environment. Environment variables
that affect localllm are kept, except secrets.
Does not know: systemd (unit.py), launchd (launchd.py).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from localllm.cli.flags import FLAGS
from localllm.config.setting_spec import SettingSpec
from localllm.config.settings import SETTINGS
from localllm.errors import ConfigError

FOLDERS = (
    *("HF_HOME", "HF_HUB_CACHE", "TRITON_CACHE_DIR"),
    *("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "LOCALLLM_CONFIG"),
)
"""Variables that name folders and files of the user who installs the service."""
KEPT = (
    "PYTHONPATH",
    *("HF_ENDPOINT", "HF_HUB_OFFLINE", "OMP_NUM_THREADS"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_HOME", "LD_LIBRARY_PATH"),
    *FOLDERS,
    *(spec.environment for spec in SETTINGS.values() if spec.environment and not spec.is_secret),
)


def kept_environment(leave_out: Collection[str] = (), environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables of `KEPT` that are set."""
    environ = os.environ if environ is None else environ
    return {name: environ[name] for name in KEPT if environ.get(name) and name not in leave_out}


def service_command(options: argparse.Namespace, leave_out: Collection[str] = ()) -> list[str]:
    """Return the words of `localllm serve` with the given flags, without the settings in `leave_out`.

    Raises `ConfigError` for a key, which must not be on a command line.
    """
    if options.api_key:
        why = "Anyone on this machine could read it in the list of processes."
        raise ConfigError("A key must not be in a unit.", why, "localllm keys add NAME", param="api_key")
    return list(_command(options, leave_out))


def _command(options: argparse.Namespace, leave_out: Collection[str]) -> Iterator[str]:
    yield from (sys.executable, "-P", "-m", "localllm", "serve")  # -P: do not import from a folder ~/localllm
    if options.model:
        yield _absolute(options.model)
    for spec in FLAGS:
        value = getattr(options, spec.name)
        if value is not None and spec.name not in leave_out:
            yield from _words(spec, value)
    if options.config:
        yield from ("--config", str(options.config.expanduser().resolve()))


def _words(spec: SettingSpec, value: bool | str | Sequence[str]) -> Iterator[str]:
    """Yield one setting as command line words."""
    if spec.kind == "bool":
        yield spec.flag if value else spec.flag.replace("--", "--no-", 1)
    elif spec.takes_words:
        yield spec.flag
        for module in value if isinstance(value, Sequence) else ():
            name, equals, path = module.partition("=")
            yield f"{name}={_absolute(path)}" if equals else module
    elif spec.repeats and not isinstance(value, str):
        for each in value if isinstance(value, Sequence) else ():
            yield from (spec.flag, each)
    else:
        yield from (spec.flag, _absolute(str(value)) if spec.is_path else str(value))


def _absolute(name: str) -> str:
    """Make the path of a file or folder absolute; another name, such as a repository, stays as it is."""
    path = Path(name).expanduser()
    return str(path.resolve()) if name.startswith((".", "/", "~")) or path.exists() else name
