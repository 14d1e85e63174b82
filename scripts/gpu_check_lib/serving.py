"""Checks over HTTP: a client's first calls on the demo model; an 8B shape under load.

A server is a process of its own, started as a user would start it. Only its weights may be random: `serve_random`
replaces the loader by random_weights and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import http.client
import importlib.util
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from localllm.tuning.load_client import Endpoint, LoadClient
from localllm.tuning.report import RequestTimes, summarise
from localllm.tuning.workload import Workload, WorkloadRequest, chat_lengths, fixed_lengths
from scripts.gpu_check_lib.figures import verdict
from scripts.gpu_check_lib.roofline import (
    HTTP_P99_ITL_S,
    HTTP_TOKENS_PER_S,
    IDLE_TTFT_S,
)
from scripts.gpu_check_lib.stages import Context, Found, Skip, end_group

SCRIPTS = Path(__file__).resolve().parent.parent
STREAMS = 256
START_LIMIT_S = 120.0
TTFT_REQUESTS = 20


def require_server() -> None:
    """Raise ImportError, which skips the stage, if a server cannot start."""
    import uvloop  # noqa: F401


# ---- stages ----------------------------------------------------------------------------------------------------------


def smoke(context: Context) -> Iterator[Found]:
    """Check a client's first calls on the bundled model: list, answer, stream, two choices, a refusal."""
    require_server()
    arguments = ["serve", "demo", "--device", context.device, "--max-model-len", "1024"]
    with server([sys.executable, "-m", "localllm", *arguments], context, "smoke") as url:
        model = json.loads(get(f"{url}/v1/models"))["data"][0]["id"]
        yield "models", "ok", model
        asked = {
            "model": model,
            "messages": [{"role": "user", "content": "Hello!"}],
            "temperature": 0,
            "max_tokens": 24,
        }
        _, body = post(url, asked)
        text = json.loads(body)["choices"][0]["message"]["content"]
        yield "answer", "ok" if text else "failed", repr(text[:60])
        _, body = post(url, {**asked, "stream": True})
        chunks = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]
        streamed = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
        same = streamed == text
        yield "stream", "ok" if same else "failed", "equals the whole answer" if same else streamed
        _, body = post(url, {**asked, "n": 2, "seed": 1})
        num_choices = len(json.loads(body)["choices"])
        yield "n = 2", "ok" if num_choices == 2 else "failed", f"{num_choices} choices"
        status, body = post(url, {**asked, "messages": [{"role": "user", "content": "word " * 5000}]})
        yield "a prompt too long", "ok" if status == 400 else "failed", f"{status}: {body[:80]}"


def trace(context: Context, shape: str = "qwen2.5-0.5b") -> Iterator[Found]:
    """Record a trace of a request's steps over HTTP, and look for its named ranges and for kernels."""
    require_server()
    folder, traces = context.out / f"{shape}-traced", context.out / "traces"
    write_folder(folder, shape)
    command = [sys.executable, str(SCRIPTS / "gpu_check"), "--serve", str(folder)]
    flags = ["--max-model-len", "1024", "--device", context.device, "--torch-profiler-dir", str(traces)]
    with server([*command, *flags], context, "trace") as url:
        asked = {"model": folder.name, "messages": [{"role": "user", "content": "a"}], "max_tokens": 24,
                 "ignore_eos": True}  # fmt: skip
        post(url, asked)
        started = post(url, {}, "/start_profile")
        post(url, asked)
        stopped = post(url, {}, "/stop_profile")
    yield "over HTTP", "ok" if (started[0], stopped[0]) == (200, 200) else "failed", f"{started[0]}, {stopped[0]}"
    [path] = sorted(traces.glob("*.json.gz"))
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = [str(event.get("name")) for event in events]
    steps, parts = sum(name.startswith("step: ") for name in names), {"forward", "sample"} <= set(names)
    kernels = sum(event.get("cat") == "kernel" for event in events)
    text = f"{steps} steps, {kernels} kernels, {path.stat().st_size / 2**20:.1f} MiB"
    is_right = steps >= 20 and parts and (kernels > 0 or context.device == "cpu")
    data = {"steps": steps, "kernels": kernels}
    yield "trace", "ok" if is_right else "failed", text, data, "24 steps with their parts, and the GPU's kernels"


