"""The store of chats: held against a plain model of it, and given files that are locked, broken, old or new."""

import asyncio
import os
import re
import socket
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from localllm import version
from localllm.machine.running_servers import began
from localllm.web.pages.chat.store import Chats, ChatStore, StoredMessage, chat_store, database, file_versions, search
from localllm.web.pages.chat.store import chats as chat_rows
from localllm.web.pages.chat.store.chats import UNDO_S
from localllm.web.pages.chat.store.database import MIGRATIONS, open_database
from localllm.web.pages.chat.store.projects import ProjectNotFound
from localllm.web.pages.chat.store.records import ChatNotFound, ChatsUnavailable, SavedPrompt
from localllm.web.pages.chat.store.saved_prompts import MAX_PROMPTS, PromptExists, PromptNotFound, TooManyPrompts

Result = TypeVar("Result")
WORDS = ("alpha", "Beta", "gämma", "delta-wing", '"quoted"', "AND", "naïve")
texts = st.lists(st.sampled_from(WORDS), max_size=4).map(" ".join)


class PlainChat:
    """A chat as it ought to be: dicts, and every question answered by looking at all of it."""

    def __init__(self, owner: str, title: str) -> None:
        self.owner, self.title, self.pinned, self.leaf = owner, title, False, None
        self.archived, self.project = False, ""
        self.messages: dict[str, tuple[str | None, str]] = {}  # in order: parent, text
        self.gone: set[str] = set()
        self.compared: dict[str, list[str]] = {}  # parent -> the replies that are shown beside each other

    def alive(self) -> list[str]:
        return [each for each in self.messages if each not in self.gone]

    def path(self) -> list[str]:
        found, at = [], self.leaf
        while at is not None:
            found.insert(0, at)
            at = self.messages[at][0]
        return found

    def beside(self) -> list[str]:
        shown = self.compared.get(self.messages[self.leaf][0] or "", []) if self.leaf else []
        return [each for each in self.alive() if each in shown and each != self.leaf] if self.leaf in shown else []

    def versions(self, message_id: str) -> list[str]:
        return [each for each in self.alive() if self.messages[each][0] == self.messages[message_id][0]]

    def newest_leaf(self, message_id: str) -> str:
        below = [each for each in self.alive() if self.messages[each][0] == message_id]
        return self.newest_leaf(below[-1]) if below else message_id

    def below(self, message_id: str) -> set[str]:
        return {message_id}.union(*(self.below(m) for m in self.alive() if self.messages[m][0] == message_id))


