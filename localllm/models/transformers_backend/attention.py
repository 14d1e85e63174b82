"""The attention of a transformers module, replaced by localllm's over the paged cache.

`transformers` allows to replace a model's attention by a function of (module, q, k, v, ...). This one writes k and v
into the layer's paged cache and attends over it, as the native decoder does. Values narrower than keys are padded with
zeros. The step's inputs are attached to the attention modules, where the function finds them.
Layers that attend to blocks of keys which an indexer chooses (MiniMax M3) run the indexer's own code row by row over
its paged keys; then each key head gathers its blocks. So do single keys, and the compressed entries of DeepSeek V4,
which are made anew in each step from what is kept of each token. Pools of keys (Qwen4-Exp) are chosen by the code here.
Where scores depend on what a query makes of each distance (Inkling), its own rows are computed in PyTorch too.
Unsupported: attention outside that interface, custom masks, biases on scores, windows inside a mask.
Does not know: requests, schedules, recurrent states.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.errors import UnsupportedModel
from localllm.kernels.indexer import ChosenRow, buffer_numbers, chosen_rows
from localllm.kernels.layer_cache import LayerCache, LayerKV, kv_of
from localllm.kernels.paged_attention import AttentionPlan, paged_attention
from localllm.kernels.quantize import dequantize_nibbles
from localllm.kernels.rotary_store_kv import rotary_store_kv
from localllm.models.inputs import ForwardInputs
from localllm.models.layers.attention import plan_step
from localllm.models.spec.model_spec import ModelSpec, layer_window
from localllm.models.transformers_backend.layouts import code_names

NAME = "localllm_paged"  # name of the attention function in transformers' table
_INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # the table, which every module that uses the interface reads by this name


@dataclass(slots=True)
class Step:
    """The inputs of one step, attached to the modules that read them."""

    spec: ModelSpec
    groups: tuple[int, ...]  # per layer the KV group that it reads and writes; -1: none
    inputs: ForwardInputs | None = None
    caches: Sequence[LayerCache | None] = ()  # per layer
    all_slots_valid: bool = False
    plans: dict[tuple[int, int, int | None], AttentionPlan] = field(default_factory=dict)
    """By KV group, query heads, and window."""


def replace_attention(module: Any, step: Step) -> None:
    """Let every attention module call `_attend` with this step. Raises `UnsupportedModel`."""
    from transformers import PreTrainedConfig
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = step.spec.architecture
    attention = [part for part in module.modules() if _INTERFACE in code_names(part)]
    if not attention:
        raise UnsupportedModel(
            f"{name} is not supported: its attention cannot be replaced.",
            "Its code in transformers does not use the attention interface.",
        )
    if any("create_chunked_causal_mask" in code_names(part) for part in module.modules()):
        raise UnsupportedModel(
            f"{name} is not supported.", "It attends in chunks of positions; full attention and windows are supported."
        )
    ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)
    for part in module.modules():
        if isinstance(config := getattr(part, "config", None), PreTrainedConfig):
            config._attn_implementation = NAME
    for part in attention:
        object.__setattr__(part, "localllm_step", step)
        if hasattr(getattr(part, "indexer", None), "compress_ratio"):
            rotary = next(each.rotary_emb for each in module.modules() if hasattr(each, "rotary_emb"))
            _choose_pools_by_rows(part, step, rotary)
        elif hasattr(part, "indexer"):
            _choose_by_rows(part, step)
        if getattr(part, "compressor", None) is not None:
            _compress_by_rows(part, step)
        if "layer_idx" in inspect.signature(part.forward).parameters:
            _note_layer(part)
    _keep_distances([part for part in attention if hasattr(part, "rel_logits_proj")])


class _AnyMask:
    """The mask of an attention module whose indexer reads one: each row's indexer gets its own."""

    dtype = torch.bool

    def __getitem__(self, index: Any) -> _AnyMask:
        return self

    def __and__(self, other: Any) -> _AnyMask:
        return self


