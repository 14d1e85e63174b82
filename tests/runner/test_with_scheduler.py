"""The real scheduler over the real runner: whatever the schedule, each request gets what it gets alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from localllm.engine.outputs import EngineOutput
from localllm.engine.request import Request
from localllm.engine.step import GaveWay
from localllm.models.spec.model_spec import ModelSpec
from localllm.runner import runner as runner_module
from tests.runner.harness import make_requests, serve


@pytest.mark.parametrize(
    ("depth", "num_blocks", "step", "way"),
    [
        (1, 200, 64, "host"), (2, 200, 64, "staged"), (1, 18, 20, "host"), (2, 18, 20, "host"), (2, 18, 20, "staged"),
        (2, 200, 64, "replayed"), (2, 18, 20, "replayed"), (2, 18, 80, "replayed"),
    ],
)  # fmt: skip
def test_output_depends_on_the_request_alone(
    model: Any, spec: ModelSpec, depth: int, num_blocks: int, step: int, way: str
) -> None:
    """I21 and I24 with real tensors: 17 usable blocks force preemptions, steps of 20 tokens force chunks."""
    together, scheduler = serve(model, spec, make_requests(), num_blocks=num_blocks, depth=depth, step=step, way=way)
    assert scheduler.recorder.num_failed_steps == 0
    assert (scheduler.recorder.num_preemptions > 0) == (num_blocks == 18)
    for request in make_requests():
        alone, _ = serve(model, spec, [request])
        got, wanted = together[request.request_id], alone[request.request_id]
        assert [t for o in got for t in o.token_ids] == [t for o in wanted for t in o.token_ids], request.request_id
        assert got[-1].finish_reason == wanted[-1].finish_reason
        assert _ids(got) == _ids(wanted)


@pytest.mark.parametrize(("num_blocks", "step"), [(200, 64), (18, 20)])
def test_background_steps_that_end_between_two_layers_change_no_token(
    model: Any, spec: ModelSpec, num_blocks: int, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice, num_ended = random.Random(3), 0

    def at_random(asked: Callable[[], bool] | None) -> Callable[[], None]:
        assert asked is not None, "a step of background requests may end"

        def before_layer() -> None:
            nonlocal num_ended
            if dice.random() < 0.2:
                num_ended += 1
                raise GaveWay

        return before_layer

    monkeypatch.setattr(runner_module, "_give_way", at_random)
    requests = make_requests()
    for request in requests:
        request.options = replace(request.options, is_background=True)
    told, scheduler = serve(model, spec, requests, num_blocks=num_blocks, step=step)
    monkeypatch.undo()
    whole, _ = serve(model, spec, make_requests(), num_blocks=num_blocks, step=step)
    assert num_ended > 5
    assert scheduler.recorder.num_failed_steps == 0
    for name, outputs in whole.items():
        assert [t for o in told[name] for t in o.token_ids] == [t for o in outputs for t in o.token_ids], name
        assert _ids(told[name]) == _ids(outputs)


def _ids(outputs: list[EngineOutput]) -> list[tuple[int, ...]]:
    """Which tokens the log-probabilities speak of; prompt ones first."""
    prompt = [entry.token_ids for output in outputs for entry in output.prompt_logprobs or ()]
    return prompt + [entry.token_ids for output in outputs for entry in output.logprobs]


class Follows:
    """A grammar that begins with each token below 150, behind which two tokens below 40 must come."""

    def __init__(self) -> None:
        self.left, self.num_refused = 0, [0]

    def may_forbid(self, num_unseen: int) -> bool:
        return self.left > 0

    def refuses(self, token_id: int) -> bool:
        refused = self.left > 0 and token_id >= 40
        self.num_refused[0] += refused
        return refused

    def fill(self, bits: Any) -> None:
        bits[:] = -1
        if self.left:
            bits[:] = 0
            bits[0] = -1
            bits[1] = 255

    def accept(self, token_id: int) -> None:
        assert not self.left or token_id < 40
        self.left = self.left - 1 if self.left else 2 * (token_id < 150)

    def fork(self) -> Follows:
        other = Follows()
        other.left, other.num_refused = self.left, self.num_refused
        return other

    @property
    def is_over(self) -> bool:
        return False


@pytest.mark.parametrize(("way", "depth"), [("host", 2), ("staged", 2), ("replayed", 3)])
@pytest.mark.parametrize("speculates", [False, True])
def test_refused_tokens_are_drawn_again(model: Any, spec: ModelSpec, way: str, depth: int, speculates: bool) -> None:
    """A grammar that begins while a token is in flight gives what it gives if the host sees each token first."""

    def requests() -> list[Request]:
        asked = make_requests()
        for request in asked[::2]:
            request.grammar = Follows()
        return asked

    expected, _ = serve(model, spec, requests())
    given = requests()
    told, scheduler = serve(model, spec, given, way=way, depth=depth, speculates=speculates)
    assert {name: tokens(outputs) for name, outputs in told.items()} == {
        name: tokens(outputs) for name, outputs in expected.items()
    }
    refused = sum(request.grammar.num_refused[0] for request in given if isinstance(request.grammar, Follows))
    assert refused
    assert scheduler.recorder.num_preemptions == refused


def tokens(outputs: Sequence[EngineOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]
