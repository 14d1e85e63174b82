"""llama.cpp's samplers: equal to its own results on fixed logits, and independent of what runs beside a request."""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from localllm.engine.outputs import EngineOutput
from localllm.engine.params import SamplingParams
from localllm.engine.request import Request
from localllm.engine.step import NewSlot
from localllm.models.spec.model_spec import ModelSpec
from localllm.runner.device_drafts import LookupOnDevice
from localllm.runner.host_drafts import HostDrafts
from localllm.runner.sampler_chain import ChainRow, Chains, apply_chains, observe
from tests.runner.harness import knowing, knowing_on_device, serve, tokens_of
from tests.runner.naive import Case, random_logits, run

CPU, VOCAB = torch.device("cpu"), 200
TOKENS = [114, 29, 66, 103, 114, 29, 66, 140, 29, 66]
OTHERS = [7, 8, 9, 3, 7, 8, 9, 5, 1, 7, 8, 9]
TWO = [103, 14] * 30
LONG = [100 + i * i % 17 for i in range(90)]

# The three tables hold results of llama.cpp's own samplers (llama-cpp-python 0.3.36) on the logits below.
FILTERED: list[tuple[dict[str, Any], int, int, dict[int, float], tuple[int, float]]] = [
    ({"typical_p": 0.2}, 0, 9, {186: 0.128488, 101: 0.122368, 167: 0.118880}, (156, 9.600e-02)),
    ({"typical_p": 0.5}, 0, 21, {152: 0.083941, 67: 0.083638, 134: 0.069931}, (15, 2.473e-02)),
    ({"typical_p": 0.9}, 0, 44, {34: 0.074555, 119: 0.074322, 1: 0.049642}, (116, 4.528e-03)),
    ({"top_n_sigma": 0.3}, 0, 10, {34: 0.147357, 119: 0.146897, 1: 0.098117}, (19, 6.939e-02)),
    ({"top_n_sigma": 0.7}, 0, 26, {34: 0.085564, 119: 0.085296, 1: 0.056972}, (15, 1.632e-02)),
    ({"top_n_sigma": 1.5}, 0, 69, {34: 0.069906, 119: 0.069688, 1: 0.046547}, (90, 1.520e-03)),
    (
        {"xtc_probability": 1.0, "xtc_threshold": 0.03},
        0,
        191,
        {19: 0.055141, 104: 0.051806, 189: 0.048569},
        (195, 6.535e-06),
    ),
    (
        {"xtc_probability": 1.0, "xtc_threshold": 0.05},
        0,
        199,
        {119: 0.071948, 1: 0.048056, 86: 0.047607},
        (195, 4.028e-06),
    ),
    (
        {"xtc_probability": 1.0, "xtc_threshold": 0.3},
        0,
        200,
        {34: 0.067315, 119: 0.067105, 1: 0.044821},
        (195, 3.757e-06),
    ),
    ({"xtc_probability": 1.0, "xtc_threshold": 0.05, "top_k": 3}, 0, 1, {1: 1.0}, (1, 1.000e00)),
    ({"dynatemp_range": 0.5}, 0, 200, {34: 0.052420, 119: 0.052287, 1: 0.037690}, (195, 1.860e-05)),
    (
        {"temperature": 0.8, "dynatemp_range": 0.3, "dynatemp_exponent": 2.0},
        0,
        200,
        {34: 0.084674, 119: 0.084352, 1: 0.051633},
        (195, 5.685e-07),
    ),
    (
        {"temperature": 0.0, "dynatemp_range": 1.5, "top_k": 40},
        0,
        40,
        {34: 0.058449, 119: 0.058318, 1: 0.043689},
        (4, 8.894e-03),
    ),
    ({"top_n_sigma": 0.7, "dynatemp_range": 0.5}, 0, 26, {34: 0.080605, 119: 0.080375, 1: 0.055574}, (15, 1.772e-02)),
    (
        {
            "dry_multiplier": 0.8,
            "top_n_sigma": 2.0,
            "top_k": 40,
            "typical_p": 0.95,
            "top_p": 0.9,
            "min_p": 0.05,
            "xtc_probability": 1.0,
            "xtc_threshold": 0.08,
            "temperature": 1.3,
            "dynatemp_range": 0.4,
            "dynatemp_exponent": 1.5,
        },
        0,
        23,
        {119: 0.071700, 1: 0.056289, 86: 0.055973},
        (185, 2.700e-02),
    ),
    (
        {"top_k": 30, "typical_p": 0.6, "top_p": 0.8, "temperature": 0.6},
        1,
        12,
        {15: 0.179727, 152: 0.120198, 67: 0.119281},
        (115, 3.775e-02),
    ),
]
"""Parameters, step, tokens that remain, the likeliest with their probabilities, and the least likely one."""

