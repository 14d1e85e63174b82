"""Pictures that a model cannot see: a short text in earlier turns and results of tools, refused in the newest message,
alike in all dialects.
"""

import base64
import struct
from typing import Any

import pytest

from localllm.web.api.pictures import picture_text
from tests.web.live_server import LiveServer

PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + struct.pack(">II", 32, 32) + bytes(1000)
DATA = base64.b64encode(PNG).decode()
URL = f"data:image/png;base64,{DATA}"
TEXT = "[image, 32 x 32, 1 KiB: this model reads text]"

OPENAI: dict[str, Any] = {"type": "image_url", "image_url": {"url": URL}}
BLOCK: dict[str, Any] = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
PART: dict[str, Any] = {"type": "input_image", "image_url": URL, "detail": "auto"}


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content[0] if content == (content[0],) and isinstance(content[0], str) else
            [{"type": "text", "text": each} if isinstance(each, str) else each for each in content]}  # fmt: skip


def openai_call(id: str) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"id": id, "type": "function",
            "function": {"name": "view", "arguments": "{}"}}]}  # fmt: skip


ASSISTANT: dict[str, Any] = {"role": "assistant", "content": "Yes."}
ITEM_CALL = {"type": "function_call", "call_id": "c", "name": "view", "arguments": "{}"}
PLAIN_PART = {"type": "input_text", "text": "Hi"}
REPLACED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [user("See", OPENAI), ASSISTANT, user("And?")]}),
    ("/v1/chat/completions", {"messages": [user("See"), openai_call("c"),
                              {"role": "tool", "tool_call_id": "c", "content": [OPENAI]}]}),
    ("/v1/chat/completions", {"messages": [user("See"), openai_call("c"),  # a result that is sent as the user's
                              {"role": "tool", "tool_call_id": "c", "content": "below"}, user("Result:", OPENAI)]}),
    ("/v1/chat/completions", {"messages": [user("See", OPENAI), user("What is it?")]}),  # sent again after a refusal
    ("/v1/messages", {"messages": [user("See", BLOCK), ASSISTANT, user("And?")], "max_tokens": 1}),
    ("/v1/messages", {"messages": [
        user("See"), {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "view", "input": {}}]},
        user({"type": "tool_result", "tool_use_id": "t", "content": [BLOCK]})], "max_tokens": 1}),
    ("/v1/responses", {"input": [user(PLAIN_PART, PART), ASSISTANT, user("And?")], "max_output_tokens": 1}),
    ("/v1/responses", {"input": [user("See"), ITEM_CALL,
                       {"type": "function_call_output", "call_id": "c", "output": [PART]}], "max_output_tokens": 1}),
    ("/api/chat", {"model": "tiny", "messages": [{**user("See"), "images": [DATA]}, ASSISTANT, user("And?")],
                   "stream": False}),
]  # fmt: skip
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": [ASSISTANT, user("See", OPENAI)]}, "messages[1].content[1]"),
    ("/v1/messages", {"messages": [user("See", BLOCK)], "max_tokens": 1}, "messages[0].content[1]"),
    ("/v1/messages", {"messages": [user("See", BLOCK), {"role": "system", "content": "Now."}], "max_tokens": 1},
     "messages[0].content[1]"),
    ("/v1/responses", {"input": [ASSISTANT, user(PART)]}, "input[1].content[0]"),
    ("/api/chat", {"model": "tiny", "messages": [{**user("See"), "images": [DATA]}]}, "messages[0].images[0]"),
    ("/api/generate", {"model": "tiny", "prompt": "See", "images": [DATA]}, "images[0]"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), REPLACED)
def test_an_earlier_picture_becomes_a_short_text(hermes: LiveServer, path: str, body: dict[str, Any]) -> None:
    answer = hermes.post(path, {"max_tokens": 1, **body} if "chat/completions" in path else body)
    assert answer.status_code == 200, answer.text
    assert "a short text replaces a picture or document" in answer.headers["x-localllm-warning"]


@pytest.mark.parametrize(("path", "body", "where"), REFUSED)
def test_a_picture_in_the_newest_message_is_refused(hermes: LiveServer, path: str, body: Any, where: str) -> None:
    answer = hermes.post(path, body)
    assert answer.status_code == 400
    assert f"{where} is a picture, and tiny reads text." in answer.text


def test_the_text_says_the_size_of_the_picture(hermes: LiveServer) -> None:
    messages = REPLACED[0][1]["messages"]
    prompt = hermes.post("/apply-template", {"messages": messages}).json()["prompt"]
    assert TEXT in prompt
    tokens = hermes.post("/tokenize", {"messages": messages}).json()["tokens"]
    assert TEXT in hermes.post("/detokenize", {"tokens": tokens}).json()["prompt"]


def jpeg(width: int, height: int) -> bytes:
    thumbnail = b"\xff\xe1" + struct.pack(">H", 2 + 500) + b"\xff\xc0" * 250
    return b"\xff\xd8" + thumbnail + b"\xff\xc2" + struct.pack(">HBHH", 17, 8, height, width) + bytes(20)


@pytest.mark.parametrize(
    ("picture", "size"),
    [
        (PNG, "32 x 32, "),
        (b"GIF89a" + struct.pack("<HH", 7, 9), "7 x 9, "),
        (jpeg(640, 480), "640 x 480, "),
        (b"RIFF\0\0\0\0WEBPVP8X" + bytes(8) + (99).to_bytes(3, "little") + (49).to_bytes(3, "little"), "100 x 50, "),
        (b"RIFF\0\0\0\0WEBPVP8 " + bytes(10) + struct.pack("<HH", 20, 10), "20 x 10, "),
        (b"RIFF\0\0\0\0WEBPVP8L" + bytes(4) + b"\x2f" + (19 | 9 << 14).to_bytes(4, "little"), "20 x 10, "),
        (PNG[:18], ""),
        (b"\xff\xd8\xff", ""),
        (b"no picture", ""),
    ],
)
def test_sizes_are_read_from_the_head(picture: bytes, size: str) -> None:
    url = f"data:image/x;base64,{base64.b64encode(picture).decode()}"
    assert picture_text(url).startswith(f"[image, {size}")
    assert f"{len(picture)} B: this" in picture_text(url) or len(picture) >= 1024


@pytest.mark.parametrize("url", ["", "https://example.com/a.png", "data:image/png;base64", "data:,x"])
def test_a_picture_that_is_elsewhere_has_no_size(url: str) -> None:
    assert picture_text(url) == "[image: this model reads text]"
