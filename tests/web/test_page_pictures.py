"""Pictures on the chat page: attached, priced, sent, kept, shown, exported, imported and deleted."""

from __future__ import annotations

import asyncio
import io
import json
import re
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest
from PIL import Image

from localllm.engine.step import RunnerStats
from localllm.web.pages.chat.files import pictures
from localllm.web.pages.chat.files.pictures import picture_of
from localllm.web.pages.chat.state import chat_state_of
from localllm.web.pages.chat.store import Chats
from tests.media.pictures import picture, saved, sight
from tests.web.harness import Pages, attach, pdf, start_chat
from tests.web.pages_stub import PICTURE, StubModel

PNG = picture(size=(30, 20))
JPEG = picture("JPEG", (400, 200))
DIGEST = r"/chats/pictures/([0-9a-f]{32})"


@pytest.fixture(autouse=True)
def seeing(served: Pages) -> Iterator[StubModel]:
    served.model.sight = sight(ord(PICTURE), mark=PICTURE)
    yield served.model
    served.model.sight = None


def ids_of(html: str) -> list[str]:
    return re.findall(r'name="attachment" value="([^"]+)"', html)


def scans(*colours: str, text: str = "") -> bytes:
    """A PDF: a page of text, then for each colour a page with one picture, which is white but for its middle."""
    from pypdf import PdfWriter

    writer = PdfWriter()
    if text:
        writer.append(io.BytesIO(pdf(text)))
    for colour in colours:
        page = Image.new("RGB", (200, 100), "white")
        page.paste(colour, (50, 25, 150, 75))
        writer.append(io.BytesIO(saved(page, "PDF", resolution=72)))
    stream = io.BytesIO()
    writer.write(stream)
    return stream.getvalue()


def asked(served: Pages) -> tuple[str, int]:
    """The last prompt as text, and its pictures."""
    request = served.model.client.asked[-1]
    return "".join(map(chr, request.prompt_token_ids)), len(request.media)


def test_a_picture_is_priced_before_it_is_sent(browser: httpx.Client) -> None:
    html = attach(browser, ("cat.png", PNG), ("dog.jpg", JPEG), ("notes.txt", b"x")).text
    assert len(ids_of(html)) == 3
    assert "30 x 20, " in html
    assert "6 tokens" in html
    assert "10 tokens, scaled to 50 x 20" in html
    assert html.count('src="data:image/webp;base64,') == 2


def test_the_menu_of_a_picture_changes_its_tokens_and_goes_with_the_message(
    browser: httpx.Client, served: Pages
) -> None:
    html = attach(browser, ("dog.jpg", JPEG)).text
    [file] = ids_of(html)
    assert f'name="detail-{file}"' in html
    lower = browser.post("/chats/attach", data={"attachment": file, f"detail-{file}": "low"}).text
    assert ids_of(lower) == [file]
    assert "2 tokens, scaled to 20 x 10" in lower
    assert '<option value="low" selected>' in lower
    url, _ = start_chat(browser, "What is it?", attachment=file)
    assert asked(served)[0] == f"user: ({PICTURE * 2})What is it?"
    exported = browser.get(f"{url}/export/json").content
    page = browser.post("/chats/import", files={"file": ("chat.json", exported)})
    browser.post("/chat", data={"message": "And now?", "conversation": page.url.path.removeprefix("/c/")})
    assert asked(served)[0].count(PICTURE) == 2


