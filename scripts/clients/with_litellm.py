"""LiteLLM, as a library: `openai/NAME` for the OpenAI dialect, `anthropic/NAME` for Anthropic's,
`ollama_chat/NAME` for Ollama's."""

import json

import litellm
from asked import PERSON, PERSON_QUESTION, QUESTION, WEATHER, WEATHER_QUESTION, expect_answer
from checking import KEY, MODEL, URL, refused, run

server = {"api_base": URL, "api_key": KEY, "max_retries": 0}
name = f"openai/{MODEL}"
question = [{"role": "user", "content": QUESTION}]
tool = {"type": "function", "function": WEATHER}


def chat() -> None:
    answer = litellm.completion(model=name, messages=question, max_tokens=100, **server)
    expect_answer(answer.choices[0].message.content)
    messages = litellm.completion(
        model=f"anthropic/{MODEL}", messages=question, max_tokens=100, api_base=URL.removesuffix("/v1"), api_key=KEY
    )
    expect_answer(messages.choices[0].message.content)
    ollama = litellm.completion(
        model=f"ollama_chat/{MODEL}", messages=question, max_tokens=100, api_base=URL.removesuffix("/v1"), api_key=KEY
    )
    expect_answer(ollama.choices[0].message.content)


def stream() -> None:
    chunks = list(litellm.completion(model=name, messages=question, stream=True, **server))
    expect_answer("".join(chunk.choices[0].delta.content or "" for chunk in chunks))


def tools() -> None:
    messages = [{"role": "user", "content": WEATHER_QUESTION}]
    for choice in ("auto", "required", {"type": "function", "function": {"name": "get_weather"}}):
        answer = litellm.completion(model=name, messages=messages, tools=[tool], tool_choice=choice, **server)
        (call,) = answer.choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Paris"}
    chunks = list(litellm.completion(model=name, messages=messages, tools=[tool], stream=True, **server))
    (call,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}


def schema() -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    messages = [{"role": "user", "content": PERSON_QUESTION}]
    answer = litellm.completion(model=name, messages=messages, response_format=wanted, **server)
    assert json.loads(answer.choices[0].message.content) == {"name": "Clara", "age": 27, "city": "Rome"}


def errors() -> None:
    with refused(litellm.NotFoundError, saying="nobody-has-this"):
        litellm.completion(model="openai/nobody-has-this", messages=question, **server)
    with refused(litellm.BadRequestError, saying="top_p"):
        litellm.completion(model=name, messages=question, top_p=7, **server)
    with refused(litellm.AuthenticationError, saying="key"):
        litellm.completion(model=name, messages=question, **{**server, "api_key": "wrong"})


def embeddings() -> None:
    with refused(litellm.BadRequestError, saying="generates text"):
        litellm.embedding(model=name, input=["a text"], **server)


def responses() -> None:
    answer = litellm.responses(model=name, input=QUESTION, max_output_tokens=100, api_base=URL, api_key=KEY)
    expect_answer(answer.output[-1].content[0].text)


def scores() -> None:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}",
        prompt="A KV cache holds",
        echo=True,
        logprobs=1,
        max_tokens=1,
        **server,
    )
    first, *others = answer.choices[0].logprobs.token_logprobs
    assert first is None
    assert all(score <= 0 for score in others)


if __name__ == "__main__":
    run(globals())
