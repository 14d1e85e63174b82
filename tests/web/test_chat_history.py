"""What the model reads of a chat, whatever happened in it before: a walk over a real store of chats."""

import asyncio
import json
from collections.abc import Coroutine
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from localllm.web.pages.chat.replies import turns
from localllm.web.pages.chat.replies.claims import Claim
from localllm.web.pages.chat.replies.messages import failed_turns, first_read, is_typed, turn_beginnings
from localllm.web.pages.chat.replies.prompt import ChatFull, reply_room
from localllm.web.pages.chat.replies.turns import history
from localllm.web.pages.chat.store import Chats, ChatStore, StoredMessage
from localllm.web.pages.chat.store.database import open_database
from localllm.web.pages.chat.store.records import ChatNotFound, Role
from tests.web.pages_stub import CONTEXT, StubModel

Result = TypeVar("Result")
lengths = st.sampled_from([1, 40, 300, 900, 1700])
OUTCOMES = ("said", "failed", "failed late", "stopped", "called", "called and failed", "broken call")


async def loaded(model: Any) -> asyncio.Future[Any]:
    """A lease that is there already."""
    lease = asyncio.get_running_loop().create_future()
    lease.set_result(SimpleNamespace(model=model))
    return lease


class HistoryWalk(RuleBasedStateMachine):
    """A person writes, attaches, edits, deletes and leaves out; the model answers, fails and calls tools."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.store = ChatStore(None)
        self.state: Any = SimpleNamespace(store=self.store, replies=SimpleNamespace(current=lambda message: message))
        self.number = 0

    def teardown(self) -> None:
        self.run(self.store.close())
        self.runner.close()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return self.runner.run(work)

    @initialize(system=lengths)
    def begin(self, system: int) -> None:
        self.settings = {"system": "s" * min(system, 300)}
        self.chat_id = self.run(self.store.call(Chats.create, "", "walk", self.settings)).id

    @property
    def leaf(self) -> str | None:
        return self.run(self.store.call(Chats.get, "", self.chat_id)).leaf

    def path(self) -> list[StoredMessage]:
        return list(self.run(self.store.call(Chats.branch, self.chat_id, self.leaf)).messages)

    def ask(self, parent: str | None, new: StoredMessage | None, outcome: str, *, leaves_out: bool) -> None:
        """As turns.py does it: fit, store, answer."""
        chat = self.run(self.store.call(Chats.get, "", self.chat_id))
        claim = Claim("stub", self.run(loaded(StubModel())))
        form = {turns.FULL: turns.LEAVE_OUT} if leaves_out else {}
        messages = self.run(history(self.state, chat, parent))
        try:
            read = self.run(turns._fit(self.state, "", chat, messages, new, self.settings, claim, form))
        except ChatFull as full:
            self.check_refusal(full, leaves_out)
            return
        self.check(read, claim.prompt.token_ids)
        if new is not None:
            assert read[-1]["role"] == ("user" if is_typed(new) else "tool")
            parent = self.run(self.store.call(Chats.add, self.chat_id, parent, "user", new.text, new.details)).id
        text, details = self.answer(outcome)
        self.run(self.store.call(Chats.add, self.chat_id, parent, "assistant", text, details))

    def check_refusal(self, full: ChatFull, leaves_out: bool) -> None:
        assert not (leaves_out and full.can_leave_out)
        assert full.used_tokens > full.context_tokens

    def check(self, read: list[dict[str, Any]], token_ids: list[int]) -> None:
        assert len(token_ids) + reply_room(CONTEXT, None) <= CONTEXT
        told = [message for message in read if message["role"] != "system"]
        assert told
        assert told[0]["role"] == "user"
        assert told[-1]["role"] in ("user", "tool")
        for before, message in pairwise(told):
            if message["role"] == "assistant":
                assert before["role"] in ("user", "tool")
            if message["role"] == "tool":
                assert before["role"] in ("assistant", "tool")
            wanted = [call["id"] for call in before.get("tool_calls", [])]
            if wanted:
                at = next(i for i, each in enumerate(told) if each is before)
                assert [each.get("tool_call_id") for each in told[at + 1 : at + 1 + len(wanted)]] == wanted

    def answer(self, outcome: str) -> tuple[str, dict[str, Any]]:
        self.number += 1
        error = {"error": ["It failed.", "", ""]} if "failed" in outcome else {}
        arguments = "{" if outcome == "broken call" else json.dumps({"n": self.number})
        call = {"id": f"call-{self.number}", "name": "look", "arguments": arguments}
        calls = {"calls": [call]} if "call" in outcome else {}
        text = "r" * 200 if outcome in ("said", "failed late") else ""
        return text, {"model": "demo", "finish_reason": "stop", **error, **calls}

    @rule(length=lengths, file=st.none() | lengths, outcome=st.sampled_from(OUTCOMES), leaves_out=st.booleans())
    def say(self, length: int, file: int | None, outcome: str, leaves_out: bool) -> None:
        details = {"files": [{"name": "a.txt", "text": "f" * file}]} if file else {}
        new = StoredMessage("", None, "user", "q" * length, details)
        self.ask(self.leaf, new, outcome, leaves_out=leaves_out)

    @precondition(lambda self: self.path() and self.path()[-1].details.get("calls"))
    @rule(length=lengths, outcome=st.sampled_from(OUTCOMES), leaves_out=st.booleans())
    def send_results(self, length: int, outcome: str, leaves_out: bool) -> None:
        results = [{"id": c["id"], "name": c["name"], "text": "t" * length} for c in self.path()[-1].details["calls"]]
        new = StoredMessage("", None, "user", "t", {"results": results})
        if self.path()[-1].details["calls"][0]["arguments"] != "{":  # the page offers no form for a broken call
            self.ask(self.leaf, new, outcome, leaves_out=leaves_out)

    @precondition(lambda self: self.path())
    @rule(data=st.data(), length=lengths, outcome=st.sampled_from(OUTCOMES), leaves_out=st.booleans())
    def edit_or_regenerate(self, data: st.DataObject, length: int, outcome: str, leaves_out: bool) -> None:
        message = data.draw(st.sampled_from(self.path()))
        new = StoredMessage("", None, "user", "e" * length) if is_typed(message) else None
        parent = message.id if message.role == "user" and new is None else message.parent_id
        self.ask(parent, new, outcome, leaves_out=leaves_out)

    @precondition(lambda self: self.path())
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        self.run(self.store.call(Chats.delete_message, self.chat_id, data.draw(st.sampled_from(self.path())).id))

    @precondition(lambda self: self.path())
    @rule(data=st.data())
    def select(self, data: st.DataObject) -> None:
        message = data.draw(st.sampled_from(self.path()))
        self.run(self.store.call(Chats.select, self.chat_id, data.draw(st.sampled_from(message.versions))))

    @rule()
    def bring_back(self) -> None:
        self.run(self.store.call(Chats.bring_back, "", self.chat_id))
        branch = self.run(self.store.call(Chats.branch, self.chat_id, self.leaf))
        assert branch.num_left_out == 0


TestHistory = HistoryWalk.TestCase
TestHistory.settings = hypothesis_settings(max_examples=20, stateful_step_count=20, deadline=None)


def said_by(kind: str, message_id: str = "") -> StoredMessage:
    """q: typed, a: a reply, c: a reply that calls, r: results, f: a failed reply, x: a failed reply that calls."""
    call = {"calls": [{"id": "1", "name": "look", "arguments": "{}"}]}
    details: dict[str, dict[str, Any]] = {
        "c": call,
        "r": {"results": [{"id": "1", "name": "look", "text": "t"}]},
        "f": {"error": ["It failed.", "", ""]},
        "x": {"error": ["It failed.", "", ""], **call},
    }
    role: Role = "user" if kind in "qr" else "assistant"
    return StoredMessage(message_id or kind, None, role, kind if kind in "qra" else "", details.get(kind, {}))


@pytest.mark.parametrize(
    ("kinds", "num_left_out", "reads"),
    [
        ("qaqa", 2, "qa"),
        ("qaqa", 0, "qaqa"),
        ("qaqa", 4, ""),
        ("qcraqa", 2, "qcraqa"),
        ("qcraqa", 4, "qa"),
        ("aqa", 1, "qa"),
    ],
)
def test_model_reads_on_from_the_beginning_of_a_turn(kinds: str, num_left_out: int, reads: str) -> None:
    messages = [said_by(kind) for kind in kinds]
    assert kinds[first_read(messages, num_left_out) :] == reads


@pytest.mark.parametrize(
    ("kinds", "new", "beginnings"),
    [
        ("qaqa", "q", [2, 4]),
        ("qcraqa", "q", [4, 6]),
        ("qcraqc", "r", [4]),
        ("qc", "r", []),
        ("", "q", []),
        ("qaq", "", [2]),
    ],
)
def test_whole_turns_are_left_out(kinds: str, new: str, beginnings: list[int]) -> None:
    last = said_by(new) if new else None
    assert turn_beginnings([said_by(kind) for kind in kinds], last) == beginnings


@pytest.mark.parametrize(
    ("kinds", "failed"), [("qf", {0, 1}), ("qaqfqa", {2, 3}), ("qcrf", {3}), ("qx", set()), ("qa", set()), ("f", {0})]
)
def test_failed_turns_are_found(kinds: str, failed: set[int]) -> None:
    messages = [said_by(kind, str(at)) for at, kind in enumerate(kinds)]
    assert failed_turns(messages) == {str(at) for at in failed}


def test_marks_of_a_branch_stay_while_another_is_changed() -> None:
    db, _ = open_database(None)
    chats = Chats(db)
    chat = chats.create("", "two branches", {}).id
    root = chats.add(chat, None, "assistant", "root").id
    left = [chats.add(chat, root, "user", "l1").id]
    left.append(chats.add(chat, left[0], "assistant", "l2").id)
    right = [chats.add(chat, root, "user", "r1").id]
    right.append(chats.add(chat, right[0], "assistant", "r2").id)
    chats.leave_out("", chat, left[1])
    chats.leave_out("", chat, right[0])
    chats.leave_out("", chat, root)
    assert [chats.branch(chat, leaf).num_left_out for leaf in (left[1], right[1])] == [3, 2]  # the last mark counts
    chats.bring_back("", chat)  # of the shown branch, with the mark at their common root
    assert [chats.branch(chat, leaf).num_left_out for leaf in (left[1], right[1])] == [3, 0]
    with pytest.raises(ChatNotFound):
        chats.leave_out("", chat, "nothing")
    with pytest.raises(ChatNotFound):
        chats.bring_back("somebody", chat)
    db.close()
