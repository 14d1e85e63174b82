"""The description of one setting: its text, its allowed values, its flag, and how a value is parsed and checked.

`setting(...)` makes a field of config/settings.py with its description; everything that shows, parses or checks a
setting reads the description.
Does not know: which settings there are, where a value comes from.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

from localllm.errors import ConfigError
from localllm.units import format_bytes, parse_bytes, parse_count, parse_keep_alive


class _ValueKind(NamedTuple):
    parse: Callable[[Any], Any]
    expected: str
    metavar: str


@dataclass(frozen=True, slots=True)
class SettingSpec:
    """The description of one setting: its meaning, its allowed values, and where it can be set.

    `name`, `type` and `default` are its field's."""

    group: str
    text: str  # what the setting does, without a full stop
    _: KW_ONLY
    unit: str = ""  # of a number; "bytes" and "seconds" also say how a value is written
    low: int | None = None
    high: int | None = None
    choices: tuple[Any, ...] = ()
    allowed_text: str = ""  # the allowed values in words, where neither bounds nor choices describe them
    accepts: Callable[[Any], bool] | None = None  # whether one value is allowed, besides bounds and choices
    parser: Callable[[Any], Any] | None = None  # None: by `kind`
    note: str = ""  # follows the allowed values in a description
    unset: str = "none"  # what the value None means
    has_flag: bool = True  # otherwise an argument of the verb
    aliases: tuple[str, ...] = ()  # other spellings of the flag
    metavar_text: str = ""  # empty: by `kind`
    repeats: bool = False  # the flag may be given several times
    takes_words: bool = False  # the flag takes several words
    environment: str = ""  # variable that sets it
    by_hand: str = ""  # why the settings page cannot change it; empty: the page can
    is_secret: bool = False  # never shown
    is_path: bool = False
    is_of_one_model: bool = False  # models that a request names do not inherit the value
    name: str = ""
    type: str = ""
    default: Any = None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def kind(self) -> str:
        """bytes, seconds, or the first type of the field: bool, int, float, str, tuple."""
        return self.unit if self.unit in _KINDS else re.findall(r"\w+", self.type)[0]

    @property
    def metavar(self) -> str:
        """The value's name in the help; empty for a switch."""
        return self.metavar_text or _KINDS[self.kind].metavar

    @property
    def allowed(self) -> str:
        """The allowed values in words; empty: all values of its kind."""
        if self.allowed_text or self.low is None:
            *first, last = [self.shown(choice) for choice in self.choices] or [""]
            return self.allowed_text or " or ".join(filter(None, (", ".join(first), last)))
        low = self.shown(self.low)
        return f"at least {low}" if self.high is None else f"{low} to {self.shown(self.high)}"

    @property
    def options(self) -> tuple[str, ...]:
        """The values to choose from, as they are typed; empty: any."""
        return ("true", "false") if self.kind == "bool" else tuple(map(str, self.choices))

    @property
    def meaning(self) -> str:
        """The text with the allowed values and the note."""
        text = self.text + (", comma-separated" if self.kind == "tuple" and not self.takes_words else "")
        if self.low is None or self.allowed_text:
            text += f": {self.allowed}" if self.allowed else ""
        elif self.low > 1 or self.high is not None:
            text += f" ({self.allowed})"
        return text + (f"; {self.note}" if self.note else "")

    @property
    def help(self) -> str:
        """The meaning with the default, for the command line."""
        shows_default = self.default not in (None, False, ()) or self.unset != "none"
        return self.meaning + (f"; default: {self.shown(self.default)}" if shows_default else "")

    def parse(self, raw: Any, said: str = "") -> Any:
        """Convert a value to the setting's type. The environment gives strings, flags and TOML typed values.

        said: the value with the place it comes from, for the `ConfigError` of a wrong value; empty: the flag.
        """
        if raw is None:
            return None
        kind = _KINDS[self.kind]
        try:
            return (self.parser or kind.parse)(raw)
        except (KeyError, ValueError, TypeError, AttributeError):
            expected = self.allowed_text if self.parser and self.allowed_text else kind.expected
            what, why = f"{said or f'{self.flag} {raw!r}'} is not valid.", f"It must be {expected}."
            raise ConfigError(what, why, param=self.name) from None

    def check(self, value: Any, said: str = "") -> None:
        """Raise `ConfigError` if a value, or one of several, is not allowed. said: as for `parse`."""
        for each in value if isinstance(value, tuple) else (value,):
            if not self._is_allowed(each):
                what, why = f"{said or f'{self.flag} {each}'} is out of range.", f"Allowed: {self.allowed}."
                raise ConfigError(what, why, param=self.name)

    def _is_allowed(self, value: Any) -> bool:
        if value is None:
            return "None" in self.type
        in_bounds = (self.low is None or value >= self.low) and (self.high is None or value <= self.high)
        return in_bounds and (not self.choices or value in self.choices) and (not self.accepts or self.accepts(value))

    def shown(self, value: Any) -> str:
        """Return a value as text."""
        if value is None or value == ():
            return self.unset
        if self.is_secret:
            return "set, not shown"
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, tuple):
            return ", ".join("=".join(each) if isinstance(each, tuple) else str(each) for each in value)
        if self.unit == "bytes":
            return format_bytes(value).replace(".0 ", " ")
        if isinstance(value, float):
            return "for ever" if math.isinf(value) else f"{value:g}"
        return str(value)

    def typed(self, value: Any) -> str:
        """Return a value as it can be typed: `parse` reads the same value from it. Empty for None, a secret, and a
        value that cannot be typed in one line.
        """
        if value is None or value == () or self.is_secret:
            return ""
        text = self._sized(value) if self.unit == "bytes" and isinstance(value, int) else self.shown(value)
        try:
            return text if self.parse(text) == value else str(value)
        except ConfigError:
            return "-1" if self.unit == "seconds" and math.isinf(value) else ""

    @staticmethod
    def _sized(size_bytes: int) -> str:
        """Return the size in the largest unit that divides it."""
        units = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
        return next((f"{size_bytes // size}{unit}" for unit, size in units if not size_bytes % size), str(size_bytes))


def setting(default: Any, group: str, text: str, **described: Any) -> Any:
    """Return a dataclass field with its description: arguments as for `SettingSpec`."""
    spec = SettingSpec(group, text, default=default, **described)
    return field(default=default, repr=not spec.is_secret, metadata={"spec": spec})


def _parse_bool(raw: Any) -> bool:
    return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[str(raw).lower()]


def _parse_names(raw: Any) -> tuple[str, ...]:
    texts = [raw] if isinstance(raw, str) else raw
    return tuple(part.strip() for text in texts for part in text.split(",") if part.strip())


_KINDS = {
    "bool": _ValueKind(_parse_bool, "true or false", ""),
    "int": _ValueKind(parse_count, "a whole number such as 8192, 8k or 8K", "N"),
    "float": _ValueKind(float, "a number", "X"),
    "str": _ValueKind(str, "text", "NAME"),
    "tuple": _ValueKind(_parse_names, "text", "NAMES"),
    "bytes": _ValueKind(parse_bytes, "a size such as 512MiB or 4GiB", "SIZE"),
    "seconds": _ValueKind(parse_keep_alive, "a time such as 5m, 90s or 300", "TIME"),
}
