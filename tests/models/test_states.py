"""The bytes of recurrent states, against the sizes that llama.cpp prints for the same models (its states are fp32)."""

from dataclasses import replace

import pytest

from localllm.config.settings import EngineConfig
from localllm.errors import DoesNotFit
from localllm.machine.hardware import Gpu, Hardware
from localllm.models.fit import MemoryPlan, kv_bytes_per_token, plan_memory
from localllm.models.fit.cache_sizes import state_interval
from localllm.models.spec.model_spec import ModelSpec, StateTensor, state_bytes, state_group
from localllm.models.spec.recurrent import RecurrentSpec
from localllm.models.spec.rope import RopeSpec

MIB = 1024**2
PLAIN = ModelSpec("LlamaForCausalLM", 4, 64, 96, 8, 4, 8, 100, 512, "silu", True, "bfloat16", RopeSpec(1e4))


def hybrid(recurrent: RecurrentSpec, num_recurrent: int, num_attention: int, **fields: object) -> ModelSpec:
    kinds = ("recurrent",) * num_recurrent + ("attention",) * num_attention
    return replace(PLAIN, num_layers=len(kinds), layer_kinds=kinds, recurrent=recurrent, **fields)


def gated_delta(num_heads: int) -> RecurrentSpec:
    return RecurrentSpec("gated_delta", 4, num_heads=num_heads, num_groups=16, head_size=128, state_size=128)


LFM2 = hybrid(RecurrentSpec("short_conv", 3, width=2048), 10, 6)
MAMBA_2 = hybrid(RecurrentSpec("mamba2", 4, num_heads=128, num_groups=8, head_size=64, state_size=128), 1, 1)


