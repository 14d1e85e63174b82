"""Turn the counts of speculation into the tile about drafts.

Does not know: HTTP, templates, how drafts are made.
"""

from __future__ import annotations

from localllm.engine.stats import NO_SPECULATION, OFF_REASONS, SpeculationStats
from localllm.units import format_count
from localllm.web.pages.dashboard.views import Drafts
from localllm.web.pages.frame.views import Fact


def drafts(stats: SpeculationStats, minute_ago: SpeculationStats | None) -> Drafts:
    """Return the figures of the last minute; if nothing was generated in it, of the whole run."""
    if not stats.is_on:
        return Drafts(why_off=stats.why_off or NO_SPECULATION.why_off)
    recent = minute_ago is not None and stats.num_decode_rows > minute_ago.num_decode_rows
    seen = stats.since(minute_ago) if recent and minute_ago is not None else stats
    return Drafts(
        tokens_per_step=f"{seen.tokens_per_row:.1f}" if seen.num_decode_rows else "–",
        accepted=seen.num_accepted_tokens,
        drafted=seen.num_draft_tokens,
        facts=(_width(stats), *_steps_without(seen)),
        span="last minute" if recent else "since start",
    )


def _width(stats: SpeculationStats) -> Fact:
    """Return the most drafts of a request in the last step that generated, and why there were none."""
    reason = OFF_REASONS.get(stats.last_reason, stats.last_reason)
    return Fact("Width of the last step", format_count(stats.last_width), reason or "drafts of a request, at most")


def _steps_without(seen: SpeculationStats) -> tuple[Fact, ...]:
    """Return how many steps generated without drafts, by reason, the most frequent first."""
    counts = sorted([(count, reason) for reason, count in seen.off_steps if count], reverse=True)
    if not counts:
        return ()
    reasons = "; ".join(f"{format_count(count)}: {OFF_REASONS.get(reason, reason)}" for count, reason in counts)
    return (Fact("Steps without drafts", format_count(sum(count for count, _ in counts)), reasons),)
