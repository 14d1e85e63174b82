"""A tiny Qwen2.5-VL served: the real clients and the offline API ask it about pictures, and get the same answer."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import ollama
import openai
import pytest
from PIL import Image

from localllm import LLM, SamplingParams
from localllm.config.settings import EngineConfig
from localllm.engine.speculation import Speculation
from localllm.machine.hardware import Hardware
from localllm.models.fit import plan_memory
from localllm.models.fit.pictures import with_tower
from localllm.models.read_spec import read_spec
from localllm.serving.build import build_engine
from tests.media.pictures import data_url
from tests.models.seeing import make_seeing, picture, save_tokenizer
from tests.serving import settings_for
from tests.tiny import make_tiny_model
from tests.web.live_server import LiveServer, ManagedServer

NUM_TOKENS = 6
IMAGE = picture(70, 33)
QUESTION = "What is it?"


def png() -> bytes:
    stream = io.BytesIO()
    IMAGE.save(stream, "PNG")
    return stream.getvalue()


URL = data_url(png())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("vision") / "qwen"
    make_seeing(made, "qwen2_5_vl")
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ManagedServer]:
    with ManagedServer(settings_for(folder, max_model_len=512, kv_cache_memory_bytes=8 << 20)) as live:
        yield live


@pytest.fixture(scope="module")
def asked(server: ManagedServer) -> dict[str, Any]:
    """The answer of the server to OpenAI's dialect."""
    part = {"type": "image_url", "image_url": {"url": URL}}
    text = {"type": "text", "text": QUESTION}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": [part, text]}]
        answer = client.chat.completions.create(
            model="qwen", messages=messages, max_tokens=NUM_TOKENS, temperature=0, extra_body={"ignore_eos": True}
        )
    return answer.to_dict()


def said(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


def test_usage_counts_the_tokens_of_the_picture(asked: dict[str, Any], server: ManagedServer) -> None:
    details = asked["usage"]["prompt_tokens_details"]
    cost = server.post("/localllm/v1/media/tokens", {"width": IMAGE.width, "height": IMAGE.height}).json()
    assert details["image_tokens"] == cost["tokens"] > 10
    assert 0 < cost["seconds"] < 60
    assert asked["usage"]["completion_tokens"] == NUM_TOKENS


def test_another_picture_is_another_answer_and_the_same_one_is_cached(
    asked: dict[str, Any], server: ManagedServer
) -> None:
    stream = io.BytesIO()
    picture(70, 33, seed=7).save(stream, "PNG")
    answers = []
    for url in (URL, data_url(stream.getvalue())):
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": NUM_TOKENS, "temperature": 0,
                "logprobs": True, "ignore_eos": True}  # fmt: skip
        answers.append(server.post("/v1/chat/completions", body).json())
    assert said(answers[0]) == said(asked)
    first, other = (each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in answers)
    assert first > asked["usage"]["prompt_tokens_details"]["image_tokens"] > other
    assert answers[0]["choices"][0]["logprobs"] != answers[1]["choices"][0]["logprobs"]


