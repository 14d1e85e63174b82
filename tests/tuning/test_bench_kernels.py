"""scripts/bench_kernels on the twins: every case runs and is right; what it tries when it tunes; what it writes."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from localllm.kernels import tuned
from localllm.kernels.gated import gated_launch
from localllm.kernels.launch import DeviceFeatures
from localllm.kernels.paged_attention.device import decode_launch, prefill_launch, split_launch
from localllm.kernels.planar.kernels import planar_tile
from localllm.kernels.rotary_store_kv import rotary_launch
from localllm.kernels.sampling.draw import gumbel_max_launch
from localllm.kernels.skinny_gemm import SkinnyGemmTile
from localllm.kernels.tuned import Table, settings_for
from localllm.kernels.w8a8_gemm import w8a8_tile
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
from scripts.gpu_check_lib.measured_cases import Part, Wanted
from scripts.gpu_check_lib.roofline import Ceilings
from scripts.random_weights import shape_spec
from tests.tuning.harness import script


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


def test_neighbours_also_trade_a_tile_for_splits_and_for_length() -> None:
    """Each of two steps alone would leave half the programs, or half the bytes in flight."""
    tile = SkinnyGemmTile(16, 64, 128, 2, 4, 4)
    found = set(tuning.neighbours(tile))
    assert {tile._replace(block_n=128, split_k=4), tile._replace(block_n=32, split_k=1)} <= found
    assert {tile._replace(block_n=128, block_k=64), tile._replace(block_n=32, block_k=256)} <= found
    assert tile._replace(block_n=128, block_k=256) not in found


@pytest.mark.parametrize(
    "settings",
    [
        decode_launch(90, 128, 16, 4, 64), split_launch(90, 128, 16, 4, 8), prefill_launch(90, 128, 16, 4, 64),
        gated_launch(4096), gumbel_max_launch(128256, False, False), rotary_launch(32, 128),
        planar_tile(16, 4096, 4096, 4, 128, False, 132, True), w8a8_tile(64, 4096, 4096, 90),
    ],
    ids=lambda settings: type(settings).__name__,
)  # fmt: skip
def test_every_kernel_with_settings_has_neighbours(settings: Any) -> None:
    assert list(tuning.neighbours(settings))


# ---- tuning, with a kernel that is made of a table -------------------------------------------------------------------


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Table:
    return new_process(tmp_path, monkeypatch)


def new_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Table:
    made = Table(folder, "GPU", "3.6")
    monkeypatch.setattr(tuned, "table", lambda: made)
    monkeypatch.setattr("localllm.kernels.tuned.measure.table", lambda: made)
    return made


def chosen(op: int = 7) -> Tile:
    return settings_for("op", (op,), heuristic)


def case(name: str, floor_us: float, *, op: int = 7, is_checked: bool = True) -> Case:
    """block_m 32 is wrong."""

    def run(turn: int) -> torch.Tensor:
        return torch.tensor([op, chosen(op).block_m])

    def error() -> float:
        return 1.0 if chosen(op).block_m == 32 else 0.0

    return Case("op", name, run, floor_us, 0, error=error if is_checked else None, plan=lambda: chosen(op))


def search_of(*cases: Case) -> tuning.Search:
    [(group, members)] = tuning.groups_of([lambda each=each: each for each in cases]).items()
    assert members == list(range(len(cases)))
    return tuning.Search(group, members)


def parts_of(*ops: int) -> list[Part]:
    return [Part(f"op {op}", [lambda op=op: case("", 1, op=op)]) for op in ops]


ONE_BYTE_A_US = Ceilings(copy_bytes_per_s=1e6, bf16_flops_per_s=1.0, fp8_flops_per_s=None)


def pretend_us(run: Callable[[int], Any]) -> float:
    """block_m 32 is fastest, but wrong; 128 and then 256 are faster than the heuristic's 64."""
    op, block_m = run(0).tolist()
    return {32: 1.0, 128: 5.0, 256: 4.0}.get(block_m, 6.0) + chosen(op).num_warps / 100


