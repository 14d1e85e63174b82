"""The real scheduler over the real runner: whatever the schedule, each request gets what it gets alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from localllm.engine.outputs import EngineOutput
from localllm.engine.request import Request
from localllm.models.spec.model_spec import ModelSpec
from tests.runner.harness import make_requests, serve


@pytest.mark.rotates(2)
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


@pytest.mark.rotates(2)
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
