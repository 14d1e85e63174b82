"""scripts/bench_kernels on the twins: every case runs and is right; what it tries when it tunes; what it writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from localllm.kernels import tuned
from localllm.kernels.tuned import Table, settings_for
from scripts.gpu_check_lib import tuning
from scripts.gpu_check_lib.kernel_cases import (
    TOLERANCE,
    Bench,
    Case,
    attention_cases,
    linear_cases,
    matrices,
    row_cases,
    sampling_cases,
)
from scripts.gpu_check_lib.roofline import Ceilings
from scripts.random_weights import shape_spec
from tests.tuning.test_scripts import script


class Tile(NamedTuple):
    block_m: int
    num_warps: int
    num_stages: int
    tma: bool


def heuristic(rows: int) -> Tile:
    return Tile(64, 4, 3, True)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(shape_spec("tiny"), torch.device("cpu"), torch.float32, l2_bytes=1 << 14)


def test_every_case_agrees_with_its_twin(bench: Bench) -> None:
    makers = [
        *row_cases(bench, [3]),
        *sampling_cases(bench, [3]),
        *attention_cases(bench, [(2, 100)], [70]),
        *linear_cases(bench, [2]),
    ]
    kernels = set()
    for make in makers:
        case = make()
        kernels.add(case.kernel)
        assert case.nbytes > 0
        assert case.run(0).isfinite().all()
        assert case.error is None or case.error() < TOLERANCE[case.weights], case.kernel
    assert {"attention decode", "attention prefill", "linear fp8", "linear int4", "add_rms_norm"} <= kernels


def test_the_table_has_a_line_for_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    assert script("bench_kernels").main(["--device", "cpu", "--only", "rows", "--rows", "2", "--json", str(file)]) == 0
    timings = json.loads(file.read_text())["timings"]
    assert [timing["kernel"] for timing in timings] == [
        "add_rms_norm",
        "silu_mul",
        "gate_up_and_silu",
        "rotary_store_kv",
    ]
    assert "| silu_mul | [2, 2 x 256] |" in capsys.readouterr().out


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert script("bench_kernels").main([]) == 2
    assert "--device cpu" in capsys.readouterr().err
    assert script("bench_kernels").main(["--device", "cpu", "--tune"]) == 2


def test_neighbours_differ_in_one_number_within_its_limits() -> None:
    found = set(tuning.neighbours(Tile(256, 1, 1, True)))
    assert found == {Tile(128, 1, 1, True), Tile(256, 2, 1, True), Tile(256, 1, 2, True)}


# ---- tuning, with a kernel that is made of a table -------------------------------------------------------------------


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Table:
    made = Table(tmp_path, "GPU", "3.6")
    monkeypatch.setattr(tuned, "table", lambda: made)
    monkeypatch.setattr("localllm.kernels.tuned.measure.table", lambda: made)
    return made


def chosen() -> Tile:
    return settings_for("op", (7,), heuristic)


def case(name: str, floor_us: float, *, is_checked: bool = True) -> Case:
    """block_m 32 is wrong."""

    def run(turn: int) -> torch.Tensor:
        return torch.tensor(chosen().block_m)

    def error() -> float:
        return 1.0 if chosen().block_m == 32 else 0.0

    return Case("op", name, run, floor_us, 0, error=error if is_checked else None, plan=lambda: None)


ONE_BYTE_A_US = Ceilings(copy_bytes_per_s=1e6, bf16_flops_per_s=1.0, fp8_flops_per_s=None)


def test_a_candidate_that_is_wrong_is_not_remembered(known: Table, tmp_path: Path) -> None:
    """block_m 32 would be fastest, 128 is next."""
    [group] = tuning.groups_of([lambda: case("", 1)])
    assert group == ("op", (7,))

    def time_of(case: Case) -> float:
        return {32: 1.0, 128: 2.0}.get(chosen().block_m, 3.0) + chosen().num_warps / 100

    best = tuning.tune_group(group, [case("", 1)], ONE_BYTE_A_US, time_of)
    assert best == chosen() == Tile(128, 1, 3, True)
    tuning.ship(tmp_path / "ship.json")
    assert json.loads((tmp_path / "ship.json").read_text())["kernels"]["op"][0]["settings"] == best._asdict()


def test_a_key_is_tuned_over_all_of_its_cases(known: Table) -> None:
    """Half as fast on the small case weighs more than a tenth faster on the large one, whichever comes last."""
    cases = [case("small", 10), case("large", 1000, is_checked=False)]
    times = {64: {"small": 20.0, "large": 2000.0}, 128: {"small": 40.0, "large": 1800.0}}

    def time_of(case: Case) -> float:
        return times.get(chosen().block_m, {"small": 1e6, "large": 1e6})[case.shape]

    [(group, makers)] = tuning.groups_of([lambda each=each: each for each in cases]).items()
    assert len(makers) == 2
    for order in (cases, cases[::-1]):
        assert tuning.tune_group(group, order, ONE_BYTE_A_US, time_of).block_m == 64


@pytest.mark.parametrize(
    ("times", "most"),
    [
        ({16: (1.0, 2.0), 32: (2.0, 2.0), 64: (3.0, 2.0)}, 32),
        ({16: (1.0, 2.0), 32: (3.0, 2.0), 64: (1.0, 2.0)}, 16),  # a lucky measurement beyond the crossing
        ({16: (3.0, 2.0)}, 0),
    ],
)
def test_the_crossover_is_the_last_row_count_before_cublas_wins(
    times: dict[int, tuple[float, float]], most: int
) -> None:
    assert tuning.crossover(times) == most


def test_the_crossover_is_measured_for_every_matrix(
    bench: Bench, known: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "crossover_key", lambda weight: (*weight.shape, 2, 90))
    monkeypatch.setattr(tuning, "skinny_gemm", lambda x, weight: ("ours", len(x)))
    monkeypatch.setattr(tuning.F, "linear", lambda x, weight: ("theirs", len(x)))

    def time_us(run: Callable[[int], object]) -> float:
        whose, rows = run(0)  # type: ignore[misc]
        return float(rows) if whose == "ours" else 50.0

    lines = list(tuning.tune_crossover(bench, time_us))
    assert len(lines) == 5
    assert all("ours up to 48 rows" in line for line in lines)
    assert {entry["skinny_rows"] for entry in known.measured["linear"].values()} == {48}
    assert len(known.measured["linear"]) == len(set(matrices(bench.spec).values()))


def test_what_is_tuned_is_written_after_each_key(bench: Bench, known: Table, tmp_path: Path,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(tuning, "tune_crossover", lambda bench: iter(["qkv: ours up to 48 rows"]))
    monkeypatch.setattr(tuning, "tune_group", lambda group, cases, ceilings: settings_for(*group, heuristic))
    monkeypatch.setattr(tuning, "groups_of", lambda makers: {("op", (1,)): makers, ("op", (2,)): makers})
    written = []
    monkeypatch.setattr(tuning, "ship", written.append)
    lines = tuning.tune_all(bench, [lambda: case("", 1)], ONE_BYTE_A_US, tmp_path / "GPU.json")
    counts = [len(written) for _ in lines]
    assert counts == [1, 2, 3]


def test_warming_runs_every_neighbour_of_its_part(known: Table) -> None:
    ran = []

    def make() -> Case:
        made = case("", 1)
        return replace(made, run=lambda turn: ran.append(chosen()) or made.run(turn))

    assert tuning.warm([make], 0, 1) == len(list(tuning.neighbours(heuristic(7))))
    assert set(ran) == {heuristic(7), *tuning.neighbours(heuristic(7))}
    assert tuning.warm([make], 1, 2) == 0
