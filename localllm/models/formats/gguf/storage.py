"""The names and order of tensors in a GGUF file, as a `Storage`: one scheme for all architectures, with few exceptions.

    Llama's name                            GGUF's
    model.embed_tokens, model.norm          token_embd, output_norm
    lm_head                                 output
    model.layers.N.self_attn.q_proj         blk.N.attn_q
    model.layers.N.mlp.gate_proj            blk.N.ffn_gate

Rows of q and k: rotary embedding rotates pairs of dimensions. For architectures where ggml rotates neighbours and
transformers rotates halves, the converter has moved the rows; `_deinterleave` moves them back.
Does not know: metadata's numbers (config.py), block types.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from localllm.models.families.qwen3_5 import INPUTS, RATES
from localllm.models.formats.checkpoint import TensorInfo
from localllm.models.formats.gguf.header import Header
from localllm.models.spec.family import FusedRecurrent, Storage

_COMMON = (
    (r"^model\.embed_tokens\.", "token_embd."),
    (r"^model\.embed_positions\.", "position_embd."),
    (r"^model\.embed_norm\.", "token_embd_norm."),
    (r"^model\.norm\.", "output_norm."),
    (r"^lm_head\.", "output."),
    (r"^model\.layers\.", "blk."),
    (r"\.self_attn\.([qkv])_proj\.", r".attn_\1."),
    (r"\.self_attn\.qkv_proj\.", ".attn_qkv."),
    (r"\.self_attn\.o_proj\.", ".attn_output."),
    (r"\.self_attn\.gate_proj\.", ".attn_gate."),
    (r"\.self_attn\.([qk])_norm\.", r".attn_\1_norm."),
    (r"\.self_attn\.sinks$", ".attn_sinks.weight"),
    (r"\.mlp\.(gate|up|down)_proj\.", r".ffn_\1."),
)
_LATENT = (
    (r"\.self_attn\.kv_a_proj_with_mqa\.", ".attn_kv_a_mqa."),
    (r"\.self_attn\.(q_a|q_b|kv_b)_proj\.", r".attn_\1."),
    (r"\.self_attn\.(q|kv)_a_layernorm\.", r".attn_\1_a_norm."),
)
_EXPERTS = (
    (r"\.mlp\.gate\.e_score_correction_bias$", ".exp_probs_b.bias"),
    (r"\.mlp\.gate\.", ".ffn_gate_inp."),
    (r"\.mlp\.experts\.(gate|up|down|gate_up)_proj\.", r".ffn_\1_exps."),
    (r"\.mlp\.shared_expert_gate\.", ".ffn_gate_inp_shexp."),
    (r"\.mlp\.shared_expert\.(gate|up|down)_proj\.", r".ffn_\1_shexp."),
)
_RECURRENT = (
    (r"\.linear_attn\.in_proj_qkv\.", ".attn_qkv."),
    (r"\.linear_attn\.in_proj_z\.", ".attn_gate."),
    (r"\.linear_attn\.in_proj_b\.", ".ssm_beta."),
    (r"\.linear_attn\.in_proj_a\.", ".ssm_alpha."),
    (r"\.linear_attn\.in_proj_ba\.", ".ssm_ba."),
    (r"\.linear_attn\.in_proj_qkvz\.", ".ssm_in."),
    (r"\.(?:linear_attn|mamba)\.(conv1d|norm)\.", r".ssm_\1."),
    (r"\.(?:linear_attn|mamba)\.(in|out)_proj\.", r".ssm_\1."),
    (r"\.(?:linear_attn|mamba)\.dt_bias$", ".ssm_dt.bias"),
    (r"\.(?:linear_attn|mamba)\.A(_log)?$", ".ssm_a"),
    (r"\.mamba\.D$", ".ssm_d"),
    (r"\.conv\.(in_proj|conv|out_proj)\.", r".shortconv.\1."),
    (r"\.mlp\.latent_(down|up)_proj\.", r".ffn_latent_\1."),
)
_WITHOUT_SUFFIX = (
    (r"\.exp_probs_b\.bias$", ".exp_probs_b"),  # Hy3
    (r"\.ffn_norm\.weight$", ".ffn_norm"),  # Falcon-H1
)
_INDEXER = (r"blk\.\d+\.indexer\..*",)  # which chooses tokens in longer contexts than are supported
_PRE_NORMS = (
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
)
_SANDWICH_NORMS = (
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".post_attention_norm."),
    (r"\.pre_feedforward_layernorm\.", ".ffn_norm."),
    (r"\.post_feedforward_layernorm\.", ".post_ffw_norm."),
)
_PER_LAYER_EMBEDDINGS = (
    (r"^model\.embed_tokens_per_layer\.", "per_layer_token_embd."),
    (r"^model\.per_layer_model_projection\.", "per_layer_model_proj."),
    (r"^model\.per_layer_projection_norm\.", "per_layer_proj_norm."),
    (r"\.post_per_layer_input_norm\.", ".post_norm."),
    (r"\.per_layer_input_gate\.", ".inp_gate."),
    (r"\.per_layer_projection\.", ".proj."),
)
_GEMMA3N = (
    *_SANDWICH_NORMS,
    *_PER_LAYER_EMBEDDINGS,
    (r"^model\.altup_projections\.", "altup_proj."),
    (r"^model\.altup_unembed_projections\.", "altup_unembd_proj."),
    (r"\.altup\.correct_output_scale$", ".altup_correct_scale.weight"),
    (r"\.altup\.correction_coefs\.", ".altup_correct_coef."),
    (r"\.altup\.prediction_coefs\.", ".altup_predict_coef."),
    (r"\.altup\.modality_router\.", ".altup_router."),
    (r"\.altup\.router_norm\.", ".altup_router_norm."),
    (r"\.laurel\.linear_left\.", ".laurel_l."),
    (r"\.laurel\.linear_right\.", ".laurel_r."),
    (r"\.laurel\.post_laurel_norm\.", ".laurel_post_norm."),
)
_GEMMA4 = (
    *_SANDWICH_NORMS,
    *_PER_LAYER_EMBEDDINGS,
    (r"\.post_feedforward_layernorm_([12])\.", r".post_ffw_norm_\1."),
    (r"\.pre_feedforward_layernorm_2\.", ".pre_ffw_norm_2."),
    (r"\.mlp\.gate\.expert_scale$", ".ffn_down_exps.scale"),
    (r"\.mlp\.experts\.gate_up_proj\.", ".ffn_gate_up_exps."),
    (r"\.layer_scalar$", ".layer_output_scale.weight"),
)
_NORM_BEFORE_MLP = (  # named by place, not by the part they norm
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".post_attention_norm."),
)
_LFM2_NORMS = (*_PRE_NORMS, (r"^model\.norm\.", "token_embd_norm."))
_TWO_NORMS_AT_ONCE = (  # Falcon 40B: the second is attention's
    (r"\.input_layernorm\.", ".attn_norm_2."),
    (r"\.post_attention_layernorm\.", ".attn_norm."),
)


def _deinterleave(heads_of: Callable[[int, int], int]) -> Callable[[int, int, int], Sequence[int]]:
    """Return the row order: row i of a head's first half is stored at 2 i, row i of its second half at 2 i + 1."""

    def rows(num_heads: int, num_kv_heads: int, head_dim: int) -> Sequence[int]:
        half = head_dim // 2
        inside = [2 * i + part for part in range(2) for i in range(half)]
        return [head * head_dim + row for head in range(heads_of(num_heads, num_kv_heads)) for row in inside]

    return rows


