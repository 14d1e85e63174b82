"""The benchmark scripts and the maker of random models, each run once on something tiny."""

import json
from pathlib import Path

import pytest

from tests.tuning.harness import script


def test_bench_engine_reports_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert script("bench_engine").main(["-n", "4", "--depth", "1", "2", "--steps", "20", "--json"]) == 0
    costs = json.loads(capsys.readouterr().out)
    assert [(cost["num_requests"], cost["depth"]) for cost in costs] == [(4, 1), (4, 2)]
    assert all(cost["median_ms"] > 0 and cost["snapshot_ms"] > 0 for cost in costs)


def test_bench_pipeline_compares_cohorts_with_one_batch(capsys: pytest.CaptureFixture[str]) -> None:
    """Simulated time: stages that take less time for fewer rows gain from cohorts, others only for prompts."""
    asked = ["--stages", "2", "--stage-ms", "12", "--fixed-share", "0.25", "1", "-n", "8"]
    assert script("bench_pipeline").main(asked) == 0
    rows = [line.split("|")[4:9] for line in capsys.readouterr().out.splitlines()[4:]]
    gains = [float(row[1].split("(")[1].split("x")[0]) for row in rows]
    assert gains[0] >= 1.5
    assert gains[1] == pytest.approx(1, abs=0.02)
    one_batch, cohorts = (float(cell.split()[0].replace(",", "")) for cell in rows[1][3:])
    assert cohorts <= 0.6 * one_batch  # the first token of a prompt in chunks


def test_bench_engine_runs_a_real_runner(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--device", "cpu", "--shape", "tiny", "-n", "1", "3", "--depth", "1", "--steps", "8", "--context", "40"]
    assert script("bench_engine").main([*asked, "--json"]) == 0
    costs = json.loads(capsys.readouterr().out)
    assert [cost["num_requests"] for cost in costs] == [1, 3]
    assert all(cost["host_ms"] > 0 and cost["tokens_per_s"] > 0 for cost in costs)
    assert script("bench_engine").main(asked) == 0
    assert "| 3 | 1 |" in capsys.readouterr().out
    assert script("bench_engine").main(["--device", "cpu", "--shape", "gpt-5"]) == 2
    assert "llama-3.1-8b" in capsys.readouterr().err


def test_bench_engine_profiles(capsys: pytest.CaptureFixture[str]) -> None:
    assert script("bench_engine").main(["-n", "2", "--depth", "1", "--steps", "5", "--profile"]) == 0
    assert "schedule" in capsys.readouterr().out


def test_a_random_model_is_whole_and_the_same_for_the_same_seed(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    maker = script("make_tiny_model")
    for folder, seed in (("a", 0), ("b", 0), ("c", 1)):
        maker.make_model(maker.TINY, tmp_path / folder, seed=seed)
    weights = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in "abc"}
    assert weights["a"] == weights["b"] != weights["c"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    text = "def add(a, b):  # naïve 🙂"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == maker.TINY.config["vocab_size"]
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == tokenizer.eos_token_id == 2047
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert model.dtype == torch.float32
    assert torch.isfinite(model(torch.arange(10)[None]).logits).all()


def test_a_model_is_not_overwritten_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert script("make_tiny_model").main(["tiny", str(tmp_path)]) == 2
    assert "--force" in capsys.readouterr().err
    assert (tmp_path / "config.json").read_text() == "{}"


def test_bench_speculation_counts_the_steps_of_a_text(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["demo", "--tokens", "12", "--prompt-tokens", "100", "--rounds", "1", "--texts", "edit"]
    assert script("bench_speculation").main(asked) == 0
    told = capsys.readouterr().out
    assert "lookup in 10,000 tokens: 0." in told
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in told.splitlines() if line.startswith("| ")][1:]
    assert [row[:3] for row in rows] == [["edit", "1", "off"], ["edit", "1", "on"]]
    assert rows[0][3:6] == ["11", "1.00", "0 of 0"]
    assert all(float(row[6]) > 0 for row in rows)
