"""Long files over a real socket: searched, with their passages in the prompt and under the answer."""

import re
import socket
from collections.abc import Iterator, Sequence
from dataclasses import replace

import httpx
import psutil
import pytest

from localllm.config.settings import MAX_UPLOAD_BYTES
from localllm.engine.pooling_client import Answers
from tests.web.chat_page import SCRIPTED
from tests.web.harness import FACTS, FILLER, attach, book, browser_of, chips, conversation, pdf_of
from tests.web.live_server import LiveServer, settings
from tests.web.pages_stub import StubModel, stub_plan, stub_spec


@pytest.fixture(scope="module")
def model() -> StubModel:
    """A model whose context holds some passages: its tokens are characters."""
    stub = StubModel(plan=replace(stub_plan(), max_model_len=16_384))
    stub.client.every_s, stub.client.chars = 0.0, 40
    return stub


@pytest.fixture(scope="module")
def server(model: StubModel, own_data: None) -> Iterator[LiveServer]:
    with LiveServer(model, settings(ui=True)) as live:  # type: ignore[arg-type]
        yield live


@pytest.fixture
def browser(server: LiveServer) -> Iterator[httpx.Client]:
    with browser_of(server) as client:
        yield client


def prompt(model: StubModel) -> str:
    return "".join(map(chr, model.client.asked[-1].prompt_token_ids))


def ask(browser: httpx.Client, message: str, page: str = "", **fields: object) -> str:
    data = {"message": message, "conversation": conversation(page) if page else "", **fields}
    answer = browser.post("/chat", data=data)
    assert answer.status_code == 200, re.findall(r'class="notice__.*', answer.text)
    return answer.text


def sources(page: str) -> list[str]:
    """The titles of the lists of passages on a page."""
    return re.findall(r'<summary class="sources__head">([^<]*)</summary>', page)


def test_a_long_file_is_searched_for_each_message(browser: httpx.Client, model: StubModel) -> None:
    answer = attach(browser, ("book.txt", book().encode()), ("short.txt", b"A short file."))
    assert "search in it" in answer.text
    assert "too many" not in answer.text
    assert re.search(r"attachments__sum\">\d+ of 16,384", answer.text), "only the short file counts"
    fact, asked = FACTS[7]
    page = ask(browser, asked, attachment=chips(answer.text))
    assert fact in prompt(model)
    assert "A short file." in prompt(model)
    assert len(prompt(model)) < 16_384 / 2
    assert asked in prompt(model)
    (title,) = sources(page)
    assert re.fullmatch(r"From book\.txt, line.*", title)
    assert fact in page

    page = ask(browser, FACTS[12][1], page)
    assert FACTS[12][0] in prompt(model)
    assert fact not in prompt(model), "the passages of an earlier question are not read again"
    assert sources(page)[0] == title
    assert len(sources(page)) == 2
    page = ask(browser, "And in Estrel?", page)
    assert FACTS[6][0] in prompt(model), "a short question is searched with the one before it"
    assert sources(browser.get(f"/c/{conversation(page)}").text) == sources(page), "they are stored"

    before = prompt(model)
    regenerate = re.findall(r'action="(/c/[^"]+/regenerate)"', page)[-1]
    browser.post(regenerate, data={}, headers=SCRIPTED)
    assert prompt(model) == before


def test_a_continued_reply_reads_the_same_passages(browser: httpx.Client, model: StubModel) -> None:
    ids = chips(attach(browser, ("book.txt", book().encode())).text)
    page = ask(browser, FACTS[3][1], attachment=ids, max_tokens="3")
    before = prompt(model)
    url = re.findall(r'formaction="(/c/[^"]+/continue)"', page)[-1]
    page = browser.post(url, data={"max_tokens": ""}).text
    assert FACTS[3][0] in before
    assert before.partition(FACTS[3][1])[0] in prompt(model)
    assert len(sources(page)) == 1


def test_a_question_without_words_of_the_file_gets_samples_and_says_so(browser: httpx.Client, model: StubModel) -> None:
    ids = chips(attach(browser, ("book.txt", book().encode())).text)
    page = ask(browser, "Summarise it, please.", attachment=ids)
    assert FILLER[:40] in prompt(model)
    assert "No passage has the words of the question" in page


def test_a_chat_without_room_for_passages_says_so_and_goes_on(browser: httpx.Client, model: StubModel) -> None:
    ids = chips(attach(browser, ("book.txt", book().encode())).text)
    page = ask(browser, "violin " * 2_200, attachment=ids)
    assert "no passage of its files fits" in page
    assert "Passages of the attached" not in prompt(model)
    assert page.count('class="figures"') == 1


def test_passages_of_a_pdf_are_named_by_their_page(browser: httpx.Client, model: StubModel) -> None:
    pages = [f"Page {number} is about nothing. " * 40 for number in range(1, 40)]
    pages[16] = "The melting point of zorbium is 412 degrees."
    answer = attach(browser, ("paper.pdf", pdf_of(pages)))
    assert "search in it" in answer.text
    page = ask(browser, "What is the melting point of zorbium?", attachment=chips(answer.text))
    assert sources(page)[0].startswith("From paper.pdf, p. ")
    assert re.search(r"p\. 17\b", sources(page)[0])
    assert "paper.pdf, p. 17:" in prompt(model)


