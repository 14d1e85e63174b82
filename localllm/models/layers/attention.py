"""Attention of one layer: project, norm, rotate, store, attend, project. q, k and v come from one matrix.

Families change q, k and v in place between projection and rotation: whole norms, LayerNorm per head, clipping. RMSNorm
over each head, the usual norm of q and k, is part of the rotation kernel (kernels/rotary_store_kv.py). With ALiBi,
scores fall with distance, with a slope per head, in place of any other encoding of positions (Press et al. 2021,
arXiv:2108.12409).
Does not know: which request owns which block (the step's `AttentionPlan` does).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.kernels.cpu.attention import cache_fields, reads_cache
from localllm.kernels.cpu.native.structures import Activation, HeadNorm, HeadsMade, NativeAttention
from localllm.kernels.fused_epilogue import PendingNorm, Unfinished, whole
from localllm.kernels.indexer import ChosenRow, DeviceQueries, chosen_rows, queries_on_device
from localllm.kernels.launch import runs_triton
from localllm.kernels.layer_cache import LayerKV
from localllm.kernels.paged_attention import AttentionPlan, RawHeads, paged_attention, plan_attention, rotates_heads
from localllm.kernels.rms_norm import normed
from localllm.kernels.rotary_store_kv import (
    Heads,
    Rotation,
    count_query_heads,
    rotary_store_kv,
    rotation_size,
    store_kv,
)
from localllm.models.inputs import ForwardInputs, GroupInputs, SourceInputs
from localllm.models.layers.group import Group, Projection
from localllm.models.layers.linear import Linear, unfinished
from localllm.models.layers.native_writer import Buffer, NotSupportedNatively, Writer
from localllm.models.layers.norm import RMSNorm
from localllm.models.spec.model_spec import QueryGrowth, kv_groups

_HEADS_MADE = {"qkv": HeadsMade.QKV, "qk": HeadsMade.QK, "q": HeadsMade.Q}
_GATES: dict[str, tuple[Callable[[Tensor], Tensor], Activation]] = {
    "sigmoid": (torch.sigmoid, Activation.SIGMOID),
    "softplus": (F.softplus, Activation.SOFTPLUS),
}


class HeadsChange(Protocol):
    """A change of q, k and v before the rotation."""

    def __call__(self, qkv: Tensor) -> Tensor:
        """Return qkv [T, size] changed, which may be the same tensor."""
        ...

    def native_fields(self, writer: Writer) -> dict[str, Any]:
        """Return the fields of `NativeAttention` that do the same. Raises `NotSupportedNatively`."""
        ...


def alibi_slopes(num_heads: int) -> list[float]:
    """Return 2^(-8 i / n), i from 1, for n heads, n a power of two. Further heads take every other slope of 2 n."""
    power = 1 << int(math.log2(num_heads))
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    return slopes + [2 ** (-4 * i / power) for i in range(1, 2 * (num_heads - power), 2)]


def distance_buckets(count: int, furthest: int) -> Tensor:
    """Return the bucket of each distance 0 .. furthest between a query and an earlier key, int64: half of the `count`
    buckets have one distance each, the others grow (T5; Raffel et al. 2020, arXiv:1910.10683). Every larger distance
    is in the last one's."""
    exact = count // 2
    distances = torch.arange(furthest + 1, device="cpu")
    growth = (distances.float().clamp_(min=1) / exact).log() / math.log(furthest / exact) * (count - exact)
    return torch.where(distances < exact, distances, (exact + growth.long()).clamp_(max=count - 1))


class WholeNorm:
    """RMSNorm over all heads of q together, and over all heads of k together (OLMo 2)."""

    __slots__ = ("k", "q")

    def __init__(self, q: RMSNorm, k: RMSNorm) -> None:
        self.q, self.k = q, k

    def __call__(self, qkv: Tensor) -> Tensor:
        q_size, k_size = self.q.weight.shape[0], self.k.weight.shape[0]
        q, k = qkv[:, :q_size], qkv[:, q_size : q_size + k_size]
        q.copy_(self.q(q))
        k.copy_(self.k(k))
        return qkv

    def native_fields(self, writer: Writer) -> dict[str, Any]:
        weight = writer.address(torch.cat((self.q.weight, self.k.weight)))
        return {"head_norm": HeadNorm.WHOLE, "head_norm_weight": weight, "head_norm_eps": self.q.eps}


