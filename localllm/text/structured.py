"""Structured output: vLLM's `structured_outputs`, validated and converted to an llguidance grammar.

    json              a JSON schema, as an object or as text
    json_object       any JSON object
    regex             the whole text matches it
    choice            one of these texts
    grammar           Lark in llguidance's dialect, or llama.cpp's GBNF
    structural_tag    free text, and after each trigger the format of a schema

Between its parts, JSON may have one blank, or one line end and up to 20 blanks: enough for indented output, and a model
cannot write blanks for ever.
Does not know: tokens, sampling.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from localllm.errors import InvalidParameter
from localllm.text.grammar_levels import levels_of

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

WHITESPACE = r"[ \t]|\n[ \t]{0,20}"
MAX_CHARACTERS = 1 << 20  # of a schema, a grammar, an expression, all choices together
MAX_GBNF_CHARACTERS = 1 << 16  # less, since GBNF is rewritten as Lark in Python
MAX_LEVELS = 10_000
"""Most levels of nesting and chained references. Schemas of whole APIs have a few hundred."""
_LARK = re.compile(r"^[ \t]*(?:%llguidance\b|start[ \t]*:(?!:=))", re.MULTILINE)
_NO_OBJECT = ("json_object", False)
UNUSABLE = object()
"""`StructuredOutputsParams.compiled` of an optional grammar that cannot be compiled, or not in time."""
KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """The requested format; exactly one of KINDS is set.
    Raises `InvalidParameter` if none or several are, or on a wrong type."""

    json: str | Mapping[str, Any] | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    disable_any_whitespace: bool = False  # JSON without blanks
    whitespace_pattern: str | None = None  # replaces WHITESPACE
    param: str = "structured_outputs"  # field named in errors
    after: tuple[str, str] | None = None  # markers of reasoning, which may come before the output
    is_inside: bool = False  # whether the prompt has opened the reasoning
    opened_by: tuple[str, ...] = ()
    """The grammar applies from each of these markers on until its text is complete, and all other text is free. Such a
    grammar is optional: if it cannot be compiled, the whole text is free."""
    _grammar: str | None = field(default=None, init=False, repr=False, compare=False)  # cached result of to_grammar
    _levels: int | None = field(default=None, init=False, repr=False, compare=False)
    compiled: Any = field(default=None, init=False, repr=False, compare=False)  # cached by text/grammar.py

    def __post_init__(self) -> None:
        given = [
            kind for kind in KINDS if getattr(self, kind) is not None and (kind, getattr(self, kind)) != _NO_OBJECT
        ]
        if len(given) != 1:
            what = f"{' and '.join(given)} cannot be combined" if given else "no format is given"
            raise self.refusal(f"{what[:1].upper()}{what[1:]}.", f"Set one of {', '.join(KINDS)}.")
        for name in ("regex", "grammar", "whitespace_pattern"):
            if not isinstance(getattr(self, name), str | None):
                raise self.refusal(f"{name} must be text.", f"Got {type(getattr(self, name)).__name__}.")
        if self.choice is not None:
            self._check_choice(self.choice)

    def _check_choice(self, choice: object) -> None:
        if isinstance(choice, str) or not isinstance(choice, Sequence) or not choice:
            raise self.refusal("choice must be a list of strings.", f"Got {choice!r:.80}.")
        for text in choice:
            if not isinstance(text, str) or not text:
                raise self.refusal("choice must hold non-empty strings.", f"Got {text!r}.")

    def to_grammar(self) -> str:
        """Return the grammar for `LLMatcher`, which is also its cache key. Raises `InvalidParameter`."""
        if self._grammar is None:
            grammar = self._within_bounds(self._written())
            levels = levels_of(grammar)
            if levels > MAX_LEVELS:
                raise self.refusal(
                    "The output format is nested too deeply.",
                    f"Its nesting and references have {levels:,} levels; the limit is {MAX_LEVELS:,}.",
                    "Ask for a simpler schema, expression or grammar.",
                )
            object.__setattr__(self, "_levels", levels)
            object.__setattr__(self, "_grammar", grammar)
        assert self._grammar is not None
        return self._grammar

    def levels(self) -> int:
        """Return an upper bound of a compiler's recursion depth for this grammar. Raises `InvalidParameter`."""
        self.to_grammar()
        assert self._levels is not None
        return self._levels

    def to_expression(self) -> str:
        """Return the grammar as a part of a rule in a Lark grammar. Raises `InvalidParameter`."""
        written = self.to_grammar()
        whole = json.loads(written)["grammars"][0] if written.startswith("{") else {"lark_grammar": written}
        if whole.get("json_schema") is not None:
            return f"%json {json.dumps(whole['json_schema'], ensure_ascii=False)}"
        return f"%lark {{\n{whole['lark_grammar']}\n}}"

    def may_begin_with(self, char: str) -> bool:
        """Return whether a text may begin with `char`, as far as known without parsing an expression.
        JSON never begins with "<"."""
        if self.choice is not None:
            return any(text.startswith(char) for text in self.choice)
        return char != "<" or not (self.json is not None or self.json_object)

    def _written(self) -> str:
        from llguidance import LLMatcher

        if self.json is not None or self.json_object:
            return self._json_grammar({"type": "object"} if self.json is None else self.json)
        if self.regex is not None:
            return str(LLMatcher.grammar_from_regex(self._within_bounds(_without_anchors(self.regex))))
        if self.choice is not None:
            texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in self.choice)
            return str(LLMatcher.grammar_from_lark(self._within_bounds(f"start: {texts}")))
        if self.grammar is not None:
            return self._lark_grammar(self._within_bounds(self.grammar))
        return self._tag_grammar()

    def _json_grammar(self, schema: str | Mapping[str, Any] | bool) -> str:
        from llguidance import LLMatcher

        parsed = self._parsed(schema, "schema")
        if not isinstance(parsed, dict | bool):
            raise self.refusal("A JSON schema must be an object.", f"Got {type(parsed).__name__}.")
        if parsed is False:
            raise self.refusal("The schema false allows nothing.")
        try:
            text = self._within_bounds(json.dumps({} if parsed is True else parsed, ensure_ascii=False))
        except RecursionError as error:
            raise self.refusal("The schema is nested too deeply.") from error
        whitespace: JsonCompileOptions = {"whitespace_pattern": self.whitespace_pattern or WHITESPACE}
        if self.disable_any_whitespace:
            whitespace = {"whitespace_flexible": False}
        try:
            return str(LLMatcher.grammar_from_json_schema(text, overrides=whitespace))
        except ValueError as error:  # its parser of JSON goes 128 levels deep
            raise self.refusal("The schema cannot be parsed.", f"{error}.") from error

    def _lark_grammar(self, text: str) -> str:
        from llguidance import LLMatcher

        if _LARK.search(text):
            return str(LLMatcher.grammar_from_lark(text))
        if len(text) > MAX_GBNF_CHARACTERS:
            raise self.refusal(
                "The grammar is too long.",
                f"It has {len(text):,} characters; GBNF may have {MAX_GBNF_CHARACTERS:,}, and Lark {MAX_CHARACTERS:,}.",
            )
        try:
            return str(LLMatcher.grammar_from_lark(_gbnf_to_lark(text)))
        except Exception as error:  # its parser raises what it likes
            raise self.refusal("The grammar cannot be parsed.", f"{error}.") from error

    def _tag_grammar(self) -> str:
        from llguidance import LLMatcher, StructTag

        asked = self._parsed(self.structural_tag, "structural_tag")
        try:
            triggers = [str(trigger) for trigger in asked["triggers"]]
            tags = [
                StructTag(
                    trigger=next(trigger for trigger in triggers if tag["begin"].startswith(trigger)),
                    begin=tag["begin"],
                    grammar=dict(tag["schema"]),
                    end=tag["end"],
                )
                for tag in asked["structures"]
            ]
            return str(LLMatcher.grammar_from_lark(StructTag.to_grammar(tags, assume_special=False)))
        except (KeyError, TypeError, ValueError, AttributeError, AssertionError, StopIteration) as error:
            raise self.refusal(
                "The structural tag cannot be parsed.",
                f"{type(error).__name__}: {error}."
                if str(error)
                else "The beginning of a structure matches none of the triggers.",
                'Expected {"structures": [{"begin": ..., "schema": {...}, "end": ...}], "triggers": [...]}.',
            ) from error

    def _parsed(self, value: Any, name: str) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return json.loads(self._within_bounds(value))
        except (ValueError, RecursionError) as error:
            raise self.refusal(f"The {name} is not JSON.", f"{error}.") from error

    def _within_bounds(self, text: str) -> str:
        if len(text) > MAX_CHARACTERS:
            raise self.refusal(
                "The output format is too long.", f"It has {len(text):,} characters; the limit is {MAX_CHARACTERS:,}."
            )
        return text

    def refusal(self, what: str, why: str = "", hint: str = "") -> InvalidParameter:
        return InvalidParameter(what, why, hint, param=self.param)


