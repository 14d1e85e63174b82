"""`truncation: "auto"` of OpenAI's responses: which items go, which stay, and what the answer says of it."""

import random
from collections.abc import Sequence
from typing import Any

import openai
import pytest

from localllm.web.api.responses.asked import droppable, truncated
from localllm.web.api.responses.items import messages_of, read_items
from tests.web.live_server import MAX_MODEL_LEN

Item = dict[str, Any]


def user(text: str = "q") -> Item:
    return {"role": "user", "content": text}


def said(text: str = "a") -> Item:
    return {"role": "assistant", "content": text}


def call(id: str) -> Item:
    return {"type": "function_call", "call_id": id, "name": "f", "arguments": "{}"}


def result(id: str, text: str = "r") -> Item:
    return {"type": "function_call_output", "call_id": id, "output": text}


SYSTEM: Item = {"role": "developer", "content": "s"}
THOUGHT: Item = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "t"}]}


@pytest.mark.parametrize(
    ("items", "steps"),
    [
        ([user()], []),
        ([user(), said(), user()], [[0, 1]]),
        ([SYSTEM, user(), said(), SYSTEM, user(), said(), user()], [[1, 2], [4, 5]]),  # neither system message goes
        ([said(), user(), user()], [[0], [1]]),
        ([user(), THOUGHT, call("1"), call("2"), result("1"), result("2"), said(), user()], [[0, 1, 2, 3, 4, 5, 6]]),
        # The newest round: calls with their results, but not the newest of them.
        (
            [user(), call("1"), result("1"), THOUGHT, call("2"), result("2"), call("3"), result("3")],
            [[1, 2], [3, 4, 5]],
        ),
        ([user(), said(), user(), call("1"), result("1"), said()], [[0, 1], [3, 4]]),
        ([user(), call("1"), user(), result("1"), user()], [[0, 1, 3], [2]]),  # a late result goes with its call
        ([call("1"), result("1"), call("2"), result("2")], [[0, 1]]),
        ([], []),
    ],
)
def test_what_goes_together_and_first(items: list[Item], steps: list[list[int]]) -> None:
    assert droppable(read_items(items, lambda id: None)) == steps


@pytest.mark.anyio
async def test_no_more_goes_than_has_to_and_what_stays_can_be_read() -> None:
    choose = random.Random(0)
    for _ in range(300):
        given: list[Item] = [SYSTEM] if choose.random() < 0.5 else []
        for number in range(choose.randint(1, 12)):
            id = str(number)
            given += choose.choice(
                [
                    [user("q" * choose.randint(1, 30))],
                    [said("a" * choose.randint(1, 30))],
                    [call(id), result(id, "r" * 9)],
                    [THOUGHT, call(id), call(f"{id}b"), result(f"{id}b"), result(id)],
                ]
            )
        items = read_items(given, lambda id: None)

        def length(some: Sequence[Item]) -> int:
            return sum(len(str(message["content"])) for message in messages_of(some))  # raises where a call is missing

        async def count(some: Sequence[Item]) -> int:
            return length(some)

        context, steps = choose.randint(8, 100), droppable(items)
        kept = await truncated(items, count, context, None)
        room = context - context // 8
        wanted = next((k for k in range(1, len(steps)) if length(_left(items, steps[:k])) <= room), len(steps))
        assert kept == _left(items, steps[:wanted])
        for must_stay in ("user", "developer"):
            newest = [item for item in items if item.get("role") == must_stay][-1:]
            assert all(item in kept for item in newest)


def _left(items: Sequence[Item], steps: list[list[int]]) -> list[Item]:
    return [item for i, item in enumerate(items) if not any(i in step for step in steps)]


LONG: list[Any] = [user("word " * 60), said("word " * 60)] * 6 + [user("How are you?")]


def test_the_oldest_items_go_and_the_answer_says_so(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="context"):
        sdk.responses.create(model="tiny", input=LONG, max_output_tokens=8)
    asked: dict[str, Any] = {"model": "tiny", "instructions": "Be brief.", "max_output_tokens": 8, "truncation": "auto"}
    raw = sdk.responses.with_raw_response.create(**asked, input=LONG)
    answer: Any = raw.parse()
    assert answer.truncation == "auto"
    assert 0 < answer.truncated_items < len(LONG)
    assert answer.truncated_items % 2 == 0, "a question goes with its answer"
    assert f"{answer.truncated_items} of {len(LONG)}" in raw.headers["x-localllm-warning"]
    # The prompt is that of the items which are left.
    same = sdk.responses.create(**{**asked, "truncation": "disabled"}, input=LONG[answer.truncated_items :])
    assert same.usage is not None
    assert answer.usage.input_tokens == same.usage.input_tokens <= MAX_MODEL_LEN - MAX_MODEL_LEN // 8
    counted = sdk.responses.input_tokens.count(
        model="tiny", instructions="Be brief.", input=LONG, truncation="auto",
    )  # fmt: skip
    assert counted.input_tokens <= MAX_MODEL_LEN - MAX_MODEL_LEN // 8
    # All items are kept: what goes on from here is truncated anew.
    again: Any = sdk.responses.create(**asked, input="And now?", previous_response_id=answer.id)
    assert again.truncated_items >= answer.truncated_items
    *_, last = sdk.responses.create(**asked, input=LONG, stream=True)
    assert last.response.truncated_items == answer.truncated_items


def test_what_fits_is_left_alone(sdk: openai.OpenAI) -> None:
    raw = sdk.responses.with_raw_response.create(model="tiny", input="Hi", max_output_tokens=8, truncation="auto")
    answer: Any = raw.parse()
    assert answer.truncated_items == 0
    assert "x-localllm-warning" not in raw.headers


def test_a_newest_message_that_is_too_long_is_refused(sdk: openai.OpenAI) -> None:
    given: list[Any] = [user(), said(), user("word " * 2000)]
    with pytest.raises(openai.BadRequestError, match="context"):
        sdk.responses.create(model="tiny", input=given, truncation="auto")
