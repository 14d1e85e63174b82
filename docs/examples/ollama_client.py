"""The ollama client against a running server: a whole answer, then a streamed one."""

import os

from ollama import Client

host = os.environ.get("LOCALLLM_URL", "http://localhost:8000/v1").removesuffix("/v1")
messages = [{"role": "user", "content": "안녕하세요! Say hello back. 🙂"}]

with Client(host=host) as client:
    model = client.list().models[0].model
    answer = client.chat(model, messages, options={"num_predict": 64})
    print(answer.message.content)

    for part in client.chat(model, messages, options={"num_predict": 64}, stream=True):
        print(part.message.content, end="", flush=True)
print()
