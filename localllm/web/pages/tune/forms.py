"""The wizard's form: a goal with limits, and the effort.

Every field is honoured or refused by name. Does not know: HTTP, how a run works.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TypeVar

from localllm.errors import InvalidParameter
from localllm.tuning.goals import Goal, GoalLimits, goal_of
from localllm.tuning.run import TuneOptions
from localllm.units import parse_bytes, parse_count


@dataclass(frozen=True, slots=True)
class LimitFields:
    """The limits, as they were typed."""

    max_ttft: str = ""
    max_tpot: str = ""
    min_context: str = ""
    max_memory: str = ""
    people: str = ""


EFFORTS: dict[str, TuneOptions] = {"quick": TuneOptions.quick(), "full": TuneOptions()}
LONGEST_TEXT = 100
Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class RunForm:
    """The run that a form asks for."""

    model: str
    goal: Goal
    effort: str
    moves_experts: bool = False

    @property
    def options(self) -> TuneOptions:
        return replace(EFFORTS[self.effort], placements="on" if self.moves_experts else "off")


def read_form(form: Mapping[str, str]) -> RunForm:
    """Return the run of a form. Raises `InvalidParameter` and `ConfigError`, both with the field's name."""
    known = {"model", "goal", "effort", "placements"} | {each.name for each in fields(LimitFields)}
    if unknown := sorted(form.keys() - known):
        raise InvalidParameter(f"The form has no field {unknown[0][:LONGEST_TEXT]!r}.", param=unknown[0][:LONGEST_TEXT])
    limits = GoalLimits(
        max_ttft_s=_read(form, "max_ttft", "a number of seconds, such as 2.5", float),
        max_tpot_s=_read(form, "max_tpot", "a number of milliseconds, such as 80", lambda text: float(text) / 1e3),
        min_context=_read(form, "min_context", "a number of tokens, such as 8192 or 8k", parse_count),
        max_memory_bytes=_read(form, "max_memory", "a size, such as 6 GiB", parse_bytes),
    )
    effort = form.get("effort", "quick")
    if effort not in EFFORTS:
        why = f"Known efforts: {', '.join(EFFORTS)}."
        raise InvalidParameter(f"Unknown effort {effort[:LONGEST_TEXT]!r}.", why, param="effort")
    if (placements := form.get("placements", "off")) not in ("on", "off"):
        what = f"Unknown value {placements[:LONGEST_TEXT]!r} of placements."
        raise InvalidParameter(what, "Known: on, off.", param="placements")
    people = _read(form, "people", "a number of users, 1 to 256", parse_count)
    goal = goal_of(form.get("goal", "")[:LONGEST_TEXT], limits, people)
    return RunForm(form.get("model", ""), goal, effort, placements == "on")


def typed_limits(form: Mapping[str, str]) -> LimitFields:
    """Return the typed limits, to be shown again beside an error."""
    return LimitFields(**{each.name: form.get(each.name, "")[:LONGEST_TEXT] for each in fields(LimitFields)})


NAMES = {
    "max_ttft": "The longest wait for the first token", "max_tpot": "The longest time for each token",
    "min_context": "The shortest context", "max_memory": "The most memory", "people": "The number of users",
}  # fmt: skip


def _read(form: Mapping[str, str], name: str, example: str, parse: Callable[[str], Number]) -> Number | None:
    text = form.get(name, "").strip()
    if not text:
        return None
    try:
        value = parse(text) if len(text) <= LONGEST_TEXT else 0
        if math.isfinite(value) and value > 0:
            return value
    except (ValueError, OverflowError):
        pass
    why = f"Got {text[:LONGEST_TEXT]!r}; it must be {example}, above 0."
    raise InvalidParameter(f"{NAMES[name]} is not valid.", why, "Leave it empty for no limit.", param=name)
