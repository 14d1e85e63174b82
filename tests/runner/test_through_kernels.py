"""A whole engine through the kernels gives what it gives through their twins: scheduler, staging, model, sampling.

Runs where kernels run: TRITON_INTERPRET=1, or on a GPU.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from localllm.engine.params import SamplingParams
from localllm.engine.request import Request
from localllm.kernels import indexer, launch, linear
from localllm.kernels.choice import ALL_KERNELS
from localllm.kernels.launch import LaunchOptions
from localllm.kernels.skinny_gemm import SkinnyProduct
from localllm.models.decoder.decoder import DecoderModel
from localllm.models.decoder.native_program import NotSupportedNatively
from localllm.models.drafters import draft_model
from localllm.models.drafters.draft_model import DraftModel
from localllm.models.drafters.drafter import Drafter
from localllm.models.drafters.opening import open_drafter, plan_drafter
from localllm.models.inputs import ForwardInputs, GroupInputs
from localllm.models.layers import latent_attention
from localllm.models.loader import load_model
from localllm.models.read_spec import read_spec
from localllm.models.spec.model_spec import ModelSpec, kv_groups
from localllm.runner.device_drafts import LookupOnDevice
from localllm.runner.kv_cache import KVCache
from tests.eagle_files import write_eagle
from tests.kv import windowed_ledger
from tests.models.harness import TAPS
from tests.mtp_models import make_mtp_model
from tests.runner import harness
from tests.runner.harness import BLOCK, check_kernels, mixed_requests, opened, serve, tokens_of
from tests.runner.harness import knowing_on_device as knowing
from tests.tiny import make_tiny_model

pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="needs TRITON_INTERPRET=1; on a GPU see tests/device")


@pytest.mark.parametrize("way", ["staged", "replayed"])
def test_kernels_answer_as_their_twins(model: Any, spec: ModelSpec, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_kernels(model, spec, mixed_requests, way, monkeypatch)


def test_products_that_finish_what_is_between_them(
    model: Any, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As bfloat16 on a GPU, where few rows do not use the BLAS: they add to the stream, divide, and activate."""
    monkeypatch.setattr(
        linear, "_uses_skinny_gemm", lambda x, weight: launch.runs_triton(weight, "products") and x.shape[0] <= 16
    )
    finished: list[str] = []
    for name in ("gated", "add_and_norm"):
        method = getattr(SkinnyProduct, name)

        def record(*args: Any, name: str = name, method: Any = method) -> Any:
            finished.append(name)
            return method(*args)

        monkeypatch.setattr(SkinnyProduct, name, record)
    check_kernels(model, spec, mixed_requests, "replayed", monkeypatch)
    assert {"gated", "add_and_norm"} <= set(finished)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", sorted(ALL_KERNELS))
