"""One line of config.toml: only it changes, and only to what a start takes."""

import stat
import tomllib
from pathlib import Path

import pytest

from localllm.config.edit import planned, planned_for_model, write
from localllm.config.resolve import resolve
from localllm.errors import ConfigError

OLD = """# mine
max_num_seqs = 8  # few
log-level = "debug"

[models.big]
max_num_seqs = 2
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(OLD)
    return path


@pytest.mark.parametrize(
    ("name", "asked", "line", "old_line"),
    [
        ("max_num_seqs", "32", "max_num_seqs = 32", "max_num_seqs = 8  # few"),
        ("log_level", "info", 'log_level = "info"', 'log-level = "debug"'),
        ("max_model_len", "8k", 'max_model_len = "8k"', ""),
        ("ui", "false", "ui = false", ""),
        ("gpu_memory_utilization", "0.85", "gpu_memory_utilization = 0.85", ""),
        ("keep_alive", "5m", 'keep_alive = "5m"', ""),
        ("allowed_hosts", "a.lan, b.lan", 'allowed_hosts = ["a.lan", "b.lan"]', ""),
        ("model", 'a"b\\', 'model = "a\\"b\\\\"', ""),
        ("model", "\U0001f600", 'model = "\U0001f600"', ""),
    ],
)
def test_the_line_is_what_a_start_reads(path: Path, name: str, asked: str, line: str, old_line: str) -> None:
    change = planned(path, name, asked)
    assert (change.line, change.old_line) == (line, old_line)
    assert path.read_text() == OLD
    write(change)
    settings = resolve({}, {}, path)
    assert settings.source(name) == settings.source("max_num_seqs") == "file"
    assert path.read_text().startswith("# mine\n")
    assert path.read_text().endswith("[models.big]\nmax_num_seqs = 2\n")
    write(planned(path, name, None))
    assert name not in {key.replace("-", "_") for key in tomllib.loads(path.read_text())}


@pytest.mark.parametrize(
    ("name", "asked", "says"),
    [
        ("max_num_seqs", "0", "out of range"),
        ("max_num_seqs", "many", "is not valid"),
        ("max_num_seqs", "8\nport = 1", "is not valid"),
        ("model", "a\x7fb", "was not changed"),
        ("ui", "perhaps", "is not valid"),
        ("ssl_keyfile", "key.pem", "needs --ssl-certfile"),
        ("nonsense", "1", "Unknown setting"),
        *((name, "true", "cannot be set here") for name in ("api_key", "trust_remote_code")),
    ],
)
def test_what_a_start_would_refuse_is_refused_now(path: Path, name: str, asked: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        planned(path, name, asked)
    assert path.read_text() == OLD


def test_a_value_of_several_lines_is_left_to_an_editor(path: Path) -> None:
    path.write_text('allowed_hosts = [\n  "a",\n]\nmodel = """\n[x]\n"""\n')
    for name, asked in (("allowed_hosts", "b"), ("port", "1")):
        with pytest.raises(ConfigError, match="was not changed"):
            planned(path, name, asked)
    path.write_text("max_num_seqs = \n")
    with pytest.raises(ConfigError, match="Cannot read"):
        planned(path, "port", "1")


def test_a_file_that_is_not_there_is_made_for_its_owner_and_a_link_stays_one(tmp_path: Path) -> None:
    link = tmp_path / "deep" / "config.toml"
    write(planned(link, "port", "8001"))
    assert link.read_text() == "port = 8001\n"
    assert stat.S_IMODE(link.stat().st_mode) == 0o600
    real = tmp_path / "dotfiles.toml"
    link.rename(real)
    real.chmod(0o644)
    link.symlink_to(real)
    write(planned(link, "max_num_seqs", "4"))
    assert link.is_symlink()
    assert real.read_text() == "port = 8001\nmax_num_seqs = 4\n"
    assert stat.S_IMODE(real.stat().st_mode) == 0o644


def test_settings_of_one_model_change_in_its_table_alone(path: Path) -> None:
    write(planned_for_model(path, "big", {"max_num_seqs": 4, "kv_cache_dtype": "int8"}))
    write(planned_for_model(path, "org/new:Q4", {"max_model_len": 4096}))
    read = tomllib.loads(path.read_text())
    assert read["models"] == {
        "big": {"max_num_seqs": 4, "kv_cache_dtype": "int8"}, "org/new:Q4": {"max_model_len": 4096},
    }  # fmt: skip
    assert path.read_text().startswith("# mine\nmax_num_seqs = 8  # few\n")
    assert resolve({}, {}, path).of_model("org/new:Q4").engine.max_model_len == 4096


@pytest.mark.parametrize(
    "text", ["models = { big = { max_num_seqs = 2 } }\n", "[models]\nbig.max_num_seqs = 2\n", "a = ["]
)
def test_a_table_that_is_written_otherwise_is_left_to_an_editor(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(ConfigError, match="was not changed"):
        planned_for_model(path, "big", {"max_num_seqs": 4})
    assert path.read_text() == text
