"""`localllm doctor --server`: a running server's parts, models, memory and last fault.

Does not know: this machine (doctor_machine.py).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from typing import Any

from localllm.cli.findings import Finding, Verdict
from localllm.units import format_bytes, format_seconds

ANSWER_S = 15.0
"""A server that takes longer to answer is stuck."""
LAG_S = 1.0


def check_server(options: argparse.Namespace) -> Iterator[Finding]:
    """Report a running server's parts, models, memory and last fault."""
    from localllm.cli.running import state_of
    from localllm.cli.server import ServerClient
    from localllm.engine.step import RunnerStats

    server = ServerClient.of(options)
    began_s = time.perf_counter()
    told = server.ask("GET", "/localllm/v1/server", timeout_s=ANSWER_S)
    took_s = time.perf_counter() - began_s
    text = f"localllm {told['version']} answered at {server.url} in {format_seconds(took_s)}"
    yield Finding("server", "ok", f"{text}, pid {told['pid']}, up for {format_seconds(told['uptime_s'])}")
    yield from (_part(part) for part in told["parts"])
    for model in server.ask("GET", "/localllm/v1/models/stats", timeout_s=ANSWER_S)["data"]:
        engine = told["engines"].get(model["name"])
        verdict: Verdict = "problem" if model["state"] == "failed" else "ok"
        yield Finding(f"model {model['name']}", verdict, f"{state_of(model)}{_step(engine)}")
        if model["stats"] and (decodes := RunnerStats(*model["stats"]["runner"]).decode_steps):
            yield Finding(f"model {model['name']}", "ok", decodes)
    lag_s, longest_s = told["loop_lag_s"], told["longest_loop_lag_s"]
    lag = f"event loop delayed by {format_seconds(lag_s)}, at most {format_seconds(longest_s)} in the last minute"
    yield Finding("lag", "note" if longest_s > LAG_S else "ok", lag)
    yield Finding("memory", "ok", f"{format_bytes(told['rss_bytes'])} resident, {told['num_threads']} threads")
    yield Finding("requests", "ok", f"{told['open_requests']} open")
    last = told["last_fault"]
    if last is None:
        yield Finding("faults", "ok", "none since the start")
    else:
        ago = format_seconds(max(0.0, time.time() - last["at_s"]))
        text = f"{told['num_faults']} since the start, the last one {ago} ago in {last['where']}: {last['what']}"
        remedy = (
            f"report it, with localllm doctor --report and the content of {told['fault_file']}"
            if told["fault_file"]
            else ""
        )
        yield Finding("faults", "note", text, remedy)


def _part(part: Mapping[str, Any]) -> Finding:
    verdicts: Mapping[str, Verdict] = {"ok": "ok", "slow": "note"}
    return Finding(part["part"], verdicts.get(part["state"], "problem"), part["why"] or "works")


def _step(engine: Mapping[str, Any] | None) -> str:
    if engine is None:
        return ""
    if engine["step_age_s"] is not None:
        return f", its current step began {format_seconds(engine['step_age_s'])} ago"
    return f", idle for {format_seconds(engine['rests_s'])}"
