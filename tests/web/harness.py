"""Requests, pages and files that the tests of several routes use."""

from __future__ import annotations

import io
import json
import re
import socket
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from tests.web.live_server import LiveServer, settings
from tests.web.pages_stub import REPLY, StubModel


def connect(server: LiveServer) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def answers(sock: socket.socket) -> str:
    """All that comes until the server closes."""
    seen = b""
    try:
        while piece := sock.recv(65536):
            seen += piece
    except ConnectionResetError:
        pass
    return seen.decode("latin-1")


def open_request(
    server: LiveServer,
    body: dict[str, Any],
    path: str = "/v1/completions",
    *,
    headers: str = "",
    receive_bytes: int | None = None,
) -> socket.socket:
    """Send a request and keep the raw connection, with a receive buffer of that size if one is named."""
    host, port = server.url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n{headers}"
        f"content-length: {len(data)}\r\n\r\n"
    )
    sock = socket.socket()
    if receive_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    sock.settimeout(10)
    sock.connect((host, int(port)))
    sock.sendall(head.encode() + data)
    return sock


def refusal(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert error["code"] is None or isinstance(error["code"], str)
    assert "Traceback" not in response.text
    return error


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]


def quick() -> StubModel:
    model = StubModel()
    model.client.every_s, model.client.chars = 0.0, 40
    return model


def start_chat(browser: httpx.Client, message: str, **form: str) -> tuple[str, str]:
    """The chat's URL, and its page with the whole reply."""
    answer = browser.post("/chat", data={"message": message, **form})
    assert answer.status_code == 200, answer.text
    return answer.url.path, answer.text


def message_urls(page: str) -> list[str]:
    """Of the messages that are shown, in order."""
    return list(dict.fromkeys(re.findall(r'action="(/c/[^"]+/m/[^"/]+)/regenerate"', page)))


def typed(page: str, name: str) -> str | None:
    """The value in a field of the drawer."""
    found = re.search(rf'name="{name}"[^>]* value="([^"]*)"', page)
    return found and found[1]


def said(served: Pages) -> str:
    return "".join(map(chr, served.model.client.asked[-1].prompt_token_ids))


def pdf_of(pages: list[str]) -> bytes:
    """Return a PDF with one line of text per page, as pypdf writes it."""
    pypdf = pytest.importorskip("pypdf")
    from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

    writer = pypdf.PdfWriter()
    for text in pages:
        page = writer.add_blank_page(300, 300)
        font = DictionaryObject({
            NameObject("/Type"): NameObject("/Font"), NameObject("/Subtype"): NameObject("/Type1"),
            NameObject("/BaseFont"): NameObject("/Helvetica"),
        })  # fmt: skip
        page[NameObject("/Resources")] = DictionaryObject(
            {NameObject("/Font"): DictionaryObject({NameObject("/F1"): font})}
        )
        stream = DecodedStreamObject()
        stream.set_data(f"BT /F1 12 Tf 20 200 Td ({text}) Tj ET".encode())
        page[NameObject("/Contents")] = stream
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


def conversation(page: str) -> str:
    found = re.search(r'name="conversation" value="([^"]+)"', page)
    assert found
    return found[1]


def attach(
    browser: httpx.Client, *files: tuple[str, bytes], ids: Sequence[str] = (), model: str = ""
) -> httpx.Response:
    data = {"attachment": list(ids), "model": model}
    return browser.post("/chats/attach", files=[("file", file) for file in files], data=data)


def chips(html: str) -> list[str]:
    return re.findall(r'name="attachment" value="([^"]+)"', html)


def pdf(text: str) -> bytes:
    return pdf_of([text])


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


def open_webui() -> list[dict[str, Any]]:
    thought = (
        '<details type="reasoning" done="true" duration="3">\n<summary>Thought for 3 seconds</summary>\n'
        "&gt; First &lt;this&gt;.\n> Then that.\n</details>\nThe answer."
    )
    call = '<details type="tool_calls" done="true" name="get_time" arguments="{}"><summary>T</summary></details>\nNoon.'
    messages = {
        "u1": {"id": "u1", "parentId": None, "childrenIds": ["a1", "a2"], "role": "user", "content": "Why?",
               "timestamp": 1_700_000_000, "models": ["llama3:8b"]},
        "a2": {"id": "a2", "parentId": "u1", "childrenIds": [], "role": "assistant", "content": call, "done": True},
        "a1": {"id": "a1", "parentId": "u1", "childrenIds": [], "role": "assistant", "content": thought,
               "model": "llama3:8b", "done": True},
    }  # fmt: skip
    chat = {
        "id": "", "title": "Webui chat", "models": ["llama3:8b"], "params": {"system": "Be kind."},
        "history": {"messages": messages, "currentId": "a1"}, "messages": [messages["u1"], messages["a1"]], "tags": [],
    }  # fmt: skip
    return [{"id": "x", "user_id": "y", "title": "Webui chat", "chat": chat, "updated_at": 1, "archived": False}]


