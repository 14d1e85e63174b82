"""Families without a class in transformers, and other spellings of a checkpoint: the weights of a model that has one
are stored as the family stores them, and the logits must stay what they were. Only Baichuan 13B is a model of its own:
it is written down here.
"""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from localllm.errors import CorruptModel, UnsupportedModel
from localllm.models.loader import load_model, resident_bytes
from localllm.models.read_spec import read_spec
from localllm.models.weights.parameters import held_bytes
from tests.models.harness import CPU, Harness, assert_close, prompt, reference_logits
from tests.models.vision_models import make_model
from tests.tiny import load_reference, make_tiny_model

Tensors = dict[str, Tensor]
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16  # of the tiny models


def stack_qkv(name: str) -> Callable[[Tensors], Tensors]:
    """q, k and v of each layer above one another, weights and biases, called `name`."""

    def change(tensors: Tensors) -> Tensors:
        out = {key: value for key, value in tensors.items() if not re.search(r"[qkv]_proj", key)}
        for key in tensors:
            if "q_proj" in key:
                parts = [tensors[key.replace("q_proj", f"{letter}_proj")] for letter in "qkv"]
                out[key.replace("q_proj", name)] = torch.cat(parts)
        return out

    return change


def group_qkv(tensors: Tensors) -> Tensors:
    """As InternLM 2: for each key head its query heads, its k, its v."""
    out = {key: value for key, value in tensors.items() if not re.search(r"[qkv]_proj", key)}
    for key in tensors:
        if "q_proj" in key:
            q = tensors[key].unflatten(0, (KV_HEADS, -1, HEAD_DIM))
            k, v = (tensors[key.replace("q_proj", f"{each}_proj")].unflatten(0, (KV_HEADS, 1, -1)) for each in "kv")
            out[key.replace("q_proj", "wqkv")] = torch.cat((q, k, v), dim=1).flatten(0, 2)
    return out


def nested(config: dict[str, Any]) -> dict[str, Any]:
    """Its fields under text_config, as a model that sees has them."""
    outer = ("architectures", "dtype", "eos_token_id", "transformers_version")
    text = {name: value for name, value in config.items() if name not in outer}
    return {"text_config": text, "vision_config": {}, **{name: config[name] for name in outer}}


@dataclass(frozen=True)
class Disguise:
    base: str  # the family in tests/tiny.py whose weights these are
    config: dict[str, Any]  # over the base's config.json; None: not there
    renames: tuple[tuple[str, str], ...] = ()
    change: Callable[[Tensors], Tensors] = lambda tensors: tensors
    overrides: dict[str, Any] = field(default_factory=dict)
    reshape: Callable[[dict[str, Any]], dict[str, Any]] = lambda config: config
    extra: tuple[str, ...] = ()  # tensors that are there and not used