def test_hostile_text_of_a_file_stays_text_on_the_page_and_in_its_fence(
    browser: httpx.Client, model: StubModel
) -> None:
    text = "<script>evil()</script> ``` zorbium ```` </details>\n\n" + FILLER * 80
    ids = chips(attach(browser, ("<b>x.txt", text.encode())).text)
    page = ask(browser, "zorbium?", attachment=ids)
    assert "<script>evil" not in page
    assert "&lt;script&gt;evil()&lt;/script&gt;" in page
    assert "`````\n<script>evil()" in prompt(model)


def test_an_edited_question_searches_the_same_file(browser: httpx.Client, model: StubModel) -> None:
    ids = chips(attach(browser, ("book.txt", book().encode())).text)
    page = ask(browser, FACTS[0][1], attachment=ids)
    url = re.findall(r'href="(/c/[^"]+)/edit"', page)[0]
    page = browser.post(f"{url}/edit", data={"message": FACTS[20][1]}).text
    assert FACTS[20][0] in prompt(model)
    assert len(sources(page)) == 1


class Concepts:
    """An embedding model that knows which words mean the same; it counts what it was asked to embed."""

    def __init__(self) -> None:
        self.prompts = {"query": "query: ", "document": ""}
        self.words = ({"car", "automobile"}, {"colour", "scarlet"}, {"ship", "vessel"})
        self.texts: list[str] = []

    async def embed(self, texts: Sequence[str], *, truncate: int | None, prompt: str) -> Answers:
        assert truncate == -1
        self.texts += [prompt + text for text in texts]
        found = [set(re.findall(r"\w+", text.lower())) for text in texts]
        return Answers([[float(bool(words & group)) for group in self.words] + [0.01] for words in found], 1)


def test_a_loaded_embedding_model_finds_what_is_meant_and_none_is_loaded_for_it(
    browser: httpx.Client, model: StubModel, server: LiveServer
) -> None:
    fact = "Her car was scarlet."
    text = "\n\n".join([*[f"The automobile number {n} was sold. {FILLER}" for n in range(60)], fact + FILLER])
    asked = "Which automobile had which colour?"
    ids = chips(attach(browser, ("cars.txt", text.encode())).text)
    ask(browser, asked, attachment=ids)
    assert fact not in prompt(model), "by words alone the others are nearer"
    concepts = Concepts()
    other = StubModel(name="concepts", spec=replace(stub_spec(), task="embed"))
    other.pooler = concepts  # type: ignore[attr-defined]
    entry = server.manager.adopt(other)  # type: ignore[arg-type]
    try:
        ids = chips(attach(browser, ("cars.txt", text.encode()), model="demo").text)
        page = ask(browser, asked, attachment=ids, model="demo")
        assert fact in prompt(model)
        assert concepts.texts.count("query: " + asked) == 1
        passages = len(concepts.texts)
        ask(browser, asked, page, model="demo")
        assert len(concepts.texts) == passages + 1, "the passages are not embedded again"
    finally:
        server.manager.entries.remove(entry)
    ask(browser, asked, page, model="demo")
    assert len(concepts.texts) == passages + 1


def test_a_file_of_two_hundred_megabytes_is_refused_before_it_is_sent(server: LiveServer) -> None:
    host, _, port = server.url.removeprefix("http://").partition(":")
    head = (
        f"POST /chats/attach HTTP/1.1\r\nhost: {host}:{port}\r\nhx-request: true\r\ncontent-length: 200000000\r\n"
        "content-type: multipart/form-data; boundary=x\r\n\r\n"
    )
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(head.encode())
        answer = connection.recv(65536).decode()
        while "</div>" not in answer:
            answer += connection.recv(65536).decode()
    assert answer.startswith("HTTP/1.1 413")
    assert "The file is too large." in answer
    assert "The limit is 64.0 MiB." in answer


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Litestar leaves its file to the GC
def test_an_upload_of_unknown_length_is_refused_in_bounded_memory(browser: httpx.Client) -> None:
    process, before = psutil.Process(), psutil.Process().memory_info().rss
    most = [0]
    head = b'--x\r\ncontent-disposition: form-data; name="file"; filename="a.txt"\r\n\r\n'

    def body() -> Iterator[bytes]:
        yield head
        for _ in range(MAX_UPLOAD_BYTES // 2**20 + 8):
            most[0] = max(most[0], process.memory_info().rss)
            yield b"x" * 2**20

    headers = {"content-type": "multipart/form-data; boundary=x", **SCRIPTED}
    answer = browser.post("/chats/attach", content=body(), headers=headers)
    assert answer.status_code == 413
    assert "The file is too large." in answer.text
    assert "64.0 MiB" in answer.text
    assert most[0] - before < MAX_UPLOAD_BYTES // 2
