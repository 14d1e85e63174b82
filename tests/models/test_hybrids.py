"""Decoders with recurrent layers: prompts of every length around chunks, mixed batches, quantised and adapted layers,
limits and norms of Mamba-2, and what is refused. Each against transformers, eager, fp32."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from localllm.errors import ConfigError, CorruptModel, LocalLLMError, UnsupportedModel, UnsupportedOption
from localllm.kernels.int4_linear import Int4Weight
from localllm.kernels.linear import StackedWeight
from localllm.models.fit import kv_bytes_per_token
from localllm.models.fit.devices import Division, require_possible
from localllm.models.layers.lora import LoraLimits
from localllm.models.loader import load_model, resident_bytes
from localllm.models.read_spec import read_spec, spec_of_config
from localllm.models.spec.model_spec import DrafterPlan, state_bytes
from localllm.models.spec.recurrent import RecurrentSpec
from localllm.models.spec.shard import shards_of
from localllm.models.weights.lora import open_lora, put_lora
from localllm.models.weights.parameters import held_bytes
from tests.adapters import make_tiny_adapter, merged
from tests.gguf_hybrids import write_hybrid
from tests.models.formats.quantised import agrees, save_quantised
from tests.models.formats.stores import AWQ, awq
from tests.models.harness import CPU, Harness, ModelHarness, Sequence, assert_close, prompt, reference, reference_logits
from tests.models.sharded import ShardedModel, even_shards, load_whole, run
from tests.tiny import load_reference, make_tiny_model

PathOf = Callable[[str], Path]
SHORT = RecurrentSpec("short_conv")
EACH_KIND = (
    "lfm2",
    "lfm3",
    "qwen3_5",
    "olmo_hybrid",
    "qwen3_next",
    "granite_hybrid",
    "granite_hybrid_moe",
    "nemotron_h",
    "falcon_h1",
)
"""Between them: every recurrence, one and several groups, single-part layers, and layers with KV and state."""
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 150)


@pytest.mark.parametrize("family", EACH_KIND)
class TestSchedules:
    def test_prompts_of_many_lengths_in_one_batch(self, family: str, tiny_model_path: PathOf) -> None:
        path = tiny_model_path(family)
        prompts = [prompt(length, seed=length) for length in LENGTHS]
        harness = Harness(path, num_blocks=256)
        sequences = [Sequence(tokens) for tokens in prompts]
        steps = harness.step([(each, len(each.token_ids)) for each in sequences], all_logits=True)
        for tokens, logits in zip(prompts, steps, strict=True):
            assert_close(logits, reference_logits(reference(path), tokens))

    def test_chunks_beside_decodes(self, family: str, tiny_model_path: PathOf) -> None:
        """Rows of 19 + 7, 12 + 1, 1 + 29 and so on, of two requests and a third that begins later."""
        path = tiny_model_path(family)
        tokens = [prompt(length, seed=length) for length in (40, 44, 21)]
        harness, sequences = Harness(path), [Sequence(each) for each in tokens]
        parts: list[list[torch.Tensor]] = [[], [], []]
        for counts in ((19, 7, 0), (12, 1, 0), (1, 29, 1), (3, 1, 19), (1, 1, 1), (4, 5, 0)):
            rows = [(row, count) for row, count in enumerate(counts) if count]
            steps = harness.step([(sequences[row], count) for row, count in rows], all_logits=True)
            for (row, _), logits in zip(rows, steps, strict=True):
                parts[row].append(logits)
        for each, logits in zip(tokens, parts, strict=True):
            assert_close(torch.cat(logits), reference_logits(reference(path), each))

    def test_a_place_of_a_former_request(self, family: str, tiny_model_path: PathOf) -> None:
        """Also with a prompt of one token, whose row looks like a decode."""
        harness, path = Harness(tiny_model_path(family)), tiny_model_path(family)
        former, _ = harness.prefill(prompt(30))
        for tokens in (prompt(1, seed=3), prompt(9, seed=4)):
            later = Sequence(tokens, place=former.place)
            (logits,) = harness.step([(later, len(tokens))], all_logits=True)
            assert_close(logits, reference_logits(reference(path), tokens))


def test_a_state_is_read_where_another_row_does_not_write(tiny_model_path: PathOf) -> None:
    """Two requests go on from one checkpoint, as after a prefix hit: both read it, and each writes its own place."""
    path, start = tiny_model_path("qwen3_5"), prompt(24)
    harness = Harness(path)
    first, _ = harness.prefill(start)
    ends = [prompt(5, seed=5), prompt(9, seed=9)]
    rows = []
    for end in ends:
        row = Sequence(start + end, computed=len(start), blocks=list(first.blocks), place=first.place)
        row.writes = harness.free_places.pop()
        rows.append((row, len(end)))
    for end, logits in zip(ends, harness.step(rows, all_logits=True), strict=True):
        assert_close(logits, reference_logits(reference(path), start + end)[len(start) :])


@pytest.mark.parametrize("family", ["qwen3_5", "falcon_h1"])
def test_a_pipeline_of_single_layers(family: str, tiny_model_path: PathOf) -> None:
    """Stages without attention and stages without states."""
    path, tokens = tiny_model_path(family), prompt(28)
    spec = read_spec(path)
    stages = [shards_of(spec, [spec.num_kv_heads], layers=range(n, n + 1)) for n in range(spec.num_layers)]
    assert_close(ShardedModel(path, *stages).logits(tokens), reference_logits(reference(path), tokens))


GROUPS: dict[str, tuple[str, dict[str, Any]]] = {
    "3 key heads": ("qwen3_5", {"linear_num_key_heads": 3, "linear_num_value_heads": 6}),
    "3 key heads in two matrices": ("qwen3_next", {"linear_num_key_heads": 3, "linear_num_value_heads": 6}),
    "3 groups of Mamba-2": ("bamba", {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 3, "mamba_expand": 1}),
    "1 group of Mamba-2": ("nemotron_h", {"n_groups": 1}),
    "3 key heads in three matrices": ("olmo_hybrid", {"linear_num_key_heads": 3, "linear_num_value_heads": 6}),
    "channels of a convolution": ("lfm2", {}),
}
"""Groups that two and three ranks do not share evenly."""


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", GROUPS)
def test_shares_of_unlike_size(kind: str, size: int, tmp_path: Path) -> None:
    """Each rank has whole groups, or with more ranks than groups a part of one; bytes as predicted."""
    family, changes = GROUPS[kind]
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}
    path = make_tiny_model(tmp_path / "model", family, **heads, **changes)
    spec, tokens = read_spec(path), prompt(28)
    shards = even_shards(path, size)
    assert shards is not None
    model = ShardedModel(path, shards)
    assert_close(model.logits(tokens), reference_logits(reference(path), tokens))
    for shard, own in zip(shards, model.stages[0], strict=True):
        assert held_bytes(own) == resident_bytes(path, spec, CPU, torch.float32, shard=shard)
        assert state_bytes(own.spec, "float32") < state_bytes(spec, "float32")


@pytest.mark.parametrize("size", [2, 3, 6])
@pytest.mark.parametrize("block_type", ["F32", "Q8_0"])
def test_shares_of_tiled_heads(block_type: str, size: int, tmp_path: Path) -> None:
    """A GGUF file has the value heads of a key head apart from each other: the last matrix reads all shards' heads."""
    changes = {"linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_value_head_dim": 32, "hidden_size": 64}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 6}
    source = make_tiny_model(tmp_path / "model", "qwen3_5", **heads, **changes)
    path, tokens = write_hybrid(source, tmp_path / "model.gguf", block_type), prompt(28)
    assert read_spec(path).recurrent == replace(read_spec(source).recurrent or SHORT, tiled_heads=True)
    shards = even_shards(path, size)
    assert shards is not None
    wanted = run([load_whole(path, cpu_weights="exact")], tokens)
    assert wanted is not None
    assert_close(ShardedModel(path, shards, cpu_weights="exact").logits(tokens), wanted)


