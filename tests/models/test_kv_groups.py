"""The KV groups of a model, what ranks hold of them, and how memory is divided among them."""

from dataclasses import replace

import pytest
import torch

from localllm.config.settings import EngineConfig
from localllm.machine.hardware import Gpu, Hardware
from localllm.models.fit import MemoryPlan, kv_bytes_per_token, kv_cache_bytes, plan_memory
from localllm.models.fit.cache_sizes import KVSplit, most_blocks
from localllm.models.spec.model_spec import ModelSpec, group_of_layers, held_blocks, kv_groups
from localllm.models.spec.rope import RopeSpec
from localllm.models.spec.shard import local_spec, shards_of
from localllm.runner.kv_cache import KVCache

GIB = 1024**3
FIVE_OF_SIX = tuple((layer + 1) % 6 != 0 for layer in range(62))
GEMMA = ModelSpec(
    architecture="Gemma3ForCausalLM", num_layers=62, hidden_size=5376, intermediate_size=21_504, num_heads=32,
    num_kv_heads=16, head_dim=128, vocab_size=262_144, max_position=131_072, hidden_act="gelu_tanh",
    tie_word_embeddings=True, dtype="bfloat16", rope=RopeSpec(), sliding_window=1024, layer_is_windowed=FIVE_OF_SIX,
)  # fmt: skip
SMALL = replace(
    GEMMA, num_layers=4, num_kv_heads=2, head_dim=8, sliding_window=6, layer_is_windowed=(True, True, False, True)
)


def test_layers_with_one_window_are_a_group() -> None:
    windowed, full = kv_groups(GEMMA)
    assert (windowed.name, windowed.window, len(windowed.layers)) == ("window_1024", 1024, 52)
    assert (full.name, full.window, full.layers) == ("full", None, tuple(range(5, 60, 6)))
    assert [group.window for group in kv_groups(replace(GEMMA, layer_is_windowed=()))] == [None]
    assert kv_bytes_per_token(GEMMA, "bfloat16") == 62 * 2 * 16 * 128 * 2


def test_two_shapes_are_two_groups_and_shared_layers_are_in_none() -> None:
    shapes = ((2, 8), (2, 8), (1, 16), (2, 8))
    spec = replace(SMALL, layer_kv_shapes=shapes, kv_source=(0, 1, 2, 1))
    assert [(g.layers, g.window, g.num_kv_heads, g.head_dim) for g in kv_groups(spec)] == [
        ((0, 1), 6, 2, 8), ((2,), None, 1, 16),
    ]  # fmt: skip
    assert group_of_layers(spec) == (0, 0, 1, 0)
    cache = KVCache(spec, (5, 9), 4, torch.device("cpu"), "float32")
    assert cache.layers[3] is cache.layers[1]
    assert [tuple(layer.k.shape) for layer in cache.layers] == [(2, 5, 4, 8), (2, 5, 4, 8), (1, 9, 4, 16), (2, 5, 4, 8)]
    assert cache.allocated_bytes == kv_cache_bytes(spec, (5, 9), 4, "float32")
    unlike = replace(SMALL, layer_is_windowed=(), layer_kv_shapes=shapes)
    assert [group.name for group in kv_groups(unlike)] == ["full_2x8", "full_1x16"]


def test_a_stage_keeps_the_groups_of_the_whole_model() -> None:
    """The second stage has no layer that sees everything; the groups' order is the same on every rank."""
    for layers, held in ((range(3), [(0, 1), (2,)]), (range(3, 4), [(0,), ()])):
        [shard] = shards_of(SMALL, [2], layers=layers)
        spec = local_spec(SMALL, shard)
        assert [group.layers for group in kv_groups(spec)] == held
        assert [group.window for group in kv_groups(spec)] == [6, None]
        cache = KVCache(spec, (5, 9), 4, torch.device("cpu"), "float32")
        assert [layer.k.shape[1] for layer in cache.layers] == [5, 5, 9][: len(layers)]
    first, _ = shards_of(SMALL, [1, 1])
    assert [group.num_kv_heads for group in kv_groups(local_spec(SMALL, first))] == [1, 1]


# ---- memory ----------------------------------------------------------------------------------------------------------


def plan(spec: ModelSpec, gib: float, **asked: object) -> MemoryPlan:
    card = Gpu(0, "Card", int(gib * GIB), int(gib * GIB), (8, 9), "570")
    return plan_memory(EngineConfig(**asked), spec, 14 * GIB, Hardware((card,), "CPU", 8, 64 * GIB, 64 * GIB))  # type: ignore[arg-type]


def test_windowed_layers_leave_memory_for_longer_contexts() -> None:
    made, kept = plan(GEMMA, 40), plan(replace(GEMMA, layer_is_windowed=()), 40)
    assert made.windows == (1024, None)
    assert made.num_kv_tokens > 2 * kept.num_kv_tokens
    assert made.kv_bytes == kv_cache_bytes(GEMMA, made.num_blocks, made.block_size, made.kv_dtype)
    assert made.kv_bytes <= kept.kv_bytes + 62 * 2 * 16 * 128 * 2 * made.block_size * 2


@pytest.mark.parametrize("gib", [20, 24, 40, 80])
def test_a_plan_holds_a_request_of_full_length_and_a_step(gib: float) -> None:
    made = plan(GEMMA, gib)
    windowed, full = made.num_blocks
    assert full > -(-made.max_model_len // made.block_size)
    assert windowed > held_blocks(made.max_model_len, 1024, made.block_size, made.max_num_batched_tokens)
    assert made.concurrency(made.max_model_len) >= 1


def test_where_all_layers_have_a_window_the_context_is_not_bound_by_the_cache() -> None:
    spec = replace(GEMMA, layer_is_windowed=(True,) * 62)
    assert plan(spec, 24).max_model_len == 131_072
    assert plan(spec, 24).num_blocks[0] > held_blocks(131_072, 1024, 64, 2048)


def test_a_windowed_group_has_windows_for_contexts_and_a_step() -> None:
    split = KVSplit((1024, None), 64, 2048, 8)
    assert split.blocks(1 + 64) == (1 + 18 + 32, 65)  # one context of 4,096 tokens
    assert split.blocks(1 + 640) == (1 + 10 * 18 + 32, 641)
    assert split.blocks(1 + 64_000) == (1 + 16 * 18 + 32, 64_001)  # no more than 16, or max_num_seqs
    assert split.blocks(20) == (20, 20)
    assert split.needs(32_768) == 513


def test_as_many_blocks_as_fit() -> None:
    assert [most_blocks(lambda n, most=most: n <= most) for most in (0, 1, 2, 3, 1000)] == [0, 1, 2, 3, 1000]  # type: ignore[misc]


def test_a_plan_in_words() -> None:
    made = replace(plan(GEMMA, 40), num_blocks=(386, 3024))
    assert made.blocks_in_words == "3,023 of 64 tokens, 385 for layers that see 1,024"
