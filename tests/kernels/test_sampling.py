"""Sampling on the device: each kernel and the whole against definitions in float64, whatever rows ask."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localllm.engine.params import SamplingParams
from localllm.engine.step import NewSlot
from localllm.kernels.launch import INTERPRETED
from localllm.kernels.prepare_step import SlotTokens
from localllm.kernels.sampling import nucleus as nucleus_file
from localllm.kernels.sampling import selection
from localllm.kernels.sampling.draw import BLOCK as DRAW_BLOCK
from localllm.kernels.sampling.draw import Cutoff, DrawRecord, draw, draw_reference, summarize_logits
from localllm.kernels.sampling.edit import BLOCK as EDIT_BLOCK
from localllm.kernels.sampling.edit import edit_logits
from localllm.kernels.sampling.logprobs import BLOCK as LOGPROBS_BLOCK
from localllm.kernels.sampling.logprobs import token_logprobs
from localllm.kernels.sampling.nucleus import nucleus
from localllm.kernels.sampling.tables import MAX_BIAS, WORD_LEN
from localllm.runner.sampler import Sampled, sample, sample_on_device
from localllm.runner.sampling import SamplingFeatures, SamplingState
from tests.kernels.conftest import DTYPES
from tests.kernels.slot_tables import longs, tables_of
from tests.runner.harness import VOCAB, cases
from tests.runner.naive import Case, naive_edits, naive_token, random_logits


def state_of(cases: list[Case], vocab_size: int, device: torch.device) -> tuple[SamplingState, torch.Tensor]:
    """The slots of these requests, and their tokens; behind each text are other numbers."""
    state = SamplingState(len(cases), vocab_size, device, with_tables=True)
    held = torch.full((len(cases), 4 + max(len(case.tokens) for case in cases)), 7, dtype=torch.int32)
    for slot, case in enumerate(cases):
        state.enter(NewSlot(slot, f"r{slot}", case.tokens, len(case.prompt), case.params, (), 0, case.eos,
                            case.bad_words))  # fmt: skip
        held[slot, : len(case.tokens)] = torch.tensor(case.tokens)
    return state, held.to(device)


# Order: larger first and lower id among equals, without sorting -------------------------------------------------------


SIZES = [1, 7, 63, 64, 65, 200, 1000]


def rows_of(size: int, kind: str) -> torch.Tensor:
    torch.manual_seed(size)
    values = torch.randn(5, size) * 3
    if kind == "ties":
        values = values.round()
    if kind == "holes":
        values[torch.rand(5, size) < 0.5] = -torch.inf
        values[:, size // 2] = 0.25
    return values


def in_order(row: torch.Tensor) -> list[int]:
    values = row.tolist()
    return sorted(range(len(values)), key=lambda token: (-values[token], token))


@pytest.mark.parametrize("kind", ["plain", "ties", "holes"])
@pytest.mark.parametrize("size", SIZES)
def test_argmax_and_top_follow_the_order(size: int, kind: str) -> None:
    values = rows_of(size, kind)
    heads = selection.group_heads(values)
    orders = [in_order(row) for row in values]
    assert selection.argmax(values, heads).tolist() == [order[0] for order in orders]
    for k in {1, min(5, size), min(70, size), size}:
        got, ids = selection.top(values, heads, k)
        assert ids.tolist() == [order[:k] for order in orders]
        assert torch.equal(got, values.gather(-1, ids))


@pytest.mark.parametrize("share", [1e-9, 0.1, 0.5, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("kind", ["plain", "ties", "holes"])
@pytest.mark.parametrize("size", SIZES)
def test_shortest_prefix_that_reaches_the_mass(size: int, kind: str, share: float) -> None:
    values = rows_of(size, kind)
    weights = values.softmax(-1)
    total = weights.double().sum(-1, keepdim=True)
    kept = selection.keep_first(values, weights, share * total)
    for row, order in enumerate(map(in_order, values)):
        count = int(kept[row].sum())
        assert kept[row].nonzero().flatten().tolist() == sorted(order[:count])  # a prefix
        mass = weights[row, order].double().cumsum(-1)
        target = share * float(total[row])
        assert mass[count - 1] >= target * (1 - 1e-12)  # that reaches it
        assert count == 1 or mass[count - 2] < target * (1 + 1e-12)  # and no shorter one does


@pytest.mark.parametrize("kind", ["plain", "ties"])
def test_a_prefix_by_count_is_exact(kind: str) -> None:
    values = rows_of(1000, kind)
    k = torch.tensor([[1.0], [2.0], [300.0], [999.0], [1000.0]], dtype=torch.float64)
    kept = selection.keep_first(values, torch.ones_like(values), k)
    for row, order in enumerate(map(in_order, values)):
        assert kept[row].nonzero().flatten().tolist() == sorted(order[: int(k[row])])


def test_all_equal_keeps_the_lowest_ids() -> None:
    values = torch.zeros(1, 300)
    values[0, ::2] = -0.0  # equal to 0.0, though its bits are not
    assert selection.top(values, selection.group_heads(values), 130)[1].tolist() == [list(range(130))]
    kept = selection.keep_first(values, torch.full((1, 300), 1 / 300), torch.tensor([[0.25]], dtype=torch.float64))
    assert kept[0].nonzero().flatten().tolist() == list(range(75))


@pytest.mark.parametrize("rows", [3, selection.FEW_ROWS + 1])
def test_heads_show_a_nan(rows: int) -> None:
    values = torch.zeros(rows, 200)
    values[1, 150] = torch.nan
    assert selection.group_heads(values).amax(-1).isnan().nonzero().flatten().tolist() == [1]


@pytest.mark.parametrize("rows", [1, selection.FEW_ROWS, selection.FEW_ROWS + 1])
def test_heads_are_the_same_for_few_and_many_rows(rows: int) -> None:
    values = torch.randn(rows, 1000).index_fill_(1, torch.tensor([7]), -torch.inf)
    groups = selection.grouped(values, -torch.inf)
    assert torch.equal(selection.group_heads(values), groups.amax(-1))


# top_k, top_p and min_p -----------------------------------------------------------------------------------------------


ASKED: list[dict[str, Any]] = [
    {}, {"top_k": 1}, {"top_k": 40}, {"top_k": 300}, {"top_k": 690}, {"top_p": 1e-6}, {"top_p": 0.5}, {"top_p": 0.95},
    {"top_p": 0.9999}, {"min_p": 0.02}, {"min_p": 1.0}, {"top_k": 40, "top_p": 0.9}, {"top_k": 40, "min_p": 0.05},
    {"top_k": 600, "top_p": 0.97, "min_p": 0.001}, {"top_p": 0.9, "min_p": 0.1, "temperature": 1.7},
    {"top_k": 5, "temperature": 0.0}, {"top_k": 500, "top_p": 0.5}, {"top_p": 0.99, "temperature": 0.3},
]  # fmt: skip


def kept_ids(
    logits: torch.Tensor, asked: list[dict[str, Any]], slots: list[int], device: torch.device
) -> list[list[int]]:
    """Kept ids per row."""
    logits, rows = logits.to(device), longs(slots, device)
    tables = tables_of(asked, logits.shape[-1], device)
    summary = summarize_logits(logits, rows, torch.ones_like(rows), tables, filters=True)
    return ids_of(logits.float().cpu(), nucleus(logits, rows, tables, summary))


def ids_of(logits: torch.Tensor, cutoff: Cutoff) -> list[list[int]]:
    value, last = cutoff.value.cpu().unsqueeze(-1), cutoff.last_id.cpu().unsqueeze(-1)
    inside = (logits > value) | ((logits == value) & (torch.arange(logits.shape[-1]) <= last))
    return [row.nonzero().flatten().tolist() for row in inside & (logits > -math.inf)]


def defined(x: torch.Tensor, asked: dict[str, Any]) -> list[int]:
    """In float64, with a sort."""
    temperature = asked.get("temperature", 1.0)
    everything = (x > -math.inf).nonzero().flatten()
    if temperature == 0:
        return everything.tolist()
    p = ((x.double() - x.max()) / temperature).exp()
    order = x.sort(descending=True, stable=True).indices[: len(everything)]
    order = order[p[order] >= asked.get("min_p", 0.0)][: asked.get("top_k", len(x))]
    if "top_p" in asked:
        mass = p[order].cumsum(0) - p[order]
        order = order[mass < asked["top_p"] * p[order].sum()]
    return sorted(order.tolist())


def logits_of_kind(rows: int, vocab_size: int, kind: str, seed: int = 0) -> torch.Tensor:
    x = random_logits(rows, vocab_size, 2.0, seed)
    if kind == "ties":
        x = (x * 2).round() / 2
    if kind == "holes":
        x[:, ::3] = -math.inf
    if kind == "flat":
        x *= 0.01
    if kind == "equal":
        x[:] = 0.25
    return x


@pytest.mark.parametrize("tries", [nucleus_file.TRIES, 2])
@pytest.mark.parametrize("kind", ["plain", "ties", "holes", "flat", "equal"])
def test_keeps_what_the_definition_keeps(
    kind: str, tries: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tries 2: nothing is near, so every row goes over the whole vocabulary and then over what lies between."""
    monkeypatch.setattr(nucleus_file, "TRIES", tries)
    asked = ASKED if not INTERPRETED else ASKED[1::4] if tries == 2 else ASKED[::3]
    logits = logits_of_kind(len(asked), 700, kind)
    got = kept_ids(logits, asked, list(range(len(asked))), device)
    for row, fields in enumerate(asked):
        assert got[row] == defined(logits[row], fields), fields