def _gbnf_to_lark(text: str) -> str:
    """Convert GBNF to Lark like llguidance's `gbnf_to_lark`, which takes quadratic time in the number of rules to find
    terminals (rules that lead only to terminals). Raises arbitrary exceptions."""
    from llguidance.gbnf_to_lark import ASTNode, GrammarParser, RuleRefNode, resolve

    rules = GrammarParser().parse(text)
    if "root" in rules and not any(each.children() for each in rules["root"].alternatives.children()):
        raise ValueError("The rule root is empty")
    waits_for: dict[str, set[str]] = {}
    for name, rule in rules.items():
        names, nodes = set(), list[ASTNode]([rule])
        while nodes:
            node = nodes.pop()
            nodes += node.children()
            if isinstance(node, RuleRefNode):
                names.add(node.name)
        waits_for[name] = names
    used_by: dict[str, list[str]] = {name: [] for name in rules}
    for name, names in waits_for.items():
        for each in names & rules.keys():
            used_by[each].append(name)
    terminals = [name for name, names in waits_for.items() if not names and name != "root"]
    for terminal in terminals:  # the list grows during the loop
        rules[terminal].rule_is_terminal = True
        for name in used_by[terminal]:
            waits_for[name].discard(terminal)
            if not waits_for[name] and name != "root":
                terminals.append(name)
    resolve(rules)
    lines = [str(rule) for rule in sorted(rules.values(), key=lambda rule: rule.order)]
    return "\n".join(["%llguidance {}", *lines]) + "\n"


def _without_anchors(regex: str) -> str:
    """Return the expression without `^` and `$`:
    the whole text must match anyway, and llguidance does not support anchors."""
    ends = regex.endswith("$") and (len(regex) - len(regex[:-1].rstrip("\\"))) % 2 == 1
    return regex.removeprefix("^")[: -1 if ends else None]
