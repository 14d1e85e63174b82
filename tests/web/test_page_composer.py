"""The composer over a real socket: a full chat and its ways on, the drawer, the model, thinking, a schema."""

from __future__ import annotations

import asyncio
import html
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from localllm.errors import DoesNotFit, StepFailed
from localllm.web.pages.chat.composer.views import ContextMeter
from localllm.web.pages.chat.replies import claims
from localllm.web.pages.frame.render import render
from tests.text.templates import CHATML
from tests.web.chat_page import SCRIPTED, listen, stream_url
from tests.web.harness import Pages, browser_of, message_urls, said, start_chat, typed
from tests.web.live_server import LiveServer, PacedRunner, fake_model, settings, wait_until
from tests.web.pages_stub import CONTEXT, REPLY, StubModel

ROOM = CONTEXT // 8
LONG = "b" * 700
"""Fits alone, and does not fit behind a message of 300 characters and its reply."""


pytestmark = pytest.mark.usefixtures("own_data")


def texts(page: str) -> list[str]:
    """What the person's messages say, in order."""
    return re.findall(r'<div class="message__text" dir="auto">([^<]*)</div>', page)


def full_chat(browser: httpx.Client) -> str:
    """The id of a chat that has no room for `LONG`."""
    return start_chat(browser, "a" * 300)[0][3:]


def test_full_chat_is_told_before_anything_is_stored_and_offers_three_ways(
    served: Pages, browser: httpx.Client
) -> None:
    chat, asked = full_chat(browser), len(served.model.client.asked)
    answer = browser.post("/chat", data={"message": LONG, "conversation": chat}, headers=SCRIPTED)
    needs = len(f"user: {'a' * 300}\nassistant: {REPLY}\nuser: {LONG}")
    assert answer.status_code == 400
    assert f"This chat is full: {needs + ROOM:,} of 2,048 tokens." in answer.text
    assert f"Its messages need {needs:,}, and 256 are kept free for the reply of demo." in answer.text
    for way in ("Leave out the oldest messages", "Go on in a new chat with a summary", "Edit the message"):
        assert way in answer.text
    assert f"{(needs + ROOM) / CONTEXT:.0%}" in answer.text.replace(" %", "%").replace("\u202f%", "%")
    assert "--max-model-len" not in answer.text
    assert f"Too long by {needs + ROOM - CONTEXT:,} tokens" in answer.text  # in place of Send
    assert 'hx-target="#composer-error" hx-swap="innerHTML"></hx-partial>' in answer.text
    assert texts(browser.get(f"/c/{chat}").text) == ["a" * 300]
    assert len(served.model.client.asked) == asked
    plain = browser.post("/chat", data={"message": LONG, "conversation": chat})
    assert (plain.status_code, f"{LONG}</textarea>" in plain.text) == (400, True)
    assert "Leave out the oldest messages" in plain.text


@pytest.mark.parametrize("scripted", [True, False])
def test_oldest_messages_are_left_out_and_brought_back(served: Pages, browser: httpx.Client, scripted: bool) -> None:
    chat, headers = full_chat(browser), SCRIPTED if scripted else {}
    form = {"message": LONG, "conversation": chat, "full": "leave-out"}
    turn = browser.post("/chat", data=form, headers=headers)
    assert turn.status_code == 200
    if scripted:
        assert 'hx-target="#messages" hx-swap="innerMorph"' in turn.text
        listen(browser, stream_url(turn.text))
    assert said(served) == f"user: {LONG}"
    page = browser.get(f"/c/{chat}").text
    assert page.count("message--left-out") == 2
    assert page.index("a" * 300) < page.index("Not sent to the model any more") < page.index(LONG)
    again = browser.post("/chat", data={"message": "more", "conversation": chat})  # remembered
    assert said(served).startswith(f"user: {LONG}\nassistant: ")
    assert again.text.count("message--left-out") == 2
    back = browser.post(f"/c/{chat}/bring-back", headers=headers)
    assert "message--left-out" not in back.text
    assert "Not sent to the model any more" not in back.text
    refused = browser.post("/chat", data={"message": "more", "conversation": chat}, headers=SCRIPTED)
    assert "This chat is full" in refused.text


