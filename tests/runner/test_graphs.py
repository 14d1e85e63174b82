"""The ladder: which shape a step is padded to, and in which order shapes are recorded."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from localllm.runner.graphs import GraphLadder, Replay, decode_sizes, ladder
from localllm.runner.staging import StepShape


class Recorder:
    """A capture that remembers what it recorded and what was replayed."""

    def __init__(self, fail_at: int = 10**9) -> None:
        self.recorded: list[StepShape] = []
        self.replayed: list[StepShape] = []
        self.fail_at = fail_at

    def parts(self, shape: StepShape) -> dict[str, Replay]:
        return {"forward": lambda: self.recorded.append(shape)}

    def __call__(self, step: Replay) -> Replay:
        if len(self.recorded) == self.fail_at:
            raise torch.OutOfMemoryError("full")
        step()
        shape = self.recorded[-1]
        return lambda: self.replayed.append(shape)


def make(max_num_seqs: int, budget: int, recorder: Recorder | None = None) -> GraphLadder:
    recorder = recorder or Recorder()
    return GraphLadder(ladder(max_num_seqs, budget), recorder, recorder.parts)


def complete(graphs: GraphLadder) -> GraphLadder:
    while graphs.capture_next():
        pass
    return graphs


@given(max_num_seqs=st.integers(1, 512), batch=st.integers(1, 512))
def test_every_decode_batch_has_a_shape_that_wastes_little(max_num_seqs: int, batch: int) -> None:
    graphs = complete(make(max_num_seqs, 2048))
    shape = graphs.shape_for(StepShape(batch))
    if batch > max_num_seqs:
        assert shape is None
        return
    assert shape is not None
    assert shape.prefill_rows == 0
    assert batch <= shape.decodes < batch + max(4, 8 if batch <= 128 else 16)


@given(st.integers(0, 64), st.integers(1, 12), st.integers(2, 3000))
def test_a_mixed_step_gets_a_shape_that_holds_it_or_none(decodes: int, rows: int, tokens: int) -> None:
    graphs = complete(make(64, 2048))
    shape = graphs.shape_for(StepShape(decodes, rows, tokens))
    assert shape is None or shape.holds(StepShape(decodes, rows, tokens))
    if decodes <= 32 and rows <= 8 and tokens <= 1024:
        assert shape is not None
        assert shape.tokens <= 2048


def test_the_smallest_come_before_ready_and_each_part_begins_with_its_largest() -> None:
    recorder = Recorder()
    graphs = make(32, 512, recorder)
    graphs.capture_first()
    assert recorder.recorded == [StepShape(n) for n in (8, 4, 2, 1)]
    complete(graphs)
    rest = [shape.tokens for shape in recorder.recorded[4:]]
    assert rest == sorted(rest, reverse=True)
    assert set(recorder.recorded) == set(ladder(32, 512))
    assert graphs.is_complete


def test_a_recorded_shape_is_the_one_that_is_replayed() -> None:
    recorder = Recorder()
    graphs = complete(make(16, 256, recorder))
    shape = graphs.shape_for(StepShape(5))
    assert shape == StepShape(8)
    graphs.replay(shape, "forward")
    assert recorder.replayed == [shape]


def test_running_out_of_memory_keeps_what_is_there() -> None:
    recorder = Recorder(fail_at=6)
    graphs = make(32, 512, recorder)
    graphs.capture_first()
    complete(graphs)
    assert len(graphs) == 6
    assert graphs.is_complete
    assert graphs.shape_for(StepShape(8)) == StepShape(8)


@pytest.mark.parametrize(("largest", "sizes"), [(1, [1]), (3, [1, 2, 3]), (24, [1, 2, 4, 8, 16, 24]), (1000, None)])
def test_sizes_end_with_the_largest_batch(largest: int, sizes: list[int] | None) -> None:
    assert sizes is None or decode_sizes(largest) == sizes
    assert decode_sizes(largest)[-1] == min(largest, 512)
