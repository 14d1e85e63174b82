"""The list of chats, the list behind Ctrl K, whose prompts and projects are whose, and written titles."""

import asyncio
import re
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.errors import StepFailed
from localllm.web.access.keys import add_key, keys_path
from localllm.web.pages.chat.replies import titles
from localllm.web.pages.chat.store import Chats
from localllm.web.pages.chat.store.database import chats_path, open_database
from tests.web.chat_page import SCRIPTED, listen, stream_url
from tests.web.harness import Pages, browser_of, new_project, new_prompt, quick, start_chat, undo
from tests.web.live_server import LiveServer, settings, wait_until

pytestmark = pytest.mark.usefixtures("own_data")

# The list of chats --------------------------------------------------------------------------------------------------


def test_chosen_chats_are_archived_moved_and_deleted_together(served: Pages, browser: httpx.Client) -> None:
    chats = {name: start_chat(browser, name)[0] for name in ("one", "two", "three")}
    ids = {name: url[3:] for name, url in chats.items()}
    project = new_project(browser, "Group")

    def change(action: str, *names: str, **form: str) -> httpx.Response:
        return browser.post("/chats/selected", data={"action": action, "chat": [ids[n] for n in names], **form})

    def listed(path: str) -> set[str]:
        page = browser.get(path).text
        return {name for name, chat_id in ids.items() if f'name="chat" value="{chat_id}"' in page}

    change("archive", "one", "two")
    assert (listed("/chats"), listed("/chats?archived=1")) == ({"three"}, {"one", "two"})
    assert chats["one"] not in browser.get("/").text
    assert chats["one"] in browser.get("/chats", params={"q": "one"}, headers=SCRIPTED).text
    assert change("unarchive", "two").url.query == b"archived=1"
    browser.post("/chat", data={"message": "back", "conversation": ids["one"]})  # a new message brings it back
    assert listed("/chats") == {"one", "two", "three"}
    change("move", "one", "three", project=project.split("/")[2])
    moved = browser.get(project).text
    assert {name for name in chats if f'href="{chats[name]}"' in moved.split('id="panel-title"')[1]} == {"one", "three"}
    page = change("delete", "one", "two").text
    assert listed("/chats") == {"three"}
    assert undo(browser, page).url.path == "/chats"
    assert listed("/chats") == {"one", "two", "three"}
    for action, form in (
        ("delete", {}),
        ("burn", {"chat": ids["one"]}),
        ("move", {"chat": ids["one"], "project": "x"}),
    ):
        assert browser.post("/chats/selected", data={"action": action, **form}).status_code in (400, 404)
    assert listed("/chats") == {"one", "two", "three"}


def test_a_reply_in_a_chat_that_is_deleted_with_others_stops(served: Pages, browser: httpx.Client) -> None:
    served.model.client.every_s = 0.02
    turn = browser.post("/chat", data={"message": "long"}, headers=SCRIPTED)
    chat_id = turn.headers["hx-replace-url"][3:]
    wait_until(lambda: bool(served.model.client.running))
    browser.post("/chats/selected", data={"action": "delete", "chat": chat_id})
    wait_until(lambda: not served.model.client.running)
    assert served.model.client.finished[0].finish_reason == "abort"


def test_old_chats_are_deleted_together_without_pinned_ones(browser: httpx.Client) -> None:
    chats = {name: start_chat(browser, name)[0] for name in ("old", "older", "pinned", "new")}
    browser.post(f"{chats['pinned']}/pin", data={"pinned": "1"})
    with closing(sqlite3.connect(chats_path())) as db, db:
        for name, days in (("old", 40), ("older", 100), ("pinned", 400)):
            db.execute("UPDATE chat SET updated_s = ? WHERE id = ?", (time.time() - days * 86_400, chats[name][3:]))
    page = browser.get("/chats").text
    assert '<option value="30">30 days (2 chats)</option><option value="90">90 days (1 chat)</option>' in page
    assert '<option value="180">' not in page
    assert browser.post("/chats/old", data={"days": "0"}).status_code == 400
    page = browser.post("/chats/old", data={"days": "30"}).text
    there = {name for name, url in chats.items() if browser.get(url).status_code == 200}
    assert there == {"pinned", "new"}
    undo(browser, page)
    assert browser.get(chats["older"]).status_code == 200
    with closing(sqlite3.connect(chats_path())) as db, db:
        db.execute("UPDATE chat SET updated_s = ?", (time.time(),))
    assert browser.post("/chats/old", data={"days": "30"}).status_code == 404
    assert 'action="/chats/old"' not in browser.get("/chats").text