def test_no_more_is_left_out_than_makes_room_for_the_next_messages(served: Pages, browser: httpx.Client) -> None:
    chat, _ = start_chat(browser, "first", max_tokens="10")
    for text in ("second", "third", "fourth", "fifth"):
        browser.post("/chat", data={"message": text, "conversation": chat[3:], "max_tokens": "10"})
    form = {"message": LONG, "conversation": chat[3:], "max_tokens": ""}
    assert browser.post("/chat", data=form).status_code == 400
    browser.post("/chat", data={**form, "full": "leave-out"})
    prompt = said(served)
    kept = prompt.count("user: ")
    assert 1 < kept < 6
    assert len(prompt) <= 0.75 * CONTEXT
    assert len(prompt) + len("user: fourth\nassistant: \n") + 200 > 0.75 * CONTEXT  # one turn more does not fit
    assert prompt.startswith("user: ")


def test_full_chat_is_told_where_a_message_is_edited_or_answered_again(served: Pages, browser: httpx.Client) -> None:
    chat, _ = start_chat(browser, "a" * 300)
    second = browser.post("/chat", data={"message": "short", "conversation": chat[3:]}).text
    question, reply = message_urls(second)[2:]
    refused = browser.post(f"{question}/edit", data={"message": LONG}, headers=SCRIPTED)
    assert refused.status_code == 400
    assert f'value="leave-out" formaction="{question}/edit"' in refused.text
    assert f'href="#edit-{question[-16:]}"' in refused.text
    assert len(message_urls(browser.get(chat).text)) == 4
    assert browser.post(f"{question}/edit", data={"message": LONG, "full": "leave-out"}).status_code == 200
    assert said(served) == f"user: {LONG}"
    assert browser.post(f"{chat}/bring-back").status_code == 200
    long_prompt = {"system": "s" * 900}
    refused = browser.post(f"{reply}/regenerate", data=long_prompt, headers=SCRIPTED)
    assert (refused.status_code, "This chat is full" in refused.text) == (400, True)
    browser.post(f"{reply}/regenerate", data={**long_prompt, "full": "leave-out"})
    assert said(served) == f"system: {'s' * 900}\nuser: short"


def test_message_that_never_fits_is_refused_with_its_excess_and_loses_nothing(browser: httpx.Client) -> None:
    text = "c" * 3000
    excess = f"Too long by {len('user: ') + 3000 + ROOM - CONTEXT:,} tokens"
    for form in ({"message": text}, {"message": text, "conversation": full_chat(browser), "full": "leave-out"}):
        answer = browser.post("/chat", data=form)
        assert (answer.status_code, f"{excess}." in answer.text) == (400, True)
        assert f"{text}</textarea>" in answer.text
        assert "Leave out the oldest" not in answer.text
    assert "No chat contains" in browser.get("/chats", params={"q": text[:40]}, headers=SCRIPTED).text


def test_longest_reply_is_a_limit_and_never_makes_a_chat_too_long(served: Pages, browser: httpx.Client) -> None:
    assert browser.post("/chat", data={"message": "a", "max_tokens": "5000"}).status_code == 200
    assert served.model.client.asked[-1].params.max_tokens is None
    assert browser.post("/chat", data={"message": "d" * (CONTEXT - 10), "max_tokens": "2"}).status_code == 200


def test_count_says_what_does_not_fit_with_files_text_and_chat_together(browser: httpx.Client) -> None:
    chat = full_chat(browser)
    tray = browser.post("/chats/attach", files={"file": ("notes.txt", b"n" * 400)}, headers=SCRIPTED).text
    file = re.search(r'name="attachment" value="([^"]+)"', tray)
    assert file
    form = {"conversation": chat, "message": "m" * 500}
    assert "data-send" in browser.post("/chats/count", data=form, headers=SCRIPTED).text
    over = browser.post("/chats/count", data={**form, "attachment": file[1]}, headers=SCRIPTED)
    assert over.status_code == 200
    assert "data-send" not in over.text
    assert "This chat is full: " in over.text
    alone = browser.post("/chats/count", data={"message": "m" * 2000, "attachment": file[1]}, headers=SCRIPTED)
    assert "Attach the first" not in alone.text  # no beginning of the file makes room for such a text
    assert "data-send" in browser.post("/chats/count", data={**form, "temperature": "hot"}, headers=SCRIPTED).text


