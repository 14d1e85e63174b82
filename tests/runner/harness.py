"""Requests, a scheduler that serves them on a runner, and drafters with known answers."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from localllm.engine.loop import EngineLoop
from localllm.engine.memory.block_names import BlockHasher
from localllm.engine.memory.cache_manager import CacheManager
from localllm.engine.memory.ledger import Ledger
from localllm.engine.memory.state_pool import StatePool
from localllm.engine.outputs import EngineOutput
from localllm.engine.params import SamplingParams
from localllm.engine.request import Request
from localllm.engine.scheduler import Scheduler
from localllm.engine.scheduler_config import SchedulerConfig
from localllm.engine.speculation import Speculation
from localllm.engine.step import Runner
from localllm.kernels import launch
from localllm.kernels.launch import LaunchOptions
from localllm.models.drafters.drafter import Drafter
from localllm.models.spec.model_spec import ModelSpec
from localllm.runner.device_drafts import (
    LookupOnDevice,
)
from localllm.runner.drafter_steps import OpenDrafter
from localllm.runner.host_drafts import NO_DRAFTS, HostDrafts
from localllm.runner.kv_cache import KVCache, StateCache
from localllm.runner.runner import TorchRunner
from tests.kv import ledger_of, of_each
from tests.runner.desk import WAYS
from tests.runner.naive import Case


def knowing_on_device(texts: Sequence[Sequence[int]], errors: float) -> Callable[[LookupOnDevice, Tensor], Tensor]:
    """A source of drafts that knows every text, and gives a wrong token with probability `errors`."""
    dice = random.Random(9)

    def look_up(self: LookupOnDevice, slots: Tensor) -> Tensor:
        ids, known, valid = self._tokens
        out = torch.zeros(len(slots), 1 + 16, dtype=torch.int32)
        for row, slot in enumerate(slots.tolist()):
            if slot < 0:
                continue
            count = int(known[slot])
            text = next((text for text in texts if list(text[:count]) == ids[slot, :count].tolist()), [])
            drafts = list(text[count : count + dice.randint(0, int(self._most[slot]))])
            drafts = [dice.randrange(500) if dice.random() < errors else token for token in drafts]
            valid[slot] = out[row, 0] = len(drafts)
            ids[slot, count : count + len(drafts)] = out[row, 1 : 1 + len(drafts)] = torch.tensor(drafts)
        return out

    return look_up


CPU = torch.device("cpu")
NUM_DRAFTS = 4


@pytest.fixture
def without_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostDrafts, "_find", lambda self, slot, most: NO_DRAFTS)
    monkeypatch.setattr(LookupOnDevice, "launch", lambda self, slots: torch.zeros(len(slots), 17, dtype=torch.int32))


def opened(drafter: Drafter, caches: list[KVCache] | None = None) -> Callable[[int], OpenDrafter]:
    """Return what makes the drafter's KV cache, filled with NaN, for a number of blocks."""

    def make(num_blocks: int) -> OpenDrafter:
        cache = KVCache(drafter.spec, (num_blocks,), BLOCK, CPU, "float32")
        for layer in cache.layers:
            assert layer is not None
            for tensor in layer.tensors():
                tensor.fill_(torch.nan)
        if caches is not None:
            caches.append(cache)
        return OpenDrafter(drafter, cache, NUM_DRAFTS)

    return make


def assert_same(told: dict[str, list[EngineOutput]], alone: dict[str, list[EngineOutput]]) -> None:
    for name, wanted in alone.items():
        assert tokens_of(told[name]) == tokens_of(wanted), name
        assert told[name][-1].finish_reason == wanted[-1].finish_reason


DRAFT_PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.7, "seed": 1, "logprobs": 0},
    {"temperature": 1.5, "seed": 2, "top_k": 20, "repetition_penalty": 1.3, "repeat_last_n": 9},
    {"temperature": 0.9, "seed": 3, "top_p": 0.9, "frequency_penalty": 0.7, "presence_penalty": 0.3},
    {"temperature": 1.0, "seed": 5, "min_p": 0.02, "min_tokens": 10, "stop_token_ids": list(range(0, 500, 3))},
    {"temperature": 0.0, "logit_bias": {7: 4.0, 9: -100.0}, "logprobs": 1},
    {"temperature": 0.7, "seed": 6, "allowed_token_ids": list(range(40))},
]


def draft_requests(count: int = 7, most_words: int = 1000) -> list[Request]:
    """most_words: bad words of all but the last request; with more than the tables of a device hold, no step has
    drafts."""
    dice = random.Random(4)
    shared = [dice.randrange(500) for _ in range(20)]
    requests = []
    for i in range(count):
        prompt = shared[: dice.choice([0, 9, 20])] + [dice.randrange(500) for _ in range(dice.randint(1, 20))]
        params = SamplingParams(max_tokens=dice.randint(12, 40), **DRAFT_PARAMS[i % len(DRAFT_PARAMS)])
        assert params.max_tokens is not None
        words = tuple((token,) for token in range(0, 500, 7)) if i % 3 == 2 else ()
        words = words if i == count - 1 else words[:most_words]
        requests.append(
            Request(f"r{i}", prompt, params, max_output_tokens=params.max_tokens, eos_token_ids=(2,),
                    bad_words_token_ids=((*words, (4, 5)) if words else ()))
        )  # fmt: skip
    return requests


