"""Limits on the cost of rendering a template: iterations, calls, characters, time. Raises `TemplateTooCostly`.

A template is a program by an unknown author. Loops count their iterations; every operation that makes a text or a list
first checks the length of its result; and containers are measured before they are printed, since one that contains
itself many times is small in memory and long when printed. The thread's CPU time is checked now and then, for costs
that are not counted otherwise.
Does not know: Jinja's syntax, messages.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from jinja2 import TemplateRuntimeError
from jinja2.runtime import Undefined
from jinja2.utils import Namespace

MOST_TURNS = 1_000_000
MOST_CHARACTERS = 10_000_000  # of one text that a template makes; a list element counts as ten
MOST_IN_ALL = 200_000_000  # of all texts that a template makes
MOST_CPU_S = 10.0
_LOOK_EACH = 64  # iterations between two checks of the time
_MOST_DIGITS = re.compile(r"\d{7,}")  # a width in a format
_NESTED_FORMAT = re.compile(r"\{[^{}]{0,100}\{")
_MOST_BITS = 100_000


class TemplateTooCostly(TemplateRuntimeError):
    """The template exceeded a limit that no real template reaches."""


class _Spent(threading.local):
    """Costs so far of the template rendered on this thread."""

    turns = 0
    made = 0
    until_cpu_s = float("inf")


_spent = _Spent()


@contextmanager
def bounded() -> Iterator[None]:
    """Apply the limits to one template being compiled or rendered."""
    _spent.turns, _spent.made, _spent.until_cpu_s = 0, 0, time.thread_time() + MOST_CPU_S
    try:
        yield
    finally:
        _spent.until_cpu_s = float("inf")


def count_turn() -> None:
    _spent.turns += 1
    if _spent.turns > MOST_TURNS:
        raise TemplateTooCostly(f"it needs more than {MOST_TURNS:,} loop iterations and calls")
    if _spent.turns % _LOOK_EACH == 0 and time.thread_time() > _spent.until_cpu_s:
        raise TemplateTooCostly(f"it takes more than {MOST_CPU_S:g} s")


def turns(items: Iterable[Any]) -> Iterable[Any]:
    """Return the items of a loop, counting iterations. A list keeps its length, since a loop may ask for it."""
    return _Turns(items) if isinstance(items, list | tuple | dict | str | range) else _counted(items)


class _Turns:
    def __init__(self, items: Any) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        return _counted(self._items)


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        count_turn()
        yield item


def require(count: int) -> None:
    """Refuse a result of `count` characters or elements if it is too long."""
    if count > MOST_CHARACTERS:
        raise TemplateTooCostly(f"it builds a string or list longer than {MOST_CHARACTERS:,}")


def made(value: Any) -> Any:
    """Count a text or a list that the template has made; return any value unchanged."""
    if _sized(value):
        weight = _weight(value)
        require(weight)
        _spent.made += weight
        if _spent.made > MOST_IN_ALL:
            raise TemplateTooCostly(f"it builds strings and lists of more than {MOST_IN_ALL:,} in total")
    return value


def measured(value: Any) -> Any:
    """Return the value, after checking that its printed contents are not too long. A text's length is already known."""
    if isinstance(value, str):
        require(len(value))
    elif isinstance(value, list | tuple | dict | Namespace):
        left, count = [value], 0
        while left:
            each = left.pop()
            count += 10 + (len(each) if isinstance(each, str) else 0)
            if isinstance(each, Namespace):
                each = each._Namespace__attrs
            if isinstance(each, dict):
                require(count + 20 * len(each))
                left += [*each, *each.values()]
            elif isinstance(each, list | tuple):
                require(count + 10 * len(each))
                left += each
            require(count)
    elif isinstance(value, int) and value.bit_length() > _MOST_BITS:
        require(value.bit_length() * MOST_CHARACTERS)
    return value


def joined(pieces: Iterable[Any]) -> str:
    """Join pieces as text, with limits; replaces `"".join`."""
    texts, count = [], 0
    for piece in pieces:
        text = piece if isinstance(piece, str) else str(measured(piece))
        count += len(text)
        require(count)
        texts.append(text)
    return str(made("".join(texts)))


