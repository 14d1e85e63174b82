"""The openai client's responses against a running server: a whole answer, then one that goes on from it as a stream."""

import os

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("LOCALLLM_URL", "http://localhost:8000/v1"), api_key="dummy")
model = client.models.list().data[0].id

first = client.responses.create(
    model=model,
    instructions="You are a helpful assistant.",
    input="안녕하세요! Say hello back. 🙂",
    max_output_tokens=64,
)
print(first.output_text)

with client.responses.stream(
    model=model, previous_response_id=first.id, input="Once more, please.", max_output_tokens=64
) as stream:
    for event in stream:
        if event.type == "response.output_text.delta":
            print(event.delta, end="", flush=True)
print()