def tokens_of(outputs: Sequence[EngineOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def knowing(texts: Sequence[Sequence[int]], errors: float) -> Callable[[HostDrafts, int, int], Any]:
    """A source of drafts that knows every text, and gives a wrong token with probability `errors`."""
    dice = random.Random(9)

    def find(self: HostDrafts, slot: int, most: int) -> Any:
        known = self._inputs.known_tokens(slot, self._slots.num_known(slot)).tolist()
        text = next((text for text in texts if list(text[: len(known)]) == known), known)
        drafts = list(text[len(known) : len(known) + dice.randint(0, most)])
        drafts = [dice.randrange(500) if dice.random() < errors else token for token in drafts]
        return np.array(drafts, np.int32)

    return find


VOCAB = 700  # above MAX_CANDIDATES and FIRST_TRY, no multiple of the group
cases = st.builds(
    lambda asked, seed, prompt, output, eos, bad: Case(SamplingParams(seed=seed, **asked), prompt, output, eos, bad),
    st.fixed_dictionaries(
        {"temperature": st.sampled_from([0.0, 0.3, 1.0, 1.7])},
        optional={
            "top_k": st.sampled_from([1, 2, 40, 256, 257, 650, 5000]),
            "top_p": st.sampled_from([1e-6, 0.2, 0.7, 0.95, 0.9999]),
            "min_p": st.sampled_from([0.01, 0.2, 1.0]),
            "repetition_penalty": st.sampled_from([0.7, 1.3]),
            "repeat_last_n": st.sampled_from([-1, 0, 2, 64]),
            "presence_penalty": st.sampled_from([-1.5, 1.0]),
            "frequency_penalty": st.sampled_from([-0.5, 0.8]),
            "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, 4.0]), max_size=4),
            "allowed_token_ids": st.lists(st.integers(0, VOCAB - 1), min_size=3, max_size=40),
            "min_tokens": st.integers(0, 6),
            "stop_token_ids": st.lists(st.integers(0, VOCAB - 1), max_size=2),
            "ignore_eos": st.booleans(),
            "logprobs": st.integers(0, 3),
        },
    ),
    st.integers(-(2**63), 2**63 - 1),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12),
    st.lists(st.integers(0, 5), max_size=8),
    st.tuples(st.integers(0, VOCAB - 1)),
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
)
BLOCK, MAX_LEN = 8, 160
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 0.9, "seed": 3, "top_p": 0.9, "frequency_penalty": 0.5},
    {"temperature": 1.5, "seed": 4, "top_k": 20, "repetition_penalty": 1.3, "repeat_last_n": 9},
    {"temperature": 1.0, "seed": 5, "min_p": 0.02, "min_tokens": 10, "stop_token_ids": [7, 9]},
]


class Widest(Speculation):
    """Verifies as many drafts as fit into a step."""

    def width(self, decoding: Sequence[Request], ready: Sequence[int], limit: int) -> int:
        widths = range(self.most, 0, -1)
        return next((w for w in widths if len(ready) + sum(min(w, count) for count in ready) <= limit), 0)


