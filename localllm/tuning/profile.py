"""From a run's result to a profile that the next start uses, to flags or TOML; and whether a stored one is still true.

Does not know: where profiles lie and when a start takes one (localllm/profiles.py), how anything is shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from localllm.config import EngineConfig
from localllm.errors import ConfigError
from localllm.profiles import Key, Profile, key_of, now, read_profiles, toml_value
from localllm.tuning.figures import Trial, flags_of
from localllm.tuning.goals import Goal, goal_of
from localllm.tuning.run import TuningResult
from localllm.tuning.trial import TrialBed

LOAD = ("streams", "prompt_len", "output_len", "shared_len", "rounds")
"""What a goal's load was made of on this machine."""
TOLERANCE = 0.10  # relative: a machine is never twice in the same state


def key_here(bed: TrialBed) -> Key:
    return key_of(bed.bare.served.path, bed.config, bed.hardware, bed.bare.served.plan.device)


def profile_of(result: TuningResult, bed: TrialBed, name: str, *, applied: bool) -> Profile:
    """Of a result that has a pick."""
    pick = result.pick
    assert pick is not None
    assert pick.score is not None
    assert pick.predicted is not None
    return Profile(
        name=name,
        goal=result.goal.name,
        settings=kept(pick.settings),
        key=key_here(bed),
        created=now(),
        applied=applied,
        context=pick.predicted.context,
        free_bytes=bed.plan(pick.settings).free_bytes,
        score=pick.score,
        unit=result.goal.unit,
        lengths=result.goal.lengths,
        load={field: getattr(result.goal, field) for field in LOAD},
    )


def kept(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are not what they would be anyway."""
    default = EngineConfig()
    return {name: value for name, value in settings.items() if value is not None and value != getattr(default, name)}


def as_flags(model: str, settings: Mapping[str, Any]) -> str:
    return f"localllm up {model} {flags_of(kept(settings))}".rstrip()


def as_toml(model: str, settings: Mapping[str, Any]) -> str:
    """A table for config.toml."""
    lines = [f"{name} = {toml_value(value)}" for name, value in kept(settings).items()]
    return "\n".join([f"[models.{toml_value(model)}]", *lines])


@dataclass(frozen=True, slots=True)
class Checked:
    """A stored profile, measured again."""

    profile: Profile
    trial: Trial
    difference: str = ""  # what is not as it was; empty: all is

    @property
    def change(self) -> float | None:
        """Of the score, relative; None: it no longer works."""
        return self.trial.score / self.profile.score - 1 if self.trial.score is not None else None

    @property
    def is_true(self) -> bool:
        return not self.difference and self.change is not None and self.change > -TOLERANCE


def check(bed: TrialBed, name: str) -> Checked:
    """Raises `ConfigError` where there is no such profile of this model."""
    key = key_here(bed)
    own = [each for each in read_profiles() if each.key.model == key.model]
    named = sorted((each for each in own if each.name == name), key=lambda each: each.key != key)
    if not named:
        known = ", ".join(sorted({each.name for each in own})) or "none for this model"
        raise ConfigError(f"There is no profile {name!r} to check.", f"Known: {known}.", f"localllm tune --goal {name}")
    profile = named[0]
    goal: Goal = replace(goal_of(profile.goal), **profile.load)
    trial = bed.run(1, profile.settings, goal)
    return Checked(profile, trial, profile.key.differs_from(key))
