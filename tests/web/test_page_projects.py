"""Prompts, projects, the list of chats and the list behind Ctrl K, over a real socket and without scripts."""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.errors import StepFailed
from localllm.web.access.keys import add_key, keys_path
from localllm.web.pages.chat import saved_prompts, titles
from localllm.web.pages.chat.store import Chats
from localllm.web.pages.chat.store.database import chats_path, open_database
from tests.web.live_server import LiveServer, settings, wait_until
from tests.web.test_page_chat import fresh_data, message_urls, own_data, quick, said, start_chat  # noqa: F401
from tests.web.test_pages_http import SCRIPTED, Pages, browser_of, listen, stream_url


@pytest.fixture(scope="module")
def served(own_data: None) -> Iterator[Pages]:  # noqa: F811
    pages = Pages()
    with pages.live:
        yield pages


@pytest.fixture
def browser(served: Pages) -> Iterator[httpx.Client]:
    with served.browser() as client:
        yield client
        client.post("/chats/wipe", data={"sure": "1"})
    served.model.client.every_s, served.model.client.gate = 0.0, None


def new_project(browser: httpx.Client, name: str) -> str:
    """The URL of a new project."""
    return browser.post("/projects", data={"name": name}).url.path


def new_prompt(browser: httpx.Client, name: str, text: str = "", **form: str) -> str:
    """The URL of a new prompt."""
    page = browser.post("/prompts", data={"name": name, "text": text, **form})
    assert page.status_code == 200, page.text
    found = re.search(rf'href="(/prompts/[^"]+)" dir="auto">{name}<', page.text)
    assert found, page.text
    return found[1]


def undo(browser: httpx.Client, page: str) -> httpx.Response:
    found = re.search(r'action="(/chats/undo/[^"]+)"', page)
    assert found, page
    return browser.post(found[1])


# Prompts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("Translate into {{language}}: {{ text }} in {{language}}", ("language", "text")),
        ("{{}} {{ }} {a} {{a\nb}} {{{deep}}}", ("deep",)),
        ("{{" + "x" * 61 + "}}", ()),
    ],
)
def test_placeholders_are_the_names_in_double_braces(text: str, names: tuple[str, ...]) -> None:
    assert saved_prompts.placeholders(text) == names


def test_a_value_is_put_in_once_and_never_read_as_a_placeholder() -> None:
    assert saved_prompts.filled("{{a}} {{ b }} {{a}}", {"a": "{{b}}", "b": r"\1"}) == r"{{b}} \1 {{b}}"


def test_a_prompt_is_made_changed_used_and_deleted_with_undo(served: Pages, browser: httpx.Client) -> None:
    url = new_prompt(browser, "Translate", "Into {{language}}:\r\n{{text}}", temperature="0.2", system="Be exact.")
    assert "Sets the system prompt, temperature" in browser.get("/prompts").text
    asked = browser.get(f"{url}/use").text
    assert asked.index(">language</label>") < asked.index(">text</label>")
    refused = browser.post(f"{url}/use", data={"value-0": "French", "value-1": " "}, headers=SCRIPTED)
    assert (refused.status_code, "text has no value." in refused.text) == (400, True)
    page = browser.post(f"{url}/use", data={"value-0": "French", "value-1": "<b>tree</b>"}).text
    assert "Into French:\n&lt;b&gt;tree&lt;/b&gt;</textarea>" in page
    assert "Be exact.</textarea>" in page
    page = browser.post(url, data={"name": "Translate", "text": "Now plain", "system": "", "temperature": ""}).text
    assert "Sets the system prompt" not in page
    used = browser.post(f"{url}/use", headers=SCRIPTED).text
    assert "Now plain</textarea>" in used
    assert 'hx-target="#sampling"' not in used  # it has no settings, so those of the chat stay
    assert "Now plain</textarea>" in browser.get(f"{url}/use").text
    gone = browser.post(f"{url}/delete").text
    assert f'href="{url}"' not in gone
    assert browser.get(url).status_code == 404
    assert f'href="{url}"' in undo(browser, gone).text


