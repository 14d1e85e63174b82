"""The files that `localllm uninstall` removes, in folders with files of others. test_uninstall.py runs the verb."""

import random
import sys
from pathlib import Path

import pytest

from localllm.setup import uninstall as footprints
from localllm.setup.uninstall import MARKER, FileGroup, footprint, remove_path

NAMES = (
    "cache", "tools", "python", "bin", "app", "torch", "cache/thesis.txt", "tools/build.sh", "python/code.py",
    "bin/mine", "app/frontend/index.html", "app/1.0/notes", "tools/other/x", "python/lib/y", "notes.txt", ".config/x",
)  # fmt: skip
LISTED = ("tools/localllm", "tools/.lock", "python/cpython-*", "cache/archive-v*", "bin/uv", "torch")


def write(path: Path, text: str = "ours") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The data folder with an install of install.sh, whose environment this is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("DATA", "CONFIG", "CACHE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name))
    root = tmp_path / "DATA/localllm"
    for name in ("tools/localllm/uv-receipt.toml", "tools/.lock", "python/cpython-3.12/bin/python", "bin/uv", "torch"):
        write(root / name)
    monkeypatch.setattr(sys, "prefix", str(root / "tools/localllm"))
    return root


def remove_programs() -> None:
    for part in footprint():
        if part.group is not FileGroup.KEPT:
            for path in part.paths:
                remove_path(path)


@pytest.mark.parametrize("has_marker", [True, False])
def test_no_file_of_others_is_removed_in_two_hundred_random_folders(root: Path, has_marker: bool) -> None:
    outside = root.parent.parent / "outside"
    ours = {path: path.read_text() for path in root.rglob("*") if path.is_file()}
    for seed in range(100):
        chance = random.Random(seed)
        for path, text in ours.items():
            if not any(parent.is_symlink() or parent.is_file() for parent in path.parents):
                write(path, text)
        if has_marker:
            write(root / MARKER, "\n".join(["localllm 1.0", *LISTED]))
        write(outside / "localllm/x", "theirs")
        for name in chance.sample(NAMES, 4):
            path = root / name
            if path.exists() or path.is_symlink() or any(each.is_symlink() or each.is_file() for each in path.parents):
                continue
            if chance.random() < 0.3:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.symlink_to(outside)
            else:
                write(path, "theirs")
        before = theirs(root.parent.parent)
        assert before
        remove_programs()
        assert theirs(root.parent.parent) == before, f"seed {seed}"
        for path in sorted(root.rglob("*"), reverse=True):
            remove_path(path)


def theirs(folder: Path) -> set[Path]:
    """Return links, and files with the text of others. rglob follows no links."""
    return {
        path for path in folder.rglob("*") if path.is_symlink() or (path.is_file() and path.read_text() == "theirs")
    }


def test_the_listed_files_and_the_marker_are_removed(root: Path) -> None:
    write(root / MARKER, "\n".join(["localllm 1.0", *LISTED]))
    write(root / "cache/archive-v0/x")
    remove_programs()
    assert [path for path in root.rglob("*") if path.is_file()] == []


def test_a_folder_behind_a_link_is_somewhere_else(root: Path, tmp_path: Path) -> None:
    write(root / MARKER, "\n".join(["localllm 1.0", *LISTED]))
    (root / "python").rename(tmp_path / "moved")
    (root / "python").symlink_to(tmp_path / "moved")
    remove_programs()
    assert (tmp_path / "moved/cpython-3.12/bin/python").exists()


@pytest.mark.parametrize("line", ["../../mine", "/etc/*", "tools/../../../mine", "", ".", "**"])
def test_a_marker_cannot_point_outside_what_installs_make(line: str, root: Path, tmp_path: Path) -> None:
    write(tmp_path / "mine", "theirs")
    write(root / MARKER, f"localllm 1.0\n{line}\n")
    assert set(footprints._made_in(root)) == {root / MARKER}


def test_unknown_files_of_the_data_and_cache_folders_are_kept(root: Path, tmp_path: Path) -> None:
    for name in ("DATA/localllm/notes.txt", "CACHE/localllm/notes.txt", "CONFIG/localllm/notes.txt"):
        write(tmp_path / name, "theirs")
    write(tmp_path / "CACHE/localllm/kernels/x.json")
    write(tmp_path / "CONFIG/localllm/config.toml")
    remove_programs()
    assert len(theirs(tmp_path)) == 3
    assert not (tmp_path / "CACHE/localllm/kernels").exists()
    assert not (tmp_path / "CONFIG/localllm/config.toml").exists()