@settings(deadline=None, max_examples=4 if INTERPRETED else 60)
@given(st.integers(1, 900), st.sampled_from(["plain", "ties", "holes", "flat"]), st.integers(1, 900),
       st.floats(1e-6, 1.0), st.sampled_from([0.0, 0.01, 0.3]), st.sampled_from([0.3, 1.0, 2.0]),
       st.integers(0, 99))  # fmt: skip
def test_any_parameters(
    device: torch.device,
    vocab_size: int,
    kind: str,
    top_k: int,
    top_p: float,
    min_p: float,
    temperature: float,
    seed: int,
) -> None:
    logits = logits_of_kind(1, vocab_size, kind, seed)
    if logits.max() == -math.inf:
        return
    asked = {"top_k": min(top_k, vocab_size), "top_p": top_p, "min_p": min_p, "temperature": temperature}
    got, wanted = kept_ids(logits, [asked], [0], device)[0], defined(logits[0], asked)
    if got != wanted:  # a few tokens more or less, where the sum meets top_p to within rounding
        assert set(got) < set(wanted) or set(wanted) < set(got)
        p = (logits[0].double() / temperature).softmax(-1)
        total = p[defined(logits[0], {**asked, "top_p": 1.0})].sum()
        assert float(p[min(got, wanted, key=len)].sum() / total) == pytest.approx(top_p, rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_half_precision_logits_have_many_equals(dtype: torch.dtype, device: torch.device) -> None:
    logits = logits_of_kind(3, 5000, "flat").to(dtype)
    asked: list[dict[str, Any]] = [{"top_k": 77}, {"top_p": 0.31}, {"top_k": 3000, "top_p": 0.5}]
    got = kept_ids(logits, asked, [0, 1, 2], device)
    assert got == [defined(logits[row].float(), fields) for row, fields in enumerate(asked)]


def test_more_equals_than_fit_between_two_pivots(device: torch.device) -> None:
    logits = torch.zeros(2, 9000)
    logits[:, 4000] = 1.0
    got = kept_ids(logits, [{"top_k": 8500}, {"top_p": 0.95}], [0, 1], device)
    assert got[0] == list(range(8500))
    assert got[1] == defined(logits[1], {"top_p": 0.95})


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, where the kernel is interpreted
def test_padding_and_broken_rows_keep_all_and_end(device: torch.device) -> None:
    logits = logits_of_kind(5, 300, "plain")
    logits[1] = math.nan
    logits[2, 7], logits[3, 7], logits[4] = math.nan, math.inf, -math.inf
    asked = [{"top_k": 3, "top_p": 0.9}]
    got = kept_ids(logits, asked, [0, -1, 0, 0, 0], device)
    assert got[0] == defined(logits[0], asked[0])


# Edits of logits ------------------------------------------------------------------------------------------------------


EDIT_VOCAB = EDIT_BLOCK + 100  # two blocks, the second not full
PROMPT, OUTPUT = [3, 7, 7, 20, EDIT_VOCAB - 1], [5, 9, 5, 3, 5, EDIT_VOCAB - 2]

TABLE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"logit_bias": {4: 3.5, 50: -100.0, EDIT_VOCAB - 1: 2.0}}, {}),
    ({"allowed_token_ids": [9, 9, 0, 31, 32, EDIT_VOCAB - 1]}, {}),
    ({"min_tokens": 7, "stop_token_ids": [8, EDIT_VOCAB - 3]}, {"eos": (2, 9)}),
    ({"min_tokens": 6, "stop_token_ids": [8]}, {"eos": (2,)}),
    ({"repetition_penalty": 1.5}, {}),
    ({"repetition_penalty": 1.5, "repeat_last_n": 4}, {}),
    ({"repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": 1.0, "repeat_last_n": 8}, {}),
    ({"repetition_penalty": 1.5, "frequency_penalty": 0.5, "repeat_last_n": 0}, {}),
    ({"repetition_penalty": 1.5, "repeat_last_n": 2**40}, {}),
    ({"repetition_penalty": 0.5, "frequency_penalty": 0.25}, {}),
    ({"presence_penalty": 1.25}, {}),
    ({"frequency_penalty": -0.75, "presence_penalty": -2.0, "repetition_penalty": 1.2}, {}),
    ({}, {"bad_words": ((11,), (5, EDIT_VOCAB - 2, 12), (9, 13), (1, 2, 3, 4, 5, 6, 7, 14))}),
    (
        {},
        {"bad_words": ((EDIT_VOCAB - 1, 5, 9, 5, 3, 5, EDIT_VOCAB - 2, 15),)},
    ),  # the prompt's last token is not output
    ({"logit_bias": {5: 8.0}, "allowed_token_ids": [5, 6], "repetition_penalty": 2.0}, {"bad_words": ((6,),)}),
    ({}, {}),
]
EDITS = [Case(SamplingParams(temperature=0.0, **row[0]), PROMPT, OUTPUT, **row[1]) for row in TABLE]


