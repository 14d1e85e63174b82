"""What a newcomer types: the commands of README, of the quickstart and of the guides for getting localllm.

Every command is parsed by the program that it calls; README's first code block is run as it is, slowly.
"""

import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from localllm import cli
from localllm.version import __version__
from scripts.layout import ROOT

PAGES = ["README.md", "docs/quickstart.md", "docs/guides/windows.md", "docs/guides/mac.md"]
OTHER_PROGRAMS = {"curl", "sudo", "wsl", "echo", "docker", "kubectl", "source"}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str) -> list[str]:
    """Return the code blocks of commands, which name no language."""
    return [body for language, body in BLOCK.findall((ROOT / page).read_text(encoding="utf-8")) if not language]


def commands(page: str) -> Iterator[list[str]]:
    """Yield the words of each command of the code blocks, and of the code spans that call a program of ours."""
    lines = [line for block in blocks(page) for line in block.replace("\\\n", "").splitlines()]
    spans = re.findall(
        r"`((?:localllm|sh|scripts/\w+) [^`\n]+|scripts/\w+)`", (ROOT / page).read_text(encoding="utf-8")
    )
    for line in [*lines, *(span.split("\\|")[0] for span in spans)]:
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=\S+", words[0]):
            words.pop(0)
        if words and not re.match(r"[\[\w]+(\]|=)", line):  # a line of a file
            yield words


ALL = [(page, " ".join(words), words) for page in PAGES for words in commands(page)]


@pytest.mark.parametrize(("page", "line", "words"), ALL, ids=[f"{page}: {line}" for page, line, _ in ALL])
def test_each_command_is_understood_by_the_program_it_calls(page: str, line: str, words: list[str]) -> None:
    program, *rest = words
    if program == "sh":
        script, *rest = rest
        if script.endswith(".run"):
            assert script == f"localllm-{__version__}-linux-x86_64-cpu.run"
            assert not rest or cli.parse(rest)
            return
        assert script in ("install.sh", "FOLDER/install.sh")
        told = subprocess.run(["sh", ROOT / "install.sh", "--help"], capture_output=True, text=True, check=True).stdout
        assert [word for word in rest if word.startswith("-") and word not in told] == []
    elif program.endswith("localllm"):
        assert program in ("localllm", ".venv/bin/localllm")
        assert cli.parse([word.strip("[]") for word in rest])
    elif program.startswith("scripts/"):
        assert os.access(ROOT / program, os.X_OK)
        assert program != "scripts/up" or cli.parse(["up", *rest])
    else:
        assert program in OTHER_PROGRAMS, line
        files = [word for word in rest if word.startswith("packaging/")]
        assert [file for file in files if not (ROOT / file).exists()] == []


