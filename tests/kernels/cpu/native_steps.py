"""Builds small steps for the native library: matrices in fp32, caches, operations."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from localllm.kernels.cpu.attention import cache_fields
from localllm.kernels.cpu.native.structures import (
    MAX_ROWS,
    OUTPUTS,
    Kind,
    NativeAttention,
    NativeMatrix,
    NativeNorm,
    NativeOperation,
    NativeRow,
    NormKind,
    Op,
)
from localllm.kernels.layer_cache import LayerKV


class Builder:
    """Makes operations and keeps the tensors alive whose memory they name."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def address(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        self.kept.append(tensor)
        return tensor.data_ptr()

    def matrix(self, weight: Tensor, bias: Tensor | None = None) -> NativeMatrix:
        """Pack weight [N, K] fp32."""
        n, k = weight.shape
        padding = -n % OUTPUTS
        padded = torch.nn.functional.pad(weight, (0, 0, 0, padding))
        packed = padded.view(-1, OUTPUTS, k).transpose(1, 2).contiguous()
        bias = None if bias is None else torch.nn.functional.pad(bias, (0, padding)).contiguous()
        return NativeMatrix(Kind.F32, n, k, self.address(packed), bias=self.address(bias))

    def norm(self, kind: NormKind, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> NativeNorm:
        return NativeNorm(kind, self.address(weight), self.address(bias), eps)

    def operation(self, op: Op, x: Tensor, y: Tensor, **fields: Any) -> NativeOperation:
        """x and y [MAX_ROWS, ...] are the buffers that the operation reads and writes."""
        attention = fields.pop("attention", None)
        if attention is not None:
            self.kept.append(attention)
            fields["attention"] = ctypes.addressof(attention)
        return NativeOperation(
            op=op, x=self.address(x), x_stride=x.stride(0), y=self.address(y), y_stride=y.stride(0),
            factor=fields.pop("factor", 1.0), **fields,
        )  # fmt: skip

    def attention(self, kv: LayerKV, heads: int, **fields: Any) -> NativeAttention:
        """Describe attention over a cache; tensors among the fields are passed by their address."""
        self.kept.append(kv)
        fields = {name: self.address(value) if isinstance(value, Tensor) else value for name, value in fields.items()}
        return NativeAttention(**(cache_fields(kv) | {"heads": heads} | fields))

    def rows(self, tables: Tensor, positions: Sequence[int], block_size: int) -> ctypes.Array[NativeRow]:
        """tables [rows, blocks] int32."""
        rows = (NativeRow * MAX_ROWS)()
        for row, position in enumerate(positions):
            table = tables[row].contiguous()
            slot = int(table[position // block_size]) * block_size + position % block_size
            rows[row] = NativeRow(self.address(table), position, slot, position)
        return rows


def no_rows() -> ctypes.Array[NativeRow]:
    """Return rows for steps without attention."""
    return (NativeRow * MAX_ROWS)()


def listed(*operations: NativeOperation) -> ctypes.Array[NativeOperation]:
    return (NativeOperation * len(operations))(*operations)
