"""The whole engine against transformers in fp32, one family at a time: 64 greedy tokens, however they are scheduled."""

import random
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.golden_engine import NUM_TOKENS, Engine
from tests.tiny import load_reference

FAMILIES = (
    "llama", "qwen2", "phi3", "smollm3", "mistral", "gemma2", "gemma3", "gemma4",  # windows, caps, norms, fusion
    "olmo2", "gptj", "bloom", "falcon_rw", "gpt2",  # other topologies, other positions
    "mixtral", "gpt_oss", "deepseek_v2",  # experts, sinks, latents
    "granite_swa", "flint",  # recognised classes
)  # fmt: skip
"""One of each kind of layer; tests/models/test_goldens.py holds every family to transformers."""


def prompts_for(family):
    """Unlike neighbours: from a few tokens to beyond every window and chunk; two share a long prefix."""
    rng = random.Random(family)
    shared = [rng.randrange(3, 500) for _ in range(70)]
    lengths = (3, 21, 130)
    return [[rng.randrange(3, 500) for _ in range(n)] for n in lengths] + [[*shared, 7], [*shared, 9, 11, 13]]


@cache
def reference(path: Path, family: str):
    model = load_reference(path)
    answers, scores = [], []
    with torch.inference_mode():
        for prompt in prompts_for(family):
            out = model.generate(
                torch.tensor([prompt]), do_sample=False, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS,
                output_logits=True, return_dict_in_generate=True, eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
            answers.append(out.sequences[0, len(prompt) :].tolist())
            scores.append(torch.log_softmax(torch.cat(out.logits).float(), -1))
    return answers, scores


WAYS = {
    "batched with unlike neighbours": {},
    "in small chunks": {"max_num_batched_tokens": 17, "cap": 5},
    "preempted": {"num_blocks": 62},
    "two steps in flight": {"depth": 2, "max_num_batched_tokens": 60},
    "without a prefix cache": {"caching": False},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", WAYS)
def test_greedy_tokens_equal_those_of_transformers(tiny_model_path, family, way):
    path = tiny_model_path(family)
    engine = Engine(path, **WAYS[way])
    assert engine.generate(prompts_for(family)) == reference(path, family)[0]
    if way == "preempted":
        assert engine.scheduler.recorder.num_preemptions > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_prefix_cached_prompts_give_the_same_tokens_and_logprobs(tiny_model_path, family):
    path = tiny_model_path(family)
    answers, scores = reference(path, family)
    engine = Engine(path)
    assert engine.generate(prompts_for(family)) == answers
    assert engine.generate(prompts_for(family), logprobs=2) == answers
    assert [engine.endings[i].num_cached_tokens for i in range(5)] == [0, 16, 128, 64, 72]
    for index, expected in enumerate(scores):
        for step, entry in enumerate(engine.logprobs[index]):
            assert entry.logprobs[0] == pytest.approx(float(expected[step, entry.token_ids[0]]), abs=2e-4)
            assert entry.rank == 1


def test_prompt_logprobs_equal_those_of_transformers_whatever_the_chunks(tiny_llama_path):
    prompt = prompts_for("llama")[2]
    model = load_reference(tiny_llama_path)
    with torch.inference_mode():
        expected = torch.log_softmax(model(torch.tensor([prompt])).logits[0].float(), -1)
    for budget in (512, 9):
        engine = Engine(tiny_llama_path, max_num_batched_tokens=budget)
        engine.generate([prompt], count=1)  # warms the prefix cache, which must not matter
        engine.generate([prompt], count=2, prompt_logprobs=1)
        told = engine.prompt_logprobs[0]
        assert len(told) == len(prompt) - 1
        for position, entry in enumerate(told):
            assert entry.token_ids[0] == prompt[position + 1]
            assert entry.logprobs[0] == pytest.approx(float(expected[position, prompt[position + 1]]), abs=2e-4)


def test_same_seed_same_tokens_whatever_the_neighbours(tiny_llama_path):
    prompts = prompts_for("llama")
    sampled = {"temperature": 0.9, "top_p": 0.95, "seed": 11}
    together = Engine(tiny_llama_path).generate(prompts, **sampled)
    alone = [Engine(tiny_llama_path).generate([prompt], **sampled)[0] for prompt in prompts]
    chunked = Engine(tiny_llama_path, max_num_batched_tokens=9, depth=2).generate(prompts, **sampled)
    other = Engine(tiny_llama_path).generate(prompts, temperature=0.9, top_p=0.95, seed=12)
    assert together == alone == chunked
    assert together != other
