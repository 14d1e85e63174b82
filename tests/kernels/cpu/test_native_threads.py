"""Threads of the native pool: the same results with any number of them, asleep or awake, called by several at once."""

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from localllm.kernels.cpu.native.library import Library, Pool, _require_memory, native, why_none
from localllm.kernels.cpu.native.structures import MAX_ROWS, Activation, Kind, NativeMatrix, NormKind, Op
from localllm.kernels.layer_cache import LayerKV
from tests.kernels.cpu.native_steps import Builder, listed

ASLEEP_S = 0.02  # by then threads without work sleep


@pytest.fixture(scope="module")
def library() -> Library:
    library = native()
    if library is None:
        pytest.skip(f"there is no native library: {why_none()}")
    return library


@pytest.fixture(params=[1, 2, 3, 8])
def pool(library: Library, request: pytest.FixtureRequest) -> Iterator[Pool]:
    pool = library.open_pool(request.param)
    yield pool
    pool.close()


class Layers:
    """Two small layers, each operation of which reads what the one before it wrote."""

    hidden, heads, kv_heads, head_dim, features, blocks = 128, 4, 2, 32, 192, 10 * MAX_ROWS

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.build = Builder()
        sizes = (
            self.hidden,
            (self.heads + 2 * self.kv_heads) * self.head_dim,
            self.heads * self.head_dim,
            self.features,
        )
        self.stream, self.qkv, self.attended, self.gated = (torch.zeros(MAX_ROWS, size) for size in sizes)
        self.caches = [
            LayerKV(*(torch.zeros(self.kv_heads, self.blocks, 16, self.head_dim) for _ in range(2))) for _ in range(2)
        ]
        self.inputs = torch.randn(16, MAX_ROWS, self.hidden)
        self.tables = torch.randperm(self.blocks)[: MAX_ROWS * 10].view(MAX_ROWS, 10).int()
        self.operations = listed(*(operation for kv in self.caches for operation in self._layer(kv)))

    def _layer(self, kv: LayerKV) -> list[object]:
        build = self.build
        weights = [torch.randn(n, k) / 12 for n, k in ((256, 128), (128, 128), (2 * self.features, 128), (128, 192))]
        qkv, out, gate_up, down = (build.matrix(weight) for weight in weights)
        norm = build.norm(NormKind.RMS, torch.ones(self.hidden))
        attention = build.attention(kv, self.heads, scale=0.2)
        return [
            build.operation(Op.LINEAR, self.stream, self.qkv, matrix=qkv, norm=norm),
            build.operation(Op.ATTEND, self.qkv, self.attended, attention=attention),
            build.operation(Op.LINEAR, self.attended, self.stream, matrix=out, adds=1),
            build.operation(
                Op.GATED, self.stream, self.gated, matrix=gate_up, norm=norm, activation=Activation.SILU
            ),
            build.operation(Op.LINEAR, self.gated, self.stream, matrix=down, adds=1),
        ]  # fmt: skip

    def step(self, pool: Pool, number: int) -> Tensor:
        """Run one step of 1 to 8 rows; return what the stream then holds."""
        num_rows = number % MAX_ROWS + 1
        self.stream.copy_(self.inputs[number % 16])
        rows = self.build.rows(self.tables, [number % 150] * num_rows, 16)
        pool.run_step(self.operations, rows, num_rows)
        del self.build.kept[-num_rows:]
        return self.stream.clone()


def run(pool: Pool, steps: int, layers: Layers | None = None, pause: bool = False) -> list[Tensor]:
    layers, chance = layers or Layers(), random.Random(1)
    results = []
    for number in range(steps):
        results.append(layers.step(pool, number))
        if pause and chance.random() < 0.2:
            time.sleep(chance.choice([0.0, 0.0005, 0.0015, 0.004]))
    return results


@pytest.fixture(scope="module")
def expected(library: Library) -> list[Tensor]:
    """What one thread computes."""
    pool = library.open_pool(1)
    results = run(pool, 300)
    pool.close()
    return results


def test_steps_are_the_same_with_any_number_of_threads(pool: Pool, expected: list[Tensor]) -> None:
    results = run(pool, 300, pause=True)
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("threads", range(1, 9))
def test_many_steps(library: Library, threads: int) -> None:
    one, many = library.open_pool(1), library.open_pool(threads)
    actual, wanted, chance = Layers(), Layers(), random.Random(threads)
    for number in range(10_000):
        assert torch.equal(actual.step(many, number), wanted.step(one, number)), number
        if chance.random() < 0.02:
            time.sleep(chance.choice([0.0, 0.001, 0.003]))
    one.close()
    many.close()


