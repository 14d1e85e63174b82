"""The body of llama.cpp's POST /completion: the honoured fields, and the rules of the others.

Does not know: the model, sampling rules, HTTP beyond the body.
"""

from __future__ import annotations

from typing import Any

from localllm.web.api.fields import FieldRules, Refused, empty
from localllm.web.api.hints import hints_of
from localllm.web.api.sampler_fields import SamplerFields


class LlamaBody(SamplerFields, kw_only=True):
    model: str | None = None
    prompt: str | list[int]
    n_predict: int | None = None  # -1: up to the end of the context
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None  # -1: random
    stop: list[str] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    n_probs: int | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    cache_prompt: bool | None = None
    return_tokens: bool | None = None


RULES = FieldRules(
    harmless=frozenset({"id_slot", "slot_id", "min_keep", "t_max_predict_ms"}),
    hints=hints_of("llamacpp"),
    refused={
        "image_data": Refused("Supported: text.", empty),
        "multimodal_data": Refused("Supported: text.", empty),
        "lora": Refused("Name an adapter as the model.", empty),
    },
)
