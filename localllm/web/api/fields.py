"""The rules for request fields; each dialect fills them in with its own names. Also the fields of llama.cpp's samplers,
for every dialect whose clients send them.

A field is *honoured* (a field of the schema), *harmless* (accepted: it cannot change the answer), a *hint* (accepted
with a warning header: nothing here follows it; hints.py has the table of all dialects), *refused* by
name unless its value has no effect, or *unknown* (accepted with a warning header).
Does not know: any field, values of honoured fields, HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from localllm.errors import UnsupportedParameter


@dataclass(frozen=True, slots=True)
class OneOf:
    """Accepts values that have no effect. `1` differs from `True` and from `1.0`."""

    values: tuple[Any, ...]

    def __call__(self, value: Any) -> bool:
        return any(value == allowed and type(value) is type(allowed) for allowed in self.values)


@dataclass(frozen=True, slots=True)
class ListOf:
    """Accepts lists of words that each have no effect."""

    words: frozenset[str]

    def __call__(self, value: Any) -> bool:
        return isinstance(value, list) and all(isinstance(each, str) and each in self.words for each in value)


@dataclass(frozen=True, slots=True)
class Hint:
    """`why` the field has no effect. A `neutral` value asks for nothing and is accepted without a warning."""

    why: str
    neutral: OneOf = OneOf(())


@dataclass(frozen=True, slots=True)
class Refused:
    """`why` the field is unsupported. A value for which `harmless` is true has no effect and is accepted."""

    why: str
    harmless: OneOf | ListOf = OneOf(())


def one_of(*values: Any) -> OneOf:
    return OneOf(values)


empty = OneOf(([], {}, ""))


@dataclass(frozen=True, slots=True)
class FieldRules:
    """The rules for the fields of one object in one dialect. A field of the schema may also have refused values."""

    harmless: frozenset[str] = frozenset()
    hints: Mapping[str, Hint] = field(default_factory=dict)  # of hints.py
    refused: Mapping[str, Refused] = field(default_factory=dict)

    def check(self, given: Mapping[str, Any], honoured: Iterable[str], inside: str = "") -> list[str]:
        """Refuse unsupported fields by name; return one warning for each field that is accepted but has no effect.

        `inside`: the path to `given` within the body, such as `options.`.
        """
        known, warnings = frozenset(honoured), []
        for name, value in given.items():
            shown, rule = f"{inside}{name}", self.refused.get(name)
            if value is None or name in self.harmless:
                continue
            if rule is not None and not rule.harmless(value):
                raise UnsupportedParameter(f"{shown!r} is not supported with this value.", rule.why, param=shown)
            if rule is not None or name in known:
                continue
            hint = self.hints.get(name)
            if hint is None:
                warnings.append(f"unknown field {shown!r} ignored")
            elif not hint.neutral(value):
                warnings.append(f"field {shown!r} has no effect: {hint.why}")
        return warnings


class SamplerFields(msgspec.Struct, kw_only=True):
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: list[str] | None = None
    top_n_sigma: float | None = None
    typical_p: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
