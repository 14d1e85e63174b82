"""The recurrent modules of a hybrid (Mamba, gated delta net, short convolution), run row by row over localllm's states.

Such a module of `transformers` takes one sequence and a cache object that it asks for its states by name. Here each row
of a step is one call, with the states of its place; rows that continue with one token are stacked to one batch. What a
module keeps is found by calling it with tensors without data. All its states of one kind, flattened one after the
other, are one row of `LayerState.conv` or `LayerState.matrix`.
Does not know: attention, who owns a place.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from localllm.errors import UnsupportedModel
from localllm.kernels.layer_cache import LayerState, state_of
from localllm.models.transformers_backend.attention import Step
from localllm.models.transformers_backend.layouts import code_names

Kind = Literal["conv", "matrix"]
Key = tuple[Kind, int]  # a state by kind and number, as transformers' caches name it
_UPDATES = {"update_conv_state", "update_recurrent_state"}
_TOKEN_IDS = "input_ids"  # the argument of a module that reads token ids beside hidden states (Qwen4-Exp)
_KDA = "chunk_kimi_delta_attention"
_KDA_TOKENS = 64
"""Tokens of a row at a time on a CPU: one chunk. The class holds a matrix of a chunk's tokens for each channel."""
_ONE_TOKEN = ("JambaMambaMixer", "ZambaMambaMixer")
"""Classes whose scan of several tokens begins from zeros: they continue token by token."""


class StatePart(NamedTuple):
    """One of the states that a module keeps for a request."""

    key: Key
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: Kind  # of the tensor that holds it
    start: int  # of its numbers in the layer's row for this kind

    @property
    def numbers(self) -> slice:
        return slice(self.start, self.start + math.prod(self.shape))


Outputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Mixer:
    """A recurrent module, with what it keeps."""

    module: Any
    layer: int
    parts: tuple[StatePart, ...]

    @cached_property
    def computes_kda(self) -> bool:
        return _KDA in code_names(self.module)

    def numbers(self, kind: str) -> int:
        """Return the end of its numbers in the layer's row for this kind."""
        return max((part.numbers.stop for part in self.parts if part.kind == kind), default=0)


class RowStates:
    """The cache that one call of a recurrent module sees: the states of its rows. B: rows of the call."""

    def __init__(self, before: Mapping[Key, Tensor]) -> None:
        """before: states [B, ...] to continue from, which the module may change; empty: begin from zeros."""
        self.states = dict(before)
        self._continues = bool(before)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.states.get(("matrix", state_idx))

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self._continues

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Append inputs [B, channels, n] to those kept; keep the last ones, and return all."""
        kept = self.states.get(("conv", state_idx))
        size = kept.shape[-1] if kept is not None else conv_kernel_size or conv_states.shape[-1]
        if kept is None:
            full = nn.functional.pad(conv_states, (max(size - conv_states.shape[-1], 0), 0))
        else:
            full = torch.cat([kept, conv_states], dim=-1)
        self.states["conv", state_idx] = full[..., -size:]
        return full

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        self.states["matrix", state_idx] = recurrent_states
        return recurrent_states


def find_mixers(module: nn.Module, name: str) -> list[Mixer]:
    """Return the recurrent modules of a model on `meta` or any other device, in order, without those inside others.

    name: the model's class. Raises `UnsupportedModel` if a module cannot be called by itself.
    """
    found: list[Mixer] = []
    ends: dict[tuple[int, str], int] = {}
    inner: set[nn.Module] = set()
    for part in module.modules():
        if part in inner or not _UPDATES & _called_names(part):
            continue
        inner |= set(part.modules())
        layer = getattr(part, "layer_idx", None)
        if not isinstance(layer, int):
            raise UnsupportedModel(f"{name} is not supported.", f"{type(part).__name__} does not know its layer.")
        states = []
        for key, shape, dtype in _trial(part, name):
            kind = key[0] if dtype.is_floating_point else "matrix"  # token ids are exact in fp32
            start = ends.get((layer, kind), 0)
            states.append(StatePart(key, shape, dtype, kind, start))
            ends[layer, kind] = start + math.prod(shape)
        found.append(Mixer(part, layer, tuple(states)))
    return found


def _called_names(part: nn.Module) -> set[str]:
    """Return the names that a module's forward function uses, and those that the methods use which it calls."""
    names = code_names(part)
    codes = [getattr(getattr(type(part), name, None), "__code__", None) for name in names]
    return names.union(*(code.co_names for code in codes if code is not None))


def _trial(part: Any, name: str) -> list[tuple[Key, tuple[int, ...], torch.dtype]]:
    """Return key, shape and dtype of each state that a module keeps, by calling a copy without data."""
    cache = RowStates({})
    try:
        empty = _without_data(part)
        weight = next(parameter for parameter in empty.parameters())
        given: dict[str, Any] = {_cache_argument(part): cache}
        if _TOKEN_IDS in inspect.signature(part.forward).parameters:
            given[_TOKEN_IDS] = torch.zeros(1, 3, dtype=torch.int64, device="meta")
        with torch.inference_mode():
            empty(torch.zeros(1, 3, _width(part), dtype=weight.dtype, device="meta"), **given)
    except Exception as error:  # the module may raise anything
        raise UnsupportedModel(
            f"{name} is not supported.",
            f"The states of {type(part).__name__} of transformers cannot be found: {type(error).__name__}: {error}",
        ) from error
    return [(key, tuple(state.shape[1:]), state.dtype) for key, state in cache.states.items()]


