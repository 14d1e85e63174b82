"""The load client against a server whose manners we choose."""

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from localllm.errors import ConfigError
from localllm.tuning.bench import BenchOptions, run
from localllm.tuning.load_client import Endpoint
from tests.tuning.stub_server import Write, running, token, usage

pytestmark = pytest.mark.slow


def options(url: str, **changes: Any) -> BenchOptions:
    defaults: dict[str, Any] = {"num_requests": 6, "concurrency": 3, "input_len": 5, "output_len": 4, "num_warmups": 0}
    return BenchOptions(url=url, **(defaults | changes))


def test_tokens_are_counted_from_usage_and_not_from_arrivals() -> None:
    async def two_chunks_for_four_tokens(asked: dict[str, Any], write: Write) -> None:
        await write(token())
        await write(token("length") + usage(asked, cached=2) + b"data: [DONE]\n\n")

    with running(two_chunks_for_four_tokens) as stub:
        report = run("serve", options(stub.url))
    assert (report.num_requests, report.num_failed) == (6, 0)
    assert (report.prompt_tokens, report.output_tokens, report.cached_tokens) == (30, 24, 12)
    assert report.itl is not None
    assert report.itl.count == 6  # one gap per answer, whatever it carried
    assert report.model == "stub"  # asked of the server


def test_times_are_those_of_the_arrivals() -> None:
    async def slow(asked: dict[str, Any], write: Write) -> None:
        await asyncio.sleep(0.2)
        await write(token())
        for reason in (None, None, "length"):
            await asyncio.sleep(0.05)
            await write(token(reason))
        await asyncio.sleep(0.3)  # after the last token nothing counts
        await write(usage(asked))

    with running(slow) as stub:
        report = run("serve", options(stub.url, num_requests=1))
    assert report.ttft is not None
    assert report.tpot is not None
    assert report.e2e is not None
    assert 0.2 <= report.ttft.p50_s < 0.3
    assert report.tpot.p50_s < 0.1
    assert 0.35 <= report.e2e.p50_s < 0.6
    assert report.ttft.p50_s + 3 * report.tpot.p50_s == pytest.approx(report.e2e.p50_s)  # however late one is read


def test_events_cut_anywhere_are_put_together() -> None:
    async def drop_by_drop(asked: dict[str, Any], write: Write) -> None:
        whole = token().replace(b"\n\n", b"\r\n\r\n") + b": a comment\n\n" + token("stop") + usage(asked)
        for start in range(0, len(whole), 31):
            await write(whole[start : start + 31])

    with running(drop_by_drop) as stub:
        report = run("serve", options(stub.url, num_requests=2))
    assert report.num_requests == 2
    assert report.itl is not None
    assert report.itl.count == 2


def test_concurrency_is_reached_and_never_exceeded_on_as_many_connections() -> None:
    async def linger(asked: dict[str, Any], write: Write) -> None:
        await asyncio.sleep(0.02)
        await write(token("length") + usage(asked))

    with running(linger) as stub:
        run("serve", options(stub.url, num_requests=12, concurrency=4, model="stub"))
    assert stub.most_busy == 4
    assert stub.connections == 4
    assert len(stub.bodies) == 12


def test_a_kept_connection_that_is_closed_unread_is_opened_again() -> None:
    with running(requests_a_connection=2) as stub:
        report = run("serve", options(stub.url, num_requests=5, concurrency=1, model="stub"))
    assert (report.num_requests, report.num_failed, len(stub.bodies)) == (5, 0, 5)
    assert stub.connections == 3


def test_the_request_says_what_was_asked_and_brings_the_key() -> None:
    with running() as stub:
        run("serve", options(stub.url + "/v1", num_requests=1, model="mine", api_key="secret"))
    body = stub.bodies[0]
    assert (body["model"], body["max_tokens"], body["temperature"], body["ignore_eos"]) == ("mine", 4, 0, True)
    assert len(body["prompt"]) == 5
    assert "POST /v1/completions HTTP/1.1" in stub.headers[0]
    assert "Authorization: Bearer secret" in stub.headers[0]


