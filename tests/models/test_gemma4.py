"""Gemma 3n and 4 beyond what every family is held to: configs, repositories as published, sizes, refusals."""

import json
import math
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from localllm.config.settings import EngineConfig
from localllm.errors import ConfigError, CorruptModel, UnsupportedModel, UnsupportedOption
from localllm.machine.hardware import Gpu, Hardware
from localllm.models.fit import kv_bytes_per_token, plan_memory
from localllm.models.layers.rotary import rope_table
from localllm.models.loader import load_model, resident_bytes
from localllm.models.read_spec import read_spec, spec_of_config
from localllm.models.spec.model_spec import ModelSpec, group_of_layers, kv_groups
from localllm.models.spec.shard import shards_of
from localllm.models.weights.parameters import held_bytes
from tests.models.harness import CPU, Harness, assert_close, prompt, reference_logits
from tests.models.sharded import STEPS, ShardedModel, even_shards, load_whole, run
from tests.tiny import load_reference, make_tiny_model

PathOf = Callable[[str], Path]
GIB = 1024**3
NO_GPU = Hardware((), "CPU", 8, 32 * GIB, 24 * GIB)
TWO_GPUS = replace(NO_GPU, gpus=tuple(Gpu(i, "Card", 24 * GIB, 23 * GIB, (8, 9), "570") for i in range(2)))
SLIDING, FULL = "sliding_attention", "full_attention"
DENSE_31B: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"], "vocab_size": 262_144, "hidden_size": 5376, "intermediate_size": 21_504,
    "num_hidden_layers": 60, "num_attention_heads": 32, "num_key_value_heads": 16, "num_global_key_value_heads": 4,
    "head_dim": 256, "global_head_dim": 512, "sliding_window": 1024, "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0, "max_position_embeddings": 262_144,
    "layer_types": ([SLIDING] * 5 + [FULL]) * 10, "dtype": "bfloat16",
}  # fmt: skip
MIXTURE_26B: dict[str, Any] = {
    **DENSE_31B, "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30, "num_attention_heads": 16,
    "num_key_value_heads": 8, "num_global_key_value_heads": 2, "layer_types": ([SLIDING] * 5 + [FULL]) * 5,
    "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704,
}  # fmt: skip
SMALL_E4B: dict[str, Any] = {
    **DENSE_31B, "hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 42, "num_attention_heads": 8,
    "num_key_value_heads": 2, "num_global_key_value_heads": None, "sliding_window": 512, "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144, "num_kv_shared_layers": 18,
    "layer_types": ([SLIDING] * 5 + [FULL]) * 7,
}  # fmt: skip


def plan(spec: ModelSpec, hardware: Hardware = NO_GPU, **asked: Any) -> Any:
    return plan_memory(EngineConfig(**asked), spec, 2 * GIB, hardware)


# ---- configs ---------------------------------------------------------------------------------------------------------


def test_the_two_spellings_of_the_full_layers_heads_are_one_spec() -> None:
    """global_head_dim as published; overrides per layer as transformers 5.23 writes them."""
    without = {n: v for n, v in DENSE_31B.items() if n not in ("global_head_dim", "num_global_key_value_heads")}
    full = [index for index, kind in enumerate(DENSE_31B["layer_types"]) if kind == FULL]
    for name in (str, "{:02}".format):  # transformers pads numbers to one width
        overrides = {name(index): {"head_dim": 512, "num_key_value_heads": 4} for index in full}
        assert spec_of_config(DENSE_31B) == spec_of_config({**without, "per_layer_config": overrides})
    assert spec_of_config(DENSE_31B).layer_kv_shapes[4:6] == ((16, 256), (4, 512))


def test_global_kv_heads_apply_only_where_values_are_made_from_keys() -> None:
    """As transformers reads a config without overrides per layer."""
    spec = spec_of_config({**DENSE_31B, "attention_k_eq_v": False})
    assert spec.layer_kv_shapes[5] == (16, 512)
    assert not spec.layer_values_from_keys