class SplitWholeNorm:
    """`WholeNorm` over heads that several shards hold: their sums of squares are added up in fp32."""

    __slots__ = ("counts_k", "group", "k", "q", "sizes")

    def __init__(self, q: RMSNorm, k: RMSNorm, sizes: tuple[int, int], group: Group, *, counts_k: bool) -> None:
        """sizes: elements of q and of k over all heads. counts_k: whether no shard before this one has its KV heads."""
        self.q, self.k, self.sizes, self.group, self.counts_k = q, k, sizes, group, counts_k

    def __call__(self, qkv: Tensor) -> Tensor:
        q_size, k_size = self.q.weight.shape[0], self.k.weight.shape[0]
        parts = [part.float() for part in (qkv[:, :q_size], qkv[:, q_size : q_size + k_size])]
        squares = torch.stack([part.square().sum(1) for part in parts], 1)  # [T, 2]
        if not self.counts_k:
            squares[:, 1] = 0
        self.group.sum_(squares)
        for index, (part, norm) in enumerate(zip(parts, (self.q, self.k), strict=True)):
            inverse = squares[:, index, None].div(self.sizes[index]).add_(norm.eps).rsqrt_()
            first = index * q_size
            qkv[:, first : first + part.shape[1]] = part.mul(inverse).mul_(norm.weight)
        return qkv

    def native_fields(self, writer: Writer) -> dict[str, Any]:
        raise NotSupportedNatively("a norm over the heads of several ranks")


