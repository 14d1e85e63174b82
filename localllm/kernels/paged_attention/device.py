"""Plans and launches the kernels of paged attention.

The host decides only what is fixed while serving or follows from the batch's size: launch settings, grids, buffers.
Lengths are read on the device, so a step can be recorded as a CUDA graph and replayed with other lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from localllm.kernels.launch import (
    INTERPRETED,
    TensorDescriptor,
    cdiv,
    early_launch,
    launch_options,
    next_power_of_2,
    runs_triton,
    uses,
)
from localllm.kernels.layer_cache import LayerKV
from localllm.kernels.paged_attention.kernels import decode_kernel, plan_kernel, prefill_kernel, reduce_kernel
from localllm.kernels.paged_attention.newest import RawHeads
from localllm.kernels.quantize import as_bytes
from localllm.kernels.tuned import settings_for

MIN_SPLIT_TOKENS = 256  # shorter parts cost more in the merge than they save
PROGRAMS_PER_PROCESSOR = 4  # of the decode kernel: enough loads in flight to keep memory busy
HAS_WGMMA = (90, 100, 103)  # matrix units that read shared memory, 64 rows at a time
MATRIX_D = 256  # wider heads (the latents of MLA, padded to 1024) fill registers with few rows, memory with few keys
DECODE_ROWS = 64  # of a score tile of the decode kernel
MERGED_BY_ONE = 1024  # numbers of a part, at most: with more, one program a head merges the parts sooner
MERGED_AT_ONCE = 32  # numbers a thread: few enough for the registers that the keys' loop needs anyway
REDUCED_AT_ONCE = 16  # parts that a program of `reduce_kernel` merges at a time
SPLIT_ROWS = 256  # decode rows that are split at once
MUCH_SHARED_MEMORY = (80, 90, 100, 103)  # 163 KiB and more for one program; others have 99


class AttentionLaunch(NamedTuple):
    """Launch settings of one kernel."""

    block_m: int  # rows of a score tile: query tokens times query heads of one key head
    tile: int  # keys per tile
    num_warps: int
    num_stages: int
    tma: bool  # load whole tiles by the tensor memory accelerator; a tile must then be inside one block


class KVReads(NamedTuple):
    """The cache of a KV group and what its layers read of it; fixed while serving."""

    num_heads: int
    cache_shape: tuple[int, ...]  # of the keys
    cache_dtype: torch.dtype  # of the keys; uint8: two numbers of 4 bits
    window: int | None  # which tokens a query sees, as in kernels/kv_format.py; None: all previous ones
    value_dtype: torch.dtype | None = None  # None: as the keys'

    @property
    def bits(self) -> int:
        """Return the bits of a number of the keys."""
        return 4 if self.cache_dtype == torch.uint8 else self.cache_dtype.itemsize * 8

    @property
    def least_bits(self) -> int:
        """Return the bits of a number of the keys or the values, whichever has fewer."""
        return 4 if self.value_dtype == torch.uint8 else self.bits

    @property
    def head_dim(self) -> int:
        return self.cache_shape[3] * (2 if self.bits == 4 else 1)


class Splitting(NamedTuple):
    """The rules by which the work of the decode kernel is split into items."""

    tile: int  # keys, a power of two
    window: int  # as in kernels/kv_format.py; 0: none
    min_tiles: int  # of an item
    queries: int  # of a row
    spare_items: int  # more than rows
    most_parts: int  # of a row
    counters: int  # of a row: key heads times tiles of queries

    def max_items(self, num_rows: int) -> int:
        return min(num_rows + self.spare_items, num_rows * self.most_parts)

    @property
    def tile_bits(self) -> int:
        return self.tile.bit_length() - 1


class WorkList(NamedTuple):
    """The decode kernel's work. N: most items."""

    splitting: Splitting
    items: Tensor  # [N, 3] int32  row (-1: none), first tile, end tile
    split_starts: Tensor  # [num_decodes + 1] int32  each row's first item
    counters: Tensor  # [num_decodes * splitting.counters] int32  written parts; zero before and after each layer


