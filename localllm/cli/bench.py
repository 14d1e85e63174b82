"""`localllm bench`: turn the arguments into `BenchOptions`, run the benchmark, print the report.

Does not know: how the benchmarks measure (tuning/bench.py).
"""

from __future__ import annotations

import argparse
import json

from localllm.cli.flags import settings_from
from localllm.cli.hub import fetch_if_missing
from localllm.cli.server import is_ours
from localllm.machine.threads import set_thread_environment
from localllm.tuning.bench import DEFAULT_URL, BenchOptions
from localllm.tuning.bench import run as measure


def bench(options: argparse.Namespace) -> int:
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
