"""Token counts in OpenAI's format and timings in llama.cpp's; every response has both.

Does not know: where the numbers come from.
"""

from __future__ import annotations

from typing import Any

from localllm.engine.outputs import PromptProgress, Usage
from localllm.web.api.generation import Progress


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def timings_object(progress: Progress) -> dict[str, Any]:
    """Return llama.cpp's timings. prompt_n counts computed tokens only; with several choices the times are those of the
    longest one.
    """
    usage, timings = progress.usage(), progress.timings
    return {
        "cache_n": usage.cached_tokens,
        **_phase("prompt", usage.prompt_tokens - usage.cached_tokens, timings.prefill_s),
        **_phase("predicted", usage.completion_tokens, timings.decode_s),
        "queue_ms": timings.queue_s * 1e3,
        "ttft_ms": timings.ttft_s * 1e3,
    }


def progress_object(progress: PromptProgress) -> dict[str, Any]:
    return {
        "total": progress.total,
        "cache": progress.cached,
        "processed": progress.processed,
        "time_ms": round(progress.seconds * 1e3),
    }


def _phase(name: str, tokens: int, seconds: float) -> dict[str, Any]:
    return {
        f"{name}_n": tokens,
        f"{name}_ms": seconds * 1e3,
        f"{name}_per_token_ms": seconds * 1e3 / tokens if tokens else 0.0,
        f"{name}_per_second": tokens / seconds if seconds > 0 else 0.0,
    }
