"""Chats over a real socket: branches, undo, search, files, presets, whose they are, and a store that fails."""

import contextlib
import html
import json
import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.errors import ContextTooLong
from localllm.web.access.keys import add_key, keys_path
from localllm.web.pages.chat.replies import active, claims
from localllm.web.pages.chat.store import Chats, database
from tests.web.chat_page import SCRIPTED, ChatPage, assert_refused, listen, stream_url, stream_urls
from tests.web.harness import Pages, browser_of, quick, said
from tests.web.live_server import LiveServer, PacedRunner, fake_model, settings, wait_until
from tests.web.pages_stub import StubModel

pytestmark = pytest.mark.usefixtures("own_data")


def new_chat_id(chat: ChatPage) -> str:
    """The id that a new page has chosen for its chat."""
    return chat.get("/").field("begins")


def test_messages_of_one_new_page_are_one_chat(chat: ChatPage) -> None:
    begins = new_chat_id(chat)
    assert begins != new_chat_id(chat)
    for number, text in enumerate(("first", "second"), 1):
        chat.post("/chat", message=text, begins=begins)
        assert (chat.path, len(chat.messages)) == (f"/c/{begins}", 2 * number)


def test_a_second_message_that_overtakes_the_reply_is_refused(served: Pages, chat: ChatPage) -> None:
    begins = new_chat_id(chat)
    served.model.client.every_s = 0.2
    sent = [chat.post("/chat", scripted=True, message=text, begins=begins) for text in "ab"]
    assert [answer.status_code for answer in sent] == [200, 409]
    chat.post(f"/c/{begins}/stop")


@pytest.mark.parametrize("begins", ["", "short", "a" * 17, "../../../../etc/", "<script>alert(1)"])
def test_an_id_that_no_page_makes_is_replaced(chat: ChatPage, begins: str) -> None:
    assert re.fullmatch(r"/c/[\w-]{16}", chat.send("hello", begins=begins).path)


def test_the_id_of_a_deleted_chat_begins_another_chat(chat: ChatPage) -> None:
    begins = new_chat_id(chat)
    first = chat.send("first", begins=begins).path
    chat.browser.post(f"{first}/delete")
    chat.post("/chat", message="second", begins=begins)
    assert chat.path != first
    assert len(chat.messages) == 2


def test_every_page_of_a_chat_hears_of_a_message_of_another_page(served: Pages, chat: ChatPage) -> None:
    url = next(url for url in stream_urls(chat.send("first").html) if url.startswith("/live/chat"))
    with served.browser() as other, other.stream("GET", url) as live:
        lines = live.iter_lines()
        assert "event: chat-changed" in lines
        assert next(lines) == f"data: {chat.reply.id}"
        leaf = chat.send("second").reply.id
        assert f"data: {leaf}" in lines
    news = chat.browser.get(f"{chat.path}?news", headers=SCRIPTED).text
    assert f'id="m-{leaf}"' in news
    assert "<html" not in news


def test_edit_makes_a_branch_and_both_branches_stay(served: Pages, chat: ChatPage) -> None:
    first = chat.send("first words").question
    assert "first words</textarea>" in chat.browser.get(f"{first.url}/edit").text
    first.do("edit", message="other words")
    assert said(served) == "user: other words"
    assert (chat.question.text, chat.question.version, len(chat.messages)) == ("other words", "2/2", 2)
    first.do("select")
    assert (chat.question.text, chat.question.version, len(chat.messages)) == ("first words", "1/2", 2)
    chat.question.do("edit", message="third", scripted=True)
    assert 'hx-target="#messages"' in chat.html
    assert chat.question.text == "third"
    chat.listen()
    assert chat.get().question.version == "3/3"


def test_regenerate_asks_again_and_keeps_the_first_reply(served: Pages, chat: ChatPage) -> None:
    first = chat.send("question").reply
    first.do("regenerate", temperature="1.5", stop="a\r\n\\n")
    assert said(served) == "user: question"
    params = served.model.client.asked[-1].params
    assert (params.temperature, params.stop) == (1.5, ("a", "\n"))
    assert (chat.reply.version, chat.field("temperature")) == ("2/2", "1.5")
    first.do("select")
    assert chat.reply.version == "1/2"