def test_layers_read_the_last_layer_of_their_kind_that_has_keys() -> None:
    spec = spec_of_config(SMALL_E4B)
    assert spec.kv_source[:24] == tuple(range(24))
    assert spec.kv_source[24:30] == (22, 22, 22, 22, 22, 23)
    assert [group.name for group in kv_groups(spec)] == ["window_512", "full"]
    assert group_of_layers(spec)[24:30] == (0, 0, 0, 0, 0, 1)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"use_bidirectional_attention": "all"}, UnsupportedModel),
        ({"per_layer_config": {"5": {"head_dim": 512}}}, UnsupportedModel),
        ({"per_layer_config": {"5": {"intermediate_size": 8}}}, UnsupportedModel),
        ({"per_layer_config": [1]}, CorruptModel),
        ({"num_kv_shared_layers": 60}, CorruptModel),
        ({"num_kv_shared_layers": 57}, CorruptModel),
        ({"global_head_dim": 0}, CorruptModel),
        ({"enable_moe_block": True, "num_experts": 4, "top_k_experts": None}, CorruptModel),
        ({"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": None}, CorruptModel),
    ],
)
def test_a_contradictory_config_is_refused(changes: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        spec_of_config({**DENSE_31B, **changes})


def test_a_quarter_of_the_frequencies_turn_and_pairs_are_half_a_head_apart() -> None:
    rope = spec_of_config(DENSE_31B).rope
    cos, sin = rope_table(rope, 3).chunk(2, dim=-1)
    assert cos.shape == (3, 256)
    wanted = [math.cos(2 * 1e6 ** (-2 * i / 512)) for i in range(64)] + [1.0] * 192
    torch.testing.assert_close(cos[2], torch.tensor(wanted), rtol=1e-6, atol=1e-6)
    assert not sin[:, 64:].any()
    assert sin[1, 63] > 0


# ---- repositories ----------------------------------------------------------------------------------------------------


def published(source: Path, path: Path, prefix: str, architecture: str) -> Path:
    """The model under the names of a repository with parts for images and sound, and K and V that no layer reads."""
    shutil.copytree(source, path)
    config = json.loads((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    text = {name: value for name, value in config.items() if name not in ("architectures", "per_layer_config")}
    if "per_layer_config" in config:
        text["global_head_dim"] = 32
    outer = {"architectures": [architecture], "text_config": text, "vision_config": {}, "audio_config": None}
    (path / "config.json").write_text(json.dumps(outer))
    head = {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()}
    last = f"{prefix}layers.{config['num_hidden_layers'] - 1}.self_attn"
    unread = {f"{last}.{name}": torch.zeros(4, 4) for name in ("k_proj.weight", "v_proj.weight", "k_norm.weight")}
    others = ("vision_tower.patch.weight", "embed_vision.weight", "audio_tower.conv.weight", "embed_audio.weight")
    save_file({**head, **unread, **{f"model.{name}": torch.zeros(2) for name in others}}, path / "model.safetensors")
    return path


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
@pytest.mark.parametrize(
    ("family", "architecture"),
    [("gemma4", "Gemma4ForConditionalGeneration"), ("gemma3n", "Gemma3nForConditionalGeneration")],
)
def test_a_repository_as_published(
    family: str, architecture: str, prefix: str, tiny_model_path: PathOf, tmp_path: Path
) -> None:
    source, tokens = tiny_model_path(family), prompt(30)
    path = published(source, tmp_path / "published", prefix, architecture)
    harness = Harness(path)
    assert_close(harness.prefill(tokens)[1], reference_logits(load_reference(source), tokens))
    assert not harness.model.unused_tensors


def test_keys_of_a_layer_that_reads_its_own_are_never_ignored(tiny_model_path: PathOf, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(tiny_model_path("gemma4_moe"), path)
    tensors = load_file(path / "model.safetensors")
    save_file({**tensors, "model.layers.2.self_attn.v_proj.weight": torch.zeros(32, 64)}, path / "model.safetensors")
    with pytest.raises(CorruptModel, match=r"layers\.2\.self_attn\.v_proj"):
        load_model(path, read_spec(path), CPU, torch.float32)


@pytest.mark.parametrize("nested", [False, True])
def test_the_unified_models_text(nested: bool, tiny_model_path: PathOf, tmp_path: Path) -> None:
    """gemma4_unified computes as gemma4 without per-layer embeddings and experts."""
    source, path, tokens = tmp_path / "source", tmp_path / "unified", prompt(40)
    make_tiny_model(source, "gemma4", hidden_size_per_layer_input=0, num_kv_shared_layers=0, attention_k_eq_v=True)
    shutil.copytree(source, path)
    config = json.loads((source / "config.json").read_text())
    kept = {name: value for name, value in config.items() if "per_layer_input" not in name}
    outer = {"architectures": ["Gemma4UnifiedForConditionalGeneration"], "text_config": kept}
    flat = {**kept, "architectures": ["Gemma4UnifiedForCausalLM"]}
    (path / "config.json").write_text(json.dumps(outer if nested else flat))
    assert_close(Harness(path).prefill(tokens)[1], reference_logits(load_reference(source), tokens))


def test_tokens_beyond_the_per_layer_table_use_its_first_row(tiny_model_path: PathOf) -> None:
    path, tokens = tiny_model_path("gemma3n"), [5, 510, 511, 9, 508, 507]  # the table has 508 rows
    assert_close(Harness(path).prefill(tokens)[1], reference_logits(load_reference(path), tokens))


# ---- sizes -----------------------------------------------------------------------------------------------------------


def test_keys_and_values_of_31b() -> None:
    """50 windowed layers of 16 heads of 256, 10 full ones of 4 heads of 512."""
    window, full = kv_groups(spec_of_config(DENSE_31B))
    assert (window.window, window.num_kv_heads, window.head_dim, len(window.layers)) == (1024, 16, 256, 50)
    assert (full.window, full.num_kv_heads, full.head_dim, len(full.layers)) == (None, 4, 512, 10)
    assert (full.numbers_per_token, window.numbers_per_token) == (40 * 1024, 400 * 1024)


def test_keys_and_values_of_26b_and_e4b() -> None:
    window, full = kv_groups(spec_of_config(MIXTURE_26B))
    assert (full.numbers_per_token, window.numbers_per_token) == (10 * 1024, 100 * 1024)
    window, full = kv_groups(spec_of_config(SMALL_E4B))  # 18 of 42 layers keep none
    assert (len(window.layers), len(full.layers)) == (20, 4)
    assert (full.numbers_per_token, window.numbers_per_token) == (4 * 2 * 2 * 512, 20 * 2 * 2 * 256)


def write_header(path: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> Path:
    """A checkpoint of bfloat16 tensors whose data is a hole in the file."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    entries, at = {}, 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    header = json.dumps(entries).encode()
    with (path / "model.safetensors").open("wb") as stream:
        stream.write(struct.pack("<Q", len(header)) + header)
        stream.truncate(8 + len(header) + at)
    return path


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a published checkpoint, from the architecture's description."""
    hidden, width, experts = config["hidden_size"], config["intermediate_size"], config.get("num_experts")
    heads, ple = config["num_attention_heads"], config["hidden_size_per_layer_input"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if ple:
        total = config["num_hidden_layers"] * ple
        shapes["model.embed_tokens_per_layer.weight"] = (config["vocab_size"], total)
        shapes["model.per_layer_model_projection.weight"] = (total, hidden)
        shapes["model.per_layer_projection_norm.weight"] = (ple,)
    for layer, kind in enumerate(config["layer_types"]):
        prefix, full = f"model.layers.{layer}.", kind == FULL
        dim = config["global_head_dim" if full else "head_dim"]
        kv = (full and config["num_global_key_value_heads"]) or config["num_key_value_heads"]
        own: dict[str, tuple[int, ...]] = {"layer_scalar": (1,)}
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            own[f"{name}_layernorm.weight"] = (hidden,)
        own |= {"self_attn.q_proj.weight": (heads * dim, hidden), "self_attn.o_proj.weight": (hidden, heads * dim)}
        own["self_attn.q_norm.weight"] = (dim,)
        if layer < config["num_hidden_layers"] - config.get("num_kv_shared_layers", 0):
            own |= {"self_attn.k_proj.weight": (kv * dim, hidden), "self_attn.k_norm.weight": (dim,)}
            if not (full and config["attention_k_eq_v"]):
                own["self_attn.v_proj.weight"] = (kv * dim, hidden)
        own |= {f"mlp.{name}_proj.weight": (width, hidden) for name in ("gate", "up")}
        own["mlp.down_proj.weight"] = (hidden, width)
        if experts:
            size = config["moe_intermediate_size"]
            own |= {"experts.gate_up_proj": (experts, 2 * size, hidden), "experts.down_proj": (experts, hidden, size)}
            own |= {"router.proj.weight": (experts, hidden), "router.scale": (hidden,)}
            own["router.per_expert_scale"] = (experts,)
            for name in ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2"):
                own[f"{name}.weight"] = (hidden,)
        if ple:
            own |= {"per_layer_input_gate.weight": (ple, hidden), "per_layer_projection.weight": (hidden, ple)}
            own["post_per_layer_input_norm.weight"] = (hidden,)
        shapes |= {prefix + name: shape for name, shape in own.items()}
    return shapes


@pytest.mark.parametrize(
    ("config", "billions"), [(DENSE_31B, 30.7), (MIXTURE_26B, 25.2), (SMALL_E4B, 7.5)], ids=["31B", "26B-A4B", "E4B"]
)
def test_the_predicted_weights_are_the_architectures(config: dict[str, Any], billions: float, tmp_path: Path) -> None:
    shapes = shapes_of(config)
    numbers = sum(map(math.prod, shapes.values()))
    assert numbers == pytest.approx(billions * 1e9, rel=0.01)
    path = write_header(tmp_path / "model", config, shapes)
    spec = read_spec(path)
    found = resident_bytes(path, spec, torch.device("cuda"), torch.bfloat16, max_model_len=8192)
    tables = 8192 * (512 + 256) * 4
    assert found == pytest.approx(2 * numbers + tables, rel=0.001)


@pytest.mark.parametrize("context", [32_768, 262_144])
def test_the_plan_of_31b_bounds_the_windowed_layers(context: int, tmp_path: Path) -> None:
    """80 KiB a token in full layers; in windowed ones 800 KiB a token of 16 windows of 1,024 and one step."""
    large = replace(NO_GPU, gpus=(Gpu(0, "Card", 141 * GIB, 139 * GIB, (9, 0), "570"),))
    asked = EngineConfig(max_model_len=context, max_num_seqs=8)
    made = plan_memory(asked, spec_of_config(DENSE_31B), 61_400_000_000, large)
    window, full = (count * made.block_size for count in made.num_blocks)
    assert made.kv_bytes == (window * 800 + full * 80) * 1024
    assert window <= 16 * (1024 + 2 * made.block_size) + made.max_num_batched_tokens + made.block_size
    assert full * 80 * 1024 > 0.7 * made.kv_bytes


def test_fit_of_a_model_whose_layers_share_keys(tiny_model_path: PathOf) -> None:
    """What the plan says a block takes is what the cache allocates; a layer that reads another's takes nothing."""
    spec = read_spec(tiny_model_path("gemma4"))
    assert kv_bytes_per_token(spec, "float32") == 4 * 2 * (2 * 2 * 16 + 1 * 2 * 32)


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_given_embeddings_are_refused_where_layers_need_token_ids(tiny_model_path: PathOf) -> None:
    for family in ("gemma3n", "gemma4"):
        with pytest.raises(UnsupportedOption, match="enable-prompt-embeds"):
            plan(read_spec(tiny_model_path(family)), enable_prompt_embeds=True)
    assert plan(read_spec(tiny_model_path("gemma4_moe")), enable_prompt_embeds=True)


@pytest.mark.parametrize("family", ["gemma3n", "gemma4"])
def test_stages_are_cut_where_no_layer_reads_keys_of_an_earlier_one(family: str, tiny_model_path: PathOf) -> None:
    """In these models, only behind the first layer; without a flag they are not spread over stages."""
    shared, apart = read_spec(tiny_model_path(family)), read_spec(tiny_model_path("gemma4_moe"))
    ranks = plan(shared, TWO_GPUS, pipeline_parallel_size=2).ranks
    assert [rank.shard.layers for rank in ranks] == [range(1), range(1, shared.num_layers)]
    with pytest.raises(ConfigError, match="a stage can begin at layer 1"):
        plan(shared, TWO_GPUS, pipeline_parallel_size=2, pipeline_layer_partition=(2, shared.num_layers - 2))
    assert len(plan(apart, TWO_GPUS, pipeline_parallel_size=2).ranks) == 2
    assert len(plan(shared, TWO_GPUS, tensor_parallel_size=2).ranks) == 2
    assert not plan(shared, TWO_GPUS).ranks


SHAPES = {
    "4 KV heads in windowed layers, 2 in full ones": (4, 2, (2, 4, 8), (3, 6)),
    "4 and 1": (4, 1, (2, 3, 4, 8), (5,)),
    "1 and 1": (1, 1, (3, 8), (9,)),
}
"""Those of windowed and of full layers, and which numbers of ranks work for 8 heads."""


@pytest.mark.parametrize("kind", SHAPES)
def test_shards_of_layers_with_unlike_kv_heads(kind: str, tmp_path: Path) -> None:
    """A rank's query heads are in whole groups of every layer, or in a part of one; KV heads are repeated where ranks
    outnumber them, in one kind of layer before the other."""
    windowed, full, works, refused = SHAPES[kind]
    heads = {"num_attention_heads": 8, "num_key_value_heads": windowed, "num_global_key_value_heads": full}
    path = make_tiny_model(tmp_path / "model", "gemma4_moe", **heads)
    spec, tokens = read_spec(path), prompt(sum(STEPS))
    assert len(set(spec.layer_kv_shapes)) == 2
    wanted = run([load_whole(path)], tokens)
    assert wanted is not None
    for size in works:
        shards = even_shards(path, size)
        assert shards is not None, size
        model = ShardedModel(path, shards)
        assert_close(model.logits(tokens), wanted)
        for shard, own in zip(shards, model.stages[0], strict=True):
            assert held_bytes(own) == resident_bytes(path, spec, CPU, torch.float32, shard=shard)
    assert [even_shards(path, size) for size in refused] == [None] * len(refused)


@pytest.mark.parametrize("cut", [1, 2])
def test_stages_of_layers_with_unlike_heads(cut: int, tiny_model_path: PathOf) -> None:
    path, tokens = tiny_model_path("gemma4_moe"), prompt(sum(STEPS))
    spec = read_spec(path)
    stages = [shards_of(spec, [spec.num_kv_heads], layers=layers) for layers in (range(cut), range(cut, 3))]
    assert_close(ShardedModel(path, *stages).logits(tokens), reference_logits(load_reference(path), tokens))


# ---- types -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gemma3n", "gemma4", "gemma4_moe"])
def test_bfloat16_is_near_fp32(family: str, tiny_model_path: PathOf) -> None:
    """The order of roundings is not transformers' own, but none of them is lost."""
    path, tokens = tiny_model_path(family), prompt(30)
    wanted = reference_logits(load_reference(path), tokens)
    ours: Tensor = Harness(path, dtype=torch.bfloat16).prefill(tokens)[1]
    error = (ours - wanted).pow(2).mean().sqrt() / wanted.std()
    assert error < 0.2
