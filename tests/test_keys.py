"""Keys in a file: made once, kept as hashes, seen by a server that runs."""

import json
import os
import sqlite3
import stat
import threading
from pathlib import Path

import pytest

from localllm.cli import main
from localllm.errors import ConfigError
from localllm.web.access.keys import GIVEN, KeyRing, add_key, keys_path, read_keys, remove_key
from localllm.web.pages.chat.store import Chats
from localllm.web.pages.chat.store.database import chats_path, open_database


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
        ("add", "keys add needs a NAME."),
        ("add ../x", "'../x' is not a valid name for a key."),
        ("add api-key", "'api-key' is not a valid name for a key."),
        ("add one", "The key one already exists."),
        ("remove two", "There is no key 'two'."),
        ("list one", "Unexpected argument 'one'."),
        ("add two --scope root", "Argument --scope: invalid choice: 'root'"),
    ],
)
def test_wrong_words(path: Path, words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    add_key(path, "one", "infer")
    assert main(["keys", *words.split()]) == 2
    assert capsys.readouterr().err.startswith(said)


# Whose chats are whose ----------------------------------------------------------------------------------------------


def chats_of(owner: str) -> list[str]:
    with sqlite3.connect(chats_path()) as db:
        return [title for (title,) in db.execute("SELECT title FROM chat WHERE owner = ?", (owner,))]


def new_chat(owner: str, title: str) -> None:
    db, _ = open_database(chats_path())
    Chats(db).create(owner, title, {})
    db.close()


def test_a_key_from_before_ids_keeps_its_chats_and_a_new_one_of_its_name_does_not_get_them(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    old = f'[[key]]\nname = "alice"\nscope = "infer"\nsha256 = "{"ab" * 32}"\ncreated = "x"\nlast = "wxyz"\n'
    path.write_text(old)
    add_key(path, "bob", "infer")  # which writes the whole file anew
    alice, bob = read_keys(path)
    assert (alice.owner, alice.name, bob.name) == ("alice", "alice", "bob")
    remove_key(path, "alice")
    add_key(path, "alice", "infer")
    owners = [key.owner for key in read_keys(path)]
    assert bob.owner == owners[0]
    assert len({"alice", "bob", *owners}) == 4  # no id is a name, and no two are the same


@pytest.mark.parametrize("id", ['"', "##", "#a b", "a\\n"])
def test_an_id_that_no_key_can_have_is_refused(path: Path, id: str) -> None:
    add_key(path, "one", "infer")
    path.write_text(path.read_text() + f"\n[[key]]\nname='two'\nscope='infer'\nsha256='{'0' * 64}'\nid='''{id}\n'''")
    with pytest.raises(ConfigError, match="the id of key 'two'"):
        read_keys(path)


def test_removing_a_key_says_what_becomes_of_its_chats(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two", "ops"):
        add_key(path, name, "admin" if name == "ops" else "infer")
    assert main(["keys", "remove", "ops", "--delete-chats"]) == 0  # where there is no file of chats yet
    one, two = read_keys(path)
    for owner in (one.owner, one.owner, two.owner, ""):
        new_chat(owner, "kept")
    capsys.readouterr()
    assert main(["keys", "remove", "one"]) == 0
    said = capsys.readouterr().out
    assert "Its 2 chats can no longer be read with any key." in said
    assert f'{path}: id = "{one.owner}".' in said
    assert chats_of(one.owner) == ["kept"] * 2
    assert main(["keys", "remove", "two", "--delete-chats", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["chats"], told["chats_deleted"], told["id"]) == (1, True, two.owner)
    assert (chats_of(two.owner), chats_of("")) == ([], ["kept"])
    assert main(["keys", "list", "--delete-chats"]) == 2


def test_chats_that_another_key_sees_too_are_not_deleted_with_one_of_them(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add_key(path, "phone", "infer")
    [phone] = read_keys(path)
    add_key(path, "tablet", "infer")
    tablet = read_keys(path)[1]
    path.write_text(path.read_text().replace(tablet.id, phone.id))
    new_chat(phone.owner, "kept")
    assert main(["keys", "remove", "phone", "--delete-chats"]) == 0
    assert "can still be read with the key tablet" in capsys.readouterr().out
    assert chats_of(phone.owner) == ["kept"]
