"""The reasoning budget of a request, under any of the names that dialects use.

Does not know: how the budget is enforced (text/reasoning_budget.py), HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping

from localllm.errors import InvalidParameter, UnsupportedParameter
from localllm.serving.chat import reasons
from localllm.serving.served import ServedModel

NO_BOUND = -1


def thinking_budget(asked: Mapping[str, int | None], model: ServedModel) -> int | None:
    """Return the budget in tokens; None: no limit. `asked`: the fields that may set it, by name. Raises `RequestError`
    naming the wrong field.
    """
    given = {name: value for name, value in asked.items() if value is not None}
    for name, value in given.items():
        if value < NO_BOUND:
            why = f"Got {value}. 0: no reasoning; {NO_BOUND}: no limit."
            raise InvalidParameter(f"{name} must be at least {NO_BOUND}.", why, param=name)
    if len(set(given.values())) > 1:
        (first, one), (second, other), *_ = given.items()
        raise InvalidParameter(
            f"{first} and {second} contradict each other.", f"{one} and {other}; send one.", param=second
        )
    name, tokens = next(iter(given.items()), ("", NO_BOUND))
    if tokens > 0 and not reasons(model):
        raise UnsupportedParameter(
            f"{name!r} is not supported by this model.", "According to its chat template, it does not reason.",
            param=name,
        )  # fmt: skip
    return tokens if tokens != NO_BOUND else None
