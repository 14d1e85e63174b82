"""One live server for all API tests, and clients that speak to it."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from localllm.engine.client import GenerationRequest
from localllm.engine.params import SamplingParams
from localllm.errors import DoesNotFit
from localllm.serving.answers import generation
from localllm.text.structured import StructuredOutputsParams
from localllm.web.pages.chat.store import database
from localllm.web.pages.chat.store.database import chats_path
from tests.text.templates import CHATML
from tests.web.chat_page import ChatPage
from tests.web.harness import Pages
from tests.web.live_server import LiveServer, PacedRunner, fake_model
from tests.web.pages_stub import StubModel
from tests.web.scripted import tool_servers
from tests.web.terminal import Terminal


@pytest.fixture(scope="module")
def own_data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A data folder for the tests of one file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        yield


@pytest.fixture(scope="module")
def served(own_data: None) -> Iterator[Pages]:
    """The pages, with a model whose replies are made by the test."""
    pages = Pages()
    with pages.live:
        yield pages


@pytest.fixture
def browser(served: Pages) -> Iterator[httpx.Client]:
    """A browser on the pages; afterwards no chats are left, and the stub is as it was."""
    with served.browser() as client:
        yield client
        client.post("/chats/wipe", data={"sure": "1"})
    served.reset()


@pytest.fixture
def chat(browser: httpx.Client) -> ChatPage:
    """A new chat in that browser."""
    return ChatPage(browser)


@pytest.fixture
def second(served: Pages) -> Iterator[StubModel]:
    """Another model, loaded as well."""
    other = StubModel(name="second", sampling_defaults={"temperature": 0.3})
    other.client.every_s, other.client.chars, other.client.reply = 0.0, 40, "The second's own words."
    entry = served.live.manager.adopt(other)  # type: ignore[arg-type]
    yield other
    if entry in served.live.manager.entries:
        served.live.manager.entries.remove(entry)


@pytest.fixture
def late_models(served: Pages, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Models come only when this is called; the model "broken" does not fit then."""
    come, acquire = asyncio.Event(), served.live.manager.acquire

    async def acquire_later(name: str | None = None) -> Any:
        await come.wait()
        if name == "broken":
            raise DoesNotFit("It does not fit.", "9 GiB needed.", "Take a smaller one.")
        return await acquire(name)

    monkeypatch.setattr(served.live.manager, "acquire", acquire_later)
    return lambda: come._loop.call_soon_threadsafe(come.set)  # type: ignore[attr-defined]


@pytest.fixture
def fresh_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder for one test; the file of its chats."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr(database, "BUSY_S", 0.05)
    return chats_path()


@pytest.fixture(scope="session")
def paced_runner() -> PacedRunner:
    return PacedRunner()


@pytest.fixture(scope="session")
def session_server(tmp_path_factory: pytest.TempPathFactory, paced_runner: PacedRunner) -> Iterator[LiveServer]:
    with LiveServer(fake_model(tmp_path_factory.mktemp("tiny"), paced_runner)) as server:
        yield server


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., LiveServer]]:
    """Starts a server whose chats may use these tool servers."""
    with tool_servers(tmp_path_factory) as begin:
        yield begin


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file in which the server of a changing tool counts."""
    return tmp_path_factory.mktemp("changing") / "n"


@pytest.fixture(scope="session")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A model whose template prints calls as Hermes does and reasoning between <think> and </think>."""
    with LiveServer(fake_model(tmp_path_factory.mktemp("hermes"), PacedRunner(), chat_template=CHATML)) as server:
        yield server


@pytest.fixture
def sdk(hermes: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{hermes.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes models answer with a text, whatever the request asks of it."""

    def say(text: str) -> None:
        def saying(name: str, token_ids: Sequence[int], params: SamplingParams, *others: Any) -> GenerationRequest:
            said = replace(params, structured_outputs=StructuredOutputsParams(choice=[text]))
            return GenerationRequest(name, token_ids, said, *others)

        monkeypatch.setattr(generation, "GenerationRequest", saying)

    return say


@pytest.fixture
def server(session_server: LiveServer, paced_runner: PacedRunner) -> Iterator[LiveServer]:
    """The shared server, idle before and after each test."""
    yield session_server
    paced_runner.step_s, paced_runner.failing = 0.0, False
    paced_runner.gate.set()
    session_server.wait_idle()


@pytest.fixture
def runner(server: LiveServer, paced_runner: PacedRunner) -> PacedRunner:
    """The shared server's runner, to slow it down or make it fail; reset after the test."""
    return paced_runner


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def open_terminal(*words: str) -> Terminal:
        opened.append(Terminal(*words))
        return opened[-1]

    yield open_terminal
    for each in opened:
        each.close()
