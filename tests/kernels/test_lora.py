"""Low-rank products against a definition in float64, one token at a time."""

import pytest
import torch
from torch import Tensor

from localllm.kernels.lora import add_lora, lora_rows
from tests.kernels.conftest import DTYPES

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
BATCHES: dict[str, tuple[list[int], list[int]]] = {  # adapters by request, and their lengths
    "decode": ([0, -1, 2, 0, 1], [1, 1, 1, 1, 1]),
    "prefill": ([1], [37]),
    "mixed": ([2, -1, 0, 2, 1], [1, 1, 20, 3, 18]),
    "nobody": ([-1, -1], [1, 6]),
}


def by_hand(y: Tensor, x: Tensor, a: Tensor, b: Tensor, ids: list[int]) -> Tensor:
    rows = [
        row.double() if adapter < 0 else row.double() + b[adapter].double() @ (a[adapter].double() @ x[i].double())
        for i, (row, adapter) in enumerate(zip(y, ids, strict=True))
    ]
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("rank", "depth", "width"), [(8, 200, 72), (48, 64, 130), (80, 1100, 64)])
def test_add_lora(rank: int, depth: int, width: int, batch: str, dtype: torch.dtype, device: torch.device) -> None:
    """Ranks of one and of several tiles, K of one part and of two, each of them with a remainder."""
    torch.manual_seed(rank)
    adapters, lengths = BATCHES[batch]
    ids = [adapter for adapter, n in zip(adapters, lengths, strict=True) for _ in range(n)]
    ranks = [rank, 0, rank - 3]
    a, b = torch.randn(3, rank, depth) / depth**0.5, torch.randn(3, width, rank) / rank**0.5
    for adapter, used in enumerate(ranks):  # behind its rank an adapter's room holds zeros
        a[adapter, used:], b[adapter, :, used:] = 0, 0
    x, y = torch.randn(len(ids), depth + 24)[:, :depth], torch.randn(len(ids), width)
    a, b, x, y = (tensor.to(device, dtype) for tensor in (a, b, x, y))
    wanted = by_hand(y, x, a, b, ids)
    rows = lora_rows(torch.tensor(ids, dtype=torch.int32, device=device), adapters, lengths)
    add_lora(y, x, a, b, rows, ranks)
    assert (y.double() - wanted).abs().max() <= TOLERANCE[dtype] * wanted.abs().max()


def test_a_row_does_not_depend_on_its_neighbours(device: torch.device) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(2, 16, 256, device=device), torch.randn(2, 64, 16, device=device)
    x, y = torch.randn(40, 256, device=device), torch.randn(40, 64, device=device)
    together, alone = y.clone(), y.clone()
    ids = torch.tensor([0] * 20 + [1] * 20, dtype=torch.int32, device=device)
    add_lora(together, x, a, b, lora_rows(ids, [0, 1], [20, 20]), [16, 16])
    add_lora(alone[20:], x[20:], a, b, lora_rows(ids[20:], [1], [20]), [16, 16])
    assert torch.equal(together[20:], alone[20:])


@pytest.mark.parametrize("first", [0, 7, 21])
def test_part_of_the_rows(first: int, device: torch.device) -> None:
    """A feed-forward part may take a step's rows a few at a time."""
    torch.manual_seed(0)
    adapters, lengths = [1, -1, 0, 1], [5, 4, 10, 9]
    ids = [adapter for adapter, n in zip(adapters, lengths, strict=True) for _ in range(n)]
    a, b = torch.randn(2, 8, 32, device=device), torch.randn(2, 16, 8, device=device)
    x, y = torch.randn(28, 32, device=device), torch.zeros(28, 16, device=device)
    rows = lora_rows(torch.tensor(ids, dtype=torch.int32, device=device), adapters, lengths)
    add_lora(y[first : first + 7], x[first : first + 7], a, b, rows.part(first, 7), [8, 8])
    wanted = by_hand(torch.zeros_like(y), x, a, b, ids)
    assert torch.allclose(y[first : first + 7].double(), wanted[first : first + 7], atol=1e-4)
    assert not y[:first].any()
    assert not y[first + 7 :].any()
