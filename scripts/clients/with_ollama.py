"""Ollama's Python client."""

import json

from asked import PERSON, PERSON_QUESTION, QUESTION, WEATHER, WEATHER_QUESTION, expect_answer
from checking import KEY, MODEL, URL, refused, run
from ollama import Client, ResponseError

host = URL.removesuffix("/v1")
client = Client(host=host, headers={"authorization": f"Bearer {KEY}"})
question = [{"role": "user", "content": QUESTION}]
tool = {"type": "function", "function": WEATHER}


def models() -> None:
    (name,) = [model.model for model in client.list().models if model.model.startswith(MODEL)]
    assert client.show(name).details.format
    assert name in [model.model for model in client.ps().models]


def chat() -> None:
    answer = client.chat(MODEL, question, options={"num_predict": 100, "temperature": 0})
    expect_answer(answer.message.content)
    assert answer.prompt_eval_count > 0
    expect_answer(client.generate(MODEL, QUESTION).response)


def stream() -> None:
    parts = list(client.chat(MODEL, question, stream=True))
    expect_answer("".join(part.message.content for part in parts))
    assert parts[-1].done


def tools() -> None:
    messages = [{"role": "user", "content": WEATHER_QUESTION}]
    said = client.chat(MODEL, messages, tools=[tool]).message
    (call,) = said.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Paris"})
    parts = client.chat(MODEL, messages, tools=[tool], stream=True)
    calls = [call for part in parts for call in part.message.tool_calls or ()]
    assert [call.function.arguments for call in calls] == [{"city": "Paris"}]
    result = {"role": "tool", "tool_name": "get_weather", "content": '{"temperature": 21, "sky": "sunny"}'}
    assert "sunny" in client.chat(MODEL, [*messages, said, result], tools=[tool]).message.content


def schema() -> None:
    answer = client.chat(MODEL, [{"role": "user", "content": PERSON_QUESTION}], format=PERSON)
    assert json.loads(answer.message.content) == {"name": "Clara", "age": 27, "city": "Rome"}


def errors() -> None:
    with refused(ResponseError, saying="nobody-has-this"):
        client.chat("nobody-has-this", question)
    with refused(ResponseError, saying="top_p"):
        client.chat(MODEL, question, options={"top_p": 7})
    with Client(host=host, headers={"authorization": "Bearer wrong"}) as stranger, refused(ResponseError, saying="401"):
        stranger.chat(MODEL, question)


def embeddings() -> None:
    with refused(ResponseError, saying="generates text"):
        client.embed(MODEL, "a text")


if __name__ == "__main__":
    run(globals())