class StoreWalk(RuleBasedStateMachine):
    """Any calls in any order."""

    chats, messages, deletions = Bundle("chats"), Bundle("messages"), Bundle("deletions")
    projects, group_deletions = Bundle("projects"), Bundle("group_deletions")

    def __init__(self) -> None:
        super().__init__()
        self.db, _ = open_database(None)
        self.store = Chats(self.db)
        self.plain: dict[str, PlainChat] = {}
        self.deleted: set[str] = set()
        self.names: dict[str, str] = {}  # of projects, deleted ones too
        self.projects_gone: set[str] = set()

    def teardown(self) -> None:
        self.db.close()

    def here(self, chat_id: str) -> bool:
        """Whether the chat is there; the store must say the same."""
        if chat_id in self.plain and chat_id not in self.deleted:
            return True
        with pytest.raises(ChatNotFound):
            self.store.get("me", chat_id)
        return False

    @rule(target=chats, title=texts, owner=st.sampled_from(["me", "me", "you"]))
    def create(self, title: str, owner: str) -> Any:
        chat = self.store.create(owner, title, {"system": title})
        if owner == "you":
            with pytest.raises(ChatNotFound):
                self.store.get("me", chat.id)
            return multiple()
        self.plain[chat.id] = PlainChat(owner, title)
        return chat.id

    @rule(target=messages, chat=chats, text=texts, below=st.none() | messages)
    def add(self, chat: str, text: str, below: tuple[str, str] | None) -> Any:
        if not self.here(chat):
            return multiple()
        plain = self.plain[chat]
        parent = below[1] if below and below[0] == chat and below[1] in plain.alive() else plain.leaf
        message = self.store.add(chat, parent, "user", text, {"figures": 1})
        plain.messages[message.id], plain.leaf, plain.archived = (parent, text), message.id, False
        return chat, message.id

    @rule(target=messages, message=messages)
    def compare(self, message: tuple[str, str]) -> Any:
        chat, parent = message
        if not self.here(chat) or parent not in self.plain[chat].alive():
            return multiple()
        plain = self.plain[chat]
        replies = self.store.compare(chat, parent, [{"model": "a"}, {"model": "b"}])
        assert [each.details for each in replies] == [{"model": "a"}, {"model": "b"}]
        plain.messages |= {each.id: (parent, "") for each in replies}
        plain.compared[parent], plain.leaf = [each.id for each in replies], replies[0].id
        return multiple(*((chat, each.id) for each in replies))

    @rule(target=chats, message=messages)
    def fork(self, message: tuple[str, str]) -> Any:
        chat, message_id = message
        if not self.here(chat) or message_id not in self.plain[chat].alive():
            return multiple()
        plain = self.plain[chat]
        with pytest.raises(ChatNotFound):
            self.store.fork("you", chat, message_id)
        copy = self.store.fork("me", chat, message_id)
        before = self.store.branch(chat, message_id).messages
        after = self.store.branch(copy.id, copy.leaf)
        assert [(m.role, m.text) for m in after.messages] == [(m.role, m.text) for m in before]
        assert [m.details for m in after.messages] == [
            {name: value for name, value in m.details.items() if name != "compared"} for m in before
        ]
        assert copy.settings == self.store.get("me", chat).settings
        titles = [each.title for name, each in self.plain.items() if name not in self.deleted]
        assert copy.title not in titles
        assert re.sub(r" \(\d+\)$", "", copy.title) == re.sub(r" \(\d+\)$", "", plain.title)
        made = self.plain[copy.id] = PlainChat("me", copy.title)
        made.messages = {m.id: (m.parent_id, m.text) for m in after.messages}
        made.leaf, made.project = copy.leaf, self.project_of(plain)
        return copy.id

    @rule(message=messages, text=texts)
    def write(self, message: tuple[str, str], text: str) -> None:
        chat, message_id = message
        self.store.write(message_id, text, {})
        if chat in self.plain and message_id in self.plain[chat].messages:
            self.plain[chat].messages[message_id] = (self.plain[chat].messages[message_id][0], text)
            self.plain[chat].compared.pop(message_id, None)  # it is among the details

    @rule(chat=chats, title=texts, pinned=st.booleans())
    def rename_and_pin(self, chat: str, title: str, pinned: bool) -> None:
        if self.here(chat):
            self.store.rename("me", chat, title)
            self.store.pin("me", chat, pinned)
            self.plain[chat].title, self.plain[chat].pinned = title, pinned

    @rule(message=messages)
    def select(self, message: tuple[str, str]) -> None:
        chat, message_id = message
        if self.here(chat) and message_id in self.plain[chat].alive():
            leaf = self.store.select(chat, message_id)
            self.plain[chat].leaf = self.plain[chat].newest_leaf(message_id)
            self.plain[chat].compared.pop(self.plain[chat].messages[message_id][0] or "", None)
            assert leaf == self.plain[chat].leaf

    @rule(target=deletions, chat=chats)
    def delete(self, chat: str) -> Any:
        if not self.here(chat):
            return multiple()
        self.deleted.add(chat)
        return self.store.delete("me", chat), chat, set(), None

    @rule(target=deletions, message=messages)
    def delete_message(self, message: tuple[str, str]) -> Any:
        chat, message_id = message
        if not self.here(chat) or message_id not in self.plain[chat].alive():
            return multiple()
        plain = self.plain[chat]
        doomed, others, before = plain.below(message_id), plain.versions(message_id), plain.leaf
        others.remove(message_id)
        deletion = self.store.delete_message(chat, message_id)
        plain.gone |= doomed
        if plain.leaf in doomed:
            plain.leaf = plain.newest_leaf(others[-1]) if others else plain.messages[message_id][0]
        return deletion, chat, doomed, before if before in doomed else None

    @rule(deletion=consumes(deletions))
    def undo(self, deletion: tuple[str, str, set[str], str | None]) -> None:
        name, chat, doomed, leaf = deletion
        with pytest.raises(ChatNotFound):
            self.store.undo("you", name)
        plain = self.plain.get(chat)
        parents = (
            {plain.messages[m][0] if m in plain.messages else "purged" for m in doomed} - doomed if plain else set()
        )
        if plain is None or not parents <= {None, *plain.alive()}:
            with pytest.raises(ChatNotFound):
                self.store.undo("me", name)
            return
        restored = self.store.undo("me", name)
        assert (restored.kind, restored.id) == ("message" if doomed else "chat", chat)
        if doomed:
            plain.gone -= doomed
            plain.leaf = leaf or plain.leaf
        else:
            self.deleted.discard(chat)

    @rule(target=projects, name=texts)
    def create_project(self, name: str) -> Any:
        project = self.store.add_project("me", name)
        self.names[project.id] = name
        return project.id

    @rule(chats=st.lists(chats, max_size=3), archived=st.booleans())
    def archive(self, chats: list[str], archived: bool) -> None:
        there = {chat for chat in chats if self.here(chat)}
        if not there:
            with pytest.raises(ChatNotFound):
                self.store.archive("me", chats, archived)
            return
        assert set(self.store.archive("me", chats, archived)) == there
        for chat in there:
            self.plain[chat].archived = archived

    @rule(chats=st.lists(chats, min_size=1, max_size=3), project=projects | st.just(""))
    def move(self, chats: list[str], project: str) -> None:
        there = {chat for chat in chats if self.here(chat)}
        if project and (project not in self.names or project in self.projects_gone):
            with pytest.raises(ProjectNotFound):
                self.store.move("me", chats, project)
            return
        with pytest.raises(ChatNotFound if not project else ProjectNotFound):
            self.store.move("you", chats, project)
        if there:
            assert set(self.store.move("me", chats, project)) == there
            for chat in there:
                self.plain[chat].project = project

    @rule(target=group_deletions, project=projects, with_chats=st.booleans())
    def delete_project(self, project: str, with_chats: bool) -> Any:
        if project not in self.names or project in self.projects_gone:
            with pytest.raises(ProjectNotFound):
                self.store.project("me", project)
            return multiple()
        chats = {chat for chat, plain in self.plain.items() if plain.project == project and chat not in self.deleted}
        deletion, gone = self.store.delete_project("me", project, with_chats=with_chats)
        assert set(gone) == (chats if with_chats else set())
        self.projects_gone.add(project)
        self.deleted |= chats if with_chats else set()
        return deletion, project, chats if with_chats else set()

    @rule(target=group_deletions, chats=st.lists(chats, min_size=1, max_size=3))
    def delete_chats(self, chats: list[str]) -> Any:
        there = {chat for chat in chats if self.here(chat)}
        if not there:
            with pytest.raises(ChatNotFound):
                self.store.delete_chats("me", chats)
            return multiple()
        deletion, gone = self.store.delete_chats("me", chats)
        assert set(gone) == there
        self.deleted |= there
        return deletion, "", there

    @rule(deletion=consumes(group_deletions))
    def undo_group(self, deletion: tuple[str, str, set[str]]) -> None:
        name, project, chats = deletion
        with pytest.raises(ChatNotFound):
            self.store.undo("you", name)
        if not (project in self.names if project else chats & self.plain.keys()):
            with pytest.raises(ChatNotFound):
                self.store.undo("me", name)
            return
        restored = self.store.undo("me", name)
        assert restored.kind == ("project" if project else "chat")
        assert restored.id in ({project} if project else chats)
        assert restored.count == (1 if project else len(chats))
        self.projects_gone.discard(project)
        self.deleted -= chats

    @rule()
    def purge(self) -> None:
        self.store.purge(time.time() + 1)
        for project in self.projects_gone:
            self.names.pop(project)
            for plain in self.plain.values():
                plain.project = "" if plain.project == project else plain.project
        self.projects_gone.clear()
        for chat in self.deleted:
            self.plain.pop(chat)
        self.deleted.clear()
        for plain in self.plain.values():
            plain.messages = {each: plain.messages[each] for each in plain.alive()}
            plain.gone.clear()

    @rule()
    def wipe_somebody_else(self) -> None:
        self.store.wipe("you")

    @rule(
        words=st.lists(st.sampled_from(["al", "BETA", "gamma", "wing", "delta", '"', "*", "naive", "and"]), max_size=2)
    )
    def search(self, words: list[str]) -> None:
        asked = [word.lower() for word in words if word.isalnum()]
        holds = lambda text: all(any(w.startswith(a) for w in _words(text)) for a in asked)  # noqa: E731
        expected = {
            chat
            for chat, plain in self.plain.items()
            if chat not in self.deleted
            and (holds(plain.title) or any(holds(plain.messages[each][1]) for each in plain.alive()))
        }
        found = {each.chat.id for each in self.store.search("me", " ".join(words), 100)}
        assert found == (expected if asked else set())

    @invariant()
    def branches_are_those_of_the_model(self) -> None:
        for chat_id, plain in self.plain.items():
            if chat_id in self.deleted:
                continue
            chat = self.store.get("me", chat_id)
            assert (chat.title, chat.pinned, chat.leaf) == (plain.title, plain.pinned, plain.leaf)
            assert (chat.archived, chat.project_id or "") == (plain.archived, self.project_of(plain))
            branch = self.store.branch(chat_id, chat.leaf)
            assert [m.id for m in branch.messages] == plain.path()
            assert [m.text for m in branch.messages] == [plain.messages[m][1] for m in plain.path()]
            assert [list(m.versions) for m in branch.messages] == [plain.versions(m) for m in plain.path()]
            assert [m.id for m in branch.beside] == plain.beside()
            assert [m.id for m in self.store.all_messages(chat_id)] == plain.alive()

    def project_of(self, plain: PlainChat) -> str:
        return "" if plain.project in self.projects_gone else plain.project

    @invariant()
    def list_holds_what_is_there(self) -> None:
        there = {chat: plain for chat, plain in self.plain.items() if chat not in self.deleted}
        for archived in (False, True):
            listed = self.store.latest("me", 1000, archived=archived)
            assert {chat.id for chat in listed} == {chat for chat, plain in there.items() if plain.archived == archived}
            assert [chat.pinned for chat in listed] == sorted((chat.pinned for chat in listed), reverse=True)
        beside = {chat for chat, plain in there.items() if not plain.archived}
        grouped = {chat for chat in beside if self.project_of(there[chat]) and not there[chat].pinned}
        assert {chat.id for chat in self.store.in_projects("me", 1000)} == grouped
        assert {chat.id for chat in self.store.outside_projects("me", 1000)} == beside - grouped

    @invariant()
    def projects_are_those_of_the_model(self) -> None:
        there = self.names.keys() - self.projects_gone
        found = self.store.projects("me")
        assert {each.id: each.name for each in found} == {each: self.names[each] for each in there}
        for each in found:
            chats = {chat for chat, plain in self.plain.items() if plain.project == each.id and not plain.archived}
            assert each.num_chats == len(chats - self.deleted)
            assert {chat.id for chat in self.store.chats_of_project("me", each.id, 1000)} == chats - self.deleted


