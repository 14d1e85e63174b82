"""Chats over a real socket: branches, undo, search, files, presets, whose they are, and a store that fails."""

from __future__ import annotations

import asyncio
import contextlib
import html
import json
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.errors import ContextTooLong, DoesNotFit
from localllm.web.access.keys import add_key, keys_path
from localllm.web.pages.chat.replies import active, claims
from localllm.web.pages.chat.store import Chats, database
from tests.web.harness import (
    SCRIPTED,
    Pages,
    browser_of,
    listen,
    message_urls,
    quick,
    said,
    start_chat,
    stream_url,
    typed,
)
from tests.web.live_server import LiveServer, PacedRunner, fake_model, settings, wait_until
from tests.web.pages_stub import StubModel

pytestmark = pytest.mark.usefixtures("own_data")


def new_chat_id(browser: httpx.Client) -> str:
    """The id that a new page has chosen for its chat."""
    found = re.search(r'name="begins" value="([^"]+)"', browser.get("/").text)
    assert found is not None
    return found[1]


def test_messages_of_one_new_page_are_one_chat(browser: httpx.Client) -> None:
    begins = new_chat_id(browser)
    assert begins != new_chat_id(browser)
    chats = [start_chat(browser, text, begins=begins) for text in ("first", "second")]
    assert [path for path, _ in chats] == [f"/c/{begins}"] * 2
    assert len(message_urls(chats[1][1])) == 4


def test_a_second_message_that_overtakes_the_reply_is_refused(served: Pages, browser: httpx.Client) -> None:
    begins = new_chat_id(browser)
    served.model.client.every_s = 0.2
    sent = [browser.post("/chat", data={"message": text, "begins": begins}, headers=SCRIPTED) for text in "ab"]
    assert [answer.status_code for answer in sent] == [200, 409]
    browser.post(f"/c/{begins}/stop")


@pytest.mark.parametrize("begins", ["", "short", "a" * 17, "../../../../etc/", "<script>alert(1)"])
def test_an_id_that_no_page_makes_is_replaced(browser: httpx.Client, begins: str) -> None:
    path, _ = start_chat(browser, "hello", begins=begins)
    assert re.fullmatch(r"/c/[\w-]{16}", path)


def test_the_id_of_a_deleted_chat_begins_another_chat(browser: httpx.Client) -> None:
    begins = new_chat_id(browser)
    first, _ = start_chat(browser, "first", begins=begins)
    browser.post(f"{first}/delete")
    second, page = start_chat(browser, "second", begins=begins)
    assert second != first
    assert len(message_urls(page)) == 2


def test_every_page_of_a_chat_hears_of_a_message_of_another_page(browser: httpx.Client) -> None:
    path, page = start_chat(browser, "first")
    url = html.unescape(re.search(r'hx-sse:connect="(/live/chat[^"]+)"', page)[1])  # type: ignore[index]
    with browser.stream("GET", url) as live:
        lines = live.iter_lines()
        assert "event: chat-changed" in lines
        assert next(lines) == f"data: {message_urls(page)[-1].rpartition('/')[2]}"
        _, page = start_chat(browser, "second", conversation=path.removeprefix("/c/"))
        leaf = message_urls(page)[-1].rpartition("/")[2]
        assert f"data: {leaf}" in lines
    news = browser.get(f"{path}?news", headers=SCRIPTED).text
    assert f'id="m-{leaf}"' in news
    assert "<html" not in news


def test_edit_makes_a_branch_and_both_branches_stay(served: Pages, browser: httpx.Client) -> None:
    chat, page = start_chat(browser, "first words")
    question, _ = message_urls(page)
    assert "first words</textarea>" in browser.get(f"{question}/edit").text
    page = browser.post(f"{question}/edit", data={"message": "other words"}).text
    assert said(served) == "user: other words"
    assert "first words</div>" not in page
    assert 'hidden">Version </span>2/2' in page
    page = browser.post(f"{question}/select").text
    assert "first words</div>" in page
    assert "other words</div>" not in page
    assert 'hidden">Version </span>1/2' in page
    update = browser.post(f"{message_urls(page)[0]}/edit", data={"message": "third"}, headers=SCRIPTED)
    assert 'hx-target="#messages"' in update.text
    assert "third</div>" in update.text
    listen(browser, stream_url(update.text))
    assert 'hidden">Version </span>3/3' in browser.get(chat).text


