"""Requests with embeddings in place of tokens, under the real scheduler and runner: each gets what it gets alone."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.engine.params import SamplingParams
from localllm.engine.request import Request
from localllm.models.prompt_embeds import PromptEmbedsReader, PromptEmbedsTensor
from localllm.models.spec.model_spec import ModelSpec
from tests.runner.harness import BLOCK, MAX_LEN, make_requests, serve
from tests.tiny import load_reference

SHARED = random.Random(5).choices(range(500), k=40)
SCHEDULES = [(1, 18, 20, "host"), (2, 18, 20, "staged"), (2, 18, 80, "replayed")]


@pytest.fixture(scope="module")
def table(tiny_llama_path: Path) -> Tensor:
    """[V, hidden] as transformers has it."""
    weight: Tensor = load_reference(tiny_llama_path).get_input_embeddings().weight.detach()
    return weight


def embeds_of(spec: ModelSpec, rows: Tensor) -> PromptEmbedsTensor:
    return PromptEmbedsReader(spec.hidden_size, torch.float32, MAX_LEN).of_tensor(rows)


def embedded(name: str, embeds: PromptEmbedsTensor, **params: Any) -> Request:
    asked = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **params})
    assert asked.max_tokens is not None
    ids = [0] * embeds.num_tokens
    return Request(name, ids, asked, max_output_tokens=asked.max_tokens, prompt_embeds=embeds)


def make_embedded(spec: ModelSpec, table: Tensor) -> list[Request]:
    """Some are the embeddings of tokens, some are of no token; two are equal, two begin alike and are not."""
    noise = torch.randn(41, spec.hidden_size, generator=torch.Generator().manual_seed(2)) * table.std()
    rows = [table[SHARED], noise, noise[:33], noise, torch.cat((noise[:16], table[SHARED])), table[SHARED[:1]]]
    asked: list[dict[str, Any]] = [
        {}, {"temperature": 1.0, "seed": 3, "frequency_penalty": 0.5}, {"logprobs": 2}, {"max_tokens": 25},
        {"temperature": 0.8, "seed": 9, "top_p": 0.9}, {"max_tokens": 30},
    ]  # fmt: skip
    return [embedded(f"e{i}", embeds_of(spec, r), **a) for i, (r, a) in enumerate(zip(rows, asked, strict=True))]


def tokens_of(outputs: list[Any]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


@pytest.fixture(scope="module")
def alone(model: Any, spec: ModelSpec, table: Tensor) -> dict[str, list[int]]:
    requests = [*make_embedded(spec, table), *make_requests()[:6]]
    return {each.request_id: tokens_of(serve(model, spec, [each])[0][each.request_id]) for each in requests}


@pytest.mark.parametrize(("depth", "num_blocks", "step", "way"), SCHEDULES)
def test_output_depends_on_the_request_alone(
    model: Any, spec: ModelSpec, table: Tensor, alone: Any, depth: int, num_blocks: int, step: int, way: str
) -> None:
    """Chunks, neighbours with and without tokens, preemptions, the prefix cache: nothing changes."""
    mixed = [request for pair in zip(make_embedded(spec, table), make_requests(), strict=False) for request in pair]
    together, scheduler = serve(model, spec, mixed, num_blocks=num_blocks, depth=depth, step=step, way=way)
    assert scheduler.recorder.num_failed_steps == 0
    assert scheduler.recorder.num_preemptions > 0
    assert {name: tokens_of(outputs) for name, outputs in together.items()} == alone


def test_the_embeddings_of_tokens_give_what_the_tokens_give(model: Any, spec: ModelSpec, table: Tensor) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20)
    told, _ = serve(
        model, spec,
        [embedded("embeds", embeds_of(spec, table[SHARED]), max_tokens=20),
         Request("tokens", SHARED, params, max_output_tokens=20)],
        step=24,
    )  # fmt: skip
    assert tokens_of(told["embeds"]) == tokens_of(told["tokens"])


def test_blocks_are_shared_with_equal_embeddings_and_with_nothing_else(
    model: Any, spec: ModelSpec, table: Tensor
) -> None:
    """All of these have the same ids: zeros."""
    first, other = embeds_of(spec, table[SHARED]), embeds_of(spec, table[SHARED].flip(0))
    zeros = Request("zeros", [0] * 40, SamplingParams(temperature=0.0, max_tokens=2), max_output_tokens=2)
    equal = embeds_of(spec, table[SHARED].clone())
    told, _ = serve(model, spec, [embedded("a", first), embedded("b", equal), embedded("c", other), zeros])
    cached = {name: outputs[-1].num_cached_tokens for name, outputs in told.items()}
    assert cached == {"a": 0, "b": (40 - 1) // BLOCK * BLOCK, "c": 0, "zeros": 0}
    assert tokens_of(told["a"]) == tokens_of(told["b"]) != tokens_of(told["c"])
