"""What the shells themselves complete with our scripts."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from localllm.cli import main

ASK = r"""
localllm() { printf '%s\n' demo org/one org/two:Q4_K_M; }
source "$1"
IFS=' ' read -ra COMP_WORDS <<< "$2"
case $2 in *' ') COMP_WORDS+=("") ;; esac
COMP_LINE=$2 COMP_POINT=${#2} COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_localllm
printf '%s\n' "${COMPREPLY[@]}"
"""
FISH = """
function localllm; printf '%s\\n' demo org/one org/two:Q4_K_M; end
source $argv[1]
complete -C $argv[2]
"""


@pytest.fixture
def script(tmp_path: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main(["completion", request.param]) == 0
    path = tmp_path / "script"
    path.write_text(capsys.readouterr().out)
    return path


CASES = [
    ("localllm do", {"doctor"}, set()),
    ("localllm --po", {"--port"}, {"doctor"}),
    ("localllm up --max-mo", {"--max-model-len"}, {"--max-loras"}),
    ("localllm up ", {"demo", "org/one", "org/two:Q4_K_M"}, {"--port", "doctor"}),
    ("localllm serve --port 9000 org/", {"org/one", "org/two:Q4_K_M"}, {"demo"}),
    ("localllm keys ", {"add", "list", "remove"}, {"demo", "infer"}),
    ("localllm keys add me --scope ", {"infer", "admin"}, {"add"}),
    ("localllm search --format g", {"gguf"}, {"safetensors"}),
    ("localllm completion ", {"bash", "zsh", "fish"}, {"demo"}),
]


def answer(*command: str) -> set[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not done.stderr
    return {line.split("\t")[0] for line in done.stdout.splitlines()}


@pytest.mark.parametrize("script", ["bash"], indirect=True)
@pytest.mark.parametrize(("line", "there", "absent"), CASES)
def test_bash(script: Path, line: str, there: set[str], absent: set[str]) -> None:
    found = answer("bash", "-c", ASK, "bash", str(script), line)
    assert there <= found
    assert not absent & found


@pytest.mark.parametrize("script", ["bash"], indirect=True)
def test_bash_replaces_only_what_stands_behind_a_colon(script: Path) -> None:
    """It breaks words there, and puts the reply in the place of the last part."""
    assert answer("bash", "-c", ASK, "bash", str(script), "localllm up org/two:Q") == {"Q4_K_M"}


@pytest.mark.parametrize("script", ["bash"], indirect=True)
def test_a_flag_that_takes_anything_leaves_the_shell_to_its_files(script: Path) -> None:
    assert answer("bash", "-c", ASK, "bash", str(script), "localllm up --config ") == {""}


@pytest.mark.skipif(not shutil.which("fish"), reason="needs fish")
@pytest.mark.parametrize("script", ["fish"], indirect=True)
@pytest.mark.parametrize(("line", "there", "absent"), [case for case in CASES if case[0] != "localllm --po"])
def test_fish(
    script: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str, there: set[str], absent: set[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    found = answer("fish", "--no-config", "-c", FISH, str(script), line)
    assert there <= found
    assert not absent & found


@pytest.mark.skipif(not shutil.which("zsh"), reason="needs zsh")
@pytest.mark.parametrize("script", ["zsh"], indirect=True)
def test_zsh(script: Path, tmp_path: Path) -> None:
    start = f"autoload -U compinit && compinit -d {tmp_path}/dump; source {script}; print -- $_comps[localllm]"
    done = subprocess.run(["zsh", "-fc", start], capture_output=True, text=True, check=True, env=dict(os.environ))
    assert done.stdout.strip().endswith("_localllm")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_verb_and_flag_is_in_the_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    from localllm.cli import build_parser

    assert main(["completion", shell]) == 0
    said = capsys.readouterr().out
    for verb, parser in build_parser()[1].items():
        assert verb in said
        assert all(flag.lstrip("-") in said for flag in parser._option_string_actions if flag.startswith("--"))


def test_names_are_those_of_the_models_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--names"]) == 0
    assert "demo" in capsys.readouterr().out.splitlines()


# ---- --install -------------------------------------------------------------------------------------------------------

PLACES = {
    "bash": "data/bash-completion/completions/localllm",
    "zsh": "data/zsh/site-functions/_localllm",
    "fish": "config/fish/completions/localllm.fish",
}
ZSH = r"""
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell "fpath+=($1); autoload -U compinit; compinit -u -d $2/dump; print RE''ADY"
zpty -r shell said '*READY*'
zpty -w -n shell $'localllm completion ba\t'
zpty -r shell said '*completion bash*'
print found
"""


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


@pytest.mark.parametrize("shell", PLACES)
def test_the_script_is_installed_where_the_shell_looks(
    folders: Path, capsys: pytest.CaptureFixture[str], shell: str
) -> None:
    path = folders / PLACES[shell]
    for _ in range(2):  # again, over its own file
        assert main(["completion", shell, "--install"]) == 0
        assert str(path) in capsys.readouterr().out
    assert main(["completion", shell]) == 0
    assert capsys.readouterr().out in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o644
    path.write_text("# by hand\n")
    assert main(["completion", shell, "--install"]) == 2
    assert "was not written by localllm" in capsys.readouterr().err
    assert path.read_text() == "# by hand\n"


def test_the_installed_script_of_bash_completes(folders: Path) -> None:
    assert main(["completion", "bash", "--install"]) == 0
    assert "doctor" in answer("bash", "-c", ASK, "bash", str(folders / PLACES["bash"]), "localllm do")


@pytest.mark.skipif(not shutil.which("zsh"), reason="needs zsh")
def test_the_installed_script_of_zsh_completes_from_the_first_call_on(folders: Path) -> None:
    assert main(["completion", "zsh", "--install"]) == 0
    command = ["zsh", "-fc", ZSH, "zsh", str((folders / PLACES["zsh"]).parent), str(folders)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.strip() == "found"
