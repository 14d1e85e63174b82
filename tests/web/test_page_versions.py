"""What a message's menu does, over a real socket: edited replies, forks, previews, the outline, two models compared."""

import asyncio
import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.errors import DoesNotFit
from localllm.serving.entry import ModelEntry
from localllm.web.access.keys import add_key, keys_path
from localllm.web.pages.chat.thread.messages import figures
from localllm.web.pages.frame.forms import CONTENT_SECURITY_POLICY
from tests.web.chat_page import SCRIPTED, ChatPage, Message, assert_refused, listen, parse, stream_urls
from tests.web.harness import Pages, browser_of, quick, said
from tests.web.live_server import LiveServer, settings, wait_until
from tests.web.pages_stub import StubModel

pytestmark = pytest.mark.usefixtures("own_data")


def entry_of(served: Pages, name: str) -> ModelEntry:
    return next(entry for entry in served.live.manager.entries if entry.name == name)


@pytest.fixture
def asked(chat: ChatPage) -> ChatPage:
    """A chat with a question and its reply."""
    return chat.send("question", model="demo")


def compare(chat: ChatPage, **names: str) -> httpx.Response:
    """Ask two models for the last reply; the page follows both."""
    return chat.reply.do("answer", scripted=True, **names)


def replies(chat: ChatPage) -> list[Message]:
    """The replies that are written beside each other."""
    return [message for message in chat.messages if message.is_reply][-2:]


# Edited replies, and copies of a chat -------------------------------------------------------------------------------


def test_an_edited_reply_is_a_version_that_says_so_and_that_the_next_turn_reads(served: Pages, asked: ChatPage) -> None:
    first, urls = asked.reply, asked.urls
    assert ">Save</button>" in asked.browser.get(f"{first.url}/edit").text
    first.do("edit", message="My **own** answer.")
    assert asked.reply.says("edited by you")
    assert (asked.reply.text, asked.reply.version) == ("My own answer.", "2/2")
    assert not asked.reply.says("to first word"), "the figures are those of the model's text"
    asked.send("next")
    assert said(served) == "user: question\nassistant: My **own** answer.\nuser: next"
    body = asked.browser.get(f"{asked.path}/export/json").content
    first.do("select")
    assert not asked.shows("edited by you")
    assert_refused(first.do("edit", message=" ", scripted=True), 400, "The message is empty.")
    assert asked.urls == urls
    asked.browser.post("/chats/wipe", data={"sure": "1"})
    copy = ChatPage(asked.browser)
    copy.post("/chats/import", files={"file": body})
    assert copy.shows("edited by you")


def test_a_rated_answer_is_exported_with_what_the_model_had_read(served: Pages, asked: ChatPage) -> None:
    assert asked.browser.get("/chats/ratings").content == b""
    form = asked.browser.get(f"{asked.reply.url}/rating", headers=SCRIPTED).text
    assert '<option value="good" selected>' in form
    asked.reply.do("rating", rating="bad", note=" It has no <b>unit</b>. ")
    assert asked.reply.says("Rated bad…")
    assert "It has no &lt;b&gt;unit&lt;/b&gt;." in asked.browser.get(f"{asked.reply.url}/rating").text
    asked.send("next")
    exported = asked.browser.get("/chats/ratings")
    assert re.search(r'filename="localllm-ratings-[\d-]+\.jsonl"', exported.headers["content-disposition"])
    (line,) = map(json.loads, exported.text.splitlines())
    assert line.pop("at_s") == pytest.approx(time.time(), abs=60)
    assert line == {
        "rating": "bad",
        "note": "It has no <b>unit</b>.",
        "model": "demo",
        "chat": "question",
        "messages": [{"role": "user", "content": "question"}],
        "answer": served.model.client.reply,
    }
    rated = asked.messages[1]
    rated.do("rating", rating="")
    assert asked.browser.get("/chats/ratings").content == b""


