"""The constants and structures of matrix.h, step.h, recurrent.h and pack.h for ctypes, field by field in the same
order.

Does not know: the library, weights, models.
"""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64, c_void_p
from enum import IntEnum

MAX_ROWS = 32  # rows of one step
FEW_ROWS = 8  # rows for which the library is the fastest with weights of every kind, on every processor
OUTPUTS = 64  # in a block of weights
GROUP = 32  # inputs with one scale, or two
MAX_INT8_INPUTS = 65536  # of a matrix of Kind.I8


class Kind(IntEnum):
    """Layout of a matrix; matrix.h describes each."""

    F32 = 0
    BF16 = 1
    F16 = 2
    I8 = 3
    Q8 = 4
    Q4 = 5
    Q4_MIN = 6
    MXFP4 = 7
    NVFP4 = 8
    IQ4 = 9
    BF16_ROUNDED = 10


KIND_STORED = 64  # plus a `Stored`: rows of a GGUF file


class Stored(IntEnum):
    """Block type of a GGUF file's tensor that pack.c takes apart."""

    Q4_0 = 0
    Q4_1 = 1
    Q5_0 = 2
    Q5_1 = 3
    Q8_0 = 4
    Q4_K = 5
    Q5_K = 6
    Q6_K = 7
    MXFP4 = 8
    IQ4_NL = 9
    IQ4_XS = 10
    Q2_K = 11
    Q3_K = 12
    IQ1_S = 13
    IQ1_M = 14
    IQ2_XXS = 15
    IQ2_XS = 16
    IQ2_S = 17
    IQ3_XXS = 18
    IQ3_S = 19
    TQ1_0 = 20
    TQ2_0 = 21


class Op(IntEnum):
    LINEAR = 0
    GATED = 1
    ATTEND = 2
    ADD = 3
    ROUTE = 4
    GATE = 5
    SCALE = 6
    EXPERTS_GATED = 7
    EXPERTS_UP = 8
    EXPERTS_DOWN = 9
    MULTIPLY = 10
    CONVOLVE = 11
    DELTA = 12
    SCAN = 13
    GATED_NORM = 14
    SHRINK = 15
    HEADS = 16
    MIX = 17
    RESIZE = 18
    CUT = 19


class NormKind(IntEnum):
    NONE = 0
    RMS = 1
    LAYER = 2
    SCALE = 3


class Activation(IntEnum):
    NONE = 0
    SILU = 1
    GELU = 2
    GELU_TANH = 3
    RELU = 4
    RELU2 = 5
    QUICK_GELU = 6
    SIGMOID = 7
    SWIGLU_CLAMPED = 8
    SOFTPLUS = 9
    TANH = 10


class CacheType(IntEnum):
    F32 = 0
    BF16 = 1
    F16 = 2
    I8 = 3
    I4 = 4


class JobOutcome(IntEnum):
    """JobOutcome of a `NativeFarJob`."""

    DONE = 0
    NO_MEMORY = 1
    NO_SUCH_EXPERT = 2
    TOO_MANY_ROWS = 3


class HeadNorm(IntEnum):
    NONE = 0
    RMS = 1
    LAYER = 2
    WHOLE = 3
    RMS_LAST = 4


class HeadsMade(IntEnum):
    QKV = 0
    QK = 1
    Q = 2
    LATENT = 3


