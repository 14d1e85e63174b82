"""Token counts in OpenAI's format, and the progress of a prompt in llama.cpp's.

Does not know: where the numbers come from.
"""

from __future__ import annotations

from msgspec import UNSET

from localllm.engine.outputs import PromptProgress, Usage
from localllm.web.api.openai.shapes import (
    CompletionDetails,
    OpenAIPromptProgress,
    OpenAIUsage,
    PromptDetails,
)


def usage_object(usage: Usage) -> OpenAIUsage:
    accepted, rejected = usage.drafts.predicted_accepted, usage.drafts.predicted_rejected
    return OpenAIUsage(
        usage.prompt_tokens, usage.completion_tokens, usage.total_tokens, PromptDetails(usage.cached_tokens),
        CompletionDetails(accepted, rejected) if accepted or rejected else UNSET,
    )  # fmt: skip


def progress_object(progress: PromptProgress) -> OpenAIPromptProgress:
    return OpenAIPromptProgress(progress.total, progress.cached, progress.processed, round(progress.seconds * 1e3))
