"""Prompts and projects over a real socket, with scripts and without."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from localllm.web.pages.chat.prompts import saved
from tests.web.chat_page import SCRIPTED
from tests.web.harness import Pages, message_urls, new_project, new_prompt, said, start_chat, undo

pytestmark = pytest.mark.usefixtures("own_data")


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
    assert saved.placeholders(text) == names


def test_a_value_is_put_in_once_and_never_read_as_a_placeholder() -> None:
    assert saved.filled("{{a}} {{ b }} {{a}}", {"a": "{{b}}", "b": r"\1"}) == r"{{b}} \1 {{b}}"


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
    page = browser.get("/prompts").text
    assert "No prompt yet." in page
    assert page.count("Take the prompt") == 3
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
    assert "Be short.</textarea>" in page  # the files are not part of the settings
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


# Memory -------------------------------------------------------------------------------------------------------------


def read_by_model(served: Pages) -> str:
    return "".join(map(chr, served.model.client.asked[-1].prompt_token_ids))


def test_the_memory_is_off_at_first_and_read_in_every_chat_once_it_is_on(served: Pages, browser: httpx.Client) -> None:
    assert " checked" not in browser.get("/memory").text.partition("Chats read these notes")[0].rpartition("<input")[2]
    browser.post("/memory", data={"text": "I use Linux.\n\n- I use Linux.\n- My cat is <Tom>."})
    start_chat(browser, "Hello")
    assert "Linux" not in read_by_model(served), "it is kept and off"
    browser.post("/memory", data={"text": "I use Linux.\nMy cat is <Tom>.", "on": "on"})
    browser.post("/chat", data={"message": "Hello", "conversation": "", "system": "Be brief."})
    notes = "The user asked you to remember, in every chat:\n- I use Linux.\n- My cat is <Tom>."
    assert f"system: Be brief.\n\n{notes}\nuser: Hello" in read_by_model(served)
    browser.post("/memory", data={"text": "", "on": "on"})
    start_chat(browser, "Hello")
    assert "remember" not in read_by_model(served)


def test_a_message_is_remembered_after_it_was_edited(served: Pages, browser: httpx.Client) -> None:
    _, page = start_chat(browser, "I like  tea\nmore than coffee")
    url = message_urls(page)[0]
    form = browser.get(f"{url}/remember", headers=SCRIPTED).text
    assert "I like tea more than coffee</textarea>" in form
    assert "This switches the memory on." in form
    browser.post(f"{url}/remember", data={"note": "I like tea"}, headers=SCRIPTED)
    assert "I like tea</textarea>" in browser.get("/memory").text
    start_chat(browser, "Hello")
    assert "- I like tea\n" in read_by_model(served)
    notes = [f"note {number}" for number in range(12)]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda note: browser.post(f"{url}/remember", data={"note": note}, headers=SCRIPTED), notes))
    kept = browser.get("/memory").text
    assert [note for note in notes if not re.search(rf"{note}\b", kept)] == [], "each of many tabs"
    long = browser.post("/memory", data={"text": "x" * 8_001, "on": "on"})
    assert (long.status_code, "at most 8,000 are kept" in long.text) == (413, True)
    assert "xxx" in long.text
    browser.post("/chats/wipe", data={"sure": "1"})
    assert "I like tea" not in browser.get("/memory").text