def test_beginning_of_a_file_is_attached_that_just_fits(served: Pages, browser: httpx.Client) -> None:
    """A file that fits beside the message is read whole, and a long system prompt is what it does not fit with."""
    body, said_first = "".join(f"{n} " for n in range(350)), {"message": "sum it up", "system": "s" * 700}
    refused = browser.post("/chat", data=said_first, files={"file": ("n.txt", body.encode())})
    assert refused.status_code == 400
    found = re.search(r'name="attachment" value="([^"]+)"', refused.text)
    offered = re.search(r"Attach the first ([\d,]+) tokens", refused.text)
    assert found
    assert offered
    assert "sum it up</textarea>" in refused.text
    form = {**said_first, "attachment": found[1]}
    cut = browser.post("/chats/attach/first", data=form, headers=SCRIPTED)
    shorter = re.search(r'name="attachment" value="([^"]+)"', cut.text)
    assert shorter
    assert browser.post("/chat", data={**form, "attachment": shorter[1]}).status_code == 200
    prompt = said(served)
    assert body[:500] in prompt
    assert CONTEXT - ROOM - 40 < len(prompt) <= CONTEXT - ROOM
    tray = browser.post("/chats/attach", files={"file": ("n.txt", body.encode())}, headers=SCRIPTED).text
    form["attachment"] = re.findall(r'name="attachment" value="([^"]+)"', tray)[0]
    plain = browser.post("/chats/attach/first", data=form)
    assert (plain.status_code, "sum it up</textarea>" in plain.text) == (200, True)
    assert re.search(r'name="attachment" value="([^"]+)"', plain.text)
    assert "refusal" not in plain.text
    plain = browser.post("/chats/attach/first", data={**form, "attachment": shorter[1]})
    assert (plain.status_code, "no longer on the server" in plain.text) == (400, True)


def test_failed_turn_is_dimmed_and_says_that_it_is_not_sent(served: Pages, browser: httpx.Client) -> None:
    _, page = start_chat(browser, "fail now")
    assert "message--failed" not in page  # it failed behind its first words, which the model reads
    served.model.client.failure = StepFailed("The step failed.", "The runner raised.", "Send it again.")
    chat, page = start_chat(browser, "lost")
    served.model.client.failure = None
    assert page.count("message--failed") == page.count("Not sent to the model") == 1
    assert page.index("The step failed.") < page.index("Not sent to the model")
    browser.post("/chat", data={"message": "next", "conversation": chat[3:]})
    assert said(served) == "user: next"


