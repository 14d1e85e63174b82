"""Every family we run, by the class name in config.json."""

from __future__ import annotations

from localllm.models.architectures import (
    bloom,
    cohere,
    falcon,
    gemma,
    glm,
    gpt2,
    gpt_neox,
    gptj,
    granite,
    llama,
    mistral,
    olmo,
    phi,
    phi3,
    qwen2,
    qwen3,
    smollm3,
    stablelm,
    starcoder2,
)
from localllm.models.architectures.family import Family

FAMILIES = (
    llama.FAMILY,
    mistral.MISTRAL,
    mistral.MINISTRAL,
    qwen2.FAMILY,
    qwen3.FAMILY,
    gemma.GEMMA1,
    gemma.GEMMA2,
    gemma.GEMMA3,
    phi3.FAMILY,
    smollm3.FAMILY,
    phi.FAMILY,
    starcoder2.FAMILY,
    granite.FAMILY,
    olmo.OLMO,
    olmo.OLMO2,
    olmo.OLMO3,
    glm.GLM,
    glm.GLM4,
    cohere.COHERE,
    cohere.COHERE2,
    stablelm.FAMILY,
    falcon.FAMILY,
    bloom.FAMILY,
    gpt2.GPT2,
    gpt2.BIGCODE,
    gptj.FAMILY,
    gpt_neox.FAMILY,
)
FAMILY_OF: dict[str, Family] = {name: family for family in FAMILIES for name in family.architectures}
