"""Find the fastest launch settings on this GPU, one kernel key at a time, over every case that uses the key.

A key holds shapes and a bucket of rows, but not batch and context length. So a candidate is judged by the sum of time /
floor over all cases of its key: the settings of 16 sequences of 8k tokens also serve one of 1k. The search starts at
the heuristic's choice and moves to the fastest neighbour until none is faster.
Most of the time is compilation. Before anything is timed, a pool of processes launches every candidate of a round, and
Triton caches what it compiled on disk.
The best settings so far are stored after each measurement in the user's cache, and after each key in the file for the
package: what kills a run loses at most the key that was being measured.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from localllm.files.folders import write_whole
from localllm.kernels import tuned
from localllm.kernels.choice import Crossover
from localllm.kernels.fp8_linear import fp8_crossover, fp8_key
from localllm.kernels.int8_linear import int8_crossover, int8_key, quantize_int8
from localllm.kernels.linear import crossover_heuristic, crossover_key
from localllm.kernels.planar.linear import planar_crossover, planar_key
from localllm.kernels.tuned import Key
from localllm.kernels.tuned.measure import LOST_CONTEXT, launch_us, tune
from scripts.gpu_check_lib.ceilings import read_ceilings
from scripts.gpu_check_lib.kernel_cases import FORMATS, TOLERANCE, Bench, Case, Maker, matrices, product
from scripts.gpu_check_lib.measured_cases import Part, Wanted
from scripts.gpu_check_lib.roofline import Ceilings
from scripts.gpu_check_lib.stages import Context, Found

log = logging.getLogger(__name__)

ROUNDS = 3
MOST_PROCESSES = 16
CANDIDATES_PER_TASK = 4
TUNABLE = {
    "num_warps": (1, 16), "num_stages": (1, 8), "split": (1, 32), "split_k": (1, 32), "tile": (16, 256),
    "block_m": (8, 256), "block_n": (16, 256), "block_k": (32, 256),
    "block": (256, 4096), "block_heads": (1, 64), "min_tokens": (64, 2048), "programs": (1, 16),
}  # fmt: skip
TOGETHER = (("block_n", "split_k", False), ("block_n", "split", False), ("block_n", "block_k", True))
"""Numbers that are also changed in pairs: with wider tiles and more splits there are as many programs; with wider and
(True) shorter tiles as many bytes in flight."""
Group = tuple[str, Key]
TimeUs = Callable[[Callable[[int], object]], float]
"""Return the microseconds of one launch."""


def neighbours(settings: Any) -> Iterator[Any]:
    """Yield settings that differ in one number, or in a pair of `TOGETHER`: tiles, warps and splits by a factor of two,
    stages by one."""
    numbers = {name: value for name, value in settings._asdict().items() if name in TUNABLE and type(value) is int}
    changes = [
        {name: other}
        for name, value in numbers.items()
        for other in ((value - 1, value + 1) if name == "num_stages" else (value // 2, value * 2))
    ]
    for first, second, opposite in TOGETHER:
        if first in numbers and second in numbers:
            up, half = (numbers[first] * 2, numbers[first] // 2), (numbers[second] * 2, numbers[second] // 2)
            changes += [{first: up[i], second: half[i != opposite]} for i in (0, 1)]
    for change in changes:
        if all(TUNABLE[name][0] <= other <= TUNABLE[name][1] for name, other in change.items()):
            yield settings._replace(**change)


# ---- keys and their cases --------------------------------------------------------------------------------------------


def groups_of(makers: Iterable[Maker]) -> dict[Group, list[int]]:
    """Return which cases have each kernel key, in the order in which keys appear; without those of crossovers."""
    groups: dict[Group, list[int]] = {}
    for place, make in enumerate(makers):
        known = tuned.table()
        known.chosen.clear()
        try:
            case = make()
            if case.error is None and not case.plan:
                continue  # settings are only stored if their result can be checked
            launch(case)
        except LOST_CONTEXT:
            raise
        except Exception as error:  # as memory that does not suffice for the largest case
            log.warning("a case is left out case=%d error=%s", place, error)
            continue
        for kernel, key, _ in known.chosen:
            if kernel not in CROSSOVER_KERNELS and kernel in (case.tunes or (kernel,)):
                groups.setdefault((kernel, key), []).append(place)
    return groups


def launch(case: Case) -> None:
    if case.plan:
        case.plan()
    case.run(0)


def checked(case: Case) -> Case:
    """Return the case, planned again. Raises `ValueError` if its result is wrong: a tile that does not cover its rows
    compiles and is fast.
    """
    if case.plan:
        case.plan()
    if case.error is not None and not case.error() <= TOLERANCE[case.weights]:
        raise ValueError("a wrong result")
    return case


class Search:
    """The search for one key's settings."""

    def __init__(self, group: Group, members: Sequence[int]) -> None:
        self.group, self.members = group, members
        self.is_over = False
        known = tuned.table()
        self._heuristic = known.heuristics[group[0]]
        self._costs: dict[Any, float | None] = {}  # of the candidates so far; None: it fails
        self.best = known.settings_for(*group, self._heuristic)

    def candidates(self) -> list[Any]:
        """Return what the next round will measure."""
        found = dict.fromkeys((self._heuristic(*self.group[1]), self.best, *neighbours(self.best)))
        return [settings for settings in found if settings not in self._costs]

    def measure(self, cases: Sequence[Case], ceilings: Ceilings, time_us: TimeUs) -> None:
        """Measure the candidates, and record the settings with the least sum of time / floor over the cases."""
        kernel, key = self.group
        known = tuned.table()

        def cost(settings: Any) -> float:
            if settings not in self._costs:
                self._costs[settings] = None
                known.chosen[kernel, key, False] = settings
                times = [time_us(checked(case).run) / case.floor_s(ceilings) / 1e6 for case in cases]
                self._costs[settings] = sum(times)
            found = self._costs[settings]
            if found is None:
                raise ValueError("this candidate has failed")
            return found

        before = self.best
        self.best = tune(kernel, key, [before, *self.candidates()], cost, self._heuristic)
        self.is_over = self.best == before


