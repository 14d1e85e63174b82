"""Nothing is removed that localllm did not make: install.sh and the .run file in folders with files of others.

The folders get files, links and folders of all names that installs use, before, between and after installs, updates and
removals, and every one of them has to be there in the end. An installed environment (tools/localllm, app/VERSION) is
localllm's as a whole. Does not know: what `localllm uninstall` removes (tests/setup/test_footprint.py).
"""

import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.packaging.harness import SHELLS, make_run, refusal
from tests.packaging.harness import bundle as bundle
from tests.packaging.sandbox import Machine, Sandbox

NAMES = (
    "cache", "tools", "python", "bin", "app", "torch", ".localllm-install", "cache/thesis-v2.txt", "tools/build.sh",
    "python/code.py", "bin/mine", "app/frontend/index.html", "app/models/user.py", "app/1.0/notes", "app/1.1/notes",
    "tools/other/x", "python/lib", "notes.txt", "cache/archive", ".config/x", "chats.db",
)  # fmt: skip


def plant(folder: Path, name: str, kind: str, outside: Path) -> None:
    """Put a file, a link to a folder of others, or a folder at a name, where nothing is there yet."""
    path = folder / name
    if (path.parent / "BUNDLE").exists():
        return
    if os.path.lexists(path) or any(parent.is_file() or parent.is_symlink() for parent in path.parents):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "file":
        path.write_text(f"mine: {name}")
    elif kind == "link":
        path.symlink_to(outside)
    else:
        path.mkdir()
        (path / "mine.txt").write_text(f"mine: {name}/mine.txt")


def theirs(folder: Path, outside: Path) -> dict[str, str]:
    """Return the files and links of others below two folders, by what only plant() writes."""
    found = {}
    for top in (folder, outside):
        for root, folders, files in os.walk(top):
            for name in (*folders, *files):
                path = Path(root, name)
                if path.is_symlink() and path.readlink() == outside:
                    found[str(path)] = "link"
                elif path.is_file() and path.stat().st_size < 200 and path.read_bytes().startswith(b"mine: "):
                    found[str(path)] = path.read_text()
    return found


def actions(sandbox: Sandbox, runs: list[Path], place: list[str], shell: str) -> Iterator[list[str]]:
    """Yield commands that install, update and remove."""
    shell = shutil.which(shell) or shell
    install = [shell, str(sandbox.source / "install.sh")]
    yield [*install, "--yes", *place]
    yield [*install, "--uninstall", "--yes", *place]
    for file in runs:
        yield [shell, str(file), *place]
    yield [shell, str(runs[0]), "--back", *place]


