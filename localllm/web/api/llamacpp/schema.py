"""llama.cpp's own routes: the fields of a body, the rules of all others, and answers as they are sent.

Does not know: the model, sampling rules, HTTP beyond the body.
"""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, UnsetType

from localllm.web.api.fields import FieldRules, Refused, SamplerFields, empty
from localllm.web.api.hints import hints_of
from localllm.web.api.timings import ApiTimings
from localllm.web.shape import Shape


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


class LlamaCompletion(Shape, kw_only=True):
    """An answer, or a piece of one. Fields from `model` on are present only in the last piece."""

    index: int = 0
    content: str
    tokens: list[int]
    stop: bool
    completion_probabilities: list[dict[str, Any]] | UnsetType = UNSET
    model: str | UnsetType = UNSET
    tokens_predicted: int | UnsetType = UNSET
    tokens_evaluated: int | UnsetType = UNSET
    tokens_cached: int | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET
    stop_type: str | UnsetType = UNSET  # eos, word or limit
    stopping_word: str | UnsetType = UNSET
    generation_settings: dict[str, Any] | UnsetType = UNSET
    timings: ApiTimings | UnsetType = UNSET


class LlamaSettings(Shape):
    n_ctx: int | None
    params: dict[str, Any]


class LlamaProps(Shape):
    default_generation_settings: LlamaSettings
    total_slots: int
    model_alias: str
    model_path: str
    modalities: dict[str, bool]
    chat_template: str
    chat_template_caps: dict[str, bool]
    bos_token: str
    eos_token: str
    build_info: str
    is_sleeping: bool
