"""scripts/gpu_check where there is no GPU: arithmetic, the stage runner, the table, what is said when it cannot run."""

import importlib
import json
import os
import re
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from localllm.engine.step import KernelFallBack, RunnerStats
from localllm.kernels.checks.choose import Chooser
from localllm.models.decoder.native_program import NotSupportedNatively
from localllm.models.drafters import draft_model
from localllm.models.spec.model_spec import kv_numbers_per_token
from localllm.runner import opening, self_check
from localllm.tuning.report import RequestTimes
from localllm.tuning.workload import Workload, WorkloadRequest, chat_lengths
from scripts import random_weights
from scripts.gpu_check_lib import (
    compiling,
    counters,
    drafts,
    environment,
    families,
    figures,
    first_start,
    profiling,
    report,
    sanitizer,
    serving,
    start,
    variants,
    wheels,
)
from scripts.gpu_check_lib.activity import Activity, idle_share
from scripts.gpu_check_lib.ceilings import measure_ceilings
from scripts.gpu_check_lib.engine import Options, RandomEngine, StepTimes, bytes_needed
from scripts.gpu_check_lib.pytest_stage import run_tests
from scripts.gpu_check_lib.roofline import GOALS, Ceilings, Goal, Work, work_of
from scripts.gpu_check_lib.stages import Context, Found, Result, Skip, Stage, run_inside, run_stages
from tests.runner import served
from tests.tuning.harness import script

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

H200 = Ceilings(copy_bytes_per_s=4.3e12, bf16_flops_per_s=790e12, fp8_flops_per_s=1500e12)


def work(shape: str = "llama-3.1-8b") -> Work:
    from scripts.random_weights import shape_spec

    return work_of(shape_spec(shape))


# ---- arithmetic ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "weights", "batch", "context", "milliseconds"),
    [
        ("llama-3.1-8b", "16-bit", 1, 1024, 3.52), ("llama-3.1-8b", "16-bit", 16, 1024, 3.99),
        ("llama-3.1-8b", "16-bit", 64, 1024, 5.49), ("llama-3.1-8b", "16-bit", 256, 1024, 12.9),
        ("llama-3.1-8b", "16-bit", 1, 32768, 4.49), ("llama-3.1-8b", "16-bit", 16, 8192, 7.49),
        ("llama-3.1-8b", "fp8", 1, 1024, 1.90), ("llama-3.1-8b", "int4", 1, 1024, 1.12),
        ("llama-3.2-1b", "16-bit", 1, 1024, 0.58), ("qwen2.5-0.5b", "16-bit", 1, 1024, 0.233),
    ],
)  # fmt: skip
def test_decode_floors(shape: str, weights: str, batch: int, context: int, milliseconds: float) -> None:
    assert work(shape).decode_s(batch, context, H200, weights) * 1e3 == pytest.approx(milliseconds, rel=0.01)


@pytest.mark.parametrize(("tokens", "milliseconds"), [(2048, 37.6), (8192, 167), (32768, 935)])
def test_prefill_floors(tokens: int, milliseconds: float) -> None:
    assert work().prefill_s(tokens, H200) * 1e3 == pytest.approx(milliseconds, rel=0.01)


def test_the_floor_of_a_workload_is_arithmetic_alone() -> None:
    workload = Workload("one", 0, (WorkloadRequest((1,) * 215, 197),) * 10)
    assert workload.output_tokens / work().workload_s(workload, H200) == pytest.approx(26_100, rel=0.01)


def test_goals_have_models_and_limits() -> None:
    for goal in GOALS:
        assert 0 < goal.asked_fraction < 1
        assert (goal.asked_ms is not None) == (goal.kind == "prefill")
        assert goal.shape in goal.what


@pytest.mark.parametrize(("step_ms", "on_h200"), [(3.8, "ok"), (4.2, "missed")])
def test_a_figure_is_judged_on_the_gpu_that_it_is_asked_of(step_ms: float, on_h200: str) -> None:
    times = StepTimes(step_ms / 1e3, step_ms / 1e3, 1e-4, 1024.0, 1, 1.0)
    name, verdict, text, data = figures.judge_decode(GOALS[0], times, work(), H200, "NVIDIA H200")  # type: ignore[misc]
    assert (name, verdict) == ("G1", on_h200)
    assert f"{1e3 / step_ms:.0f} tok/s" in text
    assert "target: 87%" in text
    assert data["floor_s"] == pytest.approx(3.52e-3, rel=0.01)
    assert figures.judge_decode(GOALS[0], times, work(), H200, "NVIDIA T4")[1] == "note"
    assert figures.judge_decode(GOALS[0], times, work(), None, "NVIDIA H200")[1] == "note"


