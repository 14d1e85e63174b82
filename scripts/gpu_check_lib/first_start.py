"""A first start on this GPU, with nothing cached: kernels compiled side by side, compared with PyTorch, and a decode
step timed as a graph and as launches. Then a later start of the same model, which does none of this.

The model is random and in memory already: what is measured is `open_runner`, as `localllm up` calls it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence

import torch

from localllm.config.settings import EngineConfig
from localllm.machine.hardware import count_cores, read_hardware
from localllm.models.fit import plan_memory
from localllm.models.weights.parameters import held_bytes
from localllm.runner.opening import open_runner
from localllm.runner.runner import TorchRunner
from scripts.gpu_check_lib.engine import Options
from scripts.gpu_check_lib.figures import dtype_of, require_memory
from scripts.gpu_check_lib.roofline import work_of
from scripts.gpu_check_lib.stages import Context, Found, Skip
from scripts.random_weights import WeightFormat, random_model, shape_spec

MODELS: Sequence[tuple[str, WeightFormat]] = (
    ("llama-3.1-8b", "16-bit"), ("llama-3.1-8b", "int4"), ("qwen2.5-0.5b", "16-bit"),
)  # fmt: skip
LENGTH, REQUESTS = 4096, 64
COMPILE_S, CORES = 8.0, 4
"""Seconds that all kernels of a model may take to compile, on so many cores."""
COMPARE_S = 2.0  # seconds that the comparisons may take


class Events(logging.Handler):
    """The log lines of the self-check: name to numbers."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.seen: dict[str, list[tuple[float, ...]]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.args, tuple) and all(isinstance(value, int | float) for value in record.args):
            name = str(record.msg).split("=")[0].rpartition(" ")[0]
            self.seen.setdefault(name, []).append(record.args)  # type: ignore[arg-type]


def measure_first_start(
    context: Context, models: Sequence[tuple[str, WeightFormat]] = MODELS
) -> Iterator[Found]:  # fmt: skip
    for shape, weights in models:
        name = f"{shape} {weights}"
        empty = context.out / f"first-start-{shape}-{weights}"  # caches of this model alone
        os.environ["TRITON_CACHE_DIR"], os.environ["XDG_CACHE_HOME"] = str(empty / "triton"), str(empty)
        try:
            yield from starts_of(name, shape, weights, context)
        except Skip as reason:
            yield name, "skipped", str(reason)


def starts_of(name: str, shape: str, weights: WeightFormat, context: Context) -> Iterator[Found]:
    spec, device = shape_spec(shape), torch.device(context.device)
    dtype = dtype_of(device)
    options = Options(device, dtype, max_num_seqs=REQUESTS, max_model_len=LENGTH, num_kv_tokens=4 * LENGTH)
    require_memory(spec, options, work_of(spec), weights)
    hardware = read_hardware()
    model = random_model(spec, device, dtype, weights=weights, max_model_len=LENGTH)
    config = EngineConfig(device=context.device, max_model_len=LENGTH, max_num_seqs=REQUESTS)
    plan = plan_memory(config, spec, held_bytes(model), hardware)
    log, events = logging.getLogger("localllm.runner.self_check"), Events()
    log.addHandler(events)
    log.setLevel(logging.INFO)

    def start() -> tuple[TorchRunner, float, list[str]]:
        """Open a runner; return the seconds that it took, and what it has reported."""
        said: list[str] = []
        begun_s = time.perf_counter()
        runner, _ = open_runner(model, spec, config, plan, hardware, said.append)
        return runner, time.perf_counter() - begun_s, said

    runner, first_s, _ = start()
    yield judge_compiling(name, events.seen.get("kernels compiled ahead", []))
    yield from judge_comparisons(name, runner)
    yield judge_graph(name, events.seen.get("step of one request", []))
    runner.close()
    events.seen.clear()
    runner, later_s, said = start()
    yield judge_later(name, first_s, later_s, runner, said)
    runner.close()
    log.removeHandler(events)


# ---- verdicts --------------------------------------------------------------------------------------------------------


def judge_compiling(name: str, events: Sequence[tuple[float, ...]]) -> Found:
    """events: (kernels, seconds) of what needs no model, and of the model."""
    count, seconds, cores = int(sum(e[0] for e in events)), sum(e[1] for e in events), count_cores()
    if not count:
        return f"{name}: compilation", "skipped", "No kernel was compiled."
    verdict = "note" if cores < CORES else "ok" if seconds <= COMPILE_S else "missed"
    text = f"{count} kernels side by side in {seconds:.1f} s on {cores} cores"
    data = {"kernels": count, "seconds": seconds, "cores": cores}
    return f"{name}: compilation", verdict, text, data, f"at most {COMPILE_S:.0f} s on {CORES} cores"


def judge_comparisons(name: str, runner: TorchRunner) -> Iterator[Found]:
    stats = runner.stats()
    text = stats.kernel_check or "nothing was compared"
    verdict = "ok" if stats.kernel_check else "failed"
    yield f"{name}: comparisons", verdict, text, {}, f"about 31 checks in at most {COMPARE_S:.0f} s"
    if not stats.fall_backs:
        yield f"{name}: fall-backs", "ok", "none", {"fall_backs": 0}, "none"
    for each in stats.fall_backs:
        yield f"{name}: {each.kernel}", "failed", f"{each.variant} serves. {each.text}", {}, "the best variant"


def judge_graph(name: str, events: Sequence[tuple[float, ...]]) -> Found:
    """events: the milliseconds of a step, replayed and launched."""
    if not events:
        return f"{name}: graph against launches", "skipped", "The step of one request was not recorded."
    replayed, launched = events[-1]
    text = f"{replayed:.3f} ms as a graph, {launched:.3f} ms kernel by kernel: {launched / replayed:.2f} times"
    data = {"replayed_ms": replayed, "launched_ms": launched}
    verdict = "ok" if replayed <= launched else "missed"
    return f"{name}: graph against launches", verdict, text, data, "the graph is quicker"


def judge_later(name: str, first_s: float, later_s: float, runner: TorchRunner, said: Sequence[str]) -> Found:
    again = [text for text in said if text.startswith("compiling")]
    again += [check] if (check := runner.stats().kernel_check) else []
    text = f"opened in {later_s:.1f} s, at first in {first_s:.1f} s"
    text += f"; done again: {', '.join(again)}" if again else ""
    data = {"first_s": first_s, "later_s": later_s}
    return f"{name}: a later start", "failed" if again else "ok", text, data, "nothing is compiled or compared again"