def test_regenerate_asks_again_and_keeps_the_first_reply(served: Pages, browser: httpx.Client) -> None:
    _, page = start_chat(browser, "question")
    reply = message_urls(page)[1]
    page = browser.post(f"{reply}/regenerate", data={"temperature": "1.5", "stop": "a\r\n\\n"}).text
    assert said(served) == "user: question"
    params = served.model.client.asked[-1].params
    assert (params.temperature, params.stop) == (1.5, ("a", "\n"))
    assert 'hidden">Version </span>2/2' in page
    assert typed(page, "temperature") == "1.5"
    assert 'hidden">Version </span>1/2' in browser.post(f"{reply}/select").text


def test_reply_that_was_cut_off_goes_on_in_place(served: Pages, browser: httpx.Client) -> None:
    chat, page = start_chat(browser, "go", max_tokens="4")
    assert "cut off: token limit" in page
    reply = message_urls(page)[1]
    first = browser.get(f"{reply}/raw").text
    assert len(first) == 80
    page = browser.post(f"{reply}/continue", data={"max_tokens": ""}).text
    assert said(served) == f"user: go\nassistant: {first}"
    assert browser.get(f"{reply}/raw").text == first + served.model.client.reply
    assert message_urls(page) == message_urls(browser.get(chat).text)
    out = re.search(r"· (\d+) tokens", page)
    assert out
    assert int(out[1]) == 4 + -(-len(served.model.client.reply) // 20)
    again = browser.post(f"{message_urls(page)[0]}/continue", headers=SCRIPTED)
    assert (again.status_code, "Only the last reply" in again.text) == (400, True)


def test_real_template_leaves_the_text_open_to_go_on(tmp_path: Path) -> None:
    with LiveServer(fake_model(tmp_path, PacedRunner()), settings(ui=True)) as server, browser_of(server) as browser:
        _, page = start_chat(browser, "hello", max_tokens="6")
        reply = message_urls(page)[1]
        before = browser.get(f"{reply}/raw").text
        page = browser.post(f"{reply}/continue").text
        assert "12 tokens" in page
        assert browser.get(f"{reply}/raw").text.startswith(before)


def test_message_and_chat_are_deleted_and_brought_back(browser: httpx.Client) -> None:
    chat, page = start_chat(browser, "keep me please")
    question, reply = message_urls(page)
    gone = browser.post(f"{reply}/delete", headers=SCRIPTED).text
    assert message_urls(gone) == [question]
    assert f"{question}/regenerate" in gone  # a message without a reply can be answered
    undo = re.search(r'action="(/chats/undo/[^"]+)"', gone)
    assert undo
    assert message_urls(browser.post(undo[1]).text) == [question, reply]
    assert browser.post(undo[1]).status_code == 404
    page = browser.post(f"{chat}/delete").text
    assert "The chat is deleted." in page
    assert f'href="{chat}"' not in page
    assert browser.get(chat).status_code == 404
    undo = re.search(r'action="(/chats/undo/[^"]+)"', page)
    assert undo
    assert message_urls(browser.post(undo[1]).text) == [question, reply]
    elsewhere = browser.post(f"{chat}/delete", data={"conversation": "other"}, headers=SCRIPTED)
    assert elsewhere.status_code == 404  # what is open is gone: said, and nothing pretended
    assert browser.get(chat).status_code == 404


def test_open_chat_that_is_deleted_leads_to_a_new_one(browser: httpx.Client) -> None:
    chat, _ = start_chat(browser, "delete me")
    answer = browser.post(f"{chat}/delete", data={"conversation": chat[3:]}, headers=SCRIPTED)
    assert answer.headers["hx-redirect"].startswith("/?deleted=")


def test_chats_are_renamed_pinned_and_found(browser: httpx.Client) -> None:
    chat, _ = start_chat(browser, "about zebras")
    changed = browser.post(
        f"{chat}/rename", data={"title": " Striped \n horses ", "conversation": chat[3:]}, headers=SCRIPTED
    )
    assert re.search(r'class="head__title" dir="auto" title="[^"]+">Striped horses</h1>', changed.text)
    browser.post(f"{chat}/pin", data={"pinned": "1"})
    page = browser.get("/").text
    assert page.index(">Pinned</h2>") < page.index("Striped horses")
    for words in ("striped", "HORS", "zebra"):
        found = browser.get("/chats", params={"q": words}, headers=SCRIPTED).text
        assert chat in found, words
    assert "<mark>zebras</mark>" in found
    assert "No chat contains these words." in browser.get("/chats", params={"q": "unicorn"}, headers=SCRIPTED).text
    assert "Striped horses" in browser.get("/chats", params={"q": '"striped'}).text
    for odd in ('"', "NEAR(", "a* OR", "x" * 5000, "\0", "title:striped"):
        assert browser.get("/chats", params={"q": odd}).status_code == 200
    assert browser.post(f"{chat}/rename", data={"title": "  "}, headers=SCRIPTED).status_code == 400


def test_exported_chat_comes_back_with_its_branches(browser: httpx.Client) -> None:
    chat, page = start_chat(browser, "first", system="Be brief.", temperature="0.3")
    browser.post(f"{message_urls(page)[0]}/edit", data={"message": "second"})
    markdown = browser.get(f"{chat}/export/md")
    assert markdown.text.startswith("# first\n\n## System\n\nBe brief.\n\n## You\n\nsecond\n\n## demo\n\n**Paged")
    assert markdown.headers["content-disposition"] == 'attachment; filename="first.md"'
    body = browser.get(f"{chat}/export/json").content
    exported = json.loads(body)
    assert [m["role"] for m in exported["messages"]] == ["system", "user", "assistant"]
    assert len(exported["tree"]) == 4
    page = browser.post("/chats/import", files={"file": ("chat.json", body)}).text
    assert 'hidden">Version </span>2/2' in page
    assert "second</div>" in page
    assert typed(page, "temperature") == "0.3"
    assert "to first word" in page
    again = json.loads(browser.get(f"{re.search(r'/c/[^/]+', message_urls(page)[0])[0]}/export/json").content)  # type: ignore[index]
    without_ids = [[(m["role"], m["content"], m["details"]) for m in each["tree"]] for each in (exported, again)]
    assert without_ids[0] == without_ids[1]


def test_openais_messages_are_imported(served: Pages, browser: httpx.Client) -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {"role": "assistant", "content": "**hi**"},
    ]
    for body in ({"messages": messages, "model": "gpt"}, messages):
        page = browser.post("/chats/import", files={"file": ("x.json", json.dumps(body).encode())})
        assert "<strong>hi</strong>" in page.text
    browser.post("/chat", data={"message": "more", "conversation": page.url.path[3:]})
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
def test_file_that_is_no_chat_is_refused_with_the_reason(browser: httpx.Client, body: Any, why: str) -> None:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = browser.post("/chats/import", **({"data": {"x": "y"}} if body is None else {"files": {"file": raw}}))
    assert answer.status_code == 400
    assert why in answer.text.replace("&#39;", "'")


