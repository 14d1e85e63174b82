"""The names and order of tensors in a GGUF file, as a `Storage`: one scheme for all
architectures, with few exceptions, which are in `GGUFFacts` (spec/gguf.py).

    Llama's name                            GGUF's
    model.embed_tokens, model.norm          token_embd, output_norm
    lm_head                                 output
    model.layers.N.self_attn.q_proj         blk.N.attn_q
    model.layers.N.mlp.gate_proj            blk.N.ffn_gate

Rows of q and k: rotary embedding rotates pairs of dimensions. For architectures where ggml rotates neighbours and
transformers rotates halves, the converter has moved the rows; `LLAMA_ROWS` moves them back.
Does not know: metadata's numbers (config.py), block types.
"""

from __future__ import annotations

from collections.abc import Mapping

from localllm.models.families.qwen3_5 import INPUTS, RATES
from localllm.models.families.registry import GGUF_OF
from localllm.models.formats.checkpoint import TensorInfo
from localllm.models.formats.gguf.header import GGUFHeader
from localllm.models.spec.family import FusedRecurrent, Storage
from localllm.models.spec.gguf import GGUFFacts

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
    (r"\.self_attn\.indexer\.wq_b\.", ".indexer.attn_q_b."),
    (r"\.self_attn\.indexer\.wk\.", ".indexer.attn_k."),
    (r"\.self_attn\.indexer\.weights_proj\.", ".indexer.proj."),
    (r"\.self_attn\.indexer\.k_norm\.", ".indexer.k_norm."),
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
_TWO_NORMS_AT_ONCE = (  # Falcon 40B: the second is attention's
    (r"\.input_layernorm\.", ".attn_norm_2."),
    (r"\.post_attention_layernorm\.", ".attn_norm."),
)


def storage_of(header: GGUFHeader, tensors: Mapping[str, TensorInfo], ignored: tuple[str, ...]) -> Storage:
    """Return the storage of a file. header: of its first part; tensors: all of them; ignored: name patterns."""
    facts = GGUF_OF.get(str(header.metadata["general.architecture"]), GGUFFacts(""))
    norms = _TWO_NORMS_AT_ONCE if "blk.0.attn_norm_2.weight" in tensors else facts.norms
    is_recurrent = "blk.0.ssm_conv1d.weight" in tensors  # then attn_qkv is part of a delta net
    return Storage(
        renames=(*norms, *_LATENT, *_EXPERTS, *_RECURRENT, *_COMMON),
        fused_qkv="qkv_proj" if "blk.0.attn_qkv.weight" in tensors and not is_recurrent else None,
        fused_recurrent=_fused_recurrent(tensors),
        fused_gate_up=facts.fused_gate_up,
        rows=facts.rows,
        added=facts.added,
        ignored=(*ignored, *facts.ignored),
        alternatives=_WITHOUT_SUFFIX,
    )


def _fused_recurrent(tensors: Mapping[str, TensorInfo]) -> tuple[FusedRecurrent, ...]:
    """Return the matrices of Qwen3-Next that are stored as one: b and a, and in old files also qkv and z."""
    stored = {name.split(".", 2)[-1] for name in tensors}
    old = (INPUTS,) if "ssm_in.weight" in stored and "ssm_ba.weight" in stored else ()
    return (*old, RATES) if "ssm_ba.weight" in stored else ()
