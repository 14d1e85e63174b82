"""The Jinja dialect of chat templates in a sandbox: the options and functions that transformers provides.

A template comes with the checkpoint and is untrusted code. It can only read its variables, and its cost is limited
(jinja_bounds.py).
Does not know: messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime
from functools import cache
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from localllm.text import jinja_bounds

MOST_SOURCE = 256 * 1024
"""Most characters of a template; the longest in use have thirty thousand."""


class TemplateRefusal(TemplateError):
    """The template called `raise_exception`: the model was not trained on such messages."""


class JinjaTemplate:
    """One compiled template. Raises jinja2's `TemplateSyntaxError` if it does not compile or is too long."""

    def __init__(self, source: str) -> None:
        if len(source) > MOST_SOURCE:
            raise TemplateSyntaxError(f"it has {len(source):,} characters; the limit is {MOST_SOURCE:,}", 1)
        self.source = source
        try:
            with jinja_bounds.bounded():
                self._template = _environment().from_string(source)
                parsed = _environment().parse(source)
                self.variables = frozenset(meta.find_undeclared_variables(parsed))  # variables that it reads
        except (RecursionError, MemoryError, SyntaxError) as error:  # raised by Python's compiler
            raise TemplateSyntaxError("it is nested too deeply", 1) from error

    def render(self, values: Mapping[str, Any]) -> str:
        """Render the template. Raises `TemplateTooCostly`, and whatever the template raises."""
        with jinja_bounds.bounded():
            return self._template.render(values)


class _GenerationBlock(Extension):
    """Support `{% generation %}...{% endgeneration %}`, which marks the assistant's words for training;
    ignored here."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _CodeGenerator(CodeGenerator):
    """Adds limits to operations that the sandbox leaves to Python."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat((")
        for each in node.nodes:
            self.visit(each, frame)
            self.write(", ")
        self.write("))")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if not isinstance(node.arg, nodes.Slice):
            return super().visit_Getitem(node, frame)
        self.write("environment.made(")
        super().visit_Getitem(node, frame)
        self.write(")")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        self.write("(")
        self._measured(node.expr, frame)
        for operand in node.ops:
            self.visit(operand, frame)
        self.write(")")

    def visit_Operand(self, node: nodes.Operand, frame: Frame) -> None:
        self.write(f" {operators[node.op]} ")
        self._measured(node.expr, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self.write("{")
        for item in node.items:
            self._measured(item.key, frame)
            self.write(": ")
            self.visit(item.value, frame)
            self.write(", ")
        self.write("}")

    def _measured(self, node: nodes.Expr, frame: Frame) -> None:
        """Measure a value's contents, since comparing and hashing traverse them."""
        self.write("environment.measured(")
        self.visit(node, frame)
        self.write(")")


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _CodeGenerator
    intercepted_binops = frozenset({"+", "*", "**", "%"})
    concat = staticmethod(jinja_bounds.joined)
    turns, made, measured = map(staticmethod, (jinja_bounds.turns, jinja_bounds.made, jinja_bounds.measured))

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        """Generate code whose loops count their iterations."""
        for loop in source.find_all(nodes.For):
            counted = nodes.EnvironmentAttribute("turns")
            loop.iter = nodes.Call(counted, [loop.iter], [], None, None, lineno=loop.lineno)
        return str(super()._generate(source.set_environment(self), *args, **kwargs))  # type: ignore[arg-type]

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        jinja_bounds.check_operation(operator, left, right)
        return jinja_bounds.made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        jinja_bounds.check_call(__obj, args, kwargs)
        return jinja_bounds.made(super().call(__context, __obj, *args, **kwargs))

    def getitem(self, obj: Any, argument: Any) -> Any:
        return super().getitem(obj, jinja_bounds.measured(argument))


@cache
def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols],
        finalize=jinja_bounds.measured,
    )  # fmt: skip
    del environment.globals["lipsum"]
    environment.filters["tojson"] = _tojson
    environment.filters = {
        name: jinja_bounds.bounded_filter(name, function) for name, function in environment.filters.items()
    }
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    tests: dict[str, Any] = environment.tests
    environment.tests = {name: jinja_bounds.bounded_test(test) for name, test in tests.items()}
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Format as JSON. Jinja's own filter escapes HTML characters, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> NoReturn:
    raise TemplateRefusal(str(message))


def _strftime_now(format: str) -> str:
    if len(format) > 200 or re.search(r"%[^a-zA-Z%]*\d{3}", format):
        raise TemplateRefusal("the template formats a date with an excessive width")
    return datetime.now().strftime(format)
