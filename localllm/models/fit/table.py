"""The numbers of a fit as table rows with a column per device or per rank, for a terminal and for a page.

Does not know: how the table is drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from localllm.models.fit.estimate import Estimate
from localllm.models.fit.rank import RankPlan
from localllm.models.fit.request_cost import RequestCost
from localllm.units import format_bytes, format_count


def fit_rows(estimates: Sequence[Estimate]) -> Iterator[tuple[str, list[str]]]:
    """Yield each row's name and value per device. Two leading spaces mark a detail of the row above."""

    def row(what: str) -> list[str]:
        return [format_bytes(getattr(each.needs, what)) for each in estimates]

    yield "weights", row("weights_bytes")
    yield "  held as", [each.needs.quantization or each.needs.dtype for each in estimates]
    is_uniform = all(each.cost.is_uniform for each in estimates)
    has_cache = any(each.kv_token_bytes for each in estimates)
    if has_cache:
        yield "KV cache, per token", [format_bytes(each.kv_token_bytes) for each in estimates]
        yield from _group_rows([each.cost for each in estimates])
        if is_uniform:
            yield "  per 1,000 tokens", [format_bytes(1000 * each.kv_token_bytes) for each in estimates]
        yield "  in all", [_kv_in_all(each) for each in estimates]
    if any(each.needs.num_places for each in estimates):
        layers = format_count(estimates[0].cost.state_layers)
        yield "recurrent state, per request", [format_bytes(each.cost.state_bytes) for each in estimates]
        yield f"  of {layers} layers, as much as", [_state_in_tokens(each.cost) for each in estimates]
        yield "  in all", [_states_in_all(each) for each in estimates]
    if not is_uniform:
        for length in estimates[0].request_bytes:
            cells = [format_bytes(each.request_bytes[length]) for each in estimates]
            yield f"one request of {format_count(length)} tokens", cells
    yield "activations", [format_bytes(e.needs.activation_bytes - e.needs.sampler_bytes) for e in estimates]
    yield "  more for sampling", row("sampler_bytes")
    if any(each.needs.graph_bytes for each in estimates):
        yield "CUDA graphs", row("graph_bytes")
    if any(each.needs.comm_bytes for each in estimates):
        on_cpu = all(each.device == "cpu" for each in estimates if each.needs.comm_bytes)
        yield "processes of the ranks" if on_cpu else "exchange between ranks", row("comm_bytes")
    yield "reserve", row("reserve_bytes")
    yield "free now", row("free_bytes")
    yield "remains", [_bytes_left(each) for each in estimates]
    yield "verdict", [each.verdict for each in estimates]
    yield "context", [_count(each.plan.max_model_len) if each.plan else "" for each in estimates]
    for length in estimates[0].concurrency if has_cache else ():
        if any(each.concurrency[length] or not each.plan for each in estimates):  # else longer than every context
            cells = [_count(each.concurrency[length]) or ("too long" if each.plan else "") for each in estimates]
            yield f"  requests of {format_count(length)}", cells
    if has_cache:
        yield "KV blocks", [_blocks(each) for each in estimates]


def _group_rows(costs: Sequence[RequestCost]) -> Iterator[tuple[str, list[str]]]:
    """Yield the bytes per token of each KV group, where a model has several or has layers without K and V."""
    groups = costs[0].groups
    if len(groups) == 1 and not costs[0].state_layers:
        return
    for index, group in enumerate(groups):
        layers = f"{format_count(group.num_layers)} {'layer' if group.num_layers == 1 else 'layers'}"
        seen = "all tokens" if group.window is None else f"{format_count(group.window)} tokens"
        cells = [format_bytes(cost.groups[index].token_bytes) for cost in costs]
        yield f"  {layers} that {'sees' if group.num_layers == 1 else 'see'} {seen}", cells


def _state_in_tokens(cost: RequestCost) -> str:
    return f"the KV cache of {format_count(cost.state_tokens)} tokens" if cost.state_tokens else ""


def rank_columns(ranks: Sequence[RankPlan]) -> list[str]:
    """Return a heading for each rank: rank 0 cuda:0 RTX 4090."""
    return [" ".join(["rank", str(number), *_device(rank)]) for number, rank in enumerate(ranks)]


def _device(rank: RankPlan) -> list[str]:
    return ["CPU"] if rank.device == "cpu" else [rank.device, rank.name]


def rank_rows(ranks: Sequence[RankPlan]) -> Iterator[tuple[str, list[str]]]:
    """Yield each row's name and value per rank, for the ranks of one plan."""
    shards = [rank.shard for rank in ranks]
    yield "layers", [_span(shard.layers) for shard in shards]
    yield "heads", [format_count(len(shard.heads)) for shard in shards]
    yield "KV heads", [format_count(len(shard.kv_heads)) for shard in shards]
    yield "features", [format_count(len(shard.features)) for shard in shards]
    if any(len(shard.experts) for shard in shards):
        yield "experts", [format_count(len(shard.experts)) for shard in shards]
        yield "features of an expert", [format_count(len(shard.expert_features)) for shard in shards]
    yield "vocabulary", [format_count(len(shard.vocab)) for shard in shards]
    names = {"weights": "weights_bytes", "KV cache": "kv_bytes", "activations": "activation_bytes"}
    names |= {"CUDA graphs": "graph_bytes"} if any(rank.graph_bytes for rank in ranks) else {}
    on_cpu = any(rank.device == "cpu" for rank in ranks)
    names |= {
        "process" if on_cpu else "exchange": "comm_bytes",
        "in all": "total_bytes",
        "reserve": "reserve_bytes",
        "free now": "free_bytes",
    }
    for title, name in names.items():
        yield title, [format_bytes(getattr(rank, name)) for rank in ranks]
    if not on_cpu:  # on a CPU all ranks share what is free
        yield "remains", [_left(rank.free_bytes - rank.reserve_bytes - rank.total_bytes) for rank in ranks]


def _span(layers: range) -> str:
    return f"{len(layers)} ({layers.start} to {layers.stop - 1})"


def _kv_in_all(each: Estimate) -> str:
    return f"{format_bytes(each.needs.kv_bytes)} as {each.needs.kv_dtype}"


def _states_in_all(each: Estimate) -> str:
    needs = each.needs
    checkpoints = max(0, needs.num_places - 1 - needs.max_num_seqs)
    return f"{format_bytes(needs.state_bytes)}: {needs.max_num_seqs} requests, {format_count(checkpoints)} checkpoints"


def _bytes_left(each: Estimate) -> str:
    needs = each.needs
    return _left(needs.free_bytes - needs.reserve_bytes - needs.total_bytes)


def _left(count: int) -> str:
    return format_bytes(count) if count >= 0 else f"{format_bytes(-count)} are missing"


def _count(number: int) -> str:
    return format_count(number) if number else ""


def _blocks(each: Estimate) -> str:
    return each.plan.blocks_in_words if each.plan else ""
