"""The whole engine against transformers in fp32, one family at a time: 64 greedy tokens, however they are scheduled."""

import random
from functools import cache
from pathlib import Path

import pytest
import torch

from localllm.engine.loop import EngineLoop
from localllm.engine.memory.block_names import BlockHasher
from localllm.engine.memory.cache_manager import CacheManager
from localllm.engine.memory.state_pool import StatePool
from localllm.engine.params import SamplingParams
from localllm.engine.request import Request
from localllm.engine.scheduler import Scheduler
from localllm.engine.scheduler_config import SchedulerConfig
from localllm.engine.step import TokenLogprobs
from localllm.models.loader import load_model
from localllm.models.read_spec import read_spec
from localllm.models.vision.tower import load_tower
from localllm.runner.kv_cache import KVCache, StateCache
from localllm.runner.pictures import Encoder
from localllm.runner.runner import TorchRunner
from tests.kv import ledger_of, of_each
from tests.tiny import load_reference

FAMILIES = (
    "llama", "qwen2", "phi3", "smollm3", "mistral", "gemma2", "gemma3", "gemma4",  # windows, caps, norms, fusion
    "olmo2", "gptj", "bloom", "falcon_rw", "gpt2",  # other topologies, other positions
    "mixtral", "gpt_oss", "deepseek_v2",  # experts, sinks, latents
)  # fmt: skip
"""One of each kind of layer; tests/models/test_goldens.py holds every family to transformers."""
CPU = torch.device("cpu")
BLOCK_SIZE = 8
NUM_TOKENS = 64


class Engine:
    """The real runner under the real scheduler, stepped by hand."""

    def __init__(
        self, path: Path, *, num_blocks: int = 400, depth: int = 1, caching: bool = True, cap: int = 0,
        staged: bool | None = None, encoder_rows: int = 0, **config: int,
    ):  # fmt: skip
        spec = read_spec(path)
        sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "max_model_len": 512, **config}
        limits = SchedulerConfig(
            block_size=BLOCK_SIZE,
            enable_prefix_caching=caching,
            long_prefill_token_threshold=cap,
            output_reserve=0.0,
            encoder_rows=encoder_rows,
            encoder_budget=encoder_rows,
            **sizes,
        )
        hasher = BlockHasher(str(path).encode(), BLOCK_SIZE)
        pool = StatePool(24) if spec.recurrent is not None else None
        self.scheduler = Scheduler(limits, CacheManager(limits, ledger_of(spec, num_blocks, BLOCK_SIZE), hasher, pool))
        model = load_model(path, spec, CPU, torch.float32)
        kv = KVCache(spec, of_each(spec, num_blocks), BLOCK_SIZE, CPU, torch.float32)
        states = StateCache(spec, 24, CPU, torch.float32) if spec.recurrent is not None else None
        for layer in filter(None, kv.layers):
            for tensor in layer.tensors():
                tensor.fill_(float("nan"))  # what nobody wrote must never be read
        encoder = None
        if spec.vision is not None:
            encoder = Encoder(load_tower(path, spec.vision, CPU, torch.float32), spec.hidden_size, torch.float32)
        self.runner = runner = TorchRunner(
            model,
            spec,
            kv,
            block_size=BLOCK_SIZE,
            device=CPU,
            encoder=encoder,
            staged=staged,
            states=states,
            **sizes,
        )
        self.loop = EngineLoop(self.scheduler, runner, depth=depth)
        self.loop._recover = _raise

    def generate(self, prompts, count=NUM_TOKENS, media=None, **params):
        """media: the pictures of each prompt; None: there are none."""
        media = media or [()] * len(prompts)
        tokens = {index: [] for index in range(len(prompts))}
        self.logprobs: dict[int, list[TokenLogprobs]] = {index: [] for index in tokens}
        self.prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        self.endings = {}

        def deliver(outputs):
            for output in outputs:
                index = int(output.request_id)
                tokens[index] += output.token_ids
                self.logprobs[index] += output.logprobs
                if output.prompt_logprobs is not None:
                    self.prompt_logprobs[index] = output.prompt_logprobs
                if output.finish_reason:
                    self.endings[index] = output

        self.loop.deliver = deliver
        asked = SamplingParams(**{"temperature": 0.0, "max_tokens": count, **params})
        self.loop.submit(
            *(
                Request(str(i), p, asked, max_output_tokens=count, media=of)
                for i, (p, of) in enumerate(zip(prompts, media, strict=True))
            )
        )
        while self.scheduler.has_work or self.loop._inbox:
            self.loop.step()
        assert not any(ending.error for ending in self.endings.values())
        return [tokens[index] for index in range(len(prompts))]


def _raise(error):
    raise error


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


@pytest.mark.rotates(3)
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
