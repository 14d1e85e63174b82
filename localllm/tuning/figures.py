"""What a trial shows: figures, what had been predicted of them, or why there are none.

Does not know: how they were measured (trial.py), which of them counts (goals.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from localllm.tuning.report import RequestTimes, distribution

Fate = Literal["measured", "does not fit", "out of memory", "over a limit", "given up", "failed"]
"""given up: it took so much longer than the best that the rest would have told nothing."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """By arithmetic, before the trial."""

    total_bytes: int  # weights, KV cache, activations, graphs
    kv_bytes: int
    context: int  # tokens of the longest request
    kv_tokens: int  # that all requests can hold together


@dataclass(frozen=True, slots=True)
class Figures:
    """Measured under the goal's load. Latencies are of single requests, None where no request showed any."""

    duration_s: float
    num_requests: int
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    tpot_p50_s: float | None
    itl_p95_s: float | None
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float  # of prompts that had to be read, over the time to their first tokens
    cached_share: float  # of prompt tokens, found in the prefix cache
    peak_bytes: int  # of weights, and on a CPU what the process grew by, on a GPU all other tensors
    num_preemptions: int
    context: int  # of the engine that was measured


@dataclass(frozen=True, slots=True)
class Trial:
    """One set of settings, tried once."""

    number: int  # from 1
    settings: Mapping[str, Any]  # fields of EngineConfig that differ from trial to trial
    effort: float  # 1: in full
    fate: Fate
    why: str = ""  # where it was not measured
    predicted: Predicted | None = None  # None: not even planned
    figures: Figures | None = None
    score: float | None = None  # in the goal's unit
    cost_s: float = 0.0  # opening and closing included

    @property
    def was_measured(self) -> bool:
        return self.figures is not None and self.score is not None

    @property
    def flags(self) -> str:
        """As they are typed."""
        return flags_of(self.settings)


def figures_of(
    times: Sequence[RequestTimes], duration_s: float, peak_bytes: int, num_preemptions: int, context: int
) -> Figures:
    """Of requests that were all answered, with what only the engine itself can say."""
    ttft, tpot = distribution(one.ttft_s for one in times), distribution(one.tpot_s for one in times)
    itl = distribution(gap for one in times for gap in one.inter_token_s)
    prompt, cached = sum(one.prompt_tokens for one in times), sum(one.cached_tokens for one in times)
    reading_s = sum(one.ttft_s or 0.0 for one in times)
    return Figures(
        duration_s=duration_s,
        num_requests=len(times),
        ttft_p50_s=ttft.p50_s if ttft else None,
        ttft_p95_s=ttft.p95_s if ttft else None,
        tpot_p50_s=tpot.p50_s if tpot else None,
        itl_p95_s=itl.p95_s if itl else None,
        requests_per_s=len(times) / duration_s,
        output_tokens_per_s=sum(one.output_tokens for one in times) / duration_s,
        prompt_tokens_per_s=(prompt - cached) / reading_s if reading_s else 0.0,
        cached_share=cached / prompt if prompt else 0.0,
        peak_bytes=peak_bytes,
        num_preemptions=num_preemptions,
        context=context,
    )


def flags_of(settings: Mapping[str, Any]) -> str:
    """What stays at its default (None) is left out, a switch is named or left out."""
    words = []
    for name, value in settings.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            words.append(flag)
        elif value is not None and value is not False:
            words.append(f"{flag} {value}")
    return " ".join(words)


def telling(trials: Sequence[Trial]) -> list[Trial]:
    """Of each set of settings that could be measured the trial that tells most: the last in full, else in brief."""
    told: dict[str, Trial] = {}
    for trial in trials:
        known = told.get(trial.flags)
        if trial.was_measured and (known is None or trial.effort >= known.effort):
            told[trial.flags] = trial
    return list(told.values())


def pareto(trials: Sequence[Trial]) -> list[Trial]:
    """Those that no other beats in speed, time to the first token and context alike. Fastest first."""
    told = telling(trials)
    kept = [one for one in told if not any(_beats(other, one) for other in told)]
    return sorted(kept, key=lambda trial: -_places(trial)[0])


def _beats(one: Trial, other: Trial) -> bool:
    a, b = _places(one), _places(other)
    return a != b and all(mine >= its for mine, its in zip(a, b, strict=True))


def _places(trial: Trial) -> tuple[float, float, float]:
    assert trial.figures is not None
    figures = trial.figures
    return figures.output_tokens_per_s, -(figures.ttft_p50_s or 0.0), float(figures.context)