STEEP = {"dry_multiplier": 1.5, "dry_base": 3.0, "dry_allowed_length": 1}
PENALISED: list[tuple[list[int], dict[str, Any], Any, dict[int, float]]] = [
    (OTHERS, {"dry_multiplier": 0.8}, (), {3: 1.4, 5: 1.4}),
    (TOKENS, {"dry_multiplier": 0.8}, (), {103: 0.8, 140: 0.8}),
    (TOKENS, STEEP, (), {103: 4.5, 140: 4.5}),
    (TOKENS, {**STEEP, "dry_penalty_last_n": 5}, (), {140: 4.5}),
    (TOKENS, STEEP, (((), (29,)),), {103: 1.5, 140: 1.5}),
    (TOKENS, STEEP, (((29,), (114,)),), {103: 4.5, 140: 4.5}),
    (TOKENS, STEEP, (((), (103,)),), {140: 4.5}),
    (TWO, {"dry_multiplier": 0.5, "dry_base": 9.0}, (), {103: 7.3904e37}),
    (LONG, {"dry_multiplier": 0.5, "dry_base": 1.1}, (((105,), (104,)),), {108: 434.36}),
    (TOKENS, {"dry_multiplier": 0.5, "dry_base": 1.2, "dry_allowed_length": 0}, (),
     {29: 0.5, 66: 0.5, 103: 0.72, 114: 0.5, 140: 0.72}),
]  # fmt: skip
"""Known tokens, parameters, breakers, and what is subtracted from which logits."""

MIROSTAT: list[tuple[int, float, float, list[tuple[int, int, float]]]] = [
    (
        1,
        2,
        0.1,
        [(1, 34, 4.20000), (1, 185, 4.40000), (1, 166, 4.60000), (1, 14, 4.80000), (1, 80, 5.00000), (1, 146, 5.20000)],
    ),
    (
        1,
        2,
        1,
        [
            (1, 34, 6.00000),
            (1, 185, 8.00000),
            (161, 66, 5.85417),
            (1, 14, 7.85417),
            (103, 198, 5.78498),
            (1, 146, 7.78498),
        ],
    ),
    (
        1,
        5,
        0.1,
        [
            (200, 86, 10.06191),
            (200, 67, 10.14083),
            (200, 36, 9.62877),
            (200, 29, 9.68649),
            (200, 198, 9.77878),
            (200, 9, 9.84723),
        ],
    ),
    (
        1,
        5,
        1,
        [
            (200, 86, 10.61908),
            (200, 67, 11.40825),
            (200, 36, 6.28769),
            (1, 14, 11.28769),
            (200, 47, 11.39364),
            (200, 46, 11.80028),
        ],
    ),
    (
        2,
        2,
        0.1,
        [(2, 34, 4.10025), (3, 185, 4.14372), (2, 81, 4.24146), (5, 99, 4.20942), (5, 165, 4.19113), (2, 146, 4.29173)],
    ),
    (
        2,
        2,
        1,
        [
            (2, 34, 5.00250),
            (11, 15, 4.01656),
            (2, 81, 4.99391),
            (10, 184, 3.79357),
            (1, 80, 5.79357),
            (20, 94, 3.93513),
        ],
    ),
    (
        2,
        5,
        0.1,
        [
            (72, 86, 10.06507),
            (73, 67, 10.14714),
            (75, 26, 9.71444),
            (63, 147, 9.77839),
            (65, 198, 9.87480),
            (67, 9, 9.94715),
        ],
    ),
    (
        2,
        5,
        1,
        [
            (72, 86, 10.65066),
            (83, 67, 11.45953),
            (96, 177, 6.72044),
            (24, 114, 7.66166),
            (37, 198, 8.74053),
            (47, 94, 9.54178),
        ],
    ),
]
"""Version, tau, eta, and for each step: tokens that remain, the token that llama.cpp drew, and its state after."""


def logits_of(step: int) -> Tensor:
    """Return the logits [V] of a step, as the program that made the tables did."""
    values = [3.0 * math.sin(i * 1.7 + 0.3 + step * 0.9) + 2.0 * math.cos(i * 0.37 + step * 0.5) for i in range(VOCAB)]
    return torch.tensor(values)


def chain_row(params: SamplingParams, tokens: Sequence[int], breakers: Any = ()) -> tuple[ChainRow, Tensor]:
    """Return the first row of a batch with these known tokens, and the table of tokens."""
    chains = Chains(VOCAB, CPU)
    chains.enter(NewSlot(0, "r", tokens, len(tokens), params, (), 0, dry_breakers=breakers), 5)
    [row] = chains.rows([0], [len(tokens)])
    return row, torch.tensor([[*tokens, 0, 0]], dtype=torch.int32)