def test_model_that_loads_first_counts_in_the_reply_and_the_meter_stays(
    served: Pages, browser: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat, come, acquire = full_chat(browser), asyncio.Event(), served.live.manager.acquire

    async def acquire_later(name: str | None = None) -> Any:
        await come.wait()
        return await acquire(name)

    monkeypatch.setattr(claims, "MODEL_WAIT_S", 0.01)
    monkeypatch.setattr(served.live.manager, "acquire", acquire_later)
    turn = browser.post("/chat", data={"message": LONG, "conversation": chat}, headers=SCRIPTED)
    come._loop.call_soon_threadsafe(come.set)  # type: ignore[attr-defined]
    told = listen(browser, stream_url(turn.text))
    for shown in (told, browser.get(f"/c/{chat}").text):
        assert "This chat is full: " in shown
        assert "context--full" in shown
        assert "Not sent to the model" in shown
    monkeypatch.undo()
    question = message_urls(browser.get(f"/c/{chat}").text)[2]
    assert "Leave out the oldest messages" in browser.post(f"{question}/regenerate", headers=SCRIPTED).text


def test_typed_text_waits_in_the_new_chat_while_the_summary_is_written(served: Pages, browser: httpx.Client) -> None:
    chat, _ = start_chat(browser, "a" * 60, system="Be kind.", max_tokens="10")
    said_first = browser.get(f"{message_urls(browser.get(chat).text)[1]}/raw").text
    tray = browser.post("/chats/attach", files={"file": ("notes.txt", b"to keep")}, headers=SCRIPTED).text
    file = re.search(r'name="attachment" value="([^"]+)"', tray)
    assert file
    form = {"message": "my <next> question", "attachment": file[1]}
    answer = browser.post(f"{chat}/summary", data=form, headers=SCRIPTED)
    new = answer.headers["hx-redirect"]
    page = browser.get(new).text
    if 'hx-sse:connect="/c/' in page:
        listen(browser, next(url for url in re.findall(r'hx-sse:connect="(/c/[^"]+)"', page)))
        page = browser.get(new).text
    assert f'Summary of <a class="text-link" href="{chat}"' in page
    assert "40 of 2,048 tokens" in page  # of the new chat, not of the one that was read
    assert "my &lt;next&gt; question</textarea>" in page
    assert file[1] in page
    asked = said(served)
    assert asked.startswith("user: Summarise the conversation below")
    assert asked.endswith(f"User: {'a' * 60}\n\nAssistant: {said_first}")
    assert served.model.client.asked[-1].params.max_tokens == CONTEXT // 4
    browser.post("/chat", data={**form, "conversation": new[3:]})
    prompt = said(served)
    assert prompt.startswith(f"system: Be kind.\nuser: Summary of our conversation so far:\n\n{REPLY.strip()[:40]}")
    assert prompt.endswith("my <next> question")
    assert "to keep" in prompt
    assert "my &lt;next&gt; question</textarea>" not in browser.get(new).text  # it was sent
    summary = message_urls(browser.get(new).text)[0]
    assert f"{summary}/continue" not in browser.get(new).text
    assert browser.post(f"{summary}/continue", headers=SCRIPTED).status_code == 400
    browser.post(f"{summary}/regenerate")
    assert said(served).startswith("user: Summarise the conversation below")
    browser.post(f"{chat}/delete")
    assert browser.post(f"{summary}/regenerate", headers=SCRIPTED).status_code == 404


def test_chat_longer_than_the_context_is_summed_up_in_pieces(served: Pages, browser: httpx.Client) -> None:
    chat, _ = start_chat(browser, "e" * 300)
    browser.post("/chat", data={"message": LONG, "conversation": chat[3:], "full": "leave-out"})
    before = len(served.model.client.asked)
    page = browser.post(f"{chat}/summary", data={"message": "go on"})
    prompts = ["".join(map(chr, each.prompt_token_ids)) for each in served.model.client.asked[before:]]
    assert len(prompts) > 2
    assert max(map(len, prompts)) + CONTEXT // 4 <= CONTEXT
    pieces = [prompt.partition("Conversation:\n")[2] for prompt in prompts]
    assert "".join(pieces).startswith(f"User: {'e' * 300}\n\nAssistant: {REPLY}\n\nUser: {LONG}"[:1000])
    assert all("Summary of our conversation so far:" in prompt for prompt in prompts[1:])
    assert "go on</textarea>" in page.text


def test_wrong_value_opens_the_drawer_at_its_field(browser: httpx.Client) -> None:
    form = {"message": "hi", "temperature": "9999", "system": "Be brief."}
    scripted = browser.post("/chat", data=form, headers=SCRIPTED)
    plain = browser.post("/chat", data=form)
    for page in (scripted.text, plain.text):
        drawer = page[page.index('id="sampling"') :]
        assert drawer.startswith('id="sampling" open')
        field = re.search(r'<input[^>]*name="temperature"[^>]*>', drawer)
        assert field
        assert 'aria-invalid="true" autofocus' in field[0]
        assert 'type="number" min="0" max="100" step="0.1"' in field[0]
        assert "Be brief.</textarea>" in drawer
        assert "· 2 set" in drawer
    assert (scripted.status_code, plain.status_code) == (400, 400)
    assert "hi</textarea>" in plain.text
    for name, value, says in (
        ("schema", "[1]", "The schema of the reply must be a JSON object."),
        ("tools", '[{"name": 3}]', "name"),
        ("thinking", "maybe", "Thinking must be on, off or empty."),
    ):
        answer = browser.post("/chat", data={"message": "hi", name: value}, headers=SCRIPTED)
        assert (answer.status_code, says in answer.text) == (400, True)


def test_behaviour_is_counted_shown_over_the_chat_and_reset(browser: httpx.Client) -> None:
    chat, page = start_chat(browser, "hi", system="Speak like a pirate", temperature="0.7")
    assert "· 2 set" in page
    assert re.search(r'href="/c/[^"]+\?behaviour=1#system"[^>]*><b>System:</b> <span dir="auto">Speak like', page)
    assert '<details class="drawer" id="sampling" open' in browser.get(f"{chat}?behaviour=1").text
    reset = browser.post("/chats/behaviour/reset", data={"message": "typed", "system": "x"})
    assert "Speak" not in reset.text
    assert "typed</textarea>" in reset.text
    assert typed(reset.text, "temperature") == ""
    new = browser.post("/chat", data={"message": "a", "system": "Be kind."}, headers=SCRIPTED).text
    assert 'hx-target="#behaviour-chip"' in new
    assert "Be kind.</span>" in new
    for words in ("Longest reply, tokens", "Above 1: repeats less", "How the model should behave in this chat"):
        assert words in page


def test_meter_beyond_the_context_is_full() -> None:
    drawn = render(ContextMeter(2173, 2048))
    assert "context--full" in drawn
    assert "2,173 of 2,048 tokens" in drawn
    assert re.search(r"106.?%", drawn)
    assert "<meter" not in render(ContextMeter())


def test_model_is_picked_kept_by_its_chat_and_remembered(served: Pages, browser: httpx.Client) -> None:
    other = StubModel(name="second", sampling_defaults={"temperature": 0.3})
    other.client.every_s, other.client.chars = 0.0, 40
    chat, _ = start_chat(browser, "to the first", model="demo")
    entry = served.live.manager.adopt(other)  # type: ignore[arg-type]
    try:
        assert re.search(r'<option value="demo" selected>demo · [\d.]+ MiB</option>', browser.get(chat).text)
        form = {"model": "second", "conversation": chat[3:], "system": "typed"}
        picked = browser.post("/chats/model", data=form, headers=SCRIPTED)
        assert "data-send" in picked.text
        assert 'title="If empty: 0.3, the model&#39;s generation_config"' in picked.text
        assert "typed</textarea>" in picked.text
        assert '<option value="second" selected>' in picked.text
        assert '<option value="second" selected>' in browser.get(chat).text  # kept without a message
        assert '<option value="second" selected>' in browser.get("/").text  # and for the next chat
        browser.post("/chat", data={"message": "back", "model": "demo"})
        assert '<option value="demo" selected>' in browser.get("/").text
        unknown = browser.post("/chats/model", data={"model": "none"}, headers=SCRIPTED)
        assert "The model &#39;none&#39; is not served here." in unknown.text
        assert "data-send" in unknown.text
    finally:
        served.live.manager.entries.remove(entry)
    assert '<option value="demo" selected>' in browser.get("/").text


def test_picked_model_loads_with_its_progress_in_place_of_send(
    served: Pages, browser: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, come = served.live.manager, asyncio.Event()
    acquire = manager.acquire

    async def acquire_later(name: str | None = None) -> Any:
        await come.wait()
        if name == "broken":
            raise DoesNotFit("It does not fit.", "9 GiB needed.", "Take a smaller one.")
        return await acquire(name)

    monkeypatch.setattr(manager, "acquire", acquire_later)
    picked = {
        name: browser.post("/chats/model", data={"model": name}, headers=SCRIPTED).text for name in ("demo", "broken")
    }
    for name, answer in picked.items():
        assert f"Loading {name}" in answer
        assert "data-send" not in answer
    counted = browser.post("/chats/count", data={"model": "demo", "message": "typed meanwhile"}, headers=SCRIPTED)
    assert "Loading demo" in counted.text
    come._loop.call_soon_threadsafe(come.set)  # type: ignore[attr-defined]
    told = {name: listen(browser, html.unescape(stream_url(answer))) for name, answer in picked.items()}
    assert all("data-send" in each for each in told.values())
    assert "9 GiB needed." in told["broken"]
    assert "notice" not in told["demo"]
    wait_until(lambda: all(entry.num_leases == 0 for entry in manager.entries))
    looked = listen(browser, "/live/chat/model?model=never-picked")
    assert ("data-send" in looked, "notice" in looked) == (True, False)  # nothing is loaded by a look


def test_thinking_and_a_schema_reach_the_model(tmp_path: Path) -> None:
    model = fake_model(tmp_path, PacedRunner(), chat_template=CHATML)
    with LiveServer(model, settings(ui=True)) as server, browser_of(server) as browser:
        page = browser.get("/").text
        assert '<select class="composer__model" id="thinking" name="thinking">' in page
        _, page = start_chat(browser, "hi", thinking="off", max_tokens="4")
        assert '<option value="off" selected>Thinking: off</option>' in page
        assert "Thought for" not in page
        schema = (
            '{"type": "object", "properties": {"ok": {"const": 1}}, "required": ["ok"], "additionalProperties": false}'
        )
        page = browser.post("/chat", data={"message": "json", "schema": schema, "thinking": "off"}).text
        raw = browser.get(f"{message_urls(page)[1]}/raw").text
        assert re.fullmatch(r'\s*\{\s*"ok"\s*:\s*1\s*\}\s*', raw)
        bad = {"message": "json", "schema": '{"type": "nonsense"}', "thinking": "off"}
        assert "nonsense" in browser.post("/chat", data=bad).text
