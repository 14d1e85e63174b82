"""Drafts of every family: the tokens of a model whose guesses are verified are those without guesses."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from localllm.engine.params import SamplingParams
from localllm.engine.request import Request
from localllm.models.drafters.draft_model import DraftModel
from localllm.models.loader import load_model
from localllm.models.read_spec import read_spec
from tests.runner.harness import assert_same, opened, serve
from tests.tiny import FAMILIES, RECOGNISED

PathOf = Callable[[str], Path]
CPU = torch.device("cpu")


def requests() -> list[Request]:
    """Two requests of three tokens, so that lookups are sometimes right."""
    prompts = {"a": [5, 6, 7] * 5, "b": [9, 8, 7, 9, 8, 7, 9]}
    asked = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True, allowed_token_ids=[7, 8, 9])
    return [Request(name, prompt, asked, max_output_tokens=14) for name, prompt in prompts.items()]


@pytest.mark.parametrize("drafter", ["lookup", "model"])
@pytest.mark.parametrize("family", [*FAMILIES, *RECOGNISED])
def test_drafts_change_no_token(family: str, drafter: str, tiny_model_path: PathOf) -> None:
    path, draft = tiny_model_path(family), tiny_model_path("llama")
    spec = read_spec(path)
    model, places = load_model(path, spec, CPU, torch.float32), 12 if spec.recurrent is not None else 0
    plain, _ = serve(model, spec, requests(), num_places=places)
    own = DraftModel(load_model(draft, read_spec(draft), CPU, torch.float32), spec.vocab_size)
    told, scheduler = serve(
        model, spec, requests(), num_places=places, speculates=True, drafter=opened(own) if drafter == "model" else None
    )
    assert scheduler.recorder.num_failed_steps == 0
    assert scheduler.speculation is not None
    assert scheduler.speculation.stats().num_draft_tokens > 0
    assert_same(told, plain)