def test_prefill_gap_and_offline_are_judged() -> None:
    prefill = next(goal for goal in GOALS if goal.kind == "prefill")
    assert figures.judge_prefill(prefill, 0.053, work(), H200, "NVIDIA H200")[1] == "ok"
    assert figures.judge_prefill(prefill, 0.055, work(), H200, "NVIDIA H200")[1] == "missed"
    assert figures.judge_gap(prefill, 0.031, "NVIDIA H200")[1] == "missed"
    assert figures.judge_gap(prefill, None, "NVIDIA H200")[1] == "skipped"
    workload = chat_lengths(1000)
    seconds = workload.output_tokens / 17_500
    assert figures.judge_offline(workload, seconds, work(), H200, "NVIDIA H200")[1] == "ok"


def test_idle_time_is_what_no_kernel_covers() -> None:
    spans = [(0.0, 40.0), (30.0, 50.0), (51.0, 60.0), (80.0, 100.0)]
    busy = [Activity("kernel", *span) for span in spans]
    assert idle_share(busy) == pytest.approx(0.20)  # the gap of 1 is within a step
    assert idle_share(busy, smallest_gap=0.5) == pytest.approx(0.21)


def test_load_is_judged_by_rate_and_tail() -> None:
    def times(gap_s: float, error: str | None = None) -> list[RequestTimes]:
        one = RequestTimes(0.0, 1.0, 10, 1000, 0, 0.01, (gap_s,) * 100, error)
        return [one] * 20

    assert serving.judge_load(times(0.01), 1.0, 256, "NVIDIA H200")[1] == "ok"
    assert serving.judge_load(times(0.07), 1.0, 256, "NVIDIA H200")[1] == "missed"
    assert serving.judge_load(times(0.01), 2.0, 256, "NVIDIA H200")[1] == "missed"
    assert serving.judge_load(times(0.01, "refused"), 1.0, 256, "NVIDIA H200")[1:3] == (
        "failed", "20 of 20 requests failed: refused",
    )  # fmt: skip
    assert serving.judge_ttft(times(0.01), "NVIDIA H200")[1] == "ok"
    assert serving.judge_ttft([], "NVIDIA H200")[1] == "failed"


# ---- stages ----------------------------------------------------------------------------------------------------------

FAKE = """
import os, sys, time
from pathlib import Path
from scripts.gpu_check_lib.stages import Context, Skip, Stage, run_inside

def good(context):
    yield "a", "ok", "fine", {"step_s": 1.0}
    yield "b", "missed", "slow"
def slow(context):
    yield "first", "ok", "told in time"
    time.sleep(60)
def broken(context):
    yield "first", "ok", "told before"
    raise ValueError("no such thing")
def killed(context):
    yield "first", "ok", "told before"
    os.kill(os.getpid(), 11)
def skipping(context):
    raise Skip("no tool")
    yield
def lacking(context):
    import no_such_package
    yield
def silent(context):
    return iter(())
run = globals()[sys.argv[1]]
sys.exit(run_inside(Stage(sys.argv[1], "", 9, run, needs=("no_such_package",)), Context(Path(sys.argv[2]))))
"""


def nothing(context: Context) -> Iterator[Found]:
    return iter(())


def run_fakes(out: Path, *stages: tuple[str, float], total_s: float = 100.0, **facts: bool) -> list[Result]:
    def command(stage: Stage, limit_s: float) -> list[str]:
        return [sys.executable, "-c", FAKE, stage.name, str(out)]

    told: list[str] = []
    results = run_stages(
        [Stage(name, "", limit_s, nothing, **facts) for name, limit_s in stages],
        Context(out),
        command,
        total_s=total_s,
        tell=lambda stage, results, seconds: told.append(stage.name),
    )
    assert told == [name for name, _ in stages]
    return results


def test_one_failing_stage_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    names = ("broken", "killed", "skipping", "lacking", "silent", "good")
    results = run_fakes(tmp_path, *((name, 30.0) for name in names))
    assert [(r.stage, r.name, r.verdict) for r in results] == [
        ("broken", "first", "ok"), ("broken", "", "failed"),
        ("killed", "first", "ok"), ("killed", "", "failed"),
        ("skipping", "", "skipped"), ("lacking", "", "skipped"), ("silent", "", "failed"),
        ("good", "a", "ok"), ("good", "b", "missed"),
    ]  # fmt: skip
    texts = {r.stage: r.text for r in results if r.name == ""}
    assert "ValueError: no such thing" in texts["broken"]
    assert "SIGSEGV" in texts["killed"]
    assert texts["skipping"] == "no tool"
    assert "no_such_package" in texts["lacking"]
    assert results[-2].data == {"step_s": 1.0}


def test_a_stage_that_hangs_is_ended_and_what_it_told_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    started = time.monotonic()
    results = run_fakes(tmp_path, ("slow", 2.0))
    assert time.monotonic() - started < 20
    assert [(r.name, r.verdict) for r in results] == [("first", "ok"), ("", "failed")]
    assert "Not done after 2 s" in results[-1].text


