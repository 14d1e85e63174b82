"""`truncation: "auto"`: leave out the oldest items of a conversation that is longer than the context.

Whole rounds are dropped first, a user's message with everything that answers it, so that the rest begins as
conversations do. Then, within the newest round, calls are dropped together with their results. Instructions, system and
developer messages, the user's newest message and the newest step after it are never dropped.
Does not know: HTTP, how a prompt is counted.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from localllm.web.api.responses.client_tools import CALLS, OUTPUTS

Item = dict[str, Any]
Count = Callable[[Sequence[Item]], Awaitable[int]]

SPARE = 8
"""If items are dropped, at least 1/SPARE of the context becomes free for the answer."""


def wanted_tokens(max_output_tokens: int | None, context: int) -> int:
    """Return the tokens to reserve for the answer: max_output_tokens, but at most half of the context; without it, one
    token.
    """
    return min(max_output_tokens or 1, context // 2)


async def truncated(items: Sequence[Item], count: Count, context: int, max_output_tokens: int | None) -> list[Item]:
    """Return the items that remain. `count` returns the prompt tokens of some items.

    If no choice makes the prompt fit, the fewest possible items remain.
    """
    steps = droppable(items)
    room = context - max(wanted_tokens(max_output_tokens, context), context // SPARE)
    low, high = 1, max(1, len(steps))  # search the fewest steps that are enough; fewer items never make a longer prompt
    while low < high:
        middle = (low + high) // 2
        fits = await count(_without(items, steps[:middle])) <= room
        low, high = (low, middle) if fits else (middle + 1, high)
    return _without(items, steps[:low])


def droppable(items: Sequence[Item]) -> list[list[int]]:
    """Return groups of item indices that are dropped together, in the order in which they are dropped."""
    units = _units(items)
    newest = max((i for i, unit in enumerate(units) if _is_question(items[unit[0]])), default=-1)
    rounds: list[list[int]] = []
    for unit in units[: max(newest, 0)]:
        if not rounds or _is_question(items[unit[0]]):
            rounds.append([])
        rounds[-1] += unit
    # The unit of the last item is the newest step: a result may come long after its call.
    last = max(range(len(units)), key=lambda i: units[i][-1], default=-1)
    return rounds + [unit for i, unit in enumerate(units) if i > newest and i != last]


def _units(items: Sequence[Item]) -> list[list[int]]:
    """Return units of item indices: a message of the user, or the model's output of one turn with the results of its
    calls and the answers to its requests for approval. Items that are never dropped are in no unit.
    """
    units: list[list[int]] = []
    unit_of_call: dict[str, list[int]] = {}
    may_go_on = False  # whether the next item of an answer belongs to the same turn
    for i, item in enumerate(items):
        answered = str(item.get("call_id" if item["type"] in OUTPUTS else "approval_request_id"))
        if answered in unit_of_call:
            unit_of_call[answered].append(i)
            may_go_on = False
        elif item["type"] == "message" and item["role"] != "assistant":
            may_go_on = False
            if _is_question(item):
                units.append([i])
        else:
            if not may_go_on:
                units.append([])
            units[-1].append(i)
            may_go_on = item["type"] != "mcp_call"  # which has its result
            if item["type"] in (*CALLS, "mcp_approval_request"):
                unit_of_call[item["call_id" if item["type"] in CALLS else "id"]] = units[-1]
    return units


def _is_question(item: Item) -> bool:
    return bool(item["type"] == "message" and item["role"] == "user")


def _without(items: Sequence[Item], steps: Sequence[Sequence[int]]) -> list[Item]:
    dropped = {index for step in steps for index in step}
    return [item for i, item in enumerate(items) if i not in dropped]
