"""The limits of this GPU for single operations: copying memory, multiplying large matrices.

Figures are given as fractions of these, measured in the same run, as datasheets promise more than programs reach.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict

import torch
from torch import Tensor

from scripts.gpu_check_lib.roofline import Ceilings
from scripts.gpu_check_lib.stages import Context, Found

COPY_BYTES = 4 << 30
SIDE = 8192
ROUNDS = 10


def measure_ceilings(device: torch.device) -> Ceilings:
    """Measure for half a second on a large GPU; sizes shrink if memory is short."""
    return Ceilings(copy_bytes_per_s(device), gemm_flops_per_s(device), fp8_flops_per_s(device))


def check_ceilings(context: Context) -> Iterator[Found]:
    found = measure_ceilings(torch.device(context.device))
    context.leave("ceilings", asdict(found))
    yield "copy", "note", f"{found.copy_bytes_per_s / 1e9:,.0f} GB/s read and written", asdict(found)
    yield "bf16 GEMM", "note", f"{found.bf16_flops_per_s / 1e12:,.0f} TFLOP/s at {SIDE} x {SIDE} x {SIDE}"
    if found.fp8_flops_per_s is None:
        yield "fp8 GEMM", "skipped", "Not supported by this GPU or this torch."
    else:
        yield (
            "fp8 GEMM",
            "note",
            f"{found.fp8_flops_per_s / 1e12:,.0f} TFLOP/s, one scale per tensor, fast accumulation",
        )
        if (exact := fp8_flops_per_s(torch.device(context.device), by_row=True)) is not None:
            text = f"{exact / 1e12:,.0f} TFLOP/s, a scale per row, full accumulation (as served)"
            yield "fp8 GEMM by rows", "note", text, {"flops_per_s": exact}


def read_ceilings(context: Context) -> Ceilings | None:
    stored = context.read("ceilings")
    return None if stored is None else Ceilings(**stored)


def copy_bytes_per_s(device: torch.device) -> float:
    size = min(COPY_BYTES, _free_bytes(device) // 4)
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    source.random_(0, 255)
    return 2 * size / seconds_of(lambda: target.copy_(source), device)


def gemm_flops_per_s(device: torch.device, side: int = SIDE) -> float:
    """Measure with random numbers: multiplying zeros takes less power, so a GPU runs unrealistically fast."""
    dtype = torch.bfloat16 if _has_bfloat16(device) else torch.float16
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * side**3 / seconds_of(lambda: torch.mm(a, b, out=out), device)


def fp8_flops_per_s(device: torch.device, side: int = SIDE, *, by_row: bool = False) -> float | None:
    """Measure fp8. by_row: with a scale for each row and column, and full-precision accumulation."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9) or not hasattr(torch, "_scaled_mm"):
        return None
    a, b = (torch.randn(side, side, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    scales = [torch.ones(shape, device=device) for shape in (((side, 1), (1, side)) if by_row else ((), ()))]

    def multiply() -> Tensor:
        out: Tensor = torch._scaled_mm(a, b.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=not by_row)
        return out

    try:
        return 2 * side**3 / seconds_of(multiply, device)
    except RuntimeError:  # some builds and GPUs have the function without support
        return None


def seconds_of(work: Callable[[], object], device: torch.device, rounds: int = ROUNDS) -> float:
    """Return the median seconds of one call on the device, after three warm-up calls."""
    for _ in range(3):
        work()
    times = []
    for _ in range(rounds):
        if device.type == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            stop.record()
            stop.synchronize()
            times.append(float(start.elapsed_time(stop)) / 1e3)
        else:
            import time

            started_s = time.perf_counter()
            work()
            times.append(time.perf_counter() - started_s)
    return statistics.median(times)


def _has_bfloat16(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return 1 << 28
