"""Opens the library that this processor runs best, and calls it.

    library = native()                  None: everything runs through torch; why_none() says why
    y = library.linear(matrix, x)       for any number of rows
    library.run_step(operations, rows)  a decode step, for up to MAX_ROWS rows
    library.attend(attention, rows, q, y)   attention of one query of each of any number of rows

One file for each instruction set is in this folder. The best one that the processor has the instructions for is opened.
It is used only if it was compiled from the sources beside it, which a wheel does not have, and if a small product of
each kind is right.
LOCALLLM_CPU_SET names another set, or `none`.
Does not know: models, how weights are packed, which set is chosen (choice.py).
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable
from ctypes import c_char_p, c_double, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from localllm.kernels.cpu.native.choice import chosen_sets, compile_again
from localllm.kernels.cpu.native.self_check import is_attention_right, is_recurrence_right, wrong_kind
from localllm.kernels.cpu.native.sources import FOLDER, library_name, source_hash
from localllm.kernels.cpu.native.structures import (
    GROUP,
    MAX_ROWS,
    OUTPUTS,
    Activation,
    NativeAttention,
    NativeConvolution,
    NativeExperts,
    NativeFarJob,
    NativeGatedDelta,
    NativeGatedNorm,
    NativeHeadProducts,
    NativeLowRank,
    NativeMatrix,
    NativeMixing,
    NativeOperation,
    NativeRow,
    NativeSelectiveScan,
    NativeStateRow,
    NativeStateRows,
    NativeStoredRows,
    Recurrent,
)

log = logging.getLogger(__name__)

_RECURRENT: dict[type, str] = {
    NativeConvolution: "localllm_convolve",
    NativeGatedDelta: "localllm_gated_delta",
    NativeSelectiveScan: "localllm_selective_scan",
}


class Pool:
    """Threads that run steps and products. Calls from several threads are run one after the other."""

    def __init__(self, functions: ctypes.CDLL, threads: int, parallel: int | None = None) -> None:
        """Start the threads, the caller's included. Raises MemoryError if there is no memory.

        parallel: address of libgomp's GOMP_parallel, to borrow its threads instead of starting any.
        """
        self._functions, self.threads = functions, threads
        self._pool = functions.localllm_open_pool(threads, parallel)
        if not self._pool:
            raise MemoryError(f"No memory for a pool of {threads} threads.")

    def close(self) -> None:
        """End the threads, after the call that is running. The pool is not used any more."""
        pool, self._pool = self._pool, None
        if pool:
            self._functions.localllm_close_pool(pool)

    def run_step(self, operations: ctypes.Array[NativeOperation], rows: ctypes.Array[NativeRow], num_rows: int) -> None:
        """Run all operations for the first `num_rows` rows, at most MAX_ROWS. Raises MemoryError."""
        assert 1 <= num_rows <= min(MAX_ROWS, len(rows)), num_rows
        done = self._functions.localllm_run_step(self._pool, operations, len(operations), rows, num_rows)
        _require_memory(done, f"a step of {num_rows} rows")

    def attend(self, attention: NativeAttention, rows: Tensor, queries: Tensor, out: Tensor) -> None:
        """Write the attention of rows of one token each, whose keys and values are in the cache, to `out`.

        rows: [n, 4] int64, NativeRow as numbers. queries: [n, heads * head_dim] fp32, normed and rotated; out: of the
        same shape and type. Raises MemoryError.
        """
        assert rows.shape == (len(queries), 4)
        assert rows.is_contiguous()
        assert queries.shape == out.shape == (len(rows), attention.heads * attention.head_dim)
        assert queries.dtype == out.dtype == torch.float32
        assert queries.stride(1) == out.stride(1) == 1
        done = self._functions.localllm_attend(
            self._pool, attention, ctypes.cast(rows.data_ptr(), ctypes.POINTER(NativeRow)), len(rows),
            queries.data_ptr(), queries.stride(0), out.data_ptr(), out.stride(0),
        )  # fmt: skip
        _require_memory(done, f"the attention of {len(rows)} rows")

    def linear(self, matrix: NativeMatrix, x: Tensor, out: Tensor | None = None, *, is_fine: bool = True) -> Tensor:
        """Return x W^T + bias [T, N] fp32, in `out` if given. x [T, K] fp32.

        is_fine: low-bit weights get activations of 15 bits; else of 8 bits, and of 15 in rows with outliers.
        Raises MemoryError.
        """
        rows, inputs = x.shape
        assert x.dtype == torch.float32
        assert inputs == matrix.inputs, (inputs, matrix.inputs)
        x = x if x.stride(1) == 1 else x.contiguous()
        if out is None:
            out = torch.empty((rows, matrix.outputs), dtype=torch.float32, device="cpu")
        assert out.shape == (rows, matrix.outputs)
        assert out.dtype == torch.float32
        assert out.stride(1) == 1
        done = self._functions.localllm_linear(
            self._pool, matrix, x.data_ptr(), x.stride(0), rows, is_fine, out.data_ptr(), out.stride(0)
        )
        _require_memory(done, f"a product of {rows} rows")
        return out

    def gated(self, matrix: NativeMatrix, x: Tensor, activation: Activation) -> Tensor:
        """Return activation(gate) * up [T, N / 2] fp32, where [gate, up] is x W^T + bias. x [T, K] fp32.
        Raises MemoryError."""
        rows, inputs = x.shape
        assert x.dtype == torch.float32
        assert inputs == matrix.inputs, (inputs, matrix.inputs)
        x = x if x.stride(1) == 1 else x.contiguous()
        out = torch.empty((rows, matrix.outputs // 2), dtype=torch.float32, device="cpu")
        done = self._functions.localllm_gated(
            self._pool, matrix, activation, x.data_ptr(), x.stride(0), rows, out.data_ptr(), out.stride(0)
        )
        _require_memory(done, f"a gated product of {rows} rows")
        return out

    def unpack(self, matrix: NativeMatrix, first: int, out: Tensor) -> None:
        """Write the matrix's rows from row `first` on, a multiple of 64, to out [n, K] fp32."""
        assert out.dtype == torch.float32
        assert out.is_contiguous()
        assert out.shape[1] == matrix.inputs
        assert first % OUTPUTS == 0
        assert first + len(out) <= matrix.outputs, (first, len(out))
        self._functions.localllm_unpack(self._pool, matrix, first, len(out), out.data_ptr())

    def unpack_bf16(self, matrix: NativeMatrix, out: Tensor, first: int = 0) -> None:
        """Write blocks of the matrix from row `first` on, a multiple of 64, as Kind.BF16 into `out`.

        out: [b, padded K / 2, 64, 2] bf16. All b blocks must be the matrix's.
        """
        assert out.dtype == torch.bfloat16
        assert out.is_contiguous()
        assert out.shape[1:] == ((matrix.inputs + 1) // 2, OUTPUTS, 2), (out.shape, matrix.inputs)
        assert first % OUTPUTS == 0
        assert 0 <= first // OUTPUTS + len(out) <= -(-matrix.outputs // OUTPUTS), (first, len(out))
        self._functions.localllm_unpack_bf16(self._pool, matrix, first, len(out) * OUTPUTS, out.data_ptr())

    def run_recurrent(self, operation: Recurrent, rows: NativeStateRows) -> None:
        """Run a recurrent operation on its tokens, and write the states of the rows. Raises MemoryError, and has then
        written nothing."""
        done = getattr(self._functions, _RECURRENT[type(operation)])(self._pool, operation, rows)
        _require_memory(done, f"a recurrent operation on {rows.count} rows")

    def gated_norm(self, norm: NativeGatedNorm, tokens: int) -> None:
        self._functions.localllm_gated_norm(self._pool, norm, tokens)

    def pack_q4(self, stored: NativeStoredRows, out: Tensor) -> None:
        """Write the matrix of the type's kind (stored_blocks.py) to out [padded count / 64, K / 32, bytes] uint8."""
        assert out.is_contiguous()
        assert out.shape[:2] == (-(-stored.count // OUTPUTS), stored.inputs // GROUP), out.shape
        self._functions.localllm_pack_q4(self._pool, stored, out.data_ptr())

    def pack_halves(self, rows: NativeStoredRows, address: int) -> None:
        """Write rows of 16-bit numbers as blocks [padded count / 64, padded K / 2, 64, 2] to an address."""
        self._functions.localllm_pack_halves(self._pool, rows, address)

    def round_rows(self, stored: NativeStoredRows, smallest: float, codes: Tensor, scales: Tensor) -> None:
        """Write each row's codes [count, K] int8 and its scale [count] fp32, at least smallest / 127."""
        assert codes.is_contiguous()
        assert codes.dtype == torch.int8
        assert codes.shape == (stored.count, stored.inputs), codes.shape
        assert scales.is_contiguous()
        assert scales.dtype == torch.float32
        assert len(scales) == stored.count
        self._functions.localllm_round_rows(self._pool, stored, smallest, codes.data_ptr(), scales.data_ptr())

    def widen_rows(self, stored: NativeStoredRows) -> Tensor:
        """Return the values [count, K] fp32."""
        out = torch.empty((stored.count, stored.inputs), dtype=torch.float32, device="cpu")
        self._functions.localllm_widen_rows(self._pool, stored, out.data_ptr())
        return out

    def reorder_int8(self, codes: Tensor, weights: Tensor, sums: Tensor) -> None:
        """Write codes [n, K] int8 as weights [n * K] of Kind.I8, and minus each row's sum to sums [n] int32.
        n is a multiple of 64."""
        count, inputs = codes.shape
        assert count % OUTPUTS == 0
        assert inputs % 4 == 0
        assert codes.dtype == torch.int8
        assert sums.dtype == torch.int32
        assert all(each.is_contiguous() for each in (codes, weights, sums))
        assert (weights.nbytes, len(sums)) == (count * inputs, count)
        addresses = codes.data_ptr(), count, inputs, weights.data_ptr(), sums.data_ptr()
        self._functions.localllm_reorder_int8(self._pool, *addresses)


class Library:
    """An opened library, with pools of as many threads as torch uses.

    Steps run in threads of their own, which delay no other thread while the system has put them aside. Products between
    torch's operations borrow torch's threads: two pools would spin on each other's processors, which costs 0.1 ms a
    product.
    """

    def __init__(self, functions: ctypes.CDLL) -> None:
        self._functions = functions
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._lock = threading.Lock()
        self.instruction_set: str = functions.localllm_instruction_set().decode()
        self.multiplies_pairs = self.instruction_set == "avx512bf16"  # by an instruction: two bf16 inputs at once

    def open_pool(self, threads: int, *, borrows: bool = False) -> Pool:
        """Return a new pool, with torch's threads if it `borrows` them. The caller closes it."""
        return Pool(self._functions, threads, _gomp_parallel() if borrows else None)

    def _pool(self, *, borrows: bool) -> Pool:
        """Return the process's pool. Nobody closes it: its threads sleep when idle."""
        key = torch.get_num_threads(), borrows
        if key not in self._pools:
            with self._lock:
                if key not in self._pools:
                    self._pools[key] = self.open_pool(key[0], borrows=borrows)
        return self._pools[key]

    def run_step(self, operations: ctypes.Array[NativeOperation], rows: ctypes.Array[NativeRow], num_rows: int) -> None:
        """Do `Pool.run_step` in the process's threads for steps."""
        self._pool(borrows=False).run_step(operations, rows, num_rows)

    def far_job(self, operations: ctypes.Array[NativeOperation], experts: int, rows: int) -> NativeFarJob:
        """Return a job for `run_far` in the process's threads for steps. experts, rows: addresses."""
        pool = self._pool(borrows=False)._pool
        return NativeFarJob(pool=pool, operations=ctypes.addressof(operations), experts=experts, rows=rows)

    @property
    def run_far(self) -> Callable[[int], None]:
        """The function that runs the job at an address, for any thread."""
        function: Callable[[int], None] = self._functions.localllm_run_far
        return function

    def attend(self, attention: NativeAttention, rows: Tensor, queries: Tensor, out: Tensor) -> None:
        """Do `Pool.attend` in torch's threads."""
        self._pool(borrows=True).attend(attention, rows, queries, out)

    def linear(self, matrix: NativeMatrix, x: Tensor, out: Tensor | None = None, *, is_fine: bool = True) -> Tensor:
        """Do `Pool.linear` in torch's threads."""
        return self._pool(borrows=True).linear(matrix, x, out, is_fine=is_fine)

    def gated(self, matrix: NativeMatrix, x: Tensor, activation: Activation) -> Tensor:
        """Do `Pool.gated` in torch's threads."""
        return self._pool(borrows=True).gated(matrix, x, activation)

    def unpack(self, matrix: NativeMatrix, first: int, out: Tensor) -> None:
        """Do `Pool.unpack` in torch's threads."""
        self._pool(borrows=True).unpack(matrix, first, out)

    def unpack_bf16(self, matrix: NativeMatrix, out: Tensor, first: int = 0) -> None:
        """Do `Pool.unpack_bf16` in torch's threads."""
        self._pool(borrows=True).unpack_bf16(matrix, out, first)

    def run_recurrent(self, operation: Recurrent, rows: NativeStateRows) -> None:
        """Do `Pool.run_recurrent` in torch's threads."""
        self._pool(borrows=True).run_recurrent(operation, rows)

    def gated_norm(self, norm: NativeGatedNorm, tokens: int) -> None:
        """Do `Pool.gated_norm` in torch's threads."""
        self._pool(borrows=True).gated_norm(norm, tokens)

    def packing_pool(self) -> Pool:
        """Return the pool that packs weights, in torch's threads."""
        return self._pool(borrows=True)


def native() -> Library | None:
    """Return the library; None if this process runs without one."""
    return _library_or_reason()[0]


def why_none() -> str:
    """Return one line that says why there is no library; empty if there is one."""
    return _library_or_reason()[1]


@cache
def _library_or_reason() -> tuple[Library | None, str]:
    names, reason = chosen_sets()
    for name in names:
        library, fault = open_library(name)
        if library is not None:
            if reason:
                log.warning("%s The library for %s is used instead.", reason, name)
            return library, ""
        reason = reason or fault
    return None, reason


def open_library(name: str) -> tuple[Library | None, str]:
    """Return (the library of an instruction set, ""), or (None, why it cannot be used)."""
    try:
        functions = ctypes.CDLL(str(FOLDER / library_name(name)))
        _declare(functions)
    except (OSError, AttributeError) as error:
        return None, f"The library for {name} cannot be opened: {error}; {compile_again()}."
    reason = _fault_of(name, functions)
    return (None, reason) if reason else (Library(functions), "")


def _gomp_parallel() -> int | None:
    """Return the address of the function that starts threads of torch's OpenMP; None if it is not libgomp."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, c_void_p).value
    except (AttributeError, OSError, TypeError):
        return None


def _declare(functions: ctypes.CDLL) -> None:
    """Set the types of arguments and results. Raises AttributeError if a function is missing."""
    matrix, pool, number = ctypes.POINTER(NativeMatrix), c_void_p, c_int64
    attention = ctypes.POINTER(NativeAttention)
    operations, rows = ctypes.POINTER(NativeOperation), ctypes.POINTER(NativeRow)
    state_rows = ctypes.POINTER(NativeStateRows)
    recurrent = [(name, number, [pool, ctypes.POINTER(kind), state_rows]) for kind, name in _RECURRENT.items()]
    stored = ctypes.POINTER(NativeStoredRows)
    for name, result, arguments in (
        ("localllm_open_pool", pool, [number, c_void_p]),
        ("localllm_close_pool", None, [pool]),
        ("localllm_run_step", number, [pool, operations, number, rows, number]),
        ("localllm_run_far", None, [c_void_p]),
        ("localllm_attend", number, [pool, attention, rows, number, c_void_p, number, c_void_p, number]),
        ("localllm_linear", number, [pool, matrix, c_void_p, number, number, number, c_void_p, number]),
        ("localllm_gated", number, [pool, matrix, number, c_void_p, number, number, c_void_p, number]),
        ("localllm_unpack", None, [pool, matrix, number, number, c_void_p]),
        ("localllm_unpack_bf16", None, [pool, matrix, number, number, c_void_p]),
        *recurrent,
        ("localllm_gated_norm", None, [pool, ctypes.POINTER(NativeGatedNorm), number]),
        ("localllm_pack_q4", None, [pool, stored, c_void_p]),
        ("localllm_pack_halves", None, [pool, stored, c_void_p]),
        ("localllm_round_rows", None, [pool, stored, c_double, c_void_p, c_void_p]),
        ("localllm_widen_rows", None, [pool, stored, c_void_p]),
        ("localllm_reorder_int8", None, [pool, c_void_p, number, number, c_void_p, c_void_p]),
        ("localllm_instruction_set", c_char_p, []),
        ("localllm_source_hash", c_char_p, []),
        ("localllm_size_of", number, [number]),
    ):
        function = getattr(functions, name)
        function.restype, function.argtypes = result, arguments


def _require_memory(done: int, call: str) -> None:
    if not done:
        raise MemoryError(f"No memory for the buffers of {call} in the native library.")


def _fault_of(name: str, functions: ctypes.CDLL) -> str:
    """Return why an opened library cannot be used; empty if it can."""
    expected = source_hash()
    if expected and functions.localllm_source_hash().decode() != expected:
        return f"The compiled libraries are older than their sources; {compile_again()}."
    structures = (
        NativeMatrix, NativeAttention, NativeExperts, NativeOperation, NativeRow, NativeConvolution, NativeGatedDelta,
        NativeSelectiveScan, NativeGatedNorm, NativeStateRows, NativeStateRow, NativeLowRank, NativeHeadProducts,
        NativeFarJob, NativeMixing,
    )  # fmt: skip
    if any(functions.localllm_size_of(place) != ctypes.sizeof(kind) for place, kind in enumerate(structures)):
        return "The structures of structures.py, step.h and recurrent.h differ."
    pool = Pool(functions, 1)
    try:
        wrong = wrong_kind(pool)
        attends, recurs = is_attention_right(pool), is_recurrence_right(pool)
    finally:
        pool.close()
    if wrong is not None:
        return f"A product with {wrong.name} weights gave wrong results in the library for {name}."
    if not attends:
        return f"An attention gave wrong results in the library for {name}."
    return "" if recurs else f"The gated delta rule gave wrong results in the library for {name}."