def test_warm_up_prompts_are_not_the_measured_ones_and_not_counted() -> None:
    with running() as stub:
        report = run("serve", options(stub.url, num_warmups=2))
    prompts = [tuple(body["prompt"]) for body in stub.bodies]
    assert len(set(prompts)) == 8
    assert report.num_requests == 6


async def break_off(asked: dict[str, Any], write: Write) -> None:
    await write(token())
    raise ConnectionResetError


async def no_finish(asked: dict[str, Any], write: Write) -> None:
    await write(token() + usage(asked))


async def no_usage(asked: dict[str, Any], write: Write) -> None:
    await write(token("stop"))


async def error_event(asked: dict[str, Any], write: Write) -> None:
    await write(token() + b'data: {"error": {"message": "out of blocks"}}\n\n')


async def no_json(asked: dict[str, Any], write: Write) -> None:
    await write(b"data: {oops\n\n")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (break_off, "connection lost"),
        (no_finish, "no finish_reason"),
        (no_usage, "no usage"),
        (error_event, "out of blocks"),
        (no_json, "unreadable response"),
    ],
)
def test_a_broken_answer_is_a_failed_request_with_its_reason(answer: Any, words: str) -> None:
    with running(answer) as stub, pytest.raises(ConfigError, match="None of the requests succeeded") as caught:
        run("serve", options(stub.url))
    assert caught.value.why.startswith("6 x ")
    assert words in caught.value.why


def test_one_failure_among_many_is_counted_and_left_out() -> None:
    seen = []

    async def every_third_breaks(asked: dict[str, Any], write: Write) -> None:
        seen.append(asked)
        await write(token() if len(seen) % 3 == 0 else token("length") + usage(asked))

    with running(every_third_breaks) as stub:
        report = run("serve", options(stub.url))
    assert (report.num_requests, report.num_failed) == (4, 2)
    assert report.output_tokens == 16


def test_a_refusal_is_quoted() -> None:
    with running() as stub, pytest.raises(ConfigError) as caught:
        run("serve", options(stub.url, output_len=2000))
    assert "status 400" in caught.value.why
    assert "too many tokens" in caught.value.why


def test_no_server_is_a_clear_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        with pytest.raises(ConfigError, match="No server answers") as caught:
            run("serve", options(f"http://127.0.0.1:{taken.getsockname()[1]}"))
    assert "localllm up" in caught.value.hint


def test_the_report_is_written_where_asked(tmp_path: Path) -> None:
    with running() as stub:
        run("serve", options(stub.url, json=tmp_path / "report.json"))
        assert json.loads((tmp_path / "report.json").read_text())["output_tokens"] == 24
        with pytest.raises(ConfigError, match="Cannot write"):
            run("serve", options(stub.url, json=tmp_path / "missing" / "report.json"))


@pytest.mark.parametrize(
    ("url", "host", "port", "base_path"),
    [
        ("http://localhost:8000", "localhost", 8000, "/v1"),
        ("localhost:8000/v1/", "localhost", 8000, "/v1"),
        ("https://models.example/api", "models.example", 443, "/api/v1"),
        ("http://[::1]:8080", "::1", 8080, "/v1"),
        ("http://example.org", "example.org", 80, "/v1"),
    ],
)
def test_urls_as_clients_write_them(url: str, host: str, port: int, base_path: str) -> None:
    endpoint = Endpoint.from_url(url)
    assert (endpoint.host, endpoint.port, endpoint.base_path) == (host, port, base_path)


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:notaport", "http://host:99999"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is not the URL"):
        Endpoint.from_url(url)


@pytest.mark.parametrize("change", [{"num_requests": 0}, {"concurrency": 0}, {"output_len": -1}, {"num_warmups": -1}])
def test_options_out_of_range_are_refused_by_name(change: dict[str, int]) -> None:
    (name,) = change
    with pytest.raises(ConfigError) as caught:
        BenchOptions(**change)
    assert caught.value.param == name
