"""The text parts of vision-language models: Qwen2-VL, Qwen2.5-VL and Qwen3-VL, InternVL 2.5 to 3.5 in the form that
transformers has a class for, SmolVLM and Idefics 3, GLM-4.1V to 4.6V.

Their multimodal rotary embedding gives text the same position in every section, which is the plain rotary embedding.
"""

from __future__ import annotations

from dataclasses import replace

from localllm.models.families import glm, llama, qwen
from localllm.models.families.text_part import of_families, of_family

_STACKED = (".experts.gate_up_proj", ".experts.down_proj")
QWEN2_VL = of_family(
    "Qwen2-VL, Qwen2.5-VL",
    ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
    qwen.QWEN2,
    rope_theta=1_000_000.0,
)
QWEN3_VL = of_family("Qwen3-VL", ("Qwen3VLForConditionalGeneration",), qwen.QWEN3, rope_theta=500_000.0)
QWEN3_VL_MOE = of_family(
    "Qwen3-VL-MoE",
    ("Qwen3VLMoeForConditionalGeneration",),
    replace(qwen.QWEN3_MOE, storage=replace(qwen.QWEN3_MOE.storage, transposed=_STACKED)),
    rope_theta=500_000.0,
    norm_topk_prob=True,
)
INTERNVL = of_families(
    "InternVL",
    ("InternVLForConditionalGeneration",),
    {"qwen2": qwen.QWEN2, "qwen3": qwen.QWEN3, "qwen3_moe": qwen.QWEN3_MOE, "llama": llama.LLAMA},
)
SMOLVLM = of_families(
    "SmolVLM, Idefics 3",
    ("SmolVLMForConditionalGeneration", "Idefics3ForConditionalGeneration"),
    {"llama": llama.LLAMA},
    prefix="text_model",
)
GLM4V = of_family(
    "GLM-4.1V, GLM-4.6V-Flash",
    ("Glm4vForConditionalGeneration", "Glm46VForConditionalGeneration"),
    glm.GLM4,
    rms_norm_eps=1e-5,
    head_dim=None,
    partial_rotary_factor=1.0,
)
GLM4V_MOE = of_family("GLM-4.5V, GLM-4.6V", ("Glm4vMoeForConditionalGeneration",), glm.FAMILY, attention_bias=True)
FAMILIES = (QWEN2_VL, QWEN3_VL, QWEN3_VL_MOE, INTERNVL, SMOLVLM, GLM4V, GLM4V_MOE)