class NativeMatrix(ctypes.Structure):
    """`Matrix` of matrix.h. Does not keep the memory alive that it points to."""

    _fields_ = (
        ("kind", c_int64),
        ("outputs", c_int64),
        ("inputs", c_int64),
        ("weights", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
        ("input_order", c_void_p),
        ("table", c_void_p),
        ("stored_inputs", c_int64),
    )


class NativeNorm(ctypes.Structure):
    _fields_ = (("kind", c_int64), ("weight", c_void_p), ("bias", c_void_p), ("eps", c_double))


class NativeAttention(ctypes.Structure):
    _fields_ = (
        ("k", c_void_p),
        ("v", c_void_p),
        ("k_scales", c_void_p),
        ("v_scales", c_void_p),
        ("key_type", c_int64),
        ("value_type", c_int64),
        ("num_blocks", c_int64),
        ("block_size", c_int64),
        ("key_group", c_int64),
        ("value_group", c_int64),
        ("hadamard_size", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("value_dim", c_int64),
        ("angles", c_void_p),
        ("rotary_dim", c_int64),
        ("window", c_int64),
        ("group", c_int64),
        ("scale", c_double),
        ("softcap", c_double),
        ("clip", c_double),
        ("sinks", c_void_p),
        ("slopes", c_void_p),
        ("distance_bias", c_void_p),
        ("distances", c_int64),
        ("head_norm", c_int64),
        ("head_norm_weight", c_void_p),
        ("head_norm_eps", c_double),
        ("made", c_int64),
        ("norms_values", c_int64),
        ("query_growth", c_double),
        ("growth_period", c_int64),
        ("growth_offset", c_int64),
    )


class NativeExperts(ctypes.Structure):
    _fields_ = (
        ("count", c_int64),
        ("top_k", c_int64),
        ("gate_up", c_void_p),
        ("down", c_void_p),
        ("correction", c_void_p),
        ("is_sigmoid", c_int64),
        ("renormalizes", c_int64),
        ("least_sum", c_double),
        ("num_groups", c_int64),
        ("top_groups", c_int64),
        ("scale", c_double),
        ("expert_scale", c_void_p),
        ("is_sparse_mixer", c_int64),
        ("tolerance", c_double),
        ("scales_inputs", c_int64),
        ("ids", c_void_p),
        ("weights", c_void_p),
    )


class NativeLowRank(ctypes.Structure):
    """`LowRank` of step.h. Does not keep the memory alive that it points to."""

    _fields_ = (
        ("a", c_void_p),
        ("b", c_void_p),
        ("type", c_int64),
        ("width", c_int64),
        ("columns", c_int64),
        ("ranks", c_void_p),
        ("adapters", c_void_p),
        ("low", c_void_p),
    )


class NativeHeadProducts(ctypes.Structure):
    """`HeadProducts` of step.h. Does not keep the memory alive that it points to."""

    _fields_ = (
        ("weights", c_void_p),
        ("type", c_int64),
        ("heads", c_int64),
        ("outputs", c_int64),
        ("inputs", c_int64),
        ("copied", c_int64),
        ("x_head_stride", c_int64),
        ("y_head_stride", c_int64),
    )


class NativeMixing(ctypes.Structure):
    """`Mixing` of step.h. Does not keep the memory alive that it points to."""

    _fields_ = (
        ("x", c_void_p),
        ("factors", c_void_p),
        ("y", c_void_p),
        ("x_stride", c_int64),
        ("factors_stride", c_int64),
        ("y_stride", c_int64),
        ("outputs", c_int64),
        ("inputs", c_int64),
        ("width", c_int64),
        ("adds", c_int64),
    )


class NativeFarJob(ctypes.Structure):
    """`FarJob` of step.h. Does not keep the memory alive that it points to."""

    _fields_ = (
        ("pool", c_void_p),
        ("operations", c_void_p),
        ("experts", c_void_p),
        ("rows", c_void_p),
        ("type", c_int64),
        ("hidden", c_int64),
        ("x", c_void_p),
        ("ids", c_void_p),
        ("weights", c_void_p),
        ("y", c_void_p),
        ("count", c_int64),
        ("most_rows", c_int64),
        ("outcome", c_int64),
    )


class NativeOperation(ctypes.Structure):
    _fields_ = (
        ("op", c_int64),
        ("matrix", NativeMatrix),
        ("norm", NativeNorm),
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("y", c_void_p),
        ("y_stride", c_int64),
        ("adds", c_int64),
        ("activation", c_int64),
        ("factor", c_double),
        ("limit", c_double),
        ("attention", c_void_p),
        ("experts", c_void_p),
        ("recurrent", c_void_p),
        ("states", c_void_p),
        ("low_rank", c_void_p),
        ("heads", c_void_p),
        ("output_factors", c_void_p),
    )


class NativeStoredRows(ctypes.Structure):
    """`StoredRows` of pack.h. Does not keep the memory alive that it points to."""

    _fields_ = (
        ("type", c_int64),
        ("count", c_int64),
        ("inputs", c_int64),
        ("rows", c_void_p),
        ("table", c_void_p),
    )


class NativeRow(ctypes.Structure):
    """`StepRow` of step.h."""

    _fields_ = (("block_table", c_void_p), ("position", c_int64), ("slot", c_int64), ("turn", c_int64))


class NativeConvolution(ctypes.Structure):
    """`Convolution` of recurrent.h."""

    _fields_ = (
        ("x", c_void_p),
        ("y", c_void_p),
        ("x_stride", c_int64),
        ("y_stride", c_int64),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("states", c_void_p),
        ("state_type", c_int64),
        ("channels", c_int64),
        ("taps", c_int64),
        ("is_silu", c_int64),
    )


class NativeGatedDelta(ctypes.Structure):
    """`GatedDelta` of recurrent.h."""

    _fields_ = (
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("a", c_void_p),
        ("b", c_void_p),
        ("y", c_void_p),
        ("q_stride", c_int64),
        ("k_stride", c_int64),
        ("v_stride", c_int64),
        ("a_stride", c_int64),
        ("b_stride", c_int64),
        ("y_stride", c_int64),
        ("rate", c_void_p),
        ("dt_bias", c_void_p),
        ("states", c_void_p),
        ("key_heads", c_int64),
        ("heads", c_int64),
        ("key_dim", c_int64),
        ("value_dim", c_int64),
        ("is_tiled", c_int64),
        ("beta_scale", c_double),
    )


class NativeSelectiveScan(ctypes.Structure):
    """`SelectiveScan` of recurrent.h."""

    _fields_ = (
        ("x", c_void_p),
        ("dt", c_void_p),
        ("b", c_void_p),
        ("c", c_void_p),
        ("y", c_void_p),
        ("x_stride", c_int64),
        ("dt_stride", c_int64),
        ("b_stride", c_int64),
        ("c_stride", c_int64),
        ("y_stride", c_int64),
        ("rate", c_void_p),
        ("dt_bias", c_void_p),
        ("skip", c_void_p),
        ("states", c_void_p),
        ("heads", c_int64),
        ("groups", c_int64),
        ("head_dim", c_int64),
        ("state_size", c_int64),
        ("least", c_double),
        ("most", c_double),
    )


class NativeGatedNorm(ctypes.Structure):
    """`GatedNorm` of recurrent.h."""

    _fields_ = (
        ("x", c_void_p),
        ("gate", c_void_p),
        ("y", c_void_p),
        ("x_stride", c_int64),
        ("gate_stride", c_int64),
        ("y_stride", c_int64),
        ("weight", c_void_p),
        ("groups", c_int64),
        ("width", c_int64),
        ("shares_weight", c_int64),
        ("gate_first", c_int64),
        ("eps", c_double),
    )


class NativeStateRow(ctypes.Structure):
    """`StateRow` of recurrent.h."""

    _fields_ = (("first", c_int64), ("end", c_int64), ("read", c_int64), ("write", c_int64), ("save", c_int64))


class NativeStateRows(ctypes.Structure):
    """`StateRows` of recurrent.h."""

    _fields_ = (
        ("bounds", c_void_p),
        ("read", c_void_p),
        ("write", c_void_p),
        ("save", c_void_p),
        ("count", c_int64),
    )


Recurrent = NativeConvolution | NativeGatedDelta | NativeSelectiveScan
