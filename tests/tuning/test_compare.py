"""scripts/compare, with servers of a few lines in the place of engines."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from localllm.errors import ConfigError
from localllm.text.tokenizer import load_tokenizer
from localllm.tuning.workload import PromptSource, WorkloadRequest
from scripts.bench_peers import known
from scripts.bench_peers.comparison import Comparison, Row
from scripts.bench_peers.engines import EngineFailed, EngineSpec, ServerEngine
from scripts.bench_peers.files import Files, make_gguf
from scripts.bench_peers.known import Room, spec_of
from scripts.bench_peers.report import equal_and_not, facts_in_words, machine_facts, table
from scripts.bench_peers.texts import Texts
from tests.tuning.harness import SCRIPTS, script

STUB = """
import asyncio, json, sys
from tests.tuning.stub_server import StubServer, _respond, every_token_at_once
class Noted(StubServer):  # 'text': as `transformers serve`; 'short': answers have a token too few
    async def _complete(self, asked, writer):
        print(json.dumps(asked), flush=True)
        if "text" in sys.argv and ("ignore_eos" in asked or not isinstance(asked["prompt"], str)):
            return await _respond(writer, 422, {"detail": "Unexpected fields in the request"})
        await super()._complete(asked, writer)
async def answer(asked, write):
    await every_token_at_once({**asked, "max_tokens": asked["max_tokens"] - ("short" in sys.argv)}, write)
async def main():
    async with await asyncio.start_server(Noted(answer).serve, "127.0.0.1", int(sys.argv[1])) as server:
        await server.serve_forever()