def test_a_picture_tells_the_seconds_before_its_answer(
    browser: httpx.Client, served: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "tokens, about" not in attach(browser, ("cat.png", PNG)).text
    stats = replace(served.model.client.stats(), runner=RunnerStats(picture_row_s=1.5, prompt_token_s=0.5))
    monkeypatch.setattr(served.model.client, "stats", lambda: stats)
    assert "6 tokens, about 12.0 s" in attach(browser, ("cat.png", PNG)).text


def test_scanned_pages_are_pictures_beside_the_text(browser: httpx.Client, served: Pages) -> None:
    pytest.importorskip("pypdfium2")
    html = attach(browser, ("scan.pdf", scans("red", "white", text="Attention"))).text
    assert len(ids_of(html)) == 2
    assert "1 page as a picture" in html
    _, page = start_chat(browser, "Read it", attachment=ids_of(html))
    text, count = asked(served)
    assert count == 1
    assert "File `scan.pdf`" in text
    assert "Attention" in text
    found = re.search(DIGEST, page)
    assert found
    shown = Image.open(io.BytesIO(browser.get(found[0]).content))
    assert shown.size == (400, 200)  # 200 x 100 points at 144 to the inch
    assert shown.getpixel((200, 100))[0] > 200 > shown.getpixel((200, 100))[1]
    assert 'title="scan.pdf, page 2' in page


def test_scans_are_refused_by_name(browser: httpx.Client, served: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pypdfium2")
    assert "Its pages have one colour." in attach(browser, ("blank.pdf", pdf(""))).text
    whole, mixed = scans("red", "blue"), scans("red", "blue", text="Attention")
    with monkeypatch.context() as patch:
        patch.setattr(pictures, "MOST_PAGES", 1)
        assert "scan.pdf has 2 pages without text." in attach(browser, ("scan.pdf", whole)).text
        html = attach(browser, ("scan.pdf", mixed)).text
        assert "2 pages without text not read" in html
        assert len(ids_of(html)) == 1
    served.model.sight = None
    html = attach(browser, ("scan.pdf", whole)).text
    assert "scan.pdf contains no text." in html
    assert "a model that sees" in html
    assert "2 pages without text not read" in attach(browser, ("scan.pdf", mixed)).text


def test_a_picture_goes_with_its_message_and_with_every_later_one(browser: httpx.Client, served: Pages) -> None:
    ids = ids_of(attach(browser, ("cat.png", PNG)).text)
    url, page = start_chat(browser, "What is it?", attachment=ids[0])
    assert asked(served) == (f"user: ({PICTURE * 6})What is it?", 1)
    assert re.search(DIGEST, page)
    browser.post("/chat", data={"message": "And now?", "conversation": url.removeprefix("/c/")})
    text, count = asked(served)
    assert (text.count(PICTURE), count) == (6, 1)
    message = re.search(rf'action="({url}/m/[^"/]+)/edit"', page) or re.search(rf'({url}/m/[^"/]+)/edit', page)
    assert message
    browser.post(f"{message[1]}/edit", data={"message": "Really?"})
    text, count = asked(served)
    assert (text.split(")")[-1], count) == ("Really?", 1)


def test_a_stored_picture_is_its_owners_own_file(browser: httpx.Client) -> None:
    _, page = start_chat(browser, "Look", attachment=ids_of(attach(browser, ("dog.jpg", JPEG)).text)[0])
    found = re.search(DIGEST, page)
    assert found
    answer = browser.get(found[0])
    assert answer.content == JPEG
    assert answer.headers["content-type"] == "image/jpeg"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-disposition"] == "inline"
    assert browser.get("/chats/pictures/" + "0" * 32).status_code == 404


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("cut.jpg", JPEG[:400], "cut.jpg is damaged."),
        ("flat.png", picture(size=(3000, 2)), "flat.png is 3000 x 2 pixels."),
        ("scan.tiff", picture("TIFF"), "scan.tiff is an image, which is not read here."),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(browser: httpx.Client, name: str, data: bytes, says: str) -> None:
    html = attach(browser, ("fine.png", PNG), (name, data)).text
    assert says in html
    assert len(ids_of(html)) == 1


def test_a_model_that_reads_text_says_so_before_sending(browser: httpx.Client, served: Pages) -> None:
    url, _ = start_chat(browser, "Look", attachment=ids_of(attach(browser, ("cat.png", PNG)).text)[0])
    waiting = ids_of(attach(browser, ("dog.jpg", JPEG)).text)[0]
    served.model.sight = None
    assert "cat.png is a picture, and demo does not see pictures." in attach(browser, ("cat.png", PNG)).text
    sent = browser.post("/chat", data={"message": "x", "attachment": waiting})
    assert "demo does not see pictures." in sent.text
    browser.post("/chat", data={"message": "Go on", "conversation": url.removeprefix("/c/")})
    text, count = asked(served)
    assert "[image cat.png: this model reads text]\nLook" in text
    assert count == 0


def test_a_picture_is_deleted_with_the_last_chat_that_has_it(browser: httpx.Client, served: Pages) -> None:
    urls = []
    for _ in range(2):
        url, page = start_chat(browser, "Look", attachment=ids_of(attach(browser, ("cat.png", PNG)).text)[0])
        urls.append((url, re.search(DIGEST, page)))
    [(first, found), (second, again)] = urls
    assert found
    assert again
    assert found[0] == again[0]
    for url, status in ((first, 200), (second, 404)):
        assert browser.post(f"{url}/delete").status_code == 200
        purge(served)
        assert browser.get(found[0]).status_code == status


def purge(served: Pages) -> None:
    """Make deletions final, as time does."""
    state = chat_state_of(served.live.server.app)
    asyncio.run(state.store.call(Chats.purge, time.time() + 1))


def test_an_export_carries_pictures_and_an_import_brings_them_back(browser: httpx.Client, served: Pages) -> None:
    url, page = start_chat(browser, "Look", attachment=ids_of(attach(browser, ("cat.png", PNG)).text)[0])
    found = re.search(DIGEST, page)
    assert found
    exported = browser.get(f"{url}/export/json").content
    assert json.loads(exported)["tree"][0]["details"]["pictures"][0]["data"].startswith("data:image/png;base64,")
    assert b"[Picture: cat.png]" in browser.get(f"{url}/export/md").content
    assert b"data:image/webp;base64," in browser.get(f"{url}/export/html").content
    with zipfile.ZipFile(io.BytesIO(browser.get("/chats/export").content)) as whole:
        assert b"data:image/png;base64," in whole.read(whole.namelist()[0])
    browser.post(f"{url}/delete")
    purge(served)
    assert browser.get(found[0]).status_code == 404
    page = browser.post("/chats/import", files={"file": ("chat.json", exported)}).text
    assert found[0] in page
    assert browser.get(found[0]).content == PNG


def test_an_import_leaves_out_what_is_not_a_picture(browser: httpx.Client) -> None:
    bad = [{"name": "a.png", "data": "data:image/png;base64,AAAA"}, {"name": "b.png"}, 3, {"name": "c", "data": "x"}]
    node = {"id": "1", "role": "user", "content": "Hi", "details": {"pictures": bad}}
    body = {"format": "localllm-chat", "version": 1, "tree": [node], "leaf": "1"}
    page = browser.post("/chats/import", files={"file": ("chat.json", json.dumps(body).encode())})
    assert page.status_code == 200
    assert "Hi" in page.text
    assert not re.search(DIGEST, page.text)


def test_a_camera_picture_has_its_own_button(browser: httpx.Client) -> None:
    page = browser.get("/").text
    assert re.search(r'accept="image/png,image/jpeg,image/webp,image/gif" capture="environment"', page)


def test_a_thumbnail_is_small() -> None:
    made = picture_of("noise.png", picture(size=(2000, 1000)))
    assert len(made["thumb"]) < 20_000
    assert Image.open(io.BytesIO(made["data"])).size == (2000, 1000)
