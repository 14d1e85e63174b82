"""The kernels of an indexer: the choice against the definition in float64, and attention against the twin."""

import random

import pytest
import torch
from torch import Tensor

from localllm.kernels import indexer
from localllm.kernels.indexer import (
    DeviceQueries,
    attend_on_device,
    attend_to_chosen,
    choose_on_device,
    chosen_rows,
    queries_on_device,
)
from localllm.kernels.launch import INTERPRETED
from localllm.kernels.layer_cache import LayerKV
from tests.kernels.harness import TOLERANCE

pytestmark = pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs Triton's interpreter")

TOPK, SIZE, ROPE, LATENT = 12, 24, 8, 40
WIDTH = ROPE + LATENT
STEPS = [
    ([1], [TOPK + 1]), ([1, 1, 1], [TOPK, 70, 13]), ([1, 30, 5], [41, 30, 100]), ([20, 1], [25, 64]), ([1, 1], [1, 9]),
]  # fmt: skip
"""Query tokens and context lengths of the rows."""


class Step:
    """Rows over one cache, NaN where no row has written, with tokens of padding behind the last row."""

    def __init__(
        self, query_lens: list[int], context_lens: list[int], device: torch.device, dtype: torch.dtype = torch.float32,
        *, block_size: int = 8, heads: int = 5, index_heads: int = 6, padding: int = 2, first_key: int = 0,
    ) -> None:  # fmt: skip
        made = torch.Generator().manual_seed(sum(context_lens))
        ids = list(range(1, 1 + sum(-(-length // block_size) for length in context_lens)))
        total = 1 + len(ids)
        random.Random(0).shuffle(ids)
        self.cache = torch.full((1, total, block_size, WIDTH), torch.nan)
        self.index = torch.full((1, total, block_size, SIZE), torch.nan)
        table = torch.zeros(len(query_lens), max(-(-n // block_size) for n in context_lens) + 1, dtype=torch.int32)
        self.keys, positions = [], []
        for row, (count, length) in enumerate(zip(query_lens, context_lens, strict=True)):
            own = [ids.pop() for _ in range(-(-length // block_size))]
            table[row, : len(own)] = torch.tensor(own)
            keys = torch.randn(length, SIZE, generator=made)
            for at in range(first_key, length):
                place = own[at // block_size], at % block_size
                self.index[0, *place] = keys[at]
                self.cache[0, *place] = torch.randn(WIDTH, generator=made)
            self.keys.append(keys)
            positions += range(length - count - first_key, length - first_key)
        tokens = sum(query_lens) + padding
        self.q = torch.randn(tokens, heads, WIDTH, generator=made).to(device, dtype)
        self.queries = torch.randn(tokens, index_heads, SIZE, generator=made).to(device, dtype)
        self.weights = torch.randn(tokens, index_heads, generator=made).to(device)
        self.query_lens, self.context_lens, self.first_key, self.device = query_lens, context_lens, first_key, device
        self.cache, self.index, self.table = (
            self.cache.to(device, dtype),
            self.index.to(device, dtype),
            table.to(device),
        )
        self.positions = [position + first_key for position in positions]
        starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        self.rows: DeviceQueries = queries_on_device(
            self.table, torch.tensor(context_lens, dtype=torch.int32, device=device), starts.to(device),
            torch.tensor([*positions, *(0,) * padding], device=device), first_key,
        )  # fmt: skip

    def choose(self) -> Tensor:
        return choose_on_device(self.queries, self.weights, self.index, self.rows, TOPK)

    def scores(self, token: int, row: int) -> Tensor:
        """Return the scores of the keys that a token sees, in float64."""
        own = self.keys[row][self.first_key : self.positions[token] + 1].to(self.index.dtype).double()
        products = (self.queries[token].cpu().double() @ own.T).clamp(min=0)
        return self.weights[token].cpu().double() @ products

    def owners(self) -> list[int]:
        return [row for row, count in enumerate(self.query_lens) for _ in range(count)]

    def attended(self, chosen: Tensor, kv: LayerKV) -> Tensor:
        """Return what the twin gives, in fp32 from the same cache."""
        rows = chosen_rows(self.table, self.cache.shape[2], self.query_lens, self.context_lens, 0)
        real = [row for row in rows if row is not None]
        out = torch.zeros(len(self.q), self.q.shape[1] * WIDTH, device=self.device)
        picked = [chosen[row.tokens].long() for row in real]
        attend_to_chosen(self.q.float(), kv, real, picked, 0.3, out)
        return out.view(len(self.q), -1, WIDTH)[:, :, ROPE:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("query_lens", "context_lens"), STEPS)
def test_the_largest_scores_are_chosen_in_order(
    query_lens: list[int], context_lens: list[int], dtype: torch.dtype, device: torch.device
) -> None:
    step = Step(query_lens, context_lens, device, dtype)
    chosen = step.choose().tolist()
    for token, row in enumerate(step.owners()):
        scores = step.scores(token, row)
        picked = [position for position in chosen[token] if position >= 0]
        assert picked == sorted(set(picked))
        assert chosen[token][len(picked) :] == [-1] * (TOPK - len(picked))
        best = scores.topk(min(TOPK, len(scores))).values
        torch.testing.assert_close(scores[picked].sort(descending=True).values, best, atol=1e-4, rtol=1e-4)
    for token in range(len(step.owners()), len(chosen)):
        assert chosen[token] == [-1] * TOPK


@pytest.mark.parametrize("numbers", [2**24, 300])
def test_few_queries_at_a_time_choose_the_same(
    numbers: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A buffer that holds the scores of a few queries only, and blocks of queries of two rows."""
    step = Step([3, 17, 2], [40, 33, 90], device)
    whole = step.choose()
    monkeypatch.setattr(indexer, "BUFFER_NUMBERS", numbers)
    assert torch.equal(step.choose(), whole)


def test_of_equal_scores_the_first_are_chosen(device: torch.device) -> None:
    step = Step([1], [60], device)
    step.weights.zero_()
    assert step.choose()[0].tolist() == list(range(TOPK))
    step.weights[:, 0], step.weights[:, 1:] = 1, 0
    step.index[0, step.table[0, 0], :] = step.queries[0, 0]  # the first block has the largest score, eight times
    chosen = step.choose()[0].tolist()
    assert chosen[:8] == list(range(8))
    assert len(set(chosen)) == TOPK


def test_equal_scores_are_not_written_behind_the_last_chosen(device: torch.device) -> None:
    chosen = torch.full((2, TOPK), -7, dtype=torch.int32, device=device)
    ends = torch.tensor([40], dtype=torch.int32, device=device)
    indexer._select_kernel[(1,)](chosen, torch.zeros(1, 40, device=device), ends, 0, 0, 40, TOPK, 64, False)
    assert chosen.tolist() == [list(range(TOPK)), [-7] * TOPK]


def test_keys_before_the_first_are_not_chosen(device: torch.device) -> None:
    step = Step([1, 9], [50, 20], device, first_key=1)
    chosen = step.choose()
    assert 0 not in chosen[:10]
    out = attend_on_device(step.q, LayerKV(step.cache, step.cache), step.rows, chosen, 0.3, ROPE)
    expected = step.attended(chosen, LayerKV(step.cache, step.cache))
    torch.testing.assert_close(out[:10], expected[:10], atol=1e-5, rtol=1e-5)
    for token, row in enumerate(step.owners()):
        scores = step.scores(token, row)
        best = scores.topk(min(TOPK, len(scores))).indices + 1
        assert sorted(best.tolist()) == [position for position in chosen[token].tolist() if position >= 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("query_lens", "context_lens"), STEPS)
@pytest.mark.parametrize("heads", [5, 20])
def test_attention_is_that_of_the_twin(
    heads: int, query_lens: list[int], context_lens: list[int], dtype: torch.dtype, device: torch.device
) -> None:
    """In one part and in several, which are merged."""
    step = Step(query_lens, context_lens, device, dtype, heads=heads)
    chosen = step.choose()
    out = attend_on_device(step.q, LayerKV(step.cache, step.cache), step.rows, chosen, 0.3, ROPE)
    real = len(step.owners())
    wide = step.cache.float()
    expected = step.attended(chosen, LayerKV(wide, wide))
    torch.testing.assert_close(out[:real].float(), expected[:real], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert not bool(out[real:].any()), "padding gives zeros"


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
def test_a_cache_of_8_bits_is_read_with_its_scales(stored: torch.dtype, device: torch.device) -> None:
    step = Step([1, 20], [50, 40], device, torch.float16)
    wide = step.cache.float().nan_to_num(0)
    if stored == torch.int8:
        scale = (wide.abs().amax(-1) / 127).clamp(min=1e-9)
        codes = (wide / scale[..., None]).round().to(torch.int8)
        exact = codes.float() * scale[..., None]
    else:
        scale = torch.full((1,), 0.02, device=device)
        codes = (wide / 0.02).to(stored)
        exact = codes.float() * 0.02
    chosen = step.choose()
    out = attend_on_device(step.q, LayerKV(codes, codes, scale, scale), step.rows, chosen, 0.3, ROPE)
    expected = step.attended(chosen, LayerKV(exact, exact))
    torch.testing.assert_close(out[:21].float(), expected[:21], atol=4e-3, rtol=4e-3)


def test_bits_of_a_query_do_not_depend_on_the_batch(device: torch.device, deterministic: None) -> None:
    together, alone = Step([4, 1], [30, 70], device), Step([4], [30], device)
    alone.index[0, alone.table[0, :4].long()] = together.index[0, together.table[0, :4].long()]
    alone.cache[0, alone.table[0, :4].long()] = together.cache[0, together.table[0, :4].long()]
    for name in ("q", "queries", "weights"):
        getattr(alone, name)[:4] = getattr(together, name)[:4]
    chosen = [step.choose() for step in (together, alone)]
    assert torch.equal(chosen[0][:4], chosen[1][:4])
    out = [
        attend_on_device(step.q, LayerKV(step.cache, step.cache), step.rows, own, 0.3, ROPE)
        for step, own in zip((together, alone), chosen, strict=True)
    ]
    assert torch.equal(out[0][:4], out[1][:4])
