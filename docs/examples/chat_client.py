"""The openai client against a running server: a whole answer, then a streamed one."""

import os

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("LOCALLLM_URL", "http://localhost:8000/v1"), api_key="dummy")
model = client.models.list().data[0].id
messages = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "안녕하세요! Say hello back. 🙂"},
]

answer = client.chat.completions.create(model=model, messages=messages, temperature=0.7, max_tokens=64)
print(answer.choices[0].message.content)

stream = client.chat.completions.create(model=model, messages=messages, temperature=0.7, max_tokens=64, stream=True)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