class WorkLists(NamedTuple):
    """Work lists of one step, to be filled on the device."""

    splittings: tuple[Splitting, ...]
    buffer: Tensor  # [splittings, size] int32: items, split_starts and counters, each aligned to 4 numbers
    rules: Tensor  # [splittings, 7] int32: `splittings` with tile_bits in place of tile, on the device
    num_decodes: int

    @staticmethod
    def empty(splittings: tuple[Splitting, ...], num_decodes: int, device: torch.device) -> WorkLists:
        size = max(sum(WorkLists._sizes(splits, num_decodes)) for splits in splittings)
        buffer = torch.empty((len(splittings), size), dtype=torch.int32, device=device)
        return WorkLists(splittings, buffer, _rules_on(splittings, device), num_decodes)

    @staticmethod
    def _sizes(splits: Splitting, num_decodes: int) -> tuple[int, int, int]:
        numbers = splits.max_items(num_decodes) * 3, num_decodes + 1, num_decodes * splits.counters
        items, starts, counters = (cdiv(count, 4) * 4 for count in numbers)
        return items, starts, counters

    def of(self, splits: Splitting) -> WorkList | None:
        """Return the list of this splitting; None if it is not one of these."""
        if splits not in self.splittings:
            return None
        sizes = self._sizes(splits, self.num_decodes)
        items, starts, counters = self.buffer[self.splittings.index(splits)][: sum(sizes)].split(sizes)
        count = splits.max_items(self.num_decodes)
        return WorkList(
            splits, items[: count * 3].view(count, 3), starts[: self.num_decodes + 1],
            counters[: self.num_decodes * splits.counters],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """The decode kernel's work list, filled on the device, and buffers for its partial results. N: most items."""

    items: Tensor  # [N, 3] int32  row (-1: none), first tile, end tile
    split_starts: Tensor  # [num_decodes + 1] int32  each row's first item
    counters: Tensor  # [num_decodes * kv_heads * query tiles] int32  written parts; zero before and after each layer
    partial_out: Tensor  # [N, queries, num_heads, head_dim] fp32
    partial_max: Tensor  # [N, queries, num_heads] fp32
    partial_sum: Tensor  # [N, queries, num_heads] fp32


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """The plan that all layers with the same window share in one step.
    Rows before num_decodes have `decode_queries` query tokens each."""

    block_table: Tensor  # [B, max_blocks] int32
    context_lens: Tensor  # [B] int32; 0: a padding row, whose output is zero
    cu_seqlens_q: Tensor  # [B + 1] int32
    num_decodes: int
    window: int  # as in kernels/kv_format.py; 0: none
    decode: AttentionLaunch
    prefill: AttentionLaunch
    splits: SplitPlan | None  # None: no row uses the decode kernel
    decode_queries: int
    positions: Tensor | None  # [T] int64; None: one query per decode row, at the context's end
    first_key: int = 0  # keys before this position are not read
    key_limits: Tensor | None = None  # [T] int32 the first key that a query does not see; None: the one behind its own

    @property
    def num_decode_tokens(self) -> int:
        return self.num_decodes * self.decode_queries


def plan_on_device(
    block_table: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    num_decodes: int,
    reads: KVReads,
    decode_queries: int,
    positions: Tensor | None,
    work: WorkLists | None,
    first_key: int = 0,
    key_limits: Tensor | None = None,
) -> DevicePlan:
    """Make the plan. If there are decode rows to split, take their work list from `work`, or launch the plan kernel.

    In deterministic mode there are none: every row uses the prefill kernel, whose sums do not depend on other rows.
    """
    num_kv_heads, _, block_size, _ = reads.cache_shape
    device = block_table.device
    key = (_arch(device), reads.head_dim, reads.bits, reads.num_heads // num_kv_heads, block_size)
    prefill = settings_for("prefill_attention", key, prefill_launch)
    num_decodes = num_decodes if splits_decodes() else 0
    splits = None
    if num_decodes:
        how = splitting(reads, decode_queries, block_table.shape[1], device)
        held = work.of(how) if work is not None else None
        splits = _plan_splits(reads, held or filled_list(how, context_lens, num_decodes))
    return DevicePlan(
        block_table, context_lens, cu_seqlens_q, num_decodes, reads.window or 0,
        _decode_launch(reads, decode_queries, device), prefill, splits, decode_queries, positions, first_key,
        key_limits,
    )  # fmt: skip


def splits_decodes() -> bool:
    """Return whether rows of one token use the decode kernel; otherwise all rows use the prefill kernel."""
    return not launch_options().deterministic and uses("decode kernel")


def takes_raw_heads(plan: DevicePlan, heads: RawHeads, kv: LayerKV) -> bool:
    """Return whether the decode kernel rotates and stores these heads: in a step where every row is a decode row of one
    token, and each token has a key and a value."""
    num_kv_heads, head_dim = kv.k.shape[0], kv.head_dim
    num_tokens, width = heads.qkv.shape
    norm_rows = 0 if heads.norm_weight is None else len(heads.norm_weight)
    return (
        plan.splits is not None
        and plan.decode_queries == 1
        and num_tokens == plan.num_decodes
        and uses("decode rotation")
        and runs_triton(heads.qkv, "rotation")
        and not kv.values_are_keys
        and kv.v.dtype != torch.uint8
        and head_dim <= MATRIX_D
        and not 0 < _arch(heads.qkv.device) < 80  # without matrix units registers hold nothing more
        and norm_rows <= width // head_dim - num_kv_heads  # values are not normed
    )


def attend_on_device(
    heads: Tensor | RawHeads,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: DevicePlan,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> Tensor:
    """Compute paged_attention: decode rows by the split kernel, the others by the prefill kernel."""
    raw = heads if isinstance(heads, RawHeads) else None
    if isinstance(heads, RawHeads):
        num_kv_heads, _, _, head_dim = k_cache.shape
        q = heads.qkv.unflatten(1, (-1, head_dim))[:, : -2 * num_kv_heads]
    else:
        q = heads
    num_tokens, num_heads, head_dim = q.shape
    assert q.stride(2) == 1, "a head's elements must be contiguous"
    assert k_cache.is_contiguous()
    assert v_cache.is_contiguous()
    assert k_cache.itemsize > 1 or (k_scale is not None and v_scale is not None), "a cache in 8 bits has scales"
    if v_cache.dtype == torch.uint8:  # bytes of two numbers are loaded through pointers
        plan = replace(plan, decode=plan.decode._replace(tma=False), prefill=plan.prefill._replace(tma=False))
    out = torch.empty((num_tokens, num_heads * head_dim), dtype=q.dtype, device=q.device)
    call = _Call(q, out, k_cache, v_cache, plan, scale, softcap or 0.0, sinks, alibi_slopes, k_scale, v_scale, raw)
    if plan.splits is not None:
        _launch_decode(call, plan.splits)
    if num_tokens > plan.num_decode_tokens:
        _launch_prefill(call)
    return out


# Planning


def splitting(reads: KVReads, queries: int, max_blocks: int, device: torch.device) -> Splitting:
    """Return how rows of `queries` queries are split. max_blocks: of a block table."""
    (num_kv_heads, _, block_size, _), head_dim = reads.cache_shape, reads.head_dim
    group_size, window = reads.num_heads // num_kv_heads, reads.window or 0
    at_once = tile_queries(group_size, head_dim, queries)
    key = (_arch(device), head_dim, reads.bits, group_size * at_once, num_kv_heads)
    launch, tile = settings_for("decode_splits", key, split_launch), _decode_launch(reads, queries, device).tile
    min_tiles = cdiv(launch.min_tokens, tile)
    # Both bounds hold for any lengths: parts have equal length, and no part is shorter than min_tiles.
    spare_items = cdiv(_num_processors(device) * launch.programs, num_kv_heads)
    most_tokens = max_blocks * block_size
    seen_tokens = min(most_tokens, abs(window) + queries - 1 + tile) if window else most_tokens
    most_parts = max(1, cdiv(cdiv(seen_tokens, tile), min_tiles))
    return Splitting(tile, window, min_tiles, queries, spare_items, most_parts, num_kv_heads * cdiv(queries, at_once))


def _decode_launch(reads: KVReads, queries: int, device: torch.device) -> AttentionLaunch:
    (num_kv_heads, _, block_size, _), head_dim = reads.cache_shape, reads.head_dim
    group_size = reads.num_heads // num_kv_heads
    rows = group_size * tile_queries(group_size, head_dim, queries)
    key = (_arch(device), head_dim, reads.bits, rows, block_size)
    return settings_for("decode_attention", key, decode_launch)


def _plan_splits(reads: KVReads, work: WorkList) -> SplitPlan:
    head_dim, device = reads.head_dim, work.items.device
    parts = (len(work.items), work.splitting.queries, reads.num_heads)
    return SplitPlan(
        items=work.items,
        split_starts=work.split_starts,
        counters=work.counters,
        partial_out=torch.empty((*parts, head_dim), dtype=torch.float32, device=device),
        partial_max=torch.empty(parts, dtype=torch.float32, device=device),
        partial_sum=torch.empty(parts, dtype=torch.float32, device=device),
    )


@cache
def _rules_on(splittings: tuple[Splitting, ...], device: torch.device) -> Tensor:
    """Return the rules as a tensor. It is cached, so that a step that is recorded as a graph copies nothing."""
    rules = [(splits.tile_bits, *splits[1:]) for splits in splittings]
    return torch.tensor(rules, dtype=torch.int32, device=device)


def filled_list(splits: Splitting, context_lens: Tensor, num_decodes: int) -> WorkList:
    """Return a work list that a kernel of its own fills."""
    device = context_lens.device
    work = WorkLists.empty((splits,), num_decodes, device).of(splits)
    assert work is not None
    plan_kernel[(1,)](
        work.items, work.split_starts, work.counters, context_lens, num_decodes, len(work.items), splits.spare_items,
        len(work.counters), TILE_BITS=splits.tile_bits, WINDOW=splits.window, MIN_TILES=splits.min_tiles,
        ROWS=SPLIT_ROWS, QUERIES=splits.queries, num_warps=4, **early_launch(device),
    )  # fmt: skip
    return work


def tile_queries(group_size: int, head_dim: int, queries: int) -> int:
    """Return how many of a row's queries one program takes: all, unless their heads are more rows than registers hold
    the sums of."""
    most_rows = DECODE_ROWS if _block_d(head_dim) <= MATRIX_D else 16
    return min(queries, max(1, most_rows // group_size))


def merge_tile(rows: int, head_dim: int, num_warps: int) -> tuple[int, int]:
    """Return (rows, parts) that a program of the decode kernel merges at a time; no parts if `reduce_kernel` does.

    rows: query heads of a key head, times the queries that a program takes.
    """
    merge_rows = next_power_of_2(rows)
    numbers = merge_rows * _block_d(head_dim)
    return merge_rows, MERGED_AT_ONCE * 32 * num_warps // numbers if numbers <= MERGED_BY_ONE else 0


def decode_launch(arch: int, head_dim: int, bits: int, rows: int, block_size: int) -> AttentionLaunch:
    """Return settings. arch: compute capability as 90; 0 in the interpreter, where small tiles let small tests have
    several. rows: query heads of a key head, times the queries that a program takes."""
    block_m, block_d = max(16, next_power_of_2(rows)), _block_d(head_dim)
    if arch == 0:
        return AttentionLaunch(block_m, 16, 1, 1, block_size % 16 == 0)
    if bits == 32 or arch < 80:
        return AttentionLaunch(block_m, 16, 4, 1, False)  # no tensor cores: fp32, or Turing, unknown to Triton
    if block_d > MATRIX_D:
        return AttentionLaunch(block_m, 16, 8, 3, False)
    # The block table's load is pipelined too and takes two stages: 5 stages hold two tiles, 3 hold one. Where shared
    # memory is small, tiles are smaller, so that each of two programs has two of them.
    is_small = arch not in MUCH_SHARED_MEMORY and block_d > 64
    tma = _has_tma(arch, head_dim, bits)
    if is_small and block_d > 128:
        return AttentionLaunch(block_m, 16, 8, 5, tma and block_size % 16 == 0)
    tile = 32 if is_small or block_d > 128 or block_m > 16 else 64
    return AttentionLaunch(block_m, tile, 4, 5, tma and block_size % tile == 0)


class SplitLaunch(NamedTuple):
    """The number of parts into which the decode kernel splits a row's context."""

    min_tokens: int  # of a part
    programs: int  # for each processor


def split_launch(arch: int, head_dim: int, bits: int, rows: int, num_kv_heads: int) -> SplitLaunch:
    """Return settings. arch, rows: as for decode_launch."""
    return SplitLaunch(MIN_SPLIT_TOKENS if arch else 32, PROGRAMS_PER_PROCESSOR)


def prefill_launch(arch: int, head_dim: int, bits: int, group_size: int, block_size: int) -> AttentionLaunch:
    """Return settings. arch: as for decode_launch."""
    min_rows, block_d = next_power_of_2(group_size), _block_d(head_dim)
    if arch == 0:
        return AttentionLaunch(max(32, min_rows), 16, 1, 1, block_size % 16 == 0)
    if bits == 32 or arch < 80:
        return AttentionLaunch(max(16, min_rows), 16, 4, 1, False)
    if block_d > 2 * MATRIX_D:
        return AttentionLaunch(max(16, min_rows), 16, 8, 2, False)
    if block_d > MATRIX_D:  # 64 rows of sums would not fit into the registers
        tile = 32 if arch in MUCH_SHARED_MEMORY and bits == 16 else 16
        return AttentionLaunch(max(32, min_rows), tile, 8, 2, False)
    block_m = max(128 if block_d <= 128 else 64, min_rows)
    tile = 64 if block_d <= 128 and arch in HAS_WGMMA else 32
    # Tiles are requested at the end of a turn. 5 stages request the tile after the next, which then has a whole turn to
    # arrive. Heads of 64 leave registers for two programs, which wait in turn. 8 bits leave too few for 5 stages.
    stages = 2 if block_d <= 64 or bits == 8 else 5
    if block_d > 128 and arch not in MUCH_SHARED_MEMORY:
        stages = 1
    return AttentionLaunch(block_m, tile, 8, stages, _has_tma(arch, head_dim, bits) and block_size % tile == 0)


def _block_d(head_dim: int) -> int:
    """Return head_dim rounded up to a power of two, at least 16, as matrix units require."""
    return max(16, next_power_of_2(head_dim))


def _has_tma(arch: int, head_dim: int, bits: int) -> bool:
    """Return whether TMA can load the cache: from Hopper on, if rows are multiples of 16 bytes."""
    return arch >= 90 and head_dim * bits % 128 == 0


@cache
def _arch(device: torch.device) -> int:
    """Return the compute capability as 90; 0 in the interpreter; 80, the most basic, for other vendors' GPUs."""
    if INTERPRETED:
        return 0
    if torch.version.hip is not None:
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


@cache
def _num_processors(device: torch.device) -> int:
    return 4 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


# Launching


class _Call(NamedTuple):
    """The arguments of one layer's attention."""

    q: Tensor
    out: Tensor
    k_cache: Tensor
    v_cache: Tensor
    plan: DevicePlan
    scale: float
    softcap: float
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    raw: RawHeads | None  # q is a view of the queries in its qkv

    @property
    def format(self) -> str:
        """Return how the kernels read the cache: "plain"; "fp8", or "fp8_bits" if the GPU cannot convert; "int8", or
        "int8_ptx" for the same in NVIDIA's assembler; "k8v4" and "k8v4_ptx" likewise with values of 4 bits; "int4"."""
        dtype, arch = self.k_cache.dtype, _arch(self.q.device)
        if dtype == torch.float8_e4m3fn:
            return "fp8" if arch >= 89 else "fp8_bits"
        if dtype == torch.int8:
            name = "int8" if self.v_cache.dtype == torch.int8 else "k8v4"
            return name if arch == 0 or torch.version.hip is not None else f"{name}_ptx"
        return "int4" if dtype == torch.uint8 else "plain"

    def cache(self, tensor: Tensor, launch: AttentionLaunch) -> Any:
        """Return the cache as a kernel argument: a pointer, or a descriptor of tiles of [tile, head_dim]."""
        if self.format == "fp8_bits":
            tensor = tensor.view(torch.uint8)
        if not launch.tma:
            return tensor
        head_dim = tensor.shape[-1]
        rows = tensor.numel() // head_dim
        return TensorDescriptor(tensor, [rows, head_dim], [head_dim, 1], [launch.tile, _block_d(head_dim)])

    def constants(self, launch: AttentionLaunch) -> dict[str, Any]:
        """Return the keyword arguments of both kernels."""
        (num_kv_heads, _, block_size, _), head_dim = self.k_cache.shape, self.q.shape[2]
        return {
            "GROUP_SIZE": self.q.shape[1] // num_kv_heads,
            "HEAD_DIM": head_dim,
            "BLOCK_D": _block_d(head_dim),
            "BLOCK_SIZE": block_size,
            "BLOCK_M": launch.block_m,
            "TILE": launch.tile,
            "WINDOW": self.plan.window,
            "SOFTCAP": self.softcap,
            "FORMAT": self.format,
            "TMA": launch.tma,
            "STAGES": launch.num_stages,
            "FIRST_KEY": self.plan.first_key,
            "num_warps": launch.num_warps,
            "num_stages": launch.num_stages,
            **early_launch(self.q.device),
        }


_STORED: dict[str, Any] = {
    "slots": None, "angles": None, "norms": None, "eps": 0.0, "k_store": None, "v_store": None, "ROTARY_DIM": 0,
    "INTERLEAVED": False,
}  # fmt: skip
"""Arguments of the decode kernel for queries that are rotated, and keys and values that are in the cache."""


def _launch_decode(call: _Call, splits: SplitPlan) -> None:
    plan, launch = call.plan, call.plan.decode
    num_kv_heads, num_blocks = call.k_cache.shape[:2]
    num_tokens, queries = plan.num_decode_tokens, plan.decode_queries
    group_size, head_dim = call.q.shape[1] // num_kv_heads, call.q.shape[2]
    at_once = tile_queries(group_size, head_dim, queries)
    merge_rows, merge_parts = merge_tile(group_size * at_once, head_dim, launch.num_warps)
    merge_parts = merge_parts if uses("decode merge") else 0
    grid = (len(splits.items), num_kv_heads, cdiv(queries, at_once))
    arguments = (
        call.out, splits.partial_out, splits.partial_max, splits.partial_sum, call.q,
        call.cache(call.k_cache, launch), call.cache(call.v_cache, launch), call.k_scale, call.v_scale,
        plan.block_table, plan.context_lens, splits.items, splits.split_starts, splits.counters,
        call.sinks, call.alibi_slopes, call.scale,
        num_blocks, plan.block_table.stride(0), call.q.stride(0), call.q.stride(1), call.out.stride(0),
    )  # fmt: skip
    named = {
        "QUERIES": queries, "TILE_QUERIES": at_once, "MERGE_ROWS": merge_rows, "MERGE_PARTS": merge_parts,
        **call.constants(launch),
    }  # fmt: skip
    if call.raw is None:
        decode_kernel[grid](*arguments, positions=plan.positions, **_STORED, **named)
    else:
        _launch_rotating_decode(call, call.raw, grid, arguments, named)
    if merge_parts or len(splits.items) == plan.num_decodes:
        return  # the decode kernel has merged the parts, or no row can have several
    reduce_kernel[(num_tokens, call.q.shape[1])](
        call.out, splits.partial_out, splits.partial_max, splits.partial_sum, splits.split_starts, call.out.stride(0),
        queries, HEAD_DIM=head_dim, BLOCK_D=_block_d(head_dim), PARTS=REDUCED_AT_ONCE, num_warps=4,
        **early_launch(call.q.device),
    )  # fmt: skip


def _launch_rotating_decode(
    call: _Call, raw: RawHeads, grid: tuple[int, ...], arguments: tuple[Any, ...], named: dict[str, Any]
) -> None:
    """Launch the decode kernel for raw heads. A function of its own, so that its errors can be told from others."""
    table, positions, interleaved = (None, None, False) if raw.rotation is None else raw.rotation[:3]
    is_wide = call.format == "plain"
    decode_kernel[grid](
        *arguments, positions=positions, slots=raw.slot_mapping, angles=table, norms=raw.norm_weight, eps=raw.norm_eps,
        k_store=call.k_cache if is_wide else as_bytes(call.k_cache),
        v_store=call.v_cache if is_wide else as_bytes(call.v_cache),
        ROTARY_DIM=0 if table is None else table.shape[1], INTERLEAVED=interleaved, **named,
    )  # fmt: skip


def _launch_prefill(call: _Call) -> None:
    plan, launch = call.plan, call.plan.prefill
    num_kv_heads, num_blocks = call.k_cache.shape[:2]
    num_rows, num_tokens = len(plan.context_lens) - plan.num_decodes, len(call.q)
    block_q = launch.block_m // (call.q.shape[1] // num_kv_heads)
    positions = None if plan.splits is not None else plan.positions  # rows with drafts are here in deterministic mode
    # Enough blocks for any lengths, and one more request: the padding tokens after the last row.
    num_blocks_q = (num_tokens - plan.num_decode_tokens) // block_q + num_rows + 1
    prefill_kernel[(num_blocks_q, num_kv_heads)](
        call.out, call.q, call.cache(call.k_cache, launch), call.cache(call.v_cache, launch),
        call.k_scale, call.v_scale, plan.block_table, plan.context_lens, plan.cu_seqlens_q, positions,
        plan.key_limits, call.sinks, call.alibi_slopes, call.scale, num_tokens, plan.num_decodes, num_rows, num_blocks,
        plan.block_table.stride(0), call.q.stride(0), call.q.stride(1), call.out.stride(0),
        ONE_LOOP=launch_options().deterministic, **call.constants(launch),
    )  # fmt: skip
