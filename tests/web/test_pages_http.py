"""The pages over a real socket: with scripts, without them, and under attack."""

import re
import time
from pathlib import Path

import httpx
import pytest

from localllm.errors import ContextTooLong
from localllm.serving.phases import Phase
from localllm.web.pages.frame.forms import CONTENT_SECURITY_POLICY
from tests.web.chat_page import SCRIPTED, listen, stream_url
from tests.web.harness import Pages, browser_of
from tests.web.live_server import LiveServer, PacedRunner, fake_model, settings, wait_until
from tests.web.pages_stub import StubModel


def test_pages_answer_with_a_strict_policy(browser: httpx.Client) -> None:
    for path in ("/", "/dashboard", "/dev/patterns", "/c/unknown"):
        answer = browser.get(path)
        assert answer.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["content-type"].startswith("text/html")
        assert not re.search(r"<script(?![^>]* src=\"/static/)", answer.text)


def test_without_scripts_a_post_ends_on_the_page_with_the_whole_reply(browser: httpx.Client) -> None:
    answer = browser.post("/chat", data={"message": "What is paged attention?"})
    assert answer.status_code == 200
    assert answer.history[0].status_code == 303
    assert "<strong>Paged attention</strong>" in answer.text
    assert "to first word" in answer.text
    assert 'hx-sse:connect="/c/' not in answer.text


def test_without_scripts_the_next_turn_carries_the_history(served: Pages, browser: httpx.Client) -> None:
    page = browser.post("/chat", data={"message": "first", "system": "Be kind."})
    conversation = re.search(r'name="conversation" value="([^"]+)"', page.text)
    assert conversation
    browser.post("/chat", data={"message": "second", "conversation": conversation[1], "system": "Be kind."})
    said = "".join(map(chr, served.model.client.asked[-1].prompt_token_ids))
    assert said.startswith("system: Be kind.\nuser: first\nassistant: **Paged")
    assert said.endswith("user: second")


def test_with_scripts_the_reply_streams_and_ends_with_its_figures(browser: httpx.Client) -> None:
    turn = browser.post("/chat", data={"message": "hi"}, headers=SCRIPTED)
    assert turn.status_code == 200
    assert "Generating" in turn.text
    said = listen(browser, stream_url(turn.text))
    assert "<strong>Paged attention</strong>" in said
    assert "Reply finished, " in said
    assert 'hx-swap="outerMorph"' in said
    assert turn.headers["hx-replace-url"].startswith("/c/")
    assert "Paged attention" in browser.get(turn.headers["hx-replace-url"]).text


def test_sampling_reaches_the_engine_and_empty_fields_keep_the_models_defaults(
    served: Pages, browser: httpx.Client
) -> None:
    browser.post("/chat", data={"message": "a", "temperature": "0", "max_tokens": "7"})
    assert served.model.client.asked[-1].params.temperature == 0
    assert served.model.client.asked[-1].params.max_tokens == 7
    browser.post("/chat", data={"message": "a", "temperature": "", "max_tokens": ""})
    assert served.model.client.asked[-1].params.temperature == 0.7
    assert served.model.client.asked[-1].params.max_tokens is None


@pytest.mark.parametrize(
    ("form", "status", "says"),
    [
        ({"message": "  "}, 400, "The message is empty."),
        ({"message": "x", "temperature": "warm"}, 400, "Temperature must be a number"),
        ({"message": "x", "temperature": "-1"}, 400, "temperature must be between"),
        ({"message": "x", "temperature": "nan"}, 400, "temperature must be a finite number"),
        ({"message": "x", "max_tokens": "1e9"}, 400, "Longest reply must be a whole number"),
        ({"message": "x", "max_tokens": "0"}, 400, "max_tokens must be"),
        ({"message": "x", "conversation": "gone"}, 404, "not on the server"),
        ({"message": "x" * 1_000_000}, 413, "The message is too long."),
        ({"message": "x" * 13_000_000}, 413, "too large"),
        ({"message": "x", "system": "x" * 300_000}, 413, "The system prompt is too long."),
    ],
)
def test_bad_input_is_refused_in_place_and_as_a_page(
    browser: httpx.Client, form: dict[str, str], status: int, says: str
) -> None:
    fragment = browser.post("/chat", data=form, headers=SCRIPTED)
    assert fragment.status_code == status
    assert says in fragment.text
    assert fragment.text.startswith('<div class="notice"')
    page = browser.post("/chat", data=form)
    assert page.status_code == status
    assert says in page.text
    assert "<!doctype html>" in page.text
    assert len(page.content) < 200_000


def test_engines_refusal_is_shown_where_the_reply_would_be(served: Pages, browser: httpx.Client) -> None:
    served.model.client.failure = ContextTooLong("Too long for the model.", "540 needed, 512 fit.", "Start a new chat.")
    page = browser.post("/chat", data={"message": "hi"})
    assert page.status_code == 200
    for words in ("Too long for the model.", "540 needed, 512 fit.", "Start a new chat."):
        assert words in page.text


def test_second_message_waits_for_the_first(served: Pages, browser: httpx.Client) -> None:
    served.model.client.every_s = 0.05
    turn = browser.post("/chat", data={"message": "hi"}, headers=SCRIPTED)
    conversation = turn.headers["hx-replace-url"].removeprefix("/c/")
    again = browser.post("/chat", data={"message": "more", "conversation": conversation}, headers=SCRIPTED)
    assert (again.status_code, "still being written" in again.text) == (409, True)
    stop = stream_url(turn.text).replace("/stream", "/stop")
    assert browser.post(stop, headers=SCRIPTED).status_code == 204
    assert "Reply stopped" in listen(browser, stream_url(turn.text))
    assert "stopped by you" in browser.get(f"/c/{conversation}").text


