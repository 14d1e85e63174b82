"""The share of an engine's steps that a recorded shape holds, under loads like those of a chat service."""

import pytest

from localllm.engine.step import StepPlan
from localllm.models.fit.rank_budget import GRAPH_PROMPTS
from localllm.runner.graphs import capture_shapes, largest_shape, mixed_decodes
from localllm.runner.staging import StepShape
from localllm.tuning.workload import Workload, chat_lengths, fixed_lengths
from tests.engine.harness import make_request
from tests.engine.scheduling_figures import Bench

BUDGET = 2048


class Load(Bench):
    """An engine on the fake model that notes the shape of each step."""

    def __init__(self, max_num_seqs: int) -> None:
        super().__init__(
            100_000, max_num_seqs=max_num_seqs, max_num_batched_tokens=BUDGET,
            long_prefill_token_threshold=BUDGET // 4,
        )  # fmt: skip
        self.shapes: list[StepShape] = []
        forward = self.loop.runner.forward

        def noted(plan: StepPlan) -> None:
            tokens = [row.num_scheduled_tokens for row in plan.rows]
            decodes = tokens.count(1)
            if tokens:
                self.shapes.append(StepShape(decodes, len(tokens) - decodes, sum(tokens) - decodes))
            forward(plan)

        self.loop.runner.forward = noted  # type: ignore[method-assign]

    def serve(self, workload: Workload, at_once: int) -> list[StepShape]:
        """Send the requests of `at_once` clients, each of which sends its next one when the last has ended."""
        for number, request in enumerate(workload.requests):
            while len(self.scheduler.requests) + len(self.loop._inbox) >= at_once:
                self.step()
            self.loop.submit(make_request(f"r{number}", request.prompt_token_ids, max_tokens=request.max_tokens))
        self.run()
        return self.shapes


@pytest.mark.parametrize(
    ("workload", "max_num_seqs", "at_once"),
    [
        (chat_lengths(300), 64, 300),
        (chat_lengths(600), 256, 256),
        (chat_lengths(900), 512, 900),
        (fixed_lengths(400, 1024, 128), 256, 256),
    ],
    ids=["64 of many", "256 clients", "512 of many", "long prompts"],
)
def test_recorded_shapes_hold_most_steps(workload: Workload, max_num_seqs: int, at_once: int) -> None:
    steps = Load(max_num_seqs).serve(workload, at_once)
    recorded = capture_shapes(max_num_seqs, BUDGET)
    padded: list[int] = []
    for step in steps:
        fits = [each for each in recorded if each.holds(step) and bool(each.prefill_rows) == bool(step.prefill_rows)]
        padded += [min(shape.tokens for shape in fits)] if fits else []
    print(f"{len(recorded)} shapes, {len(padded) / len(steps):.1%} of {len(steps)} steps, {sum(padded)} tokens padded")
    assert len(padded) >= 0.95 * len(steps)
    assert sum(padded) <= 1.25 * sum(step.tokens for step in steps), "padding costs more than launches"


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [
        (1, [0]),
        (2, [0, 2]),
        (8, [0, 8]),
        (9, [0, 8]),
        (10, [0, 8, 10]),
        (64, [0, 8, 32, 64]),
        (500, None),
        (4096, None),
    ],
)
def test_mixed_shapes_end_with_the_most_decodes_beside_a_prompt(max_num_seqs: int, sizes: list[int] | None) -> None:
    found = mixed_decodes(max_num_seqs)
    assert found == (sizes or [0, 8, 32, 128, 192, 256, 384, min(512, max_num_seqs)])
    assert found[-1] >= min(max_num_seqs - 1, 512)


@pytest.mark.parametrize("max_num_seqs", [1, 7, 64, 129, 256, 500, 512])
def test_the_memory_plan_counts_the_rows_of_the_largest_shape(max_num_seqs: int) -> None:
    largest = largest_shape(capture_shapes(max_num_seqs, 8192))
    assert largest is not None
    assert largest.rows <= max_num_seqs + GRAPH_PROMPTS
