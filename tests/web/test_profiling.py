"""Traces of the engine's steps over HTTP and from the offline API, with a real model on the CPU."""

import gzip
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from localllm import LLM, SamplingParams
from localllm.config.settings import EngineConfig, ServerConfig, Settings
from localllm.engine.loop import EngineLoop
from localllm.engine.memory.block_names import BlockHasher
from localllm.engine.memory.cache_manager import CacheManager
from localllm.engine.memory.ledger import Ledger
from localllm.engine.scheduler import Scheduler
from localllm.engine.scheduler_config import SchedulerConfig
from localllm.errors import ConfigError, DeviceLost, EngineStopped, UnsupportedOption
from localllm.runner.profiling import StepProfiler, TraceConflict
from localllm.runner.runner import TorchRunner
from localllm.serving.build import build_engine
from tests.fake_runner import FakeRunner
from tests.web.live_server import LiveServer, fake_model

TEXT = {"prompt": "one two three four five six", "max_tokens": 5, "ignore_eos": True, "temperature": 0}


def serve(path: Path, folder: Path | None) -> LiveServer:
    engine = EngineConfig(
        model=str(path), max_model_len=256, kv_cache_memory_bytes=1 << 20, device="cpu", speculative="off",
        torch_profiler_dir=None if folder is None else str(folder),
    )  # fmt: skip
    return LiveServer(build_engine(Settings(engine, ServerConfig(port=0, ui=False))))


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles") / "made"


@pytest.fixture(scope="module")
def traced(tiny_llama_path: Path, traces: Path) -> Iterator[LiveServer]:
    with serve(tiny_llama_path, traces) as server:
        yield server


def events(path: Path) -> list[dict[str, Any]]:
    """The events of a trace that last some time."""
    with gzip.open(path, "rt") as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


def spans(path: Path, name: str) -> list[tuple[float, float, str]]:
    found = [event for event in events(path) if event["name"].startswith(name) and event["cat"] == "user_annotation"]
    return sorted((event["ts"], event["ts"] + event["dur"], event["name"]) for event in found)


def refused(server: LiveServer, path: str, status: int, code: str) -> str:
    response = server.http.post(path)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code), response.text
    return str(response.json()["error"]["message"])


def test_a_trace_has_each_step_with_its_forward_and_its_sampling(traced: LiveServer, traces: Path) -> None:
    said = traced.post("/v1/completions", TEXT).json()
    assert not list(traces.iterdir())
    assert traced.http.post("/start_profile").json() == {}
    assert traced.post("/v1/completions", TEXT).json()["choices"] == said["choices"]
    answer = traced.http.post("/stop_profile").json()
    assert answer == {"model": traced.model.name, "file": answer["file"]}  # type: ignore[union-attr]
    path = Path(answer["file"])
    assert [path] == list(traces.iterdir())
    assert path.name == f"localllm-{answer['model']}-1.json.gz"
    steps, forwards, samples = (spans(path, name) for name in ("step: ", "forward", "sample"))
    assert len(steps) == len(forwards) == len(samples) >= TEXT["max_tokens"]  # type: ignore[operator]
    for step, forward, sample in zip(steps, forwards, samples, strict=True):
        assert step[0] <= forward[0] <= forward[1] <= sample[0] <= sample[1] <= step[1]
    names = [name for _, _, name in steps]
    assert names.count("step: 1 decodes, 0 prompt tokens") >= TEXT["max_tokens"] - 1  # type: ignore[operator]
    assert any(name.startswith("step: 0 decodes, ") and not name.endswith(" 0 prompt tokens") for name in names)
    assert any(event["name"].startswith("aten::") for event in events(path))


def test_an_idle_engine_writes_a_trace_without_steps_under_the_next_number(traced: LiveServer, traces: Path) -> None:
    before = set(traces.iterdir())
    assert traced.http.post("/start_profile").status_code == 200
    path = Path(traced.http.post("/stop_profile").json()["file"])
    assert path not in before
    assert not spans(path, "step: ")


