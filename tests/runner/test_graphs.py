"""Recorded steps: which shape a step is padded to, and in which order shapes are recorded."""

from collections.abc import Collection
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.errors import DeviceLost
from localllm.runner.device_memory import CaptureFailed
from localllm.runner.device_steps import kernel_sizes
from localllm.runner.graphs import STEPS_PER_CAPTURE, Replay, StepGraphs, capture_shapes, decode_sizes
from localllm.runner.staging import StepShape


class Recorder:
    """A capture that remembers what it recorded and what was replayed. `broken`: shapes that cannot be recorded."""

    def __init__(
        self,
        fail_at: int = 10**9,
        error: Exception | None = None,
        broken: Collection[StepShape] = (),
        parts: tuple[str, ...] = ("forward",),
    ) -> None:
        self.recorded: list[StepShape] = []
        self.replayed: list[StepShape] = []
        self.fail_at, self.error, self.broken = fail_at, error or torch.OutOfMemoryError("full"), broken
        self.names = parts

    def parts(self, shape: StepShape) -> dict[str, Replay]:
        def record() -> None:
            if shape in self.broken:
                raise RuntimeError("out of resource: shared memory")
            self.recorded.append(shape)

        return dict.fromkeys(self.names, record)

    def __call__(self, step: Replay) -> Replay:
        if len(self.recorded) == self.fail_at:
            raise self.error
        step()
        shape = self.recorded[-1]
        return lambda: self.replayed.append(shape)


def make(max_num_seqs: int, budget: int, recorder: Recorder | None = None) -> StepGraphs:
    recorder = recorder or Recorder()
    return StepGraphs(capture_shapes(max_num_seqs, budget), recorder, recorder.parts)


def complete(graphs: StepGraphs) -> StepGraphs:
    while graphs.capture_next():
        pass
    return graphs


@settings(deadline=None)
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


@settings(deadline=None)
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
    assert set(recorder.recorded) == set(capture_shapes(32, 512))
    assert graphs.is_complete


def test_a_recorded_shape_is_the_one_that_is_replayed() -> None:
    recorder = Recorder()
    graphs = complete(make(16, 256, recorder))
    shape = graphs.shape_for(StepShape(5))
    assert shape == StepShape(8)
    graphs.replay(shape, "forward")
    assert recorder.replayed == [shape]


def test_a_step_with_drafts_is_padded_with_rows_and_never_with_drafts() -> None:
    recorder = Recorder()
    graphs = StepGraphs(capture_shapes(16, 256, 64), recorder, recorder.parts)
    graphs.capture_first()
    assert graphs.shape_for(StepShape(3, drafts=3)) == StepShape(4, drafts=3)
    assert graphs.shape_for(StepShape(3, drafts=7)) is None, "recorded later"
    complete(graphs)
    assert graphs.shape_for(StepShape(3, drafts=7)) == StepShape(4, drafts=7)
    assert graphs.shape_for(StepShape(9, drafts=3)) == StepShape(16, drafts=3)
    assert graphs.shape_for(StepShape(9, drafts=7)) is None, "more than 64 draws"
    assert graphs.shape_for(StepShape(3)) == StepShape(4)
    assert not StepShape(4, drafts=7).holds(StepShape(4, drafts=3))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), CaptureFailed("void")])
def test_when_nothing_more_can_be_recorded_what_is_there_stays(error: Exception) -> None:
    recorder = Recorder(6, error)
    graphs = make(32, 512, recorder)
    graphs.capture_first()
    complete(graphs)
    assert len(graphs) == 6
    assert graphs.is_complete
    assert graphs.shape_for(StepShape(8)) == StepShape(8)


