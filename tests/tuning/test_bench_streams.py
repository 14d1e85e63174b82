"""scripts/bench_streams, run once on something tiny: the server, its readers and the meter work together."""

import asyncio
import json
import os
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from localllm.engine.params import SamplingParams
from localllm.engine.request import Request
from scripts.stream_bench.paced import Pace, paced_loop
from tests.tuning.harness import script
from tests.tuning.stub_server import running, token, usage

pytestmark = pytest.mark.slow


def test_open_streams_are_compared_with_the_engine_alone(capsys: pytest.CaptureFixture[str]) -> None:
    words = "-n 3 --step-ms 2 --depth 2 --dashboards 1 --stuck 1 --steps 40 --rounds 1 --replicas 2"
    assert script("bench_streams").main(words.split()) == 0
    out = capsys.readouterr().out
    rows = [line.split("|") for line in out.splitlines() if line.startswith("| 3 ")]
    assert [row[4].strip() for row in rows] == ["alone", "server", "watched", "2 behind the router"]
    assert all(float(row[5]) >= 1.9 for row in rows)  # a step is never shorter than the device takes
    assert all(float(row[-2]) > 0 for row in rows[1:])  # a reader got more than one piece
    assert re.search(r"dashboards open: 1; tokens/s \d\.\d+ of without .*% of a core", out)


def test_conversations_over_replicas_compute_less_by_prefix() -> None:
    usages_of = script("bench_fleet").conversation_usages
    computed = {}
    for policy in ("prefix", "round_robin"):
        usages = asyncio.run(usages_of(policy, 3400, 200, 0))
        computed[policy] = sum(each.prompt_tokens - each.cached_tokens for each in usages)
    assert computed["prefix"] < 0.4 * computed["round_robin"]


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


def row(printed: str, name: str) -> list[str]:
    return next([cell.strip() for cell in line.split("|")] for line in printed.splitlines() if f"| {name} |" in line)


def test_any_server_that_runs_gets_the_load_streamed_and_whole(capsys: pytest.CaptureFixture[str]) -> None:
    with running() as stub:
        words = f"-n 1 3 --url {stub.url} --pid {os.getpid()} --tokens 20 --rounds 2"
        assert script("bench_streams").main(words.split()) == 0
    printed = capsys.readouterr().out
    assert f"| {stub.url} | 1 |" in printed
    assert f"| {stub.url} | 3 |" in printed
    loads = [body for body in stub.bodies if body["max_tokens"] == 20]
    assert [body["stream"] for body in loads] == 2 * [True, False, *3 * [True], *3 * [False]]
    assert len({tuple(body["prompt"]) for body in stub.bodies}) == len(stub.bodies)  # no cache answers


def test_answers_without_all_their_tokens_are_no_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    async def cut(asked, write):
        await write(token("length") + usage({**asked, "max_tokens": 3}))

    words = "-n 2 --pid {} --rounds 1 --tokens {} --url {}"
    with running(cut) as stub:
        assert script("bench_streams").main(words.format(os.getpid(), 20, stub.url).split()) == 1
        assert "[3] tokens, not 8" in capsys.readouterr().err  # the load that warms it up
    with running() as stub:
        assert script("bench_streams").main(words.format(os.getpid(), 2000, stub.url).split()) == 1
        assert "too many tokens" in capsys.readouterr().err
        assert script("bench_streams").main(words.format(1 << 30, 20, stub.url).split()) == 2
        assert "process 1073741824" in capsys.readouterr().err


def test_of_the_paced_server_the_engine_is_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    words = "-n 8 --step-ms 2 --tokens 100 --rounds 1 --compare paced"
    assert script("bench_streams").main(words.split()) == 0
    cells = row(capsys.readouterr().out, "paced")
    assert 0 < float(cells[5]) < float(cells[4])  # the engine's thread, all of it
