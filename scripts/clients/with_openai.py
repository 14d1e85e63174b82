"""OpenAI's SDK."""

import json

from asked import PERSON, PERSON_QUESTION, QUESTION, WEATHER, WEATHER_QUESTION, expect_answer
from checking import KEY, MODEL, URL, refused, run
from openai import AuthenticationError, BadRequestError, NotFoundError, OpenAI

client = OpenAI(base_url=URL, api_key=KEY, max_retries=0)
ask = client.chat.completions.create
question = [{"role": "user", "content": QUESTION}]
tool = {"type": "function", "function": WEATHER}


def models() -> None:
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


def chat() -> None:
    answer = ask(model=MODEL, messages=question, temperature=0, max_completion_tokens=100)
    expect_answer(answer.choices[0].message.content)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def stream() -> None:
    chunks = list(ask(model=MODEL, messages=question, stream=True, stream_options={"include_usage": True}))
    expect_answer("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices))
    assert chunks[-1].usage.completion_tokens > 0


def tools() -> None:
    messages = [{"role": "user", "content": WEATHER_QUESTION}]
    for choice in ("auto", "required", {"type": "function", "function": {"name": "get_weather"}}):
        said = ask(model=MODEL, messages=messages, tools=[tool], tool_choice=choice).choices[0]
        (call,) = said.message.tool_calls
        assert said.finish_reason == "tool_calls"
        assert json.loads(call.function.arguments) == {"city": "Paris"}
    with client.chat.completions.stream(model=MODEL, messages=messages, tools=[tool], tool_choice="required") as events:
        (streamed,) = events.get_final_completion().choices[0].message.tool_calls
    assert json.loads(streamed.function.arguments) == {"city": "Paris"}
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21, "sky": "sunny"}'}
    answer = ask(model=MODEL, messages=[*messages, said.message, result], tools=[tool])
    assert "sunny" in answer.choices[0].message.content


def schema() -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    answer = ask(model=MODEL, messages=[{"role": "user", "content": PERSON_QUESTION}], response_format=wanted)
    assert json.loads(answer.choices[0].message.content) == {"name": "Clara", "age": 27, "city": "Rome"}


def errors() -> None:
    with refused(NotFoundError, saying="nobody-has-this"):
        ask(model="nobody-has-this", messages=question)
    with refused(BadRequestError, saying="top_p"):
        ask(model=MODEL, messages=question, top_p=7)
    with refused(AuthenticationError, saying="401"):
        client.with_options(api_key="wrong").models.list()


def embeddings() -> None:
    with refused(BadRequestError, saying="generates text"):
        client.embeddings.create(model=MODEL, input="a text")


def tokens() -> None:
    counted = client.responses.input_tokens.count(model=MODEL, input=QUESTION).input_tokens
    assert counted == ask(model=MODEL, messages=question, max_tokens=1).usage.prompt_tokens


def responses() -> None:
    answer = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=100, store=False)
    expect_answer(answer.output_text)
    with client.responses.stream(model=MODEL, input=QUESTION, max_output_tokens=100, store=False) as events:
        expect_answer(events.get_final_response().output_text)
    function = {"type": "function", "name": "get_weather", "parameters": WEATHER["parameters"]}
    called = client.responses.create(
        model=MODEL, input=WEATHER_QUESTION, tools=[function], tool_choice="required", store=False
    )
    (call,) = [item for item in called.output if item.type == "function_call"]
    assert json.loads(call.arguments).keys() == {"city"}
    wanted = {"format": {"type": "json_schema", "name": "person", "schema": PERSON, "strict": True}}
    answer = client.responses.create(model=MODEL, input=PERSON_QUESTION, text=wanted, store=False)
    assert json.loads(answer.output_text) == {"name": "Clara", "age": 27, "city": "Rome"}


def scores() -> None:
    answer = client.completions.create(model=MODEL, prompt="A KV cache holds", echo=True, logprobs=1, max_tokens=1)
    first, *others = answer.choices[0].logprobs.token_logprobs
    assert first is None
    assert all(score <= 0 for score in others)


if __name__ == "__main__":
    run(globals())