def edited(logits: torch.Tensor, cases: list[Case], device: torch.device, mask: torch.Tensor | None = None) -> Any:
    state, held = state_of(cases, EDIT_VOCAB, device)
    out, lengths = logits.to(device, copy=True), longs([len(case.tokens) for case in cases], device)
    assert state.tables is not None
    mask = None if mask is None else mask.to(device)
    edit_logits(out, longs(range(len(cases)), device), lengths, state.tables, held, mask)
    return out.float().cpu()


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_change_equals_the_definition(dtype: torch.dtype, device: torch.device) -> None:
    logits = random_logits(len(EDITS), EDIT_VOCAB, 2.0, seed=4).to(dtype)
    got = edited(logits, EDITS, device)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 4e-3}
    for row, case in enumerate(EDITS):
        np.testing.assert_allclose(got[row].numpy(), naive_edits(logits[row].double().numpy(), case), **close)
    assert torch.equal(got[-1], logits[-1].float())  # who asks nothing is untouched


def test_a_mask_goes_over_everything_else(device: torch.device) -> None:
    cases, logits = [EDITS[0], EDITS[-1], EDITS[-1]], random_logits(3, EDIT_VOCAB, 2.0, seed=4)
    mask = torch.full((3, -(-EDIT_VOCAB // 32)), -1, dtype=torch.int32)
    mask[:2] = 0
    mask[:2, 0] = 1 << 4 | -(1 << 31)  # tokens 4 and 31
    got = edited(logits, cases, device, mask)
    assert [row.isfinite().nonzero().flatten().tolist() for row in got[:2]] == [[4, 31]] * 2
    assert got[0, 4] == pytest.approx(logits[0, 4] + 3.5)
    assert torch.equal(got[2], logits[2])


def test_padding_and_poison_stay_as_they_are(device: torch.device) -> None:
    state, held = state_of([EDITS[12], EDITS[2]], EDIT_VOCAB, device)
    assert state.tables is not None
    logits = random_logits(3, EDIT_VOCAB, 2.0, seed=4).to(device)
    logits[1], logits[2, 2] = math.nan, math.nan
    before, lengths = logits.clone(), longs([len(EDITS[0].tokens)] * 3, device)
    edit_logits(logits, longs([0, -1, 1], device), lengths, state.tables, held)
    assert logits[1].isnan().all()
    assert logits[2].isnan().sum() == (before[2].isnan().sum() if INTERPRETED or device.type == "cuda" else 0)
    assert torch.isneginf(logits[0, 11])


@settings(deadline=None, max_examples=3 if INTERPRETED else 25)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=2500), st.integers(0, 2500), st.sampled_from([0.7, 1.0, 1.4]),
       st.sampled_from([-1.0, 0.0, 0.5]), st.sampled_from([-0.25, 0.0, 0.5]),
       st.one_of(st.sampled_from([-1, 1, 64]), st.integers(1, 2600)))  # fmt: skip
def test_penalties_of_long_texts(
    device: torch.device,
    text: list[int],
    prompt_len: int,
    repetition: float,
    presence: float,
    frequency: float,
    window: int,
) -> None:
    params = SamplingParams(
        temperature=0.0, repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency,
        repeat_last_n=window,
    )  # fmt: skip
    cut = min(max(prompt_len, 1), len(text))
    case, logits = Case(params, text[:cut], text[cut:]), random_logits(1, EDIT_VOCAB, 2.0, seed=4)
    expected = naive_edits(logits[0].double().numpy(), case)
    np.testing.assert_allclose(edited(logits, [case], device)[0].numpy(), expected, rtol=1e-5, atol=1e-4)


def test_what_does_not_fit_the_tables_is_sampled_the_general_way() -> None:
    many = dict.fromkeys(range(MAX_BIAS + 1), 1.0)
    long = tuple(range(WORD_LEN + 1))
    cases = [Case(SamplingParams(logit_bias=many)), Case(SamplingParams(), bad_words=(long,)), Case(SamplingParams())]
    state, _ = state_of(cases, EDIT_VOCAB, torch.device("cpu"))
    assert [state.features(np.array([slot])) is None for slot in range(3)] == [True, True, False]
    assert state.features(np.array([2, 0])) is None


# The draw -------------------------------------------------------------------------------------------------------------


ROWS = 15 if INTERPRETED else 400


def fields(i: int) -> dict[str, Any]:
    return {"seed": i * 7919 - 5, "temperature": (0.0, 0.3, 1.0, 1.7, 0.01)[i % 5]}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 63, 700, DRAW_BLOCK, DRAW_BLOCK + 65])
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
    got, _ = draw(logits, longs(slots, device), longs(lengths, device), tables, record=DrawRecord(tokens, counts))
    assert torch.equal(got, draw(logits, longs(slots, device), longs(lengths, device), tables)[0])
    assert counts.tolist() == [[1, 0, 1, 1, 0], [0] * 5]
    for row, slot in enumerate(slots):
        if slot >= 0:
            text[slot, lengths[row]] = got[row]
    assert tokens.token_ids.tolist() == text.tolist()
    assert tokens.known.tolist() == [2, 5, 5, 8, 10]
    assert tokens.valid.tolist() == [0, 3, 3, 0, 0]