def test_details_of_an_imported_file_are_shown_as_text_or_left_out(browser: httpx.Client) -> None:
    details = {"model": "<b>evil</b>", "prompt_tokens": "many", "error": ["x"], "ttft_s": [1], "finish_reason": "<i>"}
    tree = [*TREE, {"id": "b", "parent": "a", "role": "assistant", "content": "ok", "details": details}]
    page = browser.post("/chats/import", files={"file": json.dumps({"tree": tree}).encode()})
    assert page.status_code == 200
    assert "<b>evil" not in page.text
    assert "&lt;b&gt;evil" in page.text


def test_presets_are_saved_used_and_removed(browser: httpx.Client) -> None:
    form = {"preset_name": "Exact", "system": "Be exact.", "temperature": "0", "top_k": "5"}
    drawer = browser.post("/chats/preset/save", data=form, headers=SCRIPTED).text
    assert "<option selected>Exact</option>" in drawer
    used = browser.post("/chats/preset/use", data={"preset": "Exact", "message": "typed already"}).text
    assert "Be exact.</textarea>" in used
    assert "typed already</textarea>" in used
    assert typed(used, "top_k") == "5"
    assert "Exact" not in browser.post("/chats/preset/remove", data={"preset": "Exact"}, headers=SCRIPTED).text
    assert browser.post("/chats/preset/save", data={"preset_name": " "}, headers=SCRIPTED).status_code == 400
    assert browser.post("/chats/preset/steal", data={}, headers=SCRIPTED).status_code == 400


def test_drawer_tells_each_default_and_where_it_comes_from(browser: httpx.Client) -> None:
    page = browser.get("/").text
    for words in (
        'title="If empty: 0.7, the model&#39;s generation_config"',
        'title="If empty: what is left of 2,048, this server&#39;s default"',
        'title="If empty: off, this server&#39;s default"',
        'title="If empty: 1, OpenAI&#39;s default"',
        'title="If empty: a new one each time, this server&#39;s default"',
    ):
        assert words in page