def test_a_rating_that_cannot_be_kept_is_refused(served: Pages, asked: ChatPage) -> None:
    assert_refused(asked.reply.do("rating", rating="so-so", scripted=True), 400, "not rated 'so-so'")
    assert_refused(
        asked.reply.do("rating", rating="bad", note="x" * 2001, scripted=True), 400, "It has 2,001 characters"
    )
    assert_refused(asked.question.do("rating", rating="bad", scripted=True), 400, "Only answers that are complete")
    served.model.client.gate = asyncio.Event()
    running = asked.send("go", scripted=True).reply
    assert_refused(running.do("rating", rating="good", scripted=True), 400, "Only answers that are complete")
    _open(served.model.client.gate)
    assert asked.browser.get("/chats/ratings").content == b""


def test_an_edited_reply_can_be_continued_and_stays_marked(served: Pages, asked: ChatPage) -> None:
    asked.reply.do("edit", message="I begin")
    asked.reply.do("continue")
    assert asked.reply.raw == "I begin" + served.model.client.reply
    assert asked.reply.says("edited by you")


def test_a_chat_goes_on_as_a_copy_from_any_message(served: Pages, chat: ChatPage) -> None:
    chat.post("/chat", message="first", files={"file": ("a.txt", b"in a file")})
    path, reply = chat.path, chat.reply
    chat.send("second")
    reply.do("fork")
    assert (chat.path != path, len(chat.messages)) == (True, 2)
    assert chat.title == "first (2)"
    copied = chat.question
    chat.send("other")
    assert "in a file" in said(served)
    assert said(served).endswith("user: other")
    assert "second" not in said(served)
    copied.do("fork", scripted=True)
    assert chat.get().title == "first (3)"
    assert len(chat.get(path).messages) == 4, "the chat itself is as it was"


def test_a_reply_that_is_being_written_is_not_copied(served: Pages, asked: ChatPage) -> None:
    before, served.model.client.gate = asked.reply, asyncio.Event()
    reply = asked.send("go", scripted=True).reply
    assert_refused(reply.do("fork", scripted=True), 409, "still being written")
    assert_refused(before.do("edit", message="mine", scripted=True), 409, "still being written")
    copy = asked.browser.post(f"{before.url}/fork", headers=SCRIPTED)
    assert copy.status_code == 200, "what was said before"
    assert asked.browser.post(f"{asked.path}/stop", headers=SCRIPTED).status_code == 204
    _open(served.model.client.gate)
    assert "Reply stopped" in asked.listen()


@pytest.mark.parametrize(
    ("details", "line", "end", "more"),
    [
        ({}, None, "", []),
        ({"finish_reason": "interrupted"}, "", "interrupted: the server stopped", []),
        (
            {"prompt_tokens": 13, "completion_tokens": 49, "ttft_s": 0.151, "tokens_per_s": 285.7},
            "0.15 s to first word · 286 tok/s · 49 tokens", "", [("Read", "13 tokens")],
        ),
        ({"prompt_tokens": 8, "completion_tokens": 1, "finish_reason": "length"}, "1 token", "cut off: token limit",
         [("Read", "8 tokens")]),
        ({"prompt_tokens": 8, "finish_reason": "abort"}, "0 tokens", "stopped by you", [("Read", "8 tokens")]),
        (
            {"prompt_tokens": 1200, "cached_tokens": 1024, "completion_tokens": 2000, "ttft_s": 12.0,
             "drafted_tokens": 900, "accepted_tokens": 600},
            "12.0 s to first word · 2,000 tokens", "",
            [("Read", "1,200 tokens, 85% of it from the prefix cache"), ("Drafts", "600 of 900 tokens accepted (67%)")],
        ),
    ],
)  # fmt: skip
def test_figures_say_what_a_person_asks(
    details: dict[str, Any], line: str | None, end: str, more: list[tuple[str, str]]
) -> None:
    found = figures(details)
    assert (None if found is None else " · ".join(found.line)) == line
    if found is not None:
        assert (found.end, list(found.details)) == (end, more)


# Previews -----------------------------------------------------------------------------------------------------------

BLOCKS = """Look:

```html
<p onclick=x()>é</p><script>y()</script>
```

- and

  ```SVG
  <svg id=a/>
  ```

```xml
<svg/>
```

```xml
<a/>
```
"""