def test_reply_that_was_cut_off_goes_on_in_place(served: Pages, chat: ChatPage) -> None:
    reply, urls = chat.send("go", max_tokens="4").reply, chat.urls
    assert reply.says("cut off: token limit")
    first = reply.raw
    assert len(first) == 80
    reply.do("continue", max_tokens="")
    assert said(served) == f"user: go\nassistant: {first}"
    assert reply.raw == first + served.model.client.reply
    assert chat.reply.says(f"· {4 + -(-len(served.model.client.reply) // 20)} tokens")
    assert urls == chat.urls == chat.get().urls
    assert_refused(chat.question.do("continue", scripted=True), 400, "Only the last reply")


def test_real_template_leaves_the_text_open_to_go_on(tmp_path: Path) -> None:
    with LiveServer(fake_model(tmp_path, PacedRunner()), settings(ui=True)) as server, browser_of(server) as browser:
        chat = ChatPage(browser).send("hello", max_tokens="6")
        before = chat.reply.raw
        chat.reply.do("continue")
        assert chat.reply.says("12 tokens")
        assert chat.reply.raw.startswith(before)


def test_message_and_chat_are_deleted_and_brought_back(chat: ChatPage) -> None:
    question, reply = chat.send("keep me please").urls
    path = chat.path
    chat.reply.do("delete", scripted=True)
    assert chat.urls == [question]
    assert "regenerate" in chat.question.offers  # a message without a reply can be answered
    again = chat.undo()
    assert chat.urls == [question, reply]
    assert chat.browser.post(again).status_code == 404
    chat.post(f"{path}/delete")
    assert chat.shows("The chat is deleted.")
    assert f'href="{path}"' not in chat.html
    assert chat.browser.get(path).status_code == 404
    chat.undo()
    assert chat.urls == [question, reply]
    elsewhere = chat.post(f"{path}/delete", scripted=True, conversation="other")
    assert elsewhere.status_code == 404  # what is open is gone: said, and nothing pretended
    assert chat.browser.get(path).status_code == 404


def test_open_chat_that_is_deleted_leads_to_a_new_one(chat: ChatPage) -> None:
    answer = chat.send("delete me").post(f"{chat.path}/delete", conversation=chat.id, scripted=True)
    assert answer.headers["hx-redirect"].startswith("/?deleted=")


def test_chats_are_renamed_pinned_and_found(browser: httpx.Client, chat: ChatPage) -> None:
    path = chat.send("about zebras").path
    chat.post(f"{path}/rename", title=" Striped \n horses ", conversation=chat.id, scripted=True)
    assert chat.title == "Striped horses"
    browser.post(f"{path}/pin", data={"pinned": "1"})
    page = browser.get("/").text
    assert page.index(">Pinned</h2>") < page.index("Striped horses")
    for words in ("striped", "HORS", "zebra"):
        found = browser.get("/chats", params={"q": words}, headers=SCRIPTED).text
        assert path in found, words
    assert "<mark>zebras</mark>" in found
    assert "No chat contains these words." in browser.get("/chats", params={"q": "unicorn"}, headers=SCRIPTED).text
    assert "Striped horses" in browser.get("/chats", params={"q": '"striped'}).text
    for odd in ('"', "NEAR(", "a* OR", "x" * 5000, "\0", "title:striped"):
        assert browser.get("/chats", params={"q": odd}).status_code == 200
    assert chat.post(f"{path}/rename", title="  ", scripted=True).status_code == 400


def test_exported_chat_comes_back_with_its_branches(browser: httpx.Client, chat: ChatPage) -> None:
    chat.send("first", system="Be brief.", temperature="0.3").question.do("edit", message="second")
    markdown = browser.get(f"{chat.path}/export/md")
    assert markdown.text.startswith("# first\n\n## System\n\nBe brief.\n\n## You\n\nsecond\n\n## demo\n\n**Paged")
    assert markdown.headers["content-disposition"] == 'attachment; filename="first.md"'
    body = browser.get(f"{chat.path}/export/json").content
    exported = json.loads(body)
    assert [m["role"] for m in exported["messages"]] == ["system", "user", "assistant"]
    assert len(exported["tree"]) == 4
    chat.post("/chats/import", files={"file": ("chat.json", body)})
    assert (chat.question.text, chat.question.version, chat.field("temperature")) == ("second", "2/2", "0.3")
    assert chat.reply.says("to first word")
    again = browser.get(f"{chat.path}/export/json").json()
    without_ids = [[(m["role"], m["content"], m["details"]) for m in each["tree"]] for each in (exported, again)]
    assert without_ids[0] == without_ids[1]