def test_the_first_screen_says_how_to_get_it_and_what_it_costs() -> None:
    """What a newcomer needs stands before the first measurement, the first picture of the inside, and the tests."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    order = ["sh install.sh", "280 MB", "2.8 GB", "3.1 GB", "\nscripts/up\nscripts/check\n", "toy",
             "## Your machine", "Windows", "Mac", "Docker", "Kubernetes",
             "## Keep it", "## How fast", "## Check your copy"]  # fmt: skip
    places = [text.index(word) for word in order]
    assert places == sorted(places)


def test_sizes_are_those_that_the_script_says() -> None:
    """install.sh has the only numbers; documents repeat them."""
    script = (ROOT / "install.sh").read_text(encoding="utf-8")
    said = re.findall(r"say 'about ([\d.]+ [MG]B) to download, ([\d.]+ GB) on disk'", script)
    assert len(said) == 3
    for name in ("README.md", "docs/quickstart.md", "docs/guides/mac.md"):
        text = (ROOT / name).read_text(encoding="utf-8").partition("## A real model")[0].partition("## 3. ")[0]
        costs = re.findall(r"([\d.]+ [MG]B)(?: and|,) ([\d.]+ GB)(?: of disk)?", text)
        assert set(costs) <= set(said), name
        downloads = set(re.findall(r"\b(2\d\d MB|[23]\.\d GB)\b", text))
        assert downloads
        assert downloads <= {download for download, _ in said}, name
    assert not re.search(r"\d [MG]B", (ROOT / "scripts/_venv.sh").read_text(encoding="utf-8"))


def copy_of_the_sources(folder: Path) -> None:
    """Copy what git knows and does not ignore, as a clone of the working tree."""
    listed = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables under which uv finds the locked packages in a folder instead of at an index, and uv itself."""
    folder = tmp_path_factory.mktemp("index")
    pip = [sys.executable, "-m", "pip", "--quiet", "wheel", "--no-deps", "--wheel-dir", str(folder / "own"), str(ROOT)]
    download = [sys.executable, "-m", "pip", "--quiet", "download", "--dest", str(folder / "build"), "hatchling>=1.26"]
    collect = [sys.executable, str(ROOT / "packaging/wheelhouse"), "--torch", "cpu", "--out", str(folder / "all")]
    for command in (pip, download, collect):
        if command is collect:
            command += ["--wheel", str(next((folder / "own").glob("*.whl")))]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            pytest.skip(f"needs a package index: {ended.stderr[-500:]}")
    with zipfile.ZipFile(next((folder / "all").glob("uv-*.whl"))) as archive:
        name = next(name for name in archive.namelist() if name.endswith("/scripts/uv"))
        (folder / "uv").write_bytes(archive.read(name))
    (folder / "uv").chmod(0o755)
    return {"UV_NO_INDEX": "1", "UV_FIND_LINKS": f"{folder / 'all'},{folder / 'build'}", "PATH": str(folder)}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_first_code_block_ends_in_an_answer_and_uninstall_leaves_nothing(
    tmp_path: Path, index: dict[str, str]
) -> None:
    """In an empty home folder and a copy of the sources, with Enter as the answer to every question."""
    home, sources = tmp_path / "home", tmp_path / "copy"
    home.mkdir()
    copy_of_the_sources(sources)
    path = [f"{home}/.local/bin", index["PATH"], "/usr/bin", "/bin", str(Path(sys.executable).resolve().parent)]
    environ = {**index, "HOME": str(home), "PATH": ":".join(path), "SHELL": "/bin/bash", "HF_HUB_OFFLINE": "1"}
    said = run_at_terminal(["bash", "-e", "-c", blocks("README.md")[0]], sources, environ, b"\n")
    answer = said.rpartition("localllm uninstall")[2].partition("\n")[2]
    assert "block" in answer, said
    assert (home / ".local/share/bash-completion/completions/localllm").exists()
    removed = run_at_terminal(["localllm", "uninstall", "--all", "--yes"], home, environ, b"")
    assert list(home.iterdir()) == [], removed


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_first_code_block_answers_with_the_package_indexes_of_this_machine(tmp_path: Path) -> None:
    """In an empty home folder, with no more of this session than the configuration of uv and pip.

    Skipped where only the build with CUDA is reached, which is 2.8 GB."""
    home, sources = tmp_path / "home", tmp_path / "copy"
    home.mkdir()
    copy_of_the_sources(sources)
    kept = re.compile(r"(PIP|UV)_|SSL_CERT_FILE$|https?_proxy$", re.IGNORECASE)
    conf = Path(os.environ.get("PIP_CONFIG_FILE") or Path.home() / ".config/pip/pip.conf")
    path = f"{home}/.local/bin:/usr/local/bin:/usr/bin:/bin:{Path(sys.executable).resolve().parent}"
    environ = {name: value for name, value in os.environ.items() if kept.match(name)}
    environ |= {"HOME": str(home), "PATH": path, "SHELL": "/bin/sh"} | (
        {"PIP_CONFIG_FILE": str(conf)} if conf.exists() else {}
    )
    plan = subprocess.run(
        ["sh", "install.sh", "--look"], cwd=sources, env=environ, capture_output=True, text=True, check=False
    )
    if "about 280 MB" not in plan.stdout:
        pytest.skip(f"no small build here: {plan.stdout}{plan.stderr}")
    said = run_at_terminal(["sh", "-e", "-c", blocks("README.md")[0]], sources, environ, b"\n")
    assert "warning" not in said
    assert "block" in said.rpartition("localllm uninstall")[2], said
    removed = run_at_terminal(["localllm", "uninstall", "--all", "--yes"], home, environ, b"")
    assert list(home.iterdir()) == [], removed


def run_at_terminal(command: list[str], folder: Path, environ: dict[str, str], typed: bytes) -> str:
    """Run a command whose input is a terminal. Return its output; assert that it succeeds."""
    master, slave = pty.openpty()
    try:
        os.write(master, typed)
        done = subprocess.run(
            command, cwd=folder, env=environ, stdin=slave, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            check=False,
        )  # fmt: skip
    finally:
        os.close(slave)
        os.close(master)
    assert done.returncode == 0, done.stdout
    return done.stdout
