"""Decode steps of a few rows through the native library: a decoder as a list of operations.

The list is written once, from the objects that `DecoderModel.forward` runs, and reads the same weights and the same KV
cache: a request may change between both from token to token. Every layer needs a handful of operations:

    LINEAR     norm, then q, k and v
    ATTEND     norms of q and k, rotation, the new key and value, attention (and MULTIPLY by its gate)
    LINEAR     the output of attention, added to the residual stream
    GATED      norm, then gate and up (LINEAR without a gate; LINEAR and GATE if they are stored in different ways)
    LINEAR     down, added to the residual stream

Cross-attention adds three: LINEAR for the queries, ATTEND to the keys and values of the row's source, LINEAR.
Experts on disk divide the list: the host reads the chosen ones before it multiplies with them (layers/far.py).
A norm after a part (sandwich, post_norm) adds an operation of its own. Each layer writes its own operations
(`DecoderLayer.write`), its parts theirs. What has no operation is refused with a reason, and such models run through
torch.
Does not know: requests, schedules, sampling; how an operation is computed (kernels/cpu/native).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from localllm.kernels.cpu.attention import rows_of
from localllm.kernels.cpu.bf16 import has_amx
from localllm.kernels.cpu.native.library import Library, native, why_none
from localllm.kernels.cpu.native.structures import FEW_ROWS, MAX_ROWS, Kind, NativeOperation, NativeRow
from localllm.kernels.layer_cache import LayerCache, LayerKV
from localllm.models.decoder.decoder import DecoderModel
from localllm.models.inputs import SourceInputs
from localllm.models.layers.gemma import streams_before
from localllm.models.layers.group import Alone
from localllm.models.layers.native_writer import NotSupportedNatively, Writer
from localllm.models.spec.model_spec import FINAL_HIDDEN, FINAL_STREAM, kv_groups

__all__ = ["DecodeRows", "NativeProgram", "NotSupportedNatively", "open_native_program"]

CODED_ROWS = 12  # of a step with weights of 8 bits and fewer


class DecodeRows(NamedTuple):
    """The inputs of a step of R rows, each a token: the next one of a request, or a draft behind it."""

    token_ids: npt.NDArray[np.int64]  # [R]
    positions: npt.NDArray[np.int64]  # [R] of each token within its request
    slots: npt.NDArray[np.int64]  # [G, R] for each KV group where its K and V go: block_id * block_size + offset
    tables: npt.NDArray[np.int64]  # [G, R] addresses of the requests' blocks, int32 each
    states: npt.NDArray[np.int64] | None = None  # [3, B] places that a request reads, writes, saves; None: no states
    adapters: npt.NDArray[np.int64] | None = None  # [R] slot of each row's adapter, -1: none; None: no row has one
    starts: npt.NDArray[np.int64] | None = None  # [B + 1] first row of each request; None: one row each
    rotary: npt.NDArray[np.int64] | None = None  # [R] position to rotate by; None: `positions`
    source: SourceInputs | None = None  # of the R tokens; None: not an encoder-decoder


class NativeProgram:
    """The list of one model and one KV cache. Keeps the memory alive that its operations point to.

    The model's tensors must not be replaced while the list is in use: it would go on reading the old ones.
    Not thread-safe: its buffers hold one step.
    """

    def __init__(
        self, model: DecoderModel, cache: Sequence[LayerCache | None], sources: Sequence[LayerKV] = ()
    ) -> None:
        """sources: what each layer's cross-attention reads. Raises `NotSupportedNatively` with the reason if the model
        or this machine has none."""
        self._library, self._model, self._num_rows = _library(), model, 0
        writer, self._starts = _write(model, cache, sources)
        self._operations, self._kept, self._calls = writer.lowered(), writer.kept, writer.calls
        self._cut(self._calls)
        self._taps: tuple[int, ...] = ()
        self._features = torch.empty(0)
        self._stream, self._logits = writer.stream.values, writer.logits.values
        self._layer_inputs = writer.others["layer_inputs"].values if model.layer_inputs is not None else None
        self._adapters = writer.adapters
        self.rounds = bool(writer.kinds - {Kind.F32})  # whether torch's products of several rows round otherwise
        self.most_rows = FEW_ROWS if self._calls else most_rows(writer.kinds)  # as many as the host multiplies alike
        self._num_groups = len(kv_groups(model.spec))
        self._rows = (NativeRow * ((self._num_groups + bool(sources)) * MAX_ROWS))()
        self._columns = np.frombuffer(memoryview(self._rows).cast("B"), np.int64).reshape(-1, MAX_ROWS, 4)
        states = np.frombuffer(memoryview(writer.states).cast("B"), np.int64).reshape(MAX_ROWS, 5)
        self._states = states.T  # [5, MAX_ROWS] of each request the first token, the end, and its places

    def _cut(self, calls: Sequence[tuple[int, Callable[[int], None]]]) -> None:
        """Divide the list where the host has work. calls: before an operation, what the host does with the first rows,
        whose number it is told."""
        first = 0
        self._before_calls = list[tuple[ctypes.Array[NativeOperation], Callable[[int], None]]]()
        for end, call in sorted(calls, key=lambda each: each[0]):
            self._before_calls.append((self._part(first, end), call))
            first = end
        count = len(self._operations)
        self._last_part, self._without_head = self._part(first, count), self._part(first, count - 1)

    def _part(self, first: int, end: int) -> ctypes.Array[NativeOperation]:
        return (NativeOperation * (end - first))(*self._operations[first:end])

    def tap(self, taps: tuple[int, ...]) -> None:
        """Keep the features of each step that a drafter reads (decoder.py, Taps). A tapped layer's input is the stream
        before its first operation."""
        hidden = self._model.spec.hidden_size
        self._taps, self._features = taps, torch.empty(MAX_ROWS, len(taps), hidden, dtype=self._model.dtype)
        layers, stream = {tapped for tapped in taps if tapped >= 0}, self._stream[:, :hidden]
        keeps = [(self._starts[layer], partial(_keep, self._features, taps, layer, stream)) for layer in layers]
        self._cut([*keeps, *self._calls])

    def forward(self, rows: DecodeRows, *, samples: bool = True) -> Tensor:
        """Run one step of 1 to `most_rows` rows: write their K and V, and return logits [R, vocab] fp32, valid
        until the next step. samples: False if no row's logits are needed; then they are undefined."""
        count = len(rows.token_ids)
        assert 1 <= count <= self.most_rows, count
        model, ids = self._model, torch.from_numpy(rows.token_ids)
        assert model.embedding is not None
        positions = torch.from_numpy(rows.positions)
        embeds = model.embedding(ids, positions)
        self._stream[:count, : model.spec.hidden_size] = embeds
        self._adapters[:count] = -1 if rows.adapters is None else rows.adapters
        if model.layer_inputs is not None and self._layer_inputs is not None:
            for row in range(count):  # each by itself: the bits of torch's products depend on the number of rows
                one = slice(row, row + 1)
                if model.lora is not None:
                    model.lora.begin_row(int(self._adapters[row]))
                given = model.layer_inputs(ids[one], positions[one], embeds[one]).flatten(1)
                self._layer_inputs[one, : given.shape[1]] = given
            if model.lora is not None:
                model.lora.end()
        if rows.source is not None:
            self._columns[-1, :count] = rows_of(rows.source.block_table, rows.source.lens_host)
        columns = self._columns[: self._num_groups, :count]
        columns[..., 0], columns[..., 1], columns[..., 2] = rows.tables, rows.positions, rows.slots
        columns[..., 3] = rows.positions if rows.rotary is None else rows.rotary
        if model.spec.recurrent is not None:
            assert rows.states is not None, "a model with recurrent layers is given the places of their states"
            starts = np.arange(count + 1) if rows.starts is None else rows.starts
            requests = len(starts) - 1
            self._states[:, :requests] = starts[:-1], starts[1:], *rows.states
            self._states[:, requests:count] = np.array([0, 0, -1, 0, 0])[:, None]  # no tokens, and written nowhere
        for part, call in self._before_calls:
            if len(part):
                self._library.run_step(part, self._rows, count)
            call(count)
        self._library.run_step(self._last_part if samples else self._without_head, self._rows, count)
        self._num_rows = count
        logits = self._logits[:count, : model.spec.vocab_size]
        return model.finish_logits(logits.contiguous()) if samples else logits

    def features(self) -> Tensor:
        """Return the features [R, taps * hidden] of the last step, in the order of the taps."""
        assert self._model.norm is not None
        stream = self._stream[: self._num_rows, : self._model.spec.hidden_size]
        _keep(self._features, self._taps, FINAL_STREAM, stream, self._num_rows)
        if FINAL_HIDDEN in self._taps:
            normed = self._model.norm(stream.to(self._model.dtype))
            _keep(self._features, self._taps, FINAL_HIDDEN, normed, self._num_rows)
        return self._features[: self._num_rows].flatten(1).clone()


