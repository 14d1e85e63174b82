"""LangChain's ChatOpenAI."""

from asked import PERSON_QUESTION, QUESTION, WEATHER_QUESTION, expect_answer
from checking import KEY, MODEL, URL, refused, run
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from openai import AuthenticationError, BadRequestError, NotFoundError
from pydantic import BaseModel

server = {"base_url": URL, "api_key": KEY, "max_retries": 0}
llm = ChatOpenAI(model=MODEL, **server)


class Person(BaseModel):
    name: str
    age: int
    city: str


@tool
def get_weather(city: str) -> str:
    """Get the weather of a city"""
    return '{"temperature": 21, "sky": "sunny"}'


def chat() -> None:
    answer = llm.invoke([("system", "You are a helpful assistant."), ("user", QUESTION)])
    expect_answer(answer.content)
    assert answer.usage_metadata["output_tokens"] > 0


def stream() -> None:
    expect_answer("".join(chunk.content for chunk in llm.stream(QUESTION)))


def tools() -> None:
    for choice in ("auto", "any", "get_weather"):
        said = llm.bind_tools([get_weather], tool_choice=choice).invoke(WEATHER_QUESTION)
        (call,) = said.tool_calls
        assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
    result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
    answer = llm.bind_tools([get_weather]).invoke([HumanMessage(WEATHER_QUESTION), said, result])
    assert "sunny" in answer.content


def schema() -> None:
    for method in ("json_schema", "function_calling"):
        person = llm.with_structured_output(Person, method=method).invoke(PERSON_QUESTION)
        assert isinstance(person, Person)
    assert llm.with_structured_output(Person).invoke(PERSON_QUESTION) == Person(name="Clara", age=27, city="Rome")


def errors() -> None:
    with refused(NotFoundError, saying="nobody-has-this"):
        ChatOpenAI(model="nobody-has-this", **server).invoke(QUESTION)
    with refused(BadRequestError, saying="top_p"):
        llm.invoke(QUESTION, top_p=7)
    with refused(AuthenticationError, saying="401"):
        ChatOpenAI(model=MODEL, **{**server, "api_key": "wrong"}).invoke(QUESTION)


def embeddings() -> None:
    with refused(BadRequestError, saying="generates text"):
        OpenAIEmbeddings(model=MODEL, check_embedding_ctx_length=False, **server).embed_query("a text")


def responses() -> None:
    speaker = ChatOpenAI(model=MODEL, use_responses_api=True, **server)
    expect_answer(speaker.invoke(QUESTION).text)
    expect_answer("".join(chunk.text for chunk in speaker.stream(QUESTION)))
    (call,) = speaker.bind_tools([get_weather], tool_choice="any").invoke(WEATHER_QUESTION).tool_calls
    assert call["args"].keys() == {"city"}
    assert isinstance(speaker.with_structured_output(Person).invoke(PERSON_QUESTION), Person)


if __name__ == "__main__":
    run(globals())
