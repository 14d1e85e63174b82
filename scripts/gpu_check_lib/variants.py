"""Compare the same decode steps under two settings, A and B on one model in turn, to find the better one for this GPU.

programmatic launch   kernels that may start while the previous one drains, off and on
skinny rows           up to how many rows our own GEMM runs instead of cuBLAS
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from localllm.kernels import tuned
from localllm.kernels.launch import LaunchOptions
from localllm.kernels.linear import Crossover
from scripts.gpu_check_lib.engine import Options, RandomEngine
from scripts.gpu_check_lib.figures import dtype_of, require_memory
from scripts.gpu_check_lib.roofline import work_of
from scripts.gpu_check_lib.stages import Context, Found
from scripts.random_weights import random_model, shape_spec

BATCHES = (1, 16, 32, 64, 96)
EARLY_BATCHES = (1, 64)
SKINNY_ROWS = (0, 16, 32, 64, 128)
STEPS = 48
CONTEXT = 512


def compare(context: Context, shape: str = "llama-3.1-8b") -> Iterator[Found]:
    spec, device = shape_spec(shape), torch.device(context.device)
    length = CONTEXT + 2 * STEPS + 64
    options = Options(device, dtype_of(device), max_num_seqs=max(BATCHES), max_model_len=length,
                      num_kv_tokens=max(BATCHES) * length)  # fmt: skip
    require_memory(spec, options, work_of(spec), "16-bit")
    model = random_model(spec, device, options.dtype, max_model_len=length)

    def step_ms(batches: Sequence[int], early: bool = False) -> dict[int, float]:
        launch = LaunchOptions(programmatic_launch=early)
        engine = RandomEngine(spec, replace(options, launch=launch), model=model)
        times = {batch: engine.decode(batch, CONTEXT, STEPS).median_s * 1e3 for batch in batches}
        engine.close()
        return times

    for early in (False, True, False):
        yield row(f"programmatic launch {'on' if early else 'off'}", step_ms(EARLY_BATCHES, early))
    for most in SKINNY_ROWS:
        force_crossover(most)
        yield row(f"ours up to {most} rows", step_ms(BATCHES))


def row(name: str, times: dict[int, float]) -> Found:
    text = ", ".join(f"batch {batch}: {ms:.3f} ms" for batch, ms in times.items())
    return name, "note", text, {f"batch_{batch}_ms": ms for batch, ms in times.items()}


def force_crossover(most_rows: int) -> None:
    """Make every matrix seen so far use our GEMM up to `most_rows` rows, in this process."""
    chosen = tuned.table().chosen
    for key in [key for key in chosen if key[0] == "linear"]:
        chosen[key] = Crossover(most_rows)