asyncio.run(main())
"""
SMALL = "--rounds 2 --concurrency 2 --num-requests 4 --input-len 8 --output-len 3 --single-requests 1 --prefix-len 20"


def stub_spec(name: str, *modes: str, **fields: Any) -> EngineSpec:
    command = (sys.executable, "-c", STUB.replace("{", "{{").replace("}", "}}"), "{port}", *modes)
    return EngineSpec(name, command, {"PYTHONPATH": str(SCRIPTS.parent)}, **fields)


def compare(monkeypatch: pytest.MonkeyPatch, model: Path, out: Path, words: str) -> int:
    """As typed, with a stub in the place of localllm and of transformers."""
    module = script("compare")
    stubs = {"localllm": stub_spec("localllm"), "transformers": stub_spec("transformers", "text", reads_text=True)}
    monkeypatch.setattr(module, "spec_of", lambda name, programs, room: stubs[name])
    return int(module.main(["--model", str(model), "--out", str(out), "--device", "cpu", *shlex.split(words)]))


def bodies(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_engines_take_turns_under_the_very_same_requests(
    monkeypatch: pytest.MonkeyPatch, tiny_llama_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"{SMALL} --transformers python --bench latency serve throughput prefix --goal chat --scale 0.125"
    assert compare(monkeypatch, tiny_llama_path, tmp_path, words) == 0
    printed = capsys.readouterr().out
    for row in ("| serve | TTFT p95 ms |", "| prefix | repeated TTFT ms |", "| goal chat | answers/min |",
                "| throughput | CPU ms/token |", "| process | peak RSS MiB |"):  # fmt: skip
        assert row in printed
    assert "Greedy answers of transformers equal to those of localllm: 4 of 4." in printed
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    turns = dict.fromkeys((row["round_index"], row["engine"]) for row in rows)
    assert list(turns) == [(0, "localllm"), (0, "transformers"), (1, "localllm"), (1, "transformers")]
    ours, theirs = bodies(tmp_path / "localllm-1.log"), bodies(tmp_path / "transformers-1.log")
    encode = load_tokenizer(tiny_llama_path).encode
    assert len(ours) > 20
    assert max(token_id for one in ours[1:] for token_id in one["prompt"]) < 512  # of its vocabulary
    # Streams side by side arrive in any order.
    assert sorted((one["prompt"], one["max_tokens"]) for one in ours[1:]) == sorted(
        (encode(one["prompt"]), one["max_tokens"]) for one in theirs[1:]
    )
    said = json.loads((tmp_path / "compare.json").read_text())
    assert [load["streams"] for load in said["loads"]] == [1, 2, 4, 1, 2]
    assert said["room"] == {"context": 256, "streams": 4, "threads": said["room"]["threads"], "dtype": "float32",
                            "device": "cpu"}  # fmt: skip
    figure = next(one for one in said["figures"] if one["engine"] == "transformers" and one["load"] == "serve")
    assert len(figure["values"]) == 2
    assert figure["ratio"] > 0


def test_an_engine_that_fails_leaves_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tiny_llama_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = shlex.quote("broken=python -c \"raise SystemExit('no such flag: --warp')\"")
    short = shlex.quote(f"short={shlex.join(stub_spec('short', 'short').command)}")
    env = f"short:PYTHONPATH={SCRIPTS.parent}"
    words = f"{SMALL} --bench latency --server {broken} --server {short} --env {env}"
    assert compare(monkeypatch, tiny_llama_path, tmp_path, words) == 1
    printed = capsys.readouterr().out
    assert "broken failed: broken ended before it was ready: no such flag: --warp" in printed
    assert "short failed: short gave 2 of 3 tokens." in printed
    assert "| latency | output tok/s |" in printed


def test_what_is_missing_is_said_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tiny_llama_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for model, words, said in (
        (tmp_path, "", "There is no model"),
        (tiny_llama_path, "--input-len 3000", "A request of 3,064 tokens does not fit."),
        (tiny_llama_path, "--scale 3", "--scale 3 is out of range."),
        (tiny_llama_path, "--args other=--fast", "No engine other."),
        (tiny_llama_path, "--server other", "'other' is not NAME=VALUE."),
        (tiny_llama_path, "--goal share --people 0", "--people is not valid here."),
    ):
        assert compare(monkeypatch, model, tmp_path / "out", words) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_goal_that_fills_the_context_fills_the_one_that_all_engines_get(tiny_llama_path: Path) -> None:
    module = script("compare")
    args = module.parse(["--model", str(tiny_llama_path), "--goal", "long-context", "agents", "--context", "1000"])
    model = module.read_spec(tiny_llama_path)
    long, agents = loads = module.loads_of(args, model)
    (request,) = long.requests(0)
    assert len(request.prompt_token_ids) + request.max_tokens == 900
    assert module.longest([agents]) <= 1000 == module.context_of(args, loads, model)
    assert len({one.prompt_token_ids[:64] for one in agents.requests(0)}) == agents.streams  # each its beginning


def test_an_engine_is_launched_counted_and_stopped(tmp_path: Path) -> None:
    engine = ServerEngine(stub_spec("stub"), Path("model"), tmp_path / "stub.log")
    try:
        assert engine.model == "stub"
        assert engine.cpu_s() > 0
        assert 1 << 20 < engine.memory_bytes() <= 2 * engine.peak_bytes()
    finally:
        engine.stop()
    assert engine.cpu_s() == 0  # nobody is left


def test_a_refusal_is_quoted_at_once(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match="status 422"):
        ServerEngine(stub_spec("stub", "text"), Path("model"), tmp_path / "stub.log")


def test_ratios_are_taken_within_a_round(tmp_path: Path) -> None:
    specs = [stub_spec("ours"), stub_spec("theirs", differs=("is slow",))]
    comparison = Comparison(specs, Files(tmp_path, tmp_path), [], tmp_path, context=64)
    for round_index, (ours, theirs) in enumerate([(10.0, 5.0), (30.0, 6.0), (20.0, 40.0)]):
        for name, value in (("ours", ours), ("theirs", theirs)):
            comparison.rows.append(Row(name, round_index, "serve", "output tok/s", value, 0.0))
    comparison.answers = {"ours": ["a", "b"], "theirs": ["a", "c"]}
    comparison.prompt_tokens = {"ours": 10, "theirs": 12}
    assert table(comparison).splitlines() == [
        "| load | figure | ours | theirs | theirs / ours |",
        "|--|--|--:|--:|--:|",
        "| serve | output tok/s | 20.0 (10.0 to 30.0) | 6.00 (5.00 to 40.0) | 0.50 |",
    ]
    said = equal_and_not(comparison, Room(64, 2, 1))
    assert "room for 2 requests of 64 tokens" in said
    assert "Not equal: theirs is slow." in said
    assert "prompt tokens as the servers counted them: ours 10, theirs 12." in said
    assert "Greedy answers of theirs equal to those of ours: 1 of 2." in said


@pytest.mark.parametrize("name", ["localllm", "llama.cpp", "vllm", "transformers"])
def test_every_engine_gets_the_same_room(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "SERVE_NEEDS", ("json",))
    programs = dict.fromkeys(known.FLAGS, sys.executable)
    spec = spec_of(name, programs, Room(context=512, streams=77, threads=1, dtype="bfloat16", device="cpu"))
    assert {"{model}", "{port}", "127.0.0.1"} <= set(spec.command)
    assert {"bfloat16", "bf16"} & set(spec.command)
    if name != "transformers":
        assert "77" in spec.command
        assert {"512", str(77 * 512)} & set(spec.command)
    env = dict(spec.env)
    assert "1" in (*spec.command, env.get("OMP_NUM_THREADS")) or "," not in env["VLLM_CPU_OMP_THREADS_BIND"]


def test_an_engine_that_is_not_there_is_named_with_its_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(512, 1, 1)
    with pytest.raises(ConfigError, match=r"There is no llama\.cpp at /nowhere") as caught:
        spec_of("llama.cpp", {"llama.cpp": "/nowhere"}, room)
    assert caught.value.hint == "--llama-server PATH"
    monkeypatch.setattr(known, "SERVE_NEEDS", ("json", "no_such_module"))
    with pytest.raises(ConfigError, match="has no no_such_module") as caught:
        spec_of("transformers", {"transformers": sys.executable}, room)
    assert "pip install 'transformers[serving]'" in caught.value.hint


def test_prompts_as_text_are_the_very_tokens_and_begin_alike(tiny_llama_path: Path) -> None:
    texts, encode = Texts(tokenizer := load_tokenizer(tiny_llama_path)), tokenizer.encode
    source = PromptSource(0)
    prefixes = [source.prompt(20) for _ in range(2)]
    asked = [WorkloadRequest(prefixes[i % 2] + source.prompt(9), 4) for i in range(6)]
    worded = [texts.worded(one) for one in asked]
    for request in worded:
        assert (len(request.prompt_token_ids), request.max_tokens) == (29, 4)
        assert tuple(encode(texts.text_of(request.prompt_token_ids))) == request.prompt_token_ids
    assert len({one.prompt_token_ids[:20] for one in worded}) == 2
    assert len({one.prompt_token_ids for one in worded}) == 6
    with pytest.raises(ConfigError, match="as other tokens"):
        texts.text_of([encode(letter)[0] for letter in "the"])


def test_a_model_that_cannot_be_made_a_gguf_file_of_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "rope_scaling": {"rope_type": "llama3"}}')
    with pytest.raises(ConfigError, match="rope_type llama3") as caught:
        make_gguf(tmp_path, tmp_path / "model.gguf", "float32")
    assert "--gguf FILE" in caught.value.hint


def test_machine_facts_are_said_in_one_line() -> None:
    words = facts_in_words(machine_facts())
    assert "cores" in words
    assert "localllm" in words
    assert "\n" not in words