def _words(text: str) -> list[str]:
    plain = text.lower().replace("ä", "a").replace("ï", "i")
    return "".join(c if c.isalnum() else " " for c in plain).split()


TestStoreWalk = StoreWalk.TestCase
TestStoreWalk.settings = hypothesis_settings(max_examples=25, stateful_step_count=30, deadline=None)


def on(path: Path | None, work: Callable[[ChatStore], Any]) -> Any:
    """What a coroutine with a store gives."""

    async def main() -> Any:
        store = ChatStore(path)
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(main())


async def _new_chat(store: ChatStore) -> str:
    chat = await store.call(Chats.create, "", "kept", {"system": "Be brief."})
    question = await store.call(Chats.add, chat.id, None, "user", "why?")
    await store.call(Chats.add, chat.id, question.id, "assistant", "bec", {"finish_reason": ""})
    return chat.id


async def _titles(store: ChatStore) -> tuple[list[str], str]:
    chats = await store.call(Chats.latest, "", 10)
    return [chat.title for chat in chats], store.notice


def test_a_window_of_a_long_branch_says_what_is_outside() -> None:
    db, _ = open_database(None)
    chats = Chats(db)
    chat = chats.create("", "long", {})
    parent, ids = None, []
    for number in range(100):
        parent = chats.add(chat.id, parent, "user" if number % 2 == 0 else "assistant", str(number)).id
        ids.append(parent)
    last = chats.branch(chat.id, parent, limit=40)
    assert ([m.text for m in last.messages], last.num_earlier, last.num_later) == ([*map(str, range(60, 100))], 60, 0)
    middle = chats.branch(chat.id, parent, limit=40, before=ids[60])
    assert ([m.text for m in middle.messages], middle.num_earlier, middle.num_later) == (
        [*map(str, range(20, 60))],
        20,
        40,
    )
    assert chats.branch(chat.id, parent, limit=40, before=ids[5]).num_earlier == 0
    db.close()