@pytest.mark.parametrize(
    ("spec", "dtype", "expected"),
    [
        (hybrid(gated_delta(32), 24, 8), "bfloat16", 48 * MIB + 9 * MIB // 8),  # Qwen3.5-4B
        (hybrid(gated_delta(32), 30, 10), "float32", int(62.8125 * MIB)),  # Qwen3.6-35B-A3B: 502.5 MiB for 8 places
        (hybrid(gated_delta(48), 48, 16), "float32", int((144 + 5.625) * MIB)),  # Qwen3.6-27B: S 144.00 + R 5.62
        (MAMBA_2, "bfloat16", 4 * MIB + 60 * 1024),
        (LFM2, "bfloat16", 80 * 1024),
        (PLAIN, "bfloat16", 0),
    ],
)
def test_state_bytes(spec, dtype, expected):
    assert state_bytes(spec, dtype) == expected


def test_the_matrix_is_fp32_and_the_convolution_has_the_type_of_the_activations():
    group = state_group(hybrid(gated_delta(32), 2, 1), "float16")
    assert group.layers == (0, 1)
    assert group.tensors[0] == (
        StateTensor("conv", (2 * 16 * 128 + 32 * 128, 3), "float16"),
        StateTensor("matrix", (32, 128, 128), "float32"),
    )
    assert state_group(PLAIN, "float16") is None


def test_a_short_convolution_keeps_no_matrix():
    assert [tensor.name for tensor in state_group(LFM2, "float32").tensors[0]] == ["conv"]


QWEN_27B = replace(
    hybrid(gated_delta(48), 48, 16), hidden_size=5120, intermediate_size=17_408, num_heads=24, num_kv_heads=4,
    head_dim=256, vocab_size=248_320, max_position=262_144,
)  # fmt: skip
GIB = 1024**3
CPU = Hardware((), "CPU", 8, 32 * GIB, 24 * GIB)


def plan(spec: ModelSpec, free_gib: float, weights_gib: float = 15, gpus: int = 1, **asked: object) -> MemoryPlan:
    """Plan for GPUs with so much free memory each; 0: for a CPU."""
    cards = [Gpu(index, "Card", 80 * GIB, int(free_gib * GIB), (9, 0), "570") for index in range(gpus)]
    hardware = replace(CPU, gpus=tuple(cards)) if free_gib else CPU
    return plan_memory(EngineConfig(**asked), spec, int(weights_gib * GIB), hardware)


def test_fewer_requests_rather_than_a_shorter_context():
    """M(len, seqs, C): the state of 64 requests of a 27B model alone would take 9 GiB."""
    made = plan(QWEN_27B, 40)
    assert made.max_num_seqs < 64
    assert made.num_places == 1 + 2 * made.max_num_seqs
    assert made.state_bytes == made.num_places * state_bytes(QWEN_27B, "bfloat16")
    assert made.state_bytes <= 0.25 * (40 * GIB - made.weights_bytes)
    assert made.max_model_len > 200_000
    assert made.total_bytes <= 40 * GIB * 0.9
    assert any("requests at once instead of 64" in note for note in made.notes)
    fewer = plan(QWEN_27B, 40, max_num_seqs=4)
    assert fewer.max_num_seqs == 4
    assert fewer.num_places > made.num_places - 8


def test_two_requests_and_four_checkpoints_are_the_least():
    made = plan(QWEN_27B, 22.5)
    assert (made.max_num_seqs, made.num_places) == (2, 7)
    with pytest.raises(DoesNotFit, match="does not fit") as refused:
        plan(QWEN_27B, 20.6, device="cuda")
    assert "the recurrent states of 2 requests and their checkpoints 1.0 GiB" in refused.value.why


def test_copies_of_states_for_drafts_are_not_beside_a_prompt():
    """A step with drafts has no prompt, so that only the larger of the two counts; a GPU keeps projections instead."""
    asked = {"device": "cpu", "max_num_seqs": 4, "max_model_len": 4096}
    spec = replace(QWEN_27B, layer_kinds=("recurrent",) * 4 + ("attention",) * 4, num_layers=8)
    sizes = {}
    for tokens in (16, 4096):
        each = (plan(spec, 0, 1, max_num_batched_tokens=tokens, speculative=how, **asked) for how in ("auto", "off"))
        drafted, plain = (made.activation_bytes for made in each)
        sizes[tokens] = drafted - plain
    assert sizes[4096] == 0
    assert 0 < sizes[16] <= 4 * state_bytes(spec, "float32")


def test_without_prefix_caching_there_are_no_checkpoints():
    made = plan(QWEN_27B, 40, enable_prefix_caching=False, max_num_seqs=5)
    assert made.num_places == 6


def test_small_states_have_a_checkpoint_for_each_block():
    spec = replace(LFM2, hidden_size=2048, intermediate_size=8192, num_heads=32, head_dim=64, max_position=32_768)
    made = plan(spec, 0, 2.3)
    assert made.max_num_seqs == 64
    assert made.num_places <= 65 + made.num_blocks[0]
    assert made.num_places >= 65 + made.num_blocks[0] // 2
    assert state_interval(made.bytes_per_state, made.block_size) == made.block_size
    assert state_interval(state_bytes(QWEN_27B, "bfloat16"), 64) == 256


@pytest.mark.parametrize("asked", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_ranks_share_the_states(asked):
    """Each rank has the same places: with half of each state, or with the states of its own layers."""
    one, two = plan(QWEN_27B, 80, max_num_seqs=4), plan(QWEN_27B, 40, gpus=2, max_num_seqs=4, **asked)
    assert two.bytes_per_state == one.bytes_per_state == state_bytes(QWEN_27B, "bfloat16")
    if "tensor_parallel_size" in asked:
        assert [rank.state_bytes for rank in two.ranks] == [two.num_places * one.bytes_per_state // 2] * 2
    assert two.state_bytes == sum(rank.state_bytes for rank in two.ranks)
    assert all(rank.total_bytes <= rank.free_bytes - rank.reserve_bytes for rank in two.ranks)
    assert two.total_bytes == sum(rank.total_bytes for rank in two.ranks)


def test_the_rank_with_the_least_memory_decides_the_places():
    """A stage without recurrent layers does not."""
    apart = plan(QWEN_27B, 40, gpus=2, pipeline_layer_partition=(48, 16))
    assert [rank.state_bytes for rank in apart.ranks] == [apart.state_bytes, 0]
    assert apart.num_places == 1 + 2 * apart.max_num_seqs
    assert apart.state_bytes <= 0.25 * 40 * GIB


def test_a_model_without_states_has_no_places():
    made = plan(PLAIN, 0, 1)
    assert (made.num_places, made.state_bytes, made.bytes_per_state) == (0, 0, 0)


def test_only_attention_layers_have_kv():
    """The KV of a hybrid is that of its attention layers: over all of them, LFM2-1.2B would count 2.7 times as much."""
    assert kv_bytes_per_token(replace(LFM2, num_kv_heads=8, head_dim=64), "bfloat16") == 12 * 1024