def test_no_figure_is_measured_after_a_guard_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    results = run_fakes(tmp_path, ("broken", 30.0), ("good", 30.0), guards=True, measures=True)
    assert [(r.stage, r.verdict) for r in results] == [("broken", "ok"), ("broken", "failed"), ("good", "skipped")]
    assert "stage broken failed" in results[-1].text


def test_no_time_left_is_told(tmp_path: Path) -> None:
    [result] = run_fakes(tmp_path, ("good", 30.0), total_s=0.0)
    assert (result.verdict, result.text) == ("skipped", "No time was left of 0 s.")


def test_an_unknown_missing_package_is_an_error(tmp_path: Path) -> None:
    def run(context: Context) -> Iterator[Found]:
        raise ImportError("typo", name="localllm.typo")
        yield

    with pytest.raises(ImportError):
        run_inside(Stage("s", "", 1, run, needs=("openai",)), Context(tmp_path))


# ---- telling ---------------------------------------------------------------------------------------------------------

RESULTS = [
    Result("ceilings", "copy", "note", "4,300 GB/s"),
    Result("8b", "G1", "ok", "fast"),
    Result("8b", "G7", "missed", "a | b"),
]


def test_the_table_is_aligned_and_the_summary_counts() -> None:
    lines = report.as_table(RESULTS).splitlines()
    assert lines == [
        "·  ceilings  copy  4,300 GB/s",
        "✓  8b        G1    fast",
        "↓  8b        G7    a | b",
    ]
    assert report.summary(RESULTS) == "1 ok, 1 below target."


@pytest.mark.parametrize(
    ("verdicts", "strict", "code"),
    [(["ok", "note", "skipped"], False, 0), (["ok", "missed"], False, 0), (["ok", "missed"], True, 1),
     (["ok", "failed"], False, 1), ([], False, 1)],
)  # fmt: skip
def test_the_exit_code_says_whether_something_failed(verdicts: list[str], strict: bool, code: int) -> None:
    results = [Result("s", "n", verdict, "") for verdict in verdicts]  # type: ignore[arg-type]
    assert report.exit_code(results, strict=strict) == code


def test_results_are_written_for_people_and_programs(tmp_path: Path) -> None:
    report.write(tmp_path, RESULTS, {"gpu": "NVIDIA H200", "driver": "580.1"}, ["ceilings"])
    stored = json.loads((tmp_path / "results.json").read_text())
    assert stored["machine"]["driver"] == "580.1"
    assert [result["name"] for result in stored["results"]] == ["copy", "G1", "G7"]
    page = (tmp_path / "results.md").read_text()
    assert page.startswith("### NVIDIA H200 · driver 580.1\n")
    assert "| 8b | G7 | below | a \\| b |  |" in page


def test_figures_are_written_as_an_entry_for_the_lab() -> None:
    results = [*RESULTS, Result("8b", "G9", "skipped", "Too large."), Result("kernels", "moe", "failed", "1 of 90"),
               Result("first-start", "graph", "missed", "5 ms", {}, "quicker")]  # fmt: skip
    entry = report.as_lab_entry(results, {"gpu": "NVIDIA H200"}, ["8b", "first-start"], "the command", "2026-12-01")
    assert entry.splitlines() == [
        "## 2026-12-01: figures of NVIDIA H200", "",
        "`the command`. 1 ok, 1 failed, 2 below target, 1 skipped.", "",
        "| stage | figure | measured | expected |", "| --- | --- | --- | --- |", "| 8b | G1 | fast |  |",
        "| 8b | G7 | **below**: a \\| b |  |", "| first-start | graph | **below**: 5 ms | quicker |", "",
        "- **kernels** moe: 1 of 90", "", "Not run: 8b G9 (Too large).",
    ]  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert script("gpu_check").main([]) == 2
    said = capsys.readouterr().err
    assert "cannot run here" in said
    assert "Try: " in said


def test_an_old_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.4.1+cu121", "triton": None}
    monkeypatch.setattr(environment, "installed", lambda name: versions.get(name, "9.9"))
    problems = environment.missing()
    assert [problem.split(".")[0] for problem in problems] == ["torch 2", "The package triton is not installed"]
    assert "2.9 or newer" in problems[0]


def test_every_stage_can_be_named_and_has_a_limit() -> None:
    stages = script("gpu_check").STAGES
    assert len({stage.name for stage in stages}) == len(stages)
    assert all(0 < stage.limit_s <= 360 and stage.what for stage in stages)


