"""Answers to a few prompts, without a server."""

import os

from localllm import LLM, SamplingParams

MODEL = os.environ.get("LOCALLLM_MODEL", "demo")

llm = LLM(model=MODEL, tensor_parallel_size=1, gpu_memory_utilization=0.9)
params = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=64, stop=["</s>", "[/INST]"])
for out in llm.generate(["Hello, my name is", "The capital of France is"], params):
    print(out.prompt[:50], "->", out.outputs[0].text[:200])