_LLAMA_ROWS = {"q_proj": _deinterleave(lambda heads, kv: heads), "k_proj": _deinterleave(lambda heads, kv: kv)}


@dataclass(frozen=True, slots=True)
class _ArchitectureNames:
    """The differences of an architecture."""

    norms: tuple[tuple[str, str], ...] = _PRE_NORMS
    rows: Mapping[str, Callable[[int, int, int], Sequence[int]]] = field(default_factory=dict)
    added: tuple[tuple[str, float], ...] = ()
    fused_gate_up: str | None = None  # Llama's name of the fused matrix: up_proj


_LLAMA = _ArchitectureNames(rows=_LLAMA_ROWS)
_GEMMA = _ArchitectureNames(_SANDWICH_NORMS, added=(("norm.weight", 1.0),))
_QWEN_NEXT = _ArchitectureNames(
    _NORM_BEFORE_MLP,
    added=tuple(
        (f"{norm}_norm.weight", 1.0) for norm in ("attn", "post_attention", "output", "attn_q", "attn_k")
    ),  # all but ssm_norm
)
_NAMINGS: dict[str, _ArchitectureNames] = {
    "llama": _LLAMA,
    "smollm3": _LLAMA,
    "granite": _LLAMA,
    "granitemoe": _LLAMA,
    "olmo": _LLAMA,
    "baichuan": _LLAMA,
    "internlm2": _LLAMA,
    "minicpm": _LLAMA,
    "arcee": _LLAMA,
    "mistral3": _LLAMA,
    "nemotron": _ArchitectureNames(added=(("norm.weight", 1.0),)),
    "gemma": _ArchitectureNames(added=(("norm.weight", 1.0),)),
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "gemma3n": _ArchitectureNames(_GEMMA3N),
    "gemma4": _ArchitectureNames(_GEMMA4),
    "olmo2": _ArchitectureNames(_SANDWICH_NORMS),
    "exaone4": _ArchitectureNames(_SANDWICH_NORMS),
    "afmoe": _ArchitectureNames(_SANDWICH_NORMS),
    "phi3": _ArchitectureNames(fused_gate_up="up_proj"),
    "chatglm": _ArchitectureNames(fused_gate_up="up_proj"),
    "glm4": _ArchitectureNames(_SANDWICH_NORMS, fused_gate_up="up_proj"),
    "glm4moe": _ArchitectureNames(_NORM_BEFORE_MLP),
    "gpt-oss": _ArchitectureNames(_NORM_BEFORE_MLP),
    "seed_oss": _ArchitectureNames(_NORM_BEFORE_MLP),
    "lfm2": _ArchitectureNames(_LFM2_NORMS),
    "lfm2moe": _ArchitectureNames(_LFM2_NORMS),
    "qwen35": _QWEN_NEXT,
    "qwen35moe": _QWEN_NEXT,
    "qwen3next": _QWEN_NEXT,
    "granitehybrid": _LLAMA,
    "nemotron_h": _LLAMA,
    "nemotron_h_moe": _LLAMA,
}
"""By general.architecture; others use Llama's names and leave the rows of q and k in place."""