def test_every_goal_has_a_stage_and_every_file_of_tests_exists() -> None:
    check = script("gpu_check")
    told = " ".join(stage.what for stage in check.STAGES)
    assert {goal.name for goal in GOALS} | {"G12", "G13", "G14", "G15"} <= set(re.findall(r"G\d+", told))
    source = (ROOT / "scripts" / "gpu_check").read_text()
    assert all((ROOT / named).exists() for named in re.findall(r"tests/\w+(?:/\w+\.py)?", source))


def test_what_was_found_is_on_disk_after_every_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody ends the check in its second stage: the first one's results, log and profile are there."""
    check = script("gpu_check")
    monkeypatch.setattr(environment, "missing", list)
    monkeypatch.setattr(environment, "machine", lambda: {"gpu": "NVIDIA H200", "driver": "580.1"})

    def run(stages: object, context: Context, command: object, *, total_s: float, tell: object) -> None:
        context.leave("profile-8b", {"kernels": []})
        (context.out / "8b.log").write_text("a line\n" * 200_000)
        (context.out / "weights.safetensors").write_bytes(b"x" * 5_000_000)
        tell(EMPTY, [Result("8b", "G1", "ok", "fast")], 1.0)  # type: ignore[operator]
        raise KeyboardInterrupt

    monkeypatch.setattr(check, "run_stages", run)
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        check.main(["--out", str(out)])
    assert sorted(path.name for path in out.iterdir()) == [
        "lab.md", "logs.tar.gz", "results.json", "results.md"
    ]  # fmt: skip
    assert json.loads((out / "results.json").read_text())["results"][0]["name"] == "G1"
    with tarfile.open(out / "logs.tar.gz") as tar:
        assert sorted(tar.getnames()) == ["stages/8b.log", "stages/profile-8b.json"]
        log = tar.extractfile("stages/8b.log")
        assert log is not None
        content = log.read()
    assert len(content) < 1.1 * report.MOST_BYTES
    assert b"cut" in content


EMPTY = Stage("8b", "", 1, nothing)


# ---- pytest as a stage -----------------------------------------------------------------------------------------------

TESTS = """
import time
import pytest

def test_right(): pass
def test_wrong(): assert 1 == 2, "one is not two"
@pytest.fixture
def broken(): raise ValueError("no device")
def test_with_a_broken_fixture(broken): pass
@pytest.mark.skip
def test_skipped(): pass
"""


def found_in(tmp_path: Path, text: str, limit_s: float = 60.0, *words: str) -> list[Found]:
    (tmp_path / "test_it.py").write_text(text)
    context = Context(tmp_path, device="cpu", limit_s=limit_s)
    return list(run_tests(context, "it", [str(tmp_path / "test_it.py"), "--rootdir", str(tmp_path), *words]))


@pytest.mark.parametrize("words", [(), ("-n", "2")], ids=["one process", "several"])
def test_failing_tests_are_told_by_name_and_reason(tmp_path: Path, words: tuple[str, ...]) -> None:
    *failed, last = found_in(tmp_path, TESTS, 60.0, *words)
    told = {name.split("::")[1]: text for name, _, text, *_ in failed}
    assert set(told) == {"test_wrong", "test_with_a_broken_fixture"}
    assert "one is not two" in told["test_wrong"]
    assert "no device" in told["test_with_a_broken_fixture"]
    assert last[:2] == ("pytest", "failed")
    assert last[2].startswith("1 passed, 2 failed, 1 skipped; slowest: ")


def test_a_run_of_tests_without_time_tells_what_it_had(tmp_path: Path) -> None:
    hanging = TESTS + "def test_for_ever(): time.sleep(600)\n"
    *failed, last = found_in(tmp_path, hanging, 40.0)
    assert len(failed) == 2
    assert last[1] == "failed"
    assert "Not done after 40 s: 1 passed, 2 failed, 1 skipped" in last[2]


def test_tests_that_cannot_be_collected_are_a_failure(tmp_path: Path) -> None:
    [last] = found_in(tmp_path, "import no_such_module\n")
    assert last[:2] == ("pytest", "failed")
    assert "Ended with code 2" in last[2]


# ---- profiles, counters, wheels --------------------------------------------------------------------------------------


def test_a_profile_sums_up_by_kernel_and_tells_gaps() -> None:
    seen = [Activity("gemm", 0, 40), Activity("norm", 45, 50), Activity("gemm", 50, 90), Activity("norm", 95, 100)]
    gemm, norm = profiling.by_kernel(seen, steps=2)
    assert (gemm.name, gemm.launches, gemm.us, gemm.gap_us) == ("gemm", 1.0, 40.0, 0.0)
    assert (norm.launches, norm.us, norm.gap_us, norm.step_us) == (1.0, 5.0, 5.0, 10.0)