class HeadLayerNorm:
    """LayerNorm over each head of q and k, with a weight per head and no bias (Cohere, StableLM 2)."""

    __slots__ = ("eps", "weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight.float()  # [num_heads + num_kv_heads, head_dim]: q's, then k's
        self.eps = eps

    def __call__(self, qkv: Tensor) -> Tensor:
        num_heads, head_dim = self.weight.shape
        heads = qkv[:, : num_heads * head_dim].unflatten(1, (num_heads, head_dim))
        heads.copy_(F.layer_norm(heads.float(), (head_dim,), None, None, self.eps).mul_(self.weight))
        return qkv

    def native_fields(self, writer: Writer) -> dict[str, Any]:
        weight = writer.address(self.weight)
        return {"head_norm": HeadNorm.LAYER, "head_norm_weight": weight, "head_norm_eps": self.eps}


class Clip:
    """Clamp all elements to [-limit, limit] (OLMo 1, MPT)."""

    __slots__ = ("limit",)

    def __init__(self, limit: float) -> None:
        self.limit = limit

    def __call__(self, qkv: Tensor) -> Tensor:
        return qkv.clamp_(-self.limit, self.limit)

    def native_fields(self, writer: Writer) -> dict[str, Any]:
        return {"clip": self.limit}


class WidenedValues:
    """Widen the heads of v, which come last, with zeros to the size of the others, as the cache keeps them."""

    __slots__ = ("head_dim", "heads", "size")

    def __init__(self, heads: int, size: int, head_dim: int) -> None:
        self.heads, self.size, self.head_dim = heads, size, head_dim

    def __call__(self, qkv: Tensor) -> Tensor:
        first = qkv.shape[1] - self.heads * self.size
        values = F.pad(qkv[:, first:].unflatten(1, (self.heads, self.size)), (0, self.head_dim - self.size))
        return torch.cat((qkv[:, :first], values.flatten(1)), 1)

    def native_fields(self, writer: Writer) -> dict[str, Any]:
        return {"value_dim": self.size}


@dataclass(frozen=True, slots=True)
class SourceStep:
    """A step's sources, as all layers of an encoder-decoder attend to them."""

    plan: AttentionPlan
    layers: Sequence[LayerKV]
    watch: Callable[[int, Tensor], None] | None  # see `SourceInputs`


@dataclass(slots=True)
class ChosenKeys:
    """The keys that the last indexer of a step has chosen: positions [count, topk] for each row, or for all queries."""

    positions: list[Tensor] | Tensor = field(default_factory=list)


class SparseStep(NamedTuple):
    """The queries of a step that attend to chosen keys, and the choice, which all layers share."""

    queries: Sequence[ChosenRow] | DeviceQueries  # some rows for the twin, all queries for kernels
    choice: ChosenKeys
    first_key: int = 0  # keys before this position are not chosen


def sparse_step(
    inputs: ForwardInputs, group: GroupInputs, block_size: int, topk: int, choice: ChosenKeys
) -> tuple[SparseStep | None, ForwardInputs]:
    """Return the step's rows that attend to chosen keys, None if all see at most `topk`, and the inputs from which the
    attention of the other rows is planned. In these, such rows are as short as they can be: their results are
    overwritten. Kernels compute every query by its chosen keys, unless no context can be longer than `topk`."""
    if runs_triton(group.block_table, "indexer"):
        if group.block_table.shape[1] * block_size <= topk:
            return None, inputs
        queries = queries_on_device(
            group.block_table, inputs.context_lens, inputs.cu_seqlens_q, inputs.positions, inputs.first_key
        )
        return SparseStep(queries, choice, inputs.first_key), inputs
    if max(inputs.context_lens_host, default=0) <= topk:
        return None, inputs
    firsts, drafts = None, inputs.decode_queries > 1
    if drafts:  # queries beyond the context are padding
        begins = [0, *accumulate(inputs.query_lens)][: inputs.num_decodes]
        later = zip(inputs.context_lens_host, inputs.query_lens, strict=True)
        own = (inputs.positions[begins] + inputs.first_key).tolist()
        firsts = own + [context - length for context, length in list(later)[inputs.num_decodes :]]
    rows = chosen_rows(group.block_table, block_size, inputs.query_lens, inputs.context_lens_host, topk, firsts)
    short = tuple(
        context if chosen is None else int(row < inputs.num_decodes and not drafts)
        for row, (context, chosen) in enumerate(zip(inputs.context_lens_host, rows, strict=True))
    )
    sparse = SparseStep([row for row in rows if row is not None], choice, inputs.first_key)
    return sparse, replace(inputs, context_lens_host=short)


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """A step's inputs to attention, shared by layers of one kind."""

    plan: AttentionPlan
    rotation: Rotation | None  # None: no positions (NoPE)
    slot_mapping: Tensor  # [T] int64
    all_slots_valid: bool
    query_scale: Tensor | None = None  # [T, 1, 1] in the model's type
    layer_inputs: Tensor | None = None  # [T, layers, size]: per-layer embeddings, for the layers that add them
    source: SourceStep | None = None  # None: not an encoder-decoder
    sparse: SparseStep | None = None  # None: every row sees all keys


def plan_step(
    inputs: ForwardInputs, group: GroupInputs, k_cache: Tensor, num_heads: int, window: int | None
) -> AttentionPlan:
    """Plan how this step's queries read a cache of that shape through the tables of a KV group."""
    positions = inputs.positions if inputs.decode_queries > 1 else None
    if positions is not None and inputs.first_key:
        positions = positions + inputs.first_key  # a drafter's positions are rotary ones
    return plan_attention(
        group.block_table,
        inputs.context_lens,
        inputs.cu_seqlens_q,
        num_decodes=inputs.num_decodes,
        query_lens=inputs.query_lens,
        context_lens_host=inputs.context_lens_host,
        num_heads=num_heads,
        cache_shape=k_cache.shape,
        cache_dtype=k_cache.dtype,
        window=window,
        first_key=inputs.first_key,
        decode_queries=inputs.decode_queries,
        positions=positions,
        work=inputs.work,
        key_limits=inputs.key_limits,
    )


def plan_sources(inputs: SourceInputs, num_heads: int) -> SourceStep:
    """Plan how each token of a step reads its source: as a decode row, whose context is the source."""
    cache, count = inputs.layers[0].k, len(inputs.lens_host)
    plan = plan_attention(
        inputs.block_table, inputs.lens, torch.arange(count + 1, dtype=torch.int32, device=inputs.lens.device),
        num_decodes=count, query_lens=(1,) * count, context_lens_host=inputs.lens_host, num_heads=num_heads,
        cache_shape=cache.shape, cache_dtype=cache.dtype,
    )  # fmt: skip
    return SourceStep(plan, inputs.layers, inputs.watch)


class CrossAttention:
    """Attention of an answer's tokens to the encoder's states of its prompt, whose keys and values are computed once.
    Positions play no part."""

    __slots__ = ("group", "num_heads", "out", "query", "scale", "states")

    def __init__(
        self, query: Linear, states: Linear, out: Projection, num_heads: int, scale: float, group: Group
    ) -> None:  # fmt: skip
        """states: makes keys, then values, from the encoder's states. num_heads: of this shard of the group."""
        self.query, self.states, self.out, self.num_heads = query, states, out, num_heads
        self.scale, self.group = scale, group

    def __call__(self, x: Tensor, source: SourceStep, layer: int) -> Tensor:
        """Map x [T, hidden] to a fresh tensor [T, hidden]."""
        kv = source.layers[layer]
        q = self.query(x).unflatten(1, (self.num_heads, -1))
        if source.watch is not None:
            source.watch(layer, q)
        return self.group.sum_(self.out(paged_attention(q, kv.k, kv.v, source.plan, scale=self.scale)))

    def store(self, states: Tensor, kv: LayerKV, slots: Tensor) -> None:
        """Write the keys and values of an encoder's states [S, hidden] to the slots [S] int64."""
        k, v = self.states(states).unflatten(1, (2 * self.num_heads, -1)).chunk(2, dim=1)
        store_kv(k, v, kv.k, kv.v, slots, all_valid=True)

    def write(self, writer: Writer, kv: LayerKV, norm: Any) -> None:
        """Write the operations up to the last projection; the result is in the writer's buffer `attended`. The rows of
        sources come behind the rows of all KV groups."""
        writer.linear(self.query, writer.stream, writer.qkv, norm=norm)
        description = NativeAttention(
            **cache_fields(kv), heads=self.num_heads, group=len(kv_groups(writer.spec)), scale=self.scale,
            made=HeadsMade.Q, growth_period=1,
        )  # fmt: skip
        writer.attend(description)

    def write_out(self, writer: Writer, target: Buffer) -> None:
        """Write the last projection: added to the stream, or written to another buffer."""
        writer.linear(self.out, writer.attended, target)


class Attention:
    __slots__ = (
        "alibi_slopes", "before_rotation", "distance_bias", "gate_activation", "gate_size", "made", "norm_last", "out",
        "qk_norm", "qkv", "scale", "sinks", "softcap", "value_dim",
    )  # fmt: skip

    def __init__(
        self,
        qkv: Linear,
        out: Projection,
        scale: float,
        *,
        before_rotation: Sequence[HeadsChange] = (),
        qk_norm: RMSNorm | None = None,
        norm_last: bool = False,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        distance_bias: Tensor | None = None,
        made: Heads = "qkv",
        gate_size: int = 0,
        gate_activation: str = "sigmoid",
        value_dim: int | None = None,
    ) -> None:
        self.qkv, self.out = qkv, out
        self.made: Heads = made  # the heads that qkv makes; q: the layer reads the cache of another one
        self.gate_size = gate_size  # first outputs of qkv: gates on what attention returns, of each number or each head
        self.gate_activation = gate_activation  # sigmoid, softplus
        self.value_dim = value_dim  # first numbers of each head that attention returns; None: all
        self.before_rotation = tuple(before_rotation)  # applied to the projection's output (layers/attention.py)
        self.qk_norm = qk_norm  # weight [heads, head_dim]: q's for each head, then k's, then v's if v is normed
        self.norm_last = norm_last  # q and k are normed after the rotation
        self.scale, self.softcap = scale, softcap
        self.sinks = sinks  # [num_heads] fp32: per head an extra score in the softmax, without a value
        self.alibi_slopes = alibi_slopes  # [num_heads] fp32: penalty of a score per position
        self.distance_bias = distance_bias  # [num_heads, distances] fp32: added to scores; the last for larger ones

    @property
    def norms_values(self) -> bool:
        """Return whether v is normed too. The norm's weight has the rows of q, k and v then."""
        if self.qk_norm is None:
            return False
        heads, head_dim = self.qk_norm.weight.shape
        made = (self.qkv.weight.shape[0] - self.gate_size) // head_dim
        return (self.made == "qk" and heads > made) or (self.made == "qkv" and heads == made)

    @property
    def _may_be_raw(self) -> bool:
        """Return whether attention may rotate the heads: after their norm, with nothing added to its scores."""
        is_plain = self.sinks is None and self.alibi_slopes is None and self.distance_bias is None
        return self.made == "qkv" and not self.norm_last and is_plain

    def __call__(self, x: Tensor, kv: LayerKV, step: AttentionStep) -> Tensor:
        """Map x [T, hidden] to [T, hidden]; writes the step's K and V into the cache."""
        return whole(self.unfinished(x, kv, step))

    def unfinished(self, x: Tensor | PendingNorm, kv: LayerKV, step: AttentionStep) -> Unfinished:
        """Do the same, but leave the last work of the last product to the reader."""
        qkv, gate = self._project(x)
        norm, eps = (None, 0.0) if self.qk_norm is None else (self.qk_norm.weight, self.qk_norm.eps)
        heads = RawHeads(whole(qkv), step.slot_mapping, step.rotation, norm, eps)
        q: Tensor | RawHeads = heads
        if step.query_scale is not None or not (self._may_be_raw and rotates_heads(step.plan, heads, kv)):
            q = rotary_store_kv(
                heads.qkv, kv, step.slot_mapping, step.rotation, norm, eps,
                norm_last=self.norm_last, made=self.made, all_valid=step.all_slots_valid,
            )  # fmt: skip
            if step.query_scale is not None:
                q.mul_(step.query_scale)
        attended = paged_attention(
            q,
            kv.k,
            kv.v,
            step.plan,
            scale=self.scale,
            softcap=self.softcap,
            sinks=self.sinks,
            alibi_slopes=self.alibi_slopes,
            distance_bias=self.distance_bias,
            k_scale=kv.k_scale,
            v_scale=kv.v_scale,
        )
        if self.value_dim is not None:
            attended = attended.unflatten(1, (-1, kv.head_dim))[..., : self.value_dim].flatten(1)
        if gate is not None:
            attended.unflatten(1, (self.gate_size, -1)).mul_(_GATES[self.gate_activation][0](gate)[:, :, None])
        return unfinished(self.out, attended)

    def write(self, writer: Writer, kind: Any, kv: LayerKV, norm: Any) -> None:
        """Write the operations up to the last projection; the result is in the writer's buffer `attended`."""
        writer.linear(self.qkv, writer.stream, writer.qkv, norm=norm)
        description = self._described(writer, kind, kv)
        writer.attend(description, self.gate_size)
        if self.gate_size:
            width = description.heads * description.value_dim
            activation = _GATES[self.gate_activation][1]
            writer.multiply(writer.qkv, 0, writer.attended, 0, width, activation, factors=self.gate_size)

    def write_out(self, writer: Writer, target: Buffer, factor: float = 1.0) -> None:
        """Write the last projection: added to the stream, or written to another buffer."""
        writer.linear(self.out, writer.attended, target, factor=factor)

    def _described(self, writer: Writer, kind: Any, kv: LayerKV) -> NativeAttention:
        spec, head_dim = writer.spec, kv.head_dim
        if not reads_cache(kv):
            raise NotSupportedNatively(f"a KV cache in {str(kv.k.dtype).removeprefix('torch.')}")
        table = writer.rope_table(kind)
        window = kv_groups(spec)[writer.group].window
        growth = spec.growth_of(rotated=table is not None) or QueryGrowth(0.0, period=1)
        changes: dict[str, Any] = {}
        for change in self.before_rotation:
            changes |= change.native_fields(writer)
        if self.qk_norm is not None:
            head_norm = HeadNorm.RMS_LAST if self.norm_last else HeadNorm.RMS
            changes |= {"head_norm": head_norm, "head_norm_weight": writer.address(self.qk_norm.weight)}
            changes["head_norm_eps"] = self.qk_norm.eps
        narrower = head_dim - (self.value_dim or head_dim)
        made = (self.qkv.weight.shape[0] - self.gate_size + narrower * kv.k.shape[0]) // head_dim
        return NativeAttention(
            **{**cache_fields(kv), **changes}, hadamard_size=rotation_size(head_dim) if kv.rotates_keys else 0,
            heads=count_query_heads(made, kv, self.made),
            angles=writer.address(table), rotary_dim=0 if table is None else table.shape[1],
            window=window or 0, group=writer.group, scale=self.scale, softcap=self.softcap or 0.0,
            sinks=writer.address(self.sinks), slopes=writer.address(self.alibi_slopes),
            distance_bias=writer.address(self.distance_bias),
            distances=0 if self.distance_bias is None else self.distance_bias.shape[1],
            made=_HEADS_MADE[self.made], norms_values=self.norms_values,
            query_growth=growth.factor, growth_period=growth.period, growth_offset=growth.offset,
        )  # fmt: skip

    def _project(self, x: Tensor | PendingNorm) -> tuple[Unfinished, Tensor | None]:
        """Return the heads as the rotation reads them, and the gate of the layer if it has one."""
        if not self.gate_size and not self.before_rotation:
            return unfinished(self.qkv, x), None
        qkv, gate = self.qkv(normed(x)), None
        if self.gate_size:
            gate, qkv = qkv[:, : self.gate_size], qkv[:, self.gate_size :]
        for change in self.before_rotation:
            qkv = change(qkv)
        return qkv, gate