def test_equals_take_the_lowest_id(device: torch.device) -> None:
    logits = torch.zeros(2, 2 * DRAW_BLOCK, device=device)
    logits[0, [70, 100, DRAW_BLOCK + 3]] = 5.0
    logits[1, ::2] = -0.0
    tables = tables_of([{"temperature": 0.0}], 2 * DRAW_BLOCK, device)
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


# Log-probabilities ----------------------------------------------------------------------------------------------------


def logits_with(rows: int, vocab_size: int, ties: bool) -> torch.Tensor:
    x = random_logits(rows, vocab_size, seed=vocab_size)
    return (x * 2).round() / 2 if ties else x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [0, 1, 5, 20])
@pytest.mark.parametrize("vocab_size", [1, 70, 700, LOGPROBS_BLOCK + 1])
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


# All of it ------------------------------------------------------------------------------------------------------------


EVERYTHING = SamplingFeatures(filters=True, edits=True, logprobs=True)


def sampled(
    logits: torch.Tensor, batch: list[Case], device: torch.device, features: SamplingFeatures | None = None
) -> Sampled:
    """One padding row in front and one behind, full of NaN."""
    state, held = state_of(batch, VOCAB, device)
    features = features or state.features(np.arange(len(batch)))
    assert features is not None
    assert state.tables is not None
    poison = torch.full((1, logits.shape[-1]), math.nan)
    slots = longs([-1, *range(len(batch)), -1], device)
    lengths = longs([0, *(len(case.tokens) for case in batch), 0], device)
    with torch.inference_mode():
        return sample_on_device(
            torch.cat((poison, logits, poison)).to(device), slots, lengths, state.tables, held, features
        )