class _IndexKeys:
    """Stands in for the cache of transformers in the code of an indexer or a compressor, which hands it what it keeps
    of a row's new tokens."""

    def __init__(self, kv: LayerKV, row: ChosenRow, window: int = 1) -> None:
        """window: tokens that a compressor makes one entry of."""
        self._kv, self._row, self.window = kv, row, window
        self.keys = torch.empty(row.context_len, 0)  # its length is read

    @property
    def layers(self) -> _IndexKeys:
        return self

    def __getitem__(self, layer: int) -> _IndexKeys:
        return self

    def get_seq_length(self) -> int:
        return self._row.context_len

    def update_index(self, keys: Tensor) -> Tensor:
        """Store keys [1, 1, T, D], and return all of the row, [1, 1, context, D] in their type."""
        return self.update_indexer(keys[0])[None]

    def update_indexer(self, keys: Tensor, layer: int = 0) -> Tensor:
        """Store keys [1, T, D], and return all of the row, [1, context, D] in their type."""
        return self._keep(keys, 0)

    def store_compression_weights(self, name: str, values: Tensor, gates: Tensor) -> tuple[Tensor, Tensor, int]:
        """Store values and gates [1, T, D], and return what is stored of all complete windows of the row, and their
        first position. They are compressed anew in each step: what is kept per token survives any sharing of blocks."""
        width, index = values.shape[2], self._kv.index_keys
        assert index is not None, "its layers keep index keys"
        first = 0 if name == "compressor" else index.shape[3] - 2 * width
        kept = self._keep(torch.cat((values, gates), dim=2), first)
        whole = kept[:, : self._row.context_len // self.window * self.window]
        return whole[..., :width], whole[..., width:], 0

    def update_compressor_states(self, name: str, compressed: Tensor) -> Tensor:
        return compressed

    def update_overlap_state(self, *_: Any) -> tuple[None, None]:
        return None, None

    def _keep(self, values: Tensor, first: int) -> Tensor:
        """Write values [1, T, D] to the numbers of the row's new tokens from `first` on; return these numbers
        of all tokens."""
        index, row = self._kv.index_keys, self._row
        assert index is not None, "its layers keep index keys"
        size, end = index.shape[2], first + values.shape[2]
        own = torch.arange(row.context_len, device=index.device)
        slots = row.blocks.index_select(0, own // size) * size + own % size
        stored = index.view(-1, index.shape[3])
        stored[slots[row.context_len - row.num_queries :], first:end] = values[0].to(index.dtype)
        return stored[slots, first:end].to(values.dtype)[None]


def _choose_by_rows(part: Any, step: Step) -> None:
    """Let the indexer of an attention module choose keys for each row of a step, and a layer without one take what the
    layer before it has chosen. A choice is a list of what the indexer's code returns for each row."""

    def keep_choice(topk_indices: list[Tensor], **_: Any) -> None:
        part.localllm_chosen = topk_indices

    _give_mask(part)
    if hasattr(part, "build_attention_mask_from_topk"):
        object.__setattr__(part, "build_attention_mask_from_topk", keep_choice)
    if part.indexer is None:
        return
    forward = part.indexer.forward
    names, num_heads = inspect.signature(forward), getattr(part.indexer, "n_heads", 0) or part.indexer.num_heads

    def by_rows(*positional: Any, **others: Any) -> list[Tensor]:
        given, kv = names.bind(*positional, **others).arguments, _kv_of(step, part.layer_idx)
        chosen = []
        for row in _rows_of(step, part.layer_idx, kv):
            pieces = row.cut(max(1, buffer_numbers(kv.k) // (num_heads * row.context_len)))
            found = [forward(**_of_row(given, piece, kv)) for piece in pieces]
            most = max(each.shape[-1] for each in found)
            chosen.append(torch.cat([F.pad(each, (0, most - each.shape[-1]), value=-1) for each in found], dim=-2))
        return chosen

    object.__setattr__(part.indexer, "forward", by_rows)


def _give_mask(part: Any) -> None:
    """Let an attention module that reads a mask have one."""
    attend, named = part.forward, inspect.signature(part.forward)

    def with_mask(*positional: Any, **others: Any) -> Any:
        given = named.bind(*positional, **others).arguments
        given = {**given, **given.pop("kwargs", {})}
        if given.get("attention_mask") is None:
            given["attention_mask"] = _AnyMask()
        return attend(**given)

    object.__setattr__(part, "forward", with_mask)


def _choose_pools_by_rows(part: Any, step: Step, rotary: Any) -> None:
    """Let the indexer of an attention module (Qwen4-Exp) choose pools of keys for each row of a step.

    The class's code goes through queries one by one, and makes all pools anew for each. rotary: the model's, which maps
    positions to cosines and sines.
    """

    def by_rows(hidden_states: Tensor, *_: Any, **__: Any) -> _AnyMask:
        kv = _kv_of(step, part.layer_idx)
        part.localllm_chosen = [
            _choose_pools(part.indexer, hidden_states[:, row.tokens], _IndexKeys(kv, row), rotary)
            for row in _rows_of(step, part.layer_idx, kv)
        ]
        return _AnyMask()

    _give_mask(part)
    object.__setattr__(part.indexer, "forward", by_rows)


def _choose_pools(indexer: Any, hidden: Tensor, keys: _IndexKeys, rotary: Any) -> Tensor:
    """Return the pools that each of a row's queries sees, [1, queries, chosen + 1]; -1: none. hidden [1, queries, H].

    A pool is `compress_ratio` keys that follow one another. Its key is their mean, normed, and rotated by the position
    of the first. A query sees the complete pools of the largest scores, sum over heads of relu(q . key), and the last,
    incomplete one.
    """
    size, width, context = indexer.compress_ratio, indexer.index_head_dim, keys.get_seq_length()
    rotate = sys.modules[type(indexer).__module__].apply_rotary_pos_emb
    q, new = indexer.index_qk_proj(hidden).split((indexer.index_n_heads * width, width), dim=2)
    kept, count = keys.update_indexer(new), context // size
    pools = kept[:, : count * size].reshape(1, count, size, width).float().mean(2).to(kept.dtype)
    last = torch.arange(context - hidden.shape[1], context, device=hidden.device)
    first = torch.arange(0, count * size, size, device=hidden.device)
    (q_cos, q_sin), (cos, sin) = (rotary(hidden, positions[None]) for positions in (last, first))
    queries = rotate(indexer.q_layernorm(q.unflatten(2, (-1, width))), cos=q_cos, sin=q_sin, unsqueeze_dim=2)[0].float()
    pools = rotate(indexer.k_layernorm(pools)[:, :, None], cos=cos, sin=sin, unsqueeze_dim=2)[0, :, 0].float().t()
    complete, chosen = (last + 1) // size, []
    at_once = max(1, buffer_numbers(q) // (indexer.index_n_heads * max(count, 1)))
    for own, seen in zip(queries.split(at_once), complete.split(at_once), strict=True):
        scores = torch.matmul(own, pools).relu_().sum(1).masked_fill_(first >= seen[:, None] * size, -1.0)
        best = scores.topk(min(indexer.block_topk, count))
        chosen.append(best.indices.masked_fill_(best.values < 0, -1))
    return torch.cat((torch.cat(chosen), complete[:, None]), dim=1)[None]


def _compress_by_rows(part: Any, step: Step) -> None:
    """Let the compressor of an attention module (DeepSeek V4) compress each row of a step; `_attend` finds the entries
    and their biases in the module, and the module's own code goes on with none."""
    forward = part.compressor.forward
    names = inspect.signature(forward)

    def by_rows(*positional: Any, **others: Any) -> tuple[Tensor, None]:
        given, kv = names.bind(*positional, **others).arguments, _kv_of(step, part.layer_idx)
        window, rows = part.compressor.compress_rate, _rows_of(step, part.layer_idx, kv)
        part.localllm_compressed = [forward(**_of_row(given, row, kv, window)) for row in rows]
        hidden = given["hidden_states"]
        return hidden.new_empty(1, 1, 0, kv.head_dim), None

    object.__setattr__(part.compressor, "forward", by_rows)


def _keep_distances(attention: Sequence[Any]) -> None:
    """Let attention modules hand on what their queries make of distances, [1, T, heads, D], and not the biases: they
    count positions from the start of a batch. So does their scaling of queries in full layers, which `_attend` does."""
    for part in attention:
        floor, factor = part.config.log_scaling_n_floor, part.config.log_scaling_alpha
        part.localllm_growth = (None if part.is_sliding else floor, factor)
        object.__setattr__(part.rel_logits_proj, "forward", lambda states, *_: states)
    for part in attention:
        part.config.log_scaling_n_floor = None


def _attend_by_distance(
    q: Tensor, kv: LayerKV, rows: Sequence[ChosenRow], states: Tensor, module: Any, window: int | None, scale: float
) -> Tensor:
    """Return attention to the last `window` tokens, or to all, with a bias for each distance [T, heads * head_dim].
    q [T, heads, head_dim]. states [T, heads, D]: times the module's [D, distances] they are the biases of a query.
    Queries and biases grow with the logarithm of their position, if the module says so."""
    profiles, (floor, factor) = module.rel_logits_proj.proj, module.localllm_growth
    num_kv_heads, block_size = kv.k.shape[0], kv.k.shape[2]
    gathers = [(_tokens_of(kv, head, "k"), _tokens_of(kv, head, "v")) for head in range(num_kv_heads)]
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for row in rows:
        begin = row.context_len - row.num_queries
        numbers = 3 * q.shape[1] * max(row.context_len, profiles.shape[1])  # biases of all, of those near, scores
        at_once = max(1, buffer_numbers(q) // numbers)
        for at in range(begin, row.context_len, at_once):
            last = torch.arange(at, min(at + at_once, row.context_len), device=q.device)
            own = torch.arange(0 if window is None else max(0, at - window + 1), at + len(last), device=q.device)
            slots = row.blocks.index_select(0, own // block_size) * block_size + own % block_size
            tokens = slice(row.first + at - begin, row.first + at - begin + len(last))
            distance = last[:, None] - own
            near = (distance >= 0) & (distance < profiles.shape[1])
            places = distance.clamp(0, profiles.shape[1] - 1)[:, None].expand(-1, q.shape[1], -1)
            biases = (states[tokens] @ profiles).gather(2, places).float().masked_fill_(~near[:, None], 0.0)
            queries = q[tokens].unflatten(1, (num_kv_heads, -1))
            if floor is not None:
                growth = 1.0 + factor * torch.log(((last + 1).float() / floor).clamp_(min=1.0))
                queries = (queries.float() * growth[:, None, None, None]).to(queries.dtype)
                biases *= growth[:, None, None]
            hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
            biases = biases.masked_fill_(hidden[:, None], float("-inf")).unflatten(1, (num_kv_heads, -1))
            for head, (keys, values) in enumerate(gathers):
                k, v = keys(slots), values(slots)
                scores = torch.matmul(queries[:, head].to(k.dtype), k.t()).float() * scale + biases[:, head]
                attended = torch.matmul(scores.softmax(-1).to(v.dtype), v)
                out[tokens].unflatten(1, (num_kv_heads, -1))[:, head] = attended.to(out.dtype)
    return out.flatten(1)


def _attend_to_entries(
    q: Tensor, kv: LayerKV, rows: Sequence[ChosenRow], compressed: Sequence[tuple[Tensor, Tensor | None]], window: int,
    scale: float, sinks: Tensor,
) -> Tensor:  # fmt: skip
    """Return attention to the last `window` tokens and to compressed entries, [T, heads * head_dim]. q [T, heads,
    head_dim]. compressed: of each row the entries, keys and values of all heads, [1, 1, W, head_dim], and their bias
    [1, 1, queries, W]; None: all are seen. sinks [heads]."""
    block_size = kv.k.shape[2]
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    gather = _tokens_of(kv, 0, "k")
    for row, (entries, bias) in zip(rows, compressed, strict=True):
        begin = row.context_len - row.num_queries
        for at in range(begin, row.context_len, window):
            last = torch.arange(at, min(at + window, row.context_len), device=q.device)[:, None]
            own = torch.arange(max(0, at - window + 1), at + len(last), device=q.device)
            slots = row.blocks.index_select(0, own // block_size) * block_size + own % block_size
            keys = gather(slots)
            keys = torch.cat((keys, entries[0, 0].to(keys.dtype)))
            hidden = (own > last) | (own <= last - window)
            unseen = torch.zeros(len(last), entries.shape[2], device=q.device)
            if bias is not None:
                unseen = bias[0, 0, at - begin : at - begin + len(last)].float()
            mask = torch.cat(
                (torch.zeros(hidden.shape, device=q.device).masked_fill_(hidden, float("-inf")), unseen), 1
            )
            tokens = slice(row.first + at - begin, row.first + at - begin + len(last))
            scores = torch.matmul(q[tokens].to(keys.dtype), keys.t()).float() * scale + mask[:, None]
            scores = torch.cat((scores, sinks.view(1, -1, 1).expand(len(last), -1, 1)), dim=2)
            weights = scores.softmax(-1)[..., :-1].to(keys.dtype)
            out[tokens] = torch.matmul(weights, keys).to(out.dtype)
    return out.flatten(1)


def _of_row(given: dict[str, Any], row: ChosenRow, kv: LayerKV, window: int = 1) -> dict[str, Any]:
    """Return the arguments of an indexer's or a compressor's call for one row of the step."""
    own: dict[str, Any] = {}
    for name, value in given.items():
        if isinstance(value, tuple):  # cosines and sines
            own[name] = tuple(part[:, row.tokens] for part in value)
        elif isinstance(value, Tensor):
            own[name] = value[:, row.tokens]
        elif isinstance(value, _AnyMask):
            last = torch.arange(row.context_len - row.num_queries, row.context_len, device=kv.k.device)
            own[name] = (torch.arange(row.context_len, device=kv.k.device) <= last[:, None])[None]
        else:
            own[name] = value
    return {**own, "past_key_values": _IndexKeys(kv, row, window)}


def _rows_of(step: Step, layer: int, kv: LayerKV) -> list[ChosenRow]:
    """Return all rows of the step that have tokens. Lengths are read from the device: the host may know bounds."""
    inputs = step.inputs
    assert inputs is not None, "layers run inside a step"
    table, starts = inputs.groups[step.groups[layer]].block_table, inputs.cu_seqlens_q.tolist()
    positions, lens = inputs.positions.tolist(), inputs.context_lens.tolist()
    firsts = [positions[start] if start < end else 0 for start, end in pairwise(starts)]
    queries = [end - start for start, end in pairwise(starts)]
    rows = chosen_rows(table, kv.k.shape[2], queries, lens, 0, firsts)
    return [row for row in rows if row is not None]


def _attend_to_blocks(
    q: Tensor, kv: LayerKV, rows: Sequence[ChosenRow], chosen: Sequence[Tensor], size: int, scale: float,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return attention to the chosen blocks of `size` keys, [T, heads * head_dim]. q [T, heads, head_dim]. chosen: of
    each row [1, kv_heads, queries, blocks], or the same for all heads [1, queries, blocks]; -1: none. sinks [heads]."""
    num_kv_heads, _, block_size, head_dim = kv.k.shape
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for row, picked in zip(rows, chosen, strict=True):
        blocks = (picked if picked.dim() == 4 else picked[:, None])[0].long()  # of each key head, or of all
        last = torch.arange(row.context_len - row.num_queries, row.context_len, device=q.device)
        seen = blocks[..., None] * size + torch.arange(size, device=q.device)
        hidden = ((blocks[..., None] < 0) | (seen > last[:, None, None])).flatten(2)  # [kv_heads or 1, queries, keys]
        seen = seen.flatten(2).masked_fill(hidden, 0)
        queries = q[row.tokens].unflatten(1, (num_kv_heads, -1))
        results = out[row.tokens].unflatten(1, (num_kv_heads, -1))
        at_once = max(1, buffer_numbers(q) // (seen.shape[2] * head_dim))
        for head in range(num_kv_heads):
            choice = min(head, len(seen) - 1)
            keys, values = (_tokens_of(kv, head, side) for side in "kv")
            own_sinks = None if sinks is None else sinks.unflatten(0, (num_kv_heads, -1))[head, None, :, None]
            for at in range(0, row.num_queries, at_once):
                own = slice(at, at + at_once)
                places = seen[choice, own]
                slots = row.blocks.index_select(0, (places // block_size).flatten()) * block_size
                slots = slots + (places % block_size).flatten()
                k, v = (tokens(slots).view(*places.shape, head_dim) for tokens in (keys, values))
                scores = torch.matmul(queries[own, head].to(k.dtype), k.transpose(1, 2)).float() * scale
                scores.masked_fill_(hidden[choice, own, None], float("-inf"))
                if own_sinks is not None:
                    scores = torch.cat((scores, own_sinks.float().expand(len(scores), -1, 1)), dim=2)
                weights = scores.softmax(-1)[..., : places.shape[1]]
                results[own, head] = torch.matmul(weights.to(v.dtype), v).to(out.dtype)
                del k, v  # before the next ones are gathered
    return out.flatten(1)


def _tokens_of(kv: LayerKV, head: int, side: str) -> Callable[[Tensor], Tensor]:
    """Return a function that gathers keys or values of a head by slots, in fp32 if the cache has scales."""
    stored, scale = (kv.k, kv.k_scale) if side == "k" else (kv.v, kv.v_scale)
    rows = stored[head].flatten(0, 1)
    if scale is None:
        return lambda slots: rows.index_select(0, slots)
    if stored.dtype == torch.uint8:
        groups = scale[head].flatten(0, 1)
        return lambda slots: dequantize_nibbles(rows.index_select(0, slots), groups.index_select(0, slots))
    factors = scale[head].flatten() if scale.dim() > 1 else scale[head].expand(len(rows))
    return lambda slots: rows.view(torch.int8).index_select(0, slots).view(stored.dtype).float() * factors[slots, None]


def _note_layer(part: Any) -> None:
    """Let a module that serves several layers, and is told which in each call, keep that number (Zamba)."""
    forward, signature = part.forward, inspect.signature(part.forward)

    def noted(*positional: Any, **named: Any) -> Any:
        part.layer_idx = signature.bind(*positional, **named).arguments["layer_idx"]
        return forward(*positional, **named)

    object.__setattr__(part, "forward", noted)


def _attend(
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend: q and k [1, heads, T, head_dim], v [1, kv_heads, T, value_dim] -> [1, T, num_heads, value_dim]."""
    step: Step = module.localllm_step
    inputs, layer = step.inputs, module.layer_idx
    if inputs is None:  # between steps only the output head is called
        raise UnsupportedModel(
            f"{step.spec.architecture} is not supported.",
            "Supported: heads that read what the layers returned. Its head in transformers runs the layers itself, "
            "as the decoder of an encoder-decoder model does.",
        )
    _refuse_unsupported(module, q, k, v, attention_mask, s_aux, others)
    kv = _kv_of(step, layer, k)
    _check_window(module, step.spec, layer, sliding_window)
    num_heads, tokens, head_dim = q.shape[1:]
    group = step.groups[layer]
    own, key = inputs.groups[group], (group, num_heads, sliding_window)
    if key not in step.plans:
        step.plans[key] = plan_step(inputs, own, kv.k, num_heads, sliding_window)
    values = F.pad(v, (0, head_dim - v.shape[-1]))
    rows = torch.cat([part[0].transpose(0, 1).reshape(tokens, -1) for part in (q, k, values)], dim=1)
    queries = rotary_store_kv(rows, kv, own.slot_mapping, None, all_valid=step.all_slots_valid)
    factor, sinks = head_dim**-0.5 if scaling is None else scaling, None if s_aux is None else s_aux.float()
    given = (others.get("block_indices"), others.get("indices"), vars(module).pop("localllm_chosen", None))
    if (chosen := next((each for each in given if each is not None), None)) is not None:
        size = getattr(module.indexer, "compress_ratio", getattr(module.indexer, "block_size", 1))
        out = _attend_to_blocks(queries, kv, _rows_of(step, layer, kv), chosen, size, factor, sinks)
        return out.view(1, tokens, num_heads, head_dim)[..., : v.shape[-1]], None
    if (compressed := vars(module).pop("localllm_compressed", None)) is not None:
        assert sinks is not None, "such layers have sinks"
        assert sliding_window is not None, "such layers have a window"
        own_rows = _rows_of(step, layer, kv)
        out = _attend_to_entries(queries, kv, own_rows, compressed, sliding_window, factor, sinks)
        return out.view(1, tokens, num_heads, head_dim), None
    if (states := others.get("position_bias")) is not None:
        own_rows = _rows_of(step, layer, kv)
        out = _attend_by_distance(queries, kv, own_rows, states[0], module, sliding_window, factor)
        return out.view(1, tokens, num_heads, head_dim), None
    out = paged_attention(
        queries, kv.k, kv.v, step.plans[key], scale=factor, softcap=softcap, sinks=sinks, k_scale=kv.k_scale,
        v_scale=kv.v_scale,
    )  # fmt: skip
    return out.view(1, tokens, num_heads, head_dim)[..., : v.shape[-1]], None


def _kv_of(step: Step, layer: int, k: Tensor | None = None) -> LayerKV:
    """Return the layer's cache. Raises `UnsupportedModel` if keys [1, kv_heads, T, head_dim] do not fit into it."""
    kv = kv_of(step.caches[layer])
    if kv is None:
        raise UnsupportedModel(
            f"{step.spec.architecture} is not supported.",
            f"Layer {layer} attends, which its config does not say.",
        )
    if k is None:
        return kv
    if kv.k.shape[0] != k.shape[1] or kv.head_dim != k.shape[-1]:
        raise UnsupportedModel(
            f"{step.spec.architecture} is not supported: layer {layer} has {k.shape[1]} key heads of {k.shape[-1]}.",
            f"Its config says {kv.k.shape[0]} of {kv.head_dim} in this layer.",
        )
    return kv


def _check_window(module: Any, spec: ModelSpec, layer: int, handed: int | None) -> None:
    """Refuse a windowed layer whose code does not hand the window to attention: the window would be ignored."""
    window = layer_window(spec, layer)
    if window is not None and handed != window:
        raise UnsupportedModel(
            f"{spec.architecture} is not supported.",
            f"Layer {layer} has a window of {window} tokens, and {type(module).__name__} of transformers hands "
            f"{handed} to attention.",
        )


def _refuse_unsupported(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, sinks: Tensor | None, others: dict[str, Any]
) -> None:
    if mask is not None and not isinstance(mask, _AnyMask):
        what = "a custom attention mask"
    elif q.shape[-1] != k.shape[-1] or k.shape[-1] < v.shape[-1]:
        what = f"queries, keys and values of width {q.shape[-1]}, {k.shape[-1]} and {v.shape[-1]}"
    elif q.shape[1] % k.shape[1] or k.shape[1] != v.shape[1]:
        what = f"{q.shape[1]} heads of queries, {k.shape[1]} of keys and {v.shape[1]} of values"
    elif others.get("position_bias") is not None and not hasattr(module, "localllm_growth"):
        what = "an attention bias"
    elif not (others.get("is_causal") or getattr(module, "is_causal", True)):
        what = "bidirectional attention"
    elif sinks is None and getattr(module, "sinks", None) is not None:
        what = "attention sinks that it does not pass on"
    else:
        return
    raise UnsupportedModel(
        f"{type(module).__name__} of transformers uses {what}.", "Paged attention does not support it."
    )
