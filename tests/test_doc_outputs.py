"""The outputs in README and the guides are those that the program prints.

A block of output follows a comment that names its command: `<!-- output: localllm ps -->`. The commands run against a
server with the demo and a small model. Numbers, times, sizes and the names of models may differ; every other word of a
line must be printed, and every printed line must be in the block.
"""

import contextlib
import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving import Server

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "docs/quickstart.md", *sorted((ROOT / "docs/guides").glob("*.md"))]
NAMES = ("Qwen3-0.6B", "SmolLM2-135M-Instruct", "tiny-llama", "demo")
BLOCK = re.compile(r"<!-- output: (localllm [^>]+) -->\n```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks() -> list[tuple[str, str, str]]:
    """Return page, command and output of every block of output."""
    return [(page.name, *found) for page in PAGES for found in BLOCK.findall(page.read_text(encoding="utf-8"))]


def pattern(line: str) -> str:
    """Return a line without what differs between two runs of a command."""
    for name in NAMES:
        line = line.replace(name, "NAME")
    line = re.sub(r"\d[\d.,]*", "0", line)
    line = re.sub(r"0 ?[KMG]iB", "SIZE", line)
    line = re.sub(r"0 (h|min|s|ms|µs)( 0 (min|s|ms))?(?![a-z])", "TIME", line)
    return re.sub(r"\s+", " ", line).strip()


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory, tiny_llama_path: Path) -> Iterator[dict[str, str]]:
    """The variables with which verbs find a server that has loaded the demo and, on request, another model."""
    folder = tmp_path_factory.mktemp("run")
    variables = os.environ | {"XDG_RUNTIME_DIR": str(folder), "XDG_CONFIG_HOME": str(folder), "COLUMNS": "200"}
    with Server(folder, "serve", "demo", "--max-model-len", "512", "--kv-cache-memory-bytes", "64MiB") as server:
        variables["URL"] = server.wait_for("ready")["url"]
        printed(f"localllm load {tiny_llama_path}", variables)
        time.sleep(2)  # the watchdog looks at an engine every second
        yield variables


def printed(command: str, variables: dict[str, str]) -> str:
    words = [sys.executable, "-m", *command.split()]
    done = subprocess.run(words, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("page", "command", "output"), blocks())
def test_a_block_of_output_is_what_the_command_prints(
    page: str, command: str, output: str, environ: dict[str, str]
) -> None:
    shown, told = (
        {pattern(line) for line in text.splitlines() if line} for text in (output, printed(command, environ))
    )
    assert shown == told, page


@pytest.mark.slow
def test_readmes_python_for_a_server_prints_the_answer(environ: dict[str, str]) -> None:
    answer = run_block("from openai import OpenAI", environ["URL"])
    assert "keys and values of all earlier tokens" in answer


@pytest.mark.slow
def test_readmes_python_without_a_server_answers_both_questions(tmp_path: Path) -> None:
    first, second = run_block("from localllm import LLM").strip().splitlines()
    assert "keys and values of all earlier tokens" in first
    assert "list of KV cache blocks" in second


def run_block(begin: str, url: str = "") -> str:
    """Run README's Python block that begins so, and return what it prints."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    [block] = [each for each in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if each.startswith(begin)]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(block.replace("http://127.0.0.1:8000", url), "README.md", "exec"), {"__name__": "readme"})
    return said.getvalue()


def test_every_output_that_shows_a_command_of_a_server_is_marked() -> None:
    """A block of words that a verb prints, without a mark, would not be run."""
    marked = {(page, output) for page, _, output in blocks()}
    texts = re.compile(r"^```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    found = [(page.name, block) for page in PAGES for block in texts.findall(page.read_text(encoding="utf-8"))]
    assert [each for each in found if each not in marked and re.match(r"(NAME|MODEL|✓)", each[1])] == []
    assert len(marked) >= 2


def test_differences_of_words_are_seen() -> None:
    assert pattern("demo  269 MiB  cpu  2,048  0%  0  for ever") == pattern(
        "Qwen3-0.6B 4.0 GiB cpu 40,960 0% 0 for ever"
    )
    assert pattern("up for 3 h") == pattern("up for 11.3 s") == pattern("up for 4 min 58 s")
    assert pattern("event loop 0.2 ms behind") != pattern("event loop delayed by 0.2 ms")
