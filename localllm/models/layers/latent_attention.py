"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434). Only one short vector per token is cached; keys and
values of all heads are projections of it.

The projections are moved to the other side of attention. Each query is projected into the latent space, instead of
every key into the query's space, and values are projected after the sum over keys, instead of before. All heads then
attend to one key, the rotated part followed by the latent, whose value is the latent itself: K and V are one cache
(`LayerKV.values_are_keys`). It takes (latent + rotated) numbers per token, 576 in DeepSeek-V2-Lite, where 16 heads of
keys and values would take 5120. For long prompts this is more arithmetic than expanded heads, 1088 products per query,
key and head instead of 320; while decoding it reads that much less memory.
An indexer (DeepSeek-V3.2, arXiv:2512.02556) keeps one more short key per token, and chooses by it the keys that each
query of a long context attends to.
Does not know: which request owns which block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from localllm.kernels.cpu.attention import cache_fields, reads_cache
from localllm.kernels.cpu.native.structures import HeadsMade, NativeAttention
from localllm.kernels.indexer import (
    DeviceQueries,
    attend_on_device,
    attend_to_chosen,
    choose_keys,
    choose_on_device,
)
from localllm.kernels.launch import launch_options, runs_triton
from localllm.kernels.layer_cache import LayerKV
from localllm.kernels.linear import linear
from localllm.kernels.paged_attention import paged_attention
from localllm.kernels.rotary_store_kv import rotary_store_kv
from localllm.models.layers.attention import AttentionStep
from localllm.models.layers.group import Projection
from localllm.models.layers.linear import Linear
from localllm.models.layers.native_writer import Buffer, NotSupportedNatively, Writer
from localllm.models.layers.norm import LayerNorm, RMSNorm
from localllm.models.spec.latent import LatentSpec, heads_at_once
from localllm.models.spec.model_spec import QueryGrowth

HEADS_OF_A_PART = 8
"""Most query heads that one thread of a CPU attends from at a time; their queries and sums stay in its cache."""


class Indexer:
    """The part of a layer that chooses keys."""

    __slots__ = ("key", "key_norm", "query", "topk", "weights")

    def __init__(self, query: Linear, key: Linear, key_norm: LayerNorm, weights: Linear, topk: int) -> None:
        self.query = query  # of all heads, from the query's latent; each head's rotated dimensions come first
        self.key, self.key_norm = key, key_norm
        self.weights = weights  # of each head
        self.topk = topk

    def __call__(self, x: Tensor, q_latent: Tensor, kv: LayerKV, step: AttentionStep) -> None:
        """Write the index keys of x [T, hidden], and choose keys for the rows of the step that need it."""
        assert kv.index_keys is not None, "such a layer keeps index keys"
        heads = torch.cat((self.query(q_latent), self.key_norm(self.key(x))), dim=1)
        cache = LayerKV(kv.index_keys, kv.index_keys)
        q = rotary_store_kv(heads, cache, step.slot_mapping, step.rotation, all_valid=step.all_slots_valid)
        if step.sparse is not None:
            factor = (q.shape[1] * q.shape[2]) ** -0.5
            weights = self.weights(x).float().mul_(factor)
            queries, choice, first_key = step.sparse
            if isinstance(queries, DeviceQueries):
                choice.positions = choose_on_device(q, weights, kv.index_keys, queries, self.topk)
            else:
                choice.positions = choose_keys(q, weights, kv.index_keys, queries, self.topk, first_key)


