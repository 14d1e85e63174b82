"""Every family against transformers, eager, fp32: logits within 1e-4 relative, greedy tokens equal.

The properties that make a serving engine right are asked of each, and at length of one family of each kind: cutting a
prompt into chunks, unlike neighbours in the batch and the order of the blocks change nothing.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from localllm.kernels.linear import should_pack
from localllm.models.layers.rotary import rope_table
from localllm.models.loader import load_model, resident_bytes
from localllm.models.read_spec import read_spec
from localllm.models.weights.parameters import held_bytes
from tests.models.harness import (
    CPU,
    THOROUGH,
    Harness,
    assert_close,
    prompt,
    reference,
    reference_greedy,
    reference_logits,
)
from tests.tiny import FAMILIES, RECOGNISED, VOCAB_SIZE, load_reference, make_tiny_model

PathOf = Callable[[str], Path]


@pytest.mark.parametrize("family", [*FAMILIES, *RECOGNISED])
class TestFamily:
    def test_one_shot_prefill(self, family: str, tiny_model_path: PathOf) -> None:
        path, tokens = tiny_model_path(family), prompt(63)
        _, logits = Harness(path).prefill(tokens)
        assert_close(logits, reference_logits(reference(path), tokens))

    def test_greedy(self, family: str, tiny_model_path: PathOf) -> None:
        path = tiny_model_path(family)
        prompts = [prompt(length, seed=length) for length in (3, 30)]
        wanted = [reference_greedy(reference(path), tokens, 8) for tokens in prompts]
        assert Harness(path).greedy(prompts, 8, chunk=7) == wanted

    def test_resident_bytes_are_predicted(self, family: str, tiny_model_path: PathOf) -> None:
        path = tiny_model_path(family)
        spec = read_spec(path)
        for dtype in (torch.float32, torch.bfloat16):
            model = load_model(path, spec, CPU, dtype)
            assert held_bytes(model) == resident_bytes(path, spec, CPU, dtype)


@pytest.mark.parametrize("family", THOROUGH)
class TestThoroughly:
    @pytest.mark.parametrize("chunk", [1, 5, 8, 48])
    def test_chunked_prefill(self, family: str, chunk: int, tiny_model_path: PathOf) -> None:
        path, tokens = tiny_model_path(family), prompt(63, seed=1)
        _, logits = Harness(path).prefill(tokens, chunk)
        assert_close(logits, reference_logits(reference(path), tokens))

    def test_greedy_with_unlike_neighbours(self, family: str, tiny_model_path: PathOf) -> None:
        path = tiny_model_path(family)
        prompts = [prompt(length, seed=length) for length in (1, 8, 9, 75)]
        wanted = [reference_greedy(reference(path), tokens, 64) for tokens in prompts]
        assert Harness(path, num_blocks=256).greedy(prompts, 64, chunk=11) == wanted


def test_packed_tied_head_beside_stored_rows(tmp_path: Path) -> None:
    """Large enough to be packed: the head is fp32 in blocks, the embedding keeps its bf16 rows, both predicted."""
    path = make_tiny_model(tmp_path, "qwen2", dtype="bfloat16", hidden_size=512, intermediate_size=512)
    harness, tokens = Harness(path), prompt(20)
    assert should_pack(VOCAB_SIZE * 512, CPU, torch.float32) == harness.model.lm_head.weight.is_mkldnn
    assert held_bytes(harness.model) == resident_bytes(path, harness.spec, CPU, torch.float32)
    _, logits = harness.prefill(tokens)
    assert_close(logits, reference_logits(load_reference(path), tokens))


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn-factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "attention_factor": 1.25,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
}


@pytest.mark.parametrize("name", ROPES)
def test_rope_variant(name: str, tmp_path: Path) -> None:
    rope = {"rope_theta": 10_000.0, **ROPES[name]}
    path = make_tiny_model(tmp_path, "llama", rope_parameters=rope, max_position_embeddings=128, head_dim=32)
    tokens = prompt(100)
    _, logits = Harness(path).prefill(tokens, chunk=33)
    assert_close(logits, reference_logits(load_reference(path), tokens))


def test_dynamic_rope_past_its_length_is_as_transformers_decodes(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
    path = make_tiny_model(tmp_path, "llama", rope_parameters=rope, max_position_embeddings=24)
    tokens = prompt(20)
    wanted = reference_greedy(load_reference(path), tokens, 40)
    assert Harness(path).greedy([tokens], 40) == [wanted]


@pytest.mark.parametrize(("served", "length"), [(32, 30), (128, 60)])
def test_longrope_uses_the_factors_of_the_served_length(served: int, length: int, tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.5,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.5, 2.0, 3.0, 4.0],
    }
    path = make_tiny_model(
        tmp_path, "phi3", rope_parameters=rope, max_position_embeddings=128, original_max_position_embeddings=32
    )
    tokens = prompt(length)
    _, logits = Harness(path, max_model_len=served).prefill(tokens, chunk=13)
    assert_close(logits, reference_logits(load_reference(path), tokens))


def test_phi_moe_has_a_factor_on_rotations_for_each_length(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [1.5 + i for i in range(8)]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_mscale": 1.3, "long_mscale": 1.7, **factors}
    path = make_tiny_model(
        tmp_path, "phimoe", max_position_embeddings=256,
        rope_parameters={**rope, "original_max_position_embeddings": 64},
    )  # fmt: skip
    tokens = prompt(41)
    _, logits = Harness(path, max_model_len=64).prefill(tokens, chunk=16)
    assert_close(logits, reference_logits(load_reference(path), tokens))
    long, short = (rope_table(read_spec(path).rope, count)[:9] for count in (256, 64))
    assert torch.allclose(short.square().sum(1) / 8, torch.tensor(1.3**2))
    assert torch.allclose(long.square().sum(1) / 8, torch.tensor(1.7**2))


@pytest.mark.parametrize(
    "overrides",
    [
        {"attention_bias": True, "mlp_bias": True},
        {"hidden_act": "gelu"},
        {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
        {"num_key_value_heads": 4},
        {"hidden_size": 80, "num_attention_heads": 10, "num_key_value_heads": 5, "head_dim": 12},
        {"hidden_size": 320, "intermediate_size": 512},  # large enough for packed weights
    ],
    ids=str,
)
def test_llama_options(overrides: dict[str, Any], tmp_path: Path) -> None:
    path, tokens = make_tiny_model(tmp_path, "llama", **overrides), prompt(41)
    _, logits = Harness(path).prefill(tokens, chunk=16)
    assert_close(logits, reference_logits(load_reference(path), tokens))


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
        ("qwen3", {"attention_bias": True}),
        (
            "gemma3",
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                }
            },
        ),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 16}),
        ("phi3", {"sliding_window": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
        ("laguna", {"gating": "per-element", "num_attention_heads_per_layer": None}),
        ("laguna", {"layer_types": None, "num_attention_heads_per_layer": [8] * 3, "mlp_layer_types": None}),
        ("mellum", {"layer_types": None, "mlp_layer_types": None, "norm_topk_prob": False, "attention_bias": True}),
    ],
    ids=str,
)
def test_family_options(family: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    path, tokens = make_tiny_model(tmp_path, family, **overrides), prompt(41)
    _, logits = Harness(path).prefill(tokens, chunk=16)
    assert_close(logits, reference_logits(load_reference(path), tokens))


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_half_precision_checkpoint_runs_in_fp32_as_transformers_does(stored: str, tmp_path: Path) -> None:
    path, tokens = make_tiny_model(tmp_path, "qwen2", dtype=stored), prompt(41)
    harness = Harness(path)
    assert harness.spec.dtype == stored
    _, logits = harness.prefill(tokens)
    assert_close(logits, reference_logits(load_reference(path), tokens))


def test_sharded_checkpoint_and_progress(tiny_llama_path: Path, tmp_path: Path) -> None:
    model = load_reference(tiny_llama_path)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    calls: list[tuple[int, int]] = []
    load_model(tmp_path, read_spec(tmp_path), CPU, torch.float32, lambda done, total: calls.append((done, total)))
    assert calls == sorted(calls)
    assert calls[-1][0] == calls[-1][1]
    tokens = prompt(30)
    _, logits = Harness(tmp_path).prefill(tokens)
    assert_close(logits, reference_logits(model, tokens))


def test_prefix_of_another_request_can_be_read(tiny_llama_path: Path) -> None:
    """What the prefix cache does: a second sequence starts on the first one's full blocks."""
    harness, tokens = Harness(tiny_llama_path), prompt(40)
    first, whole = harness.prefill(tokens)
    other = [*tokens[:24], *prompt(9, seed=5)]
    from tests.models.harness import Sequence

    second = Sequence(other, computed=24, blocks=first.blocks[:3])
    (logits,) = harness.step([(second, 9)], all_logits=True)
    assert_close(logits, reference_logits(reference(tiny_llama_path), other)[24:])
    assert_close(whole, reference_logits(reference(tiny_llama_path), tokens))