def test_ranks_that_groups_of_states_do_not_allow_are_refused_with_those_that_work(tiny_model_path: PathOf) -> None:
    with pytest.raises(ConfigError, match="in its recurrent layers 2 groups of 2 heads; 1, 2 and 4 ranks work"):
        require_possible(read_spec(tiny_model_path("qwen3_5")), Division(3, 1), 4)
    assert even_shards(tiny_model_path("qwen3_5"), 3) is None


def test_a_drafter_over_stages_with_states_is_refused(tiny_model_path: PathOf) -> None:
    spec = read_spec(tiny_model_path("qwen3_5"))
    drafted = replace(spec, drafter=DrafterPlan("draft_model", Path("d"), spec, 1))
    require_possible(drafted, Division(2, 1), 4)
    with pytest.raises(UnsupportedOption, match="cannot take back a wrong guess") as refused:
        require_possible(drafted, Division(1, 2), 4)
    assert refused.value.param == "speculative"


# ---- quantised weights, adapters -------------------------------------------------------------------------------------


def test_plain_matrices_beside_quantised_ones_in_one_layer(tmp_path: Path) -> None:
    """Qwen3.5's rates stay plain in quantised checkpoints, and share a layer with the quantised inputs."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "linear_value_head_dim": 32, "dtype": "float16"}
    source = make_tiny_model(tmp_path / "plain", "qwen3_5", **sizes)
    skipped = {**AWQ, "modules_to_not_convert": ["in_proj_a", "in_proj_b"]}
    saved = save_quantised(source, tmp_path / "model", skipped, awq(32))
    harness = agrees(saved)
    weight = harness.model.layers[0].attention.recurrence.in_proj.weight
    assert isinstance(weight, StackedWeight)
    assert [isinstance(part, Int4Weight) for part in weight.parts] == [True, False]


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "olmo_hybrid", "lfm2", "lfm3", "granite_hybrid"])
def test_quantised_at_load(family: str, tiny_model_path: PathOf) -> None:
    """The rates of a delta net are kept: their rounding would add up over the tokens."""
    path, tokens = tiny_model_path(family), prompt(30)
    spec = read_spec(path)
    model = load_model(path, spec, CPU, torch.float32, quantization="int8", cpu_weights="exact")
    _, logits = ModelHarness(model).prefill(tokens)
    wanted = reference_logits(reference(path), tokens)
    assert (logits - wanted).norm() < 0.2 * wanted.norm()
    predicted = resident_bytes(path, spec, CPU, torch.float32, quantization="int8", cpu_weights="exact")
    assert held_bytes(model) == predicted
    if family.startswith(("qwen", "olmo")):
        weight = model.layers[0].attention.recurrence.in_proj.weight
        assert isinstance(weight, StackedWeight)
        assert isinstance(weight.parts[-1], torch.Tensor)
        assert not isinstance(weight.parts[0], torch.Tensor)


@pytest.mark.parametrize(
    "family", ["lfm2", "lfm3", "qwen3_5", "qwen3_next", "olmo_hybrid", "granite_hybrid", "nemotron_h"]
)
def test_adapters_of_recurrent_layers(family: str, tiny_model_path: PathOf, tmp_path: Path) -> None:
    path, tokens = tiny_model_path(family), prompt(40)
    adapter = make_tiny_adapter(tmp_path / "adapter", path)
    model = load_model(path, read_spec(path), CPU, torch.float32, lora=LoraLimits(1, 8))
    put_lora(open_lora(adapter), model.lora, 0)
    _, logits = ModelHarness(model).prefill(tokens, 16, adapter=0)
    assert_close(logits, reference_logits(merged(path, adapter), tokens))


# ---- fields of the families ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("granite_hybrid", {"time_step_limit": (0.1, 0.5)}),
        ("falcon_h1", {"mamba_rms_norm": False}),
        ("falcon_h1", {"mamba_norm_before_gate": True}),
        ("falcon_h1", {"mamba_n_groups": 1, "mamba_conv_bias": False}),
        ("nemotron_h", {"moe_latent_size": 24}),
        ("nemotron_h", {"use_conv_bias": False, "n_group": 1, "topk_group": 1}),
        ("lfm2", {"block_auto_adjust_ff_dim": False, "conv_L_cache": 2}),
        ("lfm2", {"intermediate_size": 100, "block_ffn_dim_multiplier": 1.7, "conv_bias": True}),
        ("qwen3_5", {"linear_num_value_heads": 6, "attention_bias": True}),
        ("qwen3_next", {"linear_num_value_heads": 6, "norm_topk_prob": False}),
        ("qwen3_5", {"linear_num_value_heads": 2, "layer_types": None, "full_attention_interval": 2}),
        ("olmo_hybrid", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
        ("olmo_hybrid", {"linear_allow_neg_eigval": False, "attention_bias": True}),
        ("olmo_hybrid", {"linear_num_key_heads": 4, "linear_key_head_dim": None, "linear_value_head_dim": None}),
        ("lfm3", {"use_attention_gate": False, "conv_bias": True, "tie_word_embeddings": False}),
        ("lfm3", {"layer_types": None, "num_hidden_layers": 6}),
    ],
)
def test_fields(family: str, fields: dict[str, Any], tmp_path: Path) -> None:
    path, tokens = make_tiny_model(tmp_path, family, **fields), prompt(35)
    _, logits = Harness(path).prefill(tokens)
    assert_close(logits, reference_logits(load_reference(path), tokens))


def test_the_text_part_of_a_vision_model(tiny_model_path: PathOf, tmp_path: Path) -> None:
    """Under model.language_model., beside a vision part and multi-token prediction layers that are not run."""
    source = tiny_model_path("qwen3_5")
    path = tmp_path / "vision"
    shutil.copytree(source, path)
    text = json.loads((source / "config.json").read_text())
    names = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"}
    (path / "config.json").write_text(json.dumps({**names, "text_config": text, "vision_config": {}}))
    bare = {
        name.replace("model.language_model.", "model."): t for name, t in load_file(path / "model.safetensors").items()
    }
    tensors = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in bare.items()}
    extra = {"model.visual.blocks.0.attn.qkv.weight": torch.ones(2, 2), "mtp.fc.weight": torch.ones(2, 2)}
    save_file({**tensors, **extra}, path / "model.safetensors")
    tokens = prompt(30)
    assert_close(Harness(path).prefill(tokens)[1], Harness(source).prefill(tokens)[1])


LAYERS = ["linear_attention", "full_attention"]


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"layer_types": ["conv", "full_attention"]}, UnsupportedModel, "Layer 0 is of the kind 'conv'"),
        ({"layer_types": ["linear_attention"] * 2}, UnsupportedModel, "without attention"),
        ({"layer_types": LAYERS[:1]}, CorruptModel, "describes 1 layers"),
        ({"layer_types": 3}, CorruptModel, "describes its layers as 3"),
        ({"linear_num_value_heads": 5}, CorruptModel, "5 recurrent heads cannot share 2"),
        ({"linear_key_head_dim": 0}, CorruptModel, "linear_key_head_dim = 0"),
    ],
)
def test_configs_that_are_refused(fields: dict[str, Any], error: type[LocalLLMError], message: str) -> None:
    config = {
        "architectures": ["Qwen3_5ForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 512, "layer_types": LAYERS, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }  # fmt: skip
    with pytest.raises(error, match=message):
        spec_of_config({**config, **fields})


@pytest.mark.parametrize("name", ["A_log", "dt_bias", "conv1d.weight", "norm.weight"])
def test_a_missing_state_tensor_is_named(name: str, tiny_model_path: PathOf, tmp_path: Path) -> None:
    shutil.copytree(tiny_model_path("qwen3_next"), tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    del tensors[f"model.layers.2.linear_attn.{name}"]
    save_file(tensors, file)
    with pytest.raises(CorruptModel, match=rf"lacks model\.layers\.2\.linear_attn\.{name}"):
        load_model(tmp_path / "model", read_spec(tmp_path / "model"), CPU, torch.float32)


# ---- sizes -----------------------------------------------------------------------------------------------------------


def test_the_sizes_of_qwen3_6_27b() -> None:
    """As its config describes it: 48 and 16 layers, 149.6 MiB of state in fp32, 64 KiB of K and V per token."""
    spec = spec_of_config({
        "architectures": ["Qwen3_5ForConditionalGeneration"], "tie_word_embeddings": False,
        "text_config": {
            "hidden_size": 5120, "intermediate_size": 17_408, "num_hidden_layers": 64, "num_attention_heads": 24,
            "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 248_320, "max_position_embeddings": 262_144,
            "full_attention_interval": 4, "linear_num_value_heads": 48, "linear_num_key_heads": 16, "dtype": "bfloat16",
            "rope_parameters": {"rope_theta": 10_000_000, "partial_rotary_factor": 0.25, "rope_type": "default",
                                "mrope_interleaved": True, "mrope_section": [11, 11, 10]},
        },
    })  # fmt: skip
    assert [len(spec.recurrent_layers), spec.num_layers - len(spec.recurrent_layers)] == [48, 16]
    assert round(state_bytes(spec, "float32") / 2**20, 1) == 149.6
    assert kv_bytes_per_token(spec, "bfloat16") == 64 * 1024
    assert spec.rope.rotary_dim == 64
    assert kv_bytes_per_token(replace(spec, layer_kinds=()), "bfloat16") == 4 * 64 * 1024


def test_fields_of_published_configs() -> None:
    """Names and letters that published checkpoints have, and transformers 5 no longer writes."""
    lfm2 = spec_of_config({
        "architectures": ["Lfm2ForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
        "vocab_size": 65_536, "block_ff_dim": 12_288, "tie_embedding": True, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    })  # fmt: skip
    assert (lfm2.intermediate_size, lfm2.tie_word_embeddings) == (8192, True)
    assert [layer for layer in range(16) if lfm2.has_attention(layer)] == [2, 5, 8, 10, 12, 14]
    nemotron = spec_of_config({
        "architectures": ["NemotronHForCausalLM"], "hidden_size": 2688, "num_attention_heads": 32, "vocab_size": 512,
        "num_key_value_heads": 2, "hybrid_override_pattern": "MEM*-", "num_hidden_layers": 52, "n_routed_experts": 128,
        "num_experts_per_tok": 6, "time_step_limit": [0.0, float("inf")], "layer_norm_epsilon": 1e-5,
    })  # fmt: skip
    assert nemotron.layer_kinds == ("recurrent", "moe", "recurrent", "attention", "mlp")
    assert nemotron.mixture is not None
    assert nemotron.mixture.layers == (False, True, False, False, False)
    with pytest.raises(UnsupportedModel, match="Layer 1 is of the kind 'X'"):
        spec_of_config({
            "architectures": ["NemotronHForCausalLM"], "hidden_size": 64, "num_attention_heads": 2, "vocab_size": 512,
            "hybrid_override_pattern": "MX*",
        })  # fmt: skip