def test_a_profile_is_left_for_later_with_every_kernel(tmp_path: Path) -> None:
    context = Context(tmp_path)
    name, verdict, text, _ = profiling.told(context, "8b batch 1", 50.0, [Activity("gemm", 0, 40)] * 20)  # type: ignore[misc]
    assert (name, verdict) == ("8b batch 1", "note")
    assert "gemm 1 x 40.0 us" in text
    stored = context.read("profile-8b-batch-1")
    assert stored is not None
    assert stored["unwatched_us"] == 50.0
    assert profiling.told(context, "8b", 50.0, [])[1] == "skipped"


NCU = """==PROF== Connected to process 7
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","7","_skinny_gemm_kernel(int)","dram__throughput.avg.pct_of_peak_sustained_elapsed","%","88.5"
"0","7","_skinny_gemm_kernel(int)","gpu__time_duration.sum","us","21.5"
"1","7","_skinny_gemm_kernel(int)","dram__throughput.avg.pct_of_peak_sustained_elapsed","%","70"
"1","7","_skinny_gemm_kernel(int)","gpu__time_duration.sum","ns","9,000"
"""


def test_counters_are_those_of_the_longest_launch() -> None:
    assert counters.parse(NCU) == {"_skinny_gemm_kernel": {"memory": 88.5, "ns": 21_500.0}}
    assert counters.parse("==ERROR== no permission\n") == {}


def test_wheels_of_packages_that_are_here_stay_where_they_are(tmp_path: Path) -> None:
    here = [tmp_path / "msgspec-0.21-cp312-manylinux.whl", tmp_path / "pytest_xdist-3.8-py3-none-any.whl"]
    absent = tmp_path / "no_such_package_of_ours-1.0-py3-none-any.whl"
    assert wheels.missing([*here, absent]) == [absent]
    with pytest.raises(FileNotFoundError, match="--collect-wheels"):
        wheels.unpack(tmp_path, tmp_path / "into")


def test_a_missing_package_is_installed_for_the_run_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "localllm_test_wheel"
    with zipfile.ZipFile(tmp_path / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "ANSWER = 42\n")
        wheel.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{name}-1.0.dist-info/RECORD", "")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    wheels.unpack(tmp_path, tmp_path / "into")
    assert importlib.import_module(name).ANSWER == 42
    assert os.environ["PYTHONPATH"] == f"elsewhere:{tmp_path / 'into'}"


def test_compiling_tells_the_error_of_a_model(tmp_path: Path) -> None:
    found = list(compiling.compile_all(Context(tmp_path, device="cpu"), [("no-such-shape", "16-bit")]))
    assert [verdict for _, verdict, *_ in found] == ["failed", "note"]
    assert "no-such-shape" in found[0][2]


def test_compiling_runs_every_goal_of_a_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    goals = [
        Goal("G1", "tiny", "16-bit", "decode", 2, 64, 0.5),
        Goal("G10", "tiny", "16-bit", "prefill", 1, 90, 0.5, 9.0),
    ]
    monkeypatch.setattr(figures, "GOALS", goals)
    compiling.main("tiny", "16-bit", "cpu")
    assert set(json.loads(capsys.readouterr().out)) == {"kernels", "seconds"}


def test_variants_run_on_the_twins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "BATCHES", (1, 2))
    monkeypatch.setattr(variants, "EARLY_BATCHES", (1, 2))
    monkeypatch.setattr(variants, "STEPS", 2)
    monkeypatch.setattr(variants, "CONTEXT", 40)
    found = list(variants.compare(Context(tmp_path, device="cpu"), "tiny"))
    assert len(found) == 3 + len(variants.SKINNY_ROWS)
    assert all(verdict == "note" and "batch 1: " in text for _, verdict, text, *_ in found)


def test_waiting_for_captures_ends_when_their_number_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([0, 4, 8, *[12] * 100])
    monkeypatch.setattr(serving, "get", lambda url: f'localllm:captured_graphs{{model="m"}} {next(counts)}.0\n')
    assert serving.wait_for_captures("", still_s=0.3, limit_s=20).startswith("12 graphs after ")
    monkeypatch.setattr(serving, "get", lambda url: f"localllm:captured_graphs {time.monotonic_ns()}\n")
    assert serving.wait_for_captures("", still_s=0.3, limit_s=0.5).endswith("and still capturing")


# ---- the engine on a CPU ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine() -> Iterator[RandomEngine]:
    from scripts.random_weights import shape_spec

    options = Options(torch.device("cpu"), torch.float32, max_num_seqs=4, max_model_len=256, num_kv_tokens=1024,
                      max_num_batched_tokens=64, block_size=16)  # fmt: skip
    made = RandomEngine(shape_spec("tiny"), options)
    yield made
    made.close()


