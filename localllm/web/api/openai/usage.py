"""Token counts in OpenAI's format and timings in llama.cpp's; every response has both.

Does not know: where the numbers come from.
"""

from __future__ import annotations

from msgspec import UNSET

from localllm.engine.outputs import PromptProgress, Usage
from localllm.web.api.generation import Progress
from localllm.web.api.openai.shapes import (
    CompletionDetails,
    OpenAIPromptProgress,
    OpenAITimings,
    OpenAIUsage,
    PromptDetails,
)


def usage_object(usage: Usage) -> OpenAIUsage:
    accepted, rejected = usage.drafts.predicted_accepted, usage.drafts.predicted_rejected
    return OpenAIUsage(
        usage.prompt_tokens, usage.completion_tokens, usage.total_tokens, PromptDetails(usage.cached_tokens),
        CompletionDetails(accepted, rejected) if accepted or rejected else UNSET,
    )  # fmt: skip


def timings_object(progress: Progress) -> OpenAITimings:
    """Return llama.cpp's timings. prompt_n counts computed tokens only, and predicted_n the tokens of all choices. With
    several choices, the times and the rate are those of the longest one.
    """
    usage, timings = progress.usage(), progress.timings
    prompt_n, rate = usage.prompt_tokens - usage.cached_tokens, progress.tokens_per_s
    return OpenAITimings(
        cache_n=usage.cached_tokens,
        prompt_n=prompt_n,
        prompt_ms=timings.prefill_s * 1e3,
        prompt_per_token_ms=timings.prefill_s * 1e3 / prompt_n if prompt_n else 0.0,
        prompt_per_second=prompt_n / timings.prefill_s if timings.prefill_s > 0 else 0.0,
        predicted_n=usage.completion_tokens,
        predicted_ms=timings.decode_s * 1e3,
        predicted_per_token_ms=UNSET if rate is None else 1e3 / rate,
        predicted_per_second=UNSET if rate is None else rate,
        queue_ms=timings.queue_s * 1e3,
        ttft_ms=timings.ttft_s * 1e3,
        draft_n=usage.drafts.checked or UNSET,
        draft_n_accepted=usage.drafts.accepted if usage.drafts.checked else UNSET,
    )


def progress_object(progress: PromptProgress) -> OpenAIPromptProgress:
    return OpenAIPromptProgress(progress.total, progress.cached, progress.processed, round(progress.seconds * 1e3))
