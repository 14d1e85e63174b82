"""The parts of the model that every page shows: the status pill in the header, and the progress of a load.

Does not know: HTTP, templates, where the statistics came from.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from localllm.engine.stats import EngineStats
from localllm.web.pages.frame.errors import notice
from localllm.web.pages.frame.views import Loading, LoadPhase, StatusPill

if TYPE_CHECKING:
    from localllm.models.fit import MemoryPlan
    from localllm.serving.entry import ModelEntry


PHASES = {
    "find": ("Find the files", 2),
    "torch": ("Start PyTorch", 20),
    "profile": ("Choose a tuned profile", 1),
    "fit": ("Check the memory", 3),
    "tokenizer": ("Read the tokenizer", 4),
    "weights": ("Read the weights", 58),
    "memory": ("Set up the KV cache", 8),
    "engine": ("Start the engine", 2),
    "adapters": ("Read the adapters", 2),
}
"""Phase of a load -> its words, and its usual share of the time in percent; in their order."""
RESTS = {"unloaded": "not loaded", "sleeping": "asleep"}


def status_pill(
    model: str | None, state: str, stats: EngineStats | None, plan: MemoryPlan | None, num_others: int = 0
) -> StatusPill:
    """Return the header's status pill; without an engine it shows the model's state. `num_others`: other models that
    are loaded.
    """
    if model is None or stats is None or plan is None:
        return StatusPill("error" if state == "failed" else "loading", state or "loading")
    busy = stats.num_running + stats.num_waiting
    waiting = f", {stats.num_waiting} waiting" if stats.num_waiting else ""
    label = f"{stats.num_running} running{waiting}" if busy else "ready"
    return StatusPill(
        state="busy" if busy else "ready",
        label=label,
        model=model,
        tokens_per_s=stats.decode_tokens_per_s,
        kv_usage=stats.kv_usage,
        context_tokens=plan.max_model_len,
        memory_bytes=plan.weights_bytes + plan.kv_bytes + plan.state_bytes + plan.activation_bytes,
        num_others=num_others,
    )


def chat_pill(entry: ModelEntry | None, stats: EngineStats | None, plan: MemoryPlan | None) -> StatusPill:
    """Return the status of one model for the head of its chat."""
    if entry is None:
        return StatusPill("idle", "no model", is_brief=True)
    if stats is None or plan is None:
        if entry.state in RESTS:
            return StatusPill("idle", RESTS[entry.state], entry.name, is_brief=True)
        return replace(status_pill(None, entry.state, None, None), model=entry.name, is_brief=True)
    return replace(status_pill(entry.name, entry.state, stats, plan), is_brief=True)


def loading(entry: ModelEntry | None) -> Loading:
    """Return the progress of a model's load, or why the load failed."""
    if entry is None:
        return Loading("the model")
    error = notice(entry.error) if entry.error and entry.state == "failed" else None
    rests = entry.state if entry.state in ("sleeping", "unloaded") else ""
    return Loading(entry.name, load_phases(entry), error, rests, entry.state == "tuning", load_fraction(entry))


def load_phases(entry: ModelEntry) -> tuple[LoadPhase, ...]:
    """Return the phases of a model's current load."""
    return tuple(
        LoadPhase(PHASES.get(phase.name, (phase.name,))[0], phase.done, phase.fraction, phase.detail)
        for phase in entry.phases.values()
    )


def load_fraction(entry: ModelEntry) -> float | None:
    """Return how much of a model's current load is done, over all its phases: 0 to 1; None: it has not begun."""
    phase = next(reversed(entry.phases.values()), None)
    if phase is None or phase.name not in PHASES:
        return None
    before = sum(share for _, share in list(PHASES.values())[: list(PHASES).index(phase.name)])
    part = 1.0 if phase.done else phase.fraction or 0.0
    return (before + part * PHASES[phase.name][1]) / sum(share for _, share in PHASES.values())