def test_settings_of_a_prompt_replace_those_of_the_chat_but_not_its_model(browser: httpx.Client) -> None:
    url = new_prompt(browser, "Exact", system="Be exact.", top_k="5")
    used = browser.post(f"{url}/use", data={"temperature": "1.9", "model": "demo"}, headers=SCRIPTED).text
    assert 'hx-target="#sampling"' in used
    assert "Be exact.</textarea>" in used
    assert 'value="1.9"' not in used
    assert 'hx-target="#model-choices"' not in used


def test_the_composers_list_finds_prompts_by_what_is_typed(browser: httpx.Client) -> None:
    assert "You have no prompts yet." in browser.get("/prompts/choose", params={"message": "/"}).text
    for name, text in (("Review code", "{{code}}"), ("Code golf", "x"), ("Poem", "y")):
        new_prompt(browser, name, text)

    def names(typed: str) -> list[str]:
        found = browser.get("/prompts/choose", params={"message": typed}, headers=SCRIPTED).text
        return re.findall(r'choice__name" dir="auto">([^<]+)<', found)

    assert names("/") == ["Code golf", "Poem", "Review code"]
    assert names("/code") == ["Code golf", "Review code"]
    assert names("/CODE rev") == ["Review code"]
    assert names("/etc/passwd is what?") == []


@pytest.mark.parametrize(
    ("form", "why"),
    [
        ({"name": " ", "text": "x"}, "The prompt has no name."),
        ({"name": "n" * 61, "text": "x"}, "It has 61 characters; at most 60 are allowed."),
        ({"name": "kept as typed", "text": " "}, "has neither text nor settings"),
        ({"name": "kept as typed", "text": "x", "temperature": "hot"}, "Temperature must be a number"),
        ({"name": "taken", "text": "x"}, "There is a prompt called 'taken' already."),
        ({"name": "kept as typed", "text": " ".join(f"{{{{p{n}}}}}" for n in range(21))}, "at most 20 are allowed"),
    ],
)
def test_a_wrong_prompt_is_refused_and_shown_as_it_was_typed(
    browser: httpx.Client, form: dict[str, str], why: str
) -> None:
    new_prompt(browser, "taken", "x")
    beside = {} if why == "has neither text nor settings" else {"top_p": "0.125"}
    answer = browser.post("/prompts", data={**form, **beside})
    assert answer.status_code in (400, 409)
    page = answer.text.replace("&#39;", "'")
    assert why in page
    assert f'value="{form["name"]}"' in page
    assert f"{form['text']}</textarea>" in page
    assert all(f'value="{value}"' in page for value in beside.values())
    assert form.get("temperature", "") in page


def test_prompts_go_out_and_come_back(browser: httpx.Client) -> None:
    new_prompt(browser, "Exact", "Be {{how}}", system="Be exact.", temperature="0")
    body = browser.get("/prompts/export").content
    assert json.loads(body)["prompts"] == [
        {"name": "Exact", "text": "Be {{how}}", "settings": {"system": "Be exact.", "temperature": "0"}}
    ]
    again = browser.post("/prompts/import", files={"file": body}).text
    assert again.count('class="item__name"') == 1  # it is there, word for word
    changed = body.replace(b"Be {{how}}", b"Other")
    assert "Exact (2)" in browser.post("/prompts/import", files={"file": changed}).text
    browser.post("/chats/wipe", data={"sure": "1"})
    assert "You have no prompts yet." in browser.get("/prompts").text
    browser.post("/prompts/import", files={"file": body})
    assert json.loads(browser.get("/prompts/export").content) == json.loads(body)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "truncated"),
        (b"[" * 100_000, "Expected `object`"),
        ({"prompts": []}, "It contains no prompts."),
        ({"prompts": [{"text": "x"}]}, "missing required field `name`"),
        ({"prompts": [{"name": "x", "text": 3}]}, "Expected `str`"),
        ({"prompts": [{"name": "x"}]}, "neither text nor settings"),
        ({"prompts": [{"name": "x", "settings": {"temperature": "hot"}}]}, "Temperature must be a number"),
        ({"prompts": [{"name": "x", "settings": {"magic": "1"}}]}, "has the setting 'magic', which is unknown"),
        ({"prompts": [{"name": "x", "text": "y"}], "format": "other"}, "Its format is other 1"),
        ({"prompts": [{"name": str(n), "text": "y"} for n in range(501)]}, "501 prompts; at most 500"),
        (None, "No file was chosen."),
    ],
)
def test_a_file_without_prompts_is_refused_with_the_reason(browser: httpx.Client, body: object, why: str) -> None:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = browser.post("/prompts/import", **({"data": {"x": "y"}} if body is None else {"files": {"file": raw}}))
    assert answer.status_code == 400
    assert why in answer.text.replace("&#39;", "'")
    assert 'class="item__name"' not in answer.text


