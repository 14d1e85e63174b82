"""The composer over a real socket: a full chat and its ways on, the drawer, the model, thinking, a schema."""

import re
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from localllm.errors import RanksLost, StepFailed
from localllm.web.pages.chat.composer.views import ContextMeter
from localllm.web.pages.chat.replies import claims
from localllm.web.pages.frame.render import render
from tests.text.templates import CHATML
from tests.web.chat_page import (
    SCRIPTED,
    ChatPage,
    assert_refused,
    listen,
    parse,
    stream_url,
    stream_urls,
)
from tests.web.harness import Pages, browser_of, chips, said
from tests.web.live_server import LiveServer, PacedRunner, fake_model, settings, wait_until
from tests.web.pages_stub import CONTEXT, REPLY, StubModel

ROOM = CONTEXT // 8
LONG = "b" * 700
"""Fits alone, and does not fit behind a message of 300 characters and its reply."""


pytestmark = pytest.mark.usefixtures("own_data")


@pytest.fixture
def full(chat: ChatPage) -> ChatPage:
    """A chat that has no room for `LONG`."""
    return chat.send("a" * 300)


def attach(chat: ChatPage, name: str, body: bytes) -> str:
    """Attach a file in the composer; return its id."""
    page = ChatPage(chat.browser)
    page.post("/chats/attach", files={"file": (name, body)}, scripted=True)
    return page.field("attachment")


def left_out(chat: ChatPage) -> list[bool]:
    return [message.node.has("class_", "message--left-out") for message in chat.messages]


def test_full_chat_is_told_before_anything_is_stored_and_offers_three_ways(served: Pages, full: ChatPage) -> None:
    asked = len(served.model.client.asked)
    answer = full.try_to_send(LONG, scripted=True)
    needs = len(f"user: {'a' * 300}\nassistant: {REPLY}\nuser: {LONG}")
    assert_refused(
        answer, 400,
        f"This chat is full: {needs + ROOM:,} of 2,048 tokens.",
        f"Its messages need {needs:,}, and 256 are kept free for the reply of demo.",
        "Leave out the oldest messages", "Go on in a new chat with a summary", "Edit the message",
        f"Too long by {needs + ROOM - CONTEXT:,} tokens",  # in place of Send
        'hx-target="#composer-error" hx-swap="innerHTML"></hx-partial>',
    )  # fmt: skip
    assert f"{(needs + ROOM) / CONTEXT:.0%}" in answer.text.replace(" %", "%").replace("\u202f%", "%")
    assert "--max-model-len" not in answer.text
    assert [message.text for message in full.get().messages if not message.is_reply] == ["a" * 300]
    assert len(served.model.client.asked) == asked
    assert_refused(full.try_to_send(LONG), 400, f"{LONG}</textarea>", "Leave out the oldest messages")


@pytest.mark.parametrize("scripted", [True, False])
def test_oldest_messages_are_left_out_and_brought_back(served: Pages, full: ChatPage, scripted: bool) -> None:
    full.send(LONG, full="leave-out", scripted=scripted)
    if scripted:
        assert 'hx-target="#messages" hx-swap="innerMorph"' in full.html
        full.listen()
    assert said(served) == f"user: {LONG}"
    assert left_out(full.get()) == [True, True, False, False]
    text = full.tree.text
    assert text.index("a" * 300) < text.index("Not sent to the model any more") < text.index(LONG)
    full.send("more")  # remembered
    assert said(served).startswith(f"user: {LONG}\nassistant: ")
    assert sum(left_out(full)) == 2
    full.post(f"{full.path}/bring-back", scripted=scripted)
    assert not any(left_out(full))
    assert not full.shows("Not sent to the model any more")
    assert_refused(full.try_to_send("more", scripted=True), 400, "This chat is full")


def test_no_more_is_left_out_than_makes_room_for_the_next_messages(served: Pages, chat: ChatPage) -> None:
    for text in ("first", "second", "third", "fourth", "fifth"):
        chat.send(text, max_tokens="10")
    assert chat.try_to_send(LONG, max_tokens="").status_code == 400
    chat.send(LONG, max_tokens="", full="leave-out")
    prompt = said(served)
    assert 1 < prompt.count("user: ") < 6
    assert len(prompt) <= 0.75 * CONTEXT
    assert len(prompt) + len("user: fourth\nassistant: \n") + 200 > 0.75 * CONTEXT  # one turn more does not fit
    assert prompt.startswith("user: ")