def load(context: Context) -> Iterator[Found]:
    """Measure G14 and G12 over HTTP on an 8B shape: idle TTFT, then 256 streams of chat-like requests."""
    require_server()
    require_8b(context, 24 * 2**30)
    yield from load_of("llama-3.1-8b", context, STREAMS, chat_lengths(1000))


def load_of(shape: str, context: Context, streams: int, workload: Workload) -> Iterator[Found]:
    folder = context.out / shape
    write_folder(folder, shape)
    command = [sys.executable, str(SCRIPTS / "gpu_check"), "--serve", str(folder)]
    flags = ["--max-num-seqs", str(streams), "--max-model-len", "4096", "--device", context.device]
    with server([*command, *flags], context, "load") as url:
        client = LoadClient(Endpoint.from_url(url), folder.name, ignore_eos=True)
        warm = fixed_lengths(streams, 64, 32, seed=9)
        asyncio.run(client.run(warm.requests, streams))
        yield "captures", "note", wait_for_captures(url)
        yield judge_ttft(asyncio.run(one_by_one(client, fixed_lengths(TTFT_REQUESTS, 128, 4).requests)), context.gpu)
        started_s = time.perf_counter()
        times = asyncio.run(client.run(workload.requests, streams))
        yield judge_load(times, time.perf_counter() - started_s, streams, context.gpu)


# ---- verdicts --------------------------------------------------------------------------------------------------------


def judge_ttft(times: list[RequestTimes], gpu: str) -> Found:
    got = [t.ttft_s for t in times if t.ttft_s is not None]
    if not got:
        return "G14", "failed", f"no request succeeded: {times[0].error if times else 'none was sent'}"
    middle, worst = statistics.median(got), max(got)
    text = f"idle TTFT, 128-token prompt, HTTP: p50 {middle * 1e3:.1f} ms, worst of {len(got)} {worst * 1e3:.1f} ms"
    text += f" (target: at most {IDLE_TTFT_S * 1e3:.0f} ms p50)"
    return "G14", verdict(middle <= IDLE_TTFT_S, gpu), text, {"p50_s": middle, "max_s": worst}


def judge_load(times: list[RequestTimes], duration_s: float, streams: int, gpu: str) -> Found:
    failed = [t.error for t in times if t.error]
    if failed:
        return "G12", "failed", f"{len(failed)} of {len(times)} requests failed: {failed[0]}"
    report = summarise("serve", times, duration_s=duration_s, model="", workload="chat", seed=0, concurrency=streams)
    tokens_per_s = sum(t.output_tokens for t in times) / duration_s
    p99_s = report.itl.p99_s if report.itl else 0.0
    text = (
        f"{len(times)} chat-like requests over HTTP, {streams} streams: {tokens_per_s:,.0f} output tok/s, P99 ITL "
        f"{p99_s * 1e3:.1f} ms (target: at least {HTTP_TOKENS_PER_S:,.0f} at {HTTP_P99_ITL_S * 1e3:.0f} ms or less)"
    )
    reached = tokens_per_s >= HTTP_TOKENS_PER_S and p99_s <= HTTP_P99_ITL_S
    return "G12", verdict(reached, gpu), text, {"tokens_per_s": tokens_per_s, "p99_itl_s": p99_s}


# ---- a server --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def server(
    command: list[str], context: Context, name: str, limit_s: float = START_LIMIT_S,
    environment: Mapping[str, str] | None = None,
) -> Iterator[str]:  # fmt: skip
    """Start a server on a free port, yield its URL when ready, stop it. Raises with the log's last line."""
    port = free_port()
    log = context.out / f"server-{name}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, "--port", str(port)], stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, **(environment or {})},
        )  # fmt: skip
        try:
            wait_ready(port, process, log, limit_s)
            yield f"http://127.0.0.1:{port}"
        finally:
            end_group(process)


