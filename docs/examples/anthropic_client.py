"""The anthropic client against a running server: a whole answer, then a streamed one."""

import os

from anthropic import Anthropic

url = os.environ.get("LOCALLLM_URL", "http://localhost:8000/v1").removesuffix("/v1")
client = Anthropic(base_url=url, api_key="dummy")
messages = [{"role": "user", "content": "안녕하세요! Say hello back. 🙂"}]

answer = client.messages.create(model="", messages=messages, system="You are kind.", max_tokens=64)
print("".join(block.text for block in answer.content if block.type == "text"))

with client.messages.stream(model="", messages=messages, max_tokens=64) as stream:
    for text in stream.text_stream:
        print(text, end="", flush=True)
print()
