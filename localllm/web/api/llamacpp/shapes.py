"""Answers of llama.cpp's own routes, as they are sent.

Does not know: where the values come from.
"""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, UnsetType

from localllm.web.api.timings import ApiTimings
from localllm.web.shape import Shape


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
