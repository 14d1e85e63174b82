"""The scheduler's own block tables and slots, read through paged attention, against dense attention over the tokens.

The model made of memory says in every step which token it holds where; each is given a key and a value, written to the
slot that the ledger says. Chunks, shared prefixes and preemptions move tokens between blocks and must not show.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from localllm.engine.step import StepPlan
from localllm.kernels.paged_attention import kv_cache_shape, paged_attention, plan_attention
from tests.engine.harness import BLOCK_SIZE, make_engine
from tests.fake_runner import FakeRunner

VOCAB, MAX_LEN, HEADS, KV_HEADS, DIM = 32, 64, 4, 2, 8


class Attending:
    """Attends in every step of a FakeRunner, as one layer would."""

    def __init__(self, runner: FakeRunner, num_blocks: int, device: torch.device, window: int | None) -> None:
        torch.manual_seed(0)
        self.runner, self.device, self.window = runner, device, window
        self.tokens, self.places = torch.randn(VOCAB, 3, HEADS, DIM), torch.randn(MAX_LEN, 3, HEADS, DIM)
        shape = kv_cache_shape(num_blocks, BLOCK_SIZE, KV_HEADS, DIM)
        self.k_cache, self.v_cache = (torch.full(shape, torch.nan, device=device) for _ in range(2))
        self.num_compared = 0

    def forward(self, plan: StepPlan, forward: Callable[[StepPlan], None]) -> None:
        forward(plan)
        rows = sorted(plan.rows, key=lambda row: row.num_scheduled_tokens != 1)
        lens, contexts, tables, queries, wanted = [], [], [], [], []
        for row in rows:
            slot = self.runner._slots[row.slot]
            first, end = row.num_computed_tokens, row.num_computed_tokens + row.num_scheduled_tokens
            q, k, v = self._vectors(list(slot.token_ids[:end]))
            for position in range(first, end):
                block, offset = slot.block_tables[0][position // BLOCK_SIZE], position % BLOCK_SIZE
                self.k_cache[:, block, offset], self.v_cache[:, block, offset] = k[position], v[position]
            lens.append(end - first)
            contexts.append(end)
            tables.append(slot.block_tables[0])
            queries.append(q[first:])
            wanted.append(self._dense(q[first:], k, v))
        width = max(map(len, tables))
        attention_plan = plan_attention(
            torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32, device=self.device),
            torch.tensor(contexts, dtype=torch.int32, device=self.device),
            torch.tensor([0, *lens], device=self.device).cumsum(0).int(),
            num_decodes=lens.count(1), query_lens=lens, context_lens_host=contexts, num_heads=HEADS,
            cache_shape=self.k_cache.shape, cache_dtype=self.k_cache.dtype, window=self.window,
        )  # fmt: skip
        q = torch.cat(queries)
        out = paged_attention(q, self.k_cache, self.v_cache, attention_plan, scale=0.4)
        torch.testing.assert_close(out, torch.cat(wanted), rtol=1e-4, atol=1e-4)
        self.num_compared += len(q)

    def _vectors(self, token_ids: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of a request's tokens."""
        q, k, v = (self.tokens[token_ids] + self.places[: len(token_ids)]).to(self.device).unbind(1)
        return q.contiguous(), k[:, :KV_HEADS], v[:, :KV_HEADS]

    def _dense(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n, length = len(q), len(k)
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
        distance = torch.arange(length - n, length)[:, None] - torch.arange(length)
        hidden = (distance < 0) | (distance >= (self.window or length))
        scores = torch.einsum("qhd,khd->hqk", q, k) * 0.4
        scores.masked_fill_(hidden.to(self.device), float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)


@pytest.mark.parametrize("window", [None, 6])
def test_what_the_ledger_wrote_is_what_attention_reads(device: torch.device, window: int | None) -> None:
    """Five requests, three with a prefix in common, in so few blocks that some are preempted."""
    num_blocks = 10
    engine = make_engine(
        num_blocks=num_blocks, max_num_batched_tokens=12, max_num_seqs=4, max_model_len=MAX_LEN, output_reserve=0.0
    )
    attending = Attending(engine.runner, num_blocks, device, window)
    forward = engine.runner.forward
    engine.runner.forward = lambda plan: attending.forward(plan, forward)  # type: ignore[method-assign]
    shared = list(range(1, 10))
    for name, prompt in {"a": [*shared, 20], "b": shared, "c": [*shared, 21, 22], "d": [30], "e": [7, 5] * 4}.items():
        engine.add(name, prompt, max_tokens=6)
    engine.run()
    stats = engine.scheduler.recorder
    assert stats.num_preemptions > 0
    assert attending.num_compared > 40
