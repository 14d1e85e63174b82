"""Recording a graph and emptying the allocator's cache exclude each other; a recording that fails is ended."""

import gc
import threading
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import localllm
from localllm.models.layers.far import Crossing, RamLink
from localllm.runner import device_memory
from localllm.runner.device_memory import CaptureFailed, empty_cache, make_current, record

GPU = torch.device("cuda:1")


class Graph:
    """A torch.cuda.CUDAGraph that notes what is asked of it. `stuck`: it cannot be ended, as torch before 2.12."""

    def __init__(self, stuck: bool = False) -> None:
        self.stuck, self.calls = stuck, list[str]()

    def capture_begin(self, **options: Any) -> None:
        self.calls.append("begin")

    def replay(self) -> None:
        self.calls.append("replay")

    def capture_end(self) -> None:
        self.calls.append("end")
        if self.stuck:
            raise RuntimeError("operation failed due to a previous error during capture")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """torch.cuda as it is used, without a GPU."""
    fake = SimpleNamespace(
        num_emptied=0, failure="", current=None, ended=[], is_initialized=lambda: True, Stream=lambda device: object(),
        stream=lambda stream: nullcontext(), current_device=lambda: 0,
    )  # fmt: skip

    def empty() -> None:
        if fake.failure:
            raise RuntimeError(fake.failure)
        fake.num_emptied += 1

    fake.empty_cache = empty
    fake.set_device = lambda device: setattr(fake, "current", device)
    monkeypatch.setattr(device_memory, "torch", SimpleNamespace(cuda=fake, device=torch.device, _C=SimpleNamespace()))
    monkeypatch.setattr(device_memory, "use_cublas", lambda device: None)
    device_memory._stream.cache_clear()
    return fake


def test_the_cache_is_not_emptied_while_a_graph_is_recorded(cuda: SimpleNamespace) -> None:
    emptying = threading.Thread(target=empty_cache)
    seen = []

    def step() -> None:
        emptying.start()
        emptying.join(0.05)
        seen.append(cuda.num_emptied)

    record(Graph(), (0, 1), GPU, step)
    emptying.join(10)
    assert (seen, cuda.num_emptied) == ([0], 1)


def test_a_step_with_work_of_the_host_is_recorded_in_segments(cuda: SimpleNamespace) -> None:
    """The host's work is not done while recording, and between the segments when they are replayed."""
    done, graphs = list[str](), list[Graph]()

    class Segment(Graph):
        def __init__(self) -> None:
            super().__init__()
            self.calls = done
            graphs.append(self)

    crossing = Crossing(RamLink(torch.device("cpu")))

    def step() -> None:
        for name in "ab":
            done.append(f"device {name}")
            assert crossing.split is not None
            crossing.split(lambda name=name: done.append(f"host {name}"))

    replay = record(Segment(), (0, 1), GPU, step, crossing)
    assert done == ["begin", "device a", "end", "begin", "device b", "end", "begin", "end"]
    assert crossing.split is None
    done.clear()
    replay()
    assert done == ["replay", "host a", "replay", "host b", "replay"]
    with pytest.raises(ValueError, match="cannot be recorded"):
        record(Segment(), (0, 1), GPU, fail, crossing)
    assert crossing.split is None


def fail() -> None:
    raise ValueError("a step that cannot be recorded")


def test_a_recording_that_fails_is_ended_and_others_go_on(cuda: SimpleNamespace) -> None:
    graph = Graph()
    with pytest.raises(ValueError, match="cannot be recorded"):
        record(graph, (0, 1), GPU, fail)
    assert graph.calls == ["begin", "end"]
    record(Graph(), (0, 1), GPU, lambda: None)
    empty_cache()
    assert cuda.num_emptied == 1


@pytest.mark.parametrize("words", [None, "endAllocatePool: not currently recording to mempool_id"])
def test_where_torch_does_not_tell_the_allocator_it_is_told(cuda: SimpleNamespace, words: str | None) -> None:
    def end(device: int, pool: tuple[int, int]) -> None:
        cuda.ended.append((device, pool))
        if words:
            raise RuntimeError(words)

    device_memory.torch._C._cuda_endAllocateToPool = end
    with pytest.raises(ValueError, match="cannot be recorded"):
        record(Graph(stuck=True), (0, 7), GPU, fail)
    assert cuda.ended == [(1, (0, 7))]
    record(Graph(), (0, 7), GPU, lambda: None)


def test_where_it_cannot_be_told_the_graph_lives_on_and_the_cache_is_kept(
    cuda: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    """torch's allocator calls the graph at each allocation, and asserts that it records nothing when it is emptied."""
    stuck = Graph(stuck=True)
    with pytest.raises(CaptureFailed, match="cannot be recorded"):
        record(stuck, (0, 1), GPU, fail)
    assert "could not be ended" in caplog.text
    alive = weakref.ref(stuck)
    del stuck
    gc.collect()
    assert alive() is not None
    cuda.failure = "captures_underway.empty() INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp"
    empty_cache()
    cuda.failure = "CUDA error: an illegal memory access was encountered"
    with pytest.raises(RuntimeError, match="illegal"):
        empty_cache()


def test_a_stop_of_one_model_is_not_that_of_another(cuda: SimpleNamespace) -> None:
    with pytest.raises(CaptureFailed):
        record(Graph(stuck=True), (0, 1), GPU, fail)
    other = Graph()
    record(other, (0, 2), GPU, lambda: None)
    assert other.calls == ["begin", "end"]


def test_all_recordings_of_a_device_share_a_stream(cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS keeps a workspace for each stream that it has seen, for the life of the process."""
    used: list[object] = []

    def stream(stream: object) -> Any:
        used.append(stream)
        return nullcontext()

    monkeypatch.setattr(cuda, "stream", stream)
    for _ in range(3):
        record(Graph(), (0, 1), GPU, lambda: None)
    assert len(used) == 3
    assert len(set(map(id, used))) == 1


def test_the_device_is_made_current_for_the_calling_thread(cuda: SimpleNamespace) -> None:
    make_current(torch.device("cpu"))
    assert cuda.current is None
    make_current(GPU)
    assert cuda.current == GPU


def test_nothing_else_empties_the_cache() -> None:
    """It would be done while another engine's thread records, sooner or later."""
    package = Path(localllm.__file__).parent
    callers = [path.name for path in package.rglob("*.py") if "torch.cuda.empty_cache()" in path.read_text()]
    assert callers == ["device_memory.py"]