@pytest.mark.parametrize("what", ["norm", "attention", "product"])
def test_no_memory_is_an_error_of_the_call_alone(pool: Pool, expected: list[Tensor], what: str) -> None:
    """More than a process can address is wanted, before and after ordinary steps."""
    layers, build, huge = Layers(), Builder(), 1 << 45
    cache = LayerKV(*(torch.zeros(2, 10 * MAX_ROWS, 16, 32) for _ in range(2)))
    attention = build.attention(cache, 4, scale=0.2)
    attention.heads = attention.kv_heads = huge
    matrix = NativeMatrix(Kind.I8, 64, huge)

    def ask() -> None:
        rows = build.rows(layers.tables, [0], 16)
        if what == "product":
            x, y = torch.zeros(1), torch.zeros(64)
            done = pool._functions.localllm_linear(pool._pool, matrix, x.data_ptr(), 0, 1, 1, y.data_ptr(), 64)
            _require_memory(done, "a product")
        elif what == "norm":
            pool.run_step(listed(build.operation(Op.ADD, layers.stream, layers.stream, matrix=matrix)), rows, 1)
        else:
            pool.run_step(listed(build.operation(Op.ATTEND, layers.qkv, layers.attended, attention=attention)), rows, 1)

    matrix.outputs = huge if what == "norm" else 64
    for _ in range(2):
        with pytest.raises(MemoryError, match="No memory for the buffers of a"):
            ask()
        found = run(pool, 20, Layers())
        assert all(torch.equal(got, wanted) for got, wanted in zip(found, expected, strict=False))


def test_two_callers_are_served_one_after_the_other(pool: Pool, expected: list[Tensor]) -> None:
    layers = [Layers(), Layers()]
    results: list[list[Tensor]] = [[], []]

    def call(place: int) -> None:
        results[place] = run(pool, 100, layers[place])

    callers = [threading.Thread(target=call, args=(place,)) for place in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    for each in results:
        assert len(each) == 100
        assert all(torch.equal(a, b) for a, b in zip(each, expected, strict=False))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_borrowed_threads(library: Library, expected: list[Tensor], threads: int) -> None:
    pool = library.open_pool(threads, borrows=True)
    before = _num_threads()
    results = run(pool, 50)
    assert _num_threads() <= before + threads - 1
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=False))
    pool.close()


def test_products_of_the_process(library: Library) -> None:
    """`Library.linear` follows torch's number of threads, and may be mixed with torch's operations."""
    weight, x, build = torch.randn(300, 200), torch.randn(40, 200), Builder()
    matrix, threads = build.matrix(weight), torch.get_num_threads()
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            for _ in range(5):
                y = library.linear(matrix, x)
                torch.testing.assert_close(y, torch.nn.functional.linear(x, weight), rtol=1e-4, atol=1e-4)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
@pytest.mark.parametrize("idle_s", [0.0, ASLEEP_S])
def test_closing_ends_the_threads(library: Library, idle_s: float) -> None:
    before = _num_threads()
    for _ in range(5):
        pool = library.open_pool(4)
        run(pool, 2)
        time.sleep(idle_s)
        pool.close()
        pool.close()  # has no effect
    assert _num_threads() == before


def test_a_pool_that_was_never_used_closes(library: Library) -> None:
    library.open_pool(3).close()


def test_idle_threads_take_no_processor_time(library: Library) -> None:
    pool = library.open_pool(4)
    run(pool, 2)
    time.sleep(ASLEEP_S)
    began_s = time.process_time()
    time.sleep(0.1)
    assert time.process_time() - began_s < 0.02
    pool.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_computes_alone_and_ends(library: Library, expected: list[Tensor]) -> None:
    pool = library.open_pool(3)
    layers = Layers()
    layers.step(pool, 0)
    time.sleep(ASLEEP_S)
    child = os.fork()
    if child == 0:
        same = torch.equal(layers.step(pool, 0), expected[0])
        pool.close()
        os._exit(0 if same else 1)
    status = _wait_for(child, 30)
    pool.close()
    assert status == 0


def _wait_for(child: int, seconds: float) -> int:
    """Return the child's exit status; ends it after so many seconds."""
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))