def test_a_chat_tells_when_it_changed_and_what_it_took(browser: httpx.Client) -> None:
    chat, page = start_chat(browser, "What is it?")
    start_chat(browser, "What is it?")
    assert re.search(r'title="What is it\? · \d\d:\d\d"', page)
    assert len(re.findall(r'<small class="chats__snippet">\d\d:\d\d</small>', browser.get("/").text)) == 2
    menu = browser.get(f"{chat}/manage").text
    assert re.search(r"<dt>Messages <small>on all branches</small></dt><dd>2</dd>", menu)
    assert re.search(r"<dt>Tokens written</dt><dd>\d+ in [\d.]+ m?s</dd>", menu)
    assert "<dt>Tokens read</dt><dd>17</dd>" in menu.replace(" <small>8 of them from the prefix cache</small>", "")


def test_pages_of_the_list_hold_a_hundred_chats(browser: httpx.Client) -> None:
    with closing(sqlite3.connect(chats_path())) as db, db:
        rows = [(f"c{number}", f"chat {number:03}", float(number)) for number in range(250)]
        db.executemany("INSERT INTO chat (id, owner, title, updated_s) VALUES (?, '', ?, ?)", rows)
    found = []
    path = "/chats"
    while path:
        page = browser.get(path).text.split('id="panel-title"')[1]
        found += re.findall(r'name="chat" value="c(\d+)"', page)
        older = re.search(r'href="([^"]+)" rel="next"', page)
        path = older[1] if older else ""
    assert found == [str(number) for number in reversed(range(250))]
    for odd in ("0", "-1", "x", "9" * 30, "²"):
        assert browser.get("/chats", params={"page": odd}).status_code == 200


# The list behind Ctrl K, and whose everything is ----------------------------------------------------------------------


def test_the_palette_finds_chats_projects_prompts_models_pages_and_commands(browser: httpx.Client) -> None:
    chat, _ = start_chat(browser, "about zebras")
    project, prompt = new_project(browser, "Zebra kernels"), new_prompt(browser, "Zebra poem", "x")

    def found(query: str) -> list[str]:
        page = browser.get("/palette", params={"q": query}, headers=SCRIPTED).text
        ids = re.findall(r'id="palette-(\d+)"', page)
        assert ids == [str(number) for number in range(len(ids))]
        assert page.count('aria-selected="true"') == (1 if ids else 0)
        return re.findall(r'role="option"[^>]* href="([^"]+)"', page)

    assert found("zebra") == [chat, project, f"{prompt}/use"]
    assert found("dashb")[0] == "/dashboard"
    assert found("dem") == ["/?model=demo"]
    assert found("new prompt") == ["/prompts/new"]
    assert {"/", "/chats", "/settings", chat} <= set(found(""))
    assert found("unicorn") == []
    assert browser.get("/?model=demo").status_code == 200


def test_prompts_and_projects_belong_to_a_key(own_data: None) -> None:
    keys = {name: add_key(keys_path(), name, "infer") for name in ("ann", "bob")}
    with LiveServer(quick(), settings(ui=True)) as server:  # type: ignore[arg-type]
        ann, bob = (browser_of(server, auth=("", key)) for key in keys.values())
        project, prompt = new_project(ann, "Ann's"), new_prompt(ann, "Hers", "secret text")
        chat, _ = start_chat(ann, "secret", project=project.split("/")[2])
        for path in ("/", "/projects", "/prompts", "/prompts/export", "/chats", "/prompts/choose?message=/"):
            assert not re.search("Ann|Hers|secret", bob.get(path).text), path
        assert not re.search("Ann|Hers|secret", bob.get("/palette", params={"q": "e"}).text)
        assert [bob.get(path).status_code for path in (project, prompt, f"{prompt}/use")] == [404] * 3
        assert bob.get(f"/?project={project.split('/')[2]}").status_code == 404
        posts = {
            project: {"name": "mine"},
            f"{project}/delete": {"chats": "delete"},
            f"{project}/files/remove": {"file": "x"},
            prompt: {"name": "mine", "text": "x"},
            f"{prompt}/delete": {},
            f"{prompt}/use": {},
            f"{chat}/archive": {"archived": "1"},
            f"{chat}/move": {"project": ""},
            "/chats/selected": {"action": "delete", "chat": chat[3:]},
            "/chat": {"message": "x", "project": project.split("/")[2]},
        }
        for path, form in posts.items():
            assert bob.post(path, data=form, headers=SCRIPTED).status_code == 404, path
            foreign = {"sec-fetch-site": "cross-site"}
            assert ann.post(path, data=form, headers=foreign).status_code == 403, path
        mine, _ = start_chat(bob, "own")
        assert bob.post(f"{mine}/move", data={"project": project.split("/")[2]}).status_code == 404
        assert ann.get(chat).status_code == 200
        for each in (ann, bob):
            each.close()
    keys_path().unlink()


