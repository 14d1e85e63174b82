"""Chats as files over a real socket: exports of other programs imported, broken ones refused by name, all exported."""

import io
import json
import re
import zipfile
from typing import Any

import httpx
import pytest

from localllm.web.pages.chat.imports import files as import_files
from localllm.web.pages.chat.imports.files import MAX_NESTING, chats_of
from localllm.web.pages.chat.imports.records import Imported, NotAChat, without_reasoning
from tests.web.chat_page import SCRIPTED
from tests.web.harness import lm_studio, open_webui

# Exports of other programs, as they write them ----------------------------------------------------------------------


def chatgpt_node(
    node_id: str, parent: str | None, role: str, content: dict[str, Any] | str, children: list[str], **message: Any
) -> dict[str, Any]:
    content = {"content_type": "text", "parts": [content]} if isinstance(content, str) else content
    body = {
        "id": node_id, "author": {"role": role, "name": None, "metadata": {}}, "create_time": 1_700_000_000.5,
        "content": content, "status": "finished_successfully", "end_turn": True, "weight": 1.0, "metadata": {},
        "recipient": "all", "channel": None, **message,
    }  # fmt: skip
    return {"id": node_id, "message": body, "parent": parent, "children": children}


def chatgpt() -> list[dict[str, Any]]:
    """Two conversations: one with two versions of a reply, a tool, reasoning and an image; one without messages."""
    thoughts = {"content_type": "thoughts", "thoughts": [{"summary": "Sum", "content": "I add them."}]}
    image = {"content_type": "multimodal_text", "parts": [{"content_type": "image_asset_pointer"}, "What is it?"]}
    hidden = {"metadata": {"is_visually_hidden_from_conversation": True}}
    nodes = [
        {"id": "root", "message": None, "parent": None, "children": ["sys"]},
        chatgpt_node("sys", "root", "system", "", ["own"], **hidden),
        chatgpt_node("own", "sys", "user", "Instructions of every chat.", ["q1"], **hidden),
        chatgpt_node("q1", "own", "user", "2 + 2?", ["t1", "a2"]),
        chatgpt_node("t1", "q1", "assistant", thoughts, ["a1"]),
        chatgpt_node("a1", "t1", "assistant", "It is", ["code"], metadata={"model_slug": "gpt-5"}),
        chatgpt_node("code", "a1", "assistant", "print(2 + 2)", ["tool"], recipient="python"),
        chatgpt_node("tool", "code", "tool", {"content_type": "execution_output", "text": "4"}, ["a1b"]),
        chatgpt_node("a1b", "tool", "assistant", "**4** \ue200cite\ue202turn0\ue201now", ["q2"]),
        chatgpt_node("a2", "q1", "assistant", "Five.", []),
        chatgpt_node("q2", "a1b", "user", image, ["a3"]),
        chatgpt_node("a3", "q2", "assistant", "A <b>cat</b>.", []),
    ]
    first = {
        "title": "Sums <script>alert(1)</script>", "create_time": 1.0, "update_time": 2.0, "current_node": "a3",
        "mapping": {node["id"]: node for node in nodes}, "moderation_results": [], "plugin_ids": None,
    }  # fmt: skip
    return [first, {"title": "Empty", "mapping": {"r": {"id": "r", "message": None, "parent": None, "children": []}}}]


def imported(value: Any) -> list[Imported]:
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    return list(chats_of(io.BytesIO(raw)))


def branch(chat: Imported) -> list[tuple[str, str, str]]:
    """The shown messages: role, text, reasoning."""
    by_id, found, at = {message.id: message for message in chat.messages}, [], chat.leaf
    while at is not None:
        message = by_id[at]
        found.append((message.role, message.text, message.details.get("reasoning", "")))
        at = message.parent_id  # type: ignore[assignment]
    return found[::-1]


def test_chatgpt_conversations_keep_branches_reasoning_and_models() -> None:
    (chat,) = imported(chatgpt())
    assert branch(chat) == [
        ("user", "2 + 2?", ""),
        ("assistant", "It is\n\n**4** now", "I add them."),
        ("user", "[Image]\n\nWhat is it?", ""),
        ("assistant", "A <b>cat</b>.", ""),
    ]
    assert [m.text for m in chat.messages if m.parent_id == "0"] == ["It is\n\n**4** now", "Five."]
    assert chat.messages[1].details["model"] == "gpt-5"
    assert chat.messages[0].created_s == 1_700_000_000.5


