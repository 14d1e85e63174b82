"""The memory bandwidth: measured in a moment, kept for this machine, and unknown rather than wrong."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from localllm.files.folders import cache_folder
from localllm.kernels.cpu import native_product
from localllm.machine import bandwidth
from localllm.machine.bandwidth import (
    LEAST_BYTES,
    Measured,
    ProductSpeeds,
    memory_bandwidth,
    probed,
    undisturbed_s,
    with_kept_speeds,
)
from localllm.machine.hardware import Hardware, Speeds, count_cores, fast_instructions, read_cpu_flags
from tests.marks import needs_library

HERE = Hardware((), "CPU", count_cores(), 8 << 30, 6 << 30)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def _span(began_s: float, ended_s: float, busy_s: float) -> bandwidth._Span:
    return bandwidth._Span(began_s, ended_s, busy_s)


@pytest.mark.parametrize("cores", [1, 2, 3])
def test_a_measurement_is_plausible_or_unknown(cores: int) -> None:
    """Between a slow board of 2012 and the fastest memory of a server. Under load it may be unknown."""
    found = bandwidth.measure(replace(HERE, cpu_cores=cores))
    assert found is None or 1e7 < found.bytes_per_s < 5e12


def test_little_memory_is_not_taken() -> None:
    assert bandwidth.measure(replace(HERE, ram_available_bytes=2 * LEAST_BYTES)) is None


@pytest.mark.parametrize("can_populate", [True, False])
def test_all_of_the_buffer_is_obtained_and_then_read(can_populate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that were never written are one page of zeros, which is in a cache."""
    obtained: list[tuple[int, int]] = []
    read: list[tuple[int, int]] = []
    libc = bandwidth._libc()
    assert libc is not None

    class Watched:
        def memset(self, address: int, value: int, count: int) -> None:
            assert value != 0
            obtained.append((address, count))
            libc.memset(address, value, count)

        def madvise(self, address: Any, count: Any, advice: int) -> int:
            done = int(libc.madvise(address, count, advice)) if can_populate else -1
            if done == 0:
                obtained.append((address.value, count.value))
            return done

        def memcmp(self, one: int, other: int, count: int) -> None:
            read.append((one, count))
            read.append((other, count))
            assert libc.memcmp(one, other, count) == 0  # it has read all of both

    monkeypatch.setattr(bandwidth, "_libc", Watched)
    bandwidth.measure(replace(HERE, cpu_cores=2))
    (first, size), (second, _) = sorted(obtained)
    assert second - first == size
    assert 2 * size >= LEAST_BYTES
    assert sorted(set(read)) == [(first + place * size // 2, size // 2) for place in range(4)]


@pytest.mark.parametrize(
    ("spans", "seconds"),
    [
        ([_span(0.0, 1.0, 1.0), _span(0.05, 1.1, 1.0)], 1.1),
        ([_span(0.0, 1.0, 1.0), _span(0.0, 1.0, 0.5)], math.inf),  # the second waited for a processor
        ([_span(0.0, 1.0, 1.0), _span(1.0, 2.0, 1.0)], math.inf),  # one after the other, on one processor
    ],
)
def test_a_disturbed_pass_does_not_count(spans: list[bandwidth._Span], seconds: float) -> None:
    assert undisturbed_s(spans) == pytest.approx(seconds)


def test_it_is_measured_once_for_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([Measured(3e10), None, Measured(5e10)])
    monkeypatch.setattr(bandwidth, "measure", lambda hardware: next(answers))
    assert [memory_bandwidth(HERE) for _ in range(3)] == [3e10] * 3
    other = replace(HERE, cpu_cores=HERE.cpu_cores + 1)
    assert memory_bandwidth(other) is None  # not stored: the next call measures again
    assert memory_bandwidth(other) == 5e10
    assert json.loads((cache_folder() / "bandwidth.json").read_text())["cores"] == other.cpu_cores


def test_a_disturbed_measurement_is_a_lower_bound_and_repeated_a_minute_later(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([Measured(1e10, True), Measured(0.8e10, True), Measured(0.9e10), Measured(3e10)])
    monkeypatch.setattr(bandwidth, "measure", lambda hardware: next(answers))
    file, seen = cache_folder() / "bandwidth.json", []
    for _ in range(4):
        seen += [memory_bandwidth(HERE), memory_bandwidth(HERE)]  # the second call does not measure
        os.utime(file, (0, 0))
    assert seen == [1e10, 1e10, 1e10, 1e10, 0.9e10, 0.9e10, 0.9e10, 0.9e10]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"bytes_per_s": "x"}', '{"bytes_per_s": -1}', '{"bytes_per_s": NaN}', "\x00", "[" * 9000]
)
def test_a_damaged_file_is_measured_anew(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_folder().mkdir(parents=True)
    (cache_folder() / "bandwidth.json").write_text(text)
    monkeypatch.setattr(bandwidth, "measure", lambda hardware: Measured(2e10))
    assert memory_bandwidth(HERE) == 2e10


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o500)
    monkeypatch.setattr(bandwidth, "measure", lambda hardware: Measured(2e10))
    assert memory_bandwidth(HERE) == 2e10


def test_a_file_where_the_cache_should_be_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "localllm").write_text("")
    monkeypatch.setattr(bandwidth, "measure", lambda hardware: Measured(2e10))
    assert memory_bandwidth(HERE) == 2e10