_GPT_NAMES = (
    (r"^model\.", "transformer."),
    ("embed_tokens", "wte"),
    (r"transformer\.norm", "transformer.ln_f"),
    (r"\.layers\.", ".h."),
    ("input_layernorm", "ln_1"),
    ("post_attention_layernorm", "ln_2"),
)
DISGUISES = {
    "baichuan_7b": Disguise(
        "llama",
        {"architectures": ["BaiChuanForCausalLM"], "num_key_value_heads": None},
        change=stack_qkv("W_pack"),
        overrides={"num_key_value_heads": HEADS},
    ),
    "internlm2": Disguise(
        "llama",
        {"architectures": ["InternLM2ForCausalLM"], "bias": False},
        (
            ("embed_tokens", "tok_embeddings"),
            (r"^lm_head", "output"),
            (r"self_attn\.o_proj", "attention.wo"),
            ("self_attn", "attention"),
            (r"mlp\.gate_proj", "feed_forward.w1"),
            (r"mlp\.up_proj", "feed_forward.w3"),
            (r"mlp\.down_proj", "feed_forward.w2"),
            ("input_layernorm", "attention_norm"),
            ("post_attention_layernorm", "ffn_norm"),
        ),
        group_qkv,
    ),
    "qwen": Disguise(
        "qwen2",
        {
            "architectures": ["QWenLMHeadModel"],
            "intermediate_size": 192,
            "num_key_value_heads": None,
            "kv_channels": HEAD_DIM,
            "layer_norm_epsilon": 1e-6,
            "rms_norm_eps": None,
            "rotary_emb_base": 10000,
            "seq_length": 2048,
        },
        (
            *_GPT_NAMES,
            (r"self_attn\.o_proj", "attn.c_proj"),
            ("self_attn", "attn"),
            (r"mlp\.gate_proj", "mlp.w2"),
            (r"mlp\.up_proj", "mlp.w1"),
            (r"mlp\.down_proj", "mlp.c_proj"),
        ),
        stack_qkv("c_attn"),
        {"num_key_value_heads": HEADS, "tie_word_embeddings": False},
    ),
    "exaone3": Disguise(
        "llama",
        {
            "architectures": ["ExaoneForCausalLM"],
            "num_hidden_layers": None,
            "num_layers": 2,
            "hidden_act": None,
            "activation_function": "silu",
            "rms_norm_eps": None,
            "layer_norm_epsilon": 1e-6,
        },
        (
            *_GPT_NAMES,
            ("o_proj", "out_proj"),
            ("self_attn", "attn.attention"),
            ("gate_proj", "c_fc_0"),
            ("up_proj", "c_fc_1"),
            ("down_proj", "c_proj"),
        ),
    ),
    "mimo": Disguise(
        "qwen2", {"architectures": ["MiMoForCausalLM"], "rms_norm_eps": 1e-6}, extra=("model.mtp_layers.0.x.weight",)
    ),
    "minicpm": Disguise(
        "granite",
        {"architectures": ["MiniCPMForCausalLM"], "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16},
        overrides={
            "residual_multiplier": 1.4 / 2**0.5,
            "logits_scaling": 64 / 16,
            "attention_multiplier": HEAD_DIM**-0.5,
        },
    ),
    "gpt2_without_its_prefix": Disguise(
        "gpt2", {}, ((r"^transformer\.", ""),), extra=("h.0.attn.bias", "h.1.attn.masked_bias")
    ),
    "bloom_without_its_prefix": Disguise("bloom", {}, ((r"^transformer\.", ""),)),
    "opt_without_its_prefix": Disguise("opt", {}, ((r"^model\.", ""),)),
    "gemma3_that_sees": Disguise(
        "gemma3",
        {"architectures": ["Gemma3ForConditionalGeneration"]},
        ((r"^", "language_model."),),
        reshape=nested,
        extra=("vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight", "multi_modal_projector.norm.weight"),
    ),
    "mistral3_that_sees": Disguise(
        "mistral",
        {"architectures": ["Mistral3ForConditionalGeneration"]},
        ((r"^model\.", "model.language_model."),),
        reshape=nested,
        extra=("model.vision_tower.patch_conv.weight", "model.multi_modal_projector.linear_1.weight"),
    ),
}


def disguised(folder: Path, disguise: Disguise) -> tuple[Path, Path]:
    """(the model as transformers knows it, the same under its other name)"""
    known = make_tiny_model(folder / "known", disguise.base, **disguise.overrides)
    other = folder / "other"
    other.mkdir()
    tensors = disguise.change(load_file(known / "model.safetensors"))
    renamed: Tensors = {}
    for name, tensor in tensors.items():
        for pattern, replacement in disguise.renames:
            name = re.sub(pattern, replacement, name)
        renamed[name] = tensor.contiguous()
    renamed.update({name: torch.ones(2, 3) for name in disguise.extra})
    save_file(renamed, other / "model.safetensors")
    config = {**json.loads((known / "config.json").read_text()), **disguise.config}
    config = disguise.reshape({name: value for name, value in config.items() if value is not None})
    (other / "config.json").write_text(json.dumps(config))
    return known, other


@pytest.mark.parametrize("name", DISGUISES)
def test_same_weights_under_another_name(name: str, tmp_path: Path) -> None:
    known, other = disguised(tmp_path, DISGUISES[name])
    tokens = prompt(41)
    harness = Harness(other)
    _, logits = harness.prefill(tokens, chunk=16)
    assert_close(logits, reference_logits(load_reference(known), tokens))
    assert held_bytes(harness.model) == resident_bytes(other, harness.spec, CPU, torch.float32)


def baichuan_13b_logits(tensors: Tensors, token_ids: list[int]) -> Tensor:
    """Llama without rotation, whose scores lose slope * distance."""
    slopes = torch.tensor([2.0 ** (-8 * head / HEADS) for head in range(1, HEADS + 1)])
    positions = torch.arange(len(token_ids))
    distance = positions[:, None] - positions
    bias = (-slopes[:, None, None] * distance).masked_fill(distance < 0, -torch.inf)

    def norm(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * tensors[f"{name}.weight"]

    x = tensors["model.embed_tokens.weight"][token_ids]
    for layer in ("model.layers.0.", "model.layers.1."):
        qkv = F.linear(norm(x, f"{layer}input_layernorm"), tensors[f"{layer}self_attn.W_pack.weight"])
        q, k, v = qkv.unflatten(-1, (3, HEADS, HEAD_DIM)).permute(1, 2, 0, 3)
        attended = torch.softmax(q @ k.mT / HEAD_DIM**0.5 + bias, dim=-1) @ v
        x = x + F.linear(attended.transpose(0, 1).flatten(1), tensors[f"{layer}self_attn.o_proj.weight"])
        normed = norm(x, f"{layer}post_attention_layernorm")
        gate, up = (F.linear(normed, tensors[f"{layer}mlp.{each}_proj.weight"]) for each in ("gate", "up"))
        x = x + F.linear(F.silu(gate) * up, tensors[f"{layer}mlp.down_proj.weight"])
    return F.linear(norm(x, "model.norm"), tensors["lm_head.weight"])


def test_baichuan_13b(tmp_path: Path) -> None:
    config = {
        "architectures": ["BaichuanForCausalLM"],
        "num_key_value_heads": None,
        "max_position_embeddings": None,
        "model_max_length": 512,
    }
    disguise = Disguise("llama", config, change=stack_qkv("W_pack"), overrides={"num_key_value_heads": HEADS})
    _, path = disguised(tmp_path, disguise)
    tokens = prompt(41)
    harness = Harness(path)
    assert harness.spec.max_position == 512
    _, logits = harness.prefill(tokens, chunk=16)
    assert_close(logits, baichuan_13b_logits(load_file(path / "model.safetensors"), tokens))


def test_baichuan_2_scales_the_rows_of_its_head(tmp_path: Path) -> None:
    size = {"vocab_size": 125_696, "hidden_size": 16, "num_key_value_heads": HEADS, "num_hidden_layers": 1}
    disguise = Disguise(
        "llama",
        {"architectures": ["BaichuanForCausalLM"], "num_key_value_heads": None},
        change=stack_qkv("W_pack"),
        overrides=size,
    )
    known, path = disguised(tmp_path, disguise)
    tokens = prompt(9)
    _, logits = Harness(path).prefill(tokens)
    reference = load_reference(known)
    with torch.no_grad():
        reference.lm_head.weight.copy_(F.normalize(reference.lm_head.weight))
    assert_close(logits, reference_logits(reference, tokens))


STEP_EXTRA = 2
"""Layers that predict further tokens, which the lists of a published config count too."""


def published_step(text: Any) -> dict[str, Any]:
    """The config of Step 3.5 Flash as it is published: a value for each layer, and other heads in windowed layers."""
    kinds = [*text.layer_types, *["sliding_attention"] * STEP_EXTRA]
    ropes = [text.rope_parameters[kind] for kind in kinds]
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim", "sliding_window",
             "max_position_embeddings", "moe_intermediate_size", "share_expert_dim", "moe_router_scaling_factor",
             "rms_norm_eps")  # fmt: skip
    return {
        **{name: getattr(text, name) for name in names},
        "architectures": ["Step3p5ForCausalLM"],
        "dtype": "float32",
        "num_attention_heads": 4,
        "num_attention_groups": text.num_key_value_heads,
        "attention_other_setting": {
            "attention_type": "sliding_attention",
            "num_attention_heads": 6,
            "num_attention_groups": text.num_key_value_heads,
            "head_dim": text.head_dim,
        },
        "layer_types": kinds,
        "rope_theta": [rope["rope_theta"] for rope in ropes],
        "partial_rotary_factors": [rope.get("partial_rotary_factor", 1.0) for rope in ropes],
        "moe_layers_enum": "1,2,3",
        "moe_num_experts": text.n_routed_experts,
        "moe_top_k": text.num_experts_per_tok,
        "norm_expert_weight": True,
        "swiglu_limits": [*text.swiglu_limits, *[0.0] * STEP_EXTRA],
        "swiglu_limits_shared": [*text.swiglu_limits_shared, *[0.0] * STEP_EXTRA],
        "num_nextn_predict_layers": STEP_EXTRA,
        "num_mtp_layers": STEP_EXTRA,
    }


def test_step_3_5_has_the_logits_of_the_text_part_of_3_7(tmp_path: Path) -> None:
    model, tokens, path = make_model(tmp_path / "whole", "Step3p7Config"), prompt(47), tmp_path / "published"
    state = load_file(tmp_path / "whole" / "model.safetensors")
    own = {name: t for name, t in state.items() if not name.startswith(("vision_model.", "vit_large_projector."))}
    drafts = {name.replace(".layers.3.", f".layers.{4 + i}."): t.clone() for i in range(STEP_EXTRA)
              for name, t in own.items() if ".layers.3." in name}  # fmt: skip
    path.mkdir()
    save_file({**own, **drafts}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(published_step(model.config.text_config)))
    harness = Harness(path)
    assert harness.spec.layer_heads == (4, 6, 4, 6)
    assert_close(harness.prefill(tokens, chunk=16)[1], reference_logits(model, tokens))
    assert held_bytes(harness.model) == resident_bytes(path, harness.spec, CPU, torch.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"swiglu_limits": [0.0, -1.0, 0.0, 0.0, 0.0, 0.0]}, "swiglu_limits = "),
        ({"swiglu_limits_shared": [7.0, 7.0]}, "2 swiglu_limits_shared for 4 layers"),
        ({"attention_other_setting": {"num_attention_heads": 5, "num_attention_groups": 2}}, "5 attention heads"),
    ],
)
def test_a_config_of_step_that_does_not_fit_together(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "whole", "Step3p7Config")
    config = {**published_step(model.config.text_config), **changes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CorruptModel, match=message):
        read_spec(tmp_path)