def lm_studio() -> dict[str, Any]:
    def block(text: str, **style: Any) -> dict[str, Any]:
        return {"type": "contentBlock", "content": [{"type": "text", "text": text}], **style}

    steps = [block("<think>Hm.</think>", style={"type": "thinking", "ended": True}), block("Blue."),
             {"type": "debugInfoBlock", "debugInfo": "x"}]  # fmt: skip
    reply = {"type": "multiStep", "role": "assistant", "senderInfo": {"senderName": "qwen3-4b"}, "steps": steps}
    other = {**reply, "steps": [block("Grey.")]}
    question = {"type": "singleStep", "role": "user", "content": [{"type": "text", "text": "Sky?"}]}
    return {
        "name": "Studio chat", "pinned": False, "createdAt": 1_730_000_000_000, "preset": "", "tokenCount": 9,
        "systemPrompt": "", "messages": [
            {"versions": [question], "currentlySelected": 0}, {"versions": [other, reply], "currentlySelected": 1},
        ],
        "perChatPredictionConfig": {"fields": [{"key": "llm.prediction.systemPrompt", "value": "Be short."}]},
    }  # fmt: skip


def browser_of(server: LiveServer, **options: Any) -> httpx.Client:
    accept = {"accept": "text/html,*/*;q=0.8"}
    return httpx.Client(base_url=server.url, timeout=20, follow_redirects=True, headers=accept, **options)


class Pages:
    """A server on the stub model and a browser-like client that keeps cookies."""

    def __init__(self) -> None:
        self.model = StubModel()
        self.reset()
        self.live = LiveServer(self.model, settings(ui=True))  # type: ignore[arg-type]

    def reset(self) -> None:
        client = self.model.client
        client.every_s, client.chars, client.reply = 0.0, 20, REPLY
        client.gate = client.failure = None

    def browser(self, **options: Any) -> httpx.Client:
        return browser_of(self.live, **options)


TOWNS = ("Varnholm", "Estrel", "Quibury", "Norlund", "Tamsk", "Ocre", "Pellow", "Grindale", "Ashvik", "Ilmora")
FACTS: tuple[tuple[str, str], ...] = tuple(
    fact
    for number, town in enumerate(TOWNS)
    for fact in (
        (
            f"The lighthouse of {town} was designed by the engineer Ada Stern{number} after the great storm.",
            f"Who designed the lighthouse in {town}?",
        ),
        (
            f"In the year {1810 + number * 7} the harbour of {town} froze for eleven weeks, and no ship arrived.",
            f"When did the harbour of {town} freeze?",
        ),
        (
            f"The bakers of {town} put {number + 3} grams of saffron into each of their festival loaves.",
            f"How much saffron do bakers from {town} use in a festival loaf?",
        ),
        (
            f"{town}'s library lends violins: a violin may be kept for {number + 20} days.",
            f"How long can I borrow a violin from the library of {town}?",
        ),
        (
            f"Batteries of the tramway at {town} are replaced every {number + 4} years because of the salty air.",
            f"How often is the tram battery replaced at {town}?",
        ),
        (
            f"The mayor of {town}, Otto Brandt{number}, keeps bees on the roof of the town hall.",
            f"What does the mayor of {town} keep on the town hall's roof?",
        ),
    )
)
FILLER = (
    "The town was quiet in winter, and the people who lived there spoke about the weather, the harbour and the price "
    "of bread. Ships came and went. In the evening the library closed early, and the mayor walked home by the sea. "
    "Engineers repaired the road after each storm, and the tram stopped until they were done. "
)


def book() -> str:
    """Return a text in which each fact stands between many words like its own; towns are mentioned everywhere."""
    parts = []
    for number in range(len(FACTS)):
        fact, _ = FACTS[number * 37 % len(FACTS)]
        others = " ".join(f"{town} was mentioned in the letters." for town in TOWNS[number % 7 : number % 7 + 3])
        parts += [FILLER * 2 + others, FILLER + fact + " " + FILLER, FILLER * 3]
    return "\n\n".join(parts)


USER: list[Any] = [{"role": "user", "content": "How warm is it in Paris?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "unit": {"enum": ["c", "f"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Now", "parameters": PARAMETERS}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
CLOCK_CALL = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nWarm?\n</think>\n\nIt is warm."