def previews(chat: ChatPage) -> list[str]:
    return [node.attrs["data-preview"] for node in chat.tree.all() if "data-preview" in node.attrs]


def test_a_preview_is_a_stored_block_under_a_policy_of_its_own(
    served: Pages, browser: httpx.Client, chat: ChatPage
) -> None:
    served.model.client.reply = BLOCKS
    url, digests = chat.send("draw").reply.url, previews(chat)
    assert len(digests) == 3
    answers = [browser.get(f"{url}/preview/{digest}") for digest in digests]
    assert answers[0].text == "<p onclick=x()>é</p><script>y()</script>\n"
    assert [answer.text.splitlines()[-1] for answer in answers[1:]] == ["<svg id=a/>", "<svg/>"]
    for answer in answers:
        (policy,) = answer.headers.get_list("content-security-policy")
        assert policy.startswith("sandbox allow-scripts; default-src 'none'; ")
        assert "allow-same-origin" not in policy
        assert "'self'" not in policy.replace("frame-ancestors 'self'", "")
        assert (answer.headers["cache-control"], answer.headers["connection-allowlist"]) == ("no-store", "()")
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
    for wrong in (f"{url}/preview/{'0' * 20}", f"{chat.question.url}/preview/{digests[0]}"):
        answer = browser.get(wrong)
        assert (answer.status_code, "<script>y()" in answer.text) == (404, False)
        assert answer.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert browser.post(f"{url}/preview/{digests[0]}", data={"x": "<b>"}).status_code == 405


def test_a_preview_belongs_to_the_chats_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    keys = {name: add_key(keys_path(), name, "infer") for name in ("ann", "bob")}
    model = quick()
    model.client.reply = BLOCKS
    with LiveServer(model, settings(ui=True)) as server:  # type: ignore[arg-type]
        with browser_of(server, auth=("", keys["ann"])) as ann, browser_of(server, auth=("", keys["bob"])) as bob:
            chat = ChatPage(ann).send("draw")
            url = chat.reply.url
            path = f"{url}/preview/{previews(chat)[0]}"
            assert [each.get(path).status_code for each in (ann, bob)] == [200, 404]
            for action in ("fork", "answer"):
                assert bob.post(f"{url}/{action}", data={"model": "demo"}).status_code == 404
            assert [bob.get(each).status_code for each in (f"{url}/models", f"{chat.path}/outline")] == [404, 404]
            model.client.gate = asyncio.Event()
            chat.reply.do("regenerate", scripted=True)
            assert bob.post(f"{chat.path}/stop", headers=SCRIPTED).status_code == 404
            _open(model.client.gate)
            assert "Reply finished" in chat.listen()
        assert server.get(path).status_code == 401


# The outline ----------------------------------------------------------------------------------------------------------


def test_the_outline_leads_to_every_question_of_a_long_chat(chat: ChatPage) -> None:
    texts = ["word " * 100 if i == 0 else f"message-{i}." for i in range(500)]
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    chat.post("/chats/import", files={"file": json.dumps({"messages": messages}).encode()})
    outline = parse(chat.browser.get(f"{chat.path}/outline", headers=SCRIPTED).text)
    links = [(node.attrs["href"], node.text) for node in outline.all("a") if "data-jump" in node.attrs]
    assert len(links) == 250
    assert (len(links[0][1]), links[0][1][-1], links[249][1]) == (120, "…", "message-498.")
    for number in (0, 1, 100, 229, 230, 249):
        path, _, name = links[number][0].partition("#")
        shown = chat.browser.get(path).text
        assert shown.count("<article") <= 40
        assert f'id="{name}"' in shown, links[number]
        assert ("before=" in path) == (number < 230)
    assert "message-498." in chat.browser.get(f"{chat.path}/outline").text


# Two models -----------------------------------------------------------------------------------------------------------