def _without_data(part: nn.Module) -> nn.Module:
    """Return a copy of a module on `meta`."""
    copies: dict[int, Any] = {id(own): nn.Parameter(own.to("meta"), requires_grad=False) for own in part.parameters()}
    copies |= {id(own): own.to("meta") for own in part.buffers()}
    return copy.deepcopy(part, copies)


def _width(part: Any) -> int:
    """Return the width of a recurrent module's input."""
    for name in ("hidden_size", "embed_dim", "d_model"):
        for holder in (part, getattr(part, "config", None)):
            if isinstance(getattr(holder, name, None), int):
                return int(getattr(holder, name)) * getattr(part, "hc_count", 1)  # residual streams (Qwen4-Exp)
    if isinstance(conv := getattr(part, "conv1d", None), nn.Conv1d):  # a convolution alone (Inkling)
        return conv.in_channels
    raise TypeError("the width of its input is not known")


def _cache_argument(part: Any) -> str:
    """Return the name of the argument that takes the cache."""
    names = inspect.signature(type(part).forward).parameters
    return next(name for name in ("cache_params", "past_key_values") if name in names)


def run_by_rows(mixer: Mixer, step: Step) -> None:
    """Let a module's call on a step's flat batch [1, T, width] run each row with its own states."""
    forward, cache_argument = mixer.module.forward, _cache_argument(mixer.module)
    signature = inspect.signature(forward)

    def by_rows(hidden_states: Tensor, *positional: Any, **named: Any) -> Tensor | tuple[Tensor, ...]:
        token_ids = signature.bind(hidden_states, *positional, **named).arguments.get(_TOKEN_IDS)

        def call(rows: slice, count: int, states: RowStates) -> tuple[Tensor, ...]:
            """Run some of the tokens as `count` sequences of equal length -> [tokens, ...] of each output."""
            own, given = hidden_states[0, rows], {cache_argument: states}
            if token_ids is not None:
                given[_TOKEN_IDS] = token_ids[0, rows].view(count, -1)
            out = forward(own.reshape(count, -1, own.shape[-1]), **given)
            return tuple(part.flatten(0, 1) for part in (out if isinstance(out, tuple) else (out,)))

        outputs = tuple(torch.cat(parts)[None] for parts in zip(*_run(mixer, step, call), strict=True))
        return outputs if len(outputs) > 1 else outputs[0]  # Zaya's makes queries, keys and values

    object.__setattr__(mixer.module, "forward", by_rows)


def _run(mixer: Mixer, step: Step, call: Callable[[slice, int, RowStates], Outputs]) -> list[Outputs]:
    """Call the module for each row, or each batch of rows that continue with one token; return the outputs in order."""
    inputs = step.inputs
    assert inputs is not None, "recurrent modules run inside a step"
    assert inputs.state is not None, "a model with recurrent layers has places"
    state = state_of(step.caches[mixer.layer])
    assert state is not None, "a recurrent layer has states"
    outputs: list[Outputs] = []
    start = row = 0
    while row < len(inputs.query_lens):
        length, read = inputs.query_lens[row], inputs.state.read_host[row]
        count = 1
        if length == 1 and read >= 0:
            count = _continuing(inputs.query_lens, inputs.state.read_host, row)
        rows = slice(row, row + count)
        at_once = _KDA_TOKENS if mixer.computes_kda and _tensor(state, "matrix").device.type == "cpu" else length
        if read >= 0 and type(mixer.module).__name__ in _ONE_TOKEN:
            at_once = 1
        states = RowStates(_load(mixer, state, inputs.state.read_host[rows]) if read >= 0 else {})
        for done in range(0, length, at_once):
            stop = start + count * min(at_once, length - done)
            outputs.append(call(slice(start, stop), count, states))
            states = RowStates(states.states)
            start = stop
        _store(mixer, state, states, inputs.state.write_host[rows])
        _store(mixer, state, states, inputs.state.save_host[rows])
        row += count
    return outputs


def _continuing(lengths: Sequence[int], reads: Sequence[int], first: int) -> int:
    """Return how many rows from `first` on have one token and a state to continue from."""
    end = first
    while end < len(lengths) and lengths[end] == 1 and reads[end] >= 0:
        end += 1
    return end - first


def _load(mixer: Mixer, state: LayerState, places: Sequence[int]) -> dict[Key, Tensor]:
    """Return copies of the states [B, ...] at these places."""
    loaded = {}
    for part in mixer.parts:
        rows = _tensor(state, part.kind)
        chosen = rows[torch.tensor(places, device=rows.device), part.numbers]
        loaded[part.key] = chosen.view(-1, *part.shape).to(part.dtype)
    return loaded


def _store(mixer: Mixer, state: LayerState, states: RowStates, places: Sequence[int]) -> None:
    """Write the rows' states to these places; 0: nowhere."""
    for part in mixer.parts:
        rows, new = _tensor(state, part.kind), states.states[part.key]
        for index, place in enumerate(places):
            if place:
                rows[place, part.numbers] = new[index].reshape(-1).to(rows.dtype)


def _tensor(state: LayerState, kind: str) -> Tensor:
    rows = state.conv if kind == "conv" else state.matrix
    assert rows is not None, "a layer keeps each kind of state that its modules have"
    return rows