def test_a_shape_that_cannot_be_recorded_is_left_out_and_named(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever the error: a kernel that needs more than the GPU has, an assembler that fails, a forbidden call."""
    broken = {StepShape(4), StepShape(0, 8, 128)}
    recorder = Recorder(broken=broken)
    graphs = make(32, 512, recorder)
    graphs.capture_first()
    complete(graphs)
    assert graphs.is_complete
    assert set(recorder.recorded) == set(capture_shapes(32, 512)) - broken
    assert len(graphs) == graphs.num_wanted - 2
    assert graphs.shape_for(StepShape(3)) == StepShape(8)
    assert "StepShape(decodes=4" in caplog.text
    assert "out of resource" in caplog.text


class Metered(Recorder):
    """A capture on a device with so many spare bytes, of which each graph takes one."""

    def __init__(self, spare: int) -> None:
        super().__init__(parts=("forward", "draw"))
        self.spare = spare

    def spare_bytes(self) -> int:
        return self.spare

    def __call__(self, step: Replay) -> Replay:
        if not self.spare:
            raise torch.OutOfMemoryError("full")
        self.spare -= 1
        return super().__call__(step)


@pytest.mark.parametrize("spare", [40, 70, 10_000])
def test_where_memory_is_short_the_shapes_that_serve_most_steps_are_recorded(
    spare: int, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Metered(spare)
    shapes = capture_shapes(64, 512, 256)
    graphs = StepGraphs(shapes, recorder, recorder.parts)
    graphs.capture_first()
    complete(graphs)
    decodes = {shape for shape in shapes if not (shape.prefill_rows or shape.drafts)}
    assert decodes <= set(recorder.recorded), "all decode steps have a graph"
    assert len(recorder.recorded) == 2 * len(graphs), "no shape is left half recorded"
    assert ("are left out" in caplog.text) == (len(graphs) < graphs.num_wanted) == (spare < 2 * len(shapes))


def test_a_lost_device_is_told() -> None:
    graphs = make(8, 512, Recorder(2, DeviceLost("gone")))
    with pytest.raises(DeviceLost):
        graphs.capture_first()


def test_recording_pauses_after_each_part() -> None:
    recorder = Recorder(parts=("forward", "draw"))
    graphs = make(8, 128, recorder)
    graphs.capture_first()
    assert recorder.recorded == [StepShape(n) for n in (8, 8, 4, 4, 2, 2, 1, 1)]
    graphs.capture_next()
    shape = graphs.shape_for(StepShape(0, 1, 10))
    assert shape is not None, "its first part is enough"
    assert (graphs.has(shape, "forward"), graphs.has(shape, "draw")) == (True, False)
    complete(graphs)
    assert graphs.has(shape, "draw")


def test_before_ready_more_is_recorded_as_time_allows() -> None:
    graphs = make(32, 512)
    graphs.capture_first(budget_s=60.0)
    assert graphs.is_complete


def test_an_engine_that_never_rests_records_what_its_steps_lack() -> None:
    recorder = Recorder()
    graphs = make(64, 512, recorder)
    graphs.capture_first()
    num_captures = 0
    for _ in range(3 * STEPS_PER_CAPTURE):
        if graphs.shape_for(StepShape(27)) is None and graphs.is_due(StepShape(27)):
            graphs.capture_for(StepShape(27))
            num_captures += 1
    assert num_captures == 1
    assert graphs.shape_for(StepShape(27)) == StepShape(32)
    assert not graphs.is_due(StepShape(65)), "no shape holds so many"
    complete(graphs)
    assert len(graphs) == graphs.num_wanted


@pytest.mark.parametrize(("largest", "sizes"), [(1, [1]), (3, [1, 2, 3]), (24, [1, 2, 4, 8, 16, 24]), (1000, None)])
def test_sizes_end_with_the_largest_batch(largest: int, sizes: list[int] | None) -> None:
    assert sizes is None or decode_sizes(largest) == sizes
    assert decode_sizes(largest)[-1] == min(largest, 512)


@settings(deadline=None)
@given(st.integers(1, 2000))
def test_warm_up_leaves_no_wide_gap_between_sizes(most: int) -> None:
    sizes = kernel_sizes(most)
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (1, most)
    assert all(b - a <= max(1, a / 4) for a, b in pairwise(sizes))
