"""Models larger than a GPU by their config.json and sizes, and desktops to plan them for."""

from dataclasses import replace
from typing import Any

from localllm.machine.hardware import Hardware, Speeds
from localllm.machine.links import Place
from localllm.models.fit.far import CheckpointBytes, LayerExperts
from localllm.models.spec.model_spec import ModelSpec
from tests.models.harness import GIB, gpu_machine

G = 1e9

GPT_OSS_120B = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 36,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 128,
    "num_experts_per_tok": 4, "intermediate_size": 2880, "vocab_size": 201_088, "max_position_embeddings": 131_072,
    "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 18, "rope_theta": 150_000,
    "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_235B = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 4096, "num_hidden_layers": 94,
    "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536, "intermediate_size": 12_288, "vocab_size": 151_936, "decoder_sparse_step": 1,
    "max_position_embeddings": 40_960, "norm_topk_prob": True, "mlp_only_layers": [], "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3, "moe_intermediate_size": 2048,
    "intermediate_size": 18_432, "vocab_size": 129_280, "max_position_embeddings": 163_840, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "n_group": 8,
    "topk_group": 4, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip


def sized(spec: ModelSpec, bits: float, rest_bytes: float) -> CheckpointBytes:
    """The sizes of a checkpoint whose experts have `bits` per weight, and `rest_bytes` of everything else."""
    mixture = spec.mixture
    assert mixture is not None
    layers = [layer for layer in range(spec.num_layers) if mixture.is_in(layer)]
    each = int(mixture.num_experts * 3 * spec.hidden_size * mixture.intermediate_size * bits / 8)

    def whole(device: str, dtype: str, max_model_len: int, quantization: str | None, shard: Any = None) -> int:
        return int(rest_bytes) + len(layers) * each

    return CheckpointBytes(whole, lambda *given: [LayerExperts(layer, each, each) for layer in layers])


def desk(ram_gib: float, gpu_gib: float = 23.2, **speeds: float | None) -> Hardware:
    """A GPU of 24 GB with 936 GB/s and 36 T multiply-adds/s, and RAM with two channels."""
    machine = gpu_machine(gpu_gib, 24)
    card = replace(machine.gpus[0], place=Place(bandwidth=936 * G, multiplies=36e12))
    free, total = int(ram_gib * 0.92 * GIB), int(ram_gib * GIB)
    found = Speeds(**{"ram": 77 * G, "narrow": 1.2e12, "wide": 0.4e12, **speeds})
    return replace(machine, gpus=(card,), ram_available_bytes=free, ram_total_bytes=total, speeds=found)
