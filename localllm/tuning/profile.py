"""Turn a run's result into a stored profile, flags or TOML, and check whether a stored profile still holds.

Does not know: where profiles are stored and when a start uses one (serving/profiles.py), how anything is shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from localllm.config.settings import EngineConfig
from localllm.errors import ConfigError
from localllm.serving.profiles import Profile, ProfileKey, key_of, now, read_profiles, toml_value
from localllm.tuning.figures import Trial, flags_of
from localllm.tuning.goals import Goal, goal_of
from localllm.tuning.run import TuningResult
from localllm.tuning.trial import TrialRunner

LOAD = ("streams", "prompt_len", "output_len", "shared_len", "rounds")
"""Fields of the goal that describe its load on this machine."""
TOLERANCE = 0.10  # relative: the speed of a machine varies by this much


def profile_key(runner: TrialRunner) -> ProfileKey:
    return key_of(runner.bare.served.path, runner.config, runner.hardware, runner.bare.served.plan.device)


def profile_of(result: TuningResult, runner: TrialRunner, name: str, *, applied: bool) -> Profile:
    """Return the profile to store. Requires `result.pick`."""
    pick = result.pick
    assert pick is not None
    assert pick.score is not None
    assert pick.predicted is not None
    return Profile(
        name=name,
        goal=result.goal.name,
        settings=non_default_settings(pick.settings),
        key=profile_key(runner),
        created=now(),
        applied=applied,
        context=pick.predicted.context,
        free_bytes=runner.plan(pick.settings).free_bytes,
        score=pick.score,
        unit=result.goal.unit,
        lengths=result.goal.lengths,
        load={field: getattr(result.goal, field) for field in LOAD},
    )


def non_default_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that differ from the defaults."""
    default = EngineConfig()
    return {name: value for name, value in settings.items() if value is not None and value != getattr(default, name)}


def as_flags(model: str, settings: Mapping[str, Any]) -> str:
    return f"localllm up {model} {flags_of(non_default_settings(settings))}".rstrip()


def as_toml(model: str, settings: Mapping[str, Any]) -> str:
    """Return the settings as a table for config.toml."""
    lines = [f"{name} = {toml_value(value)}" for name, value in non_default_settings(settings).items()]
    return "\n".join([f"[models.{toml_value(model)}]", *lines])


@dataclass(frozen=True, slots=True)
class ProfileCheck:
    """A stored profile and a new measurement of it."""

    profile: Profile
    trial: Trial
    difference: str = ""  # what has changed since it was stored; empty: nothing

    @property
    def change(self) -> float | None:
        """Relative change of the score; None: the settings no longer work."""
        return self.trial.score / self.profile.score - 1 if self.trial.score is not None else None

    @property
    def still_holds(self) -> bool:
        return not self.difference and self.change is not None and self.change > -TOLERANCE


def check(runner: TrialRunner, name: str) -> ProfileCheck:
    """Measure a stored profile again. Raises `ConfigError` if this model has no profile of that name."""
    key = profile_key(runner)
    own = [each for each in read_profiles() if each.key.model == key.model]
    named = sorted((each for each in own if each.name == name), key=lambda each: each.key != key)
    if not named:
        known = ", ".join(sorted({each.name for each in own})) or "none for this model"
        raise ConfigError(f"There is no profile {name!r} to check.", f"Known: {known}.", f"localllm tune --goal {name}")
    profile = named[0]
    goal: Goal = replace(goal_of(profile.goal), **profile.load)
    trial = runner.run(1, profile.settings, goal)
    return ProfileCheck(profile, trial, profile.key.differs_from(key))