def test_full_chat_is_told_where_a_message_is_edited_or_answered_again(served: Pages, full: ChatPage) -> None:
    question, reply = full.send("short").messages[2:]
    assert_refused(
        question.do("edit", message=LONG, scripted=True), 400,
        f'value="leave-out" formaction="{question.url}/edit"', f'href="#edit-{question.id}"',
    )  # fmt: skip
    assert len(full.get().messages) == 4
    assert question.do("edit", message=LONG, full="leave-out").status_code == 200
    assert said(served) == f"user: {LONG}"
    assert full.post(f"{full.path}/bring-back").status_code == 200
    long_prompt = {"system": "s" * 900}
    assert_refused(reply.do("regenerate", scripted=True, **long_prompt), 400, "This chat is full")
    reply.do("regenerate", **long_prompt, full="leave-out")
    assert said(served) == f"system: {'s' * 900}\nuser: short"


def test_message_that_never_fits_is_refused_with_its_excess_and_loses_nothing(full: ChatPage) -> None:
    text = "c" * 3000
    excess = f"Too long by {len('user: ') + 3000 + ROOM - CONTEXT:,} tokens."
    for answer in (ChatPage(full.browser).try_to_send(text), full.try_to_send(text, full="leave-out")):
        assert_refused(answer, 400, excess, f"{text}</textarea>")
        assert "Leave out the oldest" not in answer.text
    assert "No chat contains" in full.browser.get("/chats", params={"q": text[:40]}, headers=SCRIPTED).text


def test_longest_reply_is_a_limit_and_never_makes_a_chat_too_long(served: Pages, browser: httpx.Client) -> None:
    ChatPage(browser).send("a", max_tokens="5000")
    assert served.model.client.asked[-1].params.max_tokens is None
    ChatPage(browser).send("d" * (CONTEXT - 10), max_tokens="2")


def test_count_says_what_does_not_fit_with_files_text_and_chat_together(full: ChatPage) -> None:
    file = attach(full, "notes.txt", b"n" * 400)

    def counted(**form: str) -> str:
        answer = full.browser.post("/chats/count", data=form, headers=SCRIPTED)
        assert answer.status_code == 200
        return answer.text

    form = {"conversation": full.id, "message": "m" * 500}
    assert "data-send" in counted(**form)
    over = counted(**form, attachment=file)
    assert ("data-send" in over, "This chat is full: " in over) == (False, True)
    alone = counted(message="m" * 2000, attachment=file)
    assert "Attach the first" not in alone  # no beginning of the file makes room for such a text
    assert "data-send" in counted(**form, temperature="hot")


def test_beginning_of_a_file_is_attached_that_just_fits(served: Pages, chat: ChatPage) -> None:
    """A file that fits beside the message is read whole, and a long system prompt is what it does not fit with."""
    body, said_first = "".join(f"{n} " for n in range(350)), {"message": "sum it up", "system": "s" * 700}
    refused = chat.post("/chat", **said_first, files={"file": ("n.txt", body.encode())})
    assert_refused(refused, 400, "sum it up</textarea>")
    assert re.search(r"Attach the first [\d,]+ tokens", refused.text)
    (found,) = chips(refused.text)
    chat.post("/chats/attach/first", **said_first, attachment=found, scripted=True)
    shorter = chat.field("attachment")
    assert chat.post("/chat", **said_first, attachment=shorter).status_code == 200
    prompt = said(served)
    assert body[:500] in prompt
    assert CONTEXT - ROOM - 40 < len(prompt) <= CONTEXT - ROOM
    chat.post("/chats/attach/first", **said_first, attachment=attach(chat, "n.txt", body.encode()))
    assert chat.field("message") == "sum it up"
    assert chat.field("attachment")
    assert "refusal" not in chat.html
    gone = chat.post("/chats/attach/first", **said_first, attachment=shorter)
    assert_refused(gone, 400, "no longer on the server")


def test_failed_turn_is_dimmed_and_says_that_it_is_not_sent(served: Pages, browser: httpx.Client) -> None:
    begun = ChatPage(browser).send("fail now")
    assert not begun.shows("Not sent to the model")  # it failed behind its first words, which the model reads
    served.model.client.failure = StepFailed("The step failed.", "The runner raised.", "Send it again.")
    chat = ChatPage(browser).send("lost")
    served.model.client.failure = None
    assert chat.html.count("message--failed") == chat.html.count("Not sent to the model") == 1
    text = chat.reply.node.text
    assert text.index("The step failed.") < text.index("Not sent to the model")
    chat.send("next")
    assert said(served) == "user: next"


def test_model_that_loads_first_counts_in_the_reply_and_the_meter_stays(
    full: ChatPage, late_models: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "MODEL_WAIT_S", 0.01)
    full.send(LONG, scripted=True)
    late_models()
    told = full.listen()
    for shown in (told, full.get().html):
        assert "This chat is full: " in shown
        assert "context--full" in shown
        assert "Not sent to the model" in shown
    monkeypatch.undo()
    assert "Leave out the oldest messages" in full.question.do("regenerate", scripted=True).text


