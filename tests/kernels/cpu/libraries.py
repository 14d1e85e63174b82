"""The compiled libraries that this processor can run, and their products called without threads."""

from __future__ import annotations

import ctypes
import platform
from ctypes import POINTER, byref, c_int, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from localllm.kernels.cpu import native
from localllm.kernels.cpu.native.structures import MAX_ROWS, OUTPUTS, NativeMatrix
from tests.kernels.cpu.layouts import Packed

NEEDS = {
    "avx512vnni": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"},
    "avxvnni": {"avx2", "fma", "f16c", "avx_vnni"},
    "avx2": {"avx2", "fma", "f16c"},
    "dotprod": {"asimddp"},
    "plain": set[str](),
}


class Rows(ctypes.Structure):
    """`Rows` of products.h."""

    _fields_ = (
        ("rows", c_int64),
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("lines", c_int64),
        ("codes", c_void_p),
        ("padded_inputs", c_int64),
        ("group_sums", c_void_p),
        ("steps", c_void_p),
        ("first_line", c_void_p),
    )


class Products:
    """products.h, for a thread."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        lib = self.library
        lib.new_scratch.argtypes, lib.new_scratch.restype = [c_int64], c_void_p
        lib.free_scratch.argtypes, lib.free_scratch.restype = [c_void_p], None
        lib.encode_rows.argtypes = [POINTER(NativeMatrix), c_void_p, c_int64, c_int64, c_int, c_void_p]
        lib.encode_rows.restype = Rows
        lib.multiply_block.argtypes = [POINTER(NativeMatrix), POINTER(Rows), c_int64, c_void_p, c_int64]
        lib.multiply_block.restype = None
        lib.unpack_block.argtypes, lib.unpack_block.restype = [POINTER(NativeMatrix), c_int64, c_void_p], None

    def linear(self, packed: Packed, x: Tensor, *, fine: bool = True) -> Tensor:
        """x [T, K] fp32, T up to 8, whose rows may be apart -> [T, N] fp32"""
        rows, inputs = x.shape
        matrix = byref(packed.native)
        blocks = -(-packed.native.outputs // OUTPUTS)
        y = torch.full((rows, blocks * OUTPUTS), 7.0)
        assert rows <= MAX_ROWS
        assert x.stride(1) == 1
        scratch = self.library.new_scratch(inputs)
        encoded = self.library.encode_rows(matrix, x.data_ptr(), x.stride(0), rows, fine, scratch)
        for block in range(blocks):
            out = y.data_ptr() + block * OUTPUTS * 4
            self.library.multiply_block(matrix, byref(encoded), block, out, blocks * OUTPUTS)
        self.library.free_scratch(scratch)
        return y[:, : packed.native.outputs]

    def unpack(self, packed: Packed) -> Tensor:
        """-> [N, K] fp32"""
        blocks = -(-packed.native.outputs // OUTPUTS)
        out = torch.empty(blocks * OUTPUTS, packed.native.inputs)
        for block in range(blocks):
            self.library.unpack_block(byref(packed.native), block, out[block * OUTPUTS].data_ptr())
        return out[: packed.native.outputs]


def runnable() -> dict[str, Path]:
    """Return the libraries beside the sources that this processor can run, by instruction set."""
    if platform.system() != "Linux":
        return {}
    info = Path("/proc/cpuinfo").read_text()
    flags = {flag for line in info.splitlines() if line.startswith(("flags", "Features")) for flag in line.split()}
    paths = sorted(Path(native.__file__).parent.glob("localllm_*.so"))
    named = {path.stem.removeprefix("localllm_"): path for path in paths}
    return {name: path for name, path in named.items() if NEEDS[name] <= flags}
