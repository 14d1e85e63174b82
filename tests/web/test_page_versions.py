"""What a message's menu does, over a real socket: edited replies, forks, previews, the outline, two models compared."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.errors import DoesNotFit
from localllm.serving.entry import ModelEntry
from localllm.web.access.keys import add_key, keys_path
from localllm.web.pages.chat.thread.messages import figures
from localllm.web.pages.frame.forms import CONTENT_SECURITY_POLICY
from tests.web.harness import SCRIPTED, Pages, browser_of, listen, message_urls, said, start_chat
from tests.web.live_server import LiveServer, settings, wait_until
from tests.web.pages_stub import StubModel

pytestmark = pytest.mark.usefixtures("own_data")


@pytest.fixture
def second(served: Pages) -> Iterator[StubModel]:
    """Another model, loaded as well."""
    other = StubModel(name="second")
    other.client.every_s, other.client.chars, other.client.reply = 0.0, 40, "The second's own words."
    entry = served.live.manager.adopt(other)  # type: ignore[arg-type]
    yield other
    served.live.manager.entries.remove(entry)


def entry_of(served: Pages, name: str) -> ModelEntry:
    return next(entry for entry in served.live.manager.entries if entry.name == name)


def streams(html: str) -> list[str]:
    return re.findall(r'hx-sse:connect="(/c/[^"]+)"', html)


def compare(browser: httpx.Client, message: str, **names: str) -> httpx.Response:
    return browser.post(f"{message}/answer", data=names, headers=SCRIPTED)


# Edited replies, and copies of a chat -------------------------------------------------------------------------------


def test_an_edited_reply_is_a_version_that_says_so_and_that_the_next_turn_reads(
    served: Pages, browser: httpx.Client
) -> None:
    chat, page = start_chat(browser, "question")
    question, reply = message_urls(page)
    assert "Save as a new version" in browser.get(f"{reply}/edit").text
    page = browser.post(f"{reply}/edit", data={"message": "My **own** answer."}).text
    assert "edited by you" in page
    assert "<strong>own</strong>" in page
    assert 'hidden">Version </span>2/2' in page
    assert "to first word" not in page, "the figures are those of the model's text"
    browser.post("/chat", data={"message": "next", "conversation": chat[3:]})
    assert said(served) == "user: question\nassistant: My **own** answer.\nuser: next"
    body = browser.get(f"{chat}/export/json").content
    assert "edited by you" in browser.post("/chats/import", files={"file": body}).text
    page = browser.post(f"{reply}/select").text
    assert "edited by you" not in page
    empty = browser.post(f"{reply}/edit", data={"message": " "}, headers=SCRIPTED)
    assert (empty.status_code, "The message is empty." in empty.text) == (400, True)
    assert message_urls(page) == [question, reply]


def test_an_edited_reply_can_be_continued_and_stays_marked(served: Pages, browser: httpx.Client) -> None:
    _, page = start_chat(browser, "question")
    page = browser.post(f"{message_urls(page)[1]}/edit", data={"message": "I begin"}).text
    reply = message_urls(page)[1]
    page = browser.post(f"{reply}/continue").text
    assert browser.get(f"{reply}/raw").text == "I begin" + served.model.client.reply
    assert "edited by you" in page


def test_a_chat_goes_on_as_a_copy_from_any_message(served: Pages, browser: httpx.Client) -> None:
    first = browser.post("/chat", data={"message": "first"}, files={"file": ("a.txt", b"in a file")})
    chat, page = first.url.path, first.text
    browser.post("/chat", data={"message": "second", "conversation": chat[3:]})
    copy = browser.post(f"{message_urls(page)[1]}/fork")
    assert (copy.url.path != chat, copy.url.path[:3]) == (True, "/c/")
    assert "<title>first (2) · localllm" in copy.text
    assert len(message_urls(copy.text)) == 2
    browser.post("/chat", data={"message": "other", "conversation": copy.url.path[3:]})
    assert "in a file" in said(served)
    assert said(served).endswith("user: other")
    assert "second" not in said(served)
    again = browser.post(f"{message_urls(copy.text)[0]}/fork", headers=SCRIPTED)
    assert "<title>first (3) · localllm" in browser.get(again.headers["hx-redirect"]).text
    assert len(message_urls(browser.get(chat).text)) == 4, "the chat itself is as it was"


def test_a_reply_that_is_being_written_is_not_copied(served: Pages, browser: httpx.Client) -> None:
    chat, page = start_chat(browser, "first")
    served.model.client.gate = asyncio.Event()
    turn = browser.post("/chat", data={"message": "go", "conversation": chat[3:]}, headers=SCRIPTED).text
    (stream,) = streams(turn)
    refused = browser.post(stream.replace("/stream", "/fork"), headers=SCRIPTED)
    assert (refused.status_code, "still being written" in refused.text) == (409, True)
    assert browser.post(f"{message_urls(page)[1]}/fork", headers=SCRIPTED).status_code == 200, "what was said before"
    edited = browser.post(f"{message_urls(page)[1]}/edit", data={"message": "mine"}, headers=SCRIPTED)
    assert (edited.status_code, "still being written" in edited.text) == (409, True)
    assert browser.post(f"{chat}/stop", headers=SCRIPTED).status_code == 204
    _open(served.model.client.gate)
    assert "Reply stopped" in listen(browser, stream)


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


def test_a_preview_is_a_stored_block_under_a_policy_of_its_own(served: Pages, browser: httpx.Client) -> None:
    served.model.client.reply = BLOCKS
    _, page = start_chat(browser, "draw")
    reply = message_urls(page)[1]
    digests = re.findall(r'data-preview="([0-9a-f]+)"', page)
    assert len(digests) == 3
    answers = [browser.get(f"{reply}/preview/{digest}") for digest in digests]
    assert answers[0].text == "<p onclick=x()>é</p><script>y()</script>\n"
    assert [answer.text.splitlines()[-1] for answer in answers[1:]] == ["<svg id=a/>", "<svg/>"]
    for answer in answers:
        (policy,) = answer.headers.get_list("content-security-policy")
        assert policy.startswith("sandbox allow-scripts; default-src 'none'; ")
        assert "allow-same-origin" not in policy
        assert "'self'" not in policy.replace("frame-ancestors 'self'", "")
        assert (answer.headers["cache-control"], answer.headers["connection-allowlist"]) == ("no-store", "()")
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
    for wrong in (f"{reply}/preview/{'0' * 20}", f"{message_urls(page)[0]}/preview/{digests[0]}"):
        answer = browser.get(wrong)
        assert (answer.status_code, "<script>y()" in answer.text) == (404, False)
        assert answer.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert browser.post(f"{reply}/preview/{digests[0]}", data={"x": "<b>"}).status_code == 405


def test_a_preview_belongs_to_the_chats_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    keys = {name: add_key(keys_path(), name, "infer") for name in ("ann", "bob")}
    model = StubModel()
    model.client.every_s, model.client.chars, model.client.reply = 0.0, 40, BLOCKS
    with LiveServer(model, settings(ui=True)) as server:  # type: ignore[arg-type]
        with browser_of(server, auth=("", keys["ann"])) as ann, browser_of(server, auth=("", keys["bob"])) as bob:
            chat, page = start_chat(ann, "draw")
            reply = message_urls(page)[1]
            digest = re.findall(r'data-preview="([0-9a-f]+)"', page)[0]
            path = f"{reply}/preview/{digest}"
            assert [each.get(path).status_code for each in (ann, bob)] == [200, 404]
            for action in ("fork", "answer"):
                assert bob.post(f"{reply}/{action}", data={"model": "demo"}).status_code == 404
            assert [bob.get(f"{reply}/models").status_code, bob.get(f"{chat}/outline").status_code] == [404, 404]
            model.client.gate = asyncio.Event()
            (stream,) = streams(ann.post(f"{reply}/regenerate", headers=SCRIPTED).text)
            assert bob.post(f"{chat}/stop", headers=SCRIPTED).status_code == 404
            _open(model.client.gate)
            assert "Reply finished" in listen(ann, stream)
        assert server.get(path).status_code == 401


# The outline ----------------------------------------------------------------------------------------------------------


def test_the_outline_leads_to_every_question_of_a_long_chat(browser: httpx.Client) -> None:
    texts = ["word " * 100 if i == 0 else f"message-{i}." for i in range(500)]
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    page = browser.post("/chats/import", files={"file": json.dumps({"messages": messages}).encode()})
    outline = browser.get(f"{page.url.path}/outline", headers=SCRIPTED).text
    links = [(unescape(url), text) for url, text in re.findall(r'href="([^"]+)" data-jump[^>]*>([^<]+)<', outline)]
    assert len(links) == 250
    assert (len(links[0][1]), links[0][1][-1], links[249][1]) == (120, "…", "message-498.")
    for number in (0, 1, 100, 229, 230, 249):
        url, text = links[number]
        path, _, name = url.partition("#")
        shown = browser.get(path).text
        assert shown.count("<article") <= 40
        assert f'id="{name}"' in shown, text
        assert ("before=" in path) == (number < 230)
    assert "message-498." in browser.get(f"{page.url.path}/outline").text


# Two models -----------------------------------------------------------------------------------------------------------


def test_another_model_answers_once_and_the_chat_keeps_its_own(
    served: Pages, browser: httpx.Client, second: StubModel
) -> None:
    chat, page = start_chat(browser, "question", model="demo")
    question, reply = message_urls(page)
    form = browser.get(f"{reply}/models", headers=SCRIPTED).text
    assert '<option value="second" selected>second' in form
    page = browser.post(f"{reply}/answer", data={"model": "second"}).text
    assert "own words." in page
    assert 'hidden">Version </span>2/2' in page
    assert '<option value="demo" selected>' in page
    browser.post("/chat", data={"message": "next", "conversation": chat[3:]})
    assert (len(second.client.asked), said(served)) == (
        1,
        f"user: question\nassistant: {second.client.reply}\nuser: next",
    )
    assert message_urls(browser.get(chat).text)[0] == question


def test_two_models_answer_beside_each_other_and_one_is_kept(
    served: Pages, browser: httpx.Client, second: StubModel
) -> None:
    chat, page = start_chat(browser, "question", model="demo")
    reply = message_urls(page)[1]
    assert re.findall(r'<option value="(\w+)" selected>', browser.get(f"{reply}/models?compare=1").text) == [
        "demo",
        "second",
    ]
    served.model.client.gate = second.client.gate = gate = asyncio.Event()
    update = compare(browser, reply, model="demo", beside="second").text
    assert 'class="compare"' in update
    first, other = streams(update)
    _open(gate)
    assert "Reply finished" in listen(browser, other)
    assert "watch the blocks" in listen(browser, first)
    page = browser.get(chat).text
    assert page.count('class="compare__one"') == 2
    assert page.index("watch the blocks") < page.index("own words.")
    assert [asked.client.asked[-1].prompt_token_ids for asked in (served.model, second)] == [
        [ord(each) for each in "user: question"]
    ] * 2
    kept = browser.post(other.replace("/stream", "/select"), headers=SCRIPTED).text
    assert 'hx-target="#messages" hx-swap="innerHTML"' in kept
    assert "compare__one" not in kept
    assert "own words." in kept
    assert 'hidden">Version </span>3/3' in kept
    browser.post("/chat", data={"message": "next", "conversation": chat[3:]})
    assert said(served) == f"user: question\nassistant: {second.client.reply}\nuser: next"
    assert "compare__one" not in browser.post(first.replace("/stream", "/select")).text


def test_each_of_two_replies_is_stopped_alone_and_both_together(
    served: Pages, browser: httpx.Client, second: StubModel
) -> None:
    gates = []
    for model in (served.model, second):
        model.client.gate = asyncio.Event()
        gates.append(model.client.gate)
    chat, reply = _chat_with_gate(served, browser, gates[0])
    first, other = streams(compare(browser, reply, model="demo", beside="second").text)
    refused = browser.post("/chat", data={"message": "no", "conversation": chat[3:]}, headers=SCRIPTED)
    assert (refused.status_code, "still being written" in refused.text) == (409, True)
    assert browser.post(other.replace("/stream", "/stop"), headers=SCRIPTED).status_code == 204
    _open(gates[1])
    said_by_other = listen(browser, other)
    assert "Reply stopped" in said_by_other
    assert f'hx-post="{chat}/stop"' in said_by_other, "the composer still stops the first"
    assert served.model.client.running
    assert browser.post(f"{chat}/stop", headers=SCRIPTED).status_code == 204
    _open(gates[0])
    assert "data-send" in listen(browser, first)


def test_keeping_one_reply_stops_the_other_and_lets_it_be_written_on(
    served: Pages, browser: httpx.Client, second: StubModel
) -> None:
    _, reply = _chat_with_gate(served, browser, None)
    second.client.gate = gate = asyncio.Event()
    served.model.client.every_s = 0.01
    first, other = streams(compare(browser, reply, model="demo", beside="second").text)
    wait_until(lambda: bool(second.client.running and served.model.client.running))
    kept = browser.post(other.replace("/stream", "/select"), headers=SCRIPTED)
    _open(gate)
    assert kept.status_code == 200
    assert "compare__one" not in kept.text
    assert "own words." in listen(browser, other)
    assert "Reply stopped" in listen(browser, first)


def _chat_with_gate(served: Pages, browser: httpx.Client, gate: asyncio.Event | None) -> tuple[str, str]:
    """A chat with a reply; the next one waits for the gate."""
    served.model.client.gate, served.model.client.every_s = None, 0.001
    chat, page = start_chat(browser, "question", model="demo")
    served.model.client.gate = gate
    return chat, message_urls(page)[1]


def _open(gate: asyncio.Event) -> None:
    wait_until(lambda: gate._loop is not None)  # type: ignore[attr-defined]  # a reply waits for it
    gate._loop.call_soon_threadsafe(gate.set)  # type: ignore[attr-defined]


@pytest.mark.parametrize("not_loaded", [["demo"], ["second"], ["demo", "second"]], ids="+".join)
def test_a_model_that_has_to_be_loaded_answers_after_the_other(
    served: Pages, browser: httpx.Client, second: StubModel, monkeypatch: pytest.MonkeyPatch, not_loaded: list[str]
) -> None:
    manager = served.live.manager
    _, page = start_chat(browser, "question", model="demo")
    acquire, running_at_load = manager.acquire, []

    async def load(name: str | None = None) -> Any:
        if name in not_loaded:
            running_at_load.append([name, *served.model.client.running, *second.client.running])
            entry_of(served, name).state = "ready"
        return await acquire(name)

    monkeypatch.setattr(manager, "acquire", load)
    for name in not_loaded:
        entry_of(served, name).state = "unloaded"
    later = not_loaded[-1]
    update = compare(browser, message_urls(page)[1], model="demo", beside="second").text
    assert f"{later} has to be loaded: it answers after {'second' if later == 'demo' else 'demo'}." in update
    told = [listen(browser, stream) for stream in streams(update)]
    assert ("watch the blocks" in told[0], "own words." in told[1]) == (True, True)
    assert running_at_load == [[name] for name in not_loaded], "each when no reply was being written"

    served.model.client.gate = second.client.gate = gate = asyncio.Event()
    entry_of(served, later).state = "unloaded"
    update = compare(browser, message_urls(page)[1], model="demo", beside="second").text
    waits = streams(update)[("demo", "second").index(later)]
    assert browser.post(waits.replace("/stream", "/stop"), headers=SCRIPTED).status_code == 204
    assert "Reply stopped" in listen(browser, waits)
    _open(gate)
    assert ["Reply finished" in listen(browser, stream) for stream in streams(update) if stream != waits] == [True]
    assert [each[0] for each in running_at_load].count(later) == 1, "a stopped reply loads nothing"
    entry_of(served, later).state = "ready"
    wait_until(lambda: all(entry.num_leases == 0 for entry in manager.entries))


def test_a_model_that_does_not_fit_says_so_beside_the_other_reply(
    served: Pages, browser: httpx.Client, second: StubModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = served.live.manager
    _, page = start_chat(browser, "question", model="demo")
    acquire = manager.acquire

    async def refuse(name: str | None = None) -> Any:
        if name == "second":
            raise DoesNotFit("second does not fit.", "9.0 GiB needed, 2.0 GiB free.", "Unload another model.")
        return await acquire(name)

    monkeypatch.setattr(manager, "acquire", refuse)
    entry_of(served, "second").state = "unloaded"
    update = compare(browser, message_urls(page)[1], model="second", beside="demo").text
    told = [listen(browser, stream) for stream in streams(update)]
    assert ("9.0 GiB needed" in told[0], "watch the blocks" in told[1]) == (True, True)
    entry_of(served, "second").state = "ready"


def test_without_scripts_both_replies_are_waited_for(served: Pages, browser: httpx.Client, second: StubModel) -> None:
    second.client.every_s = 0.01
    _, page = start_chat(browser, "question", model="demo")
    page = browser.post(f"{message_urls(page)[1]}/answer", data={"model": "demo", "beside": "second"}).text
    assert page.count("to first word") == 2
    assert streams(page) == []


def test_a_chat_too_long_for_one_of_two_models_is_refused_before_anything_is_stored(
    browser: httpx.Client, second: StubModel
) -> None:
    second.plan = replace(second.plan, max_model_len=64)
    chat, page = start_chat(browser, "A question that is long. " * 4, model="demo")
    for names in ({"model": "demo", "beside": "second"}, {"model": "second"}):
        refused = compare(browser, message_urls(page)[1], **names)
        assert (refused.status_code, "This chat is full" in refused.text) == (400, True)
        assert "leave-out" not in refused.text
    assert message_urls(browser.get(chat).text) == message_urls(page)


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
    browser: httpx.Client, second: StubModel, names: dict[str, str], status: int, says: str
) -> None:
    chat, page = start_chat(browser, "question", model="demo")
    answer = compare(browser, message_urls(page)[1], **names)
    assert (answer.status_code, says in answer.text) == (status, True)
    assert message_urls(browser.get(chat).text) == message_urls(page)


def test_with_one_model_the_form_says_where_another_comes_from(browser: httpx.Client) -> None:
    _, page = start_chat(browser, "question", model="demo")
    form = browser.get(f"{message_urls(page)[1]}/models").text
    assert "Only demo is installed." in form
    assert 'href="/library">Get a model' in form
