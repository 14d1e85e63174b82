"""The profiles that were kept, and whether a start here would use each.

Does not know: HTTP, templates, how a profile comes about.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from localllm.config import EngineConfig
from localllm.hardware import read_hardware
from localllm.manager import ModelManager
from localllm.profiles import Key, Profile, Stored, key_of, stored_profiles
from localllm.tuning.figures import flags_of
from localllm.tuning.goals import GOALS
from localllm.units import format_rate
from localllm.web.views.shared import Fact
from localllm.web.views.tune import PlanRow, Plans, PlanState

KEY_WORDS = {"device": "Device", "driver": "Driver", "torch": "torch", "triton": "Triton", "localllm": "localllm"}


def plans(manager: ModelManager) -> Plans:
    """Blocking: it reads files and looks at the GPUs."""
    stored = stored_profiles()
    keys = keys_here(manager) if stored else []
    return Plans(tuple(plan_row(each, keys) for each in stored))


def keys_here(manager: ModelManager) -> list[Key]:
    """Of the models that this server has or had."""
    hardware = read_hardware()
    known = [(kept, kept.card) for kept in manager.kept]
    return [
        key_of(card.path, kept.settings.engine if kept.settings else EngineConfig(), hardware, card.plan.device)
        for kept, card in known
        if card is not None
    ]


def plan_row(stored: Stored, keys: Sequence[Key]) -> PlanRow:
    profile = stored.profile
    state, fits = _fits(profile, keys)
    return PlanRow(
        file=stored.path.name,
        model=stored.model,
        name=profile.name,
        goal=profile.goal,
        date=profile.date,
        score=_score(profile),
        settings=flags_of(profile.settings) or "the defaults",
        state=state,
        fits=fits,
        is_applied=profile.applied,
        key=tuple(Fact(words, getattr(profile.key, name) or "none") for name, words in KEY_WORDS.items()),
    )


def _fits(profile: Profile, keys: Sequence[Key]) -> tuple[PlanState, str]:
    key = profile.key
    here = next((each for each in keys if each.model == key.model), None)
    if here is not None:
        difference = key.differs_from(here)
        use = "Every start uses it." if profile.applied else f"A start with --profile {profile.name} uses it."
        return ("differs", f"Not used: {difference}.") if difference else ("matches", use)
    if keys and (difference := replace(key, model=keys[0].model, form=keys[0].form).differs_from(keys[0])):
        return "differs", f"Not used: {difference}."
    return "other", "Of a model that is not loaded, or whose files have changed."


def _score(profile: Profile) -> str:
    goal = GOALS.get(profile.goal)
    return goal.in_words(profile.score) if goal is not None else format_rate(profile.score, profile.unit)