def serve(
    model: Any,
    spec: ModelSpec,
    requests: list[Request],
    *,
    num_blocks: int = 200,
    depth: int = 1,
    step: int = 64,
    way: str = "host",
    make_runner: Callable[..., Runner] | None = None,
    num_places: int = 0,
    deterministic: bool = False,
    ledger: Ledger | None = None,
    kv_dtype: str = "float32",
    speculates: bool = False,
    drafter: Callable[[int], OpenDrafter] | None = None,
    then: Sequence[Request] = (),
    walk: random.Random | None = None,
) -> tuple[dict[str, list[EngineOutput]], Scheduler]:
    """Every request's outputs, and the scheduler after all is done. make_runner: in place of the model's own.
    ledger: in place of one of `num_blocks` blocks for each group. num_places: of
    recurrent states, which are NaN at the start, as K and V then are; 0: the model has none.
    speculates: with the runner's drafts, as many of them as fit into a step. drafter: made for a number of blocks.
    then: requests that come when the others have ended. walk: draws when each request comes, and which are aborted."""
    config = SchedulerConfig(
        max_num_seqs=4, max_num_batched_tokens=step, max_model_len=MAX_LEN, block_size=BLOCK,
        long_prefill_token_threshold=16, output_reserve=0.0, state_interval=BLOCK,
        fixed_chunk=2 * BLOCK if deterministic else 0,
    )  # fmt: skip
    sizes: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": step, "max_model_len": MAX_LEN, **WAYS[way]}
    if make_runner is None:
        sizes_of_groups = of_each(spec, num_blocks) if ledger is None else ledger.num_blocks
        cache = KVCache(spec, sizes_of_groups, BLOCK, CPU, kv_dtype)
        states = StateCache(spec, num_places, CPU, torch.float32)
        if num_places:
            poison(cache, states)
        runner: Runner = TorchRunner(
            model, spec, cache, block_size=BLOCK, device=CPU, states=states, has_drafts=speculates,
            drafter=drafter and drafter(sizes_of_groups[0]),
            launch_options=LaunchOptions(deterministic=deterministic), **sizes,
        )  # fmt: skip
    else:
        places = {"num_places": num_places} if num_places else {}
        runner = make_runner(num_blocks=num_blocks, block_size=BLOCK, **places, **sizes)
        config = replace(config, num_stages=runner.num_stages)
    while runner.use_idle_time():
        pass
    ledger = ledger or ledger_of(spec, num_blocks, BLOCK)
    slots = StatePool(num_places) if num_places else None
    speculation = Widest(runner.drafts) if speculates else None
    manager = CacheManager(config, ledger, BlockHasher(b"tiny", BLOCK), slots)
    scheduler = Scheduler(config, manager, speculation=speculation)
    loop = EngineLoop(scheduler, runner, depth=depth)
    told: dict[str, list[EngineOutput]] = {request.request_id: [] for request in (*requests, *then)}

    def receive(outputs: list[EngineOutput]) -> None:
        for output in outputs:
            told[output.request_id].append(output)

    loop.deliver = receive
    coming = [] if walk is None else list(requests)
    loop.submit(*(requests if walk is None else ()))
    for _ in range(3000):
        if walk is not None and coming and (not scheduler.has_work or walk.random() < 0.3):
            loop.submit(coming.pop(0))
        begun = [name for name, outputs in told.items() if outputs and outputs[-1].finish_reason is None]
        if walk is not None and begun and walk.random() < 0.08:
            loop.cancel(walk.choice(begun))
        loop.step()
        if not scheduler.has_work and not coming:
            if not then:
                return told, scheduler
            loop.submit(*then)
            then = ()
    raise AssertionError("still at work")


def poison(cache: KVCache, states: StateCache) -> None:
    """Fill the memory with NaN, except what padding is written to."""
    for layer in (*[kv for kv in cache.layers if kv is not None], *states.layers.values()):
        for tensor in layer.tensors():
            tensor[1:] = torch.nan


def make_requests() -> list[Request]:
    dice = random.Random(8)
    shared = [dice.randrange(500) for _ in range(40)]  # a prefix that some have in common
    requests = []
    for i in range(10):
        prompt = shared[: dice.choice([0, 17, 40])] + [dice.randrange(500) for _ in range(dice.randint(1, 30))]
        params = SamplingParams(max_tokens=dice.randint(8, 30), **PARAMS[i % len(PARAMS)])
        assert params.max_tokens is not None
        requests.append(Request(f"r{i}", prompt, params, max_output_tokens=params.max_tokens, eos_token_ids=(2,)))
    return requests


def mixed_requests() -> list[Request]:
    asked = [
        SamplingParams(temperature=0.0, max_tokens=5),
        SamplingParams(temperature=1.1, top_p=0.9, seed=3, max_tokens=4, repetition_penalty=1.2),
        SamplingParams(temperature=0.9, top_k=9, seed=4, max_tokens=4),
        SamplingParams(typical_p=0.8, dry_multiplier=0.8, dry_allowed_length=0, seed=5, max_tokens=3),
    ]
    prompts = [[7, 8, 9, *range(30, 50)], [5], [7, 8, 9, *range(30, 46), 3, 4], [7, 8, 7]]
    return [
        Request(f"r{i}", prompt, params, max_output_tokens=params.max_tokens or 1)
        for i, (prompt, params) in enumerate(zip(prompts, asked, strict=True))
    ]


def check_kernels(
    model: Any, spec: ModelSpec, requests: Callable[[], list[Request]], way: str, monkeypatch: pytest.MonkeyPatch,
    ledger: Ledger | None = None,
) -> None:  # fmt: skip
    """Assert that a whole engine gives through the kernels what it gives through their twins."""
    through_kernels, scheduler = serve(model, spec, requests(), num_blocks=14, depth=2, step=24, way=way, ledger=ledger)
    assert scheduler.recorder.num_failed_steps == 0
    monkeypatch.setattr(launch, "INTERPRETED", False)
    through_twins, _ = serve(model, spec, requests(), way="host")
    for name, outputs in through_twins.items():
        told = [token for output in through_kernels[name] for token in output.token_ids]
        assert told == [token for output in outputs for token in output.token_ids], name