@settings(deadline=None, max_examples=4 if INTERPRETED else 40, suppress_health_check=list(HealthCheck))
@given(st.lists(cases, min_size=1, max_size=3 if INTERPRETED else 9), st.integers(0, 1000), st.booleans())
def test_equals_the_definition_row_by_row(device: torch.device, batch: list[Case], seed: int, everything: bool) -> None:
    """With the way that the batch asks for, and with the one that does everything for everybody."""
    logits = random_logits(len(batch), VOCAB, seed=seed)
    usable = [np.isfinite(naive_edits(x.double().numpy(), case).max()) for x, case in zip(logits, batch, strict=True)]
    got = sampled(logits, batch, device, EVERYTHING if everything else None)
    assert got.best[1:-1].isfinite().tolist() == usable
    assert (got.token_ids[0], got.token_ids[-1]) == (0, 0)
    for row, case in enumerate(batch):
        if usable[row]:
            assert got.token_ids[row + 1] == naive_token(logits[row], case), case


def test_logprobs_are_those_of_the_general_way(device: torch.device) -> None:
    batch = [Case(SamplingParams(seed=i, logprobs=n, logit_bias=bias), [1, 2])
             for i, (n, bias) in enumerate([(None, None), (3, {5: 50.0}), (0, None), (20, None)])]  # fmt: skip
    state, held = state_of(batch, VOCAB, device)
    logits, slots = random_logits(4, VOCAB), np.arange(4)
    lengths = np.full(4, 2)
    want = sample(logits.to(device, copy=True), state.batch(slots, lengths), held)
    got = sampled(logits, batch, device)
    assert got.logprobs is not None
    assert want.logprobs is not None
    assert got.token_ids[1:-1].tolist() == want.token_ids.tolist()
    for place, (row, count) in enumerate(state.batch(slots, lengths).logprob_counts):
        ids = want.logprobs.token_ids[place, : 1 + count]
        assert got.logprobs.token_ids[row + 1, : 1 + count].tolist() == ids.tolist()
        torch.testing.assert_close(
            got.logprobs.logprobs[row + 1, : 1 + count],
            want.logprobs.logprobs[place, : 1 + count],
            rtol=1e-5,
            atol=1e-5,
        )
        assert got.logprobs.ranks[row + 1] == want.logprobs.ranks[place]