def test_a_second_start_and_a_stop_without_a_start_are_refused(traced: LiveServer, tiny_llama_path: Path) -> None:
    assert "/start_profile" in refused(traced, "/stop_profile", 409, "trace_conflict")
    assert traced.http.post("/start_profile").status_code == 200
    assert "/stop_profile" in refused(traced, "/start_profile", 409, "trace_conflict")
    with serve(tiny_llama_path, Path(traced.http.post("/stop_profile").json()["file"]).parent) as other:
        assert traced.http.post("/start_profile").status_code == 200
        assert "another model" in refused(other, "/start_profile", 409, "trace_conflict")
        assert traced.http.post("/stop_profile").status_code == 200
        assert other.http.post("/start_profile").status_code == 200
    assert traced.http.post("/start_profile").status_code == 200  # the other one's trace ended with its engine
    assert traced.http.post("/stop_profile").status_code == 200


def test_an_unknown_model_is_refused(traced: LiveServer) -> None:
    assert "nobody" in refused(traced, "/start_profile?model=nobody", 409, "model_not_loaded")


@pytest.mark.parametrize("path", ["/start_profile", "/stop_profile"])
def test_without_the_flag_the_refusal_names_it(tmp_path: Path, path: str) -> None:
    with LiveServer(fake_model(tmp_path, FakeRunner(33, 8, vocab_size=64))) as server:
        assert "--torch-profiler-dir DIR" in refused(server, path, 400, "unsupported_option")


def test_a_model_split_over_gpus_is_refused_by_name(tmp_path: Path) -> None:
    model = fake_model(tmp_path, FakeRunner(33, 8, vocab_size=64))
    ranks: Any = ("first", "second")
    with LiveServer(replace(model, plan=replace(model.plan, ranks=ranks))) as server:
        assert "tiny is split over several GPUs" in refused(server, "/start_profile", 400, "unsupported_option")


def test_the_ranges_of_a_step_that_fails_end_with_it(traced: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert traced.http.post("/start_profile").status_code == 200
    with monkeypatch.context() as patch:
        patch.setattr(TorchRunner, "_sample", lambda *_: 1 / 0)
        assert traced.post("/v1/completions", TEXT).status_code == 500
    assert traced.post("/v1/completions", TEXT).status_code == 200
    steps = spans(Path(traced.http.post("/stop_profile").json()["file"]), "step: ")
    assert len(steps) > TEXT["max_tokens"]  # type: ignore[operator]
    assert all(before[1] <= after[0] for before, after in pairwise(steps))


def test_on_a_gpu_each_range_is_an_nvtx_range_that_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("pop"))
    for device, wanted in (("cuda", ["step: 1", "forward", "pop", "pop"]), ("cpu", [])):
        calls.clear()
        profiler = StepProfiler(tmp_path, torch.device(device))
        with pytest.raises(ZeroDivisionError), profiler.range("step: 1"), profiler.range("forward"):
            _ = 1 / 0
        assert calls == wanted


def test_a_call_that_the_engine_cannot_answer_any_more_has_the_engines_error() -> None:
    runner = FakeRunner(33, 8, vocab_size=64)
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=64, block_size=8)
    cache = CacheManager(config, Ledger(runner.num_blocks, 8), BlockHasher(b"test", 8))
    loop = EngineLoop(Scheduler(config, cache), runner)
    asked = loop.call(lambda: 1)
    loop.step()
    assert asked.result(0) == 1
    late = loop.call(lambda: 1)
    loop.lose(DeviceLost("The GPU is lost."))
    loop.step()
    assert isinstance(late.exception(0), DeviceLost)
    with pytest.raises(EngineStopped):
        loop.call(lambda: 1)


def test_a_folder_that_cannot_be_made_is_refused_at_the_start(tiny_llama_path: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--torch-profiler-dir"):
        serve(tiny_llama_path, tmp_path / "file" / "below")


def test_the_offline_api_records_its_own_calls(tiny_llama_path: Path, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"max_model_len": 256, "kv_cache_memory_bytes": 1 << 20, "device": "cpu"}
    with LLM(str(tiny_llama_path), torch_profiler_dir=str(tmp_path), **sizes) as llm:
        with pytest.raises(TraceConflict):
            llm.stop_profile()
        llm.start_profile()
        llm.generate("one two three", SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
        assert len(spans(llm.stop_profile(), "step: ")) >= 3
        llm.start_profile()  # closing ends it
    with LLM(str(tiny_llama_path), **sizes) as llm, pytest.raises(UnsupportedOption, match="--torch-profiler-dir"):
        llm.start_profile()
