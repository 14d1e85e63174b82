"""Runs a recurrent operation over requests that are cut into steps in some way, with states in numbered places.

The pool is NaN at first, place 0 included: a state that is read before it is written shows.
"""

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from localllm.kernels.launch import INTERPRETED
from localllm.kernels.layer_cache import StateStep

MARKS = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),  # numpy's, when interpreted
    pytest.mark.usefixtures("implementation"),
]
# Of the rules whose states are matrices. Interpreted, a token takes milliseconds.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
LENGTHS = [1, 17, 65] if INTERPRETED else [1, 15, 16, 17, 63, 64, 65, 150]
LONG = 18 if INTERPRETED else 65

Compute = Callable[[list[Tensor], Tensor, StateStep], Tensor]
"""compute(inputs [T, ...] of a step, pool [places, ...], step) -> [T, ...]"""


class Part(NamedTuple):
    """Some tokens of a request within a step."""

    request: int
    count: int
    read: int = -1
    write: int = 0
    save: int = 0


def state_step(parts: Sequence[Part], device: torch.device) -> StateStep:
    lengths = [part.count for part in parts]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    places = [tuple(getattr(part, name) for part in parts) for name in ("read", "write", "save")]
    tensors = [torch.tensor(each, dtype=torch.int32, device=device) for each in (bounds.tolist(), *places)]
    decodes = next((place for place, length in enumerate(lengths) if length != 1), len(lengths))
    return StateStep(*tensors, tuple(lengths), *places, num_decodes=decodes)


def poisoned_pool(shape: Sequence[int], places: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((places, *shape), float("nan"), dtype=dtype, device=device)


class Run:
    """The outputs of all requests so far, and the states in a pool."""

    def __init__(self, compute: Compute, requests: Sequence[Sequence[Tensor]], pool: Tensor) -> None:
        """requests: each request's inputs [tokens, ...]."""
        self.compute, self.requests, self.pool = compute, requests, pool
        self.done = [0] * len(requests)
        self.outputs: list[list[Tensor]] = [[] for _ in requests]

    def step(self, *parts: Part) -> None:
        slices = [slice(self.done[part.request], self.done[part.request] + part.count) for part in parts]
        columns = zip(*(self.requests[part.request] for part in parts), strict=True)
        inputs = [torch.cat([each[cut] for each, cut in zip(column, slices, strict=True)]) for column in columns]
        out = self.compute(inputs, self.pool, state_step(parts, self.pool.device))
        for part, values in zip(parts, out.split([part.count for part in parts]), strict=True):
            self.outputs[part.request].append(values)
            self.done[part.request] += part.count

    def output(self, request: int) -> Tensor:
        return torch.cat(self.outputs[request])

    def remaining(self, request: int) -> int:
        return len(self.requests[request][0]) - self.done[request]


def whole(compute: Compute, inputs: Sequence[Tensor], pool: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output of a request in one row, and its last state."""
    run = Run(compute, [inputs], torch.full_like(pool[:2], float("nan")))
    run.step(Part(0, len(inputs[0]), write=1))
    return run.output(0), run.pool[1]


def assert_any_schedule_is_the_same(
    compute: Compute, requests: Sequence[Sequence[Tensor]], shape: Sequence[int], dtype: torch.dtype, seed: int
) -> None:
    """Run the requests cut at random, together in steps, and compare bits with each request in one row.

    A request moves between two places, and its states are saved at random.
    """
    chance, device = random.Random(seed), requests[0][0].device
    count = len(requests)
    run = Run(compute, requests, poisoned_pool(shape, 4 * count + 1, dtype, device))
    expected = [whole(compute, inputs, run.pool) for inputs in requests]
    places = [0] * count  # 0: not begun
    saved: dict[int, tuple[int, int]] = {}  # place: request, tokens
    while open_ones := [request for request in range(count) if run.remaining(request)]:
        parts = []
        for request in chance.sample(open_ones, chance.randint(1, len(open_ones))):
            own = range(4 * request + 1, 4 * request + 5)  # two places to move between, two to save to
            tokens = min(run.remaining(request), chance.choice([1, 1, 2, 15, 16, 17, 40]))
            write = chance.choice(own[:2])
            save = chance.choice([0, *own[2:]])
            parts.append(Part(request, tokens, places[request] or -1, write, save))
            places[request] = write
            if save:
                saved[save] = request, run.done[request] + tokens
        run.step(*sorted(parts, key=lambda part: part.count != 1))
    for request, (output, state) in enumerate(expected):
        assert torch.equal(run.output(request), output), request
        assert torch.equal(run.pool[places[request]], state), request
    for place, (request, tokens) in saved.items():
        _, state = whole(compute, [each[:tokens] for each in requests[request]], run.pool)
        assert torch.equal(run.pool[place], state), (request, tokens)
    assert bool(run.pool[0].isnan().all())


def assert_places_are_respected(compute: Compute, inputs: Sequence[Tensor], shape: Sequence[int]) -> None:
    """Rows begin from zeros whatever a place holds, write nowhere for 0, leave other places alone; NaN in places that
    are not read changes nothing. A row of one token that reads -1 begins, too."""
    device = inputs[0].device
    pool = poisoned_pool(shape, 6, torch.float32, device)
    expected, _ = whole(compute, inputs, pool)
    _, first_state = whole(compute, [each[:1] for each in inputs], pool)
    run = Run(compute, [inputs] * 4, pool)
    run.step(Part(0, 1, -1, 1), Part(1, 1, -1, 0), Part(2, 1, -1, 0, 2), Part(3, 1, -1, 3, 4))
    for request in range(4):
        assert torch.equal(run.output(request), expected[:1])
    for place in (1, 2, 3, 4):
        assert torch.equal(pool[place], first_state)
    assert bool(pool[0].isnan().all())
    assert bool(pool[5].isnan().all())
    rest = len(inputs[0]) - 1
    run.step(Part(0, rest, 1, 0, 0), Part(2, rest, 2, 5, 0), Part(3, rest, 4, 4, 0))
    for request in (0, 2, 3):
        assert torch.equal(run.output(request), expected)
    for place in (1, 2, 3):
        assert torch.equal(pool[place], first_state), "a row wrote where it read"
    assert torch.equal(pool[4], pool[5])
    assert bool(pool[0].isnan().all())
    begun_again = Run(compute, [inputs], pool)
    begun_again.step(Part(0, len(inputs[0]), -1, 4))  # reads -1 although place 4 holds a state
    assert torch.equal(begun_again.output(0), expected)