# Projects -----------------------------------------------------------------------------------------------------------


def test_a_chat_of_a_project_starts_with_its_settings_and_reads_its_files(served: Pages, browser: httpx.Client) -> None:
    project = new_project(browser, "Kernels")
    browser.post(project, data={"name": "Kernels", "system": "Be short.", "temperature": "0.1"})
    browser.post(f"{project}/files", files=[("file", ("a.md", b"alpha")), ("file", ("b.txt", b"beta\n"))])
    page = browser.get(f"/?project={project.split('/')[2]}").text
    assert "Be short.</textarea>" in page
    assert f'class="head__project" href="{project}"' in page
    hidden = re.search(r'name="project" value="([^"]+)"', page)
    assert hidden
    chat, page = start_chat(browser, "first", project=hidden[1], system="Be short.")
    files = "File `a.md`:\n\n```md\nalpha\n```\n\nFile `b.txt`:\n\n```txt\nbeta\n```"
    assert said(served) == f"system: Be short.\n\n{files}\nuser: first"
    assert "Be short.</textarea>" in page  # the files are no part of the settings
    assert f'class="head__project" href="{project}"' in page
    listed = browser.get("/").text
    assert listed.index(f'class="chats__group-link" href="{project}"') < listed.index(f'href="{chat}"')
    assert ">Today</h2>" not in listed
    # The files are read as they are now, by every message of every chat in the project.
    browser.post(f"{project}/files", files={"file": ("a.md", b"changed")})
    file_id = re.search(r'name="file" value="([^"]+)" aria-label="Remove b.txt"', browser.get(project).text)
    assert file_id
    browser.post(f"{project}/files/remove", data={"file": file_id[1]})
    browser.post(f"{message_urls(page)[1]}/regenerate")
    assert said(served) == "system: Be short.\n\nFile `a.md`:\n\n```md\nchanged\n```\nuser: first"
    browser.post(f"{chat}/move", data={"project": ""})
    browser.post("/chat", data={"message": "more", "conversation": chat[3:]})
    assert "File `" not in said(served)
    browser.post(f"{chat}/move", data={"project": hidden[1]})
    browser.post("/chat", data={"message": "again", "conversation": chat[3:]})
    assert said(served).startswith("system: Be short.\n\nFile `a.md`:\n\n```md\nchanged\n```\nuser: first\n")
    assert f'href="{chat}"' in browser.get(project).text


def test_a_project_is_deleted_with_its_chats_or_without_and_comes_back(browser: httpx.Client) -> None:
    project = new_project(browser, "Doomed")
    chat, _ = start_chat(browser, "inside", project=project.split("/")[2])
    assert browser.post(f"{project}/delete").status_code == 400
    page = browser.post(f"{project}/delete", data={"chats": "keep"}).text
    assert browser.get(project).status_code == 404
    assert "head__project" not in browser.get(chat).text
    assert undo(browser, page).url.path == project
    assert f'class="head__project" href="{project}"' in browser.get(chat).text
    page = browser.post(f"{project}/delete", data={"chats": "delete"}).text
    assert browser.get(chat).status_code == 404
    undo(browser, page)
    assert f'class="head__project" href="{project}"' in browser.get(chat).text