def test_wants_is_the_least_that_serves_all(device: torch.device) -> None:
    asked = [{"temperature": 0.0, "top_k": 5}, {}, {"top_p": 0.5}, {"min_p": 0.1}, {"presence_penalty": 1.0},
             {"logprobs": 0}]  # fmt: skip
    state, _ = state_of([Case(SamplingParams(**fields)) for fields in asked], VOCAB, device)
    assert state.features(np.array([0, 1])) == SamplingFeatures()
    assert [state.features(np.array([slot])) for slot in (2, 3, 4, 5)] == [
        SamplingFeatures(filters=True), SamplingFeatures(filters=True), SamplingFeatures(edits=True),
        SamplingFeatures(logprobs=True),
    ]  # fmt: skip
    assert state.features(np.array([2, 4, 5])) == EVERYTHING


def test_a_slot_forgets_its_last_holder(device: torch.device) -> None:
    strange = SamplingParams(seed=1, logit_bias={1: 90.0}, presence_penalty=1.0, top_k=4, min_tokens=9,
                             stop_token_ids=[3], allowed_token_ids=[1, 2])  # fmt: skip
    plain, logits = SamplingParams(temperature=0.0), random_logits(1, VOCAB)
    state, held = state_of([Case(strange, bad_words=((7,),))], VOCAB, device)
    state.leave(0)
    state.enter(NewSlot(0, "b", [1], 1, plain, (), 0))
    assert state.tables is not None
    got = sample_on_device(logits.to(device, copy=True), longs([0], device), longs([1], device), state.tables, held,
                           EVERYTHING)  # fmt: skip
    assert got.token_ids.tolist() == logits.argmax(-1).tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or INTERPRETED, reason="needs a CUDA device")
@pytest.mark.parametrize("features", [SamplingFeatures(), SamplingFeatures(filters=True), EVERYTHING], ids=str)
def test_a_captured_graph_samples_whatever_comes_later(features: SamplingFeatures, device: torch.device) -> None:
    batch = [Case(SamplingParams(seed=i, top_k=(0, 9)[i % 2], top_p=(1.0, 0.8)[i % 2], presence_penalty=i % 3 / 2))
             for i in range(6)]  # fmt: skip
    if not features.filters:
        batch = [Case(SamplingParams(seed=i)) for i in range(6)]
    state, held = state_of(batch, VOCAB, device)
    assert state.tables is not None
    buffers = (torch.zeros(4, VOCAB, device=device), longs([-1] * 4, device), longs([0] * 4, device))
    sample_on_device(*buffers, state.tables, held, features)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = sample_on_device(*buffers, state.tables, held, features)
    for slots in ([0, 1, 2, -1], [5, -1, -1, -1], [3, 4, 1, 0]):
        fresh = (random_logits(4, VOCAB, seed=sum(slots)).to(device), longs(slots, device), longs([1] * 4, device))
        for buffer, values in zip(buffers, fresh, strict=True):
            buffer.copy_(values)
        graph.replay()
        eager = sample_on_device(*fresh, state.tables, held, features)
        assert out.token_ids.tolist() == eager.token_ids.tolist()
