"""A server whose model runs over ranks, in Chromium: same answers, ranks on the dashboard, and one that is killed.

The demo model has two KV heads, which three ranks cannot share. A tiny random one has four: two, one and one of them.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from localllm.serving.manager import RETRY_S
from tests.tiny import make_tiny_model
from tests.web.child_server import ChildServer
from tests.web.live_server import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # up to three starts of a server

QUESTION = "What is the capital of France?"
CPU = ("--device", "cpu")
PLACES = [
    ("demo", ("-tp", "2")),
    ("demo", ("-pp", "2")),
    ("demo", ("-tp", "2", "-pp", "2")),
    ("uneven", ("-tp", "3")),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, ...]]:
    """The flags and the path of each model, by the names of PLACES."""
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}
    path = make_tiny_model(tmp_path_factory.mktemp("models") / "uneven", "llama", **sizes)
    (path / "generation_config.json").write_text('{"do_sample": false, "eos_token_id": 2}', encoding="utf-8")
    return {"demo": ("demo", *CPU), "uneven": (str(path), *CPU, "--max-model-len", "160")}


@pytest.fixture(scope="module")
def alone(
    models: dict[str, tuple[str, ...]], chromium: Browser, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], str]:
    """Returns the answer of one process."""

    @cache
    def answer_of(name: str) -> str:
        path, *flags = models[name]
        with ChildServer(tmp_path_factory.mktemp("alone"), *flags, model=path, with_bystander=False) as server:
            page = chromium.new_page()
            answer = ask(page, server.url)
            page.close()
        return answer

    return answer_of


def ask(page: Page, url: str) -> str:
    """Ask in the chat, wait for the whole answer, and return it."""
    page.goto(f"{url}/chat")
    page.get_by_label("Message", exact=True).fill(QUESTION)
    page.get_by_role("button", name="Send", exact=True).click()
    page.wait_for_selector(".figures")
    return page.locator(".prose").last.inner_text()


@pytest.mark.parametrize(("model", "place"), PLACES, ids=lambda value: "".join(value))
def test_a_chat_over_ranks(
    model: str,
    place: tuple[str, ...],
    models: dict[str, tuple[str, ...]],
    alone: Callable[[str], str],
    chromium: Browser,
    tmp_path: Path,
) -> None:
    wanted, (path, *flags) = alone(model), models[model]
    assert wanted.strip()
    with ChildServer(tmp_path, *flags, *place, model=path, with_bystander=False) as ranked:
        pids = [child.pid for child in psutil.Process(ranked.pid).children() if "localllm.ranks" in child.cmdline()]
        assert len(pids) == prod(int(count) for count in place[1::2])
        page = chromium.new_page()
        assert ask(page, ranked.url) == wanted
        page.goto(f"{ranked.url}/dashboard")
        assert page.locator("#tile-ranks").inner_text().count("Rank ") == len(pids)

        os.kill(pids[-1], signal.SIGKILL)
        wait_until(lambda: ranked.get("/health").status_code == 503, 30)
        page.goto(f"{ranked.url}/chat")
        page.get_by_label("Message", exact=True).wait_for()  # a model that had just been loaded waits for a message
        page.wait_for_timeout(1000 * RETRY_S)
        assert ask(page, ranked.url) == wanted  # after the model, which is loaded again
        page.goto(f"{ranked.url}/dashboard")
        page.get_by_text("SIGKILL").first.wait_for()
        page.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