@pytest.mark.parametrize(
    "headers",
    [
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
    ],
)
@pytest.mark.parametrize("path", ["/chat", "/dashboard/requests/x/cancel", "/c/a/m/b/stop"])
def test_posts_from_other_sites_are_refused(
    served: Pages, browser: httpx.Client, path: str, headers: dict[str, str]
) -> None:
    asked = len(served.model.client.asked)
    assert browser.post(path, data={"message": "hi"}, headers=headers).status_code == 403
    assert len(served.model.client.asked) == asked


def test_hostile_reply_and_message_stay_text(browser: httpx.Client) -> None:
    page = browser.post("/chat", data={"message": "hostile <script>alert(1)</script> <img src=x onerror=y>"}).text
    assert "<script>" not in page
    assert "<img" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert not re.search(r'href="(javascript|data):', page)
    assert "<hx-partial" not in page
    assert '<div hx-get="/dashboard"' not in page


def test_dashboard_is_complete_without_scripts_and_reloads_itself(browser: httpx.Client) -> None:
    page = browser.get("/dashboard").text
    assert '<noscript><meta http-equiv="refresh" content="2"></noscript>' in page
    for title in (
        "KV cache",
        "Batch per step",
        "Latency",
        "Live requests",
        "Finished requests",
        "Machine",
        "Model and memory plan",
    ):
        assert f">{title}</h2>" in page


def test_live_dashboard_sends_each_tile_once_and_then_what_changed(browser: httpx.Client) -> None:
    said = listen(browser, "/live/dashboard", seconds=1.2)
    events = [event for event in said.split("\n\n") if event.strip()]
    assert events[0].count("<hx-partial") == 16
    assert all(event.count("<hx-partial") < 8 for event in events[1:])


def test_request_can_be_cancelled_from_the_dashboard(served: Pages, browser: httpx.Client) -> None:
    served.model.client.every_s = 0.05
    turn = browser.post("/chat", data={"message": "hi"}, headers=SCRIPTED)
    wait_until(lambda: bool(served.model.client.running))
    row = re.search(r'hx-post="(/dashboard/requests/[^"]+/cancel)"', browser.get("/dashboard").text)
    assert row
    assert browser.post(row[1], headers=SCRIPTED).status_code == 204
    assert "Reply stopped" in listen(browser, stream_url(turn.text))


def test_static_files_are_versioned_compressed_and_confined(browser: httpx.Client) -> None:
    page = browser.get("/").text
    script = re.search(r'src="(/static/vendor/htmx[^"]+)"', page)
    assert script
    answer = browser.get(script[1])
    assert answer.headers["content-encoding"] == "gzip"
    assert "immutable" in answer.headers["cache-control"]
    assert answer.headers["content-type"].startswith("text/javascript")
    assert browser.get(script[1], headers={"if-none-match": answer.headers["etag"]}).status_code == 304
    for path in (
        "/static/../app.py",
        "/static/%2e%2e/app.py",
        "/static/..%2fapp.py",
        "/static//etc/passwd",
        "/static/x",
    ):
        assert browser.get(path).status_code == 404


def test_while_the_model_loads_pages_say_so_and_refuse_politely() -> None:
    with LiveServer(None, settings(ui=True)) as server, browser_of(server) as browser:
        assert "Loading tiny" in browser.get("/").text
        assert "Loading tiny" in browser.get("/dashboard").text
        assert browser.post("/chat", data={"message": "hi"}, headers=SCRIPTED).status_code == 503
        with browser.stream("GET", "/live/status?loading=1") as stream:
            server.manager.entries[0].record_phase(Phase("weights", "1.2 of 8.3 MiB", 0.1, 0.15))
            news = stream.iter_text()
            wait_until(lambda: "1.2 of 8.3 MiB" in next(news))
            server.manager.adopt(StubModel())  # type: ignore[arg-type]
            assert "event: ready" in "".join(news)


def test_stopping_the_server_ends_open_streams() -> None:
    with LiveServer(StubModel(), settings(ui=True)) as server:  # type: ignore[arg-type]
        browser = browser_of(server)
        with browser.stream("GET", "/live/dashboard") as stream:
            chunks = stream.iter_text()
            next(chunks)
            server.server.should_exit = True
            started = time.monotonic()
            list(chunks)
            assert time.monotonic() - started < 3
        browser.close()


def test_chat_runs_through_the_real_engine_and_stop_returns_the_blocks(tmp_path: Path) -> None:
    runner = PacedRunner()
    model = fake_model(tmp_path, runner)
    with LiveServer(model, settings(ui=True)) as server, browser_of(server) as browser:
        page = browser.post("/chat", data={"message": "hello", "max_tokens": "12"})
        assert "12 tokens" in page.text
        assert "cut off: token limit" in page.text
        runner.step_s = 0.01
        turn = browser.post("/chat", data={"message": "go on"}, headers=SCRIPTED)
        wait_until(lambda: server.stats().num_running == 1)
        assert server.stats().used_blocks > 0
        browser.post(stream_url(turn.text).replace("/stream", "/stop"), headers=SCRIPTED)
        server.wait_idle()
        assert "Reply stopped" in listen(browser, stream_url(turn.text))
        assert "KV cache" in browser.get("/dashboard").text


def test_browser_that_gives_up_on_a_plain_post_returns_the_blocks(tmp_path: Path) -> None:
    runner = PacedRunner()
    runner.step_s = 0.02
    with LiveServer(fake_model(tmp_path, runner), settings(ui=True)) as server:
        with browser_of(server) as browser, pytest.raises(httpx.ReadTimeout):
            browser.post("/chat", data={"message": "hello"}, timeout=0.3)
        server.wait_idle()