MIMO_AS_PUBLISHED = {
    "hybrid_layer_pattern": [0, 1, 1, 0],
    "moe_layer_freq": [0, 1, 1, 1],
    "swa_num_key_value_heads": 4,
    "swa_num_attention_heads": 4,
    "swa_head_dim": 24,
    "swa_v_head_dim": 16,
    "swa_rope_theta": 10_000.0,
    "rope_theta": 5_000_000.0,
    "partial_rotary_factor": 0.334,
    "sliding_window": 19,
    "sliding_window_size": 19,  # before the query
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "layernorm_epsilon": 1e-5,
    "routed_scaling_factor": 1.5,
}


def test_mimo_v2_as_it_is_published(tiny_model_path: Callable[[str], Path], tmp_path: Path) -> None:
    folder, tokens = tiny_model_path("mimo_v2"), prompt(47)
    path, written = shutil.copytree(folder, tmp_path / "published"), ("layer_types", "mlp_layer_types", "rms_norm_eps")
    config = json.loads((path / "config.json").read_text())
    kept = {name: value for name, value in config.items() if name not in (*written, "rope_parameters")}
    (path / "config.json").write_text(json.dumps({**kept, **MIMO_AS_PUBLISHED}))
    assert read_spec(path) == read_spec(folder)
    assert_close(Harness(path).prefill(tokens, chunk=16)[1], reference_logits(load_reference(folder), tokens))


