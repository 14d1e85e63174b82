"""Write the text of the systemd user unit that runs `localllm serve`.

Paths are absolute, since a service starts in the home folder with an almost empty environment. Environment variables
that affect localllm are copied into the unit, except secrets.
Does not know: where the unit is stored, systemctl (service.py).
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from localllm.cli.flags import FLAGS
from localllm.config.setting_spec import SettingSpec
from localllm.config.settings import SETTINGS
from localllm.errors import ConfigError, DeviceLost

MARK = "# Written by `localllm service install`."
KEPT = (
    "PYTHONPATH",
    *("HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "HF_HUB_OFFLINE", "TRITON_CACHE_DIR", "OMP_NUM_THREADS"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_HOME", "LD_LIBRARY_PATH"),
    *("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "LOCALLLM_CONFIG"),
    *(spec.environment for spec in SETTINGS.values() if spec.environment and not spec.is_secret),
)
STOP_S = 45
"""Timeout of a stop, longer than the time that running requests get (web/app.py)."""
NVIDIA = Path("/proc/driver/nvidia")

UNIT = """\
{mark} Running it again overwrites this file.
[Unit]
Description=localllm, a local LLM server
StartLimitIntervalSec=600
StartLimitBurst=5

[Service]
Type=exec
ExecStart={command}
{environment}# SIGTERM lets running requests end; 130 means that it came while the model was still loading.
KillSignal=SIGTERM
TimeoutStopSec={stop_s}
SuccessExitStatus=130
# {lost} means that the GPU is unusable for this process, and only a new process can use it. {wrong} means a wrong
# setting, which a restart would not correct.
Restart=on-failure
RestartSec=5
RestartForceExitStatus={lost}
RestartPreventExitStatus={wrong}
# Its files are readable by its owner only, and a crash leaves no prompts or keys in a core file.
UMask=0077
LimitCORE=0
LimitNOFILE=65536
{hardening}
[Install]
WantedBy=default.target
"""
WITH_GPU = """\
# The driver's nvidia-modprobe is setuid and creates devices that are missing after a boot. NoNewPrivileges=, and every
# option that restricts system calls or folders of a user service, would prevent this.
"""
WITHOUT_GPU = """\
# No NVIDIA driver was installed when this file was written. After installing one, run `localllm service install` again:
# its nvidia-modprobe is setuid, which NoNewPrivileges= forbids. MemoryDenyWriteExecute= would break torch's compilers.
NoNewPrivileges=yes
LockPersonality=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
RestrictNamespaces=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
SystemCallArchitectures=native
"""


def unit_text(options: argparse.Namespace, environ: Mapping[str, str] | None = None) -> str:
    """Return the unit's text. Raises `ConfigError` for values that must not be in a unit."""
    if options.api_key:
        why = "Anyone on this machine could read it in the list of processes."
        raise ConfigError("A key must not be in a unit.", why, "localllm keys add NAME", param="api_key")
    environ = os.environ if environ is None else environ
    kept = "".join(f"Environment={_quoted(f'{name}={environ[name]}')}\n" for name in KEPT if environ.get(name))
    return UNIT.format(
        mark=MARK,
        command=" ".join(_quoted(word.replace("$", "$$")) for word in _command(options)),
        environment=kept,
        stop_s=STOP_S,
        lost=DeviceLost.exit_code,
        wrong=ConfigError.exit_code,
        hardening=WITH_GPU if NVIDIA.exists() else WITHOUT_GPU,
    )


def _command(options: argparse.Namespace) -> Iterator[str]:
    yield from (sys.executable, "-P", "-m", "localllm", "serve")  # -P: do not import from a folder ~/localllm
    if options.model:
        yield _absolute(options.model)
    for spec in FLAGS:
        value = getattr(options, spec.name)
        if value is not None:
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


def _quoted(word: str) -> str:
    """Quote a word for systemd: % is doubled (in a command $ too), and words with unusual characters get quotes."""
    if re.search(r"[\x00-\x1f\x7f]", word):
        raise ConfigError(f"{word!r} cannot be in a unit.", "It contains a control character.")
    word = word.replace("%", "%%")
    if re.fullmatch(r"[\w@%+=:,./$-]+", word):
        return word
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'
