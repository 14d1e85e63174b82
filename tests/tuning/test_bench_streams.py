"""scripts/bench_streams, run once on something tiny: the server, its readers and the meter work together."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from localllm.engine.params import SamplingParams
from localllm.engine.request import Request
from scripts.stream_bench.paced import Pace, paced_loop
from tests.tuning.test_scripts import script


def test_open_streams_are_compared_with_the_engine_alone(capsys: pytest.CaptureFixture[str]) -> None:
    words = "-n 3 --step-ms 2 --depth 2 --dashboards 1 --stuck 1 --steps 40 --rounds 1"
    assert script("bench_streams").main(words.split()) == 0
    alone, server = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("| 3 ")]
    assert (alone[4].strip(), server[4].strip()) == ("alone", "server")
    assert float(alone[5]) >= 1.9  # a step is never shorter than the device takes
    assert float(server[5]) >= 1.9
    assert float(server[-2]) > 0  # a reader got more than one piece


@pytest.mark.parametrize("depth", [1, 2])
def test_the_paced_device_runs_one_step_after_another(tmp_path: Path, depth: int) -> None:
    pace = Pace(2, 0.002, depth, steps=20, report=str(tmp_path / "report"), token_ids=(5, 6, 7), warm_up_steps=3)
    assert Pace.read(json.dumps(asdict(pace))) == pace
    loop = paced_loop(pace)
    said: dict[str, list[int]] = {"a": [], "b": []}
    loop.deliver = lambda outputs: [said[output.request_id].extend(output.token_ids) for output in outputs] and None
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    loop.submit(*(Request(name, [1, 2, 3], params, max_output_tokens=500) for name in said))
    while not Path(pace.report).exists():
        loop.step()
    report = json.loads(Path(pace.report).read_text())
    launched = report["launched_s"]
    assert len(launched) == pace.steps + 1
    assert launched[-1] - launched[0] >= 0.95 * pace.steps * pace.step_s
    assert set(said["a"]) == {5, 6, 7}