def test_decode_steps_hold_every_row(engine: RandomEngine) -> None:
    times = engine.decode(batch=4, context=64, steps=10)
    assert times.batch == 4
    assert times.context == pytest.approx(64, abs=8)
    assert 0 < times.critical_s <= times.median_s * 1.5
    assert not engine.scheduler.has_work


def test_prefill_and_a_whole_workload(engine: RandomEngine) -> None:
    assert engine.prefill(150, repeats=1) > 0
    workload = chat_lengths(6, max_input_len=60, max_output_len=30, vocab_size=512)
    assert engine.run(workload) > 0


def test_memory_is_estimated_from_the_shape(engine: RandomEngine) -> None:
    spec, options = engine.spec, engine.options
    needed = bytes_needed(spec, options, 1e9)
    assert needed > 1e9 + options.num_blocks * 16 * kv_numbers_per_token(spec) * 4


def test_figures_of_a_model_that_does_not_fit_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise Skip("Needs 20.0 GiB; 8.0 GiB are free.")

    monkeypatch.setattr(figures, "require_memory", refuse)
    found = list(figures.figures_of("llama-3.1-8b", "16-bit")(Context(tmp_path, device="cpu")))
    assert {verdict for _, verdict, *_ in found} == {"skipped"}
    assert len(found) == sum((g.shape, g.weights) == ("llama-3.1-8b", "16-bit") for g in GOALS)


def test_figures_are_measured_and_told_with_their_floors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goals = [Goal("G1", "tiny", "16-bit", "decode", 1, 64, 0.5), Goal("G7", "tiny", "16-bit", "decode", 3, 64, 0.5),
             Goal("G10", "tiny", "16-bit", "prefill", 1, 100, 0.5, 10.0)]  # fmt: skip
    monkeypatch.setattr(figures, "GOALS", goals)
    monkeypatch.setattr(figures, "DECODE_STEPS", 8)
    context = Context(tmp_path, device="cpu", gpu="a CPU")
    context.leave("ceilings", {"copy_bytes_per_s": 1e10, "bf16_flops_per_s": 1e11, "fp8_flops_per_s": None})
    found = list(figures.figures_of("tiny", "16-bit")(context))
    assert [name for name, *_ in found] == ["graphs", "G1", "G7", "G10", "late work"]
    assert all("floor" in text for name, _, text, *_ in found if name.startswith("G"))
    assert "target for an H200: 50%" in found[1][2]


def test_ceilings_can_be_measured_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.gpu_check_lib.ceilings._free_bytes", lambda device: 1 << 20)
    monkeypatch.setattr("scripts.gpu_check_lib.ceilings.gemm_flops_per_s", lambda device: 1e12)
    found = measure_ceilings(torch.device("cpu"))
    assert found.copy_bytes_per_s > 0
    assert found.fp8_flops_per_s is None
    assert found.flops_per_s("fp8") == 1e12


def test_a_folder_for_a_random_server_has_a_word_for_every_id(tmp_path: Path) -> None:
    from localllm.models.read_spec import read_spec
    from localllm.text.tokenizer import load_tokenizer

    serving.write_folder(tmp_path, "tiny")
    assert load_tokenizer(tmp_path).vocab_size == read_spec(tmp_path).vocab_size


def test_a_random_model_is_served_under_load(tmp_path: Path) -> None:
    """The very processes of the load stage, tiny and on a CPU."""
    workload = chat_lengths(8, max_input_len=40, max_output_len=20)
    found = list(serving.load_of("tiny", Context(tmp_path, device="cpu"), 4, workload))
    assert [(name, verdict) for name, verdict, *_ in found] == [(name, "note") for name in ("captures", "G14", "G12")]
    assert "8 chat-like requests over HTTP, 4 streams" in found[2][2]


def test_drafts_are_measured_on_a_model_whose_drafts_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"CONTEXT": 150, "STEPS": 3, "BATCHES": (1,)}.items():
        monkeypatch.setattr(drafts, name, value)
    found = list(drafts.measure_drafts(Context(tmp_path, device="cpu"), "tiny"))
    assert [name for name, *_ in found][1:-1] == [
        *(f"batch 1, {width} drafts" for width in (0, 3, 7, 15)), "batch 1, as decided"
    ]  # fmt: skip
    assert {verdict for _, verdict, *_ in found} == {"note", "ok"}
    assert "16.0 tokens of each request" in found[4][2]


