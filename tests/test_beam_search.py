"""Beam search over a real engine, offline and through the API: what a plain search over `transformers` gives."""

import math
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from localllm.config.settings import EngineConfig, ServerConfig, Settings
from localllm.engine.beam_search import BeamSearchParams
from localllm.engine.params import SamplingParams
from localllm.errors import ContextTooLong, InvalidParameter
from localllm.llm import LLM
from localllm.serving.build import build_engine
from tests.engine.harness import all_the_way
from tests.tiny import load_reference
from tests.web.live_server import LiveServer, wait_until

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PROMPTS = [[(i * 37 + 11) % 500 for i in range(45)], [9, 8, 7], [(i * 101 + 5) % 500 for i in range(23)]]
EOS = 2
SEARCHES = [(1, 6, 1.0), (3, 8, 1.0), (4, 6, 0.0), (4, 6, 3.0)]
BEAMS = {"use_beam_search": True, "n": 3, "max_tokens": 8, "return_token_ids": True}


@pytest.fixture(scope="module")
def llm(tiny_llama_path: Path) -> Iterator[LLM]:
    with LLM(str(tiny_llama_path), max_model_len=512, dtype="float32") as llm:
        yield llm


@pytest.fixture(scope="module")
def server(tiny_llama_path: Path) -> Iterator[LiveServer]:
    engine = EngineConfig(model=str(tiny_llama_path), max_model_len=512, kv_cache_memory_bytes=2 << 20, device="cpu",
                          dtype="float32")  # fmt: skip
    with LiveServer(build_engine(Settings(engine, ServerConfig(port=0, ui=False)))) as server:
        yield server


@pytest.fixture(scope="module")
def reference(tiny_llama_path: Path) -> Any:
    model = load_reference(tiny_llama_path)

    @cache
    def scores(tokens: tuple[int, ...]) -> list[float]:
        with torch.inference_mode():
            listed: list[float] = model(torch.tensor([tokens])).logits[0, -1].float().log_softmax(-1).tolist()
        return listed

    def search(prompt: Sequence[int], width: int, max_tokens: int, eos: int | None = EOS, penalty: float = 1.0) -> Any:
        return all_the_way(lambda tokens: scores(tuple(tokens)), prompt, width, max_tokens, eos, penalty)

    return search


@pytest.mark.parametrize(("width", "max_tokens", "penalty"), SEARCHES)
def test_equals_a_plain_search_over_transformers(
    llm: LLM, reference: Any, width: int, max_tokens: int, penalty: float
) -> None:
    params = BeamSearchParams(width, max_tokens, length_penalty=penalty)
    outputs = llm.beam_search([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        wanted = reference(prompt, width, max_tokens, penalty=penalty)
        assert [each.tokens for each in output.sequences] == [[*prompt, *tokens] for tokens, _ in wanted]
        assert [each.cum_logprob for each in output.sequences] == pytest.approx([s for _, s in wanted], abs=2e-3)
        for each in output.sequences:
            assert each.text == llm.get_tokenizer().decode(each.tokens)
            assert len(each.logprobs) == len(each.tokens) - len(prompt)
            assert all(token in told for token, told in zip(each.tokens[len(prompt) :], each.logprobs, strict=True))
    assert llm._engine.loop.stats().used_blocks == 0


def test_width_one_is_greedy(llm: LLM) -> None:
    outputs = llm.beam_search(PROMPTS, BeamSearchParams(1, 12, ignore_eos=True))
    greedy = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False)
    for output, answer in zip(outputs, greedy, strict=True):
        assert output.sequences[0].tokens == [*answer.prompt_token_ids, *answer.outputs[0].token_ids]


def test_what_cannot_run_is_refused_before_anything_does(llm: LLM) -> None:
    before = llm._engine.loop.stats().num_steps
    with pytest.raises(ContextTooLong, match="512"):
        llm.beam_search([PROMPTS[0], [7] * 505], BeamSearchParams(2, 8))
    with pytest.raises(InvalidParameter, match="width 11 needs 22"):
        llm.beam_search(PROMPTS, BeamSearchParams(11, 8))
    assert llm._engine.loop.stats().num_steps == before


def test_completions_have_the_same_beams_with_usage_and_logprobs(server: LiveServer, reference: Any) -> None:
    answer = server.post(TEXT, {"prompt": PROMPTS, **BEAMS, "logprobs": 2}).json()
    for number, prompt in enumerate(PROMPTS):
        choices = answer["choices"][3 * number : 3 * number + 3]
        wanted = reference(prompt, 3, 8)
        assert [choice["token_ids"] for choice in choices] == [tokens for tokens, _ in wanted]
        for choice, (tokens, total) in zip(choices, wanted, strict=True):
            scores = choice["logprobs"]["token_logprobs"]
            assert len(scores) == len(tokens)
            assert all(1 <= len(top) <= 3 for top in choice["logprobs"]["top_logprobs"])
            if choice["finish_reason"] == "length":
                assert math.fsum(scores) == pytest.approx(total, abs=2e-3)
    assert answer["usage"]["prompt_tokens"] == sum(map(len, PROMPTS))
    assert answer["usage"]["completion_tokens"] == sum(len(c["token_ids"]) for c in answer["choices"])
    assert server.stats().used_blocks == 0


def test_a_conversation_is_answered_with_beams(server: LiveServer, reference: Any) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"messages": messages, **BEAMS, "length_penalty": 0.5, "temperature": 0.7, "seed": 3}
    response = server.post(CHAT, body)
    answer = response.json()
    wanted = reference(answer["prompt_token_ids"], 3, 8, penalty=0.5)
    assert [choice["token_ids"] for choice in answer["choices"]] == [tokens for tokens, _ in wanted]
    assert server.model is not None
    assert [choice["message"]["content"] for choice in answer["choices"]] == [
        server.model.tokenizer.decode(tokens) for tokens, _ in wanted
    ]
    assert "'temperature' has no effect" in response.headers["x-localllm-warning"]