def test_a_fork_keeps_what_was_left_out_and_the_project() -> None:
    with closing(open_database(None)[0]) as db:
        chats = Chats(db)
        project = chats.add_project("me", "Kernels")
        chat = chats.create("me", "Blocks", {}, project.id)
        parent, ids = None, []
        for number in range(6):
            parent = chats.add(chat.id, parent, "user" if number % 2 == 0 else "assistant", str(number)).id
            ids.append(parent)
        chats.leave_out("me", chat.id, ids[1])
        copy = chats.fork("me", chat.id, ids[3])
        assert (copy.project_id, chats.branch(copy.id, copy.leaf).num_left_out) == (project.id, 2)
        chats.bring_back("me", copy.id)
        assert chats.branch(chat.id, ids[3]).num_left_out == 2
        assert [chats.fork("me", copy.id, copy.leaf or "").title for _ in range(2)] == ["Blocks (3)", "Blocks (4)"]


def test_what_is_kept_survives_and_an_unfinished_reply_was_interrupted(tmp_path: Path) -> None:
    path = tmp_path / "localllm" / "chats.db"
    chat_id = on(path, _new_chat)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600

    async def look(store: ChatStore) -> tuple[StoredMessage, ...]:
        chat = await store.call(Chats.get, "", chat_id)
        assert chat.settings == {"system": "Be brief."}
        return (await store.call(Chats.branch, chat.id, chat.leaf)).messages

    question, reply = on(path, look)
    assert (question.text, reply.text) == ("why?", "bec")
    assert reply.details["finish_reason"] == "interrupted"


