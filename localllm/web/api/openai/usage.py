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
    """Return llama.cpp's timings. prompt_n counts computed tokens only; with several choices the times are those of the
    longest one.
    """
    usage, timings = progress.usage(), progress.timings
    return OpenAITimings(
        usage.cached_tokens,
        *_phase(usage.prompt_tokens - usage.cached_tokens, timings.prefill_s),
        *_phase(usage.completion_tokens, timings.decode_s),
        queue_ms=timings.queue_s * 1e3,
        ttft_ms=timings.ttft_s * 1e3,
        draft_n=usage.drafts.checked or UNSET,
        draft_n_accepted=usage.drafts.accepted if usage.drafts.checked else UNSET,
    )


def progress_object(progress: PromptProgress) -> OpenAIPromptProgress:
    return OpenAIPromptProgress(progress.total, progress.cached, progress.processed, round(progress.seconds * 1e3))


def _phase(tokens: int, seconds: float) -> tuple[int, float, float, float]:
    """Return the tokens, the milliseconds, the milliseconds per token, and the tokens per second."""
    return tokens, seconds * 1e3, seconds * 1e3 / tokens if tokens else 0.0, tokens / seconds if seconds > 0 else 0.0