def wait_ready(port: int, process: subprocess.Popen[bytes], log: Path, limit_s: float) -> None:
    """Wait until /health answers 200."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with code {process.returncode}: {_tail(log)}")
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.02)
    raise RuntimeError(f"the server was not ready after {limit_s:.0f} s: {_tail(log)}")


def wait_for_captures(url: str, still_s: float = 1.0, limit_s: float = 20.0) -> str:
    """Wait until the server captures no more graphs, which it does while idle and which delays first tokens."""
    started_s = changed_s = time.monotonic()
    captured = -1
    while (now_s := time.monotonic()) < started_s + limit_s and now_s < changed_s + still_s:
        if (now := captured_graphs(get(f"{url}/metrics"))) != captured:
            captured, changed_s = now, now_s
        time.sleep(0.1)
    done = "" if now_s >= changed_s + still_s else ", and still capturing"
    return f"{captured} graphs after {now_s - started_s:.1f} s of rest{done}"


def captured_graphs(metrics: str) -> int:
    """Return the gauge's value in a page of /metrics; 0 if it is missing."""
    found = re.search(r"^localllm:captured_graphs(?:\{[^}]*\})? (\S+)$", metrics, re.MULTILINE)
    return int(float(found[1])) if found else 0


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


def post(url: str, body: dict[str, Any], path: str = "/v1/chat/completions") -> tuple[int, str]:
    """Send a chat completion, or a body to another path; return (status, body)."""
    request = urllib.request.Request(f"{url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def write_folder(folder: Path, shape: str) -> None:
    """Write a model's folder with an empty weights file: config.json, and a tokenizer that has a word for every id."""
    from safetensors.torch import save_file

    from scripts.random_weights import SHAPES

    maker = script("make_tiny_model")
    words = {"llama-3.1-8b": maker.LLAMA_1B, "qwen2.5-0.5b": maker.QWEN_05B, "tiny": maker.TINY}[shape]
    config = {**SHAPES[shape], "vocab_size": words.config["vocab_size"]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file({}, folder / "model.safetensors")
    if not (folder / "tokenizer.json").exists():
        maker.write_tokenizer(words, folder)


def serve_random(folder: Path, arguments: list[str]) -> int:
    """Run `localllm serve FOLDER` with random weights, made on the device instead of read from a file."""
    import torch

    from localllm import cli
    from localllm.models import loader
    from localllm.models.fit import checkpoint
    from localllm.models.fit.far import CheckpointBytes
    from localllm.models.formats.registry import Headers
    from localllm.models.read_spec import read_spec
    from localllm.models.spec.model_spec import ModelSpec
    from scripts import random_weights
    from scripts.gpu_check_lib.roofline import work_of

    def held(of: ModelSpec, dtype: torch.dtype) -> int:
        return work_of(of).layer_parameters * dtype.itemsize + 2 * of.vocab_size * of.hidden_size * dtype.itemsize

    def count_held(config: object, path: Path, of: ModelSpec, headers: object = None) -> CheckpointBytes:
        return CheckpointBytes(lambda device, dtype, *asked: held(of, getattr(torch, dtype)), lambda *_: ())

    def load_random(path: Path, of: ModelSpec, device: torch.device, dtype: torch.dtype, progress: Any = None,
                    *, max_model_len: int | None = None, **asked: Any) -> Any:  # fmt: skip
        return random_weights.random_model(of, device, dtype, max_model_len=max_model_len)

    loader.load_model, checkpoint.count_resident_for = load_random, count_held  # type: ignore[assignment]
    Headers.stored_bytes = property(  # type: ignore[assignment]
        lambda headers: held(read_spec(headers.path), torch.bfloat16)
    )
    return cli.main(["serve", str(folder), *arguments])


def script(name: str) -> ModuleType:
    """Load a file of scripts/ as a module; they have no .py suffix."""
    source = SourceFileLoader(f"script_{name}", str(SCRIPTS / name))
    found = importlib.util.spec_from_loader(source.name, source)
    assert found is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[source.name] = module  # dataclasses look up their module
    source.exec_module(module)
    return module


async def one_by_one(client: LoadClient, requests: tuple[WorkloadRequest, ...]) -> list[RequestTimes]:
    times: list[RequestTimes] = []
    for request in requests:
        times += await client.run((request,), 1)
    return times


def _tail(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it printed nothing"


def require_8b(context: Context, needed_bytes: int) -> None:
    """Raise `Skip` if the 8B shape does not fit."""
    import torch

    if context.device == "cuda" and (free := torch.cuda.mem_get_info()[0]) < needed_bytes:
        raise Skip(
            f"An 8B model in 16 bits under load needs {needed_bytes / 2**30:.0f} GiB; {free / 2**30:.1f} are free."
        )
