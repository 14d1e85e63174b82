"""llama.cpp's own routes: POST /completion, GET /props and /slots, templates. Its router is in test_models."""

from threading import Thread
from typing import Any

import pytest

from tests.web.harness import events_of
from tests.web.live_server import MAX_MODEL_LEN, LiveServer, PacedRunner, wait_until

PATH = "/completion"
ASKED: dict[str, Any] = {"prompt": "the quick brown", "n_predict": 5, "temperature": 0, "return_tokens": True}


def test_a_stream_says_the_same_as_the_whole_answer(server: LiveServer) -> None:
    whole = server.post(PATH, ASKED).json()
    *pieces, last = events_of(server.post(PATH, {**ASKED, "stream": True}).text)
    assert "".join(each["content"] for each in pieces) == whole["content"]
    assert [each for piece in pieces for each in piece["tokens"]] == whole["tokens"]
    assert not any(each["stop"] for each in pieces)
    for ended in (whole, last):
        assert (ended["stop"], ended["stop_type"], ended["tokens_predicted"]) == (True, "limit", 5)
        assert (ended["model"], ended["truncated"]) == ("tiny", False)
        assert ended["tokens_evaluated"] > 0
        assert ended["generation_settings"]["n_predict"] == 5
        assert ended["timings"]["predicted_n"] == 5


def test_a_prompt_of_token_ids_and_a_stop_string(server: LiveServer) -> None:
    ids = server.post("/tokenize", {"content": "the quick brown"}).json()["tokens"]
    whole = server.post(PATH, {**ASKED, "prompt": ids}).json()
    stop = whole["content"][:1]
    stopped = server.post(PATH, {**ASKED, "prompt": ids, "stop": [stop]}).json()
    assert (stopped["stop_type"], stopped["stopping_word"], stopped["content"]) == ("word", stop, "")


def test_probabilities_and_grammars(server: LiveServer) -> None:
    body = {**ASKED, "n_probs": 3, "grammar": 'root ::= "yes"', "n_predict": -1}
    for answer in (server.post(PATH, body).json(), *events_of(server.post(PATH, {**body, "stream": True}).text)[:1]):
        first = answer["completion_probabilities"][0]
        assert {"top_logprobs", "id", "token", "bytes", "logprob"} <= first.keys()
    assert server.post(PATH, {**ASKED, "json_schema": {"type": "null"}, "n_predict": -1}).json()["content"] == "null"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"n_predict": 0}, "n_predict"),
    ({"repeat_penalty": -1}, "repeat_penalty"),
    ({"prompt": None}, "prompt"),
    ({"prompt": "a " * 2 * MAX_MODEL_LEN}, "prompt"),
    ({"grammar": "x", "json_schema": {}}, "json_schema"),
    ({"n_probs": 10_000}, "n_probs"),
    ({"mirostat": 3}, "mirostat"),
    ({"image_data": [1]}, "image_data"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("stream", [False, True])
def test_bad_fields_are_named(server: LiveServer, fields: dict[str, Any], param: str, stream: bool) -> None:
    refused = server.post(PATH, {**ASKED, **fields, "stream": stream})
    assert refused.status_code == 400, refused.text
    assert refused.json()["error"]["param"] == param


def test_unknown_fields_are_answered_with_a_warning(server: LiveServer) -> None:
    assert "unknown field 'dynatemp'" in server.post(PATH, {**ASKED, "dynatemp": 1}).headers["x-localllm-warning"]


def test_props_describe_the_model(hermes: LiveServer) -> None:
    told = hermes.get("/props").json()
    assert told == hermes.get("/props?model=tiny").json()
    assert told["default_generation_settings"]["n_ctx"] == MAX_MODEL_LEN
    assert told["default_generation_settings"]["params"]["temperature"] == 0.6
    assert (told["total_slots"], told["modalities"]) == (8, {"vision": False, "audio": False})
    assert told["chat_template_caps"]["supports_tools"]
    assert "<|im_start|>" in told["chat_template"]
    assert hermes.get("/props?model=nobody").status_code == 404


CHAT = "/v1/chat/completions"
USER: list[Any] = [{"role": "user", "content": "Hi"}]


def test_slots_are_the_live_sequences(server: LiveServer, runner: PacedRunner) -> None:
    assert server.get("/slots").json() == []
    runner.step_s = 0.02
    body = {"messages": USER, "max_tokens": 60, "n": 2}
    asking = Thread(target=server.post, args=(CHAT, body))
    asking.start()
    wait_until(lambda: any(slot["next_token"][0]["n_decoded"] > 2 for slot in server.get("/slots").json()))
    slots = server.get("/slots?model=tiny").json()
    assert [slot["id"] for slot in slots] == [0, 1]
    assert {(slot["model"], slot["n_ctx"], slot["is_processing"]) for slot in slots} == {("tiny", 512, True)}
    assert len({slot["id_task"] for slot in slots}) == 2
    runner.step_s = 0.0
    asking.join(20)


def test_a_template_is_applied_and_nothing_answered(hermes: LiveServer) -> None:
    assert hermes.model is not None
    tool = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
    for more in ({}, {"tools": [tool]}, {"chat_template_kwargs": {"enable_thinking": False}}):
        prompt = hermes.post("/apply-template", {"messages": USER, **more}).json()["prompt"]
        switches = dict(more.get("chat_template_kwargs", {})) | ({"tools": [tool]} if "tools" in more else {})
        assert prompt == hermes.model.chat_template.render(USER, **switches)
        count = hermes.post("/v1/chat/completions/input_tokens", {"messages": USER, **more}).json()["input_tokens"]
        assert count == len(hermes.model.tokenizer.encode(prompt, add_special_tokens=False))
    for body, param in (({}, "messages"), ({"messages": "Hi"}, "messages"), ({"messages": USER, "n": "x"}, "n")):
        refused = hermes.post("/apply-template", body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
