"""Keys that an indexer chooses: against the definition in float64, and in the engine far beyond their number."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from localllm.engine.params import SamplingParams
from localllm.engine.request import Request
from localllm.kernels import indexer
from localllm.kernels.indexer import ChosenRow, attend_to_chosen, choose_keys, chosen_rows
from localllm.kernels.layer_cache import LayerKV
from localllm.models.fit import kv_cache_bytes
from localllm.models.loader import load_model
from localllm.models.read_spec import read_spec
from localllm.runner.host_drafts import HostDrafts
from localllm.runner.kv_cache import KVCache
from tests.models.class_models import make_class_model
from tests.models.harness import Harness, assert_close, prompt, reference, reference_logits
from tests.runner.harness import MAX_LEN, assert_same, knowing, serve, tokens_of

CPU = torch.device("cpu")
TOPK, BLOCK, SIZE, WIDTH = 12, 8, 16, 24
HEADS = 12  # with few heads several keys have the score 0, and either may be chosen


class Batch:
    """Rows over one cache of latents and index keys, NaN where no row has written."""

    def __init__(self, query_lens: list[int], context_lens: list[int], *, consecutive: bool = False) -> None:
        made = torch.Generator().manual_seed(sum(context_lens))
        self.query_lens, self.context_lens = query_lens, context_lens
        num_blocks = 1 + sum(-(-length // BLOCK) for length in context_lens)
        ids = list(range(1, num_blocks))
        if not consecutive:
            random.Random(0).shuffle(ids)
        self.k = torch.full((1, num_blocks, BLOCK, WIDTH), torch.nan)
        self.index = torch.full((1, num_blocks, BLOCK, SIZE), torch.nan)
        self.table = torch.zeros(
            len(query_lens), max(-(-length // BLOCK) for length in context_lens), dtype=torch.int32
        )
        self.latents, self.keys = [], []
        for row, length in enumerate(context_lens):
            own = [ids.pop(0) for _ in range(-(-length // BLOCK))]
            self.table[row, : len(own)] = torch.tensor(own)
            latents, keys = (torch.randn(length, size, generator=made) for size in (WIDTH, SIZE))
            for at in range(length):
                self.k[0, own[at // BLOCK], at % BLOCK] = latents[at]
                self.index[0, own[at // BLOCK], at % BLOCK] = keys[at]
            self.latents.append(latents)
            self.keys.append(keys)
        tokens = sum(query_lens)
        self.q, self.queries = (torch.randn(tokens, HEADS, size, generator=made) for size in (WIDTH, SIZE))
        self.weights = torch.randn(tokens, HEADS, generator=made)

    def rows(self) -> list[ChosenRow]:
        rows = chosen_rows(self.table, BLOCK, self.query_lens, self.context_lens, TOPK)
        assert [row is not None for row in rows] == [length > TOPK for length in self.context_lens]
        return [row for row in rows if row is not None]

    def attend(self, kv: LayerKV, first_key: int = 0) -> Tensor:
        rows = self.rows()
        out = torch.full((len(self.q), HEADS * WIDTH), torch.nan)
        chosen = choose_keys(self.queries, self.weights, self.index, rows, TOPK, first_key)
        attend_to_chosen(self.q, kv, rows, chosen, 0.3, out)
        return out.view(len(self.q), HEADS, WIDTH)

    def definition(self, first_key: int = 0) -> Tensor:
        out = torch.full((len(self.q), HEADS, WIDTH), torch.nan, dtype=torch.float64)
        at = 0
        for row, (count, length) in enumerate(zip(self.query_lens, self.context_lens, strict=True)):
            latents, keys = self.latents[row].double(), self.keys[row].double()
            for token in range(at, at + count if length > TOPK else at):
                end = length - count + token - at + 1
                products = (self.queries[token].double() @ keys[first_key:end].T).clamp(min=0)
                scores = self.weights[token].double() @ products
                best = first_key + scores.topk(min(TOPK, end - first_key)).indices
                out[token] = ((self.q[token].double() @ latents[best].T) * 0.3).softmax(-1) @ latents[best]
            at += count
        return out


@pytest.mark.parametrize("consecutive", [True, False])
@pytest.mark.parametrize(
    ("query_lens", "context_lens"),
    [([1], [TOPK + 1]), ([1, 1, 1], [TOPK, 70, 13]), ([1, 30, 5], [41, 30, 100]), ([63], [63]), ([20, 1], [25, 64])],
)
def test_attention_is_that_to_the_largest_scores(
    query_lens: list[int], context_lens: list[int], consecutive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = Batch(query_lens, context_lens, consecutive=consecutive)
    kv = LayerKV(batch.k, batch.k)
    for numbers in (2**24, 1000):  # of buffers: all queries at once, and few
        monkeypatch.setattr(indexer, "BUFFER_NUMBERS", numbers)
        torch.testing.assert_close(batch.attend(kv), batch.definition().float(), equal_nan=True, atol=2e-5, rtol=1e-4)


def test_keys_before_the_first_are_not_chosen() -> None:
    batch = Batch([1, 9], [50, 20])
    for row in (0, 1):  # a drafter has not written them
        batch.k[0, batch.table[row, 0], 0] = batch.index[0, batch.table[row, 0], 0] = torch.nan
    out = batch.attend(LayerKV(batch.k, batch.k), first_key=1)
    torch.testing.assert_close(out, batch.definition(1).float(), equal_nan=True, atol=2e-5, rtol=1e-4)


def test_a_cache_of_8_bits_is_read_with_its_scales() -> None:
    batch = Batch([1, 20], [50, 40])
    scale = (batch.k.nan_to_num(0).abs().amax(-1) / 127).clamp(min=1e-9)
    codes = (batch.k.nan_to_num(0) / scale[..., None]).round().to(torch.int8)
    out = batch.attend(LayerKV(codes, codes, scale, scale))
    torch.testing.assert_close(out, batch.definition().float(), equal_nan=True, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
@pytest.mark.parametrize("length", [24, 25, 40])
def test_at_the_first_token_that_is_left_out(family: str, length: int, tiny_model_path: Callable[[str], Path]) -> None:
    """24 tokens are chosen, so that the last query of 25 is the first that does not see all."""
    path, tokens = tiny_model_path(family), prompt(length, seed=length)
    for chunk in (1, length - 1, length):
        _, logits = Harness(path).prefill(tokens, chunk)
        assert_close(logits, reference_logits(reference(path), tokens))


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
def test_the_cache_takes_the_planned_bytes(kv_dtype: str, tiny_model_path: Callable[[str], Path]) -> None:
    spec = read_spec(tiny_model_path("glm_moe_dsa"))
    cache = KVCache(spec, (5, 7), 8, CPU, kv_dtype)
    assert cache.allocated_bytes == kv_cache_bytes(spec, (5, 7), 8, kv_dtype)
    with_index, without, _ = (layer.index_keys for layer in cache.layers if layer is not None)
    assert with_index is not None
    assert without is None
    assert with_index.dtype == (torch.float32 if kv_dtype == "float32" else torch.bfloat16)


def test_what_a_class_keeps_of_each_token_is_planned(tmp_path: Path) -> None:
    """Values and gates of the compressors, and the indexer's beside them: twice as many, since windows overlap."""
    make_class_model(tmp_path, "deepseek_v4")
    spec = read_spec(tmp_path)
    assert spec.layer_index_sizes == (0, 2 * 16, 4 * 16 + 4 * 32, 4 * 16 + 4 * 32)
    cache = KVCache(spec, (5, 7, 9), 8, CPU, "bfloat16")
    assert cache.allocated_bytes == kv_cache_bytes(spec, (5, 7, 9), 8, "bfloat16")


