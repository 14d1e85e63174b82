"""What becomes of the fields of a request: the rules that each dialect fills with its own names.

A field is *honoured* (a field of the schema), *harmless* (accepted: it cannot change the answer), *late* (accepted
with a warning header: it asks for something that this version does not do and that does not change the answer),
*refused* by name unless its value asks for nothing, or *unknown* (accepted with a warning header).
Does not know: any field, values of honoured fields, HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from localllm.web.errors import UnsupportedParameter


@dataclass(frozen=True, slots=True)
class OneOf:
    """Values that ask for nothing. `1` is not `True`, nor `1.0`."""

    values: tuple[Any, ...]

    def __call__(self, value: Any) -> bool:
        return any(value == allowed and type(value) is type(allowed) for allowed in self.values)


@dataclass(frozen=True, slots=True)
class ListOf:
    """Lists of words, each of which asks for nothing."""

    words: frozenset[str]

    def __call__(self, value: Any) -> bool:
        return isinstance(value, list) and all(isinstance(each, str) and each in self.words for each in value)


@dataclass(frozen=True, slots=True)
class Refused:
    """`why` the field cannot be honoured; a value for which `harmless` holds asks for nothing and passes."""

    why: str
    harmless: OneOf | ListOf = OneOf(())


def one_of(*values: Any) -> OneOf:
    return OneOf(values)


empty = OneOf(([], {}, ""))


@dataclass(frozen=True, slots=True)
class FieldRules:
    """One object's fields in one dialect. Of a field that its schema honours, some values may be refused."""

    harmless: frozenset[str] = frozenset()
    late: Mapping[str, str] = field(default_factory=dict)  # and what decides instead
    refused: Mapping[str, Refused] = field(default_factory=dict)

    def check(self, given: Mapping[str, Any], honoured: Iterable[str], inside: str = "") -> list[str]:
        """Refuse by name what is not honoured; return one warning per field that is accepted and has no effect.

        `inside`: the way to `given` from the body, `options.` for one.
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
            if name in self.late:
                warnings.append(f"field {shown!r} has no effect: {self.late[name]}")
            else:
                warnings.append(f"unknown field {shown!r} ignored")
        return warnings
