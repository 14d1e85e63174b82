"""What Claude Code sends to /v1/messages: a line for bills, tools of a hosted service, documents, and prompts that are
longer than the context.
"""

import base64
import re
from typing import Any

import pytest

from localllm.web.api.anthropic.conversation import without_billing
from tests.web.harness import pdf as pdf_of
from tests.web.live_server import MAX_MODEL_LEN, LiveServer

PATH = "/v1/messages"
USER: dict[str, Any] = {"role": "user", "content": "Hi"}
ASKED: dict[str, Any] = {"model": "tiny", "messages": [USER], "max_tokens": 1}
LINE = "x-anthropic-billing-header: cc_version=2.1.197.{}; cc_entrypoint=sdk-cli; cch=0{};"
WEB_SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


@pytest.mark.parametrize(
    ("system", "rest"),
    [
        ([text(LINE.format(1, 2)), text("Be kind.")], [text("Be kind.")]),
        ([text(LINE.format(1, 2) + "\nBe kind.")], [text("Be kind.")]),
        (LINE.format(1, 2) + "\nBe kind.", "Be kind."),
        (LINE.format(1, 2), ""),
        ([text("Be kind."), text(LINE.format(1, 2))], [text("Be kind."), text(LINE.format(1, 2))]),
        ("Be kind.", "Be kind."),
        (None, None),
        ([], []),
    ],
)
def test_the_line_for_bills_is_taken_off_the_head(system: Any, rest: Any) -> None:
    assert without_billing(system) == rest


def test_a_new_session_reuses_the_prompt_of_the_one_before(hermes: LiveServer) -> None:
    body = text("You are an agent. " * 20)
    usages = [hermes.post(PATH, {**ASKED, "system": [text(LINE.format(i, i)), body]}).json()["usage"] for i in range(2)]
    cached = usages[1]["cache_read_input_tokens"]
    assert cached >= 0.9 * (cached + usages[1]["input_tokens"])


def test_tools_of_a_hosted_service_are_left_out(hermes: LiveServer) -> None:
    own = {"name": "read", "input_schema": {"type": "object"}}
    answer = hermes.post(PATH, {**ASKED, "tools": [own, WEB_SEARCH, {"type": "web_fetch_20250910", "name": "f"}]})
    assert answer.status_code == 200, answer.text
    assert "web_search_20250305, web_fetch_20250910" in answer.headers["x-localllm-warning"]
    named = {**ASKED, "tools": [own, WEB_SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}}
    assert hermes.post(PATH, named).status_code == 400


def test_blocks_of_a_hosted_service_are_left_out(hermes: LiveServer) -> None:
    said = [{"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}, text("Found.")]
    answer = hermes.post(PATH, {**ASKED, "messages": [USER, {"role": "assistant", "content": said}, USER]})
    assert "another server ran" in answer.headers["x-localllm-warning"]


def prompt_of(server: LiveServer, *blocks: dict[str, Any]) -> Any:
    """Return the answer to a request for the number of tokens, and the texts that its prompt has."""
    body = {"messages": [{"role": "user", "content": list(blocks)}]}
    return server.post(f"{PATH}/count_tokens", body)


def document(**source: Any) -> dict[str, Any]:
    return {"type": "document", "source": source}


PDF = base64.b64encode(pdf_of("The quick brown fox")).decode()


@pytest.mark.parametrize(
    "source",
    [
        {"type": "text", "media_type": "text/plain", "data": "The quick brown fox"},
        {"type": "content", "content": "The quick brown fox"},
        {"type": "content", "content": [{"type": "text", "text": "The quick brown fox"}]},
        {"type": "base64", "media_type": "application/pdf", "data": PDF},
    ],
)
def test_documents_are_read_as_text(hermes: LiveServer, source: dict[str, Any]) -> None:
    plain = prompt_of(hermes, text("The quick brown fox"), text("What?")).json()
    for _ in range(2):  # the text of a PDF is kept
        assert prompt_of(hermes, document(**source), text("What?")).json() == plain
    titled = prompt_of(hermes, {**document(**source), "title": "Fox", "context": "A tale"}, text("What?")).json()
    assert titled["input_tokens"] > plain["input_tokens"]


UNREADABLE: list[dict[str, Any]] = [
    {"type": "base64", "media_type": "application/pdf", "data": base64.b64encode(b"%PDF-1.7 broken").decode()},
    {"type": "base64", "media_type": "application/pdf", "data": "???"},
    {"type": "url", "url": "https://example.com/a.pdf"},
]


@pytest.mark.parametrize("source", UNREADABLE, ids=lambda source: source.get("data", "url"))
def test_a_document_without_a_text_is_refused_only_in_the_newest_message(
    hermes: LiveServer, source: dict[str, Any]
) -> None:
    refused = prompt_of(hermes, document(**source))
    assert refused.status_code == 400, refused.text
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "read", "input": {}}]}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [document(**source)]}
    messages = [USER, call, {"role": "user", "content": [result, document(**source)]}]
    answer = hermes.post(PATH, {**ASKED, "messages": messages})
    assert answer.status_code == 200, answer.text
    assert "each of 2 pictures and documents" in answer.headers["x-localllm-warning"]


@pytest.mark.parametrize("source", [{"type": "base64", "media_type": "text/rtf", "data": "x"}, {}, {"type": "text"}])
def test_bad_documents_are_named(hermes: LiveServer, source: dict[str, Any]) -> None:
    refused = prompt_of(hermes, document(**source))
    assert refused.status_code == 400
    assert "messages[0].content[0].source" in refused.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("words", [MAX_MODEL_LEN * 2, 2_000_000])
def test_a_prompt_over_the_context_is_refused_in_claude_codes_words(
    hermes: LiveServer, stream: bool, words: int
) -> None:
    messages = [{"role": "user", "content": "a " * words}]
    refused = hermes.post(PATH, {**ASKED, "messages": messages, "stream": stream})
    message = refused.json()["error"]["message"]
    found = re.match(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", message)  # as in its program
    assert refused.status_code == 400
    assert found is not None
    assert int(found[1]) > int(found[2]) == MAX_MODEL_LEN - 1
    assert "--max-model-len" in message
