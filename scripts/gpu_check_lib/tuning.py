"""Find the fastest launch settings on this GPU, one kernel key at a time, over every case that uses the key.

A key holds shapes and a bucket of rows, but not batch and context length. So a candidate is judged by the sum of time /
floor over all cases of its key: the settings of 16 sequences of 8k tokens also serve one of 1k. The search starts at
the heuristic's choice and moves to the fastest neighbour until none is faster.
Most of the time is compilation. `warm` compiles each key's first neighbours in several parallel processes before
anything is timed; Triton caches the results on disk.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from localllm.kernels import tuned
from localllm.kernels.linear import Crossover, crossover_heuristic, crossover_key
from localllm.kernels.skinny_gemm import skinny_gemm
from localllm.kernels.tuned import Key
from localllm.kernels.tuned.measure import launch_us, tune
from scripts.gpu_check_lib.ceilings import read_ceilings
from scripts.gpu_check_lib.kernel_cases import TOLERANCE, Bench, Case, Maker, matrices
from scripts.gpu_check_lib.roofline import Ceilings
from scripts.gpu_check_lib.stages import Context, Found

ROUNDS = 3
CROSSOVER_ROWS = (16, 24, 32, 48, 64, 96, 128, 192, 256)
MOST_CHILDREN = 8
TUNABLE = {
    "num_warps": (1, 16), "num_stages": (1, 8), "split": (1, 32), "split_k": (1, 32), "tile": (16, 256),
    "block_m": (8, 256), "block_n": (16, 256), "block_k": (32, 256),
}  # fmt: skip
Group = tuple[str, Key]
Time = Callable[[Case], float]
"""Return the microseconds of one launch."""


def neighbours(settings: Any) -> Iterator[Any]:
    """Yield settings that differ in one number: tiles, warps and splits by a factor of two, stages by one."""
    for name, value in settings._asdict().items():
        if isinstance(value, bool) or not isinstance(value, int) or name not in TUNABLE:
            continue
        others = (value - 1, value + 1) if name == "num_stages" else (value // 2, value * 2)
        low, high = TUNABLE[name]
        for other in others:
            if low <= other <= high:
                yield settings._replace(**{name: other})


# ---- keys and their cases --------------------------------------------------------------------------------------------


def groups_of(makers: Iterable[Maker]) -> dict[Group, list[Maker]]:
    """Return the cases of each kernel key, in the order in which keys appear. The crossover is measured separately."""
    groups: dict[Group, list[Maker]] = {}
    for make in makers:
        known = tuned.table()
        known.chosen.clear()
        case = make()
        if case.error is None and not case.plan:
            continue  # settings are only stored if their result can be checked
        launch(case)
        for kernel, key, _ in known.chosen:
            if kernel != "linear":
                groups.setdefault((kernel, key), []).append(make)
    return groups


def launch(case: Case) -> None:
    if case.plan:
        case.plan()
    case.run(0)


def tune_group(
    group: Group, cases: Sequence[Case], ceilings: Ceilings, time_of: Time = lambda c: launch_us(c.run)
) -> Any:
    """Find the settings with the least sum of time / floor over `cases`, record them and return them."""
    kernel, key = group
    known = tuned.table()
    heuristic = known.heuristics[kernel]
    floors_us = [case.floor_s(ceilings) * 1e6 for case in cases]

    def cost(settings: Any) -> float:
        known.chosen[kernel, key, False] = settings
        return sum(time_of(checked(case)) / floor for case, floor in zip(cases, floors_us, strict=True))

    best = known.settings_for(kernel, key, heuristic)
    for _ in range(ROUNDS):
        before, best = best, tune(kernel, key, [best, *neighbours(best)], cost, heuristic)
        if best == before:
            break
    return best


def checked(case: Case) -> Case:
    """Return the case, planned again. Raises `ValueError` if its result is wrong: a tile that does not cover its rows
    compiles and is fast.
    """
    if case.plan:
        case.plan()
    if case.error is not None and not case.error() <= TOLERANCE[case.weights]:
        raise ValueError("a wrong result")
    return case


# ---- where cuBLAS takes over -----------------------------------------------------------------------------------------


def tune_crossover(bench: Bench, time_us: Callable[[Callable[[int], object]], float] = launch_us) -> Iterator[str]:
    """Measure our kernel and cuBLAS for each 16-bit matrix from 16 to 256 rows; record up to which ours is faster."""
    for name, (n, k) in matrices(bench.spec).items():
        held = bench.copies(lambda n=n, k=k: bench.random(n, k, scale=k**-0.5), n * k * bench.dtype.itemsize)
        times: dict[int, tuple[float, float]] = {}
        for rows in CROSSOVER_ROWS:
            x = bench.random(rows, k)
            ours = time_us(lambda turn, x=x, held=held: skinny_gemm(x, held[turn % len(held)]))
            theirs = time_us(lambda turn, x=x, held=held: F.linear(x, held[turn % len(held)]))
            times[rows] = ours, theirs
        most = crossover(times)
        key = crossover_key(held[0])
        tuned.table().record("linear", key, Crossover(most), times[CROSSOVER_ROWS[0]][0], crossover_heuristic)
        yield f"{name} [{n}, {k}]: ours up to {most} rows; " + ", ".join(
            f"{rows}: {ours:.1f} / {theirs:.1f} us" for rows, (ours, theirs) in times.items()
        )


def crossover(times: dict[int, tuple[float, float]]) -> int:
    """Return the rows up to which ours is never slower; 0: none. times: rows -> (ours, cuBLAS)."""
    most = 0
    for rows, (ours, theirs) in sorted(times.items()):
        if ours > theirs:
            break
        most = rows
    return most


# ---- the whole -------------------------------------------------------------------------------------------------------


def tune_all(bench: Bench, makers: Sequence[Maker], ceilings: Ceilings, ship_to: Path | None) -> Iterator[str]:
    """Tune every key of the cases; yield a line for each. The file is rewritten after each, so that an interruption
    loses nothing.
    """
    for group, members in groups_of(makers).items():
        started_s = time.monotonic()
        best = tune_group(group, [make() for make in members], ceilings)
        if ship_to:
            ship(ship_to)
        yield f"{group[0]} {group[1]}: {best}, {len(members)} cases, {time.monotonic() - started_s:.0f} s"
    for line in tune_crossover(bench):
        if ship_to:
            ship(ship_to)
        yield line


def warm(makers: Sequence[Maker], part: int, parts: int) -> int:
    """Compile the first neighbours of every `parts`-th key. Returns the number of candidates that ran."""
    ran = 0
    for index, ((kernel, key), members) in enumerate(groups_of(makers).items()):
        if index % parts != part:
            continue
        known, case = tuned.table(), members[0]()
        heuristic = known.heuristics[kernel]
        for settings in neighbours(known.settings_for(kernel, key, heuristic)):
            known.chosen[kernel, key, False] = settings
            try:
                launch(case)
            except tuned.measure.LOST_CONTEXT:
                raise
            except Exception:  # Triton raises its own kinds of errors; the candidate fails again when it is timed
                continue
            ran += 1
    return ran


def ship(path: Path) -> None:
    """Write this process's tuned settings, in the form of localllm/kernels/tuned/README.md."""
    import triton

    known = tuned.table()
    content = {
        "measured": f"{time.strftime('%Y-%m-%d')}, {known.gpu}, torch {torch.__version__}, "
        f"triton {triton.__version__}, scripts/bench_kernels --tune",
        "kernels": {kernel: tuned.entries_as_rows(entries) for kernel, entries in known.measured.items() if entries},
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def tune_kernels(context: Context) -> Iterator[Found]:
    """Run the stage: warm in several processes, tune in one, and store the file for the package."""
    script = [sys.executable, str(Path(__file__).resolve().parent.parent / "bench_kernels")]
    words = ["--only", "linear", "attention", "--rows", "1", "16", "64"]
    started_s = time.monotonic()
    children = min(MOST_CHILDREN, max(1, (os.cpu_count() or 1) - 2))
    warming = [subprocess.Popen([*script, *words, "--warm", f"{i}/{children}"]) for i in range(children)]
    failed = sum(child.wait() != 0 for child in warming)
    yield "warm", "failed" if failed else "ok", f"{children} processes, {time.monotonic() - started_s:.0f} s"
    ceilings = context.out / "ceilings.json"
    known = ["--ceilings", str(ceilings)] if read_ceilings(context) else []
    name = "".join(c if c.isalnum() or c in ".-" else "_" for c in context.gpu) or "GPU"
    log = context.out / "tune.txt"
    with log.open("w") as file:
        command = [*script, *words, "--tune", "--ship", str(context.out / f"{name}.json"), *known]
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False)
    lines = [line for line in log.read_text().splitlines() if line.startswith("tuned ")]
    yield "tune", "failed" if done.returncode else "ok", f"{len(lines)} keys; {name}.json is in logs.tar.gz"