def test_a_second_server_on_the_file_takes_nothing_from_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its undo nor the reply that it is writing; what a server left that is gone is closed as ever."""
    path = tmp_path / "chats.db"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as first:
        mark = f"{first.pid} {began(first.pid)} {socket.gethostname()}"
        with monkeypatch.context() as as_the_first:
            as_the_first.setattr(chat_rows, "process_mark", lambda: mark)
            chat_id = on(path, _new_chat)
            deletion = on(path, lambda store: store.call(Chats.delete, "", chat_id))

        async def look(store: ChatStore) -> str:
            await store.call(Chats.latest, "", 1)
            assert (await store.call(Chats.undo, "", deletion)).id == chat_id
            chat = await store.call(Chats.get, "", chat_id)
            reply = (await store.call(Chats.branch, chat.id, chat.leaf)).messages[-1]
            return str(reply.details["finish_reason"])

        assert on(path, look) == ""
        deletion = on(path, lambda store: store.call(Chats.delete, "", chat_id))
        first.communicate(b"\n")
    assert on(path, look) == "interrupted"


def test_what_was_deleted_before_the_last_server_ended_is_purged_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "chats.db"
    chat_id = on(path, _new_chat)
    deletion = on(path, lambda store: store.call(Chats.delete, "", chat_id))
    later_s = time.time() + UNDO_S + 1
    monkeypatch.setattr(chat_store.time, "time", lambda: later_s)
    with pytest.raises(ChatNotFound):
        on(path, lambda store: store.call(Chats.undo, "", deletion))


@pytest.mark.parametrize(
    ("text", "words", "expected"),
    [
        ("one two three", "tw", ("one ", "two", " three")),
        ("Ein naïver Gedanke", "NAIVE", ("Ein ", "naïver", " Gedanke")),
        ("gamma rays", "gämma", ("", "gamma", " rays")),
        ("a foo, bar_b", "foo-ba", ("a ", "foo, bar", "_b")),
        ("twofold two", "wo two", ("", "twofold", " two")),
        ("x " * 50 + "here" + " y" * 50, "here", ("…" + "x " * 29, "here", " y" * 29 + "…")),
    ],
)
def test_a_snippet_shows_the_text_around_the_first_match(text: str, words: str, expected: tuple[str, str, str]) -> None:
    assert search.snippet(text, words) == expected


def test_a_search_takes_no_longer_where_a_word_is_frequent() -> None:
    """SQLite's snippet() took two seconds for 20,000 matches, and 500 seconds for 16 words."""
    with closing(open_database(None)[0]) as db:
        store = Chats(db)
        chat = store.create("me", "Title", {})
        store.add(chat.id, None, "user", "*a " * 20_000)
        began_s = time.monotonic()
        for words in ("a", "a " * 16, "a*" * 500):
            assert [each.chat.id for each in store.search("me", words, 10)] == [chat.id]
        assert time.monotonic() - began_s < 5


def test_what_was_purged_or_wiped_is_not_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"

    async def secret(store: ChatStore) -> None:
        chat = await store.call(Chats.create, "", "passwords", {})
        picture = {"digest": "0" * 32, "kind": "png", "data": b"\x89PNG" + b"xyzzyplugh " * 9000, "thumb": ""}
        await store.call(Chats.add, chat.id, None, "user", "xyzzyplugh " * 50, {"pictures": [picture]})
        await store.call(Chats.delete, "", chat.id)
        await store.call(Chats.purge, time.time() + 1)
        assert await store.call(Chats.picture, "", picture["digest"]) is None
        chat = await store.call(Chats.create, "", "passwords", {})
        await store.call(Chats.add, chat.id, None, "user", "xyzzyplugh " * 50)
        assert await store.call(Chats.wipe, "") == 1
        assert await store.call(Chats.search, "", "xyzzyplugh", 9) == []

    on(path, secret)
    assert b"xyzzyplugh" not in b"".join(each.read_bytes() for each in tmp_path.iterdir())


def test_locked_file_is_said_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "BUSY_S", 0.05)
    path = tmp_path / "chats.db"
    on(path, _new_chat)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("PRAGMA locking_mode = EXCLUSIVE")
    other.execute("BEGIN EXCLUSIVE")

    async def ask_twice(store: ChatStore) -> None:
        with pytest.raises(ChatsUnavailable, match="locked by another program"):
            await store.call(Chats.latest, "", 10)
        other.execute("COMMIT")
        other.close()
        assert await _titles(store) == (["kept"], "")

    on(path, ask_twice)


@pytest.mark.parametrize("damage", ["not a database", "overwritten in the middle", "another program's tables"])
def test_broken_file_is_set_aside_and_said(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "chats.db"
    if damage == "not a database":
        path.write_bytes(b"these are not chats at all\n" * 200)
    elif damage == "another program's tables":
        with sqlite3.connect(path) as db:
            db.execute("CREATE TABLE chat (x)")
        db.close()
    else:
        on(path, _new_chat)
        body = bytearray(path.read_bytes())
        body[4096:-4096] = b"\xa5" * (len(body) - 8192)
        path.write_bytes(body)
    before = path.read_bytes()
    titles, notice = on(path, _titles)
    assert titles == []
    (aside,) = tmp_path.glob("chats.db.broken-????-??-??T??????")
    assert str(aside) in notice
    assert damage != "not a database" or aside.read_bytes() == before
    on(path, _new_chat)
    assert on(path, _titles) == (["kept"], "")


ADDITIVE = "CREATE TABLE colour (name TEXT);"


def newer(monkeypatch: pytest.MonkeyPatch, *, oldest_reader: int) -> None:
    """Let this process be a localllm of the next version of the tables."""
    monkeypatch.setattr(database, "MIGRATIONS", (*MIGRATIONS, ADDITIVE))
    monkeypatch.setattr(database, "OLDEST_READER", oldest_reader)
    monkeypatch.setattr(file_versions, "__version__", "9.9")


@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_newer_file_stays_and_the_chats_of_the_run_are_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_recorded: bool
) -> None:
    path = tmp_path / "chats.db"
    with monkeypatch.context() as patch:
        newer(patch, oldest_reader=len(MIGRATIONS) + 1)
        on(path, _new_chat)
    if not is_recorded:
        with closing(sqlite3.connect(path)) as db, db:
            db.execute("DROP TABLE written")
    before = path.read_bytes()
    titles, notice = on(path, _titles)
    assert titles == []
    assert f"by {'localllm 9.9' if is_recorded else 'a newer localllm'} (version {len(MIGRATIONS) + 1}" in notice
    on(path, _new_chat)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.glob("chats.db*") if each.name != "chats.db.lock"] == ["chats.db"]
    with pytest.raises(ChatsUnavailable, match=r"by .* Update localllm"), database.beside_a_server(path):
        pass
    newer(monkeypatch, oldest_reader=len(MIGRATIONS) + 1)
    assert on(path, _titles) == (["kept"], "")


