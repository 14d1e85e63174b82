"""Prediction layers against the same layer computed over the whole text, in float32: hidden states and logits within
1e-5, whatever steps the text is cut into."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from localllm.kernels.layer_kv import LayerKV
from localllm.kernels.paged_attention import kv_cache_shape
from localllm.models.architectures.read_spec import read_spec
from localllm.models.drafters.mtp import MTPDrafter, mtp_bytes, open_mtp, plan_mtp
from localllm.models.inputs import ForwardInputs, GroupInputs
from localllm.models.loader import load_model
from localllm.models.spec.kv_groups import kv_shape
from localllm.models.weights.parameters import held_bytes
from tests.models.test_goldens import prompt
from tests.mtp_models import KINDS, MTPOracle, make_mtp_model

CPU, BLOCK_SIZE, BLOCKS = torch.device("cpu"), 8, 40
TOKENS = prompt(41)
oracle = cache(MTPOracle)


@pytest.fixture(scope="module", params=KINDS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def path(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mtp_model(tmp_path_factory.mktemp(name), name)


class Paged:
    """A drafter with a cache full of NaN, and one request whose blocks are in no order."""

    def __init__(self, path: Path) -> None:
        target = load_model(path, read_spec(path), CPU, torch.float32)
        self.drafter = open_mtp(plan_mtp(path, target.spec), target, CPU, torch.float32, lookahead=3)
        shape = kv_cache_shape(BLOCKS, BLOCK_SIZE, *kv_shape(self.drafter.spec, 0))
        k = torch.full(shape, torch.nan)
        self.cache = [LayerKV(k, k if target.spec.latent is not None else k.clone())]
        self.blocks = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(1)).int()

    def inputs(self, token_ids: list[int], first: int) -> ForwardInputs:
        """The pairs of tokens first, first + 1, ..."""
        places, count = torch.arange(first, first + len(token_ids)), len(token_ids)
        slots = self.blocks[places // BLOCK_SIZE].long() * BLOCK_SIZE + places % BLOCK_SIZE
        return ForwardInputs(
            token_ids=torch.tensor(token_ids), positions=places - 1, groups=(GroupInputs(self.blocks[None], slots),),
            context_lens=torch.tensor([first + count], dtype=torch.int32),
            cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32), logits_indices=torch.tensor([count - 1]),
            num_decodes=int(count == 1), query_lens=(count,), context_lens_host=(first + count,), first_key=1,
        )  # fmt: skip

    @torch.inference_mode()
    def extend(self, features: Tensor, chunk: int) -> list[Tensor]:
        """Return the hidden state of the newest token after each chunk. features: of the tokens but the last."""
        found = []
        for first in range(1, len(TOKENS), chunk):
            part = slice(first, min(first + chunk, len(TOKENS)))
            step = self.inputs(TOKENS[part], first)
            found.append(self.drafter.extend(step, self.cache, features[part.start - 1 : part.stop - 1]))
        return found


def assert_near(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-5


@pytest.mark.parametrize("chunk", [len(TOKENS), 3, 1])
def test_pairs_and_drafts_are_the_layers(name: str, path: Path, chunk: int) -> None:
    whole, paged = oracle(path, name), Paged(path)
    features = whole.target_hidden(TOKENS)
    wanted = whole.hidden(TOKENS, features[:-1])
    found = paged.extend(features[:-1].clone(), chunk)
    ends = [min(first + chunk, len(TOKENS)) - 2 for first in range(1, len(TOKENS), chunk)]
    assert_near(torch.cat(found), wanted[ends])
    with torch.inference_mode():
        assert_near(paged.drafter.logits(found[-1]), whole.logits(wanted[-1:]))
    drafts, before, newest = [7, 30, 400], features[:-1], found[-1]
    for count, token in enumerate(drafts, start=1):
        before = torch.cat((before, wanted[-1:]))
        wanted = whole.hidden([*TOKENS, *drafts[:count]], before)
        with torch.inference_mode():
            newest = paged.drafter.step(paged.inputs([token], len(TOKENS) + count - 1), paged.cache, newest)
            assert_near(newest, wanted[-1:])
            assert_near(paged.drafter.logits(newest), whole.logits(wanted[-1:]))


def test_its_bytes_are_predicted(path: Path) -> None:
    paged = Paged(path)
    plan = plan_mtp(path, read_spec(path))
    loaded = held_bytes(_parts(paged.drafter))
    assert mtp_bytes(plan, read_spec(path).num_layers, CPU, torch.float32) == loaded
    assert plan.weights_bytes == pytest.approx(loaded, rel=0.1)
    assert (plan.taps, plan.first_key) == ((-1,), 1)


def _parts(drafter: MTPDrafter) -> object:
    return drafter._parts
