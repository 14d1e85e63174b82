"""`localllm bench`: the speed of a server, or of this machine's engine, under a known load.

`serve` drives any OpenAI-compatible URL from outside. `throughput` submits all requests to the engine at once, and
`latency` one batch after another; both run in this process through `localllm.LLM`. All three return the same report.
Does not know: the command line, how a report is shown (it can print itself).
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from localllm.config.settings import EngineConfig
from localllm.errors import ConfigError
from localllm.tuning.load_client import Endpoint, LoadClient, fetch_json
from localllm.tuning.report import BenchReport, RequestTimes, summarise
from localllm.tuning.workload import DEFAULT_VOCAB_SIZE, WorkloadRequest, fixed_lengths

if TYPE_CHECKING:
    from localllm.engine.params import SamplingParams
    from localllm.llm import LLM

Kind = Literal["throughput", "latency", "serve"]
DEFAULT_URL = "http://127.0.0.1:8000"
WARM_UP_SEED = 1 << 32
"""Offset of the seed of warm-up prompts, so that no measured prompt is found in the prefix cache."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """The benchmark to run. `model` None: the model that the server serves, or the demo model."""

    model: str | None = None
    url: str | None = None  # serve only; None: localllm's default address
    api_key: str | None = field(default=None, repr=False)
    num_requests: int = 100
    concurrency: int = 10  # serve: open streams; latency: prompts per batch
    input_len: int = 128
    output_len: int = 128
    seed: int = 0
    json: Path | None = None  # also write the report to this file
    ignore_eos: bool = True  # every answer runs to output_len
    num_warmups: int = 1  # requests before the clock starts
    vocab_size: int = DEFAULT_VOCAB_SIZE  # prompt token ids are drawn below this
    engine: EngineConfig | None = None  # throughput and latency: the engine settings

    def __post_init__(self) -> None:
        for name, least in (("num_requests", 1), ("concurrency", 1), ("input_len", 1), ("output_len", 1),
                            ("num_warmups", 0)):  # fmt: skip
            value = getattr(self, name)
            if value < least:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} must be at least {least}.", f"Got {value}.", param=name)


def run(kind: Kind, options: BenchOptions) -> BenchReport:
    """Run one benchmark. Raises `ConfigError` when the server does not answer or every request failed."""
    if kind not in get_args(Kind):
        raise ConfigError(f"Unknown benchmark {kind!r}.", f"Known benchmarks: {', '.join(get_args(Kind))}.")
    report = asyncio.run(serve(options)) if kind == "serve" else _in_process(kind, options)
    if not report.num_requests:
        why = "; ".join(f"{count} x {message}" for message, count in report.errors.items())
        raise ConfigError("None of the requests succeeded.", why)
    if options.json is not None:
        write_json(report, options.json)
    return report


def write_json(report: BenchReport, path: Path) -> None:
    """Write the report as JSON. Raises `ConfigError` when the file cannot be written."""
    try:
        path.write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"Cannot write {path}.", str(error), param="json") from error


# A server, from outside ----------------------------------------------------------------------------------------


async def serve(options: BenchOptions) -> BenchReport:
    """Drive a server in a closed loop."""
    url = options.url or DEFAULT_URL
    endpoint = Endpoint.from_url(url, options.api_key)
    model = options.model or await served_model(endpoint)
    client = LoadClient(endpoint, model, ignore_eos=options.ignore_eos)
    await client.run(_warm_ups(options), options.concurrency)
    workload = fixed_lengths(
        options.num_requests, options.input_len, options.output_len, seed=options.seed, vocab_size=options.vocab_size
    )
    with _quiet_gc():
        started_s = time.perf_counter()
        times = await client.run(workload.requests, options.concurrency)
        duration_s = time.perf_counter() - started_s
    return summarise(
        "serve",
        times,
        duration_s=duration_s,
        model=model,
        workload=workload.name,
        seed=options.seed,
        concurrency=options.concurrency,
        url=url,
    )


async def served_model(endpoint: Endpoint) -> str:
    """Return the first model that the server lists."""
    listing = await fetch_json(endpoint, "/models")
    models = listing.get("data") if isinstance(listing, dict) else None
    if not models:
        raise ConfigError(
            "The server lists no model.",
            hint="localllm bench serve MODEL",
            param="model",
        )
    return str(models[0]["id"])


def _warm_ups(options: BenchOptions) -> Sequence[WorkloadRequest]:
    if not options.num_warmups:
        return ()
    return fixed_lengths(
        options.num_warmups,
        options.input_len,
        options.output_len,
        seed=options.seed + WARM_UP_SEED,
        vocab_size=options.vocab_size,
    ).requests


@contextmanager
def _quiet_gc() -> Iterator[None]:
    """Collect garbage before the measurement, not during it: a collection can take tens of milliseconds."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# The engine, in this process ------------------------------------------------------------------------------------


def _in_process(kind: Kind, options: BenchOptions) -> BenchReport:
    from localllm.llm import LLM

    config = options.engine or EngineConfig()
    model = options.model or config.model
    asked = {f.name: getattr(config, f.name) for f in fields(config) if f.name != "model"}
    default = EngineConfig()
    with LLM(model, **{name: value for name, value in asked.items() if value != getattr(default, name)}) as llm:
        options = replace(options, vocab_size=min(options.vocab_size, llm.vocab_size))
        workload = fixed_lengths(
            options.num_requests,
            options.input_len,
            options.output_len,
            seed=options.seed,
            vocab_size=options.vocab_size,
        )
        _measure_batch(llm, _warm_ups(options), options.ignore_eos)
        size = options.num_requests if kind == "throughput" else options.concurrency
        times: list[RequestTimes] = []
        with _quiet_gc():
            started_s = time.perf_counter()
            for first in range(0, options.num_requests, size):
                times += _measure_batch(llm, workload.requests[first : first + size], options.ignore_eos)
            duration_s = time.perf_counter() - started_s
    return summarise(
        kind,
        times,
        duration_s=duration_s,
        model=model,
        workload=workload.name,
        seed=options.seed,
        concurrency=min(size, options.num_requests),
    )


def _measure_batch(llm: LLM, requests: Sequence[WorkloadRequest], ignore_eos: bool) -> list[RequestTimes]:
    """Submit these requests to the engine at once. A single request is streamed, which also shows its first token."""
    from localllm.engine.params import SamplingParams

    params = [
        SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=ignore_eos) for request in requests
    ]
    if len(requests) == 1:
        return [_measure_stream(llm, requests[0], params[0])]
    prompts = [{"prompt_token_ids": request.prompt_token_ids} for request in requests]
    started_s = time.perf_counter()
    answers = llm.generate(prompts, params, use_tqdm=False) if prompts else []
    finished_s = time.perf_counter()
    return [
        RequestTimes(
            started_s,
            finished_s,
            prompt_tokens=len(answer.prompt_token_ids),
            output_tokens=len(answer.outputs[0].token_ids),
            cached_tokens=answer.num_cached_tokens,
        )
        for answer in answers
    ]


def _measure_stream(llm: LLM, request: WorkloadRequest, params: SamplingParams) -> RequestTimes:
    started_s = time.perf_counter()
    arrivals: list[float] = []
    usage = None
    for event in llm.stream({"prompt_token_ids": request.prompt_token_ids}, params):
        arrivals.append(time.perf_counter())
        usage = event.usage or usage
    assert usage is not None, "the last event of a choice carries its usage"
    return RequestTimes.streamed(
        started_s, arrivals, prompt_tokens=usage.prompt_tokens, output_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )  # fmt: skip