def test_tensors_that_nobody_knows_are_named(tmp_path: Path) -> None:
    """Parts that see are left out knowingly; anything else is not."""
    _, path = disguised(tmp_path, DISGUISES["gemma3_that_sees"])
    tensors = load_file(path / "model.safetensors")
    save_file({**tensors, "language_model.model.audio_tower.x": torch.ones(2)}, path / "model.safetensors")
    with pytest.raises(CorruptModel, match=r"audio_tower\.x"):
        load_model(path, read_spec(path), CPU, torch.float32)


def test_command_r_has_the_longer_of_its_two_contexts(tiny_model_path: Callable[[str], Path], tmp_path: Path) -> None:
    config = json.loads((tiny_model_path("cohere") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_max_length": 131_072}))
    assert read_spec(tmp_path).max_position == 131_072


REFUSED: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, UnsupportedModel, "scale_attn_by_inverse_layer_idx"),
    ("phi", {"qk_layernorm": True}, UnsupportedModel, "qk_layernorm"),
    ("opt", {"do_layer_norm_before": False}, UnsupportedModel, "350M"),
    (
        "bloom",
        {"apply_residual_connection_post_layernorm": True},
        UnsupportedModel,
        "apply_residual_connection_post_layernorm",
    ),
    ("mpt", {"attn_config": {"alibi": False}}, UnsupportedModel, "Learned positions"),
    ("mpt", {"attn_config": {"alibi_bias_max": 16}}, UnsupportedModel, "slopes"),
    ("granite", {"logits_scaling": 0}, CorruptModel, "logits_scaling = 0"),
    ("granite", {"residual_multiplier": "x"}, CorruptModel, "residual_multiplier = 'x'"),
    ("olmo", {"clip_qkv": -1}, CorruptModel, "clip_qkv = -1"),
    ("cohere", {"logit_scale": 1e400}, CorruptModel, "logit_scale = inf"),
    ("falcon_40b", {"num_kv_heads": 3}, CorruptModel, "cannot share 3"),
    ("gptj", {"rotary_dim": 17}, CorruptModel, "rotates 17 of the 16"),
    ("gpt2", {"n_inner": -1}, CorruptModel, "intermediate_size = -1"),
    ("llama", {"hidden_act": "relu2"}, UnsupportedModel, "gate.*relu2"),
    ("ernie4_5_moe", {"use_bias": True}, UnsupportedModel, "use_bias"),
    ("ernie4_5_moe", {"moe_norm_min": 0}, CorruptModel, "moe_norm_min = 0"),
    ("llama4", {"num_experts_per_tok": 2}, UnsupportedModel, "num_experts_per_tok = 2"),
    ("llama4", {"layer_types": ["sliding_attention"] * 4}, UnsupportedModel, "type sliding_attention"),
    ("afmoe", {"route_norm": False}, UnsupportedModel, "route_norm = False"),
    ("mimo_v2", {"swa_head_dim": 48}, UnsupportedModel, "swa_head_dim = 48 beside head_dim = 24"),
    ("mimo_v2", {"v_head_dim": 0}, CorruptModel, "v_head_dim = 0"),
    ("mistral4", {"n_group": 4}, UnsupportedModel, "n_group above 1"),
    ("minimax_m2", {"scoring_func": "softmax"}, UnsupportedModel, "scoring_func = 'softmax'"),
    ("hy_v3", {"route_norm": False}, UnsupportedModel, "route_norm"),
    ("cohere2_moe", {"expert_selection_fn": "sinkhorn"}, UnsupportedModel, "'sinkhorn'"),
    ("glm4_moe_lite", {"mlp_layer_types": ["dense", "hashed"]}, UnsupportedModel, "type hashed"),
    ("deepseek_v32", {"index_topk": 0}, CorruptModel, "index_topk = 0"),
]


@pytest.mark.parametrize(("family", "changes", "error", "message"), REFUSED, ids=[row[3] for row in REFUSED])
def test_refused(
    family: str,
    changes: dict[str, Any],
    error: type[Exception],
    message: str,
    tiny_model_path: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    config = json.loads((tiny_model_path(family) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(error, match=message):
        read_spec(tmp_path)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gpt2", {"n_positions": 100}),
        ("falcon_40b", {"num_kv_heads": 4}),
        ("gpt_neox", {"intermediate_size": 90}),
        ("cohere", {"head_dim": 12}),
        ("starcoder2", {"num_attention_heads": 8}),
    ],
    ids=str,
)
def test_a_config_that_disagrees_with_its_tensors(
    family: str, changes: dict[str, Any], tiny_model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    """The refusal names the tensor with its shape, and the shape that the config asks for."""
    path = tiny_model_path(family)
    config = json.loads((path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    (tmp_path / "model.safetensors").symlink_to(path / "model.safetensors")
    with pytest.raises(CorruptModel, match=r"has shape \[\d+.*config asks for \[\d+"):
        load_model(tmp_path, read_spec(tmp_path), CPU, torch.float32)
