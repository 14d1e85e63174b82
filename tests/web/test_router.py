"""What llama.cpp's clients ask beside answers: slots and templates. Its router and vLLM's sleep are in test_models."""

from __future__ import annotations

from threading import Thread
from typing import Any

from tests.web.live_server import LiveServer, PacedRunner, wait_until

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