def _keep(features: Tensor, taps: Sequence[int], layer: int, stream: Tensor, count: int) -> None:
    """Keep the first `count` rows of the stream as the features of a layer, at each of its places among the taps."""
    for place, tapped in enumerate(taps):
        if tapped == layer:
            features[:count, place] = stream[:count]


def most_rows(kinds: set[int]) -> int:
    """Return up to how many rows a step is faster here than through torch. Products of fp32 sums take one instruction
    for 16 inputs whatever the weights; codes are multiplied twice as fine here, and AMX multiplies both at once."""
    if kinds <= {Kind.F32}:
        return MAX_ROWS
    if has_amx():
        return FEW_ROWS
    return MAX_ROWS if kinds <= {Kind.F32, Kind.BF16, Kind.BF16_ROUNDED, Kind.F16} else CODED_ROWS


def open_native_program(
    model: object, cache: Sequence[LayerCache | None], sources: Sequence[LayerKV] = ()
) -> NativeProgram:
    """Return the list of a model as a runner holds it. Raises `NotSupportedNatively`."""
    if not isinstance(model, DecoderModel):
        raise NotSupportedNatively(f"{type(model).__name__} is not computed by localllm's own layers alone")
    return NativeProgram(model, cache, sources)


def why_not_native(model: DecoderModel, cache: Sequence[LayerCache | None]) -> str:
    """Return why a model has no list, whatever this machine has; empty: it has one."""
    try:
        _write(model, cache, ())
    except NotSupportedNatively as reason:
        return str(reason)
    return ""


