"""Anthropic's SDK."""

import json

from anthropic import Anthropic, AuthenticationError, BadRequestError, NotFoundError
from asked import PERSON, PERSON_QUESTION, QUESTION, WEATHER, WEATHER_PARAMETERS, WEATHER_QUESTION, expect_answer
from checking import KEY, MODEL, URL, refused, run

client = Anthropic(base_url=URL.removesuffix("/v1"), api_key=KEY, max_retries=0)
ask = client.messages.create
question = [{"role": "user", "content": QUESTION}]
tool = {"name": WEATHER["name"], "description": WEATHER["description"], "input_schema": WEATHER_PARAMETERS}


def models() -> None:
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


def chat() -> None:
    answer = ask(model=MODEL, messages=question, system="You are a helpful assistant.", max_tokens=100)
    expect_answer(answer.content[0].text)
    assert answer.stop_reason == "end_turn"


def stream() -> None:
    with client.messages.stream(model=MODEL, messages=question, max_tokens=100) as events:
        expect_answer("".join(events.text_stream))
        assert events.get_final_message().usage.output_tokens > 0


def tools() -> None:
    messages = [{"role": "user", "content": WEATHER_QUESTION}]
    for choice in ({"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "get_weather"}):
        answer = ask(model=MODEL, messages=messages, tools=[tool], tool_choice=choice, max_tokens=100)
        (call,) = [block for block in answer.content if block.type == "tool_use"]
        assert (call.input, answer.stop_reason) == ({"city": "Paris"}, "tool_use")
    forced = {"model": MODEL, "messages": messages, "tools": [tool], "tool_choice": choice, "max_tokens": 100}
    with client.messages.stream(**forced) as events:
        assert events.get_final_message().content[-1].input == {"city": "Paris"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": '{"temperature": 21, "sky": "sunny"}'}
    messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    assert "sunny" in ask(model=MODEL, messages=messages, tools=[tool], max_tokens=100).content[0].text


def schema() -> None:
    wanted = {"format": {"type": "json_schema", "schema": PERSON}}
    messages = [{"role": "user", "content": PERSON_QUESTION}]
    answer = ask(model=MODEL, messages=messages, output_config=wanted, max_tokens=100)
    assert json.loads(answer.content[0].text) == {"name": "Clara", "age": 27, "city": "Rome"}


def errors() -> None:
    with refused(NotFoundError, saying="nobody-has-this"):
        ask(model="nobody-has-this", messages=question, max_tokens=10)
    with refused(BadRequestError, saying="top_p"):
        ask(model=MODEL, messages=question, max_tokens=10, extra_body={"top_p": 7})
    with refused(AuthenticationError, saying="authentication_error"):
        client.with_options(api_key="wrong").messages.create(model=MODEL, messages=question, max_tokens=10)


def tokens() -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=question).input_tokens
    usage = ask(model=MODEL, messages=question, max_tokens=1).usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


if __name__ == "__main__":
    run(globals())
