"""Keys in a file: made once, kept as hashes, seen by a server that runs."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path

import pytest

from localllm.cli import main
from localllm.errors import ConfigError
from localllm.keys import GIVEN, KeyRing, add_key, keys_path, read_keys, remove_key


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return keys_path()


def test_a_key_is_shown_once_and_kept_as_a_hash_that_only_its_owner_reads(path: Path) -> None:
    key = add_key(path, "laptop", "infer")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert key not in path.read_text()
    [kept] = read_keys(path)
    assert (kept.name, kept.scope, kept.last) == ("laptop", "infer", key[-4:])
    assert KeyRing(path=path).find([b"", key.encode()]) == kept
    assert KeyRing(path=path).find([key.encode()[:-1], b""]) is None


def test_scopes(path: Path) -> None:
    ring = KeyRing(["given"], path)
    infer, admin = (ring.find([add_key(path, scope, scope).encode()]) for scope in ("infer", "admin"))
    given = ring.find([b"given"])
    assert infer is not None
    assert admin is not None
    assert given is not None
    assert given.name == GIVEN
    assert [key.may("admin") for key in (infer, admin, given)] == [False, True, True]
    assert all(key.may("infer") for key in (infer, admin, given))


def test_a_ring_sees_the_file_change_and_stays_locked_when_the_last_key_goes(path: Path) -> None:
    ring = KeyRing(path=path)
    assert not ring.is_locked
    key = add_key(path, "one", "infer").encode()
    assert ring.is_locked
    assert ring.find([key])
    remove_key(path, "one")
    assert ring.find([key]) is None
    assert ring.is_locked
    assert not KeyRing(path=path).is_locked
    assert KeyRing(path=path, always_locked=True).is_locked


def test_a_ring_that_nobody_asked_before_the_last_key_went_is_locked_too(path: Path) -> None:
    add_key(path, "one", "infer")
    ring = KeyRing(path=path)
    remove_key(path, "one")
    assert ring.is_locked


@pytest.mark.parametrize(
    "text",
    ["[[key]", "key = 3", "[[key]]\nname = 'x'", "\xff", "[[key]]\nname = 'x'\nscope = 'root'\nsha256 = 'ab'",
     "[[key]]\nname = 'x'\nscope = 'infer'\nsha256 = 5", "key = [1]"],
)  # fmt: skip
def test_a_file_that_breaks_is_refused_at_the_start_and_ignored_later(path: Path, text: str) -> None:
    key = add_key(path, "one", "infer").encode()
    ring = KeyRing(path=path)
    path.write_bytes(text.encode("latin-1"))
    assert ring.find([key])
    with pytest.raises(ConfigError, match="Cannot read the keys"):
        KeyRing(path=path)


def test_two_commands_at_once_lose_no_key(path: Path) -> None:
    threads = [threading.Thread(target=add_key, args=(path, f"k{i}", "infer")) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {key.name for key in read_keys(path)} == {f"k{i}" for i in range(16)}
    assert set(os.listdir(path.parent)) <= {"keys.toml", "keys.lock"}


def test_the_verb(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys"]) == 0
    assert "no key" in capsys.readouterr().out
    assert main(["keys", "add", "phone", "--scope", "admin", "--json"]) == 0
    key = json.loads(capsys.readouterr().out)["key"]
    assert main(["keys", "list"]) == 0
    listed = capsys.readouterr().out
    assert "phone" in listed
    assert "admin" in listed
    assert f"…{key[-4:]}" in listed
    assert key not in listed
    assert main(["keys", "remove", "phone"]) == 0
    assert read_keys(path) == ()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("add", "Which key is to be added?"),
        ("add ../x", "'../x' is no name for a key."),
        ("add api-key", "'api-key' is no name for a key."),
        ("add one", "There is a key one already."),
        ("remove two", "There is no key 'two'."),
        ("list one", "Unexpected argument 'one'."),
        ("add two --scope root", "Argument --scope: invalid choice: 'root'"),
    ],
)
def test_wrong_words(path: Path, words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    add_key(path, "one", "infer")
    assert main(["keys", *words.split()]) == 2
    assert capsys.readouterr().err.startswith(said)
