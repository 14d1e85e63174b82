"""An upper bound of the recursion depth of the grammar compiler, computed without recursion.

llguidance recurses over a JSON schema and its `$ref`s, and over Lark rules: a few KiB of stack for each level of
nesting and each step of a chain. A chain in a text of 100 KB can exceed the stack of a thread.
Does not know: llguidance, how many levels are too many.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import unquote

_REFERENCES = frozenset({"$ref", "$dynamicRef", "$recursiveRef"})
_RENAMING = frozenset({"$id", "$anchor", "$dynamicAnchor"})  # references to these are not followed


def levels_of(grammar: str) -> int:
    """Return the levels of a grammar for `LLMatcher`: Lark, or JSON that contains grammars and schemas."""
    if not grammar.startswith("{"):
        return levels_of_lark(grammar)
    total = 0
    for each in json.loads(grammar)["grammars"]:
        schema, lark = each.get("json_schema"), each.get("lark_grammar")
        total += (0 if schema is None else levels_of_schema(schema)) + (levels_of_lark(lark) if lark else 0)
    return total


def levels_of_lark(text: str) -> int:
    """Bound the levels of Lark rules by lines and brackets:
    a rule takes at least a line, and a chain has each rule once."""
    levels = text.count("\n") + 1 + text.count("(")
    position = 0
    while (position := text.find("%json", position)) >= 0:
        position += len("%json")
        while position < len(text) and text[position].isspace():
            position += 1
        try:
            schema, position = json.JSONDecoder().raw_decode(text, position)
        except (ValueError, RecursionError):
            return levels + text.count("{") + text.count("[")
        levels += levels_of_schema(schema)
    return levels


def levels_of_schema(schema: Any) -> int:
    """Return the longest chain of nested arrays and objects, through references.

    A region is the target of a reference without the regions inside it; the whole schema is one. A region leads to
    those inside it and to those it references. Regions on a cycle count as if one chain went through all of them.
    """
    found = _references_of(schema)
    if found is None:
        return sum(1 for _ in _containers(schema))
    targets = {id(schema), *(id(target) for target in found.values())}
    weights: dict[int, int] = dict.fromkeys(targets, 1)
    leads_to: dict[int, set[int]] = {target: set() for target in targets}
    level = [(schema, id(schema), 1)]
    while level:
        node, region, depth = level.pop()
        if id(node) in targets and id(node) != region:
            leads_to[region].add(id(node))
            region, depth = id(node), 1
        weights[region] = max(weights[region], depth)
        if isinstance(node, dict):
            for key in _REFERENCES & node.keys():
                if isinstance(node[key], str):
                    leads_to[region].add(id(found[node[key]]))
        level += [(child, region, depth + 1) for child in _children(node)]
    return _longest_chain(weights, leads_to)


def _references_of(schema: Any) -> dict[str, Any] | None:
    """Return the target of each reference; None if that needs names or addresses to be resolved."""
    found: dict[str, Any] = {}
    for node in _containers(schema):
        if not isinstance(node, dict):
            continue
        if node is not schema and not _RENAMING.isdisjoint(node):
            return None
        for key in _REFERENCES & node.keys():
            reference = node[key]
            if isinstance(reference, str) and reference not in found:
                found[reference] = target = _target(schema, reference)
                if not isinstance(target, dict | list | bool):
                    return None
    return found


def _target(schema: Any, reference: str) -> Any:
    _, _, pointer = reference.partition("#")
    node = schema
    for part in unquote(pointer).split("/")[1:] if pointer else ():
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict):
            node = node.get(part)
        elif isinstance(node, list) and part.isdecimal() and len(part) < 10 and int(part) < len(node):
            node = node[int(part)]
        else:
            return None
    return node if pointer.startswith("/") or not pointer else None


def _containers(schema: Any) -> Iterator[Any]:
    level = [schema] if isinstance(schema, dict | list) else []
    while level:
        node = level.pop()
        yield node
        level += _children(node)


def _children(node: Any) -> list[Any]:
    nodes: Iterable[Any] = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return [child for child in nodes if isinstance(child, dict | list)]


def _longest_chain(weights: dict[int, int], leads_to: dict[int, set[int]]) -> int:
    """Return the weight of the heaviest path. Nodes on cycles, or between two cycles, count together."""
    before: dict[int, set[int]] = {node: set() for node in weights}
    for node, others in leads_to.items():
        for other in others:
            before[other].add(node)
    left, tails = _peeled(weights, leads_to, before, set(weights))
    core, heads = _peeled(weights, before, leads_to, left)
    within = sum(weights[node] for node in core)
    return max(heads.values(), default=0) + within + max(tails.values(), default=0)


def _peeled(
    weights: dict[int, int], forward: dict[int, set[int]], backward: dict[int, set[int]], among: set[int]
) -> tuple[set[int], dict[int, int]]:
    """Split the nodes `among`: those from which a cycle can be reached,
    and the heaviest onward path of each other node."""
    waits_for = {node: len(forward[node] & among) for node in among}
    ready = deque(node for node, count in waits_for.items() if not count)
    heaviest: dict[int, int] = {}
    while ready:
        node = ready.popleft()
        heaviest[node] = weights[node] + max((heaviest[other] for other in forward[node] & among), default=0)
        for other in backward[node] & among:
            waits_for[other] -= 1
            if not waits_for[other]:
                ready.append(other)
    return among - heaviest.keys(), heaviest
