"""Log-probabilities, ranks and likeliest tokens from the device equal log_softmax and a sort."""

from __future__ import annotations

import math

import pytest
import torch

from localllm.kernels.launch import INTERPRETED
from localllm.kernels.sampling.logprobs import BLOCK, token_logprobs
from tests.kernels.conftest import DTYPES
from tests.kernels.slot_tables import longs, tables_of
from tests.runner.naive import random_logits


def logits_with(rows: int, vocab_size: int, ties: bool) -> torch.Tensor:
    x = random_logits(rows, vocab_size, seed=vocab_size)
    return (x * 2).round() / 2 if ties else x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [0, 1, 5, 20])
@pytest.mark.parametrize("vocab_size", [1, 70, 700, BLOCK + 1])
def test_equals_log_softmax(vocab_size: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
    logits = logits_with(3, vocab_size, ties=k == 5).to(device, dtype)
    tokens = longs([0, vocab_size // 2, vocab_size - 1], device)
    ids, logprobs, ranks = (part.cpu() for part in token_logprobs(logits, tokens, k))
    exact = logits.cpu().double().log_softmax(-1)
    assert ids[:, 0].tolist() == tokens.tolist()
    assert ranks.tolist() == [
        1 + int((logits[i].cpu() > logits[i, t].cpu()).sum()) for i, t in enumerate(tokens.tolist())
    ]
    for row in range(3):
        values = logits[row].tolist()
        order = sorted(range(vocab_size), key=lambda t: (-values[t], t))[: min(k, vocab_size)]
        assert ids[row, 1:].tolist() == order
    torch.testing.assert_close(logprobs.double(), exact.gather(-1, ids), rtol=1e-5, atol=2e-5)


def test_holes_are_told_last_and_once(device: torch.device) -> None:
    logits = torch.full((1, 200), -math.inf, device=device)
    logits[0, [150, 3]] = torch.tensor([1.0, 1.0], device=device)
    ids, logprobs, _ = token_logprobs(logits, longs([150], device), 5)
    assert ids[0].tolist() == [150, 3, 150, 0, 1, 2]
    assert logprobs[0, 3:].tolist() == [-math.inf] * 3


@pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="the twin answers for every row alike")
def test_each_slot_has_its_number_and_padding_has_none(device: torch.device) -> None:
    logits = logits_with(5, 700, ties=False).to(device)
    tables = tables_of([{"num_logprobs": 2}, {"num_logprobs": -1}, {"num_logprobs": 0}], 700, device)
    logits[1, 3] = math.nan
    tokens = longs([5, 0, 6, 7, 8], device)
    got = token_logprobs(logits, tokens, 20, longs([0, -1, 1, 2, 0], device), tables)
    want = token_logprobs(logits, tokens, 20)
    for row, count in ((0, 2), (3, 0), (4, 2)):
        assert torch.equal(got[0][row, : 1 + count], want[0][row, : 1 + count])
        assert torch.equal(got[1][row, : 1 + count], want[1][row, : 1 + count])
        assert got[2][row] == want[2][row]
    assert not got[0][1:3].any()


def test_nan_is_told_as_nan(device: torch.device) -> None:
    logits = logits_with(2, 100, ties=False).to(device)
    logits[1, 30] = math.nan
    _, logprobs, _ = token_logprobs(logits, longs([4, 4], device), 0)
    assert logprobs[:, 0].isnan().tolist() == [False, True]
