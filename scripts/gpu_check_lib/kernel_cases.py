"""One case per kernel and real layer shape: how to launch it, its bytes and FLOPs, its twin's result.

Each case has several copies of its data, larger than two L2 caches together, and rotates through them: in a server a
layer's weights come from memory, never from the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from localllm.kernels.fp8_linear import quantize_fp8
from localllm.kernels.gated import gated, gated_reference
from localllm.kernels.int4_linear import quantize_int4
from localllm.kernels.int8_linear import quantize_int8
from localllm.kernels.layer_cache import LayerKV
from localllm.kernels.linear import linear, linear_unfinished
from localllm.kernels.paged_attention import kv_cache_shape, paged_attention, plan_attention
from localllm.kernels.paged_attention.twin import paged_attention_reference, plan_on_host
from localllm.kernels.rms_norm import add_rms_norm, rms_norm_reference
from localllm.kernels.rotary_store_kv import plan_rotation, rotary_store_kv, rotary_store_kv_reference
from localllm.kernels.sampling.draw import draw, draw_reference
from localllm.kernels.sampling.tables import SlotTables
from localllm.kernels.tuned.measure import num_copies
from localllm.models.layers.rotary import rope_table
from localllm.models.spec.model_spec import ModelSpec
from scripts.gpu_check_lib.roofline import Ceilings

BLOCK_SIZE = 64
TOLERANCE = {"16-bit": 3e-2, "int8": 3e-2, "int4": 3e-2, "fp8": 1e-1}
"""Relative to the largest number of a result. With many rows, fp8 also has fp8 activations."""
LONGEST_CHECK = 1024
"""Most rows, and keys, for a comparison with the twin: more would take minutes and much memory."""


@dataclass(frozen=True, slots=True)
class Case:
    """One launch to measure."""

    kernel: str
    shape: str  # for display
    run: Callable[[int], Tensor]  # run(turn) uses copy turn % number of copies
    nbytes: float  # bytes that have to move
    flops: float  # operations that have to be computed
    weights: str = "16-bit"  # decides which GEMM ceiling applies
    error: Callable[[], float] | None = None  # largest relative difference from the twin; None: too large to compare
    plan: Callable[[], None] | None = None  # chooses launch settings again, if `run` does not
    tunes: tuple[str, ...] = ()  # kernels whose settings matter to it; (): all for which it asks

    def floor_s(self, ceilings: Ceilings) -> float:
        """Return the least time for the bytes and the operations."""
        return max(self.nbytes / ceilings.copy_bytes_per_s, self.flops / ceilings.flops_per_s(self.weights))


@dataclass(frozen=True, slots=True)
class Bench:
    """The device and model for which cases are made."""

    spec: ModelSpec
    device: torch.device
    dtype: torch.dtype
    l2_bytes: int

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=torch.float32).mul_(scale).to(self.dtype)

    def copies(self, make: Callable[[], Any], nbytes: float) -> list[Any]:
        return [make() for _ in range(min(64, num_copies(int(nbytes), self.l2_bytes)))]


Maker = Callable[[], Case]


def matrices(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Return [N, K] of every matrix of a layer, and of the head."""
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return {
        "qkv": (q + 2 * kv, spec.hidden_size), "out": (spec.hidden_size, q),
        "gate_up": (2 * spec.intermediate_size, spec.hidden_size), "down": (spec.hidden_size, spec.intermediate_size),
        "head": (spec.vocab_size, spec.hidden_size),
    }  # fmt: skip


def linear_cases(bench: Bench, rows: list[int], formats: Sequence[str] | None = None) -> Iterator[Maker]:
    """Yield every matrix in every weight format, or in the given ones; the head always has 16 bits."""
    for weights in formats or FORMATS:
        for name, (n, k) in matrices(bench.spec).items():
            if weights == "16-bit" or name != "head":
                for m in rows:
                    yield lambda m=m, n=n, k=k, weights=weights, name=name: _linear(bench, weights, name, m, n, k)


FORMATS: dict[str, tuple[float, Callable[[Tensor], Any]]] = {
    "16-bit": (2, lambda weight: weight),
    "fp8": (1, lambda weight: quantize_fp8(weight, "channel")),
    "int8": (1, lambda weight: quantize_int8(weight)),
    "int4": ((4 + 20 / 128) / 8, lambda weight: quantize_int4(weight, 128)),
}
"""Bytes per weight, and a function that quantises a weight."""


