"""The saved profiles: whether a start on this machine would use each, and applying one.

Does not know: HTTP, templates, how a profile is made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from localllm.config.settings import PLACEMENT, EngineConfig
from localllm.errors import ConfigError
from localllm.machine.hardware import read_hardware
from localllm.serving.entry import ModelEntry
from localllm.serving.manager import ModelManager
from localllm.serving.profiles import (
    Profile,
    ProfileKey,
    StoredProfile,
    from_profile,
    key_of,
    save_profile,
    stored_profile,
    stored_profiles,
    with_profile,
)
from localllm.tuning.figures import flags_of
from localllm.tuning.goals import GOALS
from localllm.units import format_rate
from localllm.web.pages.frame.views import Fact, View, view

ProfileState = Literal["matches", "differs", "other"]


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """A saved profile."""

    file: str
    model: str
    name: str
    goal: str
    date: str
    score: str
    settings: str
    state: ProfileState
    fits: str  # whether a start on this machine would use it, in words
    is_applied: bool
    can_apply: bool
    key: tuple[Fact, ...]


@view("tune/_plans.html")
class ProfileTable(View):
    """All profiles, the newest first."""

    rows: tuple[ProfileRow, ...]


KEY_WORDS = {"device": "Device", "driver": "Driver", "torch": "torch", "triton": "Triton", "localllm": "localllm"}


def profile_table(manager: ModelManager) -> ProfileTable:
    """Return the view of all profiles. Blocking: it reads files and looks at the GPUs."""
    stored = stored_profiles()
    keys = [key for _, key in keys_of_models(manager)] if stored else []
    return ProfileTable(tuple(profile_row(each, keys) for each in stored))


def keys_of_models(manager: ModelManager) -> list[tuple[ModelEntry, ProfileKey]]:
    """Return the profile keys of the models that this server knows. Blocking."""
    hardware, found = read_hardware(), []
    for entry in manager.entries:
        if entry.card is not None:
            config = entry.settings.engine if entry.settings is not None else EngineConfig()
            found.append((entry, key_of(entry.card.path, config, hardware, entry.card.plan.device)))
    return found


async def apply_saved(manager: ModelManager, file: str) -> None:
    """Apply the profile in a file. Raises `ConfigError` if there is none, or if no model here matches it, and the
    errors of reloading a model.
    """
    stored = await asyncio.to_thread(stored_profile, file)
    keys = await asyncio.to_thread(keys_of_models, manager)
    entry = next((entry for entry, key in keys if key == stored.profile.key), None)
    if entry is None:
        _, why = _fits(stored.profile, [key for _, key in keys])
        raise ConfigError(f"{stored.profile.name} of {stored.model} cannot be applied.", why, param="file")
    await apply_profile(manager, entry, replace(stored.profile, applied=True), stored.model)


async def apply_profile(manager: ModelManager, entry: ModelEntry, profile: Profile, model: str) -> None:
    """Reload the model with the profile and save the profile for later starts. If the reload fails, nothing is saved.
    `model`: the name to save it under. Raises `ConfigError` if the profile puts experts elsewhere than a flag does.
    """
    assert entry.settings is not None, "a model that was tuned can be opened again"
    settings = with_profile(entry.settings, profile)
    for name in PLACEMENT:
        used = getattr(settings.engine, name)
        if profile.settings.get(name, used) != used:
            raise ConfigError(
                f"{profile.name} cannot be applied while this server runs.",
                f"It has {flags_of({name: profile.settings[name]})}; the server was started with "
                f"{flags_of({name: used}) or 'other flags for the same'}, which takes precedence.",
                f"Save it, and start without that flag: localllm up {model} --profile {profile.name}", param=name,
            )  # fmt: skip
    await manager.lending.reopen(entry.name, from_profile(settings))
    await asyncio.to_thread(save_profile, profile, model)


def profile_row(stored: StoredProfile, keys: Sequence[ProfileKey]) -> ProfileRow:
    profile = stored.profile
    state, fits = _fits(profile, keys)
    goal = GOALS.get(profile.goal)
    return ProfileRow(
        file=stored.path.name,
        model=stored.model,
        name=profile.name,
        goal=profile.goal,
        date=profile.date,
        score=goal.in_words(profile.score) if goal is not None else format_rate(profile.score, profile.unit),
        settings=flags_of(profile.settings) or "the defaults",
        state=state,
        fits=fits,
        is_applied=profile.applied,
        can_apply=state == "matches" and not profile.applied,
        key=tuple(Fact(words, getattr(profile.key, name) or "none") for name, words in KEY_WORDS.items()),
    )


def _fits(profile: Profile, keys: Sequence[ProfileKey]) -> tuple[ProfileState, str]:
    key = profile.key
    here = next((each for each in keys if each.model == key.model), None)
    if here is not None:
        difference = key.differs_from(here)
        use = "Every start uses it." if profile.applied else f"A start with --profile {profile.name} uses it."
        return ("differs", f"Not used: {difference}.") if difference else ("matches", use)
    if keys and (difference := replace(key, model=keys[0].model, form=keys[0].form).differs_from(keys[0])):
        return "differs", f"Not used: {difference}."
    return "other", "Its model is not loaded, or the model's files have changed."