# ---- compiling in other processes ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Task:
    """Candidates of one key to launch with one case; without any, the case as it is."""

    part: int
    place: int
    kernel: str = ""
    key: Key = ()
    candidates: tuple[Any, ...] = ()


CompileFirst = Callable[[Sequence[Task]], None]
_makers: list[list[Maker]] = []  # in a process of the pool: the cases of each part


class Compilers:
    """Processes that launch candidates, so that Triton's cache on disk has them when they are timed."""

    def __init__(self, wanted: Wanted) -> None:
        processes = min(MOST_PROCESSES, max(1, (os.cpu_count() or 1) - 2))
        spawn = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(processes, spawn, initializer=_open_process, initargs=(wanted,))

    def __call__(self, tasks: Sequence[Task]) -> None:
        """Wait until all have been compiled. What fails here is compiled, or fails again, when it is timed."""
        try:
            futures: list[Future[int]] = [self._pool.submit(compile_task, task) for task in tasks]
            for future in futures:
                if error := future.exception():
                    log.info("a task of compiling failed error=%s", error)
        except BrokenProcessPool:
            log.warning("a process that compiles died: candidates are compiled when they are timed")

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def _open_process(wanted: Wanted) -> None:
    bench = replace(wanted.bench(), l2_bytes=0)  # one copy of the data is enough
    _makers[:] = [part.makers for part in wanted.parts(bench)]


def compile_task(task: Task) -> int:
    """Launch the task's candidates; return how many of them run."""
    case, known, ran = _makers[task.part][task.place](), tuned.table(), 0
    if not task.candidates:
        launch(case)
    for settings in task.candidates:
        known.chosen[task.kernel, task.key, False] = settings
        try:
            launch(case)
        except LOST_CONTEXT:
            raise
        except Exception:  # Triton raises its own kinds of errors; the candidate fails again when it is timed
            continue
        ran += 1
    return ran


def tasks_of(part: int, searches: Sequence[Search]) -> list[Task]:
    return [
        Task(part, search.members[0], *search.group, tuple(candidates[start : start + CANDIDATES_PER_TASK]))
        for search in searches
        for candidates in [search.candidates()]
        for start in range(0, len(candidates), CANDIDATES_PER_TASK)
    ]


# ---- where the kernel for many rows takes over -----------------------------------------------------------------------


class Crossing(NamedTuple):
    """How a weight format chooses between its kernels for few and for many rows."""

    kernel: str  # in the table of settings
    key: Callable[[Any], Key]
    heuristic: Callable[..., Crossover]
    quantize: Callable[[torch.Tensor], Any]
    rows: tuple[int, ...]  # to measure


ROWS = (17, 24, 32, 48, 64, 96, 128, 192, 256)
PLANAR_ROWS = (64, 128, 192, 256, 384, 512, 768, 1024)
CROSSINGS = {
    "16-bit": Crossing("linear", crossover_key, crossover_heuristic, FORMATS["16-bit"][1], ROWS),
    "fp8": Crossing("fp8_linear", fp8_key, fp8_crossover, FORMATS["fp8"][1], ROWS),
    "int8": Crossing("int8_linear", int8_key, int8_crossover, lambda w: quantize_int8(w, activations="dynamic"), ROWS),
    "int4": Crossing("planar_crossover", planar_key, planar_crossover, FORMATS["int4"][1], PLANAR_ROWS),
}
CROSSOVER_KERNELS = {crossing.kernel for crossing in CROSSINGS.values()}


