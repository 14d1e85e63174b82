"""`localllm bench`: turn the arguments into `BenchOptions`, run the benchmark, print the report.

Does not know: how the benchmarks measure (tuning/bench.py).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from localllm.cli.hub import fetch_if_missing
from localllm.cli.server import is_ours
from localllm.config.flags import add_engine_flags, add_model, settings_from
from localllm.machine.processes import set_thread_environment


def bench_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=("throughput", "latency", "serve"), help="what to measure")
    add_model(parser, required=False)
    parser.add_argument("--url", metavar="URL", help="serve: the server to measure; default: http://127.0.0.1:8000")
    parser.add_argument("--api-key", metavar="KEY", help="serve: the server's API key")
    parser.add_argument("--num-requests", type=int, default=100, metavar="N", help="number of requests")
    parser.add_argument("--concurrency", type=int, default=10, metavar="N", help="concurrent requests")
    parser.add_argument("--input-len", type=int, default=128, metavar="N", help="prompt tokens per request")
    parser.add_argument("--output-len", type=int, default=64, metavar="N", help="output tokens per request")
    parser.add_argument("--seed", type=int, default=0, metavar="N", dest="bench_seed", help="seed of the prompts")
    parser.add_argument("--save", type=Path, metavar="FILE", help="also write the report to FILE, as JSON")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_engine_flags(parser, leave_out=("seed", "lora_modules"))  # requests go to the model itself


def bench(options: argparse.Namespace) -> int:
    from localllm.tuning.bench import DEFAULT_URL, BenchOptions
    from localllm.tuning.bench import run as measure

    settings = settings_from(options)
    set_thread_environment()
    if options.kind != "serve":  # serve: MODEL is a name on the server
        fetch_if_missing(settings.engine)
    url = options.url or DEFAULT_URL
    report = measure(
        options.kind,
        BenchOptions(
            model=options.model,
            url=url,
            api_key=settings.server.client_key if options.api_key or is_ours(url, settings.server) else None,
            num_requests=options.num_requests,
            concurrency=options.concurrency,
            input_len=options.input_len,
            output_len=options.output_len,
            seed=options.bench_seed,
            json=options.save,
            engine=settings.engine,
        ),
    )
    print(json.dumps(report.to_dict(), indent=2) if options.json else report)
    return 0