def test_a_candidate_that_is_wrong_is_not_remembered(known: Table, tmp_path: Path) -> None:
    search = search_of(case("", 1))
    search.measure([case("", 1)], ONE_BYTE_A_US, pretend_us)
    assert search.best == chosen() == Tile(128, 4, 3, True)
    tuning.ship(tmp_path / "ship.json")
    assert json.loads((tmp_path / "ship.json").read_text())["kernels"]["op"][0]["settings"] == search.best._asdict()


def test_a_search_goes_on_from_the_best_until_no_neighbour_is_faster(known: Table) -> None:
    search, found, measured = search_of(case("", 1)), [], []

    def time_us(run: Callable[[int], Any]) -> float:
        measured.append(chosen())
        return pretend_us(run)

    while not search.is_over:
        search.measure([case("", 1)], ONE_BYTE_A_US, time_us)
        found.append(search.best.block_m)
    assert found[:2] == [128, 256]
    assert search.best == Tile(256, 1, 3, True)
    assert len(measured) == len(set(measured)), "nothing is measured twice"


def test_a_key_is_tuned_over_all_of_its_cases(known: Table) -> None:
    """Half as fast on the small case weighs more than a tenth faster on the large one, whichever comes last."""
    cases = [case("small", 10), case("large", 1000, is_checked=False)]
    times = {64: {"small": 20.0, "large": 2000.0}, 128: {"small": 40.0, "large": 1800.0}}
    names = {id(each.run): each.shape for each in cases}

    def time_us(run: Callable[[int], object]) -> float:
        return times.get(chosen().block_m, {"small": 1e6, "large": 1e6})[names[id(run)]]

    for order in (cases, cases[::-1]):
        search = search_of(*order)
        search.measure(order, ONE_BYTE_A_US, time_us)
        assert search.best.block_m == 64


def test_a_case_tunes_only_the_kernels_that_it_launches(known: Table) -> None:
    """The plan of a decode asks for the prefill's settings too."""

    def run(turn: int) -> torch.Tensor:
        settings_for("prefill", (1,), heuristic)
        return torch.tensor(chosen().block_m)

    made = replace(case("", 1), run=run)
    assert list(tuning.groups_of([lambda: made])) == [("op", (7,)), ("prefill", (1,))]
    assert list(tuning.groups_of([lambda: replace(made, tunes=("op",))])) == [("op", (7,))]


def test_a_case_that_does_not_fit_is_left_out(known: Table) -> None:
    def too_large() -> Case:
        raise MemoryError

    assert tuning.groups_of([too_large, lambda: case("", 1)]) == {("op", (7,)): [1]}


def test_all_candidates_of_a_round_are_compiled_before_one_is_timed(bench: Bench, known: Table) -> None:
    compiled: set[tuple[tuned.Key, Tile]] = set()
    rounds: list[int] = []

    def compile_first(tasks: Sequence[tuning.Task]) -> None:
        rounds.append(len(tasks))
        for task in tasks:
            assert len(task.candidates) <= tuning.CANDIDATES_PER_TASK
            compiled.update((task.key, settings) for settings in task.candidates)

    def time_us(run: Callable[[int], Any]) -> float:
        op = int(run(0)[0])
        assert ((op,), chosen(op)) in compiled
        return pretend_us(run)

    part = Part("both", [part.makers[0] for part in parts_of(1, 2)])
    lines = list(tuning.tune_all(bench, [part], ONE_BYTE_A_US, None, compile_first, time_us))
    assert rounds[0] == 2  # the cases as they are, which tells the keys
    assert len(rounds) == 1 + tuning.ROUNDS
    assert len(lines) == 2 * tuning.ROUNDS


