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

from localllm.runner.batch import StepRows


def parts_of(rows: StepRows, *, native_rows: int, splits: bool) -> list[slice]:
    """Return the parts of a step in the order in which they are computed.

    native_rows: most tokens of a native step; 0: the model has none. splits: whether its bits differ from torch's by
    more than the last ones.
    """
    count, generating = len(rows.slots), rows.num_generating
    mixed = 0 < generating < count
    if not (splits and mixed and rows.starts[generating] <= native_rows and rows.samples[:generating].all()):
        return [slice(0, count)]
    return [slice(generating, count), slice(0, generating)]


def lone_parts(rows: StepRows, *, native_rows: int) -> list[slice]:
    """Return the parts of a step in deterministic mode, in the order in which they are computed.

    native_rows: most tokens that may be one part because their bits do not depend on each other.
    """
    parts = [slice(row, row + 1) for row in range(rows.num_generating, len(rows.slots))]
    first = 0
    for row in range(rows.num_generating):
        if row > first and rows.starts[row + 1] - rows.starts[first] > native_rows:
            parts.append(slice(first, row))
            first = row
    return [*parts, slice(first, rows.num_generating)] if rows.num_generating else parts


def in_order(parts: list[slice]) -> list[int]:
    """Return the places of the parts in the order of their rows."""
    return sorted(range(len(parts)), key=lambda place: parts[place].start)