@pytest.mark.parametrize(
    ("path", "form", "why", "kept"),
    [
        ("/projects", {"name": " "}, "The project has no name.", ""),
        ("/projects", {"name": "n" * 61}, "at most 60 are allowed", "n" * 61),
        ("", {"name": "", "system": "typed"}, "The project has no name.", "typed</textarea>"),
        ("", {"name": "changed", "top_k": "many"}, "Top k must be a whole number", 'value="many"'),
    ],
)
def test_a_wrong_project_is_refused_and_shown_as_it_was_typed(
    browser: httpx.Client, path: str, form: dict[str, str], why: str, kept: str
) -> None:
    project = new_project(browser, "Right")
    answer = browser.post(path or project, data=form)
    assert answer.status_code == 400
    assert why.lower() in answer.text.lower()
    assert kept in answer.text
    assert ">Right<" in browser.get(project).text


def test_files_of_a_project_are_bounded_and_a_wrong_one_loses_nothing(browser: httpx.Client) -> None:
    project = new_project(browser, "Files")
    answer = browser.post(f"{project}/files", files=[("file", ("a.txt", b"good")), ("file", ("i.png", b"\x89PNG"))])
    assert (answer.status_code, "i.png is an image" in answer.text) == (400, True)
    assert 'aria-label="Remove a.txt"' in answer.text
    answer = browser.post(f"{project}/files", files={"file": ("b.txt", b"b" * 999_999)})
    assert (answer.status_code, "at most" in answer.text) == (413, True)
    assert browser.post(f"{project}/files", files={"file": ("a.txt", b"a" * 999_999)}).status_code == 200
    browser.post(f"{project}/files", files={"file": ("a.txt", b"small")})
    many = [("file", (f"{number}.txt", b"x")) for number in range(10)]
    answer = browser.post(f"{project}/files", files=many)
    assert (answer.status_code, "at most 10 files" in answer.text) == (413, True)
    assert browser.post(f"{project}/files").status_code == 400


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
    assert re.search(r'title="What is it\? · \d+ \w{3} \d{4}, \d\d:\d\d"', page)
    assert (
        len(re.findall(r'<small class="chats__snippet">\d+ \w{3} \d{4}, \d\d:\d\d</small>', browser.get("/").text)) == 2
    )
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


def test_prompts_and_projects_belong_to_a_key(own_data: None) -> None:  # noqa: F811
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
    fresh_data: Path,  # noqa: F811
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


def test_a_title_is_given_up_silently(fresh_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """The request fails, takes too long, or the chat was renamed: the chat stays as it is, and no message waits."""
    model = quick()
    generate = model.client.generate
    first = list[str]()

    async def failing(request: Any) -> Any:
        if not request.request_id.startswith("title-"):
            async for event in generate(request):
                yield event
            return
        first.append(request.request_id)
        if len(first) == 1:
            raise StepFailed("The step failed.")
        await asyncio.Event().wait()

    monkeypatch.setattr(model.client, "generate", failing)
    monkeypatch.setattr(titles, "TITLE_S", 0.2)
    with LiveServer(model, settings(ui=True, chat_titles="on")) as server, browser_of(server) as browser:  # type: ignore[arg-type]
        for number in (1, 2):
            chat, _ = start_chat(browser, f"zebra {number}")
            wait_until(lambda number=number: len(first) == number)
            browser.post("/chat", data={"message": "at once", "conversation": chat[3:]})
            assert browser.get(f"{chat}/title", headers=SCRIPTED).status_code == 204
            assert f'title="zebra {number} ·' in browser.get(chat).text
        wait_until(lambda: first[1] in model.client.cancelled)
        wait_until(lambda: all(entry.num_leases == 0 for entry in server.manager.entries))


def test_a_renamed_chat_keeps_its_name_and_a_model_on_a_cpu_writes_no_title(fresh_data: Path) -> None:  # noqa: F811
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
