"""Throughput and latency in this process, on a tiny random model."""

from pathlib import Path
from typing import Any

import pytest

from localllm.config.settings import EngineConfig
from localllm.errors import ConfigError
from localllm.tuning.bench import BenchOptions, run

SMALL = EngineConfig(device="cpu", dtype="float32", max_model_len=128, kv_cache_memory_bytes=1 << 20)


def options(path: Path, **changes: Any) -> BenchOptions:
    defaults: dict[str, Any] = {
        "num_requests": 5,
        "concurrency": 2,
        "input_len": 8,
        "output_len": 4,
        "vocab_size": 512,
        "engine": SMALL,
    }
    return BenchOptions(model=str(path), **(defaults | changes))


def test_throughput_runs_everything_at_once_and_to_the_end(tiny_llama_path: Path) -> None:
    report = run("throughput", options(tiny_llama_path))
    assert (report.num_requests, report.concurrency) == (5, 5)
    assert (report.prompt_tokens, report.output_tokens) == (40, 20)
    assert report.ttft is None
    assert report.e2e is not None
    assert report.e2e.max_s <= report.duration_s


def test_latency_runs_batch_after_batch(tiny_llama_path: Path) -> None:
    report = run("latency", options(tiny_llama_path))
    assert (report.num_requests, report.concurrency, report.output_tokens) == (5, 2, 20)
    assert report.e2e is not None
    assert 3 * report.e2e.mean_s > 0.5 * report.duration_s


def test_latency_of_one_stream_shows_its_first_token(tiny_llama_path: Path) -> None:
    report = run("latency", options(tiny_llama_path, concurrency=1, num_requests=2))
    assert report.ttft is not None
    assert report.tpot is not None
    assert report.e2e is not None
    assert report.ttft.mean_s + 3 * report.tpot.mean_s == pytest.approx(report.e2e.mean_s, rel=1e-6)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="Unknown benchmark 'warp'"):
        run("warp", BenchOptions())  # type: ignore[arg-type]