def test_openais_messages_are_imported(served: Pages, chat: ChatPage) -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {"role": "assistant", "content": "**hi**"},
    ]
    for body in ({"messages": messages, "model": "gpt"}, messages):
        chat.post("/chats/import", files={"file": ("x.json", json.dumps(body).encode())})
        assert "<strong>hi</strong>" in chat.html
    chat.send("more")
    assert said(served) == "system: Be kind.\nuser: hello\nassistant: **hi**\nuser: more"


TREE = [{"id": "a", "role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "holds no messages"),
        (b"\xff\xfe", "malformed"),
        (b"[" * 100_000, "more than 128 levels"),
        (b'"text"', "Expected `object`"),
        ({"messages": []}, "no messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "no message of a user"),
        ({"messages": [{"role": 3, "content": "x"}]}, "Expected `str`"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "has the role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
        ({"messages": {"role": "user"}}, "Expected `array`"),
        ({"tree": TREE * 2}, "have the id"),
        ({"tree": [{**TREE[0], "parent": "b"}]}, "before its parent"),
        ({"tree": [{**TREE[0], "parent": "a"}]}, "before its parent"),
        ({"tree": [{**TREE[0], "role": "system"}]}, "Invalid enum value"),
        ({"tree": TREE, "version": 2}, "localllm-chat 2"),
        ({"tree": TREE, "settings": {"temperature": "hot"}}, "Temperature must be a number"),
        ({"tree": TREE, "settings": {"temperature": 3}}, "Expected `str`"),
        ({"tree": TREE * 20_001}, "more than 20,000"),
        (None, "No file was chosen."),
    ],
)
def test_file_that_is_no_chat_is_refused_with_the_reason(chat: ChatPage, body: Any, why: str) -> None:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    assert_refused(chat.post("/chats/import", files=None if body is None else {"file": raw}, x="y"), 400, why)


def test_details_of_an_imported_file_are_shown_as_text_or_left_out(browser: httpx.Client) -> None:
    details = {"model": "<b>evil</b>", "prompt_tokens": "many", "error": ["x"], "ttft_s": [1], "finish_reason": "<i>"}
    tree = [*TREE, {"id": "b", "parent": "a", "role": "assistant", "content": "ok", "details": details}]
    page = browser.post("/chats/import", files={"file": json.dumps({"tree": tree}).encode()})
    assert page.status_code == 200
    assert "<b>evil" not in page.text
    assert "&lt;b&gt;evil" in page.text


def test_presets_are_saved_used_and_removed(chat: ChatPage) -> None:
    form = {"preset_name": "Exact", "system": "Be exact.", "temperature": "0", "top_k": "5"}
    chat.post("/chats/preset/save", scripted=True, **form)
    assert chat.field("preset") == "Exact"
    chat.post("/chats/preset/use", preset="Exact", message="typed already")
    assert [chat.field(name) for name in ("system", "message", "top_k")] == ["Be exact.", "typed already", "5"]
    assert "Exact" not in chat.post("/chats/preset/remove", preset="Exact", scripted=True).text
    assert chat.post("/chats/preset/save", preset_name=" ", scripted=True).status_code == 400
    assert chat.post("/chats/preset/steal", scripted=True).status_code == 400


def test_drawer_tells_each_default_and_where_it_comes_from(chat: ChatPage) -> None:
    page = html.unescape(chat.get().html)
    for words in (
        "0.7, the model's generation_config",
        "what is left of 2,048, this server's default",
        "off, this server's default",
        "1, OpenAI's default",
        "a new one each time, this server's default",
    ):
        assert f'title="If empty: {words}"' in page


@pytest.mark.parametrize("name", ["top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "seed"])
@pytest.mark.parametrize("value", ["x", "1e999", "-7e7"])
def test_settings_out_of_range_are_refused_by_name(chat: ChatPage, name: str, value: str) -> None:
    answer = chat.try_to_send("hi", scripted=True, **{name: value})
    assert answer.status_code == 400
    assert name.split("_")[0] in answer.text.lower()


def test_unknown_messages_and_chats_are_404_for_every_action(browser: httpx.Client) -> None:
    chat, other = (ChatPage(browser).send(text) for text in ("hi", "other"))
    strange = chat.question.url.replace(chat.path, other.path)  # a message of another chat
    for message in (strange, f"{chat.path}/m/nothing", "/c/none/m/none"):
        for action in ("edit", "regenerate", "continue", "select", "delete", "stop"):
            assert chat.post(f"{message}/{action}", message="x", scripted=True).status_code == 404
        for part in ("", "/raw", "/edit", "/stream"):
            assert browser.get(message + part).status_code == 404
    for action in ("rename", "pin", "delete"):
        assert chat.post(f"/c/none/{action}", title="x", scripted=True).status_code == 404


def test_wiping_needs_to_be_meant_and_leaves_nothing(fresh_data: Path) -> None:
    with LiveServer(quick(), settings(ui=True)) as server, browser_of(server) as browser:  # type: ignore[arg-type]
        ChatPage(browser).send("wipe me")
        assert browser.post("/chats/wipe").status_code == 400
        assert 'action="/chats/undo' not in browser.get("/?deleted=../wipe").text
        assert "wipe me" in browser.get("/").text
        assert "wipe me" not in browser.post("/chats/wipe", data={"sure": "1"}).text
    assert b"wipe me" not in b"".join(each.read_bytes() for each in fresh_data.parent.iterdir())


def test_without_history_nothing_is_written(fresh_data: Path) -> None:
    served = settings(ui=True, chat_history=False)
    with LiveServer(quick(), served) as server, browser_of(server) as browser:  # type: ignore[arg-type]
        ChatPage(browser).send("in memory")
        assert "in memory" in browser.get("/").text
    assert not fresh_data.exists()


def test_each_key_sees_its_own_chats(fresh_data: Path) -> None:
    keys = {name: add_key(keys_path(), name, "infer") for name in ("ann", "bob")}
    keys |= {name: add_key(keys_path(), name, "admin") for name in ("eve", "max")}
    with LiveServer(quick(), settings(ui=True)) as server:  # type: ignore[arg-type]
        browsers = {name: browser_of(server, auth=("", key)) for name, key in keys.items()}
        chats = {name: ChatPage(browsers[name]).send(f"from {name}").path for name in keys}
        for name, browser in browsers.items():
            shown = {other for other in keys if f">from {other}</span>" in browser.get("/").text}
            assert shown == ({name} if name in ("ann", "bob") else {"eve", "max"})
        assert browsers["ann"].get(chats["bob"]).status_code == 404
        assert browsers["ann"].post(f"{chats['bob']}/delete").status_code == 404
        for browser in browsers.values():
            browser.close()


def test_locked_store_is_said_and_loses_nothing(fresh_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(active, "SAVE_S", 0.05)
    model = StubModel()
    with LiveServer(model, settings(ui=True)) as server, browser_of(server) as browser:  # type: ignore[arg-type]
        model.client.every_s, model.client.chars = 0.005, 20
        chat = ChatPage(browser).send("before", scripted=True)
        other = sqlite3.connect(fresh_data, isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        assert "<strong>Paged attention</strong>" in chat.listen()
        assert_refused(ChatPage(browser).try_to_send("while locked", scripted=True), 503, "locked by another program")
        other.execute("COMMIT")
        other.close()
        assert chat.get().reply.says("watch the blocks on the dashboard")
        with sqlite3.connect(fresh_data) as db:
            wait_until(lambda: db.execute("SELECT count(*) FROM message WHERE details LIKE '%\"stop\"%'").fetchone()[0])
        db.close()


def test_broken_store_is_set_aside_with_a_notice(fresh_data: Path) -> None:
    fresh_data.parent.mkdir()
    fresh_data.write_bytes(b"nothing that SQLite knows" * 100)
    with LiveServer(quick(), settings(ui=True)) as server, browser_of(server) as browser:  # type: ignore[arg-type]
        page = browser.get("/").text
        assert "They were set aside as" in page
        assert "chats.db.broken-" in page
        ChatPage(browser).send("goes on")


def test_a_newer_store_stays_as_it_is_with_a_notice(fresh_data: Path) -> None:
    fresh_data.parent.mkdir()
    with closing(sqlite3.connect(fresh_data)) as db:
        db.execute("PRAGMA user_version = 999")
    before = fresh_data.read_bytes()
    with LiveServer(quick(), settings(ui=True)) as server, browser_of(server) as browser:  # type: ignore[arg-type]
        ChatPage(browser).send("in memory")
        assert "were written by a newer localllm" in browser.get("/").text
    assert fresh_data.read_bytes() == before


def test_stopped_server_keeps_what_was_written_and_says_interrupted(fresh_data: Path) -> None:
    model = StubModel()
    model.client.every_s = 0.02
    with LiveServer(model, settings(ui=True)) as server, browser_of(server) as browser:  # type: ignore[arg-type]
        chat = ChatPage(browser).send("long", scripted=True)
        reply = chat.reply
        wait_until(lambda: len(reply.raw) > 30)
    with LiveServer(quick(), settings(ui=True)) as server, browser_of(server) as browser:  # type: ignore[arg-type]
        chat = ChatPage(browser, chat.path).get()
        assert chat.reply.says("interrupted: the server stopped")
        assert len(chat.reply.raw) > 30
        assert "continue" in chat.reply.offers


def test_two_tabs_watch_one_reply(served: Pages, browser: httpx.Client) -> None:
    served.model.client.every_s = 0.003
    chat = ChatPage(browser).send("hi", scripted=True)
    with served.browser() as other:
        first, second = listen(other, stream_url(chat.html)), chat.listen()
    for told in (first, second):
        assert told.count("Reply finished, ") == 1
        assert "watch the blocks on the dashboard" in told


def test_message_goes_to_the_model_that_was_picked(chat: ChatPage, second: StubModel) -> None:
    assert chat.get().tree.first("select", name="model").all("option", value="second")
    assert chat.send("to the second", model="second").field("model") == "second"
    assert len(second.client.asked) == 1
    assert_refused(ChatPage(chat.browser).try_to_send("x", model="none", scripted=True), 404, "none")
    chat.send("back", model="demo")
    assert len(second.client.asked) == 1


def test_the_model_is_named_where_there_is_no_choice(chat: ChatPage) -> None:
    assert chat.get().field("model") == "demo"


def test_what_was_refused_is_no_part_of_the_history(served: Pages, chat: ChatPage) -> None:
    served.model.client.failure = ContextTooLong("Too long.", "540 needed, 512 fit.")
    chat.send("long")
    served.model.client.failure = None
    assert chat.reply.says("540 needed, 512 fit.")
    chat.send("hello")
    assert said(served) == "user: hello"


def test_model_that_has_to_come_first_is_waited_for_in_the_reply(
    served: Pages, browser: httpx.Client, late_models: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to the post does not wait; the reply says what it waits for, and can be stopped meanwhile."""
    monkeypatch.setattr(claims, "MODEL_WAIT_S", 0.01)
    names = ("demo", "broken", "stopped")
    demo, broken, stopped = (ChatPage(browser).send("hi", model=name, scripted=True) for name in names)
    for name, chat in zip(names, (demo, broken, stopped), strict=True):
        assert chat.reply.says(f"Loading {name} …")
    assert browser.post(f"{stopped.reply.url}/stop", headers=SCRIPTED).status_code == 204
    assert "Reply stopped" in stopped.listen()
    late_models()
    assert "watch the blocks on the dashboard" in demo.listen()
    assert "9 GiB needed." in broken.listen()
    wait_until(lambda: all(entry.num_leases == 0 for entry in served.live.manager.entries))


def test_long_chat_is_drawn_from_its_end_and_its_beginning_on_demand(chat: ChatPage) -> None:
    messages = [{"role": ("user", "assistant")[i % 2], "content": f"message-{i}."} for i in range(500)]
    page = chat.post("/chats/import", files={"file": json.dumps({"messages": messages}).encode()})
    assert len(page.content) < 150_000
    assert [message.text for message in chat.messages] == [f"message-{i}." for i in range(460, 500)]
    earlier = chat.tree.first("a", id="earlier")
    assert earlier.text == "Earlier messages (460)"
    more = chat.browser.get(earlier.attrs["href"], headers=SCRIPTED).text
    assert [int(n) for n in re.findall(r"message-(\d+)\.<", more)] == [*range(420, 460)]
    assert chat.get(earlier.attrs["href"]).shows("Latest messages")


def test_what_the_last_server_deleted_is_purged_though_nobody_deletes_more(
    fresh_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    db, _ = database.open_database(fresh_data)
    chats = Chats(db)
    chats.delete("", chats.create("", "gone", {}).id)
    db.close()
    monkeypatch.setattr(active, "UNDO_S", 0.0)
    with LiveServer(quick(), settings(ui=True)):  # type: ignore[arg-type]

        def is_gone() -> bool:
            with contextlib.closing(sqlite3.connect(fresh_data)) as look:
                return bool(look.execute("SELECT count(*) FROM chat").fetchone() == (0,))

        wait_until(is_gone)
