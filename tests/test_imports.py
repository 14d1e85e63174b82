"""What is imported when: the command line answers with the standard library, and the pages without torch.

Each test starts an interpreter, since this one has imported everything.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from scripts.layout import ROOT

HEAVY = {"torch", "triton", "transformers", "pydantic", "attrs", "gguf", "huggingface_hub", "llguidance"}
MOST_MODULES_OF_HELP = 90


def modules_after(program: str, *flags: str) -> set[str]:
    """Run a program in a fresh interpreter and return the names of the modules that it has then imported."""
    code = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{program}\nimport json\n"
    code += "print(json.dumps(sorted(set(sys.modules) - {'json', 'json.decoder', 'json.encoder', 'json.scanner'})))"
    ended = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, check=False, cwd="/")
    assert ended.returncode == 0, ended.stderr
    return set(json.loads(ended.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "module",
    ["localllm.web.pages", "localllm.web.app", "localllm.up", "localllm.cli.announce", "localllm.serving.build"],
)
def test_a_module_of_the_server_is_imported_without_torch(module: str) -> None:
    assert not HEAVY & modules_after(f"import {module}")


def test_the_application_is_created_without_torch() -> None:
    program = """
from localllm.config.resolve import resolve
from localllm.serving.manager import ModelManager
from localllm.web.app import create_app
create_app(ModelManager(), resolve({}))"""
    assert not HEAVY & modules_after(program)


@pytest.mark.parametrize("words", [["--help"], ["up", "--help"], ["--version"], ["nonsense"]])
def test_help_needs_few_modules_and_no_packages(words: list[str]) -> None:
    """Counted instead of timed, since a count is the same on a loaded machine. -S: without site-packages."""
    program = f"""
import contextlib, io
from localllm.cli import main
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    main({words!r})"""
    found = modules_after(program, "-I", "-S")
    assert len(found) <= MOST_MODULES_OF_HELP, sorted(found)
