"""The child of the transformers adapter: `generate` at batch 1, requests and answers as JSON lines over pipes.

SDPA attention, the dynamic KV cache and greedy search: what `generate` does by default on a
CPU. The clock is CLOCK_MONOTONIC, the same for parent and child.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, TextIO


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")  # whatever else is printed must not get between the answers
    os.dup2(2, 1)
    model, tokenizer = load(*sys.argv[1:3])
    say(answers, {"ready": True})
    for line in sys.stdin:
        say(answers, generate(model, tokenizer, json.loads(line)))


def say(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def load(folder: str, dtype: str) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    return model.eval(), AutoTokenizer.from_pretrained(folder)


class Clock:
    """A streamer as `generate` takes it: the first `put` is the prompt, each later one a token."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def put(self, token_ids: object) -> None:
        self.times_s.append(time.perf_counter())

    def end(self) -> None:
        pass


def generate(model: Any, tokenizer: Any, asked: dict[str, Any]) -> dict[str, Any]:
    import torch

    clock = Clock()
    ids = asked["prompt_token_ids"]
    length = asked["max_tokens"]
    started_s = time.perf_counter()
    with torch.inference_mode():
        prompt = torch.tensor([ids])
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=length,
            min_new_tokens=length,
            do_sample=False,
            streamer=clock,
        )
    text = tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True)
    return {"started_s": started_s, "token_times_s": clock.times_s[1:], "text": text}


if __name__ == "__main__":
    main()
