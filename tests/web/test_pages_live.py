"""Replies that outlive their tabs, and a sampler that works only while somebody looks."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest

from localllm.engine.client import GenerationRequest
from localllm.engine.params import SamplingParams
from localllm.engine.stats import EngineStats
from localllm.errors import ContextTooLong
from localllm.serving.answers.generation import Generation
from localllm.web.pages.chat.markdown.render import render_markdown
from localllm.web.pages.chat.markdown.stream import TextUpdate
from localllm.web.pages.chat.replies import reply as live_reply
from localllm.web.pages.chat.replies.reply import Reply, ReplyUpdate
from localllm.web.pages.frame import live
from localllm.web.pages.frame.handlers import update_event
from localllm.web.pages.frame.live import sse, until_closing
from localllm.web.pages.frame.sampler import Sampler, Tick
from tests.web.pages_stub import REPLY, StubClient


def start(client: StubClient, text: str = "hello") -> Reply:
    reply = Reply("r1", "demo", 2048)
    request = GenerationRequest("r1", [ord(c) for c in text], SamplingParams(max_tokens=None))
    reply.start(Generation(client, [request]))  # type: ignore[arg-type]
    return reply


async def collect(news: AsyncIterator[ReplyUpdate]) -> tuple[str, str, list[TextUpdate]]:
    """What a browser would show at the end: finished blocks and the open block."""
    html, shown, seen = "", "", []
    async for progress in news:
        if (body := progress.body) is None:
            continue
        html = body.html if body.restarts else html + body.html
        shown = body.open_text if body.open_kind else shown + body.open_text
        seen.append(body)
    return html, shown, seen


async def eventually(holds: Callable[[], bool]) -> None:
    for _ in range(400):
        if holds():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not happen in time")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_reply, "BATCH_S", 0.005)


async def test_follower_sees_the_reply_grow_and_ends_with_all_of_it() -> None:
    html, shown, seen = await collect(start(StubClient(every_s=0.001)).follow())
    assert html == render_markdown(REPLY)
    assert shown == ""
    assert len(seen) > 10
    assert any(progress.open_kind == "code" for progress in seen)


async def test_a_tab_that_comes_back_misses_nothing() -> None:
    reply = start(StubClient(every_s=0.001))
    first = reply.follow()
    for _ in range(6):
        await anext(first)
    await first.aclose()  # type: ignore[attr-defined]
    html, _, seen = await collect(reply.follow())
    assert seen[0].restarts
    assert html == render_markdown(REPLY)
    assert (await collect(reply.follow()))[0] == html  # and so it is after the end


async def test_two_tabs_see_the_same() -> None:
    reply = start(StubClient(every_s=0.001))
    one, two = await asyncio.gather(collect(reply.follow()), collect(reply.follow()))
    assert one[0] == two[0] == reply.body.html


async def test_cancel_keeps_what_was_written() -> None:
    client = StubClient(every_s=0.01)
    reply = start(client)
    await eventually(lambda: len(reply.text) > 10)
    reply.cancel()
    await reply.wait()
    assert (reply.finish_reason, reply.error) == ("abort", None)
    assert reply.text == REPLY[: len(reply.text)]
    assert "Paged" in reply.body.html
    await eventually(lambda: not client.running)


async def test_reply_that_nobody_follows_is_cancelled_after_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_reply, "DETACHED_LIMIT_S", 0.05)
    reply = start(StubClient(every_s=0.005))
    await eventually(lambda: reply.done)
    assert reply.finish_reason == "abort"
    watched = start(StubClient(every_s=0.001))
    await watched.wait()
    assert watched.finish_reason == "stop"


async def test_refusal_of_the_engine_becomes_the_replys_error() -> None:
    refusal = ContextTooLong("Too long.", "540 tokens; 512 fit.", "Start a new chat.")
    reply = start(StubClient(failure=refusal))
    await reply.wait()
    assert reply.error is refusal
    assert (await collect(reply.follow()))[0] == ""


async def test_sampler_works_only_while_somebody_follows_and_once_for_all() -> None:
    looks = 0
    client = StubClient()

    def read() -> EngineStats:
        nonlocal looks
        looks += 1
        return client.stats()

    sampler = Sampler(read, every_s=0.01)
    assert sampler._task is None
    followers = [sampler.follow() for _ in range(5)]
    ticks = [[(await anext(follower)).number for follower in followers] for _ in range(4)]
    assert looks <= 8, "five followers share one sampler"
    assert all(len(set(row)) <= 2 for row in ticks)
    for follower in followers:
        await follower.aclose()  # type: ignore[attr-defined]
    assert sampler._task is None
    before = looks
    await asyncio.sleep(0.05)
    assert looks == before


def test_what_was_seen_of_another_engine_is_not_its_past() -> None:
    """Even where it has counted further, and although nobody says that there is another."""
    one = replace(StubClient().stats(), taken_s=1000.0, uptime_s=100.0, num_steps=50)
    other = replace(one, taken_s=1002.0, uptime_s=90.0, num_steps=900)
    told = [one, replace(one, taken_s=1001.0, uptime_s=101.0), other, replace(other, taken_s=1003.0, uptime_s=91.0)]
    sampler = Sampler(lambda: told.pop(0))
    assert [[sample.taken_s for sample in sampler.tick().samples] for _ in range(4)] == [
        [1000.0], [1000.0, 1001.0], [1002.0], [1002.0, 1003.0],
    ]  # fmt: skip


async def test_sampler_survives_a_bad_look() -> None:
    answers = iter([ValueError("torn"), None])

    def read() -> None:
        answer = next(answers, None)
        if answer is not None:
            raise answer

    tick = await anext(Sampler(read, every_s=0.01).follow())
    assert tick.stats is None


def test_event_survives_every_line_end() -> None:
    assert sse("a\nb\r\nc\rd", "news") == b"event: news\ndata: a\ndata: b\ndata: c\ndata: d\n\n"
    assert sse(" x") == b"data:  x\n\n"  # one space is the separator, the other is text


async def test_streams_end_when_the_server_stops() -> None:
    async def endless() -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"x"
                await asyncio.sleep(3600)
        finally:
            closed.append(True)

    closed: list[bool] = []
    closing = asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, closing.set)
    assert [event async for event in until_closing(endless(), closing)] == [b"x"]
    assert closed == [True]


async def test_a_client_keeps_its_newest_live_connections() -> None:
    streams = live.LiveStreams()
    closing, most = asyncio.Event(), live.MOST_OF_CLIENT

    async def ticks() -> AsyncIterator[bytes]:
        while True:
            yield b"x"
            await asyncio.sleep(0.001)

    ended: list[int] = []

    async def page(number: int, client: str) -> None:
        with streams.counted(client) as superseded:
            async for _ in until_closing(ticks(), closing, superseded):
                pass
        ended.append(number)

    other = asyncio.create_task(page(-1, "other"))
    pages = []
    for number in range(most + 10):
        pages.append(asyncio.create_task(page(number, "one")))
        await asyncio.sleep(0)
    await eventually(lambda: len(ended) == 10)
    await asyncio.sleep(0.01)
    assert sorted(ended) == list(range(10))
    closing.set()
    await asyncio.gather(other, *pages)
    assert not streams._open


async def test_followers_of_a_view_share_one_drawing_of_a_tick() -> None:
    tick, drawings = Tick(1, None, (), None), 0

    async def draw() -> dict[str, str]:
        nonlocal drawings
        drawings += 1
        await asyncio.sleep(0.001)
        return {"part": "drawn"}

    impatient = asyncio.create_task(tick.drawn("view", draw))
    others = [asyncio.create_task(tick.drawn("view", draw)) for _ in range(100)]
    await asyncio.sleep(0)
    impatient.cancel()
    parts = await asyncio.gather(*others)
    assert drawings == 1
    assert all(each is parts[0] for each in (*parts, await tick.drawn("view", draw)))


def test_dashboards_that_miss_the_same_parts_share_one_update() -> None:
    tick = Tick(1, None, (), None)
    parts = {"tile-a": '<p id="tile-a">1</p>', "tile-b": '<p id="tile-b">2</p>'}
    first = update_event(tick, "minute", parts)
    assert update_event(tick, "minute", dict(parts)) is first
    assert update_event(tick, "hour", dict.fromkeys(parts, "another plot")) != first
    late = update_event(tick, "minute", {"tile-b": parts["tile-b"]})
    assert b"tile-a" not in late
    assert b"tile-b" in late
