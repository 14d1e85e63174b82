"""What a server logs: enough to find a request again, and nothing of what was said in it."""

import json
import logging

import pytest

from tests.web.live_server import LiveServer, PacedRunner

SECRET = "xyzzy"


def test_no_line_holds_a_prompt_whatever_comes_of_the_request(
    server: LiveServer, runner: PacedRunner, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    said = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 4}
    bodies = [
        said,
        {**said, "stream": True},
        {**said, "messages": [{"role": SECRET, "content": SECRET}]},
        {**said, "messages": SECRET},
        {**said, "temperature": SECRET},
        {**said, "messages": [{"role": "user", "content": SECRET * 5000}]},
    ]
    for body in bodies:
        for path in ("/v1/chat/completions", "/v1/messages", "/api/chat"):
            server.post(path, body)
    server.post("/v1/completions", {"prompt": SECRET, "max_tokens": 4})
    server.http.post(
        "/v1/chat/completions", content=json.dumps(said)[:-2], headers={"content-type": "application/json"}
    )
    runner.failing = True
    server.post("/v1/chat/completions", said)
    runner.failing = False
    assert "POST /v1/chat/completions status=200" in caplog.text
    assert "step failed" in caplog.text
    ours = [record for record in caplog.records if not record.name.startswith("http")]  # that is the client
    assert not [record for record in ours if SECRET in caplog.handler.format(record)]
