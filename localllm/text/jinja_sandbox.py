"""The Jinja dialect of chat templates: the options and functions that transformers gives them, in a sandbox.

A template comes with the checkpoint and is code by a stranger: it can read what it is given and nothing else.
Does not know: messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import cache
from typing import Any, NoReturn

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class TemplateRefusal(TemplateError):
    """The template called `raise_exception`: these messages are not what its model was trained on."""


class JinjaTemplate:
    """One compiled template. Raises jinja2's `TemplateSyntaxError` when it does not compile."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._template = _environment().from_string(source)
        self.variables = frozenset(meta.find_undeclared_variables(_environment().parse(source)))  # that it reads

    def render(self, values: Mapping[str, Any]) -> str:
        return self._template.render(values)


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML characters, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> NoReturn:
    raise TemplateRefusal(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
