"""A conversation through the model's chat template, in the form of a script with a main function."""

import os

from localllm import LLM, SamplingParams

MODEL = os.environ.get("LOCALLLM_MODEL", "demo")


def main() -> None:
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "What is a KV cache?"},
    ]
    with LLM(model=MODEL) as llm:
        (answer,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=64), use_tqdm=False)
        print(answer.outputs[0].text)
        print(f"{len(answer.prompt_token_ids)} prompt tokens, {answer.num_cached_tokens} of them cached")


if __name__ == "__main__":
    main()
