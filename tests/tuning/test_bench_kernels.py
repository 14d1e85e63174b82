"""scripts/bench_kernels on the twins: every case runs and is right; what it tries when it tunes; what it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from localllm.kernels import tuned
from localllm.kernels.tuned import Table, settings_for
from localllm.kernels.tuned.measure import tune
from localllm.models.random_weights import shape_spec
from scripts.gpu_check_lib.kernel_cases import (
    Bench,
    Case,
    attention_cases,
    linear_cases,
    row_cases,
    sampling_cases,
)
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
    tolerance = script("bench_kernels").TOLERANCE
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
        assert case.error is None or case.error() < tolerance[case.weights], case.kernel
    assert {"attention decode", "attention prefill", "linear fp8", "linear int4", "add_rms_norm"} <= kernels


def test_the_table_has_a_line_for_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    assert script("bench_kernels").main(["--device", "cpu", "--only", "rows", "--rows", "2", "--json", str(file)]) == 0
    timings = json.loads(file.read_text())["timings"]
    assert [timing["kernel"] for timing in timings] == ["add_rms_norm", "silu_mul", "rotary_store_kv"]
    assert "| silu_mul | [2, 2 x 256] |" in capsys.readouterr().out


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert script("bench_kernels").main([]) == 2
    assert "--device cpu" in capsys.readouterr().err
    assert script("bench_kernels").main(["--device", "cpu", "--tune"]) == 2


def test_neighbours_differ_in_one_number_within_its_limits() -> None:
    found = set(script("bench_kernels").neighbours(Tile(256, 1, 1, True)))
    assert found == {Tile(128, 1, 1, True), Tile(256, 2, 1, True), Tile(256, 1, 2, True)}


def test_a_candidate_that_is_wrong_is_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """block_m 32 is fastest and wrong, 128 is next."""
    known = Table(tmp_path, "GPU", "3.6")
    monkeypatch.setattr(tuned, "table", lambda: known)
    bench_kernels = script("bench_kernels")
    monkeypatch.setattr("localllm.kernels.tuned.measure.table", lambda: known)

    def chosen() -> Tile:
        return settings_for("op", (7,), heuristic)

    def run(turn: int) -> torch.Tensor:
        return torch.tensor(chosen().block_m)

    case = Case("op", "", run, 1, 1, error=lambda: 1.0 if chosen().block_m == 32 else 0.0)

    def clock(run: object) -> float:
        run(0)  # type: ignore[operator]
        return {32: 1.0, 128: 2.0}.get(chosen().block_m, 3.0) + chosen().num_warps / 100

    forced = bench_kernels._forced(case, "op", (7,))
    best = tune("op", (7,), list(bench_kernels.neighbours(heuristic(7))), forced, heuristic, clock=clock)
    assert best == Tile(128, 4, 3, True)
    assert chosen() == best
    bench_kernels.ship(tmp_path / "ship.json")
    assert json.loads((tmp_path / "ship.json").read_text())["kernels"]["op"][0]["settings"] == best._asdict()
