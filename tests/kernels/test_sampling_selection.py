"""One total order, larger first and lower id among equals, found without sorting the vocabulary."""

from __future__ import annotations

import pytest
import torch

from localllm.kernels.sampling import selection

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
def test_prefix_by_count_is_exact(kind: str) -> None:
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
