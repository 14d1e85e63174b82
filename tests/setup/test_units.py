"""The texts of the units: the command in them, the environment, what systemd-analyze says, the packaged ones."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from localllm.cli import parse
from localllm.config.flags import settings_from
from localllm.config.settings import ServerConfig
from localllm.errors import ConfigError
from localllm.setup import units
from localllm.setup.units import KEPT, SERVICE, SOCKET, listen_stream, packaged_units, unit_texts
from scripts.layout import ROOT

PACKAGED = ROOT / "packaging" / "systemd"
MOST_EXPOSED = 40
"""Tenths of the exposure level of systemd-analyze, of 100, that the machine's service may have."""
WRITTEN = packaged_units()
VARIANTS = [["--system"], ["--system", "--socket"], ["--socket"], []]

needs_analyze = pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")


@pytest.fixture(autouse=True)
def own_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in KEPT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # systemd-analyze needs one
    monkeypatch.setattr(units, "KEY_FILE", tmp_path / "api-key")
    monkeypatch.setattr(units, "NVIDIA", tmp_path / "none")
    monkeypatch.chdir(tmp_path)


def texts_of(*words: str) -> dict[str, str]:
    options = parse(["service", "install", *words])
    return unit_texts(options, settings_from(options).server)


def service_of(*words: str) -> str:
    return texts_of(*words)[SERVICE]


def command(text: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith("ExecStart=")]
    return [word.replace("%%", "%").replace("$$", "$") for word in shlex.split(line.removeprefix("ExecStart="))]


def environment(text: str) -> list[str]:
    return [line.removeprefix("Environment=") for line in text.splitlines() if line.startswith("Environment=")]


def test_the_command_in_the_unit_means_what_was_typed(tmp_path: Path) -> None:
    (tmp_path / "my model").mkdir()
    (tmp_path / "cert.pem").write_text("")
    typed = [
        "my model", "--port", "9000", "--no-ui", "--alias", "a,b", "--alias", "c$d 100%", "--lora-modules", "x=./x",
        "y=./y", "--kv-cache-dtype", "int8", "--max-model-len", "8K", "--enforce-eager", "--ssl-certfile", "cert.pem",
    ]  # fmt: skip
    words = command(service_of(*typed))
    assert words[:5] == [sys.executable, "-P", "-m", "localllm", "serve"]
    assert words[5] == str(tmp_path / "my model")
    assert f"x={tmp_path}/x" in words
    assert str(tmp_path / "cert.pem") in words
    asked, kept = settings_from(parse(["serve", *typed])), settings_from(parse(words[4:]))
    for part in ("port", "ui", "served_model_name"):
        assert getattr(asked.server, part) == getattr(kept.server, part)
    for part in ("kv_cache_dtype", "max_model_len", "enforce_eager", "max_num_seqs"):
        assert getattr(asked.engine, part) == getattr(kept.engine, part)


def test_a_repository_stays_a_name() -> None:
    assert command(service_of("org/name:Q4_K_M"))[5] == "org/name:Q4_K_M"