@pytest.mark.parametrize(
    "model_type",
    ["deepseek_v4", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("minimax_m3_vl_text", "hy_v4"))],
)
def test_what_a_class_chooses_or_compresses_depends_on_the_request_alone(model_type: str, tmp_path: Path) -> None:
    """Chunks, prefix hits, preemptions and drafts, where transformers' code reads what localllm keeps of each token."""
    make_class_model(tmp_path, model_type)
    spec = read_spec(tmp_path)
    assert spec.implementation == "transformers"
    model = load_model(tmp_path, spec, CPU, torch.float32, max_model_len=MAX_LEN)
    few, again = make_requests()[:3], make_requests()[:3]
    alone = {request.request_id: serve(model, spec, [request])[0][request.request_id] for request in few}
    for request in again:
        request.request_id = f"again {request.request_id}"
    both = [*make_requests()[:3], *again]
    told, scheduler = serve(model, spec, both, depth=2, num_blocks=17, step=20, speculates=True)
    assert scheduler.recorder.num_failed_steps == 0
    assert scheduler.recorder.num_preemptions > 0
    assert scheduler.recorder.prefix_cache_hits > 0
    for name, outputs in told.items():
        assert tokens_of(outputs) == tokens_of(alone[name.removeprefix("again ")]), name


def make_requests() -> list[Request]:
    dice, requests = random.Random(5), []
    shared = [dice.randrange(250) for _ in range(60)]
    for i in range(6):
        prompt = shared[: dice.choice([0, 33, 60])] + [dice.randrange(250) for _ in range(dice.randint(1, 30))]
        params = SamplingParams(temperature=0.0, max_tokens=dice.randint(10, 25))
        assert params.max_tokens is not None
        requests.append(Request(f"r{i}", prompt, params, max_output_tokens=params.max_tokens))
    return requests


@pytest.mark.parametrize(("num_blocks", "step"), [(200, 64), (16, 20)])
@pytest.mark.parametrize("drafts", [False, True])
def test_output_depends_on_the_request_alone(
    num_blocks: int, step: int, drafts: bool, tiny_model_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, prefix hits, preemptions, and drafts of which some are wrong, with layers that share their choice."""
    path = tiny_model_path("glm_moe_dsa")
    spec = read_spec(path)
    model = load_model(path, spec, CPU, torch.float32, max_model_len=MAX_LEN)
    alone = {request.request_id: serve(model, spec, [request])[0][request.request_id] for request in make_requests()}
    texts = [[*request.token_ids, *tokens_of(alone[request.request_id])] for request in make_requests()]
    monkeypatch.setattr(HostDrafts, "_find", knowing(texts, 0.2))
    told, scheduler = serve(model, spec, make_requests(), depth=2, num_blocks=num_blocks, step=step, speculates=drafts)
    assert scheduler.recorder.num_failed_steps == 0
    assert (scheduler.recorder.num_preemptions > 0) == (num_blocks == 16)
    assert scheduler.recorder.prefix_cache_hits > 0
    assert_same(told, alone)