def tune_crossover(bench: Bench, weights: str, time_us: TimeUs) -> Iterator[str]:
    """Measure both kernels for each matrix; record up to how many rows the one for few is faster."""
    kernel, key_of, heuristic, quantize, row_counts = CROSSINGS[weights]
    known = tuned.table()
    for name, (n, k) in matrices(bench.spec).items():
        if name == "head" and weights != "16-bit":
            continue
        held = bench.copies(lambda n=n, k=k: quantize(bench.random(n, k, scale=k**-0.5)), n * k * FORMATS[weights][0])
        key, times = key_of(held[0]), {}
        for rows in row_counts:
            x = bench.random(rows, k)
            both = []
            for most in (rows, 0):  # the kernel for few rows, and the one for many
                known.chosen[kernel, key, False] = Crossover(most)
                both.append(time_us(lambda turn, x=x, held=held: product(x, held[turn % len(held)])))
            times[rows] = both[0], both[1]
        most = crossover(times)
        known.record(kernel, key, Crossover(most), times[row_counts[0]][0], heuristic)
        yield f"{weights} {name} [{n}, {k}]: the kernel for few rows up to {most}; " + ", ".join(
            f"{rows}: {few:.1f} / {many:.1f} us" for rows, (few, many) in times.items()
        )


def crossover(times: dict[int, tuple[float, float]]) -> int:
    """Return the rows up to which the kernel for few is never slower; one less than the least measured: not even there.
    times: rows -> (few, many)."""
    most = min(times) - 1
    for rows, (few, many) in sorted(times.items()):
        if few > many:
            break
        most = rows
    return most


# ---- the whole -------------------------------------------------------------------------------------------------------


def tune_all(
    bench: Bench,
    parts: Iterable[Part],
    ceilings: Ceilings,
    ship_to: Path | None,
    compile_first: CompileFirst = lambda tasks: None,
    time_us: TimeUs = launch_us,
) -> Iterator[str]:
    """Tune every key of the cases, part by part; yield a line for each key and crossover that has been stored."""
    try:
        for number, part in enumerate(parts):
            for line in _tune_part(bench, number, part, ceilings, compile_first, time_us):
                if ship_to:
                    ship(ship_to)
                yield line
    finally:
        if ship_to:
            ship(ship_to)


def _tune_part(
    bench: Bench, number: int, part: Part, ceilings: Ceilings, compile_first: CompileFirst, time_us: TimeUs
) -> Iterator[str]:
    compile_first([Task(number, place) for place in range(len(part.makers))])
    searches = [Search(group, members) for group, members in groups_of(part.makers).items()]
    for turn in range(ROUNDS):
        searches = [search for search in searches if not search.is_over]
        compile_first(tasks_of(number, searches))
        for search in searches:
            started_s = time.monotonic()
            search.measure([part.makers[place]() for place in search.members], ceilings, time_us)
            kernel, key = search.group
            yield (
                f"{kernel} {key}: {search.best}, {len(search.members)} cases, round {turn + 1}, "
                f"{time.monotonic() - started_s:.1f} s"
            )
    for weights in part.formats:
        yield from tune_crossover(bench, weights, time_us)


def ship(path: Path) -> None:
    """Write this process's tuned settings, in the form of localllm/kernels/tuned/README.md. What the file has of other
    keys is kept: an earlier run may have tuned other kernels.
    """
    import triton

    known = tuned.table()
    kernels = {kernel: tuned.entries_as_rows(entries) for kernel, entries in known.measured.items() if entries}
    for kernel, rows in tuned.read_shipped(path).items():
        ours = {tuple(row["key"]) for row in kernels.get(kernel, [])}
        kept = tuned.entries_as_rows({key: entry for key, entry in rows.items() if key not in ours})
        kernels[kernel] = kept + kernels.get(kernel, [])
    content = {
        "measured": f"{time.strftime('%Y-%m-%d')}, {known.gpu}, torch {torch.__version__}, "
        f"triton {triton.__version__}, scripts/bench_kernels --tune",
        "kernels": kernels,
    }
    write_whole(path, json.dumps(content, indent=1) + "\n", mode=0o644)


def tune_kernels(context: Context) -> Iterator[Found]:
    """Run the stage: tune in a process of its own, and store the file for the package."""
    ceilings = context.out / "ceilings.json"
    known = ["--ceilings", str(ceilings)] if read_ceilings(context) else []
    name = "".join(c if c.isalnum() or c in ".-" else "_" for c in context.gpu) or "GPU"
    log_file = context.out / "tune.txt"
    script = [sys.executable, str(Path(__file__).resolve().parent.parent / "bench_kernels")]
    # 32 rows too: where cuBLAS takes over is measured with what was chosen for them.
    words = ["--rows", "1", "16", "32", "64", "--tune", "--ship", str(context.out / f"{name}.json")]
    with log_file.open("w") as file:
        done = subprocess.run([*script, *words, *known], stdout=file, stderr=subprocess.STDOUT, check=False)
    lines = [line for line in log_file.read_text().splitlines() if line.startswith("tuned ")]
    yield "tune", "failed" if done.returncode else "ok", f"{len(lines)} results; {name}.json is in logs.tar.gz"