def changed(params: SamplingParams, tokens: Sequence[int], step: int = 0, breakers: Any = ()) -> Tensor:
    row, table = chain_row(params, tokens, breakers)
    logits = logits_of(step)[None]
    apply_chains(logits, [row], table)
    return logits[0]


@pytest.mark.parametrize(("asked", "step", "count", "likely", "last"), FILTERED)
def test_filters_equal_llama_cpp(
    asked: dict[str, Any], step: int, count: int, likely: dict[int, float], last: tuple[int, float]
) -> None:
    if "dry_multiplier" in asked:
        asked = asked | {"dry_penalty_last_n": 1024}
    x = changed(SamplingParams(**{"temperature": 1.0, "seed": 1} | asked), TOKENS, step)
    chances = torch.softmax(x.double(), -1)
    assert int(x.isfinite().sum()) == count
    order = chances.argsort(descending=True, stable=True).tolist()
    assert order[: min(3, count)] == list(likely)
    assert {token: float(chances[token]) for token in likely} == pytest.approx(likely, abs=2e-6)
    assert order[count - 1] == last[0]
    assert float(chances[last[0]]) == pytest.approx(last[1], rel=2e-3)


@pytest.mark.parametrize(("tokens", "asked", "breakers", "penalties"), PENALISED)
def test_dry_equals_llama_cpp(
    tokens: list[int], asked: dict[str, Any], breakers: Any, penalties: dict[int, float]
) -> None:
    params = SamplingParams(temperature=1.0, **{"dry_penalty_last_n": 1024} | asked)
    taken = (logits_of(0) - changed(params, tokens, breakers=breakers)).double()
    found = {int(token): float(taken[token]) for token in taken.nonzero().flatten()}
    assert found == pytest.approx(penalties, rel=1e-4)


@pytest.mark.parametrize(("version", "tau", "eta", "steps"), MIROSTAT)
def test_mirostat_equals_llama_cpp(version: int, tau: float, eta: float, steps: list[tuple[int, int, float]]) -> None:
    params = SamplingParams(temperature=0.9, mirostat=version, mirostat_tau=tau, mirostat_eta=eta)
    row, table = chain_row(params, [1, 2, 3])
    for step, (count, drawn, state) in enumerate(steps):
        logits, at = logits_of(step)[None], row._replace(length=3 + step)
        apply_chains(logits, [at], table)
        observe(logits, [at], torch.tensor([drawn]))
        assert int(logits.isfinite().sum()) == count
        assert at.chain.mu is not None
        assert float(at.chain.mu[4 + step]) == pytest.approx(state, abs=2e-3)


def test_xtc_applies_as_often_as_its_probability() -> None:
    params = SamplingParams(temperature=1.0, xtc_probability=0.3, xtc_threshold=0.05, seed=1)
    row, table = chain_row(params, TOKENS)
    applied = 0
    for length in range(400):
        logits = logits_of(0)[None]
        apply_chains(logits, [row._replace(length=length)], table, torch.tensor([length]))
        applied += bool(logits.isinf().any())
    assert 80 < applied < 160


CHAINS: list[dict[str, Any]] = [
    {"dry_multiplier": 2.0, "dry_allowed_length": 0, "temperature": 0.0},
    {"dry_multiplier": 0.8, "dry_penalty_last_n": -1, "top_k": 30, "seed": 3},
    {"xtc_probability": 0.5, "xtc_threshold": 0.01, "seed": 4, "frequency_penalty": 0.5, "logprobs": 1},
    {"typical_p": 0.7, "temperature": 1.4, "seed": 5},
    {"top_n_sigma": 1.0, "dynatemp_range": 0.8, "seed": 6},
    {"mirostat": 1, "mirostat_tau": 4.0, "seed": 7},
    {"mirostat": 2, "mirostat_eta": 0.6, "seed": 8},
    {"xtc_probability": 0.9, "xtc_threshold": 0.001, "temperature": 0.0, "seed": 9},
]
PLAIN: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.2, "seed": 2, "top_p": 0.8, "repetition_penalty": 1.2},
    {"temperature": 0.9, "seed": 3, "logprobs": 2},
]
LENGTH = 12  # tokens of each answer


def test_a_neighbour_with_a_chain_changes_no_bit() -> None:
    logits = random_logits(8, VOCAB)
    plain = [Case(SamplingParams(**asked), TOKENS) for asked in PLAIN]
    alone = run(logits[:3], plain)
    beside = run(logits, [*plain, *(Case(SamplingParams(**asked), TOKENS) for asked in CHAINS[:5])])
    assert alone.token_ids.tolist() == beside.token_ids[:3].tolist()
    assert alone.best.tolist() == beside.best[:3].tolist()
    assert alone.logprobs is not None
    assert beside.logprobs is not None
    assert alone.logprobs.logprobs[0].tolist()[:3] == beside.logprobs.logprobs[0].tolist()[:3]