def _linear(bench: Bench, weights: str, name: str, m: int, n: int, k: int) -> Case:
    per_weight, quantize = FORMATS[weights]
    size, nbytes = bench.dtype.itemsize, n * k * per_weight
    held = bench.copies(lambda: quantize(bench.random(n, k, scale=1 / math.sqrt(k))), nbytes)
    x = bench.random(m, k)

    def run(turn: int) -> Tensor:
        return product(x, held[turn % len(held)])

    def error() -> float:
        plain = held[0] if isinstance(held[0], Tensor) else held[0].dequantize(torch.float32)
        return relative_error(run(0), x.float() @ plain.float().t())

    per_rows = m * (n + k) * size
    return Case(f"linear {weights}", f"{name} [{m}, {k}] x [{n}, {k}]", run, nbytes + per_rows, 2 * m * n * k, weights,
                error if m <= LONGEST_CHECK else None)  # fmt: skip


def product(x: Tensor, weight: Any) -> Tensor:
    y: Tensor = linear(x, weight) if isinstance(weight, Tensor) else weight.linear(x)
    return y


def row_cases(bench: Bench, rows: list[int]) -> Iterator[Maker]:
    """Yield operations on single rows: bound by memory, with few rows by the launch."""
    for m in rows:
        yield lambda m=m: _add_rms_norm(bench, m)
        yield lambda m=m: _silu_mul(bench, m)
        yield lambda m=m: _gate_up_and_silu(bench, m)
        yield lambda m=m: _rotary_store_kv(bench, m)


def _add_rms_norm(bench: Bench, m: int) -> Case:
    width, size = bench.spec.hidden_size, bench.dtype.itemsize
    nbytes = 4 * m * width * size
    held = bench.copies(lambda: (bench.random(m, width), bench.random(m, width)), nbytes)
    weight = torch.ones(width, device=bench.device)

    def run(turn: int) -> Tensor:
        x, residual = held[turn % len(held)]
        return add_rms_norm(x, residual, weight, 1e-5)

    def error() -> float:
        x, residual = held[0]
        wanted = rms_norm_reference(x.float() + residual.float(), weight, 1e-5)
        return relative_error(run(0), wanted)

    return Case("add_rms_norm", f"[{m}, {width}]", run, nbytes, 0, error=error)


def _silu_mul(bench: Bench, m: int) -> Case:
    width, size = bench.spec.intermediate_size, bench.dtype.itemsize
    nbytes = 3 * m * width * size
    held = bench.copies(lambda: bench.random(m, 2 * width), nbytes)

    def run(turn: int) -> Tensor:
        return gated(held[turn % len(held)], "silu")

    return Case("silu_mul", f"[{m}, 2 x {width}]", run, nbytes, 0,
                error=lambda: relative_error(run(0), gated_reference(held[0].float(), "silu")))  # fmt: skip