def test_another_model_answers_once_and_the_chat_keeps_its_own(
    served: Pages, asked: ChatPage, second: StubModel
) -> None:
    first = asked.urls[0]
    choices = parse(asked.browser.get(f"{asked.reply.url}/models", headers=SCRIPTED).text)
    assert choices.first("option", selected="").attrs["value"] == "second"
    asked.reply.do("answer", model="second")
    assert (asked.reply.text, asked.reply.version) == (second.client.reply, "2/2")
    assert asked.field("model") == "demo"
    asked.send("next")
    assert len(second.client.asked) == 1
    assert said(served) == f"user: question\nassistant: {second.client.reply}\nuser: next"
    assert asked.get().urls[0] == first


def test_two_models_answer_beside_each_other_and_one_is_kept(served: Pages, asked: ChatPage, second: StubModel) -> None:
    choices = parse(asked.browser.get(f"{asked.reply.url}/models?compare=1").text)
    assert [each.attrs["value"] for each in choices.all("option", selected="")] == ["demo", "second"]
    served.model.client.gate = second.client.gate = gate = asyncio.Event()
    compare(asked, model="demo", beside="second")
    first, other = replies(asked)
    _open(gate)
    assert "Reply finished" in asked.listen(1)
    assert "watch the blocks" in asked.listen(0)
    assert [len(asked.get().tree.all(class_="compare__one")), len(asked.messages)] == [2, 3]
    assert [each.text[-10:] for each in replies(asked)] == ["dashboard.", "own words."]
    for model in (served.model, second):
        assert "".join(map(chr, model.client.asked[-1].prompt_token_ids)) == "user: question"
    other.do("select", scripted=True)
    assert 'hx-target="#messages" hx-swap="innerHTML"' in asked.html
    assert not asked.tree.all(class_="compare__one")
    assert (asked.reply.text, asked.reply.version) == (second.client.reply, "3/3")
    asked.send("next")
    assert said(served) == f"user: question\nassistant: {second.client.reply}\nuser: next"
    first.do("select")
    assert not asked.tree.all(class_="compare__one")


def test_each_of_two_replies_is_stopped_alone_and_both_together(
    served: Pages, asked: ChatPage, second: StubModel
) -> None:
    served.model.client.gate, second.client.gate = asyncio.Event(), asyncio.Event()
    compare(asked, model="demo", beside="second")
    first, other = stream_urls(asked.html)
    assert_refused(asked.try_to_send("no", scripted=True), 409, "still being written")
    assert asked.browser.post(other.replace("/stream", "/stop"), headers=SCRIPTED).status_code == 204
    _open(second.client.gate)
    said_by_other = listen(asked.browser, other)
    assert "Reply stopped" in said_by_other
    assert f'hx-post="{asked.path}/stop"' in said_by_other, "the composer still stops the first"
    assert served.model.client.running
    assert asked.browser.post(f"{asked.path}/stop", headers=SCRIPTED).status_code == 204
    _open(served.model.client.gate)
    assert "data-send" in listen(asked.browser, first)


def test_keeping_one_reply_stops_the_other_and_lets_it_be_written_on(
    served: Pages, asked: ChatPage, second: StubModel
) -> None:
    second.client.gate = gate = asyncio.Event()
    served.model.client.every_s = 0.01
    compare(asked, model="demo", beside="second")
    first, other = stream_urls(asked.html)
    wait_until(lambda: bool(second.client.running and served.model.client.running))
    kept = replies(asked)[1].do("select", scripted=True)
    _open(gate)
    assert kept.status_code == 200
    assert "compare__one" not in kept.text
    assert "own words." in listen(asked.browser, other)
    assert "Reply stopped" in listen(asked.browser, first)


def _open(gate: asyncio.Event) -> None:
    wait_until(lambda: gate._loop is not None)  # type: ignore[attr-defined]  # a reply waits for it
    gate._loop.call_soon_threadsafe(gate.set)  # type: ignore[attr-defined]


