"""The texts of the systemd units: a service for the user's own systemd or for the machine's, and a socket for either.

packaging/systemd/ has the machine's units as a package may install them, written by `packaged_units`.
Does not know: where units are stored, systemctl (service.py).
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import re
import stat
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from localllm.config.flags import FLAGS
from localllm.config.resolve import CREDENTIAL
from localllm.config.setting_spec import SettingSpec
from localllm.config.settings import SETTINGS, ServerConfig
from localllm.errors import ConfigError, DeviceLost

PRIVATE = (Path("/tmp"), Path("/var/tmp"))
"""Folders that systemd replaces by empty ones for a service with `DynamicUser=`."""


def require_readable(options: argparse.Namespace) -> None:
    """Raise `ConfigError` for the first file that another user than its owner cannot read."""
    for path in (Path(sys.executable), Path(sys.executable).resolve(), Path(__file__).resolve()):
        if why := why_unreadable(path):
            hint = "python3 -m venv /opt/localllm && /opt/localllm/bin/pip install localllm"
            raise ConfigError("A service with a user of its own cannot run this installation.", why, hint)
    for path in _named_files(options):
        if why := why_unreadable(path):
            hint = "move it to /srv or /opt, and let everybody read it: chmod -R a+rX FOLDER"
            raise ConfigError(f"A service with a user of its own cannot read {path}.", why, hint)


def why_unreadable(path: Path) -> str:
    """Return why other users cannot read a file or folder; empty if they can."""
    path = path.absolute()
    for folder in PRIVATE:
        if path.is_relative_to(folder):
            return f"The service has a {folder} of its own, which is empty."
    for each in (*reversed(path.parents), path):
        needed = stat.S_IROTH if each == path else stat.S_IXOTH
        mode = each.stat().st_mode
        if not mode & needed:
            return f"{each} is closed to other users (mode {stat.S_IMODE(mode):o})."
    return ""


def _named_files(options: argparse.Namespace) -> Iterator[Path]:
    """Yield the existing files and folders that the flags name."""
    named = [options.model, *(getattr(options, spec.name) for spec in FLAGS if spec.is_path)]
    named += [module.partition("=")[2] for module in options.lora_modules or ()]
    yield from (path.resolve() for name in named if name and (path := Path(name).expanduser()).exists())
    if options.config:
        yield options.config.expanduser().resolve()


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


SERVICE, SOCKET = "localllm.service", "localllm.socket"
MARK = "# Written by `localllm service install`."
STOP_S = 45
"""Timeout of a stop, longer than the time that running requests get (web/app.py)."""
WATCHDOG_S = 120
"""systemd restarts a server that has been stuck for this long, by its own watchdog (web/watchdog.py)."""
MAX_STARTS, STARTS_S = 5, 600
"""systemd's start limit: a number of starts within a number of seconds. Starts by the socket count, too."""
NVIDIA = Path("/proc/driver/nvidia")
KEY_FILE = Path("/etc/localllm/api-key")
"""The API key of the machine's service, readable by root alone."""
GROUPS = ("render", "video")
"""Groups that may open GPUs."""

UNIT = """\
{mark} Running it again overwrites this file.
[Unit]
Description=localllm, a local LLM server
{after}StartLimitIntervalSec={starts_s}
StartLimitBurst={max_starts}

[Service]
# The server says when it has loaded its model, which may take long: a first start downloads it. systemctl status shows
# the progress. Later the server reports that no part of it is stuck, else it is started again.
Type=notify
TimeoutStartSec=infinity
WatchdogSec={watchdog_s}
{before}ExecStart={command}
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
{install}
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
OWN_USER = """\
# The user exists only while the server runs. Models and chats are in /var/lib/localllm, compiled kernels in
# /var/cache/localllm, settings in /etc/localllm/config.toml. The rest of the system is read-only, and /tmp is private.
DynamicUser=yes
StateDirectory=localllm
StateDirectoryMode=0700
CacheDirectory=localllm
CacheDirectoryMode=0700
{groups}{key}# MemoryDenyWriteExecute= would break torch's compilers, and PrivateDevices= would hide GPUs.
CapabilityBoundingSet=
LockPersonality=yes
ProtectClock=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
RestrictNamespaces=yes
RestrictRealtime=yes
SystemCallArchitectures=native
"""
OWN_FOLDERS = {
    "HOME": "%S/localllm",
    "XDG_DATA_HOME": "%S",
    "XDG_CACHE_HOME": "%C",
    "XDG_CONFIG_HOME": "%E",
    "HF_HOME": "%S/localllm/hub",
    "TRITON_CACHE_DIR": "%C/localllm/triton",
}
"""Folders of the machine's service: %S is /var/lib, %C is /var/cache, %E is /etc."""
MODPROBE = """\
# The driver's setuid helper creates devices that are missing after a boot; the server itself may not run it.
ExecStartPre=-+/usr/bin/nvidia-modprobe -u -c=0
"""
SOCKET_UNIT = """\
{mark} Running it again overwrites this file.
[Unit]
Description=The address of localllm: the first request starts the server

[Socket]
ListenStream={address}

[Install]
WantedBy=sockets.target
"""