def test_any_group_of_kernels_can_be_replaced(
    model: Any, spec: ModelSpec, kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows use products that leave their last work to the next kernel, which may be the one that is replaced."""
    monkeypatch.setattr(
        linear, "_uses_skinny_gemm", lambda x, weight: launch.runs_triton(weight, "products") and x.shape[0] <= 16
    )
    monkeypatch.setattr(harness, "LaunchOptions", partial(LaunchOptions, without=frozenset({kernel})))
    check_kernels(model, spec, mixed_requests, "staged", monkeypatch)


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v2", "bloom", "cohere", "gpt2", "ministral3"])
def test_families_far_from_llama(
    family: str, tiny_model_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of recorded shapes: rows of padding pass no expert and have a position, one cache holds keys and values,
    parts run in parallel, positions are slopes, rows of a table or nothing."""
    spec = read_spec(tiny_model_path(family))
    model = load_model(tiny_model_path(family), spec, torch.device("cpu"), torch.float32)

    def two() -> list[Request]:
        greedy = SamplingParams(temperature=0.0, max_tokens=2)
        return [Request(f"r{n}", list(range(3, 3 + n)), greedy, max_output_tokens=2) for n in (1, 19)]

    check_kernels(model, spec, two, "replayed", monkeypatch)


@pytest.mark.parametrize(
    ("family", "way"),
    [("glm_moe_dsa", "replayed"), pytest.param("deepseek_v32", "staged", marks=pytest.mark.slow)],
)
def test_contexts_beyond_what_an_indexer_chooses(
    family: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """24 keys are chosen: a recorded step is replayed below, at and beyond that length; layers share a choice."""
    layers = {"num_hidden_layers": 2, "indexer_types": ["full", "shared"]} if family == "glm_moe_dsa" else {}
    path = make_tiny_model(tmp_path, family, **layers)
    spec = read_spec(path)
    assert spec.index is not None
    assert spec.index.topk == 24
    model = load_model(path, spec, torch.device("cpu"), torch.float32, max_model_len=harness.MAX_LEN)
    used: list[int] = []
    choose = indexer.choose_on_device
    monkeypatch.setattr(latent_attention, "choose_on_device", lambda *given: used.append(1) or choose(*given))

    def two() -> list[Request]:
        greedy = SamplingParams(temperature=0.0, max_tokens=4)
        return [Request(f"r{n}", list(range(3, 3 + n)), greedy, max_output_tokens=4) for n in (22, 27)]

    check_kernels(model, spec, two, way, monkeypatch)
    assert used


def test_windowed_layers_that_give_blocks_back(
    tiny_model_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = read_spec(tiny_model_path("gemma3"))
    model = load_model(tiny_model_path("gemma3"), spec, torch.device("cpu"), torch.float32)
    sizes = tuple(16 if group.window is None else 13 for group in kv_groups(spec))

    def two() -> list[Request]:
        greedy = SamplingParams(temperature=0.0, max_tokens=3)
        return [Request(f"r{n}", list(range(3, 3 + n)), greedy, max_output_tokens=3) for n in (47, 2)]

    check_kernels(model, spec, two, "replayed", monkeypatch, windowed_ledger(spec, sizes, BLOCK, 24))


def drafted() -> list[Request]:
    """A text that repeats itself, which lookup finds, and one that is drawn."""
    asked = [
        SamplingParams(temperature=0.0, max_tokens=9, allowed_token_ids=[5, 6]),
        SamplingParams(temperature=0.7, seed=3, max_tokens=7, repetition_penalty=1.2, logprobs=1),
    ]
    prompts = [[5, 6] * 5, [7, 8, 9, *range(30, 41)]]
    return [
        Request(f"r{i}", prompt, params, max_output_tokens=params.max_tokens or 1)
        for i, (prompt, params) in enumerate(zip(prompts, asked, strict=True))
    ]


@pytest.mark.parametrize("way", ["staged", "replayed"])
@pytest.mark.parametrize("source", ["lookup", "right and wrong"])
def test_drafts_through_the_kernels(
    model: Any, spec: ModelSpec, way: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S2: rows of several queries, accepted on the device, while the next step is already launched."""
    with monkeypatch.context() as twins:
        twins.setattr(launch, "INTERPRETED", False)
        plain, _ = serve(model, spec, drafted(), way="host")
    texts = [[*r.token_ids, *tokens_of(plain[r.request_id])] for r in drafted()]
    if source != "lookup":
        monkeypatch.setattr(LookupOnDevice, "launch", knowing(texts, 0.2))
    through_kernels, scheduler = serve(
        model, spec, drafted(), num_blocks=14, depth=2, step=24, way=way, speculates=True
    )
    assert scheduler.recorder.num_failed_steps == 0
    assert scheduler.speculation is not None
    stats = scheduler.speculation.stats()
    assert stats.num_accepted_tokens
    assert (stats.num_accepted_tokens < stats.num_draft_tokens) == (source != "lookup")
    for name, outputs in plain.items():
        assert tokens_of(through_kernels[name]) == tokens_of(outputs), name


@pytest.mark.slow
@pytest.mark.timeout(300)  # the interpreter takes two minutes on a slow machine
@pytest.mark.parametrize(("kind", "way"), [("draft_model", "replayed"), ("eagle3", "staged")])
def test_a_drafter_through_the_kernels(tmp_path: Path, kind: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """S13: the texts are those of the twins, and so is what the drafter keeps of named blocks. No key of the first
    token is read: it is NaN."""
    path = make_tiny_model(tmp_path / "target", num_hidden_layers=4 if kind == "eagle3" else 1)
    spec = read_spec(path)
    model = load_model(path, spec, torch.device("cpu"), torch.float32)
    assert isinstance(model, DecoderModel)
    drafter: Drafter = DraftModel(model, spec.vocab_size)
    if kind == "eagle3":
        config = json.loads((path / "config.json").read_text("utf-8"))
        write_eagle(tmp_path / kind, config, kind, taps=TAPS)
        plan = plan_drafter(tmp_path / kind, "", spec, path)
        drafter = open_drafter(plan, model, torch.device("cpu"), torch.float32, max_model_len=harness.MAX_LEN)
    monkeypatch.setattr(draft_model, "open_native_program", _not_native)

    def run(way: str) -> tuple[dict[str, Any], Any, KVCache]:
        caches: list[KVCache] = []
        told, scheduler = serve(
            model, spec, drafted(), num_blocks=14, depth=2, step=24, way=way, speculates=True,
            drafter=opened(drafter, caches),
        )  # fmt: skip
        assert scheduler.recorder.num_failed_steps == 0
        return told, scheduler, caches[0]

    through_kernels, scheduler, cache = run(way)
    monkeypatch.setattr(launch, "INTERPRETED", False)
    plain, twins, kept = run("staged")
    for name, outputs in plain.items():
        assert tokens_of(through_kernels[name]) == tokens_of(outputs), name
    assert scheduler.speculation.stats().num_draft_tokens > 4
    named, others = (each.ledger.pools[0].names() for each in (scheduler, twins))
    assert set(named) & set(others)
    for name in set(named) & set(others):
        for ours, theirs in zip(cache.layers, kept.layers, strict=True):
            torch.testing.assert_close(
                ours.k[:, named[name]], theirs.k[:, others[name]], atol=1e-4, rtol=1e-4, equal_nan=True
            )


@pytest.mark.parametrize(
    ("family", "length"), [("deepseek_v3", 9), ("deepseek_v32", 29), ("mimo_v2", 29), ("step3p5", 29)]
)
def test_a_prediction_layer_through_the_kernels(
    family: str, length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pairs of a text and one draft behind them: hidden states, logits and the cache are those of the twins, also
    over one cache for keys and values, where an indexer chooses 24 keys, and where a window of 20 tokens is seen. No
    key of the first token is read: it is NaN."""
    path = make_mtp_model(tmp_path, family)
    spec = read_spec(path)
    model = load_model(path, spec, torch.device("cpu"), torch.float32)
    assert isinstance(model, DecoderModel)
    plan = plan_drafter(path, "mtp", spec, path)
    drafter = open_drafter(plan, model, torch.device("cpu"), torch.float32, max_model_len=64)
    table, features = torch.tensor([[3, 1, 2, 4]], dtype=torch.int32), torch.randn(length, spec.hidden_size)

    def pairs(first: int, count: int) -> ForwardInputs:
        places = torch.arange(first, first + count)
        slots = table[0, places // BLOCK].long() * BLOCK + places % BLOCK
        return ForwardInputs(
            token_ids=places * 7, positions=places - 1, groups=(GroupInputs(table, slots),),
            context_lens=torch.tensor([first + count], dtype=torch.int32),
            cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32), logits_indices=torch.tensor([count - 1]),
            num_decodes=int(count == 1), query_lens=(count,), context_lens_host=(first + count,), first_key=1,
        )  # fmt: skip

    @torch.inference_mode()
    def run() -> list[torch.Tensor]:
        cache = KVCache(drafter.spec, (5,), BLOCK, torch.device("cpu"), "float32").layers
        (kv,) = cache
        assert kv is not None
        for tensor in kv.tensors():
            tensor.fill_(torch.nan)
        hidden = drafter.extend(pairs(1, length), cache, features)
        drafted = drafter.step(pairs(1 + length, 1), cache, hidden)
        logits = drafter.logits(drafted)
        assert logits is not None
        return [hidden, drafted, logits, kv.k]

    ours = run()
    monkeypatch.setattr(launch, "INTERPRETED", False)
    for mine, theirs in zip(ours, run(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4, equal_nan=True)
    assert ours[2].isfinite().all()


@pytest.mark.parametrize("family", ["qwen3_5", "granite_hybrid", "lfm2"])
def test_drafts_of_a_hybrid_through_the_kernels(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """S2: the recurrences run again over the right tokens of each row, rows of unlike numbers."""
    path = make_tiny_model(tmp_path, family)
    spec = read_spec(path)
    model = load_model(path, spec, torch.device("cpu"), torch.float32)
    with monkeypatch.context() as twins:
        twins.setattr(launch, "INTERPRETED", False)
        plain, _ = serve(model, spec, drafted(), num_places=9)
    texts = [[*r.token_ids, *tokens_of(plain[r.request_id])] for r in drafted()]
    monkeypatch.setattr(LookupOnDevice, "launch", knowing(texts, 0.3))
    told, scheduler = serve(
        model, spec, drafted(), num_blocks=14, depth=2, step=24, way="staged", speculates=True, num_places=9
    )
    assert scheduler.recorder.num_failed_steps == 0
    assert scheduler.speculation is not None
    stats = scheduler.speculation.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    for name, outputs in plain.items():
        assert tokens_of(told[name]) == tokens_of(outputs), name


def _not_native(model: Any, layers: Any) -> Any:
    raise NotSupportedNatively("a staged step has padding")
