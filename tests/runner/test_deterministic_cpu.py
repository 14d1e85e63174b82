"""Deterministic mode on a CPU: every bit of a request's answer is the one that it gets alone."""

from functools import cache
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from localllm.engine.loop import EngineLoop
from localllm.engine.memory.block_names import BlockHasher
from localllm.engine.memory.cache_manager import CacheManager
from localllm.engine.outputs import EngineOutput
from localllm.engine.params import SamplingParams
from localllm.engine.request import Request
from localllm.engine.scheduler import Scheduler
from localllm.engine.scheduler_config import SchedulerConfig
from localllm.kernels.launch import LaunchOptions
from localllm.models.decoder.decoder import DecoderModel
from localllm.runner.kv_cache import KVCache
from localllm.runner.runner import TorchRunner
from scripts.random_weights import random_model, shape_spec
from tests.draws import draws
from tests.kv import ledger_of, of_each

CPU = torch.device("cpu")
BLOCK, CHUNK, MAX_LEN, MAX_SEQS = 8, 16, 160, 10
SPEC = shape_spec("tiny", hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2)
KINDS = ("float32", "int8", "int4")
ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 1.0, "seed": 1, "logprobs": 0},
    {"temperature": 1.3, "seed": 2, "top_p": 0.9, "logprobs": 5},
    {"temperature": 0.9, "seed": 3, "top_k": 30, "frequency_penalty": 0.5, "logprobs": 1},
    {"temperature": 1.0, "seed": 4, "min_p": 0.02, "logprobs": 2, "prompt_logprobs": 2},
]


@cache
def model_of(kind: str) -> DecoderModel:
    return random_model(SPEC, CPU, torch.float32, weights="16-bit" if kind == "float32" else kind)  # type: ignore[arg-type]


def make_request(number: int) -> Request:
    """Prompts with beginnings in common, some of them as long as a chunk or a block to the token."""
    dice = Random(number)
    shared = [Random(1).randrange(512) for _ in range(80)]
    prompt = shared[: dice.choice([0, 16, 17, 33, 64])] + [
        dice.randrange(512) for _ in range(dice.choice([1, 2, 7, 15, 16, 31]))
    ]
    params = SamplingParams(max_tokens=dice.randint(3, 20), **ASKED[number % len(ASKED)])
    assert params.max_tokens is not None
    return Request(f"r{number}", prompt, params, max_output_tokens=params.max_tokens)


class Served:
    """An engine in deterministic mode."""

    def __init__(
        self, kind: str, *, num_blocks: int = 200, budget: int = 64, caching: bool = True, deterministic: bool = True
    ) -> None:
        cache = KVCache(SPEC, of_each(SPEC, num_blocks), BLOCK, CPU, "float32")
        sizes: dict[str, Any] = {
            "max_num_seqs": MAX_SEQS, "max_num_batched_tokens": budget, "max_model_len": MAX_LEN, "block_size": BLOCK,
        }  # fmt: skip
        options = LaunchOptions(deterministic=deterministic)
        runner = TorchRunner(model_of(kind), SPEC, cache, device=CPU, launch_options=options, **sizes)
        config = SchedulerConfig(
            **sizes, fixed_chunk=CHUNK if deterministic else 0, output_reserve=0.0, enable_prefix_caching=caching
        )
        self.scheduler = Scheduler(
            config, CacheManager(config, ledger_of(SPEC, num_blocks, BLOCK), BlockHasher(b"tiny", BLOCK))
        )
        self.loop = EngineLoop(self.scheduler, runner, depth=1, deliver=self._receive)
        self.told: dict[str, list[EngineOutput]] = {}

    def _receive(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            self.told.setdefault(output.request_id, []).append(output)

    def run(self) -> None:
        while self.scheduler.has_work or self.loop._inbox:
            self.loop.step()
        assert self.scheduler.recorder.num_failed_steps == 0

    def answer(self, request: Request) -> tuple[Any, ...]:
        """Tokens and logprobs, with all their bits."""
        told = self.told[request.request_id]
        prompt = [each for output in told for each in output.prompt_logprobs or ()]
        return (
            [token for output in told for token in output.token_ids],
            [(tuple(each.token_ids), tuple(each.logprobs), each.rank) for each in prompt],
            [(tuple(e.token_ids), tuple(e.logprobs), e.rank) for output in told for e in output.logprobs],
        )


@cache
def alone(kind: str, number: int) -> tuple[Any, ...]:
    served, request = Served(kind), make_request(number)
    served.loop.submit(request)
    served.run()
    return served.answer(request)


@pytest.mark.parametrize("kind", KINDS)
@draws(8)
@given(
    seed=st.integers(0, 10**6),
    num_blocks=st.sampled_from([22, 30, 200]),
    budget=st.sampled_from([CHUNK + MAX_SEQS, 40, 64]),
    caching=st.sampled_from([True, True, False]),
)
def test_every_bit_is_the_one_of_a_lone_request(
    kind: str, seed: int, num_blocks: int, budget: int, caching: bool
) -> None:
    """Neighbours, preemptions, hits, budgets and requests that leave: no answer changes in any bit."""
    dice = Random(seed)
    served = Served(kind, num_blocks=num_blocks, budget=budget, caching=caching)
    requests = [make_request(number) for number in dice.sample(range(24), 9)]
    leaving = dice.choice(requests).request_id
    for request in requests:
        served.loop.submit(request)
        for _ in range(dice.choice([0, 0, 1, 4])):
            served.loop.step()
    served.loop.cancel(leaving)
    served.run()
    for request in requests:
        wanted = alone(kind, int(request.request_id[1:]))
        got = served.answer(request) if request.request_id in served.told else ([], [], [])
        if request.request_id == leaving:
            wanted = tuple(part[: len(own)] for part, own in zip(wanted, got, strict=True))
        assert got == wanted, request


@pytest.mark.parametrize("kind", KINDS)
def test_a_preempted_answer_goes_on_with_the_same_bits(kind: str) -> None:
    served = Served(kind, num_blocks=22, budget=64)
    requests = [make_request(number) for number in (3, 6, 9, 12, 15, 18)]
    served.loop.submit(*requests)
    served.run()
    assert served.scheduler.recorder.num_preemptions, "the pool holds all of them: this test proves nothing"
    for request in requests:
        assert served.answer(request) == alone(kind, int(request.request_id[1:]))


def test_without_the_mode_bits_do_change() -> None:
    """Else the tests above could not fail."""
    differs = 0
    for numbers in ((0, 1, 2, 3), (5, 6, 7, 8)):
        served = Served("int8", deterministic=False)
        requests = [make_request(number) for number in numbers]
        served.loop.submit(*requests)
        served.run()
        differs += sum(served.answer(r) != alone("int8", int(r.request_id[1:])) for r in requests)
    assert differs
