"""The logs page over a real socket: what is chosen, what comes, what is refused."""

import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from localllm.errors import InvalidParameter
from localllm.logs.recent_logs import LogLine, RecentLogs
from localllm.web.pages.frame.render import render
from localllm.web.pages.logs.views import LogFilter, LogTable, filter_from, request_urls, row
from tests.web.live_server import LiveServer, PacedRunner, fake_model, settings, wait_until
from tests.web.pages_stub import StubModel

FORMAT = "%(asctime)s %(levelname)-7s %(name)s %(message)s"
LINES = [
    LogLine(1, 1.7e9, "INFO", "localllm.access", "2026 INFO    localllm.access GET /Chat status=200 id=abc"),
    LogLine(2, 1.7e9, "DEBUG", "localllm.access", "2026 DEBUG   localllm.access GET /health status=200 id=abcd"),
    LogLine(3, 1.7e9, "WARNING", "localllm.serving", "2026 WARNING localllm.serving load failed id=abc-0"),
    LogLine(4, 1.7e9, "NOTICE", "other", "a level of its own id=x.abc"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with LiveServer(StubModel(), settings(ui=True)) as live:  # type: ignore[arg-type]
        yield live


@pytest.fixture
def recent() -> Iterator[RecentLogs]:
    handler, root = RecentLogs(kept=2000), logging.getLogger()
    handler.setFormatter(logging.Formatter(FORMAT))
    root.addHandler(handler)
    yield handler
    root.removeHandler(handler)


log = logging.getLogger("localllm.test")


def shown(page: str) -> list[str]:
    return re.findall(r'class="log__text">(.*?)</span>', page, re.DOTALL)


@pytest.mark.parametrize(
    ("log_filter", "numbers"),
    [
        (LogFilter(), [1, 2, 3, 4]),
        (LogFilter(level="info"), [1, 3, 4]),
        (LogFilter(level="error"), [4]),  # a level that nobody knows is not held back
        (LogFilter(text="/chat"), [1]),
        (LogFilter(request_id="abc"), [1, 3]),  # its choices are of the request too, another id is not
        (LogFilter(level="warning", text="load", request_id="abc"), [3]),
        (LogFilter(kind="requests"), [1, 2]),
        (LogFilter(kind="server"), [3, 4]),
        (LogFilter(level="info", kind="requests"), [1]),
    ],
)
def test_lines_are_chosen_by_level_text_and_request(log_filter: LogFilter, numbers: list[int]) -> None:
    assert [line.number for line in log_filter.of(LINES)] == numbers
    assert filter_from(dict(httpx.QueryParams(log_filter.query))) == log_filter


@pytest.mark.parametrize(
    "given", [{"level": "loud"}, {"text": "x" * 201}, {"id": "a b"}, {"id": "x" * 129}, {"what": "me"}]
)
def test_a_choice_that_cannot_be_read_is_refused(given: dict[str, str], server: LiveServer) -> None:
    with pytest.raises(InvalidParameter):
        filter_from(given)
    for path in ("/logs", "/logs/live", "/logs/download"):
        assert server.get(path, params=given).status_code == 400


def test_a_line_is_taken_apart_and_one_of_another_make_stays_whole() -> None:
    assert row(LINES[2]).text == "load failed id=abc-0"
    assert (row(LINES[2]).kind, row(LINES[2]).logger) == ("warning", "serving")
    assert row(LINES[3]).text == LINES[3].text


def test_a_long_id_is_short_and_leads_to_its_request() -> None:
    request_id = "4f2a91cc0d5b47a09d1f3c5e7b9a1c2d"
    line = replace(LINES[0], text=f"2026 INFO    localllm.access POST /v1 status=200 id={request_id} key=-")
    urls = request_urls(["engine-0", "several-0/1"], [(request_id, "engine-0"), ("mine", "forgotten")])
    assert urls == {"engine-0": "/dashboard/requests/engine-0", request_id: "/dashboard/requests/engine-0"}
    unknown, known = row(line), row(line, urls)
    assert (unknown.text, unknown.request_id, unknown.rest) == ("POST /v1 status=200 id=", request_id, " key=-")
    assert (unknown.short_id, unknown.request_url) == ("4f2a91cc…", "")
    assert known.request_url == urls[request_id]
    assert row(LINES[0]).request_id == ""  # an id that a client chose may be short
    drawn = render(LogTable((unknown, known)))
    assert f'<abbr class="log__id" title="{request_id}">4f2a91cc…</abbr>' in drawn
    assert 'href="/dashboard/requests/engine-0"' in drawn


def levels_by_id(recent: RecentLogs) -> dict[str, str]:
    return {line.text.rpartition(" id=")[2]: line.level for line in recent.after()}


def test_files_and_streams_of_the_pages_are_logged_at_debug(server: LiveServer, recent: RecentLogs) -> None:
    access = logging.getLogger("localllm.access")
    asked = {
        "page": ("/logs", {}, "INFO"),
        "style": ("/static/logs.css", {}, "DEBUG"),
        "missing": ("/static/nothing.css", {}, "INFO"),
        "part": ("/logs", {"hx-request": "true"}, "DEBUG"),
        "stream": ("/live/status", {}, "DEBUG"),
    }
    access.setLevel(logging.DEBUG)
    try:
        for name, (path, headers, _) in asked.items():
            with server.http.stream("GET", path, headers={**headers, "x-request-id": name}) as answer:
                next(answer.iter_text())
        wait_until(lambda: set(asked) <= set(levels_by_id(recent)))
        found = levels_by_id(recent)
        assert {name: found[name] for name in asked} == {name: level for name, (_, _, level) in asked.items()}
    finally:
        access.setLevel(logging.NOTSET)


def test_the_line_of_a_request_leads_to_its_page(tmp_path: Path, recent: RecentLogs) -> None:
    access = logging.getLogger("localllm.access")
    access.setLevel(logging.INFO)
    with LiveServer(fake_model(tmp_path, PacedRunner()), settings(ui=True)) as server:
        asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        request_id = server.post("/v1/chat/completions", asked).headers["x-request-id"]
        page = server.get("/logs", params={"what": "requests"}).text
        [link] = re.findall(r'href="(/dashboard/requests/[^"]+)"', page)
        assert server.get(link).status_code == 200
        assert f'title="Open the request {request_id}"' in page
        assert shown(server.get("/logs", params={"id": request_id, "what": "server"}).text) == []
    access.setLevel(logging.NOTSET)


def test_htmx_gets_the_lines_alone_and_the_address_of_the_filter(server: LiveServer, recent: RecentLogs) -> None:
    log.warning("found")
    asked = {"what": "server", "level": "", "text": "FOUND", "id": ""}
    part = server.get("/logs", params=asked, headers={"hx-request": "true"})
    assert part.text.startswith('<section class="card card--full logs__card" id="log-card"')
    assert shown(part.text) == ["found"]
    assert part.headers["hx-replace-url"] == "/logs?text=FOUND&what=server"
    assert 'href="/logs/download?text=FOUND&amp;what=server"' in part.text
    nothing = server.get("/logs", params={**asked, "text": "nowhere"}).text
    assert "No line matches. New ones appear here." in nothing
    assert '<option value="server" selected>' in nothing


def test_a_filtered_url_shows_what_it_says_and_nothing_becomes_markup(server: LiveServer, recent: RecentLogs) -> None:
    log.warning("first <b>bold</b>")
    log.info("second")
    page = server.get("/logs", params={"level": "warning", "text": "BOLD"}).text
    assert shown(page) == ["first &lt;b&gt;bold&lt;/b&gt;"]
    assert 'value="BOLD"' in page
    assert '<option value="warning" selected>' in page
    assert 'hx-sse:connect="/logs/live?level=warning&amp;text=BOLD&amp;after=' in page
    text = server.get("/logs/download", params={"level": "warning", "text": "bold"})
    assert text.headers["content-disposition"].startswith("attachment")
    assert text.text.endswith("WARNING localllm.test first <b>bold</b>\n")
    assert text.text.count("\n") == 1


def test_the_stream_goes_on_where_it_was_and_says_what_is_missing(server: LiveServer, recent: RecentLogs) -> None:
    for number in range(2100):
        recent.handle(logging.LogRecord("localllm.test", logging.WARNING, "", 0, f"line {number}", None, None))
    with server.http.stream("GET", "/logs/live", params={"level": "warning", "after": "50"}) as response:
        said = next(response.iter_text())
    assert said.startswith("id: ")
    assert re.search(r">\d\d lines were dropped", said)
    last = said.splitlines()[0].removeprefix("id: ")
    recent.handle(logging.LogRecord("localllm.test", logging.WARNING, "", 0, "the next", None, None))
    back = {"last-event-id": last}
    with server.http.stream("GET", "/logs/live", params={"level": "warning", "after": "50"}, headers=back) as response:
        said = next(response.iter_text())
    assert shown(said) == ["the next"]


@pytest.mark.parametrize("after", ["x", "-1", "9" * 40, "\u0664"])
def test_a_number_that_is_none_is_refused(server: LiveServer, recent: RecentLogs, after: str) -> None:
    assert server.get("/logs/live", params={"after": after}).status_code == 400


def test_without_a_ring_the_page_says_so(server: LiveServer) -> None:
    page = server.get("/logs").text
    assert "keeps no log in memory" in page
    assert "/logs/live" not in page
    assert server.get("/logs/live").status_code == 400
    assert server.get("/logs/download").text == ""


def test_prompts_never_appear(server: LiveServer, recent: RecentLogs) -> None:
    server.http.post("/chat", data={"message": "xyzzy"}, headers={"hx-request": "true"})
    assert "xyzzy" not in server.get("/logs").text