@pytest.mark.parametrize("name", ["top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "seed"])
@pytest.mark.parametrize("value", ["x", "1e999", "-7e7"])
def test_settings_out_of_range_are_refused_by_name(browser: httpx.Client, name: str, value: str) -> None:
    answer = browser.post("/chat", data={"message": "hi", name: value}, headers=SCRIPTED)
    assert answer.status_code == 400
    assert name.split("_")[0] in answer.text.lower()


def test_unknown_messages_and_chats_are_404_for_every_action(browser: httpx.Client) -> None:
    chat, page = start_chat(browser, "hi")
    other, _ = start_chat(browser, "other")
    strange = message_urls(page)[0].replace(chat, other)  # a message of another chat
    for message in (strange, f"{chat}/m/nothing", "/c/none/m/none"):
        for action in ("edit", "regenerate", "continue", "select", "delete", "stop"):
            assert browser.post(f"{message}/{action}", data={"message": "x"}, headers=SCRIPTED).status_code == 404
        for part in ("", "/raw", "/edit", "/stream"):
            assert browser.get(message + part).status_code == 404
    for action in ("rename", "pin", "delete"):
        assert browser.post(f"/c/none/{action}", data={"title": "x"}, headers=SCRIPTED).status_code == 404


def test_wiping_needs_to_be_meant_and_leaves_nothing(fresh_data: Path) -> None:
    with LiveServer(quick(), settings(ui=True)) as server, browser_of(server) as browser:  # type: ignore[arg-type]
        start_chat(browser, "wipe me")
        assert browser.post("/chats/wipe").status_code == 400
        assert 'action="/chats/undo' not in browser.get("/?deleted=../wipe").text
        assert "wipe me" in browser.get("/").text
        assert "wipe me" not in browser.post("/chats/wipe", data={"sure": "1"}).text
    assert b"wipe me" not in b"".join(each.read_bytes() for each in fresh_data.parent.iterdir())


def test_without_history_nothing_is_written(fresh_data: Path) -> None:
    served = settings(ui=True, chat_history=False)
    with LiveServer(quick(), served) as server, browser_of(server) as browser:  # type: ignore[arg-type]
        start_chat(browser, "in memory")
        assert "in memory" in browser.get("/").text
    assert not fresh_data.exists()


def test_each_key_sees_its_own_chats(fresh_data: Path) -> None:
    keys = {name: add_key(keys_path(), name, "infer") for name in ("ann", "bob")}
    keys |= {name: add_key(keys_path(), name, "admin") for name in ("eve", "max")}
    with LiveServer(quick(), settings(ui=True)) as server:  # type: ignore[arg-type]
        browsers = {name: browser_of(server, auth=("", key)) for name, key in keys.items()}
        chats = {name: start_chat(browsers[name], f"from {name}")[0] for name in keys}
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
        turn = browser.post("/chat", data={"message": "before"}, headers=SCRIPTED)
        other = sqlite3.connect(fresh_data, isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        assert "<strong>Paged attention</strong>" in listen(browser, stream_url(turn.text))
        refused = browser.post("/chat", data={"message": "while locked"}, headers=SCRIPTED)
        assert (refused.status_code, "locked by another program" in refused.text) == (503, True)
        other.execute("COMMIT")
        other.close()
        page = browser.get(turn.headers["hx-replace-url"]).text
        assert "watch the blocks on the dashboard" in page
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
        start_chat(browser, "goes on")


def test_a_newer_store_stays_as_it_is_with_a_notice(fresh_data: Path) -> None:
    fresh_data.parent.mkdir()
    with closing(sqlite3.connect(fresh_data)) as db:
        db.execute("PRAGMA user_version = 999")
    before = fresh_data.read_bytes()
    with LiveServer(quick(), settings(ui=True)) as server, browser_of(server) as browser:  # type: ignore[arg-type]
        start_chat(browser, "in memory")
        assert "were written by a newer localllm" in browser.get("/").text
    assert fresh_data.read_bytes() == before


def test_stopped_server_keeps_what_was_written_and_says_interrupted(fresh_data: Path) -> None:
    model = StubModel()
    model.client.every_s = 0.02
    with LiveServer(model, settings(ui=True)) as server, browser_of(server) as browser:  # type: ignore[arg-type]
        turn = browser.post("/chat", data={"message": "long"}, headers=SCRIPTED)
        chat = turn.headers["hx-replace-url"]
        reply = message_url = stream_url(turn.text).removesuffix("/stream")
        wait_until(lambda: len(browser.get(f"{reply}/raw").text) > 30)
    with LiveServer(quick(), settings(ui=True)) as server, browser_of(server) as browser:  # type: ignore[arg-type]
        page = browser.get(chat).text
        assert "interrupted: the server stopped" in page
        assert len(browser.get(f"{message_url}/raw").text) > 30
        assert f"{reply}/continue" in page


def test_two_tabs_watch_one_reply(served: Pages, browser: httpx.Client) -> None:
    served.model.client.every_s = 0.003
    turn = browser.post("/chat", data={"message": "hi"}, headers=SCRIPTED)
    with served.browser() as other:
        first, second = listen(other, stream_url(turn.text)), listen(browser, stream_url(turn.text))
    for told in (first, second):
        assert told.count("Reply finished, ") == 1
        assert "watch the blocks on the dashboard" in told


def test_message_goes_to_the_model_that_was_picked(served: Pages, browser: httpx.Client) -> None:
    assert re.search(r'<option value="demo" selected>demo', browser.get("/").text)  # also where there is no choice
    other = StubModel(name="second")
    other.client.every_s, other.client.chars = 0.0, 40
    entry = served.live.manager.adopt(other)  # type: ignore[arg-type]
    try:
        page = browser.get("/").text
        assert '<option value="second"' in page
        chat, page = start_chat(browser, "to the second", model="second")
        assert len(other.client.asked) == 1
        assert '<option value="second" selected>' in page
        unknown = browser.post("/chat", data={"message": "x", "model": "none"}, headers=SCRIPTED)
        assert (unknown.status_code, "none" in unknown.text) == (404, True)
        browser.post("/chat", data={"message": "back", "conversation": chat[3:], "model": "demo"})
        assert len(other.client.asked) == 1
    finally:
        served.live.manager.entries.remove(entry)


def test_what_was_refused_is_no_part_of_the_history(served: Pages, browser: httpx.Client) -> None:
    served.model.client.failure = ContextTooLong("Too long.", "540 needed, 512 fit.")
    chat, page = start_chat(browser, "long")
    served.model.client.failure = None
    assert "540 needed, 512 fit." in page
    browser.post("/chat", data={"message": "hello", "conversation": chat[3:]})
    assert said(served) == "user: hello"


def test_model_that_has_to_come_first_is_waited_for_in_the_reply(
    served: Pages, browser: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to the post does not wait; the reply says what it waits for, and can be stopped meanwhile."""
    manager = served.live.manager
    come = asyncio.Event()
    acquire = manager.acquire

    async def acquire_later(name: str | None = None) -> Any:
        await come.wait()
        if name == "broken":
            raise DoesNotFit("It does not fit.", "9 GiB needed.", "Take a smaller one.")
        return await acquire(name)

    monkeypatch.setattr(claims, "MODEL_WAIT_S", 0.01)
    monkeypatch.setattr(manager, "acquire", acquire_later)
    answers = {
        name: browser.post("/chat", data={"message": "hi", "model": name}, headers=SCRIPTED).text
        for name in ("demo", "broken", "stopped")
    }
    for name, turn in answers.items():
        assert f"Loading {name} …" in turn
    assert browser.post(stream_url(answers["stopped"]).replace("/stream", "/stop"), headers=SCRIPTED).status_code == 204
    assert "Reply stopped" in listen(browser, stream_url(answers["stopped"]))
    come._loop.call_soon_threadsafe(come.set)  # type: ignore[attr-defined]
    told = listen(browser, stream_url(answers["demo"]))
    assert "watch the blocks on the dashboard" in told
    assert "9 GiB needed." in listen(browser, stream_url(answers["broken"]))
    wait_until(lambda: all(entry.num_leases == 0 for entry in manager.entries))


def test_long_chat_is_drawn_from_its_end_and_its_beginning_on_demand(browser: httpx.Client) -> None:
    messages = [{"role": ("user", "assistant")[i % 2], "content": f"message-{i}."} for i in range(500)]
    page = browser.post("/chats/import", files={"file": json.dumps({"messages": messages}).encode()})
    assert re.findall(r"message-(\d+)\.<", page.text)[-1] == "499"
    assert page.text.count("<article") == 40
    assert len(page.content) < 150_000
    assert "Earlier messages (460)" in page.text
    earlier = re.search(r'id="earlier" href="([^"]+)"', page.text)
    assert earlier
    more = browser.get(earlier[1], headers=SCRIPTED).text
    assert [int(n) for n in re.findall(r"message-(\d+)\.<", more)] == [*range(420, 460)]
    assert "Latest messages" in browser.get(earlier[1]).text


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
