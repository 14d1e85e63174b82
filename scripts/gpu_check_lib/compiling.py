"""Compile the kernels of every measured model before anything is timed: one process per model, in parallel.

A kernel's compile key holds widths, types and settings, but not the number of layers. So one layer of real width, with
all step shapes of the real engine, compiles everything the whole model needs; Triton caches it on disk for later
stages.

    python -m scripts.gpu_check_lib.compiling llama-3.1-8b int4 cuda
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import torch

from scripts.gpu_check_lib.stages import Context, Found

MODELS = (
    ("llama-3.1-8b", "16-bit"), ("llama-3.1-8b", "fp8"), ("llama-3.1-8b", "int4"),
    ("llama-3.2-1b", "16-bit"), ("qwen2.5-0.5b", "16-bit"),
)  # fmt: skip


def compile_all(context: Context, models: Sequence[tuple[str, str]] = MODELS) -> Iterator[Found]:
    """Yield a result for each model: seconds and kernels, or the last line of its error."""
    started_s = time.monotonic()
    children = {
        model: subprocess.Popen(
            [sys.executable, "-m", __name__, *model, context.device],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for model in models
    }  # fmt: skip
    for (shape, weights), child in children.items():
        said, _ = child.communicate()
        (context.out / f"compile-{shape}-{weights}.log").write_text(said)
        lines = said.strip().splitlines() or ["it printed nothing"]
        if child.returncode == 0:
            data = json.loads(lines[-1])
            text = f"{data['kernels']} kernels ready after {data['seconds']:.0f} s"
            yield f"{shape} {weights}", "ok", text, data
        else:
            yield f"{shape} {weights}", "failed", f"code {child.returncode}: {lines[-1][:300]}"
    yield "together", "note", f"{time.monotonic() - started_s:.0f} s"


def main(shape: str, weights: str, device_name: str) -> None:
    from localllm.kernels.launch import num_compiles
    from scripts.gpu_check_lib.engine import RandomEngine
    from scripts.gpu_check_lib.figures import dtype_of, goals_of, options_for
    from scripts.random_weights import shape_spec

    started_s, device = time.perf_counter(), torch.device(device_name)
    goals = goals_of(shape, weights)
    engine = RandomEngine(shape_spec(shape, num_hidden_layers=1), options_for(goals, device, dtype_of(device)))
    for goal in goals:
        if goal.kind == "decode":
            engine.decode(goal.batch, goal.context, 2)
        else:
            engine.prefill(goal.context, repeats=1)
    engine.close()
    print(json.dumps({"kernels": num_compiles(), "seconds": time.perf_counter() - started_s}))


if __name__ == "__main__":
    main(*sys.argv[1:])