def check_operation(operator: str, left: Any, right: Any) -> None:
    """Refuse a `+`, `*`, `**` or `%` whose result would be too long."""
    count_turn()
    if operator == "+" and _sized(left) and _sized(right):
        require(_weight(left) + _weight(right))
    elif operator == "*":
        if isinstance(left, int) and isinstance(right, int):
            _require_bits(left.bit_length() + right.bit_length())
        for sized, times in ((left, right), (right, left)):
            if _sized(sized) and isinstance(times, int):
                require(_weight(sized) * times)
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        _require_bits(left.bit_length() * abs(right))
    elif operator == "%" and isinstance(left, str):
        _check_format(left)
        if "*" in left:
            raise TemplateTooCostly("it formats with a width that is not a literal number")
        measured(right)


def check_call(called: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a text method whose result would be too long."""
    count_turn()
    text, name = getattr(called, "__self__", None), getattr(called, "__name__", "")
    if name in ("format", "format_map"):  # the sandbox wraps these
        pattern = str(getattr(getattr(called, "__wrapped__", None), "__self__", "") or text or "")
        _check_format(pattern)
        if _NESTED_FORMAT.search(pattern):
            raise TemplateTooCostly("it formats with a width that is not a literal number")
        measured([*args, *kwargs.values()])
    if isinstance(text, list | tuple | dict):
        measured([each for each in args if not isinstance(each, str)])  # they may be compared or hashed
    elif isinstance(text, str):
        _check_numbers([*args, *kwargs.values()])
        _check_texts(name, text, [*args, *kwargs.values()])


def bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that checks the length of its result before and after."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0
    prints = name not in _STRUCTURAL

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        count_turn()
        given = [*args[first:], *kwargs.values()]
        if prints:
            _check_numbers(given[1:])
            if name != "join":
                measured(given)
        if name == "sum" and any(_sized(each) for each in given[1:]):
            raise TemplateTooCostly("it adds lists with sum")
        if name == "join" and given and not isinstance(given[0], str | Undefined):
            items = [str(measured(item)) for item in _counted(given[0])] if not kwargs and len(given) < 3 else given[0]
            args = (*args[:first], items, *args[first + 1 :])
            _check_texts("join", str(given[1]) if len(given) > 1 else "", [items])
        elif given and isinstance(given[0], str):
            _check_texts(name, given[0], given[1:])
        return made(function(*args, **kwargs))

    return checked


_STRUCTURAL = frozenset(
    {"length", "count", "list", "first", "last", "map", "select", "reject", "selectattr", "rejectattr", "items",
     "default", "d", "reverse", "attr", "sum", "random"}
)  # fmt: skip
"""Filters that neither print nor compare their arguments."""


def bounded_test(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a test with limits, for tests that compare their arguments: `is eq`, `is in`."""

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        count_turn()
        if len(args) > 1:
            measured([each for each in args if not isinstance(each, str)])
        return function(*args, **kwargs)

    return checked


def _check_texts(name: str, text: str, args: list[Any]) -> None:
    numbers = [each for each in args if isinstance(each, int)]
    texts = [each for each in args if isinstance(each, str)]
    if name == "replace" and len(texts) >= 2:
        require(len(text) + text.count(texts[0]) * len(texts[1]))
    elif name == "join" and args:
        items = args[0] if _sized(args[0]) else []
        require(sum(len(item) + len(text) for item in items if isinstance(item, str)))
    elif name in ("expandtabs", "indent", "wordwrap"):
        lines = 1 + len(text) if name == "wordwrap" else 1 + text.count("\n") + text.count("\t")
        require(len(text) + lines * max([*numbers * (name != "wordwrap"), *map(len, texts), 0]))
    elif name == "translate":
        raise TemplateTooCostly("it uses translate with a table")
    elif name == "format":
        _check_format(text)


def _check_numbers(values: list[Any]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MOST_CHARACTERS:
            raise TemplateTooCostly(f"it asks for a width or a count of more than {MOST_CHARACTERS:,}")


def _check_format(text: str) -> None:
    if _MOST_DIGITS.search(text):
        raise TemplateTooCostly("it formats with a width of millions")


def _require_bits(count: int) -> None:
    if count > _MOST_BITS:
        raise TemplateTooCostly(f"it computes a number of more than {_MOST_BITS:,} bits")


def _weight(value: Any) -> int:
    return len(value) * (10 if isinstance(value, list | tuple) else 1)


def _sized(value: Any) -> bool:
    return isinstance(value, str | bytes | list | tuple)
