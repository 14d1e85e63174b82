"""Speculation in a server as people start it, without a flag: fewer steps for a repeated text, and figures of them."""

import html
import re
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from localllm.cli import main
from localllm.cli.top_screen import _drafts as in_top
from localllm.engine.outputs import DraftCounts, Usage
from localllm.engine.stats import NO_SPECULATION, OFF_REASONS, SpeculationStats
from localllm.units import format_count
from localllm.web.pages.chat.replies.active import details_of
from localllm.web.pages.chat.thread.messages import figures
from localllm.web.pages.dashboard.views import Drafts, drafts
from tests.marks import needs_library
from tests.web.child_server import ChildServer

QUESTION = "How do I start a server?"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChildServer]:
    with ChildServer(tmp_path_factory.mktemp("server"), with_bystander=False) as child:
        yield child


def ask(server: ChildServer, messages: list[dict[str, str]], **fields: Any) -> tuple[str, Mapping[str, float], int]:
    """Return an answer's text, its timings, and the steps that the engine ran for it."""
    before = num_steps(server)
    body = {"messages": messages, "temperature": 0, "max_tokens": 120, **fields}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60, trust_env=False)
    assert response.status_code == 200, response.text
    told = response.json()
    return told["choices"][0]["message"]["content"], told["timings"], num_steps(server) - before


def num_steps(server: ChildServer) -> int:
    text = httpx.get(f"{server.url}/metrics", timeout=60, trust_env=False).text
    return int(float(re.findall(r"^localllm:steps_total\{[^}]*\} (\S+)$", text, re.MULTILINE)[0]))


def words_of(server: ChildServer, path: str) -> str:
    page = httpx.get(f"{server.url}{path}", timeout=60, trust_env=False)
    assert page.status_code == 200
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page.text)))


@needs_library
def test_a_text_repeated_with_a_small_change_takes_fewer_steps_and_the_pages_say_so(
    server: ChildServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """The demo answers a question that it has answered before, with one word changed in what it reads."""
    user = {"role": "user", "content": QUESTION}
    first, _, _ = ask(server, [user])
    changed = first.replace("terminal", "console")
    assert changed != first
    again = [user, {"role": "assistant", "content": changed}, user]
    plain, timings, plain_steps = ask(server, again, speculative=False)
    assert "draft_n" not in timings
    for _ in range(20):  # costs are measured, and another process may have had the processor: then none are used
        drafted, timings, steps = ask(server, again)
        assert drafted == plain
        if steps <= 0.7 * plain_steps:
            break
    else:
        pytest.fail(f"{steps} steps with drafts, {plain_steps} without: {words_of(server, '/dashboard')}")
    right, verified = timings["draft_n_accepted"], timings["draft_n"]
    board = words_of(server, "/dashboard")
    speed = re.search(r"Drafts ([\d.]+) tokens per request and step Accepted \d+ % ([\d,]+) of ([\d,]+) drafts", board)
    assert speed, board
    assert float(speed[1]) > 1
    assert f"{format_count(right)} of {format_count(verified)}" in board, "the request's row"
    assert "nothing to guess from was found" in board, "why steps had none"
    assert main(["top", "--once", "--url", server.url]) == 0
    line = capsys.readouterr().out
    assert re.search(r" tokens_per_step=\d\.\d\d drafts_accepted=\d+% ", line), line


def test_the_tile_shows_the_last_minute_or_else_the_whole_run() -> None:
    before = SpeculationStats(True, "", 4, 20, 10, (4, 3, 3), 10, 20, 7, (("cost", 2),))
    now = SpeculationStats(True, "", 6, 40, 28, (6, 5, 5, 2), 20, 60, 0, (("cost", 3), ("prompt", 5)), "prompt")
    recent = drafts(now, before)
    assert (recent.tokens_per_step, recent.accepted, recent.drafted, recent.span) == ("4.0", 18, 20, "last minute")
    assert recent.facts[0].value == "0"
    assert recent.facts[0].note == "a prompt was being read"
    assert (recent.facts[1].value, recent.facts[1].note) == (
        "6", "5: a prompt was being read; 1: drafts would not have paid",
    )  # fmt: skip
    assert now.since(before).accepted_by_place == (2, 2, 2, 2)
    for whole in (drafts(now, None), drafts(now, now)):
        assert (whole.tokens_per_step, whole.accepted, whole.drafted, whole.span) == ("3.0", 28, 40, "since start")
    assert drafts(SpeculationStats(is_on=True), None).tokens_per_step == "–"


def test_the_screen_of_top_says_what_drafts_bring() -> None:
    now = SpeculationStats(True, "", 6, 40, 28, (), 20, 60)
    assert in_top(now).plain == "Drafts    3.0 tokens per request and step, 28 of 40 accepted"
    assert in_top(SpeculationStats(why_off="--speculative off")).plain == "Drafts    off: --speculative off"
    assert in_top(NO_SPECULATION).plain == "Drafts    off: this model is served without drafts"


def test_the_tile_says_why_there_are_no_drafts() -> None:
    assert drafts(SpeculationStats(why_off="--speculative off"), None) == Drafts(why_off="--speculative off")
    assert drafts(NO_SPECULATION, None).why_off
    assert all(words and words != reason for reason, words in OFF_REASONS.items())


def test_a_chat_keeps_the_drafts_of_a_reply_and_of_its_continuation() -> None:
    reply = SimpleNamespace(
        model="demo", finish_reason="stop", thinking=SimpleNamespace(text=""), calls=(), tool_notes=(), error=None,
        usage=Usage(12, 30, 0, DraftCounts(20, 15)), timings=None, context_tokens=2048, remote=None,
    )  # fmt: skip
    first = details_of(reply, {})  # type: ignore[arg-type]
    both = details_of(reply, first)  # type: ignore[arg-type]
    shown = figures(both)
    assert shown is not None
    assert ("Drafts", "30 of 40 tokens accepted (75%)") in shown.details
    reply.usage = Usage(12, 30, 0)
    assert details_of(reply, first)["drafted_tokens"] == 20  # type: ignore[arg-type]
    assert "drafted_tokens" not in details_of(reply, {})  # type: ignore[arg-type]
