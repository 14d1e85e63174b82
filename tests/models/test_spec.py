"""config.json in the styles the field has used, and the ways it can be wrong."""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.errors import CorruptModel, ModelNotFound, UnsupportedModel
from localllm.models.families.registry import FAMILY_OF
from localllm.models.read_spec import read_spec, spec_of_config, weights_bytes
from localllm.models.spec.model_spec import ModelSpec, kv_groups, kv_numbers_per_token
from localllm.models.spec.shard import divides_by_layers
from tests.draws import draws
from tests.tiny import FAMILIES, class_of, tiny_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 256,
    "rope_theta": 500_000.0, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def spec_of(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_spec(folder)


def test_old_style_llama(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, LLAMA)
    assert (spec.head_dim, spec.rope.theta, spec.rope.rotary_dim, spec.dtype) == (16, 500_000.0, 16, "bfloat16")
    assert not spec.tie_word_embeddings
    assert (spec.bos_token_id, spec.eos_token_ids) == (1, (2,))
    assert 2 * kv_numbers_per_token(spec) == 2 * 2 * 2 * 16 * 2


def test_new_style_and_old_style_say_the_same(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64}  # fmt: skip
    old = spec_of(tmp_path, {**LLAMA, "rope_scaling": scaling})
    config = {name: value for name, value in LLAMA.items() if name not in ("rope_theta", "torch_dtype")}
    new = spec_of(tmp_path, {**config, "dtype": "bfloat16", "rope_parameters": {**scaling, "rope_theta": 500_000.0}})
    assert (new.rope.theta, new.rope.variant, new.dtype) == (old.rope.theta, "llama3", old.dtype)
    assert new.max_position == old.max_position == 256


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_read_as_transformers_reads_it(family: str, tiny_model_path: Callable[[str], Path]) -> None:
    spec, config = read_spec(tiny_model_path(family)), tiny_config(family)
    if spec.layer_kv_shapes:
        config.allow_global_per_layer_attribute_access = True  # it means the layers that have no override
    assert spec.architecture == json.loads((tiny_model_path(family) / "config.json").read_text())["architectures"][0]
    if spec.latent is None:
        counts = {heads for heads, _ in spec.layer_kv_shapes} or {spec.num_kv_heads}
        assert getattr(config, "num_key_value_heads", spec.num_kv_heads) in counts
        assert spec.num_kv_heads == max(counts)
        assert spec.head_dim == (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    assert spec.tie_word_embeddings == config.tie_word_embeddings
    epsilons = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
    assert spec.norm.eps == next((getattr(config, name) for name in epsilons if getattr(config, name, None)), 1e-5)
    layer_types = getattr(config, "layer_types", None)
    if layer_types:
        assert (spec.layer_is_windowed or (False,) * spec.num_layers) == tuple(
            kind in ("sliding_attention", "chunked_attention") for kind in layer_types
        )
    assert weights_bytes(tiny_model_path(family)) > 0


def test_layers_of_cwm_without_a_list_of_their_kinds(tiny_model_path: Callable[[str], Path]) -> None:
    config = json.loads((tiny_model_path("cwm") / "config.json").read_text()) | {"num_hidden_layers": 5}
    del config["layer_types"]
    assert spec_of_config(config).layer_is_windowed == (False, True, True, True, False)
    assert spec_of_config({**config, "layer_types": ["full_attention"] * 5}).sliding_window is None


def test_an_indexer_may_be_shared_by_layers(tiny_model_path: Callable[[str], Path], tmp_path: Path) -> None:
    path = tiny_model_path("glm_moe_dsa")
    config, spec = json.loads((path / "config.json").read_text()), read_spec(path)
    assert (spec.max_position, spec.context_limit) == (config["max_position_embeddings"], "")
    assert [(group.layers, group.index_size) for group in kv_groups(spec)] == [((0, 2), 32), ((1,), 0)]
    assert not divides_by_layers(spec)
    kinds = {"indexer_types": None, "num_hidden_layers": 6, "mlp_layer_types": ["dense"] * 6}
    spaced = spec_of(tmp_path, {**config, **kinds, "index_topk_freq": 3})
    assert spaced.latent is not None
    assert spaced.latent.index is not None
    assert spaced.latent.index.layers == (True, True, False, False, True, False)
    for wrong in ({"index_topk_pattern": "FS"}, {"index_topk_pattern": "SFFFFF"}, {"q_lora_rank": None}):
        with pytest.raises(CorruptModel, match="indexer"):
            spec_of(tmp_path, {**config, **kinds, **wrong})


def test_without_its_indexer_a_context_ends_where_the_indexer_begins_to_choose(
    tiny_model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    config = json.loads((tiny_model_path("deepseek_v32") / "config.json").read_text())
    spec = spec_of(tmp_path, {**config, "index_n_heads": 0})
    assert spec.max_position == 24 < config["max_position_embeddings"]
    assert "Beyond 24 tokens" in spec.context_limit
    short = spec_of(tmp_path, {**config, "index_n_heads": 0, "max_position_embeddings": 16})
    assert (short.max_position, short.context_limit) == (16, "")


def test_llama4_attends_within_chunks_where_it_rotates(tiny_model_path: Callable[[str], Path], tmp_path: Path) -> None:
    path = tiny_model_path("llama4")
    config = json.loads((path / "config.json").read_text())
    spec = read_spec(path)
    assert (spec.max_position, spec.layer_has_rope) == (config["max_position_embeddings"], (True, True, True, False))
    assert [(group.name, group.window) for group in kv_groups(spec)] == [("chunk_40", -40), ("full", None)]
    assert spec.growth_of(rotated=True) is None
    assert spec.growth_of(rotated=False) == (0.1, 24, 1, False)
    assert spec_of(tmp_path, {**config, "attn_temperature_tuning": False}).query_growth is None
    mobile = {"no_rope_layers": [1] * 4, "layer_types": ["full_attention"] * 4, "interleave_moe_layer_step": 0}
    plain = spec_of(tmp_path, {**config, **mobile})  # MobileLLM
    assert (plain.mixture, plain.layer_has_rope, plain.query_growth) == (None, (True,) * 4, None)
    assert [group.name for group in kv_groups(plain)] == ["full"]
    with pytest.raises(UnsupportedModel, match="sliding_attention"):
        spec_of(tmp_path, {**config, "layer_types": ["sliding_attention"] * 4})


HUNYUAN = {
    "architectures": ["HunYuanMoEV1ForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "num_experts": 8,
    "moe_topk": [3, 3], "moe_intermediate_size": [40, 40], "num_shared_expert": [1, 1], "moe_layer_num_skipped": 0,
    "max_position_embeddings": 32768, "rope_theta": 10_000.0, "use_qk_norm": True, "use_cla": False,
    "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}, "torch_dtype": "bfloat16",
}  # fmt: skip


def test_hunyuan_as_published(tmp_path: Path) -> None:
    """Lists with one value per layer, and a rotary base that `alpha` scales, for every length alike."""
    spec = spec_of(tmp_path, HUNYUAN)
    assert spec.mixture is not None
    assert (spec.mixture.num_experts, spec.mixture.top_k) == (8, 3)
    assert (spec.mixture.intermediate_size, spec.mixture.shared_size) == (40, 96)
    assert (spec.rope.variant, spec.max_position) == ("default", 32768)
    assert spec.rope.theta == pytest.approx(10_000 * 1000 ** (16 / 14))
    for changes, message in (({"use_cla": True}, "use_cla"), ({"moe_topk": [3, 4]}, "differ in moe_topk")):
        with pytest.raises(UnsupportedModel, match=message):
            spec_of(tmp_path, {**HUNYUAN, **changes})


def test_gemma3_old_style(tmp_path: Path) -> None:
    """As google/gemma-3-1b-it is published: one pattern number, a local rope base, most flags left out."""
    config = {
        "architectures": ["Gemma3ForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 7,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 512,
        "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 32768, "query_pre_attn_scalar": 256,
        "rope_theta": 1_000_000, "rope_local_base_freq": 10_000, "rope_scaling": None, "sliding_window": 512,
        "sliding_window_pattern": 6, "attn_logit_softcapping": None, "final_logit_softcapping": None,
        "eos_token_id": [1, 106], "torch_dtype": "bfloat16",
    }  # fmt: skip
    spec = spec_of(tmp_path, config)
    assert spec.layer_is_windowed == (True, True, True, True, True, False, True)
    assert spec.rope.theta == 1_000_000
    assert spec.local_rope is not None
    assert spec.local_rope.theta == 10_000
    assert spec.tie_word_embeddings
    assert (spec.attention_scale, spec.embedding_scale, spec.eos_token_ids) == (1 / 16, 8.0, (1, 106))


def test_gemma2_old_style_slides_every_other_layer_and_caps(tmp_path: Path) -> None:
    config = {name: value for name, value in LLAMA.items() if name not in ("torch_dtype", "rope_theta")}
    spec = spec_of(tmp_path, {**config, "architectures": ["Gemma2ForCausalLM"], "num_hidden_layers": 3})
    assert spec.layer_is_windowed == (True, False, True)
    assert spec.local_rope is None
    assert (spec.attention_softcap, spec.final_softcap, spec.sliding_window) == (50.0, 30.0, 4096)


@pytest.mark.parametrize(
    ("changes", "windowed"),
    [
        ({"use_sliding_window": False, "sliding_window": 32768}, ()),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, (False, True)),
    ],
)
def test_qwen2_window(changes: dict[str, Any], windowed: tuple[bool, ...], tmp_path: Path) -> None:
    spec = spec_of(tmp_path, {**LLAMA, "architectures": ["Qwen2ForCausalLM"], **changes})
    assert spec.layer_is_windowed == windowed
    assert spec.attention_bias
    assert not spec.attention_out_bias


def test_mistral_without_a_window(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, {**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": None})
    assert not any(spec.layer_is_windowed)


def test_phi3_su_is_longrope(tmp_path: Path) -> None:
    scaling = {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    config = {**LLAMA, "architectures": ["Phi3ForCausalLM"], "rope_scaling": scaling, "sliding_window": 2047,
              "original_max_position_embeddings": 64}  # fmt: skip
    spec = spec_of(tmp_path, config)
    assert spec.rope.variant == "longrope"
    assert spec.rope.parameters["original_max_position_embeddings"] == 64
    assert spec.layer_is_windowed == (True, True)


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"type": "dynamic", "factor": 2.0}, 512),
        ({"type": "linear", "factor": 2.0}, 256),
    ],
)
def test_context_length(scaling: dict[str, Any], length: int, tmp_path: Path) -> None:
    assert spec_of(tmp_path, {**LLAMA, "rope_scaling": scaling}).max_position == length


def test_generation_config_wins_and_gives_defaults(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, LLAMA, {"eos_token_id": [7, 8], "temperature": 0.6, "top_k": 20, "do_sample": True,
                                     "transformers_version": "4.51.0", "top_p": None})  # fmt: skip
    assert spec.eos_token_ids == (7, 8)
    assert spec.generation_defaults == {"temperature": 0.6, "top_k": 20, "do_sample": True}


def test_ends_behind_the_vocabulary_are_left_out(tmp_path: Path) -> None:
    assert spec_of(tmp_path, {**LLAMA, "eos_token_id": [2, 512, 151_645]}).eos_token_ids == (2,)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"architectures": None}, UnsupportedModel, "names no architecture"),
    ({"architectures": []}, UnsupportedModel, "names no architecture"),
    ({"architectures": ["MysteryForCausalLM"]}, UnsupportedModel, "transformers does not know"),
    ({"hidden_size": None}, CorruptModel, "lacks hidden_size"),
    ({"hidden_size": "64"}, CorruptModel, "hidden_size = '64'"),
    ({"hidden_size": -64}, CorruptModel, "hidden_size = -64"),
    ({"num_hidden_layers": 0}, CorruptModel, "num_hidden_layers = 0"),
    ({"vocab_size": True}, CorruptModel, "vocab_size = True"),
    ({"hidden_size": 65}, CorruptModel, "65 does not divide into 4"),
    ({"num_key_value_heads": 3}, CorruptModel, "4 attention heads cannot share 3"),
    ({"hidden_act": "relu6"}, UnsupportedModel, "relu6"),
    ({"torch_dtype": "float8_e4m3fn"}, UnsupportedModel, "float8_e4m3fn"),
    ({"eos_token_id": "2"}, CorruptModel, "eos_token_id"),
    ({"rms_norm_eps": "small"}, CorruptModel, "rms_norm_eps"),
    ({"rope_theta": "big"}, CorruptModel, "rope_theta"),
    ({"rope_scaling": {"type": "mystery"}}, UnsupportedModel, "mystery"),
    ({"rope_scaling": {"type": "linear"}}, CorruptModel, "lacks factor"),
    ({"rope_scaling": {"type": "linear", "factor": -2}}, CorruptModel, "factor = -2"),
    ({"rope_scaling": [1]}, CorruptModel, "should be an object"),
    ({"partial_rotary_factor": 0.2}, CorruptModel, "rotates 3 of the 16"),
    ({"quantization_config": {"quant_method": "aqlm", "bits": 2}}, UnsupportedModel, "aqlm.*awq"),
    ({"quantization_config": {"bits": 4}}, UnsupportedModel, "no method named"),
    ({"architectures": ["Gemma2ForCausalLM"], "layer_types": ["full_attention"]}, CorruptModel, "1 layers.*and 2"),
    ({"architectures": ["MistralForCausalLM"], "sliding_window": -1}, CorruptModel, "sliding_window = -1"),
    ({"architectures": ["Phi3ForCausalLM"], "rope_scaling": {"type": "longrope", "short_factor": [1.0],
      "long_factor": [1.0]}}, CorruptModel, "short_factor has 1 numbers.*need 8"),
    ({"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True}, UnsupportedModel, "Bidirectional"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), WRONG, ids=[message for _, _, message in WRONG])
def test_wrong_config(changes: dict[str, Any], error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        spec_of(tmp_path, {**LLAMA, **changes})


FIELDS = [
    *LLAMA, "rms_norm_eps", "sliding_window", "layer_types", "head_dim", "rope_scaling", "rope_parameters",
    "query_pre_attn_scalar", "hidden_activation", "no_rope_layers", "use_sliding_window", "max_window_layers",
    "partial_rotary_factor", "dtype", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps",
    "embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale", "clip_qkv", "use_qk_norm",
    "sliding_window_pattern", "rotary_dim", "rotary_pct", "n_embd", "n_inner", "n_positions", "num_kv_heads", "alibi",
    "new_decoder_architecture", "n_head", "attn_config", "expansion_ratio", "d_model", "ffn_dim", "seq_length",
    "kv_channels", "scale_depth", "dim_model_base", "num_layers", "text_config", "hidden_act", "model_max_length",
]  # fmt: skip


@draws(400)
@given(
    base=st.sampled_from([*FAMILY_OF]),
    name=st.sampled_from(FIELDS),
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
            st.sampled_from(["rope_type", "factor", "full_attention", "rope_theta", "x"]), inner, max_size=3),
        max_leaves=4),
)  # fmt: skip
def test_junk_in_a_field_is_refused_or_harmless(base: str, name: str, value: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            spec = spec_of(Path(folder), {**LLAMA, "architectures": [base], "use_sliding_window": True, name: value})
        except (UnsupportedModel, CorruptModel):
            return
        assert spec.num_layers > 0


@pytest.mark.parametrize(
    ("family", "changes", "error", "message"),
    [
        ("laguna", {"gating": "per-layer"}, UnsupportedModel, "gating = 'per-layer'"),
        ("laguna", {"moe_router_logit_softcapping": 30.0}, UnsupportedModel, "moe_router_logit_softcapping"),
        ("laguna", {"num_attention_heads_per_layer": [4, 8]}, CorruptModel, "It must list 3 numbers above 0"),
        ("laguna", {"num_attention_heads_per_layer": [4, 8, "8"]}, CorruptModel, "It must list 3 numbers above 0"),
        ("laguna", {"num_attention_heads_per_layer": [4, 7, 7]}, CorruptModel, "cannot share 2 key/value heads"),
        ("laguna", {"num_attention_heads_per_layer": [4, 4, 8]}, UnsupportedModel, "one number in windowed layers"),
        ("phimoe", {"num_experts_per_tok": 3}, UnsupportedModel, "Its routing chooses 2 experts"),
        ("lfm3", {"use_sandwich_norm": False}, UnsupportedModel, "use_sandwich_norm = False"),
        ("lfm3", {"attention_bias": True}, UnsupportedModel, "attention_bias = True"),
        ("lfm2", {"layer_types": ["sliding_attention"] * 3}, UnsupportedModel, "of the kind 'sliding_attention'"),
        ("olmo_hybrid", {"linear_num_key_heads": 3}, CorruptModel, "4 recurrent heads cannot share 3"),
    ],
)
def test_what_a_family_does_not_support(
    family: str, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    config = tiny_config(family)
    with pytest.raises(error, match=re.escape(message)):
        spec_of_config({**config.to_dict(), "architectures": [class_of(config).__name__], **changes})


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '"x"', "\x00\xff"])
def test_malformed_json(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(CorruptModel, match=r"config\.json"):
        read_spec(tmp_path)


def test_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="does not exist"):
        read_spec(tmp_path / "nowhere")
    with pytest.raises(ModelNotFound, match="empty"):
        read_spec(tmp_path)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ModelNotFound, match=r"no config\.json.*notes\.txt"):
        read_spec(tmp_path)


def test_other_formats_are_named(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").touch()
    with pytest.raises(UnsupportedModel, match="LoRA"):
        read_spec(tmp_path)
    (tmp_path / "model-Q4_K_M.gguf").touch()
    with pytest.raises(UnsupportedModel, match="holds GGUF files"):
        read_spec(tmp_path)
    with pytest.raises(CorruptModel, match="is empty"):
        read_spec(tmp_path / "model-Q4_K_M.gguf")


def test_a_spec_is_read_without_torch(tiny_llama_path: Path) -> None:
    """`localllm list`, `show` and the first phase of a start would wait seconds for the import."""
    code = (
        "import sys; from pathlib import Path; from localllm.models.read_spec import read_spec; "
        f"read_spec(Path({str(tiny_llama_path)!r})); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