def _library() -> Library:
    library = native()
    if library is None:
        raise NotSupportedNatively(why_none())
    return library


def _refuse(model: DecoderModel) -> None:
    """Raise `NotSupportedNatively` for models whose layers are elsewhere, too."""
    if model.device.type != "cpu":
        raise NotSupportedNatively(f"the model is on {model.device}")
    if model.embedding is None or model.lm_head is None or not isinstance(model.group, Alone):
        raise NotSupportedNatively("the model is split over several ranks")


# ---- the list of a model ---------------------------------------------------------------------------------------------


def _write(
    model: DecoderModel, cache: Sequence[LayerCache | None], sources: Sequence[LayerKV]
) -> tuple[Writer, list[int]]:
    """Return the list, and the first operation of each layer."""
    _refuse(model)
    writer, starts = Writer(model.spec, cache, model.rope_table, sources), list[int]()
    if model.streams is not None:
        model.streams.write_spread(writer)
    for layer, kv, group in zip(model.layers, cache, model.layer_groups, strict=True):
        writer.group = group
        starts.append(len(writer.planned))
        layer.write(writer, kv)
    if model.streams is not None:
        model.streams.write_join(writer, streams_before(writer, len(starts)))
    assert model.lm_head is not None
    writer.linear(model.lm_head, writer.stream, writer.logits, norm=model.norm)
    return writer, starts