def test_a_process_of_the_pool_launches_the_candidates_of_its_task(
    known: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []

    def make() -> Case:
        made = case("", 1)
        return replace(made, run=lambda turn: ran.append(chosen()) or made.run(turn))

    monkeypatch.setattr(tuning, "_makers", [[], [make]])
    candidates = tuple(tuning.neighbours(heuristic(7)))
    assert tuning.compile_task(tuning.Task(1, 0, "op", (7,), candidates)) == len(candidates)
    assert tuning.compile_task(tuning.Task(1, 0)) == 0
    assert ran == [*candidates, candidates[-1]]


def test_a_killed_run_loses_nothing_that_it_had_measured(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first key is done and the second under way; another run goes on from both, and tunes a third."""
    file = tmp_path / "GPU.json"

    def killed(run: Callable[[int], Any]) -> float:
        if run(0)[0] == 2 and chosen(2).num_warps == 2:  # after another tile
            raise KeyboardInterrupt
        return pretend_us(run)

    def shipped() -> dict[int, int]:
        return {row["key"][0]: row["settings"]["block_m"] for row in json.loads(file.read_text())["kernels"]["op"]}

    new_process(tmp_path, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        list(tuning.tune_all(bench, parts_of(1, 2), ONE_BYTE_A_US, file, time_us=killed))
    assert shipped() == {1: 256, 2: 128}
    new_process(tmp_path, monkeypatch)
    assert (chosen(1).block_m, chosen(2).block_m) == (256, 128)
    new_process(tmp_path / "another machine", monkeypatch)
    list(tuning.tune_all(bench, parts_of(3), ONE_BYTE_A_US, file, time_us=pretend_us))
    assert shipped() == {1: 256, 2: 128, 3: 256}


def test_the_file_is_written_after_each_key(bench: Bench, known: Table, tmp_path: Path) -> None:
    file = tmp_path / "GPU.json"
    lines = tuning.tune_all(bench, parts_of(1, 2), ONE_BYTE_A_US, file, time_us=pretend_us)
    for line in lines:
        kernel, key = line.split(":")[0].split(" ", 1)
        assert list(map(int, key.strip("(,)"))) in [
            row["key"] for row in json.loads(file.read_text())["kernels"][kernel]
        ]


@pytest.mark.parametrize(
    ("times", "most"),
    [
        ({17: (1.0, 2.0), 32: (2.0, 2.0), 64: (3.0, 2.0)}, 32),
        ({17: (1.0, 2.0), 32: (3.0, 2.0), 64: (1.0, 2.0)}, 17),  # a lucky measurement beyond the crossing
        ({17: (3.0, 2.0)}, 16),
    ],
)
def test_the_crossover_is_the_last_row_count_before_cublas_wins(
    times: dict[int, tuple[float, float]], most: int
) -> None:
    assert tuning.crossover(times) == most


@pytest.mark.parametrize("weights", tuning.CROSSINGS)
def test_the_crossover_is_measured_for_every_matrix(
    bench: Bench, known: Table, monkeypatch: pytest.MonkeyPatch, weights: str
) -> None:
    """The kernel for few rows takes a microsecond a row, the other as many as the third row count and a half."""
    kernel, key_of, heuristic, _, row_counts = tuning.CROSSINGS[weights]
    for file in ("linear", "fp8_linear", "int8_linear"):
        monkeypatch.setattr(f"localllm.kernels.{file}.device_features", lambda device: DeviceFeatures(90, True, True))
    monkeypatch.setattr("localllm.kernels.planar.linear._gpu", lambda device: (132, True))

    def product(x: torch.Tensor, weight: Any) -> float:
        few = len(x) <= settings_for(kernel, key_of(weight), heuristic).skinny_rows
        return float(len(x)) if few else row_counts[2] + 0.5

    monkeypatch.setattr(tuning, "product", product)
    lines = list(tuning.tune_crossover(bench, weights, lambda run: run(0)))
    shapes = [shape for name, shape in matrices(bench.spec).items() if weights == "16-bit" or name != "head"]
    assert len(lines) == len(shapes)
    assert all(f"up to {row_counts[2]};" in line for line in lines)
    assert {entry["skinny_rows"] for entry in known.measured[kernel].values()} == {row_counts[2]}
    assert {key[:2] for key in known.measured[kernel]} == set(shapes)


def test_what_is_largest_in_a_step_is_tuned_first(bench: Bench) -> None:
    parts = list(Wanted("tiny", "cpu").parts(bench))
    assert [part.name for part in parts] == ["16-bit", "int4", "attention", "8-bit", "rows", "sampling"]
    assert [part.formats for part in parts[:4]] == [("16-bit",), ("int4",), (), ("fp8", "int8")]
    assert set(tuning.CROSSINGS) == {weights for part in parts for weights in part.formats}
