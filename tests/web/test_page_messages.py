"""What is inside a message, over a real socket: reasoning, calls and their results, files."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest

from localllm.engine.client import GenerationRequest
from localllm.engine.params import SamplingParams
from localllm.text.structured import StructuredOutputsParams
from localllm.web.api import documents
from localllm.web.pages.chat.replies import prompt
from tests.text.templates import CHATML
from tests.web.chat_page import SCRIPTED, listen, stream_url
from tests.web.harness import Pages, attach, browser_of, chips, conversation, pdf
from tests.web.live_server import LiveServer, PacedRunner, fake_model, settings

WEATHER = [{"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}]
CALL = (
    "<think>\nThey want the *weather*.\n</think>\n\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
)
pytestmark = pytest.mark.usefixtures("own_data")


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory, own_data: None) -> Iterator[LiveServer]:
    model = fake_model(tmp_path_factory.mktemp("hermes"), PacedRunner(), chat_template=CHATML)
    with LiveServer(model, settings(ui=True)) as server:
        yield server


@pytest.fixture
def browser(hermes: LiveServer) -> Iterator[httpx.Client]:
    with browser_of(hermes) as client:
        yield client


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch, hermes: LiveServer) -> list[str]:
    """What the model was given, as text."""
    return []


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch, hermes: LiveServer, prompts: list[str]) -> Callable[[str], None]:
    """Makes the model answer with a text."""
    assert hermes.model is not None
    tokenizer = hermes.model.tokenizer

    def say(text: str) -> None:
        def saying(name: str, token_ids: Sequence[int], params: SamplingParams, **others: Any) -> GenerationRequest:
            prompts.append(tokenizer.decode(token_ids, skip_special_tokens=False))
            said = replace(params, structured_outputs=StructuredOutputsParams(choice=[text]))
            return GenerationRequest(name, token_ids, said, **others)

        monkeypatch.setattr(prompt, "GenerationRequest", saying)

    return say


def test_reasoning_is_told_from_the_reply(browser: httpx.Client, say: Callable[[str], None]) -> None:
    say("<think>\nFirst I *count*.\n</think>\n\nThe answer is **4**.")
    page = browser.post("/chat", data={"message": "2 + 2?"}).text
    thinking = re.search(r'<details class="thinking" id="[^"]+">(.*?)</details>', page, re.S)
    assert thinking
    assert re.search(r"Thought for .*\d+ tokens", thinking[1])
    assert "<em>count</em>" in thinking[1]
    assert "&lt;think" not in page
    assert "<strong>4</strong>" in page.split("</details>")[-1] or "<strong>4</strong>" in page
    raw = re.findall(r'href="(/c/[^"]+/raw)"', page)[-1]
    assert browser.get(raw).text == "The answer is **4**."


def test_reasoning_streams_open_and_ends_collapsed(browser: httpx.Client, say: Callable[[str], None]) -> None:
    say("<think>\nOne.\n\nTwo.\n</think>\n\nDone.")
    said = listen(browser, stream_url(browser.post("/chat", data={"message": "go"}, headers=SCRIPTED).text))
    final = said[said.rindex('hx-swap="outerMorph"') :]
    assert 'class="thinking"' in final
    assert "aria-busy" not in final
    assert "Thought for" in final


def test_reasoning_and_its_figures_survive_a_reload(browser: httpx.Client, say: Callable[[str], None]) -> None:
    say("<think>\nHm.\n</think>\n\nYes.")
    first = browser.post("/chat", data={"message": "go"})
    again = browser.get(f"/c/{conversation(first.text)}")
    assert "Thought for" in again.text
    assert "Hm." in again.text


def test_a_call_is_a_card_and_its_typed_result_goes_back_as_a_tool_message(
    browser: httpx.Client, say: Callable[[str], None], prompts: list[str]
) -> None:
    say(CALL)
    page = browser.post("/chat", data={"message": "Weather?", "tools": json.dumps(WEATHER)}).text
    assert '"name": "get_weather"' in prompts[0]
    assert re.search(r'<span class="nt">[^<]*city[^<]*</span>', page)
    action = re.search(r'<form class="results" action="([^"]+)"', page)
    assert action
    assert browser.post(action[1], data={"result-0": " "}, headers=SCRIPTED).status_code == 400
    say("It is **21 °C**.")
    page = browser.post(action[1], data={"result-0": "21 °C"}).text
    assert "<strong>21 °C</strong>" in page
    assert "Result of" in page
    assert "<tool_response>\n21 °C\n</tool_response>" in prompts[1]
    assert "They want the *weather*." in prompts[1], "reasoning since the last question is given back"
    assert '"arguments": {"city": "Paris"}' in prompts[1]
    browser.post("/chat", data={"message": "Thanks.", "conversation": conversation(page)})
    assert "<tool_response>\n21 °C\n</tool_response>" in prompts[2]


def test_a_call_of_a_tool_that_was_not_offered_gets_no_result(
    browser: httpx.Client, say: Callable[[str], None], prompts: list[str]
) -> None:
    """The API and the offline API leave it in the text; the page says what it is."""
    say(CALL)
    page = browser.post("/chat", data={"message": "Weather?"}).text
    assert "which this chat does not offer" in page
    assert 'class="results"' not in page
    browser.post("/chat", data={"message": "Go on.", "conversation": conversation(page)})
    assert "<tool_response>" not in prompts[1]


def test_a_call_without_result_stays_answerable(
    browser: httpx.Client, say: Callable[[str], None], prompts: list[str]
) -> None:
    say(CALL)
    page = browser.post("/chat", data={"message": "Weather?", "tools": json.dumps(WEATHER)}).text
    assert 'aria-label="Call to get_weather"' in page
    browser.post("/chat", data={"message": "Never mind.", "conversation": conversation(page)})
    assert "<tool_response>\nNo result was given.\n</tool_response>" in prompts[1]


def test_what_is_no_call_stays_text(browser: httpx.Client, say: Callable[[str], None]) -> None:
    say('<tool_call>\n{"name": "get_weather", "arguments": {"city": \n</tool_call><script>x</script>')
    page = browser.post("/chat", data={"message": "Weather?"}).text
    assert "<script>x" not in page


@pytest.mark.parametrize(
    ("tools", "says"),
    [
        ("{", "not JSON"),
        ("{}", "It is an object, not a list"),
        ("3", "It is not a list"),
        ("[3]", "tools[0] is not an object"),
        ('[{"name": 3}]', "tools[0].function.name"),
        ('[{"name": "f", "parameters": []}]', "tools[0].function.parameters"),
        ('[{"name": "f"}, {"name": "f"}]', "Two tools have the name"),
        ('[{"type": "web_search", "function": {}}]', "Supported: functions"),
        ("[" * 60_000, "not JSON"),
        (" " * 10 + "[" + "1," * 40_000 + "1]", "too long"),
    ],
)
def test_bad_tools_are_refused_in_words(browser: httpx.Client, tools: str, says: str) -> None:
    answer = browser.post("/chat", data={"message": "x", "tools": tools}, headers=SCRIPTED)
    assert answer.status_code in (400, 413)
    assert says in answer.text.replace("&#39;", "'")


def test_a_model_without_tools_says_so(served: Pages) -> None:
    served.model.chat_template.reads = lambda name: False  # type: ignore[attr-defined]
    with served.browser() as browser:
        page = browser.post("/chat", data={"message": "x", "tools": json.dumps(WEATHER)}).text
    assert "demo cannot call tools." in page


# Files -------------------------------------------------------------------------------------------------------------


def test_files_are_counted_in_tokens_and_go_with_the_message(served: Pages) -> None:
    with served.browser() as browser:
        first = attach(browser, ("notes.py", b"x = 1\r\n"), ("a `b`.md", "```\nä\n```".encode())).text
        ids = chips(first)
        assert len(ids) == 2
        assert "tokens" in first
        more = attach(browser, ("c.txt", b"gone"), ids=ids).text
        assert len(chips(more)) == 3
        kept = browser.post(f"/chats/attach?detach={chips(more)[2]}", data={"attachment": chips(more)}).text
        assert chips(kept) == ids
        page = browser.post("/chat", data={"message": "What is it?", "attachment": ids}).text
        said = "".join(map(chr, served.model.client.asked[-1].prompt_token_ids))
        assert (
            "File `notes.py`:\n\n```py\nx = 1\n```\n\nFile `a b.md`:\n\n````md\n```\nä\n```\n````\n\nWhat is it?"
            in said
        )
        assert '<span class="file__name" dir="auto">notes.py</span>' in page
        again = browser.post("/chat", data={"message": "x", "attachment": ids}, headers=SCRIPTED)
        assert "no longer on the server" in again.text, "a sent file is not kept for another message"


def test_without_scripts_a_file_comes_with_the_message_even_alone(served: Pages) -> None:
    with served.browser() as browser:
        page = browser.post("/chat", data={"message": ""}, files={"file": ("plan.md", b"# Plan")})
        assert page.status_code == 200
        assert "<title>plan.md" in page.text
        assert "# Plan" in "".join(map(chr, served.model.client.asked[-1].prompt_token_ids))


@pytest.mark.parametrize(
    ("name", "body", "says"),
    [
        ("cat.png", b"\x89PNG\r\n\x1a\n", "cat.png is a picture, and demo does not see pictures."),
        ("cat.webp", b"anything", "is an image"),
        ("a.out", b"\x7fELF\x00\x00", "is not text"),
        ("latin.txt", "käse".encode("latin-1"), "is not text in UTF-8"),
        ("zero.txt", b"", "is empty"),
        ("big.txt", b"x" * (20 * 1024**2 + 1), "at most 20.0 MiB"),
        ("bad.pdf", b"%PDF-1.7 nothing", "is damaged, or it is not a PDF"),
        ("../../<b>`x`\n.txt", b"\x00", "bx.txt is not text"),
    ],
)
def test_what_is_no_text_is_refused_by_name(served: Pages, name: str, body: bytes, says: str) -> None:
    pytest.importorskip("pypdf")
    with served.browser() as browser:
        answer = attach(browser, ("fine.txt", b"fine"), (name, body))
        assert says in answer.text
        assert len(chips(answer.text)) == 1, "the file beside it stays"
        assert browser.post("/chat", data={"message": "x"}, files={"file": (name, body)}).status_code in (400, 413)


def test_more_than_ten_files_are_refused(served: Pages) -> None:
    with served.browser() as browser:
        answer = attach(browser, *[(f"{n}.txt", b"x") for n in range(11)])
        assert "too many" in answer.text
        assert len(chips(answer.text)) == 10


def test_a_pdf_is_read_as_text(served: Pages) -> None:
    with served.browser() as browser:
        answer = attach(browser, ("paper.pdf", pdf("Attention is all")))
        assert "notice" not in answer.text
        browser.post("/chat", data={"message": "x", "attachment": chips(answer.text)})
    assert "Attention is all" in "".join(map(chr, served.model.client.asked[-1].prompt_token_ids))


def test_a_pdf_with_too_many_pages_or_none_with_text_is_refused(served: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    with served.browser() as browser:
        assert "contains no text" in attach(browser, ("scan.pdf", pdf(""))).text
        monkeypatch.setattr(documents, "MAX_PDF_PAGES", 0)
        assert "too many pages" in attach(browser, ("long.pdf", pdf("x"))).text
        monkeypatch.setitem(__import__("sys").modules, "pypdf", None)
        assert "pip install" in attach(browser, ("a.pdf", pdf_bytes)).text


pdf_bytes = b"%PDF-1.7"