def unit_texts(options: argparse.Namespace, server: ServerConfig) -> dict[str, str]:
    """Return the text of each unit by its name. `server`: the settings in force for the service.

    Raises `ConfigError` for values that must not be in a unit.
    """
    texts = {SERVICE: service_text(options, server)}
    if options.socket:
        texts[SOCKET] = SOCKET_UNIT.format(mark=MARK, address=listen_stream(server))
    return texts


def service_text(options: argparse.Namespace, server: ServerConfig) -> str:
    left_out = ("host", "port") if options.socket else ()  # the socket has the address
    words = [_quoted(word.replace("$", "$$")) for word in service_command(options, left_out)]
    kept = kept_environment(leave_out(options))
    environment = [_quoted(f"{name}={value}") for name, value in kept.items()]
    if not options.system:
        hardening = WITH_GPU if NVIDIA.exists() else WITHOUT_GPU
        return _service_text(words, environment, hardening, server, options.socket, is_system=False)
    own = [f"{name}={value}" for name, value in OWN_FOLDERS.items()]
    hardening = _own_user([name for name in GROUPS if _exists(name)], has_key=KEY_FILE.exists())
    return _service_text(words, own + environment, hardening, server, options.socket, is_system=True)


def leave_out(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the environment variables that the unit does not copy: the machine's service has folders of its own."""
    address = ("LOCALLLM_HOST", "LOCALLLM_PORT") if options.socket else ()
    return (*address, *FOLDERS) if options.system else address


def packaged_units() -> dict[str, str]:
    """Return the units of packaging/systemd/: the machine's service and its socket, for any machine."""
    server = ServerConfig(exit_when_idle=1800)
    command = ["/opt/localllm/bin/localllm", "serve", "--exit-when-idle", "30m"]
    own = [f"{name}={value}" for name, value in OWN_FOLDERS.items()]
    text = _service_text(command, own, _own_user(GROUPS, has_key=False), server, has_socket=True, is_system=True)
    mark = f"{MARK} Running it again overwrites this file."
    shipped = "# The unit that `localllm service install --system --socket --exit-when-idle 30m` writes, for a package."
    socket = SOCKET_UNIT.format(mark=MARK, address=listen_stream(server))
    return {SERVICE: text.replace(mark, shipped), SOCKET: socket.replace(mark, shipped)}


def listen_stream(server: ServerConfig) -> str:
    """Return the address of a socket unit. Raises `ConfigError` for a host that is a name, and for no fixed port."""
    host = "127.0.0.1" if server.host == "localhost" else server.host
    try:
        is_6 = ipaddress.ip_address(host).version == 6
    except ValueError:
        why = "A socket unit needs an IP address."
        raise ConfigError(f"--socket cannot listen on {host!r}.", why, "--host 127.0.0.1", param="host") from None
    if not server.port:
        raise ConfigError("--socket needs a fixed port.", "--port 0 means any free port.", "--port 8000", param="port")
    return f"[{host}]:{server.port}" if is_6 else f"{host}:{server.port}"


def _service_text(
    command: Sequence[str],
    environment: Sequence[str],
    hardening: str,
    server: ServerConfig,
    has_socket: bool,
    *,
    is_system: bool,
) -> str:
    after = "Wants=network-online.target\nAfter=network-online.target\n" if is_system else ""
    after += f"Requires={SOCKET}\nAfter={SOCKET}\n" if has_socket else ""
    target = "multi-user.target" if is_system else "default.target"
    return UNIT.format(
        mark=MARK,
        after=after,
        starts_s=_starts_s(server.exit_when_idle),
        max_starts=MAX_STARTS,
        watchdog_s=WATCHDOG_S,
        before=MODPROBE if is_system else "",
        command=" ".join(command),
        environment="".join(f"Environment={each}\n" for each in environment),
        stop_s=STOP_S,
        lost=DeviceLost.exit_code,
        wrong=ConfigError.exit_code,
        hardening=hardening,
        install=f"Also={SOCKET}" if has_socket else f"WantedBy={target}",
    )


def _own_user(groups: Sequence[str], *, has_key: bool) -> str:
    names = f"SupplementaryGroups={' '.join(groups)}\n" if groups else ""
    comment = "" if has_key else "# "
    return OWN_USER.format(groups=names, key=f"{comment}LoadCredential={CREDENTIAL}:{KEY_FILE}\n")


def _starts_s(idle_s: float | None) -> int:
    """Return the period of the start limit, so short that a server which ends when idle never reaches the limit."""
    return STARTS_S if idle_s is None else max(1, min(STARTS_S, int((MAX_STARTS - 1) * idle_s)))


def _exists(group: str) -> bool:
    import grp  # only on Unix

    try:
        grp.getgrnam(group)
    except KeyError:
        return False
    return True


def _quoted(word: str) -> str:
    """Quote a word for systemd: % is doubled (in a command $ too), and words with unusual characters get quotes."""
    if re.search(r"[\x00-\x1f\x7f]", word):
        raise ConfigError(f"{word!r} cannot be in a unit.", "It contains a control character.")
    word = word.replace("%", "%%")
    if re.fullmatch(r"[\w@%+=:,./$-]+", word):
        return word
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'