def test_grammars_choices_and_stop_strings_work_beside_a_picture(asked: dict[str, Any], server: ManagedServer) -> None:
    content = [{"type": "image_url", "image_url": {"url": URL}}, {"type": "text", "text": QUESTION}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": NUM_TOKENS, "temperature": 0}
    schema = {"type": "object", "properties": {"is_red": {"type": "boolean"}}, "required": ["is_red"],
              "additionalProperties": False}  # fmt: skip
    for fields, pattern in (
        ({"structured_outputs": {"choice": ["red", "blue"]}}, "red|blue"),
        ({"guided_regex": "[ab]{3}"}, "[ab]{3}"),
        ({"structured_outputs": {"json": schema, "disable_any_whitespace": True}, "max_tokens": 40, "n": 2},
         r'\{"is_red": ?(true|false)\}'),
    ):  # fmt: skip
        response = server.post("/v1/chat/completions", {**body, **fields})
        assert response.status_code == 200, response.text
        for choice in response.json()["choices"]:
            assert re.fullmatch(pattern, choice["message"]["content"])
            assert choice["finish_reason"] == "stop"
    stop = said(asked)[2:4]
    stopped = server.post("/v1/chat/completions", {**body, "stop": [stop], "ignore_eos": True}).json()
    assert said(stopped) == said(asked).partition(stop)[0]


def test_anthropic_and_ollama_get_the_same_answer(asked: dict[str, Any], server: ManagedServer) -> None:
    encoded = base64.b64encode(png()).decode()
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        source = {"type": "base64", "media_type": "image/png", "data": encoded}
        content: Any = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
        message = client.messages.create(
            model="qwen",
            messages=[{"role": "user", "content": content}],
            max_tokens=NUM_TOKENS,
            extra_body={"temperature": 0},
        )
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == asked["usage"]["prompt_tokens"]
    assert said(asked).startswith("".join(block.text for block in message.content if block.type == "text"))
    local = ollama.Client(host=server.url, timeout=60)
    sent = ollama.Message(role="user", content=QUESTION, images=[ollama.Image(value=png())])
    answer = local.chat("qwen", [sent], options={"num_predict": NUM_TOKENS, "temperature": 0})
    assert answer.prompt_eval_count == asked["usage"]["prompt_tokens"]
    assert said(asked).startswith(answer.message.content or "")
    assert "vision" in (local.show("qwen").capabilities or [])
    local._client.close()


def test_responses_go_on_about_a_stored_picture(server: ManagedServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        part: Any = [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": QUESTION}]
        first = client.responses.create(model="qwen", input=[{"role": "user", "content": part}], max_output_tokens=4)
        second = client.responses.create(model="qwen", input="And?", previous_response_id=first.id, max_output_tokens=4)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.usage.input_tokens_details.cached_tokens > 10


def test_the_offline_api_sees_the_same(folder: Path, asked: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    with LLM(str(folder), max_model_len=512, kv_cache_memory_bytes=8 << 20) as llm:
        parts = [
            {"type": "image", "image": IMAGE},
            {"type": "image_url", "image_url": {"url": URL}},
        ]
        text = {"type": "text", "text": QUESTION}
        [first], [second] = (
            llm.chat([{"role": "user", "content": [part, text]}], params, use_tqdm=False) for part in parts
        )
        assert [len(each.prompt_token_ids) for each in (first, second)] == [asked["usage"]["prompt_tokens"]] * 2
        assert first.outputs[0].text == second.outputs[0].text == said(asked)
        prompt = llm.apply_chat_template([{"role": "user", "content": QUESTION}])
        mark = "<|vision_start|><|image_pad|><|vision_end|>"
        marked = prompt.replace(QUESTION, mark + QUESTION)
        for image in (IMAGE, [IMAGE], png(), URL):
            [result] = llm.generate([{"prompt": marked, "multi_modal_data": {"image": image}}], params, use_tqdm=False)
            assert result.outputs[0].text == said(asked)
        with pytest.raises(Exception, match="The prompt has 1 marks of pictures; the request has 2 pictures"):
            llm.generate([{"prompt": marked, "multi_modal_data": {"image": [IMAGE, IMAGE]}}], params)
        with pytest.raises(Exception, match="holds only 'image'"):
            llm.generate([{"prompt": marked, "multi_modal_data": {"video": IMAGE}}], params)


@pytest.mark.parametrize("drafts", ["lookup", "a draft model"])
def test_answers_about_pictures_are_the_same_with_drafts(
    drafts: str, folder: Path, asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lookup drafts for every request; a drafter with weights does not see, and drafts for text alone."""
    monkeypatch.setattr(Speculation, "width", lambda self, decoding, ready, limit: limit // len(ready) - 1)
    given = {"draft": str(make_tiny_model(tmp_path / "small", seed=3))} if drafts != "lookup" else {}
    if given:
        save_tokenizer(tmp_path / "small", "qwen2_5_vl")
    sizes = {"max_model_len": 512, "kv_cache_memory_bytes": 8 << 20, "device": "cpu", **given}
    with LiveServer(build_engine(settings_for(folder, **sizes))) as server:
        picture_part = {"type": "image_url", "image_url": {"url": URL}}
        text = {"type": "text", "text": QUESTION}
        cases = (
            [([picture_part, text], True)] if drafts == "lookup" else [([picture_part, text], False), ([text], True)]
        )
        for content, drafted in cases:
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 40, "temperature": 0,
                    "ignore_eos": True}  # fmt: skip
            plain = server.post("/v1/chat/completions", {**body, "speculative": False}).json()
            guess = {"prediction": {"type": "content", "content": said(plain)}} if drafts == "lookup" else {}
            fast = server.post("/v1/chat/completions", {**body, "speculative": True, **guess}).json()
            assert said(fast) == said(plain)
            assert said(plain).startswith(said(asked)) == (picture_part in content)
            assert bool(fast["timings"].get("draft_n")) == drafted


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"deterministic": True}, "not supported with --deterministic on a CPU"),
    ],
)
def test_a_model_that_is_loaded_for_text_alone_says_why(given: dict[str, Any], why: str, folder: Path) -> None:
    config = EngineConfig(max_model_len=512, device="cpu", **given)
    spec = with_tower(folder, read_spec(folder))
    plan = plan_memory(config, spec, 2**20, Hardware((), "a CPU", 2, 2**34, 2**33))
    assert plan.pictures is None
    assert any(note.startswith("Text only: pictures are") and why in note for note in plan.notes)


@pytest.mark.parametrize("division", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_ranks_see_what_one_process_sees(division: str, tmp_path: Path) -> None:
    """Pictures with rows for further layers, and positions with rows and columns; the second from the prefix cache."""
    make_seeing(tmp_path, "qwen3_vl")
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    asked = [{"role": "user", "content": [{"type": "image", "image": IMAGE}, {"type": "text", "text": QUESTION}]}]
    answers = []
    for given in ({}, {division: 2}):
        with LLM(str(tmp_path), max_model_len=512, kv_cache_memory_bytes=8 << 20, device="cpu", **given) as llm:
            for _ in range(2):
                [result] = llm.chat(asked, params, use_tqdm=False)
                answers.append(result.outputs[0].token_ids)
    assert answers == answers[:1] * 4


def test_a_model_can_be_loaded_without_its_tower(folder: Path) -> None:
    with LLM(str(folder), max_model_len=512, kv_cache_memory_bytes=8 << 20, limit_mm_per_prompt={"image": 0}) as llm:
        [result] = llm.generate(["Hello"], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
        assert len(result.outputs[0].token_ids) == 2
        with pytest.raises(Exception, match="does not see pictures"):
            llm.generate([{"prompt": "a", "multi_modal_data": {"image": Image.new("RGB", (9, 9))}}])