def storage_of(header: Header, tensors: Mapping[str, TensorInfo], ignored: tuple[str, ...]) -> Storage:
    """Return the storage of a file. header: of its first part; tensors: all of them; ignored: name patterns."""
    naming = _NAMINGS.get(str(header.metadata["general.architecture"]), _ArchitectureNames())
    norms = _TWO_NORMS_AT_ONCE if "blk.0.attn_norm_2.weight" in tensors else naming.norms
    is_recurrent = "blk.0.ssm_conv1d.weight" in tensors  # then attn_qkv is part of a delta net
    return Storage(
        renames=(*norms, *_LATENT, *_EXPERTS, *_RECURRENT, *_COMMON),
        fused_qkv="qkv_proj" if "blk.0.attn_qkv.weight" in tensors and not is_recurrent else None,
        fused_recurrent=_fused_recurrent(tensors),
        fused_gate_up=naming.fused_gate_up,
        rows=naming.rows,
        added=naming.added,
        ignored=(*ignored, *_INDEXER),
        alternatives=_WITHOUT_SUFFIX,
    )


def _fused_recurrent(tensors: Mapping[str, TensorInfo]) -> tuple[FusedRecurrent, ...]:
    """Return the matrices of Qwen3-Next that are stored as one: b and a, and in old files also qkv and z."""
    stored = {name.split(".", 2)[-1] for name in tensors}
    old = (INPUTS,) if "ssm_in.weight" in stored and "ssm_ba.weight" in stored else ()
    return (*old, RATES) if "ssm_ba.weight" in stored else ()