@pytest.fixture(scope="module")
def runs(bundle: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    return [
        make_run(bundle, folder, version, says=says) for version, says in (("1.0", ""), ("1.1", ""), ("1.1", "new"))
    ]


def check_tree(seed: int, folder: Path, runs: list[Path]) -> int:
    """Install, update and remove at random in a folder of others. Return how many commands succeeded."""
    chance = random.Random(seed)
    sandbox = Sandbox(folder, Machine())
    for name in ("gzip", "tar", "sha256sum", "id"):
        found = shutil.which(name)
        assert found
        (sandbox.bin / name).symlink_to(found)
    outside = folder / "outside"
    for name in ("localllm/lib/x", "archive-v0/y", "cpython-3.12/z", "1.0/BUNDLE", "uv"):
        plant(outside, name, "file", outside)
    is_named = chance.random() < 0.6
    place = ["--dir", str(folder / "project")] if is_named else []
    own = folder / "project" if is_named else sandbox.installed
    done = 0
    planted: dict[str, str] = {}
    for _ in range(4):
        if chance.random() < 0.7:
            for name in chance.sample(NAMES, chance.randint(0, 3)):
                plant(own, name, chance.choice(("file", "link", "folder")), outside)
        planted = {**planted, **theirs(folder, outside)}
        command = chance.choice(list(actions(sandbox, runs, place, chance.choice(SHELLS))))
        ended = subprocess.run(command, env=sandbox.environ(), stdin=subprocess.DEVNULL, capture_output=True, text=True,
                               timeout=60, check=False)  # fmt: skip
        done += ended.returncode == 0
        assert theirs(folder, outside) == planted, f"seed {seed}: {' '.join(command)}\n{ended.stdout}\n{ended.stderr}"
        assert ended.returncode in (0, 1), ended.stderr
    return done


def test_no_file_of_others_is_removed_in_random_folders(tmp_path: Path, runs: list[Path]) -> None:
    done = sum(check_tree(seed, tmp_path / str(seed), runs) for seed in range(6))
    assert done > 6


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_file_of_others_is_removed_in_two_hundred_random_folders(tmp_path: Path, runs: list[Path]) -> None:
    done = 0
    for seed in range(6, 206):
        done += check_tree(seed, tmp_path / str(seed), runs)
        shutil.rmtree(tmp_path / str(seed))
    assert done > 200


# ---- what is refused, and what is said -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cache", "tools", "python", "bin", "torch", ".localllm-install"])
@pytest.mark.parametrize("kind", ["file", "link", "folder"])
def test_a_name_that_is_taken_is_refused_with_its_contents(name: str, kind: str, tmp_path: Path) -> None:
    """In the default folder, which also holds chats and keys, as in a folder that was named."""
    sandbox = Sandbox(tmp_path, Machine())
    (tmp_path / "outside").mkdir()
    plant(sandbox.installed, name, kind, tmp_path / "outside")
    (sandbox.installed / "chats.db").write_text("a chat")
    said = refusal(sandbox.run("--yes"))
    assert f"has files that localllm did not make: {name}\n" in said
    assert "install.sh --dir" in said
    assert not sandbox.uv_call()


def test_a_folder_that_is_in_use_is_refused_with_its_contents(tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path, Machine())
    plant(tmp_path / "project", "notes.txt", "file", tmp_path)
    plant(tmp_path / "project", ".git", "folder", tmp_path)
    said = refusal(sandbox.run("--yes", "--dir", str(tmp_path / "project")))
    assert "has files that localllm did not make: notes.txt .git" in said
    assert f"--dir {tmp_path}/project/localllm" in said
    assert "is not installed in" in refusal(sandbox.run("--uninstall", "--yes", "--dir", str(tmp_path / "project")))


def test_an_install_beside_chats_and_keys_goes_on(tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path, Machine())
    for name in ("chats.db", "keys.toml", "run", "logs"):
        plant(sandbox.installed, name, "file", tmp_path)
    assert sandbox.run("--yes").returncode == 0
    listed = (sandbox.installed / ".localllm-install").read_text().splitlines()
    assert listed[0] == "localllm 0.2.0"
    assert "tools/localllm" in listed


def without_marker(sandbox: Sandbox) -> None:
    """Make the install one from before there was a marker, with a cache as an interrupted update left it."""
    assert sandbox.run("--yes").returncode == 0
    (sandbox.installed / ".localllm-install").unlink()


def test_an_install_from_before_the_marker_is_updated(tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path, Machine())
    without_marker(sandbox)
    (sandbox.log / "calls").unlink()
    ended = sandbox.run("--yes")
    assert ended.returncode == 0, ended.stderr
    assert "Installed: 0.0.9; it is replaced" in ended.stdout
    assert (sandbox.installed / ".localllm-install").is_file()


def test_an_install_from_before_the_marker_is_removed_without_files_of_others(tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path, Machine())
    without_marker(sandbox)
    for name in ("cache/thesis.txt", "tools/build.sh", "python/code.py", "bin/mine"):
        plant(sandbox.installed, name, "file", tmp_path)
    assert sandbox.run("--uninstall", "--yes").returncode == 0
    left = {str(path.relative_to(sandbox.installed)) for path in sandbox.installed.rglob("*") if path.is_file()}
    assert left == {"cache/thesis.txt", "tools/build.sh", "python/code.py", "bin/mine"}


def test_a_marker_cannot_point_outside_its_folder(tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path, Machine())
    assert sandbox.run("--yes").returncode == 0
    plant(sandbox.data, "mine.txt", "file", tmp_path)
    with (sandbox.installed / ".localllm-install").open("a") as marker:
        marker.write("tools/../../mine.txt\n")
    assert sandbox.run("--uninstall", "--yes").returncode == 0
    assert (sandbox.data / "mine.txt").exists()
