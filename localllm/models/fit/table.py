"""The numbers of a fit as table rows with a column per device, for a terminal and for a page.

Does not know: how the table is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from localllm.models.fit.estimate import Estimate
from localllm.units import format_bytes, format_count


def fit_rows(estimates: Sequence[Estimate]) -> Iterator[tuple[str, list[str]]]:
    """Yield each row's name and value per device. Two leading spaces mark a detail of the row above."""

    def row(what: str) -> list[str]:
        return [format_bytes(getattr(each.needs, what)) for each in estimates]

    yield "weights", row("weights_bytes")
    yield "  held as", [each.needs.quantization or each.needs.dtype for each in estimates]
    has_cache = any(each.kv_token_bytes for each in estimates)
    if has_cache:
        yield "KV cache, per token", [format_bytes(each.kv_token_bytes) for each in estimates]
        yield "  per 1,000 tokens", [format_bytes(1000 * each.kv_token_bytes) for each in estimates]
        yield "  in all", [_kv_in_all(each) for each in estimates]
    yield "activations", [format_bytes(e.needs.activation_bytes - e.needs.sampler_bytes) for e in estimates]
    yield "  more for sampling", row("sampler_bytes")
    if any(each.needs.graph_bytes for each in estimates):
        yield "CUDA graphs", row("graph_bytes")
    yield "reserve", row("reserve_bytes")
    yield "free now", row("free_bytes")
    yield "remains", [_bytes_left(each) for each in estimates]
    yield "verdict", [each.verdict for each in estimates]
    yield "context", [_count(each.plan.max_model_len) if each.plan else "" for each in estimates]
    for length in estimates[0].concurrency if has_cache else ():
        yield f"  requests of {format_count(length)}", [_count(each.concurrency[length]) for each in estimates]
    if has_cache:
        yield "KV blocks", [_blocks(each) for each in estimates]


def _kv_in_all(each: Estimate) -> str:
    return f"{format_bytes(each.needs.kv_bytes)} as {each.needs.kv_dtype}"


def _bytes_left(each: Estimate) -> str:
    needs = each.needs
    left = needs.free_bytes - needs.reserve_bytes - needs.total_bytes
    return format_bytes(left) if left >= 0 else f"{format_bytes(-left)} are missing"


def _count(number: int) -> str:
    return format_count(number) if number else ""


def _blocks(each: Estimate) -> str:
    return f"{format_count(each.plan.num_blocks - 1)} of {each.plan.block_size} tokens" if each.plan else ""
