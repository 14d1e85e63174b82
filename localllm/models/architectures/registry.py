"""Every family we run, by the class name in config.json."""

from __future__ import annotations

from localllm.models.architectures import gemma, llama, mistral, phi3, qwen2, qwen3, smollm3
from localllm.models.architectures.family import Family

FAMILIES = (
    llama.FAMILY,
    mistral.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    gemma.GEMMA2,
    gemma.GEMMA3,
    phi3.FAMILY,
    smollm3.FAMILY,
)
FAMILY_OF: dict[str, Family] = {name: family for family in FAMILIES for name in family.architectures}
