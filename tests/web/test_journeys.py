"""How many files of the package a request enters, which is what a reader who follows it has to open.

The runner is a stand-in, so the files of `runner/`, `kernels/` and `models/layers/` are not counted. Work that goes on
beside the request, such as the watchdog's, is counted when it happens to run; the bars leave room for it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import pytest

from scripts.layout import PACKAGE
from tests.web.live_server import LiveServer, PacedRunner, fake_model, settings

FOLDER = f"{PACKAGE}/"


class Journey:
    """The files whose functions were called while it is open, in threads that were started after it was made."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.is_open = False

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if self.is_open and event == "call" and name.startswith(FOLDER) and name.endswith(".py"):
            self.files.add(name.removeprefix(FOLDER))

    def __enter__(self) -> Journey:
        self.is_open = True
        return self

    def __exit__(self, *_: object) -> None:
        self.is_open = False


@pytest.fixture
def journey() -> Iterator[Journey]:
    journey = Journey()
    threading.setprofile(journey.note)
    yield journey
    threading.setprofile(None)


@pytest.fixture
def client(journey: Journey, own_data: None, tmp_path: Path) -> Iterator[httpx.Client]:
    with LiveServer(fake_model(tmp_path, PacedRunner()), settings(ui=True)) as server:
        yield server.http


def test_one_token_over_http_enters_few_files(client: httpx.Client, journey: Journey) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}

    def ask() -> None:
        assert client.post("/v1/chat/completions", json=body).json()["usage"]["completion_tokens"] == 1

    ask()  # what only the first request needs is left out
    with journey:
        ask()
    assert "web/api/openai/chat.py" in journey.files
    assert len(journey.files) <= 78, sorted(journey.files)


def test_a_message_of_the_chat_page_enters_few_files(client: httpx.Client, journey: Journey) -> None:
    def send() -> None:
        answer = client.post("/chat", data={"message": "hi"}, headers={"hx-request": "true"})
        found = re.search(r'"(/c/[\w-]+/m/[\w-]+/stream)"', answer.text)
        assert found
        assert "reply finished" in client.get(found[1]).text.casefold()

    send()
    with journey:
        send()
    assert "web/pages/chat/replies/reply.py" in journey.files
    assert len(journey.files) <= 105, sorted(journey.files)