@pytest.mark.parametrize("not_loaded", [["demo"], ["second"], ["demo", "second"]], ids="+".join)
def test_a_model_that_has_to_be_loaded_answers_after_the_other(
    served: Pages, asked: ChatPage, second: StubModel, monkeypatch: pytest.MonkeyPatch, not_loaded: list[str]
) -> None:
    manager = served.live.manager
    acquire, running_at_load = manager.acquire, []

    async def load(name: str | None = None) -> Any:
        if name in not_loaded:
            running_at_load.append([name, *served.model.client.running, *second.client.running])
            entry_of(served, name).state = "ready"
        return await acquire(name)

    monkeypatch.setattr(manager, "acquire", load)
    for name in not_loaded:
        entry_of(served, name).state = "unloaded"
    later, beside = not_loaded[-1], ("demo", "second")
    compare(asked, model="demo", beside="second")
    assert asked.shows(f"{later} has to be loaded: it answers after {'second' if later == 'demo' else 'demo'}.")
    assert "watch the blocks" in asked.listen(0)
    assert "own words." in asked.listen(1)
    assert running_at_load == [[name] for name in not_loaded], "each when no reply was being written"

    served.model.client.gate = second.client.gate = gate = asyncio.Event()
    entry_of(served, later).state = "unloaded"
    asked.get().messages[1].do("answer", scripted=True, model="demo", beside="second")
    waits = beside.index(later)
    assert asked.browser.post(f"{replies(asked)[waits].url}/stop", headers=SCRIPTED).status_code == 204
    assert "Reply stopped" in asked.listen(waits)
    _open(gate)
    assert "Reply finished" in asked.listen(1 - waits)
    assert [each[0] for each in running_at_load].count(later) == 1, "a stopped reply loads nothing"
    entry_of(served, later).state = "ready"
    wait_until(lambda: all(entry.num_leases == 0 for entry in manager.entries))


def test_a_model_that_does_not_fit_says_so_beside_the_other_reply(
    served: Pages, asked: ChatPage, second: StubModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = served.live.manager
    acquire = manager.acquire

    async def refuse(name: str | None = None) -> Any:
        if name == "second":
            raise DoesNotFit("second does not fit.", "9.0 GiB needed, 2.0 GiB free.", "Unload another model.")
        return await acquire(name)

    monkeypatch.setattr(manager, "acquire", refuse)
    entry_of(served, "second").state = "unloaded"
    compare(asked, model="second", beside="demo")
    assert "9.0 GiB needed" in asked.listen(0)
    assert "watch the blocks" in asked.listen(1)
    entry_of(served, "second").state = "ready"


def test_without_scripts_both_replies_are_waited_for(asked: ChatPage, second: StubModel) -> None:
    second.client.every_s = 0.01
    asked.reply.do("answer", model="demo", beside="second")
    assert [reply.says("to first word") for reply in replies(asked)] == [True, True]
    assert not [url for url in stream_urls(asked.html) if url.startswith("/c/")]


def test_a_chat_too_long_for_one_of_two_models_is_refused_before_anything_is_stored(
    chat: ChatPage, second: StubModel
) -> None:
    second.plan = replace(second.plan, max_model_len=64)
    urls = chat.send("A question that is long. " * 4, model="demo").urls
    for names in ({"model": "demo", "beside": "second"}, {"model": "second"}):
        refused = compare(chat, **names)
        assert_refused(refused, 400, "This chat is full")
        assert "leave-out" not in refused.text
    assert chat.get().urls == urls


@pytest.mark.parametrize(
    ("names", "status", "says"),
    [
        ({}, 400, "No model is chosen."),
        ({"model": "none"}, 404, "none"),
        ({"model": "demo", "beside": "none"}, 404, "none"),
        ({"model": "demo", "beside": "demo"}, 400, "Choose two different models."),
        ({"model": "demo", "beside": "second", "temperature": "hot"}, 400, "Temperature must be a number"),
    ],
)
def test_a_comparison_that_cannot_be_is_refused_by_name(
    asked: ChatPage, second: StubModel, names: dict[str, str], status: int, says: str
) -> None:
    urls = asked.urls
    assert_refused(compare(asked, **names), status, says)
    assert asked.get().urls == urls


def test_with_one_model_the_form_says_where_another_comes_from(asked: ChatPage) -> None:
    asked.get(f"{asked.reply.url}/models")
    assert asked.shows("Only demo is installed.")
    assert [link.text for link in asked.tree.first("main").all("a", href="/library")] == ["Get a model"]
