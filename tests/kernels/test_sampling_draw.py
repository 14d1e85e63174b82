"""The draw on the device is the twin's, token for token, and follows the softmax."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from localllm.kernels.launch import INTERPRETED
from localllm.kernels.prepare_step import SlotTokens
from localllm.kernels.sampling.draw import BLOCK, Cutoff, Record, draw, draw_reference, summarize_logits
from localllm.kernels.sampling.nucleus import nucleus
from tests.kernels.conftest import DTYPES
from tests.kernels.slot_tables import longs, tables_of
from tests.runner.naive import random_logits

ROWS = 15 if INTERPRETED else 400


def fields(i: int) -> dict[str, Any]:
    return {"seed": i * 7919 - 5, "temperature": (0.0, 0.3, 1.0, 1.7, 0.01)[i % 5]}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 63, 700, BLOCK, BLOCK + 65])
def test_same_token_as_the_twin(vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    logits = random_logits(ROWS, vocab_size).to(device, dtype)
    tables = tables_of([fields(i) for i in range(ROWS)], vocab_size, device)
    slots, lengths = longs(range(ROWS), device), longs(range(3, ROWS + 3), device)
    got, best = draw(logits, slots, lengths, tables)
    expected, expected_best = draw_reference(logits, slots, lengths, tables)
    assert torch.equal(best, expected_best)
    assert (got == expected).double().mean() >= 0.999
    greedy = got[::5].cpu()
    assert torch.equal(greedy, logits[::5].float().cpu().argmax(-1))


def test_rows_kept_in_part_draw_the_same_token_too(device: torch.device) -> None:
    asked = [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"temperature": 0.0, "top_k": 2}, {"top_k": 1}]
    vocab_size, rows = 700, 12
    tables = tables_of([{"seed": i, **asked[i % 6]} for i in range(rows)], vocab_size, device)
    logits, slots, lengths = (
        random_logits(rows, vocab_size).to(device),
        longs(range(rows), device),
        longs([9] * rows, device),
    )
    summary = summarize_logits(logits, slots, lengths, tables, filters=True)
    cutoff = nucleus(logits, slots, tables, summary)
    got, best = draw(logits, slots, lengths, tables, cutoff, summary)
    expected, expected_best = draw_reference(logits, slots, lengths, tables, cutoff)
    assert torch.equal(best, expected_best)
    assert got.tolist() == expected.tolist()


def test_a_recorded_draw_is_behind_its_slots_tokens(device: torch.device) -> None:
    vocab_size, slots = 700, [3, -1, 0, 4, -1]
    tables = tables_of([fields(i) for i in range(5)], vocab_size, device)
    logits, lengths = random_logits(5, vocab_size).to(device), [7, 0, 1, 9, 4]
    text = torch.arange(50, dtype=torch.int32).view(5, 10) + 2000
    tokens = SlotTokens(text.to(device), longs([5] * 5, device), torch.full((5,), 3, dtype=torch.int32, device=device))
    counts = torch.full((2, 5), 9, device=device)
    got, _ = draw(logits, longs(slots, device), longs(lengths, device), tables, record=Record(tokens, counts))
    assert torch.equal(got, draw(logits, longs(slots, device), longs(lengths, device), tables)[0])
    assert counts.tolist() == [[1, 0, 1, 1, 0], [0] * 5]
    for row, slot in enumerate(slots):
        if slot >= 0:
            text[slot, lengths[row]] = got[row]
    assert tokens.token_ids.tolist() == text.tolist()
    assert tokens.known.tolist() == [2, 5, 5, 8, 10]
    assert tokens.valid.tolist() == [0, 3, 3, 0, 0]


def test_equals_take_the_lowest_id(device: torch.device) -> None:
    logits = torch.zeros(2, 2 * BLOCK, device=device)
    logits[0, [70, 100, BLOCK + 3]] = 5.0
    logits[1, ::2] = -0.0
    tables = tables_of([{"temperature": 0.0}], 2 * BLOCK, device)
    assert draw(logits, longs([0, 0], device), longs([1, 1], device), tables)[0].tolist() == [70, 0]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, where the kernel is interpreted
def test_padding_and_broken_rows_harm_nobody(device: torch.device) -> None:
    vocab_size = 300
    logits = random_logits(7, vocab_size).to(device)
    tables = tables_of([{"seed": 3}, {"temperature": 0.0}], vocab_size, device)
    slots, lengths = longs([0, -1, 1, 0, 1, 0, 0], device), longs([4] * 7, device)
    clean, _ = draw(logits, slots, lengths, tables)
    logits[1] = math.nan
    logits[2, 77], logits[3, 5], logits[4, 9] = math.nan, math.nan, math.inf
    logits[5] = -math.inf
    got, best = draw(logits, slots, lengths, tables)
    assert (got[0], got[6], got[1], best[1]) == (clean[0], clean[6], 0, 0)
    assert best.isfinite().tolist() == [True, True, False, False, False, False, True]
    assert best[5] == -math.inf
    assert ((got >= 0) & (got < vocab_size)).all()


def test_a_row_is_the_same_in_any_company(device: torch.device) -> None:
    logits = random_logits(9, 700).to(device)
    tables = tables_of([fields(i) for i in range(9)], 700, device)
    slots, lengths = longs(range(9), device), longs(range(1, 10), device)
    together, _ = draw(logits, slots, lengths, tables)
    order = [4, 8, 1]
    some, _ = draw(logits[order], slots[order], lengths[order], tables)
    assert some.tolist() == together[order].tolist()


@pytest.mark.skipif(INTERPRETED, reason="takes many draws; there the twin's token is asked for instead")
@pytest.mark.parametrize("temperature", [0.6, 1.0, 2.0])
def test_frequencies_are_the_softmax(temperature: float, device: torch.device) -> None:
    draws, vocab_size = 30_000, 150
    logits = random_logits(1, vocab_size, 1.5)
    expected = torch.softmax(logits[0].double() / temperature, -1) * draws
    tables = tables_of([{"seed": 11, "temperature": temperature}], vocab_size, device)
    got, _ = draw(
        logits.expand(draws, -1).contiguous().to(device),
        longs([0] * draws, device),
        longs(range(draws), device),
        tables,
    )
    counts = torch.bincount(got.cpu(), minlength=vocab_size).double()
    rare = expected < 5
    observed = torch.cat((counts[~rare], counts[rare].sum().view(1)))
    wanted = torch.cat((expected[~rare], expected[rare].sum().view(1)))
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    degrees = len(wanted) - 1
    limit = degrees * (1 - 2 / (9 * degrees) + 3.72 * math.sqrt(2 / (9 * degrees))) ** 3  # one in 10,000 is above
    assert float(((observed - wanted) ** 2 / wanted).sum()) < limit


def test_nothing_kept_is_still_an_id(device: torch.device) -> None:
    """`Cutoff` never says so, but a broken row may."""
    tables = tables_of([{"top_k": 1, "seed": 1}], 100, device)
    logits, slot = torch.full((1, 100), -math.inf, device=device), longs([0], device)
    cutoff = Cutoff(torch.zeros(1, device=device), longs([5], device))
    summary = summarize_logits(logits, slot, slot, tables, filters=True)
    assert 0 <= int(draw(logits, slot, slot, tables, cutoff, summary)[0]) < 100
