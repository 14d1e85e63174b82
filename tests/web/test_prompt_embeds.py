"""`prompt_embeds` over a real socket and offline: where it is allowed, and where it is not."""

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from torch import Tensor

from localllm.config.settings import EngineConfig, ServerConfig, Settings
from localllm.engine.beam_search import BeamSearchParams
from localllm.engine.params import SamplingParams
from localllm.errors import ContextTooLong, InvalidParameter
from localllm.llm import LLM
from localllm.serving.build import build_engine
from tests.tiny import load_reference
from tests.web.live_server import LiveServer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
IDS = [(i * 37 + 11) % 500 for i in range(30)]
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def rows(tiny_llama_path: Path) -> Tensor:
    """[30, hidden] of IDS, as transformers has them."""
    weight: Tensor = load_reference(tiny_llama_path).get_input_embeddings().weight.detach()
    return weight[IDS]


@pytest.fixture(scope="module")
def open_server(tiny_llama_path: Path) -> Iterator[LiveServer]:
    engine = EngineConfig(model=str(tiny_llama_path), max_model_len=256, kv_cache_memory_bytes=2 << 20, device="cpu",
                          dtype="float32", enable_prompt_embeds=True)  # fmt: skip
    with LiveServer(build_engine(Settings(engine, ServerConfig(port=0, ui=False)))) as server:
        yield server


def encoded(tensor: Any) -> str:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


@pytest.mark.parametrize("stream", [False, True])
def test_openais_client_sends_embeddings_as_vllms_users_do(open_server: LiveServer, rows: Tensor, stream: bool) -> None:
    with openai.OpenAI(base_url=f"{open_server.url}/v1", api_key="none", max_retries=0) as client:
        more = {"prompt_embeds": encoded(rows), "ignore_eos": True}
        asked: dict[str, Any] = {"model": "", "prompt": None, "max_tokens": 8, "temperature": 0}
        answer = client.completions.create(**asked, stream=stream, extra_body=more)
        texts = [chunk.choices[0].text for chunk in answer] if stream else [answer.choices[0].text]
        tokens = open_server.post(TEXT, {"prompt": IDS, **GREEDY}).json()
    assert "".join(texts) == tokens["choices"][0]["text"]


def test_several_and_prompts_beside_them_come_in_order(open_server: LiveServer, rows: Tensor) -> None:
    given = [encoded(rows), encoded(rows[None, :9].bfloat16().float())]
    answer = open_server.post(TEXT, {"prompt_embeds": given, "prompt": [IDS, IDS[:9]], "n": 2, **GREEDY}).json()
    first, second, third, fourth = (answer["choices"][i : i + 2] for i in range(0, 8, 2))
    assert [choice["index"] for choice in answer["choices"]] == list(range(8))
    assert {choice["text"] for choice in first} == {choice["text"] for choice in third}
    assert {choice["prompt_token_ids"] for choice in first + second} == {None}
    assert [choice["prompt_token_ids"] for choice in third + fourth] == [IDS, IDS, IDS[:9], IDS[:9]]
    assert answer["usage"]["prompt_tokens"] == 2 * (30 + 9)
    assert open_server.stats().used_blocks == 0


def refusal(server: LiveServer, body: dict[str, Any], path: str = TEXT) -> dict[str, Any]:
    response = server.post(path, body)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def test_without_the_flag_it_is_refused_and_the_flag_named(server: LiveServer) -> None:
    for given in ("AAAA", ["AAAA"], []):
        error = refusal(server, {"prompt_embeds": given, "max_tokens": 1})
        assert error["param"] == "prompt_embeds"
        assert "--enable-prompt-embeds" in error["message"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt_embeds": "not base64!"}, "prompt_embeds"), ({"prompt_embeds": ""}, "prompt_embeds"),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds"), ({"prompt_embeds": []}, "prompt_embeds"),
    ({"prompt_embeds": 3}, "prompt_embeds"), ({"prompt_embeds": [3]}, "prompt_embeds[0]"),
    ({"prompt_embeds": [["AAAA"]]}, "prompt_embeds[0]"), ({"prompt_embeds": ["AAAA"] * 3000}, "prompt_embeds"),
    ({"prompt_embeds": encoded(torch.zeros(3, 65))}, "prompt_embeds"),
    ({"prompt_embeds": encoded(torch.full((3, 64), torch.nan))}, "prompt_embeds"),
    ({"echo": True}, "echo"), ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"repetition_penalty": 1.2}, "repetition_penalty"), ({"truncate_prompt_tokens": 2}, "truncate_prompt_tokens"),
    ({"max_tokens": 250}, "max_tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=[f"{param}{i}" for i, (_, param) in enumerate(REFUSED)])
def test_what_cannot_be_honoured_is_refused_by_name(
    open_server: LiveServer, rows: Tensor, fields: dict[str, Any], param: str
) -> None:
    assert refusal(open_server, {"prompt_embeds": encoded(rows), "max_tokens": 1, **fields})["param"] == param


def test_too_long_is_told_with_both_numbers(open_server: LiveServer) -> None:
    error = refusal(open_server, {"prompt_embeds": encoded(torch.zeros(256, 64)), "max_tokens": 1})
    assert error["code"] == "context_length_exceeded"
    assert "256" in error["message"]


def test_conversations_take_none_and_the_other_fields_go_with_it(open_server: LiveServer, rows: Tensor) -> None:
    error = refusal(open_server, {"messages": [{"role": "user", "content": "x"}], "prompt_embeds": "AAAA"}, CHAT)
    assert (error["param"], error["code"]) == ("prompt_embeds", "unsupported_parameter")
    assert refusal(open_server, {"max_tokens": 1})["param"] == "prompt"
    more = {
        "logprobs": 2,
        "stop": ["zz"],
        "seed": 3,
        "frequency_penalty": 0.5,
        "structured_outputs": {"choice": ["yes"]},
    }
    choice = open_server.post(TEXT, {"prompt_embeds": encoded(rows), **more}).json()["choices"][0]
    assert choice["text"] == "yes"
    assert len(choice["logprobs"]["tokens"]) >= 1


def test_offline_a_tensor_is_a_prompt(tiny_llama_path: Path, rows: Tensor) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(str(tiny_llama_path), max_model_len=256, dtype="float32", enable_prompt_embeds=True) as llm:
        prompts = [{"prompt_embeds": rows}, {"prompt_token_ids": IDS}]
        embedded, tokens = llm.generate(prompts, params, use_tqdm=False)
        assert embedded.outputs[0].token_ids == tokens.outputs[0].token_ids
        assert (embedded.prompt, embedded.prompt_token_ids) == (None, [])
        streamed = [token for event in llm.stream({"prompt_embeds": rows}, params) for token in event.token_ids]
        assert streamed == tokens.outputs[0].token_ids
        with pytest.raises(InvalidParameter, match=r"\[tokens, 64\]"):
            llm.generate([IDS, {"prompt_embeds": rows[:, :10]}], params)
        with pytest.raises(ContextTooLong, match="256"):
            llm.generate({"prompt_embeds": torch.zeros(300, 64)}, params)
        with pytest.raises(InvalidParameter, match="prompt_embeds"):
            llm.beam_search({"prompt_embeds": rows}, BeamSearchParams(2, 3))
    with LLM(str(tiny_llama_path), max_model_len=256) as llm, pytest.raises(InvalidParameter) as caught:
        llm.generate({"prompt_embeds": rows}, params)
    assert "--enable-prompt-embeds" in caught.value.hint