# Titles -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ('\n"Zebras and stripes."\nMore.', "Zebras and stripes"),
        ("**Title:** Zebras", "Zebras"),
        ("# Zebras", "Zebras"),
        ("**Zebras** and `stripes` of snake_case", "Zebras and stripes of snake_case"),
        ("w" * 30 + " " + "x" * 40, "w" * 30 + "…"),
        ("y" * 80, "y" * 59 + "…"),
        (' \n "" ', ""),
        ("a\x07b\u202ec", "abc"),
    ],
)
def test_a_title_is_the_first_line_without_ornament(text: str, title: str) -> None:
    assert titles.cleaned(text) == title


def test_the_model_writes_a_title_that_delays_nothing(
    fresh_data: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The page is told where the title will be; meanwhile the chat takes messages."""
    model, go = quick(), threading.Event()
    generate = model.client.generate

    async def later(request: Any) -> Any:
        while request.request_id.startswith("title-") and not go.is_set():
            await asyncio.sleep(0.01)
        async for event in generate(request):
            yield event

    monkeypatch.setattr(model.client, "generate", later)
    with LiveServer(model, settings(ui=True, chat_titles="on")) as server, browser_of(server) as browser:  # type: ignore[arg-type]
        turn = browser.post("/chat", data={"message": "What are zebras?"}, headers=SCRIPTED)
        chat = turn.headers["hx-replace-url"]
        assert f'hx-get="{chat}/title"' in listen(browser, stream_url(turn.text))
        browser.post("/chat", data={"message": "more", "conversation": chat[3:]})
        assert 'title="What are zebras? ·' in browser.get(chat).text
        go.set()
        titled = browser.get(f"{chat}/title", headers=SCRIPTED)
        if titled.status_code == 200:  # otherwise the title was written before this request
            assert 'hx-target="#chat-head"' in titled.text
            assert 'hx-target="#chat-list"' in titled.text
        assert 'class="head__title" dir="auto" title="Paged attention keeps' in browser.get(chat).text
        reply, _, title = model.client.asked
        assert (title.options.priority > reply.options.priority, title.params.max_tokens) == (True, titles.TITLE_TOKENS)
        assert title.options.cache_salt == reply.options.cache_salt
        listen(browser, stream_url(browser.post("/chat", data={"message": "other"}, headers=SCRIPTED).text))
        wait_until(lambda: len(model.client.asked) == 5)


def test_a_title_is_given_up_silently(fresh_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request fails, takes too long, or the chat was renamed: the chat stays as it is, and no message waits."""
    model = quick()
    generate = model.client.generate
    first, ended = list[str](), list[str]()

    async def failing(request: Any) -> Any:
        if not request.request_id.startswith("title-"):
            async for event in generate(request):
                yield event
            return
        first.append(request.request_id)
        if len(first) == 1:
            raise StepFailed("The step failed.")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(request.request_id)

    monkeypatch.setattr(model.client, "generate", failing)
    monkeypatch.setattr(titles, "TITLE_S", 0.2)
    with LiveServer(model, settings(ui=True, chat_titles="on")) as server, browser_of(server) as browser:  # type: ignore[arg-type]
        for number in (1, 2):
            chat, _ = start_chat(browser, f"zebra {number}")
            wait_until(lambda number=number: len(first) == number)
            browser.post("/chat", data={"message": "at once", "conversation": chat[3:]})
            assert browser.get(f"{chat}/title", headers=SCRIPTED).status_code == 204
            assert f'title="zebra {number} ·' in browser.get(chat).text
        wait_until(lambda: ended == first[1:])
        wait_until(lambda: all(entry.num_leases == 0 for entry in server.manager.entries))


def test_a_renamed_chat_keeps_its_name_and_a_model_on_a_cpu_writes_no_title(fresh_data: Path) -> None:
    with closing(open_database(None)[0]) as db:
        store = Chats(db)
        chat = store.create("me", "first words", {})
        store.rename("me", chat.id, "My name")
        store.retitle("me", chat.id, "first words", "Written")
        assert store.get("me", chat.id).title == "My name"
        store.retitle("me", chat.id, "My name", "Written")
        assert store.get("me", chat.id).title == "Written"
    model = quick()
    with LiveServer(model, settings(ui=True)) as server, browser_of(server) as browser:  # type: ignore[arg-type]
        turn = browser.post("/chat", data={"message": "hi"}, headers=SCRIPTED)
        assert "/title" not in listen(browser, stream_url(turn.text))
        start_chat(browser, "other")
        assert len(model.client.asked) == 2