def test_each_row_with_a_chain_is_drawn_as_alone() -> None:
    logits = random_logits(len(CHAINS), VOCAB)
    cases = [Case(SamplingParams(**asked), TOKENS) for asked in CHAINS]
    together = run(logits, cases).token_ids.tolist()
    assert together == [run(logits[i : i + 1], [case]).token_ids.item() for i, case in enumerate(cases)]


def make_requests(asked: Sequence[dict[str, Any]]) -> list[Request]:
    dice = random.Random(4)
    shared = [dice.randrange(500) for _ in range(20)]
    return [
        Request(
            f"r{i}", shared + [dice.randrange(500) for _ in range(dice.randint(1, 20))],
            SamplingParams(max_tokens=LENGTH, **values), max_output_tokens=LENGTH,
            dry_breakers=(((), (3, 4)), ((7,), (5, 6))),
        )
        for i, values in enumerate(asked)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def alone(model: Any, spec: ModelSpec) -> dict[str, list[int]]:
    """What each request gets alone, on a CPU."""
    told: dict[str, list[EngineOutput]] = {}
    for request in make_requests(CHAINS + PLAIN):
        told |= serve(model, spec, [request])[0]
    return {name: tokens_of(outputs) for name, outputs in told.items()}


@pytest.mark.parametrize(("way", "depth"), [("host", 1), ("staged", 2), ("replayed", 2)])
def test_no_schedule_changes_a_token(
    model: Any, spec: ModelSpec, alone: dict[str, list[int]], way: str, depth: int
) -> None:
    """Chunks of prompts, prefix hits, and preemptions, which the few blocks cause."""
    told, scheduler = serve(model, spec, make_requests(CHAINS + PLAIN), way=way, depth=depth, num_blocks=18, step=24)
    assert scheduler.recorder.num_preemptions
    assert {name: tokens_of(outputs) for name, outputs in told.items()} == alone


@pytest.mark.parametrize("way", ["host", "staged"])
def test_drafts_change_no_token(
    model: Any, spec: ModelSpec, alone: dict[str, list[int]], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = make_requests(CHAINS + PLAIN)
    texts = [[*request.token_ids, *alone[request.request_id]] for request in requests]
    monkeypatch.setattr(HostDrafts, "_find", knowing(texts, 0.3))
    monkeypatch.setattr(LookupOnDevice, "launch", knowing_on_device(texts, 0.3))
    told, _ = serve(model, spec, requests, way=way, depth=2, speculates=True)
    assert {name: tokens_of(outputs) for name, outputs in told.items()} == alone
    checked = {request.request_id: request.acceptance.counts.checked for request in requests}
    for request in requests:
        assert (checked[request.request_id] == 0) == (request.params.mirostat > 0)


def test_a_processor_sees_the_tokens_and_decides() -> None:
    seen: list[Any] = []

    def only(token: int) -> Callable[..., Tensor]:
        def process(output: list[int], logits: Tensor) -> Tensor:
            seen.append(output)
            return torch.where(torch.arange(len(logits)) == token, logits, -torch.inf)

        return process

    def three(prompt: list[int], output: list[int], logits: Tensor) -> Tensor:
        seen.append((prompt, output))
        return logits

    cases = [
        Case(SamplingParams(temperature=0.0, logits_processors=(only(42),)), [1, 2], [3]),
        Case(SamplingParams(temperature=1.0, top_p=0.5, seed=1, logits_processors=(three, only(7))), [1], [2, 3]),
        Case(SamplingParams(temperature=0.0), [1]),
    ]
    logits = random_logits(3, VOCAB)
    assert run(logits, cases).token_ids.tolist() == [42, 7, int(logits[2].argmax())]
    assert seen == [[3], ([1], [2, 3]), [2, 3]]


def test_long_repetitions_are_measured_exactly() -> None:
    """Against a plain count, with runs longer than are compared at once."""
    dice = random.Random(3)
    for _ in range(30):
        words = [dice.randrange(3) for _ in range(dice.randint(3, 80))]
        tokens = (words * 3)[: dice.randint(4, 150)]
        params = SamplingParams(temperature=1.0, dry_multiplier=1.0, dry_base=1.05, dry_penalty_last_n=-1)
        taken = (logits_of(0) - changed(params, tokens)).double().numpy()
        longest: dict[int, int] = {}
        for place in range(1, len(tokens)):
            count = 0
            while count < place and tokens[place - 1 - count] == tokens[len(tokens) - 1 - count]:
                count += 1
            if count >= 2:
                longest[tokens[place]] = max(count, longest.get(tokens[place], 0))
        expected = np.zeros(VOCAB)
        for token, count in longest.items():
            expected[token] = 1.05 ** (count - 2)
        assert taken == pytest.approx(expected, rel=1e-4, abs=1e-5)