def test_open_webui_chats_keep_branches_reasoning_and_the_system_prompt() -> None:
    (chat,) = imported(open_webui())
    assert branch(chat) == [("user", "Why?", ""), ("assistant", "The answer.", "First <this>.\nThen that.")]
    assert [m.text for m in chat.messages if m.parent_id == "0"] == ["*Called get_time.*\n\nNoon.", "The answer."]
    assert chat.title == "Webui chat"
    assert chat.settings == {"system": "Be kind."}
    old = open_webui()
    old[0]["chat"]["history"] = {}
    assert branch(imported(old)[0]) == branch(chat)


def test_lm_studio_conversations_keep_versions_reasoning_and_the_system_prompt() -> None:
    (chat,) = imported(lm_studio())
    assert branch(chat) == [("user", "Sky?", ""), ("assistant", "Blue.", "Hm.")]
    assert [m.text for m in chat.messages] == ["Sky?", "Grey.", "Blue."]
    assert chat.messages[2].details["model"] == "qwen3-4b"
    assert (chat.title, chat.settings) == ("Studio chat", {"system": "Be short."})


def test_openai_messages_come_as_an_object_or_a_list_and_think_tags_become_reasoning() -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nYo"}]
    for value in (messages, {"messages": messages}):
        (chat,) = imported(value)
        assert branch(chat) == [("user", "Hi", ""), ("assistant", "Yo", "Hm.")]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<think>a</think>b", ("b", "a")),
        ("  <think>\na\n</think>\n\n b", ("b", "a")),
        ("[THINK]a[/THINK]b", ("b", "a")),
        ("About <think>a</think>", ("About <think>a</think>", "")),
        ("<think>never closed", ("<think>never closed", "")),
    ],
)
def test_reasoning_is_told_from_a_reply(text: str, found: tuple[str, str]) -> None:
    assert without_reasoning(text) == found


def test_a_zip_gives_the_chats_of_its_json_files_and_leaves_out_the_others() -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("conversations.json", json.dumps(chatgpt()))
        archive.writestr("user.json", '{"id": "u", "email": "a@b.c"}')
        archive.writestr("message_feedback.json", "[]")
        archive.writestr("chat.html", "<html>")
        archive.writestr("more/studio.json", json.dumps(lm_studio()))
    assert [chat.title for chat in imported(out.getvalue())] == ["Sums <script>alert(1)</script>", "Studio chat"]


# What cannot be imported --------------------------------------------------------------------------------------------

DEEP = b"[" * 5_000 + b"]" * 5_000
ZIP_OF_NOTHING = io.BytesIO()
zipfile.ZipFile(ZIP_OF_NOTHING, "w").close()


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "holds no messages"),
        (b"  \n", "holds no messages"),
        (b"[]", "holds no messages"),
        (b"{}", "holds no messages"),
        (b'{"messages": []}', "holds no messages"),
        (b'{"mapping": {}}', "holds no messages"),
        (b"not json", "not a chat export"),
        (b"[1, 2]", "not a chat export"),
        (b'[{"mapping": {}}, {"mapping": ', "ends in the middle"),
        (b'{"mapping": ', "not a chat export"),
        (b'{"chat": 1}', "holds no messages"),
        (b'{"mapping": {"a": 1, "b": {"parent": "b", "children": ["b", 3, "zz"], "message": 7}}}', "holds no messages"),
        (b'{"messages": [{"versions": 1}, {"versions": [{"role": "user", "content": "x"}]}]}', "holds no messages"),
        (DEEP, f"more than {MAX_NESTING} levels"),
        (b'{"mapping": ' + DEEP + b"}", "not a chat export"),
        (b'{"messages": [{"role": "user", "content": "x"}], "version": 9}', "supported: localllm-chat 1"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "supported: text"),
        (b"PK\x03\x04 broken", "The zip cannot be read"),
        (ZIP_OF_NOTHING.getvalue(), "not a chat export"),
        (b"\xff\xfe{\x00", "not a chat export"),
    ],
    ids=lambda value: value[:30] if isinstance(value, bytes) else None,
)
def test_a_broken_file_is_refused_with_the_reason(raw: bytes, says: str) -> None:
    with pytest.raises(NotAChat) as refused:
        imported(raw)
    assert says in f"{refused.value.what} {refused.value.why}"