# ---- the processor ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("flags\t\t: fpu avx2 fma\nflags\t\t: fpu avx2\n", ("AVX2",)),
        ("flags : avx2 avx512f avx512_vnni amx_tile\n", ("AVX2", "AVX-512", "VNNI", "AMX")),
        ("flags : avx2 avx_vnni avx512_vnni\n", ("AVX2", "VNNI")),
        ("Features : fp asimd asimddp i8mm\n", ("dot products", "I8MM")),
        ("model name : something\n", ()),
    ],
)
def test_only_instructions_of_all_processors_count(text: str, names: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert fast_instructions(read_cpu_flags(tmp_path / "cpuinfo")) == names
    assert read_cpu_flags(tmp_path / "absent") == set()


def test_it_takes_no_torch() -> None:
    code = "import sys; from localllm.machine import bandwidth; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"


def test_a_disk_is_measured_once_and_nothing_stays_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "DISK_BYTES", 16 * 1024**2)
    folder = tmp_path / "experts"
    found = bandwidth.disk_bandwidth(folder)
    if found is None:  # a file system without direct reads
        return
    assert 1e6 < found < 1e12
    assert not list(folder.iterdir())
    monkeypatch.setattr(bandwidth, "_read_speed", lambda path: pytest.fail("measured again"))
    assert bandwidth.disk_bandwidth(folder) == round(found)


def test_a_disk_without_room_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "DISK_BYTES", 2**60)
    assert bandwidth.disk_bandwidth(tmp_path / "experts") is None


# ---- the probe -------------------------------------------------------------------------------------------------------


def test_a_machine_is_probed_once_and_the_kept_speeds_are_read_without_measuring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert with_kept_speeds(HERE).speeds == Speeds()
    monkeypatch.setattr(bandwidth, "measure", lambda hardware: Measured(2e10))
    monkeypatch.setattr(bandwidth, "_read_speed", lambda path: 3e9)
    found = probed(HERE, lambda: ProductSpeeds(1e12, 4e11)).speeds
    assert found == Speeds(2e10, None, 1e12, 4e11)
    monkeypatch.setattr(bandwidth, "measure", lambda hardware: pytest.fail("measured again"))
    again = probed(HERE, lambda: pytest.fail("measured again"), disk=True)
    assert again.speeds in (found._replace(disk=3e9), found)  # a file system without direct reads
    assert with_kept_speeds(HERE) == again
    other = replace(HERE, cpu_cores=HERE.cpu_cores + 1)
    assert with_kept_speeds(other).speeds == Speeds(disk=again.speeds.disk)


def test_disturbed_products_are_a_lower_bound_and_repeated_a_minute_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "measure", lambda hardware: Measured(2e10))
    slow, slower, quick = ProductSpeeds(1e11, 3e10, True), ProductSpeeds(9e10, 5e10, True), ProductSpeeds(8e10, 2e10)
    answers, seen = iter([slow, slower, quick]), list[tuple[float | None, float | None]]()
    file = cache_folder() / "products.json"
    for _ in range(4):
        for _ in range(2):  # the second call does not measure
            found = probed(HERE, lambda: next(answers)).speeds
            seen.append((found.narrow, found.wide))
            assert with_kept_speeds(HERE).speeds[2:] == (found.narrow, found.wide)
        os.utime(file, (0, 0))
    assert seen == [slow[:2]] * 4 + [quick[:2]] * 4


@needs_library
def test_products_during_which_threads_wait_for_a_processor_are_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_product, "MEASURED_SIZE", 256)
    for share, is_disturbed in ((1.0, False), (0.5, True)):
        clock = Clock(share * torch.get_num_threads())
        monkeypatch.setattr(native_product, "time", clock)
        found = native_product.product_speeds()
        assert found is not None
        assert found.is_disturbed == is_disturbed
        assert found.narrow > 0


class Clock:
    """A clock of a process whose threads together run this many seconds in one."""

    def __init__(self, rate: float) -> None:
        self.rate, self.now_s = rate, 0.0

    def perf_counter(self) -> float:
        self.now_s += 0.25
        return self.now_s

    def process_time(self) -> float:
        return self.now_s * self.rate


def test_a_machine_without_the_native_library_has_no_speed_of_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "measure", lambda hardware: Measured(2e10))
    assert probed(HERE, lambda: None).speeds == Speeds(ram=2e10)
    assert not (cache_folder() / "products.json").exists()