def _gate_up_and_silu(bench: Bench, m: int) -> Case:
    """The product of gate and up that ends with the activation: in one kernel where few rows need no splits of K."""
    n, k = matrices(bench.spec)["gate_up"]
    nbytes = n * k * bench.dtype.itemsize
    held = bench.copies(lambda: bench.random(n, k, scale=1 / math.sqrt(k)), nbytes)
    x = bench.random(m, k)

    def run(turn: int) -> Tensor:
        return gated(linear_unfinished(x, held[turn % len(held)]), "silu")

    def error() -> float:
        return relative_error(run(0), gated_reference(x.float() @ held[0].float().t(), "silu"))

    per_rows = m * (n // 2 + k) * bench.dtype.itemsize
    return Case("gate_up_and_silu", f"[{m}, {k}] x [{n}, {k}]", run, nbytes + per_rows, 2 * m * n * k,
                error=error if m <= LONGEST_CHECK else None)  # fmt: skip


def _rotary_store_kv(bench: Bench, m: int) -> Case:
    spec, size = bench.spec, bench.dtype.itemsize
    heads = spec.num_heads + 2 * spec.num_kv_heads
    nbytes = 2 * m * heads * spec.head_dim * size
    blocks = -(-m // BLOCK_SIZE) + 1
    shape = kv_cache_shape(blocks, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
    kv = LayerKV(*(torch.zeros(shape, dtype=bench.dtype, device=bench.device) for _ in range(2)))
    held = bench.copies(lambda: bench.random(m, heads * spec.head_dim), nbytes)
    slots = torch.arange(BLOCK_SIZE, BLOCK_SIZE + m, device=bench.device)
    positions = torch.arange(m, device=bench.device)
    rotation = plan_rotation(rope_table(spec.rope, m).to(bench.device), positions)

    def run(turn: int) -> Tensor:
        return rotary_store_kv(held[turn % len(held)], kv, slots, rotation)

    def error() -> float:
        wanted = rotary_store_kv_reference(held[0].float(), LayerKV(kv.k.float(), kv.v.float()), slots, rotation)
        return relative_error(run(0), wanted)

    return Case("rotary_store_kv", f"[{m}, {heads} x {spec.head_dim}]", run, nbytes, 0, error=error)


def sampling_cases(bench: Bench, rows: list[int]) -> Iterator[Maker]:
    """Yield sampling of one token for each row, by temperature alone."""
    for m in rows:
        if m <= LONGEST_CHECK:
            yield lambda m=m: _draw(bench, m)


def _draw(bench: Bench, m: int) -> Case:
    vocab_size = bench.spec.vocab_size
    nbytes = 4 * m * vocab_size
    held = bench.copies(lambda: torch.randn(m, vocab_size, device=bench.device), nbytes)
    slots, lengths = torch.arange(m, device=bench.device), torch.full((m,), 9, device=bench.device)
    tables = SlotTables.empty(m, vocab_size, bench.device)
    tables.temperature.fill_(0.8)
    tables.top_k.fill_(vocab_size)
    tables.top_p.fill_(1.0)

    def run(turn: int) -> Tensor:
        return draw(held[turn % len(held)], slots, lengths, tables)[0]

    def error() -> float:
        """Return the share of rows whose token differs from the twin's; must be 0."""
        return float((run(0) != draw_reference(held[0], slots, lengths, tables)[0]).float().mean())

    return Case("draw", f"[{m}, {vocab_size}]", run, nbytes, 0, error=error)


def attention_cases(bench: Bench, decodes: list[tuple[int, int]], prompts: list[int]) -> Iterator[Maker]:
    """Yield attention cases. decodes: (batch, context) pairs."""
    for batch, context in decodes:
        yield lambda batch=batch, context=context: _attention(bench, batch, context, 1)
    for tokens in prompts:
        yield lambda tokens=tokens: _attention(bench, 1, tokens, tokens)


def _attention(bench: Bench, batch: int, context: int, query_len: int) -> Case:
    spec, size = bench.spec, bench.dtype.itemsize
    per_row = -(-context // BLOCK_SIZE)
    shape = kv_cache_shape(batch * per_row + 1, BLOCK_SIZE, spec.num_kv_heads, spec.head_dim)
    kv_bytes = 2 * batch * context * spec.num_kv_heads * spec.head_dim * size
    held = bench.copies(lambda: (bench.random(*shape), bench.random(*shape)), kv_bytes)
    order = torch.randperm(batch * per_row, device=bench.device).int() + 1
    table = order.view(batch, per_row)
    queries = bench.random(batch * query_len, spec.num_heads, spec.head_dim)
    lens = {"query_lens": (query_len,) * batch, "num_decodes": batch if query_len == 1 else 0}
    context_lens = torch.full((batch,), context, dtype=torch.int32, device=bench.device)
    cumulative = torch.arange(0, (batch + 1) * query_len, query_len, dtype=torch.int32, device=bench.device)
    plans: list[Any] = []

    def plan() -> None:
        plans[:] = [
            plan_attention(
                table, context_lens, cumulative, context_lens_host=(context,) * batch, num_heads=spec.num_heads,
                cache_shape=shape, cache_dtype=bench.dtype, **lens,  # type: ignore[arg-type]
            )
        ]  # fmt: skip

    plan()
    scale = spec.head_dim**-0.5

    def run(turn: int) -> Tensor:
        return paged_attention(queries, *held[turn % len(held)], plans[0], scale=scale)

    def error() -> float:
        on_host = plan_on_host(table, lens["query_lens"], (context,) * batch, lens["num_decodes"], shape, None)  # type: ignore[arg-type]
        k, v = held[0]
        return relative_error(
            run(0), paged_attention_reference(queries.float(), k.float(), v.float(), on_host, scale=scale)
        )

    pairs = batch * (context if query_len == 1 else context * (context + 1) / 2)
    kind = "decode" if query_len == 1 else "prefill"
    what = f"{batch} x {context}" if query_len == 1 else f"{context} tokens"
    return Case(
        f"attention {kind}", what, run, kv_bytes + 2 * queries.numel() * size,
        4 * pairs * spec.num_heads * spec.head_dim, error=error if batch * context <= 16 * LONGEST_CHECK else None,
        plan=plan, tunes=("decode_attention", "decode_splits") if query_len == 1 else ("prefill_attention",),
    )  # fmt: skip


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """Return the largest difference relative to the largest number."""
    difference = (got.float().flatten() - wanted.float().flatten()).abs().max()
    return float(difference / wanted.float().abs().max())
