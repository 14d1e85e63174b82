"""The definition of the native library's operations, in numpy and float64: runs a list as the library would.

Reads weights only in the layout `KIND_F32`, and caches in fp32.
Does not know: models.
"""

import ctypes
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from localllm.kernels.cpu.native.structures import (
    MAX_ROWS,
    OUTPUTS,
    Activation,
    HeadNorm,
    HeadsMade,
    Kind,
    NativeAttention,
    NativeConvolution,
    NativeExperts,
    NativeGatedDelta,
    NativeGatedNorm,
    NativeHeadProducts,
    NativeLowRank,
    NativeMatrix,
    NativeMixing,
    NativeNorm,
    NativeOperation,
    NativeRow,
    NativeSelectiveScan,
    NativeStateRow,
    NormKind,
    Op,
)
from tests.fake_runner import first_seen

Array = npt.NDArray[Any]


class DefinedLibrary:
    """Takes the place of kernels/cpu/native/library.Library."""

    def run_step(self, operations: Any, rows: Any, num_rows: int) -> None:
        for operation in operations:
            for row in range(num_rows):
                group = NativeAttention.from_address(operation.attention).group if operation.attention else 0
                _RUN[Op(operation.op)](operation, row, rows[group * MAX_ROWS + row])


def _floats(address: int | None, count: int, kind: Any = np.float32) -> Array:
    """Return memory as an array that can be written."""
    assert address, "a null pointer is read"
    size = count * np.dtype(kind).itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(address), kind)


def _row(operation: NativeOperation, row: int, count: int) -> Array:
    return _floats(operation.x + 4 * row * operation.x_stride, count).astype(np.float64)


def _put(operation: NativeOperation, row: int, values: Array) -> None:
    y = _floats(operation.y + 4 * row * operation.y_stride, len(values))
    y[:] = y + values if operation.adds else values