def test_the_environment_is_kept_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME")
    given = {
        "HF_HOME": "/my $5 100% models",
        "LOCALLLM_PORT": "9",
        "HF_TOKEN": "hf_s",
        "LOCALLLM_API_KEY": "sk-s",
        "X": "1",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert environment(service_of()) == ['"HF_HOME=/my $5 100%% models"', "LOCALLLM_PORT=9"]
    assert environment(service_of("--socket")) == ['"HF_HOME=/my $5 100%% models"']  # the socket has the port
    machine = environment(service_of("--system"))
    assert "HF_HOME=%S/localllm/hub" in machine
    assert not [each for each in machine if "my $5" in each or "sk-s" in each]


def test_a_lost_gpu_starts_it_again_and_a_wrong_setting_does_not() -> None:
    lines = service_of().splitlines()
    assert {"Restart=on-failure", "RestartForceExitStatus=7", "RestartPreventExitStatus=2"} <= set(lines)


def test_a_unit_for_a_gpu_lets_the_drivers_setuid_helper_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(units, "NVIDIA", tmp_path)
    settings = [line for line in service_of().splitlines() if not line.startswith("#")]
    implies = ("NoNewPrivileges", "Restrict", "Private", "Protect", "SystemCall", "Lock", "MemoryDeny", "Device")
    assert not [line for line in settings if line.startswith(implies)]
    assert any(
        line.startswith("ExecStartPre=-+") and "modprobe" in line for line in service_of("--system").splitlines()
    )
    monkeypatch.setattr(units, "NVIDIA", tmp_path / "none")
    assert "NoNewPrivileges=yes" in service_of()


def test_the_machines_service_gets_the_key_file_if_there_is_one(tmp_path: Path) -> None:
    line = f"LoadCredential=api-key:{tmp_path}/api-key\n"
    assert f"\n# {line}" in service_of("--system")
    (tmp_path / "api-key").write_text("sk-1")
    assert f"\n{line}" in service_of("--system")


@pytest.mark.parametrize(("idle", "period"), [("30m", 600), ("2m", 480), ("10s", 40)])
def test_a_server_that_ends_when_idle_never_reaches_the_start_limit(idle: str, period: int) -> None:
    lines = service_of("--socket", "--exit-when-idle", idle).splitlines()
    assert f"StartLimitIntervalSec={period}" in lines
    assert "StartLimitBurst=5" in lines  # six starts take at least five times the idle time


@pytest.mark.parametrize(
    ("host", "port", "address"),
    [
        ("127.0.0.1", 8000, "127.0.0.1:8000"),
        ("localhost", 9, "127.0.0.1:9"),
        ("::1", 80, "[::1]:80"),
        ("0.0.0.0", 1, "0.0.0.0:1"),
    ],
)
def test_the_address_of_a_socket(host: str, port: int, address: str) -> None:
    assert listen_stream(ServerConfig(host=host, port=port)) == address


@pytest.mark.parametrize("server", [ServerConfig(host="my.home"), ServerConfig(port=0)])
def test_a_socket_needs_an_address_and_a_port(server: ServerConfig) -> None:
    with pytest.raises(ConfigError):
        listen_stream(server)


@needs_analyze
@pytest.mark.parametrize("words", VARIANTS, ids=" ".join)
def test_systemd_finds_nothing_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str]) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "/my %models")
    texts = texts_of("org/na$me", "--alias", 'odd "name" \\ 100%', *words)
    manager = [] if "--system" in words else ["--user"]
    wrong = texts | {SERVICE: texts[SERVICE].replace("on-failure", "sometimes")}
    assert "sometimes" in _complaints(tmp_path / "wrong", wrong, manager)
    assert _complaints(tmp_path / "right", texts, manager) == ""


@needs_analyze
def test_the_packaged_units_are_right_and_closed(tmp_path: Path) -> None:
    texts = {name: text.replace("/opt/localllm/bin/localllm", "/bin/true") for name, text in WRITTEN.items()}
    assert _complaints(tmp_path / "units", texts, []) == ""
    command = ["systemd-analyze", "security", "--offline=true", f"--threshold={MOST_EXPOSED}", SERVICE]
    done = subprocess.run(command, cwd=tmp_path / "units", capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", [SERVICE, SOCKET])
def test_packaging_has_what_the_code_writes(name: str) -> None:
    assert (PACKAGED / name).read_text() == WRITTEN[name], "run scripts/make_docs"


def test_packaging_has_no_other_units() -> None:
    assert {path.name for path in PACKAGED.iterdir()} == set(WRITTEN)


def _complaints(folder: Path, texts: dict[str, str], manager: list[str]) -> str:
    """Return what `systemd-analyze verify` says about the units themselves; other units of the machine do not count."""
    folder.mkdir()
    for name, text in texts.items():
        (folder / name).write_text(text)
    command = ["systemd-analyze", *manager, "verify", *(str(folder / name) for name in texts)]
    said = subprocess.run(command, capture_output=True, text=True).stderr
    return "\n".join(line for line in said.splitlines() if "localllm" in line)
