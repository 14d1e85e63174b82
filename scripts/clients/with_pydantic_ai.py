"""Pydantic AI: agents over OpenAI's chat completions, OpenAI's responses and Anthropic's messages."""

from anthropic import AsyncAnthropic
from asked import PERSON_QUESTION, QUESTION, expect_answer
from checking import KEY, MODEL, URL, refused, run
from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, Embedder, ModelHTTPError, NativeOutput
from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class Person(BaseModel):
    name: str
    age: int
    city: str


provider = OpenAIProvider(openai_client=AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0))
model = OpenAIChatModel(MODEL, provider=provider)
sdk = AsyncAnthropic(base_url=URL.removesuffix("/v1"), api_key=KEY, max_retries=0)
of_anthropic = AnthropicModel(MODEL, provider=AnthropicProvider(anthropic_client=sdk))


async def chat() -> None:
    result = await Agent(model, instructions="You are a helpful assistant.").run(QUESTION)
    expect_answer(result.output)
    assert result.usage.output_tokens > 0
    expect_answer((await Agent(of_anthropic).run(QUESTION)).output)


async def stream() -> None:
    async with Agent(model).run_stream(QUESTION) as answer:
        expect_answer("".join([part async for part in answer.stream_text(delta=True)]))


async def tools() -> None:
    for each in (model, of_anthropic):
        agent = Agent(each, output_type=Person)  # an object is requested as a forced call
        first = await agent.run(PERSON_QUESTION)
        second = await agent.run(PERSON_QUESTION, message_history=first.all_messages())
        assert isinstance(first.output, Person)
        assert isinstance(second.output, Person)


async def schema() -> None:
    result = await Agent(model, output_type=NativeOutput(Person)).run(PERSON_QUESTION)
    assert result.output == Person(name="Clara", age=27, city="Rome")


async def errors() -> None:
    with refused(ModelHTTPError, saying="nobody-has-this"):
        await Agent(OpenAIChatModel("nobody-has-this", provider=provider)).run(QUESTION)
    with refused(ModelHTTPError, saying="top_p"):
        await Agent(model, model_settings={"top_p": 7}).run(QUESTION)
    with refused(ModelHTTPError, saying="401"):
        wrong = OpenAIProvider(openai_client=AsyncOpenAI(base_url=URL, api_key="wrong", max_retries=0))
        await Agent(OpenAIChatModel(MODEL, provider=wrong)).run(QUESTION)


async def embeddings() -> None:
    with refused(ModelHTTPError, saying="generates text"):
        await Embedder(OpenAIEmbeddingModel(MODEL, provider=provider)).embed_query("a text")


async def responses() -> None:
    speaker = OpenAIResponsesModel(MODEL, provider=provider)
    expect_answer((await Agent(speaker).run(QUESTION)).output)
    assert isinstance((await Agent(speaker, output_type=Person).run(PERSON_QUESTION)).output, Person)


if __name__ == "__main__":
    run(globals())
