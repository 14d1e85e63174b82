"""Tiny models that hear, served: the real client sends sound in chats, and files to be transcribed."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.media.sounds import wav
from tests.models.hearing import HEARING, PAD, make_hearing, noise, opened, reference_with_sounds
from tests.serving import settings_for
from tests.web.live_server import ManagedServer

NUM_TOKENS = 6
QUESTION = "What is said?"
SOUND = noise(2.4)
WAV = wav(SOUND / 32768)


class Served:
    """A tiny model behind a server, and as transformers has it."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self.path = name, folder / name
        self.model = make_hearing(self.path, name)
        self.live = ManagedServer(settings_for(self.path, max_model_len=512, kv_cache_memory_bytes=8 << 20))

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.live.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module", params=HEARING)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(tmp_path_factory.mktemp("hearing"), request.param)
    with made.live:
        yield made


def sound_part(data: bytes = WAV) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": b64encode(data).decode(), "format": "wav"}}


def chat(*content: Any, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": list(content)}]
    return {"messages": messages, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, **more}


def test_the_openai_client_gets_the_answer_of_transformers(served: Served) -> None:
    """The prompt's ids come from the server's own renderer; what follows them is transformers' greedy choice."""
    with served.client() as client:
        messages: Any = [{"role": "user", "content": [sound_part(), {"type": "text", "text": QUESTION}]}]
        answer = client.chat.completions.create(
            model=served.name, messages=messages, max_tokens=NUM_TOKENS, temperature=0, logprobs=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )  # fmt: skip
    body = answer.to_dict()
    from localllm.models.read_spec import read_spec

    sound = opened(read_spec(served.path)).process(SOUND)
    ids: Any = body["prompt_token_ids"]
    assert ids.count(PAD) == sound.rows
    details: Any = body["usage"]
    assert details["prompt_tokens_details"]["audio_tokens"] == sound.rows
    expected: list[int] = []
    for _ in range(NUM_TOKENS):
        logits = reference_with_sounds(served.model, [*ids, *expected], [sound])
        expected.append(int(logits[-1].argmax()))
    choices: Any = body["choices"]
    assert choices[0]["token_ids"] == expected
