"""How deep the compiler of grammars may recurse over a grammar, as an upper bound found without recursion.

llguidance follows a JSON schema and its `$ref`s by recursion, and Lark rules likewise: a few KiB of stack for each
level of nesting and each step of a chain. A chain in a text of 100 KB can be longer than the stack of a thread.
Does not know: llguidance, how many levels are too many.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import unquote

_REFERENCES = frozenset({"$ref", "$dynamicRef", "$recursiveRef"})
_RENAMING = frozenset({"$id", "$anchor", "$dynamicAnchor"})  # references to these are not followed here


def levels_of(grammar: str) -> int:
    """Levels of a grammar as `LLMatcher` reads it: Lark, or JSON that holds grammars and schemas."""
    if not grammar.startswith("{"):
        return levels_of_lark(grammar)
    total = 0
    for each in json.loads(grammar)["grammars"]:
        schema, lark = each.get("json_schema"), each.get("lark_grammar")
        total += (0 if schema is None else levels_of_schema(schema)) + (levels_of_lark(lark) if lark else 0)
    return total


def levels_of_lark(text: str) -> int:
    """A rule takes a line at least, and a chain of rules has each rule once: lines and brackets bound it."""
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
    """The longest chain of nested arrays and objects, through references.

    A region is what a reference points to, without the regions inside it; the whole schema is one. A region leads to
    those inside it and to those it refers to. Regions on a circle count as if a chain went through all of them.
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
    """What each reference points to. None where that cannot be said without following names and addresses."""
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
    """The heaviest path. Nodes on circles, and between two of them, count together."""
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
    """Of the nodes `among`: those from which a circle can be reached, and of the others the heaviest path on from
    each."""
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