def test_a_model_whose_engine_ended_is_asked_again_and_one_that_never_loaded_says_why(
    served: Pages, chat: ChatPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that waited would wait for ever: an engine that ends soon after its load is loaded for a message only."""
    chat.send("hello")
    entry = served.live.manager.register.default
    assert entry is not None
    monkeypatch.setattr(entry, "error", RanksLost("Rank 1 (cpu) died.", "Its process was ended by SIGKILL."))
    monkeypatch.setattr(entry, "state", "failed")
    for path in ("/", chat.path):
        page = chat.browser.get(path).text
        assert 'id="composer-message"' in page
        assert "Rank 1 (cpu) died." in page
        assert 'id="loading"' not in page
        assert "loading=1" not in page, "nothing would tell it to reload"
    assert 'id="loading"' not in chat.browser.get("/playground").text
    monkeypatch.setattr(entry, "card", None)
    page = chat.browser.get("/").text
    assert "could not be loaded" in page
    assert 'id="composer-message"' not in page


def test_typed_text_waits_in_the_new_chat_while_the_summary_is_written(served: Pages, chat: ChatPage) -> None:
    old = chat.send("a" * 60, system="Be kind.", max_tokens="10").path
    said_first = chat.reply.raw
    form = {"message": "my <next> question", "attachment": attach(chat, "notes.txt", b"to keep")}
    chat.post(f"{old}/summary", **form, scripted=True)
    for url in stream_urls(chat.get().html):
        if url.startswith("/c/"):
            listen(chat.browser, url)
    chat.get()
    assert chat.path != old
    assert f'Summary of <a class="text-link" href="{old}"' in chat.html
    assert chat.shows("40 of 2,048 tokens")  # of the new chat, not of the one that was read
    assert (chat.field("message"), chat.field("attachment")) == (form["message"], form["attachment"])
    asked = said(served)
    assert asked.startswith("user: Summarise the conversation below")
    assert asked.endswith(f"User: {'a' * 60}\n\nAssistant: {said_first}")
    assert served.model.client.asked[-1].params.max_tokens == CONTEXT // 4
    chat.post("/chat", **form, conversation=chat.id)
    prompt = said(served)
    assert prompt.startswith(f"system: Be kind.\nuser: Summary of our conversation so far:\n\n{REPLY.strip()[:40]}")
    assert prompt.endswith("my <next> question")
    assert "to keep" in prompt
    assert chat.get().field("message") == ""  # it was sent
    summary = chat.messages[0]
    assert "continue" not in summary.offers
    assert summary.do("continue", scripted=True).status_code == 400
    summary.do("regenerate")
    assert said(served).startswith("user: Summarise the conversation below")
    chat.browser.post(f"{old}/delete")
    assert summary.do("regenerate", scripted=True).status_code == 404


def test_chat_longer_than_the_context_is_summed_up_in_pieces(served: Pages, chat: ChatPage) -> None:
    chat.send("e" * 300).send(LONG, full="leave-out")
    before = len(served.model.client.asked)
    chat.post(f"{chat.path}/summary", message="go on")
    prompts = ["".join(map(chr, each.prompt_token_ids)) for each in served.model.client.asked[before:]]
    assert len(prompts) > 2
    assert max(map(len, prompts)) + CONTEXT // 4 <= CONTEXT
    pieces = [prompt.partition("Conversation:\n")[2] for prompt in prompts]
    assert "".join(pieces).startswith(f"User: {'e' * 300}\n\nAssistant: {REPLY}\n\nUser: {LONG}"[:1000])
    assert all("Summary of our conversation so far:" in prompt for prompt in prompts[1:])
    assert chat.field("message") == "go on"


@pytest.mark.parametrize("scripted", [True, False])
def test_wrong_value_opens_the_drawer_at_its_field(chat: ChatPage, scripted: bool) -> None:
    answer = chat.try_to_send("hi", temperature="9999", system="Be brief.", scripted=scripted)
    assert answer.status_code == 400
    page = parse(answer.text)
    drawer = page.first("details", id="sampling")
    assert "open" in drawer.attrs
    field = drawer.first("input", name="temperature").attrs
    assert {
        "aria-invalid": "true",
        "autofocus": "",
        "type": "number",
        "min": "0",
        "max": "100",
        "step": "0.1",
    }.items() <= field.items()
    assert drawer.first("textarea", name="system").text == "Be brief."
    assert "· 2 set" in drawer.text
    assert scripted or page.first("textarea", name="message").text == "hi"


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("schema", "[1]", "The schema of the reply must be a JSON object."),
        ("tools", '[{"name": 3}]', "name"),
        ("thinking", "maybe", "Thinking must be on, off or empty."),
    ],
)
def test_wrong_settings_are_refused_in_words(chat: ChatPage, name: str, value: str, says: str) -> None:
    assert_refused(chat.try_to_send("hi", scripted=True, **{name: value}), 400, says)


def test_behaviour_is_counted_shown_over_the_chat_and_reset(chat: ChatPage) -> None:
    chat.send("hi", system="Speak like a pirate", temperature="0.7")
    assert chat.shows("· 2 set")
    chip = chat.tree.first("a", href=f"{chat.path}?behaviour=1#system")
    assert chip.text.startswith("System: Speak like")
    for words in ("Longest reply, tokens", "Above 1: repeats less", "How the model should behave in this chat"):
        assert words in chat.html
    assert "open" in chat.get(f"{chat.path}?behaviour=1").tree.first("details", id="sampling").attrs
    chat.post("/chats/behaviour/reset", message="typed", system="x")
    assert [chat.field(name) for name in ("system", "message", "temperature")] == ["", "typed", ""]
    new = ChatPage(chat.browser).send("a", system="Be kind.", scripted=True)
    assert 'hx-target="#behaviour-chip"' in new.html
    assert new.shows("System: Be kind.")


def test_meter_beyond_the_context_is_full() -> None:
    drawn = render(ContextMeter(2173, 2048))
    assert "context--full" in drawn
    assert "2,173 of 2,048 tokens" in drawn
    assert re.search(r"106.?%", drawn)
    assert "<meter" not in render(ContextMeter())


def test_model_is_picked_kept_by_its_chat_and_remembered(
    served: Pages, browser: httpx.Client, chat: ChatPage, second: StubModel
) -> None:
    chat.send("to the first", model="demo")
    (choice,) = chat.get().tree.first("select", name="model").all("option", selected="")
    assert re.fullmatch(r"demo · [\d.]+ MiB", choice.text)
    picked = ChatPage(browser)
    picked.post("/chats/model", model="second", conversation=chat.id, system="typed", scripted=True)
    assert "data-send" in picked.html
    assert 'title="If empty: 0.3, the model&#39;s generation_config"' in picked.html
    assert (picked.field("system"), picked.field("model")) == ("typed", "second")
    assert chat.get().field("model") == "second"  # kept without a message
    assert picked.get("/").field("model") == "second"  # and for the next chat
    ChatPage(browser).send("back", model="demo")
    assert picked.get("/").field("model") == "demo"
    unknown = browser.post("/chats/model", data={"model": "none"}, headers=SCRIPTED)
    assert "The model &#39;none&#39; is not served here." in unknown.text
    assert "data-send" in unknown.text
    served.live.manager.entries.remove(next(e for e in served.live.manager.entries if e.name == "second"))
    assert picked.get("/").field("model") == "demo"


def test_picked_model_loads_with_its_progress_in_place_of_send(
    served: Pages, browser: httpx.Client, late_models: Callable[[], None]
) -> None:
    picked = {
        name: browser.post("/chats/model", data={"model": name}, headers=SCRIPTED).text for name in ("demo", "broken")
    }
    for name, answer in picked.items():
        assert f"Loading {name}" in answer
        assert "data-send" not in answer
    counted = browser.post("/chats/count", data={"model": "demo", "message": "typed meanwhile"}, headers=SCRIPTED)
    assert "Loading demo" in counted.text
    late_models()
    told = {name: listen(browser, stream_url(answer)) for name, answer in picked.items()}
    assert all("data-send" in each for each in told.values())
    assert "9 GiB needed." in told["broken"]
    assert "notice" not in told["demo"]
    wait_until(lambda: all(entry.num_leases == 0 for entry in served.live.manager.entries))
    looked = listen(browser, "/live/chat/model?model=never-picked")
    assert ("data-send" in looked, "notice" in looked) == (True, False)  # nothing is loaded by a look


def test_thinking_and_a_schema_reach_the_model(tmp_path: Path) -> None:
    model = fake_model(tmp_path, PacedRunner(), chat_template=CHATML)
    with LiveServer(model, settings(ui=True)) as server, browser_of(server) as browser:
        chat = ChatPage(browser).get()
        assert chat.tree.all("select", name="thinking")
        chat.send("hi", thinking="off", max_tokens="4")
        assert chat.field("thinking") == "off"
        assert "Thought for" not in chat.html
        schema = (
            '{"type": "object", "properties": {"ok": {"const": 1}}, "required": ["ok"], "additionalProperties": false}'
        )
        raw = ChatPage(browser).send("json", schema=schema, thinking="off").reply.raw
        assert re.fullmatch(r'\s*\{\s*"ok"\s*:\s*1\s*\}\s*', raw)
        bad = ChatPage(browser).try_to_send("json", schema='{"type": "nonsense"}', thinking="off")
        assert "nonsense" in bad.text
