"""Divide a step on a CPU into requests that are computed together: the rule about what a row's arithmetic depends on.

    a native step     up to 8 tokens of requests that generate; a token's bits do not depend on those of other requests,
                      nor on whether the tokens before it were known or guessed
    prompts           and whatever a native step does not take, together: through torch, whose bits depend on all rows

If weights have fewer than 32 bits, products of many rows also round activations to fewer bits than a native step does.
A step with both kinds of rows is therefore computed in two parts, and what a stream receives stays the same while a
neighbour's prompt is read. That reads the weights twice, so float32 weights, where only last bits differ, do not do it.
In deterministic mode every prompt's chunk is a part of its own, and so is every request that a native step does not
take. Chunks come first, since a later row may use the blocks that they fill.
Does not know: how a part is computed, why the scheduler chose the rows.
"""

from __future__ import annotations

from typing import NamedTuple

from localllm.runner.batch import StepRows


class NativeSteps(NamedTuple):
    """The limits of the native steps of a model."""

    most_tokens: int = 0  # of one step; 0: the model has none
    rounds: bool = False  # whether its bits differ from torch's by more than the last ones


class Part(NamedTuple):
    """Consecutive rows of a step that are computed together."""

    rows: slice
    is_native: bool


def parts_of(rows: StepRows, native: NativeSteps, *, is_deterministic: bool) -> list[Part]:
    """Return the parts of a step in the order in which they are computed."""
    count, generating = len(rows.slots), rows.num_generating
    if is_deterministic:
        chunks = [Part(slice(row, row + 1), is_native=False) for row in range(generating, count)]
        return chunks + _generating_parts(rows, generating, native.most_tokens)
    fits = 0 < rows.starts[generating] <= native.most_tokens
    if generating == count:
        return [Part(slice(0, count), is_native=bool(fits))]
    if fits and native.rounds:
        return [Part(slice(generating, count), is_native=False), Part(slice(0, generating), is_native=True)]
    return [Part(slice(0, count), is_native=False)]


def _generating_parts(rows: StepRows, count: int, most_tokens: int) -> list[Part]:
    """Return the first `count` rows in as few native steps as take them, or one by one."""
    parts, first = list[Part](), 0
    for row in range(1, count + 1):
        if row == count or rows.starts[row + 1] - rows.starts[first] > most_tokens:
            parts.append(Part(slice(first, row), bool(rows.starts[row] - rows.starts[first] <= most_tokens)))
            first = row
    return parts


def in_order(parts: list[Part]) -> list[int]:
    """Return the places of the parts in the order of their rows."""
    return sorted(range(len(parts)), key=lambda place: parts[place].rows.start)