def test_a_cycle_or_a_node_twice_below_another_is_imported_once() -> None:
    chat = chatgpt()[0]
    chat["mapping"]["a3"]["children"] = ["q1", "a3", "a3"]
    assert len(imported([chat])[0].messages) == 5
    webui = open_webui()
    webui[0]["chat"]["history"]["messages"]["u1"]["parentId"] = "a1"
    with pytest.raises(NotAChat):
        imported(webui)


def test_a_long_array_is_read_one_element_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However the file is divided into chunks, and with at most one chat in memory."""
    values = [{"a": 'x"]}\\', "b": [1, [2]]}, [], "s,]", 3, {"c": "\u2028ü"}]
    raw = ("\ufeff " + json.dumps(values, ensure_ascii=False)).encode()
    for size in (1, 2, 3, 7, 64):
        monkeypatch.setattr(import_files, "CHUNK_BYTES", size)
        assert [json.loads(each) for each in import_files.elements(io.BytesIO(raw))] == values
    monkeypatch.setattr(import_files, "MAX_ELEMENT_BYTES", 8)
    with pytest.raises(NotAChat, match="not a chat export"):
        list(import_files.elements(io.BytesIO(raw)))


# Over HTTP ----------------------------------------------------------------------------------------------------------


def files(*named: tuple[str, Any]) -> list[tuple[str, tuple[str, bytes]]]:
    return [("file", (name, raw if isinstance(raw, bytes) else json.dumps(raw).encode())) for name, raw in named]


def titles(browser: httpx.Client) -> list[str]:
    return re.findall(r'class="chats__title"[^>]*>([^<]*)<', browser.get("/chats", headers=SCRIPTED).text)


def test_one_chat_is_opened_and_hostile_titles_stay_text(browser: httpx.Client) -> None:
    answer = browser.post("/chats/import", files=files(("conversations.json", chatgpt())), headers=SCRIPTED)
    assert re.fullmatch(r"/c/[\w-]+", answer.headers["hx-redirect"])
    page = browser.get(answer.headers["hx-redirect"]).text
    assert "<script>alert" not in page
    assert "Sums &lt;script&gt;" in page
    assert "I add them." in page
    assert 'class="thinking"' in page
    assert "2/2" not in page
    assert "1/2" in page, "the other version of the reply is kept"


def test_several_files_are_imported_at_once_and_a_broken_one_is_named_beside_them(browser: httpx.Client) -> None:
    answer = browser.post(
        "/chats/import",
        files=files(("a.json", open_webui()), ("<b>bad.json", b"nothing"), ("c.json", lm_studio())),
        headers=SCRIPTED,
    )
    assert answer.status_code == 400
    assert "&lt;b&gt;bad.json: This file is not a chat export." in answer.text
    assert "2 chats are imported." in answer.text
    assert 'hx-target="#chat-list"' in answer.text
    assert sorted(titles(browser)) == ["Studio chat", "Webui chat"]
    answer = browser.post("/chats/import", files=files(("a.json", open_webui()), ("c.json", lm_studio())))
    assert answer.url.path == "/chats"


def test_without_scripts_an_error_is_shown_in_the_form_and_the_chats_before_it_stay(browser: httpx.Client) -> None:
    raw = json.dumps([*open_webui(), {"messages": 3}]).encode()
    page = browser.post("/chats/import", files=files(("many.json", raw)))
    assert page.status_code == 400
    assert 'action="/chats/import"' in page.text
    assert "many.json: This file is not a chat export." in page.text
    assert "Chat 2 of it" in page.text
    assert "One chat before it is imported." in page.text
    assert titles(browser) == ["Webui chat"]
    page = browser.post("/chats/import", data={"x": "y"})
    assert "No file was chosen." in page.text
    assert 'action="/chats/import"' in page.text


def test_everything_exported_is_the_same_after_an_import(browser: httpx.Client) -> None:
    browser.post("/chats/import", files=files(("1.json", chatgpt()), ("2.json", open_webui()), ("3.json", lm_studio())))
    exported = browser.get("/chats/export")
    assert exported.headers["content-type"] == "application/zip"
    assert re.search(r'filename="localllm-chats-[\d-]+\.zip"', exported.headers["content-disposition"])
    with zipfile.ZipFile(io.BytesIO(exported.content)) as archive:
        assert archive.testzip() is None
        assert len(archive.namelist()) == 3
        assert all(re.fullmatch(r"\d{5}-[a-z0-9-]+\.json", name) for name in archive.namelist())
    before = {chat.title: branch(chat) for chat in imported(exported.content)}
    browser.post("/chats/wipe", data={"sure": "1"})
    assert titles(browser) == []
    assert browser.post("/chats/import", files=files(("all.zip", exported.content))).url.path == "/chats"
    assert len(titles(browser)) == 3
    again = browser.get("/chats/export").content
    assert {chat.title: branch(chat) for chat in imported(again)} == before


def test_what_is_here_already_is_not_imported_again(browser: httpx.Client) -> None:
    untimed = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    browser.post("/chats/import", files=files(("1.json", chatgpt()), ("2.json", open_webui()), ("3.json", untimed)))
    url = browser.post("/chats/import", files=files(("3.json", untimed)), headers=SCRIPTED).headers["hx-redirect"]
    assert len(titles(browser)) == 4, "messages without times may be another chat"
    exported = browser.get("/chats/export").content
    browser.post(f"{url}/delete", headers=SCRIPTED)
    answer = browser.post("/chats/import", files=files(("all.zip", exported)), headers=SCRIPTED)
    assert "all.zip: 3 chats of this file are here already." in answer.text
    assert "One chat is imported." in answer.text
    assert len(titles(browser)) == 4


def test_an_export_of_all_is_of_the_caller_alone_and_empty_without_chats(browser: httpx.Client) -> None:
    with zipfile.ZipFile(io.BytesIO(browser.get("/chats/export").content)) as archive:
        assert archive.namelist() == []


# One HTML file ------------------------------------------------------------------------------------------------------

REPLY = """<think>Hm, *well*.</think>A [link](https://a.example) and ![img](https://b.example/x.png)

- [x] done

```python
x = "<b>" # 1
```

$E = mc^2$ <script>alert(1)</script> [x](javascript:alert(1))
"""


def test_a_chat_is_saved_as_one_file_that_runs_and_loads_nothing(browser: httpx.Client) -> None:
    messages = [
        {"role": "system", "content": "Be <i>brief</i>."}, {"role": "user", "content": "Why `a < b`?\n```\ncode\n```"},
        {"role": "assistant", "content": REPLY}, {"role": "user", "content": "</style><script>alert(2)</script>"},
    ]  # fmt: skip
    answer = browser.post("/chats/import", files=files(("a.json", messages)), headers=SCRIPTED)
    url = answer.headers["hx-redirect"]
    saved = browser.get(f"{url}/export/html")
    assert saved.headers["content-type"].startswith("text/html")
    assert saved.headers["content-disposition"] == 'attachment; filename="why-a-b-code.html"'
    body = saved.text.replace(re.findall(r"<style>.*?</style>", saved.text, re.S)[0], "")
    assert "content=\"default-src 'none'; style-src 'unsafe-inline'" in body
    assert not re.search(r"<(script|link|img|iframe|object|form|button|base)\b", body)
    assert not re.search(r"\s(src|srcset|style|on\w+|hx-[\w:-]+|action)=", re.sub(r">[^<]*<", "><", body))
    assert re.findall(r'href="([^"]*)"', body) == ["https://a.example", "https://b.example/x.png"]
    for part in ("Hm, <em>well</em>", "<msup><mi>c</mi><mn>2</mn></msup>", "&lt;script&gt;alert(1)",
                 "Be &lt;i&gt;brief", 'checked aria-label="Done"',
                 "<code>a &lt; b</code>", '<span class="s2">', "&lt;/style&gt;&lt;script&gt;alert(2)"):  # fmt: skip
        assert part in body
    assert "url(" not in saved.text
    assert "@import" not in saved.text
    assert browser.get(url).text.count(f"{url}/manage") >= 1
    assert f"{url}/export/html" in browser.get(f"{url}/manage").text


def test_only_the_shown_branch_is_saved(browser: httpx.Client) -> None:
    answer = browser.post("/chats/import", files=files(("a.json", chatgpt())), headers=SCRIPTED)
    saved = browser.get(f"{answer.headers['hx-redirect']}/export/html").text
    assert "A &lt;b&gt;cat&lt;/b&gt;." in saved
    assert "Five." not in saved
    assert "Sums &lt;script&gt;" in saved
