"""A simulated GPU: kernels launched on CPU tensors are not run, but the compilations that Triton would do are recorded.

A kernel is recompiled for each combination of its constants, its arguments' types, integers that are 1 or divisible by
16, and launch options. `Compiled` holds these keys, made by Triton's own code. With `pretend_driver` Triton's own
launches run, hooks included, over a driver and a compiler that do nothing (`Launches`).
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime import driver
from triton.runtime.jit import JITFunction, create_function_from_signature

from localllm.kernels import launch, linear
from localllm.kernels.moe import weights as expert_weights
from localllm.kernels.tuned import table
from localllm.models.decoder import builder, decoder
from localllm.models.layers import linear as linear_layer
from localllm.models.layers import mlp
from tests.kernels.ahead_of_time import triton_functions

PROCESSORS = 132


class Compiled:
    """Keys that Triton would have compiled. `new`: keys first seen since the list was cleared; `launched`: the names of
    the kernels launched since that list was cleared; `in_turn`: of those that cannot start before the previous one has
    finished."""

    def __init__(self, arch: int) -> None:
        self.new: list[str] = []
        self.launched: list[str] = []
        self.in_turn: set[str] = set()
        self.sources: list[tuple[Any, ...]] = []
        self._seen: set[tuple[Any, ...]] = set()
        self._backend = make_backend(GPUTarget("cuda", arch, 32))
        self._binders: dict[int, Callable[..., Any]] = {}

    def launch(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        self.launched.append(kernel.__name__)
        if "PDL" not in kernel.arg_names:
            self.in_turn.add(kernel.__name__)
        if id(kernel) not in self._binders:
            binder = create_function_from_signature(kernel.signature, kernel.params, self._backend)
            self._binders[id(kernel)] = binder
        bound, specialization, options = self._binders[id(kernel)](*args, **named)
        key = (id(kernel), *specialization, str(options))
        if key in self._seen:
            return
        self._seen.add(key)
        # Also refuses launch options that this version of Triton does not have.
        packed, *source = kernel._pack_args(self._backend, named, bound, specialization, options)
        self.sources.append((kernel, packed.__dict__, *source))
        arguments = zip([param.name for param in kernel.params], specialization, strict=True)
        told = ", ".join(f"{name}={_in_words(kind)}" for name, kind in arguments)
        self.new.append(f"{kernel.__name__}({told}) {options}")


def _in_words(kind: tuple[Any, Any]) -> str:
    of_type, special = kind
    return repr(special) if of_type == "constexpr" else f"{of_type}{'' if special is None else f':{special}'}"


@contextmanager
def pretend_gpu(arch: int = 90) -> Iterator[Compiled]:
    """Make operations on CPU tensors use their kernels, as on a GPU of this compute capability."""
    compiled = Compiled(arch)

    def run(kernel: Any, *args: Any, **named: Any) -> None:
        compiled.launch(kernel, *args, **named)

    with _as_on_a_gpu(arch) as patch:
        patch.setattr(JITFunction, "run", run)
        yield compiled


@dataclass
class Launches:
    """What Triton has compiled and launched, in order: ("compile" or "launch", kernel and hash, thread).

    does_not_compile: raises for kernels that the compiler refuses."""

    events: list[tuple[str, str, str]] = field(default_factory=list)
    does_not_compile: Callable[[Any, dict[Any, Any]], None] = lambda kernel, constants: None

    def compiled(self, where: str = "") -> set[str]:
        return {key for kind, key, thread in self.events if kind == "compile" and thread.startswith(where)}

    def launched(self) -> set[str]:
        return {key for kind, key, _ in self.events if kind == "launch"}

    def forget_process(self) -> None:
        """Forget what is compiled, as a new process does; its cache on disk is that of the machine."""
        for kernel in triton_functions():
            kernel.device_caches.clear()

    def compile(self, source: ASTSource, target: GPUTarget, options: dict[str, Any], _env_vars: Any = None) -> Any:
        key = self.key_of(source, target, options)
        self.events.append(("compile", key, threading.current_thread().name))
        names = source.fn.arg_names
        self.does_not_compile(source.fn, {names[place[0]]: value for place, value in source.constants.items()})

        def run(*args: Any) -> None:
            self.events.append(("launch", key, threading.current_thread().name))

        return SimpleNamespace(
            run=run, function=0, packed_metadata=(), launch_metadata=lambda *args: None, metadata=None
        )  # fmt: skip

    @staticmethod
    def key_of(source: ASTSource, target: GPUTarget, options: dict[str, Any]) -> str:
        """Return the kernel's name and what Triton's cache on disk knows it by."""
        parsed = make_backend(target).parse_options(dict(options))
        return f"{source.fn.__name__} {source.hash()} {parsed.hash()}"


class StubDriver:
    """The driver of a GPU that is not there."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


@contextmanager
def pretend_driver(arch: int = 90) -> Iterator[Launches]:
    """Let Triton compile and launch as on such a GPU. Nothing is compiled or run."""
    launches = Launches()
    with _as_on_a_gpu(arch) as patch:
        patch.setattr(driver, "_active", StubDriver(arch))
        patch.setattr(triton.compiler, "compile", launches.compile)
        try:
            yield launches
        finally:
            launches.forget_process()


@contextmanager
def _as_on_a_gpu(arch: int) -> Iterator[pytest.MonkeyPatch]:
    empty, new_empty = torch.empty, Tensor.new_empty
    properties = SimpleNamespace(multi_processor_count=PROCESSORS, major=arch // 10, minor=arch % 10)
    with pytest.MonkeyPatch.context() as patch:
        # Nothing is written, so empty tensors are read: zeros are valid ids.
        patch.setattr(torch, "empty", lambda *args, **options: empty(*args, **options).zero_())
        patch.setattr(Tensor, "new_empty", lambda *args, **options: new_empty(*args, **options).zero_())
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (properties.major, properties.minor))
        patch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
        patch.setattr(torch.nn.functional, "linear", lambda x, w, bias=None: x.new_zeros(*x.shape[:-1], len(w)))
        patch.setattr(launch, "INTERPRETED", True)  # only `runs_triton` reads it there
        patch.setattr(expert_weights, "INTERPRETED", True)
        for module in (linear, builder):
            patch.setattr(module, "should_pack", lambda *args: False)
        patch.setattr(linear_layer, "to_device_layout", lambda weight, packer: weight)
        patch.setattr(mlp, "CPU_ROWS", 1 << 30)
        patch.setattr(decoder, "has_no_skipped_slot", lambda slots: False)
        _forget_devices()
        try:
            yield patch
        finally:
            _forget_devices()


def _forget_devices() -> None:
    """Clear what kernels have cached about a device, including launch settings."""
    table().chosen.clear()
    for name, module in list(sys.modules.items()):
        if name.startswith("localllm.kernels"):
            for value in vars(module).values():
                if hasattr(value, "cache_clear") and value is not table:
                    value.cache_clear()