@pytest.mark.parametrize(("kind", "floor"), [("WINDOWS", 1.9e6), ("DELTA", 2.1e6), ("MIXTURE", 0.64e6)])
def test_other_kinds_of_models_are_measured(
    kind: str, floor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"CONTEXT": 60, "STEPS": 2, "PROMPT": 90, "BATCHES": (1, 2)}.items():
        monkeypatch.setattr(families, name, value)
    monkeypatch.setitem(random_weights.SHAPES, kind, {**served.DENSE, **getattr(served, kind)})
    context = Context(tmp_path, device="cpu")
    context.leave("ceilings", {"copy_bytes_per_s": 1e10, "bf16_flops_per_s": 1e11, "fp8_flops_per_s": None})
    found = list(families.measure_families(context, [kind]))
    assert [name.removeprefix(f"{kind} ") for name, *_ in found] == [kind, "decode", "decode", "prefill", "late work"]
    assert all(verdict in ("note", "ok") for _, verdict, *_ in found)
    data: dict[str, float] = found[1][3]  # type: ignore[misc]
    assert data["floor_s"] * 1e10 == pytest.approx(floor * 10, rel=0.05)


def test_experts_that_no_token_meets_are_not_read() -> None:
    spec = random_weights.shape_spec("qwen3-30b-a3b")
    table = spec.vocab_size * spec.hidden_size
    held = 48 * 128 * 3 * 2048 * 768
    assert families.unread_bytes(spec, 1, 2) == pytest.approx(2 * (table + held * 120 / 128))
    assert families.unread_bytes(spec, 512, 2) == pytest.approx(2 * table)


def test_the_start_is_measured_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The very processes of the stage, with a tiny checkpoint of its tensors."""
    monkeypatch.setattr(start, "NOISE_NUMBERS", 1000)
    monkeypatch.setitem(start.START_S, "tiny", (500.0, 1000.0))
    found = list(start.start_of("tiny", Context(tmp_path, device="cpu", gpu="NVIDIA H200")))
    assert [(name, verdict) for name, verdict, *_ in found] == [
        ("tiny, nothing cached", "ok"), ("tiny, everything cached", "ok")
    ]  # fmt: skip
    assert "at most 1000 s" in found[0][2]
    monkeypatch.setattr(start, "SPARE_BYTES", 1 << 60)
    assert [verdict for _, verdict, *_ in start.start_of("tiny", Context(tmp_path, device="cpu"))] == ["skipped"]


@pytest.mark.parametrize("shape", ["qwen2.5-0.5b", "llama-3.1-8b"])
def test_a_written_checkpoint_has_every_tensor_of_its_model(shape: str) -> None:
    spec = random_weights.shape_spec(shape)
    count = sum(
        torch.Size(each).numel() for file in start.tensors(random_weights.SHAPES[shape]) for each in file.values()
    )
    width = spec.num_heads * spec.head_dim
    biases = (width + 2 * spec.num_kv_heads * spec.head_dim) * spec.num_layers if shape.startswith("qwen") else 0
    norms = (2 * spec.num_layers + 1) * spec.hidden_size
    tables = (1 if spec.tie_word_embeddings else 2) * spec.vocab_size * spec.hidden_size
    assert count == work_of(spec).layer_parameters + biases + norms + tables


# ---- stages in small, on a CPU ---------------------------------------------------------------------------------------


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each stage measure the tiny shape, a few requests and a few steps."""
    for module in (figures, profiling):
        monkeypatch.setattr(module, "shape_spec", lambda name: random_weights.shape_spec("tiny"))
    for name, value in {"CROWD": 3, "CROWD_TOKENS_PER_S": {(20, 9): 1.0}, "OFFLINE": 6, "OFFLINE_SEQS": 4}.items():
        monkeypatch.setattr(figures, name, value)
    lengths = figures.chat_lengths
    monkeypatch.setattr(figures, "chat_lengths", lambda *args, **o: lengths(
        *args, **{**o, "max_input_len": 40, "max_output_len": 12}
    ))  # fmt: skip
    for name, value in {"CONTEXT": 40, "STEPS": 3}.items():
        monkeypatch.setattr(profiling, name, value)


def test_a_crowd_and_requests_at_once_are_measured(tmp_path: Path, tiny: None) -> None:
    context = Context(tmp_path, device="cpu")
    found = [*figures.crowd(context), *figures.offline(context)]
    assert [name for name, *_ in found if name.startswith("G")] == ["G13", "G12"]
    assert {verdict for _, verdict, *_ in found} == {"note", "ok"}


def test_without_a_gpu_profiles_are_skipped(tmp_path: Path, tiny: None) -> None:
    found = list(profiling.profile_steps(Context(tmp_path, device="cpu")))
    assert [verdict for _, verdict, *_ in found] == ["skipped"] * 4


TOOL = """#!/bin/sh
while [ "$1" != "$PYTHON" ]; do shift; done
echo "$PYTHONPATH" >> "$SEEN"
exec "$@"
"""


