"""What top_k, top_p and min_p keep is exactly the prefix that the definition keeps, short or long, ties and all."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.kernels.launch import INTERPRETED
from localllm.kernels.sampling import nucleus as module
from localllm.kernels.sampling.draw import Cutoff, summarize_logits
from localllm.kernels.sampling.nucleus import nucleus
from tests.kernels.conftest import DTYPES
from tests.kernels.slot_tables import longs, tables_of
from tests.runner.naive import random_logits

ASKED: list[dict[str, Any]] = [
    {}, {"top_k": 1}, {"top_k": 40}, {"top_k": 300}, {"top_k": 690}, {"top_p": 1e-6}, {"top_p": 0.5}, {"top_p": 0.95},
    {"top_p": 0.9999}, {"min_p": 0.02}, {"min_p": 1.0}, {"top_k": 40, "top_p": 0.9}, {"top_k": 40, "min_p": 0.05},
    {"top_k": 600, "top_p": 0.97, "min_p": 0.001}, {"top_p": 0.9, "min_p": 0.1, "temperature": 1.7},
    {"top_k": 5, "temperature": 0.0}, {"top_k": 500, "top_p": 0.5}, {"top_p": 0.99, "temperature": 0.3},
]  # fmt: skip


def run(logits: torch.Tensor, asked: list[dict[str, Any]], slots: list[int], device: torch.device) -> list[list[int]]:
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


@pytest.mark.parametrize("tries", [module.TRIES, 2])
@pytest.mark.parametrize("kind", ["plain", "ties", "holes", "flat", "equal"])
def test_keeps_what_the_definition_keeps(
    kind: str, tries: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tries 2: nothing is near, so every row goes over the whole vocabulary and then over what lies between."""
    monkeypatch.setattr(module, "TRIES", tries)
    asked = ASKED if not INTERPRETED else ASKED[1::4] if tries == 2 else ASKED[::3]
    logits = logits_of_kind(len(asked), 700, kind)
    got = run(logits, asked, list(range(len(asked))), device)
    for row, fields in enumerate(asked):
        assert got[row] == defined(logits[row], fields), fields


@settings(deadline=None, max_examples=4 if INTERPRETED else 60)
@given(st.integers(1, 900), st.sampled_from(["plain", "ties", "holes", "flat"]), st.integers(1, 900),
       st.floats(1e-6, 1.0), st.sampled_from([0.0, 0.01, 0.3]), st.sampled_from([0.3, 1.0, 2.0]),
       st.integers(0, 99))  # fmt: skip
def test_any_parameters(
    vocab_size: int, kind: str, top_k: int, top_p: float, min_p: float, temperature: float, seed: int
) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
    logits = logits_of_kind(1, vocab_size, kind, seed)
    if logits.max() == -math.inf:
        return
    asked = {"top_k": min(top_k, vocab_size), "top_p": top_p, "min_p": min_p, "temperature": temperature}
    got, wanted = run(logits, [asked], [0], device)[0], defined(logits[0], asked)
    if got != wanted:  # a few tokens more or less, where the sum meets top_p to within rounding
        assert set(got) < set(wanted) or set(wanted) < set(got)
        p = (logits[0].double() / temperature).softmax(-1)
        total = p[defined(logits[0], {**asked, "top_p": 1.0})].sum()
        assert float(p[min(got, wanted, key=len)].sum() / total) == pytest.approx(top_p, rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_half_precision_logits_have_many_equals(dtype: torch.dtype, device: torch.device) -> None:
    logits = logits_of_kind(3, 5000, "flat").to(dtype)
    asked: list[dict[str, Any]] = [{"top_k": 77}, {"top_p": 0.31}, {"top_k": 3000, "top_p": 0.5}]
    got = run(logits, asked, [0, 1, 2], device)
    assert got == [defined(logits[row].float(), fields) for row, fields in enumerate(asked)]


def test_more_equals_than_fit_between_two_pivots(device: torch.device) -> None:
    logits = torch.zeros(2, 9000)
    logits[:, 4000] = 1.0
    got = run(logits, [{"top_k": 8500}, {"top_p": 0.95}], [0, 1], device)
    assert got[0] == list(range(8500))
    assert got[1] == defined(logits[1], {"top_p": 0.95})


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, where the kernel is interpreted
def test_padding_and_broken_rows_keep_all_and_end(device: torch.device) -> None:
    logits = logits_of_kind(5, 300, "plain")
    logits[1] = math.nan
    logits[2, 7], logits[3, 7], logits[4] = math.nan, math.inf, -math.inf
    asked = [{"top_k": 3, "top_p": 0.9}]
    got = run(logits, asked, [0, -1, 0, 0, 0], device)
    assert got[0] == defined(logits[0], asked[0])
