"""The record of one trial: its measured figures, what was predicted of them, or why it has none.

Does not know: how they were measured (trial.py), which of them counts (goals.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from localllm.tuning.report import RequestTimes, distribution

Fate = Literal["measured", "does not fit", "out of memory", "over a limit", "given up", "not tried", "failed"]
"""Outcome of a trial. "given up": it was so much slower than the best that it was stopped early. "not tried": the load
that it needs would take more time than the run may spend on loads."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """Values calculated before the trial."""

    total_bytes: int  # weights, KV cache, activations, graphs
    kv_bytes: int
    context: int  # tokens of the longest request
    kv_tokens: int  # tokens that all requests can hold together
    each_tokens_per_s: tuple[float, float] | None = None
    """Least and most tokens/s of each answer while the goal's streams generate; None: a speed is unknown."""


@dataclass(frozen=True, slots=True)
class LoadMetrics:
    """Values measured under the goal's load. Latencies are per request; None if no request showed any."""

    duration_s: float
    num_requests: int
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    tpot_p50_s: float | None
    itl_p95_s: float | None
    requests_per_s: float
    output_tokens_per_s: float
    prompt_tokens_per_s: float  # prompt tokens not found in the prefix cache, per second of time to first token
    cached_share: float  # share of the prompt tokens that was found in the prefix cache
    peak_bytes: int  # weights, plus on a CPU the growth of the process, on a GPU all other tensors
    num_preemptions: int
    context: int  # max_model_len of the measured engine


@dataclass(frozen=True, slots=True)
class Trial:
    """One set of settings, tried once."""

    number: int  # from 1
    settings: Mapping[str, Any]  # the fields of EngineConfig that differ from trial to trial
    effort: float  # 1: a full trial
    fate: Fate
    why: str = ""  # the reason, if it was not measured
    predicted: Predicted | None = None  # None: planning failed
    figures: LoadMetrics | None = None
    score: float | None = None  # in the goal's unit
    cost_s: float = 0.0  # seconds, opening and closing included
    reload_s: float = 0.0  # of them, for a load that moved the experts

    @property
    def was_measured(self) -> bool:
        return self.figures is not None and self.score is not None

    @property
    def flags(self) -> str:
        """The settings as command-line flags."""
        return flags_of(self.settings)


def figures_of(
    times: Sequence[RequestTimes], duration_s: float, peak_bytes: int, num_preemptions: int, context: int
) -> LoadMetrics:
    """Return the figures of a load whose requests were all answered, plus the values that only the engine knows."""
    ttft, tpot = distribution(one.ttft_s for one in times), distribution(one.tpot_s for one in times)
    itl = distribution(gap for one in times for gap in one.inter_token_s)
    prompt, cached = sum(one.prompt_tokens for one in times), sum(one.cached_tokens for one in times)
    reading_s = sum(one.ttft_s or 0.0 for one in times)
    return LoadMetrics(
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
    """Return settings as command-line flags. None, False and a cache of experts of the default size are left out; True
    is a flag without a value."""
    words = []
    for name, value in settings.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            words.append(flag)
        elif value is not None and value is not False and (name, value) != ("expert_cache_gib", 0.0):
            words.append(f"{flag} {value}")
    return " ".join(words)


def best_measurements(trials: Sequence[Trial]) -> list[Trial]:
    """Return the best evidence for each measured set of settings: the last full trial, else the last brief one."""
    measured: dict[str, Trial] = {}
    for trial in trials:
        known = measured.get(trial.flags)
        if trial.was_measured and (known is None or trial.effort >= known.effort):
            measured[trial.flags] = trial
    return list(measured.values())


def pareto(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials that no other trial beats in speed, time to first token and context at once, fastest first."""
    measured = best_measurements(trials)
    kept = [one for one in measured if not any(_dominates(other, one) for other in measured)]
    return sorted(kept, key=lambda trial: -_objectives(trial)[0])


def _dominates(one: Trial, other: Trial) -> bool:
    a, b = _objectives(one), _objectives(other)
    return a != b and all(mine >= its for mine, its in zip(a, b, strict=True))


def _objectives(trial: Trial) -> tuple[float, float, float]:
    assert trial.figures is not None
    figures = trial.figures
    return figures.output_tokens_per_s, -(figures.ttft_p50_s or 0.0), float(figures.context)