@pytest.mark.timeout(400)
def test_tools_run_their_programs_with_the_packages_of_this_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "tool"
    tool.write_text(TOOL)
    tool.chmod(0o755)
    packages = os.pathsep.join((str(ROOT), "packages"))
    for name, value in {"PYTHON": sys.executable, "SEEN": str(tmp_path / "seen"), "PYTHONPATH": packages}.items():
        monkeypatch.setenv(name, value)
    context = Context(tmp_path, device="cpu")
    assert [verdict for _, verdict, *_ in sanitizer.check_memory(context, str(tool))] == ["ok"] * 3
    with pytest.raises(Skip, match=r"ncu read nothing: $"):
        list(counters.read_counters(context, str(tool)))
    seen = (tmp_path / "seen").read_text().splitlines()
    assert len(seen) == 5
    assert all(line.endswith("packages") for line in seen)


def test_the_machine_is_told_with_its_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "machine", lambda: {"gpu": "NVIDIA H200", "SMs": 132})
    found = {name: text for name, _, text, *_ in environment.check_environment(Context(tmp_path, device="cpu"))}
    assert found["gpu"] == "NVIDIA H200"
    assert "iterations of an empty loop per second" in found["host"]


def test_a_part_ends_within_a_command() -> None:
    """The limits of a part's stages add up to more; what its last stages lack is told."""
    check = script("gpu_check")
    assert check.MINUTES * 60 + 30 <= 600
    for part, stages in check.PARTS.items():
        minutes = check.ALL_MINUTES if part == "all" else check.MINUTES
        assert sum(stage.limit_s for stage in stages) <= 1.5 * minutes * 60, part


def test_a_first_start_is_measured_beside_a_later_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparisons pass without being made. Nothing is compiled or recorded."""

    def compare(self: Chooser, kernel: Any, variant: Any, case: Any, options: Any) -> str:
        self.record.pass_(kernel.name, variant.name, case.name, 0.0)
        return ""

    monkeypatch.setattr(Chooser, "_compare", compare)
    for name in ("TRITON_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr(first_start, "LENGTH", 256)
    monkeypatch.setattr(first_start, "REQUESTS", 5)
    for module in (self_check, opening):
        monkeypatch.setattr(module, "is_checked", lambda config, device: True)
    found = list(first_start.measure_first_start(Context(tmp_path, device="cpu"), [("tiny", "16-bit")]))
    assert [(name.removeprefix("tiny 16-bit: "), verdict) for name, verdict, *_ in found] == [
        ("compilation", "skipped"), ("comparisons", "ok"), ("fall-backs", "ok"),
        ("graph against launches", "skipped"), ("a later start", "ok"),
    ]  # fmt: skip


def test_a_first_start_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_start, "count_cores", lambda: 8)
    assert first_start.judge_compiling("8b", [(8, 0.5), (52, 6.5)])[1:3] == (
        "ok", "60 kernels side by side in 7.0 s on 8 cores",
    )  # fmt: skip
    assert first_start.judge_compiling("8b", [(8, 0.5), (52, 8.5)])[1] == "missed"
    monkeypatch.setattr(first_start, "count_cores", lambda: 2)
    assert first_start.judge_compiling("8b", [(8, 0.5), (52, 8.5)])[1] == "note"
    assert first_start.judge_graph("8b", [(4.0, 5.0)])[1] == "ok"
    assert first_start.judge_graph("8b", [(5.0, 4.0)])[1] == "missed"
    wrong = RunnerStats(fall_backs=(KernelFallBack("norms", "PyTorch", "slower"),), kernel_check="31 checks")
    told = list(first_start.judge_comparisons("8b", SimpleNamespace(stats=lambda: wrong)))  # type: ignore[arg-type]
    assert [verdict for _, verdict, *_ in told] == ["ok", "failed"]
    later = SimpleNamespace(stats=lambda: wrong)
    assert first_start.judge_later("8b", 9.0, 2.0, later, [])[1] == "failed"  # type: ignore[arg-type]


def no_native_steps(model: object, layers: object) -> None:
    raise NotSupportedNatively("a staged step has padding")


def test_drafters_are_measured_in_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"CONTEXT": 60, "STEPS": 2, "BATCHES": (1,), "DRAFT_VOCAB": 96}.items():
        monkeypatch.setattr(drafts, name, value)
    monkeypatch.setattr(draft_model, "open_native_program", no_native_steps)  # steps are staged, as on a GPU
    found = list(drafts.measure_drafters(Context(tmp_path, device="cpu"), "tiny", "tiny"))
    assert [name for name, *_ in found] == [
        f"{drafter}, {what}" for drafter in ("draft model tiny", "eagle3", "eagle")
        for what in ("batch 1", "graphs", "late work")
    ]  # fmt: skip
    assert {verdict for _, verdict, *_ in found} == {"note", "ok"}


def test_a_trace_is_recorded_over_http(tmp_path: Path) -> None:
    found = list(serving.trace(Context(tmp_path, device="cpu"), "tiny"))
    assert [verdict for _, verdict, *_ in found] == ["ok", "ok"], found