def test_a_newer_file_with_additions_alone_is_used_by_the_older_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "chats.db"
    with monkeypatch.context() as patch:
        newer(patch, oldest_reader=len(MIGRATIONS))
        on(path, _new_chat)
    on(path, _new_chat)
    assert on(path, _titles) == (["kept", "kept"], "")
    newer(monkeypatch, oldest_reader=len(MIGRATIONS))
    assert on(path, _titles) == (["kept", "kept"], "")


def test_a_newer_server_that_runs_keeps_its_file_beside_an_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "chats.db"
    with monkeypatch.context() as patch:
        newer(patch, oldest_reader=len(MIGRATIONS) + 1)
        running, _ = open_database(path)
    with closing(running):
        on(path, _new_chat)  # the older version, in memory
        running.execute("INSERT INTO chat (id, owner, title, updated_s) VALUES ('a', '', 'of the newer', 1)")
    newer(monkeypatch, oldest_reader=len(MIGRATIONS) + 1)
    assert on(path, _titles) == (["of the newer"], "")


def test_a_damaged_file_is_not_renamed_while_another_process_has_it_open(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    on(path, _new_chat)
    hold = (
        "import sys; from pathlib import Path; from localllm.web.pages.chat.store import file_versions; "
        "held = file_versions.hold(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        path.write_bytes(b"these are not chats at all\n" * 200)
        titles, notice = on(path, _titles)
        assert (titles, "Another localllm has the file open" in notice) == ([], True)
        assert not list(tmp_path.glob("chats.db.broken*"))
        other.communicate()
    assert "They were set aside as" in on(path, _titles)[1]


def test_update_back_gives_the_earlier_release_the_chats_from_before_the_migration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, copy = tmp_path / "chats.db", tmp_path / f"chats.db.v{len(MIGRATIONS)}"
    on(path, _new_chat)
    with monkeypatch.context() as patch:
        newer(patch, oldest_reader=len(MIGRATIONS) + 1)
        on(path, _new_chat)
        assert copy.stat().st_mode & 0o077 == 0
        assert file_versions.put_back(path, "8.8") is None
    aside = file_versions.put_back(path, version.__version__)
    assert aside is not None
    assert on(path, _titles) == (["kept"], "")
    assert not copy.exists()
    newer(monkeypatch, oldest_reader=len(MIGRATIONS) + 1)
    assert on(aside, _titles) == (["kept", "kept"], "")


def test_update_back_changes_nothing_where_the_earlier_release_can_read_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "chats.db"
    on(path, _new_chat)
    with monkeypatch.context() as patch:
        newer(patch, oldest_reader=len(MIGRATIONS))
        on(path, _new_chat)
    assert file_versions.put_back(path, version.__version__) is None
    assert file_versions.put_back(tmp_path / "none.db", version.__version__) is None


def test_a_copy_is_deleted_with_the_chats_and_after_a_month(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, copy = tmp_path / "chats.db", tmp_path / f"chats.db.v{len(MIGRATIONS)}"

    def wipe(store: ChatStore) -> Any:
        return store.call(Chats.wipe, "")

    on(path, _new_chat)
    newer(monkeypatch, oldest_reader=len(MIGRATIONS))
    on(path, _titles)
    assert copy.exists()
    on(path, wipe)
    assert not copy.exists()
    copy.touch()
    on(path, _titles)
    assert copy.exists()
    os.utime(copy, (1, 1))
    on(path, _titles)
    assert not copy.exists()


def test_older_file_is_migrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "chats.db"
    on(path, _new_chat)
    later = "ALTER TABLE chat ADD COLUMN colour TEXT NOT NULL DEFAULT 'green';\nUPDATE chat SET title = title || '!';"
    monkeypatch.setattr(database, "MIGRATIONS", (*MIGRATIONS, later))
    assert on(path, _titles) == (["kept!"], "")
    assert on(path, _titles) == (["kept!"], "")  # once


def test_consents_are_an_owners_own_and_are_wiped_with_the_chats(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    with sqlite3.connect(path) as db:  # of the version before consents
        for script in MIGRATIONS[: next(at for at, each in enumerate(MIGRATIONS) if "tool_consent" in each)]:
            db.executescript(script)
        db.execute(f"PRAGMA user_version = {next(at for at, each in enumerate(MIGRATIONS) if 'tool_consent' in each)}")
    db.close()

    async def look(store: ChatStore) -> list[list[tuple[str, str, str]]]:
        for owner, choice in (("alice", "never"), ("alice", "always"), ("bob", "never")):
            await store.call(Chats.set_consent, owner, "files", "read", f"digest of {choice}", choice)
        found = [await store.call(Chats.consents, owner) for owner in ("alice", "bob", "eve")]
        await store.call(Chats.revoke_consent, "bob", "files", "write")
        await store.call(Chats.wipe, "alice")
        found += [await store.call(Chats.consents, owner) for owner in ("alice", "bob")]
        return [[(each.tool, each.digest, each.choice) for each in rows] for rows in found]

    always, never = ("read", "digest of always", "always"), ("read", "digest of never", "never")
    assert on(path, look) == [[always], [never], [], [], [never]]


def test_chats_of_the_first_version_stay(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    with sqlite3.connect(path) as db:
        db.executescript(MIGRATIONS[0])
        db.execute("INSERT INTO chat (id, owner, title, leaf, updated_s) VALUES ('c', 'alice', 'kept', 'm', 1)")
        db.execute(
            "INSERT INTO message (id, chat_id, role, created_s, details, text) "
            """VALUES ('m', 'c', 'assistant', 1, '{"finish_reason": ""}', 'half')"""
        )
        db.execute("PRAGMA user_version = 1")
    db.close()

    async def look(store: ChatStore) -> StoredMessage:
        chat = await store.call(Chats.get, "alice", "c")
        return (await store.call(Chats.branch, chat.id, chat.leaf)).messages[0]

    message = on(path, look)
    assert (message.text, message.details) == ("half", {"finish_reason": "interrupted"})


def test_messages_are_left_out_of_a_chat_that_an_older_version_wrote(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    with sqlite3.connect(path) as db:
        db.executescript(MIGRATIONS[0] + MIGRATIONS[1])
        db.execute("INSERT INTO chat (id, owner, title, leaf, updated_s) VALUES ('c', '', 'kept', 'm', 1)")
        db.execute("INSERT INTO message (id, chat_id, role, created_s, text) VALUES ('m', 'c', 'user', 1, 'why?')")
        db.execute("PRAGMA user_version = 2")
    db.close()

    async def leave_out(store: ChatStore) -> tuple[int, int]:
        before = (await store.call(Chats.branch, "c", "m")).num_left_out
        await store.call(Chats.leave_out, "", "c", "m")
        return before, (await store.call(Chats.branch, "c", "m")).num_left_out

    assert on(path, leave_out) == (0, 1)


def test_migration_that_fails_leaves_the_old_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "chats.db"
    on(path, _new_chat)
    monkeypatch.setattr(database, "MIGRATIONS", (*MIGRATIONS, "DELETE FROM message;\nSELECT x FROM nowhere;\n"))
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        database._prepared(str(path))
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT count(*) FROM message").fetchone() == (2,)
    db.close()


def test_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "localllm").write_text("a file")
    with pytest.raises(ChatsUnavailable, match="cannot be read or written"):
        on(tmp_path / "localllm" / "chats.db", _titles)


def test_presets_of_the_version_before_prompts_become_prompts(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    with sqlite3.connect(path) as db:
        for script in MIGRATIONS[:2]:
            db.executescript(script)
        db.execute("INSERT INTO chat (id, owner, title, updated_s) VALUES ('c', 'alice', 'kept', 1)")
        db.execute("""INSERT INTO preset VALUES ('alice', 'Exact', '{"temperature": "0"}'), ('bob', 'Wild', '{}')""")
        db.execute("PRAGMA user_version = 2")
    db.close()

    async def look(store: ChatStore) -> None:
        chat = await store.call(Chats.get, "alice", "c")
        assert (chat.title, chat.archived, chat.project_id) == ("kept", False, None)
        (prompt,) = await store.call(Chats.prompts, "alice")
        assert (prompt.name, prompt.text, prompt.settings) == ("Exact", "", {"temperature": "0"})
        assert await store.call(Chats.presets, "alice") == {"Exact": {"temperature": "0"}}
        with pytest.raises(PromptNotFound):
            await store.call(Chats.prompt, "bob", prompt.id)

    on(path, look)


def test_a_file_of_the_version_before_prompts_can_be_wiped_from_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    with sqlite3.connect(path) as db:
        for script in MIGRATIONS[:2]:
            db.executescript(script)
        db.execute("INSERT INTO preset VALUES ('alice', 'Exact', '{}')")
    db.close()
    with database.beside_a_server(path) as beside:
        assert beside is not None
        Chats(beside).wipe("alice")
        assert beside.execute("SELECT count(*) FROM preset").fetchone() == (0,)


def test_prompts_have_one_name_each_and_imported_ones_get_a_number() -> None:
    with closing(open_database(None)[0]) as db:
        store = Chats(db)
        first = store.add_prompt("me", "Review", "Look at {{code}}", {})
        store.add_prompt("you", "Review", "another owner's", {})
        with pytest.raises(PromptExists):
            store.add_prompt("me", "Review", "", {})
        other = store.add_prompt("me", "Other", "", {"system": "x"})
        with pytest.raises(PromptExists):
            store.change_prompt("me", other.id, "Review", "", {})
        store.change_prompt("me", other.id, "Other", "changed", {})
        assert (
            store.add_prompts(
                "me", [first, SavedPrompt("", "Review", "new", {}), SavedPrompt("", "Review", "newer", {})]
            )
            == 2
        )
        assert [(each.name, each.text) for each in store.prompts("me")] == [
            ("Other", "changed"),
            ("Review", "Look at {{code}}"),
            ("Review (2)", "new"),
            ("Review (3)", "newer"),
        ]
        deletion = store.delete_prompt("me", first.id)
        with pytest.raises(PromptNotFound):
            store.prompt("me", first.id)
        with pytest.raises(ChatNotFound):
            store.undo("you", deletion)
        assert store.undo("me", deletion).kind == "prompt"
        assert store.prompt("me", first.id) == first
        with pytest.raises(TooManyPrompts):
            store.add_prompts("me", [SavedPrompt("", str(number), "", {}) for number in range(MAX_PROMPTS)])
        assert len(store.prompts("me")) == 4


def test_presets_are_the_prompts_with_settings() -> None:
    with closing(open_database(None)[0]) as db:
        store = Chats(db)
        store.save_preset("me", "Exact", {"temperature": "0"})
        store.add_prompt("me", "Review", "Look at {{code}}", {})
        assert store.presets("me") == {"Exact": {"temperature": "0"}}
        store.save_preset("me", "Review", {"system": "Be strict."})
        assert store.presets("me").keys() == {"Exact", "Review"}
        for name in ("Exact", "Review"):
            store.remove_preset("me", name)
        assert [(each.name, each.text) for each in store.prompts("me")] == [("Review", "Look at {{code}}")]
        assert store.presets("me") == {}
        with pytest.raises(PromptNotFound):
            store.remove_preset("me", "Exact")


def test_the_newest_chats_of_each_project_are_listed_and_its_files_go_with_it() -> None:
    with closing(open_database(None)[0]) as db:
        store = Chats(db)
        one, two = store.add_project("me", "one"), store.add_project("me", "two")
        for number in range(12):
            store.create("me", str(number), {}, (one.id, two.id)[number % 2])
        with pytest.raises(ProjectNotFound):
            store.create("you", "not mine", {}, one.id)
        pinned = store.create("me", "pinned", {}, one.id).id
        store.pin("me", pinned, True)
        assert [chat.id for chat in store.outside_projects("me", 9)] == [pinned]
        assert [chat.title for chat in store.in_projects("me", 2)] == ["11", "10", "9", "8"]
        store.add_file("me", one.id, "a.txt", "old")
        store.add_file("me", one.id, "b.txt", "b")
        store.add_file("me", one.id, "a.txt", "new")
        assert [(file.name, file.text) for file in store.project_files(one.id)] == [("b.txt", "b"), ("a.txt", "new")]
        with pytest.raises(ProjectNotFound):
            store.add_file("you", one.id, "c.txt", "c")
        deletion, _ = store.delete_project("me", one.id, with_chats=False)
        assert store.project_files(one.id) == []
        store.undo("me", deletion)
        assert len(store.project_files(one.id)) == 2
        store.delete_project("me", one.id, with_chats=True)
        store.purge(time.time() + 1)
        assert db.execute("SELECT count(*) FROM project_file").fetchone() == (0,)
        assert {chat.project_name for chat in store.latest("me", 100)} == {"two"}
        assert store.outside_projects("me", 9) == []


def test_old_chats_are_those_that_have_not_changed_and_are_not_pinned() -> None:
    with closing(open_database(None)[0]) as db:
        store = Chats(db)
        old, pinned, new = (store.create("me", title, {}).id for title in ("old", "pinned", "new"))
        store.create("you", "not mine", {})
        store.pin("me", pinned, True)
        db.execute("UPDATE chat SET updated_s = 1000 WHERE id <> ?", (new,))
        assert (store.count_old("me", 1000), store.count_old("me", 1001)) == (0, 1)
        assert store.old("me", 1001) == [old]


def test_totals_are_over_all_branches() -> None:
    with closing(open_database(None)[0]) as db:
        store = Chats(db)
        chat = store.create("me", "", {})
        first = store.add(chat.id, None, "user", "hi")
        figures = {
            "prompt_tokens": 10,
            "cached_tokens": 4,
            "completion_tokens": 21,
            "ttft_s": 0.5,
            "tokens_per_s": 10.0,
        }
        store.add(chat.id, first.id, "assistant", "x", figures)
        store.add(chat.id, first.id, "assistant", "y", {**figures, "tokens_per_s": 0, "cached_tokens": 0})
        store.add(chat.id, first.id, "assistant", "failed", {"error": ["x"]})
        totals = store.totals(chat.id)
        assert (totals.num_messages, totals.prompt_tokens, totals.cached_tokens) == (4, 20, 4)
        assert (totals.completion_tokens, totals.duration_s) == (42, 3.0)
        assert store.totals(store.create("me", "", {}).id).duration_s == 0.0