def _weights(matrix: NativeMatrix) -> Array:
    assert matrix.kind == Kind.F32
    blocks = -(-matrix.outputs // OUTPUTS)
    values = _floats(matrix.weights, blocks * OUTPUTS * matrix.inputs).reshape(blocks, matrix.inputs, OUTPUTS)
    return values.transpose(0, 2, 1).reshape(-1, matrix.inputs)


def _product(matrix: NativeMatrix, x: Array) -> Array:
    weights = _weights(matrix)
    y = weights @ x
    return (y + _floats(matrix.bias, len(weights)) if matrix.bias else y)[: matrix.outputs]


def _normed(norm: NativeNorm, x: Array) -> Array:
    if norm.kind == NormKind.NONE:
        return x
    if norm.kind == NormKind.SCALE:
        return x * _floats(norm.weight, len(x))
    centred = x - x.mean() if norm.kind == NormKind.LAYER else x
    y: Array = centred / np.sqrt((centred * centred).mean() + norm.eps) * _floats(norm.weight, len(x))
    return y + _floats(norm.bias, len(x)) if norm.bias else y


_ACTIVATE: dict[Activation, Callable[[Array], Array]] = {
    Activation.NONE: lambda x: x,
    Activation.SILU: lambda x: x / (1 + np.exp(-x)),
    Activation.GELU: lambda x: x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    Activation.GELU_TANH: lambda x: x * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    Activation.RELU: lambda x: np.maximum(x, 0),
    Activation.RELU2: lambda x: np.maximum(x, 0) ** 2,
    Activation.QUICK_GELU: lambda x: x / (1 + np.exp(-1.702 * x)),
    Activation.SIGMOID: lambda x: 1 / (1 + np.exp(-x)),
    Activation.SOFTPLUS: lambda x: np.logaddexp(x, 0),
    Activation.TANH: np.tanh,
}


def _gate_times_up(operation: Any, gate_up: Array) -> Array:
    activation = operation.activation
    gate, up = np.split(gate_up, 2)
    if activation == Activation.SWIGLU_CLAMPED:
        low, bound = np.minimum(gate, 7), up.clip(-7, 7)
        clamped: Array = (bound + 1) * low / (1 + np.exp(-1.702 * low))
        return clamped
    gate = _ACTIVATE[Activation(activation)](gate)
    if limit := operation.limit:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    product: Array = gate * up
    return product


def _linear(operation: NativeOperation, row: int, _: NativeRow) -> None:
    x = _normed(operation.norm, _row(operation, row, operation.matrix.inputs))
    product = _scaled(operation, _product(operation.matrix, x) + _low_rank(operation, row, operation.matrix.outputs))
    y = _ACTIVATE[operation.activation](product)
    _put(operation, row, y * operation.factor)


def _gated(operation: NativeOperation, row: int, _: NativeRow) -> None:
    x = _normed(operation.norm, _row(operation, row, operation.matrix.inputs))
    product = _scaled(operation, _product(operation.matrix, x) + _low_rank(operation, row, operation.matrix.outputs))
    _put(operation, row, _gate_times_up(operation, product))


def _scaled(operation: NativeOperation, product: Array) -> Array:
    return product * _floats(operation.output_factors, len(product)) if operation.output_factors else product


def _adapter(low_rank: NativeLowRank, row: int) -> tuple[int, int]:
    """Return the row's adapter and its rank, which is 0 without one."""
    adapter = int(_floats(low_rank.adapters, MAX_ROWS, np.int64)[row])
    return adapter, 0 if adapter < 0 else int(_floats(low_rank.ranks, adapter + 1, np.int64)[adapter])


def _shrink(operation: NativeOperation, row: int, _: NativeRow) -> None:
    low_rank = NativeLowRank.from_address(operation.low_rank)
    adapter, rank = _adapter(low_rank, row)
    width, inputs = low_rank.width, operation.matrix.inputs
    if rank:
        x = _normed(operation.norm, _row(operation, row, inputs))
        a = _floats(low_rank.a, (adapter + 1) * width * inputs).reshape(-1, width, inputs)[adapter, :rank]
        _floats(low_rank.low, MAX_ROWS * width).reshape(MAX_ROWS, width)[row, :rank] = a @ x


def _low_rank(operation: NativeOperation, row: int, outputs: int) -> Array:
    """Return what the row's adapter adds to the outputs."""
    if not operation.low_rank:
        return np.zeros(outputs)
    low_rank = NativeLowRank.from_address(operation.low_rank)
    adapter, rank = _adapter(low_rank, row)
    total = np.zeros(outputs)
    for k in range(rank):
        place = (adapter * low_rank.width + k) * low_rank.columns
        b = _floats(low_rank.b + 4 * place, outputs).astype(np.float64)
        total += b * _floats(low_rank.low, MAX_ROWS * low_rank.width)[row * low_rank.width + k]
    return total


def _heads(operation: NativeOperation, row: int, _: NativeRow) -> None:
    h = NativeHeadProducts.from_address(operation.heads)
    weights = _floats(h.weights, h.heads * h.outputs * h.inputs).reshape(h.heads, h.outputs, h.inputs)
    for head, weight in enumerate(weights):
        x = _floats(operation.x + 4 * (row * operation.x_stride + head * h.x_head_stride), h.copied + h.inputs)
        y = _floats(operation.y + 4 * (row * operation.y_stride + head * h.y_head_stride), h.copied + h.outputs)
        y[:] = np.concatenate((x[: h.copied], weight.astype(np.float64) @ x[h.copied :]))


def _gate(operation: NativeOperation, row: int, _: NativeRow) -> None:
    _put(operation, row, _gate_times_up(operation, _row(operation, row, 2 * operation.matrix.outputs)))


def _scale(operation: NativeOperation, row: int, _: NativeRow) -> None:
    y = _floats(operation.y + 4 * row * operation.y_stride, operation.matrix.outputs)
    y *= _ACTIVATE[operation.activation](_row(operation, row, 1))


def _add(operation: NativeOperation, row: int, _: NativeRow) -> None:
    y = _floats(operation.y + 4 * row * operation.y_stride, operation.matrix.outputs)
    x = _normed(operation.norm, _row(operation, row, len(y))) * operation.factor
    y[:] = y + x if operation.adds else x


def _mix(operation: NativeOperation, row: int, _: NativeRow) -> None:
    m = _of(operation, NativeMixing)
    x, y = _token(m, "x", row, m.inputs, m.width), _token(m, "y", row, m.outputs, m.width)
    sums = _token(m, "factors", row, m.outputs, m.inputs).astype(np.float64) @ x
    y[:] = y + sums if m.adds else sums


def _resize(operation: NativeOperation, row: int, _: NativeRow) -> None:
    y = _floats(operation.y + 4 * row * operation.y_stride, operation.matrix.outputs)
    size, own = (math.sqrt((each.astype(np.float64) ** 2).mean()) for each in (_row(operation, row, len(y)), y))
    y *= size / max(own, operation.limit)


def _cut(operation: NativeOperation, row: int, _: NativeRow) -> None:
    y = _floats(operation.y + 4 * row * operation.y_stride, operation.matrix.outputs)
    wide = y.astype(np.float64)
    y[:] = np.maximum(wide - wide.mean() - operation.limit * wide.std(), 0)


def _attend(operation: NativeOperation, row: int, at: NativeRow) -> None:
    a = ctypes.cast(operation.attention, ctypes.POINTER(NativeAttention)).contents
    if a.made == HeadsMade.LATENT:
        a = NativeAttention.from_buffer_copy(a)
        a.kv_heads = 1  # its parts are for threads
    kinds = {HeadsMade.QKV: 2, HeadsMade.QK: 1, HeadsMade.Q: 0, HeadsMade.LATENT: 1}[HeadsMade(a.made)]
    narrower = a.kv_heads * (a.head_dim - a.value_dim)
    x = _row(operation, row, (a.heads + kinds * a.kv_heads) * a.head_dim - narrower)
    x = x.clip(-a.clip, a.clip) if a.clip else x
    turning = x[: (a.heads + min(kinds, 1) * a.kv_heads) * a.head_dim].reshape(-1, a.head_dim)
    v = np.pad(x[-a.kv_heads * a.value_dim :].reshape(a.kv_heads, -1), ((0, 0), (0, a.head_dim - a.value_dim)))
    if a.norms_values:
        v = v / np.sqrt((v * v).mean(1, keepdims=True) + a.head_norm_eps)
    if a.head_norm == HeadNorm.RMS_LAST:
        turning = _head_normed(a, _rotated(a, turning, at.position))
    else:
        turning = _rotated(a, _head_normed(a, turning), at.position)
    caches = [_floats(c, a.kv_heads * a.num_blocks * a.block_size * a.head_dim) for c in (a.k, a.v)]
    keys, values = (cache.reshape(a.kv_heads, -1, a.head_dim) for cache in caches)
    if a.made != HeadsMade.Q:
        keys[:, at.slot] = turning[a.heads :]
        values[:, at.slot] = turning[a.heads :] if a.made == HeadsMade.LATENT else v
    positions = np.arange(first_seen(a.window or None, at.position), at.position + 1)
    table = _floats(at.block_table, at.position // a.block_size + 1, np.int32)
    seen = table[positions // a.block_size] * a.block_size + positions % a.block_size
    periods = (at.position + a.growth_offset) // a.growth_period
    growth = 1 + a.query_growth * math.log(1 + periods) if a.query_growth else 1
    out = [_head(a, h, turning[h] * growth, keys[:, seen], values[:, seen], positions) for h in range(a.heads)]
    _put(operation, row, np.stack(out)[:, : a.value_dim].ravel())


def _head(a: NativeAttention, head: int, q: Array, keys: Array, values: Array, positions: Array) -> Array:
    group = head // (a.heads // a.kv_heads)
    scores = keys[group].astype(np.float64) @ q * a.scale
    scores = np.tanh(scores / a.softcap) * a.softcap if a.softcap else scores
    if a.slopes:
        scores += _floats(a.slopes, a.heads)[head] * (positions - positions[-1])
    if a.distance_bias:
        biases = _floats(a.distance_bias, a.heads * a.distances).reshape(a.heads, -1)[head]
        scores += biases[np.minimum(positions[-1] - positions, a.distances - 1)]
    peak = max(scores.max(), _floats(a.sinks, a.heads)[head]) if a.sinks else scores.max()
    weights = np.exp(scores - peak)
    total = weights.sum() + (np.exp(_floats(a.sinks, a.heads)[head] - peak) if a.sinks else 0)
    mixed: Array = weights / total @ values[group]
    return mixed


def _head_normed(a: NativeAttention, heads: Array) -> Array:
    if a.head_norm == HeadNorm.NONE:
        return heads
    weight = _floats(a.head_norm_weight, heads.size).reshape(heads.shape)
    if a.head_norm == HeadNorm.WHOLE:
        parts = (heads[: a.heads], heads[a.heads :])
        return np.concatenate([p / np.sqrt((p * p).mean() + a.head_norm_eps) for p in parts]) * weight
    centred = heads - heads.mean(1, keepdims=True) if a.head_norm == HeadNorm.LAYER else heads
    scaled: Array = centred / np.sqrt((centred * centred).mean(1, keepdims=True) + a.head_norm_eps) * weight
    return scaled


def _rotated(a: NativeAttention, heads: Array, position: int) -> Array:
    if not a.angles:
        return heads
    cos, sin = _floats(a.angles + 4 * position * a.rotary_dim, a.rotary_dim).reshape(2, -1)
    first, second, rest = np.split(heads, [a.rotary_dim // 2, a.rotary_dim], axis=1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=1)


# ---- a mixture of experts --------------------------------------------------------------------------------------------


def _described(operation: NativeOperation) -> NativeExperts:
    return ctypes.cast(operation.experts, ctypes.POINTER(NativeExperts)).contents


def _choices(e: NativeExperts, row: int) -> tuple[Array, Array]:
    """Return a row's expert ids and weights, which can be written."""
    offset = 4 * row * e.top_k
    return _floats(e.ids + offset, e.top_k, np.int32), _floats(e.weights + offset, e.top_k)


def _route(operation: NativeOperation, row: int, _: NativeRow) -> None:
    e = _described(operation)
    logits = _row(operation, row, e.count)
    scores = np.exp(logits - logits.max())
    scores = 1 / (1 + np.exp(-logits)) if e.is_sigmoid else scores / scores.sum()
    choice = scores + _floats(e.correction, e.count) if e.correction else logits.copy()
    groups = choice.reshape(e.num_groups, -1)
    best = np.sort(groups, 1)[:, -2 if e.correction else -1 :].sum(1)
    groups[np.argsort(-best, kind="stable")[e.top_groups :]] = -np.inf
    chosen = np.argsort(-choice, kind="stable")[: e.top_k]
    ids, weights = _choices(e, row)
    total = max(scores[chosen].sum(), e.least_sum) if e.renormalizes else 1.0
    scale = _floats(e.expert_scale, e.count)[chosen] * e.scale if e.expert_scale else e.scale
    if e.is_sparse_mixer:
        for place, best in enumerate(chosen):
            left = np.setdiff1d(np.arange(e.count), chosen[:place])
            limit = e.tolerance * np.maximum(np.abs(logits[left]), logits[best])
            near = left[logits[best] - logits[left] <= limit]
            scores[best] = 1 / np.exp(logits[near] - logits[best]).sum()
    ids[:], weights[:] = chosen, scores[chosen] / total * scale


def _experts_first(operation: NativeOperation, row: int, _: NativeRow) -> None:
    e = _described(operation)
    matrices = ctypes.cast(e.gate_up, ctypes.POINTER(NativeMatrix))
    x, features = _normed(operation.norm, _row(operation, row, matrices[0].inputs)), []
    for i, weight in zip(*_choices(e, row), strict=True):
        product = _product(matrices[int(i)], x * weight if e.scales_inputs else x)
        is_gated = operation.op == Op.EXPERTS_GATED
        features.append(_gate_times_up(operation, product) if is_gated else _ACTIVATE[operation.activation](product))
    _put(operation, row, np.concatenate(features))


def _experts_down(operation: NativeOperation, row: int, _: NativeRow) -> None:
    e = _described(operation)
    matrices = ctypes.cast(e.down, ctypes.POINTER(NativeMatrix))
    x = _row(operation, row, e.top_k * matrices[0].inputs).reshape(e.top_k, -1)
    ids, weights = _choices(e, row)
    weights = np.ones_like(weights) if e.scales_inputs else weights
    outs = [w * _product(matrices[int(i)], x[c]) for c, (i, w) in enumerate(zip(ids, weights, strict=True))]
    _put(operation, row, np.sum(outs, 0) * operation.factor)


# ---- recurrent operations --------------------------------------------------------------------------------------------


def _of(operation: NativeOperation, kind: Any) -> Any:
    return ctypes.cast(operation.recurrent, ctypes.POINTER(kind)).contents


def _token(description: Any, name: str, row: int, *shape: int) -> Array:
    """Return an input or the output of a recurrent operation for a row, which can be written."""
    address = getattr(description, name) + 4 * row * getattr(description, f"{name}_stride")
    return _floats(address, math.prod(shape)).reshape(shape)


def _states(operation: NativeOperation, address: int, row: int, shape: tuple[int, ...]) -> tuple[Array, list[Array]]:
    """Return a row's state, of its own memory, and the places where it is to be written."""
    places = ctypes.cast(operation.states, ctypes.POINTER(NativeStateRow))[row]
    size = 4 * math.prod(shape)

    def at(place: int) -> Array:
        return _floats(address + place * size, math.prod(shape)).reshape(shape)

    before = np.zeros(shape) if places.read < 0 else at(places.read).astype(np.float64)
    return before, [at(place) for place in (places.write, places.save) if place]


def _write(targets: list[Array], state: Array) -> None:
    for target in targets:
        target[:] = state


def _multiply(operation: NativeOperation, row: int, _: NativeRow) -> None:
    y, factors = _floats(operation.y + 4 * row * operation.y_stride, operation.matrix.outputs), operation.matrix.inputs
    y *= np.repeat(_ACTIVATE[operation.activation](_row(operation, row, factors)), len(y) // factors)


def _convolve(operation: NativeOperation, row: int, _: NativeRow) -> None:
    c = _of(operation, NativeConvolution)
    before, targets = _states(operation, c.states, row, (c.channels, c.taps - 1))
    inputs = np.concatenate((before, _token(c, "x", row, c.channels)[:, None]), axis=1)
    y = (inputs.T * _floats(c.weight, c.taps * c.channels).reshape(c.taps, -1)).sum(0)
    y = y + _floats(c.bias, c.channels) if c.bias else y
    _token(c, "y", row, c.channels)[:] = _ACTIVATE[Activation.SILU](y) if c.is_silu else y
    _write(targets, inputs[:, 1:])


def _delta(operation: NativeOperation, row: int, _: NativeRow) -> None:
    d = _of(operation, NativeGatedDelta)
    state, targets = _states(operation, d.states, row, (d.heads, d.key_dim, d.value_dim))
    heads = np.arange(d.heads)
    key_heads = heads % d.key_heads if d.is_tiled else heads // (d.heads // d.key_heads)
    q, k = (_token(d, name, row, d.key_heads, d.key_dim).astype(np.float64)[key_heads] for name in "qk")
    q, k = (x / np.sqrt((x * x).sum(1, keepdims=True) + 1e-6) for x in (q, k))
    a, b = (_token(d, name, row, d.heads).astype(np.float64) for name in "ab")
    rate, dt_bias = (_floats(address, d.heads) for address in (d.rate, d.dt_bias))
    state *= np.exp(rate * np.log1p(np.exp(a + dt_bias)))[:, None, None]
    found = np.einsum("hkv,hk->hv", state, k)
    change = (_token(d, "v", row, d.heads, d.value_dim) - found) * (d.beta_scale / (1 + np.exp(-b)))[:, None]
    state += k[:, :, None] * change[:, None]
    _token(d, "y", row, d.heads, d.value_dim)[:] = np.einsum("hkv,hk->hv", state, q) / math.sqrt(d.key_dim)
    _write(targets, state)


def _scan(operation: NativeOperation, row: int, _: NativeRow) -> None:
    s = _of(operation, NativeSelectiveScan)
    state, targets = _states(operation, s.states, row, (s.heads, s.head_dim, s.state_size))
    rate, dt_bias, skip = (_floats(address, s.heads) for address in (s.rate, s.dt_bias, s.skip))
    b, c = (_token(s, name, row, s.groups, s.state_size).repeat(s.heads // s.groups, 0) for name in "bc")
    x = _token(s, "x", row, s.heads, s.head_dim).astype(np.float64)
    delta = np.log1p(np.exp(_token(s, "dt", row, s.heads).astype(np.float64) + dt_bias)).clip(s.least, s.most)
    state = state * np.exp(delta * rate)[:, None, None] + (x * delta[:, None])[:, :, None] * b[:, None]
    _token(s, "y", row, s.heads, s.head_dim)[:] = np.einsum("hpn,hn->hp", state, c) + skip[:, None] * x
    _write(targets, state)


def _gated_norm(operation: NativeOperation, row: int, _: NativeRow) -> None:
    g = _of(operation, NativeGatedNorm)
    x, gate = (_token(g, name, row, g.groups, g.width).astype(np.float64) for name in ("x", "gate"))
    weight = _floats(g.weight, g.width if g.shares_weight else g.groups * g.width).reshape(-1, g.width)
    opened = _ACTIVATE[Activation.SILU](gate)
    y = x * opened if g.gate_first else x
    y = y / np.sqrt((y * y).mean(1, keepdims=True) + g.eps) * weight
    _token(g, "y", row, g.groups, g.width)[:] = y if g.gate_first else y * opened


_RUN = {
    Op.LINEAR: _linear,
    Op.GATED: _gated,
    Op.GATE: _gate,
    Op.SCALE: _scale,
    Op.ADD: _add,
    Op.ATTEND: _attend,
    Op.ROUTE: _route,
    Op.EXPERTS_GATED: _experts_first,
    Op.EXPERTS_UP: _experts_first,
    Op.EXPERTS_DOWN: _experts_down,
    Op.MULTIPLY: _multiply,
    Op.CONVOLVE: _convolve,
    Op.DELTA: _delta,
    Op.SCAN: _scan,
    Op.GATED_NORM: _gated_norm,
    Op.SHRINK: _shrink,
    Op.HEADS: _heads,
    Op.MIX: _mix,
    Op.RESIZE: _resize,
    Op.CUT: _cut,
}
