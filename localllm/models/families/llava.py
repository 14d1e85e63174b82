"""LLaVA 1.5, 1.6 (LLaVA-NeXT) and OneVision, Pixtral and Granite Vision in the form that transformers has classes for:
another family's decoder behind a tower and a projector (arXiv:2304.08485, arXiv:2408.03326)."""

from __future__ import annotations

from localllm.models.families import granite
from localllm.models.families.llama import LLAMA
from localllm.models.families.mistral import MISTRAL
from localllm.models.families.qwen import QWEN2, QWEN3
from localllm.models.families.text_part import of_families

LLAVA = of_families(
    "LLaVA, Pixtral",
    (
        "LlavaForConditionalGeneration",
        "LlavaNextForConditionalGeneration",
        "LlavaOnevisionForConditionalGeneration",
    ),
    {"llama": LLAMA, "mistral": MISTRAL, "qwen2": QWEN2, "qwen3": QWEN3, "granite": granite.FAMILY},
)