class LatentAttention:
    __slots__ = ("down", "from_latent", "indexer", "kv_norm", "out", "q_norm", "q_up", "scale", "sizes", "to_latent")

    def __init__(
        self,
        sizes: LatentSpec,
        down: Linear,
        kv_norm: RMSNorm,
        to_latent: Tensor,
        from_latent: Tensor,
        out: Projection,
        scale: float,
        *,
        q_norm: RMSNorm | None = None,
        q_up: Linear | None = None,
        indexer: Indexer | None = None,
    ) -> None:
        self.sizes, self.indexer = sizes, indexer
        self.down = down  # queries or their latents, then the key's rotated dimensions, then its latent
        self.q_norm, self.q_up = q_norm, q_up  # expand a query's latent; each head's rotated dimensions come first;
        # behind the queries come the gates of all heads' values, if there are any
        self.kv_norm = kv_norm
        self.to_latent = to_latent  # [heads, latent, nope]
        self.from_latent = from_latent  # [heads, value, latent]
        self.out = out
        self.scale = scale

    def __call__(self, x: Tensor, kv: LayerKV, step: AttentionStep) -> Tensor:
        """Map x [T, hidden] to [T, hidden]; writes the step's latents into the cache."""
        rope, num_heads = self.sizes.rope_size, len(self.to_latent)
        projected = self.down(x)
        q, key = projected.split([projected.shape[1] - self.sizes.cached_size, self.sizes.cached_size], dim=1)
        gates = None
        if self.q_up is not None and self.q_norm is not None:
            q_latent = self.q_norm(q)
            if self.indexer is not None:
                self.indexer(x, q_latent, kv, step)
            if self.sizes.gated:
                queries = num_heads * (rope + self.sizes.nope_size)
                q, gates = self.q_up(torch.cat((q_latent, q), dim=1)).tensor_split([queries], dim=1)
            else:
                q = self.q_up(q_latent)
        q = q.unflatten(1, (num_heads, -1))
        heads = x.new_empty((len(x), num_heads + 1, self.sizes.cached_size))  # the queries of each head, then the key
        heads[:, :-1, :rope] = q[:, :, :rope]
        heads[:, :-1, rope:] = _each_head(q[:, :, rope:], self.to_latent)
        heads[:, -1, :rope] = key[:, :rope]
        heads[:, -1, rope:] = self.kv_norm(key[:, rope:])
        del projected, key  # as large as the output; free them first
        q = rotary_store_kv(heads.flatten(1), kv, step.slot_mapping, step.rotation, all_valid=step.all_slots_valid)
        del heads
        if step.query_scale is not None:
            q.mul_(step.query_scale)
        if step.sparse is not None and isinstance(step.sparse.queries, DeviceQueries):
            chosen = step.sparse.choice.positions
            assert isinstance(chosen, Tensor), "all queries have been chosen for at once"
            attended = attend_on_device(q, kv, step.sparse.queries, chosen, self.scale, rope)
        else:
            attended = self._attend(q, kv, step).view(len(x), num_heads, -1)[:, :, rope:]
        values = _each_head(attended, self.from_latent).flatten(1)
        if gates is not None:
            values = (values.float() * gates.float().sigmoid()).to(values.dtype)
        return self.out(values)

    def write(self, writer: Writer, kind: Any, kv: LayerKV, norm: Any) -> None:
        """Write the operations up to the last projection; the result is in the writer's buffer `attended`. The query
        heads are split into parts of equal size, which threads take."""
        if self.indexer is not None:
            raise NotSupportedNatively("an indexer")
        if self.sizes.gated:
            raise NotSupportedNatively("gates of latent attention")
        if not reads_cache(kv):
            raise NotSupportedNatively(f"a KV cache in {str(kv.k.dtype).removeprefix('torch.')}")
        sizes, heads = self.sizes, len(self.to_latent)
        rope, width = sizes.rope_size, sizes.cached_size
        down, queries = writer.others["latents"], writer.others["latents"]
        writer.linear(self.down, writer.stream, down, norm=norm)
        key = self.down.weight.shape[0] - width
        if self.q_up is not None:
            queries = writer.others["latent_queries"]
            writer.linear(self.q_up, down, queries, norm=self.q_norm)
        writer.each_head(
            self.to_latent, queries, writer.qkv, copied=rope, x_head=rope + sizes.nope_size, y_head=width,
        )  # fmt: skip
        writer.qkv.widen((heads + 1) * width)
        writer.copy(down, key, writer.qkv, heads * width, rope)
        writer.copy(down, key + rope, writer.qkv, heads * width + rope, sizes.latent_size, norm=self.kv_norm)
        table = writer.rope_table(kind)
        growth = writer.spec.growth_of(rotated=table is not None) or QueryGrowth(0.0, period=1)
        parts = heads // heads_at_once(heads, HEADS_OF_A_PART)
        fields = cache_fields(kv) | {"kv_heads": parts}
        description = NativeAttention(
            **fields, heads=heads, angles=writer.address(table), rotary_dim=0 if table is None else table.shape[1],
            group=writer.group, scale=self.scale, made=HeadsMade.LATENT, query_growth=growth.factor,
            growth_period=growth.period, growth_offset=growth.offset,
        )  # fmt: skip
        writer.attend(description)

    def write_out(self, writer: Writer, target: Buffer, factor: float = 1.0) -> None:
        """Write the values of each head and the last projection: added to the stream, or written to another buffer."""
        values = writer.others["latent_values"]
        writer.each_head(
            self.from_latent, writer.attended, values, source_offset=self.sizes.rope_size,
            x_head=self.sizes.cached_size, y_head=self.sizes.value_size,
        )  # fmt: skip
        writer.linear(self.out, values, target, factor=factor)

    def _attend(self, q: Tensor, kv: LayerKV, step: AttentionStep) -> Tensor:
        parts = q.split(heads_at_once(q.shape[1]), dim=1) if runs_triton(q, "attention") else [q]
        attended = [
            paged_attention(part, kv.k, kv.v, step.plan, scale=self.scale, k_scale=kv.k_scale, v_scale=kv.v_scale)
            for part in parts
        ]
        out = attended[0] if len(attended) == 1 else torch.cat(attended, dim=1)
        if step.sparse is not None:
            queries, choice, _ = step.sparse
            assert not isinstance(queries, DeviceQueries), "kernels compute such queries"
            assert isinstance(choice.positions, list), "each row has been chosen for"
            attend_to_chosen(q, kv, queries, choice.positions, self.scale, out)
        return out


def _each_head(x: Tensor, weights: Tensor) -> Tensor:
    """Multiply each head by its matrix: x [T, heads, K], weights [heads, N, K] -> [T, heads, N]."""
    if launch_options().deterministic and runs_triton(
        x, "products"
    ):  # the sums of a batched product depend on the number of rows
        return torch.stack([linear(x[:, head].contiguous(), weight) for head, weight in enumerate(weights)], dim=1)
    return torch.bmm(x.transpose(0, 1), weights.transpose(1, 2)).transpose(0, 1)
