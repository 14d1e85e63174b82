"""The data folder: what is kept there is for its owner alone."""

import errno
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from localllm.cli import doctor, main
from localllm.config.edit import Change, write
from localllm.config.resolve import default_config_path
from localllm.errors import DiskFull, NotWritable
from localllm.files.folders import data_folder, write_whole
from localllm.logs.log_file import LogFile, log_path
from localllm.machine.running_servers import announced
from localllm.models.library.names import set_alias
from localllm.serving.profiles import Profile, ProfileKey, save_profile
from localllm.web.access.keys import add_key, keys_path, remove_key
from localllm.web.pages.chat.store.database import chats_path, open_database

PROFILE = Profile("chat", "chat", {}, ProfileKey("cpu", "", "2", "", "1", "f", "as stored"), "")


def log_a_line() -> None:
    handler = LogFile(log_path(1))
    handler.handle(logging.makeLogRecord({"msg": "x"}))
    handler.close()


def announce() -> None:
    with announced("http://127.0.0.1:1", "m"):
        pass


def test_what_is_kept_is_for_its_owner_alone_and_doctor_says_where_it_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whichever file is the first that is made."""
    makers: list[Callable[[], object]] = [
        lambda: add_key(keys_path(), "one", "infer"),
        lambda: set_alias("mine", "demo"),
        lambda: save_profile(PROFILE, "demo"),
        announce,
        lambda: open_database(chats_path())[0].close(),
        log_a_line,
    ]
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(doctor, "CHECKS", (doctor.check_data_folder,))
    for number, make in enumerate(makers):
        monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / str(number) / "share"))
        previous = os.umask(0o022)
        try:
            make()
        finally:
            os.umask(previous)
        folder = data_folder()
        kept = (folder, *folder.rglob("*"))
        assert [path for path in kept if path.stat().st_mode & 0o077] == []
    main(["doctor"])
    assert f"✓ data folder  {folder}" in capsys.readouterr().out
    folder.chmod(0o755)
    main(["doctor"])
    assert f"chmod -R go= {folder}" in capsys.readouterr().out


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_a_file_is_replaced_whole_and_has_the_mode_that_was_asked_for(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "facts.toml"
    path.write_text("old")
    previous = os.umask(0o022)
    try:
        write_whole(path, "new\n", mode)
    finally:
        os.umask(previous)
    assert path.read_text() == "new\n"
    assert path.stat().st_mode & 0o777 == mode
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("at", ["open", "replace"])
def test_a_crash_before_the_replacement_leaves_the_old_file_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, at: str
) -> None:
    path = tmp_path / "facts.toml"
    path.write_text("old")

    def crash(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    if at == "open":
        monkeypatch.setattr("builtins.open", crash)
    else:
        monkeypatch.setattr(Path, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, "new")
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_two_writers_of_one_file_do_not_mix_their_texts(tmp_path: Path) -> None:
    path, texts = tmp_path / "facts.toml", [letter * 200_000 for letter in "abcd"]
    with ThreadPoolExecutor(4) as writers:
        list(writers.map(lambda text: write_whole(path, text), texts * 5))
    assert path.read_text() in texts
    assert list(tmp_path.iterdir()) == [path]


WRITERS: dict[str, Callable[[], object]] = {
    "key": lambda: add_key(keys_path(), "laptop", "infer"),
    "removed key": lambda: remove_key(keys_path(), "laptop"),
    "alias": lambda: set_alias("mine", "demo"),
    "profile": lambda: save_profile(PROFILE, "demo"),
    "setting": lambda: write(Change(default_config_path(), "port", "port = 1", "", "port = 1\n")),
}


@pytest.mark.parametrize("what", WRITERS)
@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, DiskFull), (errno.EROFS, NotWritable)])
def test_a_file_that_cannot_be_written_is_named_with_the_reason_and_the_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, what: str, number: int, kind: type[NotWritable]
) -> None:
    for variable in ("XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(variable, str(tmp_path))

    def refuse(path: Path, *args: object) -> int:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(NotWritable) as refused:
        WRITERS[what]()
    assert type(refused.value) is kind
    assert refused.value.why.startswith(f"{os.strerror(number)}: {tmp_path}")
    assert "names another folder" in refused.value.hint


def test_a_key_that_cannot_be_saved_is_an_error_with_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    assert main(["keys", "add", "laptop"]) == 1
    what, why, hint = capsys.readouterr().err.splitlines()
    assert what == "The key laptop could not be saved."
    assert why == f"File exists: {tmp_path}/file."
    assert hint == f"Try: ls -ld {tmp_path}/file; XDG_DATA_HOME names another folder"