REFUSED: list[dict[str, Any]] = [
    {"stream": True}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"presence_penalty": 1}, {"stop": ["x"]},
    {"frequency_penalty": 1}, {"repetition_penalty": 1.1}, {"logit_bias": {"5": 1}}, {"allowed_token_ids": [5]},
    {"bad_words": ["x"]}, {"stop_token_ids": [5]}, {"min_tokens": 2}, {"prompt_logprobs": 1},
    {"structured_outputs": {"regex": "a"}}, {"response_format": {"type": "json_object"}}, {"early_stopping": True},
]  # fmt: skip


@pytest.mark.parametrize("fields", REFUSED, ids=lambda fields: next(iter(fields)))
def test_what_does_not_go_with_it_is_refused_by_name(server: LiveServer, fields: dict[str, Any]) -> None:
    response = server.post(TEXT, {"prompt": "Hello", **BEAMS, **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, next(iter(fields)))


def test_values_that_ask_for_nothing_pass(server: LiveServer) -> None:
    neutral = {"stream": False, "top_p": 1, "top_k": -1, "min_p": 0.0, "stop": [], "min_tokens": 0, "logit_bias": {}}
    assert server.post(TEXT, {"prompt": "Hello", **BEAMS, **neutral}).status_code == 200
    echoed = server.post(TEXT, {"prompt": "Hello", **BEAMS, "echo": True, "logprobs": 1}).json()["error"]
    assert echoed["param"] == "echo"
    assert server.post(TEXT, {"prompt": "Hello", "length_penalty": 0.5}).json()["error"]["param"] == "length_penalty"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 11}, "n"), ({"n": 0}, "n"), ({"length_penalty": 1e300}, "length_penalty"),
        ({"length_penalty": "x"}, "length_penalty"), ({"use_beam_search": 1}, "use_beam_search"),
        ({"max_tokens": 512}, "max_tokens"), ({"logprobs": 21}, "logprobs"), ({"prompt": [[]]}, "prompt"),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused(server: LiveServer, fields: dict[str, Any], param: str) -> None:
    response = server.post(TEXT, {"prompt": "Hello", **BEAMS, **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_a_search_is_one_request_in_every_figure(server: LiveServer) -> None:
    def counts() -> list[float]:
        stats = server.wait_idle()
        each = (stats.ttft, stats.queue, stats.e2e, stats.prefill, stats.decode, stats.inference, stats.tpot)
        return [sum(stats.finished.values()), *(histogram.count for histogram in (*each, stats.prompt_len))]

    before, asked = counts(), {**BEAMS, "n": 4, "max_tokens": 12, "ignore_eos": True}
    computed = server.stats().prompt_tokens
    answer = server.post(TEXT, {"prompt": PROMPTS[1], **asked}).json()
    wait_until(lambda: counts() != before)  # the search is counted behind its last step
    assert [after - one for after, one in zip(counts(), before, strict=True)] == [1] * 9
    latest = server.stats().recent[0]
    assert (latest.num_prompt_tokens, latest.num_output_tokens, latest.finish_reason) == (3, 12, "length")
    assert latest.ttft_s == pytest.approx(answer["timings"]["ttft_ms"] / 1e3, abs=1e-6)
    assert server.stats().prompt_tokens - computed > 100  # every step's tokens count


def test_a_client_that_leaves_ends_its_search(server: LiveServer) -> None:
    body = {"prompt": ["Hello", "Goodbye"], "use_beam_search": True, "n": 8, "max_tokens": 400, "ignore_eos": True}
    with httpx.Client(base_url=server.url) as http, pytest.raises(httpx.ReadTimeout):
        http.post(TEXT, json=body, timeout=0.5)

    def rests() -> bool:
        before = server.stats().num_steps
        time.sleep(0.2)
        return server.stats().num_steps == before

    started = server.stats().num_steps
    wait_until(rests)
    assert server.stats().num_steps - started < 200
    assert (server.stats().num_running, server.stats().num_waiting, server.stats().used_blocks) == (0, 0, 0)
    wait_until(lambda: server.stats().finished.get("abort") == 2)
