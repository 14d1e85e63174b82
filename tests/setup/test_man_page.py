"""The manual page: everything that the parsers know, in a form that `man` formats without a complaint."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from localllm.cli import build_parser, main
from localllm.errors import LocalLLMError
from localllm.setup.man_page import EXIT_CODES, man_page

needs_man = pytest.mark.skipif(not shutil.which("man"), reason="needs man")


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page as a terminal of 200 columns shows it, without hyphenation."""
    path = tmp_path_factory.mktemp("man") / "localllm.1"
    path.write_text(man_page(*build_parser()), encoding="utf-8")
    environ = {**os.environ, "MANWIDTH": "200", "LC_ALL": "C.UTF-8", "MAN_KEEP_FORMATTING": ""}
    done = subprocess.run(
        ["man", "-l", "--warnings", "--no-hyphenation", path], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return " ".join(re.sub(".\x08", "", done.stdout).split())


@needs_man
def test_every_verb_and_flag_is_shown(shown: str) -> None:
    for name, verb in build_parser()[1].items():
        assert f"localllm {name}" in shown
        section = shown.partition(f"localllm {name}")[2]
        for action in verb._actions[1:]:
            # Of a flag that `up` describes, others show the first spelling only.
            flags = action.option_strings if name == "up" else action.option_strings[:1]
            for flag in flags:
                assert re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", section), f"{name} {flag}"


@needs_man
def test_every_exit_code_is_shown(shown: str) -> None:
    codes = {error.exit_code for error in _tree(LocalLLMError)}
    assert codes <= set(EXIT_CODES)
    assert all(text in shown for text in EXIT_CODES.values())


def _tree(error: type[LocalLLMError]) -> list[type[LocalLLMError]]:
    return [error, *(each for child in error.__subclasses__() for each in _tree(child))]


@needs_man
def test_the_verb_shows_the_page(tmp_path: Path) -> None:
    environ = {**os.environ, "MANPAGER": "cat", "MANWIDTH": "100"}
    command = [sys.executable, "-m", "localllm", "man"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert "local LLM server" in done.stdout


def test_without_man_the_help_of_every_verb_is_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["man"]) == 0
    said = capsys.readouterr().out
    assert all(f"usage: localllm {name}" in said for name in build_parser()[1])
